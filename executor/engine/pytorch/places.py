"""Where the rows of one batch find their states in the arena, and leave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from executor.engine.pytorch.datatypes import on_device

INITIAL_PLACE, NULL_PLACE, SCRAP_PLACE, FIRST_SLOT = 0, 1, 2, 3
"""The places of the initial state, of zeros, of what nobody reads, and of the first slot."""


@dataclass(eq=False)
class Places:
    """Which arena rows a batch reads and writes; row i of the batch at position i.

    Read and write differ: a START row reads the initial state and writes its slot.

    saves, ends     of each row, whether its states go into a checkpoint, and whether nobody will need them; told only
                    where states grow
    kept_positions  by the name of a growing state: see `growing.GrowingState`. It is asked for twice in a batch
    """

    reads: list[int]
    writes: list[int]
    device: torch.device
    saves: Sequence[bool] = ()
    ends: Sequence[bool] = ()
    kept_positions: dict[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])

    @cached_property
    def read_index(self) -> torch.Tensor:
        return self._index(self.reads)

    @cached_property
    def write_index(self) -> torch.Tensor:
        return self.read_index if self.writes == self.reads else self._index(self.writes)

    def _index(self, places: list[int]) -> torch.Tensor:
        # Through numpy, because torch converts a list four times as slowly.
        return on_device(torch.from_numpy(np.array(places, dtype=np.int64)), self.device)

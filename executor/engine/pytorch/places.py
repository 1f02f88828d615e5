"""Where the rows of one batch find their states in the arena, and leave them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from executor.engine.pytorch.datatypes import on_device

INITIAL_PLACE, NULL_PLACE, SCRAP_PLACE, FIRST_SLOT = 0, 1, 2, 3
"""The places of the initial state, of zeros, of what nobody reads, and of the first slot."""


class Places:
    """Which arena rows a batch reads and writes; row i of the batch at position i.

    Read and write differ: a START row reads the initial state and writes its slot.

    saves, ends     of each row, whether its states go into a checkpoint, and whether nobody will need them; told only
                    where states grow
    kept_positions  by the name of a growing state: see `growing.GrowingState`. It is asked for twice in a batch
    """

    __slots__ = ("_read_index", "_write_index", "device", "ends", "kept_positions", "reads", "saves", "writes")

    def __init__(
        self,
        reads: list[int],
        writes: list[int],
        device: torch.device,
        saves: Sequence[bool] = (),
        ends: Sequence[bool] = (),
    ) -> None:
        self.reads = reads
        self.writes = writes
        self.device = device
        self.saves = saves
        self.ends = ends
        self.kept_positions: dict[str, Sequence[int]] = {}
        self._read_index: torch.Tensor | None = None
        self._write_index: torch.Tensor | None = None

    @property
    def read_index(self) -> torch.Tensor:
        if self._read_index is None:
            self._read_index = self._index(self.reads)
        return self._read_index

    @property
    def write_index(self) -> torch.Tensor:
        if self.writes == self.reads:
            return self.read_index
        if self._write_index is None:
            self._write_index = self._index(self.writes)
        return self._write_index

    def _index(self, places: list[int]) -> torch.Tensor:
        # Through numpy, because torch converts a list four times as slowly.
        return on_device(torch.from_numpy(np.array(places, dtype=np.int64)), self.device)

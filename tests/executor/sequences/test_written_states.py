"""Of engines that hand states out whole: what checkpoints have written is the state, whatever a model does to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from executor.engine.base import RowResult
from executor.sequences.written_states import WrittenStates
from shared.contract import state_fields
from shared.contract.ids import SequenceId
from shared.contract.model_config import StateSpec
from shared.contract.tensors import ELEMENT_BYTES, Tensor
from tests.executor.kept_checkpoint import Kept

ONE = SequenceId("m:1")


def grows(name: str, axis: int = 0, datatype: str = "FP32") -> StateSpec:
    return StateSpec(name, f"{name}_next", datatype, (*(2, 3)[:axis], -1, *(2, 3)[axis:]), growable=True)


@dataclass
class Model:
    """Edits states of 2 x 3 elements a position, as a random stranger would."""

    specs: list[StateSpec]
    chance: np.random.Generator
    positions: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    def begin(self) -> None:
        self.positions = {
            spec.input_name: np.zeros((0, 6 * ELEMENT_BYTES[spec.datatype]), np.uint8) for spec in self.specs
        }

    def step(self) -> None:
        for name, before in self.positions.items():
            kept = len(before) if self.chance.random() < 0.7 else int(self.chance.integers(0, len(before) + 1))
            added = int(self.chance.choice([0, 1, 1, 1, 2, 40]))
            fill = self.chance.choice([0x00, 0x80, 0xFF, 0x41])
            self.positions[name] = np.concatenate([before[:kept], np.full((added, before.shape[1]), fill, np.uint8)])

    @property
    def states(self) -> dict[str, Tensor]:
        return {spec.input_name: self._state(spec) for spec in self.specs}

    def _state(self, spec: StateSpec) -> Tensor:
        positions, axis = self.positions[spec.input_name], spec.dims.index(-1)
        whole = np.moveaxis(positions.reshape(-1, 2, 3, ELEMENT_BYTES[spec.datatype]), 0, axis)
        return Tensor(spec.input_name, spec.datatype, whole.shape[:3], whole.tobytes())


def content(states: dict[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (state.datatype, tuple(state.shape), state.raw) for name, state in states.items()}


@pytest.mark.parametrize("part_bytes", [1, 100, 1024])
@pytest.mark.parametrize(
    "specs",
    [
        [grows("a")],
        [grows("a", 1, "BF16"), grows("b", 2, "INT8")],
        [grows("a", 2, "FP64"), msgspec.structs.replace(grows("b", 1), growable=False), grows("c", 0, "BOOL")],
    ],
    ids=lambda specs: "".join(spec.input_name for spec in specs),
)
def test_what_checkpoints_have_written_is_the_state(
    monkeypatch: pytest.MonkeyPatch, specs: list[StateSpec], part_bytes: int
) -> None:
    """With states that shrink, grow and change, sequences that begin anew, and owners that come and go."""
    monkeypatch.setattr(state_fields, "PART_BYTES", part_bytes)
    written, kept, model = WrittenStates(specs), Kept(), Model(specs, np.random.default_rng(part_bytes))
    for number in range(300):
        start = number == 0 or model.chance.random() < 0.03
        if start:
            model.begin()
            written.forget(ONE)
        model.step()
        if model.chance.random() < 0.3:
            continue  # no checkpoint, perhaps of a START
        kept.write(written.cut(ONE, RowResult((), model.states)))
        assert content(kept.states) == content(model.states)
        if model.chance.random() < 0.1:
            written = WrittenStates(specs)  # the sequence has another owner

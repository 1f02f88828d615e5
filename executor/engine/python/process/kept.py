"""What an executor keeps of the sequences of an instance, so that a new process goes on where the last one ended.

    states   the model declares its sequences' state: the state after each step, and each pass over one, by slot
    methods  the model hands its state out: what its method gave after each step, by correlation id
    replay   the steps since START that succeeded, by slot, within the bounds of the model's log
    nothing  the state was in the process alone: the sequence is lost, as with an executor
    none     a stateless model: there is nothing to go on with

Two sequences may have one correlation id: those of an ensemble have their client's. So only what the model itself knows
by correlation id is kept by it.

So the end of an instance's process costs a sequence what the end of its executor would, and its commits need not know
of it: nothing that was committed is run again for a caller. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import msgspec

from executor.engine.base import Row, RowError, RowResult
from executor.engine.python.process.messages import Call, LoadStates, Restore, Run
from executor.engine.python.slot_states import States
from shared.contract.model_config import ModelConfig

Result = RowResult | RowError
S = TypeVar("S")


class Kept:
    """What is kept of sequences. By default nothing: they are lost with the process.

    wants_states  whether a result must bring the state after its step
    """

    wants_states = False

    def key(self, row: Row) -> Hashable:
        """What the row's sequence is known by; None for a row that no state outlives."""
        return row.slot

    def ran(self, row: Row, result: Result) -> None:
        """Notes what became of a row that has a key."""

    def forget(self, key: Hashable) -> None:
        """Nothing of the sequence is needed any more."""

    def calls(self, key: Hashable) -> Sequence[Call] | None:
        """The calls that bring a new process to where the sequence is; None if that cannot be."""
        return None


def kept_of(config: ModelConfig, *, hands_out_state: bool) -> Kept:
    batching = config.sequence_batching
    if batching is None:
        return NothingToKeep()
    if batching.states:
        return KeptStates()
    if hands_out_state:
        return KeptByMethods()
    if config.replays:
        return KeptForReplay(config.sequence_log_steps, config.sequence_log_bytes)
    return Kept()


class NothingToKeep(Kept):
    def key(self, row: Row) -> Hashable:
        return None


class _Latest(Kept, Generic[S]):
    """The state after each sequence's latest step."""

    wants_states = True

    def __init__(self) -> None:
        self._states: dict[Hashable, S] = {}

    def put(self, key: Hashable, state: S) -> None:
        """A state that came from elsewhere."""
        self._states[key] = state

    def forget(self, key: Hashable) -> None:
        self._states.pop(key, None)


class KeptStates(_Latest[States]):
    def ran(self, row: Row, result: Result) -> None:
        if isinstance(result, RowError):
            return
        if row.end and not result.again:
            self.forget(row.slot)
        else:
            self.put(row.slot, result.states)

    def calls(self, key: Hashable) -> Sequence[Call] | None:
        states = self._states.get(key)
        assert isinstance(key, int), "a slot"
        return () if states is None else (LoadStates([key], [states]),)


class KeptByMethods(_Latest[bytes]):
    def key(self, row: Row) -> Hashable:
        return None if row.slot is None else row.correlation_id

    def ran(self, row: Row, result: Result) -> None:
        if isinstance(result, RowError) and not (row.start or row.end or result.model_state or result.lost):
            return  # refused: the model has not seen it
        if row.end or not result.model_state:
            self.forget(row.correlation_id)
        else:
            self.put(row.correlation_id, result.model_state)

    def calls(self, key: Hashable) -> Sequence[Call] | None:
        state = self._states.get(key)
        assert isinstance(key, int | str), "a correlation id"
        return None if state is None else (Restore(key, state),)


class KeptForReplay(Kept):
    """steps_max, bytes_max: of the inputs of one sequence; one that has more is lost with the process"""

    def __init__(self, steps_max: int, bytes_max: int) -> None:
        self._steps_max = steps_max
        self._bytes_max = bytes_max
        self._steps: dict[Hashable, list[Row]] = {}
        self._bytes: dict[Hashable, int] = {}

    def ran(self, row: Row, result: Result) -> None:
        key = row.slot
        if row.start:
            self._steps[key], self._bytes[key] = [], 0
        if row.end or key not in self._steps:
            self.forget(key)
            return
        if isinstance(result, RowError):
            # It left the state as it was, as replay asks of a model; a START has left none.
            if row.start:
                self.forget(key)
            return
        self._steps[key].append(msgspec.structs.replace(row, answers=None))
        self._bytes[key] += sum(len(tensor.raw) for tensor in row.inputs.values())
        if len(self._steps[key]) > self._steps_max or self._bytes[key] > self._bytes_max:
            self.forget(key)

    def forget(self, key: Hashable) -> None:
        self._steps.pop(key, None)
        self._bytes.pop(key, None)

    def calls(self, key: Hashable) -> Sequence[Call] | None:
        steps = self._steps.get(key)
        return None if steps is None else [Run([row], [False]) for row in steps]

"""The sequences of an instance: which of them its process can go on with, and how another process is brought there."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping, Sequence

import msgspec

from executor.engine.base import LoadRequest, Row, RowError, RowResult
from executor.engine.null_rows import NULL_ROW
from executor.engine.python.process.current_process import CurrentProcess
from executor.engine.python.process.instance_process import ProcessLostError
from executor.engine.python.process.kept import KeptByMethods, KeptStates, NothingToKeep, kept_of
from executor.engine.python.process.messages import Call, Ran, Run, travelling
from executor.engine.python.process.open_requests import LOOK_S, OpenRequests, ReplayedAnswers
from shared.contract.errors import Code, MeshError
from shared.contract.ids import CorrelationId
from shared.contract.tensors import Tensor


class ProcessSequences:
    def __init__(self, request: LoadRequest, process: CurrentProcess, opened: OpenRequests) -> None:
        config = request.config
        own_rows = config.is_direct and not config.states
        self._rows = max(1, config.max_batch_size) if own_rows else 1
        """Rows of a batch with a single request: a model may know its sequences by their places."""
        self._request = request
        self._process = process
        self._opened = opened
        self._kept = kept_of(config, hands_out_state=process.abilities.hands_out_state)
        self._known: set[Hashable] = set()
        """Those that the process can go on with. All of them can in the first process."""
        self._moved_on: dict[int, Mapping[str, Tensor] | None] = {}
        """States that the process does not have, by slot: those after last answers; None: it is to drop its own."""

    @property
    def wants_states(self) -> bool:
        """Whether a result must bring the state after its step, because it is kept here."""
        return self._kept.wants_states

    @property
    def _lie_in_slots(self) -> bool:
        """Whether their states are declared."""
        return isinstance(self._kept, KeptStates)

    @property
    def are_known_by_slot(self) -> bool:
        """Whether something is kept of them until their slots are dropped."""
        return not isinstance(self._kept, KeptByMethods | NothingToKeep)

    def key(self, row: Row) -> Hashable:
        """What the row's sequence is known by; None for a row that no state outlives."""
        return None if row.null else self._kept.key(row)

    def alone(self, row: Row, place: int) -> tuple[list[Row], int]:
        """A batch of one request, and where it is in it."""
        if self._rows == 1:
            return [row], 0
        return [row if index == place else NULL_ROW for index in range(self._rows)], place

    # -- what has become of them ----------------------------------------------------------------------------------

    def ran(self, row: Row, result: RowResult | RowError) -> None:
        """A row that has a key was run."""
        if not (isinstance(result, RowResult) and result.open):
            self._kept.ran(row, result)
        if not self._process.is_first:
            self._known.add(self._kept.key(row))

    def ended(self, row: Row, last: RowResult | RowError) -> None:
        """A request has its last answer: with it the state moves on, here and with the next batch in the process."""
        if self._kept.key(row) is None:
            return
        self._kept.ran(row, last)
        if self._lie_in_slots and isinstance(last, RowResult) and row.slot is not None and not row.end:
            self._moved_on[row.slot] = last.states

    def take_moved_on(self) -> Mapping[int, Mapping[str, Tensor] | None]:
        """States that the process gets with its next batch."""
        taken: dict[int, Mapping[str, Tensor] | None] = {}
        while self._moved_on:
            slot, states = self._moved_on.popitem()
            taken[slot] = states
        return taken

    def give_back(self, taken: Mapping[int, Mapping[str, Tensor] | None]) -> None:
        """The process has not got these states. Later ones stay."""
        for slot, states in taken.items():
            self._moved_on.setdefault(slot, states)

    def put(self, slot: int, states: Mapping[str, Tensor]) -> None:
        """A state that came from elsewhere, and that the process has."""
        assert isinstance(self._kept, KeptStates), "only declared states come this way"
        self._kept.put(slot, states)
        self._moved_on.pop(slot, None)

    def put_model_state(self, correlation_id: CorrelationId, state: bytes) -> None:
        """As `put`, of a model that hands its state out."""
        assert isinstance(self._kept, KeptByMethods), "asked before"
        self._kept.put(correlation_id, state)

    def drop(self, slot: int) -> None:
        """The sequence in the slot has left. The process drops a declared state before its next batch."""
        self._forget(slot)
        if self._lie_in_slots:
            self._moved_on[slot] = None

    def release(self, correlation_id: CorrelationId) -> None:
        if not self.are_known_by_slot:
            self._forget(correlation_id)

    def release_all(self) -> None:
        self._kept = kept_of(self._request.config, hands_out_state=self._process.abilities.hands_out_state)
        self._known.clear()

    def process_lost(self) -> None:
        self._known.clear()
        self._moved_on.clear()

    def _forget(self, key: Hashable) -> None:
        self._kept.forget(key)
        self._known.discard(key)

    # -- another process ------------------------------------------------------------------------------------------

    def bring(self, rows: Sequence[Row]) -> dict[int, RowError]:
        """Brings the process to where the rows' sequences are. Returns errors of those that are lost, by row. Raises
        ProcessLostError."""
        if self._process.is_first:
            return {}
        refused: dict[int, RowError] = {}
        for index, row in enumerate(rows):
            key = None if row.start else self.key(row)
            if key is None or key in self._known:
                continue
            calls = self._kept.calls(key)
            problem = "only that process held the sequence's state" if calls is None else self._replayed(calls)
            if problem:
                self._kept.forget(key)
                text = (
                    f"the state of sequence {row.correlation_id} of model '{self._request.config.name}' was lost with "
                    f"the process of model instance '{self._request.instance_name}': {problem}"
                )
                refused[index] = RowError(Code.INTERNAL, text, lost=True)
            else:
                self._known.add(key)
        return refused

    def _replayed(self, calls: Sequence[Call]) -> str:
        """Makes the calls that bring a sequence back. What was wrong; "" if nothing was."""
        try:
            for call in calls:
                if isinstance(call, Run):
                    if problem := self._replayed_to_its_end(call):
                        return problem
                else:
                    self._process.call(call)
        except MeshError as error:
            return error.message
        return ""

    def _replayed_to_its_end(self, call: Run) -> str:
        """As `_replayed`, for a step: the next one begins behind its last answer."""
        answers = ReplayedAnswers()
        (row,) = call.rows
        rows, _ = self.alone(msgspec.structs.replace(row, answers=answers), row.slot or 0)
        numbers = tuple(self._opened.opened(one, wanted=False) for one in rows)
        try:
            ran = self._process.call(Run(travelling(rows), [False] * len(rows), numbers))
            if isinstance(ran, Ran) and ran.errors:
                return next(iter(ran.errors.values())).message
            if isinstance(ran, Ran) and any(one is not None and one.open for one in ran.rows):
                self._await_end(answers)
        finally:
            for number in numbers:
                self._opened.ran(number, None)
        return answers.failure.message if answers.failure is not None else ""

    def _await_end(self, answers: ReplayedAnswers) -> None:
        """Returns when a replayed step has its last answer. Raises ProcessLostError."""
        limit_s = self._process.limit_s
        deadline_s = time.monotonic() + (limit_s or math.inf)
        while not answers.ended.wait(LOOK_S):
            if self._process.is_alive and time.monotonic() < deadline_s:
                continue
            self._process.notice_end()
            if self._process.now is not None:
                self._process.end(f"did not answer a step again within {limit_s:g} s and was ended")
            raise ProcessLostError(self._process.restarts.reason)

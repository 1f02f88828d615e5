"""A python model's instance in a process of its own (`instance_process`, `EXECUTION_ENV_PATH`).

`PythonEngine`, or `DecoupledEngine`, runs in the process, unchanged. What is here gives it its calls. Another process
takes the place of one that ends (`CurrentProcess`). A batch whose process ends is repeated row by row, so that the row
that ends it is found: a row with which the process ends a second time fails, and its sequence's state stays as it was.
The executor has committed nothing of the batch, so nothing runs twice for a caller. What a new process needs of a
sequence is kept here and given to it with the sequence's next row (`ProcessSequences`). Open requests, whose batches
are over, run again as well (`OpenRequests`). While no process may be started, rows fail, and the instance is not ready.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from executor.engine.base import NO_TIME, BatchResult, LateAnswer, LoadRequest, Row, RowError, RowResult, Timings
from executor.engine.null_rows import NULL_ROW
from executor.engine.python.process.current_process import CurrentProcess, NotNowError
from executor.engine.python.process.environments import Environment
from executor.engine.python.process.instance_process import ProcessLostError
from executor.engine.python.process.messages import (
    DescribeState,
    Done,
    Load,
    LoadStates,
    NotWanted,
    Ran,
    ReleaseSequences,
    Restore,
    Run,
    travelling,
)
from executor.engine.python.process.open_requests import LOSSES_MAX, OpenRequests, RequestInProcess
from executor.engine.python.process.sequences import ProcessSequences
from executor.engine.python.unwanted_rows import UnwantedRows
from shared.contract.errors import Code, MeshError
from shared.contract.ids import CorrelationId
from shared.contract.tensors import Tensor


class ProcessEngine:
    """See `base.Engine`, and the protocols beside it. Not thread-safe, but for `is_ready`; all calls come from the
    thread that made it, because the process ends with that thread.
    """

    has_readiness = True
    """An instance without a process is not ready."""
    has_release = True
    """What is kept of a sequence goes when the sequence does."""

    def __init__(self, request: LoadRequest, environment: Environment) -> None:
        """Starts the process and loads the model there. Raises LoadError."""
        self._model = request.config.name
        self._instance = request.instance_name
        self._decoupled = request.config.decoupled
        self._running: Sequence[tuple[Row, int]] = ()
        """The rows of the batch that the process runs now, and the numbers of their requests."""
        self._numbers: tuple[int, ...] = ()
        """The numbers of the latest batch's requests."""
        self._given: Sequence[tuple[Row, Row]] = ()
        """The rows of the present batch, as they were given, and with where their answers go."""
        self._unwanted = UnwantedRows()
        """Rows as they were given."""
        self._post: Callable[[Callable[[], None]], None] | None = None
        self._is_posted = False
        self._open = OpenRequests(
            self._instance, ended=self._ended, process=lambda: self._process.now, stray=self._post_strays
        )
        load = Load(request, logging.getLogger("seqmesh").getEffectiveLevel())
        self._process = CurrentProcess(load, environment, answered=self._open.came, lost=self._lost)
        self._sequences = ProcessSequences(request, self._process, self._open)
        self.frees_slots = self._sequences.are_known_by_slot
        abilities = self._process.abilities
        self.batch_rows, self.alone_because = abilities.batch_rows, abilities.alone_because
        self.is_testable, self.makes_calls = abilities.is_testable, abilities.makes_calls

    def limit_calls(self, limit_s: float) -> None:
        """See `base.LimitsCalls`."""
        self._process.limit_s = limit_s

    def _lost(self) -> None:
        self._sequences.process_lost()
        self._open.strand()
        if self._open.strays:
            self._post_strays()

    # -- batches --------------------------------------------------------------------------------------------------

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        """See `base.Engine.run`."""
        given = rows
        if not self._decoupled:
            rows = [row if row.null else msgspec.structs.replace(row, answers=LateAnswer()) for row in rows]
        self._given = list(zip(given, rows, strict=True))
        try:
            try:
                result = self._run(rows, want_state)
            except ProcessLostError:
                result = self._run_apart(rows, want_state)
        except NotNowError as error:
            result = BatchResult([None if row.null else RowError(error.code, error.message) for row in rows], NO_TIME)
        except BaseException:
            # Their callers are told that they failed: they must not run again when the process ends.
            for row in rows:
                self._open.give_up(row)
            raise
        finally:
            self._given = ()
            self._unwanted.batch_over(given)
        results = list(result.rows)
        for index, (row, one) in enumerate(zip(rows, results, strict=True)):
            if isinstance(one, RowError):
                self._open.give_up(row)
            elif one is not None and one.open and isinstance(row.answers, LateAnswer):
                results[index] = msgspec.structs.replace(one, late=row.answers)
        return BatchResult(results, result.timings)

    def _run_apart(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        """Runs the rows of a batch whose process has ended, each alone."""
        results: list[RowResult | RowError | None] = [None] * len(rows)
        spent, numbers = NO_TIME, self._numbers or (0,) * len(rows)
        for index, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            if row.null:
                continue
            if number and not self._open.has(number):
                results[index] = RowResult((), open=True)  # it has its last answer
                continue
            try:
                results[index], timings = self._run_alone(row, index, number, wanted=want_state[index])
                spent = spent.plus(timings)
            except ProcessLostError as lost:
                results[index] = RowError(
                    Code.INTERNAL,
                    f"model '{self._model}': the process of model instance '{self._instance}' {lost} while it ran this "
                    "request, for the second time",
                )
        return BatchResult(results, spent)

    def _run_alone(
        self, row: Row, place: int, number: int, *, wanted: bool
    ) -> tuple[RowResult | RowError | None, Timings]:
        """Runs a request again, under its number. Raises ProcessLostError alone: other requests may have run before."""
        alone, place = self._sequences.alone(row, place)
        again = [one is row for one in alone]
        try:
            ran = self._run(alone, [wanted and is_row for is_row in again], [number * is_row for is_row in again])
            return ran.rows[place], ran.timings
        except ProcessLostError:
            raise
        except MeshError as error:
            return RowError(error.code, error.message), NO_TIME
        except Exception as error:  # noqa: BLE001 - no memory, say
            return RowError(Code.INTERNAL, f"model '{self._model}' failed: {type(error).__name__}: {error}"), NO_TIME

    def _run(self, rows: Sequence[Row], want_state: Sequence[bool], numbers: Sequence[int] = ()) -> BatchResult:
        """Runs a batch. numbers: of the requests that run again. Raises ProcessLostError or NotNowError."""
        self._numbers = ()
        self._process.start()
        opened, sequences = self._open, self._sequences
        refused = sequences.bring(rows)
        given = [NULL_ROW if index in refused else row for index, row in enumerate(rows)] if refused else rows
        keys = [sequences.key(row) for row in given]
        wants = want_state
        if sequences.wants_states:
            wants = [
                want or (key is not None and not row.end)
                for row, key, want in zip(given, keys, want_state, strict=True)
            ]
        self._numbers = tuple(
            opened.opened(row, number, wanted=want)
            for row, want, number in zip(given, want_state, numbers or [0] * len(given), strict=True)
        )
        self._running = list(zip(given, self._numbers, strict=True))
        if self._unwanted:
            self._tell_unwanted()
        moved_on = sequences.take_moved_on()
        try:
            ran = self._process.call(Run(travelling(given), wants, self._numbers, moved_on))
        except ProcessLostError:
            raise
        except BaseException:  # no memory for what was to be sent, say
            sequences.give_back(moved_on)
            raise
        finally:
            self._running = ()
        if not isinstance(ran, Ran) or len(ran.rows) != len(rows):
            self._process.end("answered a batch with something else")
            raise ProcessLostError("answered a batch with something else")
        self._process.restarts.ran()
        results: list[RowResult | RowError | None] = [ran.errors.get(index, row) for index, row in enumerate(ran.rows)]
        for index, (row, key, result) in enumerate(zip(given, keys, results, strict=True)):
            opened.ran(self._numbers[index], result)
            if key is None or result is None:
                continue
            sequences.ran(row, result)
            if isinstance(result, RowResult) and (result.again or (wants[index] and not want_state[index])):
                results[index] = msgspec.structs.replace(result, states={}, model_state=b"")
        for index, error in refused.items():
            results[index] = error
        return BatchResult(results, ran.timings)

    def cancel(self, row: Row) -> None:
        """See `base.SeesCancellation`."""
        self._unwanted.add(row)
        self._tell_unwanted()

    def _tell_unwanted(self) -> None:
        """Tells the process for which requests of the batch that runs nobody waits. Safe to repeat."""
        process, given, running = self._process.now, self._given, self._running
        unwanted = [own for row, own in given if row in self._unwanted]
        for row, number in running:
            if process is not None and any(row is own for own in unwanted):
                process.order(NotWanted(number))

    # -- open requests ---------------------------------------------------------------------------

    def run_again_on(self, post: Callable[[Callable[[], None]], None]) -> None:
        """See `base.RunsAgain`."""
        self._post = post

    def _ended(self, row: Row, last: RowResult | RowError) -> None:
        self._sequences.ended(row, last)

    def _post_strays(self) -> None:
        """Has the engine's thread run requests again whose process has ended. May be called from any thread."""
        if self._post is not None and not self._is_posted:
            self._is_posted = True
            self._post(self._run_strays)

    def _run_strays(self) -> None:
        self._is_posted = False
        opened = self._open
        if self._process.now is None and not opened.strays:
            return
        self._process.notice_end()
        for one in opened.strays:
            if not one.is_stray or opened.waits(one):
                continue  # not stray: it was run with one before it
            one.is_stray = False
            if error := self._problem(one):
                opened.fail(one, error)

    def _problem(self, request: RequestInProcess) -> RowError | None:
        """Runs a request again; why it cannot be."""
        row = request.row
        if request.answers.is_cancelled:
            return RowError(Code.CANCELLED, "the request is not wanted any more")
        if request.losses >= LOSSES_MAX:
            return RowError(
                Code.INTERNAL,
                f"model '{self._model}': the process of model instance '{self._instance}' "
                f"{self._process.restarts.reason} while this request was open, "
                f"{LOSSES_MAX} times without a further answer",
            )
        try:
            result, _ = self._run_alone(row, row.slot or 0, request.number, wanted=request.wanted)
        except ProcessLostError:
            return None  # it strays again
        if isinstance(result, RowResult) and not (result.open or self._decoupled):
            request.answers.end(result)
            return None
        if isinstance(result, RowResult) and not result.open:
            return RowError(Code.INTERNAL, f"model '{self._model}' did not run a request again as it ran it before")
        return result if isinstance(result, RowError) else None

    # -- states ---------------------------------------------------------------------------------------------------

    def load_states(self, slots: Sequence[int], states: Sequence[Mapping[str, Tensor]]) -> None:
        """See `base.Engine.load_states`. Without a process they are given to the next one."""
        self._process.tell(LoadStates(slots, states))
        for slot, one in zip(slots, states, strict=True):
            self._sequences.put(slot, one)

    def describe_state(self, slot: int) -> str:
        answer = self._process.tell(DescribeState(slot))
        return answer.text if isinstance(answer, Done) else "not known: the instance has no process"

    def drop_state(self, slot: int) -> None:
        """See `base.Engine.drop_state`. The process drops it before its next batch."""
        self._sequences.drop(slot)

    @property
    def hands_out_state(self) -> bool:
        return self._process.abilities.hands_out_state

    def restore_model(self, correlation_id: CorrelationId, state: bytes) -> None:
        """See `base.HandsOutState`. Without a process it is given to the next one."""
        self._process.tell(Restore(correlation_id, state))
        self._sequences.put_model_state(correlation_id, state)

    # -- sequences that leave -------------------------------------------------------------------------------------

    def release(self, correlation_id: CorrelationId) -> None:
        self._sequences.release(correlation_id)
        if self._process.abilities.has_release:
            self._process.tell(ReleaseSequences(correlation_id))

    def release_all(self) -> None:
        self._sequences.release_all()
        if self._process.abilities.has_release:
            self._process.tell(ReleaseSequences(None))

    # -- the rest -------------------------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        return self._process.is_ready

    def run_rows_alone(self, because: str) -> None:
        """See `base.FixesShape`. Does nothing: rows run alone already."""

    def move_weights(self, offset_bytes: int) -> None:
        """See `base.FixesShape`. Does nothing: the engine does not know a python model's weights."""

    def close(self) -> None:
        self._process.close()
        self._open.close()

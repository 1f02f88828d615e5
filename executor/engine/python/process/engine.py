"""A python model's instance in a process of its own (`instance_process`, `EXECUTION_ENV_PATH`).

`PythonEngine`, or `DecoupledEngine`, runs in the process, unchanged. What is here gives it its calls, and puts another
process in the place of one that ends. A batch whose process ends is repeated row by row, so that the row that ends it
is found: a row with which the process ends a second time fails, and its sequence's state stays as it was. The executor
has committed nothing of the batch, so nothing runs twice for a caller. What a new process needs of a sequence is kept
here (`executor.engine.python.process.kept`) and given to it with the sequence's next row. Open requests, whose batches
are over, run again as well (`executor.engine.python.process.open_requests`).

A call that takes longer than the limit ends the process, not the executor. If processes end one after the other before
they have run anything, rows fail until the next one is due (`Restarts`), and the instance is not ready.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence

import msgspec

from executor.engine.base import BatchResult, LateAnswer, LoadRequest, Row, RowError, RowResult, Timings
from executor.engine.null_rows import NULL_ROW
from executor.engine.python.process.environments import Environment
from executor.engine.python.process.instance_process import CannotStartError, InstanceProcess, ProcessLostError
from executor.engine.python.process.kept import KeptByMethods, KeptStates, kept_of
from executor.engine.python.process.messages import (
    Answer,
    Answered,
    Call,
    Cancel,
    DescribeState,
    Done,
    Load,
    Loaded,
    LoadStates,
    Raised,
    Ran,
    ReleaseSequences,
    Restore,
    Run,
    travelling,
)
from executor.engine.python.process.open_requests import (
    LOOK_S,
    LOSSES_MAX,
    OpenRequests,
    ReplayedAnswers,
    RequestInProcess,
)
from executor.engine.python.process.restarts import Restarts
from shared.contract.errors import Code, LoadError, MeshError, ModelError
from shared.contract.ids import CorrelationId
from shared.contract.model_config import Direct
from shared.contract.tensors import Tensor
from shared.process import logs

START_LIMIT_S = 60.0
"""Time for another process to load the model, or `START_FACTOR` times what the first one took, if that is longer."""
START_FACTOR = 10

NO_TIME = Timings(0, 0, 0)


class NotNowError(MeshError):
    """There is no process, and none may be started yet."""

    code = Code.UNAVAILABLE


class ProcessEngine:
    """See `base.Engine`, and the protocols beside it. Not thread-safe, but for `is_ready`; all calls come from the
    thread that made it, because the process ends with that thread.
    """

    def __init__(self, request: LoadRequest, environment: Environment) -> None:
        """Starts the process and loads the model there. Raises LoadError."""
        config = request.config
        batching = config.sequence_batching
        self._model = config.name
        self._instance = request.instance_name
        self._environment = environment
        own_rows = batching is not None and isinstance(batching.strategy, Direct) and not batching.states
        self._rows = max(1, config.max_batch_size) if own_rows else 1
        """Rows of a batch with a single request: a model may know its sequences by their places."""
        self._load = Load(
            config,
            request.config_json,
            str(request.model_dir),
            request.version,
            request.instance_name,
            request.device,
            request.slots,
            request.state_value_bytes_max,
            str(request.code or ""),
            logging.getLogger("seqmesh").getEffectiveLevel(),
        )
        self._limit_s = 0.0
        self._restarts = Restarts()
        self._process: InstanceProcess | None = None
        self._is_first = True
        self._number = 0
        self._running: Sequence[Row] = ()
        """The rows of the batch that the process runs now, and its number."""
        self._numbers: tuple[int, ...] = ()
        """The numbers of the latest batch's requests."""
        self._given: Sequence[tuple[Row, Row]] = ()
        """The rows of the present batch, as they were given, and with where their answers go."""
        self._known: set[Hashable] = set()
        """Sequences that the process can go on with. All of them can in the first process."""
        self._moved_on: dict[int, Mapping[str, Tensor] | None] = {}
        """States that the process does not have, by slot: those after last answers; None: it is to drop its own."""
        self._post: Callable[[Callable[[], None]], None] | None = None
        self._is_posted = False
        self._decoupled = config.decoupled
        self._open = OpenRequests(
            self._instance, ended=self._ended, process=lambda: self._process, stray=self._post_strays
        )
        began_s = time.monotonic()
        try:
            self._process, self._abilities = self._started(0.0)
        except (ProcessLostError, CannotStartError) as error:
            raise LoadError(f"the process of model instance '{self._instance}' {error}") from error
        except ModelError as error:
            raise LoadError(error.message) from error
        self._start_limit_s = max(START_LIMIT_S, START_FACTOR * (time.monotonic() - began_s))
        self._kept = kept_of(config, hands_out_state=self._abilities.hands_out_state)

    def limit_calls(self, limit_s: float) -> None:
        """See `base.LimitsCalls`."""
        self._limit_s = limit_s

    # -- the process ----------------------------------------------------------------------------------------------

    def _started(self, limit_s: float) -> tuple[InstanceProcess, Loaded]:
        """A process that has loaded the model. Raises ProcessLostError, CannotStartError or ModelError."""
        process = InstanceProcess(self._instance, self._model, self._environment, self._answered)
        try:
            loaded = _checked(process.call(self._load, limit_s))
            if not isinstance(loaded, Loaded):
                raise ProcessLostError("answered a load with something else")
        except BaseException:
            process.kill()
            raise
        logs.debug("process of an instance started", instance=self._instance, pid=process.pid)
        return process, loaded

    def _alive(self) -> InstanceProcess:
        """The process; another one, if it has ended. Raises NotNowError."""
        if self._process is not None:
            if self._process.is_alive:
                return self._process
            self._lost(self._process.end())
        while not (wait_s := self._restarts.wait_s(time.monotonic())):
            try:
                self._process, self._abilities = self._started(self._start_limit_s)
            except (ProcessLostError, CannotStartError, ModelError) as error:
                reason = error.message if isinstance(error, ModelError) else str(error)
                self._restarts.ended(f"could not be started again: {reason}", time.monotonic())
                logs.error("instance has no process", instance=self._instance, cause=self._restarts.reason)
            else:
                return self._process
        raise self._not_now(wait_s)

    def _lost(self, reason: str) -> None:
        assert self._process is not None
        logs.error("process of an instance ended", instance=self._instance, pid=self._process.pid, cause=reason)
        self._process.kill()
        self._process, self._is_first = None, False
        self._known.clear()
        self._restarts.ended(reason, time.monotonic())
        self._open.strand()
        self._moved_on.clear()
        if self._open.strays:
            self._post_strays()

    def _not_now(self, wait_s: float) -> NotNowError:
        return NotNowError(
            f"model instance '{self._instance}' has no process: the last one {self._restarts.reason}; the next one is "
            f"started in {wait_s:.1f} s"
        )

    def _call(self, process: InstanceProcess, call: Call) -> Answer:
        """Makes a call. Raises what the instance raised, or ProcessLostError."""
        try:
            return _checked(process.call(call, self._limit_s))
        except ProcessLostError as lost:
            self._lost(str(lost))
            raise

    # -- batches --------------------------------------------------------------------------------------------------

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        """See `base.Engine.run`."""
        if not self._decoupled:
            own = [row if row.null else msgspec.structs.replace(row, answers=LateAnswer()) for row in rows]
            self._given, rows = list(zip(rows, own, strict=True)), own
        try:
            result = self._run(rows, want_state)
        except ProcessLostError:
            result = self._run_apart(rows, want_state)
        except NotNowError as error:
            result = _failed(rows, RowError(error.code, error.message))
        finally:
            self._given = ()
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
        spent, numbers = NO_TIME, self._numbers
        for index, row in enumerate(rows):
            if row.null:
                continue
            if numbers and numbers[index] and not self._open.has(numbers[index]):
                results[index] = RowResult((), open=True)  # it has its last answer
                continue
            alone, place = self._alone(row, index)
            try:
                result = self._run(alone, [want_state[index] and one is row for one in alone])
                results[index] = result.rows[place]
                spent = spent.plus(result.timings)
            except ProcessLostError as lost:
                results[index] = RowError(
                    Code.INTERNAL,
                    f"model '{self._model}': the process of model instance '{self._instance}' {lost} while it ran this "
                    "request, for the second time",
                )
            except NotNowError as error:
                results[index] = RowError(error.code, error.message)
        return BatchResult(results, spent)

    def _alone(self, row: Row, place: int) -> tuple[list[Row], int]:
        """A batch of one request, and where it is in it."""
        if self._rows == 1:
            return [row], 0
        return [row if index == place else NULL_ROW for index in range(self._rows)], place

    def _run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        """Runs a batch. Raises ProcessLostError or NotNowError."""
        self._numbers = ()
        process = self._alive()
        opened = self._open
        refused: dict[int, RowError] = {}
        given = rows
        if not self._is_first:
            refused = self._brought(process, rows)
            given = [NULL_ROW if index in refused else row for index, row in enumerate(rows)]
        kept = self._kept
        keys = [None if row.null else kept.key(row) for row in given]
        wants = want_state
        if kept.wants_states:
            wants = [
                want or (key is not None and not row.end)
                for row, key, want in zip(given, keys, want_state, strict=True)
            ]
        self._number += 1
        self._running = given
        self._numbers = tuple(opened.opened(row, wanted=want) for row, want in zip(given, want_state, strict=True))
        try:
            ran = self._call(process, Run(travelling(given), wants, self._number, self._numbers, self._taken_states()))
        finally:
            self._running = ()
        if not isinstance(ran, Ran) or len(ran.rows) != len(rows):
            self._lost("answered a batch with something else")
            raise ProcessLostError("answered a batch with something else")
        self._restarts.ran()
        results: list[RowResult | RowError | None] = [ran.errors.get(index, row) for index, row in enumerate(ran.rows)]
        for index, (row, key, result) in enumerate(zip(given, keys, results, strict=True)):
            opened.ran(self._numbers[index], result)
            if key is None or result is None:
                continue
            is_result = isinstance(result, RowResult)
            if not (is_result and result.open):
                kept.ran(row, result)
            if not self._is_first:
                self._known.add(key)
            if is_result and (result.again or (wants[index] and not want_state[index])):
                results[index] = msgspec.structs.replace(result, states={}, model_state=b"")
        for index, error in refused.items():
            results[index] = error
        return BatchResult(results, ran.timings)

    def cancel(self, row: Row) -> None:
        """See `base.SeesCancellation`."""
        process, number = self._process, self._number
        own = next((own for given, own in self._given if given is row), row)
        for index, one in enumerate(self._running):
            if one is own and process is not None:
                process.order(Cancel(number, index))

    # -- open requests ---------------------------------------------------------------------------

    def run_again_on(self, post: Callable[[Callable[[], None]], None]) -> None:
        """See `base.RunsAgain`."""
        self._post = post

    def _answered(self, process: InstanceProcess, answered: Answered) -> None:
        self._open.came(process, answered)

    def _ended(self, row: Row, last: RowResult | RowError) -> None:
        """A request has its last answer: with it the state moves on, here and with the next batch in the process."""
        if self._kept.key(row) is None:
            return
        self._kept.ran(row, last)
        if isinstance(self._kept, KeptStates) and isinstance(last, RowResult) and row.slot is not None and not row.end:
            self._moved_on[row.slot] = last.states

    def _taken_states(self) -> Mapping[int, Mapping[str, Tensor] | None]:
        taken: dict[int, Mapping[str, Tensor] | None] = {}
        while self._moved_on:
            slot, states = self._moved_on.popitem()
            taken[slot] = states
        return taken

    def _post_strays(self) -> None:
        """Has the engine's thread run requests again whose process has ended. May be called from any thread."""
        if self._post is not None and not self._is_posted:
            self._is_posted = True
            self._post(self._run_strays)

    def _run_strays(self) -> None:
        self._is_posted = False
        opened = self._open
        if self._process is None and not opened.strays:
            return
        if self._process is not None and not self._process.is_alive:
            self._lost(self._process.end())
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
                f"model '{self._model}': the process of model instance '{self._instance}' {self._restarts.reason} "
                f"while this request was open, {LOSSES_MAX} times without a further answer",
            )
        alone, place = self._alone(row, row.slot or 0)
        try:
            result = self._run(alone, [request.wanted and one is row for one in alone]).rows[place]
        except ProcessLostError:
            return None  # it strays again
        except MeshError as error:
            return RowError(error.code, error.message)
        if isinstance(result, RowResult) and not (result.open or self._decoupled):
            request.answers.end(result)
            return None
        if isinstance(result, RowResult) and not result.open:
            return RowError(Code.INTERNAL, f"model '{self._model}' did not run a request again as it ran it before")
        return result if isinstance(result, RowError) else None

    def _brought(self, process: InstanceProcess, rows: Sequence[Row]) -> dict[int, RowError]:
        """Brings a new process to where the rows' sequences are. Returns errors of those that are lost."""
        refused: dict[int, RowError] = {}
        for index, row in enumerate(rows):
            key = None if row.null or row.start else self._kept.key(row)
            if key is None or key in self._known:
                continue
            calls = self._kept.calls(key)
            problem = "only that process held the sequence's state"
            if calls is not None:
                problem = self._replayed(process, calls)
            if problem:
                self._kept.forget(key)
                text = (
                    f"the state of sequence {row.correlation_id} of model '{self._model}' was lost with the process of "
                    f"model instance '{self._instance}': {problem}"
                )
                refused[index] = RowError(Code.INTERNAL, text, lost=True)
            else:
                self._known.add(key)
        return refused

    def _replayed(self, process: InstanceProcess, calls: Sequence[Call]) -> str:
        """Makes the calls that bring a sequence back. What was wrong; "" if nothing was."""
        try:
            for call in calls:
                if isinstance(call, Run):
                    if problem := self._replayed_to_its_end(process, call):
                        return problem
                else:
                    self._call(process, call)
        except MeshError as error:
            return error.message
        return ""

    def _replayed_to_its_end(self, process: InstanceProcess, call: Run) -> str:
        """As `_replayed`, for a step: the next one begins behind its last answer."""
        opened, answers = self._open, ReplayedAnswers()
        run = self._placed(Run([msgspec.structs.replace(call.rows[0], answers=answers)], [False]))
        numbers = tuple(opened.opened(row, wanted=False) for row in run.rows)
        try:
            ran = self._call(process, Run(travelling(run.rows), run.want_state, 0, numbers))
            if isinstance(ran, Ran) and ran.errors:
                return next(iter(ran.errors.values())).message
            if isinstance(ran, Ran) and any(row is not None and row.open for row in ran.rows):
                self._await_end(process, answers)
        finally:
            for number in numbers:
                opened.ran(number, None)
        return answers.failure.message if answers.failure is not None else ""

    def _await_end(self, process: InstanceProcess, answers: ReplayedAnswers) -> None:
        """Returns when a replayed step has its last answer. Raises ProcessLostError."""
        deadline_s = time.monotonic() + (self._limit_s or math.inf)
        while not answers.ended.wait(LOOK_S):
            if process.is_alive and time.monotonic() < deadline_s:
                continue
            reason = f"did not answer a step again within {self._limit_s:g} s and was ended"
            self._lost(reason if process.is_alive else process.end())
            raise ProcessLostError(self._restarts.reason)

    def _placed(self, call: Run) -> Run:
        """A step that is replayed, as the model is to get it: at its own place in the batch."""
        (row,) = call.rows
        alone, _ = self._alone(row, row.slot or 0)
        return Run(alone, [False] * len(alone))

    # -- states ---------------------------------------------------------------------------------------------------

    def load_states(self, slots: Sequence[int], states: Sequence[Mapping[str, Tensor]]) -> None:
        """See `base.Engine.load_states`. Without a process they are given to the next one."""
        self._told(LoadStates(slots, states))
        assert isinstance(self._kept, KeptStates), "only declared states come this way"
        for slot, one in zip(slots, states, strict=True):
            self._kept.put(slot, one)
            self._moved_on.pop(slot, None)

    def describe_state(self, slot: int) -> str:
        answer = self._told(DescribeState(slot))
        return answer.text if isinstance(answer, Done) else "not known: the instance has no process"

    def drop_state(self, slot: int) -> None:
        """See `base.Engine.drop_state`. The process drops it before its next batch."""
        self._kept.forget(slot)
        self._known.discard(slot)
        self._moved_on[slot] = None

    @property
    def frees_slots(self) -> bool:
        """See `base.FreesSlots`."""
        return isinstance(self._kept, KeptStates)

    @property
    def hands_out_state(self) -> bool:
        return self._abilities.hands_out_state

    def restore_model(self, correlation_id: CorrelationId, state: bytes) -> None:
        """See `base.HandsOutState`. Without a process it is given to the next one."""
        self._told(Restore(correlation_id, state))
        assert isinstance(self._kept, KeptByMethods), "asked before"
        self._kept.put(correlation_id, state)

    def _told(self, call: Call) -> Answer | None:
        """Makes a call of the present process. None if there is none, or it ends: the next one begins anew."""
        if self._process is None or not self._process.is_alive:
            return None
        try:
            return self._call(self._process, call)
        except ProcessLostError:
            return None

    # -- sequences that leave -------------------------------------------------------------------------------------

    @property
    def has_release(self) -> bool:
        """Always: what is kept of a sequence goes when the sequence does."""
        return True

    def release(self, correlation_id: CorrelationId) -> None:
        if not isinstance(self._kept, KeptStates):
            self._kept.forget(correlation_id)
            self._known.discard(correlation_id)
        if self._abilities.has_release:
            self._told(ReleaseSequences(correlation_id))

    def release_all(self) -> None:
        self._kept = kept_of(self._load.config, hands_out_state=self._abilities.hands_out_state)
        self._known.clear()
        if self._abilities.has_release:
            self._told(ReleaseSequences(None))

    # -- what the process says of itself --------------------------------------------------------------------------

    @property
    def has_readiness(self) -> bool:
        """Always: an instance without a process is not ready."""
        return True

    def is_ready(self) -> bool:
        if self._restarts.wait_s(time.monotonic()):
            return False
        process = self._process
        if process is None or not process.is_alive or not self._abilities.has_readiness:
            # The next batch has another process started.
            return True
        return process.is_ready()

    @property
    def batch_rows(self) -> int:
        return self._abilities.batch_rows

    @property
    def alone_because(self) -> str:
        return self._abilities.alone_because

    @property
    def is_testable(self) -> bool:
        return self._abilities.is_testable

    @property
    def makes_calls(self) -> bool:
        """See `base.MakesCalls`."""
        return self._abilities.makes_calls

    def run_rows_alone(self, because: str) -> None:
        """See `base.FixesShape`. Does nothing: rows run alone already."""

    def move_weights(self, offset_bytes: int) -> None:
        """See `base.FixesShape`. Does nothing: the engine does not know a python model's weights."""

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.close()
        self._open.close()


def _failed(rows: Sequence[Row], error: RowError) -> BatchResult:
    return BatchResult([None if row.null else error for row in rows], NO_TIME)


def _checked(answer: Answer) -> Answer:
    """The answer. Raises ModelError for what the instance raised."""
    if isinstance(answer, Raised):
        error = ModelError(answer.message)
        error.code = Code(answer.code)
        raise error
    return answer

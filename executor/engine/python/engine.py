"""One instance of a `TritonPythonModel`.

A batch is one call of `execute` with one request per row. With the direct strategy null rows are requests too, because
a model may keep its state by row. Inputs, controls and states become tensors column by column: when the first row asks
for a name, the whole batch's bytes of it are joined into one buffer, and each row's array is a view of that. So a name
that the model never asks for costs nothing, and the others cost one copy.

A declared state reaches the model as an input (`input_name`) and leaves it as an output (`output_name`). If the model
does not return the output, the state stays as it was; or as the model wrote it in place, if input and output are one
buffer.

When `execute` raises, no declared state changes, and the rows are executed again one by one, so that only the rows fail
that fail alone. A sequence model that declares no state keeps it on `self`, where the failed call may have left half of
its work: then every row of the call fails, as in Triton. If the model has methods to hand that state out, they are
called after its steps (`model_state`). If it has a method for sequences that have left, that is called for each
(`model_release`).

A model may also answer a request by its response sender, while `execute` runs or later (`response_senders`): then the
row stays open, and the instance may run the next batch meanwhile.

With `fixed_shape` every call has one request, so that no other request can matter to it. A direct model that declares
no state may know its sequences by their positions: its request keeps its position, among null rows that fill the batch.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import msgspec

from executor.engine.base import NO_TIME, BatchResult, LateAnswer, LoadRequest, Row, RowError, RowResult, Timings
from executor.engine.null_rows import NULL_ROW
from executor.engine.python import calls
from executor.engine.python import triton_python_backend_utils as interface
from executor.engine.python.columns import Columns, Sources
from executor.engine.python.coroutines import Coroutines, thread_loop
from executor.engine.python.instance_code import InstanceCode, current_code
from executor.engine.python.model import (
    called,
    end_if_forked,
    error_text,
    forget,
    import_model_class,
    keep_importable,
    model_path,
)
from executor.engine.python.model_code import only_computes
from executor.engine.python.model_release import GivenSequences, has_release
from executor.engine.python.model_state import ModelState, has_methods, unfit_methods
from executor.engine.python.outputs import ResponseReader
from executor.engine.python.requests import RowRequest
from executor.engine.python.response import WrongResponseError
from executor.engine.python.response_senders import MadeAnswer, SoleSender
from executor.engine.python.slot_states import SlotStates, States
from executor.engine.python.tensor import raw_content
from executor.engine.row_shapes import RowShapes
from shared.contract.errors import Code, LoadError, ModelError
from shared.contract.ids import CorrelationId
from shared.contract.limits import MODEL_STATE_BYTES_MAX
from shared.contract.model_config import FixedShape, Oldest, SequenceRecovery
from shared.contract.tensors import Tensor

log = logging.getLogger(__name__)


class RowPass(msgspec.Struct, eq=False):
    """A row in one call of `execute`. count: rows that it brings; states: the implicit state before it, None if the
    model declares none
    """

    row: Row
    count: int
    wanted: bool
    columns: Columns
    position: int
    states: States | None


class Executing:
    """Within the block this thread runs `execute` of an execution's requests. A class: a generator's context takes
    three times as long.
    """

    __slots__ = ("_before", "_code", "_code_before", "_execution", "_process")

    def __init__(self, execution: calls.Execution, code: InstanceCode, process: int) -> None:
        self._execution = execution
        self._code = code
        self._process = process

    def __enter__(self) -> calls.Execution:
        self._code_before = current_code.set(self._code)
        self._before = calls.execution.set(self._execution)
        return self._execution

    def __exit__(self, *_: object) -> None:
        end_if_forked(self._process)
        calls.execution.reset(self._before)
        self._execution.over()
        current_code.reset(self._code_before)


class PythonEngine:
    """See `base.Engine`, and the protocols beside it. Not thread-safe: one call at a time."""

    alone_because = "a python model is given one request at a time"

    def __init__(self, request: LoadRequest) -> None:
        """Imports and initialises the model. Raises LoadError with the model's own error."""
        config = request.config
        batching = config.sequence_batching
        self._config = config
        self._instance = request.instance_name
        self._version_name = request.version_name
        self._process = os.getpid()
        self._coroutines = Coroutines(request.instance_name)
        strategy = batching.strategy if batching is not None else None
        self._keeps_positions = config.is_direct
        self._shapes = RowShapes(config)
        self._states = SlotStates(config.states, request.model_dir, request.state_value_bytes_max)
        self._has_state = self.frees_slots = self.is_testable = config.declares_state
        self._has_answered = False
        self._shares_buffers = any(state.same_buffer for state in config.states)
        self._iterative = batching is not None and batching.iterative
        self._repeatable = self._has_state or batching is None
        self.batch_rows = 0
        if config.fixed_shape is not FixedShape.OFF:
            self.batch_rows = max(1, config.max_batch_size) if self._keeps_positions and not self._has_state else 1
        self._in_order = isinstance(strategy, Oldest) and strategy.preserve_ordering
        self._reader = ResponseReader(config, request.state_value_bytes_max)
        self._sources = Sources(config, request.version)
        version_dir = request.model_dir / request.version
        path = request.code or model_path(version_dir, config.default_model_filename)
        self.only_computes = only_computes(path.read_bytes())
        # Code that only computes has no name for a call.
        self.makes_calls = not self.only_computes
        # As in Triton: a python-based backend serves many models, and asks in whose folder it is to look.
        model_dir = version_dir if request.code else path.parent
        self._code = InstanceCode(config.name, request.version, str(model_dir))
        with ExitStack() as opened:
            if not self.only_computes:
                opened.enter_context(thread_loop())
            self._model_class = import_model_class(path, self._code)
            keep_importable(path.parent)
            opened.callback(forget, self._code, path.parent)
            self._model = self._initialised(self._model_class, request)
            self._opened = opened.pop_all()
        # The model may call others there too: then the instance waits, and has not hung.
        beside = partial(self._executing, ())
        bytes_max = min(MODEL_STATE_BYTES_MAX, request.state_value_bytes_max)
        self.hands_out_state = self._has_methods()
        self._model_state = ModelState(self._model, config.name, beside, bytes_max) if self.hands_out_state else None
        self.has_release = batching is not None and has_release(self._model_class)
        self._held = GivenSequences(self._model, config.name, beside) if self.has_release else None

    def _has_methods(self) -> bool:
        """Whether the model hands out the state of its sequences. Methods that do not fit are told of in the log."""
        config = self._config
        # A request of an iterative model is a whole sequence, so no state outlives its answer.
        if not config.is_stateful or self._has_state:
            return False
        if config.sequence_recovery is SequenceRecovery.NONE:
            return False
        if unfit := unfit_methods(self._model_class):
            log.warning(
                "model '%s' hands out no state by its %s: that takes checkpoint(self, correlation_id) and "
                "restore(self, correlation_id, state)",
                config.name,
                " and ".join(unfit),
            )
        return has_methods(self._model_class)

    def _initialised(self, model_class: type[Any], request: LoadRequest) -> Any:
        kind, _, device_id = request.device.partition(":")
        arguments = {
            "model_config": request.config_json,
            "model_instance_kind": "CPU" if kind == "cpu" else "GPU",
            "model_instance_device_id": device_id or "0",
            "model_instance_name": request.instance_name,
            "model_repository": str(request.model_dir),
            "model_version": request.version,
            "model_name": request.config.name,
        }
        if not callable(getattr(model_class, "execute", None)):
            raise LoadError(f"model '{request.config.name}': TritonPythonModel has no method execute")
        try:
            with called(self._code), calls.no_calls():
                model = model_class()
                if hasattr(model, "initialize"):
                    model.initialize(arguments)
                self.has_readiness = hasattr(model, "is_ready")
        except BaseException as error:  # the model's own code, as in `_responses`
            raise LoadError(
                f"Failed to initialize model instance '{request.instance_name}', message: {error_text(error)}"
            ) from error
        return model

    def move_weights(self, offset_bytes: int) -> None:
        """See `base.FixesShape`. Does nothing: the engine does not know a python model's weights."""

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        """See `base.Engine.run`. Tensors are made when the model asks for them: that time counts as the model's."""
        try:
            return self._run(rows, want_state)
        finally:
            self._sources.unwanted.batch_over(rows)

    def cancel(self, row: Row) -> None:
        """See `base.SeesCancellation`."""
        self._sources.unwanted.add(row)

    def _run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        if self.batch_rows:
            unrun = BatchResult([None] * len(rows), NO_TIME)
            return self._run_apart(rows, want_state, unrun, None, self.batch_rows)
        result, failure = self._run_once(rows, want_state)
        # A single row would only fail again.
        if failure is not None and self._repeatable and sum(not row.null for row in rows) > 1:
            return self._run_apart(rows, want_state, result, failure, len(rows) if self._keeps_positions else 1)
        return result

    def _run_apart(
        self,
        rows: Sequence[Row],
        want_state: Sequence[bool],
        before: BatchResult,
        failure: RowError | None,
        call_rows: int,
    ) -> BatchResult:
        """Runs every row that has this failure in a call of its own: of one row, or at its own position among null
        rows.

        before  what the call before came to, and its times
        """
        results, spent = list(before.rows), before.timings
        for index, row in enumerate(rows):
            if row.null or results[index] is not failure:
                continue
            position = index if call_rows > 1 else 0
            alone, wants = [NULL_ROW] * call_rows, [False] * call_rows
            alone[position], wants[position] = row, want_state[index]
            result, _ = self._run_once(alone, wants)
            results[index] = result.rows[position]
            spent = spent.plus(result.timings)
        return BatchResult(results, spent)

    def _run_once(self, rows: Sequence[Row], want_state: Sequence[bool]) -> tuple[BatchResult, RowError | None]:
        """One call of `execute`, and its error if it raised (or returned something that cannot be assigned to rows)."""
        began = time.perf_counter_ns()
        results, batch, members = self._batch(rows)
        if not members:
            return BatchResult(results, Timings(time.perf_counter_ns() - began, 0, 0)), None
        states = self._states_before(batch)
        columns = Columns(self._sources, batch, states)
        requests = [RowRequest(row, columns, position) for position, row in enumerate(batch)]
        called = time.perf_counter_ns()
        responses = self._responses(requests, batch)
        returned = time.perf_counter_ns()
        failure = responses if isinstance(responses, RowError) else None
        for position, index, count in members:
            one = RowPass(rows[index], count, want_state[index], columns, position, states[position])
            response = responses if isinstance(responses, RowError) else responses[position]
            results[index] = self._concluded(requests[position], one, response)
        if self.hands_out_state:
            for index, result in enumerate(results):
                if result is not None:
                    results[index] = self._with_state(rows[index], result, wanted=want_state[index])
        finished = time.perf_counter_ns()
        return BatchResult(results, Timings(called - began, returned - called, finished - returned)), failure

    def _with_state(self, row: Row, result: RowResult | RowError, *, wanted: bool) -> RowResult | RowError:
        """A row's result with the state that the model hands out, if a checkpoint follows, or the row failed (see
        `base.HandsOutState`).
        """
        has_failed = isinstance(result, RowError)
        is_due = self._asks(row) if has_failed else row.slot is not None and wanted and not result.open
        if (model_state := self._model_state) is None or not is_due:
            return result
        try:
            saved = model_state.save(row.correlation_id)
        except ModelError as error:
            message = f"{result.message}; {error.message}" if has_failed else error.message
            return RowError(Code.INTERNAL, message, lost=True)
        return msgspec.structs.replace(result, model_state=saved)

    def _asks(self, row: Row) -> bool:
        """Whether the model is asked for its state when the row fails."""
        return self._model_state is not None and row.slot is not None and not (row.start or row.end)

    def restore_model(self, correlation_id: CorrelationId, state: bytes) -> None:
        assert self._model_state is not None, "asked before"
        if self._held is not None:
            self._held.give_back(correlation_id)
        self._model_state.load(correlation_id, state)

    def release(self, correlation_id: CorrelationId) -> None:
        if self._held is not None:
            self._held.release(correlation_id)

    def release_all(self) -> None:
        if self._held is not None:
            self._held.release_all()

    def load_states(self, slots: Sequence[int], states: Sequence[Mapping[str, Tensor]]) -> None:
        """See `base.Engine.load_states`. Raises ModelError when a state is missing or does not fit."""
        for slot, one in zip(slots, states, strict=True):
            self._states.load(slot, one)

    def states_at(self, slot: int) -> States:
        return self._states.at(slot)

    def describe_state(self, slot: int) -> str:
        return self._states.describe(slot)

    def drop_state(self, slot: int) -> None:
        self._states.drop(slot)

    def run_rows_alone(self, because: str) -> None:
        """See `base.FixesShape`. Does nothing: rows run alone already."""

    def is_ready(self) -> bool:
        """The result of the model's `is_ready`, which may be asynchronous; False if it raises, or gives no bool."""
        try:
            with called(self._code):
                said = self._model.is_ready()
                if inspect.iscoroutine(said):
                    self._coroutines.start()
                    said = self._coroutines.run(said)
                if not isinstance(said, bool):
                    raise TypeError(f"is_ready must return a bool, not {type(said).__name__}")
                return said
        except BaseException:  # as in `_responses`
            log.exception("is_ready of model instance '%s' failed", self._instance)
            return False

    def close(self) -> None:
        """Calls `finalize`; an exception is logged, because no caller is left."""
        self._model_state = None  # a sender that is forgotten from here on asks nothing of it
        try:
            with called(self._code), calls.no_calls():
                if hasattr(self._model, "finalize"):
                    self._model.finalize()
        except BaseException:  # as in `_responses`
            log.exception("finalize of model instance '%s' failed", self._instance)
        self._coroutines.close()
        self._opened.close()

    # --- the batch

    def _batch(
        self, rows: Sequence[Row]
    ) -> tuple[list[RowResult | RowError | None], list[Row], list[tuple[int, int, int]]]:
        """The results, so far the errors of bad rows; the rows to execute, which the model is given; and for each row
        whose result counts: position, index in `rows`, rows that it brings.

        With the direct strategy a null row takes the place of a bad row, so that its neighbours keep their positions.
        """
        results: list[RowResult | RowError | None] = [None] * len(rows)
        batch: list[Row] = []
        members: list[tuple[int, int, int]] = []
        for index, row in enumerate(rows):
            if not row.null:
                verdict = self._shapes.judge(row)
                if not isinstance(verdict, RowError):
                    members.append((len(batch), index, verdict.rows))
                    batch.append(row)
                    continue
                results[index] = verdict
            if self._keeps_positions:
                batch.append(row if row.null else NULL_ROW)
        if self._held is not None:
            self._held.give(batch)
        return results, batch, members

    def _states_before(self, batch: Sequence[Row]) -> list[States | None]:
        return [None if row.null or not self._has_state else self._state_before(row) for row in batch]

    def _state_before(self, row: Row) -> States:
        if row.start:
            return self._states.initial
        assert row.slot is not None, "a row that goes on from implicit state has a slot"
        return self._states.at(row.slot)

    def _responses(self, requests: list[RowRequest], batch: Sequence[Row]) -> Sequence[object] | RowError:
        try:
            with self._executing(batch) as execution:
                # A list of its own: a model may take the requests out of it.
                responses = self._model.execute(list(requests))
                if inspect.iscoroutine(responses):
                    execution.loop_thread = self._coroutines.start()
                    responses = self._coroutines.run(responses)
        except BaseException as error:  # noqa: BLE001 - the model's own code: every row of the call fails, as in Triton.
            # Also by SystemExit, KeyboardInterrupt or CancelledError, which in an event loop would end the executor.
            return self._raised(error, requests[0].columns)
        if responses is None and any(request.sole_sender is not None for request in requests):
            return [None] * len(requests)
        if not isinstance(responses, list | tuple):
            return self._call_error(f"Expected a list in the execute return, found type '{type(responses)}'.")
        given = cast("Sequence[object]", responses)
        if len(given) != len(requests):
            return self._call_error(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(given)}\n"
            )
        return given

    def _executing(self, batch: Sequence[Row]) -> Executing:
        return Executing(
            calls.Execution(self._config.name, self._version_name, self._instance, batch), self._code, self._process
        )

    def _raised(self, error: BaseException, columns: Columns) -> RowError:
        """The error of a call that raised. columns: those of its requests"""
        return self._call_error(error_text(error) + columns.undeclared)

    def _call_error(self, text: str) -> RowError:
        return RowError(
            Code.INTERNAL, f"Failed to process the request(s) for model '{self._instance}', message: {text}"
        )

    # --- one row's result

    def _concluded(self, request: RowRequest, one: RowPass, returned: object) -> RowResult | RowError:
        """What a row comes to for which `execute` returned this, or failed with it. Where the model has asked for a
        response sender, what it sent counts; if it neither sent nor returned anything, the row stays open.
        """
        is_again = request.release_flags == interface.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        if (sender := request.sole_sender) is not None:
            sent = sender.close(returned) if is_again or returned is not None else self._left_open(sender, one)
            if not isinstance(sent, interface.InferenceResponse | None):
                return sent
            if sent is not None:
                returned, is_again = sent, False
        if isinstance(returned, RowError):
            return returned
        if is_again:
            return self._rescheduled(one, returned)
        if not isinstance(returned, interface.InferenceResponse):
            return self._call_error(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(returned)}'."
            )
        made = self._made_of(one, returned)
        if made.keep_state is not None:
            made.keep_state()
        return made.result

    def _rescheduled(self, one: RowPass, response: object) -> RowResult | RowError:
        """The result of a request that the model wants in another pass (triton-spec 1.10)."""
        if not self._iterative:
            return RowError(
                Code.INVALID_ARG,
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured "
                "to handle such a flag.",
            )
        if response is not None:
            return self._call_error(
                "Expected a None object in the execute function return list for reschduled request, found type "
                f"'{type(response)}'."
            )
        states = self._states_left(one)
        if isinstance(states, RowError):
            return states
        if one.row.slot is not None and states is not None:
            # The next pass has no START flag, so the state that START began with is put into the slot.
            self._states.put(one.row.slot, states)
        return RowResult((), again=True)

    def _made_of(self, one: RowPass, response: interface.InferenceResponse) -> MadeAnswer:
        """The answer of a request that has one. May be called from any thread."""
        before = self._states_left(one)
        if isinstance(before, RowError):
            return MadeAnswer(before)
        read = self._reader.read(one.row, one.count, response, before)
        if isinstance(read, RowError):
            return MadeAnswer(read)
        result, states = read
        if before is None or states is None:
            return MadeAnswer(result)
        if not self._has_answered:
            self._has_answered = True
            self._tell_unreturned(before, states)
        if one.wanted:
            result = RowResult(result.outputs, states, parameters=result.parameters)
        return MadeAnswer(result, None if one.row.slot is None else partial(self._states.put, one.row.slot, states))

    def _tell_unreturned(self, before: States, after: States) -> None:
        """A model may leave a state as it was; one that does so from the first answer on may have forgotten it."""
        for state in self._config.states:
            if after[state.input_name] is before[state.input_name] and not state.same_buffer:
                log.warning(
                    "model '%s' returned no '%s' with its first answer: that state stays as it was",
                    self._config.name,
                    state.output_name,
                )

    def _left_open(self, sender: SoleSender, one: RowPass) -> interface.InferenceResponse | RowResult | RowError:
        """The response that was sent; or else the result of a row whose answer is to come."""
        late = sender.left_open(partial(self._made_late, one), asks=self._asks(one.row))
        if not isinstance(late, LateAnswer):
            return late
        # Nothing behind it may overtake it.
        return late.wait() if self._in_order else RowResult((), open=True, late=late)

    def _made_late(self, one: RowPass, given: interface.InferenceResponse | RowError) -> MadeAnswer:
        made = MadeAnswer(given) if isinstance(given, RowError) else self._made_of(one, given)
        return MadeAnswer(self._with_state(one.row, made.result, wanted=one.wanted), made.keep_state)

    def _states_left(self, one: RowPass) -> States | RowError | None:
        """The states as the model left them in place; returned ones take their places."""
        if one.states is None or not self._shares_buffers:
            return one.states
        return self._written(one.states, one.columns, one.position)

    def _written(self, before: States, columns: Columns, position: int) -> States | RowError:
        """The states, with what the model wrote into the ones whose input and output are one buffer."""
        written = dict(before)
        for state in self._config.states:
            column = columns.get(state.input_name)  # absent where the model did not ask for it
            tensor = column[position] if column is not None and state.same_buffer else None
            if tensor is not None:
                old = before[state.input_name]
                try:
                    raw = raw_content(tensor)
                    self._reader.check_size(state.output_name, raw)
                except (WrongResponseError, interface.TritonModelException) as wrong:
                    return RowError(Code.INTERNAL, str(wrong))
                written[state.input_name] = Tensor(old.name, old.datatype, old.shape, raw)
        return written

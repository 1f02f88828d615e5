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

With `fixed_shape` every call has one request, so that no other request can matter to it. A direct model that declares
no state may know its sequences by their positions: its request keeps its position, among null rows that fill the batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from executor.engine import shapes
from executor.engine.base import BatchResult, LoadRequest, Row, RowError, RowResult, Timings
from executor.engine.null_rows import NULL_ROW, false_control, zeros
from executor.engine.python import calls
from executor.engine.python import triton_python_backend_utils as interface
from executor.engine.python.coroutines import Coroutines
from executor.engine.python.model import (
    error_text,
    forget,
    import_model_class,
    keep_importable,
    model_dir_known,
    model_path,
)
from executor.engine.python.model_code import only_computes
from executor.engine.python.model_release import GivenSequences, has_release
from executor.engine.python.model_state import ModelState, has_methods
from executor.engine.python.slot_states import SlotStates, States
from executor.engine.row_shapes import RowShapes
from executor.engine.state_tensors import size_problem
from shared.contract.errors import Code, LoadError, ModelError
from shared.contract.ids import CorrelationId
from shared.contract.limits import MODEL_STATE_BYTES_MAX
from shared.contract.model_config import Direct, FixedShape, SequenceRecovery, StateSpec, TensorSpec
from shared.contract.tensors import NUMPY_TYPE, Tensor, to_numpy

log = logging.getLogger(__name__)

_CODES = frozenset(Code)
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
NO_PARAMETERS: Mapping[str, str | int | bool | float] = {}


class WrongResponseError(Exception):
    """One row's response is wrong."""


class PythonEngine:
    """See `base.Engine`. Not thread-safe: one call at a time."""

    def __init__(self, request: LoadRequest) -> None:
        """Imports and initialises the model. Raises LoadError with the model's own error."""
        config = request.config
        batching = config.sequence_batching
        self._config = config
        self._instance = request.instance_name
        self._coroutines = Coroutines()
        self._batched = config.max_batch_size > 0
        self._keeps_positions = batching is not None and isinstance(batching.strategy, Direct)
        self._shapes = RowShapes(config)
        self._states = SlotStates(batching.states if batching else (), request.model_dir, request.state_value_bytes_max)
        self._state_value_bytes_max = request.state_value_bytes_max
        self._has_state = bool(self._states.specs)
        self._shares_buffers = any(state.same_buffer for state in self._states.specs)
        self._iterative = batching is not None and batching.iterative
        self._repeatable = self._has_state or batching is None
        self._fixed = config.fixed_shape is not FixedShape.OFF
        self._call_rows = max(1, config.max_batch_size) if self._keeps_positions and not self._has_state else 1
        self._outputs = [OutputCheck(config.name, spec, batched=self._batched) for spec in config.outputs]
        self._output_states = [
            (state, OutputCheck(config.name, _as_output(state), batched=self._batched)) for state in self._states.specs
        ]
        self._known_outputs = {spec.name for spec in config.outputs} | {
            state.output_name for state in self._states.specs
        }
        inputs = {spec.name: spec for spec in config.inputs}
        controls = batching.controls if batching else ()
        false_controls = {control.name: false_control(control, batched=self._batched) for control in controls}
        states = {state.input_name: state for state in self._states.specs}
        self._sources = Sources(
            model=config.name,
            version=int(request.version) if request.version.isdecimal() else -1,
            inputs=inputs,
            false_controls=false_controls,
            states=states,
            names=(*inputs, *false_controls, *states),
            outputs=[spec.name for spec in config.outputs],
            batched=self._batched,
            cancelled={},
        )
        self._running: Sequence[Row] = ()
        version_dir = request.model_dir / request.version
        path = request.code or model_path(version_dir, config.default_model_filename)
        self.only_computes = only_computes(path.read_bytes())
        """See `base.OnlyComputes`."""
        self.makes_calls = not self.only_computes
        """See `base.MakesCalls`: code that only computes has no name for a call."""
        self._code_dir = path.parent
        # As in Triton: a python-based backend serves many models, and asks in whose folder it is to look.
        self._model_dir = str(version_dir if request.code else path.parent)
        interface.model_names[self._model_dir] = config.name
        self._model_class = import_model_class(path)
        keep_importable(path.parent)
        try:
            self._model = self._initialised(self._model_class, request)
        except LoadError:
            forget(self._model_class, path.parent)
            raise
        # A request of an iterative model is a whole sequence, so no state outlives its answer.
        own = batching is not None and not self._has_state and not self._iterative
        wanted = own and config.sequence_recovery is not SequenceRecovery.NONE and has_methods(self._model_class)
        bytes_max = min(MODEL_STATE_BYTES_MAX, request.state_value_bytes_max)
        self._model_state = ModelState(self._model, config.name, self._model_dir, bytes_max) if wanted else None
        tells = batching is not None and has_release(self._model_class)
        self._held = GivenSequences(self._model, config.name, self._model_dir) if tells else None

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
            with model_dir_known(self._model_dir), calls.no_calls():
                model = model_class()
                if hasattr(model, "initialize"):
                    model.initialize(arguments)
        except Exception as error:  # the model's own code
            raise LoadError(
                f"Failed to initialize model instance '{request.instance_name}', message: {error_text(error)}"
            ) from error
        return model

    def move_weights(self, offset_bytes: int) -> None:
        """See `base.FixesShape`. Does nothing: the engine does not know a python model's weights."""

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        """See `base.Engine.run`. Tensors are made when the model asks for them: that time counts as the model's."""
        self._running = rows
        try:
            return self._run(rows, want_state)
        finally:
            self._running = ()
            self._sources.cancelled.clear()

    def cancel(self, row: Row) -> None:
        """See `base.SeesCancellation`."""
        if any(one is row for one in self._running):
            # With the row itself, so that no other row has its id.
            self._sources.cancelled[id(row)] = row

    def _run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        if self._fixed:
            return self._run_apart(rows, want_state, Timings(0, 0, 0), self._call_rows)
        result, raised = self._run_once(rows, want_state)
        # A single row would only fail again.
        if raised and self._repeatable and sum(not row.null for row in rows) > 1:
            return self._run_apart(rows, want_state, result.timings, len(rows) if self._keeps_positions else 1)
        return result

    def _run_apart(
        self, rows: Sequence[Row], want_state: Sequence[bool], spent: Timings, call_rows: int
    ) -> BatchResult:
        """Runs every row in a call of its own: of one row, or at its own position among null rows.

        spent  times of the call before
        """
        results: list[RowResult | RowError | None] = [None] * len(rows)
        for index, row in enumerate(rows):
            if row.null:
                continue
            position = index if call_rows > 1 else 0
            alone, wants = [NULL_ROW] * call_rows, [False] * call_rows
            alone[position], wants[position] = row, want_state[index]
            result, _ = self._run_once(alone, wants)
            results[index] = result.rows[position]
            spent = spent.plus(result.timings)
        return BatchResult(results, spent)

    def _run_once(self, rows: Sequence[Row], want_state: Sequence[bool]) -> tuple[BatchResult, bool]:
        """One call of `execute`, and whether it raised (or returned something that cannot be assigned to rows)."""
        began = time.perf_counter_ns()
        results: list[RowResult | RowError | None] = [None] * len(rows)
        batch, members = self._batch(rows, results)
        if not members:
            return BatchResult(results, Timings(time.perf_counter_ns() - began, 0, 0)), False
        states = self._current_states(batch) if self._has_state else []
        columns = Columns(self._sources, batch, states)
        requests = [RowRequest(row, columns, position) for position, row in enumerate(batch)]
        if self._held is not None:
            self._held.give(batch)
        called = time.perf_counter_ns()
        responses = self._responses(requests, batch)
        returned = time.perf_counter_ns()
        for position, index, count in members:
            if isinstance(responses, RowError):
                results[index] = responses
            elif requests[position].release_flags == interface.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
                results[index] = self._rescheduled(responses[position])
                slot = rows[index].slot
                if slot is not None and self._has_state and (kept := states[position]) is not None:
                    # The next pass has no START flag, so the state that START began with is put into the slot.
                    self._states.put(slot, kept)
            else:
                before = states[position] if self._has_state else None
                if before is not None and self._shares_buffers:
                    before = self._written(before, columns, position)
                results[index] = self._result(rows[index], count, responses[position], before, wanted=want_state[index])
        if self._model_state is not None:
            self._save_states(self._model_state, rows, want_state, results)
        finished = time.perf_counter_ns()
        timings = Timings(called - began, returned - called, finished - returned)
        return BatchResult(results, timings), isinstance(responses, RowError)

    def _save_states(
        self,
        model_state: ModelState,
        rows: Sequence[Row],
        want_state: Sequence[bool],
        results: list[RowResult | RowError | None],
    ) -> None:
        """Asks the model for the state of rows that a checkpoint follows, and of rows that failed (see
        `base.HandsOutState`).
        """
        for index, (row, result) in enumerate(zip(rows, results, strict=True)):
            failed = isinstance(result, RowError) and not (row.start or row.end)
            if result is None or row.slot is None or not (want_state[index] or failed):
                continue
            if isinstance(result, RowError) and not failed:
                continue
            try:
                saved = model_state.save(row.correlation_id)
            except ModelError as error:
                message = f"{result.message}; {error.message}" if isinstance(result, RowError) else error.message
                results[index] = RowError(Code.INTERNAL, message, lost=True)
            else:
                results[index] = msgspec.structs.replace(result, model_state=saved)

    @property
    def hands_out_state(self) -> bool:
        return self._model_state is not None

    def restore_model(self, correlation_id: CorrelationId, state: bytes) -> None:
        assert self._model_state is not None, "asked before"
        if self._held is not None:
            self._held.give_back(correlation_id)
        self._model_state.load(correlation_id, state)

    @property
    def has_release(self) -> bool:
        return self._held is not None

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
        """The declared states in a slot."""
        return self._states.at(slot)

    def describe_state(self, slot: int) -> str:
        return self._states.describe(slot)

    def drop_state(self, slot: int) -> None:
        self._states.drop(slot)

    @property
    def frees_slots(self) -> bool:
        """See `base.FreesSlots`."""
        return self._has_state

    @property
    def batch_rows(self) -> int:
        return self._call_rows if self._fixed else 0

    @property
    def alone_because(self) -> str:
        return "a python model is given one request at a time"

    @property
    def is_testable(self) -> bool:
        return self._has_state

    def run_rows_alone(self, because: str) -> None:
        """See `base.FixesShape`. Does nothing: rows run alone already."""

    @property
    def has_readiness(self) -> bool:
        return hasattr(self._model, "is_ready")

    def is_ready(self) -> bool:
        """The result of the model's `is_ready`; True if it has none, False if it raises."""
        if not self.has_readiness:
            return True
        try:
            with model_dir_known(self._model_dir):
                return bool(self._model.is_ready())
        except Exception:  # the model's own code
            log.exception("is_ready of model instance '%s' failed", self._instance)
            return False

    def close(self) -> None:
        """Calls `finalize`; an exception is logged, because no caller is left."""
        if hasattr(self._model, "finalize"):
            try:
                with model_dir_known(self._model_dir), calls.no_calls():
                    self._model.finalize()
            except Exception:  # the model's own code
                log.exception("finalize of model instance '%s' failed", self._instance)
        self._coroutines.close()
        forget(self._model_class, self._code_dir)

    # --- the batch

    def _batch(
        self, rows: Sequence[Row], results: list[RowResult | RowError | None]
    ) -> tuple[list[Row], list[tuple[int, int, int]]]:
        """The rows to execute; and for each row whose result counts: position, index in `rows`, rows that it brings.

        With the direct strategy a null row takes the place of a bad row, so that its neighbours keep their positions.
        """
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
        return batch, members

    def _current_states(self, batch: Sequence[Row]) -> list[States | None]:
        return [None if row.null else self._state_before(row) for row in batch]

    def _state_before(self, row: Row) -> States:
        if row.start:
            return self._states.initial
        assert row.slot is not None, "a row that goes on from implicit state has a slot"
        return self._states.at(row.slot)

    def _responses(self, requests: list[RowRequest], batch: Sequence[Row]) -> Sequence[object] | RowError:
        try:
            with self._executing(batch):
                responses = self._model.execute(requests)
                if asyncio.iscoroutine(responses):
                    responses = self._coroutines.run(responses)
        except Exception as error:  # noqa: BLE001 - the model's own code: every row of the call fails, as in Triton
            return self._call_error(error_text(error))
        if not isinstance(responses, list | tuple):
            return self._call_error(
                f"execute must return a list with one InferenceResponse per request, not {type(responses).__name__}"
            )
        given = cast("Sequence[object]", responses)
        if len(given) != len(requests):
            return self._call_error(
                f"execute must return one InferenceResponse per request: expected {len(requests)}, got {len(given)}"
            )
        return given

    @contextmanager
    def _executing(self, batch: Sequence[Row]) -> Generator[None]:
        """Within the block this thread runs `execute` of these requests."""
        token = interface.current_model_dir.set(self._model_dir)
        execution = calls.Execution(self._config.name, self._instance, batch)
        running = calls.execution.set(execution)
        try:
            yield
        finally:
            calls.execution.reset(running)
            execution.over()
            interface.current_model_dir.reset(token)

    def _call_error(self, text: str) -> RowError:
        return RowError(
            Code.INTERNAL, f"Failed to process the request(s) for model instance '{self._instance}', message: {text}"
        )

    # --- one row's result

    def _rescheduled(self, response: object) -> RowResult | RowError:
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
        return RowResult((), again=True)

    def _result(
        self, row: Row, count: int, response: object, before: States | None, *, wanted: bool
    ) -> RowResult | RowError:
        if not isinstance(response, interface.InferenceResponse):
            return self._call_error(
                f"execute must return an InferenceResponse for every request, not {type(response).__name__}"
            )
        if (failure := self._reported(response)) is not None:
            return failure
        try:
            given = self._given(response)
            outputs = self._row_outputs(row, count, given)
            said = response_parameters(response.said)
            if before is None:
                return RowResult(outputs, parameters=said)
            states = self._next_states(before, given)
        except (WrongResponseError, interface.TritonModelException) as wrong:
            return RowError(Code.INTERNAL, str(wrong))
        if row.slot is not None:
            self._states.put(row.slot, states)
        return RowResult(outputs, states, parameters=said) if wanted else RowResult(outputs, parameters=said)

    @staticmethod
    def _reported(response: interface.InferenceResponse) -> RowError | None:
        """The error that a model made a response of; by Triton's habit it may also be a plain message."""
        failure = cast("object", response.failure)
        if failure is None:
            return None
        if not isinstance(failure, interface.TritonError):
            return RowError(Code.INTERNAL, str(failure))
        code = failure.code() if failure.code() in _CODES else Code.INTERNAL
        return RowError(code, failure.message())

    def _given(self, response: interface.InferenceResponse) -> dict[str, interface.Tensor]:
        given: dict[str, interface.Tensor] = {}
        for tensor in response.given:
            if not _is_tensor(tensor):
                raise WrongResponseError(
                    f"model '{self._config.name}' returned a {type(tensor).__name__} among its output tensors"
                )
            name = tensor.name()
            if name not in self._known_outputs:
                raise WrongResponseError(
                    f"model '{self._config.name}' returned output '{name}', which its configuration does not declare"
                )
            given[name] = tensor
        return given

    def _row_outputs(self, row: Row, count: int, given: Mapping[str, interface.Tensor]) -> list[Tensor]:
        """The declared outputs that the caller wants and the model has given: Triton lets models leave some out."""
        outputs: list[Tensor] = []
        asked = row.outputs
        for check in self._outputs:
            if asked and check.name not in asked:
                continue
            tensor = given.get(check.name)
            if tensor is not None:
                outputs.append(check.wire(tensor, count))
        return outputs

    def _written(self, before: States, columns: Columns, position: int) -> States:
        """The states, with what the model wrote into the ones whose input and output are one buffer."""
        written = dict(before)
        for state in self._states.specs:
            column = columns.get(state.input_name)  # absent where the model did not ask for it
            tensor = column[position] if column is not None and state.same_buffer else None
            if tensor is not None:
                old = before[state.input_name]
                written[state.input_name] = Tensor(old.name, old.datatype, old.shape, interface.raw_content(tensor))
        return written

    def _next_states(self, before: States, given: Mapping[str, interface.Tensor]) -> States:
        following = dict(before)
        for state, check in self._output_states:
            tensor = given.get(state.output_name)
            if tensor is not None:
                output = check.wire(tensor, 1)
                problem = size_problem(len(output.raw), self._state_value_bytes_max)
                if problem is not None:
                    raise WrongResponseError(
                        f"model '{self._config.name}' returned a wrong state '{state.output_name}': {problem}"
                    )
                shape = output.shape[1:] if self._batched else output.shape
                following[state.input_name] = Tensor(state.input_name, state.datatype, shape, output.raw)
        return following


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a model's input names come from; one per engine.

    names    in the order in which they are looked up: inputs, controls, states
    outputs  names of the declared outputs: a request that names none gets all of them
    cancelled  rows that run now, and for which nobody waits any more, by their id as objects
    """

    model: str
    version: int
    inputs: Mapping[str, TensorSpec]
    false_controls: Mapping[str, Tensor]
    states: Mapping[str, StateSpec]
    names: Sequence[str]
    outputs: Sequence[str]
    batched: bool
    cancelled: dict[int, Row]


class Columns(dict[str, interface.Column]):
    """A batch's tensors by name. Each is made for all rows when it is first asked for."""

    def __init__(self, sources: Sources, batch: Sequence[Row], states: Sequence[States | None]) -> None:
        super().__init__()
        self.sources = sources
        self._batch = batch
        self._states = states

    def __missing__(self, name: str) -> interface.Column:
        column = self[name] = self._column(name)
        return column

    def _column(self, name: str) -> interface.Column:
        sources = self.sources
        if name in sources.inputs:
            return self._input_column(name, sources.inputs[name])
        if name in sources.false_controls:
            false = sources.false_controls[name]
            tensors: list[Tensor | None] = [
                row.controls.get(name, false) if row.null else row.controls[name] for row in self._batch
            ]
            return _made(name, tensors)
        if name in sources.states:
            return self._state_column(name)
        return [None] * len(self._batch)

    def _input_column(self, name: str, spec: TensorSpec) -> interface.Column:
        tensors = [row.inputs.get(name) for row in self._batch]
        if spec.reshape is not None:
            tensors = [None if tensor is None else self._reshaped(spec, tensor) for tensor in tensors]
        return _made(name, self._nulls_filled(tensors))

    def _reshaped(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        leading = tensor.shape[:1] if self.sources.batched else ()
        shape = (*leading, *shapes.for_model(spec, tensor.shape[len(leading) :]))
        return Tensor(tensor.name, tensor.datatype, shape, tensor.raw)

    def _state_column(self, name: str) -> interface.Column:
        leading = (1,) if self.sources.batched else ()
        tensors = [None if states is None else states[name] for states in self._states]
        return _made(name, self._nulls_filled(tensors), leading)

    def _nulls_filled(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Fills the null rows with zeros of the first real row's shape (with one item, if that request brings
        several).
        """
        if None not in tensors:
            return tensors
        sample = next((tensor for tensor in tensors if tensor is not None), None)
        if sample is None:
            return tensors
        null = Tensor(sample.name, sample.datatype, sample.shape, zeros(sample.datatype, sample.shape))
        return [
            null if tensor is None and row.null else tensor for tensor, row in zip(tensors, self._batch, strict=True)
        ]


def _made(name: str, tensors: Sequence[Tensor | None], leading: shapes.Shape = ()) -> interface.Column:
    """The interface's tensors. Tensors of one shape share one buffer, and each is writable."""
    first = tensors[0]
    if first is not None and first.datatype != "BYTES":
        shape = first.shape
        parts = [tensor.raw for tensor in tensors if tensor is not None and tensor.shape == shape]
        if len(parts) == len(tensors):
            datatype = first.datatype
            arrays = _buffer(datatype, parts).reshape((len(parts), *leading, *shape))
            made = interface.TypedTensor
            return [made(name, array, datatype) for array in arrays]
    return [None if tensor is None else tensor_of(name, tensor, leading) for tensor in tensors]


def tensor_of(name: str, tensor: Tensor, leading: shapes.Shape = ()) -> interface.Tensor:
    """A tensor as the model gets it; writable."""
    if tensor.datatype == "BYTES":
        array = to_numpy(tensor).reshape((*leading, *tensor.shape))
    else:
        array = _buffer(tensor.datatype, [tensor.raw]).reshape((*leading, *tensor.shape))
    return interface.TypedTensor(name, array, tensor.datatype)


def _buffer(datatype: str, parts: Sequence[bytes]) -> NDArray[Any]:
    return np.frombuffer(bytearray().join(parts), NUMPY_TYPE["UINT16" if datatype == "BF16" else datatype])


def response_parameters(said: object) -> Mapping[str, str | int | bool | float]:
    """The parameters of a response. Raises WrongResponseError for a value that no protocol can carry."""
    if not said:
        return NO_PARAMETERS
    if not isinstance(said, Mapping):
        raise WrongResponseError(f"the parameters of a response must be a dict, not {type(said).__name__}")
    plain: dict[str, str | int | bool | float] = {}
    for key, value in cast("Mapping[object, object]", said).items():
        found = _plain(value)
        if not is_text(key) or found is None:
            raise WrongResponseError(
                f"response parameter {key!r} has invalid type: keys must be str, values str, int (of 64 bits), bool or "
                "float"
            )
        plain[str(key)] = found
    return plain


def _plain(value: object) -> str | int | bool | float | None:
    """The value itself, without what a subclass adds to it (numpy's float64 is a float); None for another type."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and INT64_MIN <= value <= INT64_MAX:
        return int(value)
    return str(value) if is_text(value) else None


def is_text(value: object) -> bool:
    """Whether it is a string that UTF-8 can encode: half a surrogate pair it cannot."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


class RowRequest(interface.InferenceRequest):
    """A row, as the model sees it."""

    __slots__ = ("_row",)

    def __init__(self, row: Row, columns: Columns, position: int) -> None:  # what the base keeps is in the row
        self._row = row
        self.columns = columns
        self.position = position
        self.release_flags = interface.TRITONSERVER_REQUEST_RELEASE_ALL

    def inputs(self) -> list[interface.Tensor]:
        assert isinstance(self.columns, Columns), "a row's columns are its batch's"
        tensors = [self.columns[name][self.position] for name in self.columns.sources.names]
        return [tensor for tensor in tensors if tensor is not None]

    def model_name(self) -> str:
        assert isinstance(self.columns, Columns), "a row's columns are its batch's"
        return self.columns.sources.model

    def model_version(self) -> int:
        assert isinstance(self.columns, Columns), "a row's columns are its batch's"
        return self.columns.sources.version

    def preferred_memory(self) -> None:
        return None

    def trace(self) -> calls.RequestTrace | None:
        """For a call that belongs to this request, whatever else is in the batch."""
        running = calls.execution.get()
        if running is None or self._row.origin is None:
            return None
        return calls.RequestTrace(running, self._row.origin)

    def request_id(self) -> str:
        return self._row.request_id

    def correlation_id(self) -> int | str:
        return self._row.correlation_id

    def flags(self) -> int:
        row = self._row
        return (interface.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if row.start else 0) | (
            interface.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if row.end else 0
        )

    def set_flags(self, flags: int) -> None:
        """Refused: the flags of a step are the client's."""
        raise interface.TritonModelException("the flags of a request that is being executed cannot be changed")

    def timeout(self) -> int:
        return self._row.timeout_us

    def parameters(self) -> str:
        return interface.json.dumps(dict(self._row.parameters))

    def is_cancelled(self) -> bool:
        assert isinstance(self.columns, Columns), "a row's columns are its batch's"
        return id(self._row) in self.columns.sources.cancelled

    def requested_output_names(self) -> list[str]:
        """What the caller asked for; all outputs when he named none, as in Triton."""
        assert isinstance(self.columns, Columns), "a row's columns are its batch's"
        return list(self._row.outputs or self.columns.sources.outputs)


class OutputCheck:
    """Turns one declared output of a row into its wire form, once it is what the configuration says.

    The shape and type that were right last time are right at once.
    """

    def __init__(self, model: str, spec: TensorSpec, *, batched: bool) -> None:
        self.name = spec.name
        self._model = model
        self._spec = spec
        self._batched = batched
        self._seen_shape: shapes.Shape | None = None
        self._seen_type: np.dtype[Any] | None = None
        self._seen_count = 0
        self._client_shape: shapes.Shape = ()

    def wire(self, tensor: interface.Tensor, count: int) -> Tensor:
        """count: rows of the request. Raises WrongResponseError that tells what was expected and returned."""
        array = tensor.array
        if array.dtype is not self._seen_type or array.shape != self._seen_shape or count != self._seen_count:
            self._check(tensor, count)
            array = tensor.array
            if self._spec.datatype not in ("BYTES", "BF16"):
                self._seen_type, self._seen_shape, self._seen_count = array.dtype, array.shape, count
        if self._spec.datatype == "BYTES":
            return Tensor(self.name, "BYTES", self._client_shape, interface.raw_content(tensor))
        return Tensor(self.name, self._spec.datatype, self._client_shape, array.tobytes())

    def _check(self, tensor: interface.Tensor, count: int) -> None:
        datatype, shape = interface.datatype_of(tensor), tensor.array.shape
        dims = shapes.declared_by_model(self._spec)
        leading = (count,) if self._batched else ()
        row_shape = shape[len(leading) :]
        expected = (*leading, *dims)
        if datatype != self._spec.datatype or not shapes.fits(shape, expected):
            raise WrongResponseError(
                f"model '{self._model}' returned a wrong output '{self.name}': expected {self._spec.datatype} "
                f"{shapes.text(expected)}, got {datatype} {shapes.text(shape)}"
            )
        self._client_shape = (*leading, *shapes.for_client(self._spec, row_shape))


def _is_tensor(value: object) -> bool:
    """Asked of a value whose type a model may have promised wrongly."""
    return isinstance(value, interface.Tensor)


def _as_output(state: StateSpec) -> TensorSpec:
    return TensorSpec(state.output_name, state.datatype, state.dims)

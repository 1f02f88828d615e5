"""One instance of a model that is called with torch tensors: TorchScript, an exported program, or a session of another
runtime.

Rows are concatenated along dim 0 and run as one batch; the state is gathered from the arena before, and scattered
after. Per row, only its bytes are picked out of one buffer per tensor; everything else happens once per batch.

Rows whose inputs (or variable states) differ in shape run in groups of equal shapes. Ragged inputs may differ, and are
one flat tensor for the whole batch (`ragged`, `batch_tensors`). With the direct strategy, where a row's position is its
slot, null rows stand for the rows of the other groups, as in Triton.

When a batch fails, each of its rows runs alone, so that only the row that causes the failure fails. State is written
only when a row's results are complete, so a retried row begins from the same state. A module that keeps state in
attributes is given it anew, and what it left in them before the failure is forgotten (`kept_state`).

With `fixed_shape` every call of the module has the same shape, and its inputs begin at aligned addresses: batches are
filled up with null rows at the end, or each row runs alone (`fixed_shape`, `executor.models.fixed_shape`).
TorchScript's optimisation is off then: it would compile the module for the shapes that it has seen, on a GPU to kernels
that round differently, and these shapes depend on earlier requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from executor.core.controls import ControlTensors
from executor.engine import shapes
from executor.engine.base import BatchResult, Row, RowError, RowResult
from executor.engine.batch_tensors import batch_input_value
from executor.engine.fixed_shape import alone_because, padded_rows
from executor.engine.null_rows import NULL_ROW, zeros
from executor.engine.pytorch.arena import StateArena
from executor.engine.pytorch.binding import Binding, Source
from executor.engine.pytorch.call import BatchFailedError, Layout
from executor.engine.pytorch.datatypes import on_device, tensor_of
from executor.engine.pytorch.outputs import Outputs
from executor.engine.pytorch.places import INITIAL_PLACE, NULL_PLACE, SCRAP_PLACE, Places
from executor.engine.pytorch.recurrent import RecurrentLayers
from executor.engine.pytorch.relocation import relocated
from executor.engine.pytorch.running_batch import GpuBatch, GpuStreams, HostBatch
from executor.engine.pytorch.state_values import Texts
from executor.engine.pytorch.switches import Switches
from executor.engine.pytorch.threads import use_threads
from executor.engine.ragged import RaggedInputs, flat_parts, request_shapes
from executor.engine.row_shapes import InputShapes, RowShapes, Verdict
from shared.contract.errors import Code
from shared.contract.model_config import BatchInput, ControlSpec, ModelConfig, StateSpec
from shared.contract.tensors import Tensor, bytes_elements, element_count, shape_text
from shared.statistics.tally import MemoryUse

ERROR_TEXT_MAX = 4096
"""Most characters of a model's own error text in a reply: TorchScript's can quote pages of source."""


Forward = Callable[..., Any]


class StateLostError(Exception):
    """A batch's new states could not all be written."""


class TorchEngine:
    """See `base.Engine`, and the protocols beside it. Not thread-safe: one call at a time."""

    def __init__(
        self,
        config: ModelConfig,
        forward: Forward,
        bindings: tuple[Binding, ...],
        places: Mapping[str, int],
        arena: StateArena,
        *,
        fixed_threads: int,
        switches: Switches | None = None,
        streams: GpuStreams | None = None,
        failure: str = "PyTorch execute failure",
    ) -> None:
        """fixed_threads: with `fixed_shape`, threads that compute one tensor; 0 without. switches: how a torch module
        is run. streams: where a GPU computes; None on a CPU, and where another runtime has streams of its own. failure:
        begins the error of a call that fails
        """
        self._config = config
        self._forward: Forward | None = forward
        # Not when it is asked for: TorchScript may set an attribute on its thread meanwhile, without Python's lock, and
        # who reads it then may read memory that is freed.
        weights = [*forward.parameters(), *forward.buffers()] if isinstance(forward, torch.nn.Module) else []
        self._weight_bytes = sum(weight.nbytes for weight in weights)
        self._bindings = bindings
        self._outputs = Outputs(config, places)
        self._arena = arena
        self.device = arena.device
        self._shapes = RowShapes(config)
        self._ragged = RaggedInputs(config.inputs)
        self._input_position = {spec.name: position for position, spec in enumerate(config.inputs)}
        self._batched = config.max_batch_size > 0
        self._keeps_positions = config.is_direct
        self._false = {name: tensor.raw for name, tensor in ControlTensors(config).null_row.items()}
        self._states_by_input = {state.spec.input_name: state for state in arena.states}
        self._fixed_threads = fixed_threads
        chosen = switches or Switches()
        self._switches = replace(chosen, optimized=chosen.optimized and not fixed_threads)
        self._mode = torch.inference_mode if chosen.inference_mode else torch.no_grad
        self._streams = streams
        self._failure = failure
        # Watches the first batch on a GPU only.
        self._layers = RecurrentLayers() if self.device.type == "cuda" else None
        self.batch_rows = padded_rows(config.max_batch_size) if fixed_threads else 0
        self.alone_because = ""
        self.is_testable = True
        self.runs_ahead = streams is not None
        self.frees_slots = arena.varies
        cut = fixed_threads if self.device.type == "cpu" else 1
        if fixed_threads and (because := alone_because(config, cut)):
            self.run_rows_alone(because)

    def run_rows_alone(self, because: str) -> None:
        self.batch_rows, self.alone_because = 1, because

    def move_weights(self, offset_bytes: int) -> None:
        if isinstance(self._forward, torch.nn.Module) and self.device.type == "cpu":
            for weight in (*self._forward.parameters(), *self._forward.buffers()):
                weight.data = relocated(weight.data, offset_bytes)

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        return self.begin(rows, want_state)()

    def begin(self, rows: Sequence[Row], want_state: Sequence[bool]) -> Callable[[], BatchResult]:
        """See `base.RunsAhead`."""
        if self._fixed_threads:
            use_threads(self._fixed_threads)
        results: list[RowResult | RowError | None] = [None] * len(rows)
        with self._mode(), self._on_device():
            running = HostBatch() if self._streams is None else GpuBatch(self._streams)
            for key, members in self._groups(rows, results).items():
                self._run_members(rows, members, key[0], want_state, results, running)
        return partial(self._ended, results, running)

    def _ended(self, results: list[RowResult | RowError | None], running: HostBatch | GpuBatch) -> BatchResult:
        with self._on_device():
            timings = running.end()
            if self._switches.cache_cleaning and self.device.type == "cuda":
                torch.cuda.empty_cache()
        return BatchResult(results, timings)

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._streams is None else self._streams.active()

    def load_states(self, slots: Sequence[int], states: Sequence[Mapping[str, Tensor]]) -> None:
        """See `base.Engine.load_states`. Raises ModelError when a state is missing or does not fit; then none moves."""
        # As `run`: a tensor that was made in inference mode, as the arena is once it has grown there, cannot be written
        # to outside of it.
        with self._mode(), self._on_device():
            self._arena.load(slots, states)

    def describe_state(self, slot: int) -> str:
        with self._on_device():
            return self._arena.describe(slot)

    def drop_state(self, slot: int) -> None:
        self._arena.drop(slot)

    def memory_usage(self) -> Sequence[MemoryUse]:
        size = self._arena.byte_size + self._weight_bytes
        kind = "GPU" if self.device.type == "cuda" else "CPU"
        return (MemoryUse(kind, self.device.index or 0, size),) if size else ()

    def close(self) -> None:
        self._forward = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- which rows run together

    def _groups(
        self, rows: Sequence[Row], results: list[RowResult | RowError | None]
    ) -> dict[tuple[InputShapes, object], dict[int, Verdict]]:
        """The rows that can share tensors, by their shapes: index in the batch -> verdict, in order."""
        groups: dict[tuple[InputShapes, object], dict[int, Verdict]] = {}
        # Rows of equal shapes have the same verdict.
        alike = self._batched and self.batch_rows != 1 and not self._arena.varies
        before: Verdict | None = None
        members: dict[int, Verdict] = {}
        for index, row in enumerate(rows):
            if row.null:
                continue
            verdict = self._shapes.judge(row)
            if isinstance(verdict, RowError):
                results[index] = verdict
                continue
            if verdict is not before or not alike:
                key = self._ragged.group(verdict.key), self._apart(index, row)
                before, members = verdict, groups.setdefault(key, {})
            members[index] = verdict
        return groups

    def _apart(self, index: int, row: Row) -> object:
        """What else must be equal for rows to share a batch, beside their input shapes. The index, which no other row
        has, makes a row run alone: if the model has no batch dimension, or rows run alone by `fixed_shape`.
        """
        if not self._batched or self.batch_rows == 1:
            return index
        if not self._arena.varies:
            return None
        place = self._read_place(row)
        return tuple(state.shape(place) for state in self._arena.states)

    def _read_place(self, row: Row) -> int:
        if row.null:
            return NULL_PLACE
        if row.start:
            return INITIAL_PLACE
        assert row.slot is not None, "a row that goes on from implicit state has a slot"
        return self._arena.place(row.slot)

    def _run_members(
        self,
        rows: Sequence[Row],
        members: dict[int, Verdict],
        key: InputShapes,
        want_state: Sequence[bool],
        results: list[RowResult | RowError | None],
        running: HostBatch | GpuBatch,
    ) -> None:
        try:
            made = self._attempt(rows, members, key, want_state, running)
        except StateLostError as failure:
            made = dict.fromkeys(members, RowError(Code.INTERNAL, str(failure), lost=True))
        except BatchFailedError as failure:
            # One call per row now: a single row that fails ends the recursion.
            if len(members) > 1:
                for index, verdict in members.items():
                    self._run_members(rows, {index: verdict}, key, want_state, results, running)
                return
            made = dict.fromkeys(members, failure.error)
        for index, result in made.items():
            results[index] = result

    def _attempt(
        self,
        rows: Sequence[Row],
        members: dict[int, Verdict],
        key: InputShapes,
        want_state: Sequence[bool],
        running: HostBatch | GpuBatch,
    ) -> Mapping[int, RowResult | RowError]:
        """Runs one group and writes its new states. Raises BatchFailedError, with no state written, if there is no
        complete result; StateLostError if only a part of the states was written.
        """
        # The order keeps a failure harmless: arguments, call, checks and results first; states are written last.
        running.start()
        layout = self._layout(rows, members)
        wants = [want_state[index] for index in members]
        try:
            places = self._places(layout, wants)
            positional, named = self._arguments(layout, key, places)
            running.input_done()
            returned = self._called(positional, named)
            running.infer_done()
            columns = self._outputs.columns(returned, layout, running.pieces)
            new_states = self._state_values(returned, layout)
            # The rows' checkpoints, state by state.
            kept = self._arena.tensors(new_states, layout.kept, running.pieces) if any(wants) else ()
            grown = self._arena.grown(places, new_states)
            made = {
                index: RowResult(
                    self._outputs.row(rows[index], columns, position),
                    {name: column[position] for name, column in kept} if wanted else {},
                    grown=[column[position] for column in grown] if wanted else (),
                )
                for index, position, wanted in zip(members, layout.positions, wants, strict=True)
            }
            running.output_done()
        except BatchFailedError:
            raise
        except Exception as error:  # no memory for a tensor, say, or a value of a kind that nobody foresaw
            raise BatchFailedError(self._execute_failure(error)) from error
        try:
            for state, value in zip(self._arena.states, new_states, strict=True):
                state.scatter(places, value)
        except Exception as error:
            raise StateLostError(self._execute_failure(error)) from error
        return made

    def _layout(self, rows: Sequence[Row], members: dict[int, Verdict]) -> Layout:
        if self._keeps_positions and self.batch_rows != 1:
            batch = [rows[index] if index in members else NULL_ROW for index in range(max(members) + 1)]
            counts = [members[index].rows if index in members else 1 for index in range(len(batch))]
            positions = list(members)
        else:
            batch = [rows[index] for index in members]
            counts = [verdict.rows for verdict in members.values()]
            positions = list(range(len(batch)))
        return Layout(batch, counts, positions, max(self.batch_rows, sum(counts)))

    def _places(self, layout: Layout, wants: Sequence[bool]) -> Places:
        if not self._arena.states:
            return Places([], [], self.device)
        reads = [self._read_place(row) for row in layout.batch]
        reads += [NULL_PLACE] * (layout.total - layout.kept)
        writes = [SCRAP_PLACE if row.slot is None or row.null else self._arena.place(row.slot) for row in layout.batch]
        if not self._arena.grows:
            return Places(reads, writes, self.device)
        saved = {position for position, wanted in zip(layout.positions, wants, strict=True) if wanted}
        saves = [row in saved for row in range(len(layout.batch))]
        return Places(reads, writes, self.device, saves, [row.end for row in layout.batch])

    # --- forward's arguments

    def _arguments(self, layout: Layout, key: InputShapes, places: Places) -> tuple[list[Any], dict[str, Any]]:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for binding in self._bindings:
            value = self._argument(binding.source, layout, key, places)
            argument = binding.argument
            if value is None and not argument.required:
                continue
            if argument.position == len(positional):
                positional.append(value)
            else:
                named[argument.name] = value
        return positional, named

    def _argument(self, source: Source, layout: Layout, key: InputShapes, places: Places) -> Any:
        batch, total = layout.batch, layout.total
        filling = total - layout.kept
        if isinstance(source, StateSpec):
            value = self._states_by_input[source.input_name].gather(places)
            if self._batched:
                return value
            return Texts(value, value.shape[1:]) if isinstance(value, Texts) else value[0]
        if isinstance(source, ControlSpec):
            name, false = source.name, self._false[source.name]
            parts = [row.controls[name].raw if not row.null or name in row.controls else false for row in batch]
            parts += [false] * filling
            return self._column(source.datatype, parts, (total, 1) if self._batched else (1,))
        if isinstance(source, BatchInput):
            return self._batch_input(source, batch, key)
        shape = key[self._input_position[source.name]]
        if shape is None:
            return None
        name = source.name
        if name in self._ragged.names:
            parts, count = flat_parts(source, batch, request_shapes(name, batch))
            return self._column(source.datatype, parts, (count,))
        null = zeros(source.datatype, shape) if self._keeps_positions else b""
        parts = [null if row.null else row.inputs[name].raw for row in batch]
        if filling:
            parts.append(zeros(source.datatype, (filling, *shape)))
        wanted = shapes.for_model(source, shape)
        return self._column(source.datatype, parts, (total, *wanted) if self._batched else wanted)

    def _batch_input(self, source: BatchInput, batch: Sequence[Row], key: InputShapes) -> torch.Tensor:
        try:
            value = batch_input_value(source.kind, source.datatype, self._model_shapes(source.source, batch, key))
        except OverflowError as error:  # an input without elements may have any dimension
            raise BatchFailedError(
                f"model '{self._config.name}': the batch cannot be described, because a number of input "
                f"'{source.source}' is beyond {source.datatype}",
                Code.INVALID_ARG,
            ) from error
        return on_device(torch.from_numpy(value), self.device)

    def _model_shapes(self, name: str, batch: Sequence[Row], key: InputShapes) -> list[shapes.Shape]:
        """Each request's shape of the input that a batch tensor describes, as the model has it. Raises
        BatchFailedError.
        """
        if key[self._input_position[name]] is None:
            raise BatchFailedError(
                f"model '{self._config.name}': the batch cannot be described without input '{name}'", Code.INVALID_ARG
            )
        given = request_shapes(name, batch)
        spec = self._config.inputs_by_name[name]
        if spec.reshape is None:
            return given
        leading = 1 if self._batched else 0
        return [(*shape[:leading], *shapes.for_model(spec, shape[leading:])) for shape in given]

    def _column(self, datatype: str, parts: list[bytes], shape: shapes.Shape) -> Any:
        if datatype != "BYTES":
            made = tensor_of(parts, datatype, shape, self.device)
            # Torch's own memory is aligned, that of `bytes` need not be, and a kernel may choose its instructions by
            # that.
            return made.clone() if self._fixed_threads else made
        try:
            strings = [element.decode() for part in parts for element in bytes_elements(part)]
        except ValueError as error:
            raise BatchFailedError(
                f"model '{self._config.name}': a BYTES input must be UTF-8: {error}", Code.INVALID_ARG
            ) from error
        if len(strings) != element_count(shape):
            raise BatchFailedError(
                f"model '{self._config.name}': {len(strings)} BYTES elements do not fill {shape_text(shape)}",
                Code.INVALID_ARG,
            )
        return Texts(strings, shape)

    def _called(self, positional: list[Any], named: dict[str, Any]) -> Any:
        assert self._forward is not None, "the engine is closed"
        layers, self._layers = self._layers, None
        try:
            with self._switches.applied(), layers or nullcontext():
                returned = self._forward(*positional, **named)
            if layers is not None:
                layers.join_weights()
            if self.device.type == "cuda" and self._streams is None:
                # Of another runtime, whose memory may be used anew as soon as its values are forgotten.
                torch.cuda.current_stream(self.device).synchronize()
            return returned
        except Exception as error:  # the model's own code: whatever it raises is the row's error, not ours
            raise BatchFailedError(self._execute_failure(error)) from error

    def _execute_failure(self, error: Exception) -> str:
        return f"{self._failure}: {str(error).strip()[:ERROR_TEXT_MAX]} (model '{self._config.name}')"

    # --- its states

    def _state_values(self, returned: Any, layout: Layout) -> list[Any]:
        """Each state's new value, in the arena's order, with a batch dimension, without the rows that fill the batch
        up.
        """
        values: list[Any] = []
        for state in self._arena.states:
            name = state.spec.output_name
            value = self._outputs.value(returned, name)
            if isinstance(value, torch.Tensor):
                value = value.to(self.device).resolve_neg()
                value = value if self._batched else value.unsqueeze(0)
            elif not self._batched and isinstance(value, Texts):
                value = value.in_batch
            problem = state.problem(value, layout.total)
            if problem is not None:
                raise BatchFailedError(f"model '{self._config.name}' returned a wrong state '{name}': {problem}")
            values.append(value if layout.kept == layout.total else value[: layout.kept])
        return values

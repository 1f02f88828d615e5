"""One instance of a TorchScript module or an exported program.

Rows are concatenated along dim 0 and run as one batch; state is gathered from the arena before, scattered after. The
work per row is kept to picking its bytes out of one buffer per tensor: everything else happens once per batch.

Rows whose inputs (or variable states) differ in shape run in groups of equal shapes; ragged inputs may differ, and are
one flat tensor for the whole batch (`ragged`, `batch_tensors`). With the direct strategy, where a row's position is its
slot, the other groups' rows are null rows meanwhile, as they are in Triton.

When a batch fails, each of its rows runs alone, so that only the guilty one fails. State moves only when a row's
results are complete, so a retried row begins where it stood; a module that keeps state of its own in attributes
(rather than in declared states) must expect to see such rows twice.

With `fixed_shape` every call of the module has the same shape and its inputs begin at aligned addresses: batches are
filled up with null rows behind the others, or each row runs alone (`fixed_shape`, `executor.models.fixed_shape`). The
module is run as it stands: TorchScript would compile it for the shapes that it has seen, on a GPU to kernels that round
otherwise, and which those are depends on who was served before.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch.export.passes import move_to_device_pass

from executor.engine import shapes
from executor.engine.arena import Places, StateArena, text_shape
from executor.engine.base import BatchResult, LoadRequest, Row, RowError, RowResult, Timings
from executor.engine.batch_tensors import batch_input_value, check_batch_tensors, scattered_shape
from executor.engine.fixed_shape import alone_because, padded_rows
from executor.engine.null_rows import NULL_ROW, false_control, zeros
from executor.engine.ragged import RaggedInputs, flat_parts, request_shapes
from executor.engine.row_shapes import InputShapes, RowShapes, Verdict
from executor.engine.torch_binding import (
    Binding,
    Returned,
    Source,
    bind_arguments,
    bind_outputs,
    program_arguments,
    script_arguments,
)
from executor.engine.torch_recurrent import RecurrentLayers
from executor.engine.torch_signature import is_fixed, load_program, model_file, script_deprecation_ignored
from executor.engine.torch_threads import use_threads
from executor.engine.torch_types import DATATYPE, TORCH_TYPE, raw_of, tensor_of
from shared.errors import Code, LoadError
from shared.model_config.values import BatchInput, ControlSpec, Direct, FixedShape, ModelConfig, StateSpec, TensorSpec
from shared.statistics.tally import MemoryUse
from shared.tensors import Tensor, bytes_elements, element_count, pack_bytes

ERROR_TEXT_MAX = 4096
"""Characters of a model's own error text in a reply: TorchScript's can quote pages of source."""


Forward = Callable[..., Any]


class Layout(NamedTuple):
    """The rows of one call of the module.

    batch      requests' rows and null rows between them, in order
    counts     of each of `batch`, how many rows of the call it brings
    positions  in `batch`, of the rows whose results count
    total      rows of the call: those of `batch`, and null rows behind them that fill it up
    """

    batch: list[Row]
    counts: list[int]
    positions: list[int]
    total: int

    @property
    def kept(self) -> int:
        """Rows of the call without those that fill it up."""
        return sum(self.counts)


class Computed(NamedTuple):
    """All that a call of the module brings.

    columns        by output: each row's tensor
    states         each state's new value, in the arena's order
    state_columns  each state's new value as the rows' checkpoints; empty where no row wants one
    """

    columns: dict[str, list[Tensor]]
    states: list[Any]
    state_columns: list[list[Tensor]]


class BatchFailedError(Exception):
    """A batch has no results; each of its rows is to be tried alone."""

    def __init__(self, message: str, code: Code = Code.INTERNAL) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


class StateLostError(Exception):
    """A batch's states could not all be moved on."""


def load(request: LoadRequest) -> TorchEngine:
    """Loads the model onto its device. Raises LoadError with the reason."""
    config = request.config
    check_batch_tensors(config)
    device = _device(request)
    threads = _threads(config)
    fixed_threads = 0
    if config.fixed_shape is not FixedShape.OFF:
        fixed_threads = threads or 1
        _choose_deterministic_kernels()
    elif threads:
        torch.set_num_threads(threads)
    path = model_file(request.model_dir / request.version, config.default_model_filename)
    if path.suffix == ".pt2":
        program = load_program(path)
        _check_batch_dimension(config, program)
        if device.type != "cpu":
            program = move_to_device_pass(program, device)
        forward: Forward = cast("Forward", program.module())
        arguments = program_arguments(program)
    else:
        script = _load_script(path, device)
        forward, arguments = script, script_arguments(script)
    states = config.sequence_batching.states if config.sequence_batching else ()
    return TorchEngine(
        config,
        forward,
        bind_arguments(config, arguments),
        bind_outputs(config),
        StateArena(states, request.slots, request.model_dir, device, request.state_bytes_max),
        fixed_threads=fixed_threads,
    )


def _device(request: LoadRequest) -> torch.device:
    device = torch.device(request.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadError(
            f"model '{request.config.name}' asks for {request.device}, but torch sees "
            f"{torch.cuda.device_count()} GPUs here"
        )
    return device


def _threads(config: ModelConfig) -> int:
    """How many threads the configuration asks for; 0 when it does not say."""
    threads = config.parameters.get("torch_threads") or config.parameters.get("INTRA_OP_THREAD_COUNT") or "0"
    asked = "torch_threads" in config.parameters or "INTRA_OP_THREAD_COUNT" in config.parameters
    if not threads.isdecimal() or (asked and int(threads) < 1):
        raise LoadError(f"model '{config.name}': parameter torch_threads must be a positive number, not '{threads}'")
    return int(threads)


def _choose_deterministic_kernels() -> None:
    """Kernels whose results do not vary from run to run. The choice is the whole process's; a kernel without such a
    form warns, and the test at load decides."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # Every new tensor would be filled before it is written: on a GPU, forty kernels per batch of an LSTM.
    cast("Any", torch.utils.deterministic).fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def _load_script(path: object, device: torch.device) -> torch.jit.ScriptModule:
    try:
        with script_deprecation_ignored():
            module = cast("torch.jit.ScriptModule", torch.jit.load(str(path), map_location=device))
    except (RuntimeError, ValueError, OSError) as error:
        raise LoadError(f"failed to load model '{path}': {error}") from error
    module.eval()
    return module


def _check_batch_dimension(config: ModelConfig, program: torch.export.ExportedProgram) -> None:
    """An exported program runs only with the sizes it was exported for: say so at load, not at the first batch."""
    if config.max_batch_size <= 1:
        return
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for name in program.graph_signature.user_inputs:
        value = values.get(name)
        if isinstance(value, torch.Tensor) and value.dim() and is_fixed(value.shape[0]):
            raise LoadError(
                f"model '{config.name}': argument '{name}' was exported with a fixed batch of {value.shape[0]}, but "
                f"max_batch_size is {config.max_batch_size}; export it with a dynamic dimension 0 (torch.export.Dim)"
            )


class TorchEngine:
    """See `base.Engine`. Not thread-safe: one call at a time."""

    def __init__(
        self,
        config: ModelConfig,
        forward: Forward,
        bindings: tuple[Binding, ...],
        returned: tuple[Returned, ...],
        arena: StateArena,
        *,
        fixed_threads: int = 0,
    ) -> None:
        """fixed_threads: that compute one tensor, with `fixed_shape`; 0 without."""
        self._config = config
        self._forward: Forward | None = forward
        self._bindings = bindings
        self._returned = {entry.name: entry.position for entry in returned}
        self._arena = arena
        self._device = arena.device
        self._shapes = RowShapes(config)
        self._ragged = RaggedInputs(config.inputs)
        self._cut_by = {name: output.source for output in config.batch_outputs for name in output.names}
        self._input_specs = {spec.name: spec for spec in config.inputs}
        self._input_position = {spec.name: position for position, spec in enumerate(config.inputs)}
        self._batched = config.max_batch_size > 0
        batching = config.sequence_batching
        self._keeps_positions = batching is not None and isinstance(batching.strategy, Direct)
        self._false = {
            control.name: false_control(control, batched=self._batched).raw
            for control in (batching.controls if batching else ())
        }
        self._states_by_input = {state.spec.input_name: state for state in arena.states}
        self._fixed_threads = fixed_threads
        # Of a GPU's first batch.
        self._layers = RecurrentLayers() if self._device.type == "cuda" else None
        self.batch_rows = padded_rows(config.max_batch_size) if fixed_threads else 0
        self.alone_because = ""
        self.is_testable = True
        cut = fixed_threads if self._device.type == "cpu" else 1
        if fixed_threads and (because := alone_because(config, cut)):
            self.run_rows_alone(because)

    def run_rows_alone(self, because: str) -> None:
        """See `base.FixesShape`."""
        self.batch_rows, self.alone_because = 1, because

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        """See `base.Engine.run`."""
        if self._fixed_threads:
            use_threads(self._fixed_threads)
        results: list[RowResult | RowError | None] = [None] * len(rows)
        clock = _StepClock()
        for key, members in self._groups(rows, results).items():
            self._run_members(rows, members, key[0], want_state, results, clock)
        return BatchResult(results, clock.timings())

    def load_state(self, slot: int, states: Mapping[str, Tensor]) -> None:
        """See `base.Engine.load_state`. Raises ModelError when a state is missing or does not fit; then none moves."""
        self._arena.load(slot, states)

    def describe_state(self, slot: int) -> str:
        """See `base.Engine.describe_state`."""
        return self._arena.describe(slot)

    def drop_state(self, slot: int) -> None:
        """See `base.Engine.drop_state`."""
        self._arena.drop(slot)

    def memory_usage(self) -> Sequence[MemoryUse]:
        """See `base.MeasuresMemory`."""
        forward = self._forward
        tensors = [*forward.parameters(), *forward.buffers()] if isinstance(forward, torch.nn.Module) else []
        size = self._arena.byte_size + sum(tensor.nbytes for tensor in tensors)
        kind = "GPU" if self._device.type == "cuda" else "CPU"
        return (MemoryUse(kind, self._device.index or 0, size),) if size else ()

    def close(self) -> None:
        """See `base.Engine.close`."""
        self._forward = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # --- which rows run together

    def _groups(
        self, rows: Sequence[Row], results: list[RowResult | RowError | None]
    ) -> dict[tuple[InputShapes, object], dict[int, Verdict]]:
        """The rows that can share tensors, by their shapes: index in the batch -> verdict, in order."""
        groups: dict[tuple[InputShapes, object], dict[int, Verdict]] = {}
        for index, row in enumerate(rows):
            if row.null:
                continue
            verdict = self._shapes.judge(row)
            if isinstance(verdict, RowError):
                results[index] = verdict
                continue
            key = self._ragged.group(verdict.key)
            groups.setdefault((key, self._apart(index, row)), {})[index] = verdict
        return groups

    def _apart(self, index: int, row: Row) -> object:
        """What else must be equal for rows to share a batch: nothing can where the model has no batch dimension, or
        where rows run alone."""
        if not self._batched or self.batch_rows == 1:
            return index
        return self._state_shapes(row) if self._arena.varies else None

    def _state_shapes(self, row: Row) -> tuple[shapes.Shape | None, ...]:
        place = self._read_place(row)
        return tuple(state.shape(place) for state in self._arena.states)

    def _read_place(self, row: Row) -> int:
        if row.null:
            return self._arena.null_place
        if row.start:
            return self._arena.initial_place
        assert row.slot is not None, "a row that goes on from implicit state has a slot"
        return row.slot

    def _run_members(
        self,
        rows: Sequence[Row],
        members: dict[int, Verdict],
        key: InputShapes,
        want_state: Sequence[bool],
        results: list[RowResult | RowError | None],
        clock: _StepClock,
    ) -> None:
        try:
            made = self._attempt(rows, members, key, want_state, clock)
        except StateLostError as failure:
            made = dict.fromkeys(members, RowError(Code.INTERNAL, str(failure), lost=True))
        except BatchFailedError as failure:
            if len(members) > 1:
                for index, verdict in members.items():
                    self._run_members(rows, {index: verdict}, key, want_state, results, clock)
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
        clock: _StepClock,
    ) -> Mapping[int, RowResult | RowError]:
        """Runs one group and moves its states on. Raises BatchFailedError, with no state moved, when it has no complete
        result; StateLostError when only a part of them moved."""
        clock.start()
        layout = self._layout(rows, members)
        wants = [want_state[index] for index in members]
        try:
            places = self._places(layout)
            columns, states, state_columns = self._computed(layout, key, places, clock, with_states=any(wants))
        except RuntimeError as error:  # torch's own: no memory for a tensor, say
            raise BatchFailedError(self._execute_failure(error)) from error
        try:
            for state, value in zip(self._arena.states, states, strict=True):
                state.scatter(places, value)
        except RuntimeError as error:
            raise StateLostError(self._execute_failure(error)) from error
        made = {
            index: RowResult(
                self._row_outputs(rows[index], columns, position),
                {column[position].name: column[position] for column in state_columns} if wanted else {},
            )
            for index, position, wanted in zip(members, layout.positions, wants, strict=True)
        }
        clock.output_done()
        return made

    def _computed(
        self, layout: Layout, key: InputShapes, places: Places, clock: _StepClock, *, with_states: bool
    ) -> Computed:
        values = self._arguments(layout, key, places)
        clock.input_done()
        returned = self._called(*values)
        clock.infer_done()
        columns = self._output_columns(returned, layout)
        states = self._state_values(returned, layout)
        return Computed(columns, states, self._state_columns(states, layout.kept) if with_states else [])

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

    def _places(self, layout: Layout) -> Places:
        if not self._arena.states:
            return Places([], [], self._device)
        scrap = self._arena.scrap_place
        reads = [self._read_place(row) for row in layout.batch]
        reads += [self._arena.null_place] * (layout.total - layout.kept)
        writes = [scrap if row.slot is None or row.null else row.slot for row in layout.batch]
        return Places(reads, writes, self._device)

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

    def _argument(
        self,
        source: Source,
        layout: Layout,
        key: InputShapes,
        places: Places,
    ) -> Any:
        batch, total = layout.batch, layout.total
        filling = total - layout.kept
        if isinstance(source, StateSpec):
            value = self._states_by_input[source.input_name].gather(places)
            return value if self._batched or isinstance(value, list) else value[0]
        if isinstance(source, ControlSpec):
            name, false = source.name, self._false[source.name]
            parts = [row.controls[name].raw if not row.null or name in row.controls else false for row in batch]
            parts += [false] * filling
            return self._column(source.datatype, parts, (total, 1) if self._batched else (1,))
        if isinstance(source, BatchInput):
            value = batch_input_value(source.kind, source.datatype, self._model_shapes(source.source, batch, key))
            return torch.from_numpy(value).to(self._device)
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

    def _model_shapes(self, name: str, batch: Sequence[Row], key: InputShapes) -> list[shapes.Shape]:
        """Each request's shape of the source of a batch tensor, as the model has it. Raises BatchFailedError."""
        if key[self._input_position[name]] is None:
            raise BatchFailedError(
                f"model '{self._config.name}': the batch cannot be described without input '{name}'", Code.INVALID_ARG
            )
        given = request_shapes(name, batch)
        spec = self._input_specs[name]
        if spec.reshape is None:
            return given
        leading = 1 if self._batched else 0
        return [(*shape[:leading], *shapes.for_model(spec, shape[leading:])) for shape in given]

    def _column(self, datatype: str, parts: list[bytes], shape: shapes.Shape) -> Any:
        if datatype != "BYTES":
            made = tensor_of(parts, datatype, shape, self._device)
            # Torch's own memory is aligned, that of bytes need not be, and a kernel may go by that.
            return made.clone() if self._fixed_threads else made
        try:
            strings = [element.decode() for part in parts for element in bytes_elements(part)]
        except ValueError as error:
            raise BatchFailedError(
                f"model '{self._config.name}': a BYTES input of a TorchScript model must be UTF-8: {error}",
                Code.INVALID_ARG,
            ) from error
        if len(strings) != element_count(shape):
            raise BatchFailedError(
                f"model '{self._config.name}': {len(strings)} BYTES elements do not fill {shapes.text(shape)}",
                Code.INVALID_ARG,
            )
        return strings

    def _called(self, positional: list[Any], named: dict[str, Any]) -> Any:
        assert self._forward is not None, "the engine is closed"
        layers, self._layers = self._layers, None
        try:
            with cast("Any", torch.jit).optimized_execution(not self._fixed_threads), layers or nullcontext():
                returned = self._forward(*positional, **named)
            if layers is not None:
                layers.join_weights()
            if self._device.type == "cuda":
                # Kernels that fail say so to whoever waits for them; and the time is the model's.
                torch.cuda.current_stream(self._device).synchronize()
            return returned
        except Exception as error:  # the model's own code: whatever it raises is the row's error, not ours
            raise BatchFailedError(self._execute_failure(error)) from error

    def _execute_failure(self, error: Exception) -> str:
        return f"PyTorch execute failure: {str(error).strip()[:ERROR_TEXT_MAX]} (model '{self._config.name}')"

    # --- what forward returned

    def _value(self, returned: Any, name: str) -> Any:
        if isinstance(returned, dict):
            by_key = cast("dict[str, Any]", returned)
            if name not in by_key:
                raise self._wrong(name, "a value under that key", f"keys {', '.join(map(str, by_key))}")
            return by_key[name]
        values = _several(returned)
        position = self._returned[name]
        if position >= len(values):
            raise self._wrong(name, f"a value at position {position}", f"{len(values)} values")
        return values[position]

    def _wrong(self, name: str, expected: str, got: str) -> BatchFailedError:
        return BatchFailedError(
            f"model '{self._config.name}' returned a wrong output '{name}': expected {expected}, got {got}"
        )

    def _output_columns(self, returned: Any, layout: Layout) -> dict[str, list[Tensor]]:
        """By output, in the order of the configuration: each row's tensor. Only outputs that some row asked for."""
        batch, counts, positions, total = layout
        asked = [batch[position] for position in positions]
        every = not all(row.outputs for row in asked)
        names = set[str]() if every else {name for row in asked for name in row.outputs}
        columns: dict[str, list[Tensor]] = {}
        for spec in self._config.outputs:
            if not every and spec.name not in names:
                continue
            value = self._value(returned, spec.name)
            if spec.name in self._cut_by:
                columns[spec.name] = self._scattered(spec, value, batch)
            elif spec.datatype == "BYTES":
                columns[spec.name] = self._text_column(spec, value, counts, total)
            else:
                raw, shape = self._checked(spec, value, total)
                columns[spec.name] = self._sliced(spec, raw, shape, counts, total)
        return columns

    def _checked(self, spec: TensorSpec, value: Any, total: int) -> tuple[memoryview, shapes.Shape]:
        """The output's bytes and its row shape as the client sees it."""
        dims = shapes.declared_by_model(spec)
        expected = f"{spec.datatype} {shapes.text((total, *dims) if self._batched else dims)}"
        if not isinstance(value, torch.Tensor):
            raise self._wrong(spec.name, expected, type(value).__name__)
        shape = tuple(value.shape)
        row_shape = shape[1:] if self._batched else shape
        leading = not self._batched or (len(shape) > 0 and shape[0] == total)
        if value.dtype is not TORCH_TYPE[spec.datatype] or not leading or not shapes.fits(row_shape, dims):
            raise self._wrong(spec.name, expected, f"{DATATYPE.get(value.dtype, value.dtype)} {shapes.text(shape)}")
        return raw_of(value), shapes.for_client(spec, row_shape)

    def _sliced(
        self, spec: TensorSpec, raw: memoryview, shape: shapes.Shape, counts: Sequence[int], total: int
    ) -> list[Tensor]:
        name, datatype = spec.name, spec.datatype
        if not self._batched:
            return [Tensor(name, datatype, shape, bytes(raw))]
        size = len(raw) // total
        if sum(counts) == len(counts):
            places, row_shape = range(len(counts)), (1, *shape)
            return [Tensor(name, datatype, row_shape, bytes(raw[at * size : (at + 1) * size])) for at in places]
        tensors: list[Tensor] = []
        at = 0
        for count in counts:
            tensors.append(Tensor(name, datatype, (count, *shape), bytes(raw[at * size : (at + count) * size])))
            at += count
        return tensors

    def _scattered(self, spec: TensorSpec, value: Any, batch: Sequence[Row]) -> list[Tensor]:
        """Each row's part of an output that comes for the whole batch; the parts lie behind each other."""
        source = self._cut_by[spec.name]
        if any(source not in row.inputs for row in batch if not row.null):
            raise BatchFailedError(
                f"model '{self._config.name}': output '{spec.name}' cannot be cut without input '{source}'",
                Code.INVALID_ARG,
            )
        cut = [scattered_shape(spec.dims, shape, batched=self._batched) for shape in request_shapes(source, batch)]
        counts = [element_count(shape) for shape in cut]
        raws = self._cut_strings(spec, value, counts) if spec.datatype == "BYTES" else self._cut(spec, value, counts)
        return [Tensor(spec.name, spec.datatype, shape, raw) for shape, raw in zip(cut, raws, strict=True)]

    def _cut(self, spec: TensorSpec, value: Any, counts: Sequence[int]) -> list[bytes]:
        expected = f"{spec.datatype} with {sum(counts)} elements"
        if not isinstance(value, torch.Tensor):
            raise self._wrong(spec.name, expected, type(value).__name__)
        if value.dtype is not TORCH_TYPE[spec.datatype] or value.numel() != sum(counts):
            got = f"{DATATYPE.get(value.dtype, value.dtype)} {shapes.text(value.shape)}"
            raise self._wrong(spec.name, expected, got)
        raw, size = raw_of(value), value.element_size()
        ends = list(itertools.accumulate(counts))
        return [bytes(raw[(end - count) * size : end * size]) for count, end in zip(counts, ends, strict=True)]

    def _cut_strings(self, spec: TensorSpec, value: Any, counts: Sequence[int]) -> list[bytes]:
        if not isinstance(value, list):
            raise self._wrong(spec.name, "List[str]", type(value).__name__)
        strings = cast("list[str]", value)
        if len(strings) != sum(counts):
            raise self._wrong(spec.name, f"{sum(counts)} strings", f"{len(strings)} strings")
        ends = list(itertools.accumulate(counts))
        return [pack_bytes(strings[end - count : end]) for count, end in zip(counts, ends, strict=True)]

    def _text_column(self, spec: TensorSpec, value: Any, counts: Sequence[int], total: int) -> list[Tensor]:
        dims = shapes.declared_by_model(spec)
        if not isinstance(value, list):
            raise self._wrong(spec.name, "List[str]", type(value).__name__)
        strings = cast("list[str]", value)
        if len(strings) % total:
            raise self._wrong(spec.name, f"the same number for each of {total} rows", f"{len(strings)} strings")
        per_row = len(strings) // total
        try:
            shape = shapes.for_client(spec, text_shape(dims, per_row))
        except ValueError as error:
            raise self._wrong(spec.name, shapes.text(dims), str(error)) from error
        tensors: list[Tensor] = []
        at = 0
        for count in counts:
            raw = pack_bytes(strings[at * per_row : (at + count) * per_row])
            tensors.append(Tensor(spec.name, "BYTES", (count, *shape) if self._batched else shape, raw))
            at += count
        return tensors

    def _row_outputs(self, row: Row, columns: Mapping[str, list[Tensor]], position: int) -> list[Tensor]:
        if not row.outputs:
            return [column[position] for column in columns.values()]
        return [column[position] for name, column in columns.items() if name in row.outputs]

    def _state_values(self, returned: Any, layout: Layout) -> list[Any]:
        """Each state's new value, in the arena's order, with a batch dimension; without the rows that fill it up."""
        values: list[Any] = []
        for state in self._arena.states:
            name = state.spec.output_name
            value = self._value(returned, name)
            if not self._batched and isinstance(value, torch.Tensor):
                value = value.unsqueeze(0)
            problem = state.problem(value, layout.total)
            if problem is not None:
                raise BatchFailedError(f"model '{self._config.name}' returned a wrong state '{name}': {problem}")
            values.append(value if layout.kept == layout.total else value[: layout.kept])
        return values

    def _state_columns(self, values: Sequence[Any], total: int) -> list[list[Tensor]]:
        return [state.tensors(value, total) for state, value in zip(self._arena.states, values, strict=True)]


class _StepClock:
    """Adds up where the groups of a batch spend their time."""

    def __init__(self) -> None:
        self._at = 0
        self._input = self._infer = self._output = 0

    def start(self) -> None:
        self._at = time.perf_counter_ns()

    def input_done(self) -> None:
        self._input += self._lap()

    def infer_done(self) -> None:
        self._infer += self._lap()

    def output_done(self) -> None:
        self._output += self._lap()

    def _lap(self) -> int:
        before, self._at = self._at, time.perf_counter_ns()
        return self._at - before

    def timings(self) -> Timings:
        return Timings(self._input, self._infer, self._output)


def _several(returned: Any) -> Sequence[Any]:
    """What forward returned as a sequence of values; one tensor, or one list of strings, is one value."""
    if isinstance(returned, tuple):
        return cast("tuple[Any, ...]", returned)
    values = cast("list[Any]", returned) if isinstance(returned, list) else []
    if values and not isinstance(values[0], str):
        return values
    return [returned]

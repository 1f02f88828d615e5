"""Compares a request's inputs and outputs with its model's configuration, whatever kind of model it is. Pure.

In the order in which Triton checks them, with its texts (triton-spec 4). Tensor bytes are counted, never decoded: for
BYTES tensors only the length fields are walked.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import msgspec

from gateway.requests.infer_call import InferCall, check_named_once, error_about
from shared.contract.errors import RequestError
from shared.contract.limits import VALUE_BYTES_MAX
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.contract.tensors import ELEMENT_BYTES, Tensor, element_count, shape_text

STRINGS_BYTES_MAX = 1 << 18
"""Bytes of a BYTES tensor that are read in one go: at worst elements without content, 4 bytes each, some 10 ms."""
BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


Form = tuple[tuple[str, ...], list[tuple[str, str, tuple[int, ...], int]]]
"""Names of the outputs; name, datatype, shape and bytes of each input. See `form_of`."""
KNOWN_FORMS = 4096
"""Models whose last form is kept: where models come and go for weeks, the first are forgotten."""


class KnownForms:
    """The form of the last request to each model that passed. A request of the same form passes by one comparison."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[ModelConfig, Form]] = {}

    def check(self, call: InferCall, config: ModelConfig) -> None:
        """Compares the form with the model's configuration. Raises as `check_form` does."""
        form = form_of(call)
        known = self._last.get(config.name)
        if known is not None and known[1] == form and known[0] is config:
            return
        check_form(call, config)
        # The elements of BYTES are checked too, and are no part of the form.
        if not any(tensor.datatype == "BYTES" for tensor in call.inputs):
            if len(self._last) >= KNOWN_FORMS and known is None:
                del self._last[next(iter(self._last))]
            self._last[config.name] = config, form


def form_of(call: InferCall) -> Form:
    """All that `check_form` looks at of a request without BYTES, but for the id that its errors name."""
    return call.outputs, [(tensor.name, tensor.datatype, tensor.shape, len(tensor.raw)) for tensor in call.inputs]


def check_form(call: InferCall, config: ModelConfig) -> None:
    """The outputs that a request asks for, and its inputs, are those of the configuration. Raises RequestError."""
    check_outputs(call, config)
    check_inputs(call, config)


def check_outputs(call: InferCall, config: ModelConfig) -> None:
    """Every output asked for is declared."""
    for name in call.outputs:
        if name not in config.outputs_by_name:
            raise RequestError(f"unexpected inference output '{name}' for model '{config.name}'")


def check_inputs(call: InferCall, config: ModelConfig) -> None:
    """Number, names, batch size, datatype, shape and byte count of every input."""
    specs = config.inputs_by_name
    given = {tensor.name: tensor for tensor in call.inputs}
    if len(given) < len(call.inputs):
        check_named_once([tensor.name for tensor in call.inputs], call.request_id)
    if given.keys() != specs.keys():
        _check_names(call, config, given)
    if config.max_batch_size > 0:
        _check_batch(call, config)
    for tensor in call.inputs:
        _check_tensor(call, config, specs[tensor.name], tensor)


def _check_names(call: InferCall, config: ModelConfig, given: Mapping[str, Tensor]) -> None:
    specs = config.inputs_by_name
    reserved = reserved_names(config) - specs.keys()
    for name in given:
        # Triton would complain of the number of inputs first, which says nothing of what is wrong.
        if name in reserved:
            raise RequestError(f"unexpected inference input '{name}' for model '{config.name}'")
    required = [spec.name for spec in config.inputs if not spec.optional]
    if not len(required) <= len(given) <= len(specs):
        raise _count_error(call, config, given, required)
    for name in given:
        if name not in specs:
            raise RequestError(f"unexpected inference input '{name}' for model '{config.name}'")
    # Triton counts and does not look: there an optional input passes for a required one that is missing.
    if not given.keys() >= set(required):
        raise _count_error(call, config, given, required)


def reserved_names(config: ModelConfig) -> frozenset[str]:
    """Tensors that the batcher makes: controls and implicit states. A client must not send them."""
    batching = config.sequence_batching
    if batching is None:
        return frozenset()
    return frozenset([c.name for c in batching.controls] + [s.input_name for s in batching.states])


def _count_error(
    call: InferCall, config: ModelConfig, given: Mapping[str, Tensor], required: Sequence[str]
) -> RequestError:
    expected = (
        f"expected {len(config.inputs)} inputs"
        if len(required) == len(config.inputs)
        else f"expected number of inputs between {len(required)} and {len(config.inputs)}"
    )
    missing = _quoted([name for name in required if name not in given])
    return error_about(
        call,
        f"{expected} but got {len(given)} inputs for model '{config.name}'. Got input(s) {_quoted(sorted(given))}, "
        f"but missing required input(s) {missing}. Please provide all required input(s).",
    )


def _quoted(names: Sequence[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _check_batch(call: InferCall, config: ModelConfig) -> None:
    # Triton's backends refuse it so: they read the batch size of the first input, which may be a sequence's control.
    if not call.inputs and config.inputs and config.sequence_batching is None and not config.ensemble:
        names = _quoted([spec.name for spec in config.inputs])
        raise error_about(
            call, f"a request to model '{config.name}' needs one of its inputs {names}, which says its batch size"
        )
    for tensor in call.inputs:
        if not tensor.shape:
            raise error_about(
                call, f"input '{tensor.name}' has no shape but model requires batch dimension for '{config.name}'"
            )
        if tensor.shape[0] != call.inputs[0].shape[0]:
            raise error_about(call, f"input '{tensor.name}' batch size does not match other inputs for '{config.name}'")
    if call.inputs and call.inputs[0].shape[0] > config.max_batch_size:
        raise error_about(call, f"inference request batch-size must be <= {config.max_batch_size} for '{config.name}'")


def _check_tensor(call: InferCall, config: ModelConfig, spec: TensorSpec, tensor: Tensor) -> None:
    if tensor.datatype != spec.datatype:
        raise error_about(
            call,
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model '{config.name}' "
            f"expects '{spec.datatype}'",
        )
    batched = config.max_batch_size > 0
    expected = (-1, *spec.dims) if batched else spec.dims
    # A batch of no rows would be nothing to answer; Triton lets it through to the backend, where it fails.
    if (batched and tensor.shape[0] == 0) or not _fits(call, config, expected, tensor):
        raise error_about(
            call,
            f"unexpected shape for input '{tensor.name}' for model '{config.name}'. Expected "
            f"{shape_text(expected)}, got {shape_text(tensor.shape)}. " + (BATCH_NOTE if batched else ""),
        )
    _check_bytes(call, config, tensor)


def _fits(call: InferCall, config: ModelConfig, expected: tuple[int, ...], tensor: Tensor) -> bool:
    """Whether a shape has the expected dimensions, of which -1 stands for any.

    raises  RequestError for a dimension that the client has left open, over gRPC
    """
    if len(tensor.shape) != len(expected):
        return False
    for want, got in zip(expected, tensor.shape, strict=True):
        if got == -1 or (got < 0 and want == -1):
            raise error_about(
                call,
                f"All input dimensions should be specified for input '{tensor.name}' for model '{config.name}', got "
                f"{shape_text(tensor.shape)}",
            )
        if want not in (-1, got):
            return False
    return True


def _check_bytes(call: InferCall, config: ModelConfig, tensor: Tensor) -> None:
    elements = element_count(tensor.shape)
    if not elements and element_count([size for size in tensor.shape if size]) > VALUE_BYTES_MAX:
        raise error_about(
            call,
            f"input '{tensor.name}' for model '{config.name}' is empty, and its other dimensions are too large: "
            f"{shape_text(tensor.shape)}",
        )
    size = ELEMENT_BYTES.get(tensor.datatype)
    if size is None:
        if call.string_problems is None:
            problem = string_problem(tensor.raw, elements, tensor.name, config.name)
        else:
            problem = call.string_problems[tensor.name]
        if problem:
            raise error_about(call, problem)
    elif len(tensor.raw) != elements * size:
        raise error_about(
            call,
            f"input byte size mismatch for input '{tensor.name}' for model '{config.name}'. "
            f"Expected {elements * size}, got {len(tensor.raw)}",
        )


def has_many_strings(call: InferCall) -> bool:
    """Whether walking the BYTES inputs takes too long for the event loop. Then the caller walks them in a thread."""
    return any(tensor.datatype == "BYTES" and len(tensor.raw) > STRINGS_BYTES_MAX for tensor in call.inputs)


def with_strings_read(call: InferCall) -> InferCall:
    """The call with `string_problems` filled in: for each BYTES input what is wrong with it. For a thread."""
    problems = {
        tensor.name: string_problem(tensor.raw, element_count(tensor.shape), tensor.name, call.model)
        for tensor in call.inputs
        if tensor.datatype == "BYTES"
    }
    return msgspec.structs.replace(call, string_problems=problems)


def string_problem(raw: bytes, expected: int, name: str, model: str) -> str:
    """What is wrong with a BYTES tensor's bytes, "" when nothing is. No element is copied."""
    where = f"for inference input '{name}' for model '{model}'"
    position, end, count = 0, len(raw), 0
    unpack = struct.Struct("<I").unpack_from
    while position < end:
        if position + 4 > end:
            return (
                f"incomplete string length indicator {where}, expecting 4 bytes but only {end - position} bytes "
                "available. Please make sure the string length indicator is in one buffer."
            )
        if count == expected:
            # As Triton does: the element beyond the last one is an error already.
            return f"unexpected number of string elements {count + 1} {where}, expecting {expected}"
        (length,) = unpack(raw, position)
        position += 4
        if position + length > end:
            return (
                f"incomplete string data {where}, expecting string of length {length} but only {end - position} bytes "
                "available"
            )
        position += length
        count += 1
    if count != expected:
        return f"expected {expected} string elements {where}, got {count}"
    return ""

"""Whether a model is what its configuration says, in Triton's words; and what each call of it is given.

Source: Triton onnxruntime backend, onnxruntime.cc (ModelInstanceState, ValidateInputs, ValidateOutputs); Triton
backend, backend_common.cc (CompareDimsSupported).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from executor.engine import shapes
from executor.engine.batch_tensors import check_batch_tensors
from executor.engine.pytorch.binding import Source, argument_sources
from executor.engine.sessions.signature import SessionSignature, SessionTensor
from shared.contract.errors import LoadError
from shared.contract.model_config import BatchInput, ControlSpec, ModelConfig, StateSpec, TensorSpec
from shared.contract.tensors import config_type, shape_text


class SessionCall(msgspec.Struct, frozen=True):
    """What each call of a session is given, and asked for.

    outputs: names of the outputs and next states that the configuration wants
    """

    signature: SessionSignature
    outputs: tuple[str, ...]


def checked_call(config: ModelConfig, signature: SessionSignature) -> SessionCall:
    """The call of a model that is what its configuration says. Raises LoadError if it is not."""
    check_batch_tensors(config)
    _check_inputs(config, signature)
    _check_outputs(config, signature)
    wanted = dict.fromkeys([spec.name for spec in config.outputs] + [state.output_name for state in config.states])
    return SessionCall(signature, tuple(wanted))


def _check_inputs(config: ModelConfig, model: SessionSignature) -> None:
    """Every input of the model is a tensor of the configuration, and the reverse. Raises LoadError."""
    sources = argument_sources(config)
    expected = [name for name, source in sources if not (isinstance(source, TensorSpec) and source.optional)]
    for name, source in sources:
        if isinstance(source, ControlSpec) and name not in model.inputs:
            raise LoadError(f"configuration specified sequence control '{name}', but model does not provide that input")
    if len(expected) != len(model.inputs):
        raise LoadError(
            f"unable to load model '{config.name}', configuration expects {len(expected)} inputs, model provides "
            f"{len(model.inputs)}"
        )
    inputs = {**model.inputs, **model.optional}
    for name, source in sources:
        if name not in inputs:
            raise LoadError(f"unexpected inference input '{name}', allowed inputs are: {', '.join(sorted(inputs))}")
        if isinstance(source, TensorSpec) and source.optional and config.max_batch_size:
            raise LoadError(
                f"unable to load model '{config.name}', optional input '{name}' is not supported for models that "
                "support batching"
            )
        _check_type(config, "input", name, source.datatype, inputs[name])
        _check_input_dims(config, name, source, inputs[name])


def _check_outputs(config: ModelConfig, model: SessionSignature) -> None:
    """Every output and every next state of the configuration is an output of the model. Raises LoadError."""
    wanted: list[tuple[str, str, Sequence[int]]] = [
        (spec.name, spec.datatype, shapes.declared_by_model(spec)) for spec in config.outputs
    ]
    wanted += [(state.output_name, state.datatype, state.dims) for state in config.states]
    cut = {name for output in config.batch_outputs for name in output.names}
    for name, datatype, dims in wanted:
        if name not in model.outputs:
            allowed = ", ".join(sorted(model.outputs))
            raise LoadError(f"unexpected inference output '{name}', allowed outputs are: {allowed}")
        _check_type(config, "output", name, datatype, model.outputs[name])
        if name not in cut:
            _check_dims(config, name, model.outputs[name].dims, dims)


def _check_type(config: ModelConfig, kind: str, name: str, datatype: str, tensor: SessionTensor) -> None:
    if datatype != tensor.datatype:
        raise LoadError(
            f"unable to load model '{config.name}', configuration expects datatype {config_type(datatype)} for {kind} "
            f"'{name}', model provides {config_type(tensor.datatype)}"
        )


def _check_input_dims(config: ModelConfig, name: str, source: Source, tensor: SessionTensor) -> None:
    if tensor.dims is None:
        return
    match source:
        case TensorSpec(allow_ragged_batch=True):
            if tensor.dims != (-1,):
                raise LoadError(
                    f"unable to load model '{config.name}', configuration expects model provides input with shape [-1] "
                    f" for ragged input '{name}', model provides {shape_text(tensor.dims)}"
                )
        case TensorSpec():
            _check_dims(config, name, tensor.dims, shapes.declared_by_model(source))
        case StateSpec():
            _check_dims(config, name, tensor.dims, source.dims)
        case ControlSpec():
            dims = tensor.dims[1:] if config.max_batch_size else tensor.dims
            if dims != (1,):
                raise LoadError(
                    f"unable to load model '{config.name}', sequence control '{name}' in model has dims "
                    f"{shape_text(dims)} but dims [1] is expected"
                )
        case BatchInput():
            pass


def _check_dims(config: ModelConfig, name: str, model_dims: Sequence[int] | None, dims: Sequence[int]) -> None:
    """The model's shape of a tensor agrees with the configured one, if the model has any. Raises LoadError."""
    if model_dims is None:
        return
    where = f"model '{config.name}', tensor '{name}'"
    if not config.max_batch_size and not model_dims:
        if set(dims) - {1}:
            raise LoadError(
                f"unable to load model '{config.name}', scalar tensor '{name}', should only provide 1 in the model "
                f"configuration when the model doesn't support batching. Model configuration provided: "
                f"{shape_text(dims)}."
            )
        return
    if config.max_batch_size and (not model_dims or model_dims[0] != -1):
        raise LoadError(
            f"{where}: for the model to support batching the shape should have at least 1 dimension and the first "
            f"dimension must be -1; but shape expected by the model is {shape_text(model_dims)}"
        )
    whole = (-1, *dims) if config.max_batch_size else tuple(dims)
    if len(whole) != len(model_dims) or any(
        of_model not in (-1, given) for of_model, given in zip(model_dims, whole, strict=True)
    ):
        said = (
            f"(an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
            f"complete shape {shape_text(whole)})"
            if config.max_batch_size
            else f"(shape {shape_text(whole)})"
        )
        raise LoadError(
            f"{where}: the model expects {len(model_dims)} dimensions (shape {shape_text(model_dims)}) but the model "
            f"configuration specifies {len(whole)} dimensions {said}"
        )

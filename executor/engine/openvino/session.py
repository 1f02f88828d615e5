"""Opens a model with OpenVINO: its tensors, and the properties that a configuration asks for.

Source: Triton openvino backend, openvino.cc (ModelState, ParseParameter, ValidateInputs); its README, "Parameters".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from executor.engine.sessions.checks import SessionCall
from executor.engine.sessions.forward import Run
from executor.engine.sessions.signature import SessionSignature, SessionTensor, parameter_of, used_names
from shared.contract.errors import LoadError
from shared.contract.tensors import NUMPY_TYPE

log = logging.getLogger(__name__)

ov: Any = openvino  # its types are those of generated bindings

WIRE_TYPE = {f"{dtype.kind}{8 * dtype.itemsize}": name for name, dtype in NUMPY_TYPE.items()} | {
    "boolean": "BOOL",
    "bf16": "BF16",
    "string": "BYTES",
}
"""By OpenVINO's names: u8 is UINT8, f32 is FP32."""
INT32_END = 1 << 31
_MOVES_TEXTS = frozenset(
    ("Concat", "Gather", "Reshape", "Result", "ShapeOf", "Squeeze", "StringTensorUnpack", "Transpose", "Unsqueeze")
)
"""Operations of OpenVINO's own that take strings as what they are. By others, a slice or an identity say, the bytes of
a string's object are copied: two then own one text, which is freed twice.
"""
_NUMBER = "a non-negative number"
_PROPERTIES: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "INFERENCE_NUM_THREADS": (_NUMBER, str.isdecimal),
    "COMPILATION_NUM_THREADS": (_NUMBER, str.isdecimal),
    "NUM_STREAMS": (f"{_NUMBER} or AUTO/NUMA", lambda text: text.isdecimal() or text in ("AUTO", "NUMA")),
    "PERFORMANCE_HINT": ("either LATENCY or THROUGHPUT", lambda text: text in ("LATENCY", "THROUGHPUT")),
}
"""Triton's parameter, which OpenVINO's property is called too: what its text may be, and the check of that."""


def open_model(path: Path, config: Mapping[str, Any]) -> Any:
    """Reads a model, with the names and the shapes that a configuration wants.

    config  Triton's JSON of the configuration, decoded
    raises  LoadError
    """
    core = _core(config)
    try:
        model = core.read_model(str(path))
    except RuntimeError as error:
        raise LoadError(f"failed to load model '{path}': openvino error: {error}") from error
    _reshape(model, config)
    return model


def options_of(config: Mapping[str, Any], *, fixed_threads: int) -> dict[str, str]:
    """The properties with which a model is compiled.

    fixed_threads  with `fixed_shape`, threads that compute one operator; 0 without
    raises         LoadError for a parameter that means nothing
    """
    # Without it OpenVINO computes an FP32 model in bfloat16 where the processor can.
    options = {"EXECUTION_MODE_HINT": "ACCURACY"}
    for name, (wanted, fits) in _PROPERTIES.items():
        text = parameter_of(config, name).upper()
        if text and not fits(text):
            raise LoadError(f"expected the parameter '{name}' to be {wanted}, got {text}")
        if text:
            options[name] = text
    if _is_yes(config, "HINT_BF16"):
        del options["EXECUTION_MODE_HINT"]
        options["INFERENCE_PRECISION_HINT"] = "bf16"
    if fixed_threads:
        options |= {"INFERENCE_NUM_THREADS": str(fixed_threads), "NUM_STREAMS": "1"}
    return options


def signature_of(model: Any, config: Mapping[str, Any]) -> SessionSignature:
    """The model's tensors, under those of their names that the configuration uses.
    Raises LoadError for one that no request can carry.
    """
    used = used_names(config)
    inputs, outputs = ([_tensor(port, used) for port in ports] for ports in (model.inputs, model.outputs))
    return SessionSignature({tensor.name: tensor for tensor in inputs}, {tensor.name: tensor for tensor in outputs})


def compiled(model: Any, call: SessionCall, options: Mapping[str, str], name: str) -> Run:
    """The call of a model on the CPU. Raises LoadError if OpenVINO cannot compile the model."""
    _refuse_copied_texts(model, name)
    try:
        request = ov.Core().compile_model(model, "CPU", dict(options)).create_infer_request()
    except RuntimeError as error:
        raise LoadError(f"unable to load model '{name}': openvino error: {error}") from error
    outputs = [call.signature.outputs[name] for name in call.outputs]
    # An integer that goes in is looked at (`_own`); a sum of integers is not.
    halved = [tensor.name for tensor in call.signature.inputs.values() if tensor.datatype == "FP64"]
    if halved := halved + [tensor.name for tensor in outputs if tensor.datatype in ("FP64", "INT64", "UINT64")]:
        log.warning("model '%s': OpenVINO computes 64 bits in 32: %s", name, ", ".join(halved))
    datatypes = {name: tensor.datatype for name, tensor in call.signature.inputs.items()}
    # By their places: two outputs that are one value, a cell's output and its state say, have one name when compiled.
    places = {_name(port, set(call.signature.outputs)): place for place, port in enumerate(model.outputs)}
    taken = [(places[tensor.name], tensor.datatype) for tensor in outputs]

    def run(arrays: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        given = {name: _own(array, datatypes[name]) for name, array in arrays.items()}
        # `infer` would make arrays of the outputs, also of strings.
        request.start_async(given, share_inputs=True)
        request.wait()
        return [_taken(request.get_output_tensor(place), datatype) for place, datatype in taken]

    return run


def _refuse_copied_texts(model: Any, name: str) -> None:
    """Raises LoadError for an operation that would damage the executor's memory by strings."""
    for node in model.get_ordered_ops():
        kind = node.get_type_info()
        takes_texts = any(given.get_element_type() == ov.Type.string for given in node.input_values())
        # What an extension brings is its own.
        if takes_texts and kind.name not in _MOVES_TEXTS and str(kind.version_id).startswith("opset"):
            raise LoadError(
                f"unable to load model '{name}': OpenVINO cannot take strings through the operation {kind.name} "
                f"('{node.get_friendly_name()}')"
            )


def _own(array: NDArray[Any], datatype: str) -> Any:
    """An array as OpenVINO takes it."""
    if datatype == "BF16":
        return ov.Tensor(array, list(array.shape), ov.Type.bf16)
    if datatype in ("INT64", "UINT64") and array.size and not (array.min() >= -INT32_END and array.max() < INT32_END):
        raise ValueError(f"OpenVINO computes {datatype} in 32 bits, and a value does not fit")
    if datatype != "BYTES":
        return array
    if any(text.endswith("\0") for text in array.flat):
        raise ValueError("a string that ends in a NUL character cannot be given to OpenVINO")
    # One by one, as in `_texts`: in an array of OpenVINO's each string is as wide as the longest.
    tensor = ov.Tensor(ov.Type.string, ov.Shape([array.size]))
    for place, text in enumerate(array.flat):
        ov.Tensor(tensor, [place], [place + 1]).bytes_data = [text.encode()]
    tensor.shape = list(array.shape)
    return tensor


def _taken(tensor: Any, datatype: str) -> NDArray[Any]:
    """A copy of an output: its memory is the request's, and the next call's."""
    if datatype == "BYTES":
        return _texts(tensor)
    array: NDArray[Any] = np.array(tensor.data)
    # OpenVINO, too, gives bfloat16 in an array of another type.
    return array.view(np.int16) if datatype == "BF16" else array


def _texts(tensor: Any) -> NDArray[Any]:
    found = np.empty(tuple(tensor.shape), dtype=object)
    for place in np.ndindex(found.shape):
        # Not `bytes_data`: of an empty string it is what lay in memory there.
        found[place] = ov.Tensor(tensor, list(place), [begin + 1 for begin in place]).str_data.item()
    return found


def _core(config: Mapping[str, Any]) -> Any:
    core = ov.Core()
    if extension := parameter_of(config, "CPU_EXTENSION_PATH"):
        try:
            core.add_extension(extension)
        except RuntimeError as error:
            raise LoadError(f"failed to load the CPU extension '{extension}': openvino error: {error}") from error
    return core


def _reshape(model: Any, config: Mapping[str, Any]) -> None:
    """Makes the batch dimension variable where the configuration has batches, and takes over the configuration's dims
    where it says RESHAPE_IO_LAYERS. Raises LoadError if the model cannot have such shapes.
    """
    takes_dims = _is_yes(config, "RESHAPE_IO_LAYERS")
    batched = int(config.get("max_batch_size", 0)) > 0 and not _is_yes(config, "SKIP_OV_DYNAMIC_BATCHSIZE")
    entries: list[dict[str, Any]] = [*(config.get("input") or [])]
    told = {entry["name"]: [int(dim) for dim in entry.get("dims", [])] for entry in entries}
    used = used_names(config)
    changed: dict[Any, Any] = {}
    for port in model.inputs:
        shape, name = port.get_partial_shape(), _name(port, used)
        if shape.rank.is_dynamic or not len(shape):
            continue
        dims = told[name] if takes_dims and name in told else list(shape)[1 if batched else 0 :]
        wanted = ov.PartialShape([-1, *dims] if batched else dims)
        if wanted != shape:
            changed[port] = wanted
    if not changed:
        return
    try:
        model.reshape(changed)
    except RuntimeError as error:
        raise LoadError(
            f"unable to load model '{config.get('name')}': it cannot have the shapes of its configuration: openvino "
            f"error: {error}"
        ) from error


def _is_yes(config: Mapping[str, Any], name: str) -> bool:
    return parameter_of(config, name).upper() == "YES"


def _tensor(port: Any, used: set[str]) -> SessionTensor:
    kind, shape, name = port.get_element_type().get_type_name(), port.get_partial_shape(), _name(port, used)
    if kind not in WIRE_TYPE:
        raise LoadError(f"tensor '{name}' of the model is a {kind}, which no request can carry")
    dims = None if shape.rank.is_dynamic else tuple(dim.get_length() if dim.is_static else -1 for dim in shape)
    return SessionTensor(name, WIRE_TYPE[kind], dims)


def _name(port: Any, used: set[str]) -> str:
    """The tensor's name: of several the one that is used, else the first; of a tensor without any, its node's."""
    names: set[str] = port.get_names()
    return min(names & used or names, default=str(port.get_node().get_friendly_name()))

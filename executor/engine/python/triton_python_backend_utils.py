"""What a `model.py` written for Triton imports as `triton_python_backend_utils`.

The engine registers this module in `sys.modules` under that name before it imports a model, so existing models run
unchanged. Written from the documented interface of Triton's python backend; nothing of it is copied. What has no
meaning inside a mesh executor is refused with a reason, never ignored.

Tensors are numpy arrays underneath. BF16 has no numpy type: such a tensor is read and made through DLPack.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from executor.configuration.completion import CompletableConfig as ModelConfig
from executor.engine.python.model_metrics import MetricFamily, TritonModelException
from shared.contract.tensors import DATATYPE_OF, NUMPY_TYPE, bytes_elements, pack_bytes

__all__ = [
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]
"""The names that Triton documents; the other names are for the engine."""

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

_TYPE_NUMBER = {
    "BOOL": 1,
    "UINT8": 2,
    "UINT16": 3,
    "UINT32": 4,
    "UINT64": 5,
    "INT8": 6,
    "INT16": 7,
    "INT32": 8,
    "INT64": 9,
    "FP16": 10,
    "FP32": 11,
    "FP64": 12,
    "BYTES": 13,
    "BF16": 14,
}
"""TRITONSERVER_DataType, by wire name."""

TRITON_TO_NUMPY_TYPE: dict[int, Any] = {
    _TYPE_NUMBER[name]: np.object_ if name == "BYTES" else NUMPY_TYPE[name].type
    for name in _TYPE_NUMBER
    if name != "BF16"
}
NUMPY_TO_TRITON_TYPE: dict[Any, int] = {
    **{numpy_type: number for number, numpy_type in TRITON_TO_NUMPY_TYPE.items()},
    np.bytes_: _TYPE_NUMBER["BYTES"],
    np.str_: _TYPE_NUMBER["BYTES"],
}
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}": TRITON_TO_NUMPY_TYPE[number]
    for name, number in _TYPE_NUMBER.items()
    if number in TRITON_TO_NUMPY_TYPE
}

current_model_dir: ContextVar[str] = ContextVar("current_model_dir")
"""Set by the engine around every call into a model; read by `get_model_dir`."""

model_names: dict[str, str] = {}
"""Set by the engine: the model of a directory, for log lines."""


class TritonError:
    """An error of one request, with a code of Triton's (class constants)."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        # Models often give the exception itself.
        self._message = str(message)
        self._code = code

    def code(self) -> str:
        return self._code

    def message(self) -> str:
        return self._message

    def __str__(self) -> str:
        return self._message


class Tensor:
    """A named tensor. Object and string arrays are BYTES; a bfloat16 array (ml_dtypes) is BF16.

    array     the content; of BF16, its bits as uint16
    datatype  wire name; None until it is told from the array, when it is first asked for
    (both for the engine: a model uses the methods)
    """

    __slots__ = ("_name", "array", "datatype")

    def __init__(self, name: str, numpy_array: NDArray[Any]) -> None:
        self._name = name
        self.array: NDArray[Any] = np.asarray(numpy_array)
        self.datatype: str | None = None

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        """The content. Raises TritonModelException for BF16, which numpy does not have."""
        if self.datatype == "BF16":
            raise TritonModelException(
                f"tensor '{self._name}' is BF16, which numpy does not have; use to_dlpack(), for instance "
                "torch.from_dlpack(tensor)"
            )
        return self.array

    def shape(self) -> list[int]:
        return list(self.array.shape)

    def triton_dtype(self) -> int:
        """The number of Triton's datatype; `triton_to_numpy_type` takes it."""
        return _TYPE_NUMBER[datatype_of(self)]

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the content."""
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        if datatype_of(self) == "BYTES":
            raise TritonModelException(f"tensor '{self._name}' is BYTES, which DLPack does not have")
        if self.datatype == "BF16":
            import torch

            bits: Any = torch.from_numpy(np.ascontiguousarray(self.array).view(np.int16))
            return bits.view(torch.bfloat16).__dlpack__(**options)
        return cast("Any", self.array).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor from a DLPack capsule, or from an object that supports DLPack; a GPU tensor is copied to the
        host.
        """
        if _is_plain_host_array(tensor):
            return Tensor(name, np.from_dlpack(tensor))
        import torch

        given: Any = torch.from_dlpack(tensor)
        content = given.cpu().contiguous()
        if content.dtype is torch.bfloat16:
            return TypedTensor(name, content.view(torch.int16).numpy().view(np.uint16), "BF16")
        return Tensor(name, content.numpy())


class TypedTensor(Tensor):
    """A tensor of a request, whose datatype is known already."""

    __slots__ = ()

    def __init__(self, name: str, array: NDArray[Any], datatype: str) -> None:  # all that the base would set
        self._name = name
        self.array = array
        self.datatype = datatype


Column = list[Tensor | None]
"""One name's tensor for each request of a batch; None where a request has none."""


def _is_plain_host_array(tensor: Any) -> bool:
    device = getattr(tensor, "__dlpack_device__", None)
    return device is not None and device()[0] == 1 and "bfloat16" not in str(getattr(tensor, "dtype", ""))


def datatype_of(tensor: Tensor) -> str:
    """The wire name of a tensor's datatype. Raises TritonModelException for one that Triton does not have."""
    if tensor.datatype is None:
        tensor.datatype = _told_from(tensor)
    return tensor.datatype


def _told_from(tensor: Tensor) -> str:
    array = tensor.array
    datatype = DATATYPE_OF.get(array.dtype)
    if datatype is not None:
        return datatype
    if array.dtype.kind in "OSU":
        return "BYTES"
    if array.dtype.name == "bfloat16":
        tensor.array = array.view(np.uint16)
        return "BF16"
    swapped = DATATYPE_OF.get(array.dtype.newbyteorder("<"))
    if swapped is None:
        raise TritonModelException(f"Unsupported numpy type {array.dtype} of tensor '{tensor.name()}'")
    tensor.array = array.astype(array.dtype.newbyteorder("<"))
    return swapped


def raw_content(tensor: Tensor) -> bytes:
    """A tensor's bytes as the wire wants them. Raises TritonModelException for a BYTES element of another type."""
    if datatype_of(tensor) != "BYTES":
        return tensor.array.tobytes()
    try:
        return pack_bytes(tensor.array.reshape(-1).tolist())
    except TypeError as error:
        raise TritonModelException(
            f"tensor '{tensor.name()}' is BYTES, but not all of its elements are bytes or str: {error}"
        ) from error


class _Given(dict[str, Column]):
    """The columns of a request that a model made itself."""

    def __missing__(self, name: str) -> Column:
        return [None]


class InferenceRequest:
    """A request, as the model gets it; or one that a model makes itself, to call another model (`exec`)."""

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_model_name",
        "_model_version",
        "_parameters",
        "_preferred_memory",
        "_request_id",
        "_requested_output_names",
        "_timeout",
        "_trace",
        "columns",
        "position",
        "release_flags",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: object = None,
        trace: object = None,
        parameters: Mapping[str, str | int | bool | float] | None = None,
    ) -> None:
        self._request_id = request_id
        self._correlation_id = correlation_id
        self.columns: dict[str, Column] = _Given({tensor.name(): [tensor] for tensor in inputs})
        self.position = 0
        self._requested_output_names = requested_output_names
        self._model_name = model_name
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters = parameters or {}
        self.release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        """All tensors: inputs, controls and states."""
        return [tensor for column in self.columns.values() for tensor in column if tensor is not None]

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        """The sequence's id, integer or string as the client gave it; 0 outside a sequence and in null requests."""
        return self._correlation_id

    def flags(self) -> int:
        """SEQUENCE_START and SEQUENCE_END, combined by `|`."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """The request's timeout, microseconds; 0 when it has none."""
        return self._timeout

    def parameters(self) -> str:
        """The request's parameters as JSON."""
        return json.dumps(dict(self._parameters))

    def requested_output_names(self) -> list[str]:
        return list(self._requested_output_names)

    def preferred_memory(self) -> object:
        return self._preferred_memory

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def trace(self) -> object:
        return self._trace

    def is_cancelled(self) -> bool:
        """Whether the caller of a sequence's step has gone while it runs. What the model answers then is committed as
        always: a result moves the state on, an error does not.
        """
        return False

    def exec(self, decoupled: bool = False) -> Any:
        """Calls the request's model, and waits for its InferenceResponse; if decoupled, returns an iterator of its
        responses. What fails is the response's error. See docs/guides/calls.md.
        """
        from executor.engine.python import model_calls

        return model_calls.execute(self, decoupled=decoupled)

    def async_exec(self, decoupled: bool = False) -> Any:
        """As `exec`, for a coroutine to await. The call is made at once, whenever it is awaited."""
        from executor.engine.python import model_calls

        return model_calls.execute_async(self, decoupled=decoupled)

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends the answers to this request. Only requests to a decoupled model have one."""
        raise TritonModelException(
            "get_response_sender: only requests to a model with 'model_transaction_policy { decoupled: true }' have a "
            "response sender"
        )

    def set_release_flags(self, flags: int) -> None:
        """RELEASE_ALL: this call of `execute` answers it. RELEASE_RESCHEDULE: `execute` returns None for it and gets
        it again in a later batch, which needs `iterative_sequence` in the configuration."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"unknown release flags {flags}")
        self.release_flags = flags


class InferenceResponseSender:
    """Sends the answers of a decoupled model to one request. `InferenceRequest.get_response_sender` gives it."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        raise TritonModelException("a response sender comes from InferenceRequest.get_response_sender")

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends an answer. Any thread may call it, also after `execute` has returned.

        response  None: no answer, the flag alone
        flags     TRITONSERVER_RESPONSE_COMPLETE_FINAL with, or after, the last answer: exactly once for each request
        raises    TritonModelException after the last answer, and for flags or responses that there are not
        """
        raise NotImplementedError

    def is_cancelled(self) -> bool:
        """Whether nobody waits for answers any more: they are dropped, and the model may stop."""
        raise NotImplementedError


class PreferredMemory:
    """Where a request of the model's own would like its outputs.

    memory_type  TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU
    """

    def __init__(self, memory_type: int, memory_type_id: int = 0) -> None:
        if memory_type not in (TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU):
            raise TritonModelException(f"unknown memory type {memory_type}")
        self.memory_type = memory_type
        self.memory_type_id = memory_type_id


class InferenceResponse:
    """A request's outputs, or its error.

    given, failure, said  what the model passed as tensors, error and parameters (for the engine: a model uses the
                          methods)
    """

    __slots__ = ("failure", "given", "said")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] | None = None,
        error: TritonError | None = None,
        parameters: Mapping[str, str | int | bool | float] | None = None,
    ) -> None:
        self.given: Sequence[Tensor] = [] if output_tensors is None else output_tensors
        self.failure = error
        self.said = parameters

    def output_tensors(self) -> list[Tensor]:
        return list(self.given)

    def has_error(self) -> bool:
        return self.failure is not None

    def error(self) -> TritonError | None:
        return self.failure

    def parameters(self) -> str:
        """The response's parameters as JSON."""
        return json.dumps(dict(self.said or {}))


class Logger:
    """The executor's log, under the logger `seqmesh.model`, with the model's name."""

    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    VERBOSE = "VERBOSE"

    _LEVELS: Mapping[str, int] = {
        INFO: logging.INFO,
        WARNING: logging.WARNING,
        ERROR: logging.ERROR,
        VERBOSE: logging.DEBUG,
    }

    @staticmethod
    def log(message: str, level: str = INFO) -> None:
        name = model_names.get(current_model_dir.get(""), "")
        fields = {"model": name} if name else {}
        logging.getLogger("seqmesh.model").log(Logger._LEVELS[level], "%s", message, extra={"fields": fields})

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input, control or state of that name; None when it has none."""
    return inference_request.columns[name][inference_request.position]


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of that name; None when it has none."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The declaration of an input in a model's configuration; None when there is none."""
    return _config_by_name(model_config.get("input", []), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The declaration of an output in a model's configuration; None when there is none."""
    return _config_by_name(model_config.get("output", []), name)


def _config_by_name(tensors: Iterable[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> Any:
    """Numpy's type for a number of Triton's datatypes."""
    return TRITON_TO_NUMPY_TYPE[data_type]


def numpy_to_triton_type(data_type: Any) -> int:
    """The number of Triton's datatype for numpy's type."""
    return NUMPY_TO_TRITON_TYPE[np.dtype(data_type).type]


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Numpy's type for a configuration's `TYPE_...`."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | None:
    """BYTES elements in their wire form, row-major; None for an array of another kind."""
    if input_tensor.dtype.kind not in "OSU":
        return None
    elements: list[Any] = input_tensor.reshape(-1).tolist()
    return pack_bytes(element if isinstance(element, bytes) else str(element) for element in elements)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[np.object_]:
    """The elements of a BYTES tensor's wire form, as a flat object array."""
    elements = list(bytes_elements(bytes(encoded_tensor)))
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def get_model_dir() -> str:
    """The directory of the model's version; called outside of a model's methods, that of the calling file."""
    directory = current_model_dir.get(None)
    if directory is not None:
        return directory
    return str(Path(inspect.stack()[1].filename).resolve().parent)


def load_model(*_arguments: object, **_options: object) -> None:
    """Not supported: models are loaded by the mesh's repository endpoints."""
    raise _unsupported("loading a model from a model (load_model)")


def unload_model(*_arguments: object, **_options: object) -> None:
    """Not supported: models are unloaded by the mesh's repository endpoints."""
    raise _unsupported("unloading a model from a model (unload_model)")


def is_model_ready(*_arguments: object, **_options: object) -> bool:
    """Not supported: a model cannot call another one here."""
    raise _unsupported("asking for another model (is_model_ready)")


def _unsupported(what: str) -> TritonModelException:
    return TritonModelException(f"{what} is not supported by seqmesh")

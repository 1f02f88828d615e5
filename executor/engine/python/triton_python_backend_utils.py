"""What a `model.py` written for Triton imports as `triton_python_backend_utils`.

The engine registers this module in `sys.modules` under that name before it imports a model, so existing models run
unchanged. Written from the documented interface of Triton's python backend; nothing of it is copied. What has no
meaning inside a mesh executor is refused with a reason, never ignored.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from executor.configuration.completion import CompletableConfig as ModelConfig
from executor.engine.python import model_calls
from executor.engine.python.instance_code import current_code
from executor.engine.python.model_metrics import MetricFamily, TritonModelException
from executor.engine.python.response import InferenceResponse, TritonError
from executor.engine.python.tensor import (
    NUMPY_TO_TRITON_TYPE,
    TRITON_STRING_TO_NUMPY,
    TRITON_TO_NUMPY_TYPE,
    Column,
    packed,
)
from executor.engine.python.tensor import ModelTensor as Tensor
from shared.contract.tensors import TEXT_KINDS, bytes_elements

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
        self.columns: dict[str, Column] = _Given()
        for tensor in inputs:
            if cast("object", tensor) is None:
                whose = f"with id '{request_id}' and model name '{model_name}'"
                raise TritonModelException(f"Input tensor for request {whose} should not be empty.")
            # One that is given twice goes on twice: whoever is called refuses it.
            self.columns.setdefault(tensor.name(), []).append(tensor)
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

    def requested_output_names(self) -> set[str]:
        """The outputs that the caller asked for; a set, as in Triton."""
        return set(self._requested_output_names)

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
        return model_calls.execute(self, decoupled=decoupled)

    def async_exec(self, decoupled: bool = False) -> Any:
        """As `exec`, for a coroutine to await. The call is made at once, whenever it is awaited."""
        return model_calls.execute_async(self, decoupled=decoupled)

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends the response to this request, or the responses of a decoupled model."""
        raise TritonModelException(
            "Unable to send response. Response sender has no reference to the decoupled state of the model: a request "
            "that a model makes itself has none"
        )

    def set_release_flags(self, flags: int) -> None:
        """RELEASE_ALL: this call of `execute` answers it. RELEASE_RESCHEDULE: `execute` returns None for it and gets
        it again in a later batch, which needs `iterative_sequence` in the configuration."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"unknown release flags {flags}")
        self.release_flags = flags


class InferenceResponseSender:
    """Sends the responses to one request: any number of a decoupled model, of another one exactly one, in the place of
    what `execute` returns for it. `InferenceRequest.get_response_sender` gives it.
    """

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        raise TritonModelException("a response sender comes from InferenceRequest.get_response_sender")

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends an answer. Any thread may call it, also after `execute` has returned.

        response  None: no answer, the flag alone
        flags     TRITONSERVER_RESPONSE_COMPLETE_FINAL with, or after, the last answer: exactly once for each request
        raises    TritonModelException after the last answer, for flags or responses that there are not, and for a
                  second response of a model that is not decoupled
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
        code = current_code.get(None)
        fields = {"model": code.model} if code is not None else {}
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
    """Numpy's type for a number of Triton's datatypes; None where numpy has none, or there is no such number."""
    return TRITON_TO_NUMPY_TYPE.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number of Triton's datatype for numpy's type; None where Triton has none."""
    return NUMPY_TO_TRITON_TYPE.get(np.dtype(data_type).type)


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Numpy's type for a configuration's `TYPE_...`."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | None:
    """BYTES elements in their wire form, row-major; None for an array of another kind."""
    if input_tensor.dtype.kind not in TEXT_KINDS:
        return None
    return packed(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[np.object_]:
    """The elements of a BYTES tensor's wire form, as a flat object array."""
    elements = list(bytes_elements(bytes(encoded_tensor)))
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def get_model_dir() -> str:
    """The directory of the model's version; called outside of a model's methods, that of the calling file."""
    code = current_code.get(None)
    if code is not None:
        return code.model_dir
    return str(Path(inspect.stack()[1].filename).resolve().parent)


def load_model(*_arguments: object, **_options: object) -> None:
    """Not supported: models are loaded by the mesh's repository endpoints."""
    raise _unsupported("loading a model from a model (load_model)")


def unload_model(*_arguments: object, **_options: object) -> None:
    """Not supported: models are unloaded by the mesh's repository endpoints."""
    raise _unsupported("unloading a model from a model (unload_model)")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether the mesh serves a model. One that is unknown is not ready, which is no error.

    model_version  "": any version will do
    raises         TritonModelException for a version that is no number, and where no gateway can be asked
    """
    return model_calls.is_ready(model_name, model_version)


def _unsupported(what: str) -> TritonModelException:
    return TritonModelException(f"{what} is not supported by seqmesh")

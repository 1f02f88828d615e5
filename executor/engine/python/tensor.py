"""The tensors that a `model.py` reads and makes (`pb_utils.Tensor`).

They are numpy arrays underneath. BF16 has no numpy type: such a tensor is read and made through DLPack.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from executor.engine.python.model_metrics import TritonModelException
from shared.contract.tensors import DATATYPE_OF, NUMPY_TYPE, TEXT_KINDS, config_type, pack_bytes

_TYPES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BYTES BF16"
"""Wire names in the order of TRITONSERVER_DataType, which begins with 1."""
_TYPE_NUMBER = {name: number for number, name in enumerate(_TYPES.split(), start=1)}
_NUMPY: dict[str, Any] = {name: dtype.type for name, dtype in NUMPY_TYPE.items()} | {"BYTES": np.object_}

TRITON_TO_NUMPY_TYPE: dict[int, Any] = {_TYPE_NUMBER[name]: kind for name, kind in _NUMPY.items()}
NUMPY_TO_TRITON_TYPE: dict[Any, int] = {kind: _TYPE_NUMBER[name] for name, kind in _NUMPY.items()} | dict.fromkeys(
    (np.bytes_, np.str_), _TYPE_NUMBER["BYTES"]
)
TRITON_STRING_TO_NUMPY: dict[str, Any] = {config_type(name): kind for name, kind in _NUMPY.items()}
_TEXTS = frozenset((bytes, str))


class ModelTensor:
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

    def copied(self) -> ModelTensor:
        """The same tensor with an array of its own; for the engine."""
        copy = ModelTensor(self._name, self.array.copy())
        copy.datatype = self.datatype
        return copy

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
            try:
                import torch
            except ModuleNotFoundError as error:
                raise _wants_torch(self._name, "it is BF16") from error
            bits: Any = torch.from_numpy(np.ascontiguousarray(self.array).view(np.int16))
            return bits.view(torch.bfloat16).__dlpack__(**options)
        return cast("Any", self.array).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> ModelTensor:
        """A tensor from a DLPack capsule, or from an object that supports DLPack; a GPU tensor is copied to the
        host.
        """
        # torch gives the numbers of a negative view (`z.conj().imag`) without their sign.
        tensor = tensor.resolve_neg() if hasattr(tensor, "resolve_neg") else tensor
        if _is_plain_host_array(tensor):
            return ModelTensor(name, np.from_dlpack(tensor))
        try:
            import torch
        except ModuleNotFoundError:
            # An environment of the model's own need not have it.
            return ModelTensor(name, _array_of(name, tensor))
        given: Any = torch.from_dlpack(tensor)
        content = given.cpu().contiguous()
        if content.dtype is torch.bfloat16:
            return TypedTensor(name, content.view(torch.int16).numpy().view(np.uint16), "BF16")
        return ModelTensor(name, content.numpy())


ModelTensor.__name__ = "Tensor"
"""What models call it (`pb_utils.Tensor`), and so what Python's errors name."""


class TypedTensor(ModelTensor):
    """A tensor of a request, whose datatype is known already."""

    __slots__ = ()

    def __init__(self, name: str, array: NDArray[Any], datatype: str) -> None:  # all that the base would set
        self._name = name
        self.array = array
        self.datatype = datatype


Column = list[ModelTensor | None]
"""One name's tensor for each request of a batch; None where a request has none."""


def _is_plain_host_array(tensor: Any) -> bool:
    device = getattr(tensor, "__dlpack_device__", None)
    kind = datatype_of(tensor) if isinstance(tensor, ModelTensor) else str(getattr(tensor, "dtype", ""))
    return device is not None and device()[0] == 1 and not kind.endswith(("BF16", "bfloat16"))


class _HostCapsule:
    """A DLPack capsule as an object, which is how numpy takes one."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        """The host: numpy looks into the capsule, too, and refuses another device."""
        return (1, 0)


def _array_of(name: str, tensor: Any) -> NDArray[Any]:
    """The content of a capsule, or of an object that gives one. Raises TritonModelException for what numpy lacks."""
    try:
        return np.from_dlpack(_HostCapsule(tensor.__dlpack__() if hasattr(tensor, "__dlpack__") else tensor))
    except (RuntimeError, BufferError) as error:
        raise _wants_torch(name, str(error)) from error


def _wants_torch(name: str, cause: str) -> TritonModelException:
    return TritonModelException(
        f"tensor '{name}' cannot go through DLPack without torch ({cause}): install torch in the model's environment"
    )


def datatype_of(tensor: ModelTensor) -> str:
    """The wire name of a tensor's datatype. Raises TritonModelException for one that Triton does not have."""
    if tensor.datatype is None:
        tensor.datatype = _told_from(tensor)
    return tensor.datatype


def _told_from(tensor: ModelTensor) -> str:
    array = tensor.array
    datatype = DATATYPE_OF.get(array.dtype)
    if datatype is not None:
        return datatype
    if array.dtype.kind in TEXT_KINDS:
        return "BYTES"
    if array.dtype.name == "bfloat16":
        tensor.array = array.view(np.uint16)
        return "BF16"
    swapped = DATATYPE_OF.get(array.dtype.newbyteorder("<"))
    if swapped is None:
        raise TritonModelException(f"Unsupported numpy type {array.dtype} of tensor '{tensor.name()}'")
    tensor.array = array.astype(array.dtype.newbyteorder("<"))
    return swapped


def raw_content(tensor: ModelTensor) -> bytes:
    """A tensor's bytes as the wire wants them. Raises TritonModelException for a BYTES element that has no text."""
    if datatype_of(tensor) != "BYTES":
        return tensor.array.tobytes()
    try:
        return packed(tensor.array)
    except Exception as error:  # an element may be any object of the model's
        raise TritonModelException(
            f"tensor '{tensor.name()}' is BYTES, but not all of its elements have a text: {error}"
        ) from error


def packed(array: NDArray[Any]) -> bytes:
    """BYTES elements in their wire form. What is neither bytes nor a string is its text, as in Triton."""
    elements: list[Any] = array.reshape(-1).tolist()
    if not _TEXTS.issuperset(map(type, elements)):
        elements = [element if isinstance(element, bytes | str) else str(element) for element in elements]
    return pack_bytes(elements)

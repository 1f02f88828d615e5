"""Packs the typed tensor contents of a gRPC request (`InferTensorContents`) into raw tensor bytes.

A client that does not send raw bytes puts numbers into one of eight repeated fields. numpy packs them here. Integers of
8 and 16 bits come in the 32 bit fields and must fit. FP16 and BF16 have no field; they need raw bytes.

Source: triton-spec section 6; Triton server, src/grpc/infer_handler.h, InferGRPCToInput.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gateway.bounds.pieces import pieces
from gateway.grpc.pb import AnyMessage
from shared.contract.errors import RequestError
from shared.contract.tensors import NUMPY_TYPE, pack_bytes

FIELDS: dict[str, tuple[str, ...]] = {
    "bool_contents": ("BOOL",),
    "int_contents": ("INT32", "INT16", "INT8"),
    "int64_contents": ("INT64",),
    "uint_contents": ("UINT32", "UINT16", "UINT8"),
    "uint64_contents": ("UINT64",),
    "fp32_contents": ("FP32",),
    "fp64_contents": ("FP64",),
    "bytes_contents": ("BYTES",),
}
"""The datatypes that each field of `InferTensorContents` may carry; Triton's errors name it after the first."""


def pack_contents(contents: AnyMessage, datatype: str, name: str, model: str) -> bytes:
    """The tensor's bytes, little-endian and row-major, from its typed contents.

    datatype     the tensor's datatype in the request
    name, model  names of the input and its model, for the error's text
    raises       RequestError when a field does not fit the datatype, two fields are set, or a value is out of range
    """
    # ListFields gives the non-empty repeated fields only, by field number.
    given = [(descriptor.name, values) for descriptor, values in contents.ListFields()]
    if not given:
        return b""
    where = f"unexpected explicit tensor data for input tensor '{name}' for model '{model}'"
    (field, values), *surplus = given
    check_carries(field, datatype, where)
    if surplus:
        raise RequestError(f"{where}, binary data was already supplied.")
    return pack_values(values, datatype, name, model)


def check_carries(field: str, datatype: str, where: str) -> None:
    """Raises RequestError when a typed field cannot hold a tensor of that datatype."""
    if datatype not in FIELDS[field]:
        raise RequestError(f"{where} of type '{FIELDS[field][0]}', expected datatype '{datatype}'")


def pack_values(values: Sequence[bytes] | Sequence[float], datatype: str, name: str, model: str) -> bytes:
    """Packs the numbers or byte strings of a protobuf field."""
    if datatype == "BYTES":
        return pack_bytes(values)  # pyright: ignore[reportArgumentType]  (the datatype says which sequence it is)
    wanted = NUMPY_TYPE[datatype]
    carried = wanted if wanted.itemsize >= 4 or wanted.kind == "b" else np.dtype(np.int64)
    array = np.empty(len(values), carried)
    for piece in pieces(len(values)):
        array[piece] = values[piece]
    if array.dtype != wanted:
        # Triton truncates such values silently. Here they are refused: a wrong number is worse than an error.
        limits = np.iinfo(wanted)
        if array.min() < limits.min or array.max() > limits.max:
            raise RequestError(
                f"value out of range for input tensor '{name}' for model '{model}', datatype '{datatype}' holds "
                f"{limits.min} to {limits.max}"
            )
        array = array.astype(wanted)
    return array.tobytes()

"""Parameters of requests and responses, as the v2 protocol types them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Parameter = str | int | bool | float
INT64_MIN, INT64_MAX, UINT64_MAX = -(1 << 63), (1 << 63) - 1, (1 << 64) - 1
FINAL_RESPONSE, EMPTY_FINAL_RESPONSE = "triton_final_response", "triton_enable_empty_final_response"
"""Of a decoupled model: says whether an answer is the last one; asks for a last one even if nothing is left to give."""


def write_parameters(target: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> None:
    """Writes parameters into a message of gRPC, each into the field of its type; integers beyond int64 go into
    uint64_param.
    """
    for name, value in parameters.items():
        field = target[name]
        # bool must be tested first: it is a subclass of int.
        if isinstance(value, bool):
            field.bool_param = value
        elif isinstance(value, int):
            if value > INT64_MAX:
                field.uint64_param = value
            else:
                field.int64_param = value
        elif isinstance(value, float):
            field.double_param = value
        else:
            field.string_param = value

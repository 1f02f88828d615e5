"""Parameters in messages of gRPC: each goes into the field of its type."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tritonclient.grpc import service_pb2

from shared.contract.parameters import Parameter, write_parameters


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (True, "bool_param"),
        (0, "int64_param"),
        (-(1 << 63), "int64_param"),
        ((1 << 63) - 1, "int64_param"),
        (1 << 63, "uint64_param"),
        ((1 << 64) - 1, "uint64_param"),
        (0.5, "double_param"),
        ("7", "string_param"),
    ],
)
def test_a_parameter_arrives_as_it_was_given(value: Parameter, field: str) -> None:
    message: Any = cast("Any", service_pb2).ModelInferRequest()
    write_parameters(message.parameters, {"x": value})

    written = message.parameters["x"]
    assert (field, value) == (written.WhichOneof("parameter_choice"), getattr(written, field))

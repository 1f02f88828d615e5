"""Parameters of requests and responses, as the v2 protocol types them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Parameter = str | int | bool | float


def write_parameters(target: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> None:
    """Writes parameters into a message of gRPC, each into the field of its type. Integers must fit int64."""
    for name, value in parameters.items():
        # bool must be tested first: it is a subclass of int.
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int):
            target[name].int64_param = value
        elif isinstance(value, float):
            target[name].double_param = value
        else:
            target[name].string_param = value

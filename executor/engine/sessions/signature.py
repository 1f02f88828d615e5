"""What a session takes and returns, and the parameters that say how it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from executor.engine.pytorch.signature import taken_names


class SessionTensor(msgspec.Struct, frozen=True):
    """An input or output of a model.

    datatype  as on the wire: FP32, INT64, BYTES, ...
    dims      with the batch dimension, if there is one; -1 is variable; empty for a scalar; None if the model does not
              say how many dimensions there are
    """

    name: str
    datatype: str
    dims: tuple[int, ...] | None


class SessionSignature(msgspec.Struct, frozen=True):
    """Tensors by name. optional: inputs that a call may leave out"""

    inputs: Mapping[str, SessionTensor]
    outputs: Mapping[str, SessionTensor]
    optional: Mapping[str, SessionTensor] = {}


def parameter_of(config: Mapping[str, Any], name: str) -> str:
    """A parameter's text in a decoded configuration; "" if it is not given."""
    parameters: Mapping[str, Mapping[str, str]] = config.get("parameters") or {}
    return parameters.get(name, {}).get("string_value", "")


def used_names(config: Mapping[str, Any]) -> set[str]:
    """Every name that a decoded configuration gives a tensor."""
    taken_in, given_out = taken_names(config)
    entries: list[dict[str, Any]] = [*(config.get("input") or []), *(config.get("output") or [])]
    cut: list[dict[str, Any]] = config.get("batch_output") or []
    names = {*taken_in, *given_out, *(entry.get("name", "") for entry in entries)}
    return names.union(*(each.get("target_name", ()) for each in cut))

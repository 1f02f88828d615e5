"""What a model itself may add to its configuration: the rules of `auto_complete_config`, in Triton's words.

A model may fill a missing value, or repeat a given one; a contradiction is refused. The errors are ValueErrors, not
errors of the mesh, because the model's own code meets them and may catch them.

Source: triton-spec sections 4 ("auto-complete") and 8; Triton python_backend, triton_python_backend_utils.py.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from typing import Any, cast

Fields = dict[str, Any]
"""A configuration, or a part of one, as JSON."""

_PROPERTIES = {"input": ("name", "data_type", "dims", "optional"), "output": ("name", "data_type", "dims")}
_REQUIRED = ("name", "data_type", "dims")
_ALLOWED = {"input": "'name', 'data_type', 'dims' and 'optional'", "output": "'name', 'data_type' and 'dims'"}


class CompletableConfig:
    """The configuration that a model's `auto_complete_config` may complete (it never overrides what is there)."""

    def __init__(self, model_config: str) -> None:
        """model_config: JSON, see `canonical`"""
        self._config: Fields = json.loads(model_config)
        self._name = str(self._config.get("name", ""))
        self._where = f"in auto-complete-config function for model '{self._name}'"

    def as_dict(self) -> Fields:
        return self._config

    def to_json(self) -> str:
        """Integers may be numpy's. Raises TypeError for another value that JSON lacks."""
        return json.dumps(self._config, default=operator.index)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets the largest batch. Raises ValueError below a configured one."""
        configured = int(self._config.get("max_batch_size", 0))
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but {self._where} specified max_batch_size "
                f"{max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Adds dynamic batching where nothing schedules yet. Raises ValueError beside another scheduler."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for "
                    f"model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy: Mapping[str, Any]) -> None:
        """Sets `decoupled`. Raises ValueError for another property, and against what is configured."""
        if set(transaction_policy) - {"decoupled"}:
            raise ValueError(f"model transaction property {self._where} contains property other than 'decoupled'.")
        configured: Fields = self._config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy:
            return
        decoupled = transaction_policy["decoupled"]
        if configured.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{configured['decoupled']}'."
            )
        configured["decoupled"] = decoupled

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002  # the documented name
        """Adds an input, or fills what a declared one of that name lacks.

        input   `name`, `data_type` (TYPE_...), `dims`, and perhaps `optional`
        raises  ValueError for properties too many or too few, and where the configuration says otherwise
        """
        self._add("input", input)

    def add_output(self, output: Mapping[str, Any]) -> None:
        """As `add_input`, for an output, which cannot be optional."""
        self._add("output", output)

    def _add(self, kind: str, tensor: Mapping[str, Any]) -> None:
        self._check_properties(kind, tensor)
        dims = tensor["dims"]
        # One dimension needs no brackets, as in a load's JSON.
        several = isinstance(dims, Iterable) and not isinstance(dims, str)
        added: Fields = {**tensor, "dims": list(cast("Iterable[Any]", dims)) if several else [dims]}
        declared: list[Fields] = self._config.setdefault(kind, [])
        for same in (entry for entry in declared if entry.get("name") == tensor["name"]):
            self._check_same(kind, same, added)
            same.update(added)
            return
        declared.append(added)

    def _check_properties(self, kind: str, tensor: Mapping[str, Any]) -> None:
        called = f"{kind} '{tensor['name']}'" if "name" in tensor else kind
        if set(tensor) - set(_PROPERTIES[kind]):
            raise ValueError(f"{called} {self._where} contains property other than {_ALLOWED[kind]}.")
        for required in _REQUIRED:
            if required not in tensor:
                raise ValueError(f"{called} {self._where} is missing '{required}' property.")

    def _check_same(self, kind: str, declared: Fields, added: Fields) -> None:
        model, name = self._name, added["name"]
        data_type = declared.get("data_type", "TYPE_INVALID")
        if data_type not in ("TYPE_INVALID", added["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {data_type} for {kind} '{name}', "
                f"model provides {added['data_type']}"
            )
        dims = [int(dim) for dim in declared.get("dims", [])]
        if dims and dims != added["dims"]:
            raise ValueError(
                f"model '{model}', tensor '{name}': the model expects dims {added['dims']} but the model configuration "
                f"specifies dims {dims}"
            )
        if "optional" in added and declared.get("optional", added["optional"]) != added["optional"]:
            raise ValueError(
                f"model '{model}', tensor '{name}': the model expects optional {added['optional']} but the model "
                f"configuration specifies optional {declared['optional']}"
            )

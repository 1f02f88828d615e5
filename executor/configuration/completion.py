"""What a model itself may add to its configuration: the rules of `auto_complete_config`, in Triton's words.

A model may fill a missing value, or repeat a given one; a contradiction is refused. The functions work on the JSON of a
configuration (see `canonical`), because a model is given that. They raise ValueError, not an error of the mesh, because
the model's own code calls them and may catch it.

Source: triton-spec sections 4 ("auto-complete") and 8; Triton python_backend, triton_python_backend_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Fields = dict[str, Any]
"""A configuration, or a part of one, as JSON."""

_PROPERTIES = {"input": ("name", "data_type", "dims", "optional"), "output": ("name", "data_type", "dims")}
_REQUIRED = ("name", "data_type", "dims")
_ALLOWED = {"input": "'name', 'data_type', 'dims' and 'optional'", "output": "'name', 'data_type' and 'dims'"}
_WHERE = "in auto-complete-config function for model"


def set_max_batch_size(config: Fields, max_batch_size: int) -> None:
    """Sets the largest batch, in place. Raises ValueError below a configured one."""
    configured = int(config.get("max_batch_size", 0))
    if configured > max_batch_size:
        raise ValueError(
            f"configuration specified max_batch_size {configured}, but {_WHERE} '{_name(config)}' specified "
            f"max_batch_size {max_batch_size}"
        )
    config["max_batch_size"] = max_batch_size


def set_dynamic_batching(config: Fields) -> None:
    """Adds dynamic batching where nothing schedules yet, in place. Raises ValueError beside another scheduler."""
    for other in ("sequence_batching", "ensemble_scheduling"):
        if other in config:
            raise ValueError(
                f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for model "
                f"'{_name(config)}' tries to set scheduling_choice as 'dynamic_batching'"
            )
    config.setdefault("dynamic_batching", {})


def add_tensor(config: Fields, kind: Literal["input", "output"], tensor: Mapping[str, Any]) -> None:
    """Adds an input or output, or fills what a declared one of that name lacks, in place.

    tensor  `name`, `data_type` (TYPE_...), `dims`, and of an input perhaps `optional`
    raises  ValueError for properties too many or too few, and where the configuration says otherwise
    """
    _check_properties(config, kind, tensor)
    added = {**tensor, "dims": list(tensor["dims"])}
    declared: list[Fields] = config.setdefault(kind, [])
    for same in (entry for entry in declared if entry.get("name") == tensor["name"]):
        _check_same(config, kind, same, added)
        same.update(added)
        return
    declared.append(added)


def set_transaction_policy(config: Fields, policy: Mapping[str, Any]) -> None:
    """Sets `decoupled`, in place. Raises ValueError for another property, and against what is configured."""
    if set(policy) - {"decoupled"}:
        raise ValueError(
            f"model transaction property {_WHERE} '{_name(config)}' contains property other than 'decoupled'."
        )
    configured: Fields = config.setdefault("model_transaction_policy", {})
    if "decoupled" not in policy:
        return
    if configured.get("decoupled", policy["decoupled"]) != policy["decoupled"]:
        raise ValueError(
            f"trying to change decoupled property in auto-complete-config for model '{_name(config)}', which is "
            f"already set to '{configured['decoupled']}'."
        )
    configured["decoupled"] = policy["decoupled"]


def _name(config: Fields) -> str:
    return str(config.get("name", ""))


def _check_properties(config: Fields, kind: str, tensor: Mapping[str, Any]) -> None:
    called = f"{kind} '{tensor['name']}'" if "name" in tensor else kind
    if set(tensor) - set(_PROPERTIES[kind]):
        raise ValueError(f"{called} {_WHERE} '{_name(config)}' contains property other than {_ALLOWED[kind]}.")
    for required in _REQUIRED:
        if required not in tensor:
            raise ValueError(f"{called} {_WHERE} '{_name(config)}' is missing '{required}' property.")


def _check_same(config: Fields, kind: str, declared: Fields, added: Fields) -> None:
    model, name = _name(config), added["name"]
    data_type = declared.get("data_type", "TYPE_INVALID")
    if data_type not in ("TYPE_INVALID", added["data_type"]):
        raise ValueError(
            f"unable to load model '{model}', configuration expects datatype {data_type} for {kind} '{name}', model "
            f"provides {added['data_type']}"
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

"""Parameters of load and unload requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.grpc.pb import AnyMessage
from shared.contract.errors import RequestError

FILE_PREFIX = "file:"


def load_parameters(parameters: Mapping[str, AnyMessage]) -> tuple[str | None, dict[str, bytes]]:
    """The configuration and files that a load request sends to replace the repository's.

    returns  the configuration's JSON, None for none; path below the model's directory -> content, {} for none
    raises   RequestError for an unknown parameter, or one of the wrong type
    """
    config_json: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            check_choice(key, value, "string_param")
            config_json = value.string_param
        elif key.startswith(FILE_PREFIX):
            check_choice(key, value, "bytes_param")
            files[key.removeprefix(FILE_PREFIX)] = value.bytes_param
        else:
            raise RequestError(f"unrecognized load parameter '{key}'.")
    return config_json, files


def check_choice(key: str, parameter: AnyMessage, choice: str) -> None:
    """Raises RequestError when a load parameter is not of its type."""
    if parameter.WhichOneof("parameter_choice") != choice:
        raise RequestError(f"invalid value type for load parameter '{key}', expected {choice}.")


def unloads_dependents(parameters: Mapping[str, AnyMessage]) -> bool:
    """The parameter `unload_dependents`. Raises RequestError if it is no bool. Others are ignored, as in Triton."""
    for key, value in parameters.items():
        if key == "unload_dependents" and value.WhichOneof("parameter_choice") != "bool_param":
            raise RequestError("invalid value type for 'unload_dependents' parameter, expected bool_param.")
    return "unload_dependents" in parameters and parameters["unload_dependents"].bool_param

"""Parameters of load and unload requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.grpc.codec import check_choice
from gateway.grpc.pb import AnyMessage
from shared.contract.errors import RequestError

FILE_PREFIX = "file:"
UNLOAD_DEPENDENTS = "unload_dependents"


def load_parameters(parameters: Mapping[str, AnyMessage]) -> tuple[str | None, dict[str, bytes]]:
    """The configuration and files that a load request sends to replace the repository's.

    returns  the configuration's JSON, None for none; path below the model's directory -> content, {} for none
    raises   RequestError for an unknown parameter, or one of the wrong type
    """
    config_json: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            check_choice(value, "string_param", f"load parameter '{key}'")
            config_json = value.string_param
        elif key.startswith(FILE_PREFIX):
            check_choice(value, "bytes_param", f"load parameter '{key}'")
            files[key.removeprefix(FILE_PREFIX)] = value.bytes_param
        else:
            raise RequestError(f"unrecognized load parameter '{key}'.")
    return config_json, files


def unloads_dependents(parameters: Mapping[str, AnyMessage]) -> bool:
    """The parameter `unload_dependents`. Raises RequestError if it is no bool. Others are ignored, as in Triton."""
    if UNLOAD_DEPENDENTS not in parameters:
        return False
    check_choice(parameters[UNLOAD_DEPENDENTS], "bool_param", f"'{UNLOAD_DEPENDENTS}' parameter")
    return parameters[UNLOAD_DEPENDENTS].bool_param

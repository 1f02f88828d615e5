"""Converts trace and log settings from and to protobuf messages (triton-spec 5.8, 6). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import fields

from gateway.grpc.pb import AnyMessage, pb
from shared.contract.errors import RequestError
from shared.process.log_settings import LogSettings

CHOICES: Mapping[Any, tuple[str, str]] = {
    bool: ("bool_param", "boolean"),
    int: ("uint32_param", "int32"),
    str: ("string_param", "string"),
}
LOG_CHOICES = {field.name: CHOICES[field.type] for field in fields(LogSettings)}
"""How a message says each log setting, and what Triton's errors call that."""


def trace_changes(request: AnyMessage) -> dict[str, list[str] | None]:
    """Values by setting; None for a setting without a value, which is reset."""
    return {name: list(setting.value) or None for name, setting in request.settings.items()}


def trace_response(texts: Mapping[str, list[str]]) -> AnyMessage:
    response = pb.TraceSettingResponse()
    for name, words in texts.items():
        response.settings[name].value.extend(words)
    return response


def log_changes(request: AnyMessage) -> dict[str, bool | int | str]:
    """Values by setting; unknown names are ignored. Raises RequestError for a value of the wrong type."""
    if "log_file" in request.settings:
        # It is refused, whatever else there is.
        return {"log_file": ""}
    changes: dict[str, bool | int | str] = {}
    for name, (wanted, word) in LOG_CHOICES.items():
        if name not in request.settings:
            continue
        setting = request.settings[name]
        if setting.WhichOneof("parameter_choice") != wanted:
            raise RequestError(f"expect {word} for '{name}'")
        changes[name] = getattr(setting, wanted)
    return changes


def log_response(settings: LogSettings) -> AnyMessage:
    response = pb.LogSettingsResponse()
    for name, (choice, _) in LOG_CHOICES.items():
        setattr(response.settings[name], choice, getattr(settings, name))
    return response

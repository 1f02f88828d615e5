"""Converts trace and log settings from and to protobuf messages (triton-spec 5.8, 6). Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.grpc.pb import AnyMessage, pb
from shared.contract.errors import RequestError
from shared.process.log_settings import BOOLEANS, LogSettings


def trace_changes(request: AnyMessage) -> dict[str, list[str] | None]:
    """Values by setting; None for a setting without a value, which is reset."""
    return {name: list(setting.value) or None for name, setting in request.settings.items()}


def trace_response(texts: Mapping[str, list[str]]) -> AnyMessage:
    response = pb.TraceSettingResponse()
    for name, words in texts.items():
        response.settings[name].value.extend(words)
    return response


def log_changes(request: AnyMessage) -> dict[str, bool | int | str]:
    """Values by setting. Raises RequestError for a value of the wrong type."""
    changes: dict[str, bool | int | str] = {}
    for name, setting in request.settings.items():
        kind = setting.WhichOneof("parameter_choice")
        if name in BOOLEANS and kind != "bool_param":
            raise RequestError(f"expect boolean for '{name}'")
        if name == "log_verbose_level" and kind != "uint32_param":
            raise RequestError(f"expect int32 for '{name}'")
        if name in ("log_file", "log_format") and kind != "string_param":
            raise RequestError(f"expect string for '{name}'")
        if kind is not None:
            changes[name] = getattr(setting, kind)
    return changes


def log_response(settings: LogSettings) -> AnyMessage:
    response = pb.LogSettingsResponse()
    for name in LogSettings.__struct_fields__:
        value = getattr(settings, name)
        kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
        setattr(response.settings[name], kind, value)
    return response

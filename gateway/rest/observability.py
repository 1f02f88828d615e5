"""Trace and log settings over HTTP. As in Triton, unknown members of the JSON are ignored (triton-spec 5.8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec.structs import fields
from starlette.types import Receive, Scope, Send

from gateway.models.runtime_settings import RuntimeSettings
from gateway.rest.body import BodyBounds, client_in, read_object
from gateway.rest.json_values import Json, JsonError, text_of
from gateway.rest.operations import OF_BODY, OF_MODEL, TRACE_CHANGES, TRACE_SETTINGS, described, json_content, of_struct
from gateway.rest.reply import send_json
from shared.process.log_settings import LogSettings
from shared.traces.settings import NUMBERS

WORDS: Mapping[Any, str] = {bool: "boolean", int: "unsigned-integer", str: "string"}
"""What Triton's errors call a type."""


class Observability:
    def __init__(self, settings: RuntimeSettings, bounds: BodyBounds) -> None:
        self._settings = settings
        self._bounds = bounds

    @described(TRACE_SETTINGS, errors=OF_MODEL)
    async def trace_settings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../trace/setting: the trace settings of the mesh, or of one model."""
        await self._send_traces(scope, send, {})

    @described(TRACE_SETTINGS, errors=(*OF_BODY, *OF_MODEL), body=json_content(TRACE_CHANGES))
    async def change_trace_settings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../trace/setting: changes the trace settings of the mesh, or of one model. Answers all of them."""
        self._settings.check_model(scope["path_params"].get("model", ""))
        await self._send_traces(scope, send, trace_changes(await read_object(scope, receive, self._bounds)))

    @described(of_struct(LogSettings))
    async def log_settings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v2/logging: the log settings of the mesh."""
        await self._send_logs(scope, send, {})

    @described(of_struct(LogSettings), errors=OF_BODY, body=json_content(of_struct(LogSettings)))
    async def change_log_settings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v2/logging: changes log settings of the mesh. Answers all of them."""
        await self._send_logs(scope, send, log_changes(await read_object(scope, receive, self._bounds)))

    async def _send_traces(self, scope: Scope, send: Send, changes: Mapping[str, list[str] | None]) -> None:
        model = scope["path_params"].get("model", "")
        texts = await self._settings.traces(model, changes, caller_of(scope), client_in(scope))
        await send_json(send, {name: words if name == "trace_level" else words[0] for name, words in texts.items()})

    async def _send_logs(self, scope: Scope, send: Send, changes: Mapping[str, bool | int | str]) -> None:
        settings = await self._settings.logs(changes, caller_of(scope), client_in(scope))
        await send_json(send, msgspec.to_builtins(settings))


def caller_of(scope: Scope) -> str:
    host, port = scope["client"]
    return f"HTTP client {host}:{port}"


def trace_changes(document: Json) -> dict[str, list[str] | None]:
    """Values by setting; null resets a setting. Raises JsonError for a value of another type."""
    if "trace_file" in document:
        # It is refused, whatever else there is.
        return {"trace_file": None}
    changes: dict[str, list[str] | None] = {}
    if "trace_level" in document:
        levels = document["trace_level"]
        if levels is not None and not isinstance(levels, list):
            raise JsonError("attempt to access JSON non-array as array")
        changes["trace_level"] = None if levels is None else [text_of(level) for level in cast("list[object]", levels)]
    for name in NUMBERS:
        if name in document:
            changes[name] = None if document[name] is None else [text_of(document[name])]
    return changes


def log_changes(document: Json) -> dict[str, bool | int | str]:
    """Values by setting; null leaves a setting unchanged. Raises JsonError for a value of another type."""
    if document.get("log_file") is not None:
        # It is refused, whatever else there is.
        return {"log_file": ""}
    changes: dict[str, bool | int | str] = {}
    for field in fields(LogSettings):
        if (value := document.get(field.name)) is None:
            continue
        if type(value) is not field.type or (field.type is int and value < 0):
            raise JsonError(f"attempt to access JSON non-{WORDS[field.type]} as {WORDS[field.type]}")
        changes[field.name] = value
    return changes

"""Trace and log settings over HTTP. As in Triton, unknown members of the JSON are ignored (triton-spec 5.8)."""

from __future__ import annotations

from typing import cast

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.models.runtime_settings import RuntimeSettings
from gateway.rest.body import BodyBounds, read_object
from gateway.rest.json_values import Json, JsonError
from gateway.rest.reply import send_json
from shared.process.log_settings import BOOLEANS
from shared.traces.settings import NUMBERS


class Observability:
    def __init__(self, settings: RuntimeSettings, bounds: BodyBounds) -> None:
        self._settings = settings
        self._bounds = bounds

    async def trace_settings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET and POST /v2/trace/setting, and the same of one model."""
        changes = trace_changes(await self._document(scope, receive))
        texts = await self._settings.traces(scope["path_params"].get("model", ""), changes, caller_of(scope))
        await send_json(send, {name: words if name == "trace_level" else words[0] for name, words in texts.items()})

    async def log_settings(self, scope: Scope, receive: Receive, send: Send) -> None:
        changes = log_changes(await self._document(scope, receive))
        await send_json(send, msgspec.to_builtins(await self._settings.logs(changes, caller_of(scope))))

    async def _document(self, scope: Scope, receive: Receive) -> Json:
        if scope["method"] == "GET":
            return {}
        return await read_object(scope, receive, self._bounds)


def caller_of(scope: Scope) -> str:
    host, port = scope.get("client") or ("unknown", 0)
    return f"HTTP client {host}:{port}"


def trace_changes(document: Json) -> dict[str, list[str] | None]:
    """Values by setting; null resets a setting. Raises JsonError for a value of another type."""
    changes: dict[str, list[str] | None] = {}
    if "trace_file" in document:
        changes["trace_file"] = None
    if "trace_level" in document:
        levels = document["trace_level"]
        if levels is not None and not isinstance(levels, list):
            raise JsonError("attempt to access JSON non-array as array")
        changes["trace_level"] = None if levels is None else [text(level) for level in cast("list[object]", levels)]
    for name in NUMBERS:
        if name in document:
            changes[name] = None if document[name] is None else [text(document[name])]
    return changes


def log_changes(document: Json) -> dict[str, bool | int | str]:
    """Values by setting; null leaves a setting unchanged. Raises JsonError for a value of another type."""
    given = {name: value for name, value in document.items() if value is not None}
    changes: dict[str, bool | int | str] = {}
    for name in ("log_file", "log_format"):
        if name in given:
            changes[name] = text(given[name])
    for name in BOOLEANS:
        if name in given:
            if type(given[name]) is not bool:
                raise JsonError("attempt to access JSON non-boolean as boolean")
            changes[name] = given[name]
    if "log_verbose_level" in given:
        level = given["log_verbose_level"]
        if type(level) is not int or level < 0:
            raise JsonError("attempt to access JSON non-unsigned-integer as unsigned-integer")
        changes["log_verbose_level"] = level
    return changes


def text(value: object) -> str:
    if not isinstance(value, str):
        raise JsonError("attempt to access JSON non-string as string")
    return value

"""Routes about models, except inference: readiness, metadata, configuration, statistics, repository."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import orjson
from starlette.types import Receive, Scope, Send

from gateway.models.catalog import Catalog
from gateway.models.metadata import index_line, model_metadata, statistics_document
from gateway.models.repository import RepositoryControl
from gateway.models.shared_reads import SharedDocument
from gateway.models.statistics import Statistics
from gateway.rest.body import BodyBounds, read_object
from gateway.rest.json_values import Json, JsonError, bool_of, members
from gateway.rest.operations import (
    FLAG,
    INDEX,
    LOAD,
    MODEL_CONFIG,
    MODEL_METADATA,
    MODEL_READY,
    NOTHING,
    OF_BODY,
    OF_MODEL,
    STATISTICS,
    UNLOAD,
    described,
    json_content,
)
from gateway.rest.operations import members as members_schema
from gateway.rest.reply import JSON, send_bytes, send_error, send_json
from shared.contract.errors import Code, RequestError
from shared.statistics.tally import ModelStatistics

FILE_PREFIX = "file:"


def statistics_page(statistics: Sequence[ModelStatistics]) -> bytes:
    return orjson.dumps({"model_stats": [statistics_document(each) for each in statistics]})


class Models:
    def __init__(
        self, catalog: Catalog, repository: RepositoryControl, statistics: Statistics, bounds: BodyBounds
    ) -> None:
        self._catalog = catalog
        self._repository = repository
        self._statistics = statistics
        self._statistics_page = SharedDocument(statistics_page)
        self._bounds = bounds

    @described(MODEL_READY, errors=(400,))
    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../ready: 200 when the model is served, 400 when it is unknown or not served now."""
        name, version = model_and_version(scope)
        if self._catalog.is_model_ready(name, version):
            await send_json(send, {"name": name, "ready": True})
        else:
            await send_error(send, RequestError("Model version not ready"))

    @described(MODEL_METADATA, errors=OF_MODEL)
    async def metadata(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v2/models/{model}: name, READY versions, inputs and outputs of a model."""
        await send_json(send, model_metadata(*self._catalog.record(*model_and_version(scope))))

    @described(MODEL_CONFIG, errors=OF_MODEL)
    async def config(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../config: the normalised configuration."""
        record, _ = self._catalog.record(*model_and_version(scope))
        await send_bytes(send, 200, record.config_json.encode(), (JSON,))

    @described(STATISTICS, errors=OF_MODEL)
    async def stats(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../stats: counters of one version, one model or all."""
        statistics = await self._statistics.read(*model_and_version(scope))
        await send_bytes(send, 200, self._statistics_page.of(statistics), (JSON,))

    @described(INDEX, errors=OF_BODY, body=json_content(members_schema(ready=FLAG)), optional_body=True)
    async def index(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../index: all models and versions that executors know, with their states. `ready`: READY ones alone."""
        document = await read_object(scope, receive, self._bounds, optional=True)
        ready = document.get("ready", False)
        if not isinstance(ready, bool):
            raise RequestError("Invalid value for 'ready': expected a boolean")
        await send_json(send, [index_line(entry) for entry in self._repository.index(ready_only=ready)])

    @described((200, NOTHING), errors=(*OF_BODY, *OF_MODEL), body=json_content(LOAD), optional_body=True)
    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../load: loads a model on every executor, or loads it anew. Returns when all have done it."""
        parameters = parameters_of(await read_object(scope, receive, self._bounds, optional=True))
        # In a thread, because it decodes base64 files, which may be large.
        config_json, files = await asyncio.to_thread(load_parameters, parameters)
        del parameters  # they are larger than the files, and the load may take minutes
        await self._repository.load(scope["path_params"]["model"], config_json=config_json, files=files)
        await send_bytes(send, 200, b"")

    @described((200, NOTHING), errors=(*OF_BODY, *OF_MODEL), body=json_content(UNLOAD), optional_body=True)
    async def unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../unload: unloads a model on every executor. The dependents of an ensemble are its steps' models."""
        document = await read_object(scope, receive, self._bounds, optional=True)
        # Triton takes null for no parameters here, other than in a load.
        parameters = {} if document.get("parameters") is None else parameters_of(document)
        dependents = bool_of(parameters.get("unload_dependents", False), "unload_dependents")
        await self._repository.unload(scope["path_params"]["model"], dependents=dependents)
        await send_bytes(send, 200, b"")

    @described(errors=(501,))
    async def named_repository(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../{repository}/models/{model}/load and unload: is refused. There is only one repository."""
        raise RequestError("'repository_name' specification is not supported", Code.UNSUPPORTED)


def model_and_version(scope: Scope) -> tuple[str, str]:
    """The model and version in the path; "" for one that is not in it."""
    path = scope["path_params"]
    return path.get("model", ""), path.get("version", "")


def parameters_of(document: Json) -> Json:
    """The member `parameters`, which may be missing but must be an object."""
    return members(document.get("parameters", {}))


def load_parameters(parameters: Json) -> tuple[str | None, dict[str, bytes]]:
    config_json: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if not isinstance(value, str):
            raise JsonError(f"attempt to access JSON non-string as string for parameter '{key}'")
        if key == "config":
            config_json = value
        elif key.startswith(FILE_PREFIX):
            files[key.removeprefix(FILE_PREFIX)] = _decoded(key, value)
        else:
            raise RequestError(f"unrecognized load parameter '{key}': use 'config' or 'file:<version>/<file name>'")
    return config_json, files


def _decoded(key: str, value: str) -> bytes:
    try:
        # Programs that encode files break lines.
        return base64.b64decode(value.replace("\r", "").replace("\n", ""), validate=True)
    except ValueError as error:  # binascii.Error is one; letters beyond ASCII are another
        raise RequestError(f"failed to decode parameter '{key}': its content must be base64: {error}") from error

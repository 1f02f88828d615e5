"""The routes of the v2 protocol (triton-spec 5.1). Starlette tries routes in their order, so inference comes first.

Every route belongs to a category. An operator may restrict a category to clients that send a secret header
(`gateway.restrictions`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import orjson
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import Receive, Scope, Send

from gateway.bounds.clients import CROWDED
from gateway.rest.generate import Generate
from gateway.rest.infer import Infer
from gateway.rest.models import Models
from gateway.rest.observability import Observability
from gateway.rest.openapi import PATH, document
from gateway.rest.operations import ANY_OBJECT, described
from gateway.rest.reply import JSON, Handler, RouteEndpoint, send_bytes, send_error
from gateway.rest.sequences import SequenceRoutes
from gateway.rest.server import ServerRoutes
from gateway.rest.shared_memory import CudaSharedMemory, SystemSharedMemory
from gateway.restrictions import METRICS, SEQUENCES, Restriction, of_metrics
from shared.contract.errors import UnavailableError
from shared.origins import Origins

MODEL = "/v2/models/{model}"
VERSIONED = "/v2/models/{model}/versions/{version:digits}"
REPOSITORY = "/v2/repository"
KNOWN_PATHS, KNOWN_PATH_CHARS = 256, 256
"""Of how many paths the route is kept, and how long one may be."""


class Digits(StringConvertor):
    """A version in a path, as it was written: any number of digits. The catalog checks versions."""

    regex = "[0-9]+"


register_url_convertor("digits", Digits())


class Answering(Route):
    """A route of one category. It answers other methods with 405 and a JSON body, where Starlette sends plain text."""

    def __init__(self, category: str, path: str, endpoint: RouteEndpoint) -> None:
        super().__init__(path, endpoint, methods=list(endpoint.handlers))
        # Starlette answers HEAD where it answers GET; Triton answers 405.
        self.methods = set(endpoint.handlers)
        # Starlette's `$` also matches before a newline at the end, and its `.` matches none: the path `.../42%0A` would
        # name the sequence 42, and `.../a%0Ab` no sequence at all.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z", re.DOTALL)
        self.described = category, path, endpoint

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.methods is not None, "every route names its methods"
        if scope["method"] in self.methods:
            await self.app(scope, receive, send)
            return
        refusal = b'{"error":"Method Not Allowed"}'
        headers = {"Allow": ", ".join(self.methods)}
        await Response(refusal, 405, headers, media_type="application/json")(scope, receive, send)


class Routes(Router):
    """The application. It needs no error middleware: each endpoint turns its own errors into responses.

    A client asks for the same path again and again, so what Starlette finds for a path is kept.
    """

    def __init__(self, routes: Sequence[Answering]) -> None:
        # A path with a trailing slash is a different path. By default Starlette would redirect it.
        super().__init__(routes, redirect_slashes=False)
        self._route_of = lru_cache(KNOWN_PATHS)(self._find)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_known = scope["type"] == "http" and len(scope["path"]) <= KNOWN_PATH_CHARS
        found = self._route_of(scope["path"], scope["method"]) if is_known else None
        if found is None:
            await super().app(scope, receive, send)
        else:
            route, fields = found
            scope.update(fields)
            await route.handle(scope, receive, send)

    def _find(self, path: str, method: str) -> tuple[BaseRoute, Scope] | None:
        """The route that serves a path, and what it adds to the scope; None if no route does."""
        scope: Scope = {"type": "http", "path": path, "method": method, "root_path": ""}
        found = ((route, route.matches(scope)) for route in self.routes)
        return next(((route, fields) for route, (match, fields) in found if match is Match.FULL), None)

    async def not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b'{"error":"Not Found"}', 404, media_type="application/json")(scope, receive, send)


class Crowded(Routes):
    """The application for connections beyond the bound. It refuses every path that is not among its routes."""

    async def not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request without waiting for its body."""
        await send_error(send, UnavailableError(CROWDED), (b"connection", b"close"))


@dataclass(frozen=True)
class Table:
    """Collects the routes. restrictions: by category."""

    origins: Origins
    restrictions: Mapping[str, Restriction]
    routes: list[Answering] = field(default_factory=list[Answering])

    def add(self, category: str, path: str, **handlers: Handler) -> None:
        """Adds a route. handlers: by method; other methods are refused"""
        restriction = of_metrics(self.restrictions) if category == METRICS else self.restrictions.get(category)
        self.routes.append(Answering(category, path, RouteEndpoint(handlers, self.origins, restriction)))

    @described(ANY_OBJECT)
    async def document(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v2/openapi.json: this document."""
        await send_bytes(send, 200, self._document, (JSON,))

    @cached_property
    def _document(self) -> bytes:
        """Made once: it takes some milliseconds."""
        return orjson.dumps(document(route.described for route in self.routes))


def build_app(
    infer: Infer,
    generate: Generate,
    models: Models,
    server: ServerRoutes,
    observability: Observability,
    sequences: SequenceRoutes,
    shared_memory: SystemSharedMemory,
    origins: Origins,
    restrictions: Mapping[str, Restriction],
) -> Router:
    table = Table(origins, restrictions)
    for model in (MODEL, VERSIONED):
        table.add("inference", f"{model}/infer", POST=infer.handle)
    _add_health(table, server)
    table.add("metadata", "/v2", GET=server.metadata)
    table.add("statistics", "/v2/models/stats", GET=models.stats)
    for model in (MODEL, VERSIONED):
        table.add("metadata", model, GET=models.metadata)
        table.add("health", f"{model}/ready", GET=models.ready)
        table.add("model-config", f"{model}/config", GET=models.config)
        table.add("statistics", f"{model}/stats", GET=models.stats)
        table.add("inference", f"{model}/generate", POST=generate.one)
        table.add("inference", f"{model}/generate_stream", POST=generate.stream)
    for model in (MODEL, VERSIONED):
        table.add(SEQUENCES, f"{model}/sequences", GET=sequences.list, POST=sequences.open_exported)
        one = f"{model}/sequences/{{id:path}}"
        table.add(SEQUENCES, one, GET=sequences.show, DELETE=sequences.end, POST=sequences.act)
    _add_repository(table, models)
    _add_observability(table, observability)
    _add_shared_memory(table, "/v2/systemsharedmemory", shared_memory)
    _add_shared_memory(table, "/v2/cudasharedmemory", CudaSharedMemory())
    table.add(METRICS, "/metrics", GET=server.metrics)
    table.add("metadata", PATH, GET=table.document)
    return Routes(table.routes)


def build_crowded_app(server: ServerRoutes, origins: Origins, restrictions: Mapping[str, Restriction]) -> Router:
    """The application of a port for clients beyond its bound of connections."""
    table = Table(origins, restrictions)
    _add_health(table, server)
    return Crowded(table.routes)


def build_metrics_app(server: ServerRoutes, origins: Origins, restrictions: Mapping[str, Restriction]) -> Router:
    table = Table(origins, restrictions)
    table.add(METRICS, "/metrics", GET=server.metrics)
    # Where gateways share their other ports, only here does one say how it is itself.
    _add_health(table, server)
    return Routes(table.routes)


def _add_health(table: Table, server: ServerRoutes) -> None:
    table.add("health", "/v2/health/live", GET=server.live)
    table.add("health", "/v2/health/ready", GET=server.ready)


def _add_repository(table: Table, models: Models) -> None:
    category = "model-repository"
    for base in (REPOSITORY, f"{REPOSITORY}/{{repository}}"):
        table.add(category, f"{base}/index", POST=models.index)
    table.add(category, f"{REPOSITORY}/models/{{model}}/load", POST=models.load)
    table.add(category, f"{REPOSITORY}/models/{{model}}/unload", POST=models.unload)
    for action in ("load", "unload"):
        path = f"{REPOSITORY}/{{repository}}/models/{{model}}/{action}"
        table.add(category, path, POST=models.named_repository)


def _add_observability(table: Table, observability: Observability) -> None:
    for path in ("/v2/trace/setting", f"{MODEL}/trace/setting"):
        table.add("trace", path, GET=observability.trace_settings, POST=observability.change_trace_settings)
    table.add("logging", "/v2/logging", GET=observability.log_settings, POST=observability.change_log_settings)


def _add_shared_memory(table: Table, root: str, memory: SystemSharedMemory | CudaSharedMemory) -> None:
    for base in (root, f"{root}/region/{{region}}"):
        table.add("shared-memory", f"{base}/status", GET=memory.status)
        table.add("shared-memory", f"{base}/register", POST=memory.register)
        table.add("shared-memory", f"{base}/unregister", POST=memory.unregister)

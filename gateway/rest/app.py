"""The routes of the v2 protocol (triton-spec 5.1). Starlette tries routes in their order, so inference comes first.

Every route belongs to a category. An operator may restrict a category to clients that send a secret header
(`gateway.access.restrictions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from gateway.access.origins import Origins
from gateway.access.restrictions import METRICS, SEQUENCES, Restriction, of_metrics
from gateway.bounds.clients import CROWDED
from gateway.rest.generate import Generate
from gateway.rest.infer import Infer
from gateway.rest.models import Models
from gateway.rest.observability import Observability
from gateway.rest.reply import Handler, RouteEndpoint, send_error
from gateway.rest.sequences import SequenceRoutes
from gateway.rest.server import ServerRoutes
from gateway.rest.shared_memory import CudaSharedMemory, SystemSharedMemory
from shared.contract.errors import UnavailableError

MODEL = "/v2/models/{model}"
VERSIONED = "/v2/models/{model}/versions/{version:digits}"
REPOSITORY = "/v2/repository"


class Digits(StringConvertor):
    """A version in a path, as it was written: any number of digits. The catalog checks versions."""

    regex = "[0-9]+"


register_url_convertor("digits", Digits())


class Answering(Route):
    """A route that answers other methods itself: with 405 and a JSON body, where Starlette would send plain text."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.methods is not None, "every route names its methods"
        if scope["method"] in self.methods:
            await self.app(scope, receive, send)
            return
        refusal = b'{"error":"Method Not Allowed"}'
        headers = {"Allow": ", ".join(self.methods)}
        await Response(refusal, 405, headers, media_type="application/json")(scope, receive, send)


class Routes(Router):
    """The application. It needs no error middleware: each endpoint turns its own errors into responses."""

    async def not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b'{"error":"Not Found"}', 404, media_type="application/json")(scope, receive, send)


class Crowded(Routes):
    """The application for connections beyond the bound. It refuses every path that is not among its routes."""

    async def not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request without waiting for its body."""
        await send_error(send, UnavailableError(CROWDED), (b"connection", b"close"))


@dataclass(frozen=True, slots=True)
class Table:
    """Collects the routes. restrictions: by category."""

    origins: Origins
    restrictions: Mapping[str, Restriction]
    routes: list[Route] = field(default_factory=list[Route])

    def add(self, category: str, path: str, handler: Handler, *methods: str) -> None:
        """Adds a route that answers only these methods."""
        restriction = of_metrics(self.restrictions) if category == METRICS else self.restrictions.get(category)
        endpoint = RouteEndpoint(handler, self.origins, restriction)
        route = Answering(path, endpoint, methods=list(methods))
        # Starlette answers HEAD where it answers GET; Triton answers 405.
        route.methods = set(methods)
        self.routes.append(route)


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
        table.add("inference", f"{model}/infer", infer.handle, "POST")
    _add_health(table, server)
    table.add("metadata", "/v2", server.metadata, "GET")
    table.add("statistics", "/v2/models/stats", models.stats, "GET")
    for model in (MODEL, VERSIONED):
        table.add("metadata", model, models.metadata, "GET")
        table.add("health", f"{model}/ready", models.ready, "GET")
        table.add("model-config", f"{model}/config", models.config, "GET")
        table.add("statistics", f"{model}/stats", models.stats, "GET")
        table.add("inference", f"{model}/generate", generate.one, "POST")
        table.add("inference", f"{model}/generate_stream", generate.stream, "POST")
    for model in (MODEL, VERSIONED):
        table.add(SEQUENCES, f"{model}/sequences", sequences.list, "GET")
        table.add(SEQUENCES, f"{model}/sequences/{{id:path}}", _by_method(sequences), "GET", "DELETE")
    _add_repository(table, models)
    _add_observability(table, observability)
    _add_shared_memory(table, "/v2/systemsharedmemory", shared_memory)
    _add_shared_memory(table, "/v2/cudasharedmemory", CudaSharedMemory())
    table.add(METRICS, "/metrics", server.metrics, "GET")
    return _app(table)


def build_crowded_app(server: ServerRoutes, origins: Origins, restrictions: Mapping[str, Restriction]) -> Router:
    """The application of the HTTP port for clients beyond the bound of connections."""
    table = Table(origins, restrictions)
    _add_health(table, server)
    return Crowded(table.routes, redirect_slashes=False)


def build_metrics_app(server: ServerRoutes, origins: Origins, restrictions: Mapping[str, Restriction]) -> Router:
    table = Table(origins, restrictions)
    table.add(METRICS, "/metrics", server.metrics, "GET")
    return _app(table)


def _app(table: Table) -> Router:
    # A path with a trailing slash is a different path. By default Starlette would redirect it.
    return Routes(table.routes, redirect_slashes=False)


def _by_method(sequences: SequenceRoutes) -> Handler:
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        await (sequences.end if scope["method"] == "DELETE" else sequences.show)(scope, receive, send)

    return handle


def _add_health(table: Table, server: ServerRoutes) -> None:
    table.add("health", "/v2/health/live", server.live, "GET")
    table.add("health", "/v2/health/ready", server.ready, "GET")


def _add_repository(table: Table, models: Models) -> None:
    category = "model-repository"
    for base in (REPOSITORY, f"{REPOSITORY}/{{repository}}"):
        table.add(category, f"{base}/index", models.index, "POST")
    table.add(category, f"{REPOSITORY}/models/{{model}}/load", models.load, "POST")
    table.add(category, f"{REPOSITORY}/models/{{model}}/unload", models.unload, "POST")
    for action in ("load", "unload"):
        path = f"{REPOSITORY}/{{repository}}/models/{{model}}/{action}"
        table.add(category, path, models.named_repository, "POST")


def _add_observability(table: Table, observability: Observability) -> None:
    for path in ("/v2/trace/setting", f"{MODEL}/trace/setting"):
        table.add("trace", path, observability.trace_settings, "GET", "POST")
    table.add("logging", "/v2/logging", observability.log_settings, "GET", "POST")


def _add_shared_memory(table: Table, root: str, memory: SystemSharedMemory | CudaSharedMemory) -> None:
    for base in (root, f"{root}/region/{{region}}"):
        table.add("shared-memory", f"{base}/status", memory.status, "GET")
        table.add("shared-memory", f"{base}/register", memory.register, "POST")
        table.add("shared-memory", f"{base}/unregister", memory.unregister, "POST")

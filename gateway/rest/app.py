"""The routes of the v2 protocol (triton-spec 5.1). Inference first: routes are tried in this order."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.rest.infer import Infer
from gateway.rest.models import Models
from gateway.rest.reply import Endpoint, Handler
from gateway.rest.server import NO_LOG_SETTINGS, NO_SHARED_MEMORY, NO_TRACE_SETTINGS, Server

VERSIONED = "/v2/models/{model}/versions/{version:int}"
MODEL = "/v2/models/{model}"
REPOSITORY = "/v2/repository"


def build_app(infer: Infer, models: Models, server: Server) -> Starlette:
    """The application of the HTTP port."""
    return Starlette(
        routes=[
            _post(f"{MODEL}/infer", infer.handle),
            _post(f"{VERSIONED}/infer", infer.handle),
            _get("/v2/health/live", server.live),
            _get("/v2/health/ready", server.ready),
            _get("/v2", server.metadata),
            _get("/v2/models/stats", models.stats),
            *_model_routes(models),
            *_repository_routes(models),
            *_refused_routes(),
            _get("/metrics", server.metrics),
        ],
        exception_handlers={404: _not_found, 405: _method_not_allowed},
    )


def build_metrics_app(server: Server) -> Starlette:
    """The application of the metrics port."""
    return Starlette(
        routes=[_get("/metrics", server.metrics)],
        exception_handlers={404: _not_found, 405: _method_not_allowed},
    )


def _model_routes(models: Models) -> list[Route]:
    return [
        _get(base + path, handler)
        for base in (MODEL, VERSIONED)
        for path, handler in (
            ("", models.metadata),
            ("/ready", models.ready),
            ("/config", models.config),
            ("/stats", models.stats),
        )
    ]


def _repository_routes(models: Models) -> list[Route]:
    return [
        _post(f"{REPOSITORY}/index", models.index),
        _post(f"{REPOSITORY}/{{repository}}/index", models.index),
        _post(f"{REPOSITORY}/models/{{model}}/load", models.load),
        _post(f"{REPOSITORY}/models/{{model}}/unload", models.unload),
        _post(f"{REPOSITORY}/{{repository}}/models/{{model}}/load", models.named_repository),
        _post(f"{REPOSITORY}/{{repository}}/models/{{model}}/unload", models.named_repository),
    ]


def _refused_routes() -> list[Route]:
    refused = [
        Route(path, NO_TRACE_SETTINGS, methods=["GET", "POST"])
        for path in ("/v2/trace/setting", f"{MODEL}/trace/setting")
    ]
    refused.append(Route("/v2/logging", NO_LOG_SETTINGS, methods=["GET", "POST"]))
    for kind in ("systemsharedmemory", "cudasharedmemory"):
        for base in (f"/v2/{kind}", f"/v2/{kind}/region/{{region}}"):
            refused.append(Route(f"{base}/status", NO_SHARED_MEMORY, methods=["GET"]))
            refused.append(Route(f"{base}/unregister", NO_SHARED_MEMORY, methods=["POST"]))
        refused.append(Route(f"/v2/{kind}/region/{{region}}/register", NO_SHARED_MEMORY, methods=["POST"]))
    return refused


def _get(path: str, handler: Handler) -> Route:
    return Route(path, Endpoint(handler), methods=["GET"])


def _post(path: str, handler: Handler) -> Route:
    return Route(path, Endpoint(handler), methods=["POST"])


async def _not_found(_request: Request, _error: Exception) -> Response:
    return Response(b'{"error":"Not Found"}', 404, media_type="application/json")


async def _method_not_allowed(_request: Request, error: Exception) -> Response:
    headers = error.headers if isinstance(error, HTTPException) else None
    return Response(b'{"error":"Method Not Allowed"}', 405, headers, media_type="application/json")

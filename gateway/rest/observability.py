"""Trace and log settings over HTTP (triton-spec 5.8). They are not kept for the mesh yet: every request is refused."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from shared.errors import Code, RequestError

TRACE_REFUSAL = (
    "trace settings cannot be read or changed over this protocol: tracing is configured by the OTEL_ environment "
    "variables of each service"
)
LOG_REFUSAL = "log settings cannot be read or changed over this protocol: each service has --log-level and --log-format"


class Observability:
    """Handlers; each answers one route."""

    async def trace_settings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET and POST /v2/trace/setting, and the same of one model."""
        raise RequestError(TRACE_REFUSAL, Code.UNSUPPORTED)

    async def log_settings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET and POST /v2/logging."""
        raise RequestError(LOG_REFUSAL, Code.UNSUPPORTED)

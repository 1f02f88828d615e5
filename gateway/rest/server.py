"""What the gateway says about itself: health, metadata, metrics, and what it does not serve."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gateway.catalog import Catalog
from gateway.metadata import EXTENSIONS, SERVER_NAME, SHARED_MEMORY_REFUSAL, server_version
from gateway.metrics import Metrics
from gateway.rest.reply import Endpoint, send_bytes, send_error, send_json
from shared.errors import Code, RequestError, UnavailableError
from shared.lifecycle import Stop

METRICS_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class Server:
    """Handlers; each answers one route."""

    def __init__(self, catalog: Catalog, metrics: Metrics, stop: Stop) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._stop = stop
        self._metadata = {"name": SERVER_NAME, "version": server_version(), "extensions": EXTENSIONS}

    async def live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v2/health/live: this process works."""
        self._refuse_while_stopping()
        await send_bytes(send, 200, b"")

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v2/health/ready: 200 when the mesh can serve, else 400."""
        self._refuse_while_stopping()
        await send_bytes(send, 200 if self._catalog.is_ready else 400, b"")

    async def metadata(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v2."""
        await send_json(send, self._metadata)

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics, in Prometheus' text format."""
        await send_bytes(send, 200, await self._metrics.render(), (METRICS_TYPE,))

    def _refuse_while_stopping(self) -> None:
        if self._stop.requested:
            raise UnavailableError("Server exiting")


def refuse(reason: str) -> Endpoint:
    """A route that exists in the protocol and is not served here: 501, and why."""

    async def refusing(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send_error(send, RequestError(reason, Code.UNSUPPORTED))

    return Endpoint(refusing)


NO_SHARED_MEMORY = refuse(SHARED_MEMORY_REFUSAL)
NO_TRACE_SETTINGS = refuse(
    "trace settings cannot be read or changed over this protocol: tracing is configured by the OTEL_ environment "
    "variables of each service"
)
NO_LOG_SETTINGS = refuse(
    "log settings cannot be read or changed over this protocol: each service has --log-level and --log-format"
)

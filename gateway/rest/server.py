"""Routes about the server: health, metadata, metrics.

Answers of health have the bodies of the Open Inference Protocol, which KServe's client reads. Triton sends the status
alone.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.models.catalog import Catalog
from gateway.models.exposition import OPENMETRICS_TYPE, TEXT_TYPE, wants_openmetrics
from gateway.models.metadata import extensions_of
from gateway.models.metrics import Metrics
from gateway.rest.operations import LIVE, NOT_READY, READY, SERVER_METADATA, TEXT, described, json_content
from gateway.rest.reply import send_bytes, send_json
from shared.contract.errors import UnavailableError
from shared.process.lifecycle import Stop
from shared.store.release import RELEASE


class ServerRoutes:
    """The handlers. Each answers one route. name, shared_memory: for the server's metadata."""

    def __init__(self, catalog: Catalog, metrics: Metrics, stop: Stop, *, name: str, shared_memory: bool) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._stop = stop
        self._metadata = {"name": name, "version": RELEASE, "extensions": extensions_of(shared_memory=shared_memory)}

    @described(LIVE)
    async def live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v2/health/live: 200 while this process serves, an error while it stops."""
        self._refuse_while_stopping()
        await send_json(send, {"live": True})

    @described((200, json_content(READY)), (400, json_content(NOT_READY)))
    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v2/health/ready: 200 when the mesh can serve, else 400 and the cause."""
        self._refuse_while_stopping()
        if cause := self._catalog.obstacle:
            await send_json(send, {"ready": False, "error": cause}, 400)
        else:
            await send_json(send, {"ready": True})

    @described(SERVER_METADATA)
    async def metadata(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v2: name, release and extensions of the server."""
        await send_json(send, self._metadata)

    @described((200, {"text/plain": TEXT, "application/openmetrics-text": TEXT}))
    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics: the metrics of the mesh and of this gateway, for Prometheus; OpenMetrics by `Accept`."""
        accept = ",".join(Headers(scope=scope).getlist("accept"))
        openmetrics = wants_openmetrics(accept)
        kind = OPENMETRICS_TYPE if openmetrics else TEXT_TYPE
        page = await self._metrics.render(openmetrics=openmetrics)
        await send_bytes(send, 200, page, ((b"content-type", kind.encode()), (b"vary", b"accept")))

    def _refuse_while_stopping(self) -> None:
        if self._stop.requested:
            raise UnavailableError("Server exiting")

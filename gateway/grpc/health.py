"""`grpc.health.v1.Health` for load balancers and orchestrators: Check and Watch.

The messages are those of grpcio-health-checking. Its asyncio servicer is not used, for two reasons. It keeps one
condition per service name and drops it when any watcher leaves, after which the other watchers hear no change. And an
open Watch would delay a graceful stop until its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from grpc_health.v1 import health_pb2

from gateway.grpc.wire.rpc import Rpc
from shared.contract.errors import Code, RequestError

OVERALL = ""
INFERENCE_SERVICE = "inference.GRPCInferenceService"
SERVICES = frozenset({OVERALL, INFERENCE_SERVICE})
"""Names that a client can ask for: the server as a whole and its one service. Both always have the same status."""

_messages: Any = health_pb2  # made at run time, without stubs
SERVING: int = _messages.HealthCheckResponse.SERVING
NOT_SERVING: int = _messages.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = _messages.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """The health service of one gateway.

    is_ready  whether the gateway can serve requests now; called at every Check, and at every `refresh` for Watch
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._stopping = False
        self._told = self.status()
        self._changed = asyncio.Event()

    def status(self) -> int:
        """The present status: SERVING or NOT_SERVING."""
        return SERVING if self._is_ready() and not self._stopping else NOT_SERVING

    def refresh(self) -> None:
        """Tells the watchers if the status has changed."""
        if self._told != self.status():
            self._told = self.status()
            self._wake_watchers()

    def stop(self) -> None:
        """Sets NOT_SERVING for good. Watchers are told, and their calls end."""
        self._stopping = True
        self.refresh()
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        # Watchers that wait now hold the old event, which is set. The next wait uses the new one.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Rpc) -> Any:  # noqa: N802  (the rpc's name)
        """The status of a service; NOT_FOUND for an unknown one."""
        if request.service not in SERVICES:
            raise RequestError(f"unknown service '{request.service}'", Code.NOT_FOUND)
        return _messages.HealthCheckResponse(status=self.status())

    async def Watch(self, request: Any, context: Rpc) -> None:  # noqa: N802  (the rpc's name)
        """The status of a service now and after every change, until the client leaves or the server stops."""
        known = request.service in SERVICES
        told: int | None = None
        while True:
            changed = self._changed
            status = self.status() if known else SERVICE_UNKNOWN
            if status != told:
                told = status
                await context.write(_messages.HealthCheckResponse(status=status).SerializeToString())
            if self._stopping:
                return
            # If the event was replaced during the write, the status may have changed: look again without waiting.
            if changed is self._changed:
                await changed.wait()

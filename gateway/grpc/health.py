"""`grpc.health.v1.Health` for load balancers and orchestrators: Check and Watch.

The messages are grpcio-health-checking's. Its asyncio servicer is not used: it keeps one condition per service name and
forgets it when any watcher leaves, so that the others are never told again; and an open Watch would hold up a graceful
stop until its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

OVERALL = ""
INFERENCE_SERVICE = "inference.GRPCInferenceService"
SERVICES = frozenset({OVERALL, INFERENCE_SERVICE})
"""What can be asked for: the server as a whole, and the one service it offers. They are healthy together."""

_messages: Any = health_pb2  # made at run time, without stubs
_base: Any = health_pb2_grpc.HealthServicer
SERVING: int = _messages.HealthCheckResponse.SERVING
NOT_SERVING: int = _messages.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = _messages.HealthCheckResponse.SERVICE_UNKNOWN


class Health(_base):
    """Answers for one server.

    is_ready  whether the gateway can serve requests now; asked at every Check, and at every `refresh` for Watch
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._stopping = False
        self._told = self.status()
        self._changed = asyncio.Event()

    def status(self) -> int:
        """SERVING or NOT_SERVING, now."""
        return SERVING if self._is_ready() and not self._stopping else NOT_SERVING

    def refresh(self) -> None:
        """Tells the watchers when the status differs from what they know."""
        if self._told != self.status():
            self._told = self.status()
            self._wake_watchers()

    def stop(self) -> None:
        """NOT_SERVING from now on; watchers are told so and their calls end."""
        self._stopping = True
        self.refresh()
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        # A new event for those who wait next; whoever waits for the old one still holds it.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  (the rpc's name)
        """The status of a service; NOT_FOUND for one that is not here."""
        if request.service not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service '{request.service}'")
        return _messages.HealthCheckResponse(status=self.status())

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802  (the rpc's name)
        """The status of a service now and after every change, until the client leaves or the server stops."""
        known = request.service in SERVICES
        told: int | None = None
        while True:
            changed = self._changed
            status = self.status() if known else SERVICE_UNKNOWN
            if status != told:
                told = status
                await context.write(_messages.HealthCheckResponse(status=status))
            if self._stopping:
                return
            if changed is self._changed:
                await changed.wait()

"""Shared memory over HTTP (triton-spec 5.9): there is none. Client, gateway and executor need not share a machine.

Questions for its status are answered, because clients ask them to clean up; there is never a region. What would make
or remove one is refused.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gateway.models.metadata import SHARED_MEMORY_REFUSAL
from gateway.rest.reply import send_json
from shared.contract.errors import Code, RequestError


class SharedMemory:
    """Handlers; each answers one route. kind: "system" or "cuda", for messages."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../status: no region, of whatever name."""
        region = scope["path_params"].get("region")
        if region is not None:
            raise RequestError(f"Unable to find {self._kind} shared memory region: '{region}'", Code.NOT_FOUND)
        await send_json(send, [])

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../register and .../unregister."""
        raise RequestError(SHARED_MEMORY_REFUSAL, Code.UNSUPPORTED)

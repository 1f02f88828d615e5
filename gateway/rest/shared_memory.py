"""The shared memory extension over HTTP (triton-spec 5.9), which a mesh cannot have: client, gateway and executor need
not share a machine.

Status requests are answered with no region, because clients send them to clean up. Requests to register or unregister a
region are refused.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gateway.models.metadata import SHARED_MEMORY_REFUSAL
from gateway.rest.reply import send_json
from shared.contract.errors import Code, RequestError


class SharedMemory:
    """The handlers. Each answers one route. kind: "system" or "cuda", for error texts."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../status: never a region."""
        region = scope["path_params"].get("region")
        if region is not None:
            raise RequestError(f"Unable to find {self._kind} shared memory region: '{region}'", Code.NOT_FOUND)
        await send_json(send, [])

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../register and .../unregister."""
        raise RequestError(SHARED_MEMORY_REFUSAL, Code.UNSUPPORTED)

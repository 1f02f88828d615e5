"""The shared memory extensions over HTTP (triton-spec 5.9). `gateway.requests.regions` holds the regions."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.requests.regions import Regions, cuda_refusal
from gateway.rest.body import BodyBounds, read_object
from gateway.rest.json_values import Json, text_of, unsigned_of
from gateway.rest.operations import NOTHING, OF_BODY, REGION, REGIONS, described, json_content
from gateway.rest.reply import JSON, send_bytes, send_json
from shared.contract.errors import Code, RequestError


class SystemSharedMemory:
    """The handlers of system shared memory. Each answers one route."""

    def __init__(self, regions: Regions, bounds: BodyBounds) -> None:
        self._regions = regions
        self._bounds = bounds

    @described(REGIONS, errors=(404,))
    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../status: lists every region, or the one that the path names."""
        await send_json(send, msgspec.to_builtins(self._regions.status(_region_of(scope))))

    @described((200, NOTHING), errors=(*OF_BODY, 404, 429), body=json_content(REGION))
    async def register(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../register: registers a region of system shared memory, under the name in the path."""
        key, offset, byte_size = registration(await read_object(scope, receive, self._bounds))
        self._regions.register(_region_of(scope), key, offset, byte_size)
        await send_bytes(send, 200, b"", (JSON,))

    @described((200, NOTHING))
    async def unregister(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../unregister: closes every region, or the one that the path names."""
        self._regions.unregister(_region_of(scope))
        await send_bytes(send, 200, b"", (JSON,))


class CudaSharedMemory:
    """The handlers of CUDA memory, of which a gateway has none."""

    @described(REGIONS, errors=(404,))
    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../status: an empty list. Of a region that the path names: it is not there."""
        if region := _region_of(scope):
            raise RequestError(f"Unable to find cuda shared memory region: '{region}'", Code.NOT_FOUND)
        await send_json(send, [])

    @described(errors=(501,))
    async def register(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../register: is refused, because a gateway has no GPU."""
        raise cuda_refusal(_region_of(scope))

    @described((200, NOTHING))
    async def unregister(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../unregister: does nothing, because no region can be registered."""
        await send_bytes(send, 200, b"", (JSON,))


def registration(document: Json) -> tuple[str, int, int]:
    """Key, offset and size of a region, looked at in this order, as in Triton.

    raises  RequestError for one that is missing, or of another type
    """
    key = text_of(_needed(document, "key"))
    offset = unsigned_of(document.get("offset", 0))
    return key, offset, unsigned_of(_needed(document, "byte_size"))


def _needed(document: Json, field: str) -> object:
    if field not in document:
        raise RequestError(f"Shared memory register request has no '{field}' field")
    return document[field]


def _region_of(scope: Scope) -> str:
    """The region that the path names, "" for none."""
    return scope["path_params"].get("region", "")

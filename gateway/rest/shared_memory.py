"""The shared memory extensions over HTTP (triton-spec 5.9). `gateway.requests.regions` holds the regions."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gateway.requests.regions import Regions, cuda_refusal
from gateway.rest.body import BodyBounds, read_object
from gateway.rest.json_values import text_member, unsigned_member
from gateway.rest.reply import JSON, send_bytes, send_json
from shared.contract.errors import Code, RequestError


class SystemSharedMemory:
    """The handlers of system shared memory. Each answers one route."""

    def __init__(self, regions: Regions, bounds: BodyBounds) -> None:
        self._regions = regions
        self._bounds = bounds

    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../status: every region, or the one that the path names."""
        regions = self._regions.status(_region_of(scope))
        fields = ("name", "key", "offset", "byte_size")
        await send_json(send, [{field: getattr(region, field) for field in fields} for region in regions])

    async def register(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../region/{region}/register."""
        document = await read_object(scope, receive, self._bounds, optional=True)
        offset = unsigned_member(document, "offset") if "offset" in document else 0
        self._regions.register(
            _region_of(scope), text_member(document, "key"), offset, unsigned_member(document, "byte_size")
        )
        await send_bytes(send, 200, b"", (JSON,))

    async def unregister(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../unregister: every region, or the one that the path names."""
        self._regions.unregister(_region_of(scope))
        await send_bytes(send, 200, b"", (JSON,))


class CudaSharedMemory:
    """The handlers of CUDA memory, of which a gateway has none."""

    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../status: never a region."""
        if region := _region_of(scope):
            raise RequestError(f"Unable to find cuda shared memory region: '{region}'", Code.NOT_FOUND)
        await send_json(send, [])

    async def register(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../region/{region}/register."""
        raise cuda_refusal(_region_of(scope))

    async def unregister(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../unregister: there is nothing to do."""
        await send_bytes(send, 200, b"", (JSON,))


def _region_of(scope: Scope) -> str:
    """The region that the path names, "" for none."""
    return scope["path_params"].get("region", "")

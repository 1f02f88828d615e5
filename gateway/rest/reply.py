"""Sends responses: bytes, JSON, and errors in the protocol's form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from gateway.requests.status import http_error, told_of
from gateway.rest.body import ClientLeftError
from gateway.rest.compression import UnsupportedEncodingError
from gateway.restrictions import Restriction
from shared.contract.errors import Code, MeshError, RequestError
from shared.origins import Origins

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")
BINARY: Header = (b"content-type", b"application/octet-stream")
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def session_headers(session_id: str | None) -> tuple[Header, ...]:
    """The header that tells a client the id of its session, if it has one."""
    return () if session_id is None else ((b"inference-session-id", session_id.encode()),)


async def send_bytes(send: Send, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
    """Sends a response whose body is there as a whole."""
    await send(
        {"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", b"%d" % len(body))]}
    )
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, document: Any, status: int = 200) -> None:
    await send_bytes(send, status, orjson.dumps(document), (JSON,))


async def send_error(send: Send, error: MeshError, *headers: Header) -> None:
    """Sends an error as `{"error": ...}`, with the status of its code."""
    if isinstance(error, ClientLeftError):
        return
    status, body = http_error(error)
    if isinstance(error, UnsupportedEncodingError):
        headers += ((b"accept-encoding", b"gzip, deflate"),)
    if (seconds := error.retry_after_s) is not None:
        headers += ((b"retry-after", b"%d" % seconds),)
    await send_bytes(send, status, orjson.dumps(body), (JSON, *headers))


class RouteEndpoint:
    """A route as an ASGI application. MeshErrors become responses; an unexpected error is logged and becomes a 500.

    handlers     by method; no other method may come
    origins      refuses requests of foreign web pages
    restriction  the secret header that a request must carry, if any
    """

    def __init__(
        self, handlers: Mapping[str, Handler], origins: Origins, restriction: Restriction | None = None
    ) -> None:
        self.handlers = handlers
        self._origins = origins
        self.restriction = restriction

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if refusal := self._origins.refusal(scope):
                raise RequestError(refusal, Code.FORBIDDEN)
            if self.restriction is not None:
                name = self.restriction.key.encode()
                if not self.restriction.is_met(value for key, value in scope["headers"] if key == name):
                    text = f"This API is restricted, expecting header '{self.restriction.key}'"
                    raise RequestError(text, Code.FORBIDDEN)
            await self.handlers[scope["method"]](scope, receive, send)
        except Exception as error:  # noqa: BLE001  the last place before the connection: the client must hear something
            await send_error(send, told_of(error, "request failed unexpectedly", path=scope["path"]))

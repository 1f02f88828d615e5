"""Sending responses: JSON, errors in the protocol's form, and bytes as they are."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from gateway.rest.body import ClientLeftError, TooSlowError, UnreadBodyError
from gateway.rest.compression import UnsupportedEncodingError
from gateway.restrictions import Restriction
from gateway.status import http_error
from shared import logs
from shared.errors import MeshError

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")
BINARY: Header = (b"content-type", b"application/octet-stream")
REQUEST_TIMEOUT = 408
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


async def send_bytes(send: Send, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
    """One whole response."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, document: Any, status: int = 200) -> None:
    """A JSON response."""
    await send_bytes(send, status, orjson.dumps(document), (JSON,))


async def send_error(send: Send, error: MeshError, *headers: Header) -> None:
    """An error as `{"error": ...}`, with the status of its code."""
    if isinstance(error, ClientLeftError):
        return
    status, body = http_error(error)
    if isinstance(error, TooSlowError):
        status = REQUEST_TIMEOUT
    if isinstance(error, UnsupportedEncodingError):
        headers += ((b"accept-encoding", b"gzip, deflate"),)
    await send_bytes(send, status, orjson.dumps(body), (JSON, *headers))


def is_open(scope: Scope, restriction: Restriction) -> bool:
    """Whether a request carries the header that opens its route."""
    given = [value for name, value in scope["headers"] if name == restriction.key.encode("latin-1")]
    expected = restriction.value.encode()
    return any(hmac.compare_digest(value, expected) for value in given)


class Endpoint:
    """A handler as an ASGI application: errors become responses, and a mistake of ours a 500 that is logged.

    restriction  the header that a request must carry, if any
    """

    def __init__(self, handler: Handler, restriction: Restriction | None = None) -> None:
        self._handler = handler
        self._restriction = restriction

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._restriction is not None and not is_open(scope, self._restriction):
                error = f"This API is restricted, expecting header '{self._restriction.key}'"
                await send_json(send, {"error": error}, 403)
                return
            await self._handler(scope, receive, send)
        except UnreadBodyError as error:
            await send_error(send, error.refusal, (b"connection", b"close"))
        except MeshError as error:
            await send_error(send, error)
        except Exception as error:  # noqa: BLE001  the last place before the connection: the client must hear something
            logs.error("request failed unexpectedly", error, path=scope["path"])
            await send_json(send, {"error": f"internal error in the gateway: {type(error).__name__}"}, 500)

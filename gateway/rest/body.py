"""Reading request bodies within bounds, and the few headers that a request is read by."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import Receive, Scope

from gateway.rest.compression import too_large, unpack
from gateway.rest.json_values import Json, parse_object
from shared.errors import Code, MeshError, RequestError

BULKY_BYTES = 1 << 18
"""JSON beyond this size is read and written beside the event loop: 64 MiB of numbers take seconds."""
LINGER_S = 2.0
"""How long a client may go on sending after its request was refused."""
NUMBER_DIGITS_MAX = 20
TRACE_HEADERS = {b"traceparent": "traceparent", b"tracestate": "tracestate"}


class ClientLeftError(MeshError):
    """The connection was closed before the request was complete or answered; there is nobody to tell."""

    code = Code.CANCELLED


@dataclass(slots=True)
class Headers:
    """What the gateway reads of a request's headers."""

    content_length: int | None = None
    content_encoding: str = ""
    accept_encoding: str = ""
    header_length: int | None = None
    session_id: str | None = None
    trace: Mapping[str, str] = field(default_factory=dict[str, str])


def read_headers(scope: Scope) -> Headers:
    """The headers of a request. Raises RequestError for a length that is no number."""
    headers = Headers()
    trace: dict[str, str] = {}
    for name, value in scope["headers"]:
        match name:
            case b"content-length":
                headers.content_length = _number("Content-Length", value)
            case b"inference-header-content-length":
                headers.header_length = _number("Inference-Header-Content-Length", value, signed=True)
            case b"content-encoding":
                headers.content_encoding = value.decode("latin-1")
            case b"accept-encoding":
                headers.accept_encoding = value.decode("latin-1")
            case b"inference-session-id":
                headers.session_id = value.decode("utf-8", "replace")
            case b"traceparent" | b"tracestate":
                trace[TRACE_HEADERS[name]] = value.decode("latin-1")
            case _:
                pass
    headers.trace = trace
    return headers


def _number(name: str, value: bytes, *, signed: bool = False) -> int:
    if not (value.removeprefix(b"-") if signed else value).isdigit() or len(value) > NUMBER_DIGITS_MAX:
        raise RequestError(f"Unable to parse {name}, got: {value.decode('latin-1')}")
    return int(value)


async def read_body(receive: Receive, headers: Headers, *, size_max: int) -> bytes:
    """The whole body, unpacked; never more than `size_max` bytes of it are held.

    raises  RequestError for a larger one, ClientLeftError when it ends early
    """
    if headers.content_length is not None and headers.content_length > size_max:
        raise too_large(headers.content_length, size_max)
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientLeftError("the client left before the request was complete")
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        body = await _read_rest(receive, body, size_max)
    if len(body) > size_max:
        raise too_large(len(body), size_max)
    if headers.content_encoding:
        # A few bytes may become many: nobody else should wait for them.
        return await asyncio.to_thread(unpack, body, headers.content_encoding, size_max=size_max)
    return body


async def read_object(scope: Scope, receive: Receive, *, size_max: int, optional: bool = False) -> Json:
    """The members of a JSON body. optional: nothing but spaces is an object without any.

    raises  as `read_body` and `parse_object`
    """
    body = await read_body(receive, read_headers(scope), size_max=size_max)
    if optional and not body.strip():
        return {}
    return await asyncio.to_thread(parse_object, body) if len(body) > BULKY_BYTES else parse_object(body)


async def discard(receive: Receive) -> None:
    """Reads the rest of a refused body for a while and throws it away.

    A connection that is closed with unread data is reset, and the client would lose the answer that says why.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass


async def _read_rest(receive: Receive, first: bytes, size_max: int) -> bytes:
    parts = [first]
    size = len(first)
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError("the client left before the request was complete")
        part = message.get("body", b"")
        size += len(part)
        if size > size_max:
            raise too_large(size, size_max)
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)

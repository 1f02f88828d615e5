"""Reading request bodies within bounds, and the few headers that a request is read by."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import Receive, Scope

from gateway.rest.compression import PIECE_BYTES, BodyTooLargeError, is_packed, too_large, unpacked
from gateway.rest.json_values import Json, parse_object
from gateway.room import Place, Room
from shared.errors import Code, MeshError, RequestError, UnavailableError

BULKY_BYTES = 1 << 18
"""JSON beyond this size is read and written beside the event loop: 64 MiB of numbers take seconds."""
PATIENCE_S = 30.0
"""How long a body may take to come, on top of what SLOWEST_BYTES_S allows: nobody keeps room by sending nothing."""
SLOWEST_BYTES_S = 64 << 10
"""Bytes per second that a client sends at least."""
SMALL_BYTES = 64 << 10
"""A body that is announced with no more may take as long as it likes to come."""
LINGER_S = 2.0
"""How long a body may take to come that is too large."""
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


class TooSlowError(RequestError):
    """A body that does not come."""


class UnreadBodyError(Exception):
    """A request was refused, and part of its body is still to come: no other request can follow on this connection."""

    def __init__(self, refusal: MeshError) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """How bodies are received. size_max: of one, unpacked, bytes; room: for all that are held."""

    size_max: int
    room: Room


async def read_body(receive: Receive, headers: Headers, size_max: int, place: Place) -> bytes:
    """The whole body, unpacked; never more than `size_max` bytes of it are held, and each of them counts.

    What is left of a body that is refused is read and thrown away, for a while: a connection that is closed with unread
    data is reset, and a client that is still sending would lose the answer that says why.

    size_max  bytes
    place     what it takes of the gateway's room, until the caller leaves it
    raises    RequestError for a larger one, UnavailableError where there is no room; UnreadBodyError where it was one
              of these, or slowness, and the client goes on sending; ClientLeftError when it ends early
    """
    length = headers.content_length
    if length is not None and length <= min(SMALL_BYTES, size_max):
        body = await _received_small(receive, length, place)
    else:
        body = await _received(receive, headers, size_max, place)
    if is_packed(headers.content_encoding):
        return await _unpacked(body, headers.content_encoding, size_max, place)
    return body


async def read_object(scope: Scope, receive: Receive, bounds: BodyBounds, *, optional: bool = False) -> Json:
    """The members of a JSON body. optional: nothing but spaces is an object without any.

    raises  as `read_body` and `parse_object`
    """
    with bounds.room.place() as place:
        body = await read_body(receive, read_headers(scope), bounds.size_max, place)
        if optional and not body.strip():
            return {}
        return await asyncio.to_thread(parse_object, body) if len(body) > BULKY_BYTES else parse_object(body)


async def _received_small(receive: Receive, length: int, place: Place) -> bytes:
    """One that nobody needs to watch: it takes hardly any room, and a timer would take most of the time."""
    refusal = _refusal(length, length, place)
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError("the client left before the request was complete")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > length:
            raise UnreadBodyError(RequestError("the request's body is longer than its Content-Length"))
    if refusal is not None:
        raise refusal
    return body


async def _received(receive: Receive, headers: Headers, size_max: int, place: Place) -> bytes:
    # Not a list of parts: of chunks of a few bytes the objects would take many times as much.
    body = bytearray()
    size = 0
    more = True
    now = asyncio.get_running_loop().time
    began = now()
    refusal = _refusal(headers.content_length or 0, size_max, place)
    try:
        async with asyncio.timeout(LINGER_S if isinstance(refusal, BodyTooLargeError) else PATIENCE_S) as patience:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError("the client left before the request was complete")
                part: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                size += len(part)
                if refusal is None:
                    body += part
                    refusal = _refusal(size, size_max, place)
                    if isinstance(refusal, BodyTooLargeError):
                        patience.reschedule(now() + LINGER_S)
                if refusal is not None:
                    body.clear()
                    place.leave()
                if size > SLOWEST_BYTES_S and not isinstance(refusal, BodyTooLargeError):
                    patience.reschedule(began + PATIENCE_S + size / SLOWEST_BYTES_S)
    except TimeoutError:
        slow = TooSlowError(f"the request's body does not come: {size} bytes in {now() - began:.1f} s")
        raise UnreadBodyError(refusal or slow) from None
    if refusal is not None:
        raise refusal
    return bytes(body)


def _refusal(size: int, size_max: int, place: Place) -> MeshError | None:
    """Why a body of so many bytes is not taken; None: it has its place."""
    if size > size_max:
        return too_large(size, size_max)
    try:
        place.hold(size)
    except UnavailableError as full:
        return full
    return None


async def _unpacked(body: bytes, encoding: str, size_max: int, place: Place) -> bytes:
    parts: list[bytes] = []
    size = 0
    pieces = unpacked(body, encoding, size_max=size_max)
    # Beside the loop: nobody else should wait for it.
    while piece := await asyncio.to_thread(next, pieces, b""):
        parts.append(piece)
        size += len(piece)
        place.hold(len(body) + size)
        if len(piece) < PIECE_BYTES:
            break
    return b"".join(parts)

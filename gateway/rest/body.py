"""Reads request bodies within bounds, and the few headers that say how to read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from starlette.types import Receive, Scope

from gateway.bounds.byte_budget import ByteBudget, Reservation
from gateway.bounds.fair_lock import through_in_thread
from gateway.bounds.inflate import gathered
from gateway.ports.seats import client_of
from gateway.requests.headers import only_value
from gateway.rest.compression import is_packed, too_large, unpacked
from gateway.rest.json_values import Json, parse_object, parsing_bytes
from shared.contract.errors import Code, MeshError, RequestError
from shared.contract.tenants import tenant_of

BULKY_BYTES = 1 << 15
"""JSON beyond this size is parsed and written in a thread. Up to it it blocks the event loop for 1 ms if it is numbers,
for 5 if it is empty arrays."""
NUMBER_DIGITS_MAX = 20
KNOWN_HEADERS = 256
"""How many requests' headers are kept when they have been read: a client sends the same ones again and again."""


class ClientLeftError(MeshError):
    """The client closed the connection before its request was complete or answered. The error reaches nobody."""

    code = Code.CANCELLED


@dataclass(frozen=True, slots=True)
class Headers:
    """What a request's headers say of its body and of its caller.

    header_length  of the JSON at the body's begin; None: it is all of the body
    """

    content_length: int | None = None
    content_encoding: str = ""
    accept_encoding: str = ""
    header_length: int | None = None
    session_id: str | None = None
    tenant: str = ""
    trace: Mapping[str, str] = field(default_factory=dict[str, str])


def read_headers(scope: Scope) -> Headers:
    """The headers of a request. Raises RequestError for a length that is no number, for what is not one tenant, and for
    two sessions or two lengths.
    """
    fields = scope["headers"]
    # Our own server gives a tuple where other requests have the very same headers (`gateway.http.llhttp_request`).
    return _known(cast("tuple[tuple[bytes, bytes], ...]", fields)) if isinstance(fields, tuple) else _read(fields)


def _read(fields: Iterable[tuple[bytes, bytes]]) -> Headers:
    found: dict[str, Any] = {}
    trace: dict[str, str] = {}
    for name, value in fields:
        match name:
            case b"content-length":
                found["content_length"] = _number("Content-Length", value)
            case b"inference-header-content-length":
                length = _number("Inference-Header-Content-Length", value, signed=True)
                what = "header 'Inference-Header-Content-Length'"
                found["header_length"] = only_value(what, length, found.get("header_length"))
            case b"content-encoding" | b"accept-encoding":
                found[name.decode().replace("-", "_")] = value.decode("latin-1")
            case b"inference-session-id":
                what = "header 'Inference-Session-Id'"
                found["session_id"] = only_value(what, _session_id(value), found.get("session_id"))
            case b"seqmesh-tenant":
                found["tenant"] = tenant_of(value.decode("latin-1"), found.get("tenant", ""))
            case b"traceparent" | b"tracestate":
                trace[name.decode()] = value.decode("latin-1")
            case _:
                pass
    return Headers(**found, trace=trace)


_known = lru_cache(KNOWN_HEADERS)(_read)


def _session_id(value: bytes) -> str:
    """What is not UTF-8 has no text: replaced, the ids of two sessions could become one."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        got = value.decode("latin-1")
        raise RequestError(f"Unable to parse Inference-Session-Id: it is not UTF-8, got: {got}") from error


def _number(name: str, value: bytes, *, signed: bool = False) -> int:
    if not (value.removeprefix(b"-") if signed else value).isdigit() or len(value) > NUMBER_DIGITS_MAX:
        raise RequestError(f"Unable to parse {name}, got: {value.decode('latin-1')}")
    return int(value)


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """Bounds of received bodies. size_max: bytes of one body, unpacked; budget: shared by all bodies."""

    size_max: int
    budget: ByteBudget


async def read_body(receive: Receive, headers: Headers, size_max: int, reservation: Reservation) -> bytes:
    """Receives the whole body and unpacks it.

    Never holds more than `size_max` bytes of the body, and counts each of them. `gateway.http.connection` bounds the
    time, and reads the rest of a refused body.

    size_max     bytes, unpacked
    reservation  counts the body's bytes; the caller leaves it
    raises       RequestError for a larger body; UnavailableError when the budget has no room; ClientLeftError when the
                 body ends early
    """
    body = await _received(receive, headers.content_length, size_max, reservation)
    if is_packed(headers.content_encoding):
        return await gathered(unpacked(body, headers.content_encoding, size_max=size_max), len(body), reservation)
    return body


async def read_object(scope: Scope, receive: Receive, bounds: BodyBounds, *, optional: bool = False) -> Json:
    """Receives a JSON body and returns its members.

    optional  a body of nothing but spaces counts as an object without members
    raises    as `read_body` and `parse_object`
    """
    with bounds.budget.reserve(client_in(scope)) as reservation:
        body = await read_body(receive, read_headers(scope), bounds.size_max, reservation)
        if optional and not body.strip():
            return {}
        if len(body) <= BULKY_BYTES:
            return parse_object(body)
        async with bounds.budget.decoding.held(client_in(scope)):
            reservation.hold_decoded(len(body), parsing_bytes(body))
            return await through_in_thread(parse_object, body)


def client_in(scope: Scope) -> str:
    """The client that a request comes from: with it, its other requests take turns with those of others."""
    return client_of(scope["client"][0])


async def _received(receive: Receive, length: int | None, size_max: int, reservation: Reservation) -> bytes:
    _hold(length or 0, size_max, reservation)
    # One buffer instead of a list of parts: with chunks of a few bytes, the list's objects would take many times more.
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError("the client left before the request was complete")
        part: bytes = message.get("body", b"")
        if len(part) == length:
            return part
        more = message.get("more_body", False)
        _hold(len(body) + len(part), size_max, reservation)
        body += part
    return bytes(body)


def _hold(size: int, size_max: int, reservation: Reservation) -> None:
    """Counts a body of so many bytes. Raises as `read_body`."""
    if size > size_max:
        raise too_large(size, size_max)
    reservation.hold(size)

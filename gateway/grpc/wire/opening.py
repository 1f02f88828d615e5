"""Reads the headers that open a call, and writes those of its answer. Pure.

Source: gRPC over HTTP/2 (doc/PROTOCOL-HTTP2.md of grpc), "Requests" and "Responses".
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import quote

from gateway.grpc.wire.messages import ENCODINGS, IDENTITY
from shared.contract.errors import Code, RequestError

Headers = Sequence[tuple[bytes, bytes]]
Metadata = Sequence[tuple[str, str | bytes]]

UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
BINARY = "-bin"
RESERVED = frozenset({"content-type", "te"})
"""Headers that are no metadata, beside those that begin with `:` or `grpc-`."""
CONTENT_TYPE = b"application/grpc"
PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"
"""What stands for itself in a status text, beside letters, digits and `-_.~`."""
HEADER_BYTES_MAX = 16 << 10
"""Largest headers of a call, as gRPC's own servers take them. Read, small entries take six times as much."""
ENTRY_BYTES = 32
"""What an entry counts beside its name and its value (RFC 9113, section 6.5.2)."""
BEGIN: Headers = (
    (b":status", b"200"),
    (b"content-type", CONTENT_TYPE),
    (b"grpc-accept-encoding", ",".join(ENCODINGS).encode()),
)
"""The headers before the first message of every answer."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What the headers of a call say.

    path       `/package.Service/Method`
    metadata   keys and values; the value of a key in -bin is its bytes
    timeout_s  how long the caller waits; None: without end
    encoding   of messages that are compressed
    accepts    encodings that the caller reads
    """

    path: str
    metadata: Metadata
    timeout_s: float | None = None
    encoding: str = IDENTITY
    accepts: frozenset[str] = frozenset()


class NoRpcError(Exception):
    """What was asked for is no call of gRPC. status: of HTTP"""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


def read_opening(headers: Headers) -> Opening:
    """Reads the headers that open a call. Raises NoRpcError, and RequestError for too many of them."""
    size = sum([len(name) + len(value) + ENTRY_BYTES * entries_of(name, value) for name, value in headers])
    if size > HEADER_BYTES_MAX:
        raise RequestError(
            f"the metadata of the call has {size} bytes, of at most {HEADER_BYTES_MAX}", Code.RESOURCE_EXHAUSTED
        )
    path, kind, method = "", b"", b""
    metadata: list[tuple[str, str | bytes]] = []
    timeout_s: float | None = None
    encoding = IDENTITY
    accepts: frozenset[str] = frozenset()
    for name, value in headers:
        key, text = name.decode("latin-1"), value.decode(errors="replace")
        match key:
            case ":path":
                path = text
            case ":method":
                method = value
            case "content-type":
                kind = value
            case "grpc-timeout":
                timeout_s = read_timeout(text)
            case "grpc-encoding":
                encoding = text
            case "grpc-accept-encoding":
                accepts = frozenset(ENCODINGS).intersection([one.strip() for one in text.split(",")])
            case _ if not key.startswith((":", "grpc-")) and key not in RESERVED:
                metadata += read_metadata(key, value)
            case _:
                pass
    if method != b"POST":
        raise NoRpcError(HTTPStatus.METHOD_NOT_ALLOWED)
    if kind != CONTENT_TYPE and not kind.startswith((CONTENT_TYPE + b"+", CONTENT_TYPE + b";")):
        raise NoRpcError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    return Opening(path, metadata, timeout_s, encoding, accepts)


def read_timeout(text: str) -> float | None:
    """The seconds of a `grpc-timeout`; None for what is none, as gRPC's own servers take it."""
    found = TIMEOUT.fullmatch(text)
    return int(found[1]) * UNITS_S[found[2]] if found else None


def entries_of(name: bytes, value: bytes) -> int:
    """How many entries a header becomes: several values of a key in -bin may come in one, and take little there."""
    return 1 + value.count(b",") if name.endswith(BINARY.encode()) else 1


def read_metadata(key: str, value: bytes) -> Metadata:
    """The entries of one header of metadata. What is neither text nor, in a key in -bin, base64 is left out."""
    try:
        if key.endswith(BINARY):
            return [(key, base64.b64decode(one + b"=" * (-len(one) % 4))) for one in value.split(b",")]
        return [(key, value.decode())]
    except (UnicodeDecodeError, binascii.Error):
        return []


def trailers(code: int, text: str = "", metadata: Metadata = ()) -> Headers:
    """The headers that end a call. code: of gRPC's statuses"""
    status = [(b"grpc-status", str(code).encode())]
    if text:
        status.append((b"grpc-message", quote(text, safe=PLAIN).encode()))
    return [*status, *written_metadata(metadata)]


def written_metadata(metadata: Metadata) -> Iterable[tuple[bytes, bytes]]:
    for key, value in metadata:
        raw = base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode()
        yield key.encode(), raw

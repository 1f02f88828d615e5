"""One request as llhttp reads it, and what is refused of it. Pure: bytes come as arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from gateway.http.connection import NOT_SERVED, VERSIONS, origin_form

EMPTY_LINE = b"\r\n\r\n"
NO_REQUEST = "no request of HTTP/1.1"
HEADERS_MAX = 256
"""Headers of a request: each takes some hundred bytes of memory, however short it is."""
CHUNKED_HEAD = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
"""The parser of a body in chunks begins with this head, because httptools ends at the real one if it has `Upgrade`."""
PIECE_BYTES = 4 << 10
"""So much of a body in chunks is parsed at once. In chunks of one byte it takes a millisecond."""
REQUEST_LINE = re.compile(rb"[^ ]+ [^ ]+ HTTP/(\d\.\d)\r\n")
KNOWN_HEADS, KNOWN_HEAD_BYTES = 256, 1 << 10
"""How many heads are kept when they have been read, and how large one may be: most are like one shortly before."""

Refusal = tuple[int, str]
"""Status and text for a request that is not served."""


class Chunks:
    """A body in chunks. parts: what the parser has found; is_whole: whether the body's end has come."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_whole = False

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)

    def on_message_complete(self) -> None:
        self.is_whole = True


class Request:
    """One request: its head, filled by the parser, and how far it and its answer are.

    scope     what ASGI says of the head
    length    bytes of its body, when it has no chunks
    missing   bytes of its body that have not left the buffer
    expects   the client sends its body when it is told to (`Expect: 100-continue`)
    is_told   the application knows that its body has ended
    is_last   the connection ends with the answer
    is_begun  part of the answer has been sent, or all of it (is_answered)
    """

    received = length = missing = hosts = 0
    target = b""
    encoding: bytes | None = None
    has_head = expects = is_told = is_last = is_begun = is_answered = False
    method = version = ""
    scope: Mapping[str, Any] = {}
    chunks: Chunks | None = None
    parser: HttpRequestParser | None = None
    began = 0.0

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []

    def on_url(self, target: bytes) -> None:
        self.target = target

    def on_header(self, name: bytes, value: bytes) -> None:
        name, value = name.lower(), value.rstrip()
        self.headers.append((name, value))
        match name:
            case b"host":
                self.hosts += 1
            case b"content-length":
                self.length = self.missing = int(value)
            case b"transfer-encoding":
                self.encoding = (self.encoding + b", " if self.encoding else b"") + value.lower()
            case b"connection":
                self.is_last |= b"close" in map(bytes.strip, value.lower().split(b","))
            case b"expect":
                self.expects = value.lower() == b"100-continue"
            case _:
                pass

    def on_headers_complete(self) -> None:
        self.has_head = True

    def begun(self, at: float) -> Self:
        """A request with this head, of which nothing else has come."""
        request = object.__new__(type(self))
        request.__dict__.update(self.__dict__, began=at)
        return request

    @property
    def is_whole(self) -> bool:
        return self.received >= self.length if self.chunks is None else self.chunks.is_whole

    @property
    def is_taken(self) -> bool:
        """Whether the whole body has left the buffer."""
        return not self.missing if self.chunks is None else self.chunks.is_whole


def parsable(buffer: bytearray) -> int:
    """How many bytes of a body in chunks may be parsed at once: to the next empty line, or all but what may be part of
    one, and no more than PIECE_BYTES."""
    end = buffer.find(EMPTY_LINE, 0, PIECE_BYTES)
    if end >= 0:
        return end + len(EMPTY_LINE)
    size = min(len(buffer), PIECE_BYTES)
    return size - next((begun for begun in (3, 2, 1) if buffer.endswith(EMPTY_LINE[:begun], 0, size)), 0)


def read_head(head: bytes, now: float) -> Request | Refusal:
    """The request that begins with this head, or why it is not served."""
    read = _known(head) if len(head) <= KNOWN_HEAD_BYTES else _read(head)
    return read.begun(now) if isinstance(read, Request) else read


def _read(head: bytes) -> Request | Refusal:
    request = Request()
    parser = HttpRequestParser(request)
    error = ""
    try:
        parser.feed_data(head)
    except HttpParserUpgrade:
        pass  # as RFC 9110 (7.8) allows
    except HttpParserError as problem:
        error = str(problem)
    request.method, request.version = parser.get_method().decode(), parser.get_http_version()
    if request.version == "1.0":
        request.is_last, request.expects = True, False
    if refusal := _refused(request, head, error):
        return refusal
    request.scope = _scope(request)
    return request


def _scope(request: Request) -> dict[str, Any]:
    path, _, query = origin_form(request.target).partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": request.version,
        "method": request.method,
        "path": unquote(path.decode("ascii")) if b"%" in path else path.decode("ascii"),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": request.headers,
    }


@lru_cache(KNOWN_HEADS)
def _known(head: bytes) -> Request | Refusal:
    read = _read(head)
    if isinstance(read, Request):
        # A tuple tells the application that other requests have the very same headers.
        read.scope = {**read.scope, "headers": tuple(read.headers)}
    return read


def _refused(request: Request, head: bytes, error: str) -> Refusal | None:
    """Status and text if a request is not served. error: llhttp's"""
    version = REQUEST_LINE.match(head)
    if version is not None and version[1] not in VERSIONS:
        return HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, NOT_SERVED.format(version=version[1].decode())
    if error or version is None or not request.has_head:
        return HTTPStatus.BAD_REQUEST, error or NO_REQUEST
    if request.hosts > 1 or (not request.hosts and request.version == "1.1"):
        return HTTPStatus.BAD_REQUEST, f"{request.hosts or 'no'} 'Host' headers"
    if len(request.headers) > HEADERS_MAX:
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {HEADERS_MAX} headers"
    if request.encoding is not None and request.version == "1.0":
        return HTTPStatus.BAD_REQUEST, "HTTP/1.0 has no 'Transfer-Encoding'"
    if request.encoding not in (None, b"chunked"):
        return HTTPStatus.NOT_IMPLEMENTED, "only chunks are served as 'Transfer-Encoding'"
    return None

"""The messages in the bytes of a call: each has a byte that says whether it is compressed, four with its length, and
its own bytes. Pure.

Source: gRPC over HTTP/2 (doc/PROTOCOL-HTTP2.md of grpc), "Length-Prefixed-Message".
"""

from __future__ import annotations

import gzip
import zlib
from collections import deque

from shared.contract.errors import Code, MeshError, RequestError

IDENTITY, DEFLATE, GZIP = "identity", "deflate", "gzip"
ENCODINGS = (IDENTITY, DEFLATE, GZIP)
PREFIX_BYTES = 5
OBJECT_BYTES = 48
"""Memory of a message besides its bytes."""
LEVEL = 6
"""Of compression: zlib's own default."""


class Packed(bytes):
    """A message that is compressed, by gzip or by zlib (deflate)."""

    __slots__ = ()


class Messages:
    """Takes the messages out of a call's bytes, in their order.

    size_max  largest message as it comes
    encoding  of those that are compressed
    ready     messages that are whole; `take` takes the first
    held      bytes that have come and are not in `ready`
    """

    __slots__ = ("_encoding", "_need", "_part", "_ready_bytes", "_size_max", "ready")

    def __init__(self, size_max: int, encoding: str = IDENTITY) -> None:
        self.ready: deque[bytes] = deque()
        self._ready_bytes = 0
        self._size_max = size_max
        self._encoding = encoding
        self._part = bytearray()
        """Bytes without an object for each piece: a client may send a message in pieces of one byte, or of none."""
        self._need = PREFIX_BYTES

    @property
    def held(self) -> int:
        return len(self._part)

    @property
    def kept_bytes(self) -> int:
        """The memory of what has come and is not taken."""
        return len(self._part) + self._ready_bytes + len(self.ready) * OBJECT_BYTES

    def take(self) -> bytes:
        message = self.ready.popleft()
        self._ready_bytes -= len(message)
        return message

    def feed(self, data: bytes) -> None:
        """Takes in bytes that have come. Raises MeshError for what is no message, or one that is too large."""
        part = self._part
        if part or len(data) < self._need:
            part += data
            if len(part) < self._need:
                return
        whole = memoryview(part) if part else data
        begin, size = 0, len(whole)
        while True:
            if size - begin < PREFIX_BYTES:
                self._need = PREFIX_BYTES
                break
            length = int.from_bytes(whole[begin + 1 : begin + PREFIX_BYTES])
            self._check(whole[begin], length)
            end = begin + PREFIX_BYTES + length
            if size < end:
                self._need = end - begin
                break
            message = whole[begin + PREFIX_BYTES : end]
            self.ready.append(Packed(message) if whole[begin] else bytes(message))
            self._ready_bytes += length
            begin = end
        if part or begin < size:
            self._part = bytearray(whole[begin:])

    def drop(self) -> None:
        """Forgets the part of a message that has come. Nothing more is to be fed."""
        self._part = bytearray()

    def clear(self) -> None:
        """Forgets all that has come and is not taken. Nothing more is to be fed."""
        self.drop()
        self.ready.clear()
        self._ready_bytes = 0

    def _check(self, packed: int, length: int) -> None:
        if packed not in (0, 1):
            raise MeshError(f"Invalid compressed flag: {packed}", Code.INTERNAL)
        if packed and self._encoding == IDENTITY:
            raise MeshError("Compressed flag set, but the call's encoding is identity", Code.INTERNAL)
        if length > self._size_max:
            raise RequestError(
                f"Received message larger than max ({length} vs. {self._size_max})", Code.RESOURCE_EXHAUSTED
            )


def prefixed(message: bytes, encoding: str = IDENTITY) -> bytes:
    """A message as it is sent. encoding: it is compressed by this, unless that makes it larger"""
    packed = 0
    if encoding != IDENTITY:
        smaller = gzip.compress(message, LEVEL) if encoding == GZIP else zlib.compress(message, LEVEL)
        if len(smaller) < len(message):
            packed, message = 1, smaller
    return b"%c%b%b" % (packed, len(message).to_bytes(4), message)

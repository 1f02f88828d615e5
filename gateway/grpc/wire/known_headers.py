"""Headers that were read or written before are not compressed or decompressed again.

The compression of headers (HPACK) is a table that both ends fill alike. A block of indexes alone changes nothing in it,
and means the same until another block does; and the calls of a client nearly all begin and end with the same few.

Source: RFC 7541, sections 2.3 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from hpack import Decoder, Encoder, HeaderTuple

Key = TypeVar("Key")
Value = TypeVar("Value")

INDEX = 0x80
"""The bit of a byte that is an index."""
LONG_INDEX = 0xFF
"""With which an index of several bytes begins."""
KNOWN_MAX = 8
BLOCK_BYTES_MAX = 32
"""Of a block that is remembered. Calls begin with a dozen headers; 32 take 3 KB, and a client may want them kept."""


class KnownHeaders(Generic[Key, Value]):
    """What was read or written since the table changed, by blocks or by headers."""

    def __init__(self) -> None:
        self._known: dict[Key, Value] = {}
        self.get = self._known.get

    def note(self, key: Key, value: Value, block: bytes) -> None:
        if min(block, default=0) < INDEX or LONG_INDEX in block:
            self._known.clear()
        elif len(block) <= BLOCK_BYTES_MAX and len(self._known) < KNOWN_MAX:
            self._known[key] = value


class KnowingDecoder(Decoder):
    """A decoder that knows the blocks which it has read."""

    def __init__(self) -> None:
        super().__init__()
        self._known: KnownHeaders[tuple[bytes, bool], list[HeaderTuple]] = KnownHeaders()

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:  # noqa: FBT001, FBT002
        key = data, raw
        headers = self._known.get(key)
        if headers is None:
            headers = list(super().decode(data, raw))
            self._known.note(key, headers, data)
        return list(headers)


class KnowingEncoder(Encoder):
    """An encoder that knows the headers which it has written."""

    def __init__(self) -> None:
        super().__init__()
        self._known: KnownHeaders[Any, bytes] = KnownHeaders()

    def encode(self, headers: Any, huffman: bool = True) -> bytes:  # noqa: FBT001, FBT002
        key = tuple(headers), huffman
        # A table that has become smaller is told of in the next block.
        block = None if self.header_table.resized else self._known.get(key)
        if block is None:
            block = super().encode(key[0], huffman)
            self._known.note(key, block, block)
        return block

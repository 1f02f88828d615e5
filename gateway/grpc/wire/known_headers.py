"""Headers that were read or written before are not compressed or decompressed again.

The compression of headers (HPACK) is a table that both ends fill alike. A block of indexes alone changes nothing in it,
and means the same until another block does; and the calls of a client nearly all begin and end with the same few.

Source: RFC 7541, sections 2.3 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from hpack import Decoder, Encoder, HeaderTuple, HPACKDecodingError

Key = TypeVar("Key")
Value = TypeVar("Value")

INDEX = 0x80
"""The bit of a byte that is an index."""
LONG_INDEX = 0xFF
"""With which an index of several bytes begins."""
KNOWN_MAX = 8
BLOCK_BYTES_MAX = 32
"""Of a block that is remembered. Calls begin with a dozen headers; 32 take 3 KB, and a client may want them kept."""
RESIZES_MAX = 16
"""Changes of the table's size before a block's headers. RFC 7541 (4.2) has two at most; some encoders write each."""
LITERAL_BYTES = 4 << 10
"""In so much of a block nearly every header has room."""


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
    """A decoder that knows the blocks which it has read. A block takes no longer than its bytes and headers must."""

    def __init__(self) -> None:
        super().__init__()
        self._resizes = 0
        self._known: KnownHeaders[tuple[bytes, bool], list[HeaderTuple]] = KnownHeaders()

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:  # noqa: FBT001, FBT002
        key = data, raw
        headers = self._known.get(key)
        if headers is None:
            self._resizes = 0
            headers = list(super().decode(data, raw))
            self._known.note(key, headers, data)
        return list(headers)

    def _update_encoding_context(self, data: bytes | memoryview) -> int:
        """For hpack, a block may be nothing but changes of the table's size: half a million of them."""
        self._resizes += 1
        if self._resizes > RESIZES_MAX:
            raise HPACKDecodingError("the table's size changes too often")
        return super()._update_encoding_context(data)

    def _decode_literal(self, data: bytes | memoryview, should_index: bool) -> tuple[HeaderTuple, int]:  # noqa: FBT001
        """Of what it is given, hpack makes three copies, and it gives itself all the rest of the block."""
        try:
            return super()._decode_literal(data[:LITERAL_BYTES], should_index)
        except HPACKDecodingError:
            return super()._decode_literal(data, should_index)


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

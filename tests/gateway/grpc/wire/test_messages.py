"""Messages in the bytes of a call, however these are cut."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.grpc.wire.messages import DEFLATE, GZIP, IDENTITY, Messages, Packed, prefixed
from shared.contract.errors import Code, MeshError

SIZE_MAX = 1000


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_messages_come_whole_and_in_order_however_their_bytes_are_cut(sent: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(map(prefixed, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    messages = Messages(SIZE_MAX)

    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        messages.feed(whole[begin:end])
        assert sum(len(one) + 5 for one in messages.ready) + messages.held == end

    assert sent == list(messages.ready)


@pytest.mark.parametrize("encoding", [GZIP, DEFLATE])
def test_a_compressed_message_is_told_apart(encoding: str) -> None:
    messages = Messages(SIZE_MAX, encoding)

    messages.feed(prefixed(bytes(500), encoding) + prefixed(b"x", encoding))

    packed, plain = messages.ready
    assert isinstance(packed, Packed)
    assert bytes(500) == (gzip.decompress(packed) if encoding == GZIP else zlib.decompress(packed))
    assert plain == b"x"
    assert not isinstance(plain, Packed), "what compression would make larger is sent as it is"


@pytest.mark.parametrize(
    ("prefix", "encoding", "code", "text"),
    [
        (struct.pack(">BI", 2, 0), GZIP, Code.INTERNAL, "Invalid compressed flag: 2"),
        (struct.pack(">BI", 1, 0), IDENTITY, Code.INTERNAL, "Compressed flag set"),
        (struct.pack(">BI", 0, 1001), IDENTITY, Code.RESOURCE_EXHAUSTED, "larger than max (1001 vs. 1000)"),
    ],
)
def test_what_is_no_message_or_too_large_is_refused_at_its_first_bytes(
    prefix: bytes, encoding: str, code: Code, text: str
) -> None:
    with pytest.raises(MeshError) as refused:
        Messages(SIZE_MAX, encoding).feed(prefix)

    assert refused.value.code is code
    assert text in refused.value.message


@pytest.mark.parametrize("piece", [b"", b"xy"])
def test_a_message_in_tiny_pieces_takes_no_more_than_its_bytes(piece: bytes) -> None:
    messages = Messages(1 << 20)
    messages.feed(struct.pack(">BI", 0, 1 << 20))
    tracemalloc.start()
    for _ in range(100_000):
        messages.feed(piece)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert taken < 100_000 * len(piece) * 3 // 2 + 10_000


def test_what_is_dropped_takes_no_memory() -> None:
    messages = Messages(SIZE_MAX)
    messages.feed(prefixed(b"whole") + prefixed(b"x" * 900)[:-1])

    messages.drop()

    assert ([b"whole"], 0) == (list(messages.ready), messages.held)

"""Headers that are known beside hpack's own: the same blocks, and the same headers, whatever came before."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hpack import Decoder, Encoder, HPACKError

from gateway.grpc.wire.known_headers import (
    BLOCK_BYTES_MAX,
    KNOWN_MAX,
    LITERAL_BYTES,
    RESIZES_MAX,
    KnowingDecoder,
    KnowingEncoder,
)

NAMES = (b":status", b"content-type", b"grpc-status", b"key", b"other-bin")
VALUES = (b"200", b"0", b"application/grpc", b"x" * 70, b"y" * 900)
TABLE_BYTES = (0, 100, 1_000, 4_096)


def some_headers(chance: random.Random) -> list[tuple[bytes, bytes]]:
    return [(chance.choice(NAMES), chance.choice(VALUES)) for _ in range(chance.randrange(5))]


@pytest.mark.parametrize("seed", range(40))
def test_blocks_and_headers_are_those_of_hpack(seed: int) -> None:
    chance = random.Random(seed)
    usual = [some_headers(chance) for _ in range(3)]
    encoders, decoders = (Encoder(), KnowingEncoder()), (Decoder(), KnowingDecoder())
    for _ in range(300):
        if chance.random() < 0.03:
            size = chance.choice(TABLE_BYTES)
            for encoder in encoders:
                encoder.header_table_size = size
        headers = chance.choice(usual) if chance.random() < 0.9 else some_headers(chance)
        block, known = (encoder.encode(headers) for encoder in encoders)
        assert known == block
        for decoder in decoders:
            assert list(decoder.decode(block, raw=True)) == headers


def test_a_known_block_is_not_compressed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, decoder = KnowingEncoder(), KnowingDecoder()
    headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]
    blocks = [encoder.encode(headers) for _ in range(3)]
    read = [decoder.decode(block, raw=True) for block in blocks]
    monkeypatch.setattr(Encoder, "encode", None)
    monkeypatch.setattr(Decoder, "decode", None)
    assert encoder.encode(headers) == blocks[-1] == blocks[-2]
    assert decoder.decode(blocks[-1], raw=True) == read[-1]


def test_whoever_gets_known_headers_may_change_them() -> None:
    decoder = KnowingDecoder()
    for _ in range(2):
        headers = decoder.decode(b"\x88", raw=True)
        assert headers == [(b":status", b"200")]
        headers.clear()  # type: ignore[attr-defined]


def test_an_index_of_nothing_is_refused_each_time() -> None:
    decoder = KnowingDecoder()
    for _ in range(2):
        with pytest.raises(HPACKError):
            decoder.decode(b"\x88\xbe", raw=True)


def test_a_client_cannot_have_any_number_of_blocks_kept() -> None:
    decoder = KnowingDecoder()
    for first in range(1, 60):
        decoder.decode(bytes([0x80 | first, 0x80 | (first % 7 + 1)]), raw=True)
        decoder.decode(bytes([0x80 | first]) * (BLOCK_BYTES_MAX + 1), raw=True)
    assert len(decoder._known._known) == KNOWN_MAX


def test_a_block_changes_the_size_of_the_table_a_few_times() -> None:
    """Half a million changes would keep everybody waiting for half a second."""
    decoder = KnowingDecoder()
    for _ in range(2):
        decoder.decode(b"\x20" * RESIZES_MAX + b"\x88", raw=True)
        with pytest.raises(HPACKError):
            decoder.decode(b"\x20" * (RESIZES_MAX + 1) + b"\x88", raw=True)


def test_each_header_takes_no_longer_in_a_large_block(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    decode_literal = Decoder._decode_literal

    def note(decoder: Decoder, data: bytes | memoryview, should_index: bool) -> Any:
        given.append(len(data))
        return decode_literal(decoder, data, should_index)

    monkeypatch.setattr(Decoder, "_decode_literal", note)
    decoder = KnowingDecoder()
    decoder.max_header_list_size = 1 << 20
    short = [(b"key-%d" % number, b"x") for number in range(5000)]
    headers = [*short, (b"key", b"v" * 3 * LITERAL_BYTES), *short]
    block = Encoder().encode(headers, huffman=False)

    assert headers == list(decoder.decode(block, raw=True))
    assert sum(given) < LITERAL_BYTES * len(headers) + len(block)

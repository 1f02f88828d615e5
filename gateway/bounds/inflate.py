"""Unpacks compressed requests piece by piece. A few bytes may unpack to very many, so each piece is counted."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from gateway.bounds.byte_budget import Reservation
from gateway.bounds.fair_lock import through_in_thread
from shared.contract.errors import MeshError, RequestError

GZIP_WINDOW = 31
ZLIB_WINDOW = 15
RAW_WINDOW = -15
EITHER_WINDOW = 47
"""Detects whether the data has gzip's or zlib's header."""
PIECE_BYTES = 1 << 20
"""Unpacked bytes of one piece."""
STEP_BYTES = 1 << 16


def inflated(data: bytes, window: int, size_max: int, too_large: Callable[[int], MeshError]) -> Iterator[bytes]:
    """The unpacked content in pieces. All but the last have PIECE_BYTES; the last has fewer, and may be empty.

    window     zlib's `wbits`, which says the format
    size_max   bytes; at the first piece beyond it the content is refused
    too_large  makes the error from the size seen so far
    raises     RequestError for data without that compression, that ends early or goes on behind its end; the error of
               `too_large`
    """
    reader = zlib.decompressobj(window)
    rest, begin, size = b"", 0, 0
    while True:
        piece = bytearray()
        while len(piece) < PIECE_BYTES and not reader.eof:
            if not rest:
                rest = data[begin : begin + STEP_BYTES]
                begin += len(rest)
            before, fed = len(piece), len(rest)
            try:
                piece += reader.decompress(rest, PIECE_BYTES - before)
            except zlib.error as error:
                raise RequestError(f"failed to decompress the request body: {error}") from error
            rest = reader.unconsumed_tail
            if not fed and len(piece) == before and not reader.eof:
                raise RequestError("failed to decompress the request body: it ends in the middle")
        size += len(piece)
        if size > size_max:
            raise too_large(size)
        is_last = len(piece) < PIECE_BYTES
        if is_last and (reader.unused_data or begin < len(data)):
            raise RequestError("failed to decompress the request body: it goes on behind the compressed data's end")
        yield bytes(piece)
        if is_last:
            return


async def gathered(pieces: Iterator[bytes], packed_bytes: int, reservation: Reservation) -> bytes:
    """Joins the pieces. The reservation grows with each piece; `packed_bytes` are in it throughout. Who is cancelled
    keeps it until the thread has ended that holds them.

    raises  UnavailableError when the budget has no room
    """
    # The first piece is often the only one, and not worth a thread. Further ones would block the event loop, and so
    # would a first one that much has to be read for: compressed data may be 64 MiB long and hold nothing, for 4 s.
    parts = [next(pieces) if packed_bytes <= STEP_BYTES else await through_in_thread(pieces.__next__)]
    size = len(parts[0])
    reservation.hold(packed_bytes + size)
    while len(parts[-1]) == PIECE_BYTES:
        parts.append(await through_in_thread(pieces.__next__))
        size += len(parts[-1])
        reservation.hold(packed_bytes + size)
    return b"".join(parts)

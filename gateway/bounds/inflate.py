"""Unpacking what a client has compressed, piece by piece: a few bytes may become many, which are counted first."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator

from gateway.bounds.byte_budget import Reservation
from shared.contract.errors import MeshError, RequestError

GZIP_WINDOW = 31
ZLIB_WINDOW = 15
RAW_WINDOW = -15
EITHER_WINDOW = 47
"""gzip's or zlib's header, whichever there is."""
PIECE_BYTES = 1 << 20
"""What is unpacked at once."""
STEP_BYTES = 1 << 16


class BrokenDataError(RequestError):
    """Data that is not what it is said to be."""


def inflated(data: bytes, window: int, size_max: int, too_large: Callable[[int], MeshError]) -> Iterator[bytes]:
    """The content, in pieces: all but the last have PIECE_BYTES.

    window    zlib's number for the form
    size_max  bytes; larger content is refused before it is unpacked
    raises    BrokenDataError; what `too_large` makes of a size
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
                raise BrokenDataError(f"failed to decompress the request body: {error}") from error
            rest = reader.unconsumed_tail
            if not fed and len(piece) == before and not reader.eof:
                raise BrokenDataError("failed to decompress the request body: it ends in the middle")
        size += len(piece)
        if size > size_max:
            raise too_large(size)
        yield bytes(piece)
        if len(piece) < PIECE_BYTES:
            return


async def gathered(pieces: Iterator[bytes], packed_bytes: int, reservation: Reservation) -> bytes:
    """All pieces as one; each takes its place, beside what was packed, as it comes.

    raises  UnavailableError when there is no room
    """
    # The first piece is often the only one, and not worth a thread; nobody should wait for the others.
    parts = [next(pieces)]
    size = len(parts[0])
    reservation.hold(packed_bytes + size)
    while len(parts[-1]) == PIECE_BYTES:
        parts.append(await asyncio.to_thread(next, pieces, b""))
        size += len(parts[-1])
        reservation.hold(packed_bytes + size)
    return b"".join(parts)

"""Long work of a thread goes in pieces: one call of numpy lets no other thread run, so not the event loop either."""

from __future__ import annotations

from collections.abc import Iterator

PIECE = 1 << 14
"""Elements that are converted at once."""


def pieces(count: int) -> Iterator[slice]:
    """Slices over the first `count` elements, PIECE at a time."""
    return (slice(begin, min(begin + PIECE, count)) for begin in range(0, count, PIECE))

"""How the operators' commands write counts, times, sizes and tables. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """`1 sequence`, `2 sequences`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def clock(ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ms / 1000))


def duration(ms: int) -> str:
    """A time in its two largest units: 2d 3h, 5m 12s, 8.4s."""
    seconds = max(0, ms) / 1000
    if seconds < 60:
        return f"{seconds:.1f}s"
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    at = next(index for index, (_, size) in enumerate(units) if seconds >= size)
    (large, size), (small, part) = units[at : at + 2]
    return f"{int(seconds // size)}{large} {int(seconds % size // part)}{small}"


def size(number: int) -> str:
    """Bytes as people read them."""
    scaled = float(number)
    for unit in ("B", "KiB", "MiB"):
        if scaled < 1024:
            return f"{scaled:.0f} {unit}"
        scaled /= 1024
    return f"{scaled:.1f} GiB"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells as lines, with the columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )

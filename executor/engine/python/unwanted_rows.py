"""Rows for which nobody waits any more."""

from __future__ import annotations

from collections.abc import Sequence

from executor.engine.base import Row

KEPT_BATCHES = 2
"""For how many batches a row is kept that is in none of them: as many as an instance is given at once. Its batch had
just ended when it was told."""


class UnwantedRows:
    """Rows of the batch that runs, or of one that was given ahead of its turn, for which nobody waits any more.

    They are told on one thread, asked for and forgotten on another.
    """

    def __init__(self) -> None:
        # With the row itself, so that no other row has its id.
        self._rows: dict[int, tuple[Row, int]] = {}
        self._batches_over = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: Row) -> bool:
        return id(row) in self._rows

    def add(self, row: Row) -> None:
        self._rows[id(row)] = row, self._batches_over

    def batch_over(self, rows: Sequence[Row]) -> None:
        """A batch has run; its rows are forgotten."""
        self._batches_over += 1
        if not self._rows:
            return
        for row in rows:
            self._rows.pop(id(row), None)
        for key, (_, told) in list(self._rows.items()):
            if self._batches_over - told > KEPT_BATCHES:
                del self._rows[key]

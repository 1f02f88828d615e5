"""One call of a torch module: its rows, and its failure."""

from __future__ import annotations

from typing import NamedTuple

from executor.engine.base import Row, RowError
from shared.contract.errors import Code


class Layout(NamedTuple):
    """The rows of one call of the module.

    batch      requests' rows and the null rows between them, in order
    counts     for each of `batch`, how many rows of the call it brings
    positions  in `batch`, of the rows whose results count
    total      rows of the call: those of `batch`, and the null rows after them that fill it up
    """

    batch: list[Row]
    counts: list[int]
    positions: list[int]
    total: int

    @property
    def kept(self) -> int:
        """Rows of the call without the null rows that fill it up."""
        return sum(self.counts)


class BatchFailedError(Exception):
    """A batch has no results; each of its rows must be tried alone."""

    def __init__(self, message: str, code: Code = Code.INTERNAL) -> None:
        super().__init__(message)
        self.error = RowError(code, message)

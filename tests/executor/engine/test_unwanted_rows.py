"""Rows for which nobody waits any more, from the word of it to the end of their batch."""

from __future__ import annotations

from executor.engine.base import Row
from executor.engine.python.unwanted_rows import KEPT_BATCHES, UnwantedRows


def test_rows_that_are_alike_are_told_apart() -> None:
    unwanted, one, alike = UnwantedRows(), Row({}), Row({})

    unwanted.add(one)

    assert one in unwanted
    assert alike not in unwanted


def test_a_row_waits_for_its_batch_and_goes_with_it() -> None:
    unwanted, one = UnwantedRows(), Row({})
    unwanted.add(one)

    unwanted.batch_over([Row({})])
    assert one in unwanted
    unwanted.batch_over([Row({}), one])
    assert not unwanted


def test_a_row_whose_batch_was_over_when_it_was_told_is_not_kept_for_ever() -> None:
    unwanted = UnwantedRows()
    unwanted.add(Row({}))

    for _ in range(KEPT_BATCHES + 1):
        assert unwanted
        unwanted.batch_over([Row({})])
    assert not unwanted

"""What a leader makes of the entries of its streams."""

from __future__ import annotations

import pytest

from scheduler.core.backlog import Entry
from scheduler.core.events import SequenceWaits
from scheduler.ingest import Source, StreamEntry, StreamKind, waiting
from shared.contract.ids import ShardId, sequence_id

SEQUENCE = sequence_id("m", "", 1)


@pytest.mark.parametrize(
    ("kind", "moving", "returning"), [(b"w", False, False), (b"m", True, False), (b"r", False, True)]
)
def test_a_sequence_that_waits_is_new_or_moves_or_returns(kind: bytes, *, moving: bool, returning: bool) -> None:
    fields = {b"q": SEQUENCE.encode(), b"v": b"2", b"u": b"5", b"k": kind, b"o": b"acme"}

    event = waiting(StreamEntry(Source(StreamKind.STARTS, ShardId(3)), b"7-1", fields))

    entry = Entry(7, 1, ShardId(3))
    assert event == SequenceWaits(SEQUENCE, "2", entry, moving, 5, f"starts {entry}", returning, "acme")

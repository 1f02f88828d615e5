"""What is carried along of those who have left a line is bounded, and nobody else's turn changes for it."""

from __future__ import annotations

from scheduler.core import expiry
from scheduler.core.backlog import COMPACT_SLACK, MOVING_RANK, Backlog, BacklogEntry, Entry
from scheduler.core.decide import decide
from scheduler.core.events import SequenceWaits
from scheduler.core.state import LeaderState, Policy
from shared.contract.ids import SequenceId, ShardId

STAYING = 5
LEAVING = 10 * COMPACT_SLACK


def entry(number: int) -> Entry:
    return Entry(number, 0, ShardId(0))


def test_a_line_does_not_grow_with_those_who_leave_it_from_the_middle() -> None:
    """Whoever is first stays, so nobody comes up."""
    backlog = Backlog()
    for number in range(STAYING):
        backlog.add(SequenceId(f"stays {number}"), entry(number), moving=False)
    for number in range(LEAVING):
        backlog.add(SequenceId(f"leaves {number}"), entry(STAYING + number), moving=False)
        backlog.withdraw(SequenceId(f"leaves {number}"))
        assert len(backlog._line) <= 2 * STAYING + COMPACT_SLACK + 1
    backlog.add(SequenceId("moves"), entry(STAYING + LEAVING), moving=True)

    turns = ["moves", *(f"stays {number}" for number in range(STAYING))]
    assert turns == [waiting.sequence for waiting in backlog.in_order()]
    assert BacklogEntry(MOVING_RANK, entry(STAYING + LEAVING), SequenceId("moves")) == backlog.in_order()[0]
    taken: list[str] = []
    while (first := backlog.first()) is not None:
        taken.append(first)
        backlog.withdraw(first)
    assert turns == taken
    assert [] == backlog._line


def test_deadlines_of_those_who_wait_no_longer_do_not_pile_up() -> None:
    state = LeaderState(Policy(1.25))
    for number in range(STAYING):
        decide(state, SequenceWaits(SequenceId(f"stays {number}"), "1", entry(number), moving=False))
        expiry.watch(state, SequenceId(f"stays {number}"), entry(number), 1000 + number)
    for number in range(LEAVING):
        expiry.watch(state, SequenceId(f"left {number}"), entry(STAYING + number), 500)
        assert len(state.timeouts) <= 2 * STAYING + COMPACT_SLACK + 1
    state.now_ms = 2000

    assert [f"stays {number}" for number in range(STAYING)] == expiry.overdue(state)
    assert [] == state.timeouts

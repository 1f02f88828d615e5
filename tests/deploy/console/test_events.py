"""The log says what happened between two readings, and nothing twice."""

from __future__ import annotations

from deploy.console.events import EVENTS_KEPT, EventLog
from deploy.console.snapshot import Snapshot
from shared.statistics.tally import FailureReason, failure
from shared.store.waiting_line import WaitingLine
from tests.deploy.console.readings import executor, reading


def told(*readings: Snapshot) -> list[str]:
    """The lines behind the first one, which says that the console began to look."""
    log = EventLog()
    before = None
    for now in readings:
        log.see(before, now)
        before = now
    return [line.text for line in log.lines[1:]]


def test_an_executor_joins_is_lost_and_is_forgotten() -> None:
    one, dead = executor("a", held=3), executor("a", held=3, alive=False)

    texts = told(
        reading(1, one),
        reading(2, one, executor("b")),
        reading(3, dead, executor("b")),
        reading(4, dead, executor("b", held=3)),
        reading(5, executor("b", held=3)),
    )

    assert [
        "b joined the mesh",
        "a is lost: its lease has ended with 3 sequences in its slots",
        "a (process 7) is forgotten: nothing is left in its slots",
    ] == texts


def test_takeovers_and_late_commits_are_counted() -> None:
    line = WaitingLine()
    line.add("lost:1", 8)
    line.add("moved:1", 1)
    line.add("refused:1", 2)

    texts = told(reading(1, executor("a")), reading(2, executor("a"), line=line), reading(3, executor("a"), line=line))

    assert [
        "8 sequences of sum were taken over from an executor that was lost",
        "1 sequence of sum was moved to another slot",
        "2 late commits of sum refused: the executor was not the owner any more",
    ] == texts


def test_a_full_model_and_failed_requests_are_told() -> None:
    waiting = WaitingLine(first=2)
    failed = failure(FailureReason.BACKEND, total_ns=1)

    texts = told(
        reading(1, executor("a"), counts={}),
        reading(2, executor("a"), counts=failed, line=waiting),
        reading(3, executor("a"), counts=failed, line=waiting),
        reading(4, executor("a"), counts=failed),
    )

    assert [
        "1 request of sum failed (BACKEND)",
        "waiting for a slot: 2 sequences of sum",
        "no sequence of sum waits for a slot any more",
    ] == texts


def test_a_model_that_nobody_serves_any_more_is_told() -> None:
    assert [
        "a is lost: its lease has ended with no sequence in its slots",
        "model sum, version 1, is served by no living executor",
    ] == told(reading(1, executor("a")), reading(2, executor("a", alive=False)))


def test_the_log_is_bounded_and_its_numbers_rise() -> None:
    log = EventLog()
    for number in range(EVENTS_KEPT + 10):
        log.add(number, "note", "x")

    assert EVENTS_KEPT == len(log.lines)
    assert [EVENTS_KEPT + 10] == [line.number for line in log.since(EVENTS_KEPT + 9)]

"""What pages show follows from readings."""

from __future__ import annotations

import dataclasses

from deploy.console.snapshot import id_of
from deploy.console.stories import Stories
from deploy.console.view import NO_NUMBER, POINTS_KEPT, ChartPoints, mesh_view, watched_view
from shared.statistics.reports import ExecutorReport, HostReport, ModelReport
from tests.deploy.console.readings import counted, executor, reading, status


def test_rates_and_means_are_of_the_time_between_two_readings() -> None:
    before = reading(10_000, executor("a"), counts=counted(steps=100, batches=10, rows=2, ms=90))
    now = reading(12_000, executor("a"), counts=counted(steps=160, batches=25, rows=2, ms=90))

    view = mesh_view(before, now, Stories(), killable=frozenset())

    (model,) = view.models
    assert (30.0, 2.0, 90.0, 5.0, 4.0) == (
        view.point.steps_per_s,
        view.point.batch,
        view.point.request_ms,
        view.point.queue_ms,
        view.point.compute_ms,
    )
    assert ((2, 15),) == view.batches
    assert (30.0, 160, "sequences", 8) == (model.steps_per_s, model.succeeded, model.kind, model.slots)


def test_nothing_is_said_of_the_time_before_the_first_reading_or_across_a_gap() -> None:
    first = reading(10_000, executor("a"), counts=counted(steps=100, batches=10, rows=2))
    late = reading(60_000, executor("a"), counts=counted(steps=900, batches=90, rows=2))

    for before, now in ((None, first), (first, late)):
        view = mesh_view(before, now, Stories(), killable=frozenset())

        assert (0.0, NO_NUMBER, NO_NUMBER, ()) == (
            view.point.steps_per_s,
            view.point.request_ms,
            view.point.batch,
            view.batches,
        )


def test_a_load_that_is_new_counts_for_nothing_yet() -> None:
    before = reading(10_000, executor("a"))
    now = reading(11_000, executor("a"), counts=counted(steps=300, batches=3, rows=1))

    view = mesh_view(before, now, Stories(), killable=frozenset())

    assert (0.0, NO_NUMBER, 300) == (view.point.steps_per_s, view.point.batch, view.models[0].succeeded)


def test_executors_are_shown_with_what_they_report_and_whether_they_can_be_killed_here() -> None:
    report = ExecutorReport(
        "a-1", "host", HostReport(0.5, 10, 4), (ModelReport("sum", "1", pending=3, batches=(1, 4)),)
    )
    seen = reading(10_000, executor("a", held=2), executor("b", alive=False, held=1))
    now = dataclasses.replace(seen, reports={"a-1": report})

    one, other = mesh_view(None, now, Stories(), killable=frozenset("ab")).executors

    assert ("serving", True, 0.5, 0.4) == (one.state, one.killable, one.cpu, one.memory)
    assert (2, 3, (1, 4)) == (one.models[0].held, one.models[0].pending, one.models[0].batches)
    assert ("dead", False, NO_NUMBER, 1) == (other.state, other.killable, other.cpu, other.models[0].held)


def test_a_sequence_that_came_from_a_lost_executor_says_so() -> None:
    stories = Stories()
    for now in (
        reading(1000, executor("a"), executor("b"), sequences=(status(executor="a-1"),)),
        reading(2000, executor("a", alive=False), executor("b"), sequences=(status(state="moving", epoch=2),)),
        reading(3000, executor("b"), sequences=(status(executor="b-1", epoch=3),)),
    ):
        stories.see(now)

    (shown,) = mesh_view(None, now, stories, killable=frozenset()).sequences

    assert ("b-1", "a-1", 3000) == (shown.executor, shown.came_from, shown.changed_ms)


def test_a_forgotten_sequence_keeps_the_story_that_was_seen() -> None:
    stories = Stories()
    stories.see(reading(1000, executor("a"), sequences=(status(),)))

    unknown, seen = watched_view(None, None), watched_view(None, stories.of(id_of(status())))

    assert (None, ()) == (unknown.sequence, unknown.lines)
    assert seen.sequence is not None
    assert ["began", "seen"] == [line.kind for line in seen.lines]


def test_charts_are_bounded() -> None:
    history = ChartPoints()
    point = mesh_view(None, reading(1, executor("a")), Stories(), killable=frozenset()).point
    for _ in range(POINTS_KEPT + 50):
        history.add(point)

    assert POINTS_KEPT == len(history.points)

"""What pages show follows from readings."""

from __future__ import annotations

import dataclasses

from deploy.console.history import NO_NUMBER, grown, moments_between
from deploy.console.snapshot import Snapshot
from deploy.console.stories import Stories
from deploy.console.view import MeshView, mesh_view, watched_view
from shared.statistics.reports import ExecutorReport, HostReport, ModelReport
from tests.deploy.console.readings import counted, executor, reading, status


def view_of(now: Snapshot, stories: Stories | None = None, *, killable: frozenset[str] = frozenset()) -> MeshView:
    return mesh_view(now, {}, moments_between(None, now, {}), stories or Stories(), killable=killable)


def test_a_model_is_shown_with_its_rates_and_what_it_did_since_its_load() -> None:
    before = reading(10_000, executor("a"), counts=counted(steps=100, batches=10, rows=2, ms=90))
    now = reading(12_000, executor("a"), counts=counted(steps=160, batches=25, rows=2, ms=90))
    since = grown(before, now)

    view = mesh_view(now, since, moments_between(before, now, since), Stories())

    (model,) = view.models
    assert ((2, 15),) == view.batches
    assert (30.0, 90.0, 2.0, 160, "sequences", 8) == (
        model.steps_per_s,
        model.request_ms,
        model.batch,
        model.succeeded,
        model.kind,
        model.slots,
    )


def test_a_model_without_an_executor_is_shown_while_its_sequences_are_open() -> None:
    (model,) = view_of(reading(10_000, sequences=(status(state="paged"),))).models

    assert ("sum", "1", 0, 1) == (model.name, model.version, model.executors, model.live)
    assert () == view_of(reading(10_000)).models


def test_executors_are_shown_with_what_they_report_and_whether_they_can_be_killed_here() -> None:
    report = ExecutorReport(
        "a-1", "host", HostReport(0.5, 10, 4), (ModelReport("sum", "1", pending=3, batches=(1, 4)),)
    )
    seen = reading(10_000, executor("a", held=2), executor("b", alive=False, held=1))
    now = dataclasses.replace(seen, reports={"a-1": report})

    one, other = view_of(now, killable=frozenset("ab")).executors

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

    (shown,) = view_of(now, stories).sequences

    assert ("b-1", "a-1", 3000) == (shown.executor, shown.came_from, shown.changed_ms)


def test_a_forgotten_sequence_keeps_the_story_that_was_seen() -> None:
    stories = Stories()
    stories.see(reading(1000, executor("a"), sequences=(status(),)))

    unknown, seen = watched_view(None, None), watched_view(None, stories.of(status().sequence))

    assert (None, ()) == (unknown.sequence, unknown.lines)
    assert seen.sequence is not None
    assert ["began", "seen"] == [line.kind for line in seen.lines]


def test_ids_reach_a_browser_whole_and_with_their_type() -> None:
    """A number of JavaScript has 53 bits, and 42 is not "42"."""
    now = reading(1000, executor("a"), sequences=(status(2**64 - 1), status(str(2**64 - 1))))

    shown = view_of(now).sequences

    assert [(str(2**64 - 1), False), (str(2**64 - 1), True)] == [(one.id, one.is_text) for one in shown]


def test_executors_that_were_drained_and_are_gone_are_named() -> None:
    """A drained executor is shown once: in the state that it is in, and by its name alone when it is gone."""
    seen = reading(1000, executor("a", leaving=True), executor("b", alive=False), executor("d"))
    now = dataclasses.replace(seen, drained=frozenset(("a", "b", "c")))

    view = view_of(now)

    assert ("c",) == view.drained
    assert [True, True, False] == [one.drained for one in view.executors]

"""A sequence's story is what its record says, and what the console saw."""

from __future__ import annotations

import msgspec
import pytest

from deploy.console.snapshot import Snapshot
from deploy.console.stories import LINES_MAX, STORIES_MAX, Stories, StoryLine
from shared.store.sequence_status import OPEN_STATES
from tests.deploy.console.readings import executor, reading, status


def story(*readings: Snapshot) -> list[StoryLine]:
    stories = Stories()
    for now in readings:
        stories.see(now)
    found = stories.of(status().sequence)
    assert found is not None
    return found.lines


def test_from_start_through_a_takeover_to_end() -> None:
    both = (executor("a"), executor("b"))

    lines = story(
        reading(1000, *both, sequences=(status(executor="a-1", steps=1),)),
        reading(2000, *both, sequences=(status(executor="a-1", steps=9),)),
        reading(
            3000, executor("a", alive=False), executor("b"), sequences=(status(executor="b-1", epoch=2, steps=10),)
        ),
        reading(4000, executor("b"), sequences=(status(state="ended", steps=12),)),
    )

    assert ["began", "seen", "takeover", "over"] == [line.kind for line in lines]
    assert 500 == lines[0].at_ms
    assert "Taken over from a-1, which is gone" in lines[2].text
    assert "slot 2 of b-1, with 10 steps" in lines[2].text


def test_the_first_line_says_whose_the_sequence_is() -> None:
    (began, _) = story(reading(1000, executor("a"), sequences=(msgspec.structs.replace(status(), tenant="acme"),)))

    assert "START was accepted, for version 1, of tenant acme." == began.text


def test_a_move_between_living_executors_is_no_takeover() -> None:
    both = (executor("a"), executor("b"))

    lines = story(
        reading(1000, *both, sequences=(status(executor="a-1"),)),
        reading(2000, *both, sequences=(status(state="moving", epoch=2),)),
        reading(3000, *both, sequences=(status(executor="b-1", epoch=3),)),
    )

    assert ["began", "seen", "waits", "move"] == [line.kind for line in lines]
    assert "Moved from a-1" in lines[3].text


def test_a_paged_sequence_that_gets_a_slot_again() -> None:
    lines = story(
        reading(1000, executor("a"), sequences=(status(executor="a-1"),)),
        reading(2000, executor("a"), sequences=(status(state="paged"),)),
        reading(3000, executor("a"), sequences=(status(executor="a-1", epoch=2),)),
    )

    assert ["began", "seen", "paged", "slot"] == [line.kind for line in lines]


def test_a_new_sequence_of_the_same_id_has_a_story_of_its_own() -> None:
    lines = story(
        reading(1000, executor("a"), sequences=(status(state="ended"),)),
        reading(2000, executor("a"), sequences=(status(begun_ms=1500),)),
    )

    assert [1500, 2000] == [line.at_ms for line in lines]


def test_what_had_happened_before_the_console_looked_is_said_as_far_as_the_record_says_it() -> None:
    moved = msgspec.structs.replace(status(), has_moved=True)

    assert "It had changed its slot since START." in story(reading(1000, executor("a"), sequences=(moved,)))[1].text


def test_stories_and_their_lines_are_bounded() -> None:
    stories = Stories()
    for number in range(STORIES_MAX + 5):
        stories.see(reading(1000, sequences=(status(number),)))
    for epoch in range(2 * LINES_MAX):
        stories.see(reading(1000, executor("a"), sequences=(status("last", epoch=epoch),)))

    last = stories.of(status("last").sequence)
    assert stories.of(status(0).sequence) is None
    assert last is not None
    assert LINES_MAX == len(last.lines)


@pytest.mark.parametrize("state", OPEN_STATES)
def test_every_state_of_an_open_sequence_has_its_words(state: str) -> None:
    first, then = ("paged", state) if state == "live" else ("live", state)
    alive = executor("a")

    lines = story(*(reading(at, alive, sequences=(status(state=now),)) for at, now in ((1, first), (2, then))))

    assert ["began", "seen"] == [line.kind for line in lines[:2]]
    assert 3 == len(lines)
    assert lines[2].text

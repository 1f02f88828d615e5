"""What became of single sequences, from START to END, with takeovers and moves, as far as the console saw it. Pure.

The mesh keeps no history of a sequence, only how it stands now. So a story holds what the record says of the past (when
the sequence began, whether it has changed its slot since), and the changes that the console saw itself. Steps are
counted and not listed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from deploy.console.snapshot import Snapshot
from deploy.operate.texts import counted
from shared.contract.ids import SequenceId
from shared.store.sequence_status import OPEN_STATES, PAUSED, SequenceStatus

STORIES_MAX = 2048
LINES_MAX = 100
"""Of one story; the oldest go first."""
ENDS = {
    "ended": "The step with END is committed. The sequence is over.",
    "expired": "The sequence was idle for too long. It is over.",
    "failed": "The step with START failed. The sequence is over.",
    "lost": "The state was lost with its executor. The sequence is over.",
    "cancelled": "The sequence was cancelled. It is over.",
}


class StoryLine(msgspec.Struct, frozen=True):
    """One thing that happened. kind: began, seen, slot, takeover, move, waits, paged, over"""

    at_ms: int
    kind: str
    text: str


@dataclass(slots=True)
class Story:
    """status: as last seen; lines: oldest first; changed_ms: when its owner changed last, 0 if nobody saw that"""

    status: SequenceStatus
    lines: list[StoryLine] = field(default_factory=list[StoryLine])
    changed_ms: int = 0
    came_from: str = ""


class Stories:
    """The stories of the sequences that were seen last."""

    def __init__(self) -> None:
        self._stories: OrderedDict[SequenceId, Story] = OrderedDict()

    def of(self, sequence: SequenceId) -> Story | None:
        return self._stories.get(sequence)

    def see(self, now: Snapshot) -> None:
        """Adds to the stories what has changed since the reading before."""
        watched = [one for one in now.watched.values() if one is not None]
        for status in (*now.sequences, *watched):
            self._see(status, now.at_ms, now.usable)
        while len(self._stories) > STORIES_MAX:
            self._stories.popitem(last=False)

    def _see(self, status: SequenceStatus, at_ms: int, alive: AbstractSet[str]) -> None:
        name = status.sequence
        story = self._stories.get(name)
        if story is None or is_another(story.status, status):
            story = self._stories[name] = Story(status, list(first_lines(status, at_ms)))
        else:
            lines = list(changes(story, status, at_ms, alive))
            if status.executor and status.executor != story.status.executor:
                story.changed_ms, story.came_from = at_ms, story.status.executor or story.came_from
            elif story.status.executor and not status.executor:
                story.came_from = story.status.executor
            story.lines = [*story.lines, *lines][-LINES_MAX:]
            story.status = status
        self._stories.move_to_end(name)


def is_another(before: SequenceStatus, now: SequenceStatus) -> bool:
    """Whether the id belongs to a new sequence."""
    return bool(now.begun_ms and now.begun_ms != before.begun_ms)


def first_lines(status: SequenceStatus, at_ms: int) -> Iterable[StoryLine]:
    """What is known of a sequence when the console first sees it."""
    if status.begun_ms:
        whose = f", of tenant {status.tenant}" if status.tenant else ""
        text = f"START was accepted, for version {status.version or 'not known'}{whose}."
        yield StoryLine(status.begun_ms, "began", text)
    if status.state not in OPEN_STATES:
        yield StoryLine(at_ms, "over", ENDS.get(status.state, f"The sequence is {status.state}."))
        return
    before = " It had changed its slot since START." if status.has_moved else ""
    yield StoryLine(at_ms, "seen", f"First seen by this console: {where(status)}, at step {status.last_step}.{before}")


def changes(story: Story, now: SequenceStatus, at_ms: int, alive: AbstractSet[str]) -> Iterable[StoryLine]:
    """What happened to a sequence between two sights. alive: executors whose lease holds"""
    before = story.status
    if now.state not in OPEN_STATES:
        if before.state in OPEN_STATES:
            yield StoryLine(at_ms, "over", f"{ENDS.get(now.state, f'It is {now.state}.')} {steps(before)}")
    elif now.state == "live":
        if before.state != "live" or before.epoch != now.epoch:
            yield _got_a_slot(story, now, at_ms, alive)
    elif now.state != before.state:
        text = {
            "moving": f"Between two slots: it had one at {before.executor or 'an executor'}, and waits for the next.",
            "waiting": "It waits for its first slot.",
            "paged": "It gave up its slot between two steps, because others wait. Its state is in Redis.",
            PAUSED: "An operator paused it: its steps wait until it is resumed.",
        }[now.state]
        yield StoryLine(at_ms, "paged" if now.state == "paged" else "waits", text)


def _got_a_slot(story: Story, now: SequenceStatus, at_ms: int, alive: AbstractSet[str]) -> StoryLine:
    owner = story.status.executor or story.came_from
    at = f"instance {now.instance}, slot {now.slot} of {now.executor}, with {steps(now)}"
    if not owner:
        return StoryLine(at_ms, "slot", f"It got {at}")
    if owner not in alive:
        return StoryLine(at_ms, "takeover", f"Taken over from {owner}, which is gone: it goes on in {at}")
    if owner == now.executor:
        return StoryLine(at_ms, "slot", f"It goes on in another slot: {at}")
    return StoryLine(at_ms, "move", f"Moved from {owner}: it goes on in {at}")


def where(status: SequenceStatus) -> str:
    """State and place, in words."""
    if status.state != "live":
        return status.state
    return f"in instance {status.instance}, slot {status.slot} of {status.executor}"


def steps(status: SequenceStatus) -> str:
    return f"{counted(status.last_step, 'step')} since START."

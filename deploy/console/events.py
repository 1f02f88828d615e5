"""What happened in the mesh between two readings, in words. Pure.

The log is what the console has seen, not what the mesh has written down: it begins when somebody looks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

import msgspec

from deploy.console.snapshot import Snapshot, served_loads
from deploy.operate.texts import counted
from shared.statistics.tally import FailureReason, statistics_of
from shared.store.waiting_line import TAKEOVER_CAUSES

EVENTS_KEPT = 300
GOOD, NOTE, WARN, BAD = "good", "note", "warn", "bad"
"""How an event is to be taken."""
CAUSES = dict(
    zip(
        TAKEOVER_CAUSES,
        ("taken over from an executor that was lost", "taken over from an executor that left", "moved to another slot"),
        strict=True,
    )
)


class MeshNews(msgspec.Struct, frozen=True):
    """One line of the log. number: rises by one; tone: one of the words above"""

    number: int
    at_ms: int
    tone: str
    text: str


class EventLog:
    """The latest lines, oldest first. last: the number of the latest one; 0 if there is none"""

    def __init__(self) -> None:
        self._lines: deque[MeshNews] = deque(maxlen=EVENTS_KEPT)
        self.last = 0

    @property
    def lines(self) -> list[MeshNews]:
        return list(self._lines)

    def since(self, number: int) -> list[MeshNews]:
        """The lines behind that number."""
        return [line for line in self._lines if line.number > number]

    def add(self, at_ms: int, tone: str, text: str) -> None:
        self.last += 1
        self._lines.append(MeshNews(self.last, at_ms, tone, text))

    def see(self, before: Snapshot | None, now: Snapshot) -> None:
        """Adds what happened between two readings."""
        if before is None:
            self.add(now.at_ms, NOTE, "The console began to look. What happened before is not in this log.")
            return
        for tone, text in happened(before, now):
            self.add(now.at_ms, tone, text)


def happened(before: Snapshot, now: Snapshot) -> Iterable[tuple[str, str]]:
    """Tone and text of each event."""
    yield from _executors(before, now)
    yield from _services(before, now)
    yield from _models(before, now)
    yield from _takeovers(before, now)
    yield from _failures(before, now)
    yield from _waiting(before, now)


def _executors(before: Snapshot, now: Snapshot) -> Iterable[tuple[str, str]]:
    was = {one.registration.executor: one for one in before.executors}
    is_ = {one.registration.executor: one for one in now.executors}
    for id_, one in is_.items():
        name, old = one.registration.name, was.get(id_)
        if old is None:
            yield GOOD, f"{name} joined the mesh"
        elif old.state != one.state and one.state == "dead":
            yield BAD, f"{name} is lost: its lease has ended with {_sequences(old.total)} in its slots"
        elif old.state != one.state and one.state == "leaving":
            yield WARN, f"{name} leaves, and hands over {_sequences(old.total)}"
        elif old.state != one.state:
            yield NOTE, f"{name} is {one.state}"
    for id_, old in was.items():
        if id_ not in is_:
            name, pid = old.registration.name, old.registration.pid
            yield NOTE, f"{name} (process {pid}) is forgotten: nothing is left in its slots"
    for name in sorted(now.drained - before.drained):
        yield WARN, f"{name} is drained by an operator"
    for name in sorted(before.drained - now.drained):
        yield GOOD, f"{name} may take sequences again"


def _services(before: Snapshot, now: Snapshot) -> Iterable[tuple[str, str]]:
    was, is_ = (
        Counter((line.service, line.name) for line in each.services if line.service != "executor")
        for each in (before, now)
    )
    for service, name in sorted((is_ - was).elements()):
        yield GOOD, f"{service} {name} joined the mesh"
    for service, name in sorted((was - is_).elements()):
        yield WARN, f"{service} {name} has not been heard of for a minute, or has stopped"


def _models(before: Snapshot, now: Snapshot) -> Iterable[tuple[str, str]]:
    was, is_ = (
        {(one.model, one.version) for one in served_loads(each.executors, each.records)} for each in (before, now)
    )
    for model, version in sorted(is_ - was):
        yield GOOD, f"model {model}, version {version}, is served"
    for model, version in sorted(was - is_):
        yield WARN, f"model {model}, version {version}, is served by no living executor"


def _takeovers(before: Snapshot, now: Snapshot) -> Iterable[tuple[str, str]]:
    for model, line in now.lines.items():
        old = before.lines.get(model)
        if old is None:
            continue
        for cause, words in CAUSES.items():
            count = sum(
                number - old.taken_over[place] for place, number in line.taken_over.items() if place[1] == cause
            )
            if count > 0:
                yield NOTE, f"{_sequences(count)} of {model} {'was' if count == 1 else 'were'} {words}"
        refused = line.refused.total() - old.refused.total()
        if refused > 0:
            text = f"{counted(refused, 'late commit')} of {model} refused: the executor was not the owner any more"
            yield WARN, text


def _failures(before: Snapshot, now: Snapshot) -> Iterable[tuple[str, str]]:
    for load, counts in now.counts.items():
        if load in before.counts:
            was = statistics_of(load.model, load.version, before.counts[load]).failures
            is_ = statistics_of(load.model, load.version, counts).failures
            for reason, count in more(was, is_).items():
                tone = BAD if reason == FailureReason.BACKEND else WARN
                yield tone, f"{counted(count, 'request')} of {load.model} failed ({reason})"


def _waiting(before: Snapshot, now: Snapshot) -> Iterable[tuple[str, str]]:
    for model, line in now.lines.items():
        old = before.lines.get(model)
        if old is not None and line.first > 0 and old.first <= 0:
            yield WARN, f"waiting for a slot: {_sequences(line.first)} of {model}"
        elif old is not None and line.first <= 0 and old.first > 0:
            yield GOOD, f"no sequence of {model} waits for a slot any more"


def more(was: Mapping[str, int], is_: Mapping[str, int]) -> dict[str, int]:
    """By how much each count has grown; those that have not are left out."""
    return {name: count - was.get(name, 0) for name, count in is_.items() if count > was.get(name, 0)}


def _sequences(count: int) -> str:
    return counted(count, "sequence") if count else "no sequence"

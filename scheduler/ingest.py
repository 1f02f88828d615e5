"""Turns what was read from Redis into events of the core: stream entries, and the polled list of executors. Pure.

The entries are those of the `starts` and `feed` streams of one model. `scheduler.effects` removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from scheduler.core.backlog import MOVING_RANK, WAITING_RANK, Entry
from scheduler.core.events import (
    Event,
    ExecutorLost,
    ExecutorSeen,
    ForecastAsked,
    IdleTimeCut,
    MoveWished,
    PatienceLowered,
    PauseWished,
    SequenceOver,
    SequenceWaits,
    SparesRecalled,
    SpareTaken,
    WaitEnded,
)
from scheduler.core.slots import OfferedVersion, SlotAddress
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, ShardId, SlotIndex, entry_key
from shared.contract.messages import RepositoryEntry, ServedModel
from shared.store.keyspace import Keyspace
from shared.store.membership import Member, lines_of
from shared.store.reading import FAILURES, noted, text_of


class StreamKind(StrEnum):
    """The two streams of a model in a shard."""

    STARTS = "starts"
    FEED = "feed"


@dataclass(frozen=True, slots=True)
class Source:
    """A stream that a leader reads."""

    kind: StreamKind
    shard: ShardId


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """An entry as it was read. entry: its id in the stream"""

    source: Source
    entry: bytes
    fields: Mapping[bytes, bytes]


ANY_VERSION = ""
"""The version in a repository index line that is about the whole model."""

CUT = "d"
"""Kind of an entry of the feed about a sequence that is not over: its idle time ends sooner. A leader of a release that
did not know it takes it for the end of epoch 0, which no sequence has."""

TAKEN, RECALLED = "t", "r"
"""Kinds of entries of the feed about spare slots (`scheduler.core.spares`)."""

Offers = Mapping[ExecutorId, tuple[OfferedVersion, ...] | None]
"""What each registered executor offers of one model; None when it is dead or leaving."""


def sources(keys: Keyspace, model: str, shards: Iterable[ShardId]) -> dict[str, Source]:
    """The streams of a model by key. Each shard's feed comes before its starts, so that freed slots are known first."""
    streams: dict[str, Source] = {}
    for shard in shards:
        streams[keys.feed(shard, model)] = Source(StreamKind.FEED, shard)
        streams[keys.starts(shard, model)] = Source(StreamKind.STARTS, shard)
    return streams


def stream_events(entries: Sequence[StreamEntry], keys: Keyspace, model: str) -> tuple[list[Event], list[StreamEntry]]:
    """The events of entries that were read together.

    Events that free slots come first, then sequences that want a slot, in the order of their turn, then the rest. The
    shards' entries come one shard after the other, so without sorting a younger sequence could come before an older. A
    sequence whose wait has ended in the same read is left out.

    returns  the events, and the entries that cannot be read; those are counted, and no sequence waits by them
    """
    events: dict[StreamKind, list[Event]] = {kind: [] for kind in StreamKind}
    unreadable: list[StreamEntry] = []
    for entry in entries:
        kind, shard = entry.source.kind, entry.source.shard
        try:
            events[kind].append(over(entry) if kind is StreamKind.FEED else started(entry, keys))
        except FAILURES as failure:
            stream = keys.feed if kind is StreamKind.FEED else keys.starts
            noted(stream(shard, model), failure, field=text_of(entry.entry))
            unreadable.append(entry)
    overs, starts = events[StreamKind.FEED], events[StreamKind.STARTS]
    gone = {event.entry for event in overs if isinstance(event, WaitEnded)}
    waits = [event for event in starts if isinstance(event, SequenceWaits) and event.entry not in gone]
    waits.sort(key=lambda event: (MOVING_RANK if event.moving else WAITING_RANK, event.entry))
    # Both are about sequences that may only now have come in, so they follow the waits. Wishes and questions go last.
    news = [event for event in starts if not isinstance(event, SequenceWaits)]
    news.sort(key=lambda event: isinstance(event, MoveWished | PauseWished | ForecastAsked))
    return [*overs, *waits, *news], unreadable


Started = SequenceWaits | PatienceLowered | MoveWished | PauseWished | ForecastAsked


def started(entry: StreamEntry, keys: Keyspace) -> Started:
    """The event of an entry of the starts stream. Raises one of `FAILURES`."""
    match entry.fields[b"k"]:
        case b"d":
            event: Started = patience_lowered(entry)
        case b"v":
            event = move_wished(entry)
        case b"z":
            event = pause_wished(entry)
        case b"i":
            event = forecast_asked(entry)
        case b"w" | b"m" | b"r":
            event = waiting(entry)
        case kind:
            raise ValueError(f"an entry of an unknown kind: {kind!r}")
    if keys.shard_of(event.sequence) != entry.source.shard:
        raise ValueError(f"no sequence of this shard: {event.sequence}")
    return event


def over(entry: StreamEntry) -> SequenceOver | WaitEnded | IdleTimeCut | SpareTaken | SparesRecalled:
    """The event of an entry of the feed.

    Written by `release` and `look_by` in common.lua; for a sequence that waits for a slot by cancel.lua, expire.lua and
    pause.lua; about spare slots by submit.lua and recall.lua.
    """
    sequence = SequenceId(entry.fields[b"q"].decode())
    kind = entry.fields[b"k"].decode()
    cause = f"feed {entry.entry.decode()}@{entry.source.shard}"
    if b"b" in entry.fields:
        return WaitEnded(sequence, parse_entry(entry.fields[b"b"], entry.source.shard), kind, cause)
    if kind == CUT:
        return IdleTimeCut(sequence, int(entry.fields[b"d"]), cause)
    if kind == TAKEN:
        return spare_taken(entry, sequence, cause)
    if kind == RECALLED:
        executor = ExecutorId(entry.fields[b"x"].decode())
        return SparesRecalled(executor, entry.source.shard, int(entry.fields[b"n"]), cause)
    is_spare = entry.fields.get(b"s") == b"1"
    return SequenceOver(sequence, Epoch(int(entry.fields[b"e"])), kind, cause, is_spare)


def spare_taken(entry: StreamEntry, sequence: SequenceId, cause: str) -> SpareTaken:
    """An entry by which a sequence has taken a spare slot (`seat` in submit.lua)."""
    fields = entry.fields
    place = address(fields[b"x"], fields[b"v"], fields[b"i"], fields[b"l"])
    taken_ms, _ = entry_key(entry.entry)
    return SpareTaken(sequence, place, Epoch(int(fields[b"n"])), text_of(fields[b"o"]), cause, taken_ms)


def address(executor: bytes, version: bytes, instance: bytes, slot: bytes) -> SlotAddress:
    """The address of a slot, as entries and records name it. Raises one of `FAILURES`."""
    return SlotAddress(
        ExecutorId(executor.decode()), version_of(version), InstanceIndex(int(instance)), SlotIndex(int(slot))
    )


def version_of(text: bytes) -> str:
    """A version, as entries and records name it; "" if they name none. Raises ValueError for what is no number."""
    version = text.decode()
    if version and not version.isdecimal():
        raise ValueError(f"no version: {version}")
    return version


def patience_lowered(entry: StreamEntry) -> PatienceLowered:
    """An entry that lowers the deadline of a waiting sequence (`lower_deadline` in submit.lua)."""
    return PatienceLowered(
        sequence=SequenceId(entry.fields[b"q"].decode()),
        entry=parse_entry(entry.fields[b"b"], entry.source.shard),
        deadline_ms=int(entry.fields[b"d"]),
        cause=f"starts {entry.entry.decode()}@{entry.source.shard}",
    )


def move_wished(entry: StreamEntry) -> MoveWished:
    """An entry with an operator's wish (`seqmesh seq move`)."""
    wish = parse_entry(entry.entry, entry.source.shard)
    to = entry.fields[b"x"].decode()
    return MoveWished(SequenceId(entry.fields[b"q"].decode()), ExecutorId(to) if to else None, wish, f"wish {wish}")


def pause_wished(entry: StreamEntry) -> PauseWished:
    """An entry with an operator's wish (`seqmesh seq pause`)."""
    wish = parse_entry(entry.entry, entry.source.shard)
    return PauseWished(SequenceId(entry.fields[b"q"].decode()), int(entry.fields[b"u"]), wish, f"wish {wish}")


def forecast_asked(entry: StreamEntry) -> ForecastAsked:
    """An entry by which a gateway or an operator asks how the waiting lines stand (`shared.store.forecasts`)."""
    question = parse_entry(entry.entry, entry.source.shard)
    return ForecastAsked(SequenceId(entry.fields[b"q"].decode()), question, f"question {question}")


def waiting(entry: StreamEntry) -> SequenceWaits:
    """An entry by which a sequence waits, or returns to the line (`line_up` in common.lua)."""
    wait = parse_entry(entry.entry, entry.source.shard)
    return SequenceWaits(
        sequence=SequenceId(entry.fields[b"q"].decode()),
        version=version_of(entry.fields[b"v"]),
        entry=wait,
        moving=entry.fields[b"k"] == b"m",
        timeout_us=int(entry.fields[b"u"] or 0),
        cause=f"starts {wait}",
        returning=entry.fields[b"k"] == b"r",
        # Entries of a release that knew no tenants have none.
        tenant=text_of(entry.fields.get(b"o", b"")),
    )


def parse_entry(entry: bytes, shard: ShardId) -> Entry:
    """An entry's id with its shard, comparable by age."""
    return Entry(*entry_key(entry), shard)


class Poll:
    """The executors as they were polled once. members: as `shared.store.membership.Membership.members` returns them"""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        # This and what is made of a poll below is by model, because each of hundreds of leaders asks for its own. What
        # executors offer alike is one object (`Membership`).
        usable = [member.registration for member in members if member.usable]
        by_model = {key: _by_model(models) for key, models in {id(one.models): one.models for one in usable}.items()}
        self._offered = {one.executor: by_model[id(one.models)] for one in usable}
        self._nothing: Offers = {one.registration.executor: () if one.usable else None for one in members}
        self.models: AbstractSet[str] = set[str]().union(*by_model.values())
        """The models that are offered."""

    def offers(self, model: str) -> Offers:
        """What each registered executor offers of a model; None for one that is dead or leaving."""
        offered = {executor: models[model] for executor, models in self._offered.items() if model in models}
        return {**self._nothing, **offered}

    def withdrawn(self, model: str, versions: Iterable[str]) -> tuple[str, ...]:
        """The unloaded ones among the versions of a model: a living executor says so, and none serves or loads them."""
        served, lines = self._served.get(model, set[str]()), self._lines.get(model, [])
        coming = {line.version for line in lines if line.state in ("READY", "LOADING", "UNLOADING")}
        gone = {line.version for line in lines if line.state == "UNAVAILABLE" and line.reason == "unloaded"}
        if ANY_VERSION in coming:
            return ()
        return tuple(
            version
            for version in sorted(versions)
            if version not in served | coming and (version in gone or ANY_VERSION in gone)
        )

    @cached_property
    def _served(self) -> Mapping[str, set[str]]:
        """The versions that living executors serve, by model."""
        served: dict[str, set[str]] = {}
        for one in lines_of(member.registration.models for member in self.members if member.alive):
            served.setdefault(one.model, set()).add(one.version)
        return served

    @cached_property
    def _lines(self) -> Mapping[str, list[RepositoryEntry]]:
        """What living executors say of their repositories, by model."""
        lines: dict[str, list[RepositoryEntry]] = {}
        for line in lines_of(member.registration.repository for member in self.members if member.alive):
            lines.setdefault(line.model, []).append(line)
        return lines


def _by_model(served: Iterable[ServedModel]) -> Mapping[str, tuple[OfferedVersion, ...]]:
    offered: dict[str, tuple[OfferedVersion, ...]] = {}
    for one in served:
        version = OfferedVersion(one.version, one.instances, one.slots, one.closing, one.pageable, one.idle_ms)
        offered[one.model] = (*offered.get(one.model, ()), version)
    return offered


def member_events(before: Offers, after: Offers) -> list[Event]:
    """The changes between two polls: lost executors first, then new and changed ones, each by id.

    An executor is lost when it is dead, leaving, or not registered any more.
    """
    lost: list[Event] = [
        ExecutorLost(executor, f"lost {executor}")
        for executor in sorted({*before, *after})
        if after.get(executor) is None and (before.get(executor) is not None or executor not in before)
    ]
    seen: list[Event] = [
        ExecutorSeen(executor, versions, f"seen {executor}")
        for executor, versions in sorted(after.items())
        if versions is not None and before.get(executor) != versions
    ]
    return lost + seen

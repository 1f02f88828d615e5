"""The core against a naive twin of Redis, under every order of events: late, repeated, with leaders that start anew.

The twin does what the scripts do, in the plainest way. Whatever the core wants is carried out there, and the twin
refuses what must never be wanted: two live sequences in one slot, or a slot that does not exist. In the end nobody
waits beside a sequence that does nothing with its slot, and everybody gets a turn. A shard may go away: then a leader
hears nothing of it, whatever happens there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.core import invariants
from scheduler.core.actions import (
    Action,
    Assign,
    Dismiss,
    Forget,
    LayOut,
    LookAtIdle,
    LookForExpired,
    MoveOut,
    Pause,
    Publish,
    Recall,
    Reclaim,
    ReclaimPart,
    Reject,
    Vacate,
    WantSlots,
)
from scheduler.core.backlog import Entry
from scheduler.core.decide import decide, in_takeover, is_due
from scheduler.core.events import (
    Assigned,
    ClockRead,
    EpochsFound,
    Event,
    ExecutorLost,
    ExecutorSeen,
    Forgotten,
    Looked,
    MovedOut,
    MoveWished,
    PatienceLowered,
    RecallSent,
    Reclaimed,
    SequenceFound,
    SequenceOver,
    SequenceWaits,
    SharesSeen,
    SparesRecalled,
    SpareTaken,
    Tick,
    Vacated,
    WaitEnded,
)
from scheduler.core.slots import OfferedVersion, SlotAddress
from scheduler.core.state import LeaderState, Lent, Policy
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId, first_shards, shard_of
from tests.scheduler.state_view import view

SEQUENCES = [SequenceId(f"q{number}") for number in range(4)]
TENANTS = dict(zip(SEQUENCES, ("", "acme", "acme", "blue"), strict=True))
"""Whose the sequences are."""
SHARDS = (HERE, AWAY) = first_shards(2)


def of(sequence: SequenceId) -> ShardId:
    """Its shard; both have sequences."""
    return shard_of(sequence, SHARDS)


Fed = SequenceOver | WaitEnded | SpareTaken | SparesRecalled
TIMEOUT_MS = 50


@dataclass
class Record:
    """A sequence in Redis; `place` is None while it waits, moves, or is paged.

    begun   it has had a slot         busy  a step of it is in flight
    paged   it gave up its slot
    """

    entry: Entry
    place: SlotAddress | None = None
    epoch: Epoch = Epoch(0)
    moving: bool = False
    timeout_us: int = 0
    deadline_ms: int = 0
    begun: bool = False
    busy: bool = True
    paged: bool = False

    @property
    def in_line(self) -> bool:
        return self.place is None and (self.busy or self.moving)


@dataclass
class Twin:
    """What Redis holds.

    starts, feed  entries that are there; the log of starts is what a reader may have seen
    lent          the shard to which each slot was lent last, as leaders note it
    spares        slots that are laid out, by executor and shard; without an entry there is none that an end gives back
    """

    now_ms: int = 1000
    epoch: int = 0
    entries: int = 0
    wanted: int = 0
    records: dict[SequenceId, Record] = field(default_factory=dict[SequenceId, Record])
    starts: list[SequenceWaits] = field(default_factory=list[SequenceWaits])
    news: list[PatienceLowered] = field(default_factory=list[PatienceLowered])
    feed: list[Fed] = field(default_factory=list[Fed])
    spares: dict[tuple[ExecutorId, ShardId], set[SlotAddress]] = field(
        default_factory=dict[tuple[ExecutorId, ShardId], set[SlotAddress]]
    )
    lent: dict[SlotAddress, ShardId] = field(default_factory=dict[SlotAddress, ShardId])
    executors: dict[ExecutorId, OfferedVersion] = field(default_factory=dict[ExecutorId, OfferedVersion])
    dead: set[ExecutorId] = field(default_factory=set[ExecutorId])
    untold: set[Entry] = field(default_factory=set[Entry])
    wishes: dict[Entry, MoveWished] = field(default_factory=dict[Entry, MoveWished])

    def waits(self, sequence: SequenceId, record: Record) -> None:
        """An entry in the starts stream."""
        self.entries += 1
        record.entry = Entry(self.now_ms, self.entries, of(sequence))
        record.place = None
        record.deadline_ms = self.now_ms + record.timeout_us // 1000 if record.timeout_us else 0
        self.records[sequence] = record
        self.starts.append(
            SequenceWaits(
                sequence,
                "1",
                record.entry,
                moving=record.moving,
                timeout_us=record.timeout_us,
                returning=record.paged,
                tenant=TENANTS[sequence],
            )
        )

    def release(self, sequence: SequenceId) -> None:
        """A live sequence is over."""
        record = self.records.pop(sequence)
        self.feed.append(SequenceOver(sequence, record.epoch, is_spare=self.spare_again(sequence, record)))

    def page_by_owner(self, sequence: SequenceId, record: Record) -> None:
        """page.lua"""
        self.feed.append(SequenceOver(sequence, record.epoch, "p", is_spare=self.spare_again(sequence, record)))
        self.page(record)

    def spare_again(self, sequence: SequenceId, record: Record) -> bool:
        """`spare_again` in common.lua."""
        assert record.place is not None
        spares = self.spares.get((record.place.executor, of(sequence)))
        if spares is not None:
            spares.add(record.place)
        return spares is not None

    def seat(self, sequence: SequenceId, executor: ExecutorId) -> None:
        """submit.lua: a sequence that begins or returns takes the lowest spare slot."""
        spares = self.spares[executor, of(sequence)]
        place = min(spares, key=lambda place: (place.slot, place.instance))
        spares.remove(place)
        self.epoch += 1
        record = self.records.setdefault(sequence, Record(Entry(0, 0, of(sequence))))
        record.place, record.epoch = place, Epoch(self.epoch)
        record.begun, record.paged, record.busy = True, False, True
        # Not in the ms in which it came into the line that it has left since.
        self.now_ms += 1
        self.feed.append(SpareTaken(sequence, place, Epoch(self.epoch), TENANTS[sequence], taken_ms=self.now_ms))

    def lay_out(self, action: LayOut) -> None:
        """lay_out.lua, with the checks of a strict world."""
        held = {record.place for record in self.records.values()}
        for instance, slot in action.slots:
            place = SlotAddress(action.executor, action.version, instance, slot)
            self.lent[place] = action.shard
            assert place not in held, f"{place} is held"
            assert place not in self.laid_out(), f"{place} is spare already"
            self.spares.setdefault((action.executor, action.shard), set()).add(place)

    def laid_out(self) -> set[SlotAddress]:
        """The spare slots of all shards."""
        return {place for places in self.spares.values() for place in places}

    def recall(self, executor: ExecutorId, shard: ShardId) -> Event:
        """recall.lua"""
        self.spares.pop((executor, shard), None)
        self.epoch += 1
        self.feed.append(SparesRecalled(executor, shard, self.epoch))
        return RecallSent(executor, shard, self.epoch)

    def assign(self, action: Assign) -> Event:
        """assign.lua, with the checks of a strict world."""
        self.lent[action.place] = of(action.sequence)
        served = self.executors[action.place.executor]
        assert action.place.instance < served.instances
        assert action.place.slot < served.slots
        record = self.records.get(action.sequence)
        if record is None or not record.in_line or record.entry != action.entry:
            return Assigned(action.sequence, action.entry, Epoch(0))
        holders = [other for other, held in self.records.items() if held.place == action.place]
        assert holders == [], f"{action.place} is held by {holders}"
        assert action.place not in self.laid_out(), f"{action.place} is spare"
        self.epoch += 1
        record.place, record.epoch = action.place, Epoch(self.epoch)
        record.begun, record.moving, record.paged = True, False, False
        self.leaves_the_line(record)
        return Assigned(action.sequence, action.entry, record.epoch)

    def reclaim(self, executor: ExecutorId, shards: Iterable[ShardId], most: int) -> bool:
        """reclaim.lua. True if nothing was left."""
        for shard in shards:
            self.spares.pop((executor, shard), None)
        owned = [
            (sequence, record)
            for sequence, record in self.records.items()
            if of(sequence) in shards and record.place is not None and record.place.executor == executor
        ]
        for sequence, record in owned[:most]:
            if not record.busy:
                self.page(record)
                continue
            record.moving = True
            self.waits(sequence, record)
        return not owned

    def page(self, record: Record) -> None:
        """A sequence gives up its slot."""
        record.paged, record.place = True, None

    def vacate(self, action: Vacate) -> Event:
        """vacate.lua"""
        record = self.records.get(action.sequence)
        freed = record is not None and record.place is not None and record.epoch == action.epoch and not record.busy
        if freed:
            assert record is not None
            assert record.place == action.place
            self.page(record)
        return Vacated(action.sequence, action.epoch, freed)

    def move_out(self, action: MoveOut) -> Event:
        """vacate.lua, of a sequence that is to have another slot at once."""
        record = self.records.get(action.sequence)
        taken = record is not None and record.place is not None and record.epoch == action.epoch and not record.busy
        if record is not None and action.executor is None and record.paged and not record.busy:
            taken, record.paged, record.busy = True, False, True
        if taken:
            assert record is not None
            record.moving = True
            self.waits(action.sequence, record)
        return MovedOut(action.sequence, action.epoch, taken)

    def commit(self, sequence: SequenceId, record: Record) -> None:
        """commit.lua: the sequence has no other step."""
        record.busy = False
        if self.wanted > 0:
            self.wanted -= 1
            self.feed.append(SequenceOver(sequence, record.epoch, "p"))
            self.page(record)

    def reject(self, action: Reject) -> None:
        """reject.lua: only of one that waits there, and only when the time of one of its steps is over."""
        record = self.records.get(action.sequence)
        if record is None or not record.in_line or record.entry != action.entry:
            return
        del self.records[action.sequence]
        assert not record.begun
        assert 0 < record.deadline_ms <= self.now_ms
        self.leaves_the_line(record)

    def leaves_the_line(self, record: Record) -> None:
        """Its entry goes from the starts stream, and the news of it."""
        self.starts = [waits for waits in self.starts if waits.entry != record.entry]
        self.news = [lowered for lowered in self.news if lowered.entry != record.entry]

    def lower_patience(self, sequence: SequenceId, record: Record) -> None:
        """submit.lua: a step that waits less long than those before it."""
        deadline_ms = self.now_ms + TIMEOUT_MS
        if not record.deadline_ms or deadline_ms < record.deadline_ms:
            record.deadline_ms = deadline_ms
            self.news = [lowered for lowered in self.news if lowered.entry != record.entry]
            self.news.append(PatienceLowered(sequence, record.entry, deadline_ms))

    def cancel(self, sequence: SequenceId, record: Record, *, tells: bool) -> None:
        """cancel.lua for one that waits; when the feed is full, the leader is not told."""
        del self.records[sequence]
        self.leaves_the_line(record)
        if tells:
            self.feed.append(WaitEnded(sequence, record.entry))
        else:
            self.untold.add(record.entry)

    def expire(self, sequence: SequenceId, record: Record) -> None:
        """expire.lua for one without a slot: paged, or between two owners."""
        del self.records[sequence]
        if record.moving:
            self.leaves_the_line(record)
            self.feed.append(WaitEnded(sequence, record.entry, "x"))


class CoreAgainstTwin(RuleBasedStateMachine):
    """Clients, executors and a leader that may be replaced at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = Twin()
        self.born = 0
        self.begin_leading()

    def begin_leading(self, withheld: Lent | None = None) -> None:
        """A new leader: an empty state, and the streams from their beginning. withheld: of the shards that are away"""
        policy = Policy(1.25, virtual_nodes=4, forget_after_ms=100, shards=SHARDS)
        self.state = LeaderState(policy, withheld=withheld or {})
        self.shards = self.state.shards
        # Slots are laid out from the first tick on, and not only when a sequence has come through the line.
        self.state.used.add("1")
        for executor, shard in sorted(self.twin.spares):
            if shard in self.shards:
                self.twin.recall(executor, shard)
        decide(self.state, EpochsFound({shard: Epoch(self.twin.epoch) for shard in self.shards}))
        self.is_stirred = True
        self.known: set[ExecutorId] = set()
        self.read_starts = {shard: Entry(0, 0, shard) for shard in SHARDS}
        self.read_log: list[SequenceWaits] = []
        self.read_feed: list[Fed] = []

    @initialize()
    def mesh_begins_with_an_executor(self) -> None:
        self.executor_joins(instances=1, slots=2)
        self.leader_polls_members()

    # -- the world ------------------------------------------------------------------------------------------------

    @rule(instances=st.integers(1, 2), slots=st.integers(0, 2))
    @precondition(lambda self: len(self.twin.executors) < 4)
    def executor_joins(self, instances: int, slots: int) -> None:
        self.born += 1
        self.twin.executors[ExecutorId(f"e{self.born}")] = OfferedVersion(
            "1", instances, slots, pageable=True, idle_ms=100_000
        )

    @rule(data=st.data())
    @precondition(lambda self: set(self.twin.executors) - self.twin.dead)
    def executor_dies(self, data: st.DataObject) -> None:
        self.twin.dead.add(data.draw(st.sampled_from(sorted(set(self.twin.executors) - self.twin.dead))))

    @rule(sequence=st.sampled_from(SEQUENCES), timeout=st.booleans())
    def client_starts(self, sequence: SequenceId, timeout: bool) -> None:
        if sequence not in self.twin.records:
            timeout_us = TIMEOUT_MS * 1000 if timeout else 0
            self.twin.waits(sequence, Record(Entry(0, 0, of(sequence)), timeout_us=timeout_us))

    @rule(sequence=st.sampled_from(SEQUENCES), data=st.data())
    def client_starts_in_a_spare_slot(self, sequence: SequenceId, data: st.DataObject) -> None:
        """Unless others of its shard wait for their first slot."""
        records = [record for other, record in self.twin.records.items() if of(other) == of(sequence)]
        waits = any(record.in_line and not record.begun for record in records)
        if sequence not in self.twin.records and not waits:
            self.seat_somewhere(sequence, data)

    @rule(sequence=st.sampled_from(SEQUENCES), data=st.data())
    def paged_sequence_returns_to_a_spare_slot(self, sequence: SequenceId, data: st.DataObject) -> None:
        record = self.twin.records.get(sequence)
        if record is not None and record.paged and not record.busy and not record.moving:
            self.seat_somewhere(sequence, data)

    def seat_somewhere(self, sequence: SequenceId, data: st.DataObject) -> None:
        spares = sorted(name for (name, shard), spares in self.twin.spares.items() if spares and shard == of(sequence))
        if spares:
            self.twin.seat(sequence, data.draw(st.sampled_from(spares)))

    @rule(sequence=st.sampled_from(SEQUENCES))
    def owner_pages_an_idle_sequence(self, sequence: SequenceId) -> None:
        record = self.twin.records.get(sequence)
        if record is not None and record.place is not None and not record.busy:
            self.twin.page_by_owner(sequence, record)

    @rule(sequence=st.sampled_from(SEQUENCES))
    def client_sends_a_step_with_a_timeout(self, sequence: SequenceId) -> None:
        record = self.twin.records.get(sequence)
        if record is not None and not record.begun:
            self.twin.lower_patience(sequence, record)

    @rule(sequence=st.sampled_from(SEQUENCES), tells=st.booleans())
    def caller_of_a_waiting_sequence_leaves(self, sequence: SequenceId, tells: bool) -> None:
        record = self.twin.records.get(sequence)
        if record is not None and not record.begun:
            self.twin.cancel(sequence, record, tells=tells)

    @rule(sequence=st.sampled_from(SEQUENCES))
    def client_ends(self, sequence: SequenceId) -> None:
        record = self.twin.records.get(sequence)
        if record is not None and record.place is not None:
            self.twin.release(sequence)

    @rule(sequence=st.sampled_from(SEQUENCES))
    def client_sends_a_step(self, sequence: SequenceId) -> None:
        record = self.twin.records.get(sequence)
        if record is not None and not record.busy:
            record.busy = True
            if record.place is None and not record.moving:
                self.twin.waits(sequence, record)

    @rule(sequence=st.sampled_from(SEQUENCES))
    def step_is_committed(self, sequence: SequenceId) -> None:
        record = self.twin.records.get(sequence)
        if record is not None and record.place is not None and record.busy:
            self.twin.commit(sequence, record)

    @rule(sequence=st.sampled_from(SEQUENCES))
    def sequence_without_a_slot_expires(self, sequence: SequenceId) -> None:
        record = self.twin.records.get(sequence)
        if record is not None and record.place is None and not record.busy:
            self.twin.expire(sequence, record)

    @rule()
    def what_commits_were_told_expires(self) -> None:
        self.twin.wanted = 0

    @rule(sequence=st.sampled_from(SEQUENCES))
    def sequence_begins_and_the_leader_hears_it(self, sequence: SequenceId) -> None:
        self.client_starts(sequence=sequence, timeout=False)
        self.leader_reads_starts(most=100)

    @rule(sequence=st.sampled_from(SEQUENCES), to=st.sampled_from(["e1", "e2", "nobody", None]))
    def operator_wants_a_sequence_elsewhere(self, sequence: SequenceId, to: str | None) -> None:
        self.twin.entries += 1
        entry = Entry(self.twin.now_ms, self.twin.entries, of(sequence))
        self.twin.wishes[entry] = MoveWished(sequence, ExecutorId(to) if to else None, entry)
        if of(sequence) in self.shards:
            self.tell(self.twin.wishes[entry])

    @rule(shares=st.dictionaries(st.sampled_from(["", "acme", "blue"]), st.integers(1, 3)))
    def operator_gives_tenants_other_shares(self, shares: dict[str, int]) -> None:
        self.tell(SharesSeen(shares))

    @rule()
    def a_long_time_passes_in_the_leaders_sight(self) -> None:
        for _ in range(3):
            self.twin.now_ms += 1000
            self.tell(Tick(self.twin.now_ms))

    @rule(by_ms=st.integers(1, 80))
    def time_passes(self, by_ms: int) -> None:
        self.twin.now_ms += by_ms

    # -- what the leader hears of it ------------------------------------------------------------------------------

    @rule(most=st.integers(1, 5))
    def leader_reads_starts(self, most: int) -> None:
        for waits in self.unread()[:most]:
            self.read_starts[waits.entry.shard] = waits.entry
            self.read_log.append(waits)
            self.tell(waits)

    def unread(self) -> list[SequenceWaits]:
        """Entries of the starts streams that the leader reads next."""
        led = [waits for waits in self.twin.starts if waits.entry.shard in self.shards]
        return [waits for waits in led if waits.entry > self.read_starts[waits.entry.shard]]

    @rule()
    def leader_reads_news(self) -> None:
        for lowered in list(self.twin.news):
            if lowered.entry.shard in self.shards and lowered.entry <= self.read_starts[lowered.entry.shard]:
                self.tell(lowered)

    @rule(data=st.data())
    @precondition(lambda self: self.read_log)
    def start_is_heard_twice(self, data: st.DataObject) -> None:
        """Of sequences that are still in that life: of others the entry has gone, and nobody can read it again."""
        waits = data.draw(st.sampled_from(self.read_log))
        record = self.twin.records.get(waits.sequence)
        if waits.sequence in self.state.sequences and record is not None and record.entry == waits.entry:
            self.tell(waits)

    @rule(most=st.integers(1, 5))
    def leader_reads_feed(self, most: int) -> None:
        for fed in self.unread_feed()[:most]:
            self.twin.feed.remove(fed)
            self.read_feed.append(fed)
            self.tell(fed)

    def unread_feed(self) -> list[Fed]:
        return [
            fed
            for fed in self.twin.feed
            if (fed.shard if isinstance(fed, SparesRecalled) else of(fed.sequence)) in self.shards
        ]

    @rule(data=st.data())
    @precondition(lambda self: self.read_feed)
    def end_is_heard_twice(self, data: st.DataObject) -> None:
        """But not how it began, when it is over: a leader reads its feed once."""
        fed = data.draw(st.sampled_from(self.read_feed))
        if not isinstance(fed, SpareTaken) or fed.sequence in self.state.sequences:
            self.tell(fed)

    @rule()
    def leader_polls_members(self) -> None:
        for executor, served in sorted(self.twin.executors.items()):
            lost = executor in self.twin.dead
            self.tell(ExecutorLost(executor) if lost else ExecutorSeen(executor, (served,)))
        for executor in sorted(self.known - set(self.twin.executors)):
            self.tell(ExecutorLost(executor))
        self.known = set(self.twin.executors)

    @rule()
    def leader_begins_a_turn(self) -> None:
        self.tell(ClockRead(self.twin.now_ms))

    @rule()
    def leader_ticks(self) -> None:
        self.tell(Tick(self.twin.now_ms))

    @rule(pauses_ms=st.lists(st.integers(1, 700), max_size=4))
    def leader_ticks_and_hears_nothing(self, pauses_ms: list[int]) -> None:
        """A tick that is not due has nothing to do."""
        self.is_stirred = False
        self.leader_ticks()
        for pause_ms in pauses_ms:
            self.twin.now_ms += pause_ms
            is_quiet = not self.is_stirred and not is_due(self.state, self.twin.now_ms)
            self.is_stirred = False
            self.leader_ticks()
            assert not is_quiet or not self.is_stirred

    @rule()
    @precondition(lambda self: self.shards == SHARDS)
    def a_shard_goes_away(self) -> None:
        """The next leader knows what was noted of it."""
        self.rebuild(self.lent_away())

    @rule()
    def leader_is_replaced(self) -> None:
        """By one that has all shards, or knows what was noted of the lost one."""
        self.rebuild(self.lent_away() if AWAY not in self.shards else None)

    def lent_away(self) -> Lent:
        return {AWAY: frozenset(place for place, shard in self.twin.lent.items() if shard == AWAY)}

    @rule()
    def all_shards_are_there(self) -> None:
        self.rebuild()

    def rebuild(self, withheld: Lent | None = None) -> None:
        self.begin_leading(withheld)
        self.tell(Tick(self.twin.now_ms))
        for executor, served in sorted(self.twin.executors.items()):
            if executor not in self.twin.dead:
                self.tell(ExecutorSeen(executor, (served,)))
        for sequence, record in sorted(self.twin.records.items()):
            if record.place is not None and of(sequence) in self.shards:
                self.tell(SequenceFound(sequence, record.place, record.epoch, tenant=TENANTS[sequence]))
        for executor in sorted(self.twin.dead & set(self.twin.executors)):
            self.tell(ExecutorLost(executor))
        self.known = set(self.twin.executors)
        for entry, wished in sorted(self.twin.wishes.items()):
            if entry.shard in self.shards:
                self.tell(wished)

    def tell(self, event: Event) -> None:
        """The core decides, the twin does, the core hears what came of it."""
        events = [event]
        while events:
            actions = [action for event in events for action in decide(self.state, event)]
            self.is_stirred |= bool(actions) or not isinstance(event, Tick)
            events = [outcome for action in actions for outcome in self.perform(action)]

    def perform(self, action: Action) -> list[Event]:
        match action:
            case Assign():
                return [self.twin.assign(action)]
            case Vacate():
                return [self.twin.vacate(action)]
            case WantSlots(_, count):
                self.twin.wanted = count
                return []
            case LayOut():
                self.twin.lay_out(action)
                return []
            case Recall(executor):
                return [self.twin.recall(executor, shard) for shard in self.shards]
            case Reclaim(executor):
                self.twin.reclaim(executor, self.shards, most=len(SEQUENCES))
                return []
            case ReclaimPart(executor):
                return [Reclaimed(executor, self.twin.reclaim(executor, self.shards, most=1))]
            case Reject():
                self.twin.reject(action)
                return []
            case Forget(executor):
                assert executor in self.twin.dead
                if self.shards != SHARDS:
                    return []
                assert not [r for r in self.twin.records.values() if r.place and r.place.executor == executor]
                self.twin.executors.pop(executor, None)
                return [Forgotten(executor)]
            case MoveOut():
                return [self.twin.move_out(action)]
            case Dismiss(_, entry):
                del self.twin.wishes[entry]
                return []
            case Pause():
                raise AssertionError("nobody wishes it: a pause is the script's, and the core only passes the wish on")
            case LookForExpired(now_ms):
                return [Looked(now_ms, None)]
            case LookAtIdle() | Publish():
                raise AssertionError("nobody asks for a forecast")

    # -- what must be true ----------------------------------------------------------------------------------------

    @invariant()
    def state_is_sound(self) -> None:
        invariants.check(self.state)

    def teardown(self) -> None:
        """Once everything has been heard, the leader's picture is what Redis holds, and nobody waits in vain."""
        self.twin.wanted = 0
        if self.shards != SHARDS:
            self.all_shards_are_there()
        self.leader_polls_members()
        self.hear_everything()
        self.leader_ticks()
        # What a tick has moved out comes back.
        self.hear_everything()
        invariants.check(self.state)
        self.compare_pictures()
        self.everybody_gets_a_turn()

    def hear_everything(self) -> None:
        while in_takeover(self.state) or self.unread() or self.unread_feed():
            self.leader_begins_a_turn()
            self.leader_reads_feed(most=100)
            self.leader_reads_starts(most=100)
        self.leader_reads_news()

    def everybody_gets_a_turn(self) -> None:
        """Whoever waits has a slot after as many commits as there are sequences, in the order of age."""
        if not self.state.ring("1").tables:
            return
        for _ in range(2 * len(SEQUENCES)):
            waiting = [record for record in self.twin.records.values() if record.in_line]
            held = {s: r for s, r in self.twin.records.items() if r.place is not None}
            assert not waiting or all(record.busy for record in held.values()), "nobody waits beside an idle sequence"
            for sequence, record in held.items():
                self.twin.commit(sequence, record)
            self.hear_everything()
            self.leader_ticks()
            # What a tick has moved out comes back.
            self.hear_everything()
        assert [] == [record for record in self.twin.records.values() if record.in_line]

    def compare_pictures(self) -> None:
        late = [r for r in self.twin.records.values() if not r.begun and r.deadline_ms]
        assert all(record.deadline_ms > self.twin.now_ms for record in late), "nobody waits beyond his patience"
        live = {s: (r.place, r.epoch) for s, r in self.twin.records.items() if r.place is not None}
        waiting = {s for s, r in self.twin.records.items() if r.in_line}

        assert live == {sequence: (place, epoch) for sequence, place, epoch in view(self.state).live}
        # Of those whose cancellation the feed had no room for, it learns when their turn comes.
        spares = {place for table in self.state.ring("1").tables.values() for place, _ in table.spares()}
        assert self.twin.laid_out() == spares
        assert {} == {sequence: held for sequence, held in live.items() if held[0] in spares}
        believed = {sequence for _, sequence, _ in view(self.state).waiting}
        assert waiting == {s for s in believed if self.state.sequences[s].entry not in self.twin.untold}


TestCoreAgainstTwin = CoreAgainstTwin.TestCase
TestCoreAgainstTwin.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)

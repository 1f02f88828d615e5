"""The leader of one model: turns what was read into events, lets the core decide, and carries the actions out.

It works in one task, one turn after the other. So the outcome of an action is always taken in before any event that
followed from it. A leader that meets an unexpected error ends; `scheduler.service` builds a new one from Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from scheduler.core import invariants
from scheduler.core.actions import Action
from scheduler.core.decide import UNREADABLE, decide, in_takeover, is_due, reclaimed_together
from scheduler.core.events import ClockRead, Event, SequenceOver, SequenceWaits, SharesSeen, Tick, VersionsWithdrawn
from scheduler.core.spares import has_spares_only
from scheduler.core.state import CONFIRMED, ExecutorPhase, LeaderState, Lent, Policy, SequencePhase
from scheduler.effects import EffectPerformer
from scheduler.ingest import Offers, Poll, StreamEntry, StreamKind, member_events, sources, stream_events
from scheduler.lent_slots import LentSlots
from scheduler.mesh import MeshAccess
from scheduler.rebuild import raise_fence, rebuilt, recall
from scheduler.sweep import sweep
from shared.contract.ids import ExecutorId, SequenceId, ShardId, Term
from shared.contract.record import LOST, WAIT_ENTRY
from shared.process import logs

DONE_MAX = 64
"""Entries of one turn from which on they are removed at once."""
REBUILT_AT_ONCE = 512
"""Events of a rebuild that are decided without a pause. There may be hundreds of thousands; the loop that renews the
leases runs in the pauses.
"""
MAILBOX_MAX = 8_192
"""Entries that were read and not yet taken in. At this bound the model's streams are not read; they have bounds too."""
AT_EASE_AFTER_S = 0.1
"""A leader that was asked for a slot is asked for more of them soon."""
SET_BACK_MS = 1_000
"""By how much the clock of Redis may go back before a leader begins anew. Until the clock is where it was, nothing that
waits for a time happens.
"""
LOST_KINDS = (LOST.decode(), UNREADABLE)
LOST_NAMED_MAX = 16
"""Lost sequences, or models whose lead is lost, that one line of the log names; it counts all."""


class ClockSetBackError(Exception):
    """The clock of Redis was set back: the times that the leader knows lie in the future."""


class Leader:
    """The leader of one model in one term.

    shares  of tenants, as they are now (`shared.contract.tenants`)
    lent    the leader's notes; None: it has none yet
    away    the shards to lead without, with the slots that were lent to them
    check   check the whole state's invariants after every turn
    sweep   go over every sequence's record before leading (`scheduler.sweep`); not done while shards are away
    """

    def __init__(
        self,
        mesh: MeshAccess,
        model: str,
        term: Term,
        *,
        policy: Policy,
        tombstone_ms: int,
        shares: Callable[[], Mapping[str, int]] = dict[str, int],
        lent: LentSlots | None = None,
        away: Lent | None = None,
        check: bool = False,
        sweep: bool = False,
    ) -> None:
        self.model = model
        self.term = term
        self.state = LeaderState(policy, withheld=away or {})
        self._mesh = mesh
        self._shares = shares
        self._check = check
        self._sweep = sweep
        self._lent = lent or LentSlots(mesh, model, term)
        shards = self.state.shards
        self._performer = EffectPerformer(mesh, model, term, shards=shards, tombstone_ms=tombstone_ms, lent=self._lent)
        self.streams = sources(mesh.keys, model, shards)
        """All that it is to hear."""
        self._positions = dict.fromkeys(self.streams, "0-0")
        self._mailbox: list[StreamEntry] = []
        self._offers: Offers = {}
        self._poll: Poll | None = None
        self._polled = False
        self._now_ms = 0
        self._is_stirred = True
        self._asked_at = 0.0
        self._since = float("inf")
        self._wake = asyncio.Event()
        self._closed = False
        self.when_asked: Callable[[], None] = lambda: None
        """Called when the leader was at ease, and a sequence asks for a slot: what other streams say of slots that are
        free by now has not been waited for."""

    # -- what the service tells it --------------------------------------------------------------------------------

    def positions(self) -> dict[str, str]:
        """The streams to be read, each with the last entry that was read.

        Empty before the rebuild is done, and while the mailbox is full.
        """
        ready = self._since < float("inf") and len(self._mailbox) < MAILBOX_MAX
        return self._positions if ready else {}

    def awaited(self, positions: Mapping[str, str]) -> Mapping[str, str]:
        """The ones among the streams for whose entries a reader is to wait.

        While new sequences take spare slots and nobody waits for another one, the feed can be read a little later.
        """
        if not self._is_at_ease:
            return positions
        return {stream: last for stream, last in positions.items() if self.streams[stream].kind is StreamKind.STARTS}

    def deliver(self, stream: str, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """Takes entries of one of the leader's streams, in order, into the mailbox."""
        source = self.streams[stream]
        if source.kind is StreamKind.STARTS:
            was_at_ease, self._asked_at = self._is_at_ease, asyncio.get_running_loop().time()
            if was_at_ease:
                self.when_asked()
        self._positions[stream] = entries[-1][0].decode()
        self._mailbox += [StreamEntry(source, entry, fields) for entry, fields in entries]
        self._wake.set()

    @property
    def _is_at_ease(self) -> bool:
        is_quiet = asyncio.get_running_loop().time() - self._asked_at >= AT_EASE_AFTER_S
        return is_quiet and has_spares_only(self.state)

    def observe(self, poll: Poll, now_ms: int, asked_at: float) -> None:
        """Takes the polled executors and the time in Redis.

        A poll that was asked for before the leader's own first one is ignored. The leader is woken only if something
        can come of the poll: while a repository is loaded, the executors change with each of its models.

        poll      the very same object as before, if no executor has changed
        asked_at  when the poll was sent, by the event loop's clock
        """
        if asked_at < self._since:
            return
        self._now_ms = now_ms
        has_changed = poll is not self._poll and poll.offers(self.model) != self._offers
        self._poll = poll
        if has_changed or self._is_stirred or is_due(self.state, now_ms):
            self._polled = True
            self._wake.set()

    @property
    def owes_sweep(self) -> bool:
        """Whether the next leader has to sweep: this one has not done it, or takes sequences from an executor that is
        registered no more, so that nobody else knows of it.
        """
        registered = self._mesh.polls.latest.offers(self.model)
        return self._sweep or any(executor not in registered for executor in in_takeover(self.state))

    @property
    def away(self) -> Lent:
        """The shards that it leads without."""
        return self.state.withheld

    def close(self) -> None:
        """Ends the leader after its present turn, even if its task's cancellation gets lost."""
        self._closed = True
        self._wake.set()

    # -- its task -------------------------------------------------------------------------------------------------

    async def run(self, rebuilding: AbstractAsyncContextManager[object] = nullcontext()) -> None:  # noqa: B008 - has no state
        """Leads until it is closed or cancelled.

        rebuilding  is entered while the state is rebuilt
        raises  CONNECTION_LOST; ResponseError (FENCED: another scheduler leads); ClockSetBackError; IllegalMoveError
                or BrokenInvariantError, which are mistakes in this code
        """
        async with rebuilding:
            await self._rebuild()
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            await self._turn()
            if in_takeover(self.state):
                # The next turn does the next part. What the last one took is read meanwhile.
                self._wake.set()
                await asyncio.sleep(0)

    async def _rebuild(self) -> None:
        mesh, shards = self._mesh, self.state.shards
        owners: set[ExecutorId] = set()
        await raise_fence(mesh, self.model, self.term, shards)
        if is_swept := self._sweep and not self.away:
            # A leader may have ended in the midst of a takeover: a step that still lies in another inbox is not lost.
            poll, _ = await mesh.polls.next()
            for executor in poll.offers(self.model):
                await self._performer.drain(executor, alive=True)
            owners = await sweep(mesh, self.model, self.term)
        poll, now_ms = await mesh.polls.next()
        # An owner that is not registered, because the registrations were lost, is lost as one whose lease has ended.
        self._offers, self._now_ms = {**dict.fromkeys(owners), **poll.offers(self.model)}, now_ms
        # A poll of `watch` that was sent before this moment may be older than the leader's own, whichever was sent
        # first. An executor that is missing in the older one would count as lost, and no move leads back from LOST.
        heard_at = asyncio.get_running_loop().time()
        await recall(mesh, self.model, self.term, self._offers, shards)
        events = await rebuilt(mesh, self.model, self._offers, now_ms, shards)
        actions: list[Action] = []
        for begin in range(0, len(events), REBUILT_AT_ONCE):
            actions += self._decide(events[begin : begin + REBUILT_AT_ONCE])
            await asyncio.sleep(0)
        await self._carry_out(reclaimed_together(actions))
        # The leader before may have taken sequences from an executor, and ended before it moved on their steps.
        mesh.drain_soon(self._offers)
        if not self.away:
            await self._lent.complete(self.state)
        self._sweep = self._sweep and not is_swept
        logs.info(
            "leading",
            model=self.model,
            term=self.term,
            executors=sum(e.phase is ExecutorPhase.SERVING for e in self.state.executors.values()),
            live=sum(s.phase is SequencePhase.LIVE for s in self.state.sequences.values()),
            **({"without_shards": ", ".join(map(str, self.away))} if self.away else {}),
        )
        self._since = heard_at
        self._wake.set()

    async def _turn(self) -> None:
        self._is_stirred = True
        mailbox, self._mailbox = self._mailbox, []
        polled, self._polled = self._polled, False
        poll, now_ms = self._poll, self._now_ms
        if now_ms < self.state.now_ms - SET_BACK_MS:
            raise ClockSetBackError(f"by {self.state.now_ms - now_ms} ms")
        events, unreadable = stream_events(mailbox, self._mesh.keys, self.model)
        events = await self._without_left_over(events)
        self._tell_lost(events)
        if (shares := self._shares()) != self.state.shares:
            events = [SharesSeen(shares, "settings"), *events]
        if polled and poll is not None:
            current = poll.offers(self.model)
            # Losses go before starts, so that no sequence is assigned to an executor that is known to be gone.
            events = [*member_events(self._offers, current), *events, *self._withdrawn(poll)]
            events.append(Tick(now_ms, f"tick {now_ms}"))
            self._offers = current
        actions = self._decide([ClockRead(now_ms), *events])
        await self._carry_out(actions)
        # Actions, or entries that came between two ticks, may have made work for the next tick: do not skip it.
        self._is_stirred = not polled or bool(actions)
        # Feed entries are removed once they are acted upon. A starts entry is removed by the script that gives its
        # sequence a slot or ends its wait: until then it is the backlog, from which a new leader rebuilds.
        self._performer.done(_entries(mailbox, StreamKind.FEED), StreamKind.FEED)
        self._performer.done(_entries(unreadable, StreamKind.STARTS), StreamKind.STARTS)
        # Else they go with the next calls. A tick follows soon, since this turn was none.
        if polled or len(mailbox) > DONE_MAX:
            await self._performer.acknowledge()
        if self._check:
            invariants.check(self.state)

    async def _without_left_over(self, events: list[Event]) -> list[Event]:
        """Leaves out, and has removed, what the vanished record of an earlier life of an id has left in the line.

        A sequence that was found in its slot has no entry there, by which the core could tell the older from the newer.
        """
        over = {event.sequence for event in events if isinstance(event, SequenceOver)}
        waits = [
            event
            for event in events
            if isinstance(event, SequenceWaits) and self._is_found(event.sequence) and event.sequence not in over
        ]
        if not waits:
            return events
        asked = [("HGET", self._mesh.keys.sequence(event.sequence).record, WAIT_ENTRY) for event in waits]
        answers = zip(waits, await self._mesh.links.ask(asked), strict=True)
        left = [event for event, entry in answers if entry != event.entry.id.encode()]
        self._performer.done(((event.entry.shard, event.entry.id.encode()) for event in left), StreamKind.STARTS)
        return [event for event in events if event not in left]

    def _is_found(self, sequence: SequenceId) -> bool:
        known = self.state.sequences.get(sequence)
        return known is not None and known.phase in CONFIRMED and known.entry is None

    def _tell_lost(self, events: Iterable[Event]) -> None:
        """Names the sequences whose state is gone: their clients have to begin again."""
        lost = [event.sequence for event in events if isinstance(event, SequenceOver) and event.kind in LOST_KINDS]
        if lost:
            named = ", ".join(lost[:LOST_NAMED_MAX])
            logs.warning("sequences lost", model=self.model, sequences=len(lost), named=named)

    def _withdrawn(self, poll: Poll) -> list[Event]:
        waited_for = [version for version, backlog in self.state.backlogs.items() if len(backlog)]
        versions = poll.withdrawn(self.model, waited_for) if waited_for else ()
        return [VersionsWithdrawn(self.model, versions, "unloaded")] if versions else []

    async def _carry_out(self, actions: list[Action]) -> None:
        while actions:
            actions = self._decide(await self._performer.perform(actions))

    def _decide(self, events: Iterable[Event]) -> list[Action]:
        return [action for event in events for action in decide(self.state, event)]


def _entries(read: Iterable[StreamEntry], kind: StreamKind) -> list[tuple[ShardId, bytes]]:
    return [(entry.source.shard, entry.entry) for entry in read if entry.source.kind is kind]

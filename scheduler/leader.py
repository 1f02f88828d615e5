"""One model's leader at work: what is read becomes events, the core decides, the actions are performed.

All of it happens in one task, one turn after the other, so that results of actions are always heard before anything
that followed from them. A leader that meets an error it cannot judge stops; the service builds a new one from Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from scheduler.core import invariants
from scheduler.core.actions import Action
from scheduler.core.decide import decide, drain_all, is_due
from scheduler.core.events import ClockRead, Event, Tick, VersionsWithdrawn
from scheduler.core.state import ExecutorPhase, LeaderState, Policy, SequencePhase
from scheduler.effects import EffectPerformer, MeshAccess
from scheduler.ingest import Offers, StreamEntry, StreamKind, member_events, offers, sources, stream_events, withdrawn
from scheduler.rebuild import raise_fence, rebuilt
from scheduler.sweep import sweep
from shared.contract.ids import ShardId, Term
from shared.process import logs
from shared.store.membership import Member

MAILBOX_MAX = 8_192
"""Entries read and not yet taken in; beyond it the model's streams are not read. They are bounded themselves."""


class Leader:
    """The leader of one model in one term.

    check  examine the whole state after every turn
    sweep  look over every sequence first (`scheduler.sweep`)
    """

    def __init__(
        self,
        mesh: MeshAccess,
        model: str,
        term: Term,
        *,
        policy: Policy,
        tombstone_ms: int,
        check: bool = False,
        sweep: bool = False,
    ) -> None:
        self.model = model
        self.term = term
        self.state = LeaderState(policy)
        self._mesh = mesh
        self._check = check
        self._sweep = sweep
        self._performer = EffectPerformer(mesh, model, term, tombstone_ms=tombstone_ms)
        self._sources = sources(mesh.keys, model)
        self._positions = dict.fromkeys(self._sources, "0-0")
        self._mailbox: list[StreamEntry] = []
        self._offers: Offers = {}
        self._members: Sequence[Member] | None = None
        self._polled = False
        self._now_ms = 0
        self._is_stirred = True
        self._since = float("inf")
        self._wake = asyncio.Event()
        self._closed = False

    # -- what the service tells it --------------------------------------------------------------------------------

    def positions(self) -> dict[str, str]:
        """The streams to be read, with the last entry that was; none while there is too much to do."""
        ready = self._since < float("inf") and len(self._mailbox) < MAILBOX_MAX
        return self._positions if ready else {}

    def deliver(self, stream: str, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """Entries of one of its streams, in order."""
        source = self._sources[stream]
        self._positions[stream] = entries[-1][0].decode()
        self._mailbox += [StreamEntry(source, entry, fields) for entry, fields in entries]
        self._wake.set()

    def observe(self, members: Sequence[Member], now_ms: int, asked_at: float) -> None:
        """The executors at `asked_at` (the loop's clock) and the time in Redis. Older news than its own is no news.

        members  the same list as before, if nothing has changed: where nothing can come of it, the leader is not woken
        """
        if asked_at < self._since:
            return
        self._now_ms = now_ms
        if members is not self._members or self._is_stirred or is_due(self.state, now_ms):
            self._members, self._polled = members, True
            self._wake.set()

    def close(self) -> None:
        """It leads no more: it ends after its present turn, also when its task's cancellation is lost on the way."""
        self._closed = True
        self._wake.set()

    # -- its task -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Leads until it is closed or cancelled, or raises: CONNECTION_LOST, ResponseError (FENCED: another leads),
        IllegalMoveError or BrokenInvariantError (a mistake of ours).
        """
        try:
            await self._rebuild()
            while not self._closed:
                await self._wake.wait()
                self._wake.clear()
                await self._turn()
        finally:
            await self._performer.close()

    async def _rebuild(self) -> None:
        await raise_fence(self._mesh.scripts, self._mesh.keys, self.model, self.term)
        if self._sweep:
            await sweep(self._mesh, self.model, self.term)
        self._offers = offers(await self._mesh.membership.members(), self.model)
        # What was asked for before this was heard may be older, whichever was asked for first: an executor that is not
        # in it yet would count as lost for ever.
        heard_at = asyncio.get_running_loop().time()
        events = await rebuilt(self._mesh.redis, self._mesh.keys, self.model, self._offers)
        await self._carry_out([*self._decide(events), *drain_all(self.state)])
        logs.info(
            "leading",
            model=self.model,
            term=self.term,
            executors=sum(e.phase is ExecutorPhase.SERVING for e in self.state.executors.values()),
            live=sum(s.phase is SequencePhase.LIVE for s in self.state.sequences.values()),
        )
        self._since = heard_at

    async def _turn(self) -> None:
        self._is_stirred = True
        mailbox, self._mailbox = self._mailbox, []
        polled, self._polled = self._polled, False
        members, now_ms = self._members, self._now_ms
        events, unreadable = stream_events(mailbox, self._mesh.keys, self.model)
        if polled and members is not None:
            current = offers(members, self.model)
            # Losses before starts: nobody is sent to an executor that is known to be gone.
            events = [*member_events(self._offers, current), *events, *self._withdrawn(members)]
            events.append(Tick(now_ms, f"tick {now_ms}"))
            self._offers = current
        actions = self._decide([ClockRead(now_ms), *events])
        await self._carry_out(actions)
        # What came of actions, or came in between two ticks, is for the next tick to look at.
        self._is_stirred = not polled or bool(actions)
        await self._performer.acknowledge(_entries(mailbox, StreamKind.FEED), StreamKind.FEED)
        await self._performer.acknowledge(_entries(unreadable, StreamKind.STARTS), StreamKind.STARTS)
        if self._check:
            invariants.check(self.state)

    def _withdrawn(self, members: Sequence[Member]) -> list[Event]:
        waited_for = [version for version, backlog in self.state.backlogs.items() if backlog.first() is not None]
        versions = withdrawn(members, self.model, waited_for) if waited_for else ()
        return [VersionsWithdrawn(self.model, versions, "unloaded")] if versions else []

    async def _carry_out(self, actions: list[Action]) -> None:
        while actions:
            actions = self._decide(await self._performer.perform(actions))

    def _decide(self, events: Iterable[Event]) -> list[Action]:
        return [action for event in events for action in decide(self.state, event)]


def _entries(read: Iterable[StreamEntry], kind: StreamKind) -> list[tuple[ShardId, bytes]]:
    return [(entry.source.shard, entry.entry) for entry in read if entry.source.kind is kind]

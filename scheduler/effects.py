"""Carries out the core's actions in Redis, in their order, and returns their outcomes as events.

Consecutive assignments travel together: one script call per shard, and all calls in one round trip. Nothing is retried
here. A lost connection ends the leader, and a new one rebuilds its state from what Redis then holds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar, cast

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
from scheduler.core.events import (
    Assigned,
    Event,
    Forgotten,
    IdleSeen,
    Looked,
    MovedOut,
    RecallSent,
    Reclaimed,
    Vacated,
)
from scheduler.core.slots import SlotAddress
from scheduler.descriptions import paged_descriptions
from scheduler.ingest import StreamKind
from scheduler.lent_slots import LentSlots
from scheduler.mesh import MeshAccess
from shared.contract.errors import Code
from shared.contract.forecast import encode_forecast
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId, Term
from shared.contract.limits import SCRIPT_STEPS_MAX
from shared.contract.messages import ReplyMessage, encode
from shared.process import logs
from shared.store.reading import text_of
from shared.store.script_sender import Call
from shared.store.script_values import Assignment, ExpiryCode, LedShard, Pausing, Rejection, VacateCode, Vacation
from shared.store.vital import vital
from shared.traces.spans import SpanName

WANT_SLOTS_TTL_MS = 2000
"""How long commits go on to free slots after the leader last asked for them. The leader asks again every tick."""
FORECAST_TTL_MS = 3000
"""How long a forecast stands: a little longer than until the next one."""
LATEST_MS = 1 << 53
"""Largest integer that Lua's numbers (doubles) count exactly. A deadline beyond it is spoilt."""
EXPIRED_MAX = 1024
"""Idle sequences from which on a look leaves the rest to the next tick: until it is done, nobody gets a slot."""
RECLAIM_COUNT = 256
"""Sequences or inbox entries that one call of a takeover moves. A script blocks Redis for a few us for each."""

T = TypeVar("T")
Item = TypeVar("Item", bound=Assign | MoveOut | Reject | Vacate)


class TakeoverProgress:
    """How far an executor's sequences are taken.

    looked_at  the entry up to which the inbox was looked at, by shard
    sequences  how many were taken
    steps      entries of the inbox that were moved on
    """

    def __init__(self, shards: Iterable[ShardId]) -> None:
        self.begun_s = time.monotonic()
        self.looked_at = dict.fromkeys(shards, "0-0")
        self.sequences = 0
        self.steps = 0


class EffectPerformer:
    """Carries out the actions of the leader of one model in one term.

    shards        those that it leads
    tombstone_ms  how long the record of a sequence that is over stays in Redis
    lent          its notes; None: it has none yet
    """

    def __init__(
        self,
        mesh: MeshAccess,
        model: str,
        term: Term,
        *,
        shards: Sequence[ShardId],
        tombstone_ms: int,
        lent: LentSlots | None = None,
    ) -> None:
        self._mesh = mesh
        self._keys = mesh.keys
        self._scripts = mesh.scripts
        self._links = mesh.links
        self._model = model
        self._term = term
        self._shards = shards
        self._tombstone_ms = tombstone_ms
        self._lent = lent or LentSlots(mesh, model, term)
        self._done: dict[tuple[ShardId, str], list[bytes]] = {}
        self._takeovers: dict[ExecutorId, TakeoverProgress] = {}

    async def perform(self, actions: Sequence[Action]) -> list[Event]:
        """Carries the actions out, in order.

        returns  their outcomes
        raises   redis.ResponseError that begins with FENCED when a newer leader exists; one of CONNECTION_LOST. In both
                 cases some of the actions may have been carried out
        """
        events: list[Event] = []
        for kind, run in groupby(actions, key=_kind):
            together = list(run)
            if kind is Assign:
                events += await self._place(together)
            elif kind is Reject:
                await self._reject(cast("list[Reject]", together))
            elif kind is LayOut:
                await self._lay_out(cast("list[LayOut]", together))
            elif kind is MoveOut:
                events += await self._move_out(cast("list[MoveOut]", together))
            else:
                for action in together:
                    events += await self._perform_one(action)
        return events

    def done(self, entries: Iterable[tuple[ShardId, bytes]], kind: StreamKind) -> None:
        """Has entries of one of the model's streams removed that were acted upon, or cannot be read: with the next
        script calls, or by `acknowledge`.
        """
        stream = self._keys.feed if kind is StreamKind.FEED else self._keys.starts
        for shard, entry in entries:
            self._done.setdefault((shard, stream(shard, self._model)), []).append(entry)

    async def acknowledge(self) -> None:
        """Removes what is done now. Raises ResponseError FENCED when a newer leader exists."""
        if self._done:
            await self._send([])

    def _led(self, shard: ShardId) -> LedShard:
        return LedShard(shard, self._model, self._term)

    async def _perform_one(self, action: Action) -> list[Event]:
        match action:
            case Reclaim(executor, _, only):
                await self._reclaim(executor, only)
                return []
            case ReclaimPart(executor, cause):
                return [Reclaimed(executor, await self._reclaim_part(executor), cause)]
            case Recall(executor):
                return await self._recall(executor)
            case Forget(executor, cause):
                if not await self._forget(executor):
                    return []
                await self._lent.forget(executor)
                return [Forgotten(executor, cause)]
            case LookForExpired(now_ms, cause):
                return [Looked(now_ms, await self._look(now_ms), cause)]
            case LookAtIdle(count, cause):
                return [IdleSeen(tuple(await self._idle(count)), cause)]
            case Publish(lines):
                forecast = ("SET", self._keys.forecast(self._model), encode_forecast(lines), "PX", FORECAST_TTL_MS)
                await self._exchange([("EVAL", *vital(forecast))])
                return []
            case Pause():
                await self._pause(action)
                return []
            case Dismiss(sequence, entry):
                await self._dismiss(sequence, entry)
                return []
            case Assign() | Vacate() | WantSlots() | MoveOut() | Reject() | LayOut():
                raise AssertionError("runs of these are carried out together")

    # -- slots ----------------------------------------------------------------------------------------------------

    async def _place(self, actions: Sequence[Action]) -> list[Event]:
        """Carries out a run of `WantSlots`, `Assign` and `Vacate`.

        `WantSlots` go first: a sequence that is then asked for its slot while it has an open step is paged by the
        commit of that step.
        """
        await self._want([action for action in actions if isinstance(action, WantSlots)])
        assigns = self._chunks(action for action in actions if isinstance(action, Assign))
        vacates = self._chunks(action for action in actions if isinstance(action, Vacate))
        await self._lent.lend((assign.place, shard) for shard, chunk in assigns for assign in chunk)
        calls: list[Call[Any]] = [
            self._scripts.assign([_assignment(one) for one in chunk], self._led(shard)) for shard, chunk in assigns
        ]
        calls += self._vacations(vacates)
        replies = [one for reply in await self._run(calls) for one in reply]
        assigned = [assign for _, chunk in assigns for assign in chunk]
        asked = [vacate for _, chunk in vacates for vacate in chunk]
        told: list[Event] = [
            self._tell_assigned(assign, epoch) for assign, epoch in zip(assigned, replies[: len(assigned)], strict=True)
        ]
        return told + self._vacated(asked, replies[len(assigned) :])

    async def _lay_out(self, actions: Sequence[LayOut]) -> None:
        await self._lent.lend(
            (SlotAddress(action.executor, action.version, *slot), action.shard)
            for action in actions
            for slot in action.slots
        )
        await self._run(
            [
                self._scripts.lay_out(action.slots, action.executor, action.version, self._led(action.shard))
                for action in actions
            ]
        )

    async def _recall(self, executor: ExecutorId) -> list[Event]:
        numbers = await self._run([self._scripts.recall(executor, self._led(shard)) for shard in self._shards])
        return [RecallSent(executor, shard, number) for shard, number in zip(self._shards, numbers, strict=True)]

    async def _want(self, wants: Sequence[WantSlots]) -> None:
        """Writes how many slots are wanted, an equal share to each shard. The last of several for a version counts."""
        commands: list[Sequence[Any]] = []
        for want in wants:
            # Rounded up, so that the shares together are at least what is wanted.
            share = -(-want.count // len(self._shards))
            for shard in self._shards:
                key = self._keys.wanted_slots(shard, self._model, want.version)
                # A Redis without memory takes it, as all that a leader writes: else nobody would lead the model.
                command = ("SET", key, share, "PX", WANT_SLOTS_TTL_MS) if share else ("DEL", key)
                commands.append(("EVAL", *vital(command)))
        await self._exchange(commands)

    def _vacated(self, asked: Sequence[Vacate], codes: Sequence[VacateCode]) -> list[Event]:
        self._drain_undrained([vacate.place.executor for vacate in asked], codes)
        for vacate, code in zip(asked, codes, strict=True):
            logs.debug("slot asked for", sequence=vacate.sequence, place=vacate.place, answer=code.name)
        return [
            Vacated(vacate.sequence, vacate.epoch, code is not VacateCode.KEPT, vacate.cause)
            for vacate, code in zip(asked, codes, strict=True)
        ]

    def _tell_assigned(self, assign: Assign, epoch: Epoch) -> Assigned:
        if logs.enabled(logs.Level.DEBUG):
            logs.debug(
                "sequence assigned", sequence=assign.sequence, place=assign.place, epoch=epoch, cause=assign.cause
            )
        if (assign.moving or assign.paged) and epoch and self._mesh.tracing.enabled:
            waited_ns = assign.entry.ms * 1_000_000
            name = SpanName.PAGED_IN if assign.paged else SpanName.TAKEOVER
            self._mesh.tracing.record_takeover(
                assign.sequence, epoch, waited_ns, time.time_ns(), name, executor=assign.place.executor
            )
        return Assigned(assign.sequence, assign.entry, epoch, assign.cause)

    async def _reject(self, rejects: Sequence[Reject]) -> None:
        calls = [
            self._scripts.reject([_rejection(one) for one in chunk], self._led(shard), tombstone_ms=self._tombstone_ms)
            for shard, chunk in self._chunks(rejects)
        ]
        await self._run(calls)
        for reject in rejects:
            logs.info("sequence rejected", sequence=reject.sequence, why=reject.message, cause=reject.cause)

    async def _move_out(self, actions: Sequence[MoveOut]) -> list[Event]:
        chunks = self._chunks(actions)
        codes = [code for reply in await self._run(self._vacations(chunks, moving=True)) for code in reply]
        asked = [action for _, chunk in chunks for action in chunk]
        self._drain_undrained([action.executor for action in asked], codes)
        taken = sum(code is not VacateCode.KEPT for code in codes)
        if taken:
            logs.info("sequences moved", model=self._model, sequences=taken, asked=len(asked), cause=asked[0].cause)
        return [
            MovedOut(action.sequence, action.epoch, code is not VacateCode.KEPT, action.cause)
            for action, code in zip(asked, codes, strict=True)
        ]

    def _vacations(
        self, chunks: Iterable[tuple[ShardId, Sequence[Vacate | MoveOut]]], *, moving: bool = False
    ) -> list[Call[list[VacateCode]]]:
        return [
            self._scripts.vacate([Vacation(asked.sequence, asked.epoch, moving) for asked in chunk], self._led(shard))
            for shard, chunk in chunks
        ]

    def _drain_undrained(self, owners: Sequence[ExecutorId | None], codes: Sequence[VacateCode]) -> None:
        """Has the owners drained whose inbox still holds steps of a sequence that was taken out of its slot."""
        codes_of = zip(owners, codes, strict=True)
        self._mesh.drain_soon(owner for owner, code in codes_of if owner and code is VacateCode.UNDRAINED)

    async def _pause(self, action: Pause) -> None:
        """The wish is removed last: if this leader ends before, the next one takes it in, and inboxes are drained."""
        shard, pausing = self._keys.shard_of(action.sequence), Pausing(action.sequence, action.until_ms)
        ((owner,),) = await self._run([self._scripts.pause([pausing], self._led(shard))])
        if owner:
            self._mesh.drain_soon([owner])
        logs.info("sequence paused", sequence=action.sequence, paused=owner is not None, cause=action.cause)
        await self._dismiss(action.sequence, action.entry)

    async def _dismiss(self, sequence: SequenceId, entry: Entry) -> None:
        """Removes the entry of a wish that is fulfilled, or that nothing can be done about."""
        shard = self._keys.shard_of(sequence)
        await self._run([self._scripts.remove([entry.id], self._keys.starts(shard, self._model), self._led(shard))])

    # -- takeover -------------------------------------------------------------------------------------------------

    async def _reclaim(self, executor: ExecutorId, only: tuple[str, ...]) -> None:
        """Takes sequences of the model from an executor that lives, then moves on the steps in its inbox.

        The order matters: `submit` puts steps only into the inbox of the sequence's owner. Once the executor owns none
        of the sequences, no step can come in behind the one that was drained last.
        """
        takeover, after = TakeoverProgress(self._shards), dict.fromkeys(self._shards, "")
        while after:
            calls = [self._taking(executor, shard, after=last, only=only) for shard, last in after.items()]
            replies = dict(zip(after, await self._run(calls), strict=True))
            takeover.sequences += sum(taken for taken, _ in replies.values())
            if only:
                after = {shard: str(goes_on) for shard, (_, goes_on) in replies.items() if goes_on}
            else:
                after = {shard: "" for shard, (taken, _) in replies.items() if taken}
        takeover.steps = await self.drain(executor, alive=True)
        self._tell_taken_over(executor, takeover)

    async def _reclaim_part(self, executor: ExecutorId) -> bool:
        """Takes some sequences from a lost executor, and moves on the steps that it looked at for that. True if there
        are no more: then it has moved on all steps, as `_reclaim` does, unless there were none from the beginning."""
        takeover = self._takeovers.setdefault(executor, TakeoverProgress(self._shards))
        # `lost` decides what clients and metrics are told. An executor that leaves in order is no loss.
        lost = not await self._mesh.membership.is_leaving(executor)
        calls = [self._taking(executor, shard, after=after, lost=lost) for shard, after in takeover.looked_at.items()]
        counts = dict(zip(takeover.looked_at, await self._run(calls), strict=True))
        takeover.sequences += sum(taken for taken, _ in counts.values())
        entries = {shard: looked_at for shard, (_, looked_at) in counts.items() if looked_at}
        drains = [
            self._scripts.drain(executor, shard=shard, after=takeover.looked_at[shard], count=count)
            for shard, count in entries.items()
        ]
        for shard, (last, looked_at, stayed) in zip(entries, await self._run(drains), strict=True):
            takeover.looked_at[shard] = last
            takeover.steps += looked_at - stayed
        if any(taken or looked_at for taken, looked_at in counts.values()):
            return False
        if takeover.sequences:
            takeover.steps += await self.drain(executor, alive=False)
        self._tell_taken_over(executor, self._takeovers.pop(executor))
        return True

    def _taking(
        self, executor: ExecutorId, shard: ShardId, *, after: str = "", only: tuple[str, ...] = (), lost: bool = False
    ) -> Call[tuple[int, int]]:
        return self._scripts.reclaim(
            executor,
            self._led(shard),
            count=RECLAIM_COUNT,
            tombstone_ms=self._tombstone_ms,
            after=after,
            only=only,
            lost=lost,
        )

    def _tell_taken_over(self, executor: ExecutorId, takeover: TakeoverProgress) -> None:
        if takeover.sequences or takeover.steps:
            logs.info(
                "sequences taken over",
                executor=executor,
                model=self._model,
                sequences=takeover.sequences,
                inbox_entries=takeover.steps,
                ms=round((time.monotonic() - takeover.begun_s) * 1000),
            )

    async def drain(self, executor: ExecutorId, *, alive: bool) -> int:
        """Goes through every entry of the executor's inboxes once. Returns how many were moved on."""
        moved, after = 0, dict.fromkeys(self._shards, "0-0")
        while after:
            calls = [
                self._scripts.drain(executor, shard=shard, after=last, count=RECLAIM_COUNT, alive=alive)
                for shard, last in after.items()
            ]
            replies = dict(zip(after, await self._run(calls), strict=True))
            moved += sum(looked_at - stayed for _, looked_at, stayed in replies.values())
            after = {shard: last for shard, (last, looked_at, _) in replies.items() if looked_at == RECLAIM_COUNT}
        return moved

    async def _forget(self, executor: ExecutorId) -> bool:
        """Removes a dead executor's registration and inboxes.

        returns  False if the executor has its lease again, or still owns sequences of some model, or may own some where
                 nobody can look

        Steps are put only into the inbox of a sequence's owner. So once it owns no sequence, draining empties the
        inboxes for good.
        """
        if len(self._shards) < len(self._keys.shards):
            return False
        # The leader of each model comes to this; the first one removes it.
        inboxes = [("EXISTS", self._keys.inbox(shard, executor)) for shard in self._keys.shards]
        if not any(await self._exchange([("HEXISTS", self._keys.executors, executor), *inboxes])):
            return True
        models = {text_of(name) for name in await self._mesh.redis.hkeys(self._keys.models)} | {self._model}
        owned = [
            ("EXISTS", *(self._keys.owned(shard, executor, model) for model in sorted(models)))
            for shard in self._keys.shards
        ]
        if any(await self._exchange([("EXISTS", self._keys.executor_lease(executor)), *owned])):
            return False
        await self.drain(executor, alive=False)
        if await self._mesh.membership.remove(executor):
            logs.info("executor forgotten", executor=executor)
        return True

    # -- idle sequences -------------------------------------------------------------------------------------------

    async def _look(self, now_ms: int) -> int | None:
        """Ends the idle sequences that are due. Returns the earliest deadline that was found."""
        firsts = await self._exchange(
            [("ZRANGE", self._keys.deadlines(shard, self._model), 0, 0, "WITHSCORES") for shard in self._shards]
        )
        deadlines = {shard: _due_ms(first[1]) for shard, first in zip(self._shards, firsts, strict=True) if first}
        await self._expire([shard for shard, first_ms in deadlines.items() if first_ms <= now_ms], now_ms)
        return min(deadlines.values(), default=None)

    async def _idle(self, count: int) -> list[tuple[SequenceId, int]]:
        """The idle ones among the sequences with the earliest deadlines, and in how many ms each of them expires."""
        found = await self._exchange(
            [("ZRANGE", self._keys.deadlines(shard, self._model), 0, count - 1) for shard in self._shards]
        )
        sequences = [SequenceId(text_of(name)) for names in found for name in names]
        left = await self._exchange([("PTTL", self._keys.sequence(sequence).idle) for sequence in sequences])
        # Of a sequence with an open step the marker has no TTL; of one that is about to be ended it is gone.
        return [(sequence, left_ms) for sequence, left_ms in zip(sequences, left, strict=True) if left_ms >= 0]

    async def _expire(self, shards: Sequence[ShardId], now_ms: int) -> None:
        """Ends the due sequences of these shards, or some of very many.

        The script ends each sequence that it looks at, or gives it a later deadline, or removes its deadline. So no
        sequence is found due twice, unless the clock of Redis is behind `now_ms`: then the look ends as well.
        """
        seen = set[SequenceId]()
        while shards and len(seen) < EXPIRED_MAX:
            due = await self._due(shards, now_ms)
            looked_at = [sequence for sequences in due.values() for sequence in sequences]
            if seen.issuperset(looked_at):
                return
            seen.update(looked_at)
            # Read before the script runs, which removes the checkpoints.
            states = await paged_descriptions(self._mesh, self._model, looked_at)
            calls = [
                self._scripts.expire(sequences, self._led(shard), tombstone_ms=self._tombstone_ms)
                for shard, sequences in due.items()
            ]
            for sequences, codes in zip(due.values(), await self._run(calls), strict=True):
                found = zip(sequences, codes, strict=True)
                self._tell_expired([sequence for sequence, code in found if code is ExpiryCode.EXPIRED], states)
            shards = [shard for shard, sequences in due.items() if len(sequences) >= SCRIPT_STEPS_MAX]

    async def _due(self, shards: Iterable[ShardId], now_ms: int) -> dict[ShardId, list[SequenceId]]:
        # The second range holds spoilt deadlines that no clock reaches: such a sequence would never be looked at.
        asked = [(shard, *times) for shard in shards for times in (("-inf", now_ms), (f"({LATEST_MS}", "+inf"))]
        replies = await self._exchange(
            [
                ("ZRANGEBYSCORE", self._keys.deadlines(shard, self._model), begin, end, "LIMIT", 0, SCRIPT_STEPS_MAX)
                for shard, begin, end in asked
            ]
        )
        due: dict[ShardId, list[SequenceId]] = {}
        for (shard, _, _), names in zip(asked, replies, strict=True):
            if names:
                due.setdefault(shard, []).extend(SequenceId(text_of(name)) for name in names)
        return due

    def _tell_expired(self, sequences: Iterable[SequenceId], states: Mapping[SequenceId, Mapping[str, object]]) -> None:
        now_ns = time.time_ns()
        for sequence in sequences:
            logs.info("sequence expired", sequence=sequence, **states.get(sequence, {}))
            self._mesh.tracing.record_of_sequence(sequence, SpanName.EXPIRED, now_ns, now_ns)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _chunks(self, actions: Iterable[Item]) -> list[tuple[ShardId, list[Item]]]:
        """The actions by shard, in their order, in pieces that one script call may carry."""
        by_shard: dict[ShardId, list[Item]] = defaultdict(list)
        for action in actions:
            by_shard[self._keys.shard_of(action.sequence)].append(action)
        return [
            (shard, members[begin : begin + SCRIPT_STEPS_MAX])
            for shard, members in by_shard.items()
            for begin in range(0, len(members), SCRIPT_STEPS_MAX)
        ]

    async def _run(self, calls: Sequence[Call[T]]) -> list[T]:
        """Makes the calls in one round trip. Raises the first error among their outcomes."""
        return await self._send(calls) if calls else []

    async def _send(self, calls: Sequence[Call[T]]) -> list[T]:
        """As `_run`; what is done is removed in the same round trip."""
        done, self._done = self._done, {}
        together: list[Call[Any]] = [*calls]
        together += (
            self._scripts.remove(entries, stream, self._led(shard)) for (shard, stream), entries in done.items()
        )
        async with self._links.connected() as link:
            return (await self._scripts.run_together(together, link))[: len(calls)]

    async def _exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Sends plain commands in one round trip. Raises the first error among their replies."""
        return await self._links.ask(commands)


def _due_ms(score: bytes) -> int:
    """A deadline in ms. A spoilt one, which no clock reaches, counts as due."""
    at_ms = float(score)
    return int(at_ms) if 0 <= at_ms <= LATEST_MS else 0


def _kind(action: Action) -> type[Action]:
    """The key by which a run of actions is carried out together. Assign, Vacate and WantSlots need no order among them,
    so they are one kind."""
    return Assign if isinstance(action, Vacate | WantSlots) else type(action)


def _assignment(assign: Assign) -> Assignment:
    slot = assign.place
    return Assignment(assign.sequence, assign.entry.id, slot.executor, slot.instance, slot.slot)


def _rejection(reject: Reject) -> Rejection:
    reply = encode(ReplyMessage(reject.version, error_code=Code.UNAVAILABLE, error=reject.message))
    return Rejection(reject.sequence, reject.entry.id, reply)

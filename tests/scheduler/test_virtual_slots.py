"""Many sequences over a few slots, by the real leader and the real scripts on a real server, in seeded games.

The test plays gateway and executors; the leader is the real one, and ends in the middle of any of its round trips,
before or after Redis has heard of it, to be replaced by a new one. Whatever happens: every accepted step is answered
once and builds on the one before; nobody who waits is overtaken by somebody younger; nobody waits beside an idle
sequence for longer than a tick; a slot has one holder; and nothing is left of what is over. SEEDS=n plays more games.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from scheduler.core.backlog import Entry
from scheduler.core.state import Policy
from scheduler.ingest import Poll, parse_entry
from scheduler.leader import Leader
from scheduler.mesh import MeshAccess
from shared.contract.ids import CorrelationId, ExecutorId, SequenceId, Term
from shared.contract.messages import (
    ExecutorRegistration,
    InboxStep,
    ReplyMessage,
    ServedModel,
    StepFlag,
    decode_reply,
    encode,
    inbox_entry,
)
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.connections.redis_client import redis_now_ms
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.script_values import CommitCode, LedShard, StepCommit, StepOutcome, Submission, SubmitCode
from shared.store.waiting_line import read_lines
from shared.traces.tracing import Tracing
from tests.scripted_mesh import GATEWAY, ScriptedMesh

SEEDS = int(os.environ.get("SEEDS", "5"))
MOVES = 150
SLOTS = 2
IDS = tuple(range(1, 9))
NOTHING = {"INPUT": np.zeros((1, 1), np.int32)}
IDLE_MS, TOMBSTONE_MS = 600_000, 600_000
START, END, NONE, PAGEABLE = StepFlag.START, StepFlag.END, StepFlag.NONE, StepFlag.PAGEABLE


class Crash(Exception):
    """The leader's process has ended."""


class Fuse:
    """Ends a leader at one of its round trips, before Redis hears of it or afterwards."""

    def __init__(self, left: int, *, before: bool) -> None:
        self._left = left
        self._before = before

    def around(self, call: Callable[[Sequence[Any]], Awaitable[list[Any]]]) -> Callable[[Any], Awaitable[list[Any]]]:
        async def burning(work: Sequence[Any]) -> list[Any]:
            self._left -= 1
            if self._left == 0 and self._before:
                raise Crash
            outcome = await call(work)
            if self._left == 0:
                raise Crash
            return outcome

        return burning


@dataclass
class Accepted:
    """A step that the mesh has accepted, and the answer that it must get: its number since START."""

    submission: Submission
    answer: int


@dataclass
class Held:
    """What an inbox holds of one sequence."""

    steps: dict[int, InboxStep] = field(default_factory=dict[int, InboxStep])


class Game:
    """One game's mesh and what is known of it."""

    def __init__(self, mesh: ScriptedMesh, chance: random.Random) -> None:
        self.mesh = mesh
        self.keys = mesh.keys
        self.commands = mesh.redis
        self.chance = chance
        self.membership = Membership(mesh.redis, mesh.keys)
        self.access = MeshAccess(mesh.redis, mesh.keys, mesh.scripts, self.membership, Tracing())
        self.executors: list[ExecutorId] = []
        self.born = 0
        self.term = 0
        self.leader: Leader | None = None
        self.accepted: list[Accepted] = []
        self.steps: dict[CorrelationId, int] = {}
        self.paged = 0
        self.crashes = 0

    # -- the world ------------------------------------------------------------------------------------------------

    async def move(self) -> None:
        """Something happens."""
        moves = [self.submit] * 8 + [self.commit] * 8 + [self.lead] * 4 + [self.lead_until_it_ends] * 2
        await self.chance.choice([*moves, self.join, self.lose, self.expire])()

    async def submit(self) -> None:
        number = self.chance.choice(IDS)
        begins = number not in self.steps
        flags = (START | PAGEABLE if begins else NONE) | (END if self.chance.random() < 0.1 else NONE)
        submission = self.mesh.submission(number, NOTHING, flags)
        if self.executors:
            submission = msgspec.structs.replace(submission, prefers=self.chance.choice(self.executors))
        outcome = await self.mesh.submit(submission)
        assert outcome.code in {SubmitCode.DELIVERED, SubmitCode.WAITING}, outcome
        self.steps[number] = self.steps.get(number, 0) + 1
        self.accepted.append(Accepted(submission, self.steps[number]))
        if END in flags:
            del self.steps[number]

    async def expire(self) -> None:
        """The idle time of a paged sequence ends, and the reaper comes by."""
        number = self.chance.choice(IDS)
        if (await self.mesh.record(number)).get("st") == "p":
            sequence = self.mesh.sequence(number)
            await self.commands.delete(self.keys.sequence(sequence).idle)
            shard = self.keys.shard_of(sequence)
            call = self.mesh.scripts.expire(
                [sequence], LedShard(shard, self.mesh.model, Term(self.term)), tombstone_ms=TOMBSTONE_MS
            )
            assert [True] == await self.mesh.scripts.run(call)
            del self.steps[number]

    async def join(self) -> None:
        if len(self.executors) < 3:
            self.born += 1
            executor = ExecutorId(f"e{self.born}")
            served = (ServedModel(self.mesh.model, "1", 1, SLOTS, pageable=True),)
            await self.membership.register(
                ExecutorRegistration(executor, executor, "host", 1, 0, served), lease_ms=600_000
            )
            self.executors.append(executor)

    async def lose(self) -> None:
        if len(self.executors) > 1:
            lost = self.executors.pop(self.chance.randrange(len(self.executors)))
            await self.commands.delete(self.keys.executor_lease(lost))

    # -- executors ------------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """An executor runs some of the next steps of its sequences. Their state is in checkpoint and inbox alone."""
        if self.executors:
            executor = self.chance.choice(self.executors)
            for sequence, held in (await self.inbox(executor)).items():
                if self.chance.random() < 0.6:
                    await self.commit_next(executor, sequence, held)

    async def inbox(self, executor: ExecutorId) -> dict[SequenceId, Held]:
        found: dict[SequenceId, Held] = {}
        for shard in self.keys.shards:
            stream = self.keys.inbox(shard, executor)
            for entry, fields in await self.commands.xrange(stream):
                item = inbox_entry(entry, fields)
                if isinstance(item, InboxStep):
                    found.setdefault(item.sequence, Held()).steps[item.step] = item
                else:
                    await self.commands.xdel(stream, entry)
        return found

    async def commit_next(self, executor: ExecutorId, sequence: SequenceId, held: Held) -> None:
        own = self.keys.sequence(sequence)
        record = {k.decode(): v.decode() for k, v in (await self.commands.hgetall(own.record)).items()}
        if (record.get("st"), record.get("ow")) != ("l", executor):
            return
        checkpointed, committed = int(record["ck"]), int(record["cm"])
        if not set(range(checkpointed + 1, committed + 2)) <= held.steps.keys():
            return  # not there yet, or still on its way from another inbox
        total = int(await self.commands.hget(own.checkpoint, "s:n") or 0)
        for number in range(checkpointed + 1, committed + 2):
            total = 1 if held.steps[number].flags & START else total + 1
        step = held.steps[committed + 1]
        saves = bool(step.flags & END) or self.chance.random() < 0.6
        done = StepCommit(
            sequence,
            step.epoch,
            step.step,
            step.flags,
            StepOutcome.DONE,
            step.gateway,
            step.token,
            encode(ReplyMessage("1", step=total)),
            entries=[one.entry for number, one in held.steps.items() if number <= step.step] if saves else (),
            checkpoint=[("s:n", str(total).encode())] if saves else (),
        )
        about: dict[str, Any] = {"idle_ms": IDLE_MS, "tombstone_ms": TOMBSTONE_MS}
        (code,) = await self.mesh.committed(executor, done, load=ModelLoad(self.mesh.model, "1", "0"), **about)
        if code is CommitCode.REFUSED:
            return  # an entry of an earlier slot, that is still to be moved on
        self.paged += code is CommitCode.PAGED
        assert code in {CommitCode.COMMITTED, CommitCode.OVER, CommitCode.PAGED}

    # -- the leader -----------------------------------------------------------------------------------------------

    async def lead(self, *, ticks: bool | None = None) -> None:
        """The leader hears everything, and perhaps that time has passed."""
        leader = self.leader or self.make_leader()
        await self.turn(leader, ticks=self.chance.random() < 0.5 if ticks is None else ticks)

    async def lead_until_it_ends(self) -> None:
        """A leader ends in the middle of what it does; the next one knows nothing but Redis."""
        leader = self.leader or self.make_leader()
        fuse, performer = Fuse(self.chance.randint(1, 8), before=self.chance.random() < 0.5), leader._performer
        performer._run = fuse.around(performer._run)  # type: ignore[method-assign]
        performer._exchange = fuse.around(performer._exchange)  # type: ignore[method-assign]
        try:
            for _ in range(3):
                await self.turn(leader, ticks=self.chance.random() < 0.7)
                await self.commit()
        except Crash:
            self.crashes += 1
        self.leader = None

    def make_leader(self) -> Leader:
        self.term += 1
        policy = Policy(1.25, virtual_nodes=8, forget_after_ms=0, shards=self.access.keys.shards)
        self.leader = Leader(
            self.access, self.mesh.model, Term(self.term), policy=policy, tombstone_ms=TOMBSTONE_MS, check=True
        )
        return self.leader

    async def turn(self, leader: Leader, *, ticks: bool) -> None:
        if not leader.positions():
            await leader._rebuild()
        before = await self.line()
        await self.read(leader)
        if ticks:
            leader.observe(
                Poll(await self.membership.members()),
                await redis_now_ms(self.mesh.redis),
                asyncio.get_running_loop().time(),
            )
        await leader._turn()
        while any(executor.recalls for executor in leader.state.executors.values()):
            await self.read(leader)
            await leader._turn()
        await self.drain()
        after = await self.line()
        for placed in before.keys() - after.keys():
            overtaken = [entry for entry in before.keys() & after.keys() if entry < placed]
            assert not overtaken, f"{before[placed]} was placed before {[before[entry] for entry in overtaken]}"
        await self.check_slots()
        if ticks and leader.state.ring("1").tables and before.keys() & after.keys():
            await self.check_nobody_waits_beside_an_idle_sequence()

    async def drain(self) -> None:
        """As a scheduler does beside its leaders."""
        for executor in sorted(await self.access.to_be_drained()) if self.access.undrained else ():
            for shard in self.keys.shards:
                await self.mesh.scripts.drain_whole(executor, shard=shard, alive=executor in self.executors)

    async def read(self, leader: Leader) -> None:
        """The leader hears everything."""
        for stream, entries in await self.commands.xread(leader.positions()) or ():
            leader.deliver(stream.decode(), entries)

    async def line(self) -> dict[Entry, bytes]:
        """Who waits by age: those that begin or come back. Who moves comes before them."""
        return {
            parse_entry(entry, shard): fields[b"q"]
            for shard in self.keys.shards
            for entry, fields in await self.commands.xrange(self.keys.starts(shard, self.mesh.model))
            if fields[b"k"] in (b"w", b"r")
        }

    # -- what must be true ----------------------------------------------------------------------------------------

    async def check_slots(self) -> None:
        records = [await self.mesh.record(number) for number in IDS]
        held = [(record["ow"], record["in"], record["sl"]) for record in records if record.get("st") == "l"]
        assert len(held) == len(set(held)), f"a slot has two holders: {held}"

    async def check_nobody_waits_beside_an_idle_sequence(self) -> None:
        live = [record for number in IDS if (record := await self.mesh.record(number)).get("st") == "l"]
        assert all(int(record["nx"]) > int(record["cm"]) for record in live), f"a slot is held for nothing: {live}"

    async def settle(self) -> None:
        """Everybody does his part until every accepted step is answered."""
        await self.join()
        for _ in range(400):
            await self.lead(ticks=True)
            if len(await self.replies()) >= len(self.accepted):
                return
            for executor in self.executors:
                for sequence, held in (await self.inbox(executor)).items():
                    await self.commit_next(executor, sequence, held)
        raise AssertionError(f"{len(await self.replies())} of {len(self.accepted)} steps were answered")

    async def replies(self) -> list[tuple[str, ReplyMessage]]:
        return [
            (token.decode(), decode_reply(data))
            for shard in self.keys.shards
            for _, fields in await self.commands.xrange(self.keys.replies(shard, cast("Any", GATEWAY)))
            for token, data in fields.items()
            if token != b"opened"
        ]

    async def check(self) -> None:
        answers = await self.replies()
        assert {one.submission.token: 1 for one in self.accepted} == Counter(token for token, _ in answers)
        expected = {one.submission.token: one.answer for one in self.accepted}
        assert expected == {token: reply.step for token, reply in answers}
        records = {number: await self.mesh.record(number) for number in IDS}
        states = Counter(record.get("st") for record in records.values())
        assert set(states) <= {"l", "p", "e", "x", None}
        (line,) = (await read_lines(self.mesh.redis, self.keys, [self.mesh.model])).values()
        assert (0, states["p"]) == (line.steps.total(), line.paged.total())
        assert self.leader is not None
        assert states["l"] == len(self.leader.state.sequences)
        for shard in self.keys.shards:
            assert 0 == await self.commands.xlen(self.keys.starts(shard, self.mesh.model))
            assert 0 == await self.commands.xlen(self.keys.feed(shard, self.mesh.model))

    async def end(self) -> None:
        await self.access.links.close()


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_everybody_gets_a_turn_and_nothing_is_lost_whenever_leaders_end(
    redis: Redis, key_prefix: str, seed: int
) -> None:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 2), "sum")
    await mesh.open()
    game = Game(mesh, random.Random(seed))
    await game.join()
    for _ in range(MOVES):
        await game.move()
    # Which sequences meet in a shard is left to chance: a rare game is long before anybody is paged.
    while not (game.paged and game.crashes):
        await game.move()
    await game.settle()

    await game.check()
    await game.end()

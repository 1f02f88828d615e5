"""A mesh without gateways and executors: the test submits, reads inboxes and commits, by the real scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from scheduler import service
from scheduler.mesh import MeshAccess
from scheduler.service import Scheduler
from scheduler.settings import SchedulerSettings
from shared.contract.ids import CorrelationId, Epoch, ExecutorId, GatewayId, SequenceId, StepNumber, Term, sequence_id
from shared.contract.messages import (
    ExecutorRegistration,
    InboxEntry,
    InboxExpired,
    InboxStep,
    InferMessage,
    ModelRecord,
    ReplyMessage,
    ServedModel,
    StepFlag,
    decode_reply,
    encode,
    inbox_entry,
)
from shared.contract.model_config import Direct, ModelConfig, SequenceBatching, StateSpec
from shared.process.lifecycle import Tasks
from shared.statistics.tally import ModelLoad
from shared.store.agreement import join_mesh
from shared.store.commands import Redis
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.script_values import (
    CancelCode,
    Cancellation,
    LedShard,
    StepCommit,
    Submission,
    SubmitCode,
    Submitted,
    VacateCode,
    Vacation,
)
from shared.store.scripts import Scripts
from shared.traces.tracing import Tracing
from tests.embedded_cluster import EmbeddedCluster
from tests.scripted_mesh import commit_of

MODEL = "sum"
LEASE_MS = 1_000
"""Of schedulers whose lease is to end, or whose Redis is to be missed."""
LONG_LEASE_MS = 60_000
"""Of all others: on a busy machine a lease must not end before its test does."""
TICK_MS = 20
WAIT_S = 60.0
"""How long something that must become true is waited for; long, because the machine may be busy."""
REDIS_TIMEOUT_MS = 2 * LEASE_MS
STATE = StateSpec("in", "out", "FP32", (1,))


class Stage:
    """The mesh around a scheduler. executors live until they are killed or leave; nothing renews their lease.

    redis  a client of the store, if it is not the server at that URL
    keys   of a mesh that has more than one shard
    """

    def __init__(self, url: str, prefix: str, redis: Redis | None = None, keys: Keyspace | None = None) -> None:
        self.url = url
        self.prefix = prefix
        self.redis = redis or connect(url, retries=0)
        self.commands = cast("Any", self.redis)
        self.keys = keys or Keyspace(prefix)
        self.scripts = Scripts(self.redis, self.keys)
        self.membership = Membership(self.redis, self.keys)
        self.mesh = MeshAccess(self.redis, self.keys, self.scripts, self.membership, Tracing())
        self.gateway = GatewayId("g1")

    def settings(self, **changed: Any) -> SchedulerSettings:
        """Of a scheduler in this mesh."""
        given: dict[str, Any] = {
            "redis_url": self.url,
            "key_prefix": self.prefix,
            "lease_ms": LONG_LEASE_MS,
            "tick_ms": TICK_MS,
            "check_invariants": True,
            "name": "s1",
        }
        return SchedulerSettings(**(given | changed))

    @asynccontextmanager
    async def scheduler(self, *, forget_after_ms: int | None = None, **changed: Any) -> AsyncGenerator[Scheduler]:
        """A scheduler in this process, stopped in order at the end. A long lease is asked for as often as a short one.

        forget_after_ms  how long an empty executor's registration stays; by default as its lease says
        """
        settings = self.settings(**changed)
        async with asyncio.TaskGroup() as group:
            tasks = Tasks(group)
            scheduler = Scheduler(settings, settings.name, self.mesh, tasks)
            if forget_after_ms is not None:
                scheduler._policy = replace(scheduler._policy, forget_after_ms=forget_after_ms)
            with pytest.MonkeyPatch.context() as patched:
                if settings.lease_ms == LONG_LEASE_MS:
                    rounds = service.ROUNDS_PER_LEASE * LONG_LEASE_MS // LEASE_MS
                    patched.setattr(service, "ROUNDS_PER_LEASE", rounds)
                scheduler.start()
            try:
                yield scheduler
            finally:
                await scheduler.stop()
                await tasks.end_all()

    async def publish(self, model: str = MODEL, *, describe: bool = False) -> None:
        """A model becomes known."""
        batching = SequenceBatching(Direct(), 1_000_000, states=(STATE,), describe_on_expiry=describe)
        config = ModelConfig(model, "python", "", 4, (), (), sequence_batching=batching)
        await self.membership.publish(ModelRecord(config, "{}", ("1",)))

    async def join(
        self,
        name: str,
        *,
        slots: int = 4,
        instances: int = 1,
        model: str = MODEL,
        idle_ms: int = 0,
        pageable: bool = False,
    ) -> ExecutorId:
        """An executor registers; its lease lasts for the whole test."""
        executor = ExecutorId(name)
        served = (ServedModel(model, "1", instances, slots, idle_ms=idle_ms, pageable=pageable),)
        registration = ExecutorRegistration(executor, name, "host", 1, 0, served)
        await self.membership.register(registration, lease_ms=600_000)
        return executor

    async def kill(self, executor: ExecutorId) -> None:
        """An executor's lease ends."""
        await self.commands.delete(self.keys.executor_lease(executor))

    async def leave(self, executor: ExecutorId) -> None:
        """An executor says that it is stopping."""
        members = {m.registration.executor: m.registration for m in await self.membership.members()}
        await self.membership.leave(members[executor])

    def submission(
        self,
        correlation_id: CorrelationId,
        *,
        start: bool = False,
        end: bool = False,
        timeout_us: int = 0,
        durable: bool = True,
        pageable: bool = False,
        model: str = MODEL,
        prefers: str = "",
        tenant: str = "",
    ) -> Submission:
        """A gateway's step; its token is `<correlation id>`."""
        sequence = sequence_id(model, "", correlation_id)
        flags = (StepFlag.START if start else 0) | (StepFlag.END if end else 0)
        flags |= (StepFlag.DURABLE if durable else 0) | (StepFlag.PAGEABLE if pageable else 0)
        return Submission(
            sequence,
            StepFlag(flags),
            b"",
            None,
            "1",
            self.gateway,
            str(correlation_id),
            timeout_us,
            encode(InferMessage(model, "1", "", correlation_id, ())),
            tenant=tenant,
            prefers=prefers,
        )

    async def submit(self, correlation_id: CorrelationId, **how: Any) -> Submitted:
        """A step is accepted. how: as for `submission`"""
        (submitted,) = await self.submit_together(self.submission(correlation_id, **how))
        return submitted

    async def submit_together(self, *steps: Submission) -> list[Submitted]:
        """Steps of one shard are accepted, before anybody can act upon one of them."""
        call = self.scripts.submit(steps, backlog_max=10_000, in_flight_max=1_000)
        accepted = await self.scripts.run(call)
        assert {submitted.code for submitted in accepted} <= {SubmitCode.DELIVERED, SubmitCode.WAITING}
        return accepted

    async def cancel(self, correlation_id: CorrelationId, accepted: Submitted) -> CancelCode:
        """The caller of an accepted step has gone."""
        sequence = sequence_id(MODEL, "", correlation_id)
        birth = accepted.birth
        gone = Cancellation(sequence, birth, accepted.step, self.gateway, str(correlation_id))
        reply = encode(ReplyMessage("", error_code="CANCELLED"))
        (code,) = await self.scripts.run(self.scripts.cancel([gone], reply=reply))
        return code

    async def start_many(self, count: int, *, model: str = MODEL) -> list[SequenceId]:
        """Sequences 1..count, started in as few round trips as may be."""
        steps = [self.submission(number, start=True, model=model) for number in range(1, count + 1)]
        calls = [self.scripts.submit([step], backlog_max=10_000, in_flight_max=1_000) for step in steps]
        for begin in range(0, count, 200):
            await self.scripts.run_all(calls[begin : begin + 200])
        return [step.sequence for step in steps]

    async def record(self, correlation_id: CorrelationId, model: str = MODEL) -> dict[str, str]:
        """A sequence's record."""
        raw = await self.commands.hgetall(self.keys.sequence(sequence_id(model, "", correlation_id)).record)
        return {name.decode(): value.decode(errors="replace") for name, value in raw.items()}

    async def begin(self, *correlation_ids: CorrelationId, **how: Any) -> list[dict[str, str]]:
        """Sequences begin and get their slots; their records. how: as for `submit`"""
        for correlation_id in correlation_ids:
            await self.submit(correlation_id, start=True, **how)
        return await self.live(*correlation_ids)

    async def live(self, *correlation_ids: CorrelationId) -> list[dict[str, str]]:
        """Waits until all of them have an owner; their records."""

        async def all_live() -> bool:
            return all([(await self.record(c)).get("st") == "l" for c in correlation_ids])

        await self.until(all_live)
        return [await self.record(c) for c in correlation_ids]

    async def inbox(self, executor: ExecutorId) -> list[InboxStep]:
        """The steps in an executor's inboxes, each sequence's in their order."""
        return sorted(
            (e for e in await self._entries(executor) if isinstance(e, InboxStep)), key=lambda e: (e.sequence, e.step)
        )

    async def told_expired(self, executor: ExecutorId) -> list[SequenceId]:
        """The sequences that an executor was told to drop."""
        return [e.sequence for e in await self._entries(executor) if isinstance(e, InboxExpired)]

    async def _entries(self, executor: ExecutorId) -> list[InboxEntry]:
        return [
            inbox_entry(entry, fields)
            for shard in self.keys.shards
            for entry, fields in await self.commands.xrange(self.keys.inbox(shard, executor))
        ]

    async def commit(self, steps: Sequence[InboxStep], executor: ExecutorId, *, idle_ms: int = 600_000) -> list[int]:
        """An executor has run these steps."""
        codes: list[int] = []
        for step in steps:
            reply = encode(ReplyMessage("1", step=step.step))
            done = commit_of(step, reply, entries=(step.entry,), checkpoint=(("in", b"x"),))
            codes.append(await self.committed(executor, done, idle_ms=idle_ms))
        return codes

    async def committed(self, executor: ExecutorId, done: StepCommit, *, idle_ms: int) -> int:
        """What the script says of a step of this executor, as it is given."""
        call = self.scripts.commit(
            [done],
            shard=self.keys.shard_of(done.sequence),
            executor=executor,
            load=ModelLoad(MODEL, "1", "0"),
            idle_ms=idle_ms,
            tombstone_ms=600_000,
        )
        (code,) = await self.scripts.run(call)
        return code

    async def page(self, correlation_id: CorrelationId) -> None:
        """The last leader has asked an idle sequence for its slot."""
        sequence = sequence_id(MODEL, "", correlation_id)
        vacation = Vacation(sequence, Epoch(int((await self.record(correlation_id))["ep"])))
        shard, term = self.keys.shard_of(sequence), await self.term()
        call = self.scripts.vacate([vacation], LedShard(shard, MODEL, term))
        assert [VacateCode.VACATED] == await self.scripts.run(call)

    async def end_idle_time(self, correlation_id: CorrelationId) -> None:
        """The idle time of a sequence is over, and its leader is to look."""
        sequence = sequence_id(MODEL, "", correlation_id)
        await self.commands.delete(self.keys.sequence(sequence).idle)
        await self.commands.zadd(self.keys.deadlines(self.keys.shard_of(sequence), MODEL), {sequence: 0})

    async def open_replies(self) -> None:
        """The gateway listens."""
        for shard in self.keys.shards:
            await self.commands.xadd(self.keys.replies(shard, self.gateway), {"-": "-"})
            await self.commands.pexpire(self.keys.replies(shard, self.gateway), 600_000)

    async def replies(self) -> dict[str, ReplyMessage]:
        """The last reply of each token."""
        return {
            token.decode(): decode_reply(reply)
            for shard in self.keys.shards
            for _, fields in await self.commands.xrange(self.keys.replies(shard, self.gateway))
            for token, reply in fields.items()
            if token != b"-"
        }

    async def backlog_length(self) -> int:
        """Entries in the starts streams."""
        return sum([await self.commands.xlen(self.keys.starts(shard, MODEL)) for shard in self.keys.shards])

    async def feed_length(self) -> int:
        """Entries in the feeds."""
        return sum([await self.commands.xlen(self.keys.feed(shard, MODEL)) for shard in self.keys.shards])

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Waits for something that must become true."""
        async with asyncio.timeout(WAIT_S):
            while not await condition():
                await asyncio.sleep(0.005)

    async def term(self) -> Term:
        """The last term given to a leader."""
        return Term(int(await self.commands.hget(self.keys.terms, MODEL) or 0))

    async def close(self) -> None:
        """Closes its connections."""
        await self.mesh.links.close()
        await self.redis.aclose()


@asynccontextmanager
async def stage_on(cluster: EmbeddedCluster, prefix: str) -> AsyncGenerator[Stage]:
    """A mesh on a Cluster, with one known model. A node of it may be silent for two seconds."""
    async with connect(cluster.url, retries=0, timeout_ms=REDIS_TIMEOUT_MS) as redis:
        stage = Stage(cluster.url, prefix, redis, await join_mesh(redis, prefix))
        await stage.publish()
        yield stage
        await stage.mesh.links.close()


def step_numbers(steps: Sequence[InboxStep], correlation_id: CorrelationId) -> list[StepNumber]:
    """The steps of one sequence."""
    return [step.step for step in steps if step.sequence == sequence_id(MODEL, "", correlation_id)]

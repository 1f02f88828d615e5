"""A leader with nothing to do costs next to nothing, and is there at once when there is something."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import pytest

import scheduler.reader
import scheduler.service
from scheduler.core.state import Policy
from scheduler.ingest import Poll
from scheduler.leader import Leader
from scheduler.leadership import Leadership
from scheduler.reader import LEADERS_MAX
from shared.contract.ids import SchedulerId, Term, sequence_id
from shared.contract.messages import ServedModel
from shared.store.connections.link import Link
from shared.store.connections.redis_client import redis_now_ms
from shared.store.membership import Member
from shared.store.script_sender import Call
from shared.store.scripts import Scripts
from tests.scheduler.stage import MODEL, Stage

TICK_MS = 100
T = TypeVar("T")


class Observed:
    """A leader whose time is told by the test. turns: when it was woken; looks: when it asked Redis for deadlines."""

    def __init__(self, stage: Stage) -> None:
        self.leader = Leader(stage.mesh, MODEL, Term(1), policy=Policy(), tombstone_ms=1000, check=True)
        self.turns: list[int] = []
        self.looks: list[int] = []
        self._now_ms = 0
        self._exchange = self.leader._performer._exchange
        self.leader._performer._exchange = self.exchange  # type: ignore[method-assign]

    async def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        if any(command[0] == "ZRANGE" for command in commands):
            self.looks.append(self._now_ms)
        return await self._exchange(commands)

    async def watch(self, stage: Stage, begin_ms: int, ticks: int) -> None:
        """It leads for so many ticks, beginning at that time."""
        poll = Poll(await stage.membership.members())
        for tick in range(ticks):
            self._now_ms = tick * TICK_MS
            self.leader.observe(poll, begin_ms + self._now_ms, asyncio.get_running_loop().time())
            while self.leader._wake.is_set():
                self.leader._wake.clear()
                self.turns.append(self._now_ms)
                await self.leader._turn()


async def test_idle_leader_looks_when_something_can_be_due_and_then_at_once(stage: Stage) -> None:
    """Half a minute of a model whose sequences may be idle for a minute, with one that is to be looked at in it."""
    await stage.join("e1", idle_ms=60_000)
    observed = Observed(stage)
    sequence = sequence_id(MODEL, "", 1)
    deadlines = stage.keys.deadlines(stage.keys.shard_of(sequence), MODEL)
    due_ms = await redis_now_ms(stage.redis) + 600_000
    await stage.commands.zadd(deadlines, {sequence: due_ms})
    await observed.leader._rebuild()
    begin_ms = due_ms - 5_030

    await observed.watch(stage, begin_ms, 300)

    assert [0, 0, 5_100, 5_200, 15_200, 25_200] == observed.looks, "the first is the rebuild's"
    assert not await stage.commands.exists(deadlines)
    # Once more after each look: what came of it may be news.
    assert [0, 100, 5_100, 5_200, 5_300, 15_200, 15_300, 25_200, 25_300] == observed.turns


async def test_an_idle_leader_looks_as_soon_as_an_idle_time_is_cut(stage: Stage) -> None:
    """It would look after 10 s else, and the slot of a sequence that its client ends would be taken for so long."""
    await stage.join("e1", idle_ms=60_000)
    observed = Observed(stage)
    await observed.leader._rebuild()
    begin_ms = await redis_now_ms(stage.redis)
    await observed.watch(stage, begin_ms, 10)

    sequence = sequence_id(MODEL, "", 1)
    cut = {b"q": sequence.encode(), b"e": b"0", b"k": b"d", b"d": b"%d" % (begin_ms + 1030)}
    observed.leader.deliver(stage.keys.feed(stage.keys.shard_of(sequence), MODEL), [(b"1-1", cut)])
    await observed.watch(stage, begin_ms, 20)

    assert [0, 1100] == observed.looks


async def test_what_is_read_while_tenants_get_other_shares_counts_too(stage: Stage) -> None:
    observed = Observed(stage)
    await observed.leader._rebuild()
    begin_ms = await redis_now_ms(stage.redis)
    await observed.watch(stage, begin_ms, 1)
    assert begin_ms + 5000 < observed.leader.state.look_ms

    observed.leader._shares = lambda: {"acme": 3}
    sequence = sequence_id(MODEL, "", 1)
    cut = {b"q": sequence.encode(), b"e": b"0", b"k": b"d", b"d": b"%d" % (begin_ms + 1030)}
    observed.leader.deliver(stage.keys.feed(stage.keys.shard_of(sequence), MODEL), [(b"1-1", cut)])
    await observed.watch(stage, begin_ms, 1)

    assert ({"acme": 3}, begin_ms + 1030) == (observed.leader.state.shares, observed.leader.state.look_ms)


@pytest.mark.leaves_sequences
async def test_a_leader_begins_anew_when_the_clock_of_redis_is_set_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing that waits for a time would happen for an hour."""
    e1 = await stage.join("e1", idle_ms=60_000)
    membership = stage.mesh.polls._membership
    look = membership.look

    async def an_hour_ahead() -> tuple[list[Member], int]:
        members, now_ms = await look()
        return members, now_ms + 3_600_000

    monkeypatch.setattr(membership, "look", an_hour_ahead)
    async with stage.scheduler() as scheduler:
        await stage.start_many(1)
        await stage.live(1)
        first = scheduler.leaders[MODEL]
        monkeypatch.undo()

        async def has_begun_anew() -> bool:
            return scheduler.leaders.get(MODEL, first) is not first

        await stage.until(has_begun_anew)
        await stage.commit(await stage.inbox(e1), e1, idle_ms=100)

        async def is_over() -> bool:
            return (await stage.record(1))["st"] == "x"

        await stage.until(is_over)


async def test_a_leader_is_woken_by_what_executors_offer_of_its_own_model(stage: Stage) -> None:
    """Else each model of a repository that is being loaded would wake the leaders of all others."""
    e1 = await stage.join("e1", idle_ms=60_000)
    observed = Observed(stage)
    await observed.leader._rebuild()
    begin_ms = await redis_now_ms(stage.redis)
    await observed.watch(stage, begin_ms, 3)
    observed.turns.clear()

    (member,) = await stage.membership.members()
    other = (*member.registration.models, ServedModel("other", "1", 1, 4))
    await stage.membership.update(msgspec.structs.replace(member.registration, models=other))
    await observed.watch(stage, begin_ms, 3)
    assert [] == observed.turns

    closing = msgspec.structs.replace(member.registration.models[0], closing=True)
    await stage.membership.update(msgspec.structs.replace(member.registration, models=(closing,)))
    await observed.watch(stage, begin_ms, 3)

    assert 0 in observed.turns
    assert {e1} == set(observed.leader.state.executors)


@pytest.mark.leaves_sequences
async def test_read_that_waits_ends_for_a_new_leader(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for ten minutes here, so that nobody would come to an end otherwise."""
    for module in (scheduler.reader, scheduler.service):
        monkeypatch.setattr(module, "BLOCK_MS", 600_000)
    await stage.publish()
    await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(1)
        await stage.publish("other")
        await stage.join("e2", model="other")
        await stage.submit(2, start=True, model="other")

        async def is_live() -> bool:
            return (await stage.record(2, model="other")).get("st") == "l"

        await stage.until(is_live)


@pytest.mark.leaves_sequences
async def test_a_read_names_few_streams_however_many_models_there_are(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every one of the models is read for."""
    named: list[int] = []

    class Noting(Link):
        async def exchange(self, commands: Sequence[Iterable[Any]], *, blocking_s: float = 0.0) -> list[Any]:
            reads = map(tuple, commands)
            named.extend((len(read) - read.index("STREAMS") - 1) // 2 for read in reads)
            return await super().exchange(commands, blocking_s=blocking_s)

    monkeypatch.setattr(scheduler.reader, "Link", Noting)
    models = [f"m{index}" for index in range(3 * LEADERS_MAX)]
    for model in models:
        await stage.publish(model)
        await stage.join(f"of-{model}", model=model)
    async with stage.scheduler():
        for model in models:
            await stage.submit(1, start=True, model=model)

        async def are_live() -> bool:
            return all([(await stage.record(1, model=model)).get("st") == "l" for model in models])

        await stage.until(are_live)
    # Each model has two streams.
    assert 2 * LEADERS_MAX == max(named)


class Counting(Scripts):
    """Scripts that count their calls."""

    calls = 0

    async def run_all(self, calls: Sequence[Call[T]], link: Link | None = None) -> list[T | Exception]:
        """As `Scripts.run_all`."""
        self.calls += len(calls)
        return await super().run_all(calls, link)


async def test_leases_of_many_models_cost_as_many_calls_as_that_of_one(stage: Stage) -> None:
    models = [f"m{index}" for index in range(50)]
    clock = asyncio.get_running_loop().time
    scripts = [Counting(stage.redis, stage.keys) for _ in range(2)]
    first, standby = (
        Leadership(each, SchedulerId(f"s{index}"), lease_ms=60_000, clock=clock) for index, each in enumerate(scripts)
    )
    for _ in range(3):
        await first.contend(models)
        assert {} == (await standby.contend(models)).gained

    assert (50, [3, 3]) == (len(first.terms), [each.calls for each in scripts])

"""While a node of a Cluster is away, leaders lead the shards of the others."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from copy import copy
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from deploy.chaos.node import Node
from scheduler.core.slots import SlotAddress
from scheduler.core.state import Policy
from scheduler.effects import EffectPerformer
from scheduler.leader import Leader
from scheduler.lent_slots import LentSlots
from scheduler.mesh import MeshAccess
from scheduler.service import Scheduler
from scheduler.sweep import stranded
from shared.contract.ids import ExecutorId, InstanceIndex, SchedulerId, SlotIndex, Term, sequence_id
from shared.store.connections.homes import MESH_TAG, tag_of
from shared.store.connections.link import LINKS_MAX
from shared.store.connections.redis_client import connect
from shared.store.reading import read_counts
from tests.embedded_cluster import EmbeddedCluster
from tests.scheduler.stage import LEASE_MS, MODEL, REDIS_TIMEOUT_MS, Stage, stage_on
from tests.scheduler.test_leadership import told_times
from tests.scheduler.test_spares import all_laid_out, holders, places

pytestmark = pytest.mark.leaves_sequences

SLOTS = 6


@pytest.fixture
async def stage(private_cluster: EmbeddedCluster, key_prefix: str) -> AsyncIterator[Stage]:
    """Nodes of its Cluster may go away."""
    async with stage_on(private_cluster, key_prefix) as stage:
        yield stage


@pytest.fixture
async def unharmed(redis_cluster: EmbeddedCluster, key_prefix: str) -> AsyncIterator[Stage]:
    """Its Cluster serves other tests, too."""
    async with stage_on(redis_cluster, key_prefix) as stage:
        yield stage


@pytest.fixture
def node(stage: Stage, private_cluster: EmbeddedCluster) -> Node:
    """The one that goes away. It does not hold the mesh's own keys."""
    holders = (private_cluster.holder(tag_of(stage.keys.base(shard))) for shard in stage.keys.shards)
    return next(node for node in holders if node is not private_cluster.holder(MESH_TAG))


@pytest.fixture
def numbers(stage: Stage, node: Node, private_cluster: EmbeddedCluster) -> tuple[list[int], list[int]]:
    """Ids of sequences whose shard is there, and ids of those whose shard goes away."""
    gone = {shard for shard in stage.keys.shards if private_cluster.holder(tag_of(stage.keys.base(shard))) is node}
    of_gone = [stage.keys.shard_of(sequence_id(MODEL, "", number)) in gone for number in range(1, 100)]
    there = [number for number, is_gone in enumerate(of_gone, 1) if not is_gone]
    return there, [number for number, is_gone in enumerate(of_gone, 1) if is_gone]


async def leads(stage: Stage, scheduler: Scheduler, *, away: bool) -> None:
    """Waits until the model is led, with or without shards that are away."""

    async def is_so() -> bool:
        leader = scheduler.leaders.get(MODEL)
        return leader is not None and bool(leader.positions()) and bool(leader.away) == away

    await stage.until(is_so)


async def begin(stage: Stage, scheduler: Scheduler, *numbers: int) -> list[dict[str, str]]:
    """Begins sequences, and waits until the leader has noted which slots it has given: it may give the first before."""
    await leads(stage, scheduler, away=False)
    return await stage.begin(*numbers)


async def slots_held(stage: Stage, scheduler: Scheduler, count: int) -> None:
    async def are_held() -> bool:
        return len(holders(scheduler)) == count

    await stage.until(are_held)


@pytest.mark.parametrize("spare_slots", [0, 32])
async def test_new_sequences_of_other_shards_get_slots_that_no_sequence_of_the_lost_shard_holds(
    stage: Stage,
    node: Node,
    numbers: tuple[list[int], list[int]],
    private_cluster: EmbeddedCluster,
    spare_slots: int,
) -> None:
    there, gone = numbers
    await stage.join("e1", slots=SLOTS)
    async with stage.scheduler(spare_slots=spare_slots) as scheduler:
        before = places(await begin(stage, scheduler, there[0], *gone[:2]))
        await asyncio.to_thread(node.kill)
        await leads(stage, scheduler, away=True)

        for number in there[1:10]:
            await stage.submit(number, start=True)
        if spare_slots == 0:
            await slots_held(stage, scheduler, SLOTS - 2)
        while_away = {place for place in holders(scheduler).values() if place != before[0]}
        await asyncio.to_thread(private_cluster.revive)
        await leads(stage, scheduler, away=False)
        await slots_held(stage, scheduler, SLOTS)
        await stage.submit(gone[0], end=True)

        assert while_away.isdisjoint(before)
        assert before == places(await stage.live(there[0], *gone[:2]))
        assert SLOTS == len(set(holders(scheduler).values()))


@pytest.mark.parametrize("spare_slots", [0, 32])
async def test_a_scheduler_that_has_not_led_leads_the_other_shards_and_gives_nobody_a_slot_of_the_lost_one(
    stage: Stage,
    node: Node,
    numbers: tuple[list[int], list[int]],
    private_cluster: EmbeddedCluster,
    spare_slots: int,
) -> None:
    there, gone = numbers
    await stage.join("e1", slots=SLOTS)
    async with stage.scheduler(spare_slots=spare_slots) as scheduler:
        before = places(await begin(stage, scheduler, there[0], *gone[:2]))
        await asyncio.to_thread(node.kill)
    async with stage.scheduler(name="s2", spare_slots=spare_slots) as scheduler:
        await leads(stage, scheduler, away=True)
        for number in there[1:10]:
            await stage.submit(number, start=True)
        if spare_slots == 0:
            await slots_held(stage, scheduler, SLOTS - 2)
        while_away = {place for place in holders(scheduler).values() if place != before[0]}
        await asyncio.to_thread(private_cluster.revive)
        await leads(stage, scheduler, away=False)
        await slots_held(stage, scheduler, SLOTS)

        assert while_away.isdisjoint(before)
        assert before == places(await stage.live(there[0], *gone[:2]))
        assert SLOTS == len(set(holders(scheduler).values()))


async def test_slots_that_are_laid_out_for_a_shard_are_noted(unharmed: Stage) -> None:
    """A sequence takes one without its leader, which may end before it hears of that."""
    executor = await unharmed.join("e1", slots=SLOTS)
    async with unharmed.scheduler(spare_slots=32) as scheduler:
        await begin(unharmed, scheduler, 1)
        await unharmed.until(lambda: all_laid_out(unharmed, executor))

        noted = await unharmed.commands.hgetall(unharmed.keys.lent(MODEL))
        for shard in unharmed.keys.shards:
            laid_out = await unharmed.commands.hget(unharmed.keys.spares(shard, executor, MODEL), "v:1")
            slots = [one.split(b".") for one in laid_out.split()]
            assert {b"%d" % shard} == {noted.get(b"e1/1/%b/%b" % (instance, slot)) for slot, instance in slots}


async def test_sequences_of_a_lost_executor_go_on_elsewhere_and_those_of_the_lost_shard_when_it_is_back(
    stage: Stage,
    node: Node,
    numbers: tuple[list[int], list[int]],
    private_cluster: EmbeddedCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then the executor is not forgotten."""
    there, gone = numbers
    forgotten, really_forget = list[bool](), EffectPerformer._forget

    async def forget(performer: EffectPerformer, executor: ExecutorId) -> bool:
        forgotten.append(await really_forget(performer, executor))
        return forgotten[-1]

    monkeypatch.setattr(EffectPerformer, "_forget", forget)
    first = await stage.join("e1", slots=SLOTS)
    async with stage.scheduler(forget_after_ms=1_000) as scheduler:
        await begin(stage, scheduler, there[0], gone[0])
        await asyncio.to_thread(node.kill)
        await leads(stage, scheduler, away=True)
        await stage.join("e2", slots=SLOTS)
        await stage.kill(first)

        async def has_moved() -> bool:
            return (await stage.record(there[0])).get("ow") == "e2"

        await stage.until(has_moved)

        async def was_tried() -> bool:
            return bool(forgotten)

        await stage.until(was_tried)
        assert not any(forgotten)
        await asyncio.to_thread(private_cluster.revive)

        async def all_have_moved() -> bool:
            return {"e2"} == {(await stage.record(number)).get("ow") for number in (there[0], gone[0])}

        await stage.until(all_have_moved)


async def test_while_a_node_is_silent_the_loss_of_an_executor_is_noticed(
    stage: Stage, node: Node, numbers: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose host has vanished answers nothing, not even that it is gone. Looks for removed keys ask it."""
    there, _ = numbers
    looked = asyncio.Event()

    async def read(*about: Any) -> Counter[str]:
        looked.set()
        return await read_counts(*about)

    monkeypatch.setattr("scheduler.service.SPOILT_INTERVAL_S", 0.1)
    monkeypatch.setattr("scheduler.sweep.read_counts", read)
    first = await stage.join("e1", slots=SLOTS)
    async with stage.scheduler(redis_timeout_ms=REDIS_TIMEOUT_MS) as scheduler:
        await begin(stage, scheduler, there[0])
        node.send(signal.SIGSTOP)
        try:
            await leads(stage, scheduler, away=True)
            looked.clear()
            await looked.wait()
            await stage.join("e2", slots=SLOTS)
            await stage.kill(first)

            async def has_moved() -> bool:
                return (await stage.record(there[0])).get("ow") == "e2"

            await stage.until(has_moved)
        finally:
            node.send(signal.SIGCONT)


async def test_all_leaders_lead_without_a_silent_node_as_soon_as_its_silence_is_noticed(
    stage: Stage, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """There are more of them than connections. Not one group after the other waits for it."""
    models = {f"m{number}" for number in range(3 * LINKS_MAX)}
    for model in models:
        await stage.publish(model)

    async def all_lead(*, away: bool) -> bool:
        led = {model for model, one in scheduler.leaders.items() if one.positions() and bool(one.away) is away}
        return models <= led

    async with stage.scheduler(lease_ms=LEASE_MS * 3, redis_timeout_ms=REDIS_TIMEOUT_MS) as scheduler:
        await stage.until(lambda: all_lead(away=False))
        before = await stage.commands.hgetall(stage.keys.terms)
        node.send(signal.SIGSTOP)
        try:
            await stage.until(lambda: all_lead(away=True))
        finally:
            node.send(signal.SIGCONT)
        after = await stage.commands.hgetall(stage.keys.terms)
        await stage.until(lambda: all_lead(away=False))

    told = [vars(record)["fields"] for record in caplog.records if record.message == "leadership lost"]
    assert len(models) // 2 < sum(about["models"] for about in told if about["cause"] == "a node of Redis is silent")
    taken = [int(after[model]) - int(before[model]) for model in before]
    assert max(taken) <= 2, "one that had just noticed it by itself has begun once more"


async def test_while_a_node_is_away_nobody_goes_over_the_keys_of_the_others(
    stage: Stage,
    node: Node,
    private_cluster: EmbeddedCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To look for owners in no list takes every node. A look that fails is repeated soon, and may fail for hours."""
    looks = list[dict[str, set[ExecutorId]]]()

    async def look(mesh: MeshAccess) -> dict[str, set[ExecutorId]]:
        looks.append({})
        looks[-1] = await stranded(mesh)
        return looks[-1]

    async def has_looked() -> bool:
        return bool(looks)

    monkeypatch.setattr("scheduler.service.stranded", look)
    await asyncio.to_thread(node.kill)
    async with stage.scheduler():
        await stage.until(lambda: told_times(caplog, "redis out of reach", "owners", at_least=3))
        assert [] == looks
        await asyncio.to_thread(private_cluster.revive)
        await stage.until(has_looked)


async def test_who_has_not_led_before_leads_when_all_nodes_are_there(
    stage: Stage, node: Node, private_cluster: EmbeddedCluster
) -> None:
    """And raises no fence before: it would make the slots worthless that the last leader has laid out."""
    await stage.join("e1", slots=SLOTS)
    await asyncio.to_thread(node.kill)
    shard = next(
        shard for shard in stage.keys.shards if private_cluster.holder(tag_of(stage.keys.base(shard))) is not node
    )

    async with stage.scheduler() as scheduler:
        await stage.until(lambda: reached(stage, 3))
        assert None is await stage.commands.get(stage.keys.fence(shard, MODEL))
        await asyncio.to_thread(private_cluster.revive)
        await leads(stage, scheduler, away=False)


async def test_who_cannot_lead_without_a_shard_leaves_the_lead_to_a_scheduler_that_reaches_all(unharmed: Stage) -> None:
    """It asked again and again before its lease had ended, so nobody else ever got it."""
    await unharmed.join("e1", slots=SLOTS)
    shard = unharmed.keys.shards[0]
    async with unharmed.scheduler() as cut_off:
        cut_off._mesh = copy(unharmed.mesh)
        cut_off._mesh.reach = Mock(lost=AsyncMock(return_value={shard: RedisConnectionError("cut off")}))
        await unharmed.until(lambda: reached(unharmed, 1))
        async with unharmed.scheduler(name="s2") as other:
            await leads(unharmed, other, away=False)
            assert MODEL not in cut_off.leaders


async def reached(stage: Stage, term: int) -> bool:
    return await stage.term() >= term


def leader(stage: Stage, term: int, lent: LentSlots | None = None) -> Leader:
    policy = Policy(shards=stage.keys.shards)
    return Leader(stage.mesh, MODEL, Term(term), policy=policy, tombstone_ms=1000, lent=lent)


async def taken(stage: Stage) -> Term:
    """The next term, as a scheduler gets it that then dies."""
    (term,) = await stage.scripts.run(stage.scripts.lead({MODEL: Term(0)}, SchedulerId("s1"), lease_ms=LEASE_MS))
    assert isinstance(term, int)
    return Term(term)


async def found(stage: Stage, term: Term) -> LentSlots:
    """The notes, as the leader of a term finds them."""
    lent = LentSlots(stage.mesh, MODEL, term)
    await lent.begin()
    return lent


async def led(stage: Stage) -> Term:
    """A leader has begun in the next term, and has read all shards."""
    term = await taken(stage)
    await leader(stage, term, await found(stage, term))._rebuild()
    return term


async def count(stage: Stage) -> bool:
    """Whether the notes count for the leader of the next term."""
    return (await found(stage, await taken(stage))).counts


async def test_what_a_leader_knew_counts_while_no_other_scheduler_has_led(unharmed: Stage) -> None:
    """No other than leaders that note what they lend: a term is missing if one of another release has led."""
    assert not await count(unharmed)
    term = await led(unharmed)

    assert (await found(unharmed, term)).counts, "the same term, after a failure"
    assert await count(unharmed)
    await taken(unharmed)
    await taken(unharmed)
    assert await count(unharmed), "whoever died before it led has lent nothing"
    await unharmed.commands.hincrby(unharmed.keys.terms, MODEL, 1)
    assert not await count(unharmed)
    assert not await count(unharmed)


async def test_notes_that_may_lack_something_do_not_count(unharmed: Stage) -> None:
    """The server may have lost the newest; after a reshard they are about other shards; a value is spoilt."""
    notes, shards = unharmed.keys.lent(MODEL), unharmed.keys.shards

    await led(unharmed)
    unharmed.mesh.run.bound[MESH_TAG] = "another run"
    assert not await count(unharmed)
    unharmed.mesh.run.bound[MESH_TAG] = ""
    assert not await count(unharmed), "the one before may have lent slots, and not noted all"
    await led(unharmed)
    unharmed.keys.shards = tuple(reversed(shards))
    assert not await count(unharmed)
    unharmed.keys.shards = shards
    await led(unharmed)
    await unharmed.commands.hset(notes, "e1/1/0/x", str(shards[0]))
    assert not await count(unharmed)
    await led(unharmed)

    assert await count(unharmed)
    await unharmed.commands.delete(notes)
    assert not await count(unharmed)


async def test_a_slot_is_noted_where_it_was_lent_last(unharmed: Stage) -> None:
    here, there = unharmed.keys.shards[:2]
    e1, e2 = (SlotAddress(ExecutorId(name), "1", InstanceIndex(0), SlotIndex(1)) for name in ("e/1", "e2"))
    first = await found(unharmed, await taken(unharmed))
    await unharmed.join(e1.executor)
    await first.lend([(e1, here), (e2, here)])
    await first.lend([(e1, there)])
    await leader(unharmed, 1, first)._rebuild()

    second = await found(unharmed, term := await taken(unharmed))
    assert {here: frozenset(), there: {e1}} == second.of([here, there]), "those of an executor that is gone are removed"
    with pytest.raises(ResponseError, match="FENCED"):
        await first.lend([(e1, here)])
    await second.forget(e1.executor)
    assert {there: frozenset()} == (await found(unharmed, term)).of([there])


async def test_on_one_server_nothing_is_left_to_the_next_leader(redis_server: str, key_prefix: str) -> None:
    """Without the server nobody leads."""
    async with connect(redis_server, retries=0) as redis:
        stage = Stage(redis_server, key_prefix, redis)
        await stage.publish()
        await stage.join("e1")
        async with stage.scheduler():
            await stage.begin(1)
        await led(stage)
        assert not await stage.commands.exists(stage.keys.lent(MODEL))
        await stage.mesh.links.close()

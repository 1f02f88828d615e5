"""Spare slots: new sequences take them without the leader, which hears of it, and no slot has two holders."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from scheduler import reader, service
from scheduler.leader import Leader
from scheduler.service import Scheduler
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId, sequence_id
from shared.contract.messages import InboxStep
from shared.store.script_values import SubmitCode
from tests.embedded_cluster import EmbeddedCluster
from tests.scheduler.stage import MODEL, Stage, stage_on

pytestmark = pytest.mark.leaves_sequences

SHARD = ShardId(0)


async def laid_out(stage: Stage, executor: ExecutorId) -> list[str]:
    """The spare slots of an executor, as they are stored."""
    return ((await stage.commands.hget(stage.keys.spares(SHARD, executor, MODEL), "v:1")) or b"").decode().split()


async def use(stage: Stage, executor: ExecutorId, slots: int) -> None:
    """A first sequence, 1000, makes the leader lay slots out."""
    await stage.begin(1000)

    async def are_laid_out() -> bool:
        return len(await laid_out(stage, executor)) == slots

    await stage.until(are_laid_out)


async def known(stage: Stage, scheduler: Scheduler, *numbers: int) -> None:
    """Waits until the leader knows exactly these sequences with slots."""
    expected = {sequence_id(MODEL, "", number) for number in numbers}

    async def knows() -> bool:
        return MODEL in scheduler.leaders and holders(scheduler).keys() == expected

    await stage.until(knows)


def holders(scheduler: Scheduler) -> dict[SequenceId, str]:
    state = scheduler.leaders[MODEL].state
    return {name: str(sequence.place) for name, sequence in state.sequences.items() if sequence.place is not None}


def places(records: Iterable[dict[str, str]]) -> list[str]:
    return [f"{record['ow']}/1/{record['in']}/{record['sl']}" for record in records]


async def test_a_new_sequence_takes_the_lowest_spare_slot_and_gives_it_back(stage: Stage) -> None:
    executor = await stage.join("e1", slots=4)
    async with stage.scheduler() as scheduler:
        await use(stage, executor, slots=3)

        first = await stage.submit(1, start=True, prefers=executor)
        second = await stage.submit(2, start=True, end=True, prefers=executor)

        assert [SubmitCode.DELIVERED] * 2 == [first.code, second.code]
        assert ["e1/1/0/1", "e1/1/0/2"] == places(await stage.live(1, 2))
        await known(stage, scheduler, 1000, 1, 2)
        await commit(stage, executor, 2)
        await known(stage, scheduler, 1000, 1)
        assert ["3.0", "2.0"] == await laid_out(stage, executor)
        await stage.submit(3, start=True, prefers=executor)
        assert ["e1/1/0/2"] == places(await stage.live(3))


async def test_new_sequences_begin_and_end_while_no_scheduler_runs(stage: Stage) -> None:
    executor = await stage.join("e1", slots=4)
    async with stage.scheduler():
        await use(stage, executor, slots=3)
    for number in range(1, 31):
        await stage.submit(number, start=True, end=True, prefers=executor)
        assert [2] == await commit(stage, executor, number)
    await stage.submit(31, start=True, prefers=executor)

    async with stage.scheduler() as scheduler:
        await known(stage, scheduler, 1000, 31)
        for number in (32, 33):
            await stage.submit(number, start=True)
        records = await stage.live(1000, 31, 32, 33)

        assert len(set(places(records))) == 4


async def commit(stage: Stage, executor: ExecutorId, number: int) -> list[int]:
    """An executor has run the steps of a sequence that are in its inbox."""
    return await stage.commit(await steps_of(stage, executor, number), executor)


async def steps_of(stage: Stage, executor: ExecutorId, number: int) -> list[InboxStep]:
    return [step for step in await stage.inbox(executor) if step.sequence == sequence_id(MODEL, "", number)]


async def page(stage: Stage, executor: ExecutorId, number: int) -> None:
    """Its owner pages an idle sequence."""
    owned = (sequence_id(MODEL, "", number), Epoch(int((await stage.record(number))["ep"])))
    assert [True] == await stage.scripts.run(stage.scripts.page([owned], shard=SHARD, executor=executor, model=MODEL))


async def with_a_paged_sequence(stage: Stage) -> ExecutorId:
    """An executor with two slots: sequence 1000 has one, the other one is spare again since sequence 1 was paged."""
    executor = await stage.join("e1", slots=2)
    async with stage.scheduler():
        await use(stage, executor, slots=1)
    await stage.submit(1, start=True, pageable=True, prefers=executor)
    await commit(stage, executor, 1)
    await page(stage, executor, 1)
    return executor


async def test_a_paged_sequence_returns_to_a_spare_slot_of_its_last_owner(stage: Stage) -> None:
    executor = await with_a_paged_sequence(stage)
    assert ["1.0"] == await laid_out(stage, executor)
    submitted = await stage.submit(1)

    record = await stage.record(1)
    (step,) = await steps_of(stage, executor, 1)
    assert SubmitCode.DELIVERED is submitted.code
    assert ["e1/1/0/1"] == places([record])
    assert (step.epoch, step.committed) == (int(record["ep"]), 1)
    assert [1] == await stage.commit([step], executor)
    async with stage.scheduler() as scheduler:
        await known(stage, scheduler, 1000, 1)


async def test_a_paged_sequence_without_a_spare_slot_waits_in_line(stage: Stage) -> None:
    executor = await with_a_paged_sequence(stage)
    await stage.submit(2, start=True, prefers=executor)

    submitted = await stage.submit(1)

    assert SubmitCode.WAITING is submitted.code
    await commit(stage, executor, 1000)
    async with stage.scheduler() as scheduler:
        await stage.end_idle_time(1000)
        await stage.live(1)
        await known(stage, scheduler, 1, 2)


async def test_spare_slots_of_an_earlier_leader_are_given_to_nobody(stage: Stage) -> None:
    executor = await stage.join("e1", slots=4)
    async with stage.scheduler():
        await use(stage, executor, slots=3)
    await stage.commands.set(stage.keys.fence(SHARD, MODEL), await stage.term() + 1)

    submitted = await stage.submit(1, start=True, prefers=executor)

    assert SubmitCode.WAITING is submitted.code


async def test_who_waits_gets_a_spare_slot_before_those_who_come_later(stage: Stage) -> None:
    executor = await stage.join("e1", slots=2)
    async with stage.scheduler():
        await use(stage, executor, slots=1)

    await stage.submit(1, start=True)
    later = await stage.submit(2, start=True, prefers=executor)

    assert SubmitCode.WAITING is later.code
    async with stage.scheduler():
        assert ["e1/1/0/1"] == places(await stage.live(1))


async def test_recalled_slots_go_to_those_who_wait(stage: Stage) -> None:
    executor = await stage.join("e1", slots=4)
    async with stage.scheduler() as scheduler:
        await use(stage, executor, slots=3)
        await stage.submit(1, start=True, prefers=executor)

        await stage.submit(2, start=True)
        await stage.submit(3, start=True)

        assert {"e1/1/0/1", "e1/1/0/2", "e1/1/0/3"} == set(places(await stage.live(1, 2, 3)))
        await known(stage, scheduler, 1000, 1, 2, 3)


@pytest.mark.parametrize("leaves", [True, False])
async def test_sequences_in_spare_slots_move_when_their_executor_goes(stage: Stage, *, leaves: bool) -> None:
    executor = await stage.join("e1", slots=8)
    async with stage.scheduler() as scheduler:
        await use(stage, executor, slots=7)
        await stage.submit(1, start=True, prefers=executor)
        other = await stage.join("e2", slots=8)

        await (stage.leave(executor) if leaves else stage.kill(executor))
        # The leader has not heard of it yet: it takes this one too.
        await stage.submit(2, start=True, prefers=executor)

        async def have_moved() -> bool:
            return [other] * 3 == [(await stage.record(number)).get("ow") for number in (1000, 1, 2)]

        await stage.until(have_moved)
        await known(stage, scheduler, 1000, 1, 2)
        assert not await stage.commands.exists(stage.keys.spares(SHARD, executor, MODEL))
        late = await stage.submit(3, start=True, prefers=executor)
        assert SubmitCode.WAITING is late.code
        await stage.live(3)


async def test_no_more_is_laid_out_than_an_executors_share(stage: Stage) -> None:
    names = [await stage.join(name, slots=64) for name in ("e1", "e2")]
    async with stage.scheduler() as scheduler:
        for number in range(16):
            await stage.submit(number, start=True)
        await stage.live(*range(16))

        async def are_laid_out() -> bool:
            return all([await laid_out(stage, name) for name in names])

        await stage.until(are_laid_out)
        loads = [place.split("/")[0] for place in holders(scheduler).values()]

        for name in names:
            assert loads.count(name) + len(await laid_out(stage, name)) <= 1.25 * 17


async def test_nothing_is_taken_while_the_feed_is_not_read(stage: Stage) -> None:
    executor = await stage.join("e1", slots=4)
    async with stage.scheduler():
        await use(stage, executor, slots=3)
    feed = stage.keys.feed(SHARD, MODEL)
    pipe = stage.redis.pipeline(transaction=False)
    for _ in range(10_000):
        pipe.xadd(feed, {"q": "sum||i1", "e": "0", "k": "e"})
    await pipe.execute()

    submitted = await stage.submit(1, start=True, prefers=executor)

    assert SubmitCode.WAITING is submitted.code


async def test_without_spare_slots_the_leader_gives_every_slot(stage: Stage) -> None:
    executor = await stage.join("e1", slots=4)
    async with stage.scheduler(spare_slots=0):
        await stage.begin(1)
        await asyncio.sleep(0.1)

        submitted = await stage.submit(2, start=True, prefers=executor)

        assert SubmitCode.WAITING is submitted.code
        await stage.live(2)


async def test_a_leader_at_ease_is_not_woken_by_every_sequence(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty sequences that come one after the other are read together, when one asks for a slot: nobody waits for
    them, and a read waits for ten minutes here.
    """
    for module in (reader, service):
        monkeypatch.setattr(module, "BLOCK_MS", 600_000)
    executor = await stage.join("e1", slots=64)
    reads: list[int] = []
    deliver = Leader.deliver

    def counted(leader: Leader, stream: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if ":feed:" in stream:
            reads.append(len(entries))
        deliver(leader, stream, entries)

    async with stage.scheduler() as scheduler:
        await use(stage, executor, slots=32)
        leader = scheduler.leaders[MODEL]
        await stage.until(lambda: is_at_ease(leader))
        # The reader may still wait as it did before: it waits anew behind this one.
        await stage.submit(1, start=True, prefers=executor)
        await known(stage, scheduler, 1000, 1)
        await stage.until(lambda: waits_for_starts(stage, scheduler, SHARD))
        monkeypatch.setattr(Leader, "deliver", counted)
        for number in range(2, 22):
            await stage.submit(number, start=True, prefers=executor)
        await stage.submit(22, start=True)
        await known(stage, scheduler, 1000, *range(1, 23))

    assert [20] == reads


async def is_at_ease(leader: Leader) -> bool:
    return leader._is_at_ease


async def waits_for_starts(stage: Stage, scheduler: Scheduler, shard: ShardId) -> bool:
    """Whether the reader of a shard's server is to be woken by a sequence that asks for a slot alone."""
    (of_shard,) = scheduler._readers[stage.redis.home(stage.keys.feed(shard, MODEL))]
    return scheduler.leaders[MODEL]._is_at_ease and not of_shard._is_fed


async def test_a_wait_that_was_lost_does_not_make_the_slot_of_a_later_sequence_free(stage: Stage) -> None:
    """Its entry in the line was never acted upon: the later sequence of the id came into the line behind it."""
    await stage.join("e1", slots=1)
    own = stage.keys.sequence(sequence_id(MODEL, "", 1))
    async with stage.scheduler() as scheduler:
        await stage.begin(1000)
        await stage.submit(1, start=True)
        await stage.commands.hset(own.record, "nx", "no number")
        await stage.submit(1, start=True)
        entry = (await stage.record(1))["be"]

        async def is_in_line() -> bool:
            known = scheduler.leaders[MODEL].state.sequences.get(sequence_id(MODEL, "", 1))
            return known is not None and str(known.entry) == f"{entry}@0"

        await stage.until(is_in_line)
        await stage.join("e2", slots=3)
        await stage.live(1)

    async with stage.scheduler():
        for number in (2, 3):
            await stage.submit(number, start=True)

        assert len(set(places(await stage.live(1, 2, 3)))) == 3


async def test_who_asks_at_one_node_of_a_cluster_gets_what_was_freed_at_another_at_once(
    redis_cluster: EmbeddedCluster, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has a reader, which waits for ten minutes here while nobody asks."""
    for module in (reader, service):
        monkeypatch.setattr(module, "BLOCK_MS", 600_000)
    async with stage_on(redis_cluster, key_prefix) as stage:
        shards = stage.keys.shards
        by_shard = {shard: [n for n in range(1, 99) if shard_of_number(stage, n) == shard] for shard in shards}
        first, second = by_shard[shards[0]], by_shard[shards[1]]
        executor = await stage.join("e1", slots=len(shards) + 1)
        async with stage.scheduler() as scheduler:
            await stage.begin(first[0])
            leader = scheduler.leaders[MODEL]
            await stage.until(lambda: all_laid_out(stage, executor))
            for shard in shards:
                await stage.submit(by_shard[shard][1], start=True, prefers=executor)
            await stage.live(*(by_shard[shard][1] for shard in shards))

            await stage.until(lambda: is_at_ease(leader))
            await stage.submit(first[1], end=True)
            await commit(stage, executor, first[1])
            await stage.until(lambda: waits_for_starts(stage, scheduler, shards[0]))
            await stage.submit(first[2], start=True, end=True, prefers=executor)
            await commit(stage, executor, first[2])
            await stage.submit(second[2], start=True, prefers=executor)
            assert 1 == len(await stage.live(second[2]))


def shard_of_number(stage: Stage, number: int) -> ShardId:
    return stage.keys.shard_of(sequence_id(MODEL, "", number))


async def all_laid_out(stage: Stage, executor: ExecutorId) -> bool:
    return all([await stage.commands.exists(stage.keys.spares(shard, executor, MODEL)) for shard in stage.keys.shards])

"""The order of a leader's effects: what happens between two of its calls finds nothing half done for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from scheduler.core.actions import LookForExpired, Publish, Reclaim, ReclaimPart, Vacate, WantSlots
from scheduler.core.events import Looked, Reclaimed, Vacated
from scheduler.core.slots import SlotAddress
from scheduler.core.state import Policy
from scheduler.effects import EffectPerformer
from scheduler.leader import Leader
from shared.contract.forecast import LineForecast, decode_forecast, encode_forecast
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, SlotIndex, Term, sequence_id
from shared.contract.limits import IDLE_MS_MAX
from shared.contract.model_config import Direct, ModelConfig, SequenceBatching
from shared.store.connections.redis_client import redis_now_ms
from shared.store.script_values import LedShard
from shared.store.scripts import Scripts
from tests.scheduler.stage import MODEL, Stage
from tests.scripted_mesh import commit_of

SEVEN = sequence_id(MODEL, "", 7)


async def idle(stage: Stage, executor: ExecutorId, count: int) -> None:
    """So many sequences have run their first step. A scheduler must run."""
    await stage.start_many(count)
    await stage.live(*range(1, count + 1))
    await stage.commit(await stage.inbox(executor), executor)


async def due(stage: Stage, count: int) -> None:
    """So many sequences in slots have been idle for too long, and nobody has looked."""
    executor = await stage.join("e1", slots=32)
    async with stage.scheduler():
        await idle(stage, executor, count)
    for number in range(1, count + 1):
        await stage.end_idle_time(number)


@asynccontextmanager
async def performer(
    stage: Stage,
    *,
    before: Callable[[], Awaitable[Any]] | None = None,
    after: Callable[[], Awaitable[Any]] | None = None,
) -> AsyncGenerator[EffectPerformer]:
    """One in the leader's place. before, after: what others do at each of its script calls."""
    one = EffectPerformer(stage.mesh, MODEL, await stage.term(), shards=stage.keys.shards, tombstone_ms=10_000)
    run = one._run

    async def interrupted(calls: Sequence[Any]) -> list[Any]:
        if before:
            await before()
        outcomes = await run(calls)
        if after:
            await after()
        return outcomes

    one._run = interrupted  # type: ignore[method-assign]
    yield one


async def take_over(leader: EffectPerformer, executor: ExecutorId) -> int:
    """Takes all from a lost executor, as the turns of a leader do. Returns in how many parts."""
    parts = 1
    while await leader.perform([ReclaimPart(executor)]) != [Reclaimed(executor, is_all=True)]:
        parts += 1
    return parts


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("only", [(), ("1",)], ids=["its executor is lost", "its version is withdrawn"])
async def test_steps_that_come_during_a_takeover_are_moved_on_with_the_others(
    stage: Stage, only: tuple[str, ...]
) -> None:
    """Nothing else looks into the inbox of an executor that lives; into a lost one's, only when it is forgotten."""
    e1 = await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(7)
    if not only:
        await stage.kill(e1)
    came = 1

    async def a_step_comes() -> None:
        nonlocal came
        await stage.submit(7)
        came += 1

    async with performer(stage, before=a_step_comes) as leader:
        await (leader.perform([Reclaim(e1, only=only)]) if only else take_over(leader, e1))

    assert came > 2
    assert [] == await stage.inbox(e1)
    parked = await stage.commands.xrange(stage.keys.sequence(SEVEN).parked)
    assert list(range(1, came + 1)) == sorted(int(fields[b"a"].split()[0]) for _, fields in parked)


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_sweep_in_the_midst_of_a_takeover_loses_no_step(stage: Stage, *, is_killed: bool) -> None:
    """The leader ends between the two calls, as a key was unreadable, and its successor looks over all records."""
    e1 = await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(7)
    if is_killed:
        await stage.kill(e1)
    term = await stage.term()
    reclaim = stage.scripts.reclaim(
        e1, LedShard(stage.keys.shard_of(SEVEN), MODEL, term), count=1, tombstone_ms=10_000, lost=is_killed
    )
    assert (1, 0) == await stage.scripts.run(reclaim)

    leader = Leader(stage.mesh, MODEL, Term(term + 1), policy=Policy(), tombstone_ms=10_000, sweep=True)
    assert leader.owes_sweep
    await leader._rebuild()

    assert not leader.owes_sweep, "else each later leader would look over all records"
    assert "m" == (await stage.record(7))["st"]
    assert 1 == await stage.commands.xlen(stage.keys.sequence(SEVEN).parked)


@pytest.mark.leaves_sequences
async def test_after_a_sweep_an_owner_that_is_registered_no_more_is_lost(stage: Stage) -> None:
    """The list of executors was lost, and the leader that had seen it."""
    await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(7)
    term = await stage.term()
    await stage.commands.delete(stage.keys.executors)
    leader = Leader(stage.mesh, MODEL, Term(term + 1), policy=Policy(), tombstone_ms=10_000, sweep=True)

    await leader._rebuild()

    assert "m" == (await stage.record(7))["st"]
    assert 1 == await stage.commands.xlen(stage.keys.sequence(SEVEN).parked)


@pytest.mark.leaves_sequences
async def test_a_tenants_sequences_count_for_it_again_after_its_set_was_unreadable(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it might have as many more."""
    monkeypatch.setattr("scheduler.service.SPOILT_INTERVAL_S", 0.01)
    tenant = stage.keys.tenant(stage.keys.shard_of(SEVEN), "acme")
    await stage.join("e1")
    async with stage.scheduler() as scheduler:
        await stage.begin(7, tenant="acme")

        async def is_watched() -> bool:
            return scheduler._spoilt._seen is not None

        await stage.until(is_watched)
        await stage.commands.set(tenant, "no set")
        await stage.submit(8, start=True, tenant="acme")

        async def is_counted() -> bool:
            return await stage.commands.scard(tenant) == 2

        await stage.until(is_counted)


@pytest.mark.leaves_sequences
async def test_a_slot_that_is_asked_for_while_a_step_runs_is_given_up_when_the_step_is_done(stage: Stage) -> None:
    """However soon that is: otherwise who waits for the slot waits until it is asked for again."""
    e1 = await stage.join("e1")
    async with stage.scheduler():
        (record,) = await stage.begin(7, pageable=True)
    epoch, place = Epoch(int(record["ep"])), SlotAddress(e1, "1", InstanceIndex(0), SlotIndex(0))

    async def the_step_is_done() -> None:
        await stage.commit(await stage.inbox(e1), e1)

    async with performer(stage, after=the_step_is_done) as leader:
        outcome = await leader.perform([Vacate(SEVEN, place, epoch), WantSlots("1", 1)])

    assert [Vacated(SEVEN, epoch, freed=False)] == outcome
    assert "p" == (await stage.record(7))["st"]


@pytest.mark.leaves_sequences
async def test_a_slot_is_given_on_beside_the_drain_of_the_inbox_that_its_sequence_has_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are kept for a replay lie there, perhaps very many, of all sequences."""
    drains, drain_whole = asyncio.Event(), Scripts.drain_whole

    async def later(*of: Any, **where: Any) -> None:
        await drains.wait()
        await drain_whole(*of, **where)

    monkeypatch.setattr(Scripts, "drain_whole", later)
    e1 = await stage.join("e1", slots=1, pageable=True)
    async with stage.scheduler(spare_slots=0):
        await stage.begin(7, pageable=True)
        (step,) = await stage.inbox(e1)
        assert 1 == await stage.committed(e1, commit_of(step), idle_ms=600_000)
        await stage.begin(8, pageable=True)
        assert "p" == (await stage.record(7))["st"]
        assert step in await stage.inbox(e1)
        drains.set()
        await stage.until(lambda: is_parked(stage, SEVEN))


async def is_parked(stage: Stage, sequence: SequenceId) -> bool:
    return await stage.commands.xlen(stage.keys.sequence(sequence).parked) == 1


@pytest.mark.leaves_sequences
async def test_a_takeover_takes_all_however_many_calls_that_needs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.effects.RECLAIM_COUNT", 2)
    e1 = await stage.join("e1", slots=32)
    async with stage.scheduler():
        await stage.start_many(20)
        await stage.live(*range(1, 21))
    await stage.kill(e1)

    async with performer(stage) as leader:
        assert await take_over(leader, e1) > 2

    assert ["m"] * 20 == [(await stage.record(number))["st"] for number in range(1, 21)]
    assert [] == await stage.inbox(e1)


@pytest.mark.leaves_sequences
async def test_all_of_a_version_are_taken_though_a_call_looks_at_some_of_the_sequences(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of the calls for 100,000 sequences would keep Redis for a tenth of a second."""
    monkeypatch.setattr("scheduler.effects.RECLAIM_COUNT", 2)
    # More in each shard than a set holds in one piece, which is always looked at in one call.
    shards, count = stage.keys.shards, 200 * len(stage.keys.shards)
    e1 = await stage.join("e1", slots=count)
    async with stage.scheduler():
        await stage.start_many(count)
        await stage.live(*range(1, count + 1))
    term = await stage.term()

    led = [LedShard(shard, MODEL, Term(term)) for shard in shards]
    other = [stage.scripts.reclaim(e1, each, count=2, tombstone_ms=1000, only=("2",)) for each in led]
    for taken, goes_on in await stage.scripts.run_together(other):
        assert 0 == taken
        assert goes_on, "not all have been looked at"
    async with performer(stage) as leader:
        await leader.perform([Reclaim(e1, only=("1",))])

    assert {"m"} == {(await stage.record(number))["st"] for number in range(1, count + 1)}
    await stage.kill(e1)


@pytest.mark.leaves_sequences
async def test_what_is_wanted_once_for_each_sequence_that_was_found_is_done_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a leader that begins with tens of thousands of a version that is gone would not come to an end."""
    e1 = await stage.join("e1", slots=9)
    async with stage.scheduler():
        await stage.start_many(9)
        await stage.live(*range(1, 10))
    term = await stage.term()
    (member,) = await stage.membership.members()
    (served,) = member.registration.models
    later = msgspec.structs.replace(served, version="2")
    await stage.membership.update(msgspec.structs.replace(member.registration, models=(later,)))
    reclaimed = list[tuple[str, ...]]()
    reclaim = EffectPerformer._reclaim

    async def noted(performer: EffectPerformer, executor: ExecutorId, only: tuple[str, ...]) -> None:
        reclaimed.append((executor, *only))
        await reclaim(performer, executor, only)

    monkeypatch.setattr(EffectPerformer, "_reclaim", noted)
    await Leader(stage.mesh, MODEL, Term(term + 1), policy=Policy(), tombstone_ms=10_000)._rebuild()

    assert [(e1, "1")] == reclaimed
    assert {"m"} == {(await stage.record(number))["st"] for number in range(1, 10)}


@pytest.mark.leaves_sequences
async def test_the_first_part_of_a_takeover_has_the_sequences_that_somebody_waits_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.effects.RECLAIM_COUNT", 2)
    e1 = await stage.join("e1", slots=64)
    async with stage.scheduler():
        await idle(stage, e1, 60)
    by_shard = {stage.keys.shard_of(sequence_id(MODEL, "", number)): number for number in range(1, 61)}
    for number in by_shard.values():
        await stage.submit(number)
    await stage.kill(e1)

    async with performer(stage) as leader:
        assert [Reclaimed(e1, is_all=False)] == await leader.perform([ReclaimPart(e1)])

    states = {number: (await stage.record(number))["st"] for number in range(1, 61)}
    assert {"m"} == {states[number] for number in by_shard.values()}
    assert list(states.values()).count("l") >= 60 - 2 * len(by_shard)
    assert [] == await stage.inbox(e1)


@pytest.mark.leaves_sequences
async def test_an_inbox_is_not_read_for_a_model_of_which_its_lost_executor_owned_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the steps of all models, and each one's leader takes the executor's sequences."""
    monkeypatch.setattr("scheduler.effects.RECLAIM_COUNT", 1)
    e1 = await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(1, 2, 3)
    await stage.kill(e1)
    calls = 0

    async def count() -> None:
        nonlocal calls
        calls += 1

    async with performer(stage, before=count) as leader:
        leader._model = "other"
        await take_over(leader, e1)

    assert 2 == calls, "no sequence is taken, and there is nothing to drain"
    assert 3 == len(await stage.inbox(e1))


@pytest.mark.leaves_sequences
async def test_all_idle_sequences_end_at_one_look_however_many_calls_that_needs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.effects.SCRIPT_STEPS_MAX", 2)
    await due(stage, 20)

    async with performer(stage) as leader:
        await leader.perform([LookForExpired(1)])

    assert ["x"] * 20 == [(await stage.record(number))["st"] for number in range(1, 21)]


@pytest.mark.leaves_sequences
async def test_a_look_at_very_many_idle_sequences_leaves_some_to_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever begins meanwhile does not wait until thousands are over."""
    monkeypatch.setattr("scheduler.effects.SCRIPT_STEPS_MAX", 2)
    monkeypatch.setattr("scheduler.effects.EXPIRED_MAX", 4)
    await due(stage, 20)

    async with performer(stage) as leader:
        (looked,) = await leader.perform([LookForExpired(1)])

    states = [(await stage.record(number))["st"] for number in range(1, 21)]
    assert (4, 16) == (states.count("x"), states.count("l"))
    assert looked == Looked(1, first_ms=0), "it looks again at the next tick"

    async def all_over() -> bool:
        return all([(await stage.record(number))["st"] == "x" for number in range(1, 21)])

    async with stage.scheduler():
        await stage.until(all_over)


@pytest.mark.leaves_sequences
async def test_a_sequence_that_may_be_idle_for_ever_is_never_due(stage: Stage) -> None:
    """As the largest number of microseconds that a configuration can say is meant."""
    batching = SequenceBatching(Direct(), idle_us=(1 << 64) - 1)
    config = ModelConfig(MODEL, "python", "", 1, (), (), sequence_batching=batching)
    e1 = await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(7)
        await stage.commit(await stage.inbox(e1), e1, idle_ms=config.idle_ms)

    now_ms = await redis_now_ms(stage.redis)
    async with performer(stage) as leader:
        (looked,) = await leader.perform([LookForExpired(now_ms)])

    assert isinstance(looked, Looked)
    assert looked.first_ms is not None
    assert looked.first_ms - now_ms > IDLE_MS_MAX // 2
    left_ms = await stage.commands.pttl(stage.keys.sequence(SEVEN).idle)
    line = LineForecast("1", expiries_ms=(left_ms,))
    assert decode_forecast(encode_forecast((line,))).behind("1") is not None


@pytest.mark.leaves_sequences
async def test_a_look_ends_although_the_clock_of_redis_is_behind_its_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was set back by an hour: each sequence gets a deadline that is due again."""
    monkeypatch.setattr("scheduler.effects.SCRIPT_STEPS_MAX", 2)
    e1 = await stage.join("e1", slots=8)
    async with stage.scheduler():
        await idle(stage, e1, 5)

    async with performer(stage) as leader, asyncio.timeout(60):
        await leader.perform([LookForExpired(await redis_now_ms(stage.redis) + 3_600_000)])

    assert ["l"] * 5 == [(await stage.record(number))["st"] for number in range(1, 6)]


@pytest.mark.leaves_sequences
async def test_what_a_vanished_record_leaves_in_the_line_takes_no_slot_from_a_later_life(stage: Stage) -> None:
    """A later leader finds the later life live, before it reads the entry of the earlier one."""
    async with stage.scheduler(spare_slots=0) as scheduler:
        await stage.submit(7, start=True)
        await stage.commands.delete(*stage.keys.sequence(SEVEN))
        await stage.submit(7, start=True)
        later = (await stage.record(7))["be"]

        async def is_heard() -> bool:
            leader = scheduler.leaders.get(MODEL)
            known = leader and leader.state.sequences.get(SEVEN)
            return bool(known and str(known.entry).startswith(f"{later}@"))

        await stage.until(is_heard)
        await stage.join("e1", slots=2)
        (record,) = await stage.live(7)
    assert 1 == await stage.backlog_length()

    async def is_removed() -> bool:
        return await stage.backlog_length() == 0

    async with stage.scheduler(spare_slots=0):
        await stage.until(is_removed)
        (other,) = await stage.begin(8)

    assert record["sl"] != other["sl"]


async def test_a_forecast_is_there_for_a_while(stage: Stage) -> None:
    performer = EffectPerformer(stage.mesh, MODEL, Term(1), shards=stage.keys.shards, tombstone_ms=1000)

    await performer.perform([Publish((LineForecast("1", ("a", "b")),), "")])

    foretold = decode_forecast(await stage.commands.get(stage.keys.forecast(MODEL))).of("b")
    assert foretold is not None
    assert 2 == foretold.place
    assert 0 < await stage.commands.pttl(stage.keys.forecast(MODEL))

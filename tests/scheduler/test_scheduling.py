"""The whole scheduler on a real server: assignment, backlog, takeover, expiry. No slot leaks, no step is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from scheduler.core import decide
from scheduler.effects import EffectPerformer
from shared.contract.ids import ExecutorId, sequence_id
from shared.contract.messages import ReplyMessage, StepFlag, encode
from shared.contract.record import CANCELLED
from shared.contract.tensors import Tensor
from shared.store.connections.link import Link
from shared.store.script_sender import Call
from shared.store.script_values import CancelCode, CommitCode, Ending, LedShard, StepCommit, StepOutcome
from shared.store.waiting_line import read_lines
from tests.scheduler.stage import MODEL, Stage, step_numbers


@pytest.mark.leaves_sequences
async def test_new_sequence_gets_owner_and_slot_and_its_parked_steps_arrive_in_order(stage: Stage) -> None:
    e1 = await stage.join("e1")
    await stage.submit(7, start=True)
    await stage.submit(7)
    async with stage.scheduler():
        (record,) = await stage.live(7)

    assert ("e1", "0", "0") == (record["ow"], record["in"], record["sl"])
    steps = await stage.inbox(e1)
    assert [1, 2] == step_numbers(steps, 7)
    assert {int(record["ep"])} == {step.epoch for step in steps}
    assert await stage.backlog_length() == 0


@pytest.mark.leaves_sequences
async def test_instances_fill_evenly_and_slots_from_the_lowest(stage: Stage) -> None:
    await stage.join("e1", slots=2, instances=2)
    async with stage.scheduler():
        records = await stage.begin(1, 2, 3, 4)

    assert [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")] == sorted((r["in"], r["sl"]) for r in records)


async def test_more_sequences_than_slots_all_come_to_their_turn(stage: Stage) -> None:
    """24 sequences of one step each share 3 slots; no slot is held twice, and none is left over."""
    e1 = await stage.join("e1", slots=3)
    done = 0
    async with stage.scheduler():
        for number in range(1, 25):
            await stage.submit(number, start=True, end=True)
        async with asyncio.timeout(60):
            while done < 24:
                steps = await stage.inbox(e1)
                assert len(steps) <= 3
                assert max(Counter((s.instance, s.slot) for s in steps).values(), default=0) <= 1
                done += len([code for code in await stage.commit(steps, e1) if code == CommitCode.OVER])
                await asyncio.sleep(0.001)

        async def feed_is_read() -> bool:
            return await stage.feed_length() == 0

        await stage.until(feed_is_read)
    assert await stage.backlog_length() == 0
    await stage.membership.remove(e1)


@pytest.mark.leaves_sequences
async def test_waiting_sequence_is_refused_when_its_timeout_is_over_and_others_are_not(stage: Stage) -> None:
    await stage.open_replies()
    await stage.join("e1", slots=1)
    async with stage.scheduler():
        await stage.begin(1, timeout_us=1)
        # Together: the second step would otherwise be a stranger's, if the first one has timed out before it comes.
        await stage.submit_together(stage.submission(2, start=True, timeout_us=50_000), stage.submission(2))
        await stage.submit(3, start=True)

        async def refused() -> bool:
            return "2" in await stage.replies()

        await stage.until(refused)
        replies = await stage.replies()

    assert ("UNAVAILABLE", "timeout of the corresponding sequence has been expired") == (
        replies["2"].error_code,
        replies["2"].error,
    )
    assert {} == await stage.record(2)
    assert ["l", "w"] == [(await stage.record(number))["st"] for number in (1, 3)]


@pytest.mark.leaves_sequences
async def test_every_queued_steps_timeout_counts_in_the_backlog_also_for_a_leader_that_comes_later(
    stage: Stage,
) -> None:
    """The earliest deadline is the sequence's; all of its steps hear the same, and the next step is a stranger's."""
    await stage.open_replies()
    await stage.join("e1", slots=1)
    async with stage.scheduler():
        await stage.begin(1)
    await stage.submit(2, start=True, timeout_us=600_000_000)
    await stage.submit(2, timeout_us=20_000)
    await stage.submit(3, start=True, timeout_us=600_000_000)
    async with stage.scheduler(name="s2"):
        await stage.submit(4, start=True)
        await stage.submit(4, timeout_us=20_000)

        async def refused() -> bool:
            return {"2", "4"} <= set(await stage.replies())

        await stage.until(refused)
        for number in (2, 4):
            reply = (await stage.replies())[str(number)]
            assert ("UNAVAILABLE", "timeout of the corresponding sequence has been expired") == (
                reply.error_code,
                reply.error,
            )
            assert {} == await stage.record(number)
    assert ["l", "w"] == [(await stage.record(number))["st"] for number in (1, 3)]
    assert 1 == await stage.backlog_length(), "no news stays of those who are gone"


@pytest.mark.leaves_sequences
async def test_cancelled_waiting_sequence_leaves_the_line_and_a_cancelled_live_one_gives_its_slot_back(
    stage: Stage,
) -> None:
    e1 = await stage.join("e1", slots=1)
    async with stage.scheduler() as scheduler:
        await stage.begin(1)
        accepted = await stage.submit(2, start=True)
        await stage.submit(3, start=True)
        assert CancelCode.REMOVED is await stage.cancel(2, accepted)

        async def is_forgotten() -> bool:
            known = scheduler.leaders["sum"].state.sequences
            return await stage.feed_length() == 0 and {sequence_id("sum", "", n) for n in (1, 3)} == set(known)

        await stage.until(is_forgotten)
        (step,) = await stage.inbox(e1)
        done = StepCommit(
            step.sequence, step.epoch, step.step, step.flags, StepOutcome.CANCELLED, "", "", b"", entries=(step.entry,)
        )
        assert CommitCode.OVER == await stage.committed(e1, done, idle_ms=1)
        await stage.live(3)

    assert "c" == (await stage.record(1))["st"]
    assert {} == await stage.record(2)


@pytest.mark.leaves_sequences
async def test_dead_executors_sequences_move_with_all_their_steps_in_order(stage: Stage) -> None:
    """Steps in the dead one's inbox, steps parked while moving and steps sent later: all once, by number."""
    e1 = await stage.join("e1", slots=4)
    async with stage.scheduler() as scheduler:
        before = await stage.begin(1, 2, 3, 4)
        await stage.commit(await stage.inbox(e1), e1)
        for number in range(1, 5):
            for _ in range(5):
                await stage.submit(number)
        late = await stage.inbox(e1)
        await stage.kill(e1)

        async def moving() -> bool:
            return all([(await stage.record(number))["st"] == "m" for number in range(1, 5)])

        await stage.until(moving)
        for number in range(1, 5):
            await stage.submit(number)
        e2 = await stage.join("e2", slots=4)
        after = await stage.live(1, 2, 3, 4)
        for number in range(1, 5):
            await stage.submit(number)

        async def arrived() -> bool:
            return len(await stage.inbox(e2)) == 4 * 7

        await stage.until(arrived)
        assert {"sum"} == set(scheduler.leaders)

    assert all(int(new["ep"]) > int(old["ep"]) for old, new in zip(before, after, strict=True))
    assert {"e2"} == {record["ow"] for record in after}
    steps = await stage.inbox(e2)
    for number in range(1, 5):
        assert [2, 3, 4, 5, 6, 7, 8] == step_numbers(steps, number)
    assert [CommitCode.REFUSED] * 20 == await stage.commit(late, e1), "the old owner woke up"
    assert [CommitCode.COMMITTED] * 28 == await stage.commit(steps, e2)


@pytest.mark.leaves_sequences
async def test_leaving_executors_sequences_move_at_once_and_it_is_forgotten(stage: Stage) -> None:
    e1 = await stage.join("e1")
    async with stage.scheduler(forget_after_ms=100):
        await stage.begin(1)
        await stage.join("e2")
        await stage.leave(e1)

        async def moved_and_forgotten() -> bool:
            members = [member.registration.executor for member in await stage.membership.members()]
            return (await stage.record(1)).get("ow") == "e2" and members == ["e2"]

        await stage.until(moved_and_forgotten)
        assert [] == [key async for key in stage.commands.scan_iter(f"{stage.prefix}:*e1*")]


@pytest.mark.leaves_sequences
async def test_only_an_executor_that_dies_may_have_died_of_a_step(stage: Stage) -> None:
    """One that leaves in order takes nothing with it, however often: its step is not suspected."""
    await stage.join("e1")
    async with stage.scheduler(forget_after_ms=100):
        await stage.begin(1)
        for number, end in ((1, stage.leave), (2, stage.kill)):
            heir = await stage.join(f"e{number + 1}")
            await end(ExecutorId(f"e{number}"))

            async def moved(heir: ExecutorId = heir) -> bool:
                record = await stage.record(1)
                return (record["st"], record.get("ow")) == ("l", heir)

            await stage.until(moved)
            assert ({1: None, 2: "1 1"}[number]) == (await stage.record(1)).get("tk")
        line = (await read_lines(stage.commands, stage.keys, [MODEL]))[MODEL]
    assert {("1", "leaving"): 1, ("1", "lost"): 1} == dict(line.taken_over)


async def test_dead_registration_that_owns_nothing_is_removed(stage: Stage) -> None:
    ghost = await stage.join("ghost")
    await stage.kill(ghost)
    async with stage.scheduler(forget_after_ms=100):

        async def gone() -> bool:
            return await stage.membership.members() == []

        await stage.until(gone)


@pytest.mark.leaves_sequences
async def test_registration_stays_while_another_models_sequences_are_there(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader of one model does not remove an executor, nor its inbox, before the other's leader has taken over."""
    forgotten, really_forget = list[bool](), EffectPerformer._forget

    async def forget(performer: EffectPerformer, executor: ExecutorId) -> bool:
        forgotten.append(await really_forget(performer, executor))
        return forgotten[-1]

    monkeypatch.setattr(EffectPerformer, "_forget", forget)
    e1 = await stage.join("e1", model="other")
    await stage.publish("other")
    async with stage.scheduler(forget_after_ms=100) as scheduler:
        await stage.submit(1, start=True, model="other")

        async def assigned() -> bool:
            return (await stage.record(1, "other")).get("st") == "l"

        await stage.until(assigned)
        leading = scheduler._leading["other"]
        leading.cancel()
        await asyncio.wait([leading])
        await stage.kill(e1)

        async def has_tried() -> bool:
            return len(forgotten) > 1

        await stage.until(has_tried)
        assert not any(forgotten)
        assert [e1] == [member.registration.executor for member in await stage.membership.members()]
        assert 1 == len(await stage.inbox(e1))


@pytest.mark.leaves_sequences
async def test_state_that_only_the_dead_process_held_is_reported_as_lost(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that keeps its own state: idle sequences end as lost; steps in flight go to a new owner to be voided;
    a sequence whose START has not run yet moves like any other. The log names those that are lost."""
    e1 = await stage.join("e1", slots=3)
    async with stage.scheduler():
        await stage.begin(1, 2, durable=False)
        await stage.commit(await stage.inbox(e1), e1)
        await stage.submit(2, durable=False)
        await stage.begin(3, durable=False)
        e2 = await stage.join("e2", slots=3)
        await stage.kill(e1)

        async def moved() -> bool:
            return [(await stage.record(number)).get("ow") for number in (2, 3)] == ["e2", "e2"]

        await stage.until(moved)

        async def drained() -> bool:
            return len(await stage.inbox(e2)) == 2 and (await stage.record(1))["st"] == "o"

        await stage.until(drained)
        records = [await stage.record(number) for number in (1, 2, 3)]
        await void(stage, e2)
        void_record = await stage.record(2)

        async def named() -> bool:
            lost = [record for record in caplog.records if record.getMessage() == "sequences lost"]
            # In one line or in two: a late leader hears of both at once.
            text = ", ".join(str(vars(record)["fields"]["named"]) for record in lost)
            return sorted(text.split(", ")) == [sequence_id("sum", "", number) for number in (1, 2)]

        await stage.until(named)

    assert "o" == records[0]["st"]
    assert ("l", "1", "o") == (records[1]["st"], records[1]["vd"], records[1]["vk"])
    assert "vd" not in records[2]
    assert "o" == void_record["st"]


async def void(stage: Stage, executor: ExecutorId) -> None:
    """An executor answers the steps of sequence 2 that it cannot run."""
    for step in await stage.inbox(executor):
        if step.sequence != sequence_id("sum", "", 2):
            continue
        done = StepCommit(
            step.sequence, step.epoch, step.step, StepFlag.NONE, StepOutcome.VOID, "", "", b"", entries=(step.entry,)
        )
        assert CommitCode.OVER == await stage.committed(executor, done, idle_ms=1000)


@pytest.mark.leaves_sequences
async def test_idle_sequence_expires_without_keyspace_events_and_its_slot_goes_on(stage: Stage) -> None:
    """The owner is told to drop the state; a sequence with a step in flight never expires."""
    assert [""] == list((await stage.commands.config_get("notify-keyspace-events")).values())
    e1 = await stage.join("e1", slots=2)
    async with stage.scheduler():
        await stage.begin(1, 2)
        one, two = await stage.inbox(e1)
        await stage.commit([two], e1)
        await stage.submit(2)
        # The leader looks at it, too.
        await stage.commands.zadd(stage.keys.deadlines(stage.keys.shard_of(two.sequence), MODEL), {two.sequence: 0})
        await stage.commit([one], e1, idle_ms=300)
        (record,) = await stage.begin(3)

    assert "x" == (await stage.record(1))["st"]
    assert "l" == (await stage.record(2))["st"]
    assert "e1" == record["ow"]
    assert [sequence_id("sum", "", 1)] == await stage.told_expired(e1)


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("describe", [True, False])
async def test_a_paged_sequence_that_expires_is_described_if_its_model_asks_for_it(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, describe: bool
) -> None:
    """It has no executor that could: its state is its checkpoint. One that cannot be read holds up nobody, and no more
    than one is read at a time, as each may be large.
    """
    caplog.set_level(logging.INFO, "seqmesh")
    await stage.publish(describe=describe)
    e1 = await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(1, 2, 3, pageable=True)
        await stage.commit(await stage.inbox(e1), e1)
    state = Tensor("h", "FP32", (2,), np.array([3, 4], np.float32).tobytes())
    for number, paged, data in ((1, True, encode(state)), (2, True, b"torn"), (3, False, encode(state))):
        sequence = sequence_id("sum", "", number)
        await stage.commands.hset(stage.keys.sequence(sequence).checkpoint, "s:h", data)
        if paged:
            await stage.page(number)
        await stage.end_idle_time(number)

    read: list[str] = []
    hgetall = stage.mesh.redis.hgetall

    async def noted(key: str) -> dict[bytes, bytes]:
        read.append(key)
        return await hgetall(key)

    monkeypatch.setattr(stage.mesh.redis, "hgetall", noted)
    async with stage.scheduler(name="s2"):

        async def all_are_over() -> bool:
            return ["x"] * 3 == [(await stage.record(number)).get("st") for number in (1, 2, 3)]

        await stage.until(all_are_over)
        await told_expired(stage, caplog, 3)

    lines = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "sequence expired"]
    said = {line["sequence"]: (line.get("last_step"), line.get("state")) for line in lines}
    one, torn, held = (sequence_id("sum", "", number) for number in (1, 2, 3))
    assert ((1, "h FP32 [2] mean 3.5 norm 5") if describe else (None, None)) == said[one]
    assert (None, None) == said[torn]
    assert (None, None) == said[held], "its executor says it"
    own = [stage.keys.sequence(sequence).checkpoint for sequence in (one, torn)]
    assert (own if describe else []) == sorted(key for key in read if "}:checkpoint:" in key)


async def told_expired(stage: Stage, caplog: pytest.LogCaptureFixture, count: int) -> None:
    """Waits until the log says of so many sequences that they expired: it does when the leader has heard of it."""

    async def is_told() -> bool:
        return caplog.messages.count("sequence expired") >= count

    await stage.until(is_told)


@pytest.mark.leaves_sequences
async def test_idle_sequence_whose_owner_died_expires_while_nobody_serves_its_model(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader drops it from its line: the next executor's only slot goes to somebody else."""
    # Where nobody says how long a sequence may be idle, this is the pause until the leader looks.
    monkeypatch.setattr(decide, "LOOK_MS_MAX", 200)
    e1 = await stage.join("e1")

    async def is_in_state(state: str) -> bool:
        return (await stage.record(1)).get("st") == state

    async with stage.scheduler() as scheduler:
        await stage.begin(1)
        await stage.commit(await stage.inbox(e1), e1)
        await stage.kill(e1)
        await stage.until(lambda: is_in_state("m"))
        await stage.end_idle_time(1)
        await stage.until(lambda: is_in_state("x"))

        async def is_out_of_line() -> bool:
            return not await stage.backlog_length() and not await stage.feed_length()

        await stage.until(is_out_of_line)
        (leader,) = scheduler.leaders.values()
        assert {} == leader.state.sequences
        await stage.join("e2", slots=1)
        (record,) = await stage.begin(2)

    assert "e2" == record["ow"]
    assert await is_in_state("x")


@pytest.mark.leaves_sequences
async def test_the_log_says_of_a_sequence_that_expired_that_it_did_and_of_no_ended_one(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "seqmesh")
    e1 = await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(1, 2)
        await stage.commit(await stage.inbox(e1), e1, idle_ms=600_000)
        ending = Ending(sequence_id(MODEL, "", 1), "")
        await stage.scripts.run(stage.scripts.end([ending], tombstone=CANCELLED, reply=b""))
        await stage.end_idle_time(2)

        async def are_over() -> bool:
            return ["c", "x"] == [(await stage.record(number))["st"] for number in (1, 2)]

        await stage.until(are_over)
        await told_expired(stage, caplog, 1)

    told = [vars(record)["fields"]["sequence"] for record in caplog.records if record.message == "sequence expired"]
    assert [sequence_id(MODEL, "", 2)] == told


@pytest.mark.leaves_sequences
async def test_a_sequence_that_is_ended_between_two_owners_leaves_the_line(stage: Stage) -> None:
    """Else whoever is behind it would hear of a longer line, until a slot is free."""
    e1 = await stage.join("e1", slots=1)
    async with stage.scheduler() as scheduler:
        await stage.begin(1)
        await stage.commit(await stage.inbox(e1), e1)
        await stage.join("e2", slots=1)
        await stage.begin(2)
        await stage.kill(e1)
        line = scheduler.leaders[MODEL].state.backlogs["1"]

        async def waits() -> bool:
            return len(line) == 1

        await stage.until(waits)
        ending = Ending(sequence_id(MODEL, "", 1), "")
        await stage.scripts.run(stage.scripts.end([ending], tombstone=CANCELLED, reply=b""))

        async def is_gone() -> bool:
            return len(line) == 0

        await stage.until(is_gone)


@pytest.mark.leaves_sequences
async def test_entries_that_an_expired_sequence_left_behind_do_not_reach_its_successor(stage: Stage) -> None:
    """With a checkpoint interval > 1 committed steps stay in the inbox. If the sequence expires, its owner dies and the
    id starts anew, they belong to nobody."""
    e1 = await stage.join("e1", slots=2)
    # Where the executor's end is known before the id starts anew, it owned nothing, and what it leaves goes with it.
    async with stage.scheduler(forget_after_ms=0):
        await stage.submit(1, start=True)
        await stage.submit(1)
        await stage.live(1)
        for step in await stage.inbox(e1):
            done = StepCommit(step.sequence, step.epoch, step.step, step.flags, StepOutcome.DONE, "", "", b"")
            assert CommitCode.COMMITTED == await stage.committed(e1, done, idle_ms=1)

        async def expired() -> bool:
            return (await stage.record(1)).get("st") == "x"

        await stage.until(expired)
        assert [1, 2] == step_numbers(await stage.inbox(e1), 1)
        await stage.kill(e1)
        await stage.submit(1, start=True)
        e2 = await stage.join("e2")

        async def moved_and_drained() -> bool:
            return (await stage.record(1)).get("ow") == "e2" and [] == await stage.inbox(e1)

        await stage.until(moved_and_drained)
        assert [1] == step_numbers(await stage.inbox(e2), 1)


async def test_reply_to_a_refused_sequence_is_an_error_for_every_step(stage: Stage) -> None:
    """Parked steps are answered one by one, and nothing of the sequence stays."""
    await stage.open_replies()
    await stage.submit("a", start=True, timeout_us=20_000)
    await stage.submit("a")
    async with stage.scheduler():

        async def answered() -> bool:
            return "a" in await stage.replies()

        await stage.until(answered)
    shard = stage.keys.shard_of(sequence_id("sum", "", "a"))
    answers = await stage.commands.xrange(stage.keys.replies(shard, stage.gateway))

    assert 2 == len([fields for _, fields in answers if b"a" in fields])
    assert (
        ReplyMessage("1", error_code="UNAVAILABLE", error="timeout of the corresponding sequence has been expired")
        == (await stage.replies())["a"]
    )
    assert {} == await stage.record("a")


@pytest.mark.leaves_sequences
async def test_sequences_have_new_owners_while_others_are_still_being_taken(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all of a lost executor's sequences would wait until the last one of them is taken."""
    monkeypatch.setattr("scheduler.effects.RECLAIM_COUNT", 1)
    called: list[str] = []
    run_all = stage.mesh.scripts.run_all

    async def noted(calls: Sequence[Call[Any]], link: Link | None = None) -> list[Any]:
        called.extend(call.script for call in calls)
        return await run_all(calls, link)

    monkeypatch.setattr(stage.mesh.scripts, "run_all", noted)
    e1 = await stage.join("e1", slots=120)
    async with stage.scheduler():
        await stage.start_many(120)
        await stage.live(*range(1, 121))
        e2 = await stage.join("e2", slots=120)
        called.clear()
        await stage.kill(e1)

        async def all_at_e2() -> bool:
            return len(await stage.inbox(e2)) == 120

        await stage.until(all_at_e2)

    last = max(index for index, script in enumerate(called) if script == "reclaim")
    assert "assign" in called[called.index("reclaim") : last]


@pytest.mark.leaves_sequences
async def test_steps_that_a_dead_leader_did_not_move_on_are_moved_by_the_next(stage: Stage) -> None:
    """It died between taking the sequences of a living executor and moving their steps. They come back to the same
    executor under a new epoch; what it is to be told of other sequences stays in its inbox."""
    e1 = await stage.join("e1")
    question = sequence_id("sum", "", 1)
    shard = stage.keys.shard_of(question)
    async with stage.scheduler():
        await stage.submit(1, start=True)
        await stage.submit(1)
        await stage.live(1)
    await stage.commands.xadd(stage.keys.inbox(shard, e1), {"k": "expired", "q": "gone", "e": "1"})
    term = await stage.term()
    call = stage.scripts.reclaim(e1, LedShard(shard, "sum", term), count=10, tombstone_ms=1000)
    assert (1, 0) == await stage.scripts.run(call)
    async with stage.scheduler():
        (record,) = await stage.live(1)

        async def all_of_the_new_epoch() -> bool:
            return [int(record["ep"])] * 2 == [step.epoch for step in await stage.inbox(e1)]

        await stage.until(all_of_the_new_epoch)

    assert [1, 2] == step_numbers(await stage.inbox(e1), 1)
    assert ["gone"] == await stage.told_expired(e1)

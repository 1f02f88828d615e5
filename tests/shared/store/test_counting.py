"""An answered request counts exactly once, on the real scripts: repeated calls, refused owners, parts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from shared.contract.ids import Epoch, ExecutorId, ShardId, Term
from shared.contract.messages import InboxStep, ReplyMessage, StepFlag, encode
from shared.statistics.tally import COUNT_MAX, ModelLoad, Timings, execution, packed, statistics_of, success
from shared.store import totals
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.script_values import (
    COUNTS_TTL_MS,
    TOTAL_MAX,
    CancelCode,
    Cancellation,
    CommitCode,
    LedShard,
    Rejection,
)
from shared.store.totals import Tallies
from shared.store.waiting_line import read_lines
from tests.scripted_mesh import ScriptedMesh, commit_of

ALICE, BOB = ExecutorId("alice-1"), ExecutorId("bob-1")
ONE = {"INPUT": np.ones((1, 1), np.int32)}
TIMES = Timings(1, 2, 3)
STEP = packed(success(rows=1, total_ns=100, queue_ns=10, compute=TIMES))
LOAD = ModelLoad("sum", "1", "0")
SHARD = ShardId(0)

pytestmark = pytest.mark.leaves_sequences


async def delivered(mesh: ScriptedMesh, *sequences: int) -> list[InboxStep]:
    """The first steps of sequences that alice owns."""
    for number in sequences:
        await mesh.submit(mesh.submission(number, ONE, StepFlag.START))
        await mesh.assign(number, ALICE, slot=number)
    return await mesh.steps(ALICE)


async def commit(mesh: ScriptedMesh, steps: Sequence[InboxStep], *, epochs: Sequence[int] = ()) -> list[CommitCode]:
    """One batch of these steps and a null row. epochs: what the owner believes, when that is not the truth."""
    final = [
        commit_of(
            msgspec.structs.replace(step, epoch=Epoch(epochs[place])) if epochs else step,
            entries=[step.entry],
            counts=STEP,
            execution=packed(execution(batch_size=len(steps) + 1, compute=TIMES, ended_ms=5)) if place == 0 else b"",
        )
        for place, step in enumerate(steps)
    ]
    return await mesh.committed(ALICE, *final, load=LOAD)


async def counted(mesh: ScriptedMesh) -> tuple[int, int]:
    """Requests answered, executions."""
    read = statistics_of("sum", "1", (await Tallies(mesh.scripts, mesh.keys).read([LOAD]))[LOAD])
    assert read.inference_count == read.durations["success"].count
    return read.inference_count, read.execution_count


async def test_a_commit_that_is_sent_twice_counts_once(mesh: ScriptedMesh) -> None:
    steps = await delivered(mesh, 1, 2)

    assert [CommitCode.COMMITTED] * 2 == await commit(mesh, steps)
    assert [CommitCode.BEFORE] * 2 == await commit(mesh, steps)
    assert (2, 1) == await counted(mesh)


async def test_an_owner_that_is_no_owner_any_more_counts_nothing(mesh: ScriptedMesh) -> None:
    steps = await delivered(mesh, 1, 2)
    await mesh.take_over(ALICE)

    assert [CommitCode.REFUSED] * 2 == await commit(mesh, steps)
    assert (0, 0) == await counted(mesh)


async def test_of_a_batch_of_which_some_steps_are_refused_the_others_and_its_execution_count(
    mesh: ScriptedMesh,
) -> None:
    """The refused step is the first, with which the counts of the execution travel."""
    steps = await delivered(mesh, 1, 2)

    codes = await commit(mesh, steps, epochs=[steps[0].epoch + 9, steps[1].epoch])

    assert [CommitCode.REFUSED, CommitCode.COMMITTED] == codes
    assert (1, 1) == await counted(mesh)


@pytest.mark.parametrize(
    "flags", [StepFlag.START, StepFlag.START | StepFlag.END, StepFlag.START | StepFlag.END | StepFlag.ALONE]
)
async def test_of_a_group_that_is_made_final_in_two_parts_the_execution_counts_once(
    mesh: ScriptedMesh, flags: StepFlag
) -> None:
    """The call before it was not carried out, as a server that has just been restarted does not know the script: so one
    of its steps comes too early. What became of the others is seen by the call that repeats it: they are answered, or
    over, or nothing is left of them."""
    await mesh.submit(mesh.submission(1, ONE, flags))
    await mesh.assign(1, ALICE, slot=1)
    await mesh.submit(mesh.submission(2, ONE, StepFlag.START))
    await mesh.submit(mesh.submission(2, ONE))
    await mesh.assign(2, ALICE, slot=2)
    only, first, second = await delivered(mesh)
    is_over = StepFlag.END in flags

    expected = CommitCode.OVER if is_over else CommitCode.COMMITTED
    assert [expected, CommitCode.OUT_OF_ORDER] == await commit(mesh, [only, second])
    assert (1, 1) == await counted(mesh)
    assert [CommitCode.COMMITTED] == await commit(mesh, [first])
    assert (2, 2) == await counted(mesh)

    expected = CommitCode.REFUSED if is_over else CommitCode.BEFORE
    assert [expected, CommitCode.COMMITTED] == await commit(mesh, [only, second])
    assert (3, 2) == await counted(mesh)
    assert [expected, CommitCode.BEFORE] == await commit(mesh, [only, second])
    assert (3, 2) == await counted(mesh)
    assert {} == +(await read_lines(mesh.redis, mesh.keys, ["sum"]))["sum"].refused, "nobody else owns them"


async def test_a_group_that_paged_its_sequence_counts_once(mesh: ScriptedMesh) -> None:
    await mesh.submit(mesh.submission(1, ONE, StepFlag.START | StepFlag.PAGEABLE))
    await mesh.assign(1, ALICE, slot=1)
    steps = await delivered(mesh)
    await mesh.redis.set(mesh.keys.wanted_slots(SHARD, "sum", "1"), 1, px=60_000)

    assert [CommitCode.PAGED] * 2 == [(await commit(mesh, steps))[0] for _ in range(2)]
    assert (1, 1) == await counted(mesh)


async def refusals(mesh: ScriptedMesh) -> tuple[int, dict[str, int]]:
    read = statistics_of("sum", "1", (await Tallies(mesh.scripts, mesh.keys).read([LOAD]))[LOAD])
    return read.durations["fail"].count, {reason: count for reason, count in read.failures.items() if count}


async def test_every_step_of_a_sequence_that_waited_too_long_is_rejected_once(mesh: ScriptedMesh) -> None:
    for flags in (StepFlag.START, StepFlag.NONE, StepFlag.END):
        await mesh.submit(mesh.submission(1, ONE, flags))
    entry = (await mesh.record(1))["be"]
    call = mesh.scripts.reject(
        [Rejection(mesh.sequence(1), entry, encode(ReplyMessage("1")))],
        LedShard(SHARD, "sum", Term(1)),
        tombstone_ms=60_000,
    )

    assert [3] == await mesh.scripts.run(call)
    assert [-1] == await mesh.scripts.run(call)
    assert (3, {"REJECTED": 3}) == await refusals(mesh)


async def test_every_step_of_a_waiting_sequence_is_cancelled_once(mesh: ScriptedMesh) -> None:
    first = mesh.submission(1, ONE, StepFlag.START)
    submitted = await mesh.submit(first)
    await mesh.submit(mesh.submission(1, ONE))
    gone = Cancellation(first.sequence, submitted.birth, submitted.step, first.gateway, first.token)
    call = mesh.scripts.cancel([gone], reply=encode(ReplyMessage("1")))

    assert [CancelCode.REMOVED] == await mesh.scripts.run(call)
    await mesh.scripts.run(call)
    assert (2, {"CANCELED": 2}) == await refusals(mesh)


async def test_counts_are_added_up_once_by_however_many(mesh: ScriptedMesh) -> None:
    await commit(mesh, await delivered(mesh, 1, 2, 3))

    assert (3, 1) == await counted(mesh)
    await Tallies(mesh.scripts, mesh.keys).add_up([LOAD])
    assert (3, 1) == await counted(mesh)


async def test_more_counts_than_one_call_takes_are_all_added_up(mesh: ScriptedMesh) -> None:
    tally = mesh.keys.tally(SHARD, "sum", "1", "0")
    for _ in range(3):
        await mesh.redis.rpush(tally, *[STEP] * TOTAL_MAX)
    await mesh.redis.pexpire(tally, 60_000)

    assert (3 * TOTAL_MAX, 0) == await counted(mesh)


async def test_sums_beyond_the_precision_of_a_double_stay_exact(mesh: ScriptedMesh) -> None:
    """A script calculates in doubles; a year of 100 requests in flight is more nanoseconds than these can hold."""
    place = (SHARD, "sum", "1", "0")
    await mesh.redis.hset(mesh.keys.counts(*place), "success_ns", 2**60 + 1)
    await commit(mesh, await delivered(mesh, 1))

    assert 2**60 + 101 == (await Tallies(mesh.scripts, mesh.keys).read([LOAD]))[LOAD]["success_ns"]


async def test_tallies_and_counts_have_a_time_to_live(mesh: ScriptedMesh) -> None:
    await commit(mesh, await delivered(mesh, 1))
    place = (SHARD, "sum", "1", "0")
    redis = mesh.redis

    assert 0 < await redis.pttl(mesh.keys.tally(*place)) <= COUNTS_TTL_MS
    await Tallies(mesh.scripts, mesh.keys).add_up([LOAD])
    assert 0 == await redis.exists(mesh.keys.tally(*place))
    assert 0 < await redis.pttl(mesh.keys.counts(*place)) <= COUNTS_TTL_MS


async def test_counts_to_which_nothing_is_added_are_renewed_now_and_then(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await commit(mesh, await delivered(mesh, 1))
    counts, tallies = mesh.keys.counts(SHARD, "sum", "1", "0"), Tallies(mesh.scripts, mesh.keys)
    await tallies.add_up([LOAD])
    await mesh.redis.pexpire(counts, 5_000)

    await tallies.add_up([LOAD])
    await tallies.read([LOAD])
    assert await mesh.redis.pttl(counts) <= 5_000
    monkeypatch.setattr(totals, "RENEWAL_S", 0)
    await tallies.add_up([LOAD])
    assert 5_000 < await mesh.redis.pttl(counts)


async def test_many_models_without_requests_are_one_command_for_redis(mesh: ScriptedMesh) -> None:
    async def commands() -> int:
        statistics = await mesh.redis.info("commandstats")
        return sum(statistics.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("lrange", "pexpire"))

    tallies = Tallies(mesh.scripts, mesh.keys)
    loads = [ModelLoad(f"m{number}", "1", "0") for number in range(200)]
    await tallies.add_up(loads)
    before = await commands()
    await tallies.add_up(loads)

    assert before == await commands()


async def test_another_load_of_the_model_begins_at_zero(mesh: ScriptedMesh) -> None:
    await commit(mesh, await delivered(mesh, 1))
    reloaded = ModelLoad("sum", "1", "5-0")

    sums = await Tallies(mesh.scripts, mesh.keys).read([LOAD, reloaded])
    assert (1, {}) == (sums[LOAD]["success_count"], sums[reloaded])


async def test_steps_wait_until_their_sequence_has_a_slot(mesh: ScriptedMesh) -> None:
    for number, flags in ((1, StepFlag.START), (1, StepFlag.NONE), (2, StepFlag.START)):
        await mesh.submit(mesh.submission(number, ONE, flags))

    async def steps() -> dict[str, int]:
        lines = await read_lines(mesh.redis, mesh.keys, ["sum", "unknown"])
        assert {} == +lines["unknown"].steps
        return dict(+lines["sum"].steps)

    assert {"1": 3} == await steps()
    await mesh.assign(1, ALICE)
    assert {"1": 1} == await steps()
    await mesh.assign(2, ALICE, slot=1)
    assert {} == await steps()
    await mesh.take_over(ALICE)
    assert {"1": 3} == await steps()


async def test_shards_are_added_up(redis: Redis, key_prefix: str) -> None:
    keys = Keyspace(key_prefix, 3)
    mesh = ScriptedMesh(redis, keys, "sum")
    for shard in keys.shards:
        await cast(Any, redis).rpush(keys.tally(shard, "sum", "1", "0"), STEP)

    assert (3, 0) == await counted(mesh)


async def test_a_field_that_nothing_has_counted_is_left_out_and_the_others_are_read(mesh: ScriptedMesh) -> None:
    counts = mesh.keys.counts(SHARD, "sum", "1", "0")
    odd = (
        "batch:x:count",
        "batch:08:count",
        "batch::count",
        "response:x:success_count",
        "sketch:request:x",
        "sketch:a",
    )
    await mesh.redis.hset(counts, mapping=dict.fromkeys(odd, 1))
    await mesh.redis.hset(counts, mapping={"success_count": 7, "queue_ns": 10**30, "fail_count": -1, "fail_ns": "x"})
    await mesh.redis.hset(counts, mapping={"batch:8:count": 2, "sketch:request:3": 4, "of_a_newer_release": 5})

    await mesh.redis.pexpire(counts, COUNTS_TTL_MS)

    (sums,) = (await Tallies(mesh.scripts, mesh.keys).read([LOAD])).values()

    assert {"success_count": 7, "batch:8:count": 2, "sketch:request:3": 4, "of_a_newer_release": 5} == sums
    assert 2 == statistics_of("sum", "1", sums).execution_count


async def test_sums_of_all_shards_are_no_larger_than_what_is_told_of_them(redis: Redis, key_prefix: str) -> None:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 3), "sum")
    await mesh.open()
    for shard in mesh.keys.shards:
        await redis.hset(mesh.keys.counts(shard, "sum", "1", "0"), "success_ns", COUNT_MAX)
        await redis.pexpire(mesh.keys.counts(shard, "sum", "1", "0"), COUNTS_TTL_MS)

    assert {LOAD: {"success_ns": COUNT_MAX}} == await Tallies(mesh.scripts, mesh.keys).read([LOAD])

"""What is counted once per sequence by the scripts that decide it, and what processes hand on, on a real server."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from shared.contract.ids import ExecutorId
from shared.contract.messages import ReplyMessage, StepFlag, encode
from shared.statistics.meter import (
    OF_MESH,
    SLOT_WAIT,
    SLOT_WAIT_BOUNDS_S,
    SLOT_WAITS,
    TIME_BOUNDS_S,
    LoadMeter,
    Phase,
    RoundTripMeter,
    histogram_of,
)
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.connections.cluster_redis import ClusterRedis
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.keyspace import Keyspace
from shared.store.libraries import LUA
from shared.store.metering import Metering
from shared.store.script_values import CommitCode, LedShard, Rejection, StepOutcome
from shared.store.scripts import Scripts
from shared.store.totals import Tallies
from shared.store.waiting_line import ENDS, read_lines
from tests.embedded_redis import EmbeddedRedis
from tests.scripted_mesh import ScriptedMesh, commit_of

ALICE, BOB = ExecutorId("alice-1"), ExecutorId("bob-1")
ONE = {"INPUT": np.ones((1, 1), np.int32)}
LOAD = ModelLoad("sum", "1", "0")
START, END = StepFlag.START, StepFlag.END

pytestmark = pytest.mark.leaves_sequences


async def ended(mesh: ScriptedMesh, number: int, outcome: StepOutcome = StepOutcome.DONE) -> CommitCode:
    """Commits the newest step of a sequence that alice owns."""
    (*_, step) = await mesh.steps(ALICE, number)
    (code,) = await mesh.committed(ALICE, commit_of(step, outcome=outcome), load=LOAD)
    return code


async def test_sequences_are_counted_when_they_begin_and_when_they_are_over(mesh: ScriptedMesh) -> None:
    async def counted() -> tuple[int, dict[str, int]]:
        line = (await read_lines(mesh.redis, mesh.keys, ["sum"]))["sum"]
        return line.begun["1"], {reason: line.over["1", reason] for reason in ENDS.values() if line.over["1", reason]}

    for number, flags in ((1, START | END), (2, START), (3, START), (4, START)):
        await mesh.submit(mesh.submission(number, ONE, flags))
    assert (4, {}) == await counted()

    for number in (1, 2):
        await mesh.assign(number, ALICE, slot=number)
    assert CommitCode.OVER is await ended(mesh, 1)
    # A call that is sent again ends nothing a second time.
    assert CommitCode.REFUSED is await ended(mesh, 1)
    assert CommitCode.OVER is await ended(mesh, 2, StepOutcome.FAILED)
    assert (4, {"end": 1, "failed": 1}) == await counted()

    # The same id once more is another sequence.
    await mesh.submit(mesh.submission(1, ONE, START))
    assert 5 == (await counted())[0]


async def test_whatever_a_sequence_dies_of_is_counted_as_the_reason_that_its_caller_hears(mesh: ScriptedMesh) -> None:
    async def over() -> dict[str, int]:
        line = (await read_lines(mesh.redis, mesh.keys, ["sum"]))["sum"]
        return {reason: line.over["1", reason] for reason in ENDS.values() if line.over["1", reason]}

    # Its state was only its owner's, and no step of it is open: it dies with the owner.
    await mesh.submit(msgspec.structs.replace(mesh.submission(1, ONE), flags=START))
    await mesh.assign(1, ALICE)
    assert CommitCode.COMMITTED is await ended(mesh, 1)
    await mesh.take_over(ALICE, lost=True)
    assert {"lost": 1} == await over()

    # One with an open step dies when a START or nothing comes behind the step that is answered with the loss.
    await mesh.submit(msgspec.structs.replace(mesh.submission(2, ONE), flags=START))
    await mesh.assign(2, ALICE, slot=1)
    assert CommitCode.COMMITTED is await ended(mesh, 2)
    await mesh.submit(msgspec.structs.replace(mesh.submission(2, ONE), flags=StepFlag.NONE))
    await mesh.take_over(ALICE, lost=True)
    await mesh.assign(2, ALICE, slot=2)
    assert CommitCode.OVER is await ended(mesh, 2, StepOutcome.LOST)
    assert {"lost": 2} == await over()

    # Its client has left before it had a slot.
    left = mesh.submission(3, ONE, START)
    await mesh.cancel(left, await mesh.submit(left))
    assert {"lost": 2, "cancelled": 1} == await over()

    # It waited too long for its first slot.
    await mesh.submit(mesh.submission(4, ONE, START))
    entry = (await mesh.record(4))["be"]
    shard, late = mesh.keys.shard_of(mesh.sequence(4)), encode(ReplyMessage("1"))
    rejection = Rejection(mesh.sequence(4), entry, late)
    await mesh.scripts.run(mesh.scripts.reject([rejection], LedShard(shard, "sum", mesh.term), tombstone_ms=60_000))
    assert {"lost": 2, "cancelled": 1, "rejected": 1} == await over()

    # It was idle for too long.
    await mesh.submit(mesh.submission(5, ONE, START))
    await mesh.assign(5, ALICE, slot=3)
    assert CommitCode.COMMITTED is await ended(mesh, 5)
    sequence = mesh.sequence(5)
    await mesh.redis.delete(mesh.keys.sequence(sequence).idle)
    expired = mesh.scripts.expire([sequence], LedShard(shard, "sum", mesh.term), tombstone_ms=10_000)
    await mesh.scripts.run(expired)
    assert {"lost": 2, "cancelled": 1, "rejected": 1, "expired": 1} == await over()


async def test_waits_for_a_slot_are_measured_by_what_the_sequence_waited_as(mesh: ScriptedMesh) -> None:
    async def waits() -> dict[str, int]:
        counts = (await Tallies(mesh.scripts, mesh.keys).read([LOAD]))[LOAD]
        found = {cause: histogram_of(counts, f"{SLOT_WAIT}{cause}", SLOT_WAIT_BOUNDS_S) for cause in SLOT_WAITS}
        assert sum(each.total for each in found.values()) < 60_000
        return {cause: sum(each.buckets) for cause, each in found.items()}

    await mesh.submit(mesh.submission(7, ONE, START | StepFlag.DURABLE))
    await mesh.assign(7, ALICE)
    assert {"start": 1, "takeover": 0, "page": 0} == await waits()

    await mesh.take_over(ALICE, lost=True)
    await mesh.assign(7, BOB)
    # Once more, after it has its slot: nothing waits under that entry.
    await mesh.assign(7, ALICE)
    assert {"start": 1, "takeover": 1, "page": 0} == await waits()


def test_the_script_and_the_metric_have_the_same_bounds_of_waits() -> None:
    bounds = ", ".join(f"{round(bound * 1000)}" for bound in SLOT_WAIT_BOUNDS_S)

    assert f"local WAIT_BOUNDS = {{ {bounds} }}" in (LUA / "tally.lua").read_text()


async def test_measurements_of_several_processes_add_up(redis: Redis, key_prefix: str) -> None:
    keys = Keyspace(key_prefix, 1)
    for rows in (1, 2):
        meter, trips = LoadMeter(), RoundTripMeter("executor")
        scripts = Scripts(redis, keys, trips=trips)
        meter.phase(Phase.COMPUTE).add(5, times=rows)
        metering = Metering(scripts, keys, lambda meter=meter, trips=trips: [(LOAD, meter), (OF_MESH, trips.meter)])
        await metering.flush()
        await metering.flush()

    sums = await Tallies(Scripts(redis, keys), keys).read([LOAD, OF_MESH])

    assert {"phase_compute:0": 3, "phase_compute:sum": 15} == sums[LOAD]
    # The round trip of each flush is measured, and goes with the next one.
    assert 2 <= sum(histogram_of(sums[OF_MESH], "round_trip/executor/count", TIME_BOUNDS_S).buckets)


async def test_what_redis_refuses_is_handed_on_later(private_server: EmbeddedRedis) -> None:
    redis = connect(private_server.url, retries=0)
    untyped, keys, meter = cast("Any", redis), Keyspace(), LoadMeter()
    scripts = Scripts(redis, keys)
    metering = Metering(scripts, keys, lambda: [(LOAD, meter)])
    meter.counts["some"] += 3
    await untyped.config_set("min-replicas-to-write", 1)

    with pytest.raises(CONNECTION_LOST):
        await metering.flush()
    await untyped.config_set("min-replicas-to-write", 0)
    meter.counts["some"] += 1
    await asyncio.gather(metering.flush(), metering.flush())

    assert {"some": 4} == (await Tallies(scripts, keys).read([LOAD]))[LOAD]
    await redis.aclose()


async def test_what_one_home_of_a_cluster_has_counted_is_not_counted_again_because_another_is_away(
    redis: Redis, redis_url: str, key_prefix: str
) -> None:
    keys = Keyspace(key_prefix, 2)
    here, away = (next(f"m{n}" for n in range(99) if keys.home_shard(f"m{n}") == shard) for shard in keys.shards)
    meters = [(ModelLoad(model, "1", "0"), LoadMeter()) for model in (here, away)]
    loads = [load for load, _ in meters]
    tallies = Tallies(Scripts(redis, keys), keys)
    # The server knows the scripts.
    await tallies.read(loads)

    def open_home(tag: str) -> Any:
        return connect("redis://127.0.0.1:1" if tag == "1" else redis_url, retries=0)

    async with ClusterRedis(open_home) as cluster:
        cluster.know(keys.bases())
        metering = Metering(Scripts(cast("Any", cluster), keys), keys, lambda: meters)
        for _, meter in meters:
            meter.counts["steps"] = 1
        for _ in range(3):
            with pytest.raises(CONNECTION_LOST):
                await metering.flush()

    sums = await tallies.read(loads)

    assert [{"steps": 1}, {}] == [sums[load] for load in loads]
    assert [{}, {"steps": 1}] == [meter.take() for _, meter in meters]

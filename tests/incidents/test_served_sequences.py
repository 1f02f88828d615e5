"""Incidents between clients and a server that runs: batches, slots, states and streams. One mesh for all of them."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpc_aio
from redis import RedisCluster

from shared.contract.ids import sequence_id
from tests.incidents.conftest import BRIEF_US
from tests.mesh.raw_http import get
from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.traffic import Callers, GrpcCaller, Step, StreamCaller, Traffic, make_plans

PLACE = ("st", "ow", "in", "sl")
CLEAN = 6
"""Sequences of numbers among those of NaN."""


def counts(mesh: RunningMesh, model: str) -> tuple[int, int]:
    """Inferences and executions so far."""
    (stats,) = get(mesh.http(), f"/v2/models/{model}/stats").document["model_stats"]
    return stats["inference_count"], stats["execution_count"]


async def test_triton_4841_batches_do_not_decay_under_load(mesh: RunningMesh, chance: random.Random) -> None:
    """There (triton-inference-server/server#4841), under many clients, the oldest strategy stopped to queue and went on
    with ever smaller batches. Here the batches of the last of three rounds are about as large as those of the first."""
    sizes: list[float] = []
    async with Callers(mesh) as callers:
        for _ in range(3):
            before = counts(mesh, "crowded_sum")
            plans = make_plans(chance, 64, shortest=4, longest=6)
            traffic = Traffic("crowded_sum", callers, plans, chance, pause_s=0.0)
            await traffic.run()
            expected = before[0] + traffic.total

            def are_counted(expected: int = expected) -> bool:
                return counts(mesh, "crowded_sum")[0] >= expected

            await eventually(are_counted, "statistics follow")
            inferences, executions = counts(mesh, "crowded_sum")
            sizes.append((inferences - before[0]) / (executions - before[1]))

    assert sizes[2] >= sizes[0] / 2, sizes
    assert sizes[2] >= 3, sizes


async def test_triton_7117_no_two_sequences_share_a_slot_and_no_nan_leaks(
    mesh: RunningMesh, chance: random.Random
) -> None:
    """There (triton-inference-server/server#7117) a slot was given back twice, by a cancellation and by the reaper: two
    sequences then had it, and the NaN of one came out of the other. Here callers of NaN leave in the middle or fall
    silent with every slot taken, and sequences of numbers among them are right."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(poison(mesh, f"poison {number}", random.Random(chance.random()), over))
        watching = group.create_task(slots_seen(mesh, "nan_sum", over))
        for number in range(CLEAN):
            await play_clean(mesh, f"clean {number}")
        over.set()

    assert watching.result() > 0
    await eventually(lambda: mesh.slots_held("nan_sum") == 0, "every slot is free again")


async def poison(mesh: RunningMesh, name: str, chance: random.Random, over: asyncio.Event) -> None:
    """Begins sequences of NaN, and ends none of them: its caller leaves, or says no more."""
    client: Any = grpc_aio.InferenceServerClient(mesh.grpc())
    number = 0
    while not over.is_set():
        number += 1
        step = {"sequence_id": f"{name}/{number}", "sequence_start": True}
        begun = asyncio.ensure_future(client.infer("nan_sum", [float_tensor(math.nan)], **step))
        await asyncio.wait([begun], timeout=chance.choice([0.03, 2 * BRIEF_US / 1e6]))
        if not begun.done():
            begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
    await client.close()


async def play_clean(mesh: RunningMesh, name: str) -> None:
    """A whole sequence of numbers, each of whose answers is right. It is sent at once; where its steps come so slowly
    that it is idle between them, it expires as the others do, and is begun again."""
    right, sums = [1.0, 3.0, 6.0], list[float]()
    while sums != right:
        sums = await clean_sums(mesh, name)
        assert right[: len(sums)] == sums


async def clean_sums(mesh: RunningMesh, name: str) -> list[float]:
    """The answers to it, up to its end or to where it has expired."""
    client: Any = grpc_aio.InferenceServerClient(mesh.grpc(1))

    async def steps() -> AsyncIterator[dict[str, Any]]:
        for value in (1.0, 2.0, 3.0):
            yield {
                "model_name": "nan_sum",
                "inputs": [float_tensor(value)],
                "sequence_id": name,
                "sequence_start": value == 1.0,
                "sequence_end": value == 3.0,
            }

    sums: list[float] = []
    async for result, error in client.stream_infer(steps()):
        if error is None:
            sums.append(float(result.as_numpy("OUTPUT").item()))
        else:
            assert "expired" in str(error), error
    await client.close()
    return sums


def float_tensor(value: float) -> Any:
    tensor = grpc_aio.InferInput("INPUT", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[value]], np.float32))
    return tensor


async def slots_seen(mesh: RunningMesh, model: str, over: asyncio.Event) -> int:
    """Looks again and again at who has which slot, all at one moment (on a Cluster all of a shard); in how many moments
    all of them were taken."""
    full, is_cluster = 0, isinstance(mesh.redis, RedisCluster)
    pattern = mesh.keys.sequence(sequence_id(model, "", "x")).record.partition("{")[0]
    while not over.is_set():
        keys = [key for key in mesh.redis.scan_iter(match=f"{pattern}*seq:*", count=1000) if model.encode() in key]
        taken = 0
        for seen_together in of_shards(keys) if is_cluster else [keys]:
            with mesh.redis.pipeline(transaction=True) as pipe:
                for key in seen_together:
                    pipe.hmget(key, PLACE)
                places = [tuple(place[1:]) for place in pipe.execute() if place[0] == b"l"]
            assert len(places) == len(set(places)), "two sequences in one slot"
            taken += len(places)
        full += taken == mesh.slots(model)
        await asyncio.sleep(0.02)
    return full


def of_shards(keys: Iterable[bytes]) -> list[list[bytes]]:
    """The keys by their hash tags."""
    found: dict[bytes, list[bytes]] = {}
    for key in keys:
        found.setdefault(key.partition(b"{")[2].partition(b"}")[0], []).append(key)
    return list(found.values())


async def test_triton_8449_full_slots_without_end_move_on_and_nothing_spins(mesh: RunningMesh) -> None:
    """There (triton-inference-server/server#8449), with every slot taken and no END ever sent, the backlog grew, and
    the reaper found the same idle sequences for ever, every 50 ms. Here each of them ends once, others take their
    slots, and a backlog that cannot move costs next to no calls."""
    names = [f"no end {number}" for number in range(4 * mesh.slots("brief_sum"))]
    caller = GrpcCaller(mesh.grpc())
    try:
        begun = [caller("brief_sum", Step(name, 5, start=True)) for name in names]
        assert [5] * len(names) == await asyncio.gather(*begun)
        await eventually(lambda: mesh.slots_held("brief_sum") == 0, "all of them end")
        # The leader says so when it is done.
        await eventually(lambda: set(names) <= set(said_to_expire(mesh)), "all of them are said to have expired")
        assert dict.fromkeys(names, 1) == said_to_expire(mesh)

        quiet = await calls_within(mesh, 1.0)
        held = [Step(f"held {number}", 1, start=True) for number in range(mesh.slots("single_sum"))]
        await asyncio.gather(*(caller("single_sum", step) for step in held))
        waiting = [
            asyncio.create_task(caller("single_sum", Step(f"waits {number}", 1, start=True, end=True)))
            for number in range(20)
        ]
        await eventually(lambda: waiting_sequences(mesh, "single_sum") == len(waiting), "they are in the backlog")
        lines = scheduler_lines(mesh)
        blocked = await calls_within(mesh, 1.0)
        assert blocked <= 2 * quiet + 100, f"{blocked} script calls in a second, {quiet} when nobody waits"
        assert lines == scheduler_lines(mesh), "nothing has happened, and nothing is said"
        for step in held:
            await caller("single_sum", Step(step.id, 0, end=True))
        assert [1] * len(waiting) == await asyncio.gather(*waiting)
    finally:
        await caller.close()


def said_to_expire(mesh: RunningMesh) -> Counter[str]:
    """How often the schedulers' logs say so of each sequence without an end."""
    return Counter(re.findall(r'sequence expired .*sequence="brief_sum\S*(no end \d+)"', mesh.logs("scheduler")))


def waiting_sequences(mesh: RunningMesh, model: str) -> int:
    return sum(mesh.redis.xlen(mesh.keys.starts(shard, model)) for shard in mesh.keys.shards)


def scheduler_lines(mesh: RunningMesh) -> int:
    """Lines about the model whose slots are full."""
    return sum(mesh.log(name).count("single_sum") for name in mesh.names("scheduler"))


async def calls_within(mesh: RunningMesh, seconds: float) -> float:
    """Script calls per second, over about that time."""

    def calls() -> int:
        return int(mesh.redis.info("commandstats").get("cmdstat_fcall", {}).get("calls", 0))

    first, began = calls(), time.monotonic()
    await asyncio.sleep(seconds)
    return (calls() - first) / (time.monotonic() - began)


async def test_triton_3160_a_long_stream_of_one_sequence_is_never_interrupted(mesh: RunningMesh) -> None:
    """There (triton-inference-server/server#3160) the stream of one long sequence broke off, or its requests were told
    to specify the START flag. Here many steps, more of them open than a batch takes, are each answered in order."""
    steps, width = 1200, asyncio.Semaphore(200)
    caller = StreamCaller(mesh.grpc())

    async def one(number: int) -> int:
        async with width:
            return await caller("few_sum", Step("long", 1, start=number == 0, end=number == steps - 1))

    try:
        answers = await asyncio.gather(*(one(number) for number in range(steps)))
    finally:
        await caller.close()

    assert list(range(1, steps + 1)) == answers


async def test_triton_3577_the_same_ids_can_be_played_again_and_again(mesh: RunningMesh, chance: random.Random) -> None:
    """There (triton-inference-server/server#3577) 850 recordings were run through the server again and again, under the
    same ids; every sixth run some request in the middle was told to specify the START flag. Here seven runs of many
    more sequences than slots are right."""
    plans = make_plans(chance, 32, shortest=2, longest=5)
    async with Callers(mesh) as callers:
        for _ in range(7):
            await Traffic("few_sum", callers, plans, chance, pause_s=0.0).run()

    await eventually(lambda: mesh.slots_held("few_sum") == 0, "every slot is free again")


async def test_triton_8586_states_are_not_swapped_however_their_names_sort(mesh: RunningMesh) -> None:
    """There (triton-inference-server/server#8586) inputs and outputs of states were paired in the order of their names:
    from the second request on, cache and length were each other's. Here they are not, and neither after a takeover."""
    client: Any = grpc_aio.InferenceServerClient(mesh.grpc())

    async def step(number: int, **flags: bool) -> list[int]:
        tensor = grpc_aio.InferInput("INPUT", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.array([[100]], np.int32))
        named = {"sequence_id": "swapped", "request_id": f"{number}"}
        result = await client.infer("two_states", [tensor], **named, **flags)
        return result.as_numpy("OUTPUT").reshape(-1).tolist()

    try:
        answers = [await step(1, sequence_start=True), await step(2)]
        owner = mesh.record(sequence_id("two_states", "", "swapped"))["ow"]
        (name,) = [one.name for one in mesh.alive() if one.executor == owner]
        await mesh.kill_executor(name)
        answers += [await step(3), await step(4, sequence_end=True)]
    finally:
        await client.close()

    assert [[100, 1], [200, 2], [300, 3], [400, 4]] == answers

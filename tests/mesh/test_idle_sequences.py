"""Sequences that are silent for too long end by themselves; those that are not are left alone.

The server's keyspace events stay off: nothing may depend on them.
"""

from __future__ import annotations

import asyncio
import queue
import re
import time
from typing import Any

import pytest
import tritonclient.grpc as grpc_sync
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from shared.contract.ids import sequence_id
from tests.mesh.conftest import TARDY_GATE
from tests.mesh.model_repository import HANGS
from tests.mesh.raw_http import answer, infer_document, posted
from tests.mesh.running_mesh import RunningMesh, eventually, wait
from tests.mesh.traffic import GrpcCaller, Step, sum_of, tensor

BRIEF = "/v2/models/brief_sum/infer"
DESCRIPTION = re.compile(r"sequence expired.*described .*SUM_IN INT64 \[1\] mean (\d+) norm")


async def test_a_silent_sequence_expires_its_slot_goes_to_another_and_its_next_step_hears_so(mesh: RunningMesh) -> None:
    assert {"notify-keyspace-events": ""} == mesh.redis.config_get("notify-keyspace-events")
    slots = mesh.slots("brief_sum")

    # One more than there are slots: the last one is only answered because another has expired.
    answers = await asyncio.gather(
        *(
            posted(mesh.http(), BRIEF, infer_document(5, sequence_id=f"silent {number}", sequence_start=True))
            for number in range(slots + 1)
        )
    )
    assert [5] * (slots + 1) == [answer(response) for response in answers]
    await eventually(lambda: mesh.slots_held("brief_sum") == 0, "every slot is free again")

    late = await posted(mesh.http(1), BRIEF, infer_document(1, sequence_id="silent 0"))
    assert 400 == late.status
    assert ("expired", 1) == (late.document["reason"], late.document["last_step"])
    assert "must specify the START flag" in late.error
    assert "expired" in late.error

    caller = GrpcCaller(mesh.grpc())
    with pytest.raises(InferenceServerException, match="expired") as refused:
        await caller("brief_sum", Step("silent 1", 1))
    assert "StatusCode.INVALID_ARGUMENT" == refused.value.status()

    assert 7 == await caller("brief_sum", Step("silent 0", 7, start=True))
    assert 8 == await caller("brief_sum", Step("silent 1", 8, start=True, end=True))
    await caller.close()
    await eventually(lambda: inbox_entries(mesh) == 0, "executors clear what they were told of expired sequences")


async def test_the_slots_of_sequences_that_expired_are_each_used_again(mesh: RunningMesh) -> None:
    slots = mesh.slots("brief_sum")
    for round_number in range(3):
        ids = [f"abandoned {round_number}/{number}" for number in range(slots)]
        responses = await asyncio.gather(
            *(posted(mesh.http(), BRIEF, infer_document(1, sequence_id=name, sequence_start=True)) for name in ids)
        )
        assert [1] * slots == [answer(response) for response in responses]


def test_a_sequence_with_steps_waiting_or_running_does_not_expire_however_long_they_take(mesh: RunningMesh) -> None:
    """All are accepted while the first one runs: a step that is late itself would find the sequence idle."""
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    gate, sequence = mesh.directory.parent / TARDY_GATE, sequence_id("tardy_sum", "", 4711)

    def arrive(result: Any, error: Any) -> None:
        arrived.put((result, error))

    with grpc_sync.InferenceServerClient(mesh.grpc()) as client:
        client.start_stream(arrive)
        try:
            for number, value in enumerate((HANGS, 1, 1, 1)):
                client.async_stream_infer(
                    "tardy_sum",
                    [tensor(grpc_sync.InferInput, value)],
                    sequence_id=4711,
                    sequence_start=number == 0,
                    sequence_end=number == 3,
                )
            wait(lambda: mesh.record(sequence).get("nx") == "4", "all are accepted")
            time.sleep(0.3)  # three times its idle time
        finally:
            gate.touch()
        answers = [arrived.get(timeout=60) for _ in range(4)]
        client.stop_stream()

    assert [None] * 4 == [error for _, error in answers]
    assert [HANGS, HANGS + 1, HANGS + 2, HANGS + 3] == [sum_of(result) for result, _ in answers]


async def test_a_stream_that_breaks_off_leaves_its_sequence_to_be_continued_elsewhere(mesh: RunningMesh) -> None:
    async def one_request() -> Any:
        yield {
            "model_name": "running_sum",
            "inputs": [tensor(grpc_aio.InferInput, 40)],
            "sequence_id": "broken off",
            "sequence_start": True,
        }
        await asyncio.sleep(3600)

    client: Any = grpc_aio.InferenceServerClient(mesh.grpc())
    answers = client.stream_infer(one_request())
    result, error = await anext(answers)
    assert (40, None) == (sum_of(result), error)
    answers.cancel()
    await client.close()

    last = await posted(
        mesh.http(1), "/v2/models/running_sum/infer", infer_document(2, sequence_id="broken off", sequence_end=True)
    )
    assert 42 == answer(last)
    sequence = sequence_id("running_sum", "", "broken off")
    assert "e" == mesh.record(sequence)["st"]


def inbox_entries(mesh: RunningMesh) -> int:
    """Steps and messages that wait for executors."""
    return sum(
        mesh.redis.xlen(mesh.keys.inbox(shard, executor.executor))
        for executor in mesh.alive()
        for shard in mesh.keys.shards
    )


async def test_every_sequence_that_expires_is_described_once_whether_it_holds_a_slot_or_is_paged(
    mesh: RunningMesh,
) -> None:
    count = mesh.slots("described_sum") + 2
    caller = GrpcCaller(mesh.grpc())
    for number in range(count):
        assert number == await caller("described_sum", Step(f"described {number}", number, start=True))
    await caller.close()

    def described() -> list[int]:
        said = mesh.logs("scheduler", "executor")
        return sorted(int(mean) for mean in DESCRIPTION.findall(said))

    await eventually(lambda: len(described()) >= count, "all of them are described")
    assert list(range(count)) == described()

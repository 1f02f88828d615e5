"""Replies of another release, and replies that are none: each concerns its own caller only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import msgspec
import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from shared.contract.ids import SequenceId
from shared.contract.messages import LoadFailure, ReplyMessage, encode
from shared.contract.tensors import Tensor
from shared.store import reading
from shared.store.keyspace import Keyspace
from tests.gateway.fake_executor import FakeExecutor, RunningGateway

SUM = "running_sum"
BYSTANDERS = range(100, 105)

UNREADABLE: dict[str, bytes] = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "half a reply": encode(ReplyMessage("1", error="long" * 100))[:-50],
    "another type": msgspec.msgpack.encode({"version": "1"}),
    "a field of another type": msgspec.msgpack.encode(["1", [], 7]),
    "too few fields": msgspec.msgpack.encode([]),
    "a text that is none": b"\x91\xa2\xff\xfe",
    "unknown datatype": encode(ReplyMessage("1", (Tensor("OUTPUT", "FP7", (1,), b"\0"),))),
    "too few bytes": encode(ReplyMessage("1", (Tensor("OUTPUT", "INT32", (1, 1), b"\0"),))),
    "negative shape": encode(ReplyMessage("1", (Tensor("OUTPUT", "INT32", (-1, -1), b"\0" * 4),))),
    "endless shape": encode(ReplyMessage("1", (Tensor("OUTPUT", "BYTES", (2**64 - 1,), b""),))),
    "reason that no header takes": encode(ReplyMessage("1", error_code="INTERNAL", reason="a\r\nb: c")),
    "endless step": encode(ReplyMessage("1", error_code="INTERNAL", reason="lost", step=2**63)),
}
LATER: tuple[tuple[ReplyMessage, int, dict[str, Any], str], ...] = (
    # (reply of a later release, HTTP status, facts, gRPC status)
    (
        ReplyMessage("1", error_code="UNAVAILABLE", error="at rest", reason="resting", step=3),
        503,
        {"reason": "resting", "last_step": 3, "retry": "same"},
        "UNAVAILABLE",
    ),
    (
        ReplyMessage("1", error_code="TOO_EARLY", error="not yet", reason="early"),
        500,
        {"reason": "early", "last_step": 0, "retry": "no"},
        "INTERNAL",
    ),
    (ReplyMessage("1", error_code="TOO_EARLY", error="not yet"), 500, {}, "INTERNAL"),
    (
        ReplyMessage("1", error_code="TOO_EARLY", error="gone", reason="lost", step=2),
        500,
        {"reason": "lost", "last_step": 2, "retry": "start"},
        "INTERNAL",
    ),
)


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "found", reading.Found())
    # The gateway adds these counts to the mesh's at intervals, and begins at 0 again: not while a test looks at them.
    monkeypatch.setattr(reading, "TELL_INTERVAL_S", 3600.0)


@pytest.fixture
async def session(gateway: RunningGateway) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{gateway.url}") as opened:
        yield opened


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[Any]:
    async with cast("Any", grpc_aio).InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc_port}") as opened:
        yield opened


def only_for(reply: ReplyMessage, data: bytes) -> bytes:
    """The given bytes for who sends a 13, the reply itself to everybody else."""
    asked = bool(reply.outputs) and 13 == int.from_bytes(reply.outputs[0].raw[:4], "little")
    return data if asked else encode(reply)


def step(sequence: int, value: int) -> dict[str, Any]:
    tensor = {"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    return {"inputs": [tensor], "parameters": {"sequence_id": sequence, "sequence_start": True}}


async def post(session: aiohttp.ClientSession, document: dict[str, Any]) -> tuple[int, Any]:
    async with session.post(f"/v2/models/{SUM}/infer", json=document) as response:
        return response.status, await response.json()


def grpc_step(sequence: int, value: int) -> dict[str, Any]:
    tensor = cast("Any", grpc_aio).InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    return {"model_name": SUM, "inputs": [tensor], "sequence_id": sequence, "sequence_start": True}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_a_reply_that_cannot_be_read_is_answered_to_its_own_caller_and_nobody_else_notices(
    executor: FakeExecutor,
    keys: Keyspace,
    session: aiohttp.ClientSession,
    client: Any,
    data: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor.encoded = lambda reply: only_for(reply, data)
    await executor.pause()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in BYSTANDERS:
            yield grpc_step(number, 13 if number == BYSTANDERS[2] else 1)

    async def stream() -> list[str]:
        return [str(error or int(got.as_numpy("OUTPUT")[0, 0])) async for got, error in client.stream_infer(requests())]

    with caplog.at_level(logging.ERROR, "seqmesh"):
        streamed = asyncio.create_task(stream())
        posted = [
            asyncio.create_task(post(session, step(number, value))) for number, value in ((1, 2), (2, 13), (3, 4))
        ]
        executor.paused.clear()
        first, (status, body), last = await asyncio.gather(*posted)
        texts = await streamed

    text = (
        "a step of sequence {} of model 'running_sum' was answered, but its answer cannot be read: the log names "
        "the key"
    )
    assert [[2], [4]] == [each["outputs"][0]["data"] for _, each in (first, last)]
    assert (500, {"error": text.format(2)}) == (status, body)
    assert ["1", "1", text.format(BYSTANDERS[2]), "1", "1"] == texts
    lines = [cast("Any", line).fields for line in caplog.records if "unreadable" in line.getMessage()]
    assert {"replies": 2} == reading.found.counts
    assert len({line["key"] for line in lines}) == len(lines) <= len(keys.shards)


@pytest.mark.parametrize(("reply", "status", "facts", "grpc_status"), LATER)
async def test_a_reason_or_code_of_a_later_release_is_passed_on(
    executor: FakeExecutor,
    session: aiohttp.ClientSession,
    client: Any,
    reply: ReplyMessage,
    status: int,
    facts: dict[str, Any],
    grpc_status: str,
) -> None:
    executor.encoded = lambda own: only_for(own, encode(reply))

    assert (status, {"error": reply.error} | facts) == await post(session, step(1, 13))
    with pytest.raises(InferenceServerException) as refused:
        await client.infer(**grpc_step(2, 13))
    assert (f"StatusCode.{grpc_status}", reply.error) == (refused.value.status(), refused.value.message())
    assert 200 == (await post(session, step(3, 5)))[0]


async def test_fields_that_a_later_release_appends_are_left_alone(
    executor: FakeExecutor, session: aiohttp.ClientSession
) -> None:
    def longer(reply: ReplyMessage) -> bytes:
        return msgspec.msgpack.encode([*msgspec.msgpack.decode(encode(reply)), "new", {"more": [1]}])

    executor.encoded = longer

    status, body = await post(session, step(1, 5))
    assert (200, [5]) == (status, body["outputs"][0]["data"])


async def test_a_kept_reply_that_cannot_be_read_is_its_own_callers_trouble(
    executor: FakeExecutor, session: aiohttp.ClientSession, redis: Any, keys: Keyspace
) -> None:
    """A retry is answered from the sequence's record."""
    document = step(1, 5) | {"id": "first"}
    await post(session, document)
    name = keys.sequence(SequenceId(f"{SUM}||i1")).record
    kept = [field for field, value in (await redis.hgetall(name)).items() if b"OUTPUT" in value]
    assert kept, "the record holds no reply"
    await redis.hset(name, kept[0], b"\xc1 garbage")

    status, body = await post(session, document)

    assert 500 == status
    assert "its answer cannot be read" in body["error"]
    assert {"seq": 1} == reading.found.counts
    assert 200 == (await post(session, step(2, 5)))[0]


async def test_a_load_that_failed_with_a_later_releases_code_is_told(
    executor: FakeExecutor, session: aiohttp.ClientSession, redis: Any, keys: Keyspace
) -> None:
    async def fail() -> None:
        while not (entries := await redis.xrange(keys.control)):
            await asyncio.sleep(0.01)
        failure = LoadFailure(entries[-1][0].decode(), "echo", "TOO_EARLY", "not at this hour")
        told = msgspec.structs.replace(executor.registration, applied=failure.entry, failures=(failure,))
        await executor.membership.update(told)

    failing = asyncio.create_task(fail())
    async with session.post("/v2/repository/models/echo/load", json={}) as response:
        answer = response.status, await response.json()
    await failing

    assert (500, "not at this hour") == (answer[0], answer[1]["error"])

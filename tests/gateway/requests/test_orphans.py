"""Clients that leave in the middle of a sequence (`orphan_grace_microseconds`): what their connections' ends change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgspec
import pytest
import tritonclient.grpc.aio as grpc_aio
from redis.exceptions import ConnectionError as RedisConnectionError

import gateway.requests.orphans
from gateway.parts import GatewayParts
from gateway.requests.exchange.notices import Notices
from gateway.requests.infer_call import InferCall
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.waiting import PendingRequest
from shared.contract.ids import GatewayId, SequenceId, sequence_id
from shared.contract.messages import StepFlag
from shared.store.keyspace import Keyspace
from shared.store.script_values import Orphan
from shared.store.scripts import Scripts
from tests.gateway.fake_executor import GRACE_MS, FakeExecutor, RunningGateway, running_sum
from tests.gateway.requests.portless import pending, settled, step, total
from tests.gateway.requests.test_cancellation import until
from tests.mesh.traffic import sum_of, tensor

GRACED = "left_sum"


async def record_of(executor: FakeExecutor, correlation_id: int, model: str = GRACED) -> dict[str, str]:
    key = executor.keys.sequence(sequence_id(model, "", correlation_id)).record
    fields = await executor.commands.hgetall(key)
    return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}


async def idle_left_ms(executor: FakeExecutor, correlation_id: int) -> int:
    return await executor.commands.pttl(executor.keys.sequence(sequence_id(GRACED, "", correlation_id)).idle)


async def orphaned(executor: FakeExecutor, correlation_id: int) -> None:
    """Waits until Redis knows of it, and what is in flight is committed."""

    async def is_short() -> bool:
        return 0 < await idle_left_ms(executor, correlation_id) <= GRACE_MS

    await until(is_short)


def left_step(value: int, sequence: int, **rest: Any) -> InferCall:
    return msgspec.structs.replace(step(value, sequence, **rest), model=GRACED)


class Stream:
    """One real gRPC stream."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._client: Any = grpc_aio.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc_port}")
        self._requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._answers: Any = self._client.stream_infer(self._sent())

    async def _sent(self) -> AsyncIterator[dict[str, Any]]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def step(self, value: int, sequence: int, *, model: str = GRACED, **flags: Any) -> int:
        inputs = [tensor(grpc_aio.InferInput, value)]
        self._requests.put_nowait({"model_name": model, "inputs": inputs, "sequence_id": sequence, **flags})
        result, error = await anext(self._answers)
        assert error is None, error
        return sum_of(result)

    async def end(self, how: str) -> None:
        if how == "broken":
            self._answers.cancel()
        else:
            self._requests.put_nowait(None)
            with pytest.raises(StopAsyncIteration):
                await anext(self._answers)
        await self._client.close()


@pytest.mark.parametrize("how", ["broken", "closed in order"])
async def test_a_stream_that_is_gone_leaves_its_open_sequences_the_grace_and_another_takes_them_back(
    gateway: RunningGateway, executor: FakeExecutor, how: str
) -> None:
    first = Stream(gateway)
    for sequence in (1, 2, 3):
        assert 5 == await first.step(5, sequence, sequence_start=True)
    assert 5 == await first.step(5, 4, model="running_sum", sequence_start=True)
    second = Stream(gateway)
    assert 7 == await second.step(2, 2)
    assert 6 == await first.step(1, 3, sequence_end=True)

    await first.end(how)

    await orphaned(executor, 1)
    assert await idle_left_ms(executor, 2) > GRACE_MS, "the other stream has used it since"
    assert "e" == (await record_of(executor, 3))["st"]
    assert "og" not in await record_of(executor, 4, "running_sum")
    assert 8 == await second.step(3, 1)
    assert await idle_left_ms(executor, 1) > GRACE_MS
    await second.end(how)
    await orphaned(executor, 1)
    await orphaned(executor, 2)


async def test_an_http_connection_that_breaks_before_its_answer_leaves_the_sequence_the_grace(
    gateway: RunningGateway, executor: FakeExecutor
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port)
    await executor.pause()
    body = msgspec.json.encode(
        {
            "id": "first",
            "parameters": {"sequence_id": 1, "sequence_start": True},
            "inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [5]}],
        }
    )
    head = f"POST /v2/models/{GRACED}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)

    async def is_accepted() -> bool:
        return bool(await record_of(executor, 1))

    await until(is_accepted)
    writer.close()

    async def is_told() -> bool:
        return "og" in await record_of(executor, 1)

    await until(is_told)
    executor.paused.clear()
    await orphaned(executor, 1)


async def test_a_unary_caller_who_leaves_before_the_answer_counts_and_one_who_has_it_does_not(
    parts: GatewayParts, executor: FakeExecutor
) -> None:
    assert 1 == total(await parts.inference.submit(left_step(1, 1, start=True)))
    assert 2 == total(await parts.inference.submit(left_step(2, 2, start=True)))
    await executor.pause()
    leaving = parts.inference.submit(left_step(4, 2, request_id="second"))
    while not parts.replies.unanswered[0].accepted:
        await asyncio.sleep(0.005)

    leaving.cancel()
    executor.paused.clear()

    await orphaned(executor, 2)
    assert await idle_left_ms(executor, 1) > GRACE_MS


async def test_connections_that_a_stopping_gateway_cuts_count_for_nothing(
    parts: GatewayParts, executor: FakeExecutor
) -> None:
    cut, gone = parts.inference.connection(), parts.inference.connection()
    await parts.inference.submit(left_step(1, 1, start=True), cut)
    await parts.inference.submit(left_step(1, 2, start=True), gone)
    await settled(parts, 2)  # a step that is accepted later is told at once
    parts.inference.stopping = True
    cut.end()
    parts.inference.stopping = False
    gone.end()

    await orphaned(executor, 2)
    assert await idle_left_ms(executor, 1) > GRACE_MS


# -- alone ----------------------------------------------------------------------------------------------------------


def used(sequence: str, token: str, flags: StepFlag = StepFlag.NONE) -> PendingRequest:
    config = msgspec.structs.replace(running_sum(GRACED), parameters={"orphan_grace_microseconds": "1500"})
    return pending(config, sequence=SequenceId(sequence), flags=flags, token=token)


def left(sequence: str, token: str) -> Orphan:
    return Orphan(SequenceId(sequence), token, grace_ms=2)


def test_a_connection_names_the_latest_step_of_each_sequence_it_has_not_ended() -> None:
    told: list[Orphan] = []
    connection = ConnectionSequences(told.append)
    for waiting in (used("a", "1"), used("b", "2"), used("a", "3"), used("c", "4"), used("b", "5", StepFlag.END)):
        connection.used(waiting)
    assert [] == told

    connection.end()

    assert [left("a", "3"), left("c", "4")] == told


def test_a_step_that_is_accepted_when_its_connection_has_gone_is_an_orphans_at_once() -> None:
    told: list[Orphan] = []
    connection = ConnectionSequences(told.append)
    connection.end()

    connection.used(used("a", "1"))
    connection.used(used("b", "2", StepFlag.START | StepFlag.END))

    assert [left("a", "1")] == told


def test_of_too_many_sequences_those_used_least_recently_keep_their_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.requests.orphans, "NOTED_MAX", 2)
    told: list[Orphan] = []
    connection = ConnectionSequences(told.append)
    for waiting in (used("a", "1"), used("b", "2"), used("a", "3"), used("c", "4")):
        connection.used(waiting)

    connection.end()

    assert [left("a", "3"), left("c", "4")] == told


async def test_what_redis_was_not_told_is_told_when_it_is_back() -> None:
    class Flaky:
        """Scripts whose connection is lost at the first call."""

        def __init__(self) -> None:
            self.calls: list[list[Orphan]] = []
            self.told = asyncio.Event()

        def orphan(self, orphans: Sequence[Orphan], **_: Any) -> list[Orphan]:
            return list(orphans)

        async def run_all(self, calls: list[list[Orphan]], link: None) -> list[list[bool]]:
            self.calls += calls
            if len(self.calls) == 1:
                raise RedisConnectionError("lost")
            self.told.set()
            return [[True for _ in call] for call in calls]

    scripts = Flaky()
    notices = Notices(cast(Scripts, scripts), Keyspace("t", 1), GatewayId("g"))
    notices.orphan(left("a", "1"))
    notices.orphan(left("b", "2"))
    running = asyncio.create_task(notices.run())
    async with asyncio.timeout(60):
        await scripts.told.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert [[left("a", "1"), left("b", "2")]] * 2 == scripts.calls

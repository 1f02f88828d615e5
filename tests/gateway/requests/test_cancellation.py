"""Callers who leave: what they asked for is given up unless it runs, and all others hear of it (triton-spec 1.8)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.parts import GatewayParts
from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Answer
from shared.contract.errors import Code, MeshError, Reason, SequenceError
from shared.contract.ids import sequence_id
from shared.contract.tensors import Tensor
from shared.store.connections.link import Link
from tests.gateway.fake_executor import FakeExecutor
from tests.gateway.requests.portless import Proxy, departures_of, settled, step, total

SEQUENCE = sequence_id("running_sum", "", 1)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.005)


async def accepted(executor: FakeExecutor, count: int) -> None:
    """Waits until that many steps of the sequence have been accepted, all in all."""
    record = executor.keys.sequence(SEQUENCE).record

    async def are_accepted() -> bool:
        return int(await executor.commands.hget(record, "nx") or 0) >= count

    await until(are_accepted)


async def cancelled(answer: asyncio.Future[Answer]) -> None:
    with pytest.raises(MeshError) as caught:
        await answer
    assert (Code.CANCELLED, "") == (caught.value.code, caught.value.message)


async def test_waiting_sequence_goes_whole_when_one_of_its_callers_leaves(parts: GatewayParts, executor: FakeExecutor):
    await executor.pause()
    first = parts.inference.submit(step(1, start=True))
    second = parts.inference.submit(step(2))
    await accepted(executor, 2)

    second.cancel()

    await cancelled(first)
    with pytest.raises(SequenceError, match="must specify the START flag") as caught:
        await parts.inference.submit(step(4))
    assert Reason.NEVER_SEEN is caught.value.reason
    executor.paused.clear()
    assert total(await parts.inference.submit(step(8, start=True))) == 8
    assert len(executor.received) == 1


async def test_step_in_a_slot_is_cancelled_with_those_behind_it(parts: GatewayParts, executor: FakeExecutor):
    await parts.inference.submit(step(1, start=True))
    await executor.pause()
    left, behind = parts.inference.submit(step(2)), parts.inference.submit(step(4))
    await accepted(executor, 3)
    inbox = executor.keys.inbox(parts.inference._keys.shard_of(SEQUENCE), executor.executor)

    left.cancel()

    async def is_told() -> bool:
        return any(b"k" in fields for _, fields in await executor.commands.xrange(inbox))

    await until(is_told)
    executor.paused.clear()
    await cancelled(behind)
    with pytest.raises(SequenceError, match=r"must specify the START flag .* \(the sequence was cancelled") as caught:
        await parts.inference.submit(step(8))
    assert Reason.CANCELLED is caught.value.reason
    assert total(await parts.inference.submit(step(16, start=True))) == 16


async def test_caller_who_leaves_while_his_step_is_on_its_way_leaves_nothing_behind(
    parts: GatewayParts, executor: FakeExecutor
):
    await executor.pause()
    record = executor.keys.sequence(SEQUENCE).record
    before = parts.dispatch.sent
    leaving = parts.inference.submit(step(1, start=True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    leaving.cancel()
    after = parts.inference.submit(step(2, 2, start=True))

    async def both_were_settled() -> bool:
        return parts.dispatch.sent > before and not await executor.commands.exists(record)

    await until(both_were_settled)
    assert parts.inference.in_flight == 1
    executor.paused.clear()
    assert total(await after) == 2


async def test_a_step_whose_caller_leaves_before_it_is_sent_is_not_sent(
    parts: GatewayParts, executor: FakeExecutor
) -> None:
    before = parts.dispatch.sent
    callers = [parts.inference.submit(step(1, number, start=True)) for number in range(1, 6)]
    callers[2].cancel()

    await asyncio.gather(*callers, return_exceptions=True)
    await settled(parts, before + 4)

    assert (4, 4) == (len(executor.received), parts.dispatch.sent - before)


@pytest.fixture(params=[False, True], ids=["for the first time", "again"])
def leaving(
    parts: GatewayParts, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> list[asyncio.Future[Answer]]:
    """The callers of these leave while their gateway connects to Redis; before, it may have failed to."""
    leaving, link, connect = list[asyncio.Future[Answer]](), departures_of(parts)._link, Link.connect
    failures = [RedisConnectionError("lost")] if request.param else []

    async def leaves_meanwhile(self: Link) -> None:
        await connect(self)
        if self is not link or not leaving:
            return
        if failures:
            raise failures.pop()
        for answer in leaving:
            answer.cancel()
        await asyncio.sleep(0)

    monkeypatch.setattr(Link, "connect", leaves_meanwhile)
    return leaving


async def test_a_step_whose_caller_leaves_while_its_gateway_connects_is_not_sent(
    parts: GatewayParts, executor: FakeExecutor, leaving: list[asyncio.Future[Answer]]
) -> None:
    """Whoever takes it back relies on that: what was not sent has changed nothing."""
    await parts.inference.submit(step(1, start=True))
    await settled(parts, 1)
    leaving.append(parts.inference.submit(step(2)))
    behind = parts.inference.submit(step(4))

    assert 5 == total(await behind)
    await settled(parts, 2)
    assert 2 == parts.dispatch.sent


@pytest.mark.parametrize("together", [1, 100])
async def test_a_step_that_can_be_sent_again_stays_before_the_one_that_somebody_waits_for(
    parts: GatewayParts,
    executor: FakeExecutor,
    leaving: list[asyncio.Future[Answer]],
    together: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway may not have heard yet that the other one is left, too. It must not take the place of the first, in
    the same round trip or in the next one. together: steps that a round trip carries
    """
    monkeypatch.setattr("gateway.requests.exchange.departures.SCRIPT_STEPS_MAX", together)
    await parts.inference.submit(step(1, start=True))
    await settled(parts, 1)
    first, second, third = (step(value, request_id=f"r{value}") for value in (2, 4, 8))
    leaving.append(parts.inference.submit(first))
    behind = parts.inference.submit(second)
    leaving.append(parts.inference.submit(third))

    assert 7 == total(await behind)
    await settled(parts, 3)
    assert 3 == parts.dispatch.sent, "nobody waits for one behind the third"
    leaving.clear()
    assert [3, 7, 15] == [total(await parts.inference.submit(one)) for one in (first, second, third)]


@pytest.mark.parametrize("bound", ["SCRIPT_STEPS_MAX", "SCRIPT_BYTES_MAX"])
async def test_a_round_trip_carries_no_more_than_redis_runs_at_once(
    parts: GatewayParts, executor: FakeExecutor, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"gateway.requests.exchange.departures.{bound}", 1)
    before = parts.dispatch.round_trips

    await asyncio.gather(*(parts.inference.submit(step(1, number, start=True)) for number in range(1, 4)))
    await settled(parts, 3)

    assert 3 == parts.dispatch.round_trips - before


async def test_a_request_that_is_on_its_way_counts_as_sent_before_redis_has_answered(
    parts: GatewayParts, executor: FakeExecutor
):
    """Whoever takes it back must wait for its outcome: Redis may have given it a number."""
    answer = parts.inference.submit(step(1, start=True))
    (pending,) = parts.replies.unanswered
    assert not pending.sent
    while pending.accepted is None and not pending.sent:
        await asyncio.sleep(0)

    assert pending.accepted is None
    assert total(await answer) == 1


@pytest.mark.parametrize("patience_s", [600.0, 0.0], ids=["for a moment", "for long"])
async def test_a_step_that_is_taken_back_while_redis_is_lost_is_answered_as_what_became_of_it(
    behind_proxy: GatewayParts,
    proxy: Proxy,
    executor: FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    patience_s: float,
):
    """Redis has accepted it. An ensemble waits for that, and so does who would wait too long for a slot."""
    await behind_proxy.inference.submit(step(1, start=True))
    await executor.pause()
    answer = behind_proxy.inference.submit(step(2))
    await settled(behind_proxy, 2)
    (pending,) = behind_proxy.replies.unanswered
    sent, lost = pending.sent, asyncio.Event()

    def cut(chunk: bytes) -> bool:
        if b"FCALL" not in chunk or pending.token.encode() not in chunk:
            return False
        lost.set()
        return True

    monkeypatch.setattr("gateway.requests.exchange.departures.PATIENCE_S", patience_s)
    proxy.cut_before = cut
    behind_proxy.dispatch.withdraw(pending)
    await lost.wait()
    while departures_of(behind_proxy)._down_since is None:  # what waits at a loss after long is told so
        await asyncio.sleep(0)
    other = behind_proxy.inference.submit(step(4, 2, start=True, request_id="a"))
    await settled(behind_proxy, 4 if patience_s else 3)
    executor.paused.clear()

    assert (sent, None) == (pending.sent, pending.first_sent)
    if patience_s:
        await cancelled(answer)
    else:
        assert 3 == total(await answer)
    assert 4 == total(await other)


@pytest.mark.parametrize("identity", [{"request_id": "r"}, {"expected_step": 2}], ids=["request id", "step number"])
async def test_step_that_can_be_asked_for_again_runs_though_its_caller_left(
    parts: GatewayParts, executor: FakeExecutor, identity: dict[str, Any]
):
    await parts.inference.submit(step(1, start=True))
    await executor.pause()
    left = parts.inference.submit(step(2, **identity))
    await accepted(executor, 2)
    left.cancel()
    executor.paused.clear()
    assert total(await parts.inference.submit(step(4))) == 7

    assert total(await parts.inference.submit(step(2, **identity))) == 3
    assert len(executor.received) == 3


async def test_sequence_that_waits_stays_when_the_caller_of_its_named_start_left(
    parts: GatewayParts, executor: FakeExecutor
):
    await executor.pause()
    left = parts.inference.submit(step(1, start=True, request_id="first"))
    await accepted(executor, 1)
    left.cancel()
    await asyncio.sleep(0)

    again = parts.inference.submit(step(1, start=True, request_id="first"))
    executor.paused.clear()

    assert total(await again) == 1
    assert len(executor.received) == 1


async def test_gateway_that_stops_gives_nothing_up(parts: GatewayParts, executor: FakeExecutor):
    """It closes connections itself, and then its callers may ask another one for their answer."""
    await executor.pause()
    answer = parts.inference.submit(step(1, start=True))
    await accepted(executor, 1)
    parts.inference.stopping = True
    answer.cancel()
    await asyncio.sleep(0)
    parts.inference.stopping = False
    executor.paused.clear()

    assert total(await parts.inference.submit(step(2))) == 3


async def test_stateless_request_leaves_its_queue(parts: GatewayParts, executor: FakeExecutor):
    await executor.pause()
    call = InferCall("echo", inputs=(Tensor("INPUT0", "FP32", (1, 1), b"\0\0\0\0"),))
    queue = executor.keys.work_queue("echo", "1")

    async def waiting_requests(count: int) -> bool:
        return await executor.commands.hlen(queue.meta) == count

    leaving = parts.inference.submit(call)
    await until(lambda: waiting_requests(1))
    leaving.cancel()
    await until(lambda: waiting_requests(0))

    executor.paused.clear()
    await parts.inference.submit(msgspec.structs.replace(call, request_id="2"))
    assert ["2"] == [message.request_id for message in executor.received]

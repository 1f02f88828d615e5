"""A stateless request's timeout is answered when it ends, though no executor looks at the queue (triton-spec 3.3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from gateway.parts import GatewayParts
from gateway.requests.exchange.script_calls import CallKind
from gateway.requests.infer_call import InferCall
from shared.contract.errors import UnavailableError
from shared.contract.messages import ReplyMessage, encode
from shared.contract.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from shared.contract.tensors import Tensor
from shared.statistics.tally import ModelLoad
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.work_scripts import Take, Taken, WorkDone, WorkScripts
from tests.gateway.fake_executor import FakeExecutor, echo

MODELS = tuple(
    msgspec.structs.replace(
        echo(action.name),
        dynamic_batching=DynamicBatching(
            default_queue_policy=QueuePolicy(action, 600_000_000, allow_timeout_override=True)
        ),
    )
    for action in TimeoutAction
)
TENSOR = Tensor("INPUT0", "FP32", (1, 1), b"\0\0\0\0")


@pytest.fixture
async def executor(redis_url: str, keys: Keyspace) -> AsyncIterator[FakeExecutor]:
    """An executor that takes nothing unless the test does."""
    redis = connect(redis_url)
    fake = FakeExecutor(redis, keys, MODELS)
    await fake.join()
    yield fake
    await redis.aclose()


def call(action: TimeoutAction, timeout_ms: int) -> InferCall:
    return InferCall(action.name, inputs=(TENSOR,), timeout_us=timeout_ms * 1000)


async def take(executor: FakeExecutor, action: TimeoutAction, count: int = 1) -> list[str]:
    """The executor takes what is in the queue, when that many requests are."""
    queue, work = executor.keys.work_queue(action.name, "1"), WorkScripts(executor.keys)
    async with asyncio.timeout(60):
        while await executor.commands.zcard(queue.queue) < count:
            await asyncio.sleep(0.001)
    load = ModelLoad(action.name, "1", "0")
    pull = work.pull(load, executor.executor, "t", requests_max=9, rows_max=9, delay_us=0, take=Take.WHEN_PLAIN)
    taken = await executor.scripts.run(pull)
    assert isinstance(taken, Taken)
    return [request for request, _ in taken.requests]


async def finish(executor: FakeExecutor, action: TimeoutAction, requests: list[str]) -> list[bool]:
    done = [WorkDone(request, encode(ReplyMessage("1", (TENSOR,)))) for request in requests]
    load = ModelLoad(action.name, "1", "0")
    return (await executor.scripts.run(WorkScripts(executor.keys).finish(load, executor.executor, done))).answered


async def test_a_request_that_nobody_takes_is_refused_when_its_timeout_ends(
    parts: GatewayParts, executor: FakeExecutor
):
    late, patient = (
        parts.inference.submit(call(TimeoutAction.REJECT, 20)),
        parts.inference.submit(call(TimeoutAction.REJECT, 300_000)),
    )

    with pytest.raises(UnavailableError, match=r"^Request timeout expired$") as refused:
        await asyncio.wait_for(late, 60)

    assert refused.value.accepted
    (left,) = await take(executor, TimeoutAction.REJECT)
    assert [True] == await finish(executor, TimeoutAction.REJECT, [left])
    await asyncio.wait_for(patient, 60)


async def test_a_request_that_was_taken_in_time_is_answered_once_by_who_has_it(
    parts: GatewayParts, executor: FakeExecutor
):
    running = parts.inference.submit(call(TimeoutAction.REJECT, 300_000))
    taken = await take(executor, TimeoutAction.REJECT)
    # Its timeout ends now: not before it was taken, however late that is.
    (pending,) = parts.replies.unanswered
    parts.dispatch._departures[pending.shard].put(pending, CallKind.REFUSE_LATE)
    with pytest.raises(UnavailableError, match="Request timeout expired"):
        await parts.inference.submit(call(TimeoutAction.REJECT, 20))

    assert not running.done()
    assert [True] == await finish(executor, TimeoutAction.REJECT, taken)
    await asyncio.wait_for(running, 60)


async def test_a_request_that_is_only_delayed_stays_in_its_queue(parts: GatewayParts, executor: FakeExecutor):
    delayed = parts.inference.submit(call(TimeoutAction.DELAY, 10))
    with pytest.raises(UnavailableError, match="Request timeout expired"):
        await parts.inference.submit(call(TimeoutAction.REJECT, 100))

    assert [True] == await finish(executor, TimeoutAction.DELAY, await take(executor, TimeoutAction.DELAY))
    await asyncio.wait_for(delayed, 60)

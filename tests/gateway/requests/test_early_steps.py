"""Numbered steps that come before the steps they follow: they wait, within bounds, and run once and in order."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.parts import GatewayParts
from gateway.requests.exchange.early_steps import EARLY_STEPS_MAX
from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Answer
from gateway.settings import GatewaySettings
from shared.contract.errors import Reason, SequenceError
from shared.store.keyspace import Keyspace
from tests.gateway.fake_executor import FakeExecutor
from tests.gateway.requests.portless import Proxy, is_submit, step, total, without_ports

pytestmark = pytest.mark.settings(early_step_wait_ms=20_000)


def numbered(number: int, **rest: Any) -> InferCall:
    """Step `number` of a sequence: it adds 10 ** number, so a sum shows which steps it has."""
    return step(10**number, start=number == 1, expected_step=number, **rest)


def values(executor: FakeExecutor) -> list[int]:
    """What ran, in order."""
    return [struct.unpack("<i", message.inputs[0].raw)[0] for message in executor.received]


def sums(count: int) -> list[int]:
    return [sum(10**index for index in range(1, number + 1)) for number in range(1, count + 1)]


async def totals(answers: Sequence[asyncio.Future[Answer]]) -> list[int]:
    return [total(await answer) for answer in answers]


async def test_steps_in_any_order_run_in_the_order_of_their_numbers(
    parts: GatewayParts, executor: FakeExecutor
) -> None:
    backwards = [parts.inference.submit(numbered(number)) for number in range(8, 0, -1)]

    assert sums(8) == (await totals(backwards))[::-1]
    assert [10**number for number in range(1, 9)] == values(executor)


async def test_steps_over_several_gateways_wait_for_each_other(
    gateway_settings: GatewaySettings, keys: Keyspace, executor: FakeExecutor
) -> None:
    async with without_ports(gateway_settings, keys) as one, without_ports(gateway_settings, keys) as other:
        early = one.inference.submit(numbered(3)), one.inference.submit(numbered(2))
        await asyncio.sleep(0.05)
        first = other.inference.submit(numbered(1))

        assert sums(3) == await totals([first, *reversed(early)])
    assert [10, 100, 1000] == values(executor)


async def test_callers_of_the_same_early_step_get_the_same_answer(parts: GatewayParts, executor: FakeExecutor) -> None:
    twice = [parts.inference.submit(numbered(2)) for _ in range(2)]
    await parts.inference.submit(numbered(1))

    assert [110, 110] == await totals(twice)
    assert [10, 100] == values(executor)


async def test_a_step_that_waited_in_vain_is_refused_as_if_it_had_not_waited(
    gateway_settings: GatewaySettings, keys: Keyspace, executor: FakeExecutor
) -> None:
    refusals: list[tuple[str, str, int | None]] = []
    for wait_ms in (0, 60):
        settings = dataclasses.replace(gateway_settings, early_step_wait_ms=wait_ms)
        async with without_ports(settings, keys) as parts:
            await parts.inference.submit(numbered(1, sequence=wait_ms + 1))
            with pytest.raises(SequenceError) as caught:
                await parts.inference.submit(numbered(3, sequence=wait_ms + 1))
        text = caught.value.message.replace(f"sequence {wait_ms + 1} ", "")
        refusals.append((text, caught.value.reason, caught.value.last_step))

    text = "of model 'running_sum' expects step 2 next, but the request is step 3"
    assert [(text, Reason.WRONG_STEP, 1)] * 2 == refusals
    assert [10, 10] == values(executor)


async def test_beyond_the_bounds_of_number_and_count_a_step_is_refused_at_once(
    parts: GatewayParts, executor: FakeExecutor
) -> None:
    await parts.inference.submit(numbered(1))
    with pytest.raises(SequenceError, match="expects step 2 next"):
        await parts.inference.submit(_far(EARLY_STEPS_MAX + 3))
    waiting = [parts.inference.submit(_far(EARLY_STEPS_MAX + 2)) for _ in range(EARLY_STEPS_MAX)]
    with pytest.raises(SequenceError, match="expects step 2 next"):
        await parts.inference.submit(_far(3))
    for future in waiting:
        assert not future.done()
        future.cancel()


async def test_steps_that_were_accepted_leave_room_for_others_before_they_are_answered(
    parts: GatewayParts, executor: FakeExecutor
) -> None:
    last = EARLY_STEPS_MAX + 3
    await parts.inference.submit(step(1, start=True, expected_step=1))
    await executor.pause()
    # All but step 2 are too early.
    backwards = [parts.inference.submit(_far(number)) for number in range(last - 1, 1, -1)]
    async with asyncio.timeout(60):
        while not all(each.accepted for each in parts.replies.unanswered):
            await asyncio.sleep(0.005)
    early = parts.inference.submit(_far(last + 1))
    missing = parts.inference.submit(_far(last))
    executor.paused.clear()

    assert list(range(last + 1, 1, -1)) == await totals([early, missing, *backwards])


def _far(number: int) -> InferCall:
    return step(1, expected_step=number)


async def test_a_sequence_that_is_over_or_begun_anew_refuses_at_once(
    parts: GatewayParts, executor: FakeExecutor
) -> None:
    for number in (1, 2):
        await parts.inference.submit(numbered(number))
    stale = parts.inference.submit(numbered(4))
    await asyncio.sleep(0.03)
    await parts.inference.submit(step(5, start=True))
    # In the sequence's new life these are the steps before it.
    for number in (2, 3):
        await parts.inference.submit(numbered(number))
    with pytest.raises(SequenceError) as anew:
        await stale
    await parts.inference.submit(step(6, end=True))
    with pytest.raises(SequenceError) as ended:
        await parts.inference.submit(numbered(6))

    assert [Reason.WRONG_STEP, Reason.ENDED] == [anew.value.reason, ended.value.reason]
    assert [10, 100, 5, 100, 1000, 6] == values(executor)


async def test_a_step_whose_caller_left_while_it_waited_does_not_run(
    parts: GatewayParts, executor: FakeExecutor
) -> None:
    left = parts.inference.submit(numbered(2))
    await asyncio.sleep(0.03)
    left.cancel()
    await parts.inference.submit(numbered(1))
    with pytest.raises(SequenceError):
        await parts.inference.submit(step(0, expected_step=99))

    assert 0 == parts.inference.in_flight
    assert [10] == values(executor)


@pytest.mark.parametrize("seed", range(4))
async def test_shuffled_steps_over_breaking_connections_run_once_and_in_order(
    behind_proxy: GatewayParts, executor: FakeExecutor, proxy: Proxy, seed: int
) -> None:
    """A client that sends again what failed, in any order, gets each step's own sum; none runs twice."""
    chance = random.Random(seed)
    order = list(range(1, 9))
    chance.shuffle(order)

    async def send(number: int) -> int:
        await asyncio.sleep(chance.random() / 20)
        while True:
            try:
                return total(await behind_proxy.inference.submit(numbered(number)))
            except SequenceError:
                await asyncio.sleep(0.01)

    sent = {number: asyncio.create_task(send(number)) for number in order}
    for _ in range(3):
        await asyncio.sleep(chance.random() / 40)
        proxy.cut_after = is_submit
    got = [await sent[number] for number in range(1, 9)]

    assert sums(8) == got
    assert [10**number for number in range(1, 9)] == values(executor)

"""Clients take turns, on their requests' way to Redis for instance (`gateway.bounds.client_queue`)."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest

from gateway.bounds.client_queue import ClientQueue
from gateway.parts import GatewayParts
from gateway.requests.waiting import PendingRequest
from shared.contract.model_config import ModelConfig
from tests.gateway.fake_executor import FakeExecutor
from tests.gateway.requests.portless import pending, step, total

CONFIG = ModelConfig("model", "", "python", 1, (), ())


def request(client: str, number: int) -> PendingRequest:
    made = pending(CONFIG, token=f"{client}{number}")
    made.client = client
    return made


def test_clients_take_turns_and_each_ones_requests_leave_in_their_order() -> None:
    queue = ClientQueue[PendingRequest]()
    for client, count in (("a", 4), ("b", 1), ("c", 2)):
        for number in range(count):
            queue.append(client, request(client, number))

    assert ["a0", "b0", "c0", "a1", "c1", "a2", "a3"] == [queue.popleft().token for _ in range(len(queue))]
    assert not queue


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_overtaken_by_what_its_own_client_sent_later(seed: int) -> None:
    chance, queue = random.Random(seed), ClientQueue[PendingRequest]()
    sent, left = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for number in range(400):
        if queue and chance.random() < 0.45:
            first = next(iter(queue))
            gone = queue.popleft()
            assert gone is first
            left[gone.client].append(gone.token)
        elif chance.random() < 0.05:
            # Some are wanted no more.
            kept = [one for one in queue if chance.random() < 0.8]
            for client in sent:
                sent[client] = [*left[client], *(one.token for one in kept if one.client == client)]
            queue.clear()
            for one in kept:
                queue.append(one.client, one)
        else:
            new = request(chance.choice("abc"), number)
            sent[new.client].append(new.token)
            queue.append(new.client, new)
        assert len(queue) == len(list(queue))
    while queue:
        gone = queue.popleft()
        left[gone.client].append(gone.token)

    assert sent == left


async def test_who_has_sent_ahead_keeps_no_other_client_waiting(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.requests.exchange.departures.SCRIPT_STEPS_MAX", 2)
    done = list[int]()
    ahead = [parts.inference.submit(step(1, number, start=True), client="10.0.0.1") for number in range(1, 41)]
    other = parts.inference.submit(step(1, 99, start=True), client="10.0.0.2")
    for number, answer in enumerate((*ahead, other)):
        answer.add_done_callback(lambda _, number=number: done.append(number))

    assert [1] * 41 == [total(answer) for answer in await asyncio.gather(*ahead, other)]
    await asyncio.sleep(0)
    assert done.index(40) < 10

"""The first batch can be held back; every later one cannot (triton-spec 1.12)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from executor.workers.first_batch import BACKLOG_VARIABLE, REQUESTS_VARIABLE, FirstBatch, backlog_requests
from shared.contract.errors import LoadError
from shared.contract.ids import ExecutorId
from shared.contract.messages import StepFlag
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from tests.scripted_mesh import ScriptedMesh


def test_without_variables_nothing_is_held_back() -> None:
    assert FirstBatch.from_environment({}).is_open
    assert FirstBatch.from_environment({REQUESTS_VARIABLE: "0", BACKLOG_VARIABLE: ""}).is_open


def test_it_opens_when_enough_requests_are_queued_and_wait() -> None:
    gate = FirstBatch.from_environment({REQUESTS_VARIABLE: "3", BACKLOG_VARIABLE: "2"})

    assert not gate.look(2, 2)
    assert not gate.look(3, 1)
    assert gate.look(3, 2)


def test_a_batcher_that_does_not_heed_the_backlog_opens_without_it() -> None:
    gate = FirstBatch.from_environment({REQUESTS_VARIABLE: "3", BACKLOG_VARIABLE: "2"})

    assert not gate.look(2)
    assert gate.look(3)


def test_once_open_it_stays_open() -> None:
    gate = FirstBatch(2)

    assert gate.look(2)
    assert gate.look(0)


@pytest.mark.parametrize("value", ["-1", "two", "1.5", "٣"])
def test_what_is_no_number_is_an_error_of_the_load(value: str) -> None:
    with pytest.raises(LoadError, match=f"{REQUESTS_VARIABLE} must be a number of requests, not '{value}'"):
        FirstBatch.from_environment({REQUESTS_VARIABLE: value})


async def test_everybody_who_waits_for_it_is_let_go() -> None:
    """Instances of one model share the gate: who finds it open first opens it for the others."""
    gate, queued = FirstBatch(2, 1), 0
    waiting = [asyncio.create_task(gate.opened(lambda: queued, backlog)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)

    queued = 2

    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)


async def backlog() -> int:
    return 1


@pytest.mark.leaves_sequences
async def test_the_backlog_counts_requests_and_not_sequences(redis: Redis, key_prefix: str) -> None:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 2), "m")
    value = {"INPUT": np.zeros((1, 1), np.int32)}
    for correlation_id in (1, 2, 3):
        await mesh.submit(mesh.submission(correlation_id, value, StepFlag.START))
        await mesh.submit(mesh.submission(correlation_id, value))

    assert 6 == await backlog_requests(redis, mesh.keys, "m")

    await mesh.assign(1, ExecutorId("e"))

    assert 4 == await backlog_requests(redis, mesh.keys, "m")

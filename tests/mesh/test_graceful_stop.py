"""Processes that are told to stop (SIGTERM) while they are busy: nobody who calls the mesh sees an error."""

from __future__ import annotations

import random
import signal
from asyncio import TaskGroup

import pytest

from tests.mesh.running_mesh import RunningMesh
from tests.mesh.traffic import Callers, Traffic, make_plans


@pytest.mark.parametrize("service", ["executor", "scheduler"])
async def test_no_caller_sees_an_error_when_a_busy_process_is_told_to_stop(
    victim: RunningMesh, chance: random.Random, service: str
) -> None:
    async with Callers(victim) as callers, TaskGroup() as group:
        traffic = Traffic("slow_sum", callers, make_plans(chance, 24, shortest=15, longest=30), chance, pause_s=0.005)
        group.create_task(traffic.run())
        for share, name in zip((0.2, 0.6), victim.names(service), strict=True):
            await traffic.progress(share)
            victim.send(name, signal.SIGTERM)

    assert 0 == traffic.repeated
    for name in victim.names(service):
        assert "reason=SIGTERM" in victim.log(name)


async def test_a_gateway_that_is_told_to_stop_answers_what_it_has_accepted(
    victim: RunningMesh, chance: random.Random
) -> None:
    async with Callers(victim) as callers, TaskGroup() as group:
        plans = make_plans(chance, 24, shortest=10, longest=20)
        traffic = Traffic("slow_sum", callers, plans, chance, retries=True, pause_s=0.005)
        group.create_task(traffic.run())
        await traffic.progress(0.3)
        victim.send(victim.names("gateway")[0], signal.SIGTERM)

    # What was refused (not begun, or on a connection that had closed) went to the other gateway; nothing ran twice.
    assert "reason=SIGTERM" in victim.log("gateway-1")

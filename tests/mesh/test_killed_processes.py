"""Processes are killed without warning in the middle of the traffic: every sum must still be right.

A step that was lost would be missing in every later sum of its sequence, one that ran twice would be in it twice.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Sequence

import pytest

from shared.ids import SequenceId, sequence_id
from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.traffic import Callers, Plan, Traffic, make_plans

SEQUENCES = 24


async def test_sums_are_right_and_nobody_sees_an_error_though_an_executor_is_killed(
    victim: RunningMesh, chance: random.Random
) -> None:
    plans = make_plans(chance, SEQUENCES, shortest=10, longest=30)
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic("slow_sum", callers, plans, chance)
        group.create_task(traffic.run())
        await traffic.progress(0.3)

        victim.kill(chance.choice(victim.names("executor")))

    assert 0 == traffic.repeated


async def test_sums_are_right_though_every_executor_is_killed_at_once(
    victim: RunningMesh, chance: random.Random
) -> None:
    plans = make_plans(chance, SEQUENCES, shortest=10, longest=20)
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic("running_sum", callers, plans, chance)
        group.create_task(traffic.run())
        await traffic.progress(0.3)

        for name in victim.names("executor"):
            victim.kill(name)

    assert 0 == traffic.repeated


async def test_sums_are_right_and_new_sequences_start_though_the_leading_scheduler_is_killed(
    victim: RunningMesh, chance: random.Random
) -> None:
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic("running_sum", callers, make_plans(chance, SEQUENCES, shortest=20, longest=40), chance)
        group.create_task(traffic.run())
        await traffic.progress(0.2)
        leader = victim.leader("running_sum")

        victim.kill(leader)
        late = Traffic("running_sum", callers, make_plans(chance, SEQUENCES, shortest=2), chance)
        await late.run()

    assert 0 == traffic.repeated + late.repeated


async def test_live_sequences_go_on_while_no_scheduler_runs(victim: RunningMesh, chance: random.Random) -> None:
    plans = make_plans(chance, 8, shortest=6, longest=6)
    begun = [Plan(plan.id, plan.values[:3]) for plan in plans]
    async with Callers(victim) as callers:
        for plan in begun:
            for step in plan.steps:
                await callers[0]("running_sum", type(step)(step.id, step.value, start=step.start))

        frozen = [victim.send(name, signal.SIGSTOP) for name in victim.names("scheduler")]
        answers = [
            [await callers[1]("running_sum", type(step)(step.id, step.value, end=step.end)) for step in plan.steps[3:]]
            for plan in plans
        ]
        assert len(frozen) == len(victim.names("scheduler"))
        for name in victim.names("scheduler"):
            victim.send(name, signal.SIGCONT)

    assert [plan.sums[3:] for plan in plans] == answers


async def test_a_retry_through_another_gateway_repeats_no_step_of_a_killed_gateways_callers(
    victim: RunningMesh, chance: random.Random
) -> None:
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, SEQUENCES, shortest=10, longest=30)
        traffic = Traffic("slow_sum", callers, plans, chance, retries=True, pause_s=0.0)
        group.create_task(traffic.run())
        await traffic.progress(0.3)

        victim.kill(chance.choice(victim.names("gateway")))

    assert traffic.repeated > 0


async def test_sums_are_right_though_redis_is_restarted(victim: RunningMesh, chance: random.Random) -> None:
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, SEQUENCES, shortest=10, longest=30)
        traffic = Traffic("running_sum", callers, plans, chance, retries=True)
        group.create_task(traffic.run())
        await traffic.progress(0.3)

        # Not killed: with `appendfsync everysec` that may lose what was acknowledged last (deploy/embedded.py).
        victim.send("redis", signal.SIGTERM)


@pytest.mark.timeout(180)
async def test_sums_are_right_whatever_is_killed_and_frozen_in_turn(victim: RunningMesh, chance: random.Random) -> None:
    processes = [name for service in ("gateway", "scheduler", "executor") for name in victim.names(service)]
    schedule = chance.sample(processes, len(processes))
    print(f"in this order: {schedule}")
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, SEQUENCES, shortest=60, longest=90)
        traffic = Traffic("running_sum", callers, plans, chance, retries=True, pause_s=0.05)
        running = group.create_task(traffic.run())
        for turn, name in enumerate(schedule):
            await traffic.progress((turn + 1) / (len(schedule) + 2))
            if chance.random() < 0.3:
                victim.send(name, signal.SIGSTOP)
                await asyncio.sleep(chance.uniform(0.1, 2.0))
                victim.send(name, signal.SIGCONT)
            else:
                victim.kill(name)
        await running


async def test_a_frozen_executor_that_wakes_after_takeover_changes_nothing_and_registers_anew(
    victim: RunningMesh, chance: random.Random
) -> None:
    plans = make_plans(chance, SEQUENCES, shortest=60, longest=80)
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic("slow_sum", callers, plans, chance, pause_s=0.01)
        running = group.create_task(traffic.run())
        await traffic.progress(0.2)
        name = chance.choice(victim.names("executor"))
        before = next(one for one in victim.alive() if one.name == name)
        sequences = [sequence_id("slow_sum", "", plan.id) for plan in plans]
        assert [] != owned_by(victim, before.executor, sequences)

        pid = victim.send(name, signal.SIGSTOP)
        await eventually(lambda: owned_by(victim, before.executor, sequences) == [], "takeover")
        await traffic.progress(0.5)
        victim.send(name, signal.SIGCONT)

        after = await eventually(
            lambda: next((one for one in victim.alive() if one.name == name), None), "the executor registers anew"
        )
        await running

    assert before.executor != after.executor
    assert pid == after.pid
    assert before.executor not in {one.executor for one in victim.alive()}
    assert "lease lost" in victim.log(name)
    assert 0 == traffic.repeated


def owned_by(mesh: RunningMesh, executor: str, sequences: Sequence[SequenceId]) -> list[SequenceId]:
    """Those of the sequences that an executor owns, by their records."""
    return [sequence for sequence in sequences if mesh.record(sequence).get("ow") == executor]

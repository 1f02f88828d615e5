"""Processes are killed without warning in the middle of the traffic: every sum must still be right.

A step that was lost would be missing in every later sum of its sequence, one that ran twice would be in it twice.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio

from shared.contract.ids import SequenceId, sequence_id
from tests.mesh.conftest import MakeMesh
from tests.mesh.raw_http import infer_document, posted
from tests.mesh.running_mesh import LEASE_MS, LONG_LEASE, PATIENCE_S, RunningMesh, eventually
from tests.mesh.traffic import Callers, Plan, Step, Traffic, make_plans, play_stateless, sum_of, tensor

SEQUENCES = 24
on_its_own_server = pytest.mark.skipif(
    "config.getoption('--redis-cluster')", reason="tests/mesh/test_cluster.py strikes the nodes of a Cluster"
)


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


async def test_sums_are_right_over_takeovers_however_a_model_keeps_its_state(
    victim: RunningMesh, chance: random.Random
) -> None:
    """replayed_sum: a checkpoint every fifth step; the steps since then run again and are not answered again. sent_sum:
    the same with response senders, so that batches end before their answers. oldest_sum: the other strategy. The last
    two keep their state themselves: one is told its steps again, one has methods to save and load it.
    """
    models = ("replayed_sum", "sent_sum", "oldest_sum", "retold_sum", "methodical_sum")
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        traffics = [
            Traffic(model, callers, make_plans(chance, SEQUENCES // 2, shortest=20, longest=40), chance)
            for model in models
        ]
        for traffic in traffics:
            group.create_task(traffic.run())
        for share, name in ((0.2, "executor-1"), (0.5, "executor-2")):
            for traffic in traffics:
                await traffic.progress(share)
            await victim.kill_executor(name)

    assert [0] * len(models) == [traffic.repeated for traffic in traffics]


async def test_stateless_requests_are_all_answered_though_executors_are_killed(
    victim: RunningMesh, chance: random.Random
) -> None:
    answered: list[None] = []
    async with http_aio.InferenceServerClient(victim.http()) as client, asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(play_stateless(client, chance, 40, answered))
        for share, name in ((0.2, "executor-1"), (0.6, "executor-2")):
            await eventually(lambda share=share: len(answered) >= share * 640, "requests are answered")
            await victim.kill_executor(name)

    assert 640 == len(answered)


async def test_stateless_requests_are_all_answered_though_an_executor_is_frozen_and_woken(
    victim: RunningMesh, chance: random.Random
) -> None:
    """What it held is run by the other; when it wakes it registers anew and takes part again."""
    answered: list[None] = []
    before = next(one for one in victim.alive() if one.name == "executor-1")
    async with http_aio.InferenceServerClient(victim.http()) as client, asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(play_stateless(client, chance, 40, answered))
        await eventually(lambda: len(answered) >= 64, "requests are answered")
        victim.send("executor-1", signal.SIGSTOP)
        await eventually(lambda: before.executor not in {one.executor for one in victim.alive()}, "its lease ends")
        await eventually(lambda: len(answered) == 640, "all requests are answered")
        victim.send("executor-1", signal.SIGCONT)
        await eventually(lambda: "executor-1" in {one.name for one in victim.alive()}, "it registers anew")

    keys = victim.keys.work_queue("add_sub", "1")
    assert [0, 0, 0] == [victim.redis.zcard(keys.queue), victim.redis.hlen(keys.held), victim.redis.hlen(keys.messages)]


async def test_state_that_only_a_dead_executor_held_is_lost_and_its_sequences_say_so(
    victim: RunningMesh, chance: random.Random
) -> None:
    names = [f"forgotten {number}" for number in range(SEQUENCES)]
    async with Callers(victim) as callers:
        caller = callers[0]

        async def have_begun() -> bool:
            await asyncio.gather(*(caller("forgetful_sum", Step(name, 1, start=True)) for name in names))
            steps = (caller("forgetful_sum", Step(name, 1)) for name in names)
            outcomes = await asyncio.gather(*steps, return_exceptions=True)
            assert all(one == 2 or "state was lost" in str(one) for one in outcomes), outcomes
            return outcomes == [2] * SEQUENCES

        # A busy machine may cost an executor its lease, and with it these states.
        while not await have_begun():
            pass
        for name in victim.names("executor"):
            victim.kill(name)
        await eventually(lambda: victim.slots_held("forgetful_sum") == 0, "the dead executors' sequences are over")

        for name in names:
            late = await posted(victim.http(), "/v2/models/forgetful_sum/infer", infer_document(1, sequence_id=name))
            assert (400, "lost", 2) == (late.status, late.document["reason"], late.document["last_step"])
        again = await asyncio.gather(*(caller("forgetful_sum", Step(name, 5, start=True, end=True)) for name in names))
    assert [5] * SEQUENCES == again


@on_its_own_server
async def test_sums_are_right_though_redis_answers_nobody_for_longer_than_every_lease(
    victim: RunningMesh, chance: random.Random
) -> None:
    """When it wakes, every executor has lost its lease and every scheduler its leadership."""
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, SEQUENCES, shortest=10, longest=30)
        traffic = Traffic("running_sum", callers, plans, chance, retries=True)
        group.create_task(traffic.run())
        await traffic.progress(0.3)

        victim.send("redis", signal.SIGSTOP)
        await asyncio.sleep(2 * LEASE_MS / 1000)
        victim.send("redis", signal.SIGCONT)


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
        leader = await eventually(lambda: victim.leader("running_sum"), "somebody leads")

        victim.kill(leader)
        late = Traffic("running_sum", callers, make_plans(chance, SEQUENCES, shortest=2), chance)
        await late.run()

    assert 0 == traffic.repeated + late.repeated


async def test_live_sequences_go_on_while_no_scheduler_runs(make_mesh: MakeMesh, chance: random.Random) -> None:
    """On a mesh whose leases are long: nobody could take over what an executor lost meanwhile."""
    mesh = make_mesh(schedulers=2, environment=LONG_LEASE)
    plans = make_plans(chance, 8, shortest=6, longest=6)
    begun = [Plan(plan.id, plan.values[:3]) for plan in plans]
    async with Callers(mesh) as callers:
        for plan in begun:
            for step in plan.steps:
                await callers[0]("running_sum", Step(step.id, step.value, start=step.start))

        frozen = [mesh.send(name, signal.SIGSTOP) for name in mesh.names("scheduler")]
        answers = [
            [await callers[1]("running_sum", Step(step.id, step.value, end=step.end)) for step in plan.steps[3:]]
            for plan in plans
        ]
        assert 2 == len(frozen)
        for name in mesh.names("scheduler"):
            mesh.send(name, signal.SIGCONT)

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


@on_its_own_server
async def test_sums_are_right_though_redis_is_restarted(victim: RunningMesh, chance: random.Random) -> None:
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, SEQUENCES, shortest=10, longest=30)
        traffic = Traffic("running_sum", callers, plans, chance, retries=True)
        group.create_task(traffic.run())
        await traffic.progress(0.3)

        # Not killed: with `appendfsync everysec` that may lose what was acknowledged last (deploy/local/embedded.py).
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
        sequences = [sequence_id("slow_sum", "", plan.id) for plan in plans]
        before = chance.choice([one for one in victim.alive() if owned_by(victim, one.executor, sequences)])
        name = before.name

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


async def test_eight_open_steps_are_repeated_elsewhere_when_their_gateway_and_their_executor_are_killed(
    victim: RunningMesh, chance: random.Random
) -> None:
    """Some are committed by then, some run, some wait. The client knows none of it, and asks for all of them again."""
    clients = [OpenSteps(victim, f"open {number}", named=number % 2 == 0, chance=chance) for number in range(6)]
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(client.stream()) for client in clients]
        await eventually(lambda: all(client.accepted == 8 for client in clients), "all steps are accepted")
        victim.kill(victim.gateways[0].name)
        victim.kill(chance.choice(victim.names("executor")))
        await asyncio.wait(streams)
        for client in clients:
            group.create_task(client.repeat())


class OpenSteps:
    """A client that sends eight steps at once on a stream of the first gateway, and repeats them through the second.

    named  by request ids: then START begins the sequence anew, and the others follow it; otherwise by number: then they
           are told from new ones in any order
    """

    def __init__(self, mesh: RunningMesh, name: str, *, named: bool, chance: random.Random) -> None:
        self._mesh = mesh
        self._plan = Plan(name, tuple(chance.randint(-1000, 1000) for _ in range(9)))
        self._named = named
        self._order = list(range(8)) if named else chance.sample(range(8), 8)

    @property
    def accepted(self) -> int:
        """Steps that the mesh has taken."""
        return int(self._mesh.record(sequence_id("slow_sum", "", self._plan.id)).get("nx", 0))

    def request(self, index: int) -> dict[str, Any]:
        identity = {"request_id": f"r{index}"} if self._named else {"parameters": {"sequence_step": index + 1}}
        return {
            "model_name": "slow_sum",
            "inputs": [tensor(grpc_aio.InferInput, self._plan.values[index])],
            "sequence_id": self._plan.id,
            "sequence_start": index == 0,
            "sequence_end": index == 8,
            **identity,
        }

    async def stream(self) -> None:
        """Ends when its gateway is killed."""

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for index in range(8):
                yield self.request(index)
            await asyncio.sleep(PATIENCE_S)

        client: Any = grpc_aio.InferenceServerClient(self._mesh.grpc(0))
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await self._listen(client.stream_infer(requests()))
        assert grpc.StatusCode.UNAVAILABLE is lost.value.code()
        await client.close()

    @staticmethod
    async def _listen(answers: Any) -> None:
        async for _result, error in answers:
            assert error is None, error

    async def repeat(self) -> None:
        """All of them at once, and then the last one."""
        order = [*self._order, 8]

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for index in order:
                yield self.request(index)

        client: Any = grpc_aio.InferenceServerClient(self._mesh.grpc(1))
        answers = [answer async for answer in client.stream_infer(requests())]
        await client.close()

        assert [None] * len(order) == [error for _, error in answers]
        assert [self._plan.sums[index] for index in order] == [sum_of(result) for result, _ in answers]

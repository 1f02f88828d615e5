"""A rolling restart under load: every process of a kind is stopped in order (SIGTERM) and comes back, one by one.

For executors and schedulers no caller sees anything; for gateways, callers lose connections and ask again, by the
number of their step. Every sum is right: no step is lost, doubled or reordered.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack

import pytest

from tests.mesh.running_mesh import ANY_PORTS, RunningMesh, eventually
from tests.mesh.traffic import Callers, Traffic, make_plans

SEQUENCES = 8


@pytest.mark.parametrize("service", ["executor", "scheduler", "gateway"])
@pytest.mark.timeout(240)
async def test_a_rolling_restart_is_noticed_by_nobody(victim: RunningMesh, chance: random.Random, service: str) -> None:
    """The first without a substitute, the others after a new process was started."""
    retries = service == "gateway"
    over = asyncio.Event()
    callers = Callers(victim, streams=True)
    async with callers as all_callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, SEQUENCES)
        traffic = Traffic("slow_sum", all_callers, plans, chance, retries=retries, pause_s=0.05, numbered=True)
        running = group.create_task(traffic.run_until(over))
        await traffic.more(4 * SEQUENCES)
        first, *others = victim.names(service)
        await victim.restart(first)
        await traffic.more(4 * SEQUENCES)
        with ExitStack() as spare:
            await start_spare(victim, service, spare, callers)
            for name in others:
                await victim.restart(name)
                await traffic.more(4 * SEQUENCES)
            if service != "gateway":
                # The spare leaves under load, too. Callers of a spare gateway would never find it again.
                await asyncio.to_thread(spare.close)
                await traffic.more(4 * SEQUENCES)
            over.set()
            await running

    print(f"{service}: longest gap {traffic.slowest_s:.2f} s, {traffic.answered} answered, {traffic.repeated} repeated")
    print("\n".join(f"{count} x {text}" for text, count in traffic.interruptions.items()))
    assert retries or traffic.repeated == 0
    for name in victim.names(service):
        assert "reason=SIGTERM" in victim.log(name)


async def start_spare(mesh: RunningMesh, service: str, spare: ExitStack, callers: Callers) -> None:
    """One more process of the service; returns when it takes part."""
    name = f"spare-{service}"
    if service == "gateway":
        host = mesh.state.host
        spare.enter_context(mesh.spare(service, name, f"--host={host}", *ANY_PORTS))
        ports = await eventually(lambda: mesh.chosen_ports(name), "the spare gateway is ready")
        callers.add(f"{host}:{ports['http']}", f"{host}:{ports['grpc']}")
        return
    spare.enter_context(mesh.spare(service, name))
    if service == "executor":
        await eventually(lambda: name in {one.name for one in mesh.alive()}, "the spare executor serves")
    else:
        await eventually(lambda: mesh.redis.exists(mesh.keys.scheduler(name)), "the spare scheduler stands by")

"""Incidents of servers that are told to stop."""

from __future__ import annotations

import asyncio
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from shared.contract.ids import sequence_id
from tests.mesh.model_repository import add_sum_model
from tests.mesh.running_mesh import RunningMesh, eventually, running_mesh
from tests.mesh.traffic import GrpcCaller, Step

IDLE_US = 300_000


@pytest.mark.timeout(240)
async def test_triton_4628_and_temporal_783_a_stop_in_the_worst_moment_is_orderly_and_loses_no_answer(
    tmp_path: Path,
) -> None:
    """There (triton-inference-server/server#4628) a server whose sequences had timed out hung or crashed when it was
    told to stop; and (temporalio/sdk-python#783) a worker that was told to stop did not end cleanly. Here the executor,
    and then everything, is told to stop while sequences are past their idle limit, others wait for their slots, and
    batches run: each process ends in time, with code 0 and without an error in its log, and what ran is answered."""
    models = tmp_path / "models"
    add_sum_model(models, "brief_sum", slots=1, idle_us=IDLE_US, virtual_slots=False)
    add_sum_model(models, "slow_sum", batch_s=0.2)
    with ExitStack() as stack:
        mesh = stack.enter_context(running_mesh(tmp_path / "data", [models]))
        services = ("executor", "scheduler", "gateway")
        names = [name for service in services for name in mesh.names(service)]
        load = await begin(mesh, "first")
        await mesh.restart(mesh.names("executor")[0], signal.SIGTERM)
        await load.check()
        load = await begin(mesh, "second")
        stopping = asyncio.create_task(asyncio.to_thread(stack.close))
        await load.check()
        await stopping

    said = mesh.log("launcher")
    assert {"0"} == set(re.findall(r"exited with code (-?\d+)", said)), said
    assert "was killed by" not in said
    assert "did not stop within" not in said
    assert [] == mesh.tracebacks()
    for name in names:
        assert "reason=SIGTERM" in mesh.log(name), name
        assert " ERROR " not in mesh.log(name), name


@pytest.mark.timeout(240)
async def test_who_waits_for_a_step_that_takes_minutes_is_told_that_the_mesh_stops(tmp_path: Path) -> None:
    """Its gateway ends before the launcher kills it, which would break the connection without a word."""
    add_sum_model(tmp_path / "models", "slow_sum", batch_s=300)
    with ExitStack() as stack:
        mesh = stack.enter_context(running_mesh(tmp_path / "data", [tmp_path / "models"]))
        caller = GrpcCaller(mesh.grpc())
        step = asyncio.create_task(caller("slow_sum", Step("long", 7, start=True, request_id="long")))
        await eventually(lambda: mesh.record(sequence_id("slow_sum", "", "long")), "the step is accepted")
        await asyncio.to_thread(stack.close)

        with pytest.raises(InferenceServerException, match="the gateway has stopped"):
            await step
        await caller.close()

    assert "gateway-1 did not stop within" not in mesh.log("launcher")


class Load:
    """Steps on their way.

    silent   each begins a sequence and leaves it: one by one they expire, and those behind them get their slot
    running  whole sequences of a slow model
    """

    def __init__(self, caller: GrpcCaller, silent: list[asyncio.Task[int]], running: list[asyncio.Task[int]]) -> None:
        self.caller = caller
        self.silent = silent
        self.running = running

    async def check(self) -> None:
        """What ran has its answer; what waited has it too, or heard that it may come again."""
        assert [7] * len(self.running) == await asyncio.gather(*self.running)
        for outcome in await asyncio.gather(*self.silent, return_exceptions=True):
            if isinstance(outcome, InferenceServerException):
                assert "StatusCode.UNAVAILABLE" == outcome.status()
            else:
                assert 1 == outcome
        await self.caller.close()


async def begin(mesh: RunningMesh, name: str) -> Load:
    """Returns when one sequence is silent, others wait for its slot, and batches run."""
    caller = GrpcCaller(mesh.grpc())

    def step(model: str, number: int, value: int, *, end: bool) -> asyncio.Task[int]:
        identity = f"{name} {number}"
        return asyncio.create_task(caller(model, Step(identity, value, start=True, end=end, request_id=identity)))

    silent = [step("brief_sum", number, 1, end=False) for number in range(4)]
    await silent[0]
    running = [step("slow_sum", number, 7, end=True) for number in range(4)]
    # What reaches a gateway that stops already is told to go elsewhere.
    await eventually(
        lambda: all(mesh.record(sequence_id("slow_sum", "", f"{name} {number}")) for number in range(4)),
        "all are accepted, and a batch runs",
    )
    return Load(caller, silent, running)

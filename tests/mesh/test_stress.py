"""The stress list of the seeds (seeds/002): everything at once that fills slots, leaves early or comes twice.

One mesh, with a model of each strategy. Chance is seeded; whatever it does, every answer is the right one, and in the
end no slot and no key is left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tritonclient.grpc as grpc_sync
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_sync
from tritonclient.utils import InferenceServerException

from shared.contract.ids import sequence_id
from tests.mesh.model_repository import add_sum_model
from tests.mesh.running_mesh import LONG_LEASE, RunningMesh, eventually, running_mesh, wait
from tests.mesh.traffic import Callers, GrpcCaller, Plan, Step, StreamCaller, Traffic, make_plans, sum_of, tensor

MODELS = ("direct_sum", "oldest_sum")
BRIEF = ("direct_brief", "oldest_brief")
LEFT = ("direct_left", "oldest_left")
IDLE_US = 2_000_000
"""Long enough that a sequence whose steps come one by one over a busy machine is not idle between two of them."""
BUSY_STEPS = 120
"""So many take longer than that."""
GRACE_US = 100_000
OLDEST = "oldest { max_candidate_sequences: 4 }"


@pytest.fixture(scope="module")
def stressed_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """Two gateways, two executors with four slots of each model."""
    directory = tmp_path_factory.mktemp("stress")
    models = directory / "models"
    strategies = {"direct": "direct { }", "oldest": OLDEST}
    for kind, strategy in strategies.items():
        given: dict[str, Any] = {"slots": 4, "strategy": strategy, "virtual_slots": False}
        add_sum_model(models, f"{kind}_sum", **given)
        add_sum_model(models, f"{kind}_brief", idle_us=IDLE_US, batch_s=0.02, **given)
        left = add_sum_model(models, f"{kind}_left", idle_us=600_000_000, **given)
        with (models / left / "config.pbtxt").open("a") as config:
            config.write(
                f'parameters: {{ key: "orphan_grace_microseconds", value: {{ string_value: "{GRACE_US}" }} }}\n'
            )
    with running_mesh(directory / "data", [models], gateways=2, executors=2, environment=LONG_LEASE) as mesh:
        yield mesh


@pytest.fixture
def mesh(stressed_mesh: RunningMesh) -> Iterator[RunningMesh]:
    """It, for one test; afterwards nothing has died or raised, and no slot is held."""
    yield stressed_mesh
    assert [] == stressed_mesh.deaths()
    assert [] == stressed_mesh.tracebacks()
    for model in (*MODELS, *BRIEF, *LEFT):
        wait(lambda model=model: not stressed_mesh.slots_held(model), f"no slot of {model} is held")


@pytest.mark.parametrize("model", MODELS)
async def test_slots_are_exhausted_and_refilled_by_rapid_and_by_long_sequences(
    mesh: RunningMesh, chance: random.Random, model: str
) -> None:
    """Bursts of sequences of one request, and short ones, among long ones that hold their slots: many times more than
    there are slots, and who waits too long is told so and takes nothing with it."""
    plans = [
        *make_plans(chance, 40, shortest=1, longest=1),
        *make_plans(chance, 12, shortest=2, longest=4),
        *make_plans(chance, 3, shortest=25, longest=40),
    ]
    # No streams: there, answers wait for those before them, so who holds a slot could wait for who wants it.
    async with Callers(mesh) as callers:
        slots = mesh.slots(model)
        caller = GrpcCaller(mesh.grpc())
        holders = [Step(f"holds {number}", 1, start=True) for number in range(slots)]
        await asyncio.gather(*(caller(model, step) for step in holders))
        late = await asyncio.gather(
            *(impatient(mesh, model, f"impatient {number}") for number in range(5)), return_exceptions=True
        )
        assert ["StatusCode.UNAVAILABLE"] * 5 == [getattr(error, "status", str)() for error in late], late
        running = asyncio.create_task(Traffic(model, callers, plans, chance, pause_s=0.0).run())
        for step in holders:
            await caller(model, Step(step.id, 0, end=True))
        await running
        await caller.close()


async def impatient(mesh: RunningMesh, model: str, name: str) -> int:
    """A START that waits for a slot a tenth of a second."""
    client: Any = grpc_aio.InferenceServerClient(mesh.grpc())
    try:
        flags = {"sequence_id": name, "sequence_start": True, "sequence_end": True, "timeout": 100_000}
        return sum_of(await client.infer(model, [tensor(grpc_aio.InferInput, 1)], **flags))
    finally:
        await client.close()


@pytest.mark.parametrize("model", BRIEF)
async def test_sequences_that_time_out_leave_their_neighbours_in_the_batch_alone(
    mesh: RunningMesh, chance: random.Random, model: str
) -> None:
    """Some fall silent in the middle and expire; others, whose steps are always on their way, go on beside them."""
    silent = [f"silent {chance.randrange(1 << 30)}" for _ in range(4)]
    busy = [Plan(f"busy {number}", tuple(chance.randint(-9, 9) for _ in range(BUSY_STEPS))) for number in range(3)]

    async def fall_silent(name: str) -> None:
        caller = GrpcCaller(mesh.grpc(1))
        assert 3 == await caller(model, Step(name, 3, start=True))
        await eventually(lambda: mesh.record(sequence_id(model, "", name)).get("st") == "x", "it expires")
        with pytest.raises(InferenceServerException, match="expired"):
            await caller(model, Step(name, 1))
        await caller.close()

    async def go_on(plan: Plan) -> list[int]:
        caller = StreamCaller(mesh.grpc())
        answers = await asyncio.gather(*(caller(model, step) for step in plan.steps))
        await caller.close()
        return answers

    async with asyncio.TaskGroup() as group:
        for name in silent:
            group.create_task(fall_silent(name))
        playing = [group.create_task(go_on(plan)) for plan in busy]

    assert [plan.sums for plan in busy] == [task.result() for task in playing]


@pytest.mark.parametrize("model", LEFT)
async def test_slots_of_clients_that_are_gone_are_free_after_the_grace(mesh: RunningMesh, model: str) -> None:
    """Their idle time is ten minutes: only the grace lets the ones that come after them in."""
    slots = mesh.slots(model)
    client: Any = grpc_aio.InferenceServerClient(mesh.grpc())

    async def steps() -> Any:
        for number in range(slots):
            yield {
                "model_name": model,
                "inputs": [tensor(grpc_aio.InferInput, 1)],
                "sequence_id": f"left {number}",
                "sequence_start": True,
            }
        await asyncio.sleep(3600)

    answers = client.stream_infer(steps())
    for _ in range(slots):
        result, error = await anext(answers)
        assert (1, None) == (sum_of(result), error)
    assert slots == mesh.slots_held(model)

    answers.cancel()
    await client.close()

    caller = GrpcCaller(mesh.grpc(1))
    after = [Step(f"after {number}", 2, start=True, end=True) for number in range(slots)]
    assert [2] * slots == await asyncio.gather(*(caller(model, step) for step in after))
    # One free slot would do for all of these.
    await eventually(lambda: mesh.record(sequence_id(model, "", "left 0")).get("st") == "x", "the first one expires")
    with pytest.raises(InferenceServerException, match="expired"):
        await caller(model, Step("left 0", 1))
    await caller.close()


@pytest.mark.parametrize("model", MODELS)
def test_one_sequence_from_many_threads_and_both_gateways(mesh: RunningMesh, model: str) -> None:
    """All add 1, over every protocol and gateway at once: whatever their order, each step has run once, one after the
    other. Of those who begin it at the same moment one does."""
    threads, each = 8, 12

    def add(thread: int) -> list[int]:
        library: Any = (grpc_sync, http_sync)[thread % 2]
        gateway = thread // 2 % 2
        url = mesh.grpc(gateway) if library is grpc_sync else mesh.http(gateway)
        with library.InferenceServerClient(url) as client:
            return [sum_of(client.infer(model, [tensor(library.InferInput, 1)], sequence_id=77)) for _ in range(each)]

    def begin(gateway: int) -> str:
        with grpc_sync.InferenceServerClient(mesh.grpc(gateway)) as client:
            flags: Any = {"sequence_id": 77, "sequence_start": True, "parameters": {"sequence_step": 1}}
            flags["request_id"] = f"begun by {gateway}"
            try:
                return str(sum_of(client.infer(model, [tensor(grpc_sync.InferInput, 1)], **flags)))
            except InferenceServerException as error:
                return str(error.message())

    with ThreadPoolExecutor(threads) as pool:
        begun = list(pool.map(begin, (0, 1)))
        answers = [answer for found in pool.map(add, range(threads)) for answer in found]
    with http_sync.InferenceServerClient(mesh.http()) as client:
        last: Any = client.infer(model, [tensor(http_sync.InferInput, 0)], sequence_id=77, sequence_end=True)

    assert 1 == begun.count("1"), begun
    assert list(range(2, threads * each + 2)) == sorted(answers)
    assert threads * each + 1 == sum_of(last)

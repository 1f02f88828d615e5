"""Sequences that change their executor because somebody wants it: drained executors, and those that are to stop."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from shared.contract.ids import sequence_id
from tests.mesh.model_repository import add_forgetful_model, add_sum_model
from tests.mesh.running_mesh import LONG_LEASE, PATIENCE_S, RunningMesh, eventually, running_mesh, seqmesh, wait
from tests.mesh.traffic import Call, Callers, Step, Traffic, make_plans

SLOTS = 64
MODELS = ("running_sum", "forgetful_sum")


@pytest.fixture(scope="module")
def module_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """Two executors; the running sum, and one whose state only its executor has."""
    directory = tmp_path_factory.mktemp("moving")
    repository = directory / "models"
    add_sum_model(repository, slots=SLOTS)
    add_forgetful_model(repository)
    # A stop is not to give up sequences that cannot be moved because the machine is slow, and nobody dies.
    patience = {**LONG_LEASE, "SEQMESH_DRAIN_TIMEOUT_S": "300"}
    with running_mesh(directory / "data", [repository], executors=2, environment=patience) as mesh:
        yield mesh


@pytest.fixture
def mesh(module_mesh: RunningMesh) -> Iterator[RunningMesh]:
    """With both executors serving. Afterwards no process has shown a traceback, and no slot is held."""
    mesh = module_mesh
    wait(lambda: serves_as_it_began(mesh), "both executors serve")
    yield mesh
    assert [] == mesh.tracebacks()
    wait(lambda: [0, 0] == [mesh.slots_held(model) for model in MODELS], "no slot is held")


def serves_as_it_began(mesh: RunningMesh) -> bool:
    """Whether both executors, and no other, take sequences of all models."""
    serving = [one.name for one in mesh.alive() if not any(served.closing for served in one.models)]
    return ["executor-1", "executor-2"] == sorted(serving) == sorted(one.name for one in mesh.alive())


def is_closing(mesh: RunningMesh, executor: str) -> bool:
    """Whether an executor takes no sequence any more, and those that it has stay until they end."""
    found = [one for one in mesh.registrations() if one.executor == executor]
    return bool(found) and all(served.closing for served in found[0].models)


async def begin(caller: Call, model: str, names: Sequence[str]) -> None:
    """Starts sequences, each with a sum of 1."""
    assert [1] * len(names) == await asyncio.gather(*(caller(model, Step(name, 1, start=True)) for name in names))


async def end(caller: Call, model: str, names: Sequence[str], value: int) -> list[int]:
    """Ends sequences with a last step; the sums."""
    return await asyncio.gather(*(caller(model, Step(name, value, end=True)) for name in names))


async def both_are_offered(mesh: RunningMesh, caller: Call) -> None:
    """Returns when new sequences are given to both executors: a leader hears of one that came with its next look. Other
    ones each time, because two that prefer the same executor may both find a spare slot there."""
    turns = itertools.count()
    held: list[dict[str, int]] = []
    async with asyncio.timeout(PATIENCE_S):
        while not held or any(not each["executor-1"] == each["executor-2"] == 1 for each in held):
            held.clear()
            turn = next(turns)
            pair = [f"one {turn}", f"another {turn}"]
            for model in MODELS:
                await begin(caller, model, pair)
                held.append(mesh.loads(model))
                await end(caller, model, pair, 0)


async def test_a_drained_executor_is_empty_and_nobody_notices_until_it_serves_again(
    mesh: RunningMesh, chance: random.Random
) -> None:
    over = asyncio.Event()
    async with Callers(mesh, streams=True) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic("running_sum", callers, make_plans(chance, 12), chance, pause_s=0.03, numbered=True)
        running = group.create_task(traffic.run_until(over))
        await eventually(lambda: mesh.loads("running_sum")["executor-1"] > 0, "it holds sequences")
        (before,) = [one.executor for one in mesh.alive() if one.name == "executor-1"]
        pid = mesh.pid("executor-1")

        assert "executor-1: asked to hand over all sequences" in await seqmesh(mesh, "drain", before, "--no-wait")
        shown = await seqmesh(mesh, "drain", "--list")
        # It may be drained already, and not be listed under its id any more.
        assert " serving " not in next((line for line in shown.splitlines() if before in line), "")
        said = await seqmesh(mesh, "drain", before)

        assert said.splitlines()[-1] == "executor-1: drained"
        assert "executor-1" not in {one.name for one in mesh.alive()}
        assert mesh.loads("running_sum").get("executor-1", 0) == 0
        listed = await seqmesh(mesh, "drain", "--list")
        # A former life of it may be listed, too.
        (other,) = [one.executor for one in mesh.alive()]
        assert " serving " in next(line for line in listed.splitlines() if other in line)
        await traffic.more(50)

        assert "serves again" in await seqmesh(mesh, "drain", "executor-1", "--undo")
        await eventually(lambda: mesh.loads("running_sum").get("executor-1", 0) > 0, "it takes sequences again")
        over.set()
        await running

    assert traffic.repeated == 0
    assert pid == mesh.pid("executor-1")
    assert before not in {one.executor for one in mesh.alive()}
    unknown = await seqmesh(mesh, "drain", "nobody", code=1)
    assert "no executor 'nobody' in this mesh; there are: executor-1, executor-2" in unknown
    assert "executor-1: was not drained\n" == await seqmesh(mesh, "drain", "executor-1", "--undo")
    assert "'nobody' is not drained; drained are: none" in await seqmesh(mesh, "drain", "nobody", "--undo", code=1)


async def test_an_executor_that_stops_serves_sequences_that_cannot_be_moved_until_they_end(mesh: RunningMesh) -> None:
    """It takes no others, and what can be moved goes at once."""
    fixed, movable = ([f"{kind} {number}" for number in range(12)] for kind in ("fixed", "movable"))
    async with Callers(mesh) as callers:
        caller = callers[0]
        await both_are_offered(mesh, caller)
        await begin(caller, "forgetful_sum", fixed)
        await begin(caller, "running_sum", movable)
        assert mesh.loads("forgetful_sum")["executor-1"] > 0
        pid = mesh.send("executor-1", signal.SIGTERM)
        await eventually(lambda: mesh.loads("running_sum").get("executor-1", 0) == 0, "what can be moved is moved")

        stays = mesh.loads("forgetful_sum")["executor-1"]
        assert [3] * 12 == await asyncio.gather(*(caller("forgetful_sum", Step(name, 2)) for name in fixed))
        assert [3] * 12 == await asyncio.gather(*(caller("running_sum", Step(name, 2)) for name in movable))
        late = [f"late {number}" for number in range(12)]
        await begin(caller, "forgetful_sum", late)
        assert stays == mesh.loads("forgetful_sum")["executor-1"]

        for model, names, expected in (
            ("forgetful_sum", fixed, 6),
            ("running_sum", movable, 6),
            ("forgetful_sum", late, 4),
        ):
            assert [expected] * 12 == await end(caller, model, names, 3)
        await eventually(lambda: mesh.pid("executor-1") != pid, "it ends when they have ended, and is started again")
    await eventually(lambda: "executor-1" in {one.name for one in mesh.alive()}, "it is back")
    assert "sequences are lost with their executor" not in mesh.log("executor-1")


def is_even(held: dict[str, int], executors: int) -> bool:
    """Whether load is spread over so many executors, within 1.25 of the mean."""
    counts = [count for count in held.values() if count]
    return len(counts) == executors and max(counts) <= 1.25 * sum(counts) / executors


async def step_all(
    callers: Sequence[Call], names: Sequence[str], chance: random.Random, *, end: bool = False
) -> set[int]:
    """Takes every sequence one step further, adding 1; the sums, which are all the same."""
    steps = (chance.choice(callers)("running_sum", Step(name, 1, end=end)) for name in names)
    return set(await asyncio.gather(*steps))


@pytest.mark.timeout(240)
async def test_load_spreads_over_executors_that_join_and_back_to_one_and_no_answer_is_wrong(
    mesh: RunningMesh, chance: random.Random
) -> None:
    """60 sequences over 2, 3, 4, then 1 executor."""
    names = [f"spread {number}" for number in range(60)]
    total = 1
    async with Callers(mesh, streams=True) as callers:
        caller = callers[0]
        await begin(caller, "running_sum", names)
        with ExitStack() as spares:
            for number in (3, 4):
                spares.enter_context(mesh.spare("executor", f"spare-{number}"))
                async with asyncio.timeout(2 * PATIENCE_S):
                    while not is_even(mesh.loads("running_sum"), number):
                        total += 1
                        assert {total} == await step_all(callers, names, chance)
            # Some may be on their way from one to another.
            await eventually(lambda: 60 == mesh.slots_held("running_sum"), "each is on one executor")
            await seqmesh(mesh, "drain", "executor-1", "executor-2", "spare-3")
            total += 1
            assert {total} == await step_all(callers, names, chance)
            assert 60 == mesh.loads("running_sum")["spare-4"]
            await seqmesh(mesh, "drain", "--undo", "executor-1", "executor-2", "spare-3")
            await eventually(lambda: len(mesh.alive()) == 4, "the drained executors are back")
            assert {total + 1} == await step_all(callers, names, chance, end=True)


async def test_one_sequence_is_moved_where_an_operator_wants_it(mesh: RunningMesh) -> None:
    async with Callers(mesh) as callers:
        caller = callers[0]
        await begin(caller, "running_sum", ["42"])
        await begin(caller, "forgetful_sum", ["42"])
        await caller("running_sum", Step(42, 5, start=True))
        owner = mesh.record(sequence_id("running_sum", "", "42"))["ow"]
        (other,) = [one for one in mesh.alive() if one.executor != owner]

        said = await seqmesh(mesh, "seq", "move", "running_sum", "42", "--string")
        assert said == f"moved from {owner} to {other.executor}\n"
        assert 3 == await caller("running_sum", Step("42", 2))
        assert owner != mesh.record(sequence_id("running_sum", "", "42"))["ow"]
        back = await seqmesh(mesh, "seq", "move", "running_sum", "42", "--string", "--to", owner)
        assert f"to {owner}" in back
        there = await seqmesh(mesh, "seq", "move", "running_sum", "42", "--string", "--to", owner, code=1)
        assert f"the sequence is on {owner} already" in there
        assert 4 == await caller("running_sum", Step("42", 1, end=True))

        refused = await seqmesh(mesh, "seq", "move", "forgetful_sum", "42", "--string", code=1)
        assert "only its model knows the sequence's state" in refused
        assert "43: there is no such open sequence" in await seqmesh(mesh, "seq", "move", "running_sum", "43", code=1)
        nobody = await seqmesh(mesh, "seq", "move", "running_sum", "42", "--to", "nobody", code=1)
        assert "no executor 'nobody' serves 'running_sum'; it is served by: executor-1, executor-2" in nobody
        assert 5 == await caller("running_sum", Step(42, 0, end=True))
        bound = mesh.record(sequence_id("forgetful_sum", "", "42"))["ow"]
        await seqmesh(mesh, "drain", bound, "--no-wait")
        await eventually(lambda: is_closing(mesh, bound), "it goes on with what only its model knows")
        undone = await seqmesh(mesh, "drain", bound, "--undo")
        assert f"{bound}: serves again after the end of its last 1 sequence (of forgetful_sum)" in undone
        assert 1 == await caller("forgetful_sum", Step("42", 0, end=True))
        await eventually(lambda: serves_as_it_began(mesh), "it serves again")

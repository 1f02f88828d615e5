"""Ensembles over real processes: two states, or one model twice, and whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_sync
import tritonclient.http as http_sync
from tritonclient.utils import InferenceServerException

from tests.mesh.ensemble_models import EnsembleSource, SumOfSums, add_example, add_failing_model
from tests.mesh.model_repository import add_sum_model
from tests.mesh.running_mesh import RunningMesh, running_mesh, wait
from tests.mesh.traffic import Callers, Traffic, make_plans, sum_of, tensor


def repository_of_ensembles(repository: Path) -> Path:
    """The models of these tests."""
    add_sum_model(repository, idle_us=20_000_000)
    add_sum_model(repository, "brief_sum", idle_us=500_000)
    add_example(repository)
    moody = add_failing_model(repository)
    EnsembleSource(
        "moody_between",
        [
            ("running_sum", {"INPUT": "INPUT"}, {"OUTPUT": "sum"}),
            (moody, {"NUMBER": "sum"}, {"NEXT": "passed"}),
            ("running_sum", {"INPUT": "passed"}, {"OUTPUT": "OUTPUT"}),
        ],
    ).add(repository)
    EnsembleSource(
        "moody_behind",
        [
            ("running_sum", {"INPUT": "INPUT"}, {"OUTPUT": "sum"}),
            (moody, {"NUMBER": "sum"}, {"NEXT": "OUTPUT"}),
        ],
    ).add(repository)
    EnsembleSource(
        "brief_behind",
        [
            ("running_sum", {"INPUT": "INPUT"}, {"OUTPUT": "sum"}),
            ("brief_sum", {"INPUT": "sum"}, {"OUTPUT": "OUTPUT"}),
        ],
    ).add(repository)
    EnsembleSource(
        "nested",
        [
            ("sum_of_sums", {"INPUT": "INPUT"}, {"OUTPUT": "inner"}),
            ("plus_one", {"NUMBER": "inner"}, {"NEXT": "OUTPUT"}),
        ],
    ).add(repository)
    EnsembleSource(
        "plain",
        [
            ("plus_one", {"NUMBER": "INPUT"}, {"NEXT": "one"}),
            ("plus_one", {"NUMBER": "one"}, {"NEXT": "OUTPUT"}),
        ],
        max_batch_size=8,
    ).add(repository)
    return repository


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    directory = tmp_path_factory.mktemp("ensembles")
    models = [repository_of_ensembles(directory / "models")]
    with running_mesh(directory / "data", models, gateways=2, executors=2) as mesh:
        yield mesh


def infer(mesh: RunningMesh, model: str, value: int, *, gateway: int = 0, **flags: Any) -> int:
    with http_sync.InferenceServerClient(mesh.http(gateway)) as client:
        return sum_of(client.infer(model, [tensor(http_sync.InferInput, value)], **flags))


def sums_of_sums(chance: random.Random, count: int, *, longest: int = 12) -> list[SumOfSums]:
    plans = make_plans(chance, count, shortest=2, longest=longest)
    return [SumOfSums(plan.id, tuple(value % 90 for value in plan.values)) for plan in plans]


def test_an_ensemble_is_listed_and_described(shared: RunningMesh) -> None:
    with grpc_sync.InferenceServerClient(shared.grpc()) as typed:
        client: Any = typed
        assert client.is_model_ready("sum_of_sums")
        metadata = client.get_model_metadata("sum_of_sums", as_json=True)
        config = client.get_model_config("sum_of_sums", as_json=True)["config"]
    with http_sync.InferenceServerClient(shared.http()) as typed_http:
        over_http: Any = typed_http
        index = {line["name"]: line["state"] for line in over_http.get_model_repository_index()}

    assert "ensemble" == metadata["platform"]
    assert [("OUTPUT", ["-1", "1"]), ("SUM", ["-1", "1"])] == [(o["name"], o["shape"]) for o in metadata["outputs"]]
    assert ["plus_one", "running_sum", "running_sum"] == [
        step["model_name"] for step in config["ensemble_scheduling"]["step"]
    ]
    assert "instance_group" not in config
    assert "READY" == index["sum_of_sums"]


def test_stateless_steps_take_batches(shared: RunningMesh) -> None:
    with http_sync.InferenceServerClient(shared.http()) as typed:
        client: Any = typed
        given = http_sync.InferInput("INPUT", [3, 1], "INT32")
        given.set_data_from_numpy(np.array([[1], [2], [3]], np.int32))
        answer = client.infer("plain", [given])

    assert [[3], [4], [5]] == answer.as_numpy("OUTPUT").tolist()


async def test_sequences_of_two_states_over_every_protocol(shared: RunningMesh) -> None:
    chance = random.Random(7)
    async with Callers(shared, streams=True) as callers:
        await Traffic("sum_of_sums", callers, sums_of_sums(chance, 24), chance, pause_s=0.001).run()


async def test_steps_pipelined_on_a_stream_stay_in_order(shared: RunningMesh) -> None:
    chance = random.Random(8)
    async with Callers(shared, streams=True) as callers:
        stream = callers[2]
        plans = sums_of_sums(chance, 6, longest=30)
        answers = await asyncio.gather(
            *(asyncio.gather(*(stream("sum_of_sums", step) for step in plan.steps)) for plan in plans)
        )

    assert [plan.sums for plan in plans] == [list(answer) for answer in answers]


def test_an_ensemble_within_an_ensemble(shared: RunningMesh) -> None:
    first = infer(shared, "nested", 4, sequence_id=5, sequence_start=True)
    last = infer(shared, "nested", 4, sequence_id=5, sequence_end=True)

    assert (6, 16) == (first, last)


def test_a_client_of_the_inner_model_does_not_meet_the_ensembles_sequence(shared: RunningMesh) -> None:
    infer(shared, "sum_of_sums", 1, sequence_id="mine", sequence_start=True)
    own = infer(shared, "running_sum", 100, sequence_id="mine", sequence_start=True)
    both = infer(shared, "sum_of_sums", 1, sequence_id="mine", sequence_end=True)
    own_again = infer(shared, "running_sum", 100, sequence_id="mine", sequence_end=True)

    assert (100, 6, 200) == (own, both, own_again)


def test_a_repeated_step_is_answered_from_its_records(shared: RunningMesh) -> None:
    def step(number: int, **flags: Any) -> int:
        same = {"sequence_id": 77, "request_id": f"r{number}", **flags}
        answers = {infer(shared, "sum_of_sums", number, gateway=gateway, **same) for gateway in (0, 1, 0)}
        assert 1 == len(answers), answers
        return answers.pop()

    answers = [step(1, sequence_start=True), step(2), step(3, sequence_end=True)]

    assert SumOfSums(77, (1, 2, 3)).sums == answers


def test_a_start_begins_anew_in_every_step(shared: RunningMesh) -> None:
    infer(shared, "sum_of_sums", 50, sequence_id=78, sequence_start=True)
    infer(shared, "sum_of_sums", 50, sequence_id=78)
    first = infer(shared, "sum_of_sums", 1, sequence_id=78, sequence_start=True)
    second = infer(shared, "sum_of_sums", 1, sequence_id=78, sequence_end=True)

    assert (2, 6) == (first, second)


def test_errors_name_the_ensemble(shared: RunningMesh) -> None:
    with pytest.raises(InferenceServerException) as no_id:
        infer(shared, "sum_of_sums", 1)
    with pytest.raises(InferenceServerException) as no_start:
        infer(shared, "sum_of_sums", 1, sequence_id=4711)

    assert (
        "in ensemble 'sum_of_sums', inference request to model 'running_sum' must specify a non-zero or non-empty "
        "correlation ID"
    ) == no_id.value.message()
    assert str(no_start.value.message()).startswith(
        "in ensemble 'sum_of_sums', inference request for sequence 4711 to model 'running_sum' must specify the START"
    )


def test_a_failure_between_two_states_ends_the_sequence_in_both(shared: RunningMesh) -> None:
    infer(shared, "moody_between", 10, sequence_id=91, sequence_start=True)
    with pytest.raises(InferenceServerException) as failed:
        infer(shared, "moody_between", 3, sequence_id=91)
    with pytest.raises(InferenceServerException) as over:
        infer(shared, "moody_between", 1, sequence_id=91)
    again = infer(shared, "moody_between", 5, sequence_id=91, sequence_start=True, sequence_end=True)

    assert str(failed.value.message()).startswith("in ensemble 'moody_between', thirteen (the sequence is over")
    assert "START" in str(over.value.message())
    assert 5 == again
    wait(lambda: not shared.slots_held("running_sum"), "no slot is held")


def test_a_failure_behind_the_only_state_leaves_the_sequence_as_it_is(shared: RunningMesh) -> None:
    infer(shared, "moody_behind", 10, sequence_id=92, sequence_start=True)
    with pytest.raises(InferenceServerException) as failed:
        infer(shared, "moody_behind", 3, sequence_id=92)
    last = infer(shared, "moody_behind", 1, sequence_id=92, sequence_end=True)

    assert "in ensemble 'moody_behind', thirteen" == failed.value.message()
    assert 14 == last


def test_when_one_state_expires_the_sequence_is_over_in_both(shared: RunningMesh) -> None:
    infer(shared, "brief_behind", 10, sequence_id=93, sequence_start=True)
    wait(lambda: not shared.slots_held("brief_sum"), "the second state has expired")
    with pytest.raises(InferenceServerException) as expired:
        infer(shared, "brief_behind", 1, sequence_id=93)
    with pytest.raises(InferenceServerException) as over:
        infer(shared, "brief_behind", 1, sequence_id=93)

    assert "expired" in str(expired.value.message())
    assert "START" in str(over.value.message())
    wait(lambda: not shared.slots_held("running_sum"), "no slot is held")


def test_statistics_count_the_ensemble_and_its_steps(shared: RunningMesh) -> None:
    def counts() -> tuple[int, int]:
        with http_sync.InferenceServerClient(shared.http()) as typed:
            client: Any = typed
            stats = client.get_inference_statistics()["model_stats"]
        found = {one["name"]: one["inference_stats"]["success"]["count"] for one in stats}
        return found["plain"], found["plus_one"]

    before = counts()
    infer(shared, "plain", 1)
    infer(shared, "plain", 2)

    wait(lambda: (before[0] + 2, before[1] + 4) == counts(), "both are counted")


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("service", ["executor", "gateway"])
async def test_sums_are_right_though_a_process_is_killed_in_the_middle(
    shared: RunningMesh, service: str, *, numbered: bool
) -> None:
    chance = random.Random(9)
    async with Callers(shared) as callers:
        traffic = Traffic(
            "sum_of_sums", callers, sums_of_sums(chance, 24, longest=20), chance, retries=True, numbered=numbered
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.run())
            for share, name in zip((0.2, 0.5), shared.names(service), strict=False):
                await traffic.progress(share)
                shared.send(name, signal.SIGKILL)
    wait(lambda: len(shared.alive()) == 2, "executors are back")
    wait(lambda: shared.is_ready(0) and shared.is_ready(1), "gateways are back")
    wait(lambda: not shared.slots_held("running_sum"), "no slot is held")


def test_an_ensemble_is_loaded_and_unloaded_with_its_models(make_mesh: Any, tmp_path: Path) -> None:
    """Model control: an ensemble brings its models, is not ready without them, and takes them along if asked to."""
    models = repository_of_ensembles(tmp_path / "repository")
    explicit = {"SEQMESH_MODEL_CONTROL_MODE": "explicit", "SEQMESH_LOAD_MODEL": "nested"}
    mesh: RunningMesh = make_mesh(models=(models,), environment=explicit)
    with http_sync.InferenceServerClient(mesh.http()) as typed:
        client: Any = typed

        def ready() -> list[str]:
            return [line["name"] for line in client.get_model_repository_index() if line.get("state") == "READY"]

        everything = ["nested", "plus_one", "running_sum", "sum_of_sums"]
        wait(lambda: everything == ready(), "the ensemble's models are loaded")
        client.unload_model("running_sum")
        wait(lambda: ["plus_one"] == ready(), "ensembles without a model are not ready")
        reason = next(line["reason"] for line in client.get_model_repository_index() if line["name"] == "sum_of_sums")
        with pytest.raises(InferenceServerException) as unavailable:
            infer(mesh, "sum_of_sums", 1, sequence_id=1, sequence_start=True)
        client.load_model("sum_of_sums")
        again = infer(mesh, "nested", 1, sequence_id=1, sequence_start=True, sequence_end=True)
        client.load_model("plain")
        client.unload_model("plain", unload_dependents=False)
        kept = ready()
        client.unload_model("nested", unload_dependents=True)

        assert "ensemble 'sum_of_sums' depends on 'running_sum' which has no loaded version." == reason
        assert "Request for unknown model: 'sum_of_sums' has no available versions" == unavailable.value.message()
        assert 3 == again
        assert everything == kept
        assert [] == ready()


def is_equal_or_over(answer: object) -> bool:
    """Whether a second step of 1 was answered from equal states, without or with a step of 1 between, or refused."""
    if isinstance(answer, InferenceServerException):
        return "START" in str(answer.message())
    return answer in (6, 12)


async def test_a_client_that_leaves_in_the_middle_leaves_equal_states(shared: RunningMesh) -> None:
    """Steps without a name whose callers leave at any moment: what was taken back and what was done is the same in both
    states, or the sequence is over. Never is an answer made of states that differ."""
    chance = random.Random(11)
    async with Callers(shared) as callers:
        for number in range(12):
            plan = SumOfSums(f"left {number}", (1, 1))
            first, second = plan.steps
            unnamed = {"request_id": "", "number": 0}
            assert 2 == await callers[0]("sum_of_sums", replace(first, **unnamed))
            leaving = asyncio.create_task(callers[number % 2]("sum_of_sums", replace(second, end=False, **unnamed)))
            await asyncio.sleep(chance.random() * 0.01)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            (answer,) = await asyncio.gather(
                callers[0]("sum_of_sums", replace(second, **unnamed)), return_exceptions=True
            )
            assert is_equal_or_over(answer), answer
    wait(lambda: not shared.slots_held("running_sum"), "no slot is held")


async def test_a_gateway_that_dies_with_unnamed_steps_is_never_answered_from_states_that_differ(
    shared: RunningMesh,
) -> None:
    async with Callers(shared) as callers:
        plans = [SumOfSums(f"orphan {number}", (1,) * 3) for number in range(6)]
        unnamed = {"request_id": "", "number": 0, "end": False}
        await asyncio.gather(*(callers[0]("sum_of_sums", replace(plan.steps[0], **unnamed)) for plan in plans))
        open_steps = [
            asyncio.create_task(callers[0]("sum_of_sums", replace(plan.steps[1], **unnamed))) for plan in plans
        ]
        await asyncio.sleep(0.004)
        shared.kill(shared.names("gateway")[0])
        await asyncio.gather(*open_steps, return_exceptions=True)
        answers = await asyncio.gather(
            *(callers[2]("sum_of_sums", replace(plan.steps[1], request_id="", number=0, end=True)) for plan in plans),
            return_exceptions=True,
        )
    assert all(map(is_equal_or_over, answers)), answers
    wait(lambda: shared.is_ready(0), "the gateway is back")
    wait(lambda: not shared.slots_held("running_sum"), "no slot is held")

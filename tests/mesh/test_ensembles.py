"""Ensembles over real processes: two states, or one model twice, and whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_sync
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_sync
from tritonclient.utils import InferenceServerException

from gateway.requests.ensembles.progress import PATIENCE_MS
from tests.mesh.conftest import wait_until_equal
from tests.mesh.ensemble_models import (
    EnsembleSource,
    SumOfSums,
    add_example,
    add_failing_model,
    add_late_model,
    add_sour_sum,
)
from tests.mesh.model_repository import add_streaming_models, add_sum_model
from tests.mesh.raw_http import get
from tests.mesh.running_mesh import ANY_PORTS, PATIENCE_S, RunningMesh, eventually, running_mesh, wait
from tests.mesh.streams import VALUES, Reader, with_empty_finals
from tests.mesh.traffic import Callers, Traffic, infer, make_plans, sum_of, tensor

SLOW_S = 1.0
"""How long the slow models take for a batch."""
SUMS_OF_TWO = {
    "slow_first": ("slow_sum", "running_sum"),
    "slow_behind": ("running_sum", "slow_sum"),
    "narrow_first": ("narrow_sum", "running_sum"),
    "narrow_behind": ("running_sum", "narrow_sum"),
    "hasty": ("hasty_sum", "hasty_sum"),
    "forgetful_behind": ("running_sum", "forgetful_sum"),
    "sour_behind": ("running_sum", "sour_sum"),
}
"""Ensembles that sum the sums of a first model by a second one."""


def repository_of_ensembles(repository: Path) -> Path:
    """The models of these tests."""
    add_sum_model(repository)
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
    add_streaming_models(repository)
    EnsembleSource(
        "streamed_then_one",
        [
            ("streamed_sum", {"INPUT": "INPUT"}, {"OUTPUT": "number"}),
            ("plus_one", {"NUMBER": "number"}, {"NEXT": "OUTPUT"}),
        ],
    ).add(repository)
    for name, last in (
        ("sum_then_streamed", "plus_one"),
        ("sum_then_moody", moody),
    ):
        EnsembleSource(
            name,
            [
                ("running_sum", {"INPUT": "INPUT"}, {"OUTPUT": "sum"}),
                ("streamed_sum", {"INPUT": "sum"}, {"OUTPUT": "number"}),
                (last, {"NUMBER": "number"}, {"NEXT": "OUTPUT"}),
            ],
        ).add(repository)
    EnsembleSource(
        "streams_of_streams",
        [
            ("streamed_count", {"INPUT": "INPUT"}, {"OUTPUT": "number"}),
            ("streamed_count", {"INPUT": "number"}, {"OUTPUT": "counted"}),
            ("plus_one", {"NUMBER": "counted"}, {"NEXT": "OUTPUT"}),
        ],
    ).add(repository)
    EnsembleSource(
        "nested",
        [
            ("sum_of_sums", {"INPUT": "INPUT"}, {"OUTPUT": "inner"}),
            ("plus_one", {"NUMBER": "inner"}, {"NEXT": "OUTPUT"}),
        ],
    ).add(repository)
    add_sum_model(repository, "slow_sum", batch_s=SLOW_S)
    add_sum_model(repository, "narrow_sum", slots=1, virtual_slots=False)
    add_sum_model(repository, "forgetful_sum", retry_replies=1)
    add_sum_model(repository, "hasty_sum", slots=2, idle_us=500_000, virtual_slots=False)
    add_sour_sum(repository, seconds=SLOW_S)
    late = add_late_model(repository, seconds=SLOW_S)
    for name, (first, last) in SUMS_OF_TWO.items():
        EnsembleSource(
            name,
            [
                (first, {"INPUT": "INPUT"}, {"OUTPUT": "sum"}),
                (last, {"INPUT": "sum"}, {"OUTPUT": "OUTPUT"}),
            ],
        ).add(repository)
    EnsembleSource(
        "late_between",
        [
            ("running_sum", {"INPUT": "INPUT"}, {"OUTPUT": "sum"}),
            (late, {"NUMBER": "sum"}, {"NEXT": "passed"}),
            ("running_sum", {"INPUT": "passed"}, {"OUTPUT": "OUTPUT"}),
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


def test_a_retry_whose_answer_a_follower_has_forgotten_is_told_so_and_the_sequence_goes_on(shared: RunningMesh) -> None:
    """As with large outputs, of which only the newest is kept; the first state keeps its small ones for longer."""

    def step(number: int, **flags: Any) -> int:
        named = {"sequence_id": 80, "parameters": {"sequence_step": number}}
        return infer(shared, "forgetful_behind", number, **named, **flags)

    first = [step(1, sequence_start=True), step(2), step(3)]
    with pytest.raises(InferenceServerException, match="sequence 80 of model 'forgetful_sum' exists"):
        step(1, sequence_start=True)
    with pytest.raises(InferenceServerException, match="was answered, and its answer is kept no longer"):
        step(2)
    last = [step(3), step(4, sequence_end=True)]

    assert ([1, 4, 10], [10, 20]) == (first, last)


def test_a_start_begins_anew_in_every_step(shared: RunningMesh) -> None:
    infer(shared, "sum_of_sums", 50, sequence_id=78, sequence_start=True)
    infer(shared, "sum_of_sums", 50, sequence_id=78)
    first = infer(shared, "sum_of_sums", 1, sequence_id=78, sequence_start=True)
    second = infer(shared, "sum_of_sums", 1, sequence_id=78, sequence_end=True)

    assert (2, 6) == (first, second)
    wait(lambda: not shared.slots_held("running_sum"), "no slot is held")


def test_a_start_needs_no_second_slot_for_a_step_that_has_one(shared: RunningMesh) -> None:
    """Every slot of the second state is held, one of them by the run that the START cuts off."""
    with held_slots(shared, "narrow_sum", "narrow_behind") as holders:
        assert 1 == infer(shared, "narrow_behind", 1, sequence_id=holders[0], sequence_start=True)


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


async def test_a_step_behind_one_that_failed_in_the_second_state_is_not_answered(shared: RunningMesh) -> None:
    """Both are there before the first one fails; the first state has done both."""

    async def steps() -> Any:
        for number, value in enumerate((10, 3, 1)):
            named: dict[str, Any] = {"sequence_id": 93, "sequence_start": number == 0}
            yield {"model_name": "sour_behind", "inputs": [tensor(grpc_aio.InferInput, value)], **named}

    told: list[str | int] = []
    async with grpc_aio.InferenceServerClient(shared.grpc()) as client, asyncio.timeout(PATIENCE_S):
        responses: Any = client.stream_infer(steps())
        async for result, error in responses:
            told.append(sum_of(result) if error is None else str(error.message()))

    first, failed, behind = told
    assert 10 == first
    assert "thirteen" in str(failed)
    assert "START" in str(behind), behind
    wait(lambda: not shared.slots_held("sour_sum"), "no slot is held")


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


@pytest.mark.parametrize("service", ["executor", "gateway"])
async def test_sums_are_right_though_a_process_is_killed_in_the_middle(shared: RunningMesh, service: str) -> None:
    """Steps that are known by their request ids, and steps that are known by their numbers."""
    chance = random.Random(9)
    async with Callers(shared) as callers:
        traffics = [
            Traffic(
                "sum_of_sums", callers, sums_of_sums(chance, 12, longest=20), chance, retries=True, numbered=numbered
            )
            for numbered in (False, True)
        ]
        async with asyncio.TaskGroup() as group:
            for traffic in traffics:
                group.create_task(traffic.run())
            for share, name in zip((0.2, 0.5), shared.names(service), strict=False):
                for traffic in traffics:
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
    states, or the sequence is over. Never is an answer made of states that differ, and no step waits for one that was
    taken back."""
    chance = random.Random(11)
    async with Callers(shared) as callers:
        for number in range(48):
            plan = SumOfSums(f"left {number}", (1, 1))
            first, second = plan.steps
            unnamed = {"request_id": "", "number": 0}
            assert 2 == await callers[0]("sum_of_sums", replace(first, **unnamed))
            leaving = asyncio.create_task(callers[number % 2]("sum_of_sums", replace(second, end=False, **unnamed)))
            await asyncio.sleep(chance.random() * 0.01)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            began = time.monotonic()
            (answer,) = await asyncio.gather(
                callers[0]("sum_of_sums", replace(second, **unnamed)), return_exceptions=True
            )
            assert is_equal_or_over(answer), answer
            assert time.monotonic() - began < PATIENCE_MS / 1000
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


# -- decoupled steps ------------------------------------------------------------------------------------------------


async def stream(mesh: RunningMesh, model: str, value: int, **asked: Any) -> list[tuple[int | str | None, bool]]:
    """What a stream gives for one request, until its final answer: a number, the text of an error or None, and whether
    the answer said that it is the last one."""

    async def one() -> Any:
        yield {"model_name": model, "inputs": [tensor(grpc_aio.InferInput, value)], **asked}

    got: list[tuple[int | str | None, bool]] = []
    async with grpc_aio.InferenceServerClient(mesh.grpc()) as client, asyncio.timeout(PATIENCE_S):
        responses: Any = client.stream_infer(one())
        async for result, error in responses:
            if error is not None:
                got.append((str(error.message()), True))
                continue
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            got.append((sum_of(result) if response.outputs else None, final))
    return got


async def test_each_answer_of_a_decoupled_step_goes_through_the_steps_behind_it(shared: RunningMesh) -> None:
    plain = await stream(shared, "streams_of_streams", 3)
    request = {"model_name": "streams_of_streams", "inputs": [tensor(grpc_sync.InferInput, 2)]}
    flagged = await asyncio.to_thread(with_empty_finals, shared.grpc(), request)

    assert [2, 2, 3, 2, 3, 4] == [number for number, _ in plain]
    # The flag comes with the last answer or behind it, as in Triton: whichever step ends later.
    assert [2, 2, 3] == [number for _, number in flagged if number is not None]
    assert [False] * (len(flagged) - 1) + [True] == flagged.finals


async def test_an_ensemble_is_decoupled_if_one_of_its_steps_is(shared: RunningMesh) -> None:
    with http_sync.InferenceServerClient(shared.http()) as typed:
        client: Any = typed
        told = [
            client.get_model_config(model)["model_transaction_policy"]["decoupled"]
            for model in ("streamed_then_one", "sum_of_sums")
        ]
        with pytest.raises(InferenceServerException) as refused:
            infer(shared, "streamed_then_one", 1, sequence_id=1, sequence_start=True)
        events = client._post(  # tritonclient has no call for the generate extension
            "v2/models/streams_of_streams/generate_stream", '{"INPUT": 2}', None, None
        ).read()

    assert [True, False] == told
    assert "doesn't support models with decoupled transaction policy" in str(refused.value.message())
    assert [2, 2, 3] == [json.loads(line[6:])["OUTPUT"] for line in events.splitlines() if line.startswith(b"data: ")]


async def test_an_error_behind_a_decoupled_step_ends_the_request_and_not_the_sequence(shared: RunningMesh) -> None:
    """The steps before it did their part, so the states are equal, and the sequence goes on."""
    same: dict[str, Any] = {"sequence_id": 300}
    first = await stream(shared, "sum_then_moody", 15, sequence_start=True, request_id="a", **same)
    again = await stream(shared, "sum_then_moody", 15, sequence_start=True, request_id="a", **same)
    second = await stream(shared, "sum_then_moody", 2, sequence_end=True, **same)

    # The step behind fails with 13.
    failed = ("in ensemble 'sum_then_moody', thirteen", True)
    assert [*((number, False) for number in range(1, 13)), failed] == first
    assert first == again
    # The first state is 17 now, and the second one goes on from 15.
    assert list(range(16, 33)) == [number for number, _ in second]
    wait(lambda: not shared.slots_held("running_sum") and not shared.slots_held("streamed_sum"), "no slot is held")


@pytest.mark.parametrize("service", ["executor", "gateway"])
@pytest.mark.parametrize("model", ["streamed_then_one", "sum_then_streamed"])
async def test_every_answer_of_a_decoupled_ensemble_comes_once_though_processes_are_killed(
    shared: RunningMesh, model: str, service: str
) -> None:
    """Half of the clients of a gateway that dies say which answer they lack first; the others get all of them again."""
    readers = [Reader(f"killed {service} {number}", model) for number in range(4)]

    async def play(reader: Reader, *, tells: bool) -> None:
        first = reader.step(0, sequence=True, request_id="a")
        if service == "gateway":
            first = await reader.lose(shared.grpc(0), tells=tells)
        await reader.read(shared.grpc(1), first)
        # Answers of two requests come as they come; those of one in their order.
        await reader.read(shared.grpc(1), reader.step(1, sequence=True, request_id="b"))

    async with asyncio.TaskGroup() as group:
        for number, reader in enumerate(readers):
            group.create_task(play(reader, tells=number % 2 == 0))
        await eventually(lambda: all(len(reader.got) > 8 for reader in readers), "answers come")
        for name in shared.names(service)[: 1 if service == "gateway" else 2]:
            shared.kill(name)

    # The sums of the first state are 60 and 100: it is how far the second one counts.
    count = sum(VALUES) if model == "streamed_then_one" else 2 * VALUES[0] + VALUES[1]
    for reader in readers:
        assert list(range(2, count + 2)) == reader.got
    wait(lambda: shared.is_ready(0) and len(shared.alive()) == 2, "everything is back")
    wait(lambda: not shared.slots_held("running_sum") and not shared.slots_held("streamed_sum"), "no slot is held")


async def test_a_client_that_leaves_a_decoupled_ensemble_leaves_nothing_running(shared: RunningMesh) -> None:
    asked = 300  # it takes seconds: this client leaves in the middle, however slow it is itself
    before = executed(shared, "plus_one")

    async def one() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "streams_of_streams", "inputs": [tensor(grpc_aio.InferInput, asked)]}

    async with grpc_aio.InferenceServerClient(shared.grpc()) as client, asyncio.timeout(PATIENCE_S):
        responses: Any = client.stream_infer(one())
        async for _, error in responses:
            assert error is None
            break
        assert in_flight(shared)
        responses.cancel()
    await eventually(lambda: not in_flight(shared) and not open_work(shared), "no request is open")

    # Of so many answers the last step would have taken each.
    assert executed(shared, "plus_one") - before < asked * (asked + 1) // 2


# -- timeouts -------------------------------------------------------------------------------------------------------


def in_flight(mesh: RunningMesh) -> int:
    """Requests that wait for an answer in a gateway, the steps of ensembles and their clients' requests alike."""
    return sum(metric(mesh, gateway, "seqmesh_gateway_requests_in_flight") for gateway in range(len(mesh.gateways)))


def metric(mesh: RunningMesh, gateway: int, name: str) -> int:
    page = get(f"{mesh.state.host}:{mesh.gateways[gateway].metrics_port}", "/metrics").body.decode()
    (value,) = re.findall(rf"^{name} (\S+)$", page, re.MULTILINE)
    return int(float(value))


def open_work(mesh: RunningMesh) -> list[Any]:
    """The keys of stateless requests that wait or run."""
    return list(mesh.redis.scan_iter(match=f"{mesh.keys.prefix}*work:*:messages", count=1000))


def executed(mesh: RunningMesh, model: str) -> int:
    """Inferences of a model so far."""
    with http_sync.InferenceServerClient(mesh.http()) as typed:
        client: Any = typed
        (found,) = client.get_inference_statistics(model)["model_stats"]
    return int(found["inference_count"])


@contextmanager
def held_slots(mesh: RunningMesh, model: str, ensemble: str) -> Generator[list[str]]:
    """All slots of a model are taken by sequences of an ensemble, which go on and end behind the block."""
    wait(lambda: not mesh.slots_held("running_sum") and not mesh.slots_held(model), "nothing is left of other tests")
    ids = [f"holder {number}" for number in range(mesh.slots(model))]
    for number, name in enumerate(ids):
        assert 1 + number == infer(mesh, ensemble, 1 + number, sequence_id=name, sequence_start=True)
    yield ids
    for number, name in enumerate(ids):
        assert 3 * (1 + number) == infer(mesh, ensemble, 1 + number, sequence_id=name, sequence_end=True)


TIMED_OUT = "timeout of the corresponding sequence has been expired"


@pytest.mark.parametrize(("ensemble", "told"), [("narrow_first", ""), ("narrow_behind", " (the sequence is over, ")])
def test_a_timeout_while_a_state_waits_for_a_slot_leaves_neither_state(
    shared: RunningMesh, ensemble: str, told: str
) -> None:
    """The first state waits: nothing has happened. The second one does: the first one has run, and is ended."""
    again: dict[str, Any] = {"sequence_id": f"{ensemble} late", "sequence_start": True, "sequence_end": True}
    with held_slots(shared, "narrow_sum", ensemble):
        with pytest.raises(InferenceServerException) as late:
            infer(shared, ensemble, 7, sequence_id=f"{ensemble} late", sequence_start=True, timeout=1_500_000)
        # At most the states of those that hold the slots are there: where a lease was lost, they are in Redis alone.
        wait(lambda: max(map(shared.slots_held, ("running_sum", "narrow_sum"))) <= 2, "no other state is left")
        wait(lambda: not in_flight(shared), "nobody waits for an answer")

    assert str(late.value.message()).startswith(f"in ensemble '{ensemble}', {TIMED_OUT}{told}")
    assert 5 == infer(shared, ensemble, 5, **again)
    wait(lambda: not shared.slots_held("running_sum") and not shared.slots_held("narrow_sum"), "no slot is held")


@pytest.mark.parametrize("name", ["", "named"])
async def test_a_timeout_in_a_queue_between_two_states_ends_the_sequence_in_both(
    shared: RunningMesh, name: str
) -> None:
    infer(shared, "late_between", 1, sequence_id=401, sequence_start=True)
    queue = [asyncio.create_task(asyncio.to_thread(infer_number, shared, "late", 1)) for _ in range(10)]
    messages = shared.keys.work_queue("late", "1").messages
    # Two instances run two of them. With three more in the line nothing behind them runs within a second. There are
    # more of them than that, so that who looks late still finds these.
    await eventually(lambda: shared.redis.hlen(messages) >= 5, "they are queued")
    with pytest.raises(InferenceServerException) as late:
        infer(shared, "late_between", 1, sequence_id=401, timeout=50_000, request_id=name)
    with pytest.raises(InferenceServerException) as over:
        infer(shared, "late_between", 1, sequence_id=401)
    await asyncio.gather(*queue)

    assert str(late.value.message()).startswith(
        "in ensemble 'late_between', Request timeout expired (the sequence is over, "
    )
    assert "START" in str(over.value.message())
    assert 6 == infer(shared, "late_between", 6, sequence_id=401, sequence_start=True, sequence_end=True)
    wait(lambda: not shared.slots_held("running_sum"), "no slot is held")


def infer_number(mesh: RunningMesh, model: str, value: int) -> None:
    """A request to a model of one number."""
    with http_sync.InferenceServerClient(mesh.http()) as client:
        given = http_sync.InferInput("NUMBER", [1, 1], "INT32")
        given.set_data_from_numpy(np.array([[value]], np.int32))
        client.infer(model, [given])


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("ensemble", ["slow_first", "slow_behind"])
async def test_a_request_that_the_gateway_has_given_up_goes_on_in_both_states(
    shared: RunningMesh, ensemble: str, *, kill: bool
) -> None:
    """`--request-timeout-ms` is over while a state runs: the client hears so, and its next step is right, though it had
    no name."""
    hasty = f"hasty {ensemble} {kill}"
    same: dict[str, Any] = {"sequence_id": f"given up {kill}"}
    with shared.spare("gateway", hasty, *ANY_PORTS, "--request-timeout-ms=400"):
        ports = await eventually(lambda: shared.chosen_ports(hasty), "it listens")
        url = f"127.0.0.1:{ports['http']}"
        await eventually(lambda: is_ready(url), "it is ready")
        with http_sync.InferenceServerClient(url) as client, pytest.raises(InferenceServerException) as given_up:
            client.infer(ensemble, [tensor(http_sync.InferInput, 3)], sequence_start=True, **same)
        if kill:
            for name in shared.names("executor"):
                shared.kill(name)
        last = await asyncio.to_thread(infer, shared, ensemble, 4, sequence_end=True, **same)

    assert "no answer came within 400 ms" in str(given_up.value.message())
    assert 3 + 7 == last
    wait(lambda: len(shared.alive()) == 2, "executors are back")
    wait(lambda: not shared.slots_held("running_sum") and not shared.slots_held("slow_sum"), "no slot is held")


async def test_triton_7117_no_state_leaks_from_sequences_that_time_out_in_an_ensemble(
    shared: RunningMesh, chance: random.Random
) -> None:
    """There (triton-inference-server/server#7117) an ensemble of two models with state, with every slot taken and no
    END ever sent, gave the states of some sequences to others. Here clients fall silent, time out and leave while an
    executor is killed; what is answered among them is right, and nothing stays."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(fall_silent(shared, f"silent {number}", random.Random(chance.random()), over))
        for number in range(4):
            if number == 1:
                shared.kill(shared.names("executor")[0])
            await sums_of_three(shared, f"whole {number}")
        over.set()

    wait(lambda: len(shared.alive()) == 2, "executors are back")
    wait(lambda: not shared.slots_held("hasty_sum"), "no slot is held")
    wait(lambda: not in_flight(shared), "nobody waits for an answer")
    # Sequences of tests before it may be open until they have been idle for too long.
    wait_until_equal([], shared.leaks, "keys left without TTL")


async def fall_silent(mesh: RunningMesh, name: str, chance: random.Random, over: asyncio.Event) -> None:
    """Begins sequences, and ends none of them: the request times out, its client leaves, or says no more."""
    async with grpc_aio.InferenceServerClient(mesh.grpc()) as typed:
        client: Any = typed
        number = 0
        while not over.is_set():
            number += 1
            begun = asyncio.ensure_future(
                client.infer(
                    "hasty",
                    [tensor(grpc_aio.InferInput, 1000 + number)],
                    sequence_id=f"{name}/{number}",
                    sequence_start=True,
                    timeout=chance.choice([0, 50_000, 500_000]),
                )
            )
            await asyncio.wait([begun], timeout=chance.choice([0.03, 0.3, 3.0]))
            if not begun.done():
                begun.cancel()
            with suppress(InferenceServerException, asyncio.CancelledError):
                assert 1000 + number == sum_of(await begun)


async def sums_of_three(mesh: RunningMesh, name: str) -> None:
    """A whole sequence, sent at once. It may expire while an executor is taken over, and is begun again then; what is
    answered is right."""
    right = [1, 4, 10]
    got: list[Any] = []

    async def steps() -> AsyncIterator[dict[str, Any]]:
        for value in (1, 2, 3):
            flags = {"sequence_start": value == 1, "sequence_end": value == 3}
            given = [tensor(grpc_aio.InferInput, value)]
            yield {"model_name": "hasty", "inputs": given, "sequence_id": name, "request_id": str(value), **flags}

    async with grpc_aio.InferenceServerClient(mesh.grpc(1)) as typed, asyncio.timeout(PATIENCE_S):
        client: Any = typed
        while got != right:
            got = []
            async for result, error in client.stream_infer(steps()):
                got.append(sum_of(result) if error is None else error)
            answered = [
                one for one in zip(got, right, strict=False) if not isinstance(one[0], InferenceServerException)
            ]
            assert all(one == expected for one, expected in answered), got


def is_ready(url: str) -> bool:
    """Whether a gateway at this address takes requests."""
    try:
        return get(url, "/v2/health/ready").status == 200
    except OSError:
        return False

"""The response cache: equal requests of a model that has it enabled are answered without running it.

One server for all tests, with a cache and two executors, which both fill it. What is in the cache stays there, so each
test has values of its own (`fresh_id`), and one that counts has a model of its own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from shared.contract.errors import Code
from tests.conformance.calls import Answer, Caller, Gate, Step, Stream, count, fresh_id, refused, settled
from tests.conformance.conftest import watched
from tests.conformance.repository import RECORDER, ModelText
from tests.conformance.targets import Target, running_target

CONFIG = """backend: "python"
max_batch_size: 4
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
ENABLED = CONFIG + "response_cache { enable: true }\n"
MODELS = {
    "cached": ENABLED,
    "tallied": ENABLED,
    "reloaded": ENABLED,
    "computed": CONFIG,
    "in_order": ENABLED + "dynamic_batching { preserve_ordering: true }\n",
}


@pytest.fixture(scope="module")
def shared_cached_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The server behind `cached_target`."""
    options = {"cache-config": "local,size=1048576", "model-control-mode": "explicit", "load-model": list(MODELS)}
    models = [ModelText(name, config) for name, config in MODELS.items()]
    directory = tmp_path_factory.mktemp("cached")
    with running_target(directory, models, executors=2, options=options) as target:
        yield target


@pytest.fixture
def cached_target(request: pytest.FixtureRequest, shared_cached_target: Target) -> Iterator[Target]:
    """A server with a cache of a megabyte."""
    yield from watched(request, shared_cached_target)


@pytest.fixture
async def cached(cached_target: Target) -> AsyncIterator[Caller]:
    """Its model that is not counted."""
    async with Caller("grpc", cached_target, "cached") as made:
        yield made


def named(value: int | tuple[int, ...], **fields: Any) -> Step:
    """A request with an id that no other one has."""
    return Step(value=value, request_id=f"request {fresh_id()}", **fields)


def is_computed(answer: Answer) -> bool:
    """Whether the model ran for this very request, which had an id of its own."""
    return answer.seen.mine.request_id == answer.request_id


async def test_a_hit_is_answered_over_every_protocol_without_running_the_model(cached_target: Target) -> None:
    value = fresh_id()
    async with Caller("http", cached_target, "tallied") as web, Caller("grpc", cached_target, "tallied") as far:
        answers = [await caller.infer(named(value)) for caller in (web, web, far, far)]
        other = await far.infer(named((value, value)))
        statistics = await settled(far, 5)

    assert [True, False, False, False] == [is_computed(answer) for answer in answers]
    assert [value] * 4 == [answer.total for answer in answers]
    assert is_computed(other)
    # A hit is a success that was queued, and no inference.
    assert (2, 2) == (statistics["inference_count"], statistics["execution_count"])
    expected = {"success": 5, "queue": 5, "compute_infer": 2, "cache_hit": 3, "cache_miss": 2}
    assert expected == {name: count(statistics, name) for name in expected}
    page = cached_target.metrics_page()
    for name, hits in (("hits", 3), ("misses", 2)):
        line = rf'^nv_cache_num_{name}_per_model{{model="tallied",version="1"}} (\S+)$'
        assert [hits] == [float(text) for text in re.findall(line, page, re.MULTILINE)]


@pytest.mark.mesh_only("Triton looks at its cache every other second")
async def test_the_metrics_page_tells_of_the_whole_cache(cached: Caller) -> None:
    names = ("entries", "hits", "misses", "lookups", "evictions")

    def shown() -> dict[str, float]:
        found = cached.target.metrics_page()
        return {name: float(text) for name, text in re.findall(r"^nv_cache_(?:num_)?(\w+) (\S+)$", found, re.MULTILINE)}

    before, value = shown(), fresh_id()
    for _ in range(2):
        await cached.infer(Step(value=value))

    after = shown()
    assert [1, 1, 1, 2, 0] == [after[name] - before[name] for name in names]
    assert before["util"] < after["util"] < 1
    assert before["lookup_duration"] <= after["lookup_duration"]


async def test_a_model_that_has_it_not_enabled_runs_every_time(cached: Caller) -> None:
    caller, value = cached.of("computed"), fresh_id()

    assert [True, True] == [is_computed(await caller.infer(named(value))) for _ in range(2)]
    assert 0 == count(await settled(caller, 2), "cache_miss")


async def test_how_a_request_waits_makes_no_difference(cached: Caller) -> None:
    value = fresh_id()
    assert is_computed(await cached.infer(named(value)))

    for step in (named(value, priority=1), named(value, timeout_us=60_000_000)):
        assert not is_computed(await cached.infer(step))


@pytest.mark.mesh_only("Triton 2.51 looks at bytes alone, and answers with another shape")
async def test_shapes_count_and_not_only_bytes(cached: Caller) -> None:
    value = fresh_id()
    flat = await cached.infer(Step(inputs={"INPUT": np.array([[value, value]], np.int32)}))
    tall = await cached.infer(Step(inputs={"INPUT": np.array([[value], [value]], np.int32)}, outputs=("OUTPUT",)))

    assert ((1, 2), (2, 1)) == (flat.outputs["OUTPUT"].shape, tall.outputs["OUTPUT"].shape)


@pytest.mark.mesh_only("Triton 2.51 overlooks parameters and outputs, and answers for one with the other")
async def test_parameters_and_outputs_count(cached: Caller) -> None:
    value, tell = fresh_id(), {"tell": '{"told": 1}'}
    assert is_computed(await cached.infer(named(value)))

    told = [await cached.infer(named(value, parameters=tell)) for _ in range(2)]
    assert [True, False] == [is_computed(answer) for answer in told]
    # The parameters of a response are part of what is stored.
    assert [{"told": 1}] * 2 == [answer.parameters for answer in told]

    for name in ("OUTPUT", "SEEN"):
        assert [name] == list((await cached.infer(Step(value=value, outputs=(name,)))).outputs)


@pytest.mark.mesh_only("Triton 2.51 stores failed responses, and answers the next request with none of its outputs")
async def test_failed_answers_are_not_stored(cached: Caller) -> None:
    for wish in ("fail", "raise"):
        step = Step(value=fresh_id(), parameters={wish: "the model would not"})
        for _ in range(2):
            with refused(Code.INTERNAL):
                await cached.infer(step)


@pytest.mark.mesh_only("a hit overtakes in Triton 2.51, in spite of preserve_ordering")
async def test_where_answers_leave_in_order_a_hit_waits_for_those_before_it(cached: Caller, gate: Gate) -> None:
    caller, known, unknown = cached.of("in_order"), fresh_id(), fresh_id()
    done: list[Answer] = []

    async def infer(step: Step) -> None:
        done.append(await caller.infer(step))

    await infer(named(known))
    async with asyncio.TaskGroup() as group:
        group.create_task(infer(named(unknown, parameters=gate.parameters)))
        await gate.entered()
        group.create_task(infer(named(known)))
        while count(await caller.statistics(), "cache_hit") == 0:
            await asyncio.sleep(0.01)
        assert 1 == len(done)
        gate.open()

    assert [(known, True), (unknown, True), (known, False)] == [(each.total, is_computed(each)) for each in done]


@pytest.mark.mesh_only("Triton 2.51 answers 'response output count mismatch' to a request in a stream")
async def test_requests_in_a_stream_are_answered_from_the_cache_too(cached_target: Target) -> None:
    value = fresh_id()
    async with Stream(cached_target, "cached") as stream:
        stream.send(named(value))
        answers = await stream.answers(1)
        stream.send(named(value), named(value))
        answers += await stream.answers(2)

    assert [True, False, False] == [is_computed(answer) for answer in answers]


@pytest.mark.mesh_only("Triton's cache outlives what it was computed by")
async def test_a_reload_with_other_files_forgets(cached_target: Target) -> None:
    code = RECORDER.read_text()
    changed = code.replace("return value\n", "return value + 1\n")
    assert code != changed
    value = fresh_id()
    async with Caller("grpc", cached_target, "reloaded") as caller:
        assert value == (await caller.infer(Step(value=value))).total
        assert value == (await caller.infer(Step(value=value))).total

        (cached_target.repository / "reloaded" / "1" / "model.py").write_text(changed)
        await caller.client.load_model("reloaded")
        assert value + 1 == (await caller.infer(Step(value=value))).total
        assert value + 1 == (await caller.infer(Step(value=value))).total

        statistics = await caller.statistics()
        assert (1, 1, 1) == (
            statistics["inference_count"],
            count(statistics, "cache_hit"),
            count(statistics, "cache_miss"),
        )

"""What operators ask a mesh: health, metadata, statistics, metrics, the repository, load and unload."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any

import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from tests.mesh.model_repository import add_sum_model
from tests.mesh.raw_http import answer, get, infer_document, post, posted
from tests.mesh.running_mesh import RunningMesh, eventually, running_mesh, wait
from tests.mesh.traffic import Callers, GrpcCaller, Step, Traffic, make_plans

# -- asking ------------------------------------------------------------------------------------------------------------


async def test_both_protocols_say_the_same_of_server_and_models(mesh: RunningMesh) -> None:
    async with (
        http_aio.InferenceServerClient(mesh.http(0)) as http,
        grpc_aio.InferenceServerClient(mesh.grpc(1)) as rpc,
    ):
        web: Any = http
        far: Any = rpc
        assert await web.is_server_live()
        assert await far.is_server_live()
        assert await web.is_server_ready()
        assert await far.is_server_ready()
        assert (await web.get_server_metadata())["extensions"] == list((await far.get_server_metadata()).extensions)
        for model in ("running_sum", "text_lstm", "add_sub", "my_lstm_model", "rnn_model"):
            assert await web.is_model_ready(model)
            assert await far.is_model_ready(model)
            assert not await web.is_model_ready(model, "2")
            assert not await far.is_model_ready(model, "2")
            metadata = await far.get_model_metadata(model, as_json=True)
            assert without_defaults(await web.get_model_metadata(model)) == without_defaults(metadata)
            config = (await far.get_model_config(model, as_json=True))["config"]
            assert (await web.get_model_config(model))["name"] == config["name"] == model
        index = [(line["name"], line["state"]) for line in await web.get_model_repository_index()]
        assert index == [(line.name, line.state) for line in (await far.get_model_repository_index()).models]
        assert ("running_sum", "READY") in index
        assert not await web.is_model_ready("nobody")
        assert not await far.is_model_ready("nobody")


def without_defaults(metadata: Any) -> Any:
    """Metadata with numbers as numbers: protobuf's JSON writes 64-bit ones as text."""
    text = re.sub(r'"(-?\d+)"', r"\1", json.dumps({name: metadata[name] for name in ("name", "platform")}))
    shapes = [
        (kind, tensor["name"], tensor["datatype"], [int(size) for size in tensor["shape"]])
        for kind in ("inputs", "outputs")
        for tensor in metadata[kind]
    ]
    return text, shapes


async def test_statistics_and_metrics_count_every_step_of_the_mesh_once(
    mesh: RunningMesh, chance: random.Random
) -> None:
    before = counted(mesh)
    plans = make_plans(chance, 16)
    async with Callers(mesh) as callers:
        traffic = Traffic("oldest_sum", callers, plans, chance, pause_s=0.001)
        await traffic.run()
        failed = infer_document((1 << 31) - 1, sequence_id="overflows", sequence_start=True)
        assert (1 << 31) - 1 == answer(await posted(mesh.http(), "/v2/models/oldest_sum/infer", failed))
        overflow = await posted(mesh.http(), "/v2/models/oldest_sum/infer", infer_document(1, sequence_id="overflows"))
        assert HTTPStatus.BAD_REQUEST == overflow.status
        await callers[0]("oldest_sum", Step("overflows", 0, end=True))
    steps = traffic.total + 2

    await eventually(lambda: counted(mesh)[0] - before[0] >= steps, "statistics follow")
    after = counted(mesh)
    assert (steps, 1) == (after[0] - before[0], after[1] - before[1])
    assert 0 < after[2] - before[2] <= steps + 1
    assert after == counted(mesh, 1)
    metrics = get(f"127.0.0.1:{mesh.gateways[1].metrics_port}", "/metrics").body.decode()
    labels = r'\{model="oldest_sum",version="1"\}'
    for name, value in (("nv_inference_request_success", after[0]), ("nv_inference_exec_count", after[2])):
        (shown,) = re.findall(rf"^{name}{labels} (\S+)$", metrics, re.MULTILINE)
        assert value == float(shown)


def counted(mesh: RunningMesh, gateway: int = 0) -> tuple[int, int, int]:
    """Successful requests, failed ones and executions of oldest_sum, by the statistics."""
    (statistics,) = get(mesh.http(gateway), "/v2/models/oldest_sum/stats").document["model_stats"]
    stats = statistics["inference_stats"]
    return stats["success"]["count"], stats["fail"]["count"], statistics["execution_count"]


async def test_requests_that_wait_together_share_a_batch(mesh: RunningMesh) -> None:
    """A batch of several rows is seen in the statistics, and each row is answered with its own result."""
    caller = GrpcCaller(mesh.grpc())
    names = [f"together {number}" for number in range(mesh.slots("moody_sum"))]
    await asyncio.gather(*(caller("moody_sum", Step(name, 1, start=True)) for name in names))
    for _ in range(10):
        await asyncio.gather(*(caller("moody_sum", Step(name, 1)) for name in names))
    answers = await asyncio.gather(*(caller("moody_sum", Step(name, 0, end=True)) for name in names))
    await caller.close()

    assert [11] * len(names) == answers

    def largest() -> bool:
        (statistics,) = get(mesh.http(), "/v2/models/moody_sum/stats").document["model_stats"]
        return max(batch["batch_size"] for batch in statistics["batch_stats"]) > 1

    await eventually(largest, "a batch of more than one row")


def test_load_and_unload_are_refused_unless_models_are_loaded_on_request(mesh: RunningMesh) -> None:
    for action in ("load", "unload"):
        refused = post(mesh.http(), f"/v2/repository/models/running_sum/{action}", {})
        assert HTTPStatus.SERVICE_UNAVAILABLE == refused.status
        assert "explicit model load / unload is not allowed" in refused.error
    assert HTTPStatus.OK == get(mesh.http(), "/v2/models/running_sum/ready").status


# -- loading on request ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def module_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """Two executors that load models on request; running_sum and dropped_sum at the start. Each test has models of its
    own, and only reads of running_sum."""
    directory = tmp_path_factory.mktemp("explicit")
    repository = directory / "models"
    for name in ("running_sum", "other_sum", "surviving_sum", "meanwhile_sum", "dropped_sum", "leaving_sum"):
        add_sum_model(repository, name)
    config = repository / add_sum_model(repository, "broken_sum") / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 32", "max_batch_size: -1"))
    environment = {
        "SEQMESH_MODEL_CONTROL_MODE": "explicit",
        "SEQMESH_LOAD_MODEL": "running_sum,dropped_sum",
        "SEQMESH_LEASE_MS": "3000",  # a busy machine must not look like dead executors, which load and unload nothing
    }
    with running_mesh(directory / "data", (repository,), executors=2, gateways=2, environment=environment) as mesh:
        yield mesh


@pytest.fixture
def explicit_mesh(module_mesh: RunningMesh) -> RunningMesh:
    """It, whole again."""
    wait(lambda: module_mesh.slots("running_sum") == 2 * 32, "both executors serve")
    wait(lambda: serve(module_mesh, "running_sum"), "the gateways know it")
    return module_mesh


def serve(mesh: RunningMesh, model: str, *, how: Callable[[Iterable[bool]], bool] = all) -> bool:
    """Whether the gateways, all of them or any, serve a model."""
    addresses = [mesh.http(gateway) for gateway in range(len(mesh.gateways))]
    return how(get(address, f"/v2/models/{model}/ready").status == HTTPStatus.OK for address in addresses)


async def test_models_come_and_go_on_request_over_both_protocols(
    explicit_mesh: RunningMesh, chance: random.Random
) -> None:
    mesh = explicit_mesh
    async with (
        http_aio.InferenceServerClient(mesh.http(0)) as http,
        grpc_aio.InferenceServerClient(mesh.grpc(1)) as rpc,
        Callers(mesh) as callers,
    ):
        web: Any = http
        far: Any = rpc

        async def states() -> dict[str, str]:
            lines = await web.get_model_repository_index()
            looked_at = ("broken_sum", "other_sum", "running_sum")
            return {line["name"]: line.get("state", "") for line in lines if line["name"] in looked_at}

        assert {"broken_sum": "", "other_sum": "", "running_sum": "READY"} == await states()
        with pytest.raises(InferenceServerException, match="other_sum"):
            await callers[0]("other_sum", Step(1, 1, start=True))

        await web.load_model("other_sum")
        assert await web.is_model_ready("other_sum")
        await Traffic("other_sum", callers, make_plans(chance, 8), chance, pause_s=0).run()

        await far.unload_model("other_sum")
        assert not await far.is_model_ready("other_sum")
        # The other gateway learns of it with its next look at the mesh.
        await until_unready(mesh, "other_sum")
        assert (await states())["other_sum"] in ("UNLOADING", "UNAVAILABLE")
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'other_sum' has no available"):
            await callers[1]("other_sum", Step(1, 1, start=True))

        await far.load_model("other_sum")
        assert await far.is_model_ready("other_sum")
        await Traffic("other_sum", callers, make_plans(chance, 8), chance, pause_s=0).run()
        await web.unload_model("other_sum")
        assert not await web.is_model_ready("other_sum")

        with pytest.raises(
            InferenceServerException, match="'max_batch_size' must be non-negative value for broken_sum"
        ):
            await web.load_model("broken_sum")
        with pytest.raises(InferenceServerException, match="failed to load 'nobody', failed to poll"):
            await far.load_model("nobody")
        await Traffic("running_sum", callers, make_plans(chance, 8), chance, pause_s=0).run()


async def until_unready(mesh: RunningMesh, model: str) -> None:
    """Returns when no gateway serves the model."""
    await eventually(lambda: not serve(mesh, model, how=any), f"{model} is unready everywhere")


async def test_a_model_that_was_loaded_on_request_survives_its_executors(
    explicit_mesh: RunningMesh, chance: random.Random
) -> None:
    mesh = explicit_mesh
    assert HTTPStatus.OK == post(mesh.http(), "/v2/repository/models/surviving_sum/load", {}).status
    async with Callers(mesh) as callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, 12, shortest=10, longest=20)
        traffic = Traffic("surviving_sum", callers, plans, chance, retries=True)
        group.create_task(traffic.run())
        for share, name in ((0.2, "executor-1"), (0.6, "executor-2")):
            await traffic.progress(share)
            await mesh.kill_executor(name)
        await Traffic("surviving_sum", callers, make_plans(chance, 12), chance, retries=True).run()


async def test_an_executor_that_starts_again_knows_what_was_loaded_and_unloaded_meanwhile(
    explicit_mesh: RunningMesh,
) -> None:
    mesh = explicit_mesh
    for model, action in (("meanwhile_sum", "load"), ("dropped_sum", "unload")):
        assert HTTPStatus.OK == post(mesh.http(), f"/v2/repository/models/{model}/{action}", {}).status
    old = {one.executor for one in mesh.alive()}
    for name in mesh.names("executor"):
        mesh.kill(name)

    await eventually(lambda: len({one.executor for one in mesh.alive()} - old) == len(old), "both are back")

    new = [one for one in mesh.alive() if one.executor not in old]
    for served in ({offer.model for offer in one.models} for one in new):
        assert {"running_sum", "meanwhile_sum"} == served & {"running_sum", "meanwhile_sum", "dropped_sum"}


async def test_a_model_that_is_unloaded_refuses_its_sequences_and_leaves_others_alone(
    explicit_mesh: RunningMesh, chance: random.Random
) -> None:
    mesh = explicit_mesh
    assert HTTPStatus.OK == post(mesh.http(), "/v2/repository/models/leaving_sum/load", {}).status
    async with Callers(mesh) as callers:
        assert 1 == await callers[0]("leaving_sum", Step("open", 1, start=True))
        async with asyncio.TaskGroup() as group:
            traffic = Traffic("running_sum", callers, make_plans(chance, 12, shortest=10, longest=20), chance)
            group.create_task(traffic.run())
            await traffic.progress(0.2)
            assert HTTPStatus.OK == (await posted(mesh.http(), "/v2/repository/models/leaving_sum/unload", {})).status
            await until_unready(mesh, "leaving_sum")
            for caller in callers:
                with pytest.raises(InferenceServerException, match="has no available versions"):
                    await caller("leaving_sum", Step("open", 1))
        assert HTTPStatus.OK == (await posted(mesh.http(), "/v2/repository/models/leaving_sum/load", {})).status
        assert 5 == await callers[0]("leaving_sum", Step("new", 5, start=True, end=True))

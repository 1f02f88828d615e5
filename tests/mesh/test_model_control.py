"""Models that are loaded anew, overridden, unloaded and polled while two executors serve them, by tritonclient."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from shared.contract.ids import sequence_id
from tests.mesh.conftest import MakeMesh
from tests.mesh.model_repository import SAMPLES, add_sum_model
from tests.mesh.raw_http import get, post, posted
from tests.mesh.running_mesh import RunningMesh, eventually, running_mesh
from tests.mesh.traffic import GrpcCaller, Step

SUM_CODE = (SAMPLES / "running_sum" / "1" / "model.py").read_text()
NOT_STARTED = "must specify the START flag"
NOT_THERE = "Request for unknown model: '{}' has no available versions"


def sum_code(*, bonus: int = 0, batch_s: float = 0.0, gate: Path | None = None, broken: bool = False) -> str:
    """The running sum with a bonus for each step, of slow batches, that loads only when a file is there, or never."""
    code = SUM_CODE.replace("after = before + ", f"after = {bonus} + before + ")
    code = code.replace("        return [add(", f"        __import__('time').sleep({batch_s})\n        return [add(")
    initialize = "    def initialize(self, args):\n"
    if gate is not None:
        initialize += f"        while not __import__('os').path.exists({str(gate)!r}): __import__('time').sleep(0.02)\n"
    initialize += "        raise RuntimeError('it is broken')\n" if broken else "        pass\n"
    return code.replace("    def execute(", f"{initialize}\n    def execute(")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of models of the explicit mesh."""
    folder = tmp_path_factory.mktemp("control-models")
    for name in ("running_sum", "slow_sum", "overridden_sum", "gated_sum", "plain_sum"):
        add_sum_model(folder, name)
    add_sum_model(folder, "narrow_sum", slots=1, virtual_slots=False)
    add_sum_model(folder, "sparse_sum", checkpoint_interval=9)
    for name in ("slow_sum", "narrow_sum"):
        write_code(folder, name, sum_code(batch_s=0.5))
    return folder


def write_code(repository: Path, model: str, code: str) -> None:
    """Changes a model in the repository."""
    (repository / model / "1" / "model.py").write_text(code)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[RunningMesh]:
    """Two executors that load on request."""
    directory = tmp_path_factory.mktemp("control-mesh")
    environment = {
        "SEQMESH_MODEL_CONTROL_MODE": "explicit",
        "SEQMESH_LOAD_MODEL": "running_sum",
        "SEQMESH_LEASE_MS": "3000",  # a busy machine must not look like a dead executor
    }
    with running_mesh(directory, (repository,), executors=2, gateways=2, environment=environment) as mesh:
        yield mesh


def load(mesh: RunningMesh, model: str) -> None:
    """Loads a model; on return every gateway serves it."""
    loaded = post(mesh.http(), f"/v2/repository/models/{model}/load", {})
    assert HTTPStatus.OK == loaded.status, loaded.body


async def until_ready(mesh: RunningMesh, model: str, *, is_ready: bool = True) -> None:
    """Returns when every gateway says so."""
    addresses = [mesh.http(gateway) for gateway in range(len(mesh.gateways))]
    await eventually(
        lambda: all((get(at, f"/v2/models/{model}/ready").status == HTTPStatus.OK) is is_ready for at in addresses),
        f"{model} ready: {is_ready}",
    )


async def until_accepted(mesh: RunningMesh, model: str, identity: int | str, steps: int) -> None:
    """Returns when the mesh has accepted so many steps of a sequence."""
    record = sequence_id(model, "", identity)
    await eventually(lambda: mesh.record(record).get("nx") == str(steps), f"{steps} steps of {identity} accepted")


def index_line(mesh: RunningMesh, model: str) -> dict[str, str]:
    """What the repository index says of a model that has one version."""
    lines = post(mesh.http(1), "/v2/repository/index", {}).document
    return next(line for line in lines if line["name"] == model)


async def test_a_reload_finishes_what_was_accepted_and_ends_what_is_open(mesh: RunningMesh, repository: Path) -> None:
    load(mesh, "slow_sum")
    await until_ready(mesh, "slow_sum")
    caller = GrpcCaller(mesh.grpc(1))
    assert 1 == await caller("slow_sum", Step("open", 1, start=True))
    accepted = asyncio.create_task(caller("slow_sum", Step("open", 2)))
    await until_accepted(mesh, "slow_sum", "open", 2)

    write_code(repository, "slow_sum", sum_code(bonus=1000))
    reloaded = await posted(mesh.http(), "/v2/repository/models/slow_sum/load", {})

    assert HTTPStatus.OK == reloaded.status, reloaded.body
    assert 3 == await accepted
    with pytest.raises(InferenceServerException, match=NOT_STARTED):
        await caller("slow_sum", Step("open", 3))
    assert 1005 == await caller("slow_sum", Step("open", 5, start=True))
    assert 2007 == await caller("slow_sum", Step("open", 2))

    # Nothing has changed since: nobody is disturbed.
    load(mesh, "slow_sum")
    assert 3007 == await caller("slow_sum", Step("open", 0))
    # Other instances are no other model.
    config = repository / "slow_sum" / "config.pbtxt"
    config.write_text(config.read_text().replace("instance_group [ { count: 1", "instance_group [ { count: 2"))
    load(mesh, "slow_sum")
    assert 2 * 2 * 32 == mesh.slots("slow_sum")
    assert 4007 == await caller("slow_sum", Step("open", 0, end=True))

    write_code(repository, "slow_sum", sum_code(broken=True))
    failed = await posted(mesh.http(), "/v2/repository/models/slow_sum/load", {})
    assert HTTPStatus.BAD_REQUEST == failed.status
    assert failed.error.startswith("load failed for model 'slow_sum': version 1 is at UNAVAILABLE state: ")
    assert "it is broken" in failed.error
    assert "READY" == index_line(mesh, "slow_sum")["state"]
    assert 1001 == await caller("slow_sum", Step("still", 1, start=True, end=True))
    await caller.close()


async def test_more_instances_go_on_from_steps_that_no_checkpoint_covers_yet(
    mesh: RunningMesh, repository: Path
) -> None:
    """Its START and the steps since are run again, without the one that failed."""
    model, full = "sparse_sum", 2**31 - 1
    load(mesh, model)
    await until_ready(mesh, model)
    caller = GrpcCaller(mesh.grpc(1))
    assert 1 == await caller(model, Step("open", 1, start=True))
    with pytest.raises(InferenceServerException, match="does not fit INT32"):
        await caller(model, Step("open", full))
    assert 3 == await caller(model, Step("open", 2))

    config = repository / model / "config.pbtxt"
    config.write_text(config.read_text().replace("instance_group [ { count: 1", "instance_group [ { count: 2"))
    load(mesh, model)
    # With these, both executors have come to read their inboxes from the beginning.
    assert [5] * 8 == [await caller(model, Step(f"other {n}", 5, start=True, end=True)) for n in range(8)]

    assert 6 == await caller(model, Step("open", 3, end=True))
    await caller.close()


async def test_requests_find_the_version_they_ask_for_and_sequences_stay_with_that_of_their_start(
    mesh: RunningMesh, repository: Path
) -> None:
    model = add_sum_model(repository, "versioned_sum")
    config = (repository / model / "config.pbtxt").read_text()
    for version in (1, 2, 3):
        (repository / model / f"{version}").mkdir(exist_ok=True)
        (repository / model / f"{version}" / "model.py").write_text(sum_code(bonus=100 * version))

    def serve(policy: str) -> None:
        (repository / model / "config.pbtxt").write_text(f"{config}\nversion_policy: {{ {policy} }}\n")
        load(mesh, model)

    serve("specific: { versions: [ 1, 2 ] }")
    await until_ready(mesh, f"{model}/versions/2")
    caller = GrpcCaller(mesh.grpc(1))
    assert 201 == await caller(model, Step("pinned", 1, start=True))
    with pytest.raises(InferenceServerException, match=f"'{model}' version 3 is not"):
        await caller(model, Step("early", 1, start=True, version="3"))

    serve("all { }")
    await until_ready(mesh, f"{model}/versions/3")
    assert ["1", "2", "3"] == get(mesh.http(), f"/v2/models/{model}").document["versions"]
    assert 402 == await caller(model, Step("pinned", 1))
    for version, bonus in (("1", 100), ("2", 200), ("3", 300), ("", 300)):
        assert bonus + 5 == await caller(model, Step("same id", 5, start=True, version=version))
    for version, bonus in (("3", 300), ("", 300), ("1", 100), ("2", 200)):
        assert 2 * bonus + 6 == await caller(model, Step("same id", 1, end=True, version=version))
    assert 603 == await caller(model, Step("pinned", 1, end=True))
    assert 301 == await caller(model, Step("pinned", 1, start=True, end=True))

    serve("latest: { num_versions: 1 }")
    await until_ready(mesh, f"{model}/versions/1", is_ready=False)
    assert 301 == await caller(model, Step("last", 1, start=True, end=True))
    with pytest.raises(InferenceServerException, match=f"'{model}' version 1 is not"):
        await caller(model, Step("gone", 1, start=True, version="1"))
    await caller.close()


async def test_an_override_holds_until_the_next_load_also_for_executors_that_start_anew(mesh: RunningMesh) -> None:
    model = "overridden_sum"
    load(mesh, model)
    config = get(mesh.http(), f"/v2/models/{model}/config").document
    async with (
        http_aio.InferenceServerClient(mesh.http(0)) as http,
        grpc_aio.InferenceServerClient(mesh.grpc(0)) as rpc,
    ):
        web: Any = http
        far: Any = rpc
        await web.load_model(model, config=json.dumps(config | {"max_batch_size": 7}))
        assert 7 == get(mesh.http(), f"/v2/models/{model}/config").document["max_batch_size"]
        code = sum_code(bonus=100).encode()
        await far.load_model(model, config=json.dumps(config | {"max_batch_size": 5}), files={"file:1/model.py": code})
        assert 5 == get(mesh.http(), f"/v2/models/{model}/config").document["max_batch_size"]
        with pytest.raises(InferenceServerException, match="but the model config was not"):
            await web.load_model(model, files={"file:1/model.py": code})
        with pytest.raises(InferenceServerException, match="must not leave the model's directory"):
            await far.load_model(model, config=json.dumps(config), files={"file:../1/model.py": code})
        with pytest.raises(
            InferenceServerException, match=f"failed to load '{model}', failed to poll from model repos"
        ):
            await web.load_model(model, config=json.dumps(config | {"max_batch_size": -1}))

    old = {one.executor for one in mesh.alive()}
    for executor in mesh.names("executor"):
        mesh.kill(executor)
    await eventually(lambda: len({one.executor for one in mesh.alive()} - old) == len(old), "both are back")
    await until_ready(mesh, model)
    caller = GrpcCaller(mesh.grpc(0))
    assert 101 == await caller(model, Step("a", 1, start=True, end=True))
    assert 5 == get(mesh.http(), f"/v2/models/{model}/config").document["max_batch_size"]

    load(mesh, model)
    assert 32 == get(mesh.http(), f"/v2/models/{model}/config").document["max_batch_size"]
    assert 1 == await caller(model, Step("b", 1, start=True, end=True))
    await caller.close()


async def test_an_unloaded_model_answers_what_was_accepted_and_refuses_the_rest(mesh: RunningMesh) -> None:
    model = "narrow_sum"
    load(mesh, model)
    await until_ready(mesh, model)
    caller = GrpcCaller(mesh.grpc(1))
    for name in ("a", "b"):
        assert 1 == await caller(model, Step(name, 1, start=True))
    waits = asyncio.create_task(caller(model, Step("waits", 1, start=True)))
    accepted = [asyncio.create_task(caller(model, Step(name, 2))) for name in ("a", "b")]
    for name, steps in (("a", 2), ("b", 2), ("waits", 1)):
        await until_accepted(mesh, model, name, steps)

    assert HTTPStatus.OK == (await posted(mesh.http(), f"/v2/repository/models/{model}/unload", {})).status

    # The gateway that was asked knows at once.
    assert HTTPStatus.BAD_REQUEST == get(mesh.http(), f"/v2/models/{model}/ready").status
    refused = post(mesh.http(), f"/v2/models/{model}/infer", {"inputs": []})
    assert (HTTPStatus.NOT_FOUND, NOT_THERE.format(model)) == (refused.status, refused.error)
    refused = post(mesh.http(), f"/v2/models/{model}/versions/1/infer", {"inputs": []})
    assert HTTPStatus.SERVICE_UNAVAILABLE == refused.status
    assert refused.error == f"Request for unknown model: '{model}' version 1 is not at ready state"
    assert [3, 3] == await asyncio.gather(*accepted)
    with pytest.raises(InferenceServerException, match="version 1 is not at ready state"):
        await waits
    await eventually(lambda: index_line(mesh, model)["state"] == "UNAVAILABLE", "unloaded")
    assert {"name": model, "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"} == index_line(mesh, model)
    assert model not in [line["name"] for line in post(mesh.http(), "/v2/repository/index", {"ready": True}).document]
    await eventually(lambda: not mesh.slots_held(model), "no slot is held")
    assert HTTPStatus.OK == post(mesh.http(), f"/v2/repository/models/{model}/unload", {}).status

    load(mesh, model)
    await until_ready(mesh, model)
    for name in ("a", "b"):
        with pytest.raises(InferenceServerException, match=f"{NOT_STARTED}.*state was lost"):
            await caller(model, Step(name, 1))
    with pytest.raises(InferenceServerException, match=f"{NOT_STARTED} on the first request of the sequence$"):
        await caller(model, Step("waits", 1))
    assert 1 == await caller(model, Step("a", 1, start=True, end=True))
    await caller.close()


async def test_an_executor_that_dies_while_a_model_is_loaded_holds_nobody_up(
    mesh: RunningMesh, repository: Path, tmp_path: Path
) -> None:
    model, gate = "gated_sum", tmp_path / "gate"
    write_code(repository, model, sum_code(gate=gate))
    loading = asyncio.create_task(posted(mesh.http(), f"/v2/repository/models/{model}/load", {}))

    def are_loading() -> bool:
        states = [line.state for one in mesh.alive() for line in one.repository if line.model == model]
        return states == ["LOADING", "LOADING"]

    try:
        await eventually(are_loading, "both executors load")
        await eventually(lambda: index_line(mesh, model).get("state") == "LOADING", "the index says so")
        assert HTTPStatus.OK == get(mesh.http(1), "/v2/health/ready").status
        mesh.kill("executor-1")
    finally:
        gate.touch()

    loaded = await loading
    assert HTTPStatus.OK == loaded.status, loaded.body
    caller = GrpcCaller(mesh.grpc(0))
    assert 3 == await caller(model, Step("a", 3, start=True, end=True))
    await caller.close()
    await eventually(lambda: mesh.slots(model) == 2 * 32, "both executors serve it")


async def test_names_and_unknown_models(mesh: RunningMesh) -> None:
    async with grpc_aio.InferenceServerClient(mesh.grpc(0)) as rpc:
        far: Any = rpc
        with pytest.raises(InferenceServerException, match="Model name cannot be empty"):
            await far.load_model("")
        for name in ("../running_sum", "a/b", ".."):
            with pytest.raises(InferenceServerException, match="must not contain path traversal characters"):
                await far.load_model(name)
        with pytest.raises(InferenceServerException, match="failed to load 'nobody', failed to poll from model repos"):
            await far.load_model("nobody")
        await far.unload_model("nobody", unload_dependents=True)
    assert not mesh.redis.hexists(mesh.keys.wanted, "nobody")
    assert "nobody" not in [line["name"] for line in post(mesh.http(), "/v2/repository/index", {}).document if line]


async def test_models_follow_their_folders_in_poll_mode(make_mesh: MakeMesh, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    add_sum_model(repository)
    environment = {"SEQMESH_MODEL_CONTROL_MODE": "poll", "SEQMESH_REPOSITORY_POLL_SECS": "0.2"}
    mesh = make_mesh(models=(repository,), executors=2, gateways=1, environment=environment)
    caller = GrpcCaller(mesh.grpc())
    assert 1 == await caller("running_sum", Step("stays", 1, start=True))
    for action in ("load", "unload"):
        refused = post(mesh.http(), f"/v2/repository/models/running_sum/{action}", {})
        assert HTTPStatus.SERVICE_UNAVAILABLE == refused.status
        assert "explicit model load / unload is not allowed if polling is enabled: start every executor with " in (
            refused.error
        )
    # The mode counts first, whatever else is wrong.
    async with grpc_aio.InferenceServerClient(mesh.grpc()) as rpc:
        far: Any = rpc
        with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed"):
            await far.load_model("")
    files = {"parameters": {"file:1/model.py": ""}}
    refused = post(mesh.http(), "/v2/repository/models/running_sum/load", files)
    assert HTTPStatus.SERVICE_UNAVAILABLE == refused.status

    add_sum_model(tmp_path / "elsewhere", "other_sum")
    shutil.move(tmp_path / "elsewhere" / "other_sum", repository / "other_sum")
    await eventually(lambda: mesh.slots("other_sum") == 64, "the new model is served")
    await until_ready(mesh, "other_sum")
    assert 1 == await caller("other_sum", Step("a", 1, start=True))

    write_code(repository, "other_sum", sum_code(bonus=10))
    shutil.copytree(repository / "other_sum" / "1", repository / "other_sum" / "2")

    def versions() -> set[str]:
        return {served.version for one in mesh.alive() for served in one.models if served.model == "other_sum"}

    await eventually(lambda: versions() == {"2"}, "the latest version is served")
    await until_ready(mesh, "other_sum/versions/2")
    await until_ready(mesh, "other_sum/versions/1", is_ready=False)
    assert 11 == await caller("other_sum", Step("b", 1, start=True, end=True))

    shutil.rmtree(repository / "other_sum")
    await until_ready(mesh, "other_sum", is_ready=False)
    with pytest.raises(InferenceServerException, match=NOT_THERE.format("other_sum")):
        await caller("other_sum", Step("c", 1, start=True))
    assert 2 == await caller("running_sum", Step("stays", 1, end=True))
    await caller.close()


async def test_what_was_asked_of_a_model_and_cannot_be_read_is_that_models_matter(mesh: RunningMesh) -> None:
    """Executors go on, and start with it, too; the next word on the model replaces it."""
    load(mesh, "overridden_sum")
    keys, dance = mesh.keys, msgspec.msgpack.encode({"action": "dance", "model": "overridden_sum"})
    for garbage in (b"\xc1", b"", dance):
        for words in (keys.wanted, keys.kept):
            mesh.redis.hset(words, "overridden_sum", garbage)
            mesh.redis.hset(words, b"\xff", garbage)
        mesh.redis.xadd(keys.control, {"n": "overridden_sum"})
        mesh.redis.xadd(keys.control, {"odd": garbage})
    await mesh.kill_executor(mesh.names("executor")[0])

    for model in ("overridden_sum", "plain_sum"):
        load(mesh, model)
        await until_ready(mesh, model)

    caller = GrpcCaller(mesh.grpc())
    for model in ("overridden_sum", "plain_sum", "running_sum"):
        assert 1 == await caller(model, Step("beside garbage", 1, start=True, end=True))
    for words in (keys.wanted, keys.kept):
        mesh.redis.hdel(words, b"\xff")

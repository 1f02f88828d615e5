"""A mesh whose models lie in an S3 server: two executors that poll it, share copies, and outlive its absence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.mesh.conftest import MakeMesh
from tests.mesh.model_repository import SAMPLES
from tests.mesh.raw_http import get, post, posted
from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.traffic import HttpCaller, Step
from tests.object_store import BUCKET, CREDENTIALS, ObjectStore

CODE = (SAMPLES / "running_sum" / "1" / "model.py").read_text()
BONUS = CODE.replace("after = before + ", "after = 1000 + before + ")


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as store:
        store.upload(SAMPLES / "running_sum", "models/running_sum")
        yield store


def environment(store: ObjectStore, cache: Path, mode: str) -> dict[str, str]:
    """How the executors find the repository."""
    return {
        **CREDENTIALS,
        "SEQMESH_MODELS": store.url(),
        "SEQMESH_MODEL_CACHE_DIR": str(cache),
        "SEQMESH_MODEL_CONTROL_MODE": mode,
        "SEQMESH_REPOSITORY_POLL_SECS": "0.3",
    }


def reasons(mesh: RunningMesh) -> list[str]:
    return [line.get("reason", "") for line in post(mesh.http(), "/v2/repository/index", {}).document]


def is_served(mesh: RunningMesh) -> bool:
    return get(mesh.http(), "/v2/models/running_sum/ready").status == HTTPStatus.OK


def nothing_told(mesh: RunningMesh) -> bool:
    """Whether no log of the mesh holds a credential."""
    logs = "".join(path.read_text() for path in (mesh.directory / "logs").iterdir())
    return not any(CREDENTIALS[name] in logs for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))


async def test_executors_follow_a_store_and_go_on_without_it(
    make_mesh: MakeMesh, store: ObjectStore, tmp_path: Path
) -> None:
    mesh = make_mesh(models=(), executors=2, environment=environment(store, tmp_path / "cache", "poll"))
    caller = HttpCaller(mesh.http())
    assert 1 == await caller("running_sum", Step("open", 1, start=True))
    copies = list((tmp_path / "cache").glob("*/running_sum"))
    assert 1 == len(copies), "executors of one machine share it"

    store.stop()
    await eventually(lambda: any("cannot be read" in one for one in reasons(mesh)), "the index says so")
    assert 3 == await caller("running_sum", Step("open", 2))
    # One is killed and cannot read the store when it comes back; the other one takes its sequences over.
    owner = next(one.name for one in mesh.alive())
    mesh.kill(owner)
    assert 6 == await caller("running_sum", Step("open", 3))
    await eventually(lambda: "waiting for model repositories" in mesh.log(owner), f"{owner} waits for the store")

    store.start()
    await eventually(lambda: len(mesh.alive()) == 2 and not any(reasons(mesh)), "both read the store again")
    store.put("models/running_sum/1/model.py", BONUS)
    await eventually(lambda: not copies[0].exists(), "both have loaded the new code, and the old copy is removed")
    assert 1001 == await caller("running_sum", Step("new", 1, start=True, end=True))

    for key in store.names():
        store.delete(key)
    await eventually(lambda: not is_served(mesh), "the model is unloaded")
    await eventually(lambda: not list((tmp_path / "cache").glob("*/running_sum")), "its copies are removed")
    await caller.close()
    assert nothing_told(mesh)


async def test_models_are_loaded_on_request_and_overridden(
    make_mesh: MakeMesh, store: ObjectStore, tmp_path: Path
) -> None:
    mesh = make_mesh(models=(), environment=environment(store, tmp_path / "cache", "explicit"))
    assert not is_served(mesh)
    # A model that is put there later stands in the index, too.
    store.upload(SAMPLES / "add_sub", "models/add_sub")
    await eventually(lambda: len(reasons(mesh)) == 2, "the index names both models")
    loaded = await posted(mesh.http(), "/v2/repository/models/running_sum/load", {})
    assert HTTPStatus.OK == loaded.status, loaded.body
    caller = HttpCaller(mesh.http())
    assert 1 == await caller("running_sum", Step("a", 1, start=True, end=True))

    config = get(mesh.http(), "/v2/models/running_sum/config").document
    override = {"parameters": {"config": json.dumps({**config, "max_batch_size": 4})}}
    overridden = await posted(mesh.http(), "/v2/repository/models/running_sum/load", override)
    assert HTTPStatus.OK == overridden.status, overridden.body
    await eventually(
        lambda: get(mesh.http(), "/v2/models/running_sum/config").document["max_batch_size"] == 4, "the override"
    )
    store.stop()
    refused = await posted(mesh.http(), "/v2/repository/models/add_sub/load", {})
    assert "cannot be read" in refused.error
    assert is_served(mesh)
    store.start()
    await caller.close()
    assert nothing_told(mesh)


async def test_a_repository_that_is_not_there_ends_the_start_with_its_reason(
    make_mesh: MakeMesh, store: ObjectStore, tmp_path: Path
) -> None:
    """And with `none` the models are those of the start."""
    mesh = make_mesh(models=(), environment=environment(store, tmp_path / "cache", "none"))
    assert is_served(mesh)

    wrong = f"--models=s3://127.0.0.1:{store.port}/no-{BUCKET}"
    spare = mesh.spare("executor", "lost", wrong)
    with pytest.raises(AssertionError, match="lost ended with 70"), spare as process:
        await asyncio.to_thread(process.wait, 60)
    assert f"no-{BUCKET} cannot be read" in mesh.log("lost")

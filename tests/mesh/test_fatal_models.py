"""Models that end the executor that loads them: they are given up, everything else is served."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from pathlib import Path

from tests.mesh.conftest import MakeMesh
from tests.mesh.model_repository import SAMPLES, add_sum_model
from tests.mesh.raw_http import post, posted
from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.traffic import GrpcCaller, Step

SUM_CODE = (SAMPLES / "running_sum" / "1" / "model.py").read_text()
SEGMENTATION_FAULT = "__import__('ctypes').string_at(0)"
EXIT = "__import__('os')._exit(1)"
WARM_UP = """
model_warmup [ { name: "one" batch_size: 1
  inputs { key: "INPUT" value: { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } } ]
"""


def fatal_code(end: str, *, gate: Path | None = None) -> str:
    """The running sum, which ends its process while it is loaded; after a file is there, if one is named."""
    wait = f"while not __import__('os').path.exists({str(gate)!r}): __import__('time').sleep(0.02)" if gate else "pass"
    return SUM_CODE.replace(
        "    def execute(", f"    def initialize(self, args):\n        {wait}\n        {end}\n\n    def execute("
    )


def write_code(repository: Path, model: str, code: str) -> None:
    (repository / model / "1" / "model.py").write_text(code)


def lines_of(mesh: RunningMesh) -> dict[str, dict[str, str]]:
    """The repository index, by model."""
    return {line["name"]: line for line in post(mesh.http(), "/v2/repository/index", {}).document}


async def sums(mesh: RunningMesh, model: str) -> None:
    """A model serves."""
    caller = GrpcCaller(mesh.grpc())
    assert 3 == await caller(model, Step(f"in {model}", 3, start=True, end=True))
    await caller.close()


async def test_a_load_on_request_that_ends_its_executors_fails_and_the_mesh_goes_on(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    for model in ("exiting_sum", "fatal_sum", "running_sum"):
        add_sum_model(repository, model)
    write_code(repository, "exiting_sum", fatal_code(EXIT))
    write_code(repository, "fatal_sum", fatal_code(SEGMENTATION_FAULT))
    environment = {"SEQMESH_MODEL_CONTROL_MODE": "explicit", "SEQMESH_LOAD_MODEL": "exiting_sum,running_sum"}
    mesh = make_mesh(models=(repository,), environment=environment)
    # One that is loaded at the start ended three, too, and no more.
    assert "ended 3 executors" in lines_of(mesh)["exiting_sum"]["reason"]
    assert 3 == len(mesh.deaths())

    failed = await posted(mesh.http(), "/v2/repository/models/fatal_sum/load", {})

    assert (HTTPStatus.BAD_REQUEST, "application/json") == (failed.status, failed.headers["content-type"])
    assert "load of model 'fatal_sum' ended 3 executors and is given up" in failed.error
    assert 3 == len([line for line in mesh.deaths() if "SIGSEGV" in line])
    await sums(mesh, "running_sum")
    line = lines_of(mesh)["fatal_sum"]
    assert "UNAVAILABLE" == line["state"]
    assert "ended 3 executors" in line["reason"]
    assert HTTPStatus.OK == post(mesh.http(), "/v2/repository/models/fatal_sum/unload", {}).status
    # Killed from outside in the middle of an innocent load, the executor tries again.
    gate = tmp_path / "gate"
    write_code(repository, "fatal_sum", fatal_code("pass", gate=gate))
    loading = asyncio.create_task(posted(mesh.http(), "/v2/repository/models/fatal_sum/load", {}))
    await eventually(lambda: lines_of(mesh)["fatal_sum"].get("state") == "LOADING", "it is loaded")
    mesh.kill("executor-1")
    gate.touch()
    loaded = await loading
    # What was given up is not tried again by those that start later.
    assert 3 + 3 + 1 == len(mesh.deaths())
    assert HTTPStatus.OK == loaded.status, loaded.body
    await sums(mesh, "fatal_sum")


async def test_a_mesh_starts_with_a_model_that_ends_whoever_loads_it(make_mesh: MakeMesh, tmp_path: Path) -> None:
    """It is mended while the mesh runs."""
    repository = tmp_path / "models"
    for model in ("fatal_when_warm", "running_sum"):
        add_sum_model(repository, model)
    call = "        return [add("
    write_code(repository, "fatal_when_warm", SUM_CODE.replace(call, f"        {SEGMENTATION_FAULT}\n{call}"))
    config = repository / "fatal_when_warm" / "config.pbtxt"
    config.write_text(config.read_text() + WARM_UP)
    environment = {"SEQMESH_MODEL_CONTROL_MODE": "poll", "SEQMESH_REPOSITORY_POLL_SECS": "0.2"}
    mesh = make_mesh(models=(repository,), executors=2, environment=environment)

    await sums(mesh, "running_sum")
    line = lines_of(mesh)["fatal_when_warm"]
    assert "UNAVAILABLE" == line["state"]
    assert re.search("load of model 'fatal_when_warm' ended [3-6] executors", line["reason"])
    deaths = mesh.deaths()
    assert 3 <= len(deaths) <= 6, deaths

    write_code(repository, "fatal_when_warm", SUM_CODE)
    await eventually(lambda: mesh.slots("fatal_when_warm") == 2 * 32, "mended, it is served")
    await sums(mesh, "fatal_when_warm")
    assert deaths == mesh.deaths()

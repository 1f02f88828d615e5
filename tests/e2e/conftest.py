"""The images, built once, and one mesh of containers for all tests; each finds it whole: two executors, healthy."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Generator, Iterator

import pytest

from tests.e2e.compose_mesh import ComposeMesh
from tests.mesh.model_repository import SAMPLES, add_sum_model

IDLE_US = 600_000_000
"""A sequence must outlive the restart of a whole mesh on a small, busy machine; the sample forgets it in a minute."""
SHOWN = pytest.StashKey[ComposeMesh]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test's report ends with the state of the containers and what they logged."""
    report = yield
    if report.failed and SHOWN in item.stash:
        report.sections += item.stash[SHOWN].diagnosis()
    return report


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeMesh]:
    """The project behind `mesh`: on free ports, with the sample models. Removed at the end, whatever happens."""
    models = tmp_path_factory.mktemp("compose") / "models"
    shutil.copytree(SAMPLES, models, ignore=shutil.ignore_patterns("__pycache__", "running_sum"))
    add_sum_model(models, idle_us=IDLE_US)
    models.chmod(0o755)  # the containers' user is not ours
    ports = {f"SEQMESH_{protocol}_PORT": "0" for protocol in ("HTTP", "GRPC", "METRICS", "CONSOLE")}
    mesh = ComposeMesh(f"seqmesh-test-{secrets.token_hex(4)}", {"SEQMESH_MODELS": str(models), **ports})
    try:
        mesh.build()
        yield mesh
    finally:
        mesh.down()


@pytest.fixture
def mesh(request: pytest.FixtureRequest, project: ComposeMesh) -> ComposeMesh:
    """The mesh, whole, whatever earlier tests did to it."""
    request.node.stash[SHOWN] = project
    project.up()
    return project

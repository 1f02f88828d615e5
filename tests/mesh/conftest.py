"""Meshes of real processes: one for all gentle tests, and a factory of private ones for those that kill."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.seed_models.build import build as build_seed_models
from tests.groups import Shared
from tests.mesh.model_repository import (
    METHODICAL_MODEL,
    MISBEHAVING,
    SAMPLES,
    add_forgetful_model,
    add_iterative_model,
    add_journaled_models,
    add_stateless_model,
    add_streaming_models,
    add_sum_model,
    add_tardy_model,
)
from tests.mesh.running_mesh import LONG_LEASE, PATIENCE_S, RunningMesh, running_mesh, wait

VICTIM_MODELS = (
    "running_sum",
    "slow_sum",
    "replayed_sum",
    "sent_sum",
    "oldest_sum",
    "paged_sum",
    "rarely_saved_sum",
    "forgetful_sum",
    "retold_sum",
    "methodical_sum",
    "iterative",
    "streamed_sum",
)

TARDY_GATE = "tardy-gate"
"""The file that `tardy_sum` waits for, beside the mesh's directory."""


@contextmanager
def gentle_mesh(directory: Path) -> Generator[RunningMesh]:
    """The mesh of the gentle tests: two gateways, two executors, and every model that tests are gentle to."""
    repository = directory / "models"
    add_sum_model(repository, "narrow_sum", slots=2, virtual_slots=False)
    add_sum_model(repository, "scarce_sum", slots=1, virtual_slots=False)
    add_sum_model(repository, "brief_sum", slots=2, idle_us=300_000, virtual_slots=False)
    add_tardy_model(repository, "tardy_sum", gate=directory / TARDY_GATE, idle_us=100_000, batch_s=0.3)
    add_sum_model(repository, "oldest_sum", slots=8, strategy="oldest { max_candidate_sequences: 8 }")
    add_sum_model(repository, "counted_sum", slots=2, virtual_slots=False)
    add_sum_model(repository, "described_sum", slots=2, idle_us=2_000_000)
    add_journaled_models(repository)
    with (repository / "described_sum" / "config.pbtxt").open("a") as config:
        config.write("model_transaction_policy { stateful_model_policy { timeout_action: DESCRIBE } }\n")
    build_seed_models(directory / "seeds")
    repositories = (SAMPLES, MISBEHAVING, repository, directory / "seeds")
    with running_mesh(directory / "data", repositories, gateways=2, executors=2, environment=LONG_LEASE) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[RunningMesh]]:
    """The mesh behind `mesh`."""
    with Shared(lambda: gentle_mesh(tmp_path_factory.mktemp("shared-mesh"))) as shared:
        yield shared


@pytest.fixture
def mesh(shared_mesh: Shared[RunningMesh]) -> Iterator[RunningMesh]:
    """The shared mesh, for a test that does no harm to it: afterwards no process has died or shown a traceback."""
    mesh = shared_mesh.get()
    deaths, tracebacks = mesh.deaths(), mesh.tracebacks()
    yield mesh
    assert deaths == mesh.deaths()
    assert tracebacks == mesh.tracebacks()


@contextmanager
def mesh_of_victims(directory: Path) -> Generator[RunningMesh]:
    """Two of each service, and the models that are played while one of them dies."""
    repository = directory / "models"
    add_sum_model(repository)
    add_sum_model(repository, "slow_sum", batch_s=0.03)
    add_sum_model(repository, "replayed_sum", checkpoint_interval=5, batch_s=0.005)
    oldest = "oldest { max_candidate_sequences: 16, max_queue_delay_microseconds: 500 }"
    add_sum_model(repository, "oldest_sum", slots=8, strategy=oldest, batch_s=0.005)
    add_sum_model(repository, "sent_sum", checkpoint_interval=3, sends=True)
    add_sum_model(repository, "paged_sum", slots=3)
    add_sum_model(repository, "rarely_saved_sum", slots=3, checkpoint_interval=3)
    add_forgetful_model(repository)
    add_forgetful_model(repository, "retold_sum", recovery="replay")
    add_forgetful_model(repository, "methodical_sum", source=METHODICAL_MODEL)
    add_iterative_model(repository, pass_s=0.02)
    add_stateless_model(repository)
    add_streaming_models(repository)
    # States of 8 bytes: an executor holds six sequences of `paged_sum`, in batches of three.
    few = {"SEQMESH_STATE_BYTES_MAX": "48"}
    with running_mesh(directory / "data", [repository], gateways=2, schedulers=2, executors=2, environment=few) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def shared_victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[RunningMesh]]:
    """The mesh behind `victim`."""
    with Shared(lambda: mesh_of_victims(tmp_path_factory.mktemp("victim"))) as shared:
        yield shared


@pytest.fixture
def victim(shared_victim: Shared[RunningMesh]) -> Iterator[RunningMesh]:
    """Two of each service, to be killed.

    Afterwards all that the test has killed is back, and when every sequence is over, no slot and no key of it may be
    left.
    """
    mesh = shared_victim.get()
    wait_until_whole(mesh)
    tracebacks = mesh.tracebacks()
    yield mesh
    assert tracebacks == mesh.tracebacks()
    wait_until_whole(mesh)
    wait_until_equal(
        [0] * len(VICTIM_MODELS), lambda: [mesh.slots_held(model) for model in VICTIM_MODELS], "slots held"
    )
    wait_until_equal([], mesh.leaks, "keys left without TTL")


def wait_until_equal(expected: object, current: Callable[[], object], what: str) -> None:
    """Returns when it is so. A dead executor's last keys go when the mesh forgets it, which takes two leases."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := current()) != expected:
        assert time.monotonic() < deadline, f"{what}: expected {expected}, found {found}"
        time.sleep(0.1)


def wait_until_whole(mesh: RunningMesh) -> None:
    """Returns when every process runs, answers and takes part."""
    executors = set(mesh.names("executor"))
    wait(lambda: executors == {one.name for one in mesh.alive()} and len(mesh.alive()) == len(executors), "executors")
    wait(lambda: all(map(mesh.is_ready, range(len(mesh.gateways)))), "gateways are ready")
    wait(lambda: all(map(mesh.leader, VICTIM_MODELS)), "schedulers lead")
    wait(lambda: all(mesh.redis.exists(mesh.keys.scheduler(name)) for name in mesh.names("scheduler")), "schedulers")


MakeMesh = Callable[..., RunningMesh]


@pytest.fixture
def make_mesh(tmp_path: Path) -> Iterator[MakeMesh]:
    """Starts meshes that only this test uses: `make_mesh(executors=2, ...)`, arguments as of `running_mesh`.

    Without `models` they serve the running sum alone: an executor without torch is there in a second.
    """
    numbers = itertools.count()
    with ExitStack() as stack:

        def make(**arguments: Any) -> RunningMesh:
            directory = tmp_path / f"mesh-{next(numbers)}"
            models = arguments.pop("models", None)
            if models is None:
                models = (directory / "models",)
                add_sum_model(models[0])
            return stack.enter_context(running_mesh(directory / "data", models, **arguments))

        yield make

"""One mesh of real processes for all incidents that happen between clients and a running server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.incidents.incident_models import add_nan_model, add_two_state_model
from tests.mesh.model_repository import add_sum_model
from tests.mesh.running_mesh import RunningMesh, running_mesh

BRIEF_US = 500_000


@pytest.fixture(scope="module")
def incident_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """Two gateways, two executors. Whoever has a slot keeps it, as where the incidents happened, unless a model says
    otherwise."""
    directory = tmp_path_factory.mktemp("incidents")
    models = directory / "models"
    oldest = "oldest { max_candidate_sequences: 32 }"
    add_sum_model(models, "crowded_sum", slots=16, strategy=oldest, batch_s=0.1, virtual_slots=False)
    add_sum_model(models, "few_sum", slots=8, virtual_slots=False)
    add_sum_model(models, "single_sum", slots=1, virtual_slots=False)
    add_sum_model(models, "brief_sum", slots=1, idle_us=BRIEF_US, virtual_slots=False)
    add_nan_model(models, slots=2, idle_us=BRIEF_US)
    add_two_state_model(models)
    lease = {"SEQMESH_LEASE_MS": "3000"}  # a busy machine must not look like a dead executor
    with running_mesh(directory / "data", [models], gateways=2, executors=2, environment=lease) as mesh:
        yield mesh


@pytest.fixture
def mesh(incident_mesh: RunningMesh) -> Iterator[RunningMesh]:
    """It, for one test: nothing may have raised meanwhile."""
    tracebacks = incident_mesh.tracebacks()
    yield incident_mesh
    assert tracebacks == incident_mesh.tracebacks()

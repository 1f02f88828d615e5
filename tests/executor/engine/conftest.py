"""A directory to make models in, and the models that lie beside the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from executor.engine.pytorch.threads import use_threads
from tests import signal_stack
from tests.executor.engine.model_workshop import Workshop


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where engines run that do not say it themselves (`--device`)."""
    return str(request.config.getoption("--device"))


@pytest.fixture
def workshop(tmp_path: Path, device: str) -> Iterator[Workshop]:
    made = Workshop(tmp_path, device)
    with signal_stack.kept():
        yield made
        made.close()
        made.engines.clear()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Workshop]:
    """One whose engines a module's tests share. On a busy machine, two threads that wait for each other take long."""
    threads = torch.get_num_threads()
    use_threads(1)
    torch.manual_seed(1)
    made = Workshop(tmp_path_factory.mktemp("house"), device)
    yield made
    made.close()
    use_threads(threads)


@pytest.fixture
def fixture_models() -> Path:
    """Models written for Triton, as they are."""
    return Path(__file__).parents[2] / "fixtures" / "models"


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.starts_processes)])
def workshop_of_both(workshop: Workshop, request: pytest.FixtureRequest) -> Workshop:
    """One in which an instance of a python model is a thread, and one in which it is a process."""
    workshop.own_process = request.param == "process"
    return workshop

"""SIGTERM at any moment of a start: the process ends in order, soon, and leaves nothing behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from deploy.local.data_directory import read_state
from deploy.local.private_mesh import environment_without_settings
from deploy.local.tether import tethered
from tests.mesh.model_repository import SAMPLES
from tests.mesh.running_mesh import wait

END_S = 60.0
"""Within which it must have ended: what it waits for takes longer, or for ever."""
SLOW_MODEL = """
import os
import pathlib
import time


def tell(what):
    path = pathlib.Path(os.environ["TELL"])
    path.with_suffix(".new").write_text(what)
    path.with_suffix(".new").replace(path)
    time.sleep(1000)


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        if os.environ["SLOW"] == "completing":
            tell(str(os.getpid()))
        return config

    def initialize(self, args):
        tell("loading")

    def execute(self, requests):
        raise NotImplementedError
"""
CONFIG = """
backend: "python"
input [{ name: "INPUT" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUTPUT" data_type: TYPE_INT32 dims: [1] }]
"""


@pytest.fixture
def slow_models(tmp_path: Path) -> Path:
    version = tmp_path / "models" / "slow" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(SLOW_MODEL)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    return tmp_path / "models"


@contextmanager
def started(command: Sequence[str], **environment: str) -> Generator[subprocess.Popen[str]]:
    """A process that says things on one stream; killed at the end of the block, if it still runs."""
    with subprocess.Popen(
        tethered([sys.executable, "-P", "-m", *command], signal.SIGKILL),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment_without_settings(), **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def service(name: str, models: Path) -> list[str]:
    """The command of a service."""
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    return [name, *{"gateway": ports, "executor": [f"--models={models}"]}.get(name, [])]


def ends_in_order(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=END_S)
    assert 0 == process.returncode, said
    assert "Traceback" not in said


@pytest.mark.parametrize("redis", ["is silent", "hangs up"])
@pytest.mark.parametrize("name", ["gateway", "scheduler", "executor"])
def test_while_it_waits_for_a_redis_that(redis: str, name: str, slow_models: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        with started(service(name, slow_models), SEQMESH_REDIS_URL=url) as process:
            connection, _ = listener.accept()
            if redis == "hangs up":
                connection.close()
                connection, _ = listener.accept()

            ends_in_order(process)
            connection.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_while_it_imports_torch(redis_url: str, key_prefix: str) -> None:
    variables = {"SEQMESH_REDIS_URL": redis_url, "SEQMESH_KEY_PREFIX": key_prefix}
    with started(service("executor", SAMPLES), **variables) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait(lambda: "libtorch" in maps.read_text(), "torch is being loaded")

        ends_in_order(process)


@pytest.mark.parametrize("slow", ["completing", "loading"])
def test_while_a_model_is(slow: str, slow_models: Path, redis_url: str, key_prefix: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    variables = {"SEQMESH_REDIS_URL": redis_url, "SEQMESH_KEY_PREFIX": key_prefix, "TELL": str(told), "SLOW": slow}
    with started(service("executor", slow_models), **variables) as process:
        wait(told.exists, f"the model is {slow}")

        ends_in_order(process)

    if slow == "completing":
        wait(lambda: not psutil.pid_exists(int(told.read_text())), "the process that completes ends as well")


def test_while_a_mesh_starts(slow_models: Path, tmp_path: Path) -> None:
    told, data_dir = tmp_path / "told", tmp_path / "data"
    command = ["deploy.cli", "up", f"--data-dir={data_dir}", f"--models={slow_models}"]
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    with started([*command, *ports], TELL=str(told), SLOW="loading") as launcher:
        wait(told.exists, "the model is loading")

        def pids() -> list[int] | None:
            found = [child.pid for child in read_state(data_dir).children]
            return found if all(found) else None

        # The last ones may be started while the model is loading already.
        children = list(map(psutil.Process, wait(pids, "every process is started")))

        launcher.send_signal(signal.SIGTERM)
        said, _ = launcher.communicate(timeout=END_S)

    assert 0 == launcher.returncode, said
    assert "while stopping" not in said
    assert "killing" not in said
    assert not any(child.is_running() for child in children)

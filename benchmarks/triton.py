"""A real Triton to compare with: the server inside NVIDIA's PyPI wheel `nvidia-pytriton`, CPU only, no container.

The wheel brings `tritonserver`, its libraries and the Python backend; only that backend, so the models are `model.py`.
The wheel's files are not changed. Two things that Triton needs elsewhere are copied into a temporary directory: the
backend's stub, which must be beside the backend's library, and the models, because the stub's Python writes bytecode.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.clients import Addresses
from deploy.local.embedded import free_port, log_tail
from deploy.local.private_mesh import past_proxies, stop
from deploy.local.tether import tethered

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.1
ASK_INTERPRETER = (
    "import json, sys, sysconfig;"
    "print(json.dumps(dict(packages=sysconfig.get_path('purelib'), libraries=sysconfig.get_config_var('LIBDIR') or '',"
    "version='%d.%d' % sys.version_info[:2], programs=sysconfig.get_path('scripts'))))"
)


class TritonError(click.ClickException):
    """Triton cannot be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What the Python backend's stub needs to know of the Python that runs the models.

    packages   its site-packages: numpy and torch must be there
    libraries  where its libpython is
    programs   the directory of `python3`: the interpreter inside the stub finds its packages by that on PATH
    """

    packages: Path
    libraries: Path
    version: str
    programs: Path


def interpreter_of(python: str) -> Interpreter:
    """Asks a Python about itself. Raises `TritonError` when it does not answer."""
    try:
        said = subprocess.run([python, "-c", ASK_INTERPRETER], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise TritonError(f"--triton-python: {python} does not run: {error}") from error
    facts: dict[str, str] = json.loads(said)
    return Interpreter(Path(facts["packages"]), Path(facts["libraries"]), facts["version"], Path(facts["programs"]))


@dataclass(frozen=True, slots=True)
class Wheel:
    """The files of the wheel nvidia-pytriton that a server needs."""

    program: Path
    backend: Path
    stub: Path
    libraries: Path


def wheel_at(directory: Path, version: str) -> Wheel:
    """The parts of the wheel that is installed (site-packages) or unpacked in `directory`.

    version  of the Python that will run the models: the wheel has a stub for each
    raises   TritonError with what to install, when something is missing
    """
    server = directory.resolve() / "pytriton" / "tritonserver"
    wheel = Wheel(
        program=server / "bin" / "tritonserver",
        backend=server / "backends" / "python",
        stub=server / "python_backend_stubs" / version / "triton_python_backend_stub",
        libraries=directory.resolve() / "nvidia_pytriton.libs",
    )
    missing = [path for path in (wheel.program, wheel.backend, wheel.stub, wheel.libraries) if not path.exists()]
    if missing:
        raise TritonError(
            f"no Triton at {directory}: {missing[0]} is missing. Install the wheel into a venv "
            "(pip install nvidia-pytriton numpy torch) and name its Python with --triton-python, "
            "or name the directory it is unpacked in with --triton-wheel"
        )
    return wheel


class Triton:
    """One Triton process; starts again when it has died. See `servers.MeasuredServer`."""

    label = "triton"
    redis_url: str | None = None

    def __init__(self, wheel: Wheel, interpreter: Interpreter, models: Path, names: list[str], directory: Path) -> None:
        self._log = directory / "triton.log"
        self.address = Addresses(HOST, free_port(), free_port())
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = environment(wheel, interpreter)
        backends = prepare_backends(wheel, directory)
        repository = prepare_models(models, names, directory)
        self._command = command(wheel, backends, repository, self.address)

    @property
    def groups(self) -> Mapping[str, list[int]]:
        """The server; the stubs, which run the models, are its children."""
        assert self._process is not None
        return {"triton": [self._process.pid]}

    def keep_running(self) -> None:
        """Starts the process when it does not run. Raises `TritonError` when it does not become ready."""
        if self._process is not None and self._process.poll() is None and self._is_ready():
            return
        self.stop()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                tethered(self._command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TritonError(f"Triton did not become ready; the end of its log:\n{log_tail(self._log)}")
            time.sleep(POLL_INTERVAL_S)

    def _is_ready(self) -> bool:
        url = f"http://{HOST}:{self.address.http_port}/v2/health/ready"
        try:
            with urllib.request.urlopen(url, timeout=5.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """Stops the process in order, or kills it."""
        process, self._process = self._process, None
        if process is not None:
            stop(process)


@contextmanager
def running_triton(models: Path, names: list[str], python: str, wheel_directory: Path | None) -> Generator[Triton]:
    """A Triton that serves the models of these names, as long as the block."""
    interpreter = interpreter_of(python or sys.executable)
    wheel = wheel_at(wheel_directory or interpreter.packages, interpreter.version)
    with past_proxies(HOST), tempfile.TemporaryDirectory(prefix="seqmesh-triton-") as directory:
        triton = Triton(wheel, interpreter, models, names, Path(directory))
        try:
            triton.keep_running()
            yield triton
        finally:
            triton.stop()


def environment(wheel: Wheel, interpreter: Interpreter) -> dict[str, str]:
    """Without this process's Python settings, and with no GPU: the mesh it is compared with has none either."""
    inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    return {
        **inherited,
        # The interpreter's own libpython before any other of the same major version on this machine.
        "LD_LIBRARY_PATH": f"{interpreter.libraries}:{wheel.libraries}",
        "PATH": f"{interpreter.programs}:{inherited.get('PATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",
    }


def prepare_backends(wheel: Wheel, directory: Path) -> Path:
    """A backend directory with the Python backend and its stub, executable, side by side."""
    backend = directory / "backends" / "python"
    shutil.copytree(wheel.backend, backend, symlinks=False, ignore=shutil.ignore_patterns("*_stub", "__pycache__"))
    stub = backend / wheel.stub.name
    shutil.copyfile(wheel.stub, stub)
    stub.chmod(0o755)
    return backend.parent


def prepare_models(models: Path, names: list[str], directory: Path) -> Path:
    """A repository with copies of the models of these names, whose configurations declare no state.

    Triton 2.51 lets its Python backend declare states, hands the model uninitialised memory for them at every step, and
    drops what the model gives back. The models keep their state themselves when none is handed to them.
    """
    repository = directory / "models"
    for name in names:
        shutil.copytree(models / name, repository / name, ignore=shutil.ignore_patterns("__pycache__"))
        path = repository / name / "config.pbtxt"
        path.write_text(without_states(path.read_text()))
    return repository


def without_states(configuration: str) -> str:
    """A config.pbtxt without the states of its sequence batching."""
    config: Any = text_format.Parse(configuration, cast(Any, model_config_pb2).ModelConfig())
    config.sequence_batching.ClearField("state")
    return text_format.MessageToString(config)


def command(wheel: Wheel, backends: Path, repository: Path, address: Addresses) -> list[str]:
    # A wheel that was unpacked by hand has lost the program's permission to run.
    if not os.access(wheel.program, os.X_OK):
        wheel.program.chmod(0o755)
    grpc_port = address.grpc.rpartition(":")[2]
    options = {
        "model-repository": repository,
        "backend-directory": backends,
        "http-address": HOST,
        "http-port": address.http_port,
        "grpc-address": HOST,
        "grpc-port": grpc_port,
        "allow-metrics": "false",
        "exit-timeout-secs": 5,
        # Shared memory of its own, should another Triton run here.
        "backend-config": f"python,shm-region-prefix-name=seqmesh{address.http_port}",
    }
    return [str(wheel.program), *(part for name, value in options.items() for part in (f"--{name}", str(value)))]

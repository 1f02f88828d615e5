"""What the suite runs against: a mesh, or a real Triton when TRITON_PYTHON names the interpreter of a virtual
environment with nvidia-pytriton 0.7.0 (Triton 2.51) in it.

Both are given by their addresses alone. A mesh of two executors stands for one Triton with twice the instances.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.embedded import free_port
from tests.conformance.repository import Model, build
from tests.mesh.raw_http import get
from tests.mesh.running_mesh import LOG_LINES, LONG_LEASE, RunningMesh, running_mesh, wait

TRITON_PYTHON = os.environ.get("TRITON_PYTHON", "")
TRITON_START_S = 300.0
"""Every instance of a Python model is a process of its own there, one started after the other."""
TRITON_STOP_S = 30.0

Options = Mapping[str, str | Iterable[str]]
"""Options of a server by Triton's names without the dashes, for instance {"load-model": ["a", "b"]}."""


@dataclass
class Target:
    """A running server.

    http, grpc, metrics  host:port of the three protocols
    mesh                 the mesh's processes, None for a Triton
    repository           the model repository that it serves; a test may write into that of its own target
    """

    http: str
    grpc: str
    metrics: str
    repository: Path
    mesh: RunningMesh | None = None
    triton: subprocess.Popen[bytes] | None = None
    logs: dict[str, Path] = field(default_factory=dict)

    @property
    def is_mesh(self) -> bool:
        """Whether this is a mesh."""
        return self.mesh is not None

    def deaths(self) -> list[str]:
        """What has been said of processes that ended though nobody stopped them."""
        if self.mesh is not None:
            return self.mesh.deaths()
        assert self.triton is not None
        return [] if self.triton.poll() is None else [f"tritonserver ended with {self.triton.returncode}"]

    def metrics_page(self) -> str:
        """What the metrics page says. A mesh's is asked for again if it went without what Redis holds, as it does
        where the machine is too busy for an answer in time.
        """

        def page() -> str | None:
            found = get(self.metrics, "/metrics").body.decode()
            return None if "seqmesh_gateway_mesh_up 0" in found else found

        return wait(page, "the metrics page has the mesh")

    def log_sections(self) -> list[tuple[str, str]]:
        """The end of every log of a Triton, for the report of a failed test; it has those of a mesh."""
        return [(name, "\n".join(self.log(name).splitlines()[-LOG_LINES:])) for name in self.logs]

    def log(self, name: str = "tritonserver") -> str:
        """Everything that a process has printed; of a mesh, everything that all of them have."""
        paths = [self.logs[name]] if self.mesh is None else sorted((self.mesh.directory / "logs").glob("*.log"))
        return "\n".join(path.read_text(errors="replace") for path in paths)


@contextmanager
def running_target(
    directory: Path,
    models: Iterable[Model],
    *,
    executors: int = 1,
    env: Mapping[str, str] | None = None,
    options: Options | None = None,
) -> Generator[Target]:
    """Runs a mesh or a Triton inside the `with` block; it is ready when the block begins."""
    if TRITON_PYTHON:
        repository = build(directory / "models", models, instance_factor=executors)
        with running_triton(directory, repository, env or {}, options or {}) as triton:
            yield triton
        return
    repository = build(directory / "models", models)
    # As a user has it, other than most meshes of tests; and shared memory, which Triton 2.51 has always on.
    environment = {
        "SEQMESH_STATE_BYTES_MAX": str(256 << 20),
        "SEQMESH_ALLOW_CLIENT_SHM": "true",
        **LONG_LEASE,
        **(env or {}),
        **as_settings(options or {}),
    }
    with running_mesh(directory / "data", [repository], executors=executors, environment=environment) as mesh:
        metrics = f"{mesh.state.host}:{mesh.gateways[0].metrics_port}"
        yield Target(mesh.http(), mesh.grpc(), metrics, repository, mesh)


def as_settings(options: Options) -> dict[str, str]:
    """Triton's options as the mesh's settings, which have the same names where they mean the same."""
    return {
        f"SEQMESH_{name.upper().replace('-', '_')}": value if isinstance(value, str) else ",".join(value)
        for name, value in options.items()
    }


# -- a real Triton -----------------------------------------------------------------------------------------------------


@contextmanager
def running_triton(directory: Path, repository: Path, env: Mapping[str, str], options: Options) -> Generator[Target]:
    """Runs tritonserver of the environment of TRITON_PYTHON, CPU only."""
    paths = TritonPaths.found()
    ports = [free_port() for _ in range(3)]
    said = directory / "tritonserver.log"
    with said.open("wb") as output:
        server = subprocess.Popen(
            paths.command(repository, ports, options),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**paths.environment(), **env},
            start_new_session=True,
        )
    http_address, grpc_address, metrics_address = (f"127.0.0.1:{port}" for port in ports)
    target = Target(http_address, grpc_address, metrics_address, repository, triton=server)
    target.logs["tritonserver"] = said
    try:
        wait(lambda: target.deaths() or is_live(http_address), "tritonserver is live", TRITON_START_S)
        assert not target.deaths(), target.log()
        yield target
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Stops tritonserver. Its stubs are in its session; they stay behind when it crashes or does not end by itself."""
    server.terminate()
    try:
        server.wait(TRITON_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def is_live(address: str) -> bool:
    """Whether all models that are to be loaded have been (a server answers only then)."""
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", "/v2/health/live")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


@dataclass(frozen=True)
class TritonPaths:
    """Where things are inside the environment."""

    bin: Path
    library: Path
    packages: Path
    version: str

    @classmethod
    def found(cls) -> TritonPaths:
        """Asks the interpreter; puts the stub for its version beside the backend, where the server looks for it."""
        question = (
            "import sys, sysconfig; print(sysconfig.get_path('scripts'), sysconfig.get_config_var('LIBDIR'), "
            "sysconfig.get_path('purelib'), '%d.%d' % sys.version_info[:2], sep=chr(10))"
        )
        said = subprocess.run([TRITON_PYTHON, "-c", question], capture_output=True, text=True, check=True).stdout
        scripts, library, packages, version = said.splitlines()
        paths = cls(Path(scripts), Path(library), Path(packages), version)
        name = "triton_python_backend_stub"
        stub = paths.server / "python_backend_stubs" / version / name
        link = paths.server / "backends" / "python" / name
        if not link.exists():
            link.symlink_to(stub)
        for program in (stub, paths.server / "bin" / "tritonserver"):
            program.chmod(0o755)
        return paths

    @property
    def server(self) -> Path:
        """The server's own directory."""
        return self.packages / "pytriton" / "tritonserver"

    def command(self, repository: Path, ports: list[int], options: Options) -> list[str]:
        """The command line."""
        http_port, grpc_port, metrics_port = ports
        command = [str(self.server / "bin" / "tritonserver"), f"--model-repository={repository}"]
        command += [f"--backend-directory={self.server / 'backends'}", f"--cache-directory={self.server / 'caches'}"]
        command += ["--http-address=127.0.0.1", f"--http-port={http_port}"]
        command += ["--grpc-address=127.0.0.1", f"--grpc-port={grpc_port}"]
        command += ["--metrics-address=127.0.0.1", f"--metrics-port={metrics_port}"]
        command += ["--allow-gpu-metrics=false", "--exit-timeout-secs=5", "--exit-on-error=false"]
        command += [f"--backend-config=python,shm-region-prefix-name=conformance{http_port}"]
        for name, value in options.items():
            command += [f"--{name}={one}" for one in ([value] if isinstance(value, str) else value)]
        return command

    def environment(self) -> dict[str, str]:
        """The embedded interpreter finds its environment through `python3` on PATH."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        libraries = f"{self.library}:{self.packages / 'nvidia_pytriton.libs'}"
        return {
            **kept,
            "LD_LIBRARY_PATH": libraries,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
        }

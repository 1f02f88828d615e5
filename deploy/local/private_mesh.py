"""Runs a temporary mesh: `seqmesh up` as a child process, on free ports, in a temporary directory.

It is for programs that try or measure a mesh, and must not touch another one that runs already. For the same reason the
mesh settings in the environment are left out: a SEQMESH_REDIS_URL there would lead to that other mesh's data.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deploy.local.data_directory import LauncherError, MeshState, NotRunningError, read_state
from deploy.local.embedded import log_tail
from deploy.local.private_files import make_private
from deploy.local.tether import tethered
from shared.settings import ENVIRONMENT_PREFIX

START_TIMEOUT_S = 120.0
"""Executors import torch and load their models: seconds on a quiet machine, much longer on a busy one."""
STOP_TIMEOUT_S = 30.0
"""Longer than each stage of the launcher's own stop; a primary waits ten seconds for replicas that lack some of its
data."""
POLL_INTERVAL_S = 0.1


@contextmanager
def private_mesh(
    *,
    executors: int,
    models: tuple[Path, ...] = (),
    settings: Mapping[str, str] | None = None,
    data_dir: Path | None = None,
) -> Generator[MeshState]:
    """Runs a mesh inside the `with` block. Yields its state (ports and processes) once it is ready.

    models    model repositories; by default the sample models
    settings  further settings, by their environment variables
    data_dir  directory of data and logs, which stays; by default a temporary one
    raises    LauncherError when the mesh does not become ready, with the end of the launcher's output
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(past_proxies("127.0.0.1"))
        if data_dir is None:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seqmesh-")))
        make_private(data_dir)
        said = data_dir / "launcher.log"
        with said.open("wb") as output:
            launcher = subprocess.Popen(
                tethered(up_command(data_dir, executors, models), signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment_without_settings(), **(settings or {})},
                # Its own session: Ctrl-C reaches only this process, which then stops the launcher in order.
                start_new_session=True,
            )
        try:
            yield ready_state(launcher, data_dir, said)
        finally:
            stop(launcher)


@contextmanager
def past_proxies(host: str) -> Generator[None]:
    """Within the block connections to this host go past the proxies that the environment names. gRPC and urllib would
    ask one also for a mesh of this machine, which it does not reach.
    """
    before = os.environ.get("no_proxy")
    os.environ["no_proxy"] = ",".join(filter(None, (before or os.environ.get("NO_PROXY"), host)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["no_proxy"]
        else:
            os.environ["no_proxy"] = before


def up_command(data_dir: Path, executors: int, models: tuple[Path, ...], *, console: bool = False) -> list[str]:
    """The command line of `seqmesh up` with this interpreter. -P: Python imports nothing from the current directory."""
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--console-port=0")
    repositories = [f"--models={repository.resolve()}" for repository in models]
    command = [sys.executable, "-P", "-m", "deploy.cli", "up", "--console" if console else "--no-console"]
    return [*command, f"--executors={executors}", f"--data-dir={data_dir}", *ports, *repositories]


def environment_without_settings() -> dict[str, str]:
    """This process's environment without the settings of a mesh."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}


def ready_state(launcher: subprocess.Popen[bytes], data_dir: Path, said: Path) -> MeshState:
    """Waits until the mesh is ready, and returns its state."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and launcher.poll() is None:
        with contextlib.suppress(NotRunningError):  # not yet, or not any more
            if (state := read_state(data_dir)).ready:
                return state
        time.sleep(POLL_INTERVAL_S)
    problem = "ended" if launcher.poll() is not None else f"was not ready after {START_TIMEOUT_S:.0f} s"
    raise LauncherError(f"the mesh {problem}; the end of what it said:\n{log_tail(said)}")


def stop(process: subprocess.Popen[bytes], sent: signal.Signals = signal.SIGTERM) -> None:
    """Has a process end, and waits for it. It is killed if that takes too long; a launcher's children die with it."""
    process.send_signal(sent)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

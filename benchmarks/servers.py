"""The servers under load: their addresses, their processes, and their statistics of batches."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.clients import Addresses
from deploy.local.data_directory import MeshState
from deploy.local.private_mesh import private_mesh

BUILD_MODELS = Path(__file__).with_name("build_models.py")
STATISTICS_TIMEOUT_S = 10.0


class MeasuredServer(Protocol):
    """A server that speaks the v2 protocols.

    label      how results name it
    groups     process ids by the name their CPU time is reported under
    redis_url  None when it has no Redis
    """

    @property
    def label(self) -> str: ...
    @property
    def address(self) -> Addresses: ...
    @property
    def groups(self) -> Mapping[str, list[int]]: ...
    @property
    def redis_url(self) -> str | None: ...

    def keep_running(self) -> None:
        """Called before each cell: starts a server again that has died."""
        ...


@dataclass(frozen=True, slots=True)
class BenchmarkMesh:
    """A mesh that was started for the benchmark; its launcher restarts what dies."""

    label: str
    address: Addresses
    groups: Mapping[str, list[int]]
    redis_url: str | None

    def keep_running(self) -> None:
        """Does nothing: the launcher restarts processes."""


@contextmanager
def running_mesh(models: Path, executors: int, settings: Mapping[str, str] | None = None) -> Generator[BenchmarkMesh]:
    """A mesh that serves `models`, as long as the block. settings: by their environment variables."""
    with private_mesh(executors=executors, models=(models,), settings=settings) as state:
        yield mesh_of(state)


def mesh_of(state: MeshState) -> BenchmarkMesh:
    """The mesh's addresses and its processes by service."""
    groups: dict[str, list[int]] = {}
    for child in state.children:
        groups.setdefault(child.service, []).append(child.pid)
    order = [name for name in ("gateway", "scheduler", "executor", "redis") if name in groups]
    address = Addresses(state.host, state.gateway.http_port, state.gateway.grpc_port)
    return BenchmarkMesh("seqmesh", address, {name: groups[name] for name in order}, state.redis_url)


def build_models(directory: Path) -> None:
    """Makes the model repository. In a process of its own, so that this one, the client, stays without torch."""
    subprocess.run([sys.executable, str(BUILD_MODELS), str(directory)], check=True, stdout=subprocess.DEVNULL)


@dataclass(frozen=True, slots=True)
class Executions:
    """How many requests a model has answered, and in how many executions."""

    inferences: int
    runs: int

    def mean_batch_since(self, earlier: Executions) -> float | None:
        """Requests per execution between two readings; None without an execution."""
        runs = self.runs - earlier.runs
        return (self.inferences - earlier.inferences) / runs if runs else None


def executions(address: Addresses, model: str) -> Executions:
    """From the server's statistics extension, over all versions of the model."""
    url = f"http://{address.host}:{address.http_port}/v2/models/{model}/stats"
    with urllib.request.urlopen(url, timeout=STATISTICS_TIMEOUT_S) as answer:
        rows = json.load(answer)["model_stats"]
    return Executions(sum(row["inference_count"] for row in rows), sum(row["execution_count"] for row in rows))

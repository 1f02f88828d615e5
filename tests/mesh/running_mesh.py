"""A mesh of real processes for a test: started by `seqmesh up`, on free ports, in a directory of its own.

The test reaches every process by its pid, so that it can kill, freeze, wake or stop one. Nothing of the mesh is
imported into the test's process: what it says of itself is read from mesh.json, from Redis and over its protocols.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import psutil
from click.testing import CliRunner
from redis import Redis, RedisCluster
from redis.backoff import ExponentialBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry
from redis.sentinel import Sentinel

from deploy import cli
from deploy.local.data_directory import ChildState, MeshState, has_state, read_state
from deploy.local.private_files import make_private
from deploy.local.private_mesh import environment_without_settings, ready_state, stop, up_command
from deploy.local.tether import tethered
from executor.engine import mkl
from shared.contract.ids import SequenceId
from shared.contract.messages import ExecutorRegistration
from shared.store.agreement import shards_told
from shared.store.connections.redis_url import parse_redis_url
from shared.store.keyspace import Keyspace
from tests.embedded_cluster import EmbeddedCluster
from tests.key_leaks import leaked_keys

REDIS_URL = "SEQMESH_REDIS_URL"
ANY_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
"""Of a spare gateway. A port that a test chooses may be another process's by the time that the gateway wants it."""
on_clusters = False
"""Whether meshes run on Clusters (`pytest --redis-cluster`)."""

LEASE_MS = 1000
"""Of executors and schedulers: short, so that a test need not wait long for a takeover."""
LONG_LEASE = {"SEQMESH_LEASE_MS": "10000"}
"""Environment of a mesh on which nobody dies: a busy machine must not look like a dead executor."""
PATIENCE_S = 60.0
"""How long a test waits for something that must happen; long, because the machine may be busy."""
LOG_LINES = 60
DEATH = re.compile(r"^seqmesh: \S+ (?:was killed by|exited with code)")
TRACEBACK = re.compile(
    r"^ *(?:\+ Exception Group )?Traceback \(most recent call last\):\n(?: .*\n)*(?:\w.*\n)?", re.MULTILINE
)

_registration = msgspec.json.Decoder(ExecutorRegistration)
seen: list[RunningMesh] = []
"""Meshes that run, or have run since the present test began: their logs are part of its report, if it fails."""


class RunningMesh:
    """One mesh. `state` is read anew each time: the launcher restarts whatever dies."""

    def __init__(self, directory: Path, models: Sequence[Path], environment: Mapping[str, str]) -> None:
        self.directory = directory
        self.models = models
        self.keys = Keyspace()
        self._environment = environment
        self._redis: Redis | None = None
        self.is_closed = False

    @property
    def state(self) -> MeshState:
        """Who runs where, now."""
        return read_state(self.directory)

    @property
    def redis(self) -> Any:
        """A client of the mesh's server; replies are bytes. Typed loosely: redis-py's types are unions."""
        if self._redis is None:
            self._redis = client_of(self.state.redis_url)
        return cast("Any", self._redis)

    def close(self) -> None:
        """Closes the client."""
        self.is_closed = True
        if self._redis is not None:
            self._redis.close()

    # -- where to call ----------------------------------------------------------------------------------------------

    @property
    def gateways(self) -> list[ChildState]:
        """The gateways, in order."""
        return [child for child in self.state.children if child.service == "gateway"]

    def http(self, gateway: int = 0) -> str:
        """host:port of a gateway's HTTP protocol."""
        return f"{self.state.host}:{self.gateways[gateway].http_port}"

    def grpc(self, gateway: int = 0) -> str:
        """host:port of a gateway's gRPC protocol."""
        return f"{self.state.host}:{self.gateways[gateway].grpc_port}"

    def is_ready(self, gateway: int = 0) -> bool:
        """Whether a gateway says that it is ready, on the port that it shares with nobody."""
        address = f"{self.state.host}:{self.gateways[gateway].metrics_port}"
        connection = http.client.HTTPConnection(address, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    # -- processes --------------------------------------------------------------------------------------------------

    def names(self, service: str) -> list[str]:
        """The processes of a service."""
        return [child.name for child in self.state.children if child.service == service]

    def pid(self, name: str) -> int:
        """A process's id; waits while it is between two runs."""
        return wait(lambda: next(child.pid for child in self.state.children if child.name == name), f"{name} runs")

    def send(self, name: str, sent: signal.Signals) -> int:
        """Sends a process a signal; returns its id."""
        pid = self.pid(name)
        os.kill(pid, sent)
        return pid

    def kill(self, name: str) -> int:
        """Kills a process without warning; returns what its id was."""
        return self.send(name, signal.SIGKILL)

    def wake(self) -> None:
        """Wakes what a test has left frozen, which could not be stopped in order."""
        for child in self.state.children if has_state(self.directory) else ():
            if child.pid:
                with suppress(ProcessLookupError):  # It has just ended.
                    os.kill(child.pid, signal.SIGCONT)

    @contextmanager
    def spare(self, service: str, name: str, *flags: str) -> Generator[subprocess.Popen[bytes]]:
        """One more process of a service, which the launcher knows nothing of; at the end of the block it is told to
        stop, and must end in order."""
        repositories = [f"--models={repository}" for repository in self.models] if service == "executor" else []
        command = [sys.executable, "-P", "-m", service, f"--name={name}"]
        with (self.directory / "logs" / f"{name}.log").open("ab") as said:
            process = subprocess.Popen(
                tethered([*command, *repositories, *flags], signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**self._environment, REDIS_URL: self.state.redis_url},
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                code = process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        assert code == 0, f"{name} ended with {code}:\n{self.log(name)}"

    def chosen_ports(self, name: str) -> dict[str, int] | None:
        """By protocol, the ports that a spare gateway was left to choose; None until it listens."""
        said = re.search(r"gateway ready .*", self.log(name))
        return {kind: int(port) for kind, port in re.findall(r"(http|grpc|metrics)=(\d+)", said[0])} if said else None

    async def restart(self, name: str, sent: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal that ends a process; returns when the launcher has started it again and it takes part."""
        service = next(child.service for child in self.state.children if child.name == name)
        old = {one.executor for one in self.registrations()}
        times_ready = self.log(name).count("scheduler ready")
        pid = self.send(name, sent)
        await eventually(lambda: self.pid(name) != pid, f"{name} runs again")
        if service == "executor":
            await eventually(
                lambda: any(one.name == name and one.executor not in old for one in self.alive()), f"{name} is back"
            )
        elif service == "scheduler":
            # Its sign of life in Redis may still be that of the one that was killed.
            await eventually(lambda: self.log(name).count("scheduler ready") > times_ready, f"{name} is back")
        else:
            await eventually(lambda: self.is_ready(self.names("gateway").index(name)), f"{name} is ready")

    async def kill_executor(self, name: str) -> None:
        """Kills an executor; returns when the launcher has started it again and it serves, under a new id."""
        await self.restart(name, signal.SIGKILL)

    # -- what it says of itself --------------------------------------------------------------------------------------

    def registrations(self) -> list[ExecutorRegistration]:
        """Every registered executor, dead ones too."""
        return [_registration.decode(data) for data in self.redis.hgetall(self.keys.executors).values()]

    def alive(self) -> list[ExecutorRegistration]:
        """The executors whose lease holds and that are not about to leave."""
        return [
            registration
            for registration in self.registrations()
            if not registration.leaving and self.redis.exists(self.keys.executor_lease(registration.executor))
        ]

    def leader(self, model: str) -> str:
        """The name of the scheduler that leads a model; "" while nobody does."""
        value: bytes = self.redis.get(self.keys.leader(model)) or b""
        scheduler_id = value.decode().split(" ")[0]
        return next((name for name in self.names("scheduler") if scheduler_id.startswith(f"{name}-")), "")

    def record(self, sequence: SequenceId) -> dict[str, str]:
        """A sequence's record as Redis holds it (fields: docs/reference/keys.md); {} when there is none."""
        fields: dict[bytes, bytes] = self.redis.hgetall(self.keys.sequence(sequence).record)
        return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}

    def slots(self, model: str) -> int:
        """How many sequences of a model can hold a slot at the same time."""
        return sum(
            served.instances * served.slots
            for registration in self.alive()
            for served in registration.models
            if served.model == model
        )

    def loads(self, model: str) -> dict[str, int]:
        """How many sequences of a model each registered executor owns, by name; all at the same moment (of a Cluster:
        soon after each other)."""
        registered = self.registrations()
        shards = self.keys.shards
        pipe = self.redis.pipeline(transaction=not isinstance(self.redis, RedisCluster))
        pipe.hkeys(self.keys.executors)
        for one in registered:
            for shard in shards:
                pipe.scard(self.keys.owned(shard, one.executor, model))
        ids, *counts = pipe.execute()
        if {one.executor for one in registered} != {name.decode() for name in ids}:
            # Somebody came or went meanwhile, and may own some of them.
            return self.loads(model)
        held: dict[str, int] = {}
        for number, one in enumerate(registered):
            owned = sum(counts[number * len(shards) : (number + 1) * len(shards)])
            held[one.name] = held.get(one.name, 0) + owned
        return held

    def slots_held(self, model: str) -> int:
        """How many sequences of a model have an owner now."""
        return sum(self.loads(model).values())

    def leaks(self) -> list[str]:
        """Keys that would stay for ever though every sequence is over. A live executor's empty inbox is none."""
        inboxes = {
            self.keys.inbox(shard, registration.executor) for registration in self.alive() for shard in self.keys.shards
        }
        empty = {f"{inbox} (stream)" for inbox in inboxes if not self.redis.xlen(inbox)}
        return [key for key in leaked_keys(self.redis, self.keys.prefix) if key not in empty]

    def log(self, name: str) -> str:
        """Everything that a process (or "launcher") has printed."""
        path = self.directory / "launcher.log" if name == "launcher" else self.directory / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self, *services: str) -> str:
        """What all processes of these services have printed."""
        return "".join(self.log(name) for service in services for name in self.names(service))

    def deaths(self) -> list[str]:
        """What the launcher said of processes that ended."""
        return [line for line in self.log("launcher").splitlines() if DEATH.search(line)]

    def tracebacks(self) -> list[str]:
        """Every Python traceback in the processes' logs, with the process's name."""
        return [
            f"{path.stem}: {found.group()}"
            for path in sorted((self.directory / "logs").glob("*.log"))
            for found in TRACEBACK.finditer(path.read_text(errors="replace"))
        ]

    def log_sections(self) -> list[tuple[str, str]]:
        """The end of every log, for the report of a failed test."""
        names = ["launcher", *sorted(path.stem for path in (self.directory / "logs").glob("*.log"))]
        return [(f"{name} log", "\n".join(self.log(name).splitlines()[-LOG_LINES:])) for name in names]


@contextmanager
def running_mesh(
    directory: Path,
    models: Sequence[Path],
    *,
    gateways: int = 1,
    schedulers: int = 1,
    executors: int = 1,
    console: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Generator[RunningMesh]:
    """Runs a mesh inside the `with` block; it is ready when the block begins, and every executor takes part: a gateway
    is ready as soon as one does. Each gateway has ports of its own, as on a machine of its own.

    environment  further settings (SEQMESH_...) and variables of the processes. With `pytest --redis-cluster` a mesh
                 that names no Redis there has a Cluster of three nodes
    """
    make_private(directory)
    said = directory / "launcher.log"
    models = [repository.resolve() for repository in models]
    variables = {
        **environment_without_settings(),
        "SEQMESH_GATEWAYS": str(gateways),
        "SEQMESH_SHARE_PORTS": "false",
        "SEQMESH_SCHEDULERS": str(schedulers),
        "SEQMESH_LEASE_MS": str(LEASE_MS),
        # What a test kills has not failed: without this the launcher's pauses grow from test to test.
        "SEQMESH_RESTART_PAUSE_MAX_MS": "200",
        # Slots as models configure them, so that a test can take all of them.
        "SEQMESH_STATE_BYTES_MAX": "0",
        # Threads of a library that wait for work burn the processor that the other processes need.
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    variables.pop(mkl.VARIABLE, None)  # set for the tests' own engines; an executor asks for it by itself
    with ExitStack() as stack:
        if on_clusters and REDIS_URL not in variables:
            variables[REDIS_URL] = stack.enter_context(EmbeddedCluster(directory / "cluster")).url
        with said.open("wb") as output:
            launcher = subprocess.Popen(
                tethered(up_command(directory, executors, tuple(models), console=console), signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,
            )
        stack.callback(stop, launcher)
        mesh = RunningMesh(directory, models, variables)
        seen.append(mesh)
        stack.callback(mesh.close)
        stack.callback(mesh.wake)
        ready_state(launcher, directory, said)
        mesh.keys = Keyspace(shards=shards_told(mesh.redis.hget(mesh.keys.mesh, "shards")))
        wait(lambda: len(mesh.alive()) == executors, "every executor takes part")
        yield mesh


T = TypeVar("T")


def wait(condition: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
    """The first true value of the condition. Fails, saying what did not happen. Blocks."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"did not happen within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)
    return value


async def eventually(condition: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
    """`wait` for a coroutine: the loop runs on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"did not happen within {timeout_s:.0f} s: {what}"
        await asyncio.sleep(0.05)
    return value


def instances_of(mesh: RunningMesh, executor: str = "executor-1") -> list[psutil.Process]:
    """The processes of an executor's instances."""
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        for process in psutil.Process(mesh.pid(executor)).children():
            with suppress(psutil.Error):
                if any(part.endswith("bootstrap.py") for part in process.cmdline()):
                    found.append(process)
    return found


def client_of(url: str) -> Redis:
    """A client of a mesh's server: of whatever server is the primary where Sentinels stand in the URL, of all of them
    where nodes of a Cluster do."""
    address = parse_redis_url(url)
    if address.nodes:
        nodes = [ClusterNode(host, port) for host, port in address.nodes]
        return cast("Any", RedisCluster(startup_nodes=nodes, **address.server.options))
    if not address.sentinels:
        return Redis.from_url(url)
    options = [dict(sentinel.options) for sentinel in address.sentinels]
    sentinels = [(one.pop("host"), one.pop("port")) for one in options]
    # Such a client tries once by itself, and a primary that is demoted closes its connections.
    again = Retry(ExponentialBackoff(), 3)
    return Sentinel(sentinels, sentinel_kwargs=options[0]).master_for(
        address.service, retry=again, **address.server.options
    )


async def seqmesh(mesh: RunningMesh, *arguments: str, code: int = 0) -> str:
    """What a command of `seqmesh` says to the mesh's operator. code: how it exits."""
    # On a thread of its own: it runs an event loop.
    result = await asyncio.to_thread(
        CliRunner().invoke,
        cli.main,
        arguments,
        env={REDIS_URL: mesh.state.redis_url},
        catch_exceptions=False,
    )
    assert code == result.exit_code, result.output
    return result.output

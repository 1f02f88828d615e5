"""A private mesh for chaos: `seqmesh up` behind proxies, with a Redis that can be killed.

The services reach Redis through a proxy. The clients reach every gateway through two proxies, one per protocol. The
launcher restarts the services that die; this module starts and restarts Redis itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import click
import psutil
from redis.exceptions import RedisError

from deploy.chaos.clients import GatewayAddresses
from deploy.chaos.faults import OF_REDIS, Act, Victim
from deploy.chaos.links import Links, gateway_link
from deploy.chaos.mesh import BACK_TIMEOUT_S, POLL_S, NoVictimError, TargetMesh, strike_process
from deploy.chaos.models import FILLED, VARIANTS, variant, write_repository
from deploy.chaos.own_redis import OwnCluster, OwnFailover, OwnRedis, OwnServer
from deploy.local.data_directory import ChildState, LauncherError, MeshState, read_state
from deploy.local.private_mesh import private_mesh
from deploy.local.readiness import unreadiness
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership

OF_EACH = 2
"""Gateways, schedulers and executors: while one is away, another does its work."""
START_ATTEMPTS = 3
PORT_TAKEN = "cannot listen on"
"""The words in which a gateway says so."""
INSTANCE_PROGRAM = "executor.engine.python.process.host"
"""The module that the process of an instance runs."""
INSTANCES = sum(one.process for one in VARIANTS)
"""Such processes of each executor."""
REFUSED_COMMIT = "commit refused"
"""The words in which an executor logs one."""


@contextmanager
def own_mesh(directory: Path, *, lease_ms: int, sentinels: bool, cluster: bool = False) -> Generator[OwnMesh]:
    """A private mesh, as long as the block.

    directory  for models, data and logs of this mesh alone, which stay there; those of an earlier one are removed
    raises     click.UsageError if anything else is in the directory
    """
    if others := foreign(directory):
        raise click.UsageError(f"{directory} is to be removed for a new mesh, and has other things in it: {others[0]}")
    shutil.rmtree(directory, ignore_errors=True)
    models, data_dir = directory / "models", directory / "mesh"
    write_repository(models)
    with contextlib.ExitStack() as stack:
        own: OwnRedis[Any] = OwnServer(directory / "redis")
        if cluster:
            own = OwnCluster(directory / "redis", node_timeout_ms=lease_ms)
        elif sentinels:
            own = OwnFailover(directory / "redis", down_after_ms=lease_ms)
        redis = stack.enter_context(own)
        links = stack.enter_context(Links())
        settings = {
            "SEQMESH_REDIS_URL": redis.url_for_services(links),
            "SEQMESH_GATEWAYS": str(OF_EACH),
            # Each has proxies of its own before it, as if it were alone on its machine.
            "SEQMESH_SHARE_PORTS": "false",
            "SEQMESH_SCHEDULERS": str(OF_EACH),
            "SEQMESH_LEASE_MS": str(lease_ms),
            # Processes are killed on purpose here, so the launcher need not wait long before it restarts them.
            "SEQMESH_RESTART_PAUSE_MAX_MS": "200",
            # OpenMP threads that wait for work would take CPU time from the other processes.
            "OMP_NUM_THREADS": "1",
        }
        state = started(
            stack, lambda: private_mesh(executors=OF_EACH, models=(models,), settings=settings, data_dir=data_dir)
        )
        yield OwnMesh(data_dir, state, redis, links, lease_ms)


def foreign(directory: Path) -> list[str]:
    """What is in the directory of a private mesh, or among its models, and is of no such mesh."""
    own = {Path(name) for name in ("models", "mesh", "redis")} | {Path("models", one.name) for one in VARIANTS}
    found = [path.relative_to(directory) for folder in ("*", "models/*") for path in directory.glob(folder)]
    return sorted(str(path) for path in found if path not in own)


def started(stack: contextlib.ExitStack, start: Callable[[], AbstractContextManager[MeshState]]) -> MeshState:
    """Starts a mesh within the stack; again when a port that was free has been taken meanwhile."""
    for _ in range(START_ATTEMPTS - 1):
        try:
            return stack.enter_context(start())
        except LauncherError as failure:
            if PORT_TAKEN not in failure.message:
                raise
    return stack.enter_context(start())


class OwnMesh(TargetMesh):
    """A private mesh: its launcher starts again whatever dies, except for Redis, which is ours."""

    def __init__(self, data_dir: Path, state: MeshState, redis: OwnRedis[Any], links: Links, lease_ms: int) -> None:
        self.links = links
        self.slots = OF_EACH * variant(FILLED).slots
        self.kinds = redis.kinds
        self._data_dir = data_dir
        self._redis = redis
        self._host = state.host
        self._keys = Keyspace(state.key_prefix)
        self.gateways = [
            GatewayAddresses(
                links.listen(gateway_link(number, "http"), state.host, child.http_port),
                links.listen(gateway_link(number, "grpc"), state.host, child.grpc_port),
            )
            for number, child in enumerate(self._children("gateway"))
        ]
        self.about = {
            "mesh": f"private: {OF_EACH} gateways, {OF_EACH} schedulers, {OF_EACH} executors, lease {lease_ms} ms",
            "redis": redis.about(),
        }

    def names(self, victim: Victim) -> Sequence[str]:
        if victim in OF_REDIS:
            return ["redis"]
        if victim is Victim.INSTANCE:
            return self._instances()
        return [child.name for child in self._children(victim)]

    async def strike(self, victim: Victim, name: str, act: Act, seconds: float) -> None:
        if victim in OF_REDIS:
            await self._redis.strike(act, seconds)
            return
        if victim is Victim.INSTANCE:
            await self._strike_instance(name, act, seconds)
            return
        pid = await self._new_pid(name, 0)
        old = await self._registrations(name)
        await strike_process(pid, act, seconds)
        if act in (Act.KILL, Act.RESTART):
            await self._new_pid(name, pid)
            await self._back(victim, name, old)
        else:
            # An executor that was frozen may still be registered under its old id.
            await self._back(victim, name, set())

    async def ready(self) -> None:
        """The launcher itself waits only for the first executor."""
        for victim in (Victim.GATEWAY, Victim.EXECUTOR):
            for name in self.names(victim):
                await self._back(victim, name, set())

    async def refused_commits(self) -> int:
        """Counted from the executors' logs."""
        logs = (self._data_dir / "logs").glob("executor-*.log*")
        return sum(log.read_text(errors="replace").count(REFUSED_COMMIT) for log in logs)

    def _instances(self) -> list[str]:
        """Processes of instances, as `<executor>/<process id>`."""
        found = [f"{child.name}/{pid}" for child in self._children("executor") for pid in instances_of(child.pid)]
        if not found:
            raise NoVictimError("no process of an instance lives")
        return sorted(found)

    async def _strike_instance(self, name: str, act: Act, seconds: float) -> None:
        """Returns when its executor has all of these processes again. The executor may be struck as well meanwhile."""
        executor, _, pid = name.partition("/")
        await strike_process(int(pid), act, seconds)
        struck = {int(pid)} if act is Act.KILL else set[int]()
        deadline = time.monotonic() + BACK_TIMEOUT_S
        while len(instances_of(self._child(executor).pid) - struck) < INSTANCES:
            await self._poll(deadline, f"{executor} did not start its instance again")

    async def _new_pid(self, name: str, old: int) -> int:
        """The id of a process; waits while it is between two runs, or still the old one."""
        deadline = time.monotonic() + BACK_TIMEOUT_S
        while (pid := self._child(name).pid) in (0, old):
            await self._poll(deadline, f"{name} was not started again")
        return pid

    async def _back(self, victim: Victim, name: str, old: set[str]) -> None:
        """Waits until a process does its work again. A scheduler does so at once, or stands by.

        old  registrations of an executor that are over, though their leases may still hold
        """
        deadline = time.monotonic() + BACK_TIMEOUT_S
        while not await self._serves(victim, name, old):
            await self._poll(deadline, f"{name} did not serve again")

    async def _poll(self, deadline: float, problem: str) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} within {BACK_TIMEOUT_S:.0f} s")
        await asyncio.sleep(POLL_S)

    async def _serves(self, victim: Victim, name: str, old: set[str]) -> bool:
        match victim:
            case Victim.GATEWAY:
                return not await unreadiness(self._host, self._child(name).http_port)
            case Victim.EXECUTOR:
                return bool(await self._registrations(name) - old)
            case _:
                return True

    async def _registrations(self, name: str) -> set[str]:
        """The ids under which an executor is registered with every model; empty while Redis is away."""
        async with connect(self._redis.url, retries=0) as client:
            try:
                members = await Membership(client, self._keys).members()
            except (RedisError, OSError):
                return set()
        wanted = {one.name for one in VARIANTS}
        return {
            member.registration.executor
            for member in members
            if member.usable
            and member.registration.name == name
            and wanted <= {served.model for served in member.registration.models}
        }

    def _children(self, service: str) -> list[ChildState]:
        return [child for child in read_state(self._data_dir).children if child.service == service]

    def _child(self, name: str) -> ChildState:
        return next(child for child in read_state(self._data_dir).children if child.name == name)


def instances_of(executor: int) -> set[int]:
    """The processes of instances that an executor's process has started, and that live."""
    found: set[int] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(executor).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(INSTANCE_PROGRAM in word for word in child.cmdline()):
                    found.add(child.pid)
    return found

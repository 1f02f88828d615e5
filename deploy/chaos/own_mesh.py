"""A private mesh for chaos: `seqmesh up` behind proxies, with a Redis that can be killed.

The services reach Redis through a proxy. The clients reach every gateway through two proxies, one per protocol. The
launcher restarts the services that die; this module starts and restarts Redis itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from deploy.chaos.clients import GatewayAddresses
from deploy.chaos.faults import Act, Victim
from deploy.chaos.links import Links, gateway_link
from deploy.chaos.mesh import BACK_TIMEOUT_S, POLL_S, SIGNALS, frozen, send, until
from deploy.chaos.models import FILLED, VARIANTS, variant, write_repository
from deploy.chaos.own_redis import Fsync, OwnRedis, OwnReplicated, OwnServer
from deploy.chaos.replicated import ReplicatedRedis
from deploy.local.embedded import EmbeddedRedis
from deploy.local.launcher import ChildState, LauncherError, MeshState, read_state, unreadiness
from deploy.local.private_mesh import private_mesh
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.redis_client import connect

START_ATTEMPTS = 3
REDIS_VICTIMS = (Victim.REDIS, Victim.REPLICA)
PORT_TAKEN = "cannot listen on"
"""The words in which a gateway says so."""
REFUSED_COMMIT = "commit refused"
"""The words in which an executor logs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A private mesh's processes and settings."""

    gateways: int
    schedulers: int
    executors: int
    lease_ms: int
    fsync: Fsync
    sentinels: bool = False


@contextmanager
def own_mesh(size: Size, directory: Path) -> Generator[OwnMesh]:
    """A private mesh, as long as the block. directory: models, data and logs; they stay there."""
    models = directory / "models"
    write_repository(models)
    with contextlib.ExitStack() as stack:
        # The server ends with the thread that started it. So it is started by a thread that lives as long as the mesh.
        thread = stack.enter_context(ThreadPoolExecutor(1, "redis"))
        server = own_redis(size, directory / "redis", thread)
        stack.callback(lambda: thread.submit(server.stop).result())
        thread.submit(server.start).result()
        links = stack.enter_context(Links())
        settings = {
            "SEQMESH_REDIS_URL": server.url_for_services(links),
            "SEQMESH_GATEWAYS": str(size.gateways),
            "SEQMESH_SCHEDULERS": str(size.schedulers),
            "SEQMESH_LEASE_MS": str(size.lease_ms),
            # Processes are killed on purpose here, so the launcher need not wait long before it restarts them.
            "SEQMESH_RESTART_PAUSE_MAX_MS": "200",
            # OpenMP threads that wait for work would take CPU time from the other processes.
            "OMP_NUM_THREADS": "1",
        }
        data_dir = directory / "mesh"
        state = started(
            stack,
            lambda: private_mesh(executors=size.executors, models=(models,), settings=settings, data_dir=data_dir),
        )
        mesh = OwnMesh(size, data_dir, state, server, links)
        stack.callback(mesh.wake_all)
        yield mesh


def own_redis(size: Size, directory: Path, thread: ThreadPoolExecutor) -> OwnRedis:
    """The Redis of a private mesh, not yet started."""
    if not size.sentinels:
        return OwnServer(EmbeddedRedis(directory), size.fsync, thread)
    servers = ReplicatedRedis(
        directory, replicas=2, appendfsync=size.fsync, min_replicas=1, down_after_ms=size.lease_ms
    )
    return OwnReplicated(servers, size.fsync, thread)


def started(stack: contextlib.ExitStack, start: Callable[[], AbstractContextManager[MeshState]]) -> MeshState:
    """Starts a mesh within the stack; again when a port that was free has been taken meanwhile."""
    for _ in range(START_ATTEMPTS - 1):
        try:
            return stack.enter_context(start())
        except LauncherError as failure:
            if PORT_TAKEN not in failure.message:
                raise
    return stack.enter_context(start())


class OwnMesh:
    """A private mesh: its launcher starts again whatever dies, except for Redis, which is ours."""

    def __init__(self, size: Size, data_dir: Path, state: MeshState, server: OwnRedis, links: Links) -> None:
        self.links = links
        self.slots = size.executors * variant(FILLED).slots
        self.kinds = server.kinds
        self._data_dir = data_dir
        self._server = server
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
            "mesh": f"private: {size.gateways} gateways, {size.schedulers} schedulers, {size.executors} executors, "
            f"lease {size.lease_ms} ms",
            "redis": server.about(),
        }

    def names(self, victim: Victim) -> Sequence[str]:
        """See `TargetMesh`."""
        return ["redis"] if victim in REDIS_VICTIMS else [child.name for child in self._children(victim)]

    async def strike(self, victim: Victim, name: str, act: Act, seconds: float) -> None:
        """See `TargetMesh`."""
        if victim in REDIS_VICTIMS:
            await self._server.strike(act, seconds)
            return
        before = await self._running(name)
        old = await self._registrations(name)
        if act in (Act.FREEZE, Act.BLINK):
            await frozen(before, seconds)
        else:
            send(before, SIGNALS[act])
            await until(lambda: self._child(name).pid not in (0, before), f"{name} is started again")
        # An executor that was frozen may still be registered under its old id.
        await self._back(victim, name, set() if act in (Act.FREEZE, Act.BLINK) else old)

    async def _back(self, victim: Victim, name: str, old: Collection[str] = ()) -> None:
        """Waits until a process does its work again. A scheduler does so at once, or stands by.

        old  registrations of an executor that are over, though their leases may still hold
        """
        deadline = time.monotonic() + BACK_TIMEOUT_S
        while not await self._serves(victim, name, old):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not serve again within {BACK_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def _serves(self, victim: Victim, name: str, old: Collection[str]) -> bool:
        match victim:
            case Victim.GATEWAY:
                return not await unreadiness(self._host, self._child(name).http_port)
            case Victim.EXECUTOR:
                return bool(await self._registrations(name) - set(old))
            case _:
                return True

    async def _registrations(self, name: str) -> set[str]:
        """The ids under which an executor is registered with every model; empty while Redis is away."""
        async with connect(self._server.url, retries=0) as client:
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

    async def ready(self) -> None:
        """See `TargetMesh`. The launcher itself waits only for the first executor."""
        for victim in (Victim.GATEWAY, Victim.EXECUTOR):
            for name in self.names(victim):
                await self._back(victim, name)

    async def _running(self, name: str) -> int:
        """The id of a process; waits while it is between two runs."""
        await until(lambda: self._child(name).pid, f"{name} runs")
        return self._child(name).pid

    def _children(self, service: str) -> list[ChildState]:
        return [child for child in read_state(self._data_dir).children if child.service == service]

    def _child(self, name: str) -> ChildState:
        return next(child for child in read_state(self._data_dir).children if child.name == name)

    def wake_all(self) -> None:
        """Wakes frozen processes, which could not stop in order."""
        with contextlib.suppress(LauncherError):
            for child in read_state(self._data_dir).children:
                if child.pid:
                    send(child.pid, signal.SIGCONT)

    async def refused_commits(self) -> int:
        """See `TargetMesh`. Counted from the executors' logs."""
        return sum(
            log.read_text(errors="replace").count(REFUSED_COMMIT)
            for log in (self._data_dir / "logs").glob("executor-*.log*")
        )

"""A store that does not serve for a while, and says so, or says nothing.

    full       what was accepted is finished, and nothing else is accepted (decision 0019). There is room again only
               when that is done
    disk       it cannot write, and refuses whatever writes; or it has too few replicas
    replica    it is demoted, and is the primary again later: who waits is cut short, and its run is another one
    loading    it was started again, and reads its file
    away       it has lost its primary; of a Cluster, the slot of its keys is on its way to another node
    silent     it takes commands, and carries them out when it answers again

`--cluster`: each node of a Cluster (nodes.py) goes through this by itself.

In every other mesh there is all that `--vary` has, besides.

`python -m tests.simulation --refuse --seeds 1000`, and `--refuse-lose`: it also comes back without its newest data
(losing.py)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from shared.contract.record import ACCEPTED, COMMITTED, STATE, TOMBSTONES
from shared.store.connections.homes import tag_of
from tests.simulation.connections import Server
from tests.simulation.losing import LosingWorld, play_losing
from tests.simulation.nodes import WorldOfNodes
from tests.simulation.store import Args, Store
from tests.simulation.story import Story
from tests.simulation.values import HashValue
from tests.simulation.varying import VariedWorld, varied_plan
from tests.simulation.world import Plan, Result, World, plan_of, play

REFUSALS = 0.25
"""The share of faults that are such ones."""
GROWING = frozenset(b"SET INCR INCRBY DECR HSET HSETNX HINCRBY SADD ZADD RPUSH XADD".split())
"""Commands that a store without memory refuses."""
WRITING = GROWING | frozenset(
    b"DEL UNLINK RENAME PEXPIRE EXPIRE PERSIST HDEL SREM SPOP ZREM LPOP LTRIM BLPOP XDEL XTRIM".split()
)
ANSWERED = frozenset(b"INFO CLIENT TIME CONFIG CLUSTER MULTI EXEC".split())
"""What a server answers in whatever state it is."""


def writes(store: Store, command: Args) -> bool:
    """Whether a command may write. A function that the store does not have is above all unknown to it."""
    name = command[0].upper()
    if name == b"FCALL":
        return store.library_of(command[1]) is not None
    return name in WRITING or name == b"EVAL" or (name == b"FUNCTION" and command[1].upper() != b"LIST")


def grows(store: Store, command: Args) -> bool:
    """Whether a store without memory refuses it."""
    name = command[0].upper()
    if name == b"FCALL":
        script, source = command[1].rpartition(b"_")[0], store.library_of(command[1])
        return source is not None and b"'%b_' .. RELEASE, flags = { 'allow-oom' }" % script not in source
    if name == b"EVAL":
        return not command[1].startswith(b"#!lua flags=allow-oom\n")
    return name in GROWING or (name == b"FUNCTION" and command[1].upper() == b"LOAD")


def asks(_: Store, command: Args) -> bool:
    """Whether it is anything but a question about the server itself."""
    return command[0].upper() not in ANSWERED


@dataclass(frozen=True)
class Refusal:
    """A state of a server. error: its answer to what it refuses; ends: what is over when it comes into that state. Its
    next time as a primary is another run then.
    """

    error: str
    refuses: Callable[[Store, Args], bool]
    ends: str = ""


FULL = Refusal("OOM command not allowed when used memory > 'maxmemory'.", grows)
SILENT = Refusal("", asks)
REFUSALS_OF_SERVERS = (
    *(FULL, FULL, SILENT, SILENT),
    Refusal("MISCONF Errors writing to the AOF file: No space left on device", writes),
    Refusal("NOREPLICAS Not enough good replicas to write.", writes),
    Refusal("READONLY You can't write against a read only replica.", writes, "waits"),
    Refusal("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", asks, "waits"),
    Refusal("LOADING Redis is loading the dataset in memory", asks, "connections"),
)
REFUSALS_OF_NODES = (
    *REFUSALS_OF_SERVERS,
    Refusal("MOVED 1 127.0.0.1:6390", asks, "waits"),
    Refusal("TRYAGAIN Multiple keys request during rehashing of slot", asks),
    Refusal("CLUSTERDOWN The cluster is down", asks),
)


class RefusingWorld(World):
    """A mesh whose store does that."""

    refusals = REFUSALS_OF_SERVERS

    def __init__(self, seed: int, story: Story, plan: Plan) -> None:
        super().__init__(seed, story, plan)
        self._fate = random.Random(f"refuse {seed}")
        self._refusing: dict[str, Refusal] = {}

    def _fault(self) -> None:
        home = self._fate.choice(list(self.network.servers))
        if home in self._refusing or self._fate.random() >= REFUSALS:
            super()._fault()
            return
        refusal, seconds = self._fate.choice(self.refusals), self._fate.choice((0.3, 1.0, 3.0, 6.0, 12.0))
        self.story.tell(f"fault: the store {home} for {seconds} s: {refusal.error or 'is silent'}")
        self._refusing[home] = refusal
        self._refuse(self.network.servers[home], refusal)
        asyncio.get_running_loop().call_later(seconds, self._recover, home, refusal)

    def _refuse(self, server: Server, refusal: Refusal) -> None:
        server.refuse = lambda command: refusal.error if refusal.refuses(self.store, command) else ""
        if refusal is SILENT:
            self.network.silence(server, is_silent=True)
        elif refusal.ends == "waits":
            server.end_blocks("UNBLOCKED force unblock from blocking operation, instance state changed")
        elif refusal.ends:
            self.network.break_all(server=server)

    def _recover(self, home: str, refusal: Refusal) -> None:
        if self._refusing.get(home) is not refusal:
            return
        if refusal is FULL and self._is_unfinished(home):
            asyncio.get_running_loop().call_later(1.0, self._recover, home, refusal)
            return
        self.story.tell(f"the store {home} serves again")
        server = self.network.servers[home]
        del self._refusing[home]
        server.run += bool(refusal.ends)
        server.refuse = lambda _: ""
        self.network.silence(server, is_silent=False)

    def _is_unfinished(self, home: str) -> bool:
        """Whether a full server has steps that are not final, and the scripts for it: it takes none."""
        keys = [key for key in self.store.present() if b":seq:" in key and home in ("", tag_of(key.decode()))]
        return self.store.has_libraries and any(self._is_open(self.store.value(key)) for key in keys)

    def _is_open(self, record: object) -> bool:
        fields = dict(record) if isinstance(record, HashValue) else {}
        state, accepted, committed = (fields.get(name.encode(), b"0") for name in (STATE, ACCEPTED, COMMITTED))
        return state not in TOMBSTONES and int(accepted) > int(committed)

    async def weather(self) -> None:
        await super().weather()
        for home, refusal in list(self._refusing.items()):
            self._recover(home, refusal)


class RefusingVaried(RefusingWorld, VariedWorld):
    """A mesh with all else, too. Its operator needs memory for what he has begun, a load say."""

    def _is_open(self, record: object) -> bool:
        return False


class RefusingLosing(LosingWorld, RefusingWorld):
    """A mesh whose store loses its newest data, too."""


class ClusterWorld(WorldOfNodes, RefusingWorld):
    """A mesh on a Cluster."""

    refusals = REFUSALS_OF_NODES


class ClusterVaried(ClusterWorld, RefusingVaried):
    """With all else, too."""


def refused(seed: int) -> Result:
    """Runs one seed of a mesh with one server."""
    return play(seed, varied_plan(seed), RefusingVaried) if seed % 2 else play(seed, plan_of(seed), RefusingWorld)


def refused_and_lost(seed: int) -> Result:
    """Runs one seed of a mesh whose server does both."""
    return play_losing(seed, plan_of(seed), RefusingLosing)


def clustered(seed: int) -> Result:
    """Runs one seed of a mesh on a Cluster."""
    plan, world = (varied_plan(seed), ClusterVaried) if seed % 2 else (plan_of(seed), ClusterWorld)
    return play(seed, replace(plan, shards=random.Random(f"nodes {seed}").choice((2, 3))), world)

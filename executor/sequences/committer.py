"""Makes finished steps final, in the order in which they were computed. Only one round trip to each server is under way
at a time.

While one group of commits is on its way, further batches are computed, and their commits gather here: under load every
round trip carries many steps (group commit). A lost connection is no error: `commit` recognises what it did before, so
the same group is sent again until Redis answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from shared.contract.ids import ExecutorId, ShardId
from shared.contract.limits import SCRIPT_BYTES_MAX, SCRIPT_STEPS_MAX
from shared.process import logs
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.connections.homes import servers
from shared.store.connections.link import Link
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.keyspace import Keyspace
from shared.store.round_trips import RoundTrips
from shared.store.script_sender import Call
from shared.store.script_values import CommitCode, JournalBounds, KeptReplies, StepCommit
from shared.store.scripts import Scripts

OPEN_STEPS_MAX = 4096
"""Most computed steps that wait for their commit, over all models. Beyond that, computing waits for Redis."""
OPEN_BYTES_MAX = 256 << 20
"""Most bytes of their answers and checkpoints; the last batch may exceed it."""

Taken = Sequence[int]
"""How many steps were taken up to some moment, for each server."""


class CommitOwner(Protocol):
    """The owner of committed steps: a model whose sequences live here."""

    @property
    def load(self) -> ModelLoad: ...
    @property
    def idle_ms(self) -> int: ...
    @property
    def kept_replies(self) -> KeptReplies: ...
    @property
    def mark(self) -> str: ...
    @property
    def journal(self) -> JournalBounds: ...
    def committed(self, steps: Sequence[StepCommit], codes: Sequence[CommitCode], sent_ns: int, done_ns: int) -> None:
        """Called once for each step, in commit order; times are wall clock, ns."""
        ...


@dataclass(slots=True)
class _Group:
    """The steps that one call of the script carries. size: bytes"""

    owner: CommitOwner
    shard: ShardId
    steps: list[StepCommit]
    size: int = 0


def size_of(step: StepCommit) -> int:
    """Bytes of a step's answer and checkpoint."""
    size = len(step.reply)
    for _, value in step.checkpoint:
        size += len(value)
    return size


class Committer:
    """The commits of one executor registration. Those to one server wait for no other server."""

    def __init__(self, scripts: Scripts, redis: Redis, keys: Keyspace, executor: ExecutorId, tombstone_ms: int) -> None:
        self._keys = keys
        self._servers: list[_ServerCommits] = []
        self._server_of: dict[ShardId, _ServerCommits] = {}
        for server, shards in servers(redis, keys):
            commits = _ServerCommits(scripts, Link(server), executor, tombstone_ms, self._moved_on)
            self._servers.append(commits)
            self._server_of |= dict.fromkeys(shards, commits)
        self.below_bounds = asyncio.Event()
        """Set while another batch may be computed."""
        self.below_bounds.set()
        self._progress = asyncio.Event()

    def put(self, owner: CommitOwner, steps: Sequence[StepCommit]) -> Taken:
        """Takes computed steps; the steps of a sequence must come in order."""
        for step in steps:
            shard = self._keys.shard_of(step.sequence)
            self._server_of[shard].put(owner, shard, step)
        if steps:
            self._look_at_bounds()
        return [server.taken for server in self._servers]

    def _moved_on(self) -> None:
        """Some of what was put is final."""
        # Whoever waits now looks again; who comes later waits for the next round trip.
        self._progress.set()
        self._progress.clear()
        self._look_at_bounds()

    def _look_at_bounds(self) -> None:
        steps = sum(server.open_steps for server in self._servers)
        if steps >= OPEN_STEPS_MAX or sum(server.open_bytes for server in self._servers) >= OPEN_BYTES_MAX:
            self.below_bounds.clear()
        else:
            self.below_bounds.set()

    async def final(self, taken: Taken) -> None:
        """Returns when the steps that had been taken then are final."""
        while any(server.done < count for server, count in zip(self._servers, taken, strict=False)):
            await self._progress.wait()

    async def drained(self) -> None:
        """Returns when every step that was put is final."""
        while any(server.open_steps for server in self._servers):
            await self._progress.wait()

    async def run(self, clock_ns: Callable[[], int]) -> None:
        """Sends the commits that gather, for ever."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(server.run(clock_ns), name="commits")


class _ServerCommits:
    """The commits to one server.

    moved_on  called when a round trip has made steps final
    taken     steps that were put so far; done: how many of them are final
    """

    def __init__(
        self, scripts: Scripts, link: Link, executor: ExecutorId, tombstone_ms: int, moved_on: Callable[[], None]
    ) -> None:
        self._scripts = scripts
        self._trips = RoundTrips(scripts, link, "commits")
        self._executor = executor
        self._tombstone_ms = tombstone_ms
        self._moved_on = moved_on
        self._waiting: deque[tuple[CommitOwner, ShardId, StepCommit, int]] = deque()
        self._groups: list[_Group] = []
        self._sending = 0
        self._sent_ns = 0
        self.open_bytes = 0
        self.taken = 0
        self.done = 0

    @property
    def open_steps(self) -> int:
        """Steps that are not final yet."""
        return self.taken - self.done

    def put(self, owner: CommitOwner, shard: ShardId, step: StepCommit) -> None:
        self.taken += 1
        size = size_of(step)
        self._waiting.append((owner, shard, step, size))
        self.open_bytes += size
        self._trips.due()

    async def run(self, clock_ns: Callable[[], int]) -> None:
        await self._trips.run(partial(self._depart, clock_ns))

    async def _depart(self, clock_ns: Callable[[], int]) -> bool:
        """One round trip. False when groups are left that are not final; they go again, before everything newer."""
        if not self._groups:
            taken, self._waiting = self._waiting, deque()
            self._groups, self._sending, self._sent_ns = _grouped(taken), len(taken), clock_ns()
        outcomes = await self._trips.send([self._call(group) for group in self._groups])
        done_ns = clock_ns()
        failed: list[_Group] = []
        for index, (group, outcome) in enumerate(zip(self._groups, outcomes, strict=True)):
            if isinstance(outcome, Exception):
                # A primary that was replaced, or a slot that moves, is a lost connection.
                tell = logs.warning if isinstance(outcome, CONNECTION_LOST) else logs.error
                tell("commit failed", model=group.owner.load.model, steps=len(group.steps), cause=str(outcome))
                failed.append(group)
            elif CommitCode.OUT_OF_ORDER in outcome:
                # The call for the step before was not run, or ran after this one: a server that has just been
                # restarted does not know the script until it is loaded. If there is no such call, this process has
                # lost count. It must end then, so that other executors restore the sequences from Redis.
                earlier = [(before.owner, before.shard) for before in self._groups[:index]]
                assert (group.owner, group.shard) in earlier, f"{group.owner.load}, {group.shard}: out of order"
                failed.append(group)
            else:
                self.open_bytes -= group.size
                group.owner.committed(group.steps, outcome, self._sent_ns, done_ns)
        self._groups = failed
        if not failed:
            self.done += self._sending
            self._sending = 0
            self._moved_on()
        return not failed

    def _call(self, group: _Group) -> Call[list[CommitCode]]:
        return self._scripts.commit(
            group.steps,
            shard=group.shard,
            executor=self._executor,
            load=group.owner.load,
            idle_ms=group.owner.idle_ms,
            tombstone_ms=self._tombstone_ms,
            kept=group.owner.kept_replies,
            mark=group.owner.mark,
            journal=group.owner.journal,
        )


def _grouped(taken: deque[tuple[CommitOwner, ShardId, StepCommit, int]]) -> list[_Group]:
    """Groups of one owner and shard each, in order of arrival; none is larger than a script call should be."""
    open_groups: dict[tuple[CommitOwner, ShardId], _Group] = {}
    groups: list[_Group] = []
    for owner, shard, step, size in taken:
        group = open_groups.get((owner, shard))
        if group is None or len(group.steps) >= SCRIPT_STEPS_MAX or group.size >= SCRIPT_BYTES_MAX:
            group = open_groups[owner, shard] = _Group(owner, shard, [])
            groups.append(group)
        group.steps.append(step)
        group.size += size
    return groups

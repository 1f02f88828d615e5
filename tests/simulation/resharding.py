"""A mesh that is stopped in the middle of traffic and faults, goes to another number of shards, and goes on.

Every process is told to stop, and killed if it takes too long. Then `seqmesh reshard` runs over the same network, is
killed a few times in the middle, and repeated until it comes to its end. The ledger judges what becomes of the clients'
steps, with an operator beside them (operator.py); beside that

    sequences  have the same keys as before, in their new shards; a record loses its owner and nothing else
    steps      that are open lie parked, each once and in their order
    places     the waiting lines and the deadlines are what the records say

`python -m tests.simulation --reshard --seeds 1000`
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import click

from deploy.operate.reshard import OF_A_SEQUENCE, Resharding
from shared.contract.ids import SequenceId
from shared.contract.record import LOST, MOVING, NO_ENTRY, PAGED, TOMBSTONES, WAITING
from shared.process import lifecycle
from shared.process.lifecycle import Stop, Tasks
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.keyspace import SCHEMA_VERSION, Keyspace
from shared.store.sequence_status import SequenceStatus
from tests.simulation.ledger import Record
from tests.simulation.model import NAME
from tests.simulation.operator import OperatedWorld
from tests.simulation.script_bench import pairs
from tests.simulation.story import Story
from tests.simulation.values import HashValue, SortedSet, Stream
from tests.simulation.world import PREFIX, URL, Life, Member, Plan, Result, plan_of, play

STOP_S = 2.0
"""So long at most a process that was told to stop has for it."""
ON_THE_WAY_S = 2.5
"""Longer than anything is on its way (`tests.simulation.network.Trouble`)."""
DEATHS_MAX = 3
SHARDS_MAX = 4
NAMES_OF_ENTRIES = frozenset({"be", "bn", "dn"})
"""Fields of a record that may name an entry of the starts stream."""
OF_THE_OWNER = frozenset({"st", "ow", "in", "sl", "ep", "vd", "vk", "cl", "tk"})
"""Fields that change when a sequence is taken from its owner."""


class Kept(NamedTuple):
    """A key of a sequence."""

    shard: int
    value: object
    until_ms: int | None

    def is_as(self, before: Kept, is_lost: bool) -> bool:
        """Whether nothing of it has changed; a sequence that is lost is remembered for a while."""
        return self.value == before.value and (is_lost or self.until_ms == before.until_ms)


@dataclass(frozen=True)
class Sequences:
    """keys: by kind and sequence; due: when to look at an idle marker, ms, by sequence and shard"""

    records: dict[SequenceId, Record]
    keys: dict[tuple[str, SequenceId], Kept]
    due: dict[tuple[SequenceId, int], float]


class ReshardedWorld(OperatedWorld):
    """A mesh whose number of shards changes once."""

    def __init__(self, seed: int, story: Story, plan: Plan) -> None:
        super().__init__(seed, story, plan)
        self._fate = random.Random(f"reshard {seed}")
        self._to = self._fate.choice([n for n in range(1, SHARDS_MAX + 1) if n != plan.shards])
        self._command = Member(self, "reshard", self._reshards)

    async def weather(self) -> None:
        await super().weather()
        if not self.story.violations:
            await self._change_shards()
            await super().weather()

    async def _change_shards(self) -> None:
        self.story.tell(f"the mesh is stopped, to have {self._to} shards")
        for member in self.members:
            member.wanted = False
            if member.life is not None:
                member.life.stop.request("SIGTERM")
        await asyncio.sleep(self._fate.uniform(0.0, STOP_S))
        for member in self.members:
            member.kill()
        # The command refuses to begin for a minute after a process was killed. Here nobody waits for longer than until
        # what was on its way from it has come.
        await asyncio.sleep(ON_THE_WAY_S)
        self.store.execute([b"DEL", self.keys.services.encode()])
        before = self._sequences()
        for _ in range(self._fate.randint(0, DEATHS_MAX)):
            self._command.start()
            await asyncio.sleep(self._fate.uniform(0.0, 0.5))
            self._command.kill()
        self._command.start()
        while self._command.wanted:
            await asyncio.sleep(0.1)
            if self.story.violations:
                # It fails each time that it is repeated.
                self._command.kill()
                return
        self.keys = self.ledger.keys = Keyspace(PREFIX, self._to)
        self._compare(before)
        for member in self.members:
            member.wanted = True
            member.start()

    async def _copy(self, sequences: Any, one: SequenceStatus) -> None:
        # A copy is told from its origin by its one answer.
        if not self.plan.shape.decoupled:
            await super()._copy(sequences, one)

    async def _reshards(self, life: Life) -> int:
        return await lifecycle.outcome(self._run_command, life.stop)

    async def _run_command(self, tasks: Tasks, stop: Stop) -> None:
        """One process of the command."""
        redis = connect(URL)
        try:
            await Resharding(redis, PREFIX, self._to, tell=self.story.tell).run()
            self._command.wanted = False
        except (click.ClickException, *CONNECTION_LOST) as error:
            self.story.tell(f"the command ends: {error}")
        await redis.aclose()

    def _sequences(self) -> Sequences:
        """What lies in the store under each sequence's own keys, and until when, ms; None: for ever."""
        now_ms, found = self.store.now_ms(), Sequences({}, {}, {})
        for raw in self.store.present():
            shard, _, rest = raw.decode().removeprefix(f"{PREFIX}:{SCHEMA_VERSION}:{{").partition("}:")
            kind, _, sequence = rest.partition(":")
            value, ttl_ms = self.store.value(raw), self.store.ttl_ms(raw)
            if kind == "seq" and isinstance(value, HashValue):
                found.records[SequenceId(sequence)] = dict(value)
            if kind in OF_A_SEQUENCE:
                until_ms = now_ms + ttl_ms if ttl_ms >= 0 else None
                found.keys[kind, SequenceId(sequence)] = Kept(int(shard), deepcopy(value), until_ms)
            if kind == "deadlines" and isinstance(value, SortedSet):
                found.due.update({(SequenceId(name.decode()), int(shard)): at for name, at in value.scores.items()})
        return found

    def _compare(self, before: Sequences) -> None:
        """Nothing is lost of what was there, and everything lies where a mesh of that many shards looks for it."""
        after, now_ms = self._sequences(), self.store.now_ms()
        lost = {one for one, record in after.records.items() if record[b"st"] == LOST}
        for (kind, sequence), was in before.keys.items():
            record, now = before.records.get(sequence, {}), after.keys.get((kind, sequence))
            is_over = was.until_ms is not None and was.until_ms < now_ms
            if kind == "seq":
                self._compare_records(sequence, record, after.records.get(sequence, {}), is_over=is_over)
            elif now is None and not is_over and record.get(b"st") != b"l":
                self.story.violate(f"{sequence}: its {kind} is gone")
            elif now is not None and kind != "parked" and not now.is_as(was, sequence in lost):
                self.story.violate(f"{sequence} ({record[b'st']!r}): its {kind} was {was}, and is {now}")
        for (kind, sequence), now in after.keys.items():
            if now.shard != self.keys.shard_of(sequence):
                self.story.violate(f"{sequence}: its {kind} lies in shard {now.shard}")
        for sequence, record in after.records.items():
            if record[b"st"] not in TOMBSTONES:
                self._check_parked(sequence, record)
        self._check_lines(after.records)
        due = {(one, self.keys.shard_of(one)): at for (one, _), at in before.due.items() if one not in lost}
        if after.due != due:
            self.story.violate(f"looked at are {after.due}, not {due}")

    def _compare_records(self, sequence: SequenceId, was: Record, now: Record, *, is_over: bool) -> None:
        changed = {name.decode() for name in was.keys() | now.keys() if was.get(name) != now.get(name)}
        if is_over and not now:
            return
        if was[b"st"] != b"l":
            is_right = changed <= NAMES_OF_ENTRIES
        elif now.get(b"st") == LOST:
            is_right = was[b"du"] == b"0" and was[b"nx"] == was[b"cm"]
        else:
            is_right = now.get(b"st") in (MOVING, PAGED) and changed <= OF_THE_OWNER | NAMES_OF_ENTRIES
        self.ledger.renamed(sequence, was[b"bn"], now.get(b"bn", b""))
        if not is_right:
            self.story.violate(f"{sequence}: its record was {was}, and is {now}")

    def _check_parked(self, sequence: SequenceId, record: Record) -> None:
        """Every open step waits for the next owner, with those that it needs to run again. In any order: a step that
        came while the sequence had no owner lies before those that a takeover has moved.
        """
        parked = self.store.value(self.keys.sequence(sequence).parked.encode())
        entries = [dict(pairs(parked.fields[entry])) for entry in parked.ids] if isinstance(parked, Stream) else []
        steps = [int(fields[b"a"].split()[0]) for fields in entries]
        accepted, committed = int(record[b"nx"]), int(record[b"cm"])
        # A step that failed left the state as it was: it is not run again.
        waits = sorted(step for step in steps if step > committed)
        if len(steps) > len(set(steps)) or waits != list(range(committed + 1, accepted + 1)):
            self.story.violate(f"{sequence}: {steps} are parked, and {committed} of {accepted} committed")

    def _check_lines(self, records: Mapping[SequenceId, Record]) -> None:
        """Whoever waits has an entry in its shard, and is counted there."""
        for shard in self.keys.shards:
            starts = self.store.value(self.keys.starts(shard, NAME).encode())
            entries = {} if not isinstance(starts, Stream) else starts.fields
            found = {b"%d-%d" % entry: dict(pairs(fields)) for entry, fields in entries.items()}
            in_line = {entry: fields[b"q"] for entry, fields in found.items() if fields[b"k"] in (b"w", b"m", b"r")}
            here = {sequence: record for sequence, record in records.items() if self.keys.shard_of(sequence) == shard}
            waits = {one[b"be"]: s.encode() for s, one in here.items() if one[b"st"] in (WAITING, MOVING)}
            # Who is paused waits for no slot.
            waits.pop(NO_ENTRY, None)
            line = self.store.value(self.keys.line(shard, NAME).encode())
            counted = int(line.get(b"w", b"0")) if isinstance(line, HashValue) else 0
            if in_line != waits or counted != sum(one[b"st"] == WAITING for one in here.values()):
                self.story.violate(f"in the line of shard {shard} are {in_line}, {counted} of them new, not {waits}")


def resharded(seed: int) -> Result:
    """Runs one seed of a mesh that is resharded."""
    plan = plan_of(seed)
    return play(seed, replace(plan, faults_s=plan.faults_s / 2), ReshardedWorld)

"""`seqmesh reshard`: the keys of a mesh that does not run go to another number of shards.

While the keys move, Redis holds `RESHARDING` as the mesh's number of shards, and the number that they go to beside it.
So no process joins the mesh until the command has come to its end. Every step of it leaves a state from which it can
begin anew, and changes nothing if it was done before: a command that was killed is repeated.

1. The sequences are taken from their executors, as a leader takes them from an executor that has left.
2. What belongs to one sequence, or to one queue of stateless work, is renamed; on a Cluster, where the new name is
   another node's, it is copied and then removed.
3. What many sequences share is divided anew: for each model its waiting line and its deadlines, and the sequences of
   each tenant.
4. Statistics of shards that are no more are added to those of the first one. What only running processes need, and the
   response cache, is removed.

No transaction reaches over shards, as they may be on several nodes. Where a half would not tell what the other half was
to be, the commands are written down first, as a *plan*: with all values as they are to be in the end, so that they can
be made from the first to the last as often as it takes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import click
import msgspec

from deploy.local.data_directory import locked
from deploy.local.embedded import served
from deploy.local.private_files import private_files
from deploy.operate.operating import connected
from deploy.operate.settings import OperatorSettings, operator_command
from deploy.operate.texts import counted
from shared.contract.ids import ExecutorId, SchedulerId, SequenceId, ShardId, Term, entry_key, model_of
from shared.contract.record import BIRTH, DEADLINE_ENTRY, STATE, WAIT_ENTRY, WAITING
from shared.store.agreement import RESHARDING, agree, shards_for, shards_told, told
from shared.store.company import services
from shared.store.connections.redis_client import redis_now_ms
from shared.store.journals import RUN
from shared.store.keyspace import DEFAULT_PREFIX, SCHEMA_VERSION, SHARDS_MAX, Keyspace
from shared.store.membership import Membership
from shared.store.reading import text_of
from shared.store.script_values import LedShard
from shared.store.scripts import Scripts

TO, FROM, PLAN = "to", "from", "plan"
"""Fields of the mesh's record meanwhile: the number of shards that the keys go to, the one that they come from, and
commands that are being made.
"""
OF_A_SEQUENCE = ("seq", "idle", "parked", "checkpoint", "journal")
REMOVED = ("feed", "replies", "wanted-slots", "spares", "inbox", "owned", "cache")
"""Kinds of keys that say something to running processes alone, and the response cache."""
NUMBER = re.compile(rb"-?\d{1,18}")
"""What was counted. Anything else can only be damaged, and stops nothing."""
LAST_INFERENCE = b"last_inference_ms"
TOMBSTONE_MS = 60_000
LEASE_MS = 60_000
AT_ONCE = 500
"""Keys or members that are moved in one round trip."""
COPIED_AT_ONCE = 16
"""Keys that are copied to another node in one round trip: each may hold some megabytes of state."""

HELP = """Changes the number of shards of a mesh that does not run.

Stop every process of the mesh first: the command refuses while one is alive. (One that was killed counts as alive for a
minute.) Live sequences go on afterwards; only those whose state their executor alone had are lost, as with every stop
of all executors. The response cache is emptied. A command that was cut off is repeated; until it has come to its end no
process joins the mesh.

One server is fastest with one shard, and a Redis Cluster with one for each node, which is what a new mesh has. On a
Cluster the shards are divided anew among the nodes.

\b
  seqmesh reshard 1
  seqmesh reshard 1 --redis-url redis://redis.internal:6379/0
"""


class ShardKey(NamedTuple):
    """A key of a shard. rest: what follows the kind"""

    name: str
    shard: int
    kind: str
    rest: str


class StartsEntry(NamedTuple):
    """An entry of a starts stream. sequence: "" if it names none"""

    id: tuple[int, int]
    shard: int
    sequence: SequenceId
    fields: Mapping[bytes, bytes]


class MovedEntry(NamedTuple):
    """An entry in its new stream.

    renamed  fields of its sequence's record that name it by its old id, and its new one
    waits    the sequence waits by this entry
    """

    id: str
    shard: int
    sequence: SequenceId
    fields: Mapping[bytes, bytes]
    renamed: Mapping[str, str]
    waits: bool


Records = Mapping[SequenceId, Mapping[str, bytes | None]]


async def run(settings: OperatorSettings, shards: int) -> None:
    prefix = settings.key_prefix or DEFAULT_PREFIX
    async with redis_of(settings) as redis:
        before = await Resharding(redis, prefix, shards, tell=partial(click.echo, err=True)).run()
    click.echo(f"the mesh '{prefix}' has {counted(shards, 'shard')} now" + (f"; it had {before}" if before else ""))


@asynccontextmanager
async def redis_of(settings: OperatorSettings) -> AsyncGenerator[Any]:
    """A client for the Redis that is given, or for the server of a data directory, which runs for the block."""
    if settings.redis_url:
        async with connected(settings.redis_url) as redis:
            yield redis
        return
    directory = settings.data_dir / "redis"
    if not directory.exists():
        raise click.ClickException(f"no mesh has run in {settings.data_dir}: give its --data-dir, or its --redis-url")
    with private_files(), locked(settings.data_dir), served(directory.resolve()) as url:
        async with connected(url) as redis:
            yield redis


class Resharding:
    """The way of one mesh's keys to a number of shards.

    redis  typed loosely, for commands that no service uses
    tell   hears what is done next: a large mesh takes minutes
    """

    def __init__(self, redis: Any, prefix: str, shards: int, *, tell: Callable[[str], object] = bool) -> None:
        self._redis = redis
        self._tell = tell
        self._count = shards
        self._to = Keyspace(prefix)
        self._key = re.compile(rf"{re.escape(prefix)}:{SCHEMA_VERSION}:\{{(\d+)\}}:([^:]+):?(.*)", re.DOTALL)

    async def run(self) -> int:
        """Everything. Returns the number of shards before, 0 if it is not known any more."""
        before = await self._claim()
        if before == self._to.shards:
            return len(before)
        await self._carry_out()
        found = await self._keys()
        self._tell(f"{len(found)} keys: sequences are taken from their executors")
        await self._take_from_executors(found)
        self._tell("keys get their new names")
        await self._rename(await self._keys())
        await self._raise_epochs(await self._keys())
        found = await self._keys()
        for model in sorted({one.rest for one in found if one.kind in ("starts", "line", "deadlines")}):
            self._tell(f"the sequences of '{model}' are divided")
            await self._divide_line(model, found)
        await self._divide_sets(found)
        await self._add_up(found)
        await self._remove(await self._keys())
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._to.mesh, "shards", told(self._to.shards))
            pipe.hdel(self._to.mesh, TO, FROM)
            await pipe.execute()
        return len(before)

    # -- who may ----------------------------------------------------------------------------------------------------

    async def _claim(self) -> Sequence[ShardId]:
        """Keeps every process out of the mesh, and says to which shards its keys go. Returns its shards, none if a
        command was cut off.

        Raises click.ClickException while a process is in it.
        """
        mesh = self._to.mesh
        shards, to, of = await self._redis.hmget(mesh, "shards", TO, FROM)
        if shards is None:
            raise click.ClickException(
                f"no mesh '{self._to.prefix}' in this Redis: give its --redis-url and --key-prefix"
            )
        if shards != RESHARDING.encode():
            before = (await agree(self._redis, self._to.prefix)).shards
            self._to = Keyspace(self._to.prefix, await shards_for(self._redis, self._count))
            await self._refuse_company()
            if before == self._to.shards:
                return before
            names = {"shards": RESHARDING, TO: told(self._to.shards), FROM: told(before)}
            await self._redis.hset(mesh, mapping=names)
            try:
                # A process that joined before tells of itself before it looks at the number: one sees the other.
                await self._refuse_company()
            except click.ClickException:
                await self._redis.hset(mesh, "shards", told(before))
                await self._redis.hdel(mesh, TO, FROM)
                raise
            self._know(before)
            return before
        going = shards_told(to) if to is not None else await shards_for(self._redis, self._count)
        if len(going) != self._count:
            raise click.ClickException(
                f"the keys are on their way to {len(going)} shards: run `seqmesh reshard {len(going)}` to its end first"
            )
        self._to = Keyspace(self._to.prefix, going)
        await self._refuse_company()
        self._know(shards_told(of or RESHARDING.encode()))
        return ()

    def _know(self, before: Iterable[ShardId]) -> None:
        """Makes the homes known, so that `_keys` looks at all nodes of a Cluster that have keys of the mesh."""
        self._redis.know(self._named(shard, "") for shard in {*before, *self._to.shards})

    async def _refuse_company(self) -> None:
        alive = {f"{line.service} {line.name}" for line in await services(self._redis, self._to)}
        members = await Membership(self._redis, self._to).members()
        alive |= {f"executor {member.registration.name}" for member in members if member.alive}
        if alive:
            raise click.ClickException(
                f"processes of the mesh are alive, or were killed less than a minute ago: {', '.join(sorted(alive))}. "
                "Stop them, and repeat the command"
            )

    # -- the keys ---------------------------------------------------------------------------------------------------

    async def _keys(self) -> list[ShardKey]:
        base = re.sub(r"([\\*?\[\]])", r"\\\1", f"{self._to.prefix}:{SCHEMA_VERSION}:{{")
        found: set[ShardKey] = set()
        async for data in self._redis.scan_iter(match=f"{base}*", count=1000):
            name = text_of(data)
            if match := self._key.fullmatch(name):
                found.add(ShardKey(name, int(match[1]), match[2], match[3]))
        return sorted(found)

    def _named(self, shard: int, kind: str, rest: str = "") -> str:
        return f"{self._to.prefix}:{SCHEMA_VERSION}:{{{shard}}}:{kind}{rest and ':' + rest}"

    async def _take_from_executors(self, found: Sequence[ShardKey]) -> None:
        """Takes every sequence from its executor, and every step from the inboxes, as a leader does."""
        keys = Keyspace(self._to.prefix, sorted({ShardId(one.shard) for one in found}))
        scripts, terms = Scripts(self._redis, keys), dict[str, Term]()
        for one in found:
            if one.kind != "owned" or not (member := await self._redis.srandmember(one.name)):
                continue
            model = model_of(SequenceId(text_of(member)))
            if model not in terms:
                terms[model] = await self._term(scripts, model)
            executor = ExecutorId(one.rest.removesuffix(f":{model}"))
            led = LedShard(ShardId(one.shard), model, terms[model])
            reclaim = scripts.reclaim(executor, led, count=256, tombstone_ms=TOMBSTONE_MS)
            while await scripts.run(reclaim) != (0, 0):
                pass
        for one in found:
            if one.kind == "inbox":
                await scripts.drain_whole(ExecutorId(one.rest), shard=ShardId(one.shard))
        for model, term in terms.items():
            await scripts.run(scripts.resign(model, SchedulerId("reshard"), term=term))

    async def _term(self, scripts: Scripts, model: str) -> Term:
        (term,) = await scripts.run(scripts.lead({model: Term(0)}, SchedulerId("reshard"), lease_ms=LEASE_MS))
        if isinstance(term, Exception):
            raise term
        if not term:
            raise click.ClickException(f"a scheduler still has the lead of '{model}': repeat the command in a minute")
        return term

    async def _rename(self, found: Iterable[ShardKey]) -> None:
        """Renames the keys of single sequences and of queues."""
        names: list[tuple[str, str]] = []
        for one in found:
            if one.kind in OF_A_SEQUENCE:
                shard = self._to.shard_of(SequenceId(one.rest))
            elif one.kind == "work":
                # work:<model>:<version>:<name>
                shard = self._to.home_shard(one.rest.rsplit(":", 2)[0])
            else:
                continue
            if shard != one.shard:
                names.append((one.name, self._named(shard, one.kind, one.rest)))
        here = [(before, now) for before, now in names if self._redis.home(before) is self._redis.home(now)]
        for part in parts(here):
            pipe = self._redis.pipeline(transaction=False)
            for before, now in part:
                pipe.rename(before, now)
            for outcome in await pipe.execute(raise_on_error=False):
                # A tombstone or an idle marker may have run out meanwhile.
                if isinstance(outcome, Exception) and "no such key" not in str(outcome):
                    raise outcome
        for part in parts(sorted(set(names).difference(here)), COPIED_AT_ONCE):
            await self._copy(part)

    async def _copy(self, names: Sequence[tuple[str, str]]) -> None:
        """Copies keys to where their new names belong, then removes those of the old names."""
        read, write, remove = (self._redis.pipeline(transaction=False) for _ in range(3))
        for before, _ in names:
            # The time first: of a key that has run out in between there is nothing to copy.
            read.pttl(before)
            read.execute_command("DUMP", before)
            remove.unlink(before)
        told = await read.execute()
        for (_, now), left_ms, data in zip(names, told[::2], told[1::2], strict=True):
            if data is not None:
                # -1: it has no TTL, which RESTORE calls 0.
                write.execute_command("RESTORE", now, 0 if left_ms < 0 else max(left_ms, 1), data, "REPLACE")
        await write.execute()
        await remove.execute()

    async def _carry_out(self, plan: Sequence[Sequence[Any]] = ()) -> None:
        """Writes a plan down, makes its commands and forgets it; without one, that of a command that was cut off."""
        if plan:
            await self._redis.hset(self._to.mesh, PLAN, msgspec.msgpack.encode(plan))
        if (written := await self._redis.hget(self._to.mesh, PLAN)) is None:
            return
        for part in parts(msgspec.msgpack.decode(written)):
            pipe = self._redis.pipeline(transaction=False)
            for command in part:
                pipe.execute_command(*command)
            await pipe.execute()
        await self._redis.hdel(self._to.mesh, PLAN)

    async def _raise_epochs(self, found: Iterable[ShardKey]) -> None:
        """Epochs go on from the highest of all: a sequence that comes from another shard has had that shard's."""
        epochs = [await self._epoch(one.name) for one in found if one.kind == "epoch"]
        for shard in self._to.shards:
            await self._redis.set(self._to.epoch(shard), max(epochs, default=0))

    async def _epoch(self, name: str) -> int:
        value = await self._redis.get(name) or b"0"
        # As scripts do (common.lua): the clock in ms is above every epoch that was given.
        return int(value) if NUMBER.fullmatch(value) else await redis_now_ms(self._redis)

    async def _divide_line(self, model: str, found: Iterable[ShardKey]) -> None:
        """The starts streams and the counts of a model's waiting line, with one plan."""
        shards = sorted({one.shard for one in found if one.kind in ("starts", "line") and one.rest == model})
        pipe = self._redis.pipeline(transaction=False)
        for shard in shards:
            pipe.xrange(self._named(shard, "starts", model))
            pipe.hgetall(self._named(shard, "line", model))
        read = await pipe.execute()
        entries = sorted(
            (
                StartsEntry(entry_key(id), shard, SequenceId(text_of(fields.get(b"q", b""))), fields)
                for shard, stream in zip(shards, read[::2], strict=True)
                for id, fields in stream
            ),
            key=lambda entry: (entry.id, entry.shard),
        )
        records = await self._records(entries)
        moved = moved_entries(self._to, entries, records)
        counts = line_counts(self._to, moved, records, read[1::2])
        runs = await self._renamed_runs(moved, records)
        # Also where there was none: the plan may be carried out twice, and no entry is taken behind itself.
        plan: list[Sequence[Any]] = [
            ("DEL", self._named(shard, kind, model))
            for shard in sorted({*shards, *self._to.shards})
            for kind in ("starts", "line")
        ]
        for entry in moved:
            plan.append(("XADD", self._named(entry.shard, "starts", model), entry.id, *flat(entry.fields)))
            if entry.renamed:
                plan.append(("HSET", self._to.sequence(entry.sequence).record, *flat(entry.renamed)))
        plan += (("HSET", journal, RUN, run) for journal, run in runs.items())
        plan += (("HSET", self._named(shard, "line", model), *flat(line)) for shard, line in counts.items() if line)
        await self._carry_out(plan)

    async def _renamed_runs(self, moved: Iterable[MovedEntry], records: Records) -> dict[str, str]:
        """The runs of journals that name their sequences by births of old: those of copies, which have waited since."""
        runs: dict[str, str] = {}
        for entry in moved:
            if BIRTH in entry.renamed:
                journal = self._to.journal(entry.sequence)
                birth, _, start = text_of(await self._redis.hget(journal, RUN) or b"").partition(".")
                if birth == text_of(records[entry.sequence][BIRTH] or b""):
                    runs[journal] = f"{entry.renamed[BIRTH]}.{start}"
        return runs

    async def _records(self, entries: Iterable[StartsEntry]) -> dict[SequenceId, dict[str, bytes | None]]:
        """What the records of these entries' sequences say of their wait."""
        names = (WAIT_ENTRY, BIRTH, DEADLINE_ENTRY, STATE)
        records: dict[SequenceId, dict[str, bytes | None]] = {}
        for part in parts(sorted({entry.sequence for entry in entries if entry.sequence})):
            pipe = self._redis.pipeline(transaction=False)
            for sequence in part:
                pipe.hmget(self._to.sequence(sequence).record, names)
            for sequence, values in zip(part, await pipe.execute(), strict=True):
                records[sequence] = dict(zip(names, values, strict=True))
        return records

    async def _divide_sets(self, found: Iterable[ShardKey]) -> None:
        """The deadlines of each model's sequences, and the sequences of each tenant."""
        for one in found:
            members: list[tuple[bytes, float | None]] = []
            if one.kind == "deadlines":
                members = await self._redis.zrange(one.name, 0, -1, withscores=True)
            elif one.kind == "tenant":
                members = [(member, None) for member in sorted(await self._redis.smembers(one.name))]
            for part in parts(members):
                gained, left = (self._redis.pipeline(transaction=False) for _ in range(2))
                for member, score in part:
                    now = self._named(self._to.shard_of(SequenceId(text_of(member))), one.kind, one.rest)
                    if now == one.name:
                        continue
                    if score is None:
                        gained.sadd(now, member)
                        left.srem(one.name, member)
                    else:
                        gained.zadd(now, {member: score})
                        left.zrem(one.name, member)
                await gained.execute()
                await left.execute()

    async def _add_up(self, found: Iterable[ShardKey]) -> None:
        """Adds the statistics of shards that are no more to those of the first shard; all shards are read as one."""
        for one in found:
            if one.shard in self._to.shards or one.kind not in ("counts", "unreadable", "tally"):
                continue
            first = self._named(self._to.shards[0], one.kind, one.rest)
            pipe = self._redis.pipeline(transaction=False)
            for name in (first, one.name):
                if one.kind == "tally":
                    pipe.lrange(name, 0, -1)
                else:
                    pipe.hgetall(name)
            pipe.pttl(one.name)
            to, of, left_ms = await pipe.execute()
            if not of:  # it has run out
                continue
            if one.kind == "tally":
                # Cut back to what it was, in case this is done again.
                as_it_was = ("LTRIM", first, 0, len(to) - 1) if to else ("DEL", first)
                plan: list[Sequence[Any]] = [as_it_was, ("RPUSH", first, *of)]
            else:
                plan = [("HSET", first, *flat(summed(to, of)))]
            if left_ms > 0:
                plan.append(("PEXPIRE", first, left_ms))
            await self._carry_out([*plan, ("DEL", one.name)])

    async def _remove(self, found: Iterable[ShardKey]) -> None:
        """Removes what nobody reads any more."""
        for part in parts([one for one in found if one.kind in REMOVED or one.shard not in self._to.shards]):
            await self._redis.unlink(*(one.name for one in part))


def parts(values: Sequence[Any], at_once: int = 0) -> Iterable[Sequence[Any]]:
    """A list in parts, of `AT_ONCE` by default."""
    size = at_once or AT_ONCE
    return (values[first : first + size] for first in range(0, len(values), size))


def flat(fields: Mapping[Any, Any]) -> list[Any]:
    """Fields and values in turn, as commands take them."""
    return [word for field in fields.items() for word in field]


def summed(to: Mapping[bytes, bytes], of: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Two hashes of counts added up. The later one of the last requests counts, and `of` where there is no number."""
    sums = dict(to)
    for field, value in of.items():
        before = sums.get(field, b"0")
        if NUMBER.fullmatch(value) and NUMBER.fullmatch(before):
            both = int(before), int(value)
            sums[field] = b"%d" % (max(both) if field == LAST_INFERENCE else sum(both))
        else:
            sums[field] = value
    return sums


def moved_entries(to: Keyspace, entries: Iterable[StartsEntry], records: Records) -> list[MovedEntry]:
    """The entries in this order, each in its sequence's shard, behind the entry before it there."""
    moved: list[MovedEntry] = []
    ids: dict[tuple[int, str], str] = {}
    last: dict[int, tuple[int, int]] = {}
    for entry in entries:
        shard = to.shard_of(entry.sequence) if entry.sequence else to.shards[0]
        ms, number = last[shard] = max(entry.id, next_id(last.get(shard)))
        was = f"{entry.id[0]}-{entry.id[1]}"
        now = ids[entry.shard, was] = f"{ms}-{number}"
        fields = dict(entry.fields)
        if b"b" in fields:
            waits = text_of(fields[b"b"])
            fields[b"b"] = ids.get((entry.shard, waits), waits).encode()
        record = records.get(entry.sequence, {})
        naming = [name for name in (WAIT_ENTRY, BIRTH, DEADLINE_ENTRY) if text_of(record.get(name) or b"") == was]
        renamed = dict.fromkeys(naming, now) if now != was else {}
        moved.append(MovedEntry(now, shard, entry.sequence, fields, renamed, WAIT_ENTRY in naming))
    return moved


def line_counts(
    to: Keyspace, entries: Iterable[MovedEntry], records: Records, before: Iterable[Mapping[bytes, bytes]]
) -> dict[int, Counter[str]]:
    """The counts of the waiting lines, by shard: how many wait for their first slot, of which each shard has its bound
    (submit.lua), and all other counts of before in the first one, as only their sums are read.
    """
    counts: dict[int, Counter[str]] = {shard: Counter() for shard in to.shards}
    for line in before:
        for field, value in line.items():
            if (name := text_of(field)) != "w" and NUMBER.fullmatch(value):
                counts[to.shards[0]][name] += int(value)
    for entry in entries:
        if entry.waits:
            counts[entry.shard]["w"] += records[entry.sequence][STATE] == WAITING
    return counts


def next_id(last: tuple[int, int] | None) -> tuple[int, int]:
    """The lowest id that a stream takes behind its last one."""
    return (0, 1) if last is None else (last[0], last[1] + 1)


command = operator_command("reshard", HELP, run, [click.Argument(["shards"], type=click.IntRange(1, SHARDS_MAX))])

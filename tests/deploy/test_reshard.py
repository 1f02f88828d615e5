"""The keys of a mesh go to another number of shards; what the mesh promised holds afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, Self, cast

import click
import msgspec
import numpy as np
import pytest

from deploy.local.embedded import served
from deploy.operate import reshard
from deploy.operate.reshard import Resharding
from deploy.operate.settings import OperatorSettings
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId, StepNumber, Term
from shared.contract.messages import StepFlag
from shared.store.agreement import join_mesh
from shared.store.commands import Redis
from shared.store.company import Company
from shared.store.connections.fitness import UnfitRedisError
from shared.store.connections.redis_client import connect
from shared.store.exported import ExportedSequence
from shared.store.journals import journal_of
from shared.store.keyspace import SCHEMA_VERSION, Keyspace
from shared.store.script_values import ReopenCode, StepCommit, StepOutcome, Submission, SubmitCode
from tests.embedded_cluster import EmbeddedCluster, ask
from tests.embedded_redis import EmbeddedRedis
from tests.scripted_mesh import ScriptedMesh

FIRST, SECOND = ExecutorId("first"), ExecutorId("second")
INPUT = {"INPUT": np.array([1], np.int32)}
TENANT = "acme"
LIVE, OPEN, PAGED, PAUSED, NEW = range(1, 9), range(9, 17), range(17, 25), range(25, 29), range(29, 45)
IDLE_MS = 3_600_000


class Died(Exception):
    """The command was killed."""


class DyingRedis:
    """A connection whose process dies at one of its round trips: before it, or after Redis has had it."""

    def __init__(self, redis: Any, at: int) -> None:
        self._redis = redis
        self._left = count(at, -1)

    def __getattr__(self, name: str) -> Any:
        found: Any = getattr(self._redis, name)
        if name in ("scan_iter", "home", "know") or not callable(found):
            return found
        if name == "pipeline":

            def pipeline(**options: Any) -> DyingPipe:
                return DyingPipe(found(**options), self)

            return pipeline

        async def mortal(*args: Any, **options: Any) -> Any:
            self.breathe()
            call: Any = found
            return await call(*args, **options)

        return mortal

    def breathe(self) -> None:
        if next(self._left) == 0:
            raise Died


class DyingPipe:
    """Its pipelines."""

    def __init__(self, pipe: Any, redis: DyingRedis) -> None:
        self._pipe = pipe
        self._redis = redis

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    async def __aenter__(self) -> Self:
        await self._pipe.__aenter__()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._pipe.__aexit__(*failure)

    async def execute(self, **options: Any) -> Any:
        self._redis.breathe()
        return await self._pipe.execute(**options)


@pytest.fixture
async def redis(private_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A server of its own: the command looks at every key."""
    client = connect(private_server.url)
    yield client
    await client.aclose()


async def begun(redis: Redis, shards: int) -> dict[int, Submission]:
    """A mesh that was stopped with sequences in every state. Returns the open steps."""
    keys = await join_mesh(redis, "seqmesh", shards)
    mesh, opened = ScriptedMesh(redis, keys, "sum"), dict[int, Submission]()
    await mesh.open()
    for number in (*LIVE, *OPEN, *PAGED, *PAUSED):
        submission = mesh.submission(number, INPUT, StepFlag.START | StepFlag.PAGEABLE)
        await mesh.submit(msgspec.structs.replace(submission, tenant=TENANT))
        await mesh.assign(number, FIRST, slot=number)
        await committed(mesh, number, 1)
    for number in PAGED:
        await mesh.vacate(number)
    for number in PAUSED:
        assert await mesh.pause(number)
    for number in (*OPEN, *PAUSED, *NEW):
        opened[number] = mesh.submission(number, INPUT, StepFlag.START if number in NEW else StepFlag.NONE)
        await mesh.submit(opened[number])
    return opened


async def committed(mesh: ScriptedMesh, number: int, nth: int) -> None:
    sequence, step = mesh.sequence(number), StepNumber(nth)
    record = await mesh.record(number)
    done = StepCommit(
        sequence,
        Epoch(int(record["ep"])),
        step,
        StepFlag.NONE,
        StepOutcome.DONE,
        "",
        "",
        b"",
        checkpoint=(("s:SUM", b"%d of %d" % (step, number)),),
        base=step,
        recoverable=True,
    )
    assert [1] == await mesh.committed(ExecutorId(record["ow"]), done, idle_ms=IDLE_MS, tombstone_ms=1000)


async def statistics(redis: Any, keys: Keyspace) -> None:
    for shard in keys.shards:
        await redis.hset(keys.counts(shard, "sum", "1", "0"), mapping={"success_count": 5, "last_inference_ms": 7})
        await redis.pexpire(keys.counts(shard, "sum", "1", "0"), 60_000)
        await redis.rpush(keys.tally(shard, "sum", "1", "0"), b"one", b"two")
        await redis.hset(keys.unreadable(shard), mapping={"seq": 1, "last:seq": f"x{shard}"})
        await redis.hset(keys.cache(shard).entries, "a", "b")
    await redis.hset(keys.work_queue("add", "1").meta, "a", "b")


async def check(redis: Any, shards: int, opened: dict[int, Submission]) -> None:
    """Everything is where a mesh of that number looks for it, and goes on."""
    keys = await join_mesh(redis, "seqmesh")
    assert shards == len(keys.shards)
    mesh = ScriptedMesh(redis, keys, "sum")
    await mesh.open()

    bases = (*(f"{keys.base(shard)}" for shard in keys.shards), f"seqmesh:{SCHEMA_VERSION}:{{mesh}}:", keys.mesh)
    names = [name.decode() async for name in redis.scan_iter(match="seqmesh:*")]
    assert [] == [name for name in names if not name.startswith(bases)]
    assert [] == [name for name in names if ":inbox:" in name or ":owned:" in name or ":cache:" in name]

    waiting = [int(await redis.hget(keys.line(shard, "sum"), "w") or 0) for shard in keys.shards]
    assert (len(NEW), len(opened)) == (sum(waiting), await waiting_steps(redis, keys))

    order: list[tuple[int, int]] = []
    for shard in keys.shards:
        for id, fields in await redis.xrange(keys.starts(shard, "sum")):
            sequence = SequenceId(fields[b"q"].decode())
            assert shard == keys.shard_of(sequence)
            assert id == await redis.hget(keys.sequence(sequence).record, "be")
            if fields[b"k"] == b"w":
                number = [mesh.sequence(number) for number in NEW].index(sequence)
                order.append((number, int(id.split(b"-")[0])))
    if shards == 1:
        times = [ms for _, ms in sorted(order)]
        assert sorted(times) == times, "who came first is served first"

    counts = [await redis.hgetall(keys.counts(shard, "sum", "1", "0")) for shard in keys.shards]
    assert 20 == sum(int(one.get(b"success_count", 0)) for one in counts)
    assert 8 == sum([await redis.llen(keys.tally(shard, "sum", "1", "0")) for shard in keys.shards])
    assert b"b" == await redis.hget(keys.work_queue("add", "1").meta, "a")

    for shard in keys.shards:
        own = {mesh.sequence(number) for number in (*LIVE, *OPEN, *PAGED, *PAUSED)}
        expected = {sequence.encode() for sequence in own if shard == keys.shard_of(sequence)}
        assert expected == await redis.smembers(keys.tenant(shard, TENANT))

    epochs = set[int]()
    for number in (*LIVE, *PAGED, *NEW, *OPEN, *PAUSED):
        record = await mesh.record(number)
        assert {"st": record["st"]} == {"st": "w" if number in NEW else "m" if number in opened else "p"}
        if number not in NEW:
            sequence = mesh.sequence(number)
            state = await redis.hget(keys.sequence(sequence).checkpoint, "s:SUM")
            assert b"1 of %d" % number == state
            assert await redis.zscore(keys.deadlines(keys.shard_of(sequence), "sum"), sequence) is not None
            assert (number in opened) == (await redis.pttl(keys.sequence(sequence).idle) < 0)
        if number in LIVE or number in PAGED:
            again = await mesh.submit(mesh.submission(number, INPUT))
            assert (SubmitCode.WAITING, 2) == (again.code, again.step)
    mesh.term = Term(9)
    for number in PAUSED:
        assert await mesh.resume(number)
    for number in (*LIVE, *OPEN, *PAGED, *PAUSED, *NEW):
        before = int((await mesh.record(number)).get("ep", 0))
        epoch = await mesh.assign(number, SECOND)
        assert epoch > before
        epochs.add(epoch)
        await committed(mesh, number, 1 if number in NEW else 2)
    waiting = [int(await redis.hget(keys.line(shard, "sum"), "w") or 0) for shard in keys.shards]
    assert (0, 0) == (sum(waiting), await waiting_steps(redis, keys))
    inbox = [entry for shard in keys.shards for _, entry in await redis.xrange(keys.inbox(shard, SECOND))]
    tokens = {entry[b"a"].split()[3].decode() for entry in inbox if b"a" in entry}
    assert {one.token for one in opened.values()} <= tokens


async def waiting_steps(redis: Any, keys: Keyspace) -> int:
    """How many steps the waiting line counts."""
    return sum([int(await redis.hget(keys.line(shard, "sum"), "s:1") or 0) for shard in keys.shards])


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 3), (1, 4)])
async def test_on_a_cluster_the_keys_go_to_other_nodes(
    private_cluster: EmbeddedCluster, before: int, after: int
) -> None:
    async with connect(private_cluster.url) as redis:
        opened = await begun(redis, before)
        await statistics(redis, Keyspace("seqmesh", 4))
    async with connect(private_cluster.url) as redis:
        assert before == await Resharding(redis, "seqmesh", after).run()
    async with connect(private_cluster.url) as redis:
        await check(redis, after, opened)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 3), (1, 4)])
async def test_every_sequence_goes_on_in_its_new_shard(redis: Redis, before: int, after: int) -> None:
    opened = await begun(redis, before)
    await statistics(redis, Keyspace("seqmesh", 4))

    told: list[str] = []

    assert before == await Resharding(redis, "seqmesh", after, tell=told.append).run()

    await check(redis, after, opened)
    assert ["sequences are taken from their executors", "the sequences of 'sum' are divided"] == [
        told[0].partition(": ")[2],
        told[-1],
    ]


@pytest.mark.timeout(300)
async def test_counters_that_cannot_be_read_do_not_leave_the_mesh_on_its_way(redis: Any) -> None:
    """No process joins a mesh whose keys are on their way, and the command failed at the same value again and again."""
    opened, old = await begun(redis, 4), Keyspace("seqmesh", 4)
    await statistics(redis, old)
    await redis.set(old.epoch(ShardId(0)), "x")
    await redis.hset(old.line(ShardId(1), "sum"), mapping={"gone:1": "y", "out:1": "9" * 30})

    await Resharding(redis, "seqmesh", 1).run()

    await check(redis, 1, opened)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
async def test_a_command_that_was_killed_anywhere_is_repeated(
    redis: Any, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """It dies between two of its round trips, in which it moves few keys; nobody joins the mesh meanwhile."""
    monkeypatch.setattr(reshard, "AT_ONCE", 5)

    assert await deaths(redis, redis.flushall, every=4, before=before, after=after) > 20


@pytest.mark.timeout(600)
async def test_a_command_that_was_killed_anywhere_on_a_cluster_is_repeated(
    private_cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reshard, "AT_ONCE", 5)
    monkeypatch.setattr(reshard, "COPIED_AT_ONCE", 7)

    async def emptied() -> None:
        for node in private_cluster.nodes:
            ask(node, "FLUSHALL")

    async with connect(private_cluster.url) as redis:
        assert await deaths(redis, emptied, every=11, before=4, after=1) > 10


async def deaths(redis: Any, emptied: Callable[[], Awaitable[object]], *, every: int, before: int, after: int) -> int:
    """Kills the command at every so-many-th round trip, and repeats it. Returns how often it died."""
    died = 0
    for trip in range(1, 999, every):
        await emptied()
        opened = await begun(redis, before)
        await statistics(redis, Keyspace("seqmesh", 4))
        try:
            await Resharding(DyingRedis(redis, trip), "seqmesh", after).run()
            break
        except Died:
            died += 1
        if await redis.hget("seqmesh:{mesh}:mesh", "shards") == b"0":
            with pytest.raises(UnfitRedisError, match="to its end"):
                await join_mesh(redis, "seqmesh")
            with pytest.raises(click.ClickException, match=f"reshard {after}` to its end first"):
                await Resharding(redis, "seqmesh", 7).run()
        await Resharding(redis, "seqmesh", after).run()
        await check(redis, after, opened)
    return died


async def test_a_copy_that_gets_another_birth_keeps_its_journal(redis: Redis) -> None:
    """Two entries of one millisecond come into one stream: the second one gets a name of its own."""
    mesh = ScriptedMesh(redis, keys := await join_mesh(redis, "seqmesh", 2), "sum")
    first, copy = (next(n for n in range(99) if keys.shard_of(mesh.sequence(n)) == shard) for shard in (0, 1))
    journal = {"n": b"1", "b": b"2", "i:1": b"i", "o:1": b"o"}
    exported = ExportedSequence("sum", "1", 1, 1, 1, {}, {"s:SUM": b"x"}, 0, "", journal)
    reopened = mesh.scripts.reopen(mesh.sequence(copy), exported, idle_ms=IDLE_MS, live_max=10, pageable=False)
    assert ReopenCode.DONE == await mesh.scripts.run(reopened)
    await mesh.submit(mesh.submission(first, INPUT, StepFlag.START))
    commands, (record, other), starts = cast("Any", redis), keys.records(map(mesh.sequence, (first, copy))), keys.starts
    ((_, fields),) = await commands.xrange(starts(ShardId(0), "sum"))
    birth = (await commands.hget(other, "bn")).decode()
    await commands.delete(starts(ShardId(0), "sum"))
    await commands.xadd(starts(ShardId(0), "sum"), fields, id=birth)
    await commands.hset(record, mapping={"bn": birth, "be": birth})

    await Resharding(redis, "seqmesh", 1).run()

    keys = Keyspace("seqmesh", 1)
    found = await commands.hgetall(keys.sequence(mesh.sequence(copy)).record)
    assert birth.encode() != found[b"bn"] == found[b"be"]
    assert journal == journal_of(await commands.hgetall(keys.journal(mesh.sequence(copy))), found)


async def test_a_mesh_that_runs_is_left_alone(redis: Any) -> None:
    keys = await join_mesh(redis, "seqmesh", 4)
    company = Company(redis, keys, "gateway", "gateway-1")
    await company.tell()

    with pytest.raises(click.ClickException, match="gateway gateway-1"):
        await Resharding(redis, "seqmesh", 1).run()

    assert [b"4", None] == await redis.hmget(keys.mesh, "shards", "to")
    await company.tell()
    with pytest.raises(click.ClickException, match="no mesh 'other'"):
        await Resharding(redis, "other", 1).run()


async def test_the_mesh_of_a_data_directory_is_changed_by_its_own_server(tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    directory.mkdir()
    with served(directory) as url:
        async with connect(url) as client:
            old = await join_mesh(client, "seqmesh", 4)
            await cast("Any", client).hset(old.work_queue("add", "1").meta, "a", "b")

    await reshard.run(OperatorSettings(data_dir=tmp_path), 1)

    with served(directory) as url:
        async with connect(url) as client:
            new = await join_mesh(client, "seqmesh")
            assert (1, b"b") == (len(new.shards), await client.hget(new.work_queue("add", "1").meta, "a"))
    with pytest.raises(click.ClickException, match="no mesh has run in"):
        await reshard.run(OperatorSettings(data_dir=tmp_path / "other"), 1)

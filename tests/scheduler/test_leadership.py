"""One leader per model at any time: killed, frozen, stopped, cut off from Redis; the next one knows what it must."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError

from scheduler import service
from scheduler.core.actions import Action, Assign, Dismiss, LookForExpired, Reclaim, ReclaimPart, Reject
from scheduler.core.backlog import Entry
from scheduler.core.slots import SlotAddress
from scheduler.core.state import ExecutorPhase, Policy
from scheduler.effects import EffectPerformer
from scheduler.ingest import Poll, StreamKind, parse_entry
from scheduler.leader import Leader
from scheduler.leadership import Leadership
from scheduler.mesh import MeshAccess
from scheduler.rebuild import epochs_found, raise_fence
from scheduler.service import Scheduler, models_to_lead
from scheduler.sweep import sweep
from shared.contract.ids import (
    ExecutorId,
    InstanceIndex,
    SchedulerId,
    ShardId,
    SlotIndex,
    Term,
    sequence_id,
)
from shared.contract.messages import ModelRecord
from shared.contract.model_config import ModelConfig
from shared.contract.record import EPOCH, INSTANCE, OWNER, SLOT, VERSION
from shared.process.lifecycle import Stop, Tasks
from shared.store.agreement import join_mesh
from shared.store.connections.link import Link, SharedLinks
from shared.store.connections.redis_client import connect
from shared.store.membership import Member, Membership
from shared.store.script_sender import Call
from shared.store.script_values import CommitCode
from shared.store.scripts import Scripts
from shared.store.wishes import WishEntry, uttered
from shared.traces.tracing import Tracing
from tests.embedded_cluster import EmbeddedCluster
from tests.embedded_redis import EmbeddedRedis
from tests.scheduler.stage import LEASE_MS, MODEL, TICK_MS, Stage
from tests.scheduler.state_view import StateView, view

QUESTION = sequence_id(MODEL, "", 1)
CALM_LEASE_MS = 6_000
"""Of a process that is to keep its lease, though the machine is busy, and asks for another's every second."""
T = TypeVar("T")


class Processes:
    """Scheduler processes of one mesh, killed at the end whatever happens."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, stage: Stage, name: str, *, lease_ms: int = LEASE_MS) -> subprocess.Popen[bytes]:
        """A scheduler of that name."""
        process = subprocess.Popen([*self.command(stage, name), f"--lease-ms={lease_ms}", f"--tick-ms={TICK_MS}"])
        self.running.append(process)
        return process

    def is_healthy(self, stage: Stage, name: str, *more: str, check: str = "healthcheck") -> bool:
        """What a check's command says about it."""
        command = [*self.command(stage, name), *more]
        command.insert(command.index("scheduler") + 1, check)
        return subprocess.run(command, check=False, timeout=60).returncode == 0

    def command(self, stage: Stage, name: str) -> list[str]:
        """The command line that all have in common."""
        return [
            sys.executable,
            "-m",
            "scheduler",
            f"--redis-url={stage.url}",
            f"--key-prefix={stage.prefix}",
            f"--name={name}",
        ]

    def stop_all(self) -> None:
        """Kills what still runs."""
        for process in self.running:
            process.kill()
            process.wait()


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.stop_all()


async def leader(stage: Stage) -> str:
    """The name of the scheduler that leads, "" for nobody."""
    value = await stage.commands.get(stage.keys.leader(MODEL))
    return value.decode().split("-")[0] if value else ""


async def is_silent(stage: Stage, name: str) -> bool:
    """Whether a scheduler's sign of life has ended."""
    return not await stage.commands.exists(stage.keys.scheduler(name))


async def until_leads(stage: Stage, name: str) -> None:
    async def leads() -> bool:
        return await leader(stage) == name

    await stage.until(leads)


@pytest.mark.leaves_sequences
@pytest.mark.timeout(300)  # it starts eight processes, which takes long on a busy machine
async def test_standby_takes_over_from_a_killed_leader_and_serves_the_backlog(
    stage: Stage, processes: Processes
) -> None:
    await stage.join("e1", slots=2)
    first = processes.start(stage, "s1", lease_ms=CALM_LEASE_MS)
    await until_leads(stage, "s1")
    before = await stage.begin(1)
    processes.start(stage, "s2", lease_ms=CALM_LEASE_MS)
    assert processes.is_healthy(stage, "s1")
    first.send_signal(signal.SIGKILL)
    first.wait()
    await stage.submit(2, start=True)
    await until_leads(stage, "s2")
    after = await stage.live(1, 2)

    assert before[0] == after[0], "a live sequence does not notice"
    assert "1" == after[1]["sl"]
    assert processes.is_healthy(stage, "s2")
    await stage.until(partial(is_silent, stage, "s1"))
    nowhere = "--redis-url=redis://127.0.0.1:1"
    for check, without_redis in {"healthcheck": False, "livecheck": True}.items():
        assert not processes.is_healthy(stage, "s1", check=check)
        assert without_redis == processes.is_healthy(stage, "s2", nowhere, check=check)


@pytest.mark.leaves_sequences
async def test_frozen_leader_does_nothing_when_it_wakes(stage: Stage, processes: Processes) -> None:
    """While it slept, another took its model. Both then see the same starts; only the newer one's decisions count."""
    await stage.join("e1", slots=8)
    first = processes.start(stage, "s1")
    await until_leads(stage, "s1")
    processes.start(stage, "s2", lease_ms=CALM_LEASE_MS)
    first.send_signal(signal.SIGSTOP)
    await until_leads(stage, "s2")
    await stage.begin(1)
    term = await stage.term()
    first.send_signal(signal.SIGCONT)
    for number in range(2, 8):
        await stage.submit(number, start=True)
    records = await stage.live(*range(1, 8))

    assert len({(record["in"], record["sl"]) for record in records}) == 7
    assert "s2" == await leader(stage)
    assert term == await stage.term()
    assert first.poll() is None, "it lives on as a standby"


async def test_stopped_leader_hands_over_without_waiting_for_the_lease(stage: Stage, processes: Processes) -> None:
    """A lease of ten minutes would be noticed."""
    first = processes.start(stage, "s1", lease_ms=600_000)
    await until_leads(stage, "s1")
    processes.start(stage, "s2")
    first.send_signal(signal.SIGTERM)

    assert 0 == await asyncio.to_thread(first.wait, 60)
    await until_leads(stage, "s2")
    assert not processes.is_healthy(stage, "s1")


@pytest.mark.leaves_sequences
async def test_every_action_of_an_older_term_is_refused(stage: Stage) -> None:
    await stage.submit(1, start=True)
    await raise_fence(stage.mesh, MODEL, Term(5), stage.keys.shards)
    await stage.commands.zadd(stage.keys.deadlines(stage.keys.shard_of(QUESTION), MODEL), {QUESTION: 1})
    entry = Entry(1, 0, ShardId(0))
    place = SlotAddress(ExecutorId("e1"), "1", InstanceIndex(0), SlotIndex(0))
    actions: list[Action] = [
        Assign(QUESTION, place, entry),
        Reclaim(ExecutorId("e1")),
        ReclaimPart(ExecutorId("e1")),
        Reject(QUESTION, entry, "1", "no"),
        LookForExpired(10),
        Dismiss(QUESTION, parse_entry((await stage.record(1))["be"].encode(), stage.keys.shard_of(QUESTION))),
    ]
    before = await stage.record(1)
    late = EffectPerformer(stage.mesh, MODEL, Term(4), shards=stage.keys.shards, tombstone_ms=1000)
    for action in actions:
        with pytest.raises(ResponseError, match="FENCED"):
            await late.perform([action])
    feed = stage.keys.feed(stage.keys.shard_of(QUESTION), MODEL)
    news = await stage.commands.xadd(feed, {"q": QUESTION, "e": 1, "k": "e"})
    late.done([(stage.keys.shard_of(QUESTION), news)], StreamKind.FEED)
    with pytest.raises(ResponseError, match="FENCED"):
        await late.acknowledge()
    with pytest.raises(ResponseError, match="FENCED"):
        await raise_fence(stage.mesh, MODEL, Term(4), stage.keys.shards)

    assert before == await stage.record(1)
    assert 1 == await stage.backlog_length()
    assert 1 == await stage.feed_length(), "the newer leader has yet to hear of it"


async def test_a_leader_reads_what_there_is_when_no_earlier_one_can_change_it(stage: Stage) -> None:
    leader = Leader(stage.mesh, MODEL, Term(5), policy=Policy(shards=stage.keys.shards), tombstone_ms=1000)

    await leader._rebuild()

    with pytest.raises(ResponseError, match="FENCED"):
        await raise_fence(stage.mesh, MODEL, Term(4), stage.keys.shards)


async def test_lease_is_one_schedulers_until_it_is_given_back(stage: Stage) -> None:
    first, second = (
        Leadership(stage.scripts, SchedulerId(name), lease_ms=60_000, clock=asyncio.get_running_loop().time)
        for name in ("s1", "s2")
    )

    assert {MODEL: Term(1)} == (await first.contend([MODEL])).gained
    assert {} == (await second.contend([MODEL])).gained
    assert {} == (await first.contend([MODEL])).gained, "renewed, not gained anew"
    await first.resign()
    assert {MODEL: Term(2)} == (await second.contend([MODEL])).gained, "terms only grow"
    assert {} == (await first.contend([MODEL])).gained


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("seen", [1_000, 1_000_000_000_000_000])
async def test_a_model_is_led_again_at_once_though_the_counter_of_terms_was_lost(stage: Stage, seen: int) -> None:
    """Not after as many terms as there were before."""
    await stage.join("e1")
    await raise_fence(stage.mesh, MODEL, Term(seen), stage.keys.shards)
    async with stage.scheduler():
        await stage.begin(1)

    assert seen < await stage.term()


@pytest.mark.leaves_sequences
async def test_a_term_that_is_given_a_second_time_is_led_by_nobody(stage: Stage) -> None:
    """Of a Cluster, the node that counts terms may come back without the newest one. Its leader may be frozen: what it
    has yet to send to the shards would be as new there as what the next leader sends."""
    await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(1)
        before = await stage.term()
    await stage.commands.hset(stage.keys.terms, MODEL, before - 1)

    async with stage.scheduler():
        await stage.begin(2)

    assert before < await stage.term()


@pytest.mark.parametrize("counted", [b"-5", b"%d" % (1 << 53), b"9" * 18, b"garbage"])
async def test_two_leaders_have_two_terms_whatever_the_counter_of_terms_says(stage: Stage, counted: bytes) -> None:
    await stage.commands.hset(stage.keys.terms, MODEL, counted)
    terms: list[Term] = []
    for name in ("s1", "s2"):
        clock = asyncio.get_running_loop().time
        leadership = Leadership(stage.scripts, SchedulerId(name), lease_ms=60_000, clock=clock)
        terms.append((await leadership.contend([MODEL])).gained[MODEL])
        await leadership.resign()

    assert 0 < terms[0] < terms[1] < 1 << 53


class Unheard(Scripts):
    """Scripts whose next replies are lost: the calls were carried out, and the caller does not learn it."""

    deaf = False

    async def run_all(self, calls: Sequence[Call[T]], link: Link | None = None) -> list[T | Exception]:
        """As `Scripts.run_all`."""
        outcomes = await super().run_all(calls, link)
        if self.deaf:
            raise RedisConnectionError("the reply was lost")
        return outcomes


async def test_lease_that_was_given_and_not_heard_of_blocks_nobody(stage: Stage) -> None:
    """Neither the scheduler itself, which asks again, nor a standby when the scheduler stops."""
    scripts = Unheard(stage.redis, stage.keys)
    clock = asyncio.get_running_loop().time
    first = Leadership(scripts, SchedulerId("s1"), lease_ms=60_000, clock=clock)
    second = Leadership(stage.scripts, SchedulerId("s2"), lease_ms=60_000, clock=clock)

    async def asks_in_vain() -> None:
        scripts.deaf = True
        with pytest.raises(RedisConnectionError):
            await first.contend([MODEL])
        scripts.deaf = False

    await asks_in_vain()
    assert {} == (await second.contend([MODEL])).gained
    assert {MODEL: Term(2)} == (await first.contend([MODEL])).gained
    await first.resign()

    await asks_in_vain()
    await first.resign()
    assert {MODEL: Term(4)} == (await second.contend([MODEL])).gained
    await first.resign()
    assert {} == (await first.contend([MODEL])).gained, "another's lease is not given back"


async def test_a_scheduler_that_stops_gives_back_what_it_dropped_with_a_lost_connection(stage: Stage) -> None:
    clock = asyncio.get_running_loop().time
    first, second = (
        Leadership(stage.scripts, SchedulerId(name), lease_ms=60_000, clock=clock) for name in ("s1", "s2")
    )
    await first.contend([MODEL])
    first.drop(MODEL, Term(1))
    assert {} == (await second.contend([MODEL])).gained
    await first.resign()
    assert {MODEL: Term(2)} == (await second.contend([MODEL])).gained
    second.drop_all()
    await second.resign()
    assert {MODEL: Term(3)} == (await first.contend([MODEL])).gained


async def test_a_term_that_was_dropped_while_its_lease_was_renewed_is_not_led_again(stage: Stage) -> None:
    """What the leader of that term had sent may still be on its way, and Redis must refuse it when it comes."""

    class Dropping(Scripts):
        async def run_all(self, calls: Sequence[Call[T]], link: Link | None = None) -> list[T | Exception]:
            outcomes = await super().run_all(calls, link)
            leadership.drop(MODEL, Term(1))
            return outcomes

    clock = asyncio.get_running_loop().time
    leadership = Leadership(Dropping(stage.redis, stage.keys), SchedulerId("s1"), lease_ms=60_000, clock=clock)
    await leadership.contend([MODEL])

    assert {} == (await leadership.contend([MODEL])).gained
    assert {MODEL: Term(2)} == (await leadership.contend([MODEL])).gained


async def test_leader_whose_lease_was_taken_hears_that_it_lost_it(stage: Stage) -> None:
    now = 0.0
    first, second = (
        Leadership(stage.scripts, SchedulerId(name), lease_ms=60_000, clock=lambda: now) for name in ("s1", "s2")
    )
    await first.contend([MODEL])
    assert not first.expired()
    now = 60.0
    assert first.expired(), "nobody knows, so it must not lead"
    await stage.commands.delete(stage.keys.leader(MODEL))
    await second.contend([MODEL])

    assert [MODEL] == (await first.contend([MODEL])).lost


async def test_a_lease_whose_renewal_redis_refuses_ends_when_it_would_have(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, refusal = 0.0, ResponseError("OOM command not allowed when used memory > 'maxmemory'.")
    leadership = Leadership(stage.scripts, SchedulerId("s1"), lease_ms=60_000, clock=lambda: now)
    await leadership.contend([MODEL])

    async def refused(_: Scripts, calls: Sequence[Call[Any]]) -> list[ResponseError]:
        return [refusal for _ in calls]

    with monkeypatch.context() as patched:
        patched.setattr(Scripts, "run_all", refused)
        now = 59.0
        assert {MODEL: refusal} == (await leadership.contend([MODEL])).refused
    assert not leadership.expired()
    now = 60.0
    assert leadership.expired()
    await leadership.contend([MODEL])
    assert not leadership.expired()


@pytest.mark.leaves_sequences
async def test_rebuilt_state_is_the_state_before(stage: Stage) -> None:
    """Live sequences, the backlog in its order, executors: alive, dead with sequences, dead and empty."""
    await stage.join("e1", slots=3)
    await stage.join("e2", slots=3)
    async with stage.scheduler() as first:
        for number in range(1, 12):
            await stage.submit(number, start=True)

        async def settled() -> bool:
            seen = view(first.leaders[MODEL].state) if MODEL in first.leaders else None
            return seen is not None and len(seen.live) == 6 and len(seen.waiting) == 5

        await stage.until(settled)
        await stage.kill(ExecutorId("e2"))

        async def taken() -> bool:
            seen = view(first.leaders[MODEL].state)
            is_emptied = (ExecutorId("e2"), ExecutorPhase.EMPTY) in seen.executors
            return is_emptied and len(seen.live) + len(seen.waiting) == 11

        await stage.until(taken)
        before = view(first.leaders[MODEL].state)
    async with stage.scheduler(name="s2") as second:
        after: StateView | None = None

        async def equal() -> bool:
            nonlocal after
            after = view(second.leaders[MODEL].state) if MODEL in second.leaders else None
            return before == after

        await stage.until(equal)

    assert 3 == len(before.live)
    assert 8 == len(before.waiting)


@pytest.mark.parametrize(("written", "found"), [(10**14 - 1, True), (10**14, False)])
async def test_a_counter_of_epochs_that_scripts_begin_anew_is_not_rebuilt_from(
    stage: Stage, written: int, *, found: bool
) -> None:
    (shard,) = stage.keys.shards
    await stage.commands.set(stage.keys.epoch(shard), written)

    newest = (await epochs_found(stage.mesh, stage.keys.shards)).newest

    assert ({shard: written} if found else {}) == newest


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("lost", [OWNER, VERSION, INSTANCE, SLOT, EPOCH])
@pytest.mark.parametrize("is_zero", [False, True])
async def test_a_model_is_led_though_a_live_record_lacks_a_field_or_has_zero_in_it(
    stage: Stage, lost: str, *, is_zero: bool
) -> None:
    await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(1)
    record = stage.keys.sequence(sequence_id(MODEL, "", 1)).record
    await stage.commands.hdel(record, lost)
    if is_zero:
        await stage.commands.hset(record, lost, 0)

    async with stage.scheduler():
        await stage.begin(2)


@pytest.mark.leaves_sequences
async def test_leader_survives_a_restart_of_redis(
    private_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """It rebuilds its picture, and slots that were given stay given. The log says that Redis is away, as long as it
    is, and that it is back."""
    caplog.set_level(logging.INFO, "seqmesh")
    stage = Stage(private_server.url, "restart")
    # What was acknowledged is to be there again: while the disk is busy, the server would keep it for two seconds.
    await stage.commands.config_set("appendfsync", "always")
    await stage.publish()
    await stage.join("e1", slots=4)
    async with stage.scheduler() as scheduler:
        before = await stage.begin(1)
        await asyncio.to_thread(private_server.kill)
        await stage.until(lambda: told_times(caplog, "redis out of reach", "contend", at_least=3))
        await asyncio.to_thread(private_server.start)
        await stage.until(lambda: told_times(caplog, "redis is back", "contend"))
        await stage.submit(2, start=True)
        after = await stage.live(1, 2)
        assert [MODEL] == list(scheduler.leaders)
    await stage.close()

    assert before[0] == after[0]
    assert "1" == after[1]["sl"]


async def test_a_loop_that_has_nothing_to_ask_does_not_say_that_redis_is_back(
    private_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """While Redis is away no model is led, and the loop that watches over the leaders has nothing to do."""
    caplog.set_level(logging.INFO, "seqmesh")
    stage = Stage(private_server.url, "away")
    await stage.publish()
    async with stage.scheduler(lease_ms=LEASE_MS) as scheduler:

        async def leads() -> bool:
            return bool(scheduler.leaders)

        await stage.until(leads)
        # A turn that was held up for a lease may have failed, and the next one succeeded.
        caplog.clear()
        os.kill(private_server.pid, signal.SIGSTOP)
        try:
            await stage.until(lambda: told_times(caplog, "redis out of reach", "contend", at_least=3))
            while_away = [record.getMessage() for record in caplog.records]
        finally:
            os.kill(private_server.pid, signal.SIGCONT)
        await stage.until(lambda: told_times(caplog, "redis is back", "contend"))
    await stage.close()

    assert "redis is back" not in while_away


async def test_the_log_says_of_a_silent_redis_that_it_does_not_answer(
    private_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(private_server.url, "silent")
    await stage.publish()
    async with stage.scheduler(lease_ms=LEASE_MS):
        os.kill(private_server.pid, signal.SIGSTOP)
        try:
            await stage.until(lambda: told_times(caplog, "redis out of reach", "contend"))
        finally:
            os.kill(private_server.pid, signal.SIGCONT)
    await stage.close()

    told = [vars(record)["fields"] for record in caplog.records if "out of reach" in record.getMessage()]
    assert {"no answer within 1 s"} == {fields["cause"] for fields in told if fields["loop"] == "contend"}


async def told_times(caplog: pytest.LogCaptureFixture, event: str, loop: str, *, at_least: int = 1) -> bool:
    """Whether a loop of the scheduler has logged an event so often."""
    told = [vars(record)["fields"].get("loop") for record in caplog.records if record.getMessage() == event]
    return told.count(loop) >= at_least


async def test_the_loss_of_many_models_is_one_line_of_the_log(
    private_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(private_server.url, "many")
    for model in ("one", "other"):
        await stage.publish(model)

    async def is_leading() -> bool:
        return len(scheduler.leaders) == 2

    def lost() -> list[Any]:
        return [vars(record)["fields"] for record in caplog.records if record.getMessage() == "leadership lost"]

    async def is_told() -> bool:
        return any(fields["cause"] == "not renewed in time" for fields in lost())

    async with stage.scheduler(lease_ms=LEASE_MS) as scheduler:
        await stage.until(is_leading)
        os.kill(private_server.pid, signal.SIGSTOP)
        try:
            await stage.until(is_told)
        finally:
            os.kill(private_server.pid, signal.SIGCONT)
    await stage.close()

    # A busy machine may have lost them more than once, each time together.
    assert {(2, "one, other")} == {(fields["models"], fields["named"]) for fields in lost()}


async def test_leaders_that_lose_redis_together_are_one_line_of_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    leading, is_lost = list[Leader](), asyncio.Event()

    async def lose(leader: Leader, *_: Any) -> None:
        leading.append(leader)
        await is_lost.wait()
        raise RedisConnectionError("gone")

    async def lead_together() -> bool:
        return len(leading) == 2

    def lost() -> list[str]:
        told = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "leaders lost redis"]
        return [f"{fields['models']}: {fields['named']}: {fields['cause']}" for fields in told]

    async def is_told() -> bool:
        return bool(lost())

    monkeypatch.setattr(Leader, "run", lose)
    await stage.publish("other")
    async with stage.scheduler():
        await stage.until(lead_together)
        is_lost.set()
        await stage.until(is_told)

    assert f"2: other, {MODEL}: gone" == lost()[0]


async def test_a_right_that_is_withdrawn_is_told_without_a_traceback_and_what_waits_is_kept(
    private_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(private_server.url, "rights")
    await stage.publish()
    async with stage.scheduler() as scheduler:

        async def leads() -> bool:
            return bool(scheduler.leaders)

        async def is_told() -> bool:
            return any(record.getMessage() == "leader failed" for record in caplog.records)

        await stage.until(leads)
        await stage.submit(1, start=True)
        await stage.commands.acl_setuser("default", enabled=True, categories=["+@all"], commands=["-incr"])
        await stage.join("e1")
        await stage.until(is_told)
        await stage.commands.acl_setuser("default", enabled=True, categories=["+@all"])
        await stage.live(1)
    await stage.close()

    told = next(record for record in caplog.records if record.getMessage() == "leader failed")
    assert told.exc_info is None
    # Redis 7.0 does not name the command.
    assert re.search("'incr'|can't run this command", str(vars(told)["fields"]["cause"]))


async def test_redis_without_memory_finishes_what_was_accepted(private_server: EmbeddedRedis) -> None:
    """Only what is new is refused: the rest gets its slots, is answered, ends and expires, also under a leader that has
    begun meanwhile. Otherwise nothing would ever make room."""
    stage = Stage(private_server.url, "full")
    await stage.publish()
    executor = await stage.join("e1", slots=1)
    async with stage.scheduler():
        await stage.begin(1)
        await stage.submit(2, start=True, end=True)

    await stage.commands.config_set("maxmemory", 1)
    async with stage.scheduler():
        with pytest.raises(ResponseError, match="maxmemory"):
            await stage.submit(3, start=True)
        assert [1] == await stage.commit(await stage.inbox(executor), executor, idle_ms=1)
        await stage.live(2)
        assert "x" == (await stage.record(1))["st"]
        assert [2] == await stage.commit(await stage.inbox(executor), executor)
    await stage.commands.config_set("maxmemory", 0)
    await stage.close()


async def test_a_leader_goes_on_in_a_redis_without_memory_while_sequences_wait_for_slots_of_busy_ones(
    private_server: EmbeddedRedis,
) -> None:
    """It tells commits how many slots are wanted, and whoever asked how the line stands."""
    stage = Stage(private_server.url, "full")
    await stage.publish()
    executor = await stage.join("e1", slots=1, pageable=True)
    (shard,) = stage.keys.shards
    told = [stage.keys.wanted_slots(shard, MODEL, "1"), stage.keys.forecast(MODEL)]

    async def is_told() -> bool:
        return await stage.redis.exists(*told) == len(told)

    async with stage.scheduler() as scheduler:
        await stage.begin(1, pageable=True)
        await stage.submit(2, start=True, end=True)
        await uttered(stage.redis, stage.keys, QUESTION, WishEntry("i", {}))
        await stage.until(is_told)
        (leader,) = scheduler.leaders.values()

        await stage.commands.config_set("maxmemory", 1)
        await stage.redis.delete(*told)
        await stage.until(is_told)
        assert [leader] == [*scheduler.leaders.values()]
        assert [CommitCode.PAGED] == await stage.commit(await stage.inbox(executor), executor)
        await stage.live(2)
        await stage.commands.config_set("maxmemory", 0)
    await stage.close()


async def test_a_scheduler_shows_that_it_lives_in_a_redis_without_memory(private_server: EmbeddedRedis) -> None:
    """Else what restarts the dead would end all schedulers."""
    stage = Stage(private_server.url, "full")
    sign = stage.keys.scheduler("s1")

    async def is_shown() -> bool:
        return await stage.commands.pttl(sign) > 0

    async with stage.scheduler():
        await stage.until(is_shown)
        await stage.commands.config_set("maxmemory", 1)
        await stage.commands.delete(sign)
        await stage.until(is_shown)
    await stage.commands.config_set("maxmemory", 0)
    await stage.close()


async def test_a_stop_does_not_wait_for_a_redis_that_hangs(
    private_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """What stops services kills those that take longer than their grace."""
    stage = Stage(private_server.url, "hangs", connect(private_server.url, retries=0, timeout_ms=600_000))
    await stage.publish()

    async with asyncio.timeout(60):
        async with stage.scheduler(lease_ms=LEASE_MS):
            await stage.until(lambda: stage.commands.exists(stage.keys.leader(MODEL)))
            private_server.send(signal.SIGSTOP)
        private_server.send(signal.SIGCONT)

    assert "leases not given back" in caplog.messages
    await stage.close()


async def test_a_lease_that_cannot_be_read_is_free(stage: Stage) -> None:
    """Also one that would never end: a leader's always does."""
    leadership = Leadership(stage.scripts, SchedulerId("s1"), lease_ms=60_000, clock=lambda: 0.0)
    await stage.commands.hset(stage.keys.leader("hash"), "not", "a lease")
    await stage.commands.set(stage.keys.leader("garbage"), b"\xff garbage", px=60_000)
    await stage.commands.set(stage.keys.leader("endless"), "s2 7")
    await stage.commands.set(stage.keys.leader("taken"), "s2 7", px=60_000)
    await stage.commands.hset(stage.keys.terms, "garbage", "no term")

    contest = await leadership.contend([MODEL, "hash", "garbage", "endless", "taken"])
    assert {MODEL, "hash", "garbage", "endless"} == set(contest.gained)
    await stage.commands.delete(stage.keys.leader(MODEL))
    await stage.commands.hset(stage.keys.leader(MODEL), "not", "a lease")
    assert [MODEL] == (await leadership.contend([MODEL])).lost
    assert {MODEL: Term(2)} == (await leadership.contend([MODEL])).gained


async def test_news_that_was_asked_for_before_the_leaders_own_was_heard_is_no_news(stage: Stage) -> None:
    """Two connections: what is asked for later may be answered earlier, before an executor came. It is not lost."""
    asked, answered = asyncio.Event(), asyncio.Event()

    class Slow(Membership):
        async def look(self) -> tuple[list[Member], int]:
            asked.set()
            await answered.wait()
            return await super().look()

    mesh = MeshAccess(stage.redis, stage.keys, stage.scripts, Slow(stage.redis, stage.keys), Tracing())
    leader = Leader(mesh, MODEL, Term(1), policy=Policy(), tombstone_ms=1000)
    leading = asyncio.create_task(leader.run())
    await asked.wait()
    older = asyncio.get_running_loop().time()
    executor = await stage.join("e1")
    answered.set()

    async def leads() -> bool:
        return bool(leader.positions())

    await stage.until(leads)
    leader.observe(Poll([]), 1, older)
    # Both pieces of news would be taken in one turn: between them it has one.
    leader.deliver(stage.keys.feed(ShardId(0), MODEL), [(b"1-0", {b"q": b"sum||i9", b"e": b"1", b"k": b"e"})])

    async def has_turned() -> bool:
        return not leader._mailbox

    await stage.until(has_turned)
    leader.observe(Poll(await stage.membership.members()), 2, asyncio.get_running_loop().time())

    async def has_looked() -> bool:
        return leader.state.now_ms >= 2

    await stage.until(has_looked)
    assert ExecutorPhase.SERVING is leader.state.executors[executor].phase
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)
    await mesh.links.close()


async def test_models_are_led_as_soon_as_they_are_offered_and_not_with_the_next_renewal(stage: Stage) -> None:
    """The first one of a new mesh, and one that is loaded later. Leases are renewed after longer than a test waits."""
    await stage.commands.delete(stage.keys.models)
    async with stage.scheduler(lease_ms=600_000):
        await asyncio.sleep(10 * TICK_MS / 1000)
        await stage.publish()
        await stage.join("e1")
        await until_leads(stage, "s1")
        await stage.publish("later")
        await stage.join("e2", model="later")

        async def is_led() -> bool:
            return await stage.commands.exists(stage.keys.leader("later")) == 1

        await stage.until(is_led)


async def test_a_model_that_never_had_sequences_needs_no_leader(stage: Stage) -> None:
    """Except for one, if there is no other: leaders forget executors. One that had sequences may have some still."""
    await stage.commands.delete(stage.keys.models)

    async def publish(*models: str) -> None:
        for model in models:
            await stage.membership.publish(ModelRecord(ModelConfig(model, "python", "", 4, (), ()), "{}", ("1",)))

    async def to_lead() -> list[str]:
        _, models = await models_to_lead(stage.mesh)
        return sorted(models)

    await publish("plain", "spare")
    assert ["plain"] == await to_lead()
    await stage.publish()
    assert [MODEL] == await to_lead()
    await Leadership(stage.scripts, SchedulerId("s1"), lease_ms=1_000, clock=time.monotonic).contend(await to_lead())
    await publish(MODEL)
    assert [MODEL] == await to_lead()
    await stage.publish("plain")
    assert ["plain", MODEL] == await to_lead()
    await stage.commands.hset(stage.keys.models, "spare", "no record")
    assert ["plain", "spare", MODEL] == await to_lead()


async def test_without_models_a_sign_of_life_is_written_with_the_leases_and_not_with_every_tick(stage: Stage) -> None:
    await stage.commands.delete(stage.keys.models)
    async with stage.scheduler(lease_ms=600_000):

        async def is_seen() -> bool:
            return await stage.commands.exists(stage.keys.scheduler("s1")) == 1

        await stage.until(is_seen)
        await stage.commands.delete(stage.keys.scheduler("s1"))
        await asyncio.sleep(10 * TICK_MS / 1000)
        assert not await is_seen()


@pytest.mark.leaves_sequences
async def test_a_leader_that_lost_redis_leads_on_in_a_new_term(stage: Stage) -> None:
    """What it had sent may still be on its way, and Redis must refuse it when it comes."""
    await stage.join("e1")
    async with stage.scheduler() as scheduler:
        await stage.until(partial(is_led, scheduler, Term(0)))
        before = scheduler.leaders[MODEL]

        async def lost(*_: object) -> list[object]:
            raise RedisConnectionError

        before._performer._send = lost  # type: ignore[method-assign]
        await stage.submit(1, start=True)

        await stage.until(partial(is_led, scheduler, before.term))
        await stage.live(1)


@pytest.mark.leaves_sequences
async def test_a_sweep_that_failed_is_the_next_leaders(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = list[Term]()

    async def fail_once(mesh: MeshAccess, model: str, term: Term) -> set[ExecutorId]:
        swept.append(term)
        if len(swept) == 1:
            raise RedisConnectionError
        return await sweep(mesh, model, term)

    monkeypatch.setattr("scheduler.leader.sweep", fail_once)
    await stage.join("e1")
    await stage.submit(1, start=True)
    async with stage.scheduler() as scheduler:
        scheduler._to_sweep.add(MODEL)
        await stage.live(1)
        await stage.until(partial(is_led, scheduler, swept[0]))

    assert [Term(swept[0] + 1)] == swept[1:], "once, by the next one"


async def test_a_record_in_another_shard_than_its_own_ends_no_sweep(redis_cluster: EmbeddedCluster) -> None:
    """On a Cluster a call that names it would be refused, and the model would have no leader."""
    async with connect(redis_cluster.url) as redis:
        keys = await join_mesh(redis, f"t{uuid.uuid4().hex[:12]}")
        mesh = MeshAccess(redis, keys, Scripts(redis, keys), Membership(redis, keys), Tracing())
        sequence = sequence_id(MODEL, "", 1)
        other = next(shard for shard in keys.shards if shard != keys.shard_of(sequence))
        await redis.hset(f"{keys.base(other)}seq:{sequence}", "st", "l")

        assert set() == await sweep(mesh, MODEL, Term(1))

        await mesh.links.close()


@pytest.mark.leaves_sequences
async def test_a_takeover_is_the_next_leaders_though_its_executor_is_registered_no_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of executors was lost, and the leader that had seen it ends in the midst of the takeover."""
    failed, really_take = list[ExecutorId](), EffectPerformer._reclaim_part

    async def fail_once(performer: EffectPerformer, executor: ExecutorId) -> bool:
        if not failed:
            failed.append(executor)
            raise RedisConnectionError
        return await really_take(performer, executor)

    monkeypatch.setattr(EffectPerformer, "_reclaim_part", fail_once)
    e1 = await stage.join("e1")
    await stage.submit(1, start=True)
    async with stage.scheduler():
        await stage.live(1)
        await stage.commands.delete(stage.keys.executors)

        async def is_taken() -> bool:
            return (await stage.record(1))["st"] == "m"

        await stage.until(is_taken)

    assert [e1] == failed


@pytest.mark.leaves_sequences
async def test_a_scheduler_that_starts_takes_over_from_an_executor_that_is_in_no_list(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The list was lost, the executor died, and no leader lives that had seen either."""
    await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(1)
    await stage.commands.delete(stage.keys.executors)
    await stage.join("e2")
    # What a record has left there that is gone is removed, too: otherwise each look would find it again.
    left_over = stage.keys.owned(ShardId(0), ExecutorId("e0"), MODEL)
    await stage.commands.sadd(left_over, sequence_id(MODEL, "", 2))

    async with stage.scheduler():

        async def is_taken() -> bool:
            return (await stage.record(1)).get("ow") == "e2" and await stage.commands.exists(left_over) == 0

        await stage.until(is_taken)

    told = [vars(one)["fields"] for one in caplog.records if one.getMessage() == "owners in no list of executors"]
    assert {"model": MODEL, "executors": 2, "named": "e0, e1"} == told[0]


@pytest.mark.leaves_sequences
async def test_of_sequences_that_name_one_slot_or_none_that_exists_a_new_leader_takes_these_alone(stage: Stage) -> None:
    """Of the others one may have a state that only its owner holds: it would be lost."""
    await stage.join("e1", slots=6)
    async with stage.scheduler(spare_slots=0):
        before = await stage.begin(1, 2, 3, durable=True) + await stage.begin(4, durable=False)
    await stage.commit(await stage.inbox(ExecutorId("e1")), ExecutorId("e1"))
    first, second, third, _ = [stage.keys.sequence(sequence_id(MODEL, "", number)).record for number in range(1, 5)]
    await stage.commands.hset(second, "sl", await stage.commands.hget(first, "sl"))
    await stage.commands.hset(third, "sl", 99)

    async with stage.scheduler(spare_slots=0):

        async def have_moved() -> bool:
            epochs = [int((await stage.record(number)).get("ep", 0)) for number in range(1, 4)]
            return all(new > int(old["ep"]) for new, old in zip(epochs, before, strict=False))

        await stage.until(have_moved)
        after = await stage.live(1, 2, 3, 4)

    assert before[3]["ep"] == after[3]["ep"]
    assert 4 == len({record["sl"] for record in after})


@pytest.mark.leaves_sequences
async def test_an_inbox_that_comes_back_after_its_executor_was_forgotten_is_emptied_and_removed(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A stale replica has become the primary. One of an executor that lives stays, whatever the list says."""
    old, shard = await stage.join("e1"), ShardId(0)
    async with stage.scheduler(forget_after_ms=1_000):
        await stage.begin(1)
        inbox = await stage.commands.dump(stage.keys.inbox(shard, old))
        await stage.join("e2")
        await stage.kill(old)

        async def is_forgotten() -> bool:
            return not await stage.commands.hexists(stage.keys.executors, old)

        await stage.until(is_forgotten)
    before = await stage.live(1)
    await stage.commands.restore(stage.keys.inbox(shard, old), 0, inbox)
    living = ExecutorId("e3")
    await stage.commands.set(stage.keys.executor_lease(living), 1)
    await stage.commands.restore(stage.keys.inbox(shard, living), 0, inbox)

    async with stage.scheduler():

        async def is_removed() -> bool:
            return not await stage.commands.exists(stage.keys.inbox(shard, old))

        async def is_told() -> bool:
            return "inboxes of forgotten executors removed" in caplog.messages

        await stage.until(is_removed)
        # It is told when the other inboxes were looked at, too.
        await stage.until(is_told)

    assert before == await stage.live(1)
    assert {1} == {step.step for step in await stage.inbox(ExecutorId("e2"))}
    assert 1 == await stage.commands.exists(stage.keys.inbox(shard, living))
    await stage.commands.delete(stage.keys.inbox(shard, living), stage.keys.executor_lease(living))


@pytest.mark.leaves_sequences
async def test_steps_of_what_an_executor_owned_are_found_though_the_set_of_it_was_removed_before_it_died(
    stage: Stage,
) -> None:
    """Nobody takes these sequences over, and their executor is forgotten, but not what lies in its inbox."""
    old = await stage.join("e1")
    async with stage.scheduler(forget_after_ms=1_000):
        await stage.begin(1)
        await stage.commands.delete(stage.keys.owned(ShardId(0), old, MODEL))
        await stage.join("e2")
        await stage.kill(old)

        async def is_forgotten() -> bool:
            return not await stage.commands.hexists(stage.keys.executors, old)

        await stage.until(is_forgotten)
    async with stage.scheduler():

        async def is_taken() -> bool:
            return {step.step for step in await stage.inbox(ExecutorId("e2"))} == {1}

        await stage.until(is_taken)
        assert "e2" == (await stage.record(1))["ow"]


async def is_led(scheduler: Scheduler, after: Term) -> bool:
    """Whether a leader of a later term leads."""
    leader = scheduler.leaders.get(MODEL)
    return leader is not None and leader.term > after


async def test_a_scheduler_whose_user_may_not_remove_scripts_starts_all_the_same(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: Scripts) -> int:
        raise NoPermissionError("User mesh has no permissions to run the 'function|list' command")

    stop = Stop()
    stop.request("the end of the test")
    monkeypatch.setattr(Scripts, "forget_others", refuse)
    async with asyncio.TaskGroup() as group:
        await service.serve(stage.settings(), Tasks(group), stop)

    assert stop.has_started


async def test_a_scheduler_leads_though_scripts_cannot_be_removed_for_long(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a node of a Cluster says nothing."""

    async def wait(_: Scripts) -> int:
        return await asyncio.Event().wait()

    stop = Stop()
    monkeypatch.setattr(Scripts, "forget_others", wait)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(service.serve(stage.settings(), Tasks(group), stop))
        await until_leads(stage, "s1")
        stop.request("the end of the test")
        await serving


async def test_its_tasks_end_before_the_connections_that_they_use(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one of them could log that Redis has closed its connection, at the end of a scheduler that was told to."""
    ended, really_close = list[str](), SharedLinks.close
    stop = Stop()
    stop.request("the end of the test")

    async def measure(_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("measurements")

    async def close(connections: SharedLinks) -> None:
        ended.append("connections")
        await really_close(connections)

    monkeypatch.setattr(service.Metering, "run", measure)
    monkeypatch.setattr(SharedLinks, "close", close)
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        await service.serve(stage.settings(), tasks, stop)
        await tasks.end_all()

    assert ["measurements", "connections"] == ended

"""The scheduler's composition root and its loops.

    contend   renews the leases of the models that it leads, asks for the others; starts and stops leaders
    server    drops all leadership when Redis was restarted or replaced, so that it begins again from there
    watch     every tick: polls the executors and the time in Redis for the leaders
    drain     moves on what leaders leave in executors' inboxes, or the leaders before them have left there
    spoilt    every few seconds: looks whether a key was removed that many sequences share
    owners    every few minutes: looks for sequences whose owner nobody knows, and inboxes of such executors
    read      for a few leaders: one blocking read (`scheduler.reader`)
    lead      per model: runs a `Leader`, and builds a new one from Redis whenever it fails
    reach     every second: replaces leaders that lead a shard whose server is silent, or lead without one that is back

A scheduler has no state of its own: all that it knows is in Redis. So it may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from scheduler.core.history import IllegalMoveError
from scheduler.core.invariants import BrokenInvariantError
from scheduler.core.state import Policy
from scheduler.leader import LOST_NAMED_MAX, ClockSetBackError, Leader
from scheduler.leadership import Leadership
from scheduler.lent_slots import LentSlots
from scheduler.mesh import MeshAccess
from scheduler.reader import BLOCK_MS, StreamReader
from scheduler.rebuild import check_new
from scheduler.settings import SchedulerSettings
from scheduler.sweep import SpoiltKeys, clear_abandoned, stranded
from shared.contract.ids import SchedulerId, ShardId, Term
from shared.process import logs
from shared.process.lifecycle import Stop, Tasks, end
from shared.statistics.meter import OF_MESH, RoundTripMeter
from shared.store.agreement import joined
from shared.store.commands import Redis
from shared.store.company import Company, services
from shared.store.connections.redis_client import BACKOFF_CAP_S, connect, pause_s
from shared.store.connections.redis_py import CONNECTION_LOST, LOST_OR_REFUSED
from shared.store.connections.server_run import ServerRun
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.metering import Metering
from shared.store.reading import tell, text_of
from shared.store.release import RELEASE
from shared.store.scripts import Scripts
from shared.store.tenants import KnownTenants, StoredTenants
from shared.store.vital import vital
from shared.stored_settings import ProcessSettings, StoredSettings
from shared.traces.tracing import setup

ROUNDS_PER_LEASE = 6
"""How often per lease's time a lease is renewed or asked for: a few lost rounds must not cost the lease."""
REBUILDS_MAX = 16
"""Leaders that rebuild at the same time. Hundreds at once, after a start, would keep the loop that renews the leases
from its turn for longer than a lease.
"""
REACH_INTERVAL_S = 1.0
"""Pause between two looks whether every server answers."""
SPOILT_INTERVAL_S = 5.0
"""Pause between two looks for removed keys, and so between two sweeps, each of which goes over every key."""
OWNERS_INTERVAL_S = 300.0
"""Pause between two looks for owners that nobody knows, each of which goes over the name of every key of the mesh."""
FORGET_LEASES = 2
"""How long an empty executor's registration stays, in leases: by then every leader has seen the executor's end."""


async def serve(settings: SchedulerSettings, tasks: Tasks, stop: Stop) -> None:
    """Runs a scheduler until it is told to stop; then its leases are given back."""
    name = settings.name_of("scheduler")
    # Waits for Redis and checks that it fits this mesh; the connections in use are made below.
    async with joined(settings.redis_url, settings.key_prefix, settings.shards, name=name) as (_, keys):
        pass
    run = ServerRun()
    timeout_ms = settings.redis_timeout_ms
    redis = connect(settings.redis_url, retries=0, name=name, timeout_ms=timeout_ms, run=run, keys=keys)
    tracing = setup("scheduler", name)
    trips = RoundTripMeter("scheduler")
    scripts = Scripts(redis, keys, trips=trips)
    mesh = MeshAccess(redis, keys, scripts, Membership(redis, keys), tracing, run)
    scheduler = Scheduler(settings, name, mesh, tasks)
    process = ProcessSettings(StoredSettings(redis, keys), tracing.control, logs.Level[settings.log_level.upper()])
    try:
        stop.started()
        scheduler.start()
        # Beside the rest: nobody need wait for it, and a node of a Cluster may be silent.
        tasks.start(forget_libraries(redis, keys), name="libraries")
        tasks.start(process.run(), name="settings")
        tasks.start(tell(redis, keys), name="unreadable values")
        tasks.start(Metering(scripts, keys, lambda: [(OF_MESH, trips.meter)]).run(), name="measurements")
        tasks.start(Company(redis, keys, "scheduler", name).run(), name="company")
        logs.info("scheduler ready", name=name)
        await stop.wait()
        await scheduler.stop()
    finally:
        # First: a call whose connection is closed under it logs that Redis has closed it.
        await tasks.end_all()
        await mesh.links.close()
        await redis.aclose()
        await asyncio.to_thread(tracing.shutdown)


async def forget_libraries(redis: Redis, keys: Keyspace) -> None:
    """Removes the scripts of releases that are not in the mesh any more."""
    try:
        if all(line.release == RELEASE for line in await services(redis, keys)):
            removed = await Scripts(redis, keys).forget_others()
            if removed:
                logs.info("scripts of other releases removed", libraries=removed)
    except LOST_OR_REFUSED as lost:
        logs.debug("scripts of other releases not removed", cause=str(lost))


class Scheduler:
    """The loops of one scheduler process."""

    def __init__(self, settings: SchedulerSettings, name: str, mesh: MeshAccess, tasks: Tasks) -> None:
        self._settings = settings
        self._name = name
        self._mesh = mesh
        self._tasks = tasks
        self._policy = Policy(
            settings.bounded_load,
            forget_after_ms=FORGET_LEASES * settings.lease_ms,
            spare_slots=settings.spare_slots,
            shards=mesh.keys.shards,
        )
        self._clock = asyncio.get_running_loop().time
        self._leadership = Leadership(
            mesh.scripts,
            SchedulerId(f"{name}-{uuid.uuid4().hex[:8]}"),
            lease_ms=settings.lease_ms,
            clock=self._clock,
        )
        self._readers: dict[Redis, list[StreamReader]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._leading: dict[str, asyncio.Task[None]] = {}
        self._rebuilding = asyncio.Semaphore(REBUILDS_MAX)
        self._poll = mesh.polls.latest
        self._spoilt = SpoiltKeys(mesh.redis, mesh.keys)
        self._tenants = KnownTenants(StoredTenants(mesh.redis, mesh.keys))
        self._to_sweep: set[str] = set()
        self._contending = asyncio.Lock()
        self._models: frozenset[str] = frozenset()
        self._cut_off: dict[str, Exception] = {}
        self.leaders: dict[str, Leader] = {}

    def start(self) -> None:
        settings = self._settings
        self._loops.append(self._tasks.start(self._tenants.run(), name="tenants"))
        for name, turn, every_s, block_s in (
            ("contend", self._contend, settings.lease_ms / 1000 / ROUNDS_PER_LEASE, 0.0),
            ("watch", self._watch, settings.tick_ms / 1000, 0.0),
            # Each of these asks every server, and one of them may be silent for long: no leader is to wait for that.
            ("reach", self._look_who_answers, REACH_INTERVAL_S, settings.redis_timeout_ms / 1000),
            ("spoilt", self._look_for_spoilt, SPOILT_INTERVAL_S, settings.redis_timeout_ms / 1000),
            ("owners", self._look_for_owners, OWNERS_INTERVAL_S, OWNERS_INTERVAL_S),
        ):
            self._loops.append(self._tasks.start(self._repeat(name, turn, every_s, block_s), name=name))
        self._loops.append(self._tasks.start(self._follow_server(), name="server"))
        self._loops.append(self._tasks.start(self._drain_left(), name="drain"))

    async def stop(self) -> None:
        """Stops the loops and the leaders, then gives the leases back, so that a standby leads at once.

        In this order no leader of this scheduler can still act while the standby leads.
        """
        await end([*self._loops, *self._leading.values()])
        self._tell_cut_off()
        for readers in self._readers.values():
            for reader in readers:
                await reader.close()
        lease_s = self._settings.lease_ms / 1000
        try:
            # Then they have ended, and there is nothing to give back.
            async with asyncio.timeout(lease_s):
                await self._leadership.resign()
                await self._mesh.redis.delete(self._mesh.keys.scheduler(self._name))
        except CONNECTION_LOST as error:
            logs.warning("leases not given back", cause=str(error) or f"no answer within {lease_s:g} s")

    # -- loops ----------------------------------------------------------------------------------------------------

    async def _repeat(
        self, name: str, turn: Callable[[], Awaitable[bool]], every_s: float = 0.0, block_s: float = 0.0
    ) -> None:
        """Runs a loop that goes on when Redis fails: its turns are repeated, with longer pauses while they fail.

        A turn that takes longer than a lease fails, because Redis does not answer.

        turn     says whether Redis has answered it; one that had nothing to ask does not show that Redis is back
        block_s  how long a turn may wait in Redis by design; comes on top
        """
        failures = 0
        while True:
            begin = self._clock()
            limit_s = max(self._settings.lease_ms / 1000, 1.0) + block_s
            try:
                async with asyncio.timeout(limit_s):
                    answered = await turn()
                if answered and failures:
                    logs.info("redis is back", loop=name, failures=failures)
                    failures = 0
                pause = max(0.0, begin + every_s - self._clock())
            except LOST_OR_REFUSED as error:
                cause = str(error) or f"no answer within {limit_s:g} s"
                logs.warning("redis out of reach", loop=name, cause=cause)
                failures += 1
                pause = pause_s(failures)
            self._give_up_expired()
            await asyncio.sleep(pause)

    async def _contend(self) -> bool:
        self._tell_cut_off()
        await self._take_leads()
        await self._show_life()
        return True

    async def _take_leads(self) -> None:
        async with self._contending:
            self._models, to_lead = await models_to_lead(self._mesh)
            contest = await self._leadership.contend(to_lead)
        self._stop_leading(contest.lost, "another scheduler leads")
        for model, term in contest.gained.items():
            self._leading[model] = self._tasks.start(self._lead(model, term), name=f"lead {model}")
        for model, error in contest.refused.items():
            logs.warning("lease refused", model=model, cause=error)

    async def _show_life(self) -> None:
        sign, lasts_ms = ",".join(sorted(self._leadership.terms)), max(self._settings.lease_ms, 1000)
        key = self._mesh.keys.scheduler(self._name)
        await self._mesh.redis.eval(*vital(("SET", key, sign, "PX", lasts_ms)))

    async def _watch(self) -> bool:
        # Taken before the poll: what the poll returns is not older than this.
        asked_at = self._clock()
        if not self.leaders:
            if self._models:
                return False
            # A new mesh: its first model is led as soon as it is there, not with the next renewal of leases.
            await self._take_leads()
            return True
        poll, now_ms = await self._mesh.polls.next()
        if poll is not self._poll:
            self._poll = poll
            if not poll.models <= self._models:
                await self._take_leads()
        for leader in list(self.leaders.values()):
            leader.observe(poll, now_ms, asked_at)
        return True

    async def _look_for_spoilt(self) -> bool:
        if await self._spoilt.found():
            # Also those that another scheduler leads: whoever leads next may not have looked over them.
            self._have_swept(self._models)
        return True

    async def _look_for_owners(self) -> bool:
        # Of a Cluster one node may be away for long: the keys of the others are not gone over until it is back.
        await self._mesh.redis.ping()
        found = await stranded(self._mesh)
        for model, executors in sorted(found.items()):
            named = ", ".join(sorted(executors)[:LOST_NAMED_MAX])
            logs.warning("owners in no list of executors", model=model, executors=len(executors), named=named)
        self._have_swept(found.keys() | await clear_abandoned(self._mesh))
        return True

    def _have_swept(self, models: Iterable[str]) -> None:
        """The next leader of each of these models sweeps; one that leads it now ends."""
        for model in models:
            self._to_sweep.add(model)
            if model in self.leaders:
                self.leaders[model].close()

    def _readers_for(self, leader: Leader) -> list[StreamReader]:
        """Readers that read for this leader from now on, one for each server that has streams of it."""
        readers: list[StreamReader] = []
        for streams in self._mesh.redis.apart(leader.streams):
            readers.append(reader := self._reader_of(self._mesh.redis.home(streams[0])))
            reader.add(leader, streams)
        return readers

    def _reader_of(self, server: Redis) -> StreamReader:
        """A reader of this server that takes one more leader's streams; a new one is started if all are full."""
        of_server = self._readers.setdefault(server, [])
        reader = next((reader for reader in of_server if reader.has_room), None)
        if reader is None:
            reader = StreamReader(server)
            of_server.append(reader)
            reading = self._repeat("read", partial(self._read, reader), block_s=BLOCK_MS / 1000)
            self._loops.append(self._tasks.start(reading, name="read"))
        return reader

    async def _read(self, reader: StreamReader) -> bool:
        was_asked = await reader.read(tick_ms=self._settings.tick_ms)
        if not was_asked:
            await asyncio.sleep(self._settings.tick_ms / 1000)
        return was_asked

    async def _drain_left(self) -> None:
        """See `MeshAccess.drain_soon`."""
        mesh, failures = self._mesh, 0
        while True:
            executors, begin = await mesh.to_be_drained(), self._clock()
            try:
                lost = await mesh.reach.lost()
                poll, _ = await mesh.polls.next()
                gone = {member.registration.executor for member in poll.members if not member.usable}
                for executor in sorted(executors):
                    for shard in (shard for shard in mesh.keys.shards if shard not in lost):
                        await mesh.scripts.drain_whole(executor, shard=shard, alive=executor not in gone)
                failures = 0
                # Where inboxes are long and slots are short, there is no end of it: Redis has as long for others.
                await asyncio.sleep(self._clock() - begin)
            except LOST_OR_REFUSED as error:
                logs.warning("inboxes not drained", cause=str(error))
                mesh.drain_soon(executors)
                failures += 1
                await asyncio.sleep(pause_s(failures))

    async def _follow_server(self) -> None:
        """After a restart of Redis or a failover: stops all leaders. New ones rebuild from what is there now."""
        while True:
            await self._mesh.run.changed.wait()
            leading = list(self._leading.values())
            self._stop_leading(self._leadership.drop_all(), "Redis was restarted or replaced")
            # The old leaders must have ended before connections to the new server open. If the server has lost its
            # newest data, it may give out the same term a second time, and would not refuse an old leader of that term.
            await end(leading)
            self._mesh.run.agree(self._mesh.run.met)

    # -- leading --------------------------------------------------------------------------------------------------

    async def _lead(self, model: str, term: Term) -> None:
        """Leads a model for as long as the lease is held, with a new `Leader` after each failure.

        After a lost connection the lease is taken anew, in another term: what was sent may still be on its way to
        Redis, which then refuses it.
        """
        failures = 0
        while self._leadership.terms.get(model) == term:
            begin = self._clock()
            try:
                await self._run_leader(model, term, is_new=not failures)
            except ResponseError as error:
                if str(error).startswith("FENCED"):
                    logs.warning("leadership lost", model=model, term=term, cause=error)
                    self._leadership.fenced(model, term, error)
                    return
                logs.error("leader failed", model=model, term=term, cause=error)
            except ClockSetBackError as error:
                logs.warning("clock of redis set back, rebuilding", model=model, term=term, cause=error)
            except (IllegalMoveError, BrokenInvariantError) as error:
                logs.error("state contradicts itself, rebuilding", error, model=model, term=term)
            except CONNECTION_LOST as error:
                self._cut_off[model] = error
                self._leadership.drop(model, term)
                return
            except Exception as error:  # noqa: BLE001 - a fault of ours in one model's state must not end the others'
                logs.error("leader failed, rebuilding", error, model=model, term=term)
            failures = failures + 1 if self._clock() - begin < BACKOFF_CAP_S else 1
            await asyncio.sleep(pause_s(failures))

    async def _run_leader(self, model: str, term: Term, *, is_new: bool) -> None:
        """Has a new leader lead, of all shards whose server answers. is_new: nobody has led in this term. Raises as
        `Leader.run`.
        """
        lent = LentSlots(self._mesh, model, term)
        await lent.begin()
        lost = await self._mesh.reach.lost()
        if lost and not lent.counts:
            # Nobody knows which slots the sequences of these shards hold. Another scheduler may reach all shards.
            await self._leadership.give_back(model, term)
            raise next(iter(lost.values()))
        if is_new:
            await check_new(self._mesh, model, term, [shard for shard in self._mesh.keys.shards if shard not in lost])
        leader = self.leaders[model] = self._new_leader(model, term, lent, lost)
        readers = self._readers_for(leader)

        def look_again() -> None:
            for reader in readers:
                reader.look_again()

        leader.when_asked = look_again
        try:
            await leader.run(self._rebuilding)
        finally:
            for reader in readers:
                reader.drop(leader)
            if leader.owes_sweep:
                self._to_sweep.add(model)
            # A cancelled task may end after its successor has begun and put its own leader there.
            if self.leaders.get(model) is leader:
                del self.leaders[model]

    def _new_leader(self, model: str, term: Term, lent: LentSlots, lost: Iterable[ShardId]) -> Leader:
        sweep = model in self._to_sweep
        self._to_sweep.discard(model)
        return Leader(
            self._mesh,
            model,
            term,
            policy=self._policy,
            tombstone_ms=self._settings.tombstone_seconds * 1000,
            shares=lambda: self._tenants.now.shares,
            lent=lent,
            away=lent.of(lost),
            check=self._settings.check_invariants,
            sweep=sweep,
        )

    async def _look_who_answers(self) -> bool:
        """Ends leaders that lead without a shard whose server answers again. Others begin, with this shard.

        And ends all that lead a shard whose server is silent. They share a few connections, and by themselves would
        find out a few at a time, each few after the time limit of an answer.
        """
        if not self._mesh.is_of_servers:
            return False
        lost = await self._mesh.reach.lost()
        silent = {shard for shard, cause in lost.items() if isinstance(cause, RedisTimeoutError)}
        deaf: list[str] = []
        for model, leader in self.leaders.items():
            if not leader.away.keys() <= lost.keys():
                leader.close()
            # Another one that begins in its place has taken its lease anew, and looks by itself.
            elif not silent <= leader.away.keys() and self._leadership.terms.get(model) == leader.term:
                deaf.append(model)
                self._leadership.drop(model, leader.term)
        self._stop_leading(deaf, "a node of Redis is silent")
        return True

    def _stop_leading(self, models: Sequence[str], why: str) -> None:
        if models:
            tell_of_many("leadership lost", models, why)
        for model in models:
            if model in self.leaders:
                self.leaders[model].close()
            self._leading.pop(model).cancel()

    def _tell_cut_off(self) -> None:
        """Logs which leaders have lost Redis, in one line: at a failover each of them does."""
        if self._cut_off:
            tell_of_many("leaders lost redis", sorted(self._cut_off), next(iter(self._cut_off.values())))
            self._cut_off.clear()

    def _give_up_expired(self) -> None:
        """Stops all leaders when the leases could not be renewed in time: another scheduler may lead by now."""
        if self._leadership.expired():
            self._stop_leading(self._leadership.drop_all(), "not renewed in time")


async def models_to_lead(mesh: MeshAccess) -> tuple[frozenset[str], frozenset[str]]:
    """The names of all models, and of those that need a leader: all but the ones that never had a sequence.

    A model without sequences may have had some: then it was led, and what is left of them still expires.
    """
    records = await mesh.membership.models()
    pipe = mesh.redis.pipeline(transaction=False)
    pipe.hkeys(mesh.keys.models)
    pipe.hkeys(mesh.keys.terms)
    names, led = [set(map(text_of, found)) for found in await pipe.execute()]
    stateless = {name for name, record in records.items() if record.config.sequence_batching is None}
    # At least one: it is leaders who forget executors.
    return frozenset(names), frozenset(names - (stateless - led) or sorted(names)[:1])


def tell_of_many(event: str, models: Sequence[str], cause: object) -> None:
    logs.warning(event, models=len(models), named=", ".join(models[:LOST_NAMED_MAX]), cause=cause)

"""One life of an executor in the mesh: from taking a lease to losing it, or to leaving.

Everything that belongs to the lease (id, inbox position, owned sequences, open commits) begins and ends with a
`Registration`; engines outlive it. A process that was frozen for too long finds its lease gone. It ends this
registration and begins another under a new id. What the old one still tries to commit is refused by epoch.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from executor.connections import RETRY_DELAY_S, RedisConnections, insist
from executor.lease.draining import models_that_stay
from executor.lease.hung_calls import HungCallError, place_of, watch
from executor.lease.intake import take_in
from executor.lease.serving import Serving
from executor.lease.watchdog import Watchdog
from executor.models.repository import ModelRepository
from executor.models.sources import ModelSource
from executor.reporting.nvml import Nvml
from executor.reporting.reports import Reporter
from executor.sequences.committer import Committer
from executor.sequences.holdings import is_behind
from executor.sequences.inbox import BEGINNING, Inbox
from executor.settings import ExecutorSettings
from executor.workers.devices import DeviceLostError
from executor.workers.worker import EngineWorker
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, LoadFailure, ModelRecord
from shared.process import logs
from shared.statistics.meter import OF_MESH, LoadMeter
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.connections.homes import shards_at
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.intervals import at_intervals
from shared.store.membership import Membership
from shared.store.metering import Metering
from shared.store.reporting import Reports
from shared.store.totals import Tallies
from shared.traces.tracing import Tracing

RENEWALS_PER_LEASE = 6
RENEWAL_TRIES = 3
"""A renewal may take the lease's time divided by this: then its connection is given up, and the next renewal makes
another one before the lease has ended.
"""
COUNTS_INTERVAL_S = 1.0
KNOWN_INTERVAL_S = 1.0
SETTLE_POLL_S = 0.1
"""How often a leaving executor checks whether its last sequences have ended."""


class LeaseLostError(Exception):
    """This registration is over: its lease has ended, or its entry in Redis cannot be read. Other executors may own its
    sequences already.
    """


class OlderDataError(Exception):
    """This registration is over: Redis has lost steps that it knows of."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of control messages.

    position  every one up to this was carried out, or failed: its place in the control stream
    beyond    so were these behind it
    """

    position: str = BEGINNING
    failures: tuple[LoadFailure, ...] = ()
    beyond: tuple[str, ...] = ()


class Registration:
    """One registration of this executor, with everything that it owns.

    changed  set when there is something to announce
    calls    which model has called which
    """

    def __init__(
        self,
        settings: ExecutorSettings,
        connections: RedisConnections,
        repository: ModelRepository,
        tracing: Tracing,
        applied: Applied,
        changed: asyncio.Event,
        calls: Callable[[], Collection[tuple[str, str]]] = tuple,
    ) -> None:
        self.executor = ExecutorId(f"{settings.name}-{secrets.token_hex(4)}")
        self._settings = settings
        self._connections = connections
        self._repository = repository
        self._applied = applied
        self._changed = changed
        tombstone_ms = settings.tombstone_seconds * 1000
        self._committer = Committer(
            connections.scripts, connections.commands, connections.keys, self.executor, tombstone_ms
        )
        self._inbox = Inbox(connections, self.executor)
        self.registered = asyncio.Event()
        self.serving = Serving(
            self.executor,
            connections,
            self._inbox,
            self._committer,
            tracing,
            repository,
            changed,
            self.registered,
            tombstone_ms=tombstone_ms,
            calls=calls,
        )
        self._tallies = Tallies(connections.scripts, connections.keys)
        self._metering = Metering(connections.scripts, connections.keys, self._meters)
        self._reporter = Reporter(
            Reports(connections.commands, connections.keys),
            self.executor,
            self.serving.reports,
            Nvml(repository.devices.gpus),
        )
        self._started_ms = time.time_ns() // 1_000_000
        self._listed: Mapping[str, ModelSource] = {}
        # Whoever ends the lease here says why: that it was lost would be wrong.
        self._gives_up = False
        self._retired = asyncio.Event()
        # Of the registration before this one nothing runs any more.
        self._retired.set()

    async def run(self, applied: Callable[[], Applied] | None = None) -> None:
        """Registers and serves until cancelled, or until this registration is over.

        applied  what became of control messages; with it, models that change are served, and announced to the mesh

        Raises, in an exception group, LeaseLostError, OlderDataError, HungCallError or DeviceLostError. In the last two
        cases the lease has been given up.
        """
        try:
            async with asyncio.TaskGroup() as group:
                # First, because until it has run, no connection opens to a Redis that was restarted meanwhile.
                group.create_task(self._connections.follow(self._compare), name="server")
                # Before the registration: steps come as soon as the mesh knows this executor.
                await self.serving.begin(group)
                await self._register()
                group.create_task(self._renew(), name="lease")
                looking = at_intervals(KNOWN_INTERVAL_S, self._stay_known, "registration not looked at", log=logs.debug)
                group.create_task(looking, name="registration")
                group.create_task(self._committer.run(time.time_ns), name="commits")
                group.create_task(
                    take_in(self._inbox, self.serving, bytes_max=self._settings.inbox_bytes_max), name="inbox"
                )
                group.create_task(self._add_up_counts(), name="counts")
                group.create_task(self._metering.run(), name="measurements")
                group.create_task(self._reporter.run(), name="reports")
                group.create_task(self._close_retired(), name="retired versions")
                if applied is not None:
                    group.create_task(self._announce(applied), name="announcements")
                if self._settings.batch_limit_s:
                    group.create_task(self._watch_calls(self._settings.batch_limit_s), name="hung calls")
                logs.info("executor serving", executor=self.executor, models=len(self._repository.loaded))
        except* DeviceLostError as lost:
            logs.error("GPU lost, giving the lease up", executor=self.executor, cause=_cause(lost))
            await self.give_up()
            raise
        finally:
            self.serving.forget_all()

    async def settle(self, until: Coroutine[Any, Any, None]) -> bool:
        """Hands over the sequences that can be moved. Sequences whose state is in this process alone go on here, and
        their models take no other sequence. Returns when these have ended, or `until` has returned; False if there
        were none.
        """
        patience = asyncio.create_task(until, name="patience")
        try:
            staying = await self._models_that_stay(self._repository.loaded)
            if staying:
                await self.serving.close(staying)
                await self._committer.drained()
                await insist("registration", self._update)
                logs.info("executor leaves when its last sequences end", executor=self.executor, models=sorted(staying))
            left = staying
            while left and not patience.done():
                await asyncio.wait({patience}, timeout=SETTLE_POLL_S)
                left = await self._models_that_stay(staying)
        finally:
            patience.cancel()
        if left:
            logs.warning("sequences are lost with their executor", executor=self.executor, models=sorted(left))
        return bool(staying)

    async def _models_that_stay(self, models: Iterable[str]) -> set[str]:
        redis, keys = self._connections.commands, self._connections.keys
        return await insist("look for bound sequences", lambda: models_that_stay(redis, keys, self.executor, models))

    async def leave(self) -> None:
        """Finishes the running batches, commits them, and hands all sequences over at once."""
        await self.serving.close()
        await self._committer.drained()
        with suppress(*LOST_OR_REFUSED):
            await self._metering.flush()
        # Last: until the lease ends, the commits above are accepted.
        self._gives_up = True
        try:
            await self._connections.membership.leave(self._registration())
        except LOST_OR_REFUSED as error:
            logs.warning("executor left without a word: its lease will end", executor=self.executor, cause=error)
            return
        logs.info("executor left", executor=self.executor)

    async def _announce(self, applied: Callable[[], Applied]) -> None:
        """Among the registration's own tasks: what changes while these end is served by the next registration."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.announce(applied())

    async def announce(self, applied: Applied) -> None:
        """The models have changed: serves the new ones, tells the mesh, and has closed what is not in use any more."""
        # Served first and announced then: the scheduler sends sequences for what is announced.
        await self.serving.change()
        self._applied = applied
        await insist("registration", self._update)
        self._retired.set()

    async def _close_retired(self) -> None:
        """Closes what is not in use any more. A slow `finalize` holds up neither another model, which is loaded
        meanwhile, nor a registration.
        """
        while True:
            await self._retired.wait()
            self._retired.clear()
            await self._repository.close_retired(self.serving.in_use)

    async def _update(self) -> None:
        await self._list()
        await self._publish()
        await self._connections.membership.update(self._registration())

    async def _list(self) -> None:
        """Lists the models of the repositories anew, for what is announced next."""
        # A file system that does not answer holds up what is announced, and not the loop, which renews the lease.
        self._listed = await asyncio.to_thread(self._repository.listed, readable_alone=True)

    def _registration(self) -> ExecutorRegistration:
        return ExecutorRegistration(
            executor=self.executor,
            name=self._settings.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            models=self.serving.offers,
            repository=self._repository.index(self._listed, self.serving.in_use),
            applied=self._applied.position,
            control_mode=self._settings.model_control_mode,
            failures=self._applied.failures,
            beyond=self._applied.beyond,
        )

    async def _register(self) -> None:
        """Begins the lease. Raises LeaseLostError when it is not known whether it has begun.

        A call whose reply is lost may have been carried out, and its lease may have ended since. Then other services
        have seen this executor die, and send nothing to its id. So a registration is not repeated under the same id.
        """
        await self._list()
        await insist("publication", self._publish)

        async def is_known() -> bool:
            try:
                await self._connections.membership.register(self._registration(), lease_ms=self._settings.lease_ms)
            except LOST_OR_REFUSED as error:
                logs.warning("registration lost", executor=self.executor, cause=str(error))
                return False
            return True

        if not await insist("registration", is_known):
            await asyncio.sleep(RETRY_DELAY_S)
            raise LeaseLostError(self.executor)
        self.registered.set()

    async def _publish(self) -> None:
        await self._connections.membership.publish_changed(self._records())

    def _records(self) -> list[ModelRecord]:
        # A copy, because models are loaded on another thread meanwhile.
        return [model.record for model in list(self._repository.loaded.values())]

    async def _renew(self) -> None:
        """Renews the lease. A lease that was not renewed in time is lost, whatever the reason."""
        lease_s = self._settings.lease_ms / 1000
        limit_s = lease_s / RENEWAL_TRIES
        watchdog = Watchdog(lease_s, self._workers)
        while True:
            await watchdog.sleep(lease_s / RENEWALS_PER_LEASE)
            try:
                async with asyncio.timeout(limit_s):
                    held = await self._connections.lease.renew(self.executor, lease_ms=self._settings.lease_ms)
            except LOST_OR_REFUSED as error:
                # Only Redis knows whether the lease still holds: it is asked when it is back.
                cause = str(error) or f"no answer within {limit_s:g} s"
                logs.warning("lease renewal delayed", executor=self.executor, cause=cause)
                continue
            if not held:
                if self._gives_up:
                    return
                raise LeaseLostError(self.executor)

    async def _stay_known(self) -> None:
        """Checks that other services can still read this registration and its models. A model that cannot be read is
        published again. If the registration cannot be read, this life is over.

        A leader that has seen the registration moves its sequences then. One that began later knows nobody of this id:
        so the registration is written once more, as that of an executor that leaves.
        """
        membership = self._connections.membership
        if not await membership.is_known(self.executor):
            await membership.leave(self._registration())
            raise LeaseLostError(self.executor)
        for record in await membership.unknown(self._records()):
            await membership.publish(record)

    def _workers(self) -> list[EngineWorker]:
        return [worker for served in self.serving.in_use for worker in served.workers]

    async def _watch_calls(self, limit_s: float) -> None:
        """Gives the lease up at once when a model hangs."""
        call = await watch(self._workers, limit_s)
        logs.error(
            "model hangs, giving the lease up",
            executor=self.executor,
            instance=call.worker,
            seconds=limit_s,
            at=place_of(call),
        )
        await self.give_up()
        raise HungCallError(call.worker)

    async def give_up(self) -> None:
        """Ends the lease, so that other executors take over at once. Without Redis the lease ends by itself."""
        self._gives_up = True
        with suppress(TimeoutError, *LOST_OR_REFUSED):
            async with asyncio.timeout(self._settings.lease_ms / 1000):
                await self._connections.membership.give_up(self.executor)

    async def _compare(self, redis: Redis, home: str) -> None:
        """After a restart or a failover of Redis: raises OlderDataError unless it still holds everything that this
        executor was told.
        """
        keys = self._connections.keys
        shards = shards_at(home, keys)
        holdings = [holding for holding in self.serving.holdings if keys.shard_of(holding.sequence) in shards]
        if await is_behind(redis, keys, self.executor, holdings):
            # Its sequences are moved at once: their next owners begin with what Redis holds.
            await Membership(redis, keys).leave(self._registration())
            raise OlderDataError(self.executor)
        # Entries that were removed from the inboxes, and are back with the older data, lie before the present
        # positions.
        self._inbox.read_again()
        logs.info("redis holds what was known", executor=self.executor)

    def _meters(self) -> list[tuple[ModelLoad, LoadMeter]]:
        return [*self.serving.meters, (OF_MESH, self._connections.trips.meter)]

    async def _add_up_counts(self) -> None:
        """Adds up the tallies of the models served here, which keeps them short and renews the counts' TTL."""
        # Statistics are no reason to stop serving.
        await at_intervals(
            COUNTS_INTERVAL_S, lambda: self._tallies.add_up([*self.serving.loads, OF_MESH]), "counts delayed"
        )


def _cause(failure: Any) -> str:
    """The text of the first failure in a group, however deep it is nested."""
    return _cause(failure.exceptions[0]) if isinstance(failure, BaseExceptionGroup) else str(failure)

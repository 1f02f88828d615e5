"""One life of an executor in the mesh: from taking a lease to losing it, or to leaving.

Everything that belongs to the lease (id, inbox position, owned sequences, open commits) lives and dies with this
object; engines outlive it. A process that was frozen too long finds its lease gone, ends its registration, and begins a
new one under a new id: what the old one still tries to commit is refused by epoch.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from executor.connections import RETRY_DELAY_S, RedisConnections, insist
from executor.lease.draining import bound_models
from executor.lease.hung_calls import HungCallError, place_of, watch
from executor.lease.serving import Serving
from executor.lease.watchdog import Watchdog
from executor.models.repository import ModelRepository
from executor.reporting.host import Host
from executor.reporting.nvml import load_nvml
from executor.reporting.reports import Reporter
from executor.sequences.committer import Committer
from executor.sequences.holdings import is_behind
from executor.sequences.inbox import BEGINNING, Inbox
from executor.settings import ExecutorSettings
from executor.workers.devices import DeviceLostError
from executor.workers.worker import EngineWorker
from shared.contract.ids import ExecutorId, correlation_id_of, model_of
from shared.contract.messages import (
    ExecutorRegistration,
    InboxCancelled,
    InboxExpired,
    InboxOwned,
    InboxStep,
    InboxVacated,
    InferMessage,
    LoadFailure,
    decode_infer,
    inbox_entry,
)
from shared.process import logs
from shared.store.link import Link
from shared.store.membership import Membership
from shared.store.reading import FAILURES, UnreadableError, noted
from shared.store.redis_client import CONNECTION_LOST
from shared.store.reporting import Reports
from shared.store.totals import Tallies
from shared.traces.tracing import Tracing

RENEWALS_PER_LEASE = 6
COUNTS_INTERVAL_S = 1.0
KNOWN_INTERVAL_S = 1.0
SETTLE_POLL_S = 0.1
"""How often an executor that leaves looks whether its last sequences have ended."""


class LeaseLostError(Exception):
    """This registration is over: its lease has ended, or its entry in Redis cannot be read. Others may own its
    sequences already."""


class OlderDataError(Exception):
    """This registration is over: it knows of steps that Redis has lost."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of control messages. position: the last one that was carried out or found to be impossible."""

    position: str = BEGINNING
    failures: tuple[LoadFailure, ...] = ()


class Registration:
    """One registration of this executor, with everything that it owns.

    changed  set when there is something to announce
    """

    def __init__(
        self,
        settings: ExecutorSettings,
        connections: RedisConnections,
        repository: ModelRepository,
        tracing: Tracing,
        applied: Applied,
        changed: asyncio.Event,
    ) -> None:
        self.executor = ExecutorId(f"{settings.name}-{secrets.token_hex(4)}")
        self._settings = settings
        self._connections = connections
        self._repository = repository
        self._applied = applied
        tombstone_ms = settings.tombstone_seconds * 1000
        self._committer = Committer(
            connections.scripts, Link(connections.commands), connections.keys, self.executor, tombstone_ms
        )
        self.serving = Serving(
            self.executor, connections, self._committer, tracing, repository, changed, tombstone_ms=tombstone_ms
        )
        inbox = Inbox(
            connections,
            self.executor,
            count_max=settings.inbox_read_count,
            bytes_max=settings.inbox_bytes_max,
            take=self._take,
            holder=self.serving,
        )
        self.serving.inbox = self._inbox = inbox
        self._tallies = Tallies(connections.scripts, connections.keys)
        self._reporter = Reporter(
            Reports(connections.commands, connections.keys),
            self.executor,
            self.serving.reports,
            Host(),
            load_nvml(repository.devices.gpus),
        )
        self._started_ms = time.time_ns() // 1_000_000
        self.registered = asyncio.Event()

    async def run(self) -> None:
        """Registers and serves until cancelled, or until this life is over: raises LeaseLostError, OlderDataError,
        HungCallError or DeviceLostError in an exception group. In the last two cases the lease is given up."""
        try:
            async with asyncio.TaskGroup() as group:
                # First of all: nobody talks to a Redis that was restarted meanwhile.
                group.create_task(self._follow_server(), name="server")
                await self.serving.begin(group)
                await self._register()
                group.create_task(self._renew(), name="lease")
                group.create_task(self._stay_known(), name="registration")
                group.create_task(self._committer.run(time.time_ns), name="commits")
                group.create_task(self._inbox.run(), name="inbox")
                group.create_task(self._add_up_counts(), name="counts")
                group.create_task(self._reporter.run(), name="reports")
                if self._settings.batch_limit_s:
                    group.create_task(self._watch_calls(self._settings.batch_limit_s), name="hung calls")
                logs.info("executor serving", executor=self.executor, models=len(self._repository.loaded))
        except* DeviceLostError as lost:
            logs.error("GPU lost, giving the lease up", executor=self.executor, cause=_cause(lost))
            await self._give_up()
            raise
        finally:
            self.serving.forget_all()

    async def settle(self, enough: Coroutine[Any, Any, None]) -> bool:
        """Hands over what can be moved, and serves on what cannot: sequences whose state is nowhere else. Their models
        take no others any more. Returns when they have ended, or `enough` has returned; False if there were none.
        """
        patience = asyncio.create_task(enough, name="patience")
        try:
            staying = await self._bound(self._repository.loaded)
            if staying:
                await self.serving.close(staying)
                await self._committer.drained()
                await insist("registration", self._update)
                logs.info("executor leaves when its last sequences end", executor=self.executor, models=sorted(staying))
            left = staying
            while left and not patience.done():
                await asyncio.wait({patience}, timeout=SETTLE_POLL_S)
                left = await self._bound(staying)
        finally:
            patience.cancel()
        if left:
            logs.warning("sequences are lost with their executor", executor=self.executor, models=sorted(left))
        return bool(staying)

    async def _bound(self, models: Iterable[str]) -> set[str]:
        redis, keys = self._connections.commands, self._connections.keys
        return await insist("look for bound sequences", lambda: bound_models(redis, keys, self.executor, models))

    async def leave(self) -> None:
        """Finishes what runs, makes it final, and hands the rest over at once."""
        await self.serving.quiet()
        await self._committer.drained()
        await self._connections.membership.leave(self._registration())
        logs.info("executor left", executor=self.executor)

    async def announce(self, applied: Applied) -> None:
        """The models have changed: serve what is new, and tell the mesh. Afterwards what is not in use is closed."""
        await self.serving.change()
        self._applied = applied
        await insist("registration", self._update)
        await self._repository.close_retired(self.serving.in_use)

    async def _update(self) -> None:
        await self._publish()
        await self._connections.membership.update(self._registration())

    def _registration(self) -> ExecutorRegistration:
        return ExecutorRegistration(
            executor=self.executor,
            name=self._settings.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            models=self.serving.offers,
            repository=self._repository.index(self.serving.in_use),
            applied=self._applied.position,
            control_mode=self._settings.model_control_mode,
            failures=self._applied.failures,
        )

    async def _register(self) -> None:
        """Begins the lease. Raises LeaseLostError when it is not known whether it has begun.

        A call without an answer may have been carried out, and its lease have ended since: then others have seen this
        executor die, and never send anything to it. So a call is not repeated under the same id.
        """
        await insist("publication", self._publish)

        async def is_known() -> bool:
            try:
                await self._connections.membership.register(self._registration(), lease_ms=self._settings.lease_ms)
            except CONNECTION_LOST as error:
                logs.warning("registration lost", executor=self.executor, cause=str(error))
                return False
            return True

        if not await insist("registration", is_known):
            await asyncio.sleep(RETRY_DELAY_S)
            raise LeaseLostError(self.executor)
        self.registered.set()

    async def _publish(self) -> None:
        for model in list(self._repository.loaded.values()):
            await self._connections.membership.publish(model.record)

    async def _renew(self) -> None:
        """Renews the lease; a lease that could not be renewed in time is lost, whatever the reason."""
        lease_s = self._settings.lease_ms / 1000
        watchdog = Watchdog(lease_s, self._workers)
        while True:
            await watchdog.sleep(lease_s / RENEWALS_PER_LEASE)
            try:
                held = await self._connections.membership.renew(self.executor, lease_ms=self._settings.lease_ms)
            except CONNECTION_LOST as error:
                # Redis alone decides: when it is back, either the lease still holds there, or it does not.
                logs.warning("lease renewal delayed", executor=self.executor, cause=str(error))
                continue
            if not held:
                raise LeaseLostError(self.executor)

    async def _stay_known(self) -> None:
        """Looks whether others can still read who this is and what it serves. What cannot be read of a model is
        published again; of the registration, this life is over: its sequences go on elsewhere already."""
        membership = self._connections.membership
        while True:
            await asyncio.sleep(KNOWN_INTERVAL_S)
            try:
                if not await membership.is_known(self.executor):
                    raise LeaseLostError(self.executor)
                for record in await membership.unknown([model.record for model in self._repository.loaded.values()]):
                    await membership.publish(record)
            except (*CONNECTION_LOST, ResponseError) as error:
                logs.debug("registration not looked at", cause=str(error))

    def _workers(self) -> list[EngineWorker]:
        return [worker for served in self.serving.in_use for worker in served.workers]

    async def _watch_calls(self, limit_s: float) -> None:
        """When a model hangs, the lease goes at once."""
        call = await watch(self._workers, limit_s)
        logs.error(
            "model hangs, giving the lease up",
            executor=self.executor,
            instance=call.worker,
            seconds=limit_s,
            at=place_of(call),
        )
        await self._give_up()
        raise HungCallError(call.worker)

    async def _give_up(self) -> None:
        """Ends the lease, so that others take over at once; without Redis it ends by itself."""
        with suppress(TimeoutError, *CONNECTION_LOST):
            async with asyncio.timeout(self._settings.lease_ms / 1000):
                await self._connections.membership.give_up(self.executor)

    async def _follow_server(self) -> None:
        """After a restart of Redis, or a failover: goes on when nothing is missing there of what it has told us."""
        while True:
            await self._connections.run.changed.wait()
            await insist("comparison with Redis", self._compare)

    async def _compare(self) -> None:
        async with self._connections.unbound() as (redis, run):
            if await is_behind(redis, self._connections.keys, self.executor, self.serving.holdings):
                # Its sequences are moved at once: their next owner begins with what is there.
                await Membership(redis, self._connections.keys).leave(self._registration())
                raise OlderDataError(self.executor)
            # What was removed from the inboxes, and is there again, lies before the place where reading goes on.
            self._inbox.read_again()
            self._connections.run.agree(run.bound)
            logs.info("redis holds what was known", executor=self.executor)

    async def _take(self, stream: str, entry: bytes, fields: Mapping[bytes, bytes]) -> Sequence[str]:
        """Takes an inbox entry in (see `inbox.Take`)."""
        try:
            item = inbox_entry(entry, fields)
        except FAILURES as failure:
            raise UnreadableError(stream, failure) from failure
        if isinstance(item, InboxStep):
            try:
                message = decode_infer(item.message)
            except FAILURES as failure:
                item, message = self._unreadable(stream, item, failure)
            return self.serving.accept(item, message)
        gone = [item.entry]
        if isinstance(item, InboxOwned):
            self.serving.expect(item)
            return gone
        for model in self.serving.models_of(item.sequence):
            match item:
                case InboxCancelled():
                    model.cancelled(item)
                case InboxVacated():
                    model.vacated(item)
                case InboxExpired():
                    gone += await model.expired(item)
        return gone

    def _unreadable(self, stream: str, step: InboxStep, failure: Exception) -> tuple[InboxStep, InferMessage]:
        """A step of which only its place in its sequence can be read."""
        model = model_of(step.sequence)
        try:
            correlation_id = correlation_id_of(step.sequence)
        except FAILURES:
            raise UnreadableError(stream, failure) from failure
        noted(stream, failure, field=step.entry)
        message = InferMessage(model, step.version, "", correlation_id, (), arrived_ns=time.time_ns())
        return msgspec.structs.replace(step, unreadable=True), message

    async def _add_up_counts(self) -> None:
        """Keeps the tallies of what is served here short, and its counts alive."""
        while True:
            await asyncio.sleep(COUNTS_INTERVAL_S)
            try:
                await self._tallies.add_up(self.serving.loads)
            except (*CONNECTION_LOST, ResponseError) as error:
                # Also when Redis has no memory left: statistics are no reason to stop serving.
                logs.warning("counts delayed", cause=str(error))


def _cause(failure: Any) -> str:
    """What the first member of a group says, however deep it lies."""
    return _cause(failure.exceptions[0]) if isinstance(failure, BaseExceptionGroup) else str(failure)

"""One life of an executor in the mesh: from taking a lease to losing it, or to leaving.

Everything that belongs to the lease (id, inbox position, owned sequences, open commits) lives and dies with this
object; engines outlive it. A process that was frozen too long finds its lease gone, ends its incarnation, and begins a
new one under a new id: what the old one still tries to commit is refused by epoch.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from executor.checkpoints import read_checkpoints
from executor.committer import Committer
from executor.first_batch import backlog_requests
from executor.repository import Repository, ServedVersion
from executor.sequence_model import SequenceModel
from executor.settings import ExecutorSettings
from executor.work_model import WorkModel
from shared import logs
from shared.ids import ExecutorId, SequenceId, model_of
from shared.keyspace import Keyspace
from shared.link import REPLY_TIMEOUT_S, Link
from shared.membership import Membership
from shared.messages import ExecutorRegistration, InboxCancelled, InboxStep, InferMessage, decode_infer, inbox_entry
from shared.redis_client import CONNECTION_LOST
from shared.scripts import Scripts
from shared.totals import Tallies
from shared.tracing import Tracing

INBOX_BLOCK_MS = 1000
RETRY_DELAY_S = 0.2
RENEWALS_PER_LEASE = 6
CLAIM_INTERVAL_S = 1.0
COUNTS_INTERVAL_S = 1.0


class LeaseLostError(Exception):
    """This incarnation is over: others may own its sequences already."""


class Connections:
    """An executor's connections, by use: blocking reads must not hold up commands.

    Neither repeats a call by itself: a read whose reply was lost is repeated here, where it is known what it meant.
    """

    def __init__(self, commands: Redis, blocking: Redis, keys: Keyspace) -> None:
        self.commands = commands
        self.blocking = blocking
        self.keys = keys
        self.scripts = Scripts(commands, keys)
        self.membership = Membership(commands, keys)

    async def close(self) -> None:
        """Closes both pools."""
        await self.commands.aclose()
        await self.blocking.aclose()


class Incarnation:
    """One registration of this executor, with everything that it owns."""

    def __init__(
        self,
        settings: ExecutorSettings,
        connections: Connections,
        repository: Repository,
        tracing: Tracing,
        control_position: str,
    ) -> None:
        self.executor = ExecutorId(f"{settings.name}-{secrets.token_hex(4)}")
        self._settings = settings
        self._connections = connections
        keys = connections.keys
        self._repository = repository
        self._tracing = tracing
        self._control_position = control_position
        self._committer = Committer(
            connections.scripts,
            Link(connections.commands),
            keys,
            self.executor,
            settings.tombstone_seconds * 1000,
        )
        self._sequence_models: dict[tuple[str, str], SequenceModel] = {}
        self._work_models: dict[tuple[str, str], WorkModel] = {}
        self._loops: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._positions = dict.fromkeys((keys.inbox(shard, self.executor) for shard in keys.shard_ids()), "0-0")
        self._read_again = False
        self._keys = keys
        self._tallies = Tallies(connections.scripts, keys)
        self._restore = asyncio.Event()
        self._started_ms = time.time_ns() // 1_000_000
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Registers and serves until the lease is lost (raises LeaseLostError in an exception group) or cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for served in self._served():
                await self._start(served)
            await self._register()
            group.create_task(self._renew(), name="lease")
            group.create_task(self._committer.run(time.time_ns), name="commits")
            group.create_task(self._read_inbox(), name="inbox")
            group.create_task(self._restore_sequences(), name="restore")
            group.create_task(self._claim_work(), name="claims")
            group.create_task(self._add_up_counts(), name="counts")
            logs.info("executor serving", executor=self.executor, models=len(self._repository.loaded))

    async def leave(self) -> None:
        """Finishes what runs, makes it final, and hands the rest over at once."""
        for model in [*self._sequence_models.values(), *self._work_models.values()]:
            await model.quiet()
        await self._committer.drained()
        await self._connections.membership.leave(self._registration())
        logs.info("executor left", executor=self.executor)

    async def announce(self, control_position: str) -> None:
        """Models were loaded or unloaded: serve what is new, and tell the mesh."""
        self._control_position = control_position
        served = {(version.config.name, version.version): version for version in self._served()}
        for place, model in self._models().items():
            if model.serves is not served.get(place):
                await self._retire(place, model)
        for place, version in served.items():
            if place not in self._models():
                await self._start(version)
        # What was read and not finished is still in the inbox: a replaced model's successor goes on from there, and
        # the scheduler takes an unloaded model's steps away when it sees that this executor does not serve it.
        self._read_again = True
        await self._publish()
        await self._connections.membership.update(self._registration())

    async def _retire(self, place: tuple[str, str], model: SequenceModel | WorkModel) -> None:
        """Ends a model's loops after its running batches."""
        await model.quiet()
        await self._committer.drained()
        self._loops.pop(place).cancel()
        self._work_models.pop(place, None)
        self._sequence_models.pop(place, None)

    def _models(self) -> dict[tuple[str, str], SequenceModel | WorkModel]:
        return {**self._sequence_models, **self._work_models}

    def _served(self) -> Sequence[ServedVersion]:
        return [version for model in self._repository.loaded.values() for version in model.versions]

    async def _start(self, served: ServedVersion) -> None:
        assert self._group is not None
        place = (served.config.name, served.version)
        if served.config.sequence_batching is not None:
            model = SequenceModel(
                served,
                executor=self.executor,
                committer=self._committer,
                tracing=self._tracing,
                backlog=partial(backlog_requests, self._connections.commands, self._keys, place[0]),
            )
            self._sequence_models[place] = model
            self._loops[place] = self._group.create_task(model.run(), name=f"{place[0]} sequences")
            return
        work = WorkModel(
            served,
            executor=self.executor,
            redis=self._connections.commands,
            blocking=self._connections.blocking,
            scripts=self._connections.scripts,
            keys=self._connections.keys,
            tracing=self._tracing,
        )
        self._work_models[place] = work
        self._loops[place] = self._group.create_task(work.run(), name=f"{place[0]} work")

    def _registration(self) -> ExecutorRegistration:
        return ExecutorRegistration(
            executor=self.executor,
            name=self._settings.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            models=tuple(version.announcement for version in self._served()),
            repository=self._repository.index(),
            applied=self._control_position,
            control_mode=self._settings.model_control_mode,
        )

    async def _register(self) -> None:
        await self._publish()
        await self._connections.membership.register(self._registration(), lease_ms=self._settings.lease_ms)

    async def _publish(self) -> None:
        for model in self._repository.loaded.values():
            await self._connections.membership.publish(model.record)

    async def _renew(self) -> None:
        """Renews the lease; a lease that could not be renewed in time is lost, whatever the reason."""
        lease_s = self._settings.lease_ms / 1000
        while True:
            await asyncio.sleep(lease_s / RENEWALS_PER_LEASE)
            try:
                held = await self._connections.membership.renew(self.executor, lease_ms=self._settings.lease_ms)
            except CONNECTION_LOST as error:
                # Redis alone decides: when it is back, either the lease still holds there, or it does not.
                logs.warning("lease renewal delayed", executor=self.executor, cause=str(error))
                continue
            if not held:
                raise LeaseLostError(self.executor)

    async def _read_inbox(self) -> None:
        link = Link(self._connections.blocking)
        try:
            while True:
                try:
                    await link.connect()
                    await self._read_entries(link)
                except CONNECTION_LOST as error:
                    logs.warning("inbox reading delayed", executor=self.executor, cause=str(error))
                    await asyncio.sleep(RETRY_DELAY_S)
        finally:
            await link.close()

    async def _read_entries(self, link: Link) -> None:
        """One blocking read of all inboxes; positions move on only with what was taken in."""
        if self._read_again:
            self._read_again = False
            self._positions = dict.fromkeys(self._positions, "0-0")
        head = ("XREAD", "COUNT", self._settings.inbox_read_count, "BLOCK", INBOX_BLOCK_MS, "STREAMS")
        command = (*head, *self._positions, *self._positions.values())
        (read,) = await link.exchange([command], timeout_s=REPLY_TIMEOUT_S + INBOX_BLOCK_MS / 1000)
        if isinstance(read, ResponseError):
            raise read
        for stream, entries in read or ():
            heard: list[bytes] = []
            for entry, flat in entries:
                if await self._take(entry, dict(zip(flat[::2], flat[1::2], strict=True))):
                    heard.append(entry)
            if heard:
                # A step leaves the inbox with its checkpoint, a control message as soon as it was heard.
                await link.exchange([("XDEL", stream, *heard)], timeout_s=REPLY_TIMEOUT_S)
            self._positions[stream.decode()] = entries[-1][0].decode()

    async def _take(self, entry: bytes, fields: Mapping[bytes, bytes]) -> bool:
        """Takes an entry in; True when that was all there is to do about it."""
        item = inbox_entry(entry, fields)
        if isinstance(item, InboxStep):
            self._accept(item, decode_infer(item.message))
            return False
        for (name, _), model in self._sequence_models.items():
            if name != model_of(item.sequence):
                continue
            if isinstance(item, InboxCancelled):
                model.cancelled(item)
            else:
                await model.expired(item)
        return True

    def _accept(self, step: InboxStep, message: InferMessage) -> None:
        model = self._sequence_models.get((message.model, step.version))
        if model is None:
            logs.warning("step left to the scheduler", sequence=step.sequence, cause="its model was unloaded here")
            return
        model.accept(step, message)
        if model.restoring:
            self._restore.set()

    async def _restore_sequences(self) -> None:
        """Fetches the checkpoints of sequences that came from elsewhere, all that gathered in one round trip."""
        while True:
            await self._restore.wait()
            self._restore.clear()
            for model in self._sequence_models.values():
                wanted, model.restoring = model.restoring, []
                if wanted:
                    await self._restore_all(model, wanted)

    async def _restore_all(self, model: SequenceModel, wanted: Sequence[SequenceId]) -> None:
        while True:
            try:
                found = await read_checkpoints(self._connections.commands, self._connections.keys, wanted)
            except CONNECTION_LOST as error:
                logs.warning("restore delayed", sequences=len(wanted), cause=str(error))
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            for sequence in wanted:
                model.restored(sequence, found.get(sequence))
            logs.info("sequences restored", model=model.model, sequences=len(wanted))
            return

    async def _claim_work(self) -> None:
        """Looks for stateless requests of executors whose lease has ended."""
        while True:
            await asyncio.sleep(CLAIM_INTERVAL_S)
            try:
                members = await self._connections.membership.members()
                alive = {member.registration.executor for member in members if member.alive}
                for model in list(self._work_models.values()):
                    await model.claim_from_others(alive)
            except CONNECTION_LOST as error:
                logs.warning("claims delayed", cause=str(error))

    async def _add_up_counts(self) -> None:
        """Keeps the tallies of what is served here short, and its counts alive."""
        while True:
            await asyncio.sleep(COUNTS_INTERVAL_S)
            try:
                await self._tallies.add_up([version.statistics.load for version in self._served()])
            except CONNECTION_LOST as error:
                logs.debug("counts delayed", cause=str(error))

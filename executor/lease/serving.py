"""What one executor registration serves, and how that changes while it lives.

    start      a version that is new
    withdraw   a version that was unloaded: it goes on for a moment, for gateways that have not heard of it, then ends;
               and with it its idle sequences, if no other executor has the version and they cannot be paged
    replace    a version that was loaded again: the old engines finish what was accepted before; sequences that begin
               now go to the new engines. Then the later steps of older sequences are read again
    in place   the same version with other instances: its sequences stay, and are read again from the inbox

A reload ends the open sequences (triton-spec 1.11). A *mark* tells which ones these are: the record of a sequence names
the mark of the load that ran its START, and a load with another mark does not use the state. That holds wherever the
sequence comes to a new load: by a reload here, a move, a takeover, or from its page. The executor that loaded again
ends its idle sequences itself; the others are ended with their next step. The scheduler takes no part in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

import msgspec

from executor.calls.deadlocks import in_order
from executor.connections import RedisConnections, insist
from executor.models.repository import ModelRepository
from executor.models.served import ServedVersion
from executor.sequences.arrivals import fetch_checkpoints, try_suspects
from executor.sequences.committer import Committer
from executor.sequences.departures import page_idle
from executor.sequences.holdings import Holding
from executor.sequences.inbox import Inbox, LastEntries
from executor.sequences.reloads import end_outdated
from executor.sequences.sequence_model import SequenceModel
from executor.sequences.step_answers import AnswerWriter
from executor.stateless.dozing import Dozing
from executor.stateless.work_model import WorkModel
from executor.stateless.work_source import refuse_waiting, takers_of
from executor.workers.answers import unloaded_answer
from executor.workers.first_batch import backlog_requests
from shared.contract.ids import Epoch, ExecutorId, SequenceId, entry_key, model_of
from shared.contract.messages import (
    InboxCancelled,
    InboxExpired,
    InboxOwned,
    InboxStep,
    InboxVacated,
    InferMessage,
    ServedModel,
)
from shared.process import logs
from shared.statistics.meter import LoadMeter
from shared.statistics.reports import ModelReport
from shared.statistics.tally import ModelLoad
from shared.store.connections.homes import grouped, together
from shared.store.intervals import at_intervals
from shared.store.membership import lines_of
from shared.traces.tracing import Tracing

LINGER_S = 1.0
"""How long an unloaded model still takes steps: twice the time after which a gateway reads the mesh again."""
FINISH_S = 60.0
"""How long a replaced or unloaded model may work off what was accepted; then the scheduler handles the rest."""
FINISH_POLL_S = 0.01
RETURN_S = 120.0
"""How long its running batches are waited for after that, or in a drain. A model that hangs would hold up every later
change here, and every sequence that is to move."""
REFUSE_S = 300.0
"""How long requests to an unloaded version are refused here. What comes later, the gateways fail by themselves: else an
executor would look after every model that it ever had.
"""
CLAIM_INTERVAL_S = 1.0
READINESS_INTERVAL_S = 1.0

Place = tuple[str, str]
Model = SequenceModel | WorkModel


@dataclass(frozen=True, slots=True)
class Replaced:
    """A replaced model. last: it finishes the inbox entries up to these"""

    model: SequenceModel
    last: LastEntries

    def holds(self, entry: InboxStep | InboxOwned) -> bool:
        """Whether the old engines still own the sequence of an inbox entry."""
        return self.model.state.get(entry.sequence, entry.epoch) is not None


class Serving:
    """The models of one registration."""

    def __init__(
        self,
        executor: ExecutorId,
        connections: RedisConnections,
        inbox: Inbox,
        committer: Committer,
        tracing: Tracing,
        repository: ModelRepository,
        changed: asyncio.Event,
        registered: asyncio.Event,
        *,
        tombstone_ms: int,
        calls: Callable[[], Collection[tuple[str, str]]],
    ) -> None:
        """registered: set when the lease has begun. calls: which model has called which"""
        self._executor = executor
        self._registered = registered
        self._calls = calls
        self._tombstone_ms = tombstone_ms
        self._connections = connections
        self._inbox = inbox
        self._keys = connections.keys
        self._committer = committer
        self._tracing = tracing
        self._repository = repository
        self._changed = changed
        self._dozing = Dozing(connections.blocking)
        self._models: dict[Place, Model] = {}
        self._loops: dict[Place, asyncio.Task[None]] = {}
        self._replaced: dict[Place, Replaced] = {}
        # Up to this entry (`entry_key`) a load's inboxes may hold steps that an earlier one has committed.
        self._older: dict[Place, tuple[int, int]] = {}
        # In the order in which their steps came: an order by address would make each run of the simulation another one.
        self._told: dict[SequenceModel, None] = {}
        self._withdrawals: dict[Place, asyncio.Task[None]] = {}
        self._unloaded: dict[Place, tuple[ModelLoad, float]] = {}
        self._changing = asyncio.Lock()
        self._staying: frozenset[str] | None = None
        # Whether the inboxes may hold steps of a sequence that was over when no model here knew it.
        self._has_left_over = False
        self._trial = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None

    async def begin(self, group: asyncio.TaskGroup) -> None:
        """Starts every loaded model; the group owns their tasks."""
        self._group = group
        for place, version in self._versions().items():
            await self._start(place, version)
        group.create_task(at_intervals(CLAIM_INTERVAL_S, self._claim_work, "claims delayed"), name="claims")
        group.create_task(self._dozing.run(), name="dozing queues")
        group.create_task(self._watch_readiness(), name="readiness")

    # -- what others ask --------------------------------------------------------------------------------------------

    @property
    def offers(self) -> tuple[ServedModel, ...]:
        """The versions to which the scheduler may send sequences; an unloaded one too, until it has ended. And the
        ensembles, which only gateways read.
        """
        return tuple(
            msgspec.structs.replace(served.announcement, closing=self._staying is not None)
            for served in (*(model.serves for model in self._models.values()), *self._versions(ensembles=True).values())
            if self._goes_on(served.config.name)
        )

    @property
    def in_use(self) -> list[ServedVersion]:
        """Versions whose engines may still run something."""
        return [model.serves for model in self._all()]

    @property
    def loads(self) -> list[ModelLoad]:
        """The loads whose counts are added up here."""
        served = (*(model.serves for model in self._all()), *self._versions(ensembles=True).values())
        return [version.statistics.load for version in served]

    @property
    def meters(self) -> list[tuple[ModelLoad, LoadMeter]]:
        """What is measured of the loads that run here."""
        return [(served.statistics.load, served.statistics.requests.meter) for served in self.in_use]

    def reports(self) -> list[ModelReport]:
        """What this executor reports of each version. (Stateless requests wait in Redis, where gateways count them.)"""
        return [
            model.serves.report(pending=model.state.waiting if isinstance(model, SequenceModel) else 0)
            for model in self._models.values()
        ]

    @property
    def queued_bytes(self) -> int:
        """Bytes of the requests of steps that wait here for their turn, or run."""
        # Asked for every read: without a generator, which would take ten times as long.
        size = 0
        for model in self._models.values():
            if type(model) is SequenceModel:
                size += model.state.queued_bytes
        for replaced in self._replaced.values():
            size += replaced.model.state.queued_bytes
        return size

    @property
    def is_busy(self) -> bool:
        """Whether any of these steps runs, or can run."""
        return any(model.state.is_busy for model in self._all() if isinstance(model, SequenceModel))

    @property
    def holdings(self) -> list[Holding]:
        """What is known of every sequence that this executor owns."""
        return [holding for model in self._all() if isinstance(model, SequenceModel) for holding in model.holdings]

    async def close(self, staying: AbstractSet[str] = frozenset()) -> None:
        """From now on no sequence begins here, and only the sequences of the staying models go on. Returns when the
        batches of all other models have ended, or are not waited for any more.
        """
        self._staying = frozenset(staying)
        # Callers first: what they wait for may run here alone.
        names = in_order(dict.fromkeys(model.model for model in self._all()), self._calls())
        order = {name: place for place, name in enumerate(names)}
        for model in sorted(self._all(), key=lambda model: order[model.model]):
            if model.model not in staying:
                await self._quiet(model)

    def _goes_on(self, model: str) -> bool:
        """Whether a model is served: each is, until `close` has named those that stay."""
        return self._staying is None or model in self._staying

    def forget_all(self) -> None:
        """This registration is over, its tasks have ended: nothing is owned here any more."""
        for model in self._all():
            if isinstance(model, SequenceModel):
                model.forget_all()

    # -- steps ------------------------------------------------------------------------------------------------------

    def accept(self, step: InboxStep, message: InferMessage) -> Sequence[str]:
        """Takes a step from the inbox, or leaves it there for the scheduler; `taken` follows. Returns inbox entries
        that may be removed at once.
        """
        place = message.model, step.version
        model = self._taker(place, step)
        if model is None:
            logs.debug("step left to the scheduler", sequence=step.sequence, step=step.step, epoch=step.epoch)
            return ()
        self._told[model] = None
        older = self._older.get(place)
        return model.take(step, message, is_older=older is not None and entry_key(step.entry) <= older)

    def taken(self) -> None:
        """The steps of one read have been taken in: what they make ready may run."""
        for model in self._told:
            model.look(at_once=True)
        self._told.clear()

    def tell(self, entry: InboxOwned | InboxCancelled | InboxVacated | InboxExpired) -> Sequence[str]:
        """Takes a control message from the inbox. Returns further inbox entries that may be removed."""
        if isinstance(entry, InboxOwned):
            # Its state is fetched at once, if its model takes it.
            model = self._taker((model_of(entry.sequence), entry.version), entry)
            return model.handle(entry) if model is not None else ()
        models = self.sequence_models(model_of(entry.sequence))
        if isinstance(entry, InboxExpired) and not any(one.state.get(entry.sequence, entry.epoch) for one in models):
            self._has_left_over = True
        return [gone for model in models for gone in model.handle(entry)]

    def _taker(self, place: Place, entry: InboxStep | InboxOwned) -> SequenceModel | None:
        model = self._models.get(place)
        if replaced := self._replaced.get(place):
            if entry_key(entry.entry) <= entry_key(replaced.last[self._keys.shard_of(entry.sequence)]):
                # Accepted before the reload: the old engines finish it.
                model = replaced.model
            elif replaced.holds(entry):
                # A later step of a sequence that the old engines still run. It is read again when they are done, by the
                # new load.
                return None
        if not isinstance(model, SequenceModel) or not has_place(model.serves, entry):
            # The scheduler that assigned it has not read yet what is served here now.
            return None
        return model

    def owns(self, sequence: SequenceId, epoch: int) -> bool:
        """Whether a sequence is owned here, in that epoch."""
        models = self.sequence_models(model_of(sequence))
        return any(model.state.get(sequence, Epoch(epoch)) is not None for model in models)

    def sequence_models(self, model: str) -> list[SequenceModel]:
        """Every version of a model that may hold sequences."""
        return [one for one in self._all() if isinstance(one, SequenceModel) and one.model == model]

    # -- change -----------------------------------------------------------------------------------------------------

    async def change(self) -> None:
        """Serves what the repository holds now. Returns when new versions are running, and replaced ones have finished
        what was accepted. Unloaded ones finish on their own; `changed` is set when they have.
        """
        async with self._changing:
            served = self._versions()
            for place, model in list(self._models.items()):
                wanted = served.get(place)
                if not self._goes_on(model.model):
                    continue
                if wanted is None:
                    self._withdraw_soon(place, model)
                elif wanted is not model.serves:
                    withdrawal = self._withdrawals.pop(place, None)
                    if withdrawal is not None:
                        withdrawal.cancel()
                    await self._replace(place, model, wanted)
            for place, version in served.items():
                if place not in self._models:
                    await self._start(place, version)
                    await self._meet_older_sequences(place)

    async def _start(self, place: Place, served: ServedVersion) -> None:
        assert self._group is not None
        await asyncio.gather(*(one.look() for one in served.readiness))
        if not self._goes_on(served.config.name):
            return
        if served.config.sequence_batching is not None:
            model: Model = SequenceModel(
                served,
                executor=self._executor,
                committer=self._committer,
                tracing=self._tracing,
                count_waiting=partial(backlog_requests, self._connections.commands, self._keys, served.config.name),
                answer_bytes_max=self._connections.value_bytes_max,
                answer_writer=self._answer_writer(served.config.name) if served.config.decoupled else None,
            )
        else:
            model = WorkModel(
                served,
                executor=self._executor,
                connections=self._connections,
                dozing=self._dozing,
                tracing=self._tracing,
            )
        self._models[place] = model
        self._unloaded.pop(place, None)
        self._loops[place] = self._group.create_task(self._run(model), name=f"{place[0]} {place[1]}")

    def _answer_writer(self, model: str) -> AnswerWriter:
        connections = self._connections
        return AnswerWriter(connections.scripts, connections.links, self._keys, self._executor, model)

    async def _run(self, model: Model) -> None:
        if isinstance(model, WorkModel):
            # Whoever holds requests without a lease counts as dead.
            await self._registered.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(model.run(), name=f"{model.model} instances")
            if isinstance(model, SequenceModel):
                arriving = fetch_checkpoints(model, self._connections, self._inbox, self._executor)
                group.create_task(arriving, name=f"{model.model} checkpoints")
                leaving = page_idle(model, self._connections, self._executor)
                group.create_task(leaving, name=f"{model.model} departures")
                group.create_task(try_suspects(model, self._connections, self._trial), name=f"{model.model} suspects")

    async def _replace(self, place: Place, model: Model, wanted: ServedVersion) -> None:
        if isinstance(model, WorkModel) or model.serves.fingerprint.content == wanted.fingerprint.content:
            await self._end(model, self._loops.pop(place))
            await self._start(place, wanted)
        else:
            # Taken before the new load starts: entries up to these belong to the old engines.
            last = await insist("reload", self._inbox.last_entries)
            loop = self._loops.pop(place)
            self._replaced[place] = Replaced(model, last)
            await self._start(place, wanted)
            await self._finish(model, last)
            await self._end(model, loop)
            del self._replaced[place]
        await self._meet_older_sequences(place)

    async def _meet_older_sequences(self, place: Place) -> None:
        """After a load: ends the idle sequences of earlier loads, and has the steps of the others read again."""
        model = self._models.get(place)
        if isinstance(model, SequenceModel):
            await self._end_idle("reload", model, model.mark)
            last = await insist("reload", self._inbox.last_entries)
            # Of all shards the latest: one fetch too many does no harm.
            self._older[place] = max(map(entry_key, last.values()))
            self._inbox.read_again()

    async def _end_idle(self, cause: str, model: SequenceModel, mark: str) -> None:
        """mark: as of `end_outdated`"""
        ended = partial(
            end_outdated, self._connections, self._executor, model, mark=mark, tombstone_ms=self._tombstone_ms
        )
        if count := await insist(cause, ended):
            version = model.serves.version
            logs.info(f"idle sequences ended by a {cause}", model=model.model, version=version, sequences=count)

    def _withdraw_soon(self, place: Place, model: Model) -> None:
        assert self._group is not None
        if place not in self._withdrawals:
            name = f"{place[0]} {place[1]} withdrawal"
            self._withdrawals[place] = self._group.create_task(self._withdraw(place, model), name=name)

    async def _withdraw(self, place: Place, model: Model) -> None:
        """Works off what was accepted, also by gateways that did not know yet, and ends. Later requests are refused
        elsewhere: steps of sequences by the scheduler, stateless requests by `_refuse_unloaded`.
        """
        await asyncio.sleep(LINGER_S)
        await self._finish(model, {})
        async with self._changing:
            # `change` cancels a withdrawal under the same lock: from here on it cannot.
            del self._withdrawals[place]
            await self._end(model, self._loops.pop(place))
            del self._models[place]
            self._older.pop(place, None)
            if isinstance(model, WorkModel):
                self._unloaded[place] = model.serves.statistics.load, time.monotonic()
            # Else those that cannot be paged would wait for a slot, be refused there, and be forgotten: their clients
            # would hear that there never were such sequences.
            elif not model.serves.config.pageable and not await self._goes_on_elsewhere(place):
                await self._end_idle("unload", model, mark="")
        self._changed.set()

    async def _goes_on_elsewhere(self, place: Place) -> bool:
        """Whether another executor has a version, or loads it, and does not unload it as well."""
        members = await insist("unload", self._connections.membership.members)
        others = [one.registration for one in members if one.alive and one.registration.executor != self._executor]
        lines = lines_of(one.repository for one in others)
        return any(
            line.model == place[0] and line.version in (place[1], "") and line.state in ("READY", "LOADING")
            for line in lines
        )

    async def _finish(self, model: Model, last: LastEntries) -> None:
        """Returns when a model has finished everything up to these entries."""
        try:
            async with asyncio.timeout(FINISH_S):
                while await self._has_more(model, last):  # noqa: ASYNC110 - part of it lies in Redis
                    await asyncio.sleep(FINISH_POLL_S)
        except TimeoutError:
            logs.warning("model ends with steps unfinished", model=model.model, seconds=FINISH_S)

    async def _has_more(self, model: Model, last: LastEntries) -> bool:
        if not self._inbox.has_passed(last):
            # An entry that is gone meanwhile is not read again, so the position may stay before it.
            present = await insist("end of a model", self._inbox.last_entries)
            if not self._inbox.has_passed(present):
                return True
        if isinstance(model, SequenceModel):
            return model.state.is_busy
        return await insist("end of a model", model.has_work)

    async def _end(self, model: Model, loop: asyncio.Task[None]) -> None:
        """Ends a model's loops, after its running batches are finished and committed."""
        await self._quiet(model)
        await self._committer.drained()
        loop.cancel()

    async def _quiet(self, model: Model) -> None:
        """Returns when a model's running batches have ended; no other is started afterwards. Those that do not return
        are left behind, and run again by whoever serves them next.
        """
        try:
            async with asyncio.timeout(RETURN_S):
                await model.quiet()
        except TimeoutError:
            logs.error("model ends with a batch that has not returned", model=model.model, seconds=RETURN_S)
            if isinstance(model, WorkModel):
                await model.give_up()

    # -- loops ------------------------------------------------------------------------------------------------------

    async def _claim_work(self) -> None:
        """Takes back stateless requests that executors without a lease hold."""
        works = [model for model in self._models.values() if isinstance(model, WorkModel)]
        groups = grouped(self._connections.commands, works, lambda model: model.queue.takers)
        await together([*map(self._claim_from_dead, groups), self._refuse_unloaded(), self._remove_left_over()])

    async def _claim_from_dead(self, works: Sequence[WorkModel]) -> None:
        takers = await takers_of(self._connections.links, [model.queue for model in works])
        if not any(takers):
            return
        # Read behind the takers: each of them had a lease when it took, and no executor gets a second one.
        members = await self._connections.membership.members()
        alive = {member.registration.executor for member in members if member.alive}
        for model, executors in zip(works, takers, strict=True):
            await model.claim_from(executors - alive)

    async def _remove_left_over(self) -> None:
        """Removes steps that were kept for a replay, of sequences that have ended between two loads of their model: no
        model here knows them, and the scheduler moves nothing on, as they had an owner to the end.
        """
        if not self._has_left_over:
            return
        self._has_left_over = False
        try:
            scripts = self._connections.scripts
            await together([scripts.drain_whole(self._executor, shard=one, alive=True) for one in self._keys.shards])
        except BaseException:
            self._has_left_over = True
            raise

    async def _refuse_unloaded(self) -> None:
        """Answers stateless requests to versions that no executor serves any more, from gateways that had not heard of
        it.

        An executor that served the version can tell so at once, and for the requests of every gateway, dead ones
        included. A gateway can only conclude it from a long absence (`gateway.requests.unserved`).
        """
        since_s = time.monotonic() - REFUSE_S
        self._unloaded = {place: one for place, one in self._unloaded.items() if one[1] > since_s}
        if not self._unloaded:
            return
        members = await self._connections.membership.members()
        living = [member.registration for member in members if member.alive]
        served = {(one.model, one.version) for one in lines_of(registration.models for registration in living)}
        alive = {registration.executor for registration in living}
        loads = [load for place, (load, _) in self._unloaded.items() if place not in served]
        await together([self._refuse(load, {model for model, _ in served}, alive) for load in loads])

    async def _refuse(self, load: ModelLoad, served: AbstractSet[str], alive: AbstractSet[ExecutorId]) -> None:
        others = load.model in served
        reply = unloaded_answer(load.model, load.version, others=others, executor=self._executor)
        links, scripts = self._connections.links, self._connections.scripts
        await refuse_waiting(links, scripts, self._keys, load, reply, alive=alive)

    async def _watch_readiness(self) -> None:
        """Asks models for their readiness every second, and has it announced if it has changed."""
        while True:
            await asyncio.sleep(READINESS_INTERVAL_S)
            checks = [check for model in self._models.values() for check in model.serves.readiness]
            before = [check.is_ready for check in checks]
            await asyncio.gather(*(check.look() for check in checks))
            if before != [check.is_ready for check in checks]:
                self._changed.set()

    def _all(self) -> list[Model]:
        return [*self._models.values(), *(replaced.model for replaced in self._replaced.values())]

    def _versions(self, *, ensembles: bool = False) -> Mapping[Place, ServedVersion]:
        """What the repository holds: the versions that run here, or the ensembles."""
        # A copy, because models are loaded on another thread meanwhile.
        models = list(self._repository.loaded.values())
        versions = (version for model in models for version in model.versions)
        return {
            (version.config.name, version.version): version
            for version in versions
            if bool(version.config.ensemble) == ensembles
        }


def has_place(served: ServedVersion, entry: InboxStep | InboxOwned) -> bool:
    """Whether the version has the instance and slot that an entry names. A number below 0, which no service writes,
    would be another sequence's place.
    """
    return 0 <= entry.instance < len(served.workers) and 0 <= entry.slot < served.slots

"""Runs the stateless requests of one model version: takes batches from its queue, runs them, and answers.

The queue lies in Redis, one for all executors of the model (`shared.store.work_scripts`), so that priorities, policies,
delay and order hold over all of them. An executor takes a batch only when an instance is free to run it. One collector
per model version takes batches for all instances here, one after the other.

The requests of a dead executor go back to their old places once its lease has ended (never because the executor was
merely silent); those of a leaving executor go back at once. So a request may run twice, but it is answered once: only
the executor that holds it answers it. A request with which several executors were lost is answered with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from executor.connections import RedisConnections
from executor.core.batching import Wait
from executor.core.dynamic_batcher import BatchRules
from executor.engine.base import Origin, Row, RowError, RowResult, Timings
from executor.models.custom_batching import StrategyError
from executor.models.served import ServedVersion
from executor.reporting.statistics import together
from executor.stateless.dozing import Dozing
from executor.stateless.work_source import WorkSource
from executor.workers.answers import answer, refusal
from executor.workers.first_batch import POLL_S
from executor.workers.open_rows import Numbered, OpenRow, OpenRows
from executor.workers.worker import EngineWorker
from shared.contract.batch_shape import rows_of
from shared.contract.errors import Code
from shared.contract.ids import ExecutorId
from shared.contract.limits import LOST_EXECUTORS_MAX, OPEN_ROWS_MAX
from shared.contract.messages import UNREADABLE, InferMessage, StepFlag, decode_infer
from shared.contract.response_cache import entry_name
from shared.process import logs
from shared.statistics.tally import FailureReason
from shared.store.reading import value_of
from shared.store.work_scripts import Front, RequestId, Stored, Take, Taken, WorkDone, WorkHeld
from shared.traces.spans import SpanName
from shared.traces.tracing import Tracing


class WorkModel:
    """The stateless requests of one model version on this executor."""

    def __init__(
        self,
        served: ServedVersion,
        *,
        executor: ExecutorId,
        connections: RedisConnections,
        dozing: Dozing,
        tracing: Tracing,
    ) -> None:
        self.serves = served
        self.model = served.config.name
        self.version = served.version
        self.config = served.config
        self._executor = executor
        self._tracing = tracing
        self._answer_bytes_max = connections.value_bytes_max
        self._statistics = served.statistics
        self._rules = BatchRules.of(served.config)
        self._strategy = served.strategy
        self._source = WorkSource(served.statistics.load, executor, connections, dozing)
        self.queue = self._source.queue
        lost = f"{LOST_EXECUTORS_MAX} executors were lost while they ran it"
        text = f"request to model '{self.model}' was given up: {lost}"
        self._given_up = refusal(Code.INTERNAL, text, version=served.version, executor=executor)
        self._open: OpenRows[OpenWork] = OpenRows(self._write, self._request_ended, looks=True)
        self._executed = b""
        self._messages: dict[RequestId, InferMessage] = {}
        self._makes_calls = served.workers[0].makes_calls
        self._idle = deque(served.workers)
        self._freed = asyncio.Event()
        self._running = 0
        self._finished = asyncio.Event()
        self._finished.set()
        # Two guesses that save round trips. Under load the queue is never empty, so an instance that is done pulls at
        # once, in the write that carries its answers (`_looks_first`). The next request of a lone client comes only
        # after its answer, so an instance that is done waits for the queue's wake-up first (`_waits_first`).
        self._looks_first = False
        self._waits_first = False
        # Every instance here has been busy since this executor last waited for the queue.
        self._was_busy = False
        self._first_batch = served.workers[0].first_batch
        self._collector: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Takes and runs batches, for ever."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._source.run(), name=f"{self.model} source")
            group.create_task(self._open.run(), name=f"{self.model} open requests")
            self._collector = group.create_task(self._collect(), name=f"{self.model} collector")

    async def quiet(self) -> None:
        """Returns when no batch is running. No other is started afterwards, and this executor holds no request any
        more.
        """
        if self._collector is None:
            return
        self._collector.cancel()
        await self._finished.wait()
        await self._open.quiet()
        # A take may have been on its way when the collector was cancelled; calls run in order, so this one undoes it.
        await self._source.hand_back()

    async def give_up(self) -> None:
        """Puts the requests back whose batches do not return, as those of a lost executor."""
        await self._source.take_from(self._executor, given_up=self._given_up)

    async def has_work(self) -> bool:
        """Whether a batch runs here, a request is open, or one waits in the queue."""
        if self._running or len(self._open):
            return True
        pulled = await self._source.pull(requests_max=0, rows_max=0, delay_us=0, take=0)
        return pulled.queued > 0

    async def claim_from(self, dead: Iterable[ExecutorId]) -> None:
        """Puts the requests back that executors without a lease hold."""
        for holder in sorted(dead):
            if holder != self._executor:
                requests = await self._source.take_from(holder, given_up=self._given_up)
                logs.info("work of a dead executor put back", model=self.model, holder=holder, requests=requests)

    # -- taking -----------------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        while True:
            if not self._idle:
                self._was_busy = True
                self._freed.clear()
                await self._freed.wait()
            await self._open.below(OPEN_ROWS_MAX)
            taken = await self._take()
            if taken:
                self._start(taken)

    async def _take(self) -> Sequence[tuple[RequestId, bytes]]:
        """Reads the queue once. Returns a batch; or nothing, after waiting for what the queue needs."""
        if self._waits_first:
            self._waits_first = False
            await self._wait()
        rules = self._rules
        pulled = await self._source.pull(
            requests_max=rules.requests_max,
            rows_max=rules.rows_max,
            delay_us=rules.delay_us,
            take=self._takes_at_once(),
        )
        if isinstance(pulled, Taken):
            self._looks_first |= pulled.queued > 0
            return pulled.requests
        if not pulled.front:
            self._looks_first = False
            await self._wait()
            return ()
        # Triton's debug variable holds the first batch back.
        if not self._first_batch.look(pulled.queued):
            await self._wait(POLL_S)
            return ()
        looked = time.monotonic()
        try:
            decision = await self._decide(pulled)
        except StrategyError as error:
            await self._refuse(error)
            return ()
        if not isinstance(decision, Wait):
            return await self._source.take(decision)
        due_s = None if decision.until_us is None else (decision.until_us - pulled.now_us) / 1e6
        await self._wait(None if due_s is None else max(0.0, due_s - (time.monotonic() - looked)))
        return ()

    async def _wait(self, timeout_s: float | None = None) -> None:
        await self._source.wait(timeout_s)
        self._was_busy = False

    def _takes_at_once(self) -> int:
        if self._strategy is not None or not self._first_batch.is_open:
            return Take.NEVER
        return Take.WHEN_LATE if self._rules.preferred else Take.WHEN_PLAIN

    async def _decide(self, look: Front) -> Sequence[RequestId] | Wait:
        """The requests that run now. Raises StrategyError."""
        ids = [seen.id for seen in look.front]
        if self._strategy is None:
            decision = self._rules.decide(
                look.front, now_us=look.now_us, deadline_us=look.deadline_us, was_busy=self._was_busy
            )
        else:
            known = await self._known(ids)
            if lost := [id for id in ids if id not in known]:
                # Another executor has taken it meanwhile: then nothing is taken. Or Redis has lost its message: then it
                # is taken, and answered so.
                return lost[:1]
            decision = await self._strategy.decide(self._rules, look, known, was_busy=self._was_busy)
        return decision if isinstance(decision, Wait) else ids[:decision]

    async def _known(self, ids: Sequence[RequestId]) -> Mapping[RequestId, InferMessage]:
        """The messages of these requests, as far as Redis has them. Raises StrategyError for an unreadable one."""
        known = self._messages
        unknown = [id for id in ids if id not in known]
        for id, data in await self._source.read(unknown) if unknown else ():
            message = self._read(id, data)
            if message is None:
                raise StrategyError(UNREADABLE, id)
            known[id] = message
        self._messages = {id: known[id] for id in ids if id in known}
        return self._messages

    async def _refuse(self, error: StrategyError) -> None:
        """Answers the request that the batch strategy failed on; the others are pulled again."""
        logs.error("batch strategy failed", model=self.model, cause=error.message)
        for id, data in await self._source.take([error.request]):
            message = self._read(id, data)
            arrived_ns = message.arrived_ns if message is not None else time.time_ns()
            await self._source.finish([self._refused(id, error.code, error.message, arrived_ns)])

    def _refused(self, id: RequestId, code: Code, text: str, arrived_ns: int) -> WorkDone:
        counts = self._statistics.refused(FailureReason.OTHER, arrived_ns=arrived_ns, now_ns=time.time_ns())
        return WorkDone(id, refusal(code, text, version=self.version, executor=self._executor), counts)

    def _read(self, id: RequestId, data: bytes) -> InferMessage | None:
        """A request's message; None if it cannot be read."""
        return value_of(self.queue.messages, data, decode_infer, field=id)

    def _read_all(
        self, taken: Sequence[tuple[RequestId, bytes]]
    ) -> tuple[list[tuple[RequestId, InferMessage]], list[WorkDone]]:
        """The requests with their messages, and the answers to those that cannot be read."""
        batch: list[tuple[RequestId, InferMessage]] = []
        unreadable: list[WorkDone] = []
        for id, data in taken:
            message = self._read(id, data)
            if message is not None:
                batch.append((id, message))
            else:
                unreadable.append(self._refused(id, Code.INTERNAL, UNREADABLE, time.time_ns()))
        return batch, unreadable

    # -- running ----------------------------------------------------------------------------------------------------

    def _start(self, taken: Sequence[tuple[RequestId, bytes]]) -> None:
        assert self._group is not None
        worker = self._idle.popleft()
        self._running += 1
        self._finished.clear()
        self._group.create_task(self._run_batch(worker, taken), name=f"{worker.name} batch")

    async def _run_batch(self, worker: EngineWorker, taken: Sequence[tuple[RequestId, bytes]]) -> None:
        batch, unreadable = self._read_all(taken)
        try:
            compute = self._compute_open if self.config.decoupled else self._compute
            done, execution = await compute(worker, batch) if batch else ([], b"")
            done += unreadable
            if not done:
                # All of them are open. The batch's own counts go with the first one that is finished.
                self._executed = together(self._executed, execution)
                self._free(worker)
                return
            looks = self._looks_first
            if looks:
                # The instance is freed before the answers are sent, so that its next pull leaves in the same write.
                self._free(worker)
            finished = await self._source.finish(done, execution)
            if not looks:
                self._looks_first = finished.queued > 0
                # Only if no other instance is free: else the collector waits for the queue already.
                self._waits_first = finished.queued == 0 and not self._idle
                self._free(worker)
            # They were put back meanwhile, usually because this executor's lease had ended.
            if not all(finished.answered):
                requests = finished.answered.count(False)
                logs.warning("answers of another's requests", model=self.model, requests=requests)
        finally:
            self._running -= 1
            if self._running == 0:
                self._finished.set()

    def _free(self, worker: EngineWorker) -> None:
        self._idle.append(worker)
        self._freed.set()

    def _row(self, id: RequestId, message: InferMessage) -> Row:
        return Row(
            inputs={tensor.name: tensor for tensor in message.inputs},
            start=bool(message.flags & StepFlag.START),
            end=bool(message.flags & StepFlag.END),
            correlation_id=message.correlation_id,
            request_id=message.request_id,
            outputs=message.outputs,
            timeout_us=message.timeout_us,
            priority=message.priority,
            parameters=message.parameters,
            # A call that is made again is another request of the queue, but the same call.
            origin=Origin.of(message, message.call or id, time.monotonic_ns() // 1000) if self._makes_calls else None,
        )

    async def _compute(
        self, worker: EngineWorker, batch: Sequence[tuple[RequestId, InferMessage]]
    ) -> tuple[list[WorkDone], bytes]:
        rows = [self._row(id, message) for id, message in batch]
        sizes = [rows_of(self.config, message.inputs) for _, message in batch]
        began_ns = time.time_ns()
        result = await worker.run(rows, [False] * len(rows))
        ended_ns = time.time_ns()
        done: list[WorkDone] = []
        for (id, message), row, size in zip(batch, result.rows, sizes, strict=True):
            assert row is not None, "only null rows have no result"
            if isinstance(row, RowResult) and row.late is not None:
                opened = self._open.open(OpenWork(id, message), None)
                self._open.conclude(opened, (began_ns, result.timings))
                row.late.give(opened)
                continue
            counts = self._statistics.answered(
                row,
                rows=size,
                arrived_ns=message.arrived_ns,
                began_ns=began_ns,
                ended_ns=ended_ns,
                timings=result.timings,
            )
            reply = answer(row, version=self.version, executor=self._executor, bytes_max=self._answer_bytes_max)
            done.append(WorkDone(id, reply, counts, None if isinstance(row, RowError) else self._stored(message)))
        return done, self._ran(batch, sum(sizes), result.timings, began_ns, ended_ns)

    # -- open requests ------------------------------------------------------------------------------------------------

    async def _compute_open(
        self, worker: EngineWorker, batch: Sequence[tuple[RequestId, InferMessage]]
    ) -> tuple[list[WorkDone], bytes]:
        """Runs a batch of a decoupled model. Its requests are finished later, each with its last answer."""
        encode = partial(
            answer, version=self.version, executor=self._executor, bytes_max=self._answer_bytes_max, more=True
        )
        opened = [self._open.open(OpenWork(id, message), encode) for id, message in batch]
        rows = [msgspec.structs.replace(self._row(one.key.id, one.key.message), answers=one) for one in opened]
        began_ns = time.time_ns()
        result = await worker.run(rows, [False] * len(rows))
        ended_ns = time.time_ns()
        for one, row in zip(opened, result.rows, strict=True):
            assert row is not None, "only null rows have no result"
            # A backend without response senders gives the only answer at once.
            only = None if isinstance(row, RowResult) and row.open else row
            self._open.conclude(one, (began_ns, result.timings), last=only)
        size = sum(rows_of(self.config, message.inputs) for _, message in batch)
        return [], self._ran(batch, size, result.timings, began_ns, ended_ns)

    async def _write(self, requests: Sequence[tuple[OpenWork, Sequence[Numbered]]]) -> Sequence[WorkHeld]:
        return await self._source.answers([(work.id, answers) for work, answers in requests])

    def _request_ended(self, opened: OpenRow[OpenWork]) -> None:
        """A request has its last answer, and all answers before it are written."""
        began_ns, timings = opened.finished
        last, message = opened.last, opened.key.message
        assert last is not None, "it has a last answer"
        counts = self._statistics.answered(
            last,
            rows=rows_of(self.config, message.inputs),
            arrived_ns=message.arrived_ns,
            began_ns=began_ns,
            ended_ns=time.time_ns(),
            timings=timings,
            responses=opened.responses,
        )
        reply = answer(last, version=self.version, executor=self._executor, bytes_max=self._answer_bytes_max)
        execution, self._executed = self._executed, b""
        stored = None if isinstance(last, RowError) else self._stored(message)
        self._source.finish([WorkDone(opened.key.id, reply, counts, stored)], execution)

    def _stored(self, message: InferMessage) -> Stored | None:
        """Where the answer goes in the response cache: its name tells the files that computed it, not those the gateway
        knew of.
        """
        scope = self.serves.cache_scope
        if not message.cache_key or not scope:
            return None
        return Stored(entry_name(scope, self._statistics.load.generation, message.cache_key), message.cache_bytes)

    def _ran(
        self,
        requests: Sequence[tuple[RequestId, InferMessage]],
        rows: int,
        timings: Timings,
        began_ns: int,
        ended_ns: int,
    ) -> bytes:
        """Measures a batch and its requests, and records those that are traced. Returns the batch's own counts."""
        self._statistics.requests.batch(rows)
        self._statistics.requests.computed(len(requests), began_ns, ended_ns)
        for _, message in requests:
            self._statistics.requests.ran(message.arrived_ns, 0, began_ns, ended_ns, message.traceparent)
        traced = [message for _, message in requests if message.traceparent]
        parents, size = [message.traceparent for message in traced], len(requests)
        batch = self._tracing.record_batch(parents, began_ns, ended_ns, batch_size=size, model=self.model)
        for message in traced:
            self._tracing.record(message.traceparent, SpanName.QUEUE, message.arrived_ns, began_ns)
            self._tracing.record(message.traceparent, SpanName.COMPUTE, began_ns, ended_ns, [batch], batch_size=size)
        return self._statistics.execution(batch_size=rows, timings=timings, ended_ns=ended_ns)


class OpenWork(msgspec.Struct, frozen=True, eq=False):
    """A request that was taken from the queue, and is not answered yet."""

    id: RequestId
    message: InferMessage

"""Runs the stateless requests of one model version: pulls them from the work streams, batches, answers.

Executors of a model share its work as a consumer group; each takes no more than it can run soon, so that none hoards.
What a dead executor had taken is claimed by the others once its lease has ended (never because it was merely silent).
A request may therefore run twice, but it is answered once: `finish` answers only for the one that holds it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from executor.answers import answer, refusal
from executor.clock import monotonic_us
from executor.core.batching import ShapeKeys, Wait, decide_queue
from executor.core.work_queue import QueuedRequest, WorkQueue, deadline_us, effective_level, policy_of
from executor.engine.base import Row
from executor.repository import ServedVersion
from executor.statistics import ModelStatistics
from executor.worker import EngineWorker
from shared import logs
from shared.errors import Code
from shared.ids import ExecutorId
from shared.keyspace import Keyspace
from shared.messages import InferMessage, decode_infer
from shared.model_config.values import DynamicBatching, ModelConfig
from shared.redis_client import CONNECTION_LOST
from shared.scripts import Scripts, WorkDone
from shared.tally import Reason
from shared.tracing import SpanName, Tracing

GROUP = "executors"
BATCHES_AHEAD = 2
"""Batches' worth of requests that an executor takes ahead of each instance: one runs, one is ready."""
READ_BLOCK_MS = 1000
RETRY_DELAY_S = 0.2
CLAIM_COUNT = 128
CLAIM_IDLE_MS = 500
"""Two executors may see the same dead consumer at once: what one has just claimed is not idle for the other."""


class WorkModel:
    """The stateless requests of one model version on this executor."""

    def __init__(
        self,
        served: ServedVersion,
        *,
        executor: ExecutorId,
        redis: Redis,
        blocking: Redis,
        scripts: Scripts,
        keys: Keyspace,
        tracing: Tracing,
    ) -> None:
        self.serves = served
        self.model = served.config.name
        self.version = served.version
        self.config = served.config
        self.statistics: ModelStatistics = served.statistics
        self._workers = served.workers
        self._executor = executor
        self._redis = cast(Any, redis)
        self._blocking = cast(Any, blocking)
        self._scripts = scripts
        self._shard = keys.home_shard(self.model)
        self._tracing = tracing
        # Without dynamic batching every request runs alone (Triton's default scheduler).
        self._batching = served.config.dynamic_batching or DynamicBatching()
        self._max_batch_size = served.config.max_batch_size if served.config.dynamic_batching else 0
        self._queue = WorkQueue(self._batching)
        self._shape_keys = ShapeKeys(self.config)
        levels = range(1, self._batching.priority_levels + 1) if self._batching.priority_levels else range(1)
        self._streams = {keys.work(self.model, self.version, level): level for level in levels}
        # Entries that this executor holds: pending in Redis, and queued or running here.
        self._held: set[str] = set()
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._stopping = False
        self._running = 0
        self._finished = asyncio.Event()
        self._finished.set()

    async def prepare(self) -> None:
        """Creates the consumer groups; has to be done before the model is announced."""
        for stream in self._streams:
            try:
                await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    async def run(self) -> None:
        """Pulls and runs, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pull(), name=f"{self.model} work")
            for worker in self._workers:
                group.create_task(self._run_instance(worker), name=f"{worker.name} loop")

    async def quiet(self) -> None:
        """Returns when no batch is running; nothing new is started afterwards. What was pulled but not run goes to
        another executor by its claim."""
        self._stopping = True
        await self._finished.wait()

    async def claim_from_others(self, alive: AbstractSet[str]) -> None:
        """Takes over requests that executors without a lease had pulled."""
        for stream, level in self._streams.items():
            consumers = await self._redis.xinfo_consumers(stream, GROUP)
            for consumer in consumers:
                name = consumer["name"].decode()
                if name not in alive and name != self._executor:
                    await self._claim(stream, level, name, consumer["pending"])

    async def _claim(self, stream: str, level: int, consumer: str, pending: int) -> None:
        if pending == 0:
            await self._redis.xgroup_delconsumer(stream, GROUP, consumer)
            return
        entries = await self._redis.xpending_range(stream, GROUP, "-", "+", CLAIM_COUNT, consumername=consumer)
        ids = [entry["message_id"] for entry in entries]
        claimed = await self._redis.xclaim(stream, GROUP, self._executor, CLAIM_IDLE_MS, ids)
        if claimed:
            logs.info("work claimed", model=self.model, consumer=consumer, requests=len(claimed))
        self._add(stream, level, claimed)

    async def _pull(self) -> None:
        # ">" reads what nobody has taken; "0" what was given to this executor already: in a reply that never arrived,
        # or before the model was reloaded.
        position = "0"
        while True:
            room = self._room()
            if room <= 0:
                self._taken.clear()
                await self._taken.wait()
                continue
            try:
                read = await self._blocking.xreadgroup(
                    GROUP, self._executor, dict.fromkeys(self._streams, position), count=room, block=READ_BLOCK_MS
                )
                position = ">"
            except CONNECTION_LOST as error:
                logs.warning("work reading delayed", model=self.model, cause=str(error))
                position = "0"
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            except ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                # Redis came back empty: nothing that was accepted is left, but new work must not be refused.
                await self.prepare()
                continue
            for stream, entries in read or ():
                self._add(stream.decode(), self._streams[stream.decode()], entries)

    def _room(self) -> int:
        return BATCHES_AHEAD * len(self._workers) * max(1, self._max_batch_size) - self._queue.rows

    def _add(self, stream: str, level: int, entries: Sequence[tuple[bytes, dict[bytes, bytes] | None]]) -> None:
        now_us = monotonic_us()
        for entry, fields in entries:
            if not fields or entry.decode() in self._held:
                continue
            self._held.add(entry.decode())
            message = decode_infer(fields[b"m"])
            level = effective_level(self._batching, message.priority)
            policy = policy_of(self._batching, level)
            queued_us = now_us - max(0, time.time_ns() - message.arrived_ns) // 1000 if message.arrived_ns else now_us
            self._queue.add(
                QueuedRequest(
                    stream=stream,
                    entry=entry.decode(),
                    gateway=fields[b"g"].decode(),
                    token=fields[b"t"].decode(),
                    message=message,
                    queued_us=queued_us,
                    shape_key=self._shape_keys.of(message.inputs),
                    rows=rows_of(self.config, message),
                    deadline_us=deadline_us(policy, timeout_us=message.timeout_us, queued_us=queued_us),
                ),
                level,
            )
        self._arrived.set()

    async def _run_instance(self, worker: EngineWorker) -> None:
        while True:
            decision = await self._decide()
            if isinstance(decision, Wait):
                await self._sleep(decision)
                continue
            batch = self._queue.take(decision)
            self._taken.set()
            self._running += 1
            self._finished.clear()
            try:
                await self._run_batch(worker, batch)
            finally:
                self._running -= 1
                if self._running == 0:
                    self._finished.set()

    async def _decide(self) -> int | Wait:
        if self._stopping:
            return Wait()
        now_us = monotonic_us()
        rejected = self._queue.expire(now_us)
        if rejected:
            await self._reject(rejected)
        decision = decide_queue(
            list(self._queue),
            max_batch_size=self._max_batch_size,
            preferred=self._batching.preferred_batch_sizes,
            max_queue_delay_us=self._batching.max_queue_delay_us,
            now_us=now_us,
        )
        if isinstance(decision, Wait):
            due = [us for us in (decision.until_us, self._queue.next_deadline_us()) if us is not None]
            return Wait(min(due, default=None))
        return decision

    async def _sleep(self, wait: Wait) -> None:
        self._arrived.clear()
        delay_s = None if wait.until_us is None else max(0, wait.until_us - monotonic_us()) / 1e6
        try:
            async with asyncio.timeout(delay_s):
                await self._arrived.wait()
        except TimeoutError:
            return

    async def _reject(self, rejected: Sequence[QueuedRequest]) -> None:
        reply = refusal(Code.UNAVAILABLE, "Request timeout expired", version=self.version, executor=self._executor)
        now_ns = time.time_ns()
        await self._finish(
            [
                _done(
                    request,
                    reply,
                    self.statistics.refused(Reason.REJECTED, arrived_ns=request.message.arrived_ns, now_ns=now_ns),
                )
                for request in rejected
            ]
        )

    async def _run_batch(self, worker: EngineWorker, batch: Sequence[QueuedRequest]) -> None:
        rows = [self._row(request.message) for request in batch]
        began_ns = time.time_ns()
        result = await worker.run(rows, [False] * len(rows))
        ended_ns = time.time_ns()
        batch_size = sum(request.rows for request in batch)
        execution = self.statistics.execution(batch_size=batch_size, timings=result.timings, ended_ns=ended_ns)
        answers: list[WorkDone] = []
        for request, row in zip(batch, result.rows, strict=True):
            assert row is not None, "only null rows have no result"
            counts = self.statistics.answered(
                row,
                rows=request.rows,
                arrived_ns=request.message.arrived_ns,
                began_ns=began_ns,
                ended_ns=ended_ns,
                timings=result.timings,
            )
            reply = answer(row, version=self.version, executor=self._executor)
            answers.append(_done(request, reply, counts, b"" if answers else execution))
            if request.message.traceparent:
                parent = request.message.traceparent
                self._tracing.record(parent, SpanName.QUEUE, request.message.arrived_ns, began_ns)
                self._tracing.record(parent, SpanName.COMPUTE, began_ns, ended_ns, batch_size=len(batch))
        await self._finish(answers)

    async def _finish(self, done: Sequence[WorkDone]) -> None:
        load = self.statistics.load
        while True:
            try:
                await self._scripts.run(
                    self._scripts.finish(done, shard=self._shard, group=GROUP, consumer=self._executor, load=load)
                )
            except CONNECTION_LOST as error:
                # Repeating is safe: what was answered is not pending any more.
                logs.warning("answers delayed", model=self.model, requests=len(done), cause=str(error))
                await asyncio.sleep(RETRY_DELAY_S)
            else:
                self._held.difference_update(item.entry for item in done)
                return

    def _row(self, message: InferMessage) -> Row:
        return Row(
            inputs={tensor.name: tensor for tensor in message.inputs},
            correlation_id=message.correlation_id,
            request_id=message.request_id,
            outputs=message.outputs,
            timeout_us=message.timeout_us,
            priority=message.priority,
            parameters=message.parameters,
        )


def _done(request: QueuedRequest, reply: bytes, counts: bytes, execution: bytes = b"") -> WorkDone:
    return WorkDone(request.stream, request.entry, request.gateway, request.token, reply, counts, execution)


def rows_of(config: ModelConfig, message: InferMessage) -> int:
    """The batch size that a request brings of its own."""
    if config.max_batch_size == 0 or not message.inputs:
        return 1
    return message.inputs[0].shape[0]

"""Sends admitted requests to Redis: everything that gathered during one round trip goes with the next.

One round trip is outstanding at a time, and each carries at most one `submit` and one `enqueue` per shard, so that the
steps of a sequence are accepted in the order in which they were given to `send`, whatever becomes of a connection or
of the server's script cache.

A connection that breaks while a round trip is out leaves its outcome unknown. Requests that the mesh can tell from a
first attempt are sent again, in their place before everything newer; the others fail and say so.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.backoff import FullJitterBackoff
from redis.exceptions import ReadOnlyError

from gateway.admission import with_id
from gateway.refusals import refusal
from gateway.replies import Replies, unknown_outcome
from gateway.waiting import Waiting
from shared import logs
from shared.errors import UnavailableError
from shared.ids import GatewayId, ShardId
from shared.keyspace import Keyspace
from shared.limits import SCRIPT_BYTES_MAX, SCRIPT_STEPS_MAX
from shared.link import Link
from shared.messages import encode
from shared.redis_client import BACKOFF_BASE_S, BACKOFF_CAP_S, CONNECTION_LOST
from shared.scripts import Call, Scripts, Submission, SubmitCode, Submitted
from shared.work_scripts import WorkItem, WorkScripts

PATIENCE_S = 10.0
"""How long requests wait for Redis to come back (its restart takes about that), before they are told to try later."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may wait in Redis; beyond it callers are refused.

    in_flight_max  accepted, unanswered steps of one sequence
    backlog_max    sequences of one model and shard that wait for a slot; stateless requests in one work stream
    """

    in_flight_max: int
    backlog_max: int


@dataclass(frozen=True, slots=True)
class Load:
    """What one script call carries: steps of one shard, or stateless requests of one."""

    shard: ShardId
    steps: bool
    waiting: list[Waiting]


class Dispatch:
    """The queue before Redis and the task that empties it."""

    def __init__(
        self, redis: Redis, scripts: Scripts, keys: Keyspace, replies: Replies, gateway: GatewayId, bounds: Bounds
    ) -> None:
        self._scripts = scripts
        self._link = Link(redis)
        self._stateless = WorkScripts(keys)
        self._replies = replies
        self._gateway = gateway
        self._bounds = bounds
        self._queues: dict[tuple[ShardId, bool], deque[Waiting]] = {
            (shard, steps): deque() for shard in keys.shard_ids() for steps in (True, False)
        }
        self._work = asyncio.Event()
        self._down_since: float | None = None
        self.round_trips = 0
        self.sent = 0

    def send(self, waiting: Waiting) -> None:
        """Queues a request for the next round trip."""
        self._queues[waiting.shard, waiting.admitted.sequence is not None].append(waiting)
        self._work.set()

    async def run(self) -> None:
        """Sends until it is cancelled."""
        try:
            while True:
                await self._work.wait()
                loads = self._take()
                if loads:
                    await self._deliver(loads)
        finally:
            await self._link.close()

    def _take(self) -> list[Load]:
        """The next round trip's requests; callers who have left meanwhile are left out."""
        loads: list[Load] = []
        left = False
        for (shard, steps), queue in self._queues.items():
            taken: list[Waiting] = []
            size = 0
            while queue and len(taken) < SCRIPT_STEPS_MAX and size < SCRIPT_BYTES_MAX:
                waiting = queue.popleft()
                if not waiting.future.done():
                    taken.append(waiting)
                    size += sum(len(tensor.raw) for tensor in waiting.call.inputs)
            left = left or bool(queue)
            if taken:
                loads.append(Load(shard, steps, taken))
        if not left:
            self._work.clear()
        return loads

    async def _deliver(self, loads: Sequence[Load]) -> None:
        """Sends until every request was accepted, refused or given up."""
        backoff = FullJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S)
        failures = 0
        while loads:
            try:
                await self._link.connect()
            except CONNECTION_LOST as lost:
                # Nothing was sent, so everything may be tried again.
                loads = self._after_failure(loads, lost)
            else:
                loads = await self._attempt(loads)
                if not loads:
                    self._back()
            if loads:
                failures += 1
                await asyncio.sleep(backoff.compute(failures))

    async def _attempt(self, loads: Sequence[Load]) -> Sequence[Load]:
        """One round trip; returns what must be sent again."""
        try:
            outcomes = await self._scripts.run_all([self._call(load) for load in loads], self._link)
        except CONNECTION_LOST as lost:
            for load in loads:
                for waiting in load.waiting:
                    if not waiting.repeatable:
                        waiting.failed(unknown_outcome(waiting, "the connection to Redis was lost"))
            return self._after_failure(loads, lost)
        self.round_trips += 1
        again: list[Load] = []
        for load, outcome in zip(loads, outcomes, strict=True):
            self.sent += len(load.waiting)
            if isinstance(outcome, ReadOnlyError):
                # A primary that was demoted: nothing was done, and the next connection finds the new primary.
                await self._link.close()
                again.append(load)
            elif isinstance(outcome, Exception):
                logs.error("redis refused a script", error=str(outcome))
                _fail(load, f"Redis refused the request: {outcome}")
            else:
                self._settle(load, outcome)
        return again

    def _settle(self, load: Load, outcomes: Sequence[Any]) -> None:
        for waiting, outcome in zip(load.waiting, outcomes, strict=True):
            if load.steps:
                self._settle_step(waiting, outcome)
            elif outcome:
                waiting.span.accepted(0)
            else:
                waiting.failed(UnavailableError(with_id(waiting.call.request_id, "Exceeds maximum queue size")))

    def _settle_step(self, waiting: Waiting, outcome: Submitted) -> None:
        if outcome.code < 0:
            waiting.failed(refusal(waiting, outcome))
            return
        repeated = outcome.code in (SubmitCode.REPEATED, SubmitCode.JOINED)
        waiting.span.accepted(outcome.step, repeated=repeated)
        if outcome.code is SubmitCode.REPEATED:
            self._replies.deliver(waiting.token.encode(), outcome.extra)

    def _after_failure(self, loads: Sequence[Load], lost: BaseException) -> Sequence[Load]:
        """What is still worth sending again; nothing when Redis has been away for too long."""
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
            logs.warning("redis lost, requests wait", error=str(lost))
        waiting_loads = [
            Load(load.shard, load.steps, waiting)
            for load in loads
            if (waiting := [waiting for waiting in load.waiting if not waiting.future.done()])
        ]
        if now - self._down_since < PATIENCE_S:
            return waiting_loads
        for load in waiting_loads:
            _fail(load, "Redis, which holds every sequence, cannot be reached: try again later")
        return ()

    def _back(self) -> None:
        if self._down_since is not None:
            logs.info("redis is back", away_s=round(time.monotonic() - self._down_since, 3))
            self._down_since = None

    def _call(self, load: Load) -> Call[Any]:
        if load.steps:
            return self._scripts.submit(
                [self._submission(waiting) for waiting in load.waiting],
                shard=load.shard,
                backlog_max=self._bounds.backlog_max,
                in_flight_max=self._bounds.in_flight_max,
            )
        return self._stateless.enqueue(
            [self._item(waiting) for waiting in load.waiting], bound=self._bounds.backlog_max
        )

    def _submission(self, waiting: Waiting) -> Submission:
        message, call = waiting.admitted.message, waiting.call
        assert waiting.admitted.sequence is not None
        return Submission(
            sequence=waiting.admitted.sequence,
            flags=waiting.admitted.flags,
            request_id=call.request_id,
            expected_step=call.expected_step,
            model=message.model,
            version=message.version,
            gateway=self._gateway,
            token=waiting.token,
            timeout_us=0 if waiting.admitted.served_late else call.timeout_us,
            message=encode(message),
        )

    def _item(self, waiting: Waiting) -> WorkItem:
        message, queueing = waiting.admitted.message, waiting.admitted.queueing
        return WorkItem(
            message.model,
            message.version,
            self._gateway,
            waiting.token,
            encode(message),
            level=queueing.level,
            level_bound=queueing.level_bound,
            timeout_us=queueing.timeout_us,
            delays=queueing.delays,
            rows=queueing.rows,
            shape=queueing.shape,
            ordered=queueing.ordered,
        )


def _fail(load: Load, message: str) -> None:
    for waiting in load.waiting:
        waiting.failed(UnavailableError(message))

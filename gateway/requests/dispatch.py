"""Sends admitted requests to Redis: everything that gathered during one round trip goes with the next.

One round trip is outstanding at a time, and each carries at most one `submit` and one `enqueue` per shard, so that the
steps of a sequence are accepted in the order in which they were given to `send`, whatever becomes of a connection or
of the server's script cache.

A connection that breaks while a round trip is out leaves its outcome unknown. Requests that the mesh can tell from a
first attempt are sent again, in their place before everything newer; the others fail and say so. A step that is sent
again says since when it has been on its way: if other steps of its sequence came in meanwhile, its own trace may be
gone, and it is refused instead of being run twice.

Requests whose callers have left are withdrawn in the same way, after what was to be sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.backoff import FullJitterBackoff
from redis.exceptions import OutOfMemoryError

from gateway.requests.admission import with_id
from gateway.requests.refusals import refusal
from gateway.requests.replies import Replies, unknown_outcome
from gateway.requests.response_cache import lookup_of
from gateway.requests.waiting import Accepted, PendingRequest
from shared.contract.errors import Code, Reason, UnavailableError
from shared.contract.ids import GatewayId, SequenceId, ShardId
from shared.contract.limits import LIVE_MAX, SCRIPT_BYTES_MAX, SCRIPT_STEPS_MAX
from shared.contract.messages import ReplyMessage, encode
from shared.contract.record import ACCEPTED, BIRTH
from shared.contract.step_digest import step_digest
from shared.process import logs
from shared.statistics.tally import ModelLoad
from shared.store.keyspace import Keyspace
from shared.store.link import Link
from shared.store.reading import text_of, value_of
from shared.store.redis_client import BACKOFF_BASE_S, BACKOFF_CAP_S, CONNECTION_LOST, UnfitServerError
from shared.store.scripts import Call, Scripts, Submission, SubmitCode, Submitted
from shared.store.scripts import Cancellation as CancelledStep
from shared.store.work_scripts import WorkItem, WorkScripts

PATIENCE_S = 10.0
"""How long requests wait for Redis to come back (its restart takes about that), before they are told to try later."""
LATE_PATIENCE_S = 2.0
"""How long the answer may still come to a step that was sent again too late to be recognised."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may wait in Redis; beyond it callers are refused.

    in_flight_max  accepted, unanswered steps of one sequence
    backlog_max    sequences of one model and shard that wait for their first slot; requests in one work stream
    live_max       sequences of one model and shard that have had a slot, and are not over
    """

    in_flight_max: int
    backlog_max: int
    live_max: int = LIVE_MAX


class CallKind(IntEnum):
    """What a script call is about. WITHDRAW_..: of callers who have left."""

    STEPS = auto()
    WORK = auto()
    WITHDRAW_STEPS = auto()
    WITHDRAW_WORK = auto()


WITHDRAWALS = {CallKind.STEPS: CallKind.WITHDRAW_STEPS, CallKind.WORK: CallKind.WITHDRAW_WORK}
CANCELLED = encode(ReplyMessage("", error_code=Code.CANCELLED))
"""Triton has no message for it (triton-spec 1.8)."""
CANCELLED_STEP = encode(ReplyMessage("", error_code=Code.CANCELLED, reason=Reason.CANCELLED))


class CallBatch(msgspec.Struct, frozen=True):
    """What one script call carries: requests of one kind and shard, of withdrawals also of one load of a model."""

    shard: ShardId
    kind: CallKind
    waiting: list[PendingRequest]


class Dispatch:
    """The queue before Redis and the task that empties it. summaries: whether cache lookups count for them."""

    def __init__(
        self,
        redis: Redis,
        scripts: Scripts,
        keys: Keyspace,
        replies: Replies,
        gateway: GatewayId,
        bounds: Bounds,
        *,
        summaries: bool = False,
    ) -> None:
        self._scripts = scripts
        self._keys = keys
        self._link = Link(redis)
        self._stateless = WorkScripts(keys)
        self._replies = replies
        self._gateway = gateway
        self._bounds = bounds
        self._summaries = summaries
        self._queues: dict[tuple[ShardId, CallKind], deque[PendingRequest]] = {
            (shard, kind): deque() for shard in keys.shard_ids() for kind in CallKind
        }
        self._left = dict.fromkeys(self._queues, 0)
        self._work = asyncio.Event()
        self._down_since: float | None = None
        self._full_since: float | None = None
        self._redis_ahead_ms = 0.0
        self._backoff = FullJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S)
        self.round_trips = 0
        self.sent = 0

    def send(self, waiting: PendingRequest) -> None:
        """Queues a request for the next round trip."""
        self._queues[waiting.shard, kind_of(waiting)].append(waiting)
        self._work.set()

    @property
    def queued(self) -> int:
        """Requests that have not been sent yet."""
        return sum(map(len, self._queues.values()))

    def forget(self, waiting: PendingRequest) -> None:
        """A request's future has ended before it was accepted: if it was not sent, it never will be.

        While Redis is away such ones may be many. They go when they are as many as the others: each costs the same.
        """
        place = waiting.shard, kind_of(waiting)
        queue = self._queues[place]
        self._left[place] += 1
        if 2 * self._left[place] >= len(queue):
            self._left[place] = 0
            wanted = [one for one in queue if not one.future.done()]
            queue.clear()
            queue.extend(wanted)

    def withdraw(self, waiting: PendingRequest) -> None:
        """Gives an accepted request up, with the next round trip."""
        self._queues[waiting.shard, WITHDRAWALS[kind_of(waiting)]].append(waiting)
        self._work.set()

    async def run(self) -> None:
        """Sends until it is cancelled."""
        try:
            while True:
                await self._work.wait()
                batches = self._take()
                if batches:
                    await self._deliver(batches)
        finally:
            await self._link.close()

    def _take(self) -> list[CallBatch]:
        """The next round trip's requests; callers who have left meanwhile are left out."""
        batches: list[CallBatch] = []
        left = False
        for (shard, kind), queue in self._queues.items():
            if not queue:
                continue
            taken = _take_unsent(queue) if kind in WITHDRAWALS else _take_of_one_load(queue)
            left = left or bool(queue)
            if taken:
                batches.append(CallBatch(shard, kind, taken))
        if not left:
            self._work.clear()
        return batches

    async def _deliver(self, batches: Sequence[CallBatch]) -> None:
        """Sends until every request was accepted, refused or given up."""
        failures = 0
        while batches:
            try:
                await self._link.connect()
            except CONNECTION_LOST as lost:
                # Nothing was sent, so everything may be tried again.
                batches = self._after_failure(batches, lost)
            else:
                batches = await self._attempt(batches)
            if batches:
                failures += 1
                await asyncio.sleep(self._backoff.compute(failures))

    async def _attempt(self, batches: Sequence[CallBatch]) -> Sequence[CallBatch]:
        """One round trip; returns what must be sent again."""
        began = time.monotonic()
        try:
            if self._down_since is not None:
                await self._learn_the_time(batches, self._link)
                began = time.monotonic()
            outcomes = await self._scripts.run_all([self._call(batch) for batch in batches], self._link)
        except CONNECTION_LOST as lost:
            for batch in batches:
                for waiting in batch.waiting:
                    if waiting.first_sent is None:
                        waiting.first_sent = began
                    if not waiting.repeatable:
                        waiting.failed(unknown_outcome(waiting, "the connection to Redis was lost"))
            return self._after_failure(batches, lost)
        self.round_trips += 1
        again: list[CallBatch] = []
        unfit: UnfitServerError | None = None
        for batch, outcome in zip(batches, outcomes, strict=True):
            self.sent += len(batch.waiting)
            for waiting in batch.waiting:
                waiting.sent = began
            if isinstance(outcome, UnfitServerError):
                # For instance a primary that was demoted: nothing was done, and the next connection finds the new one.
                unfit = outcome
                again.append(batch)
            elif isinstance(outcome, Exception):
                self._refused(batch, outcome)
            else:
                self._settle(batch, outcome)
        if unfit is not None:
            return self._after_failure(again, unfit)
        self._back()
        return again

    async def ask_again(self, redis: Redis, lost: Collection[ShardId]) -> None:
        """Makes sure that a server which was restarted, and may hold older data, still owes every accepted request its
        answer; for before anything else is sent there.

        What can be recognised is sent again, in its order: it is known, or accepted once more. Of other steps the
        record is asked; their callers are told when they are not there.
        lost    shards whose replies may be gone
        raises  one of CONNECTION_LOST: then all of it is to be done again
        """
        waiting = [one for one in self._replies.waiting if one.accepted is not None and not one.withdrawn]
        link = Link(redis)
        try:
            await link.connect()
            await self._send_again([one for one in waiting if one.repeatable], link)
            await self._tell_forgotten([one for one in waiting if not one.repeatable], lost, link)
        finally:
            await link.close()

    async def _send_again(self, waiting: Sequence[PendingRequest], link: Link) -> None:
        queues: dict[tuple[ShardId, CallKind], deque[PendingRequest]] = {}
        for one in waiting:
            if one.first_sent is None:
                one.first_sent = one.sent
            queues.setdefault((one.shard, kind_of(one)), deque()).append(one)
        while queues:
            batches = [CallBatch(*place, taken) for place, queue in queues.items() if (taken := _take_unsent(queue))]
            await self._learn_the_time(batches, link)
            outcomes = await self._scripts.run_all([self._call(batch) for batch in batches], link)
            for batch, outcome in zip(batches, outcomes, strict=True):
                if isinstance(outcome, UnfitServerError):
                    raise outcome
                if isinstance(outcome, Exception):
                    self._refused(batch, outcome)
                else:
                    self._settle(batch, outcome)
            queues = {place: queue for place, queue in queues.items() if queue}

    async def _tell_forgotten(self, waiting: Sequence[PendingRequest], lost: Collection[ShardId], link: Link) -> None:
        asked = [("HMGET", self._keys.sequence(sequence_of(one)).record, BIRTH, ACCEPTED) for one in waiting]
        for one, record in zip(waiting, await link.exchange(asked) if asked else (), strict=True):
            if isinstance(record, Exception):
                raise record
            assert one.accepted is not None
            birth, newest = record
            step: int | None = value_of(self._keys.sequence(sequence_of(one)).record, newest or b"0", int)
            known = text_of(birth or b"") == one.accepted.birth and step is not None and step >= one.accepted.step
            if not known or one.shard in lost:
                one.failed(unknown_outcome(one, "Redis was restarted and has lost data"))

    def _refused(self, batch: CallBatch, refusal: Exception) -> None:
        """Redis is there and does not do it. That it is full is no news with every request."""
        if not isinstance(refusal, OutOfMemoryError):
            logs.error("redis refused a script", error=str(refusal))
            _fail(batch, f"Redis refused the request: {refusal}")
            return
        if self._full_since is None:
            self._full_since = time.monotonic()
            logs.error("redis is full, new requests are refused: raise its maxmemory", error=str(refusal))
        _fail(batch, "Redis, which holds every sequence, is full: try again later")

    def _settle(self, batch: CallBatch, outcomes: Sequence[Any]) -> None:
        if batch.kind not in WITHDRAWALS:
            return
        if self._full_since is not None:
            logs.info("redis has room again", full_s=round(time.monotonic() - self._full_since, 3))
            self._full_since = None
        for waiting, outcome in zip(batch.waiting, outcomes, strict=True):
            if batch.kind is CallKind.STEPS:
                self._settle_step(waiting, outcome)
            elif isinstance(outcome, bytes):
                waiting.span.accepted(0)
                self._replies.deliver(waiting.token.encode(), outcome, self._keys.cache(waiting.shard).entries)
            elif outcome:
                waiting.span.accepted(0)
                self._accepted(waiting, Accepted())
            else:
                waiting.failed(UnavailableError(with_id(waiting.call.request_id, "Exceeds maximum queue size")))

    def _settle_step(self, waiting: PendingRequest, outcome: Submitted) -> None:
        if outcome.code is SubmitCode.LATE:
            # If its first attempt was answered, the answer is about to be read, on another connection.
            asyncio.get_running_loop().call_later(LATE_PATIENCE_S, waiting.failed, refusal(waiting, outcome))
            return
        if outcome.code < 0:
            waiting.failed(refusal(waiting, outcome))
            return
        if waiting.user is not None:
            waiting.user.used(waiting)
        repeated = outcome.code in (SubmitCode.REPEATED, SubmitCode.JOINED)
        waiting.span.accepted(outcome.step, repeated=repeated)
        if outcome.code is SubmitCode.REPEATED:
            record = self._keys.sequence(sequence_of(waiting)).record
            self._replies.deliver(waiting.token.encode(), outcome.extra, record)
        else:
            self._accepted(waiting, Accepted(text_of(outcome.extra), outcome.step))

    def _accepted(self, waiting: PendingRequest, place: Accepted) -> None:
        waiting.accepted = place
        if waiting.withdrawn:
            self.withdraw(waiting)

    async def _learn_the_time(self, batches: Sequence[CallBatch], link: Link) -> None:
        """The clock of Redis against this process's, when something is sent again. It was read a moment ago, so a time
        that is reckoned by it is rather too early than too late: what came in since then is not overlooked."""
        if any(waiting.first_sent is not None for batch in batches for waiting in batch.waiting):
            ((seconds, microseconds),) = await link.exchange([("TIME",)])
            self._redis_ahead_ms = int(seconds) * 1000 + int(microseconds) // 1000 - time.monotonic() * 1000

    def _after_failure(self, batches: Sequence[CallBatch], lost: BaseException) -> Sequence[CallBatch]:
        """What is still worth sending again; nothing when Redis has been away for too long."""
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
            logs.warning("redis lost, requests wait", error=str(lost))
        wanted = [(batch, self._still_wanted(batch)) for batch in batches]
        wanted_batches = [CallBatch(batch.shard, batch.kind, waiting) for batch, waiting in wanted if waiting]
        if now - self._down_since < PATIENCE_S:
            return wanted_batches
        for batch in wanted_batches:
            _fail(batch, "Redis, which holds every sequence, cannot be reached: try again later")
        return ()

    def _still_wanted(self, batch: CallBatch) -> list[PendingRequest]:
        """Of what was not answered: callers who have left want nothing but to be withdrawn."""
        if batch.kind not in WITHDRAWALS:
            return batch.waiting
        for waiting in batch.waiting:
            # A stateless request may lie in its queue although it is not known; it is found there by its token.
            if waiting.withdrawn and waiting.first_sent is not None and batch.kind is CallKind.WORK:
                self.withdraw(waiting)
        return [waiting for waiting in batch.waiting if not waiting.future.done()]

    def _back(self) -> None:
        if self._down_since is not None:
            logs.info("redis is back", away_s=round(time.monotonic() - self._down_since, 3))
            self._down_since = None

    def _call(self, batch: CallBatch) -> Call[Any]:
        match batch.kind:
            case CallKind.STEPS:
                return self._scripts.submit(
                    [self._submission(waiting) for waiting in batch.waiting],
                    shard=batch.shard,
                    backlog_max=self._bounds.backlog_max,
                    in_flight_max=self._bounds.in_flight_max,
                    live_max=self._bounds.live_max,
                )
            case CallKind.WORK:
                return self._stateless.enqueue(
                    [self._item(waiting) for waiting in batch.waiting],
                    bound=self._bounds.backlog_max,
                    summaries=self._summaries,
                )
            case CallKind.WITHDRAW_STEPS:
                return self._scripts.cancel(
                    [self._withdrawn(waiting) for waiting in batch.waiting],
                    shard=batch.shard,
                    reply=CANCELLED_STEP,
                    feed_max=self._bounds.backlog_max,
                )
            case CallKind.WITHDRAW_WORK:
                tokens = [waiting.token for waiting in batch.waiting]
                return self._stateless.withdraw(model_load(batch.waiting[0]), self._gateway, tokens, reply=CANCELLED)

    def _withdrawn(self, waiting: PendingRequest) -> CancelledStep:
        assert waiting.accepted is not None
        birth, step = waiting.accepted
        model = waiting.admitted.message.model
        return CancelledStep(sequence_of(waiting), model, birth, step, self._gateway, waiting.token)

    def _submission(self, waiting: PendingRequest) -> Submission:
        message, call = waiting.admitted.message, waiting.call
        return Submission(
            sequence=sequence_of(waiting),
            flags=waiting.admitted.flags,
            digest=step_digest(call.request_id, waiting.admitted.flags, call.inputs),
            expected_step=call.expected_step,
            model=message.model,
            version=message.version,
            gateway=self._gateway,
            token=waiting.token,
            timeout_us=0 if waiting.admitted.served_late else call.timeout_us,
            message=encode(message),
            since_ms=self._since_ms(waiting),
        )

    def _since_ms(self, waiting: PendingRequest) -> int:
        return -1 if waiting.first_sent is None else int(waiting.first_sent * 1000 + self._redis_ahead_ms)

    def _item(self, waiting: PendingRequest) -> WorkItem:
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
            lookup=lookup_of(message, waiting.record),
        )


def kind_of(waiting: PendingRequest) -> CallKind:
    """By which script a request is sent."""
    return CallKind.WORK if waiting.admitted.sequence is None else CallKind.STEPS


def sequence_of(waiting: PendingRequest) -> SequenceId:
    """The sequence of a step."""
    assert waiting.admitted.sequence is not None
    return waiting.admitted.sequence


def model_load(waiting: PendingRequest) -> ModelLoad:
    """What a request is counted for."""
    message = waiting.admitted.message
    return ModelLoad(message.model, message.version, waiting.record.generation)


def _take_unsent(queue: deque[PendingRequest]) -> list[PendingRequest]:
    taken: list[PendingRequest] = []
    size = 0
    while queue and len(taken) < SCRIPT_STEPS_MAX and size < SCRIPT_BYTES_MAX:
        waiting = queue.popleft()
        if not waiting.future.done():
            taken.append(waiting)
            size += sum(len(tensor.raw) for tensor in waiting.call.inputs)
    return taken


def _take_of_one_load(queue: deque[PendingRequest]) -> list[PendingRequest]:
    load = model_load(queue[0])
    taken: list[PendingRequest] = []
    while queue and len(taken) < SCRIPT_STEPS_MAX and model_load(queue[0]) == load:
        taken.append(queue.popleft())
    return taken


def _fail(batch: CallBatch, message: str) -> None:
    for waiting in batch.waiting:
        waiting.failed(UnavailableError(message))

"""Sends admitted requests to Redis: everything that gathered during one round trip goes with the next.

Order. One round trip is under way at a time, and it carries at most one `submit` and one `work_enqueue` per shard. So
Redis accepts the steps of a sequence in the order in which `send` got them, even when a connection breaks or the server
has forgotten its scripts.

Lost connections. When the connection breaks during a round trip, its outcome is unknown. A repeatable request
(`PendingRequest.repeatable`) is sent again, before everything newer; any other request fails, with an error that says
that the outcome is unknown. A step that is sent again carries the time of its first attempt. If Redis has accepted
other steps of that sequence since then, what the record says of the first attempt may be overwritten; Redis then
refuses the step, because it could otherwise run twice. The clock of Redis may have been set meanwhile: so it is read
before the loss, too, and the earlier time counts.

Requests whose client has left are withdrawn in the same round trips, after the requests to be sent. So are stateless
requests that are not taken before their timeout ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import OutOfMemoryError

from gateway.requests.early_steps import EarlySteps
from gateway.requests.infer_call import with_id
from gateway.requests.refusals import refusal
from gateway.requests.replies import Replies, unknown_outcome
from gateway.requests.script_calls import (
    WITHDRAWAL_OF,
    CallBatch,
    CallKind,
    ScriptCalls,
    is_withdrawal,
    kind_of,
    model_load,
)
from gateway.requests.slot_waits import SlotWaits
from gateway.requests.waiting import Accepted, PendingRequest, SlotWait
from shared.contract.errors import NotReadyError, UnavailableError
from shared.contract.ids import ShardId
from shared.contract.limits import SCRIPT_BYTES_MAX, SCRIPT_STEPS_MAX
from shared.contract.record import ACCEPTED, BIRTH
from shared.process import logs
from shared.store.commands import Redis
from shared.store.forecasts import Forecasts
from shared.store.keyspace import Keyspace
from shared.store.link import Link
from shared.store.reading import clock_ms, text_of, value_of
from shared.store.redis_client import CONNECTION_LOST, LOST_OR_REFUSED
from shared.store.redis_py import UnfitServerError
from shared.store.round_trips import RoundTrips
from shared.store.script_sender import Call
from shared.store.script_values import SubmitCode, Submitted
from shared.store.scripts import Scripts

PATIENCE_S = 10.0
"""How long requests wait while Redis is away, before they fail with "try again later". A restart takes about this."""
CLOCK_READINGS = 3
"""How often the clock of Redis is read before requests are sent again."""
CLOCK_AFTER_S = 5.0
"""How old the reading of the clock of Redis becomes that requests have which are sent for the first time, unless none
was sent for longer. An old one errs on the safe side, too."""
NEVER = -math.inf
LATE_PATIENCE_S = 2.0
"""How long a step that Redis refused as LATE still waits for the answer to its first attempt, before it fails."""


class Dispatch:
    """The queues of requests that Redis has not seen yet, and the task that empties them.

    early_wait_s   how long a numbered step waits here for the steps before it
    """

    def __init__(
        self,
        redis: Redis,
        scripts: Scripts,
        keys: Keyspace,
        replies: Replies,
        calls: ScriptCalls,
        *,
        early_wait_s: float = 0.0,
    ) -> None:
        self._scripts = scripts
        self._keys = keys
        self._link = Link(redis)
        self._trips = RoundTrips(scripts, self._link, "requests")
        self._replies = replies
        self._calls = calls
        self._early = EarlySteps(self._resend, wait_s=early_wait_s)
        self.waits = SlotWaits(Forecasts(redis, keys), self.withdraw)
        self._queues: dict[tuple[ShardId, CallKind], deque[PendingRequest]] = {
            (shard, kind): deque() for shard in keys.shard_ids() for kind in CallKind
        }
        self._left = dict.fromkeys(self._queues, 0)
        self._again: Sequence[CallBatch] = ()
        self._down_since: float | None = None
        self._failed_at = NEVER
        self._full_since: float | None = None
        self._redis_ahead_ms = 0.0
        self._clock_read = NEVER
        self.round_trips = 0
        self.sent = 0

    def send(self, pending: PendingRequest) -> None:
        """Queues a request for the next round trip."""
        self._queue(pending, kind_of(pending))

    def forget(self, pending: PendingRequest) -> None:
        """Notes that a request's future ended before Redis accepted the request. If it is still queued, it is not sent.

        While Redis is away, many such requests may lie in a queue. The queue is cleaned when half of it may be such:
        this bounds the queue at twice the live requests, and the cost per request stays constant.
        """
        key = pending.shard, kind_of(pending)
        queue = self._queues[key]
        self._left[key] += 1
        if 2 * self._left[key] >= len(queue):
            self._left[key] = 0
            wanted = [pending for pending in queue if not pending.future.done()]
            queue.clear()
            queue.extend(wanted)

    def withdraw(self, pending: PendingRequest) -> None:
        """Takes an accepted request back from Redis, with the next round trip."""
        self._queue(pending, WITHDRAWAL_OF[kind_of(pending)])

    def _queue(self, pending: PendingRequest, kind: CallKind) -> None:
        self._queues[pending.shard, kind].append(pending)
        self._trips.due()

    async def run(self) -> None:
        await self._trips.run(self._depart)

    def _take(self) -> list[CallBatch]:
        """The next round trip's requests, without those whose client has left."""
        batches: list[CallBatch] = []
        for (shard, kind), queue in self._queues.items():
            if not queue:
                continue
            taken = _take_of_one_load(queue) if is_withdrawal(kind) else _take_unsent(queue)
            if queue:
                # One script call carries no more: the rest goes with the next round trip.
                self._trips.due()
            if taken:
                batches.append(CallBatch(shard, kind, taken))
        return batches

    async def _depart(self) -> bool:
        """One round trip. False when batches must be sent again; they are, before everything newer, until Redis has
        accepted or refused each of their requests, or the requests have failed."""
        batches = self._again or self._take()
        if not batches:
            return True
        if not self._again and time.monotonic() - self._failed_at > PATIENCE_S:
            # Nothing was left to be sent again, so nobody has seen since whether Redis was back.
            self._down_since = None
        try:
            await self._link.connect()
            if self._again or self._clock_read == NEVER:
                await self._learn_the_time(self._link)
        except LOST_OR_REFUSED as lost:
            # None of them was sent, so everything may be tried again.
            self._again = self._after_failure(batches, lost)
        else:
            self._again = await self._attempt(batches)
            if not self._again and time.monotonic() - self._clock_read >= CLOCK_AFTER_S:
                # Behind the requests, so that none waits for it. The next round trip sees a lost connection.
                with suppress(*LOST_OR_REFUSED):
                    await self._learn_the_time(self._link)
        return not self._again

    async def _attempt(self, batches: Sequence[CallBatch]) -> Sequence[CallBatch]:
        """One round trip. Returns the batches that must be sent again."""
        began = time.monotonic()
        try:
            for batch in batches:
                for pending in batch.requests:
                    pending.sent = began
                    if pending.first_sent is None:
                        pending.redis_ahead_ms = self._redis_ahead_ms
            outcomes = await self._scripts.run_all(self._script_calls(batches), self._link)
        except CONNECTION_LOST as lost:
            for batch in batches:
                for pending in batch.requests:
                    # The first of several lost attempts counts: any of them may have been carried out.
                    if pending.first_sent is None:
                        pending.first_sent = began
                    # Redis may have carried this request out, and a second attempt would not be recognised.
                    if not pending.repeatable:
                        pending.failed(unknown_outcome(pending, "the connection to Redis was lost"))
            return self._after_failure(batches, lost)
        self.round_trips += 1
        again: list[CallBatch] = []
        unfit: UnfitServerError | None = None
        for batch, outcome in zip(batches, outcomes, strict=True):
            self.sent += len(batch.requests)
            if isinstance(outcome, UnfitServerError):
                # For instance a primary that was demoted. It did nothing, so even requests that are not repeatable may
                # be sent again; the next connection finds the new primary.
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
        """Checks every accepted request against a server that was restarted, and may have lost its newest data.

        Call it before anything else is sent to that server. Of steps that are not repeatable the sequences' records are
        read: if a record does not show the step, its client gets an error. Then repeatable requests are sent again, in
        their order: the server knows them already, or accepts them once more.

        lost    shards whose reply streams were lost: replies may have been lost with them
        raises  one of CONNECTION_LOST; then `ask_again` must be called again
        """
        requests = [
            pending for pending in self._replies.unanswered if pending.accepted is not None and not pending.withdrawn
        ]
        link = Link(redis)
        try:
            await link.connect()
            # First, while the records show what came back: the steps that are sent again take new numbers.
            await self._tell_forgotten([pending for pending in requests if not pending.repeatable], lost, link)
            await self._send_again([pending for pending in requests if pending.repeatable], link)
        finally:
            await link.close()

    async def _send_again(self, requests: Sequence[PendingRequest], link: Link) -> None:
        queues: dict[tuple[ShardId, CallKind], deque[PendingRequest]] = {}
        for pending in requests:
            if pending.first_sent is None:
                pending.first_sent = pending.sent
            queues.setdefault((pending.shard, kind_of(pending)), deque()).append(pending)
        while queues:
            batches = [CallBatch(*key, taken) for key, queue in queues.items() if (taken := _take_unsent(queue))]
            await self._learn_the_time(link)
            outcomes = await self._scripts.run_all(self._script_calls(batches), link)
            for batch, outcome in zip(batches, outcomes, strict=True):
                if isinstance(outcome, UnfitServerError):
                    raise outcome
                if isinstance(outcome, Exception):
                    self._refused(batch, outcome)
                else:
                    self._settle(batch, outcome)
            queues = {key: queue for key, queue in queues.items() if queue}

    async def _tell_forgotten(self, requests: Sequence[PendingRequest], lost: Collection[ShardId], link: Link) -> None:
        asked = [("HMGET", self._keys.sequence(pending.sequence).record, BIRTH, ACCEPTED) for pending in requests]
        for pending, record in zip(requests, await link.ask(asked) if asked else (), strict=True):
            assert pending.accepted is not None
            birth, newest = record
            step: int | None = value_of(self._keys.sequence(pending.sequence).record, newest or b"0", int)
            # The birth tells this sequence from a later one under the same id. A step below the newest was accepted.
            known = (
                text_of(birth or b"") == pending.accepted.birth and step is not None and step >= pending.accepted.step
            )
            if not known or pending.shard in lost:
                pending.failed(unknown_outcome(pending, "Redis was restarted and has lost data"))

    def _refused(self, batch: CallBatch, error: Exception) -> None:
        """Fails a batch that Redis answered with an error. A full Redis is logged once, not with every batch."""
        if not isinstance(error, OutOfMemoryError):
            logs.error("redis refused a script", error=str(error))
            _fail(batch, f"Redis refused the request: {error}")
            return
        if self._full_since is None:
            self._full_since = time.monotonic()
            logs.error("redis is full, new requests are refused: raise its maxmemory", error=str(error))
        _fail(batch, "Redis, which holds every sequence, is full: try again later")

    def _settle(self, batch: CallBatch, outcomes: Sequence[Any]) -> None:
        if is_withdrawal(batch.kind):
            # Its clients have left, so nobody needs the outcome.
            return
        if self._full_since is not None:
            logs.info("redis has room again", full_s=round(time.monotonic() - self._full_since, 3))
            self._full_since = None
        now_ns = time.time_ns()
        for pending, outcome in zip(batch.requests, outcomes, strict=True):
            if batch.kind is CallKind.STEPS:
                self._settle_step(pending, outcome, now_ns)
            elif batch.kind is CallKind.ENDS:
                # Whatever the outcome is: this run accepts no further step.
                pending.ended()
            elif outcome is False:
                pending.failed(NotReadyError(with_id(pending.call.request_id, "Exceeds maximum queue size")))
            else:
                _measure_accepted(pending, now_ns)
                pending.span.accepted(0)
                if isinstance(outcome, bytes):
                    # The response cache had the answer.
                    self._replies.deliver(pending.token, outcome, self._keys.cache(pending.shard).entries)
                else:
                    self._accepted(pending, Accepted())
                    self._watch_timeout(pending)

    def _settle_step(self, pending: PendingRequest, outcome: Submitted, now_ns: int) -> None:
        if outcome.code is SubmitCode.LATE:
            # The first attempt may have been accepted. Its answer then comes over the connection of `Replies`, which
            # may be behind this one. `failed` does nothing if the answer has come by then.
            asyncio.get_running_loop().call_later(LATE_PATIENCE_S, pending.failed, refusal(pending, outcome))
            return
        if outcome.code < 0:
            if self._early.keep(pending, outcome):
                return
            error = refusal(pending, outcome)
            if pending.wait is not None and outcome.code is SubmitCode.BACKLOG_FULL and outcome.extra != b"live":
                self.waits.refuse(pending, error)
            else:
                pending.failed(error)
            return
        self._early.accepted(pending.sequence)
        if pending.used is not None:
            pending.used(pending)
        repeated = outcome.code in (SubmitCode.REPEATED, SubmitCode.JOINED)
        _measure_accepted(pending, now_ns)
        if repeated and pending.measures is not None:
            pending.measures.repeated(outcome.code)
        pending.span.accepted(outcome.step, repeated=repeated)
        if pending.wait is not None:
            self._watch_wait(pending, pending.wait, outcome)
        if outcome.code is SubmitCode.REPEATED:
            pending.was_accepted(Accepted(step=outcome.step, run=outcome.run, repeated=True, at_ns=now_ns))
            record = self._keys.sequence(pending.sequence).record
            self._replies.deliver(pending.token, outcome.extra, record)
        else:
            accepted = Accepted(
                outcome.birth, outcome.step, outcome.run, outcome.cut_off, repeated=repeated, at_ns=now_ns
            )
            self._accepted(pending, accepted)

    def _watch_wait(self, pending: PendingRequest, wait: SlotWait, outcome: Submitted) -> None:
        """Begins to tell a caller that has asked about its wait for a slot. Of one that joined another nobody knows
        whether it waits; it hears something if it does."""
        if outcome.code is SubmitCode.DELIVERED:
            wait.waited_ms = 0
        elif outcome.code in (SubmitCode.WAITING, SubmitCode.JOINED):
            wait.is_new = outcome.code is SubmitCode.WAITING and outcome.step == 1
            self.waits.begin(pending)

    def _resend(self, pending: PendingRequest) -> None:
        """Sends a step again that was refused.

        It gets a new token, because `submit` takes a gateway's tokens for the order in which it sent its steps.
        """
        if not pending.future.done():
            self._replies.rename(pending)
            self.send(pending)

    def _accepted(self, pending: PendingRequest, accepted: Accepted) -> None:
        pending.was_accepted(accepted)
        # The client left while the request was on its way to Redis.
        if pending.withdrawn:
            self.withdraw(pending)

    def _watch_timeout(self, pending: PendingRequest) -> None:
        """Has a queued stateless request answered when its timeout ends, unless an executor has taken it by then.

        The timeout of the action DELAY changes only the order, which an executor looks at when it takes a batch.
        """
        queueing = pending.admitted.queueing
        if queueing.timeout_us and not queueing.delays:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(queueing.timeout_us / 1e6, self._queue, pending, CallKind.REFUSE_LATE)
            pending.future.add_done_callback(lambda _: timer.cancel())

    async def _learn_the_time(self, link: Link) -> None:
        """Reads the clock of Redis, by which it is judged whether a request that is sent again has come before.

        The answer is a moment old when it arrives, so a time computed from it is slightly too early, never too late.
        That errs on the safe side: no step that came in since the first attempt is overlooked. The answer that came
        fastest counts, so that few steps from before the first attempt are taken for later ones.
        """
        self._redis_ahead_ms = max([await _redis_ahead_ms(link) for _ in range(CLOCK_READINGS)])
        self._clock_read = time.monotonic()

    def _script_calls(self, batches: Sequence[CallBatch]) -> list[Call[Any]]:
        return [self._calls.of(batch, self._redis_ahead_ms) for batch in batches]

    def _after_failure(self, batches: Sequence[CallBatch], lost: BaseException) -> Sequence[CallBatch]:
        """The batches that are worth sending again; none when Redis has been away for longer than PATIENCE_S."""
        now = self._failed_at = time.monotonic()
        if self._down_since is None:
            self._down_since = now
            logs.warning("redis lost, requests wait", error=str(lost))
        wanted = [(batch, self._still_wanted(batch)) for batch in batches]
        wanted_batches = [CallBatch(batch.shard, batch.kind, requests) for batch, requests in wanted if requests]
        if now - self._down_since < PATIENCE_S:
            return wanted_batches
        for batch in wanted_batches:
            _fail(batch, "Redis, which holds every sequence, cannot be reached: try again later")
        return ()

    def _still_wanted(self, batch: CallBatch) -> list[PendingRequest]:
        """The batch's requests that still need an answer. Requests whose client has left are withdrawn or dropped."""
        if is_withdrawal(batch.kind):
            return batch.requests
        for pending in batch.requests:
            # The lost attempt may have put a stateless request into its queue. A withdrawal needs no more than its
            # token, so it is sent on suspicion. A step could not be named without its birth and number.
            if pending.withdrawn and pending.first_sent is not None and batch.kind is CallKind.WORK:
                self.withdraw(pending)
        return [pending for pending in batch.requests if not pending.future.done()]

    def _back(self) -> None:
        if self._down_since is not None:
            logs.info("redis is back", away_s=round(time.monotonic() - self._down_since, 3))
            self._down_since = None


async def _redis_ahead_ms(link: Link) -> float:
    """What the clock of Redis has more than this process's monotonic clock, or slightly less than that, ms."""
    (told,) = await link.ask([("TIME",)])
    return clock_ms(told) - time.monotonic() * 1000


def _measure_accepted(pending: PendingRequest, now_ns: int) -> None:
    if pending.measures is not None:
        message = pending.admitted.message
        pending.measures.accepted(message.arrived_ns, now_ns, message.traceparent)


def _take_unsent(queue: deque[PendingRequest]) -> list[PendingRequest]:
    taken: list[PendingRequest] = []
    size = 0
    while queue and len(taken) < SCRIPT_STEPS_MAX and size < SCRIPT_BYTES_MAX:
        pending = queue.popleft()
        if not pending.future.done():
            taken.append(pending)
            size += pending.size
    return taken


def _take_of_one_load(queue: deque[PendingRequest]) -> list[PendingRequest]:
    load = model_load(queue[0])
    taken: list[PendingRequest] = []
    while queue and len(taken) < SCRIPT_STEPS_MAX and model_load(queue[0]) == load:
        taken.append(queue.popleft())
    return taken


def _fail(batch: CallBatch, message: str) -> None:
    for pending in batch.requests:
        pending.failed(UnavailableError(message))

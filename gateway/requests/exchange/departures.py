"""Requests on their way to Redis: everything that gathered during one round trip goes with the next.

Order. One round trip is under way at a time, and it carries at most one `submit` and one `work_enqueue` per shard. So
Redis accepts the steps of a sequence in the order in which `put` got them from one client, even when a connection
breaks or the server has forgotten its scripts.

Lost connections. When the connection breaks during a round trip, its outcome is unknown. A repeatable request
(`PendingRequest.repeatable`) is sent again, before everything newer; any other request fails, with an error that says
that the outcome is unknown. A step that is sent again carries the time of its first attempt. If Redis has accepted
other steps of that sequence since then, what the record says of the first attempt may be overwritten; Redis then
refuses the step, because it could otherwise run twice. The clock of Redis may have been set meanwhile: so it is read
before the loss, too, and the earlier time counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from gateway.bounds.client_queue import ClientQueue
from gateway.requests.exchange.replies import unknown_outcome
from gateway.requests.exchange.script_calls import (
    WITHDRAWAL_OF,
    CallBatch,
    CallKind,
    ScriptCalls,
    is_withdrawal,
    kind_of,
    model_load,
)
from gateway.requests.waiting import PendingRequest
from shared.contract.errors import UnavailableError
from shared.contract.ids import ShardId
from shared.contract.limits import SCRIPT_BYTES_MAX, SCRIPT_STEPS_MAX
from shared.process import logs
from shared.store.connections.link import Link
from shared.store.connections.redis_py import CONNECTION_LOST, LOST_OR_REFUSED, UnfitServerError
from shared.store.reading import clock_ms
from shared.store.round_trips import RoundTrips
from shared.store.script_sender import Call
from shared.store.scripts import Scripts

PATIENCE_S = 10.0
"""How long requests wait while Redis is away, before they fail with "try again later". A restart takes about this."""
CLOCK_READINGS = 3
"""How often the clock of Redis is read before requests are sent again."""
CLOCK_AFTER_S = 5.0
"""How old the reading of the clock of Redis becomes that requests have which are sent for the first time, unless none
was sent for longer. An old one errs on the safe side, too."""
LEFT_BYTES_MAX = 16 << 20
"""Bytes of requests whose clients have left, and that may still lie in a queue."""
NEVER = -math.inf

Settle = Callable[[CallBatch, Any], None]
"""Takes what Redis answered to the requests of a batch: their outcomes, or the error with which it refused them all."""


class Departures:
    """The queues of requests of some shards that Redis has not seen yet, and the task that empties them.

    shards  those of one server
    link    to that server
    """

    def __init__(
        self, scripts: Scripts, link: Link, shards: Iterable[ShardId], calls: ScriptCalls, settle: Settle
    ) -> None:
        self._scripts = scripts
        self._link = link
        self._trips = RoundTrips(scripts, link, "requests")
        self._calls = calls
        self._settle = settle
        self._queues = {(shard, kind): ClientQueue[PendingRequest]() for shard in shards for kind in CallKind}
        self._left, self._left_bytes = dict.fromkeys(self._queues, 0), dict.fromkeys(self._queues, 0)
        self._again: Sequence[CallBatch] = ()
        self._down_since: float | None = None
        self._failed_at = NEVER
        self._redis_ahead_ms = 0.0
        self._clock_read = NEVER
        self.round_trips = 0
        self.sent = 0

    def put(self, pending: PendingRequest, kind: CallKind) -> None:
        """Queues a request for the next round trip."""
        self._queues[pending.shard, kind].append(pending.client, pending)
        self._trips.due()

    def forget(self, pending: PendingRequest) -> None:
        """Notes that a request's future ended before Redis accepted the request. If it is still queued, it is not sent.

        While Redis is away, many such requests may lie in a queue. The queue is cleaned when half of it may be such:
        this bounds the queue at about twice the live requests, and the cost per request stays constant. And when those
        may have LEFT_BYTES_MAX, which count no longer: a client may send large ones and leave, again and again.
        """
        key = pending.shard, kind_of(pending)
        queue = self._queues[key]
        self._left[key] += 1
        self._left_bytes[key] += pending.size
        is_large = self._left_bytes[key] > LEFT_BYTES_MAX
        if 2 * self._left[key] >= len(queue) or is_large:
            self._left[key] = self._left_bytes[key] = 0
            wanted = [one for one in queue if not one.future.done()] if is_large else _worth_sending(queue)
            queue.clear()
            for one in wanted:
                queue.append(one.client, one)

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
        if not self._again and time.monotonic() - self._failed_at > PATIENCE_S:
            # Nothing was left to be sent again, so nobody has seen since whether Redis was back.
            self._down_since = None
        try:
            await self._link.connect()
            if self._again or self._clock_read == NEVER:
                await self._learn_the_time(self._link)
        except LOST_OR_REFUSED as lost:
            # Nothing was sent, so everything may be tried again.
            self._again = self._after_failure(self._again or self._take(), lost)
            return not self._again
        # Taken only now: requests whose clients left while this gateway connected are not sent.
        batches = self._wanted(self._again) or self._take()
        self._again = await self._attempt(batches) if batches else ()
        if not self._again and time.monotonic() - self._clock_read >= CLOCK_AFTER_S:
            # Behind the requests, so that none waits for it. The next round trip sees a lost connection.
            with suppress(*LOST_OR_REFUSED):
                await self._learn_the_time(self._link)
        return not self._again

    async def _attempt(self, batches: Sequence[CallBatch]) -> Sequence[CallBatch]:
        """One round trip. Returns the batches that must be sent again."""
        began = time.monotonic()
        # What is taken back was sent before: its times, and its outcome, are those of that.
        sent = [pending for batch in batches if not is_withdrawal(batch.kind) for pending in batch.requests]
        try:
            for pending in sent:
                pending.sent = began
                if pending.first_sent is None:
                    pending.redis_ahead_ms = self._redis_ahead_ms
            outcomes = await self._scripts.run_all(self._script_calls(batches), self._link)
        except CONNECTION_LOST as lost:
            for pending in sent:
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
            else:
                self._settle(batch, outcome)
        if unfit is not None:
            return self._after_failure(again, unfit)
        if self._down_since is not None:
            logs.info("redis is back", away_s=round(time.monotonic() - self._down_since, 3))
            self._down_since = None
        return ()

    async def send_again(self, requests: Sequence[PendingRequest], link: Link) -> None:
        """Sends accepted, repeatable requests again, in their order, over a link of their own: the server knows them
        already, or accepts them once more. Raises one of CONNECTION_LOST.
        """
        queues: dict[tuple[ShardId, CallKind], ClientQueue[PendingRequest]] = {}
        for pending in requests:
            if pending.first_sent is None:
                pending.first_sent = pending.sent
            queue = queues.setdefault((pending.shard, kind_of(pending)), ClientQueue())
            queue.append(pending.client, pending)
        while queues:
            batches = [CallBatch(*key, taken) for key, queue in queues.items() if (taken := _take_unsent(queue))]
            await self._learn_the_time(link)
            outcomes = await self._scripts.run_all(self._script_calls(batches), link)
            for batch, outcome in zip(batches, outcomes, strict=True):
                if isinstance(outcome, UnfitServerError):
                    raise outcome
                self._settle(batch, outcome)
            queues = {key: queue for key, queue in queues.items() if queue}

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
        wanted = self._wanted(batches)
        if now - self._down_since < PATIENCE_S:
            return wanted
        # What has gathered behind these does not wait for another attempt: a silent Redis takes ten seconds over each.
        for batch in (*wanted, *self._take()):
            fail(batch, "Redis, which holds every sequence, cannot be reached: try again later")
        return ()

    def _wanted(self, batches: Sequence[CallBatch]) -> Sequence[CallBatch]:
        """The batches without requests that need no answer any more."""
        wanted = [CallBatch(batch.shard, batch.kind, self._still_wanted(batch)) for batch in batches]
        return [batch for batch in wanted if batch.requests]

    def _still_wanted(self, batch: CallBatch) -> list[PendingRequest]:
        """The batch's requests that still need an answer. Requests whose client has left are withdrawn or dropped."""
        if is_withdrawal(batch.kind):
            return batch.requests
        for pending in batch.requests:
            # The lost attempt may have put a stateless request into its queue. A withdrawal needs no more than its
            # token, so it is sent on suspicion. A step could not be named without its birth and number.
            if pending.withdrawn and pending.first_sent is not None and batch.kind is CallKind.WORK:
                self.put(pending, WITHDRAWAL_OF[batch.kind])
        return _worth_sending(batch.requests, self._queues[batch.shard, batch.kind])


async def _redis_ahead_ms(link: Link) -> float:
    """What the clock of Redis has more than this process's monotonic clock, or slightly less than that, ms."""
    (told,) = await link.ask([("TIME",)])
    return clock_ms(told) - time.monotonic() * 1000


def _take_unsent(queue: ClientQueue[PendingRequest]) -> list[PendingRequest]:
    taken: list[PendingRequest] = []
    size = 0
    while queue and len(taken) < SCRIPT_STEPS_MAX and size < SCRIPT_BYTES_MAX:
        taken.append(queue.popleft())
        size += taken[-1].size
    return _worth_sending(taken, queue)


def _worth_sending(requests: Iterable[PendingRequest], behind: Iterable[PendingRequest] = ()) -> list[PendingRequest]:
    """Those that somebody waits for, in their order, and repeatable steps before one of these, or of those behind them,
    in their sequence.

    Of several steps that a client has sent one behind the other, and has left, a gateway may have heard that the first
    one is left, and not the second one yet. That one alone would be accepted in the first one's place. Together they
    are in order, and who sends them again finds them.
    """
    queued = list(requests)
    if not any(pending.future.done() for pending in queued):
        return queued
    worth: list[PendingRequest] = []
    awaited = {pending.admitted.sequence for pending in behind if not pending.future.done()}
    for pending in reversed(queued):
        sequence = pending.admitted.sequence
        if not pending.future.done():
            worth.append(pending)
            awaited.add(sequence)
        elif sequence is not None and sequence in awaited and pending.repeatable:
            worth.append(pending)
    return worth[::-1]


def _take_of_one_load(queue: ClientQueue[PendingRequest]) -> list[PendingRequest]:
    load = model_load(next(iter(queue)))
    taken: list[PendingRequest] = []
    while queue and len(taken) < SCRIPT_STEPS_MAX and model_load(next(iter(queue))) == load:
        taken.append(queue.popleft())
    return taken


def fail(batch: CallBatch, message: str) -> None:
    """Ends a batch's requests with an error, unless they are being taken back: Redis has accepted those."""
    if batch.kind not in WITHDRAWAL_OF.values():
        for pending in batch.requests:
            pending.failed(UnavailableError(message))

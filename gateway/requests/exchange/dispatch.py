"""Sends admitted requests to Redis, and says what its answers mean to those who wait.

Each server that holds shards has its departures (`gateway.requests.exchange.departures`): while one cannot be reached,
the requests for the others go on.

Requests whose client has left are withdrawn in the same round trips, after the requests to be sent. So are stateless
requests that are not taken before their timeout ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError

from gateway.requests.exchange.departures import Departures, fail
from gateway.requests.exchange.early_steps import EarlySteps
from gateway.requests.exchange.replies import Replies, unknown_outcome
from gateway.requests.exchange.script_calls import (
    WITHDRAWAL_OF,
    CallBatch,
    CallKind,
    ScriptCalls,
    is_withdrawal,
    kind_of,
)
from gateway.requests.exchange.slot_waits import SlotWaits
from gateway.requests.infer_call import with_id
from gateway.requests.refusals import refusal
from gateway.requests.waiting import Accepted, PendingRequest, SlotWait
from shared.contract.errors import NotReadyError
from shared.contract.ids import ShardId
from shared.contract.record import ACCEPTED, BIRTH, LATEST
from shared.process import logs
from shared.store.commands import Redis
from shared.store.connections.homes import servers
from shared.store.connections.link import Link
from shared.store.forecasts import Forecasts
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of, value_of
from shared.store.script_values import SubmitCode, Submitted
from shared.store.scripts import Scripts

LATE_PATIENCE_S = 2.0
"""How long a step that Redis refused as LATE still waits for the answer to its first attempt, before it fails."""


class Dispatch:
    """Sends requests, and hears of those that Redis has accepted, refused or not got.

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
        early_wait_s: float,
    ) -> None:
        self._keys = keys
        self._replies = replies
        self._early = EarlySteps(self._resend, wait_s=early_wait_s)
        self.waits = SlotWaits(Forecasts(redis, keys), self.withdraw)
        self._full_since: float | None = None
        self._departures: dict[ShardId, Departures] = {}
        self._of_servers: list[Departures] = []
        for server, shards in servers(redis, keys):
            departures = Departures(scripts, Link(server), shards, calls, self._settle)
            self._of_servers.append(departures)
            self._departures |= dict.fromkeys(shards, departures)

    @property
    def round_trips(self) -> int:
        """How many have been made."""
        return sum(departures.round_trips for departures in self._of_servers)

    @property
    def sent(self) -> int:
        """How many requests, withdrawals among them, Redis has answered."""
        return sum(departures.sent for departures in self._of_servers)

    def send(self, pending: PendingRequest) -> None:
        """Queues a request for the next round trip."""
        self._departures[pending.shard].put(pending, kind_of(pending))

    def forget(self, pending: PendingRequest) -> None:
        """Notes that a request's future ended before Redis accepted the request. If it is still queued, it is not
        sent."""
        self._departures[pending.shard].forget(pending)

    def withdraw(self, pending: PendingRequest) -> None:
        """Takes an accepted request back from Redis, with the next round trip."""
        self._departures[pending.shard].put(pending, WITHDRAWAL_OF[kind_of(pending)])

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for departures in self._of_servers:
                group.create_task(departures.run(), name="departures")

    async def ask_again(self, redis: Redis, shards: Sequence[ShardId], lost: Collection[ShardId]) -> None:
        """Checks every accepted request of these shards against Redis, after the server that has them was restarted,
        and may have lost its newest data.

        Call it before anything else is sent to that server. Of steps that are not repeatable the sequences' records
        are read: if a record does not prove the step, its client gets an error. Then repeatable requests are sent
        again, in their order: the server knows them already, or accepts them once more.

        lost    shards whose reply streams were lost: replies may have been lost with them
        raises  one of CONNECTION_LOST; then `ask_again` must be called again
        """
        requests = [
            pending for pending in self._replies.unanswered if pending.shard in shards and pending.accepted is not None
        ]
        link = Link(redis.home(self._keys.base(shards[0])))
        try:
            await link.connect()
            # First, while the records show what came back: the steps that are sent again take new numbers.
            await self._tell_forgotten([pending for pending in requests if not pending.repeatable], lost, link)
            repeatable = [pending for pending in requests if pending.repeatable]
            await self._departures[shards[0]].send_again(repeatable, link)
        finally:
            await link.close()

    async def _tell_forgotten(self, requests: Sequence[PendingRequest], lost: Collection[ShardId], link: Link) -> None:
        asked = [
            ("HMGET", self._keys.sequence(pending.sequence).record, BIRTH, ACCEPTED, LATEST) for pending in requests
        ]
        for pending, record in zip(requests, await link.ask(asked) if asked else (), strict=True):
            if not self._is_known(pending, record) or pending.shard in lost:
                pending.failed(unknown_outcome(pending, "Redis was restarted and may have lost data"))

    def _is_known(self, pending: PendingRequest, record: Sequence[bytes | None]) -> bool:
        """Whether a record shows an accepted step that its gateway has not sent again."""
        assert pending.accepted is not None
        birth, newest, latest = record
        step: int | None = value_of(self._keys.sequence(pending.sequence).record, newest or b"0", int)
        # The birth tells this sequence from a later one under the same id.
        if text_of(birth or b"") != pending.accepted.birth or step is None:
            return False
        # Another gateway may have been faster: then another step has its number. What this gateway has accepted last
        # came before the restart, and so did this step then.
        gateway, token = self._replies.gateway.encode(), pending.token.encode()
        known = [gateway, token] if step == pending.accepted.step else [gateway]
        return step >= pending.accepted.step and (latest or b"").split()[1 : 1 + len(known)] == known

    def _refused(self, batch: CallBatch, error: Exception) -> None:
        """Fails a batch that Redis answered with an error. A full Redis is logged once, not with every batch."""
        if not isinstance(error, OutOfMemoryError):
            logs.error("redis refused a script", error=str(error))
            fail(batch, f"Redis refused the request: {error}")
            return
        if self._full_since is None:
            self._full_since = time.monotonic()
            logs.error("redis is full, new requests are refused: raise its maxmemory", error=str(error))
        fail(batch, "Redis, which holds every sequence, is full: try again later")

    def _settle(self, batch: CallBatch, outcomes: Any) -> None:
        """Tells a batch's requests what Redis has answered: their outcomes, or one error."""
        if isinstance(outcomes, Exception):
            self._refused(batch, outcomes)
            return
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
        self._early.accepted(pending)
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
            put = self._departures[pending.shard].put
            timer = loop.call_later(queueing.timeout_us / 1e6, put, pending, CallKind.REFUSE_LATE)
            pending.future.add_done_callback(lambda _: timer.cancel())


def _measure_accepted(pending: PendingRequest, now_ns: int) -> None:
    if pending.measures is not None:
        message = pending.admitted.message
        pending.measures.accepted(message.arrived_ns, now_ns, message.traceparent)

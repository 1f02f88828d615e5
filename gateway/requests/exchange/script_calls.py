"""Which script sends an admitted request, and with which arguments."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any

import msgspec

from gateway.requests.response_cache import lookup_of
from gateway.requests.waiting import PendingRequest
from shared.contract.errors import Code, Reason
from shared.contract.ids import GatewayId, SequenceId, ShardId
from shared.contract.limits import IDLE_MS_MAX
from shared.contract.messages import START, ReplyMessage, StepFlag, encode
from shared.contract.record import CANCELLED as TOMBSTONE_CANCELLED
from shared.contract.step_digest import step_digest
from shared.contract.tenants import Tenants
from shared.statistics.tally import ModelLoad
from shared.store.keyspace import Keyspace
from shared.store.script_sender import Call
from shared.store.script_values import Cancellation as CancelledStep
from shared.store.script_values import Ending, Submission, ended_by
from shared.store.scripts import Scripts
from shared.store.work_scripts import WorkItem, WorkScripts

PATIENCE_US_MAX = 1000 * IDLE_MS_MAX
"""A longer patience has no end: scripts count times up to 2^53, and write larger ones with an exponent."""


class CallKind(IntEnum):
    """Which script a call runs. The two WITHDRAW kinds take back requests whose client has left; REFUSE_LATE answers
    stateless requests whose timeout has ended. ENDS are requests that end a sequence without a step.
    """

    STEPS = auto()
    WORK = auto()
    ENDS = auto()
    WITHDRAW_STEPS = auto()
    WITHDRAW_WORK = auto()
    REFUSE_LATE = auto()


WITHDRAWAL_OF = {CallKind.STEPS: CallKind.WITHDRAW_STEPS, CallKind.WORK: CallKind.WITHDRAW_WORK}
"""Which call takes back what a call has sent."""
NAMED = int(StepFlag.NAMED)
CANCELLED = encode(ReplyMessage("", error_code=Code.CANCELLED))
"""Triton has no message for it (triton-spec 1.8)."""
CANCELLED_STEP = encode(ReplyMessage("", error_code=Code.CANCELLED, reason=Reason.CANCELLED))
ENDED_BY_CLIENT = ended_by("its client")


class CallBatch(msgspec.Struct, frozen=True):
    """The requests of one script call: all of one kind and one shard. Withdrawals are also of one load of a model."""

    shard: ShardId
    kind: CallKind
    requests: list[PendingRequest]


class ScriptCalls:
    """Makes the script call of a batch.

    gateway        who gets the replies
    in_flight_max  open steps of one sequence; this bound and the next two are Redis's: what is beyond is refused
    backlog_max    sequences of one model and shard that wait for their first slot; waiting stateless requests of
                   one model version
    live_max       sequences of one model and shard that have had a slot, and are not over
    tenants        the limits of tenants as they are now
    prefers        the executor that new sequences of a model and version prefer; "": not known
    summaries      whether durations of cache lookups are counted for Triton's summary metrics
    """

    def __init__(
        self,
        scripts: Scripts,
        keys: Keyspace,
        gateway: GatewayId,
        *,
        in_flight_max: int,
        backlog_max: int,
        live_max: int,
        tenants: Callable[[], Tenants],
        prefers: Callable[[str, str, SequenceId], str],
        summaries: bool,
    ) -> None:
        self._scripts = scripts
        self._stateless = WorkScripts(keys)
        self._shards = len(keys.shards)
        self._gateway = gateway
        self._in_flight_max = in_flight_max
        self._backlog_max = backlog_max
        self._live_max = live_max
        self._tenants = tenants
        self._prefers = prefers
        self._summaries = summaries

    def of(self, batch: CallBatch, redis_ahead_ms: float) -> Call[Any]:
        """redis_ahead_ms: what the clock of Redis has more than this process's monotonic clock. Needed only if a
        request is sent again."""
        match batch.kind:
            case CallKind.STEPS:
                return self._scripts.submit(
                    [self._submission(pending, redis_ahead_ms) for pending in batch.requests],
                    backlog_max=self._backlog_max,
                    in_flight_max=self._in_flight_max,
                    live_max=self._live_max,
                )
            case CallKind.ENDS:
                endings = [Ending(pending.sequence, pending.call.ended_run) for pending in batch.requests]
                return self._scripts.end(endings, tombstone=TOMBSTONE_CANCELLED, reply=ENDED_BY_CLIENT)
            case CallKind.WORK:
                return self._stateless.enqueue(
                    [self._item(pending) for pending in batch.requests],
                    bound=self._backlog_max,
                    summaries=self._summaries,
                )
            case CallKind.WITHDRAW_STEPS:
                withdrawn = [self._withdrawn(pending) for pending in batch.requests]
                return self._scripts.cancel(withdrawn, reply=CANCELLED_STEP)
            case CallKind.WITHDRAW_WORK:
                tokens = [pending.token for pending in batch.requests]
                return self._stateless.withdraw(model_load(batch.requests[0]), self._gateway, tokens, reply=CANCELLED)
            case CallKind.REFUSE_LATE:
                tokens = [pending.token for pending in batch.requests]
                return self._stateless.refuse_late(model_load(batch.requests[0]), self._gateway, tokens)

    def _withdrawn(self, pending: PendingRequest) -> CancelledStep:
        accepted = pending.accepted
        assert accepted is not None
        return CancelledStep(pending.sequence, accepted.birth, accepted.step, self._gateway, pending.token)

    def _submission(self, pending: PendingRequest, redis_ahead_ms: float) -> Submission:
        message, call = pending.admitted.message, pending.call
        part = call.part
        flags = pending.admitted.flags
        # A model may compute other bits when its step runs again.
        inputs = () if flags & NAMED else call.inputs
        return Submission(
            pending.sequence,
            flags,
            step_digest(call.request_id, flags, inputs) if part is None else part.digest,
            call.expected_step,
            message.version,
            self._gateway,
            pending.token,
            patience_us(pending),
            encode(message),
            since_ms=_since_ms(pending, redis_ahead_ms),
            tenant=call.tenant,
            tenant_max=-(-self._tenants().of(call.tenant).live_max // self._shards) if call.tenant else 0,
            prefers=self._prefers(message.model, message.version, pending.sequence) if flags & START else "",
        )

    def _item(self, pending: PendingRequest) -> WorkItem:
        message = pending.admitted.message
        return WorkItem(
            message.model,
            message.version,
            self._gateway,
            pending.token,
            encode(message),
            pending.admitted.queueing,
            lookup_of(message, pending.record),
        )


def is_withdrawal(kind: CallKind) -> bool:
    return kind not in (CallKind.STEPS, CallKind.ENDS, CallKind.WORK)


def _since_ms(pending: PendingRequest, redis_ahead_ms: float) -> int:
    """When a request was first sent, by the clock of Redis: as that was then or as it is now, the earlier time counts.
    -1 if it has not been sent before.
    """
    if pending.first_sent is None:
        return -1
    return int(pending.first_sent * 1000 + min(pending.redis_ahead_ms, redis_ahead_ms))


def patience_us(pending: PendingRequest) -> int:
    """How long a request may wait for its sequence's first slot, at most PATIENCE_US_MAX; 0: for ever."""
    call = pending.call
    if not call.timeout_us and not call.wait_max_ms:
        return 0
    bounds = (0 if pending.admitted.timeout_is_ignored else call.timeout_us, 1000 * call.wait_max_ms)
    return min(PATIENCE_US_MAX, *filter(None, bounds)) if any(bounds) else 0


def kind_of(pending: PendingRequest) -> CallKind:
    """Which script a request is sent by: stateless requests by `work_enqueue`, steps by `submit`, ends by `end`."""
    if pending.call.ended_run:
        return CallKind.ENDS
    return CallKind.WORK if pending.admitted.sequence is None else CallKind.STEPS


def model_load(pending: PendingRequest) -> ModelLoad:
    """The load of a model version under which the request is counted."""
    message = pending.admitted.message
    return ModelLoad(message.model, message.version, pending.record.generation)

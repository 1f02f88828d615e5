"""Stateless work: one queue per model version, which all executors of the model serve. Typed wrappers of its scripts.

A request waits in the queue, is taken by an executor (which then holds it), and leaves with its answer. Every call
concerns one shard, is atomic, and may be sent again if its outcome is unknown: a request is recognised by its id, a
take by its tag, and only the holder answers. The headers of `shared/store/lua/work*.lua` describe keys, arguments and
replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from shared.contract.batch_shape import Queueing
from shared.contract.errors import Code
from shared.contract.ids import ExecutorId, GatewayId
from shared.contract.limits import LOST_EXECUTORS_MAX, SCRIPT_STEPS_MAX
from shared.contract.messages import ReplyMessage, encode
from shared.statistics.metrics_config import SKETCH_BASE, SKETCH_BUCKET_MAX
from shared.statistics.tally import FailureReason, ModelLoad
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of
from shared.store.script_sender import Call, each_as

LEVEL_DIGITS = 20
"""Digits of a priority level in a queue's order, because levels are uint64."""

OVERDUE = "Request timeout expired"
TOO_LATE = encode(ReplyMessage("", error_code=Code.UNAVAILABLE, error=OVERDUE))
"""The answer to a request whose timeout ended before an executor took it."""

RequestId = str
"""`<gateway>/<token>`: a request's name in its queue."""


class Lookup(msgspec.Struct, frozen=True):
    """A lookup in the response cache before a request is queued.

    name        under which its answer would be stored (`shared.contract.response_cache`)
    generation  of the load that the lookup counts for
    arrived_ns  when the request arrived at its gateway, wall clock
    """

    name: str
    generation: str
    arrived_ns: int


class Stored(msgspec.Struct, frozen=True):
    """Where an answer is stored in the response cache. bound: bytes that the cache may hold; a larger answer is not
    stored
    """

    name: str
    bound: int


class WorkItem(msgspec.Struct, frozen=True):
    """A stateless request for its queue. lookup: where the response cache may have its answer"""

    model: str
    version: str
    gateway: str
    token: str
    message: bytes
    queueing: Queueing = Queueing()
    lookup: Lookup | None = None


class WorkDone(msgspec.Struct, frozen=True):
    """A stateless request's answer.

    counts  packed (`shared.statistics.tally`); they count if this call answers the request
    stored  where the answer is stored in the response cache then, if it is
    """

    id: RequestId
    reply: bytes
    counts: bytes = b""
    stored: Stored | None = None


class WorkHeld(IntEnum):
    """What became of a request that an executor runs.

    GONE       another executor holds it, or it was answered
    HELD       this executor holds it
    CANCELLED  so it does, and the request's callers have gone
    """

    GONE = 0
    HELD = 1
    CANCELLED = 2


class Seen(msgspec.Struct, frozen=True):
    """A request at the front of a queue. queued_us: when it arrived, Redis clock."""

    id: RequestId
    rows: int
    queued_us: int
    shape_key: str


class Front(msgspec.Struct, frozen=True):
    """The front of a queue, as `pull` found it.

    queued       requests in the queue
    deadline_us  microseconds until one of them is too late; None: never
    now_us       Redis clock
    front        the requests that run first; one more than fits, if there is one
    """

    queued: int
    deadline_us: int | None
    now_us: int
    front: tuple[Seen, ...]


class Taken(msgspec.Struct, frozen=True):
    """A batch that this executor holds now: (id, encoded message). queued: requests left in the queue"""

    queued: int
    requests: tuple[tuple[RequestId, bytes], ...]


class Finished(msgspec.Struct, frozen=True):
    """Reply of `finish`. queued: requests in the queue now; answered: for each request, whether this executor
    held it
    """

    queued: int
    answered: list[bool]


class Take:
    """When `pull` takes the front at once: never; when the oldest request has waited long enough; or also when no more
    fits, and when there is nothing to wait for.
    """

    NEVER = 0
    WHEN_LATE = 1
    WHEN_PLAIN = 2


REQUESTS_MAX = 1024
"""Most requests that one call takes: their ids and messages are arguments of one command inside the script."""


def request_id(gateway: str, token: str) -> RequestId:
    return f"{gateway}/{token}"


class WorkScripts:
    """Makes the calls; `Scripts` sends them."""

    def __init__(self, keys: Keyspace) -> None:
        self._keys = keys

    def enqueue(self, items: Sequence[WorkItem], *, bound: int, summaries: bool = False) -> Call[list[bool | bytes]]:
        """Accepts requests of models of one home shard, in this order; False: the queue, or the request's level, is
        full.

        Bytes are the answer itself, from the response cache: that request was not queued, and is counted.
        summaries: whether lookups count for the summaries
        """
        queues: dict[tuple[str, str, str], list[int]] = {}
        for index, item in enumerate(items):
            generation = item.lookup.generation if item.lookup else ""
            queues.setdefault((item.model, item.version, generation), []).append(index)
        shard = self._keys.home_shard(items[0].model)
        keys: list[str] = []
        tallies: list[str] = []
        args: list[Any] = [bound, SKETCH_BASE if summaries else 0, SKETCH_BUCKET_MAX]
        # Items are grouped by queue; `order` leads the replies back to the items.
        order: list[int] = []
        for (model, version, generation), indexes in queues.items():
            keys += self._keys.work_queue(model, version)
            tallies.append(self._keys.tally(shard, model, version, generation))
            args.append(len(indexes))
            order += indexes
            for index in indexes:
                args += _fields(items[index])

        def read(outcomes: list[int | bytes]) -> list[bool | bytes]:
            found = [outcome if isinstance(outcome, bytes) else bool(outcome) for outcome in outcomes]
            accepted = dict(zip(order, found, strict=True))
            return [accepted[index] for index in range(len(items))]

        return Call("work_enqueue", [*keys, *tallies, *self._keys.cache(shard)], args, read)

    def pull(
        self,
        load: ModelLoad,
        executor: ExecutorId,
        tag: str,
        *,
        requests_max: int,
        rows_max: int,
        delay_us: int,
        take: int,
    ) -> Call[Taken | Front]:
        """Applies the queue's timeout policies, then takes the front of the queue or describes it.

        requests_max, rows_max  of one batch; requests_max 0: only apply the policies
        delay_us  how long the oldest request may wait for others
        take      one of `Take`
        """
        args = [executor, tag, min(requests_max, REQUESTS_MAX), rows_max, delay_us, take, TOO_LATE]
        return Call("work_pull", self._queue(load), args, _read_pulled)

    def take(
        self, load: ModelLoad, executor: ExecutorId, tag: str, ids: Sequence[RequestId]
    ) -> Call[tuple[tuple[RequestId, bytes], ...]]:
        """Takes exactly these requests; empty if one of them is not in the queue any more: pull again."""
        return Call("work_take", self._queue(load), [executor, tag, *ids], _read_taken)

    def read(self, load: ModelLoad, ids: Sequence[RequestId]) -> Call[tuple[tuple[RequestId, bytes], ...]]:
        """Messages of waiting requests; requests that are gone are left out."""
        return Call("work_read", self._queue(load), list(ids), _read_messages)

    def finish(
        self, load: ModelLoad, executor: ExecutorId, done: Sequence[WorkDone], *, execution: bytes = b""
    ) -> Call[Finished]:
        """Answers requests. A request that this executor does not hold (any more) is not answered.

        execution  packed counts of the model's run
        """
        args: list[Any] = [executor, execution]
        for item in done:
            stored = (item.stored.name, item.stored.bound) if item.stored else ("", 0)
            args += (item.id, item.reply, item.counts, *stored)
        cache = self._keys.cache(self._keys.home_shard(load.model))
        return Call("work_finish", [*self._queue(load), *cache], args, _read_finished)

    def answers(
        self, load: ModelLoad, executor: ExecutorId, requests: Sequence[tuple[RequestId, Sequence[tuple[int, bytes]]]]
    ) -> Call[list[WorkHeld]]:
        """Writes answers of requests that are not their last ones: (id, (number, encoded)). Safe to repeat."""
        args: list[Any] = [executor]
        for id, answers in requests:
            args += (id, len(answers), *(part for numbered in answers for part in numbered))
        return Call("work_answers", self._queue(load), args, each_as(WorkHeld))

    def requeue(self, load: ModelLoad, executor: ExecutorId, *, given_up: bytes = b"") -> Call[int]:
        """Puts all requests that an executor holds back at their old places; returns how many.

        given_up  of a dead executor: encoded reply for requests with which `LOST_EXECUTORS_MAX` executors were lost
        """
        return Call("work_requeue", self._queue(load), [executor, LOST_EXECUTORS_MAX if given_up else 0, given_up], int)

    def withdraw(self, load: ModelLoad, gateway: GatewayId, tokens: Sequence[str], *, reply: bytes) -> Call[list[bool]]:
        """Gives up requests whose callers have gone; False: the request is being run, or was answered.
        reply: encoded
        """
        return self._give_up(load, gateway, tokens, reply, FailureReason.CANCELED)

    def refuse_late(self, load: ModelLoad, gateway: GatewayId, tokens: Sequence[str]) -> Call[list[bool]]:
        """Answers requests whose timeout has ended; False: the request was taken in time, or was answered."""
        return self._give_up(load, gateway, tokens, TOO_LATE, FailureReason.REJECTED)

    def _give_up(
        self, load: ModelLoad, gateway: GatewayId, tokens: Sequence[str], reply: bytes, reason: FailureReason
    ) -> Call[list[bool]]:
        ids = [request_id(gateway, token) for token in tokens]
        return Call("work_withdraw", self._queue(load), [reply, reason, *ids], each_as(bool))

    def refuse(self, load: ModelLoad, reply: bytes, *, at_most: int = SCRIPT_STEPS_MAX) -> Call[int]:
        """Answers the requests for a version that no executor serves any more; call again until it returns 0."""
        return Call("work_refuse", self._queue(load), [reply, at_most], int)

    def wake(self, load: ModelLoad) -> Call[int]:
        """Passes a wake-up on to another idle executor."""
        return Call("work_wake", self._queue(load), [], int)

    def _queue(self, load: ModelLoad) -> list[str]:
        """The keys of a model version's queue, and its tally."""
        tally = self._keys.tally(self._keys.home_shard(load.model), load.model, load.version, load.generation)
        return [*self._keys.work_queue(load.model, load.version), tally]


def _fields(item: WorkItem) -> tuple[Any, ...]:
    queueing = item.queueing
    return (
        request_id(item.gateway, item.token),
        f"{queueing.level:0{LEVEL_DIGITS}d}",
        queueing.level_bound,
        queueing.timeout_us,
        "D" if queueing.delays else "R",
        queueing.rows,
        1 if queueing.ordered else 0,
        queueing.shape,
        item.message,
        item.lookup.name if item.lookup else "",
        item.lookup.arrived_ns // 1000 if item.lookup else 0,
    )


def _read_pulled(reply: list[Any]) -> Taken | Front:
    taken, queued, *rest = reply
    if taken:
        return Taken(queued, _read_taken(rest))
    deadline, now_us, *flat = rest
    fields = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    front = tuple(Seen(text_of(id), rows, arrived, text_of(shape)) for id, rows, arrived, shape in fields)
    return Front(queued, None if deadline < 0 else deadline, now_us, front)


def _read_taken(flat: list[bytes]) -> tuple[tuple[RequestId, bytes], ...]:
    """Requests whose message is gone have b"": the executor that takes them answers them too."""
    return tuple((text_of(id), message) for id, message in zip(flat[::2], flat[1::2], strict=True))


def _read_messages(flat: list[bytes]) -> tuple[tuple[RequestId, bytes], ...]:
    return tuple((id, message) for id, message in _read_taken(flat) if message)


def _read_finished(reply: list[int]) -> Finished:
    queued, *flags = reply
    return Finished(queued, each_as(bool)(flags))

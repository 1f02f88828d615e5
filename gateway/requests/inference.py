"""The one way into the mesh for an inference request, for both protocols.

`submit` puts a request into the queue before it returns, without awaiting anything. So two requests that are submitted
one after the other are accepted in that order; this keeps the steps of a stream in order.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import msgspec

from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.client_shares import ClientShares
from gateway.bounds.unread_answers import UnreadAnswers
from gateway.models.catalog import Catalog
from gateway.requests.admission import Admitted, admit, admit_end
from gateway.requests.allowances import Allowances
from gateway.requests.caller import Caller
from gateway.requests.cancellation import caller_left
from gateway.requests.ensembles.requests import Ensembles
from gateway.requests.ensembles.runs import EnsembleServices
from gateway.requests.exchange.dispatch import Dispatch
from gateway.requests.exchange.notices import Notices
from gateway.requests.exchange.replies import Replies, never_sent, unknown_outcome
from gateway.requests.forms import KnownForms
from gateway.requests.infer_call import InferCall, input_bytes
from gateway.requests.measures import Measures
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.refusals import decoupled_refusal
from gateway.requests.response_cache import with_cache_key
from gateway.requests.sessions import new_session
from gateway.requests.status import told_of
from gateway.requests.waiting import Answer, OnOpen, OpenRequest, PendingRequest, end_span
from shared.contract.errors import MeshError, Reason, RequestError, SequenceError, UnavailableError
from shared.contract.messages import START, ModelRecord
from shared.store.keyspace import Keyspace
from shared.store.script_values import Orphan
from shared.traces.tracing import NO_STEP, StepSpan, Tracing


class Inference:
    """Admits requests, sends them on and gives a future for each.

    submit(call) -> asyncio.Future[Answer]
        Never raises: every failure is the future's MeshError. Cancelling the future means that the client has left;
        a request that Redis has accepted is then withdrawn (`gateway.requests.cancellation`).
        Cancel several futures within one turn of the event loop. Otherwise the steps behind a cancelled step could be
        sent in between, and would run without it.
    connection() -> ConnectionSequences
        One per stream: give it to `submit` with each request of the stream, and call its `end` when the stream ends
        (`gateway.requests.orphans`).
    budget
        The bytes that requests in flight may take, also while they are still being received.
    unread
        Counts the answers that clients have not taken.
    """

    def __init__(
        self,
        catalog: Catalog,
        dispatch: Dispatch,
        replies: Replies,
        keys: Keyspace,
        tracing: Tracing,
        notices: Notices,
        *,
        in_flight_max: int,
        budget: ByteBudget,
        unread: UnreadAnswers,
        request_bytes_max: int,
        timeout_ms: int,
        cache_bytes: int,
        measures: Measures,
        allowances: Allowances,
    ) -> None:
        self._allowances = allowances
        self._measures = measures
        self._catalog = catalog
        self._dispatch = dispatch
        self._replies = replies
        self._keys = keys
        self._tracing = tracing
        self._notices = notices
        self._in_flight_max = in_flight_max
        self._submitted = ClientShares()
        self.budget = budget
        self.unread = unread
        self._request_bytes_max = request_bytes_max
        self._timeout_ms = timeout_ms
        self._cache_bytes = cache_bytes
        self._forms = KnownForms()
        # Requests for a model or version that the catalog does not know yet wait here for its refresh. Later requests
        # that name the same wait behind them, so that a sequence's steps stay in the order of their arrival: the
        # version that is asked for is a part of its name.
        self._held: deque[tuple[tuple[str, str], Unsent]] = deque()
        self._held_names: Counter[tuple[str, str]] = Counter()
        self._looking: set[asyncio.Future[None]] = set()
        services = EnsembleServices(dispatch, replies, notices, self._send_step, budget.add)
        self._ensembles = Ensembles(catalog, services, tracing, unread, measures)
        self.stopping = False
        """True while this gateway stops. It then closes connections itself, so a lost one does not mean a cancel."""

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer."""
        return len(self._replies) + len(self._held) + len(self._looking) + len(self._allowances)

    def connection(self) -> ConnectionSequences:
        """The sequences of a new connection. While this gateway stops, the connection's end leaves no orphans."""

        def tell(orphan: Orphan) -> None:
            if not self.stopping:
                self._notices.orphan(orphan)

        return ConnectionSequences(tell)

    def give_up(self, cause: str) -> None:
        """Fails every request that waits. cause: begins the error's text"""
        self._replies.give_up(cause)
        for future in (*(unsent.caller.future for _, unsent in self._held), *self._looking):
            if not future.done():
                future.set_exception(never_sent(cause))
        self._allowances.give_up(cause)

    async def look_up(self, model: str, version: str) -> ModelRecord:
        """The model of a request that cannot be read without it. An unknown one is looked for once more, after a
        refresh: it may just have been loaded. Meanwhile the request is in flight.

        raises  as `Catalog.find`; UnavailableError if too many requests are in flight, the gateway gives up, or its own
                time for a request is over: whether this one brings a timeout, nobody has read yet
        """
        try:
            record, _ = self._catalog.find(model, version)
        except MeshError:
            self._check_room()
            refreshed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._looking.add(refreshed)
            self._catalog.ask(partial(_conclude, refreshed))
            try:
                async with asyncio.timeout(self._timeout_ms / 1000 or None):
                    await refreshed
            except TimeoutError:
                raise self._late() from None
            finally:
                self._looking.discard(refreshed)
            record, _ = self._catalog.find(model, version)
        return record

    def _check_room(self, client: str = "", *, goes_on: bool = False) -> None:
        """Raises UnavailableError if no further request, or none of this client, may be in flight.

        goes_on  with a sequence. An eighth of the room is for these alone: others wait for a slot, or in a queue, for
                 as long as it takes, and would keep out the live sequences of all models
        """
        most = self._in_flight_max - (0 if goes_on else self._in_flight_max // 8)
        if (in_flight := self.in_flight) < most // 2:
            return  # Nobody has more than its part.
        if in_flight >= most:
            raise UnavailableError(f"the gateway has {most} requests in flight, which is its limit: try again later")
        of_client, share = self._submitted.of(client), self._submitted.most(client, most, is_small=goes_on)
        if of_client and of_client >= share:
            raise UnavailableError(
                f"this client has {of_client} requests in flight, and others need room beside the {share} that it may "
                "have: try again later"
            )

    def submit(
        self,
        call: InferCall,
        connection: ConnectionSequences | None = None,
        on_open: OnOpen | None = None,
        *,
        client: str = "",
    ) -> asyncio.Future[Answer]:
        """Puts a request in the queue of the next round trip; the order of a client's calls is the order of acceptance.

        connection, on_open, client  as those of a `Caller`
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        size = input_bytes(call)
        if call.tenant:
            # Behind a proxy that names them, all clients have one address.
            client = f"{client} {self._allowances.counted_as(call.tenant)}"
        try:
            self._check_room(client, goes_on=bool(call.correlation_id) and not call.start)
            self._check_size(call, size)
            self.budget.take(size, client)
        except MeshError as error:
            future.set_exception(error.released())
            return future
        self._submitted.take(client, 1)
        sent = None
        try:
            # The gateway's own limit applies only to requests that came without a timeout.
            since = time.monotonic() if self._timeout_ms and not call.timeout_us else 0.0
            sent = self._arrive(call, Caller(future, connection, on_open, since, client))
        except Exception as error:  # noqa: BLE001  of this request alone, whose bytes are given back
            _fail(call, future, error)
        if sent is not None:
            # Given back in `_ended`: each callback of a future is scheduled on its own.
            sent.held_bytes = size
        elif future.done():
            self._give_back(client, size)
        else:
            future.add_done_callback(lambda _: self._give_back(client, size))
        return future

    def _give_back(self, client: str, size: int) -> None:
        """A request of this client is not in flight any more, nor are its bytes."""
        self._submitted.take(client, -1)
        self.budget.give_back(size, client)

    def _arrive(self, call: InferCall, caller: Caller) -> PendingRequest | None:
        """As `_enter`, but not before the request's tenant may send it: it is None then."""
        # What ends a sequence frees what others may have: it is never too much.
        if not call.tenant or call.ended_run:
            return self._enter(call, caller)
        caller.future.add_done_callback(partial(self._count_refusal, self._allowances.counted_as(call.tenant)))
        self._allowances.enter(call.tenant, partial(self._allowed, self._unsent(call, caller)))
        return None

    def _allowed(self, unsent: Unsent, refusal: MeshError | None) -> None:
        """The request's tenant may send it now, or may not."""
        if (call := unsent.taken()) is None:
            return
        if refusal is not None:
            _fail(call, unsent.caller.future, refusal)
        else:
            self._enter(call, unsent.caller)

    def _count_refusal(self, tenant: str, future: asyncio.Future[Answer]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, SequenceError) and error.reason == Reason.QUOTA:
            self._measures.over_quota(tenant)

    def _check_size(self, call: InferCall, size: int) -> None:
        """Refuses a request that Redis would not take.

        Redis closes a connection that sends it a larger value. All other requests of that round trip would fail too.
        """
        if size > self._request_bytes_max:
            raise RequestError(
                f"the request to model '{call.model}' has {size} bytes, and Redis, through which it goes, takes no "
                f"value beyond {self._request_bytes_max} (proto-max-bulk-len)"
            )

    def _enter(self, call: InferCall, caller: Caller, *, may_hold: bool = True) -> PendingRequest | None:
        """The request, if it is one that was sent; None if it is held, refused or an ensemble's."""
        try:
            if may_hold and self._held_names and (call.model, call.version) in self._held_names:
                self._hold(call, caller)
                return None
            try:
                record, version = self._catalog.find(call.model, call.version)
            except MeshError:
                if not may_hold:
                    raise
                self._hold(call, caller)
                return None
            return self._send_any(call, caller, record, version)
        except Exception as error:  # noqa: BLE001  of this request alone: a held one is entered in the catalog's task
            _fail(call, caller.future, error)
            return None

    def _hold(self, call: InferCall, caller: Caller) -> None:
        name = call.model, call.version
        self._held.append((name, self._unsent(call, caller)))
        self._held_names[name] += 1
        self._catalog.ask(self._release)

    def _release(self) -> None:
        """The catalog was refreshed since the oldest held request came: takes that in. It is not held a second time."""
        name, unsent = self._held.popleft()
        self._held_names[name] -= 1
        if not self._held_names[name]:
            del self._held_names[name]
        if (call := unsent.taken()) is not None:
            self._enter(call, unsent.caller, may_hold=False)

    def _send_any(self, call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest | None:
        if record.config.decoupled and caller.on_open is None and not call.ended_run:
            raise decoupled_refusal(call.endpoint)
        if call.ended_run or not record.config.ensemble:
            send = self._send_end if call.ended_run else self._send
            pending = send(call, caller, record, version)
            if caller.since:
                self._limit(pending, partial(self._expire, pending), caller.since)
            return pending
        connection = caller.connection or self._connection_of(caller.future)
        request = self._ensembles.begin(call, caller, record, version, connection)

        def ended(answer: asyncio.Future[Answer]) -> None:
            # A gateway that stops closes connections itself: what was begun goes on.
            if answer.cancelled() and not self.stopping:
                request.left()

        caller.future.add_done_callback(ended)
        if caller.since:
            self._limit(request, partial(self._expire_ensemble, call, request), caller.since)
            caller.future.add_done_callback(lambda _: request.limit and request.limit.cancel())
        return None

    def _send_end(self, call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        """Sends a request that ends a sequence without a step. It is no inference: nothing is measured or traced."""
        admitted = admit_end(call, record, version, arrived_ns=time.time_ns())
        assert admitted.sequence is not None, "only sequences end"
        shard, token = self._keys.shard_of(admitted.sequence), self._replies.token()
        pending = PendingRequest(call, record, admitted, caller.future, shard=shard, token=token, client=caller.client)
        # No reply comes for it, but it is in flight as any other.
        self._replies.expect(pending)
        caller.future.add_done_callback(partial(self._ended, pending))
        self._dispatch.send(pending)
        return pending

    def _send_step(self, call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        """Sends a step of an ensemble. It was let in with the whole request, whatever bounds are reached meanwhile.

        It has no limit of its own: a step that is given up before its answer is known would leave states apart. When
        the whole request's time is over, its steps with state go on.
        """
        self._check_size(call, input_bytes(call))
        return self._send(call, caller, record, version)

    def _expire_ensemble(self, call: InferCall, request: OpenRequest) -> None:
        request.failed(
            UnavailableError(
                f"no answer came within {self._timeout_ms} ms: it is not known what became of the request to ensemble "
                f"'{call.model}'; a request with a request id or sequence_step can be sent again safely"
            )
        )

    def _send(self, call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        config, future, on_open = record.config, caller.future, caller.on_open
        admitted = admit(
            call,
            record,
            version,
            arrived_ns=time.time_ns(),
            make_session=partial(new_session, config),
            forms=self._forms,
        )
        if admitted.sequence is not None:
            shard = self._keys.shard_of(admitted.sequence)
        else:
            shard = self._keys.home_shard(config.name)
            admitted = with_cache_key(admitted, record, self._cache_bytes)
        span = NO_STEP
        if self._tracing.enabled:
            admitted, span = self._traced(call, admitted)
        token, measures = self._replies.token(), self._measures.of(record, version)
        pending = PendingRequest(
            call,
            record,
            admitted,
            future,
            shard=shard,
            token=token,
            client=caller.client,
            span=span,
            measures=measures,
        )
        if on_open is not None and (config.decoupled or pending.wait is not None):
            on_open(pending)
        self._replies.expect(pending)
        if admitted.sequence is not None and config.orphan_grace_ms:
            pending.used = (caller.connection or self._connection_of(future)).used
        # One callback for all: a future schedules each of its callbacks on its own.
        future.add_done_callback(partial(self._ended, pending))
        self._dispatch.send(pending)
        return pending

    def _ended(self, pending: PendingRequest, future: asyncio.Future[Answer]) -> None:
        self._replies.forget(pending)
        if pending.held_bytes is not None:
            self._give_back(pending.client, pending.held_bytes)
        if pending.limit is not None:
            pending.limit.cancel()
        if pending.span is not NO_STEP:
            end_span(pending.span, future)
        is_cancelled = future.cancelled()
        if pending.measures is not None and not is_cancelled and future.exception() is None:
            message = pending.admitted.message
            pending.measures.answered(message.arrived_ns, pending.replied_ns, time.time_ns(), message.traceparent)
        if is_cancelled or pending.take is not None:
            # Nobody takes the answers that are still to come, so a decoupled model need not give them.
            caller_left(pending, self._dispatch, is_stopping=self.stopping)

    def _connection_of(self, future: asyncio.Future[Answer]) -> ConnectionSequences:
        connection = self.connection()

        def ended(answer: asyncio.Future[Answer]) -> None:
            if answer.cancelled():
                connection.end()

        future.add_done_callback(ended)
        return connection

    def _limit(self, request: OpenRequest, expire: Callable[[], None], since: float) -> None:
        """Calls `expire` when the gateway's own time for a request is over; it counts from the latest answer, or from
        when the request came.
        """
        left_s = self._left_s(request.heard or since)
        if left_s <= 0 or (request.limit is not None and not request.heard):
            expire()
        else:
            request.limit = asyncio.get_running_loop().call_later(left_s, self._limit, request, expire, since)

    def _unsent(self, call: InferCall, caller: Caller) -> Unsent:
        """A request that waits here. It fails when the gateway's own time for it is over before it is sent."""
        limit = None
        if caller.since:
            left_s = max(0.0, self._left_s(caller.since))
            limit = asyncio.get_running_loop().call_later(left_s, _fail, call, caller.future, self._late())
        return Unsent(call, caller, limit)

    def _late(self) -> MeshError:
        return never_sent(f"{self._timeout_ms} ms were over")

    def _left_s(self, since: float) -> float:
        return self._timeout_ms / 1000 - (time.monotonic() - since)

    def _expire(self, pending: PendingRequest) -> None:
        unknown = unknown_outcome(pending, f"no answer came within {self._timeout_ms} ms")
        pending.failed(unknown if pending.sent else self._late())
        if pending.accepted is None:
            self._dispatch.forget(pending)

    def _traced(self, call: InferCall, admitted: Admitted) -> tuple[Admitted, StepSpan]:
        message = admitted.message
        span = self._tracing.begin_step(
            admitted.sequence,
            call.model,
            start=bool(admitted.flags & START),
            trace_headers=call.trace_headers,
            arrived_ns=message.arrived_ns,
            endpoint=call.endpoint,
            within=call.within,
        )
        if not span.traceparent:
            return admitted, span
        message = msgspec.structs.replace(message, traceparent=span.traceparent)
        return msgspec.structs.replace(admitted, message=message), span


class Unsent:
    """A request that waits in this gateway before it is sent. Nothing of it is kept for a client that has left: its
    bytes count no longer, and a client that sends and leaves again and again would fill the gateway.

    limit  ends its wait; None: nothing does
    """

    def __init__(self, call: InferCall, caller: Caller, limit: asyncio.TimerHandle | None) -> None:
        self.caller = caller
        self._call: InferCall | None = call
        self._limit = limit
        caller.future.add_done_callback(lambda _: self.taken())

    def taken(self) -> InferCall | None:
        """The call, which is the caller's from now on; None if its client has left, or its time was over."""
        call, self._call = self._call, None
        if self._limit is not None:
            self._limit.cancel()
        return None if self.caller.future.done() else call


def _conclude(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _fail(call: InferCall, future: asyncio.Future[Answer], error: Exception) -> None:
    # Without its traceback, whose frames hold the future, which holds the error: in this cycle the tensors would wait
    # for the collector.
    told = told_of(error, "request failed unexpectedly", model=call.model)
    if not future.done():
        future.set_exception(told)

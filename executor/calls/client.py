"""Makes the calls of this executor's models through a gateway, on the event loop.

A call is an RPC of its own, so no call waits behind another one; but the calls to one sequence are made one after the
other, in the order in which they were issued. A call is sent again, through another gateway if need be, when its
gateway has gone or refuses everything, and when the mesh asks for it (`retry: same`). It repeats nothing: a step of a
sequence carries the call's name as its request id. A stateless request may be computed twice, and is answered once.

Each call has a deadline. It goes with the RPC, so that a gateway gives up what nobody waits for, and in the message to
the model that is called, whose own calls end no later.

A step that is replayed after a takeover is different: it has no caller whom an error would tell something, and the
error would lose its sequence. Its calls are made again for as long as the cause may pass and the sequence is this
executor's. So they end with the sequence (it is ended, expires, is moved) and with the lease.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from executor.calls.gateways import CallGateway, Gateways, NoGatewayError, load_grpc
from executor.calls.protocol import (
    Outcome,
    answer_of,
    failure_of,
    outcome_of,
    request_of,
    rpc_error,
    streamed,
    unsent_error,
)
from executor.engine.python.calls import CallAnswer, ModelCall
from shared.contract.calls import CALL_KEY, call_value, is_of_sequence, models_of
from shared.contract.errors import Code
from shared.contract.ids import SequenceId
from shared.process import logs
from shared.store.connections.redis_py import CONNECTION_LOST

PATIENCE_S = 30.0
"""How long a call looks for a gateway that takes it, from its first failure on: longer than a gateway takes to be
started again.
"""
PAUSE_S, PAUSE_MAX_S = 0.05, 1.0
EDGES_MAX = 1024
"""Callers with models that they called; beyond it those are forgotten whose last call was longest ago."""
BULKY_BYTES = 1 << 20
"""A request with more bytes of tensors is encoded in a thread."""
A = TypeVar("A")
Owns = Callable[[SequenceId, int], bool]
"""Whether this executor owns a sequence, in that epoch."""


class CallTurn(asyncio.Lock):
    """Of the calls to one sequence: one is made at a time. given_up_by: `caller_of` the latest that was given up"""

    given_up_by = ""


class BehindGivenUpError(Exception):
    """A call was issued behind one of the same step to the same sequence that was given up."""


class CallClient:
    """See `executor.engine.python.calls.Calls`. Lives on the event loop on which it is made.

    timeout_s  of a call whose callers have no deadline
    headers    metadata of every call
    """

    def __init__(self, gateways: Gateways, *, timeout_s: float, headers: Mapping[str, str]) -> None:
        self._gateways = gateways
        self._timeout_s = timeout_s
        self._headers = tuple((name.lower(), value) for name, value in headers.items())
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._refused: dict[int, CallAnswer] = {}
        self._turns: WeakValueDictionary[tuple[str, int | str], CallTurn] = WeakValueDictionary()
        self._closing = False
        self._owns: Owns | None = None
        self.edges: dict[tuple[str, str], None] = {}
        """Which model has called which."""

    @contextmanager
    def replaying(self, owns: Owns) -> Generator[None]:
        """Within the block calls of replayed steps are made again while their sequences are owned."""
        self._owns = owns
        try:
            yield
        finally:
            self._owns = None

    # -- what models' threads ask -----------------------------------------------------------------------------------

    def start(self, call: ModelCall) -> Future[CallAnswer]:
        return self.submit(self._answered(call))

    def stream(self, call: ModelCall) -> Stream:
        return Stream(self, call)

    def submit(self, work: Coroutine[Any, Any, A]) -> Future[A]:
        assert threading.get_ident() != self._thread, "a model that calls others runs on a thread of its own"
        load_grpc()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, action: Callable[[], None]) -> None:
        """Has the loop do something, if it still runs. Any thread may call it, the loop's own too: what a model lets go
        of is found by the collector of garbage, wherever that runs.
        """
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(action)

    # -- on the loop ------------------------------------------------------------------------------------------------

    def fail(self, number: int, text: str) -> None:
        """Answers an open call with an error. Does nothing if it has been answered meanwhile."""
        task = self._tasks.get(number)
        if task is not None:
            self._refused[number] = CallAnswer(error_code=Code.UNAVAILABLE, error=text)
            task.cancel()

    async def close(self) -> None:
        """Answers every open call with an error, so that no model waits any more, and takes no further one."""
        self._closing = True
        for number in list(self._tasks):
            self.fail(number, "the executor stops")
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._gateways.close()

    async def _answered(self, call: ModelCall) -> CallAnswer:
        async def answer() -> CallAnswer:
            async with self.turn(call):
                request = await encoded_request(call)
                return await self.insist(call, lambda gateway: self._once(gateway, call, request))

        return await self.bounded(call, answer())

    async def bounded(self, call: ModelCall, work: Coroutine[Any, Any, A]) -> A | CallAnswer:
        """What the work returns; the answer to the call if it takes too long, or `fail` refuses it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[call.number] = task
        if call.chain:
            self._note((models_of(call.chain)[-1], call.model))
        try:
            if self._closing:
                work.close()
                return CallAnswer(error_code=Code.UNAVAILABLE, error="the executor stops")
            async with asyncio.timeout(None if call.replayed else self.left_s(call)):
                return await work
        except TimeoutError:
            text = f"the call of model '{call.model}' was not answered in time (--call-timeout-secs)"
            self._give_up(call)
            return CallAnswer(error_code=Code.UNAVAILABLE, error=text)
        except asyncio.CancelledError:
            if call.number not in self._refused:
                raise
            task.uncancel()
            self._give_up(call)
            return self._refused[call.number]
        except BehindGivenUpError:
            text = f"a call before it to the same sequence of model '{call.model}' was given up"
            return CallAnswer(error_code=Code.UNAVAILABLE, error=text)
        except Exception as failure:  # noqa: BLE001 - the model waits, and must learn of it
            logs.error("call failed unexpectedly", failure, model=call.model)
            return CallAnswer(error_code=Code.INTERNAL, error=f"the call failed: {type(failure).__name__}: {failure}")
        finally:
            del self._tasks[call.number]
            self._refused.pop(call.number, None)

    def _note(self, edge: tuple[str, str]) -> None:
        self.edges.pop(edge, None)
        self.edges[edge] = None
        if len(self.edges) > EDGES_MAX:
            del self.edges[next(iter(self.edges))]

    def left_s(self, call: ModelCall) -> float:
        """How long a call may still take."""
        if not call.deadline_us:
            return self._timeout_s
        return min(self._timeout_s, max(0.0, call.deadline_us / 1e6 - time.monotonic()))

    @asynccontextmanager
    async def turn(self, call: ModelCall) -> AsyncGenerator[None]:
        """Within the block no other call to the same sequence is under way."""
        if not call.correlation_id:
            yield
            return
        # It is held by those who wait for it, and gone with the last of them.
        turn = self._turns.setdefault((call.model, call.correlation_id), CallTurn())
        async with turn:
            if turn.given_up_by == caller_of(call) != "":
                raise BehindGivenUpError
            yield

    def _give_up(self, call: ModelCall) -> None:
        """It is not known whether the call was made. What its step has issued behind it, to the same sequence, is not
        made any more: when the step runs again, this call would come too late.
        """
        if (turn := self._turns.get((call.model, call.correlation_id))) is not None:
            turn.given_up_by = caller_of(call)

    async def insist(
        self, call: ModelCall, once: Callable[[CallGateway], Coroutine[Any, Any, tuple[A, bool]]]
    ) -> A | CallAnswer:
        """Makes a call until it is answered, or not made again any more.

        once  makes it through a gateway, at once: while it waited, the gateway might be lost, and its channel closed.
              Returns the answer, and whether asking again would not change it
        """
        pause_s, patience_until = PAUSE_S, 0.0
        while True:
            answer: A | CallAnswer
            try:
                answer, is_last = await once(await self._gateways.current())
                if is_last:
                    return answer
            except (NoGatewayError, *CONNECTION_LOST) as error:
                answer = CallAnswer(error_code=Code.UNAVAILABLE, error=str(error))
            # From here on it looks for a gateway: it may have waited at the last one for long.
            now = time.monotonic()
            patience_until = patience_until or now + PATIENCE_S
            if not self._goes_on(call, is_patient=now <= patience_until):
                self._give_up(call)
                return answer
            if now > patience_until:
                patience_until = math.inf
                cause = answer.error if isinstance(answer, CallAnswer) else None
                logs.warning("replayed step waits for its call", model=call.model, by=call.chain[-1], cause=cause)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _goes_on(self, call: ModelCall, *, is_patient: bool) -> bool:
        """Whether a call that was not answered is made again."""
        if call.replayed is None:
            return is_patient
        return self._owns is not None and self._owns(*call.replayed)

    async def _once(self, gateway: CallGateway, call: ModelCall, request: bytes) -> tuple[CallAnswer, bool]:
        rpc = gateway.ready if call.asks_readiness else gateway.infer
        try:
            response = await rpc(request, timeout=self.left_s(call), metadata=self.metadata(call))
        except rpc_error() as error:
            return await self.failed(gateway, call, error)
        return CallAnswer(is_ready=response.ready) if call.asks_readiness else answer_of(response), True

    async def failed(self, gateway: CallGateway, call: ModelCall, error: Any) -> tuple[CallAnswer, bool]:
        """What an RPC's error says to the model, and whether that is the answer."""
        outcome = outcome_of(call, error)
        if outcome is Outcome.TOO_LATE and call.replayed is None:
            raise TimeoutError
        return failure_of(call, error), self.is_settled(gateway, outcome)

    def is_settled(self, gateway: CallGateway, outcome: Outcome) -> bool:
        """Whether what a gateway said is the answer to a call. If the gateway is gone, another one is asked next."""
        if outcome in (Outcome.GATEWAY_GONE, Outcome.TOO_LATE):
            self._gateways.lost(gateway)
        return outcome is Outcome.ANSWERED

    def metadata(self, call: ModelCall) -> tuple[tuple[str, str], ...]:
        about = [(CALL_KEY, call_value(call.name, call.chain))]
        if call.traceparent:
            about.append(("traceparent", call.traceparent))
        return (*self._headers, *about)


class Stream:
    """See `executor.engine.python.calls.AnswerStream`. The call is made at once; its first response is waited for in
    the call's turn.

    When its gateway has gone, the call is made again through another one, for the responses that have not come. A step
    of a sequence goes on; a stateless request runs again, and a decoupled model answers the same then.
    """

    def __init__(self, client: CallClient, call: ModelCall) -> None:
        self._client = client
        self._call = call
        self._gateway: CallGateway | None = None
        self._rpc: Any = None
        self._had = 0
        # Unless a response says that others follow: what is said in its place, as at the deadline, is the end.
        self._ended = True
        self._is_given_up = False
        self._first: Future[CallAnswer | None] | None = client.submit(client.bounded(call, self._response(self._begin)))

    def read(self) -> Future[CallAnswer | None]:
        first, self._first = self._first, None
        return first or self._client.submit(self._next())

    def cancel(self) -> None:
        self._client.soon(self._cancel)

    def _cancel(self) -> None:
        self._ended = self._is_given_up = True
        if self._rpc is not None:
            self._rpc.cancel()

    async def _response(self, come: Callable[[], Coroutine[Any, Any, CallAnswer | None]]) -> CallAnswer | None:
        """A response; None if the stream is given up while it is waited for."""
        task = asyncio.current_task()
        try:
            return await come()
        except asyncio.CancelledError:
            # gRPC raises it for an RPC that was cancelled here, too; the task itself was not cancelled then.
            if self._is_given_up and task is not None and not task.cancelling():
                return None
            raise

    async def _begin(self) -> CallAnswer | None:
        async with self._client.turn(self._call):
            return await self._insist()

    async def _insist(self) -> CallAnswer | None:
        """The next response, of whatever gateway. An error without a response is the end."""
        self._ended = True
        request = await encoded_request(self._call, self._had + 1)
        return await self._client.insist(self._call, lambda gateway: self._open(gateway, request))

    async def _open(self, gateway: CallGateway, request: bytes) -> tuple[CallAnswer | None, bool]:
        """The first response that is lacking, and whether asking again would not change it."""
        if self._is_given_up:
            # Nobody would read the responses, nor end the RPC before its deadline.
            return None, True
        call, self._gateway = self._call, gateway
        metadata = self._client.metadata(call)
        self._rpc = gateway.stream(timeout=self._client.left_s(call), metadata=metadata)
        try:
            await self._rpc.write(request)
            # If the RPC is over, how it ended is read.
            with suppress(unsent_error()):
                await self._rpc.done_writing()
            return await self._read()
        except rpc_error() as error:
            return await self._client.failed(gateway, call, error)

    async def _next(self) -> CallAnswer | None:
        if self._ended:
            return None
        self._ended = True
        return await self._client.bounded(self._call, self._response(self._following))

    async def _following(self) -> CallAnswer | None:
        try:
            answer, is_settled = await self._read()
        except rpc_error() as error:
            # It may have been cancelled meanwhile.
            if self._is_given_up or self._gateway is None:
                return None
            answer, is_settled = await self._client.failed(self._gateway, self._call, error)
        return answer if is_settled else await self._insist()

    async def _read(self) -> tuple[CallAnswer | None, bool]:
        message: Any = await self._rpc.read()
        if not hasattr(message, "infer_response"):  # the end of the stream
            self._ended = True
            return None, True
        answer, self._ended, outcome = streamed(self._call, message)
        assert self._gateway is not None, "it has said something"
        is_settled = self._client.is_settled(self._gateway, outcome)
        self._had += is_settled
        return answer, is_settled


def caller_of(call: ModelCall) -> str:
    """Names the sequence whose step makes a call; "" for any other call."""
    return call.chain[-1] if call.chain and is_of_sequence(call.chain[-1]) else ""


async def encoded_request(call: ModelCall, first_answer: int = 0) -> bytes:
    """The encoded request of a call, as `request_of` makes it: a large one in a thread."""
    if sum([len(tensor.raw) for tensor in call.inputs]) > BULKY_BYTES:
        return await asyncio.to_thread(request_of, call, first_answer)
    return request_of(call, first_answer)

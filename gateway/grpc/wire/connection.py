"""One client's HTTP/2 connection: its calls, who may send how much, and how it ends.

The protocol itself is h2's, a state machine without input and output (`gateway.grpc.wire.http2`). Here are the
transport, the calls, and the order in which they send: what is ready in one turn of the event loop leaves in one write.

Receiving. A call receives no more than WINDOW_BYTES before its server asks for a message; then it receives all of that
message. Calls do not share a window, so none of them keeps the others waiting. Frames are handled one by one, for a
short time in each turn of the event loop (`gateway.grpc.wire.turns`), whatever a client sends; nothing is read while
some of them wait.

Sending. What a window or a full transport holds back waits at its call; the calls take turns. A call that waits for its
own window takes none. While the transport is full, nothing is read either, so a client that reads nothing cannot have
answers to its pings pile up.

Ending. A client is told first: the frame GOAWAY says that the connection takes no new call, and clients open another
one without a word to their callers. What was on its way is still served. HEARD_S later a second frame names the last
call that is served, later ones are refused so that clients repeat them elsewhere, and the connection ends with its last
call.

Source: RFC 9113, above all sections 5.2, 6.8 and 10.5; gRPC over HTTP/2 (doc/PROTOCOL-HTTP2.md of grpc).
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import FlowControlError, FrameTooLargeError
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from gateway.bounds.clients import PATIENCE_S, SLOWEST_BYTES_S
from gateway.grpc.wire.http2 import WINDOW_BYTES, Broken, Http2
from gateway.grpc.wire.messages import ENCODINGS, IDENTITY
from gateway.grpc.wire.opening import BEGIN, Headers, NoRpcError, Opening, read_opening
from gateway.grpc.wire.pings import PingRules, Pings
from gateway.grpc.wire.rpc import Rpc
from gateway.grpc.wire.turns import TURN_S, LoopTurns
from gateway.ports.seats import Seat
from shared.contract.errors import UnavailableError
from shared.process import logs

CONNECTION_WINDOW_BYTES = (1 << 31) - 1
"""The largest there is, and what comes makes it smaller for a while only: the windows of the calls bound what is
received."""
HEARD_S = 0.5
"""How long a client is served as before after it was told to leave."""
LINGER_S = 2.0
"""How long the client of a connection that has ended may take to close it. What it sends meanwhile is dropped."""
WRITE_BYTES = 128 << 10
"""So much is handed to the transport at once, which then says whether it is full."""
AGE_SPREAD = 0.1
"""Connections that were opened together do not reach their age together: they vary by this part of it."""
NEWEST = (1 << 31) - 1
"""Stands for the last call in a GOAWAY that refuses none."""

Serve = Callable[[Rpc], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class RpcLimit:
    """The open calls of a port, and their bound."""

    most: int
    open: int = 0


@dataclass(frozen=True, slots=True)
class ConnectionRules:
    """What holds for the connections of a port.

    message_bytes_max  largest message as it comes
    idle_s             how long a connection without a call stays open
    age_s, grace_s     age at which a connection is to end, and how long its calls may take then; 0: any
    """

    pings: PingRules
    message_bytes_max: int
    idle_s: float
    age_s: float = 0.0
    grace_s: float = 0.0


class GrpcConnection(asyncio.Protocol):
    """One connection. serve: serves a call to its end; turns: with the other connections of the port"""

    def __init__(self, serve: Serve, seat: Seat, rules: ConnectionRules, limit: RpcLimit, turns: LoopTurns) -> None:
        self._serve = serve
        self._seat = seat
        self._rules = rules
        self._limit = limit
        self._turns = turns
        self.loop = asyncio.get_running_loop()
        self._now = self.loop.time
        self._http2 = Http2()
        self._pings = Pings(rules.pings, self._now())
        self._transport: asyncio.Transport
        self.rpcs: dict[int, Rpc] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: OrderedDict[Rpc, None] = OrderedDict()
        """Calls that have something to send, in the order of their turns; not those that wait for their own window."""
        self._hears: dict[type[Event], Callable[[Any], None]] = {
            RequestReceived: self._begins,
            DataReceived: self._came,
            StreamEnded: self._half_closed,
            StreamReset: self._left,
            WindowUpdated: self._opened,
            RemoteSettingsChanged: self._told,
            PingReceived: self._pinged,
            ConnectionTerminated: self._leaves,
            Broken: self._broke,
        }
        self._known: tuple[Headers, Opening] | None = None
        self._unwritten = 0
        self._uncredited = 0
        """Bytes that have come on the connection since its window was opened last."""
        self._is_flushing = self._is_full = self._has_begun = self._is_seen_off = False
        self._turn, self._until = -1, 0.0
        """The turn of the event loop in which frames were handled last, and until when they may be."""
        self._is_behind = False
        """Frames that have come wait for a turn of the event loop; meanwhile nothing is read."""
        self._sends_later = False
        self._last = 0
        self._told_at: float | None = None
        self._end_at: float | None = None
        spread = random.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
        self._old_at = self._now() + rules.age_s * spread if rules.age_s else None
        self._lost = asyncio.Event()
        self.peer = ""

    # -- what the transport calls -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.peer = peer_text(transport.get_extra_info("peername") or UNKNOWN)
        self._http2.initiate_connection()
        self._http2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - 65535)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._end_at is None:
            self._pings.heard(self._now())
            self._receive(data)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_full = True
        self._look_whether_to_read()

    def resume_writing(self) -> None:
        self._is_full = False
        self._look_whether_to_read()
        self._send_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._end_at = self._now()
        self._leave_calls()
        self._lost.set()

    # -- what the server calls ----------------------------------------------------------------------------------------

    @property
    def protocol(self) -> asyncio.Protocol:
        return self

    async def run(self, transport: asyncio.Transport) -> None:
        """Serves the connection, which is open now. Returns when it is closed and its calls are not served any more."""
        try:
            await self._lost.wait()
        finally:
            transport.abort()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def check(self, now: float, left_at: float | None) -> None:
        """Ends the connection, or calls of it, when their time is over."""
        del left_at
        if self._end_at is not None:
            if now >= self._end_at:
                self._transport.abort()
            return
        if self._pings.is_dead(now):
            self._transport.abort()
            return
        if self._seat.is_waiting and now >= self._seat.until:
            if self._has_begun:
                self.leave()
            else:
                self._transport.abort()
        if self._old_at is not None and now >= self._old_at:
            self.leave()
            if self._rules.grace_s and now >= self._old_at + self._rules.grace_s:
                self._transport.abort()
        if self._told_at is not None and now >= self._told_at + HEARD_S:
            self.see_off()
        if self._pings.is_due(now, has_rpcs=bool(self.rpcs)):
            self._http2.ping(b"keptlive")
            self._flush()
        for rpc in self.rpcs.values():
            if rpc.is_awaited and now > rpc.since + PATIENCE_S + rpc.messages.held / SLOWEST_BYTES_S:
                rpc.fail(UnavailableError("the message does not come: try again"))

    def leave(self) -> None:
        """Tells the client that the connection takes no new call, and goes on serving it."""
        if self._told_at is None and self._end_at is None:
            self._told_at = self._now()
            self._go_away(NEWEST)

    def see_off(self) -> None:
        """Refuses calls that come from now on. The connection ends with its last call."""
        if self._is_seen_off or self._end_at is not None:
            return
        self._is_seen_off = True
        self._go_away(self._last)
        if not self.rpcs:
            self._close()

    def crowd_out(self) -> None:
        """Ends the connection: another one gets its seat."""
        self._go_away(self._last)
        self._close()

    # -- what calls ask for -------------------------------------------------------------------------------------------

    def credit(self, rpc: Rpc) -> None:
        if rpc.is_reading and rpc.uncredited >= WINDOW_BYTES // 2:
            self._http2.increment_flow_control_window(rpc.uncredited, rpc.number)
            rpc.uncredited = 0
            self._flush_soon()

    def put(self, rpc: Rpc, data: bytes) -> None:
        if not rpc.has_begun:
            rpc.has_begun = True
            encoding = [] if rpc.encoding == IDENTITY else [(b"grpc-encoding", rpc.encoding.encode())]
            self._http2.send_headers(rpc.number, [*BEGIN, *encoding])
        try:
            if not (self._is_full or rpc.unsent):
                self._http2.send_data(rpc.number, data)
                self._wrote(len(data))
                return
        except (FlowControlError, FrameTooLargeError):
            pass  # it waits, and goes in parts
        rpc.unsent.append(memoryview(data))
        self._waiting[rpc] = None
        self._flush_soon()
        self._send_waiting()

    def finish(self, rpc: Rpc) -> None:
        if rpc.unsent or rpc.last_headers is None:
            return
        head = rpc.last_headers if rpc.has_begun else [*BEGIN[:2], *rpc.last_headers]
        self._end(rpc.number, head, is_half_closed=rpc.is_half_closed)
        self._wrote(0)
        self._forget(rpc)

    def cut(self) -> None:
        self._transport.abort()

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        if self._turn != (turn := self._turns.number):
            self._turn, self._until = turn, self._now() + TURN_S
        self._is_behind = False
        for events in self._http2.receive(data):
            for event in events:
                if (hear := self._hears.get(type(event))) is not None:
                    hear(event)
            if self._end_at is not None:
                return
            if self._now() > self._until:
                self._is_behind = True
                self._turns.wait(self._go_on)
                break
        self._look_whether_to_read()
        self._flush_soon()

    def _go_on(self) -> None:
        if self._end_at is None:
            self._receive(b"")

    def _broke(self, _event: Broken) -> None:
        self._close()

    def _look_whether_to_read(self) -> None:
        if self._is_full or self._is_behind:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _begins(self, event: RequestReceived) -> None:
        if self._is_seen_off:
            self._http2.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
            return
        self._last = event.stream_id
        headers = cast("Headers", event.headers)
        try:
            if self._known is None or self._known[0] != headers:
                self._known = headers, read_opening(headers)
        except NoRpcError as error:
            self._answer(event, error)
            return
        opening = self._known[1]
        until = None if opening.timeout_s is None else self._now() + opening.timeout_s
        rpc = Rpc(self, event.stream_id, opening, self._rules.message_bytes_max, until)
        if not self.rpcs:
            self._seat.work()
        self.rpcs[rpc.number] = rpc
        self._limit.open += 1
        if self._limit.open > self._limit.most:
            rpc.end(RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        elif opening.encoding not in ENCODINGS:
            accepted = (("grpc-accept-encoding", ",".join(ENCODINGS)),)
            rpc.end(UNIMPLEMENTED, f"Compression algorithm '{opening.encoding}' is not supported", accepted)
        else:
            rpc.task = self.loop.create_task(self._serve(rpc))
            self._tasks.add(rpc.task)
            rpc.task.add_done_callback(partial(self._served, rpc))
            if opening.timeout_s is not None:
                rpc.expiry = self.loop.call_later(opening.timeout_s, self._expire, rpc)

    def _answer(self, event: RequestReceived, error: NoRpcError) -> None:
        status = str(error.status.value).encode()
        headers = [(b":status", status), (b"content-length", b"0")]
        self._end(event.stream_id, headers, is_half_closed=event.stream_ended is not None)

    def _came(self, event: DataReceived) -> None:
        self._uncredited += event.flow_controlled_length
        if self._uncredited > CONNECTION_WINDOW_BYTES // 2:
            self._http2.increment_flow_control_window(self._uncredited)
            self._uncredited = 0
        rpc = self.rpcs.get(event.stream_id)
        if rpc is not None:
            rpc.uncredited += event.flow_controlled_length
            rpc.came(event.data)
            self.credit(rpc)

    def _half_closed(self, event: StreamEnded) -> None:
        if (rpc := self.rpcs.get(event.stream_id)) is not None:
            rpc.half_closed()

    def _left(self, event: StreamReset) -> None:
        if (rpc := self.rpcs.get(event.stream_id)) is not None:
            self._gone(rpc)

    def _pinged(self, _event: PingReceived) -> None:
        if self._pings.are_too_many(self._now(), has_rpcs=bool(self.rpcs)):
            self._go_away(self._last, ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_pings")
            self._close()

    def _told(self, event: RemoteSettingsChanged) -> None:
        if not self._has_begun:
            self._has_begun = True
            if self._seat.is_waiting:
                self._seat.wait(self._now(), self._rules.idle_s)
        if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
            self._waiting.update((rpc, None) for rpc in self.rpcs.values() if rpc.unsent)
            self._send_waiting()

    def _opened(self, event: WindowUpdated) -> None:
        rpc = self.rpcs.get(event.stream_id or 0)
        if rpc is not None and rpc.unsent:
            self._waiting[rpc] = None
        if rpc is not None or not event.stream_id:
            self._send_waiting()

    def _leaves(self, _event: ConnectionTerminated) -> None:
        self.see_off()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send_waiting(self) -> None:
        """Sends what windows and transport take now, of one call after the other, for one turn of the event loop."""
        until = self._now() + TURN_S
        while self._can_send and not self._sends_later:
            rpc, _ = self._waiting.popitem(last=False)
            self._send_some(rpc)
            if self._can_send and self._now() > until:
                self._sends_later = True
                self._turns.wait(self._send_rest)

    def _send_rest(self) -> None:
        self._sends_later = False
        self._send_waiting()

    @property
    def _can_send(self) -> bool:
        return bool(self._waiting) and not self._is_full and self._http2.outbound_flow_control_window > 0

    def _send_some(self, rpc: Rpc) -> None:
        """Sends what there is of a call. Behind the last of it comes the call's end."""
        unsent = rpc.unsent
        while unsent:
            if self._is_full or self._http2.outbound_flow_control_window <= 0:
                self._waiting[rpc] = None
                return
            window = self._http2.local_flow_control_window(rpc.number)
            size = min(window, self._http2.max_outbound_frame_size, len(unsent[0]))
            if size <= 0:
                return  # until its own window opens
            self._http2.send_data(rpc.number, bytes(unsent[0][:size]))
            if size == len(unsent[0]):
                unsent.popleft()
            else:
                unsent[0] = unsent[0][size:]
            self._wrote(size)
        rpc.sent()
        self.finish(rpc)

    def _wrote(self, size: int) -> None:
        self._pings.wrote()
        self._unwritten += size
        if self._unwritten > WRITE_BYTES:
            self._flush()
        else:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        self._unwritten = 0
        data = self._http2.data_to_send()
        if data and self._end_at is None:
            self._transport.write(data)

    def _go_away(self, last: int, code: ErrorCodes = ErrorCodes.NO_ERROR, why: bytes = b"") -> None:
        self._flush()
        if self._end_at is None:
            frame = GoAwayFrame(0, last_stream_id=last, error_code=code, additional_data=why)
            self._transport.write(frame.serialize())

    def _end(self, number: int, headers: Headers, *, is_half_closed: bool) -> None:
        """Ends a stream. is_half_closed: its client has said all that it had to say; else it need not go on"""
        self._http2.send_headers(number, headers, end_stream=True)
        if not is_half_closed:
            self._http2.reset_stream(number, ErrorCodes.NO_ERROR)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _expire(self, rpc: Rpc) -> None:
        """The caller waits no longer."""
        self._break(rpc, DEADLINE_EXCEEDED, "Deadline Exceeded")
        if rpc.task is not None:
            rpc.task.cancel()

    def _break(self, rpc: Rpc, code: int, text: str) -> None:
        """Ends a call that is not served to its end."""
        if rpc.unsent and not rpc.is_over:
            # A part of a message may be sent, behind which no status can follow.
            self._http2.reset_stream(rpc.number, ErrorCodes.CANCEL)
            self._flush_soon()
            self._forget(rpc)
        rpc.end(code, text)

    def _served(self, rpc: Rpc, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._break(rpc, CANCELLED, "the call was cancelled")
        elif (error := task.exception()) is not None:
            logs.error("grpc call failed unexpectedly", error)
            self._break(rpc, INTERNAL, f"internal error in the gateway: {type(error).__name__}")

    def _leave_calls(self) -> None:
        for rpc in list(self.rpcs.values()):
            self._gone(rpc)

    def _gone(self, rpc: Rpc) -> None:
        """The client has left the call."""
        self._forget(rpc)
        if rpc.task is not None:
            rpc.task.cancel()

    def _forget(self, rpc: Rpc) -> None:
        if self.rpcs.pop(rpc.number, None) is None:
            return
        self._waiting.pop(rpc, None)
        self._limit.open -= 1
        rpc.over()
        if not self.rpcs:
            self._seat.wait(self._now(), self._rules.idle_s)
            if self._is_seen_off:
                self._close()

    def _close(self) -> None:
        """Ends the connection. Bytes that the client is sending are dropped for a while: otherwise the system would
        reset the connection, and the client would lose what it was told last."""
        if self._end_at is not None:
            return
        self._flush()
        self._end_at = self._now() + LINGER_S
        self._leave_calls()
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()


CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 1, 4, 8, 12, 13
"""Statuses of gRPC with which a connection ends calls itself."""


UNKNOWN = ("unknown", 0)
"""The address of a client that has left before its connection was looked at."""


def peer_text(address: tuple[Any, ...]) -> str:
    """A client's address, as gRPC writes it: `ipv4:127.0.0.1:50000` or `ipv6:[::1]:50000`."""
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

"""One client's HTTP/2 connection: its calls, what it receives, and how it ends.

The protocol itself is h2's, a state machine without input and output (`gateway.grpc.wire.http2`).

A call receives no more than WINDOW_BYTES before its server asks for a message; then it receives all of that message.
Calls do not share a window, so none of them keeps the others waiting. When frames are handled is said in
`gateway.grpc.wire.receiving`, when answers are sent in `gateway.grpc.wire.sending`.

A connection that ends tells its client first: the frame GOAWAY says that the connection takes no new call, and clients
open another one without a word to their callers. What was on its way is still served. SEE_OFF_S later a second frame
names the last call that is served, later ones are refused so that clients repeat them elsewhere, and the connection
ends with its last call.

Source: RFC 9113, above all sections 5.2, 6.8 and 10.5; gRPC over HTTP/2 (doc/PROTOCOL-HTTP2.md of grpc).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.settings import SettingCodes

from gateway.bounds.clients import PATIENCE_S, SLOWEST_BYTES_S
from gateway.grpc.wire.frame_allowance import EARNED, RESET, USEFUL_BYTES, FrameAllowance, Useless
from gateway.grpc.wire.http2 import WINDOW_BYTES, Broken, Http2
from gateway.grpc.wire.messages import ENCODINGS, IDENTITY
from gateway.grpc.wire.opening import BEGIN, Headers, NoRpcError, Opening, read_opening, trailers
from gateway.grpc.wire.pings import Pings
from gateway.grpc.wire.receiving import Hears, Receiving
from gateway.grpc.wire.rpc import Rpc
from gateway.grpc.wire.rules import ConnectionRules, RpcLimit
from gateway.grpc.wire.sending import Sending
from gateway.ports.listening import progress
from gateway.ports.seats import Seat
from gateway.ports.serving import SEE_OFF_S
from gateway.ports.turns import LoopTurns
from shared.contract.calls import FULL
from shared.contract.errors import RequestError, UnavailableError
from shared.process import logs

CONNECTION_WINDOW_BYTES = (1 << 31) - 1
"""The largest there is, and what comes makes it smaller for a while only: the windows of the calls bound what is
received."""
CREDITS = 2048
"""The connection's window opens by such a part of it, 1 MiB: many calls that are not read must not keep it shut."""
LINGER_S = 2.0
"""How long the client of a connection that has ended may take nothing of what was sent last, and not close it. What it
sends meanwhile is dropped."""
AGE_SPREAD = 0.1
"""Connections that were opened together do not reach their age together: they vary by this part of it."""
NEWEST = (1 << 31) - 1
"""Stands for the last call in a GOAWAY that refuses none."""
ENCODING_CHARACTERS_MAX = 64
"""Of an unknown encoding, which its answer names. To write one of 15 KB that is no text takes hpack 100 ms."""
UNKNOWN = ("unknown", 0)
"""The address of a client that has left before its connection was looked at."""
CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 1, 4, 8, 12, 13
"""Statuses of gRPC with which a connection ends calls itself."""

Serve = Callable[[Rpc], Coroutine[Any, Any, None]]


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
        self._pings = Pings(rules.pings, self._now())
        self._transport: asyncio.Transport
        self._http2: Http2
        self._allowance: FrameAllowance
        self._sending: Sending
        self._receiving: Receiving
        self.rpcs: dict[int, Rpc] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: tuple[Headers, Opening] | None = None
        self._uncredited = 0
        """Bytes that count no longer, and for which the connection's window has not opened yet."""
        self._has_begun = self._is_seen_off = False
        self._last = 0
        self._told_at: float | None = None
        self._end_at: float | None = None
        self._progress = 0
        """How far the client had come in taking what it was sent. Looked at only when the connection has ended."""
        spread = random.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
        self._old_at = self._now() + rules.age_s * spread if rules.age_s else None
        self._lost = asyncio.Event()
        self.peer = ""
        self.client = seat.client

    # -- what the transport calls -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection's parts are made here: many a client never comes to the end of its TLS handshake."""
        self._transport = cast("asyncio.Transport", transport)
        hears: Hears = {
            RequestReceived: self._begins,
            DataReceived: self._came,
            StreamEnded: self._half_closed,
            StreamReset: self._left,
            WindowUpdated: self._opened,
            RemoteSettingsChanged: self._told,
            PingReceived: self._pinged,
            ConnectionTerminated: lambda _event: self.see_off(),
            Broken: lambda _event: self._close(),
            Useless: self._tell_off,
        }
        self._http2 = Http2()
        self._allowance = FrameAllowance(self._now())
        self._sending = Sending(self._transport, self._http2, self._pings, self._turns, self._allowance)
        self._receiving = Receiving(
            self._transport,
            self._http2,
            self._turns,
            self.client,
            self._sending,
            hears,
            self._allowance,
        )
        self.peer = peer_text(transport.get_extra_info("peername") or UNKNOWN)
        self._http2.initiate_connection()
        self._http2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - 65535)
        self._sending.flush()

    def data_received(self, data: bytes) -> None:
        if self._end_at is None:
            self._pings.heard(self._now())
            self._receiving.came(data)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._sending.is_full = True
        self._receiving.look_whether_to_read()

    def resume_writing(self) -> None:
        self._sending.is_full = False
        self._receiving.look_whether_to_read()
        self._sending.opened()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._end_at = self._now()
        self._sending.abandon()
        self._receiving.finish()
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
            if (reached := progress(self._transport)) != self._progress:
                self._progress, self._end_at = reached, now + LINGER_S
            elif now >= self._end_at:
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
        if self._told_at is not None and now >= self._told_at + SEE_OFF_S:
            self.see_off()
        if self._pings.is_due(now, has_rpcs=bool(self.rpcs)):
            self._http2.ping(b"keptlive")
            self._sending.flush()
        for rpc in self.rpcs.values():
            if rpc.is_awaited and now > rpc.since + PATIENCE_S + rpc.messages.held / SLOWEST_BYTES_S:
                rpc.fail(UnavailableError("the message does not come: try again"))

    def leave(self) -> None:
        """Tells the client that the connection takes no new call, and goes on serving it."""
        if self._told_at is None and self._end_at is None:
            self._told_at = self._now()
            self._sending.go_away(NEWEST)

    def see_off(self) -> None:
        """Refuses calls that come from now on. The connection ends with its last call."""
        if self._is_seen_off or self._end_at is not None:
            return
        self._is_seen_off = True
        self._sending.go_away(self._last)
        if not self.rpcs:
            self._close()

    def crowd_out(self) -> None:
        """Ends the connection: another one gets its seat."""
        self._sending.go_away(self._last)
        self._close()

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of headers whose end has not come: no call keeps them."""
        return self._http2.unfinished_bytes

    # -- what calls ask for -------------------------------------------------------------------------------------------

    def credit(self, rpc: Rpc) -> None:
        if rpc.is_reading and rpc.uncredited >= WINDOW_BYTES // 2:
            self._http2.increment_flow_control_window(rpc.uncredited, rpc.number)
            self._took(rpc.uncredited)
            rpc.uncredited = 0
            self._sending.flush_soon()

    def put(self, rpc: Rpc, data: bytes) -> None:
        if not rpc.has_begun:
            rpc.has_begun = True
            encoding = [] if rpc.encoding == IDENTITY else [(b"grpc-encoding", rpc.encoding.encode())]
            self._http2.answer(rpc.number, [*BEGIN, *encoding])
        self._sending.message(rpc, data)

    def finish(self, rpc: Rpc) -> None:
        if rpc.unsent or rpc.last_headers is None:
            return
        head = rpc.last_headers if rpc.has_begun else [*BEGIN[:2], *rpc.last_headers]
        self._sending.end(rpc.number, head, is_half_closed=rpc.is_half_closed)
        self._forget(rpc)

    def cut(self) -> None:
        self._transport.abort()

    async def turn(self) -> None:
        await self._turns.entered(self.client)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _begins(self, event: RequestReceived) -> None:
        if self._is_seen_off:
            self._http2.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
            return
        self._last = event.stream_id
        self._allowance.left += EARNED
        headers = cast("Headers", event.headers)
        try:
            if self._known is None or self._known[0] != headers:
                self._known = headers, read_opening(headers)
        except NoRpcError as error:
            self._refuse(event, [(b":status", str(error.status.value).encode()), (b"content-length", b"0")])
            return
        except RequestError as error:
            self._refuse(event, [*BEGIN[:2], *trailers(RESOURCE_EXHAUSTED, error.message)])
            return
        opening = self._known[1]
        until = None if opening.timeout_s is None else self._now() + opening.timeout_s
        rpc = Rpc(self, event.stream_id, opening, self._rules.message_bytes_max, until)
        # With END_STREAM its headers are all that its client says: a stream that was answered then is closed for both.
        rpc.is_half_closed = event.stream_ended is not None
        if not self.rpcs:
            self._seat.work()
        self.rpcs[rpc.number] = rpc
        if not self._limit.begin(self.client, opening.path):
            logs.warning("grpc calls refused", most=self._limit.most, client=self.client)
            rpc.end(RESOURCE_EXHAUSTED, FULL)
        elif opening.encoding not in ENCODINGS:
            accepted = (("grpc-accept-encoding", ",".join(ENCODINGS)),)
            unknown = opening.encoding[:ENCODING_CHARACTERS_MAX]
            rpc.end(UNIMPLEMENTED, f"Compression algorithm '{unknown}' is not supported", accepted)
        else:
            rpc.task = self.loop.create_task(self._serve(rpc))
            self._tasks.add(rpc.task)
            rpc.task.add_done_callback(partial(self._served, rpc))
            if opening.timeout_s is not None:
                rpc.expiry = self.loop.call_later(opening.timeout_s, self._expire, rpc)

    def _refuse(self, event: RequestReceived, headers: Headers) -> None:
        self._sending.end(event.stream_id, headers, is_half_closed=event.stream_ended is not None)

    def _came(self, event: DataReceived) -> None:
        rpc = self.rpcs.get(event.stream_id)
        if rpc is None:
            self._took(event.flow_controlled_length)
            return
        rpc.uncredited += event.flow_controlled_length
        if len(event.data) >= USEFUL_BYTES:
            self._allowance.left += EARNED
        rpc.came(event.data)
        self.credit(rpc)

    def _took(self, size: int) -> None:
        """Bytes that have come count no longer: the connection's window may open for as many."""
        self._uncredited += size
        if self._uncredited > CONNECTION_WINDOW_BYTES // CREDITS:
            self._http2.increment_flow_control_window(self._uncredited)
            self._uncredited = 0
            self._sending.flush_soon()

    def _half_closed(self, event: StreamEnded) -> None:
        if (rpc := self.rpcs.get(event.stream_id)) is not None:
            rpc.half_closed()

    def _left(self, event: StreamReset) -> None:
        if (rpc := self.rpcs.get(event.stream_id)) is not None:
            if not (rpc.message_bytes or rpc.messages.ready):
                self._allowance.left -= RESET
            self._gone(rpc)

    def _tell_off(self, _event: Useless) -> None:
        logs.warning("grpc connection of useless frames closed", client=self.client)
        self._sending.go_away(self._last, ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_useless_frames")
        self._close()
        self._transport.pause_reading()  # To drop what it goes on sending would cost as much as it likes.

    def _pinged(self, _event: PingReceived) -> None:
        if self._pings.are_too_many(self._now(), has_rpcs=bool(self.rpcs)):
            self._sending.go_away(self._last, ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_pings")
            self._close()

    def _told(self, event: RemoteSettingsChanged) -> None:
        if not self._has_begun:
            self._has_begun = True
            if self._seat.is_waiting:
                self._seat.wait(self._now(), self._rules.idle_s)
        if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
            self._sending.opened(self.rpcs.values())

    def _opened(self, event: WindowUpdated) -> None:
        if not event.stream_id:
            self._sending.opened()
        elif (rpc := self.rpcs.get(event.stream_id)) is not None:
            self._sending.opened([rpc])

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
            self._sending.flush_soon()
            self._forget(rpc)
        rpc.end(code, text)

    def _served(self, rpc: Rpc, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # A task that was cancelled keeps its frames, and they keep the call.
        rpc.task = None
        if rpc.is_over:
            self._limit.end(self.client)
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
        self._sending.forget(rpc)
        if self._end_at is None:
            self._took(rpc.uncredited)
        if rpc.task is None:
            # Else it counts until it is not served any more: a thread may be at work for it that nothing ends.
            self._limit.end(self.client)
        rpc.over()
        if not self.rpcs:
            self._seat.wait(self._now(), self._rules.idle_s)
            if self._is_seen_off:
                self._close()

    def _close(self) -> None:
        """Ends the connection. Bytes that the client is sending are dropped for a while: otherwise the system would
        reset the connection, and the client would lose what it was told last. TLS does the same when its end has been
        sent, so there the client, who knows of the end, is left to close."""
        if self._end_at is not None:
            return
        self._sending.finish()
        self._end_at = self._now() + LINGER_S
        self._receiving.finish()
        self._leave_calls()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        elif not self._has_begun:
            self._transport.close()


def peer_text(address: tuple[Any, ...]) -> str:
    """A client's address, as gRPC writes it: `ipv4:127.0.0.1:50000` or `ipv6:[::1]:50000`."""
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

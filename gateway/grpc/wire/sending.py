"""What a connection sends: when, how much, and of which call first.

What is ready in one turn of the event loop leaves in one write. What a window or a full transport holds back waits at
its call; the calls take turns, frame by frame. A call that waits for its own window takes none.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from h2.errors import ErrorCodes
from hyperframe.frame import GoAwayFrame

from gateway.grpc.wire.frame_allowance import EARNED, FrameAllowance
from gateway.grpc.wire.http2 import Http2
from gateway.grpc.wire.opening import Headers
from gateway.grpc.wire.pings import Pings
from gateway.grpc.wire.rpc import Rpc
from gateway.ports.turns import TURN_S, LoopTurns

WRITE_BYTES = 128 << 10
"""So much is handed to the transport at once, which then says whether it is full."""


class Sending:
    """The sending half of a connection. is_full: the transport takes no more for now"""

    def __init__(
        self, transport: asyncio.Transport, http2: Http2, pings: Pings, turns: LoopTurns, allowance: FrameAllowance
    ) -> None:
        self.is_full = False
        self._transport = transport
        self._http2 = http2
        self._pings = pings
        self._allowance = allowance
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[Rpc, None] = OrderedDict()
        """Calls that have something to send, in the order of their turns; not those that wait for their own window."""
        self._unwritten = 0
        self._is_flushing = self._goes_on = self._has_ended = False

    def message(self, rpc: Rpc, data: bytes) -> None:
        """Sends bytes of a call's answer. What cannot be sent yet waits in `Rpc.unsent`."""
        if not (self.is_full or rpc.unsent) and self._http2.send_at_once(rpc.number, data):
            self._wrote(len(data))
            return
        rpc.unsent.append(memoryview(data))
        self.flush_soon()
        self.opened([rpc])

    def end(self, number: int, headers: Headers, *, is_half_closed: bool) -> None:
        """Ends a stream. is_half_closed: its client has said all that it had to say; else it need not go on"""
        self._http2.answer(number, headers, end_stream=True)
        if not is_half_closed:
            self._http2.reset_stream(number, ErrorCodes.NO_ERROR)
        self._wrote(0)

    def forget(self, rpc: Rpc) -> None:
        """Drops what still waits for room, as the call is over."""
        self._waiting.pop(rpc, None)

    def opened(self, rpcs: Iterable[Rpc] = ()) -> None:
        """The connection's window may have grown, and the windows of these calls. Sends what windows and transport take
        now, a frame of one call after the other, for one turn of the event loop."""
        self._waiting.update((rpc, None) for rpc in rpcs if rpc.unsent)
        if not self._waiting:
            return
        until = self._loop.time() + TURN_S
        while self._can_send and not self._goes_on:
            rpc, _ = self._waiting.popitem(last=False)
            self._send_part(rpc)
            if self._can_send and self._loop.time() > until:
                self._goes_on = True
                self._turns.wait(self._go_on)

    def go_away(self, last: int, code: ErrorCodes = ErrorCodes.NO_ERROR, why: bytes = b"") -> None:
        """Tells the client that no call after `last` is served."""
        self.flush()
        if not self._has_ended:
            self._transport.write(GoAwayFrame(0, last_stream_id=last, error_code=code, additional_data=why).serialize())

    def flush_soon(self) -> None:
        """Writes what h2 has made ready, in the next turn of the loop."""
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._is_flushing = False
        self._unwritten = 0
        data = self._http2.data_to_send()
        if data and not self._has_ended:
            self._transport.write(data)

    def finish(self) -> None:
        """Writes what is ready. Nothing more is sent."""
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Nothing is sent any more, nor what is ready: uvloop takes no byte for a connection that is lost."""
        self._has_ended = True

    def _go_on(self) -> None:
        self._goes_on = False
        self.opened()

    @property
    def _can_send(self) -> bool:
        return bool(self._waiting) and not self.is_full and self._http2.outbound_flow_control_window > 0

    def _send_part(self, rpc: Rpc) -> None:
        """Sends a frame of a call, which then waits for its next turn if there is more."""
        part = rpc.unsent[0]
        size = min(self._http2.local_flow_control_window(rpc.number), self._http2.max_outbound_frame_size, len(part))
        if size <= 0:
            return  # until its own window opens
        self._http2.send_data(rpc.number, bytes(part[:size]))
        if size == len(part):
            rpc.unsent.popleft()
        else:
            rpc.unsent[0] = part[size:]
        self._wrote(size)
        if rpc.unsent:
            self._waiting[rpc] = None
        else:
            rpc.sent()

    def _wrote(self, size: int) -> None:
        self._pings.wrote()
        self._allowance.left += EARNED
        self._unwritten += size
        if self._unwritten > WRITE_BYTES:
            self.flush()
        else:
            self.flush_soon()

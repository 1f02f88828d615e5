"""What a connection receives, and when it is handled.

Frames are handled one by one, for a short time in each turn of the event loop, whatever a client sends, and of so many
connections only (`gateway.ports.turns`). Nothing is read while some of them wait. Nor is it while the transport is
full: a client that reads nothing cannot have answers to its pings pile up. A client whose frames bring nothing loses
its connection (`gateway.grpc.wire.frame_allowance`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from h2.events import Event

from gateway.grpc.wire.frame_allowance import FrameAllowance, Useless
from gateway.grpc.wire.http2 import Http2
from gateway.grpc.wire.sending import Sending
from gateway.ports.turns import TURN_S, LoopTurns

AHEAD_BYTES = 4 << 10
"""Bytes that may wait for the connection's turn while others come: to stop reading costs more than they take."""
Hears = Mapping[type[Event], Callable[[Any], None]]
"""Who is told of an event, by its kind."""


class Receiving:
    """The receiving half of a connection. client: with whose other connections it takes turns"""

    def __init__(
        self,
        transport: asyncio.Transport,
        http2: Http2,
        turns: LoopTurns,
        client: str,
        sending: Sending,
        hears: Hears,
        allowance: FrameAllowance,
    ) -> None:
        self._transport = transport
        self._client = client
        self._http2 = http2
        self._turns = turns
        self._sending = sending
        self._hears: Hears = hears
        self._allowance = allowance
        self._now = asyncio.get_running_loop().time
        self._turn, self._until = -1, 0.0
        """The turn of the event loop in which frames were handled last, and until when they may be."""
        self._is_behind = self._has_ended = False
        self._came = b""
        """Bytes that wait until the connection may begin with them."""

    def came(self, data: bytes) -> None:
        """Bytes have come: handles them when it is the connection's turn."""
        is_waiting = bool(self._came)
        self._came += data
        if not is_waiting:
            self._turns.enter(self._client, self._begin)
        if len(self._came) > AHEAD_BYTES:
            self.look_whether_to_read()

    def _begin(self) -> None:
        data, self._came = self._came, b""
        if not self._has_ended:
            self._handle(data)

    def _handle(self, data: bytes = b"") -> None:
        """Handles these bytes and those that came before, or as many as the turn has time for."""
        if self._turn != (turn := self._turns.number):
            self._turn, self._until = turn, self._now() + TURN_S
        self._is_behind = False
        now, until, hears, allowance = self._now, self._until, self._hears, self._allowance
        for events in self._http2.receive(data):
            for event in events:
                if (hear := hears.get(type(event))) is not None:
                    hear(event)
            if self._has_ended:
                return
            allowance.left -= 1
            if allowance.left < 0 and allowance.is_spent(now()):
                hears[Useless](Useless())
                return
            if now() > until:
                self._is_behind = True
                self._turns.wait(self._go_on)
                break
        self.look_whether_to_read()
        if self._http2.has_to_send:
            self._sending.flush_soon()

    def look_whether_to_read(self) -> None:
        if self._sending.is_full or self._is_behind or len(self._came) > AHEAD_BYTES:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def finish(self) -> None:
        """Nothing more is handled. Nobody is told any more, so that the connection is in no cycle when it is over."""
        self._has_ended = True
        self._hears = {}
        self._http2.finish()
        self._transport.resume_reading()

    def _go_on(self) -> None:
        if not self._has_ended:
            self._handle()

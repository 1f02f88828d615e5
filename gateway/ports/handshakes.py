"""TLS handshakes of a port take turns: each takes a millisecond of the event loop, and thousands may come at once.

A connection's bytes come through here until both sides have shaken hands. Its TLS gets one record in a turn of the
loop that is its own. It is made with the first bytes: a client that sends none takes little memory.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import cast

from gateway.ports.turns import LoopTurns

WRITE_AHEAD_BYTES = 64 << 10
"""Bytes that a transport buffers before a writer must wait: asyncio's own default, but for TLS, where it is eight times
as many."""
RECORD_HEAD_BYTES = 5
"""With which a record begins. The last two are the size of what follows."""


async def shake_hands(
    accepted: socket.socket, protocol: asyncio.Protocol, tls: ssl.SSLContext, turns: LoopTurns, end_s: float
) -> asyncio.Transport:
    """The transport of a connection of TLS, of which `protocol` has been told.

    turns   with the other handshakes of the port
    end_s   how long the end of TLS may take
    raises  OSError when the client leaves, also ssl.SSLError when it speaks no TLS or is not accepted
    """
    loop = asyncio.get_running_loop()
    gate = Handshake(turns)
    plain, _ = await loop.connect_accepted_socket(lambda: gate, accepted)
    try:
        await gate.begun
        await turns.turn()
        # Between what `start_tls` does at once, and the first bytes that it lets in.
        loop.call_soon(gate.guard)
        # Nobody is told of a connection that ends before it has begun.
        nobody = asyncio.Protocol()
        transport = await loop.start_tls(plain, nobody, tls, server_side=True, ssl_shutdown_timeout=end_s)
    except BaseException:
        plain.abort()
        raise
    assert transport is not None, "None is given for a transport that is closing, and this one is waited for"
    transport.set_write_buffer_limits(WRITE_AHEAD_BYTES)
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    gate.leave()
    return transport


class Handshake(asyncio.Protocol):
    """Stands between the plain transport and its TLS. begun: done when bytes have come"""

    def __init__(self, turns: LoopTurns) -> None:
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns = turns
        self._plain: asyncio.Transport
        self._tls: asyncio.BufferedProtocol | None = None
        self._came = bytearray()
        self._missing = 0
        """Bytes of a record whose beginning TLS has."""

    # -- what the transport calls --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._came += data
        self._plain.pause_reading()
        if self._tls is not None:
            self._turns.wait(self._go_on)
        elif not self.begun.done():
            self.begun.set_result(None)

    def eof_received(self) -> bool | None:
        return None if self._tls is None else self._tls.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._tls is not None:
            self._tls.connection_lost(exc)
            self._tls = None
        elif not self.begun.done():
            self.begun.set_exception(exc or ConnectionResetError("the client left before it began"))

    # -- what the handshake calls --------------------------------------------------------------------------------------

    def guard(self) -> None:
        """Takes the place of TLS at the transport, which is not read at the moment."""
        self._tls = cast("asyncio.BufferedProtocol", self._plain.get_protocol())
        self._plain.set_protocol(self)
        asyncio.get_running_loop().call_soon(self._go_on)

    def leave(self) -> None:
        """Gives TLS its place, and what has come."""
        if (tls := self._tls) is None:
            return
        self._plain.pause_reading()
        self._plain.set_protocol(tls)
        self._tls = None
        if self._came:
            feed(tls, self._came)
        self._plain.resume_reading()

    def _go_on(self) -> None:
        if (tls := self._tls) is None:
            return
        if not self._missing and len(self._came) >= RECORD_HEAD_BYTES:
            self._missing = RECORD_HEAD_BYTES + int.from_bytes(self._came[RECORD_HEAD_BYTES - 2 : RECORD_HEAD_BYTES])
        part = self._came[: self._missing]
        del self._came[: len(part)]
        self._missing -= len(part)
        if part:
            feed(tls, part)
        if len(self._came) >= RECORD_HEAD_BYTES:
            self._turns.wait(self._go_on)
        else:
            self._plain.resume_reading()


def feed(tls: asyncio.BufferedProtocol, data: bytearray) -> None:
    buffer = cast("memoryview", tls.get_buffer(len(data)))
    buffer[: len(data)] = data
    tls.buffer_updated(len(data))

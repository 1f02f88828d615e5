"""The server of a port: gives each connection a seat, ends those whose clients are too slow, and takes leave of all.

What the connections speak is their own affair (`gateway.http`, `gateway.grpc.wire`).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from errno import ECONNABORTED
from functools import partial
from typing import Generic, Protocol, TypeVar

from gateway.ports.handshakes import shake_hands
from gateway.ports.listening import quieten
from gateway.ports.seats import Seat, Share, client_of
from gateway.ports.turns import LoopTurns
from shared.process import logs
from shared.process.lifecycle import end

SEE_OFF_S = 0.5
"""How long a server that stops keeps connections open that have no request. Their clients learn in this time that the
server leaves, and what they send just then is answered."""
CHECK_S = 1.0
"""Pause between two checks for clients that are too slow."""
ACCEPT_PAUSE_S = 0.2
"""Pause after a connection could not be accepted because descriptors or memory ran out."""
IDLE_BYTES = 32 << 10
"""What a connection without a request may take: 16 KiB, and with TLS 62 KiB."""
IDLE_AT_ONCE = 64
"""So many of them are ended at once when memory is short: it shows only later how much that gives back."""
TELL_S = 60.0
"""Shortest time between two log lines of one kind about connections."""


class PortConnection(Protocol):
    """One client's connection, as its server sees it."""

    @property
    def protocol(self) -> asyncio.Protocol:
        """What the transport of this connection speaks to."""
        ...

    async def run(self, transport: asyncio.Transport) -> None:
        """Serves the connection, which is open now. Returns when it is closed."""

    def check(self, now: float, left_at: float | None) -> None:
        """Ends the connection if its client is too slow. left_at: when the server began to stop, else None."""

    def see_off(self) -> None:
        """The server stops: ends the connection if it has no request, else as soon as it has none."""

    def crowd_out(self) -> None:
        """Ends the connection: another one gets its seat."""

    def cut(self) -> None:
        """Closes the connection at once."""


C = TypeVar("C", bound=PortConnection)


class PortServer(ABC, Generic[C]):
    """Serves the connections of one port.

    A connection is served by the first share that has a seat for it. If none has, it is closed.

    name         of what is served, for the log
    tls          None: plain text
    first_s      how long a connection may take to begin: for TLS, and for its first request
    end_s        how long the end of TLS may take
    leaving_max  connections that have made room for others and may take their time to close
    """

    def __init__(
        self,
        name: str,
        shares: Sequence[Share],
        tls: ssl.SSLContext | None,
        *,
        first_s: float,
        end_s: float,
        leaving_max: int,
    ) -> None:
        self._name = name
        self._shares = shares
        self._tls = tls
        self._first_s = first_s
        self._end_s = end_s
        self._open: dict[asyncio.Task[None], C | None] = {}
        self._leaving_max = leaving_max
        self._turns = LoopTurns()
        self._handshakes = LoopTurns()
        self._leaving: dict[C, None] = {}
        """Connections that have lost their seats and are not closed yet, the oldest first."""
        self._left_at: float | None = None
        self._told_at: dict[str, float] = {}
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._loops: list[asyncio.Task[None]] = []
        """What runs as long as the server does."""
        self.port = 0

    @abstractmethod
    def _connection(self, seat: Seat) -> C:
        """What serves a new connection."""

    @abstractmethod
    def _leave(self) -> None:
        """No further connection comes: tells the clients that the server stops."""

    @abstractmethod
    async def _close(self) -> None:
        """From now on a connection is closed instead of waiting for another request."""

    async def start(self, listening: socket.socket) -> None:
        """Begins to accept connections. The server owns the socket from now on, and closes it. `watched` tells of its
        loops' failures.
        """
        loop = asyncio.get_running_loop()
        self._listening = listening
        self.port = listening.getsockname()[1]
        self._accepting = loop.create_task(self._accept(listening), name=f"{self._name} accept")
        self._loops += [self._accepting, loop.create_task(self._check(), name=f"{self._name} check")]

    async def watched(self) -> None:
        """Returns when the server has stopped. Raises what one of its loops fails with: its port is then not served."""
        ended, _ = await asyncio.wait(self._loops, return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.gather(*(loop for loop in ended if not loop.cancelled()))

    async def stop(self, grace_s: float, *, see_off_s: float | None = None) -> None:
        """Accepts what clients have connected already, answers the requests on open connections, then closes them.

        grace_s    seconds until unanswered requests are cut off
        see_off_s  seconds until connections without a request are closed; None: SEE_OFF_S
        """
        assert self._listening is not None and self._accepting is not None
        see_off_s = SEE_OFF_S if see_off_s is None else see_off_s
        if see_off_s and not self._accepting.done():
            await quieten(self._listening)
        await end([self._accepting])
        self._listening.close()
        # Not before: a client that is told to leave comes back at once, and is to find another server then, or none.
        self._leave()
        self._left_at = asyncio.get_running_loop().time()
        begin = time.monotonic()
        await self._gone(min(see_off_s, grace_s))
        await self._close()
        for task, connection in self._open.items():
            if connection is None:
                task.cancel()
            else:
                connection.see_off()
        await self._gone(max(0.0, grace_s - (time.monotonic() - begin)))
        await end([*self._loops, *self._open])

    def relieve_idle(self, excess: int) -> int:
        """Gives memory of connections without a request back. Returns how many bytes that is, as far as is known."""
        wanted = min(IDLE_AT_ONCE, -(-excess // IDLE_BYTES))
        ended = self._shares[0].relieve_memory(asyncio.get_running_loop().time(), wanted)
        if ended:
            self._tell("memory is short, idle connections are closed", connections=ended)
        return ended * IDLE_BYTES

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno == ECONNABORTED:
                    continue
                self._tell("connections cannot be accepted", error=str(error))
                self._shares[0].relieve(loop.time())
                await asyncio.sleep(ACCEPT_PAUSE_S)
            else:
                try:
                    self._welcome(accepted, client_of(address[0]))
                except Exception as error:  # noqa: BLE001  as in `_serve`
                    accepted.close()
                    self._failed(error)

    def _welcome(self, accepted: socket.socket, client: str) -> None:
        loop = asyncio.get_running_loop()
        for share in self._shares:
            seat = share.take(client, loop.time(), self._first_s)
            if seat is not None:
                task = loop.create_task(self._serve(seat, accepted), name=f"{self._name} connection")
                # While the connection is being opened (TLS), it can be ended only by cancelling its task.
                seat.end = task.cancel
                self._open[task] = None
                task.add_done_callback(self._open.pop)
                return
            bounds = {"most": share.connections_max, "per_client": share.per_client, "so_far": share.refused}
            self._tell("connections refused", client=client, **bounds)
        accepted.close()

    async def _serve(self, seat: Seat, accepted: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            # Thousands may come at one moment, and to open one of gRPC takes some tenths of a millisecond.
            await self._turns.entered(seat.client)
            connection = self._connection(seat)
            transport = await self._opened(accepted, connection.protocol)
            seat.end = partial(self._crowd_out, connection)
            self._open[task] = connection
            try:
                await connection.run(transport)
            finally:
                self._leaving.pop(connection, None)
        except ssl.SSLError as error:
            # A client's fault. But where all clients fail, their operators ask what is wrong with the gateway.
            self._tell("TLS handshake failed", client=seat.client, error=error.reason or str(error))
        except OSError:
            pass  # the client left, or took too long: as probes do that only look whether the port is open
        except Exception as error:  # noqa: BLE001  one connection's failure is nobody else's
            self._failed(error)
        finally:
            accepted.close()
            seat.leave()
            # It refers to the connection, and the connection to it: in a cycle both would wait for the collector.
            seat.end = bool

    def _crowd_out(self, connection: C) -> None:
        """Another connection gets its seat. Its file may be open for a while yet: a client that does not close its side
        of TLS keeps it. So only a few of them may take that time."""
        connection.crowd_out()
        self._leaving[connection] = None
        if len(self._leaving) > self._leaving_max:
            oldest = next(iter(self._leaving))
            del self._leaving[oldest]
            oldest.cut()

    async def _opened(self, accepted: socket.socket, protocol: asyncio.Protocol) -> asyncio.Transport:
        """The connection's transport. `asyncio.start_server` has no place for a bound."""
        if self._tls is not None:
            async with asyncio.timeout(self._first_s):
                return await shake_hands(accepted, protocol, self._tls, self._handshakes, self._end_s)
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, accepted)
        return transport

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self._check_all(asyncio.get_running_loop().time)

    def _check_all(self, now: Callable[[], float]) -> None:
        for connection in self._connections():
            try:
                connection.check(now(), self._left_at)
            except Exception as error:  # noqa: BLE001  as in `_serve`
                self._failed(error)

    def _connections(self) -> list[C]:
        return [connection for connection in self._open.values() if connection is not None]

    def _failed(self, error: Exception) -> None:
        logs.error(f"{self._name} connection failed unexpectedly", error)

    def _tell(self, event: str, **fields: object) -> None:
        """Logs a warning, at most one of its kind in TELL_S seconds."""
        now = asyncio.get_running_loop().time()
        if now >= self._told_at.get(event, now - TELL_S) + TELL_S:
            self._told_at[event] = now
            logs.warning(event, None, port=self.port, **fields)

    async def _gone(self, patience_s: float) -> None:
        """Returns when every connection has ended, or after `patience_s`."""
        if self._open:
            await asyncio.wait(self._open, timeout=patience_s)

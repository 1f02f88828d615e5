"""Finds the connections that have sent most bytes of unfinished messages, and ends their calls when memory is short.

The transport shows a message only when it is whole. But the system knows how many bytes have come over each connection,
and this module counts the bytes that were delivered; the difference waits in the transport. The sizes of headers and
frames are only estimated. The error is some bytes per call, which does not matter when the search is for connections
with many megabytes.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc

from gateway.grpc.connections import LISTENING, GrpcConnections, received_bytes, sockets_of
from gateway.grpc.errors import abort
from gateway.grpc.pb import Context
from shared.contract.errors import MeshError, UnavailableError
from shared.process import logs

_aio: Any = grpc.aio  # the checker does not see all that it exports
END_OF_REQUESTS = _aio.EOF
CALL_BYTES = 64
"""Estimate of a message's headers and frames. Rather too large, so that a connection with many calls does not seem to
have undelivered bytes."""
MUCH_BYTES = 1 << 20
"""A connection with less than this undelivered is left alone."""
CHECK_S = 1.0
"""Pause between two checks for calls whose message does not come. A timer per call would cost ten times as much."""
PEERS_MAX = 4096
"""Beyond so many connections, closed ones are forgotten."""


class Arrivals:
    """Reads the messages of one port's calls, and counts their bytes per connection."""

    def __init__(self, connections: GrpcConnections) -> None:
        self._connections = connections
        # When each call's message must be there at the latest, by the loop's clock.
        self._reading: dict[Context, float] = {}
        self._checking: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._delivered: dict[int, int] = {}
        self._peers_max = PEERS_MAX
        self._cutting: dict[int, asyncio.Task[None]] = {}

    async def read(self, context: Context, patience_s: float = math.inf) -> Any:
        """A call's next message as it came, or END_OF_REQUESTS.

        patience_s  a call whose message has not come after this is ended, at most CHECK_S later
        """
        client = self._connections.client(context)
        self._reading[context] = patience_s if patience_s == math.inf else self._time_is_over(patience_s)
        try:
            raw = await context.read()
        finally:
            self._reading.pop(context, None)
        if raw is not END_OF_REQUESTS:
            self._delivered[client] = self._delivered.get(client, 0) + len(raw) + CALL_BYTES
            if len(self._delivered) > self._peers_max:
                self._forget_closed()
        return raw

    def _time_is_over(self, patience_s: float) -> float:
        """When a call whose message may take so long is ended, by the loop's clock. Begins to look for such calls."""
        loop = asyncio.get_running_loop()
        if self._checking is None:
            self._checking = loop.call_later(min(CHECK_S, patience_s), self._end_late)
        return loop.time() + patience_s

    def relieve(self, excess: int) -> int:
        """Gives memory of unfinished messages back: ends the calls that wait for one, on the connections with the most
        undelivered bytes first. Returns how many bytes that is.

        A connection that has no such call, or whose calls do not end, is closed.
        """
        calls: dict[int, list[Context]] = {}
        for context in self._reading:
            calls.setdefault(self._connections.client(context), []).append(context)
        waiting = {
            client: received_bytes(file) - self._delivered.get(client, 0)
            for file, client in sockets_of(self._connections.port)
            if client != LISTENING
        }
        given = 0
        for client in sorted(waiting, key=lambda client: -waiting[client]):
            if given >= excess or waiting[client] < MUCH_BYTES:
                break
            given += waiting[client]
            self._cut(client, calls.get(client, []), waiting[client])
            self._delivered[client] = self._delivered.get(client, 0) + waiting[client]
        return given

    def _cut(self, client: int, calls: list[Context], size: int) -> None:
        logs.warning("memory is short, calls are ended", calls=len(calls), waiting_bytes=size, client_port=client)
        # Its calls were told to end at an earlier look and the task still waits, or none is known: close it.
        if client in self._cutting or not calls:
            self._connections.cut(client)
            return
        refusal = UnavailableError("the gateway has no memory for the message, which was on its way: try again later")
        task = asyncio.get_running_loop().create_task(end_all(calls, refusal), name="grpc calls that take memory")
        self._cutting[client] = task
        task.add_done_callback(lambda _: self._cutting.pop(client))

    def _end_late(self) -> None:
        loop = asyncio.get_running_loop()
        self._checking = None
        late = [context for context, until in self._reading.items() if until <= loop.time()]
        if late:
            refusal = UnavailableError("the message does not come: try again")
            task = loop.create_task(end_all(late, refusal), name="grpc calls without a message")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            for context in late:
                del self._reading[context]
        waiting = [until for until in self._reading.values() if until < math.inf]
        if waiting:
            self._checking = loop.call_later(CHECK_S, self._end_late)

    def _forget_closed(self) -> None:
        open_ones = {client for _, client in sockets_of(self._connections.port) if client != LISTENING}
        self._delivered = {client: size for client, size in self._delivered.items() if client in open_ones}
        self._peers_max = max(PEERS_MAX, 2 * len(self._delivered))


async def end_all(calls: list[Context], refusal: MeshError) -> None:
    """Ends calls from outside of their handlers. A call that has ended meanwhile is no error."""
    await asyncio.gather(*[abort(context, refusal) for context in calls], return_exceptions=True)

"""redis-py's own connections, with the twin at the other end instead of a socket.

Everything above the socket is redis-py as it is: pools, pipelines, parsing, what it does when a connection breaks.
A `Wire` carries bytes both ways; `DirectWire` does so at once, the simulated network (`tests.simulation.network`) when
and if it likes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import hiredis
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection

from shared.store.commands import Redis
from shared.store.connections.mending import MendingRedis
from shared.store.connections.redis_py import BoundedConnection
from tests.simulation.store import Args, Reply, Status, Store, StoreError


def encode_reply(reply: Reply) -> bytes:
    """A reply as the protocol writes it."""
    if isinstance(reply, Status):
        return b"+%b\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, StoreError):
        return b"-%b\r\n" % str(reply).replace("\n", " ").encode()
    return b"*%d\r\n" % len(reply) + b"".join(map(encode_reply, reply))


class Server:
    """The twin's side of all connections: it carries out what arrives, and keeps those waiting who block.

    later      (seconds, callback) -> cancels it: for blocking reads that end without news
    is_up      whether anybody is there to connect to, and is_silent: somebody is, and does nothing
    run        its time as a primary, from 0
    refuse     the error with which it answers a command instead of carrying it out; "" for none
    """

    def __init__(self, store: Store, later: Callable[[float, Callable[[], None]], Callable[[], None]]) -> None:
        self.store = store
        self.later = later
        self.is_up, self.is_silent = True, False
        self.run = 0
        self.refuse: Callable[[Args], str] = lambda _: ""
        self._blocked: dict[bytes, list[Session]] = {}

    def execute(self, command: Args) -> Reply:
        """Carries a command out. Raises StoreError."""
        self.check(command)
        reply = self.store.execute(command)
        return reply + b"master_replid:%d\r\n" % self.run if command[0].upper() == b"INFO" else reply

    def check(self, command: Args) -> None:
        """Raises StoreError if it refuses the command."""
        if error := self.refuse(command):
            raise StoreError(error)

    def end_blocks(self, error: str) -> None:
        """Whoever waits hears this error instead."""
        for session in dict.fromkeys(session for sessions in list(self._blocked.values()) for session in sessions):
            session.end_block(error)

    def block(self, session: Session, keys: Iterable[bytes]) -> None:
        """The session waits for one of these keys to grow."""
        for key in keys:
            self._blocked.setdefault(key, []).append(session)

    def unblock(self, session: Session, keys: Iterable[bytes]) -> None:
        """It waits no more."""
        for key in keys:
            waiting = self._blocked[key]
            waiting.remove(session)
            if not waiting:
                del self._blocked[key]

    def serve_blocked(self) -> None:
        """Whoever waited for what has grown gets it, those who came first before the others."""
        while self.store.grown:
            grown, self.store.grown = self.store.grown, []
            for key in dict.fromkeys(grown):
                for session in list(self._blocked.get(key, ())):
                    session.try_again()


class Session:
    """One connection as the server sees it. send: takes encoded replies."""

    def __init__(self, server: Server, send: Callable[[bytes], None]) -> None:
        self._server = server
        self._send = send
        self._reader = hiredis.Reader()
        self._commands: deque[list[bytes]] = deque()
        self._queued: list[list[bytes]] | None = None
        self._is_discarded = False
        self._blocked_on: tuple[list[bytes], list[bytes]] | None = None
        self._stop_timer: Callable[[], None] = lambda: None

    def receive(self, data: bytes) -> None:
        """Bytes have arrived."""
        self._reader.feed(data)
        while (command := self._reader.gets()) is not False:
            self._commands.append(command)
        self._work()

    def close(self) -> None:
        """The connection is gone; what was not read from it is not carried out."""
        self._commands.clear()
        self._end_block()

    def try_again(self) -> None:
        """Something was added to what it waits for."""
        if self._blocked_on is None:
            return
        reply = self._reply(self._blocked_on[0])
        if reply is not None:
            self._end_block()
            self._send(encode_reply(reply))
            self._work()

    def _work(self) -> None:
        while self._commands and self._blocked_on is None:
            command = self._commands.popleft()
            reply = self._transaction(command)
            if reply is None and (wait := _wait_of(command)) is not None:
                self._block(command, *wait)
            else:
                self._send(encode_reply(reply))
            self._server.serve_blocked()

    def _transaction(self, command: list[bytes]) -> Reply:
        name = command[0].upper()
        if name == b"MULTI":
            self._queued, self._is_discarded = [], False
            return Status(b"OK")
        if name == b"EXEC" and self._queued is not None:
            queued, self._queued = self._queued, None
            if self._is_discarded:
                return StoreError("EXECABORT Transaction discarded because of previous errors.")
            return [self._reply(one) for one in queued]
        if self._queued is not None:
            return self._queue(self._queued, command)
        return self._reply(command)

    def _queue(self, queued: list[list[bytes]], command: list[bytes]) -> Reply:
        try:
            self._server.check(command)
        except StoreError as error:
            self._is_discarded = True
            return error
        queued.append(command)
        return Status(b"QUEUED")

    def _reply(self, command: Args) -> Reply:
        try:
            return self._server.execute(command)
        except StoreError as error:
            return error

    def end_block(self, error: str) -> None:
        """What it waits for is refused."""
        self._end_block()
        self._send(encode_reply(StoreError(error)))
        self._work()

    def _block(self, command: list[bytes], keys: list[bytes], seconds: float) -> None:
        self._blocked_on = (command, keys)
        self._server.block(self, keys)
        if seconds:
            self._stop_timer = self._server.later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._end_block()
        self._send(b"*-1\r\n")
        self._work()

    def _end_block(self) -> None:
        if self._blocked_on is not None:
            self._server.unblock(self, self._blocked_on[1])
            self._blocked_on = None
            self._stop_timer()


def _wait_of(command: list[bytes]) -> tuple[list[bytes], float] | None:
    """The keys that a command without an answer waits for, and for how long (0: for ever); None: it does not block."""
    match command[0].upper():
        case b"BLPOP":
            return command[1:-1], float(command[-1])
        case b"XREAD":
            upper = [part.upper() for part in command]
            if b"BLOCK" not in upper:
                return None
            names = command[upper.index(b"STREAMS") + 1 :]
            return names[: len(names) // 2], int(command[upper.index(b"BLOCK") + 1]) / 1000
        case _:
            return None


class Wire(Protocol):
    """One connection's way to the server and back."""

    def send(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class TwinTransport:
    """The socket's place below asyncio's streams: what is written goes to the wire, what comes goes to the protocol."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        self._is_over = False
        self.wire: Wire | None = None

    def get_protocol(self) -> asyncio.Protocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def writelines(self, parts: Iterable[bytes]) -> None:
        assert self.wire is not None, "it is connected"
        self.wire.send(b"".join(parts))

    def abort(self) -> None:
        """The process gives the connection up. As of a socket, its protocol hears of that a moment later."""
        assert self.wire is not None, "it is connected"
        self.wire.close()
        asyncio.get_running_loop().call_soon(self.lost, None)

    def received(self, data: bytes) -> None:
        """Bytes have come from the server."""
        if not self._is_over:
            self._protocol.data_received(data)

    def lost(self, failure: OSError | None) -> None:
        """The connection has broken, or was given up (None)."""
        if not self._is_over:
            self._is_over = True
            self._protocol.connection_lost(failure)


Dial = Callable[[TwinTransport], Any]
"""Makes a wire whose replies go to the transport; a coroutine. Raises OSError."""


class DirectWire:
    """Everything arrives at once."""

    def __init__(self, server: Server, transport: TwinTransport) -> None:
        self._session = Session(server, transport.received)

    def send(self, data: bytes) -> None:
        """To the server."""
        self._session.receive(data)

    def close(self) -> None:
        """Closes the session."""
        self._session.close()


class _Writer:
    """What redis-py needs of a StreamWriter."""

    def __init__(self, transport: TwinTransport, wire: Wire) -> None:
        self.transport = transport
        self._wire = wire

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.transport.writelines(parts)

    async def drain(self) -> None:
        return

    def close(self) -> None:
        self._wire.close()

    async def wait_closed(self) -> None:
        return

    def get_extra_info(self, name: str) -> None:
        return None


class TwinConnection(BoundedConnection, AbstractConnection):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A connection as the mesh's own ones are (shared/store/connections/redis_py.py), whose other end is the twin.

    dial: how to reach it; discovery: whom a client takes for its node of a Cluster
    """

    numbers = itertools.count(1)

    def __init__(self, *, dial: Dial, discovery: object = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._dial = dial
        # Pools keep connections in a set; by a number of their own its order is the same in every run.
        self._number = next(self.numbers)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    def __del__(self, _warnings: Any = None) -> None:
        """A process that was killed closes nothing."""

    async def _connect(self) -> None:
        reader = asyncio.StreamReader()
        transport = TwinTransport(asyncio.StreamReaderProtocol(reader))
        wire = transport.wire = await self._dial(transport)
        # redis-py types its streams as asyncio's own.
        self._reader, self._writer = reader, _Writer(transport, wire)  # pyright: ignore[reportAttributeAccessIssue]

    def repr_pieces(self) -> Any:
        return [("twin", str(self._number))]

    def _host_error(self) -> str:
        return "twin"


def twin_client(dial: Dial, **options: Any) -> Redis:
    """A client whose connections are made by `dial`. options: of the connections."""
    pool: Any = ConnectionPool(connection_class=TwinConnection, dial=dial, protocol=2, driver_info=None, **options)
    return cast(Redis, MendingRedis.from_pool(pool))


def direct_client(server: Server) -> Redis:
    """A client that reaches the twin at once."""

    async def dial(transport: TwinTransport) -> DirectWire:
        return DirectWire(server, transport)

    return twin_client(dial, socket_timeout=None)


def loop_timer(seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
    """A `Server`'s `later` on the running loop."""
    return asyncio.get_running_loop().call_later(seconds, callback).cancel

"""Everything that this project uses of redis-py beyond its documented interface, and nothing else does.

Our connections read and write the streams of redis-py's, because that takes half of a pipeline's time and leaves it to
the caller to send again (`shared.store.connections.link`). tests/shared/store/connections/test_redis_py.py pins each
use: a release of redis-py that lacks one fails there, by its name, before anything fails in a mesh.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import hiredis
from redis.asyncio import Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import DefaultParser
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.store.connections.discovery import Discovery
from shared.store.connections.redis_url import Way

REPLY_TIMEOUT_S = 10.0
"""How long an answer may take when nobody says otherwise: through a proxy or a tunnel that has lost its other end, a
connection looks alive, and only its silence tells."""
REDIS_LOST = (RedisConnectionError, RedisTimeoutError, InvalidResponse)
"""What a command raises when Redis cannot be reached, or cannot serve now, or what is there does not speak its
protocol."""
REFUSED = (AuthenticationError, ResponseError)
"""What a command raises when the URL's user, password or database is wrong, the user may too little, Redis is full, or
what is there is no server for a mesh."""
CONNECTION_LOST = (*REDIS_LOST, OSError)
"""Beside those what a socket itself may raise: for loops that do nothing but talk to Redis."""
LOST_OR_REFUSED = (*CONNECTION_LOST, ResponseError)
"""Beside those what Redis answers when it refuses a command: for what can be tried again later, for whatever reason."""
LATE_S = 0.1
"""A timer that is so late tells that this process was frozen, or busy for long. What has come meanwhile has yet to be
taken in."""
CLOSED = "the server has closed the connection"
UNFIT = (ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError, AskError)
"""A Cluster's node also tells by AskError that it has a key no more, for now or (MOVED) for good."""
UNFIT_CODES = ("UNBLOCKED ", "MISCONF ", "NOREPLICAS ", "BUSY ")


class UnfitServerError(RedisConnectionError):
    """What was reached cannot serve now: a replica, a server that is just becoming one or has lost its primary, one
    that cannot write to its disk, or is busy with a script. The command was not carried out."""


NOT_SERVING = (BusyLoadingError, UnfitServerError)
"""What a command raises when a server answers, and says that it cannot serve now: of REDIS_LOST what is over some time,
and no mistake in the URL."""


class BoundedConnection:
    """What all our connections have in common, whatever they go over. Mixed into redis-py's classes.

    Replies have a time limit. Errors that are about the server, not about the command, count as a lost connection.
    """

    reply_timeout_s = REPLY_TIMEOUT_S
    # redis-py's own; so are `_connect` and `_parser.parse_error`.
    _reader: asyncio.StreamReader | None
    _writer: asyncio.StreamWriter | None
    _parser: Any
    _replies: ReplyStream | None = None
    _silence: Silence | None = None
    _limit: asyncio.Timeout | None = None

    def set_parser(self, parser_class: Any) -> None:
        cast("Any", super()).set_parser(_HearingParser)

    @property
    def is_quiet(self) -> bool:
        """Whether it is connected, and nothing has come since the last exchange: neither bytes nor the stream's end."""
        if (replies := self._replies) is not None and replies.writer is self._writer:
            return replies.is_quiet
        stream: Any = self._reader
        # As `can_read` of the parser, which is a coroutine in a coroutine.
        return stream is not None and not stream._buffer and not is_over(stream)  # noqa: SLF001

    def cut(self) -> None:
        """Ends the connection at once: who waits for replies gets one of `CONNECTION_LOST`."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        try:
            await cast("Any", super()).send_packed_command(*args, **options)
        except RuntimeError as closed:
            # uvloop refuses to write to a connection that has ended by an error; asyncio's loop says nothing then.
            raise RedisConnectionError(CLOSED) from closed

    async def read_response(self, *args: Any, timeout: float | None = None, **options: Any) -> Any:
        """As redis-py's. timeout: None for `reply_timeout_s`; math.inf where the caller has a limit of its own."""
        read = cast("Any", super()).read_response
        try:
            if timeout is not None:
                return await read(*args, timeout=timeout, **options)
            silence = self._silence = self._silence or Silence(self._fall_silent)
            async with asyncio.timeout(None) as self._limit:
                silence.begin(self.reply_timeout_s)
                return await read(*args, timeout=math.inf, **options)
        except TimeoutError as silence:
            raise RedisTimeoutError(f"no answer within {self.reply_timeout_s:.3g} s") from silence
        except ResponseError as error:
            if is_unfit(error):
                raise unfit_server(error) from error
            raise
        finally:
            if self._silence is not None:
                self._silence.end()

    def heard(self) -> None:
        """A piece of a reply has come, of which there may be many: that is no silence."""
        if self._silence is not None:
            self._silence.renew()

    def _fall_silent(self, _: Exception) -> None:
        if self._limit is not None:
            self._limit.reschedule(0)

    def exchange(self, packed: Sequence[bytes], limit_s: float) -> asyncio.Future[list[Any]]:
        """Sends commands in one write; the future has as many replies. An error reply is an exception in its place.

        limit_s  how long the server may be silent until all of them have come
        raises   one of `CONNECTION_LOST`, as the future does; after any failure the connection is of no more use
        """
        writer, replies = self._writer, self._replies
        if replies is None or replies.writer is not writer:
            stream = self._reader
            if stream is None or writer is None or is_over(stream):
                raise RedisConnectionError(CLOSED)
            replies = self._replies = ReplyStream(writer, self._parser.parse_error)
        return replies.to(packed, limit_s)


def is_over(stream: asyncio.StreamReader) -> bool:
    """Whether a connection's stream has come to its end, or was ended by an error: RST, or a host that was silent for
    too long. Only the former is an end to `at_eof`."""
    return stream.at_eof() or stream.exception() is not None


class ReplyStream(asyncio.Protocol):
    """What comes over a connection from its first exchange on. It takes the place of redis-py's stream, which would
    copy every piece and wake a task to look at it. The stream still hears of the connection's end.
    """

    def __init__(self, writer: asyncio.StreamWriter, parse_error: Callable[[str], Exception]) -> None:
        self.writer = writer
        self._transport: Any = writer.transport
        self._stream = cast("asyncio.StreamReaderProtocol", self._transport.get_protocol())
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=parse_error)
        self._loop = asyncio.get_running_loop()
        self._silence = Silence(self._fail)
        self._replies: list[Any] = []
        self._expected = 0
        self._whole: asyncio.Future[list[Any]] = self._loop.create_future()
        self._is_over = False
        self._transport.set_protocol(self)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has come but replies that were asked for, and not the end."""
        return not self._is_over and not self._reader.has_data()

    def to(self, packed: Sequence[bytes], limit_s: float) -> asyncio.Future[list[Any]]:
        """See `BoundedConnection.exchange`."""
        if self._is_over:
            raise RedisConnectionError(CLOSED)
        self._replies, self._expected, self._whole = [], len(packed), self._loop.create_future()
        if packed:
            # What is to be sent is not waited for: the replies are, and nothing else is sent before.
            self._transport.writelines(packed)
            self._silence.begin(limit_s)
        else:
            self._whole.set_result(self._replies)
        return self._whole

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._whole.done():
            return
        replies, expected = self._replies, self._expected
        try:
            while len(replies) < expected:
                reply = self._reader.gets()
                if reply is False:
                    # A long reply comes in pieces, over a busy network for longer than a server may be silent.
                    self._silence.renew()
                    return
                replies.append(_judged(reply) if isinstance(reply, Exception) else reply)
            if self._reader.has_data():
                raise RedisConnectionError("the server has sent more than was asked for")
        except (InvalidResponse, RedisConnectionError) as failure:
            self._fail(failure)
        else:
            self._silence.end()
            self._whole.set_result(replies)

    def eof_received(self) -> bool | None:
        self._end()
        return self._stream.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._stream.connection_lost(exc)

    def _end(self) -> None:
        self._is_over = True
        self._fail(RedisConnectionError(CLOSED))

    def _fail(self, failure: Exception) -> None:
        self._silence.end()
        if not self._whole.done():
            self._whole.set_exception(failure)


class Silence:
    """Ends the wait for replies, if that takes too long. fail: ends it, with the reason

    One timer serves many waits: when it fires, it looks how long the present wait may still take. A timer for each
    would cost more than all else that a wait costs.
    """

    def __init__(self, fail: Callable[[Exception], object]) -> None:
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._limit_s = 0.0
        self._until_s: float | None = None

    def begin(self, limit_s: float) -> None:
        """Starts a wait that may last `limit_s`; the one before it is over."""
        self._limit_s = limit_s
        self._until_s = until_s = self._loop.time() + limit_s
        if self._timer is None or self._timer.when() > until_s:
            self._set(until_s)

    def renew(self) -> None:
        """Something has come: from now on the wait, if there is one, may last as long again."""
        if self._until_s is not None:
            self.begin(self._limit_s)

    def end(self) -> None:
        """Ends the wait: its limit counts no longer, and the timer may stay for the next one."""
        self._until_s = None

    def _set(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._until_s is None:
            return
        now_s = self._loop.time()
        if now_s - self._until_s > LATE_S:
            self._until_s = now_s + LATE_S
        if self._until_s > now_s:
            self._set(self._until_s)
        else:
            self._fail(RedisTimeoutError(f"no answer within {self._limit_s:.3g} s"))


def _judged(error: Exception) -> Exception:
    """An error reply as what it means. Raises one that says that the connection is lost."""
    if isinstance(error, RedisConnectionError):
        raise error
    return unfit_server(error) if isinstance(error, ResponseError) and is_unfit(error) else error


class _HearingParser(cast("Any", DefaultParser)):
    """Tells its connection of each piece, and the pool of every end."""

    __slots__ = ("_heard",)

    async def can_read(self) -> bool:
        """Whether the connection is of no more use to the pool. redis-py's own does not see an end by an error."""
        theirs: Any = super()
        return is_over(self._stream) or await theirs.can_read()

    def on_connect(self, connection: BoundedConnection) -> None:
        super().on_connect(connection)
        self._heard = connection.heard

    async def read_from_socket(self) -> bool:
        await super().read_from_socket()
        self._heard()
        return True


class _TcpConnection(BoundedConnection, Connection):
    pass


class _TlsConnection(BoundedConnection, SSLConnection):
    def _connection_arguments(self) -> Mapping[str, Any]:
        """As redis-py's. Files of certificates that the URL names are read again for each connection: they are replaced
        while services run."""
        asked = self.ssl_context
        try:
            asked.context = tls_context(asked)
        except OSError as error:  # it names no file
            files = ", ".join(filter(None, (asked.ca_certs, asked.ca_path, asked.certfile, asked.keyfile)))
            raise OSError(f"TLS cannot be spoken with {files}: {error}") from error
        return cast("Any", super())._connection_arguments()  # noqa: SLF001 -- redis-py's own


def tls_context(asked: Any) -> ssl.SSLContext:
    """What a connection speaks TLS with. asked: redis-py's own, whose `get` would read the system's authorities each
    time, also beside named ones: 50 ms, four times for a connection that asks three Sentinels. After a failover a
    service opens dozens.
    """
    if asked.ca_certs or asked.ca_path:
        context = ssl.create_default_context(cafile=asked.ca_certs, capath=asked.ca_path)
        context.check_hostname, context.verify_mode = asked.check_hostname, asked.cert_reqs
    else:
        context = _trusting_the_system(asked.check_hostname, asked.cert_reqs, asked.certfile, asked.ciphers)
    if asked.certfile or asked.keyfile:
        # Without any password OpenSSL asks the terminal for that of an encrypted key, and waits.
        context.load_cert_chain(asked.certfile, asked.keyfile, asked.password or "")
    if asked.ciphers is not None:
        context.set_ciphers(asked.ciphers)
    return context


@cache
def _trusting_the_system(check_hostname: bool, verify: ssl.VerifyMode, *_others: str | None) -> ssl.SSLContext:  # noqa: FBT001 -- a key
    """One for all connections that are asked for alike."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = check_hostname, verify
    if verify != ssl.CERT_NONE:
        context.load_default_certs()
    return context


class _UnixConnection(BoundedConnection, UnixDomainSocketConnection):
    pass


class DiscoveredConnection:
    """A connection to the primary that others name. Mixed into those above."""

    host: str
    port: int

    def __init__(self, *, discovery: Discovery, **options: Any) -> None:
        super().__init__(**options)
        self._discovery = discovery

    async def _connect(self) -> None:
        self.host, self.port = await self._discovery.primary()
        await cast("Any", super())._connect()  # noqa: SLF001 -- redis-py's own

    async def verify(self) -> None:
        """Raises UnfitServerError when it is no primary: those who named it may be wrong for a while."""
        connection = cast("Any", self)
        await connection.send_command("ROLE")
        match await connection.read_response():
            case [b"master", *_]:
                return
            case [bytes(role), *_]:
                told = f"its role is {role.decode(errors='replace')}"
            case _:
                told = "it does not tell its role"
        raise UnfitServerError(f"{self.host}:{self.port} was named as the primary, but {told}")


class _DiscoveredTcpConnection(DiscoveredConnection, _TcpConnection):  # pyright: ignore[reportIncompatibleVariableOverride]
    pass


class _DiscoveredTlsConnection(DiscoveredConnection, _TlsConnection):  # pyright: ignore[reportIncompatibleVariableOverride]
    pass


CONNECTIONS: Mapping[Way, Any] = {"tcp": _TcpConnection, "tls": _TlsConnection, "unix": _UnixConnection}
DISCOVERED_CONNECTIONS: Mapping[Way, Any] = {"tcp": _DiscoveredTcpConnection, "tls": _DiscoveredTlsConnection}


def is_unfit(error: ResponseError) -> bool:
    """Whether an error reply tells of the server's state alone. (A loading server's is a ConnectionError already; one
    without memory must be told apart, because it still does part of what is asked.)"""
    return isinstance(error, UNFIT) or str(error).startswith(UNFIT_CODES)


def unfit_server(error: ResponseError) -> UnfitServerError:
    """An error reply of those for which `is_unfit` holds."""
    if isinstance(error, AskError):
        return UnfitServerError(f"the Cluster's slot is on another node, or on its way there: {error}")
    return UnfitServerError(str(error))


def new_connection(pool: Any) -> Any:
    """A connection that a client's pool does not know of, made like those of the pool; not connected yet."""
    return pool.make_connection()


class RepeatablePipeline(Pipeline):
    """A pipeline whose commands can be queued once more after they were sent."""

    def __init__(self, client: Redis, *, transaction: bool, shard_hint: str | None) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)

    def queued(self) -> list[Any]:
        """The commands that are to be sent, each with its options."""
        return list(self.command_stack)

    def queue(self, commands: Sequence[Any]) -> None:
        """Queues what `queued` has returned."""
        self.command_stack = list(commands)

"""What the mesh uses of redis-py beyond its documentation: a redis-py without it fails here, by name."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop
from redis.asyncio import Connection, ConnectionPool, SSLConnection
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import AbstractConnection, RedisSSLContext
from redis.exceptions import BusyLoadingError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.store import commands
from shared.store.connections.mending import MendingRedis
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import (
    CONNECTIONS,
    BoundedConnection,
    RedisTimeoutError,
    RepeatablePipeline,
    ReplyStream,
    Silence,
    new_connection,
    tls_context,
)
from tests.redis_proxy import RedisProxy
from tests.simulation.virtual import virtual_world

ROOT = Path(__file__).resolve().parents[4]
PATIENCE_S = 60.0
TLS = ROOT / "tests" / "fixtures" / "tls"
INTERNALS = re.compile(
    r"redis\._|\b_parser\b|make_connection|command_stack|response_callbacks|super\(\)[^\n]*_connect\b"
    r"|from redis\.asyncio(\.connection|\.client)? import [^\n]*(Connection\b|Pipeline)"
)


@pytest.fixture
async def redis(redis_server: str) -> AsyncIterator[Any]:
    redis = connect(redis_server, retries=0)
    yield redis
    await redis.aclose()


def test_no_other_module_uses_the_insides_of_redis_py() -> None:
    files = [
        file for folder in ("shared", "gateway", "executor", "scheduler") for file in (ROOT / folder).rglob("*.py")
    ]

    assert ["redis_py.py"] == [file.name for file in files if INTERNALS.search(file.read_text())]
    typed = [
        file.name for file in files if re.search("^from redis.asyncio import .*Redis$", file.read_text(), re.MULTILINE)
    ]
    assert {"mending.py"} == set(typed), "everybody else takes the client's type from shared.store.commands"


@pytest.mark.parametrize("method", ["connect", "disconnect", "send_command", "on_connect", "_connect"])
def test_a_connection_has_the_coroutine(method: str) -> None:
    assert inspect.iscoroutinefunction(getattr(AbstractConnection, method, None)), f"redis-py's connection: {method}"


def test_a_connection_over_tls_takes_the_context_that_it_is_given() -> None:
    connection: Any = SSLConnection()
    connection.ssl_context.context = ours = ssl.create_default_context()

    assert ours is connection._connection_arguments()["ssl"]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"ca_certs": str(TLS / "ca.pem")},
        {"ca_path": str(TLS)},
        {"cert_reqs": "none"},
        {"check_hostname": False},
        {"ciphers": "ECDHE+AESGCM"},
        {"certfile": str(TLS / "server.pem"), "keyfile": str(TLS / "server.key")},
    ],
)
def test_our_context_of_tls_is_as_strict_as_redis_pys(asked: dict[str, Any]) -> None:
    asked = {"cert_reqs": "required", "check_hostname": True} | asked
    theirs: Any = RedisSSLContext(**asked)
    ours = tls_context(theirs)

    def strictness(context: ssl.SSLContext) -> tuple[Any, ...]:
        ciphers = [cipher["name"] for cipher in context.get_ciphers()]
        return context.verify_mode, context.check_hostname, context.options, context.minimum_version, ciphers

    assert strictness(theirs.get()) == strictness(ours)


def test_only_authorities_that_are_named_are_trusted_and_else_the_systems() -> None:
    named = tls_context(RedisSSLContext(cert_reqs="required", ca_certs=str(TLS / "ca.pem")))
    unnamed = tls_context(RedisSSLContext(cert_reqs="required"))

    assert 1 == len(named.get_ca_certs())
    assert ssl.create_default_context().get_ca_certs() == unnamed.get_ca_certs()
    assert unnamed is tls_context(RedisSSLContext(cert_reqs="required")), "reading them takes 50 ms"
    assert unnamed is not tls_context(RedisSSLContext(cert_reqs="none"))


def test_a_connection_takes_the_arguments() -> None:
    assert "timeout" in inspect.signature(AbstractConnection.read_response).parameters
    assert "nowait" in inspect.signature(AbstractConnection.disconnect).parameters
    assert {"redis_connect_func", "retry", "client_name"} <= inspect.signature(AbstractConnection).parameters.keys()


def test_a_connections_streams_and_parser_lie_where_we_take_them() -> None:
    connection: Any = Connection()

    assert (None, None) == (connection._reader, connection._writer)
    assert not connection.is_connected
    errors = [connection._parser.parse_error(text) for text in ("ERR a", "READONLY b", "LOADING c")]
    assert [ResponseError, ReadOnlyError, BusyLoadingError] == [type(error) for error in errors]


async def test_a_connections_streams_are_asyncios_and_it_dials_by_connect(redis_server: str) -> None:
    """`_connect` opens the streams, then `redis_connect_func` is called, all within `connect`."""
    called: list[str] = []

    class Watched(Connection):
        async def _connect(self) -> None:
            called.append("_connect")
            await super()._connect()

    async def greet(connection: Any) -> None:
        called.append("redis_connect_func")
        await connection.on_connect()

    pool: Any = ConnectionPool.from_url(redis_server, connection_class=Watched, redis_connect_func=greet, protocol=2)
    connection: Any = pool.make_connection()
    await connection.connect()

    assert ["_connect", "redis_connect_func"] == called
    assert isinstance(connection._reader, asyncio.StreamReader)
    assert isinstance(connection._writer, asyncio.StreamWriter)
    buffered: Any = vars(connection._reader)["_buffer"]
    assert b"" == buffered, "what has come that was not asked for"
    await connection.disconnect(nowait=True)
    assert not connection.is_connected


async def test_a_pool_makes_connections_that_it_does_not_know(redis: Any) -> None:
    connection: Any = new_connection(redis.connection_pool)

    assert not connection.is_connected
    assert isinstance(connection, BoundedConnection)
    await redis.ping()
    (pooled,) = redis.connection_pool._available_connections
    assert pooled is not connection


async def has_ended(connection: Any) -> None:
    """Waits until a connection has heard of its end, which was an error."""
    async with asyncio.timeout(PATIENCE_S):
        while connection._reader.exception() is None:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_was_reset_is_not_used_again(new_loop: Any, redis_server: str) -> None:
    """The end by an error (RST, or a host that acknowledges nothing) is no end of the stream, as redis-py sees it."""

    async def reset(proxy: RedisProxy) -> None:
        redis = connect(proxy.url, retries=0)
        pool: Any = redis.connection_pool
        own = new_connection(pool)
        await own.connect()
        await redis.ping()
        (idle,) = pool._available_connections
        proxy.cut()
        await has_ended(idle)
        await has_ended(own)

        assert await redis.ping()
        assert not own.is_quiet
        # uvloop says that by a RuntimeError, of which no caller knows.
        with pytest.raises(RedisConnectionError):
            await own.send_command("PING")
        await redis.aclose()

    with RedisProxy(redis_server) as proxy, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(reset(proxy))


async def test_a_pipeline_keeps_its_commands_until_they_are_sent(redis: Any) -> None:
    pipe: Any = RepeatablePipeline(redis, transaction=False, shard_hint=None)
    assert list(inspect.signature(Pipeline).parameters)[:4] == [
        "connection_pool",
        "response_callbacks",
        "transaction",
        "shard_hint",
    ]
    pipe.echo("a").echo("b")

    queued = pipe.queued()

    assert [("ECHO", "a"), ("ECHO", "b")] == [args for args, _ in queued]
    assert [b"a", b"b"] == await pipe.execute()
    assert [] == pipe.queued()
    pipe.queue(queued)
    assert [b"a", b"b"] == await pipe.execute()


@pytest.mark.parametrize(("ours", "theirs"), [(commands.Redis, MendingRedis), (commands.Pipeline, Pipeline)])
def test_redis_py_has_every_command_that_is_annotated_and_its_named_arguments(ours: type, theirs: type) -> None:
    declared = {name: each for name, each in vars(ours).items() if inspect.isfunction(each) and name[:2] != "__"}
    assert declared

    for name, method in declared.items():
        accepted = inspect.signature(getattr(theirs, name)).parameters.values()
        named = {one.name for one in inspect.signature(method).parameters.values() if one.kind is one.KEYWORD_ONLY}
        assert named <= {one.name for one in accepted}, name


def test_a_wait_ends_when_its_own_limit_is_over_whatever_the_waits_before_were_allowed() -> None:
    """On virtual time, so the times are exact."""

    async def waited_s(*limits_s: float) -> float:
        loop, stream = asyncio.get_running_loop(), asyncio.StreamReader()
        silence = Silence(stream.set_exception)
        for limit_s in limits_s[:-1]:
            silence.begin(limit_s)
            await asyncio.sleep(0.25)
            silence.end()
        silence.begin(limits_s[-1])
        began_s = loop.time()
        with pytest.raises(RedisTimeoutError, match="no answer within"):
            await stream.read(1)
        return loop.time() - began_s

    async def not_cut_short() -> None:
        stream = asyncio.StreamReader()
        silence = Silence(stream.set_exception)
        silence.begin(1)
        silence.end()
        await asyncio.sleep(2)
        assert stream.exception() is None, "nobody waits"

    with virtual_world(1, compute_s=lambda _: 0.0) as runner:
        assert 10 == runner.run(waited_s(10))
        assert 10 == runner.run(waited_s(1, 1, 1, 10))
        assert 1 == runner.run(waited_s(10, 10, 1))
        runner.run(not_cut_short())


def test_while_a_long_reply_comes_in_pieces_over_the_pool_the_server_is_not_silent() -> None:
    """On virtual time, so the times are exact."""

    async def waited_s(pieces: int) -> float:
        loop, connection = asyncio.get_running_loop(), CONNECTIONS["tcp"]()
        connection._reader = stream = asyncio.StreamReader()
        connection._parser.on_connect(connection)
        began_s, asked = loop.time(), asyncio.create_task(connection.read_response())
        stream.feed_data(b"$%d\r\n" % (pieces + 1))
        for _ in range(pieces):
            await asyncio.sleep(9)
            stream.feed_data(b"x")
        with pytest.raises(RedisTimeoutError, match="no answer within 10 s"):
            await asked
        return loop.time() - began_s

    with virtual_world(1, compute_s=lambda _: 0.0) as runner:
        assert [10, 9 + 10, 9 + 9 + 10] == [runner.run(waited_s(pieces)) for pieces in range(3)]


@pytest.mark.parametrize("over_pool", [False, True])
def test_a_reply_that_came_while_the_process_was_frozen_is_read_before_the_server_counts_as_silent(
    *, over_pool: bool
) -> None:
    """The task that waits for it gets its turn after the timers."""

    async def reply() -> object:
        client, server = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=client)
        connection = CONNECTIONS["tcp"]()
        connection._reader, connection._writer, connection.reply_timeout_s = reader, writer, 0.1
        connection._parser.on_connect(connection)
        asked = asyncio.ensure_future(connection.read_response() if over_pool else connection.exchange([b"PING"], 0.1))
        await asyncio.sleep(0)
        server.sendall(b"+PONG\r\n")
        time.sleep(0.5)  # noqa: ASYNC251 - frozen
        try:
            return await asked
        finally:
            await connection.disconnect()
            server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert (b"PONG" if over_pool else [b"PONG"]) == runner.run(reply())


def test_while_a_long_reply_comes_in_pieces_the_server_is_not_silent() -> None:
    """On virtual time, so the times are exact."""

    async def waited_s(pieces: int) -> float:
        loop, transport = asyncio.get_running_loop(), Mock()
        replies = ReplyStream(Mock(transport=transport), ResponseError)
        asked, began_s = replies.to([b""], 10), loop.time()
        replies.data_received(b"$%d\r\n" % (pieces + 1))
        for _ in range(pieces):
            await asyncio.sleep(9)
            replies.data_received(b"x")
        with pytest.raises(RedisTimeoutError, match="no answer within 10 s"):
            await asked
        return loop.time() - began_s

    with virtual_world(1, compute_s=lambda _: 0.0) as runner:
        assert [10, 9 + 10, 9 + 9 + 10] == [runner.run(waited_s(pieces)) for pieces in range(3)]

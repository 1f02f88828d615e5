"""The replies of a connection that exchanges whole commands: all that were asked for, no more, or a lost connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError

from shared.store.connections.redis_py import ReplyStream

PING = b"*1\r\n$4\r\nPING\r\n"
LIMIT_S = 60


class Wire:
    """A connection, and the server's end of it."""

    def __init__(self, server: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer
        self.replies = ReplyStream(writer, ResponseError)

    async def says(self, data: bytes) -> None:
        """The server sends this, and it has come."""
        await asyncio.get_running_loop().sock_sendall(self.server, data)
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    client, server = socket.socketpair()
    server.setblocking(False)
    wire = Wire(server, *await asyncio.open_connection(sock=client))
    yield wire
    wire.writer.close()
    await wire.writer.wait_closed()
    server.close()


async def test_replies_that_come_in_pieces_are_given_when_all_have_come(wire: Wire) -> None:
    asked = wire.replies.to([PING, PING, PING], LIMIT_S)

    await wire.says(b"+one\r\n$3\r\ntw")
    assert not asked.done()
    await wire.says(b"o\r\n-ERR three\r\n")

    one, two, three = await asked
    assert (b"one", b"two") == (one, two)
    assert isinstance(three, ResponseError)
    assert 3 * PING == await asyncio.get_running_loop().sock_recv(wire.server, 1024)
    assert wire.replies.is_quiet


async def test_an_exchange_of_nothing_is_over_at_once(wire: Wire) -> None:
    assert [] == await wire.replies.to([], LIMIT_S)


@pytest.mark.parametrize(
    ("said", "failure", "text"),
    [
        (b"+one\r\n+two\r\n", RedisConnectionError, "more than was asked for"),
        (b"?\r\n", InvalidResponse, "Protocol error"),
    ],
)
async def test_what_is_no_answer_loses_the_connection(
    wire: Wire, said: bytes, failure: type[Exception], text: str
) -> None:
    asked = wire.replies.to([PING], LIMIT_S)

    await wire.says(said)

    with pytest.raises(failure, match=text):
        await asked


async def test_bytes_that_nobody_asked_for_are_noticed(wire: Wire) -> None:
    asked = wire.replies.to([PING], LIMIT_S)
    await wire.says(b"+one\r\n")
    assert [b"one"] == await asked

    await wire.says(b"+two\r\n")

    assert not wire.replies.is_quiet


async def test_a_connection_that_ends_ends_the_wait_and_takes_nothing_more(wire: Wire) -> None:
    """And redis-py's own stream hears of it."""
    asked = wire.replies.to([PING, PING], LIMIT_S)
    await wire.says(b"+one\r\n")

    wire.server.shutdown(socket.SHUT_WR)

    with pytest.raises(RedisConnectionError, match="closed"):
        await asked
    assert not wire.replies.is_quiet
    with pytest.raises(RedisConnectionError, match="closed"):
        wire.replies.to([PING], LIMIT_S)
    assert b"" == await wire.reader.read()


async def test_the_next_exchange_does_not_get_the_replies_of_one_that_was_given_up(wire: Wire) -> None:
    given_up = wire.replies.to([PING], LIMIT_S)
    given_up.cancel()

    await wire.says(b"+late\r\n")

    assert not wire.replies.is_quiet, "so the connection is not used again"

"""Connections end with their clients."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator
from functools import partialmethod
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from gateway.bounds.unread_answers import UNLIMITED, UnreadAnswers
from gateway.http.llhttp_connection import LlhttpConnection
from gateway.http.server import HttpServer, Served
from gateway.ports.seats import Seat, Share
from gateway.ports.serving import IDLE_BYTES
from gateway.rest.reply import send_bytes
from gateway.settings import GatewaySettings, HttpParser
from tests.gateway.cycles import nothing_stays
from tests.gateway.flow_control import needs_flow_control
from tests.gateway.http_serving import running, serving

TLS = Path(__file__).parents[2] / "fixtures" / "tls"
SECURE = GatewaySettings(
    redis_url="", http_server_cert=str(TLS / "server.pem"), http_server_key=str(TLS / "server.key")
)
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE_BYTES = 32 << 20
"""More than all buffers between two processes take."""
SOON_S = 60.0
"""A tenth of the time for which a connection may be idle."""


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers everybody alike."""
    if scope["type"] == "http":
        await send_bytes(send, 200, b"hello")


async def large(scope: Any, receive: Any, send: Any) -> None:
    """One whose answers are large."""
    await send_bytes(send, 200, bytes(LARGE_BYTES))


@pytest.fixture(params=get_args(HttpParser), autouse=True)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HttpParser:
    """What reads the requests of the servers of a test."""
    monkeypatch.setattr(HttpServer, "__init__", partialmethod(HttpServer.__init__, parser=request.param))
    return request.param


opened: list[asyncio.StreamWriter] = []
"""The connections of the running test's clients."""


@pytest.fixture(autouse=True)
async def no_connection_stays() -> AsyncIterator[None]:
    """A client's side of TLS is open until the other side has answered its close, which may be behind the test's end:
    the warning would be an error of whichever test runs then."""
    yield
    while opened:
        opened.pop().transport.abort()
    await asyncio.sleep(0)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Where a server listens."""
    async with serving(hello) as port:
        yield port


@pytest.mark.parametrize("requests", [0, 1, 2])
async def test_a_connection_that_its_client_closes_is_closed_at_once(port: int, requests: int) -> None:
    """And not kept for as long as an idle one: each holds a descriptor, of which a process has about a thousand."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(SOON_S):
        for _ in range(requests):
            writer.write(REQUEST)
            await reader.readuntil(b"hello")
        writer.write_eof()

        assert b"" == await reader.read()
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_leaves_before_its_answer_is_told_nothing() -> None:
    """Whether it has left, or only sends nothing more, cannot be told apart."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serving(app) as port, asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        writer.write_eof()

        assert b"" == await reader.read()
        writer.close()


@needs_flow_control
@pytest.mark.parametrize("ending", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_that_does_not_take_its_answer_has_left(
    tls: bool, ending: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its answer counts as unread, and is not kept for ever, whatever the system's buffers take of it."""
    monkeypatch.setattr("gateway.http.connection.PATIENCE_S", 0.2)
    monkeypatch.setattr("gateway.http.connection.SLOWEST_BYTES_S", LARGE_BYTES)
    given_up, unread = asyncio.Event(), UnreadAnswers(UNLIMITED)
    counted: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asyncio.get_running_loop().call_soon(lambda: counted.append(unread.taken))
        await large(scope, receive, send)
        given_up.set()

    settings = SECURE if tls else None
    async with serving(app, settings=settings, unread=unread) as port, asyncio.timeout(SOON_S):
        reader, writer = await connected(port, tls=tls)
        cast("asyncio.Transport", writer.transport).pause_reading()
        writer.write(REQUEST.removesuffix(b"\r\n") + ending + b"\r\n")
        await given_up.wait()
        cast("asyncio.Transport", writer.transport).resume_reading()

        assert [True] == [count > LARGE_BYTES // 2 for count in counted]
        assert 0 == unread.taken
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(LARGE_BYTES)
        writer.close()


@pytest.mark.parametrize("ending", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_that_has_taken_much_of_its_answer_may_pause(
    tls: bool, ending: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a body that comes: what counts is the pace since the beginning."""
    monkeypatch.setattr("gateway.ports.serving.CHECK_S", 0.02)
    monkeypatch.setattr("gateway.http.connection.PATIENCE_S", 10.0)
    monkeypatch.setattr("gateway.http.connection.SLOWEST_BYTES_S", 1)
    # The pause is made by hand: a patience short enough to wait for could be over before the client reads at all.
    loop, paused_s = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + paused_s)
    async with serving(large, settings=SECURE if tls else None) as port, asyncio.timeout(SOON_S):
        reader, writer = await connected(port, tls=tls)
        writer.write(REQUEST.removesuffix(b"\r\n") + ending + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(LARGE_BYTES // 2)
        paused_s = 20.0
        await asyncio.sleep(0.1)

        assert LARGE_BYTES // 2 == len(await reader.readexactly(LARGE_BYTES // 2))
        writer.close()


UPGRADE_H2C = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
UPGRADE_WEBSOCKET = (
    b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
PRIOR_KNOWLEDGE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


async def connected(port: int, *, tls: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client's connection."""
    context = None
    if tls:
        context = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
        # A client that would rather speak HTTP/2.
        context.set_alpn_protocols(["h2", "http/1.1"])
    reader, writer = await asyncio.open_connection("localhost" if tls else "127.0.0.1", port, ssl=context)
    opened.append(writer)
    return reader, writer


async def until_alone(others: set[asyncio.Task[Any]]) -> None:
    """Returns when every task that was begun since has ended."""
    async with asyncio.timeout(SOON_S):
        while asyncio.all_tasks() - others:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("upgrade", [UPGRADE_H2C, UPGRADE_WEBSOCKET], ids=["h2c", "websocket"])
async def test_who_asks_for_another_protocol_gets_this_one(tls: bool, upgrade: bytes) -> None:
    """As often as it likes, on one connection; and nothing is left when it goes."""
    settings = SECURE if tls else None
    async with serving(hello, settings=settings) as port, asyncio.timeout(SOON_S):
        others = asyncio.all_tasks()
        reader, writer = await connected(port, tls=tls)
        for _ in range(2):
            writer.write(REQUEST.removesuffix(b"\r\n") + upgrade + b"\r\n")
            answer = await reader.readuntil(b"hello")
            assert answer.startswith(b"HTTP/1.1 200 ")
        writer.close()
        await until_alone(others)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("piece", [1, 16, 1000])
async def test_who_begins_with_http_2_is_refused(tls: bool, piece: int) -> None:
    """However the preface is cut into pieces."""
    settings = SECURE if tls else None
    async with serving(hello, settings=settings) as port, asyncio.timeout(SOON_S):
        others = asyncio.all_tasks()
        reader, writer = await connected(port, tls=tls)
        for begin in range(0, len(PRIOR_KNOWLEDGE), piece):
            writer.write(PRIOR_KNOWLEDGE[begin : begin + piece])
            await asyncio.sleep(0)
        answer = await reader.readuntil(b"}")

        assert answer.startswith(b"HTTP/1.1 505 ")
        assert b"HTTP/2.0 is not served: use HTTP/1.1" in answer
        writer.close()
        await until_alone(others)


@pytest.mark.parametrize("upgrade", [b"", UPGRADE_H2C], ids=["plain", "h2c"])
async def test_nothing_is_left_of_clients_that_leave_within_an_answer(upgrade: bytes) -> None:
    """Nor of their answers, each of 32 MiB."""
    async with serving(large) as port, asyncio.timeout(SOON_S):
        others = asyncio.all_tasks()
        for _ in range(10):
            reader, writer = await connected(port)
            writer.write(REQUEST.removesuffix(b"\r\n") + upgrade + b"\r\n")
            await reader.readexactly(65_536)
            writer.close()
        await until_alone(others)


async def early(scope: Any, receive: Any, send: Any) -> None:
    """An application that does not read what it is sent."""
    await send_bytes(send, 404, b"hello")


async def test_an_early_answer_leaves_the_connection_as_it_is_when_the_rest_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("hypercorn_protocol", "llhttp_connection"):
        monkeypatch.setattr(f"gateway.http.{module}.LINGER_S", SOON_S)
    async with serving(early) as port, asyncio.timeout(SOON_S):
        reader, writer = await connected(port)
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
            for _ in range(10):
                writer.write(bytes(100_000))
                await writer.drain()
            assert b"connection: close" not in (await reader.readuntil(b"hello")).lower()
        writer.close()


@pytest.mark.parametrize("head", [b"content-length: 1000000\r\n", b"transfer-encoding: chunked\r\n"])
async def test_an_early_answer_says_that_the_connection_ends(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the rest of the request does not come; and it reaches a client that goes on to send."""
    for module in ("hypercorn_protocol", "llhttp_connection"):
        monkeypatch.setattr(f"gateway.http.{module}.LINGER_S", 0.1)
    monkeypatch.setattr("gateway.http.connection.LINGER_S", SOON_S)
    async with serving(early) as port, asyncio.timeout(SOON_S):
        reader, writer = await connected(port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n3e8\r\n")
        answer = await reader.readuntil(b"hello")
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert b"connection: close" in answer.lower()
        writer.write(bytes(1000))

        assert b"" == await reader.read()
        writer.close()


async def test_what_an_application_does_not_read_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body waits in its client until somebody wants it, and goes nowhere when the answer comes without."""
    answer_now = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer_now.wait()
        await send_bytes(send, 200, b"hello")

    async with serving(app) as port, asyncio.timeout(SOON_S):
        reader, writer = await connected(port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % LARGE_BYTES)
        writer.write(bytes(LARGE_BYTES))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await writer.drain()
        answer_now.set()
        await writer.drain()

        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that have little patience with heads and bodies that have begun."""
    monkeypatch.setattr("gateway.ports.serving.CHECK_S", 0.02)
    for name in ("HEAD_S", "PATIENCE_S"):
        monkeypatch.setattr(f"gateway.http.connection.{name}", 0.1)


BODY_HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"", b""),
        (b"GET / HTT", b"the request's head does not come within 0.1 s"),
        (REQUEST + b"G", b"the request's head does not come within 0.1 s"),
        (BODY_HEAD, b"the request's body does not come: 0 bytes in "),
        (BODY_HEAD + b"12345", b"the request's body does not come: 5 bytes in "),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n1", b"body does not come: 1 bytes in "),
    ],
    ids=["nothing", "head", "second head", "no body", "body", "chunk"],
)
async def test_a_request_that_does_not_come_is_given_up(
    hasty: None, sent: bytes, told: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sent:
        # The time of the first head counts from the connection's beginning: what is sent may come when it is over.
        monkeypatch.setattr("gateway.http.server.HEAD_S", 0.1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await hello(scope, receive, send)

    async with serving(app) as port, asyncio.timeout(SOON_S):
        others = asyncio.all_tasks()
        reader, writer = await connected(port)
        writer.write(sent)
        heard = await reader.read()

        assert told in heard
        assert heard.count(b" 408 ") == heard.count(b"connection: close") == bool(told)
        writer.close()
        await until_alone(others)


async def refused(scope: Any, receive: Any, send: Any) -> None:
    """An application for those beyond the bound."""
    await send_bytes(send, 503, b"hello", [(b"connection", b"close")])


async def test_beyond_the_bound_connections_are_served_otherwise_then_closed() -> None:
    """Until there is room again: somebody leaves, or has been idle for a moment."""
    share = Share(2, 2)
    by_share = Served(hello, share), Served(refused, Share(1, 1), once=True)
    async with running(*by_share) as server, asyncio.timeout(SOON_S):
        port = server.port
        others = asyncio.all_tasks()
        first, second, third, fourth = [await connected(port) for _ in range(4)]

        assert b"" == await fourth[0].read()
        third[1].write(REQUEST)
        answer = await third[0].read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in answer.lower()
        assert 2 == share.refused

        second[1].write(REQUEST + b"GET / HT")
        await second[0].readuntil(b"hello")
        for seat in share.waiting:
            seat.since -= 10
        first[1].close()
        fifth, sixth = await connected(port), await connected(port)
        for reader, writer in (fifth, sixth):
            writer.write(REQUEST)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
        assert (await second[0].read()).startswith(b"HTTP/1.1 503 ")
        for _, writer in (second, third, fourth, fifth, sixth):
            writer.close()
        await until_alone(others)


@pytest.mark.parametrize(
    ("cause", "waits_s", "told"),
    [(errno.EMFILE, 0.15, ["connections cannot be accepted"]), (errno.ECONNABORTED, 0.0, [])],
)
async def test_a_connection_that_cannot_be_accepted_is_accepted_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cause: int, waits_s: float, told: list[str]
) -> None:
    """For want of descriptors: no loop spins, and the log says so once. Of a client that has left it says nothing."""
    monkeypatch.setattr("gateway.ports.serving.ACCEPT_PAUSE_S", 0.05)
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept
    attempts = 0

    async def failing(listening: socket.socket) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts < 5:
            raise OSError(cause, os.strerror(cause))
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", failing)
    async with serving(hello) as port, asyncio.timeout(SOON_S):
        began = loop.time()
        reader, writer = await connected(port)
        writer.write(REQUEST)
        await reader.readuntil(b"hello")

        assert loop.time() - began >= waits_s
        assert [record.message for record in caplog.records] == told
        writer.close()


async def test_a_client_of_tls_that_does_not_shake_hands_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.server.HEAD_S", 0.1)
    async with serving(hello, settings=SECURE) as port, asyncio.timeout(SOON_S):
        reader, writer = await connected(port)
        with contextlib.suppress(ConnectionError):
            assert b"" == await reader.read()
        writer.close()


@pytest.mark.parametrize("tls", [False, True])
async def test_nothing_of_a_connection_stays_when_it_is_over(parser: HttpParser, tls: bool) -> None:
    """Hypercorn's own objects, which read requests with `--http-parser hypercorn`, refer to one another."""
    if parser == "hypercorn":
        return
    async with serving(hello, settings=SECURE if tls else None) as port, nothing_stays(LlhttpConnection, Seat):
        for begin in (b"", REQUEST, b"\0"):
            reader, writer = await connected(port, tls=tls)
            writer.write(begin)
            if begin:
                await reader.read(1)
            writer.close()


async def test_who_has_sent_ahead_loses_the_connection_when_memory_is_short() -> None:
    """But not who has sent little ahead."""
    answer_now = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await answer_now.wait()
        await hello(scope, receive, send)

    async with running(Served(slow, Share(100, 100))) as server, asyncio.timeout(SOON_S):
        (reader, writer), (other, others) = [await connected(server.port) for _ in range(2)]
        writer.write(REQUEST * 5_000)
        others.write(REQUEST * 2)
        while not server.relieve(1):
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            assert b"" == await reader.read()
        answer_now.set()
        for _ in range(2):
            await other.readuntil(b"hello")

        assert 0 == server.relieve(1 << 30)
        writer.close()
        others.close()


async def test_idle_connections_make_room_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Thousands of them would have the gateway refuse what all others ask for."""
    monkeypatch.setattr("gateway.ports.seats.SETTLED_S", 0.0)
    monkeypatch.setattr("gateway.ports.seats.FEW", 0)
    works, answer_now = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        works.set()
        await answer_now.wait()
        await hello(scope, receive, send)

    async with running(Served(slow, Share(100, 100))) as server, asyncio.timeout(SOON_S):
        connections = [await connected(server.port) for _ in range(4)]
        asked, asker = connections.pop()
        asker.write(REQUEST)
        await works.wait()
        given = 0
        while given < 3 * IDLE_BYTES:
            await asyncio.sleep(0)
            given += server.relieve_idle(2 * IDLE_BYTES)
        for reader, _ in connections:
            assert b"" == await reader.read()
        answer_now.set()
        await asked.readuntil(b"hello")

        assert ["memory is short, idle connections are closed"] == caplog.messages
        for _, writer in (*connections, (asked, asker)):
            writer.close()


async def test_a_stop_waits_while_a_client_takes_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it empties the system's buffers, which hold megabytes."""
    monkeypatch.setattr("gateway.ports.serving.CHECK_S", 1e9)
    part, loop = 1 << 18, asyncio.get_running_loop()
    async with running(Served(large, Share(100, 100))) as server, asyncio.timeout(SOON_S):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, part // 8)
        client.connect(("127.0.0.1", server.port))
        reader, writer = await asyncio.open_connection(sock=client, limit=part // 8)
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        stop = asyncio.create_task(server.stop(SOON_S, see_off_s=0.0))
        (connection,) = server._connections()
        for number in range(16):
            await reader.readexactly(part)
            connection.check(loop.time() + 10 * number, 0.0)
        await reader.readexactly(LARGE_BYTES - 16 * part)
        writer.close()
        await stop


async def test_a_stop_does_not_wait_for_idle_clients_to_close_their_side_of_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that do not read between two requests, as most pools of connections."""
    monkeypatch.setattr("gateway.ports.serving.CHECK_S", 0.02)
    monkeypatch.setattr("gateway.http.connection.LEAVING_PATIENCE_S", 0.1)
    for module in ("connection", "server"):
        monkeypatch.setattr(f"gateway.http.{module}.PATIENCE_S", 1e6)
    trusting = ssl.create_default_context(cafile=str(TLS / "ca.pem"))

    def idle_client(port: int) -> ssl.SSLSocket:
        client = trusting.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="localhost")
        client.sendall(REQUEST)
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        return client

    async with running(Served(hello, Share(100, 100)), settings=SECURE) as server, asyncio.timeout(SOON_S):
        with await asyncio.to_thread(idle_client, server.port):
            await server.stop(1e6, see_off_s=0.0)

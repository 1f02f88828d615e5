"""TLS handshakes that come at one moment are carried out in turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from gateway.ports.handshakes import WRITE_AHEAD_BYTES, shake_hands
from gateway.ports.listening import HTTP_PORT
from gateway.ports.tls import tls_context
from gateway.ports.turns import LoopTurns

TLS = Path(__file__).parents[2] / "fixtures" / "tls"
CLIENTS = 20
AT_ONCE = 6
"""Steps of handshakes that may fall into one turn of the loop: one begins, one is answered, one is done; and the count
of turns is late by one."""
READ_BYTES = 1 << 16
SOON_S = 60.0

Play = Callable[[ssl.SSLContext, list[tuple[socket.socket, socket.socket]]], Coroutine[Any, Any, None]]


class Told(asyncio.Protocol):
    """A connection's protocol that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str | bytes] = []
        self._lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.told.append("made")

    def data_received(self, data: bytes) -> None:
        self.told.append(data)

    def pause_writing(self) -> None:
        self.told.append("full")

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.told.append("lost")
        self._lost.set()

    async def end(self) -> None:
        self._transport.abort()
        await self._lost.wait()


class Client:
    """A client that sends its side of a handshake when the test says so."""

    def __init__(self, sock: socket.socket, trusting: ssl.SSLContext) -> None:
        self.sock = sock
        self._came, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = trusting.wrap_bio(self._came, self._out, server_hostname="localhost")
        self.goes_on()

    def goes_on(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()

    async def heard(self) -> None:
        self._came.write(await asyncio.get_running_loop().sock_recv(self.sock, READ_BYTES))
        self.goes_on()

    def receive(self) -> None:
        self._came.write(self.sock.recv(READ_BYTES))
        self.goes_on()

    def send(self, *, size: int | None = None) -> None:
        self.sock.send(self._out.read() if size is None else self._out.read(size))


@pytest.fixture
def server() -> ssl.SSLContext:
    cert, key = str(TLS / "server.pem"), str(TLS / "server.key")
    return tls_context(HTTP_PORT, cert, key, "", protocol="http/1.1", asks_clients=False)


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """The two ends of each connection: the gateway's and the client's."""
    pairs = [socket.socketpair() for _ in range(CLIENTS)]
    for one in (one for pair in pairs for one in pair):
        one.setblocking(False)
    yield pairs
    for one in (one for pair in pairs for one in pair):
        one.close()


async def test_handshakes_of_one_moment_leave_the_loop_to_others(
    server: ssl.SSLContext, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    turns, in_turn = LoopTurns(), Counter[int]()

    class Noting(ssl.SSLObject):
        def do_handshake(self) -> None:
            in_turn[turns.number] += 1
            super().do_handshake()

    server.sslobject_class = Noting
    trusting = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    clients = [Client(sock, trusting) for _, sock in pairs]
    for client in clients:
        client.send()
    told, handshakes = [Told() for _ in pairs], LoopTurns()
    async with asyncio.timeout(SOON_S):
        shaking = [
            asyncio.create_task(shake_hands(sock, one, server, handshakes, SOON_S))
            for (sock, _), one in zip(pairs, told, strict=True)
        ]
        await asyncio.gather(*(client.heard() for client in clients))
        for client in clients:
            client.tls.write(b"first words")
            client.send()
        await asyncio.gather(*shaking)
        while any(one.told == ["made"] for one in told):
            await asyncio.sleep(0)

    assert 2 * CLIENTS <= in_turn.total()
    assert AT_ONCE >= max(in_turn.values())
    assert [["made", b"first words"]] * CLIENTS == [one.told for one in told]
    for one in told:
        await one.end()


async def test_a_handshake_may_come_byte_by_byte(
    server: ssl.SSLContext, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    (sock, clients), told = pairs[0], Told()
    client = Client(clients, ssl.create_default_context(cafile=str(TLS / "ca.pem")))
    async with asyncio.timeout(SOON_S):
        shaking = asyncio.create_task(shake_hands(sock, told, server, LoopTurns(), SOON_S))
        heard = asyncio.create_task(client.heard())
        while not heard.done():
            with contextlib.suppress(BlockingIOError, ssl.SSLError):
                client.send(size=1)
            await asyncio.sleep(0)
        client.send()
        await shaking

    assert ["made"] == told.told
    await told.end()


async def test_a_transport_is_full_as_soon_as_one_without_tls(
    server: ssl.SSLContext, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    (sock, clients), told = pairs[0], Told()
    client = Client(clients, ssl.create_default_context(cafile=str(TLS / "ca.pem")))
    client.send()
    async with asyncio.timeout(SOON_S):
        shaking = asyncio.create_task(shake_hands(sock, told, server, LoopTurns(), SOON_S))
        await client.heard()
        client.send()
        transport = await shaking
    while "full" not in told.told:
        transport.write(bytes(WRITE_AHEAD_BYTES // 2))

    assert WRITE_AHEAD_BYTES <= transport.get_write_buffer_size() < 2 * WRITE_AHEAD_BYTES
    await told.end()


@pytest.mark.parametrize("turns", range(24))
async def test_nobody_is_told_of_a_connection_that_is_given_up_before_it_has_begun(
    server: ssl.SSLContext, pairs: list[tuple[socket.socket, socket.socket]], turns: int
) -> None:
    """As for a new one, when all seats are taken. turns: of the loop until then"""
    (sock, clients), told = pairs[0], Told()
    client = Client(clients, ssl.create_default_context(cafile=str(TLS / "ca.pem")))
    client.send()
    shaking = asyncio.create_task(shake_hands(sock, told, server, LoopTurns(), SOON_S))
    for _ in range(turns):
        with contextlib.suppress(BlockingIOError):
            client.receive()
        client.send()
        await asyncio.sleep(0)
    shaking.cancel()
    await asyncio.wait([shaking])
    if not shaking.cancelled():
        await told.end()
    await asyncio.sleep(0)

    assert told.told in ([], ["made", "lost"])


@pytest.mark.parametrize(("sent", "error"), [(b"", ConnectionResetError), (b"GET / HTTP/1.1\r\n\r\n", ssl.SSLError)])
async def test_who_speaks_no_tls_has_no_connection(
    server: ssl.SSLContext,
    pairs: list[tuple[socket.socket, socket.socket]],
    sent: bytes,
    error: type[Exception],
) -> None:
    (sock, client), told = pairs[0], Told()
    client.send(sent)
    client.shutdown(socket.SHUT_WR)
    with pytest.raises(error):
        async with asyncio.timeout(SOON_S):
            await shake_hands(sock, told, server, LoopTurns(), SOON_S)

    assert [] == told.told


@pytest.mark.parametrize(
    "play", [test_handshakes_of_one_moment_leave_the_loop_to_others, test_a_handshake_may_come_byte_by_byte]
)
def test_the_loop_that_services_run_on_does_alike(
    server: ssl.SSLContext, pairs: list[tuple[socket.socket, socket.socket]], play: Play
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play(server, pairs))

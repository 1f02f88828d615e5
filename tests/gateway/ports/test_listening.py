"""Listening sockets: who may share a port, and what becomes of connections when one of those who share it leaves."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
import uvloop

from deploy.local.embedded import free_port
from gateway.ports.listening import KEEPALIVE, METRICS_PORT, TCP_INFO, bound, listen, progress, queued, quieten
from shared.contract.errors import UnavailableError

HOST = "127.0.0.1"
CLIENTS = 32
SOON_S = 60.0


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def shared(port: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two listening sockets that share a port."""
    with listen(HOST, port, is_shared=True) as first, listen(HOST, port, is_shared=True) as second:
        yield first, second


@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, False)])
def test_a_port_is_shared_only_if_both_say_so(port: int, first: bool, second: bool) -> None:
    with listen(HOST, port, is_shared=first), pytest.raises(UnavailableError, match=f"cannot listen on {HOST}:{port}"):
        listen(HOST, port, is_shared=second)


def test_who_finds_a_port_taken_is_told_the_option_that_names_another(port: int) -> None:
    with listen(HOST, port), pytest.raises(UnavailableError, match=r"\(--metrics-port names another port\)"):
        listen(HOST, port, of=METRICS_PORT)


@pytest.mark.parametrize("host", ["192.0.2.1", "no host"])
def test_who_names_a_host_that_is_not_this_machines_is_told_the_option_of_the_host(host: str) -> None:
    with pytest.raises(UnavailableError, match=r"\(--host names an address of this machine\)"):
        listen(host, 0)


def test_without_sharing_a_port_of_those_who_share_is_taken(shared: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(UnavailableError):
        bound(HOST, shared[0].getsockname()[1])


def connected(port: int) -> socket.socket:
    """A client's connection, which the system has made, whoever accepts it."""
    return socket.create_connection((HOST, port), timeout=SOON_S)


async def greet(listening: socket.socket, name: bytes) -> None:
    """Accepts for ever, and greets each client."""
    while True:
        accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
        with accepted:
            await asyncio.get_running_loop().sock_sendall(accepted, name)


async def test_who_leaves_a_port_serves_what_is_queued_and_the_others_get_the_rest(
    port: int, shared: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection is reset, neither one that waited to be accepted, nor one that began while the socket left."""
    monkeypatch.setattr("gateway.ports.listening.QUEUE_S", SOON_S)
    leaving, staying = shared
    queue = [connected(port) for _ in range(CLIENTS)]
    waiting = queued(leaving)
    assert CLIENTS == waiting + queued(staying)

    async with asyncio.timeout(SOON_S):
        tasks = [asyncio.create_task(greet(leaving, b"leaving")), asyncio.create_task(greet(staying, b"staying"))]
        quiet = asyncio.create_task(quieten(leaving))
        await asyncio.sleep(0)
        begun = [asyncio.create_task(asyncio.to_thread(connected, port)) for _ in range(CLIENTS)]
        await quiet
        assert 0 == queued(leaving)
        tasks[0].cancel()
        leaving.close()
        late = await asyncio.gather(*begun)
        heard = [await asyncio.to_thread(client.recv, 7) for client in queue]
        heard_late = [await asyncio.to_thread(client.recv, 7) for client in late]
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert waiting == heard.count(b"leaving")
    assert CLIENTS - waiting == heard.count(b"staying")
    assert [b"staying"] * CLIENTS == heard_late
    for client in (*queue, *late):
        client.close()


async def test_what_nobody_accepts_is_waited_for_no_longer_than_a_moment(
    port: int, shared: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.ports.listening.QUEUE_S", 0.05)
    clients = [connected(port) for _ in range(CLIENTS)]

    async with asyncio.timeout(SOON_S):
        await quieten(shared[0])

    assert 0 < queued(shared[0])
    for client in clients:
        client.close()


def test_a_connection_of_a_quiet_socket_carries_data(port: int) -> None:
    """The filter goes over to accepted connections, and drops nothing of theirs."""
    with listen(HOST, port) as listening, connected(port) as client:
        asyncio.run(quieten_now(listening))
        accepted, _ = listening.accept()
        with accepted:
            client.sendall(b"hello")
            accepted.settimeout(SOON_S)

            assert b"hello" == accepted.recv(5)
            assert 5 == struct.unpack_from("Q", accepted.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 232), 128)[0]


def test_a_client_whose_machine_has_vanished_is_asked_for_and_given_up_within_two_minutes(port: int) -> None:
    with listen(HOST, port) as listening, connected(port):
        accepted, _ = listening.accept()
        with accepted:
            idle_s, pause_s, probes = (
                accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name, _ in KEEPALIVE
            )

            assert 0 < accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert 120 >= idle_s + pause_s * probes


async def quieten_now(listening: socket.socket) -> None:
    """`quieten`, which waits for a queue that nobody empties."""
    task = asyncio.create_task(quieten(listening))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_of_a_connection_that_is_closed_nothing_is_known(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A server that stops asks of all that are not over yet."""

    async def closed() -> None:
        lost = asyncio.Event()

        class Noting(asyncio.Protocol):
            def connection_lost(self, exc: Exception | None) -> None:
                del exc
                lost.set()

        with listen("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()):
            accepted, _ = await asyncio.get_running_loop().sock_accept(server)
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(Noting, accepted)
            progress(transport)
            transport.abort()
            await lost.wait()
            await asyncio.sleep(0.01)
            assert 0 == progress(transport)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(closed())

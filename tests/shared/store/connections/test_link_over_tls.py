"""Connections to a server behind TLS: a link on both event loops, whose replies take the place of redis-py's stream
there as well, and certificates that are replaced."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.store.connections.link import Link
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import CLOSED

TLS = Path(__file__).parents[3] / "fixtures" / "tls"
LARGE = bytes(range(256)) * (8 << 10)


@asynccontextmanager
async def behind_tls(url: str) -> AsyncGenerator[tuple[str, list[asyncio.StreamWriter]]]:
    """The server of a URL behind a relay that speaks TLS: the URL with TLS, and the connections to be cut."""
    at = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    clients: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.append(writer)
        from_server, to_server = await asyncio.open_connection(at.hostname, at.port)
        await asyncio.gather(pump(reader, to_server), pump(from_server, writer))

    async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"rediss://:{at.password}@localhost:{port}{at.path}?ssl_ca_certs={TLS / 'ca.pem'}", clients
        for client in clients:
            client.close()


@pytest.mark.parametrize("asked", ["ssl_ca_certs=/nowhere.pem", f"ssl_certfile={TLS}/server.pem&ssl_keyfile=/nowhere"])
async def test_a_file_that_cannot_be_read_is_named(asked: str) -> None:
    async with connect(f"rediss://localhost:1/0?{asked}", retries=0) as redis:
        with pytest.raises(RedisConnectionError, match=r"/nowhere.*: \[Errno 2\] No such file or directory"):
            await redis.ping()


async def test_nobody_is_asked_for_the_password_of_a_key(capfd: pytest.CaptureFixture[str]) -> None:
    files = f"ssl_certfile={TLS}/server.pem&ssl_keyfile={TLS}/encrypted.key"
    async with connect(f"rediss://localhost:1/0?{files}", retries=0) as redis:
        with pytest.raises(RedisConnectionError, match=r"encrypted\.key"):
            await redis.ping()

    assert "pass phrase" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_link_over_tls_exchanges_and_connects_again(
    redis_server: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def talk() -> None:
        async with behind_tls(redis_server) as (url, clients):
            redis = connect(url, retries=0)
            link = Link(redis)
            for number in range(3):
                await link.connect()
                echoed = await link.exchange([("ECHO", LARGE), ("ECHO", str(number)), ("NONE",)])
                assert [LARGE, str(number).encode()] == echoed[:2]
                assert "unknown command" in str(echoed[2])
            assert 1 == len(clients)

            clients[0].transport.abort()
            with pytest.raises(RedisConnectionError, match=CLOSED):
                await link.exchange([("PING",)])
            await link.connect()
            assert [b"PONG"] == await link.exchange([("PING",)])

            await link.close()
            await redis.aclose()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(talk())


async def test_certificates_are_read_again_for_each_connection(redis_server: str, tmp_path: Path) -> None:
    """They are renewed while a service runs: what it read at its start would lock it out when it connects again."""
    trusted = tmp_path / "ca.pem"
    shutil.copy(TLS / "ca.pem", trusted)
    async with behind_tls(redis_server) as (url, clients):
        redis = connect(url.replace(str(TLS / "ca.pem"), str(trusted)), retries=0)
        assert await redis.ping()

        trusted.write_text("half a file")
        clients[0].transport.abort()
        # The first finds its connection closed.
        for _ in range(2):
            with pytest.raises(RedisConnectionError):
                await redis.ping()

        shutil.copy(TLS / "ca.pem", trusted)
        assert await redis.ping()
        await redis.aclose()

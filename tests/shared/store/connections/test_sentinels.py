"""The primary is found by way of Sentinels, whatever some of them say, and left when it is none any more."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hiredis
import pytest

from deploy.chaos.node import until
from deploy.chaos.replicated import ReplicatedRedis
from deploy.local.embedded import free_port
from shared.store.agreement import joined
from shared.store.connections import discovery
from shared.store.connections.link import Link
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import CONNECTION_LOST, UnfitServerError
from shared.store.connections.server_run import AnotherRunError, ServerRun
from shared.store.keyspace import DEFAULT_PREFIX
from tests.embedded_redis import EmbeddedRedis

TLS = Path(__file__).parents[3] / "fixtures" / "tls"
PATIENCE_S = 60.0


# -- what Sentinels say ------------------------------------------------------------------------------------------------


def told(host: str = "127.0.0.1", port: int = 1, *, flags: str = "master", epoch: int = 0) -> bytes:
    """The answer to SENTINEL MASTER."""
    fields = ("name", "mesh", "ip", host, "port", str(port), "flags", flags, "config-epoch", str(epoch))
    return b"*%d\r\n" % len(fields) + b"".join(b"$%d\r\n%b\r\n" % (len(one), one.encode()) for one in fields)


def demanding(login: tuple[str, ...], answer: bytes) -> Callable[[list[bytes]], bytes]:
    """A Sentinel that answers only who has said AUTH and this before, on whatever connection."""
    known: list[bool] = []

    def reply(command: list[bytes]) -> bytes:
        if command[0] == b"AUTH" and tuple(part.decode() for part in command[1:]) == login:
            known.append(True)
        if command[0] != b"SENTINEL":
            return b"+OK\r\n"
        return answer if known else b"-NOAUTH Authentication required.\r\n"

    return reply


class Late(bytes):
    """An answer that takes its time."""


@asynccontextmanager
async def fakes(
    *answers: bytes | Callable[[list[bytes]], bytes] | None, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[str]:
    """Sentinels that give these answers; None: one that is silent. Yields their addresses, with commas between them."""
    async with contextlib.AsyncExitStack() as stack:
        addresses: list[str] = []
        for answer in answers:

            async def serve(
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                answer: bytes | Callable[[list[bytes]], bytes] | None = answer,
            ) -> None:
                commands = hiredis.Reader()
                with contextlib.suppress(OSError):
                    while data := await reader.read(4096):
                        commands.feed(data)
                        while (command := commands.gets()) is not False:
                            if isinstance(answer, Late):
                                await asyncio.sleep(0.1)
                            if callable(answer):
                                writer.write(answer(command))
                            elif answer is not None:
                                writer.write(answer if command[0] == b"SENTINEL" else b"+OK\r\n")
                            if answer == b"":
                                writer.close()
                writer.close()

            server = await stack.enter_async_context(await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls))
            addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield ",".join(addresses)


def client(url: str, run: ServerRun | None = None) -> Any:
    return connect(url, retries=0, run=run)


async def refusal(call: Awaitable[Any]) -> str:
    with pytest.raises(CONNECTION_LOST) as caught:
        await call
    return str(caught.value)


@pytest.fixture
def right(private_server: EmbeddedRedis) -> bytes:
    """The answer of a Sentinel that knows the primary."""
    return told(port=private_server.port, epoch=3)


@pytest.fixture
def login(private_server: EmbeddedRedis) -> str:
    """What stands before the hosts in a URL of the primary."""
    return private_server.url.removeprefix("redis://").rpartition("127.0.0.1")[0]


WRONG = {
    "garbage": (b"garbage\r\n", "Protocol error"),
    "a closed connection": (b"", "onnection"),
    "a text": (b"+OK\r\n", "its answer is not a Sentinel's"),
    "nothing": (b"*-1\r\n", "its answer is not a Sentinel's"),
    "an empty list": (b"*0\r\n", "its answer is not a Sentinel's"),
    "an odd list": (b"*3\r\n+ip\r\n+a\r\n+port\r\n", "its answer is not a Sentinel's"),
    "numbers": (b"*2\r\n:1\r\n:2\r\n", "its answer is not a Sentinel's"),
    "no text": (told("x").replace(b"x", b"\xff"), "its answer is not a Sentinel's"),
    "no address": (told(""), "its answer names no server"),
    "no port": (told(port=0), "its answer names no server"),
    "a port too high": (told(port=65536), "its answer names no server"),
    "a dead primary": (told(flags="master,s_down,o_down"), "127.0.0.1:1 is down"),
    "a replica": (told(flags="slave"), "127.0.0.1:1 is down"),
    "another service": (b"-ERR No such master with that name\r\n", "No such master with that name"),
    "no Sentinel": (b"-ERR unknown command 'SENTINEL'\r\n", "unknown command 'SENTINEL'"),
    "a stranger": (b"-NOAUTH Authentication required.\r\n", "Authentication required"),
}


@pytest.mark.parametrize("said", WRONG)
async def test_a_sentinel_that_talks_nonsense_is_outvoted_by_one_and_named_where_it_is_alone(
    right: bytes, login: str, said: str
) -> None:
    wrong, reason = WRONG[said]
    async with fakes(wrong, right, wrong) as hosts:
        redis = client(f"redis+sentinel://{login}{hosts}/mesh")
        assert await redis.ping()
        await redis.aclose()
    async with fakes(wrong) as hosts:
        redis = client(f"redis+sentinel://{login}{hosts}/mesh?sentinel_password=hunter2")
        text = await refusal(redis.ping())
        await redis.aclose()

    assert reason in text
    assert "no Sentinel tells of a primary 'mesh'" in text
    assert hosts in text
    assert "hunter2" not in text


async def test_most_sentinels_count_and_of_equals_the_newer_configuration(
    right: bytes, login: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PATIENCE_S", PATIENCE_S)
    late = Late(right)
    for answers in ((late, told(epoch=9), late), (told(epoch=2), right), (told(), told(port=2), late, late)):
        async with fakes(*answers) as hosts:
            redis = client(f"redis+sentinel://{login}{hosts}/mesh")
            assert await redis.ping(), answers
            await redis.aclose()


async def test_silent_sentinels_are_not_waited_for_where_the_others_agree(
    right: bytes, login: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PATIENCE_S", 2 * PATIENCE_S)
    async with fakes(None, right, right) as hosts, asyncio.timeout(PATIENCE_S):
        redis = client(f"redis+sentinel://{login}{hosts}/mesh")
        assert await redis.ping()
        await redis.aclose()
    monkeypatch.setattr(discovery, "PATIENCE_S", 0.05)
    async with fakes(None, right, None) as hosts:
        redis = client(f"redis+sentinel://{login}{hosts}/mesh")
        assert await redis.ping()
        await redis.aclose()


async def test_a_server_that_is_no_primary_is_not_used_whoever_names_it(
    right: bytes, login: str, private_server: EmbeddedRedis
) -> None:
    direct = client(private_server.url)
    async with fakes(right) as hosts:
        redis = client(f"redis+sentinel://{login}{hosts}/mesh")
        await direct.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert "was named as the primary, but its role is slave" in await refusal(redis.ping())
        assert "but its role is slave" in await refusal(Link(redis).connect())
        await direct.execute_command("REPLICAOF", "NO", "ONE")
        assert await redis.ping()
        await redis.aclose()
    await direct.aclose()


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "Protocol"),
        (b"+OK\r\n", "it does not tell its role"),
        (b"*1\r\n$8\r\nsentinel\r\n", "its role is sentinel"),
        (b"*1\r\n:1\r\n", "it does not tell its role"),
        (b"", "onnection"),
        (None, "Error 111"),
    ],
)
async def test_an_address_where_there_is_no_redis_counts_as_a_lost_connection(
    right: bytes, login: str, there: bytes | None, reason: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        with contextlib.suppress(OSError):
            while there and (data := await reader.read(4096)):
                commands.feed(data)
                while (command := commands.gets()) is not False:
                    writer.write(there if command[0] == b"ROLE" or there[:1] == b"H" else b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if there is None:
        server.close()
        await server.wait_closed()
        # Nobody else gets this one, as somebody may get the port that was just closed.
        port = free_port()
    async with fakes(told(port=port), told(port=port), right) as hosts:
        redis = client(f"redis+sentinel://:secret@{hosts}/mesh")
        assert reason in await refusal(redis.ping())
        assert reason in await refusal(Link(redis).connect())
        await redis.aclose()
    server.close()


async def test_sentinels_have_credentials_and_tls_apart_from_the_servers(right: bytes, login: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    async with fakes(demanding(("asker", "p@ss"), right), tls=context) as hosts:
        apart = "sentinel_username=asker&sentinel_password=p%40ss"
        over = f"sentinel_tls=yes&sentinel_ssl_ca_certs={TLS / 'ca.pem'}"
        for options, reason in (
            (over, "Authentication required"),
            (f"{apart}&sentinel_tls=yes", "certificate"),
            (f"{apart}&{over}", ""),
        ):
            redis = client(f"redis+sentinel://{login}{hosts}/mesh?{options}")
            if reason:
                assert reason in (text := await refusal(redis.ping()))
                assert "p@ss" not in text
            else:
                assert await redis.ping()
            await redis.aclose()


# -- real ones ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedRedis]:
    with ReplicatedRedis(tmp_path_factory.mktemp("replicated"), min_replicas=1) as replicated:
        yield replicated


@pytest.fixture
def replicated(processes: ReplicatedRedis) -> ReplicatedRedis:
    """A primary with one replica, without which it takes no writes, and three Sentinels: all of them live."""
    processes.revive()
    return processes


@pytest.fixture
async def run() -> ServerRun:
    return ServerRun()


@pytest.fixture
async def redis(replicated: ReplicatedRedis, run: ServerRun) -> AsyncIterator[Any]:
    # However long a failover takes, no answer of a frozen server is missed before it is over.
    redis = connect(replicated.url, retries=0, run=run, timeout_ms=600_000)
    yield redis
    await redis.aclose()


@pytest.fixture
async def link(redis: Any) -> AsyncIterator[Link]:
    link = Link(redis)
    await link.connect()
    yield link
    await link.close()


async def insisted(call: Callable[[], Awaitable[Any]]) -> Any:
    """The answer to a call that is repeated while Redis is away."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await call()
            except AnotherRunError:
                raise
            except CONNECTION_LOST:
                await asyncio.sleep(0.05)


async def test_the_new_primary_is_found_and_nothing_is_sent_to_it_before_it_is_agreed_to(
    replicated: ReplicatedRedis, redis: Any, link: Link, run: ServerRun
) -> None:
    assert await redis.set("a", "1")
    first = replicated.primary()
    first.kill()

    with pytest.raises(AnotherRunError):
        await insisted(redis.ping)
    with pytest.raises(AnotherRunError):
        await insisted(link.connect)

    run.agree(run.met)
    assert b"1" == await redis.get("a")
    await link.connect()
    assert [b"1"] == await link.exchange([("GET", "a")])
    # Alone, with min-replicas-to-write 1, it takes no writes.
    assert "NOREPLICAS" in await refusal(redis.set("a", "2"))

    # The old one comes back, takes itself for the primary, and is not believed: not once most Sentinels know better.
    await asyncio.to_thread(replicated.replaced, first)
    fresh = await asyncio.to_thread(replicated.primary)
    first.start()
    await asyncio.to_thread(until, first.answers, "the old primary answers", PATIENCE_S)
    assert "master" == first.info("role")
    await redis.connection_pool.disconnect()
    assert b"1" == await redis.get("a")
    assert fresh.port == redis.connection_pool._available_connections[0].port
    with first.client() as old:
        old.replicaof("127.0.0.1", fresh.port)
    assert await insisted(lambda: redis.set("a", "2"))


async def test_a_primary_that_was_frozen_and_replaced_takes_no_writes_and_is_left(
    replicated: ReplicatedRedis, redis: Any, link: Link, run: ServerRun
) -> None:
    """Its clients are still connected; it takes itself for the primary until the Sentinels tell it better."""
    assert [b"OK"] == await link.exchange([("SET", "a", "old")])
    assert await redis.ping()
    stale = replicated.primary()
    stale.send(signal.SIGSTOP)
    await asyncio.to_thread(replicated.replaced, stale)
    fresh = await asyncio.to_thread(replicated.primary)
    stale.send(signal.SIGCONT)

    # The first command may still be one of those that lay there; none of them is taken once it has looked around.
    async def refused() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance((await link.exchange([("SET", "a", "stale")]))[0], UnfitServerError):
                await asyncio.sleep(0.01)

    with contextlib.suppress(*CONNECTION_LOST):
        await refused()
    with pytest.raises(AnotherRunError):
        await insisted(link.connect)
    await asyncio.to_thread(replicated.rejoined)

    assert fresh is replicated.primary()
    with pytest.raises(AnotherRunError):
        await insisted(redis.ping)
    run.agree(run.met)
    assert await redis.set("a", "new")
    assert b"new" == await redis.get("a")


async def test_what_a_frozen_primary_says_counts_no_more_once_another_one_was_met(
    replicated: ReplicatedRedis, redis: Any, link: Link, run: ServerRun
) -> None:
    """It wakes up, carries out what lies in its sockets, and answers: but nothing of that is on the new primary."""
    assert await redis.set("a", "old")
    stale = replicated.primary()
    stale.send(signal.SIGSTOP)
    waiting = [asyncio.create_task(link.exchange([("SET", "a", "late")])), asyncio.create_task(redis.set("a", "late"))]
    await asyncio.to_thread(replicated.replaced, stale)
    assert not any(one.done() for one in waiting)

    with pytest.raises(AnotherRunError):
        await insisted(Link(redis).connect)
    for one in waiting:
        assert "closed" in (await refusal(one)).lower()
    run.agree(run.met)
    stale.send(signal.SIGCONT)
    assert [b"old"] == await exchanged(link, ("GET", "a"))
    assert b"old" == await redis.get("a")
    await asyncio.to_thread(replicated.rejoined)


async def exchanged(link: Link, command: tuple[str, ...]) -> list[Any]:
    await link.connect()
    return await link.exchange([command])


async def test_connections_that_are_idle_leave_a_run_that_is_over(
    replicated: ReplicatedRedis, redis: Any, link: Link, run: ServerRun
) -> None:
    """Although that server lives and would serve them."""
    assert await redis.set("a", "old")
    first = replicated.primary()
    run.agree({"": "another one, which was compared"})
    await asyncio.sleep(0)  # the loop tells connections of their end in its next turn

    with pytest.raises(AnotherRunError):
        await link.connect()
    with pytest.raises(AnotherRunError):
        await redis.ping()
    run.agree(run.met)
    assert b"old" == await redis.get("a")
    assert first is replicated.primary()


async def test_a_server_that_refuses_the_password_is_named(replicated: ReplicatedRedis) -> None:
    """One of several may have been restarted with an older file of users."""
    primary = replicated.primary()
    redis = client(replicated.url.replace(f":{primary.password}@", ":another@"))

    assert (await refusal(redis.ping())).startswith(f"{primary.address}: ")
    await redis.aclose()


async def test_sentinels_may_die_one_after_the_other_and_come_back(replicated: ReplicatedRedis, redis: Any) -> None:
    assert await redis.set("a", "1")
    for sentinel in replicated.sentinels[:2]:
        sentinel.kill()
        await redis.connection_pool.disconnect()
        assert b"1" == await redis.get("a")

    replicated.sentinels[2].kill()
    assert b"1" == await redis.get("a"), "connections that are there stay"
    await redis.connection_pool.disconnect()
    text = await refusal(redis.get("a"))
    assert all(sentinel.address in text for sentinel in replicated.sentinels)
    assert replicated.sentinels[0].password not in text

    joining = asyncio.create_task(join(replicated.url))
    replicated.sentinels[1].start()
    async with asyncio.timeout(PATIENCE_S):
        await joining
    assert b"1" == await redis.get("a")


async def join(url: str) -> None:
    """A service's start, again and again as its supervisor would."""
    while True:
        with contextlib.suppress(Exception):
            async with joined(url, DEFAULT_PREFIX, 0, name="a"):
                return

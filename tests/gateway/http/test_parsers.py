"""Requests byte by byte, through each parser: what is served, and what is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, get_args

import pytest

from gateway.http.llhttp_request import HEADERS_MAX, Chunks
from gateway.ports.turns import LoopTurns
from gateway.rest.reply import send_bytes
from gateway.settings import HttpParser
from tests.gateway.http_serving import serving

SOON_S = 60.0
POST = b"POST /echo?a=b HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"
TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"
"""How a client begins that speaks TLS."""
GET = b"GET /%41 HTTP/1.1\r\nhost: x\r\n\r\n"
THREE = (
    POST
    + b"content-length: 9\r\nA: \r\n\r\n\r\n\r\n\r\n\r\n!"
    + POST
    + UPGRADE
    + b"transfer-encoding: chunked\r\n\r\n4;x=y\r\n\r\n\r\n\r\n2\r\n!!\r\n0\r\nTrailer: x\r\n\r\n"
    + GET
)
ANSWERS = (b"POST|/echo|\r\n\r\n\r\n\r\n!", b"POST|/echo|\r\n\r\n!!", b"GET|/A|")
PARTS = (b"a", b"", b"bc")


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request; by some paths, with what an application may do besides."""
    match scope["path"]:
        case "/unread":
            await send_bytes(send, 404, b"unread")
        case "/parts":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in PARTS:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body"})
        case "/split":
            await send_bytes(send, 200, b"", [(b"a", b"b\r\nc: d")])
        case "/raise":
            raise ValueError
        case _:
            body = b""
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message["body"]
                if not message["more_body"]:
                    break
            await send_bytes(send, 200, b"|".join((scope["method"].encode(), scope["path"].encode(), body)))


@pytest.fixture(params=get_args(HttpParser))
def parser(request: pytest.FixtureRequest) -> HttpParser:
    return request.param


@pytest.fixture
async def port(parser: HttpParser, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    # Who is refused while it sends byte by byte takes its time, and would lose the answer.
    for name in ("LINGER_S", "PATIENCE_S"):
        monkeypatch.setattr(f"gateway.http.connection.{name}", SOON_S)
    async with serving(app, parser=parser) as port:
        yield port


async def heard(port: int, *sent: bytes, ends: bool = True) -> bytes:
    """What a client hears that sends these pieces. ends: it says that it sends nothing more"""
    async with asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in sent:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if ends:
                writer.write_eof()
            return await reader.read()
        finally:
            writer.close()


def bodies(heard: bytes) -> list[bytes]:
    """The bodies of answers, each of which has a length."""
    found: list[bytes] = []
    while heard:
        head, _, rest = heard.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None, heard
        found.append(rest[: int(length[1])])
        heard = rest[int(length[1]) :]
    return found


async def test_requests_mean_the_same_wherever_they_are_cut(port: int) -> None:
    assert list(ANSWERS) == bodies(await heard(port, THREE))
    assert list(ANSWERS) == bodies(await heard(port, *(THREE[at : at + 1] for at in range(len(THREE)))))
    for at in range(1, len(THREE)):
        assert list(ANSWERS) == bodies(await heard(port, THREE[:at], THREE[at:])), THREE[:at]


async def test_a_thousand_requests_at_once_are_answered_in_their_order(port: int) -> None:
    sent = b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(1000))

    assert [b"GET|/%d|" % number for number in range(1000)] == bodies(await heard(port, sent))


REFUSED = {
    "length and chunks": (POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks and length": (POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400),
    "no length": (POST + b"content-length: x\r\n\r\n", 400),
    "signed length": (POST + b"content-length: +3\r\n\r\nabc", 400),
    "endless length": (POST + b"content-length: " + b"9" * 30 + b"\r\n\r\nabc", 400),
    "other coding": (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "two codings": (POST + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    "coding twice": (POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "no coding": (POST + UPGRADE + b"transfer-encoding: \r\n\r\n", 400),
    "chunks of HTTP/1.0": (CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n", 400),
    "size of a chunk": (CHUNKED + b"x\r\n\r\n", 400),
    "endless chunk": (CHUNKED + b"f" * 17 + b"\r\n", 400),
    "longer chunk": (CHUNKED + b"2\r\nabc\r\n0\r\n\r\n", 400),
    "line of a chunk": (CHUNKED + b"1\na\n0\n\n", 400),
    "lines": (GET.replace(b"\r\n", b"\n"), 400),
    "space before a colon": (POST + b"content-length : 3\r\n\r\nabc", 400),
    "folded": (GET.replace(b"host: x", b"host: x\r\n y"), 400),
    "no host": (GET.replace(b"host: x\r\n", b""), 400),
    "two hosts": (GET.replace(b"host: x", b"host: x\r\nhost: y"), 400),
    "nul": (GET.replace(b"host: x", b"host: x\r\na: b\0"), 400),
    "large head": (GET.replace(b"host: x", b"host: x\r\na: " + b"b" * 20_000), 431),
    "endless head": (b"GET /" + b"a" * 20_000, 431),
    "many headers": (GET.replace(b"host: x", b"host: x" + b"\r\na:" * HEADERS_MAX), 431),
    "another version": (GET.replace(b"1.1", b"1.2"), 505),
    "no version": (b"GET /\r\n\r\n", 400),
    "no request": (TLS + b"\r\n\r\n", 400),
    "half a head": (GET[:-2], 400),
    "half a body": (POST + b"content-length: 9\r\n\r\nabc", 400),
    "half of the chunks": (CHUNKED + b"5\r\nabc", 400),
}


@pytest.mark.parametrize("parser", ["llhttp"])
@pytest.mark.parametrize("name", REFUSED)
async def test_what_could_be_read_in_two_ways_is_refused_and_ends_the_connection(port: int, name: str) -> None:
    """With one answer: what follows is not read as a request."""
    sent, status = REFUSED[name]
    follows = b"" if name.startswith("half") else GET
    by_bytes = [sent[at : at + 1] for at in range(len(sent))]
    for before, pieces in ((0, [sent, follows]), (1, [GET + sent + follows]), (0, by_bytes)):
        answers = await heard(port, *pieces)

        assert before + 1 == answers.count(b"HTTP/1.1 "), answers
        line = b" %d %b\r\n" % (status, HTTPStatus(status).phrase.encode())
        assert 1 == answers.count(line) == answers.count(b"connection: close"), answers


@pytest.mark.parametrize(("parser", "sent"), [("llhttp", TLS), ("hypercorn", TLS), ("llhttp", GET.replace(b"\r", b""))])
async def test_a_client_whose_head_never_ends_is_refused_while_it_waits(port: int, sent: bytes) -> None:
    """One that speaks TLS, and one whose lines end without a carriage return."""
    async with asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("origin", [b"http://x", b"HTTPS://x.y:8000"])
async def test_a_target_may_name_its_origin(port: int, origin: bytes) -> None:
    assert [b"GET|/A|"] == bodies(await heard(port, GET.replace(b"/%41", origin + b"/%41")))
    assert [b"GET|/|"] == bodies(await heard(port, GET.replace(b"/%41", origin)))
    assert [b"POST|/echo|abc"] == bodies(
        await heard(port, POST.replace(b"/echo", origin + b"/echo") + b"content-length: 3\r\n\r\nabc")
    )


async def test_an_answer_without_a_length_comes_in_chunks(port: int) -> None:
    """To a client that knows chunks; else it ends with the connection."""
    new = await heard(port, b"GET /parts HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
    old = await heard(port, b"GET /parts HTTP/1.0\r\n\r\n")

    assert 2 == new.lower().count(b"transfer-encoding: chunked\r\n")
    assert 2 == new.count(b"\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n")
    assert old.endswith(b"\r\n\r\nabc")
    assert b"chunked" not in old


async def test_a_status_is_followed_by_its_words(port: int) -> None:
    """Clients put them into their errors, some of them in place of the body."""
    answers = await heard(port, GET, GET.replace(b"/%41", b"/unread"))

    assert [b"200 OK", b"404 Not Found"] == re.findall(rb"HTTP/1.1 (.*)\r\n", answers)
    assert (await heard(port, b"GET / HTTP/2.0\r\nhost: x\r\n\r\n")).startswith(
        b"HTTP/1.1 505 HTTP Version Not Supported\r\n"
    )


async def test_an_answer_to_head_has_no_body(port: int) -> None:
    answers = await heard(port, GET.replace(b"GET", b"HEAD") + GET)

    assert 2 == answers.count(b"HTTP/1.1 200 ")
    assert answers.count(b"|/A|") == 1
    assert b"content-length: 8\r\n" in answers


@pytest.mark.parametrize("path", [b"/split", b"/raise"])
async def test_a_failure_of_the_application_is_a_500_and_ends_the_connection(
    port: int, path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    # Else its end may come before the application has failed, and who has left is told nothing.
    answers = await heard(port, GET.replace(b"/%41", path) + GET, ends=False)

    assert answers.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert 1 == answers.count(b"HTTP/1.1 ")
    assert b"c: d" not in answers
    assert caplog.records


async def test_a_body_is_asked_for_when_the_application_wants_it(port: int, parser: HttpParser) -> None:
    """Hypercorn asks for each."""
    head = b"HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
    async with asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /echo " + head)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 Continue\r\n")
        writer.write(b"abc")
        assert (await reader.readuntil(b"POST|/echo|abc")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"POST /unread " + head)
        answer = await reader.readuntil(b"unread")

        assert (parser == "hypercorn") == (b" 100 " in answer)
        assert b"connection: close" in answer.lower()
        writer.close()


async def test_a_client_of_http_1_0_is_not_asked_for_its_body(port: int) -> None:
    """It would take that for the answer (RFC 9110, 10.1.1)."""
    head = b"POST /echo HTTP/1.0\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
    async with asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readuntil(b"\r\n"), 0.2)
        writer.write(b"abc")
        assert b"POST|/echo|abc" == (await reader.read()).rpartition(b"\r\n\r\n")[2]
        writer.close()


@pytest.mark.parametrize("said", [b"close", b"Keep-Alive, Close", b"x,\tclose\t, y"])
async def test_a_client_may_say_that_its_connection_ends(port: int, said: bytes) -> None:
    async with asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"host: x", b"host: x\r\nconnection: " + said))
        answer = await reader.read()
        writer.close()

    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("behind", [b"\r\n", GET])
async def test_what_comes_behind_the_last_request_is_dropped(parser: HttpParser, version: bytes, behind: bytes) -> None:
    """Together with it, or while it is answered."""
    came, answer_now = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        came.set()
        await answer_now.wait()
        await app(scope, receive, send)

    last = POST.replace(b"1.1", version) + b"connection: close\r\ncontent-length: 3\r\n\r\nabc"
    async with serving(slow, parser=parser) as port, asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(last + behind)
        await came.wait()
        writer.write(behind)
        await asyncio.sleep(0.05)
        answer_now.set()
        answer = await reader.read()
        writer.close()

    assert 1 == answer.count(b"HTTP/1.1 ")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"POST|/echo|abc")


async def test_a_client_that_sends_ahead_is_not_read(parser: HttpParser) -> None:
    """Until its earlier requests are answered: they wait in the client."""
    answer_now = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await answer_now.wait()
        await app(scope, receive, send)

    async with serving(slow, parser=parser) as port, asyncio.timeout(SOON_S):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET * 500_000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await writer.drain()
        writer.transport.abort()
        answer_now.set()


async def test_a_client_that_sends_ahead_keeps_nobody_waiting(parser: HttpParser) -> None:
    served: list[str] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])
        await app(scope, receive, send)

    async with serving(noting, parser=parser) as port, asyncio.timeout(SOON_S):
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        connections[0][1].write(GET * 2000)
        connections[1][1].write(GET.replace(b"%41", b"other"))
        for (reader, writer), last in zip(connections, (2000, 1), strict=True):
            for _ in range(last):
                await reader.readuntil(b"|")
                await reader.readuntil(b"|")
            writer.close()

    assert served.index("/other") < 1000


async def turns_of(requests: int, sent: bytes = GET, rest: bytes = b"") -> int:
    """In how many turns of the loop 20 clients are answered that send so many requests each, all at one moment. rest:
    of their bodies, also sent at one moment, when all clients wait for it."""
    turns, begun, answered = LoopTurns(), list[str](), set[int]()

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            answered.add(turns.number)
            await send(message)

        begun.append(scope["path"])
        await app(scope, receive, counted)

    async with serving(counting) as port, asyncio.timeout(SOON_S):
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in connections:
            writer.write(sent * requests)
        while rest and len(begun) < 20:
            await asyncio.sleep(0)
        for _, writer in connections:
            writer.write(rest)
        for reader, writer in connections:
            for _ in range(2 * requests):
                await reader.readuntil(b"|")
            writer.close()
    return len(answered)


async def test_of_the_clients_that_send_ahead_one_is_served_in_a_turn_of_the_loop() -> None:
    """So that any number of them takes from all others as much as one does."""
    # Two turns, one after the other, may be counted as one.
    assert await turns_of(20) >= 20 * (20 - 1) // 2


async def test_of_the_clients_that_send_at_one_moment_some_are_served_in_a_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.ports.turns.ENTERING_MAX", 1)

    # Two turns, one after the other, may be counted as one.
    assert await turns_of(1) >= 20 // 2


async def test_of_the_bodies_that_end_at_one_moment_some_are_taken_in_a_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What follows a body, its decoding, may take milliseconds."""
    monkeypatch.setattr("gateway.ports.turns.ENTERING_MAX", 1)

    # Two turns, one after the other, may be counted as one.
    assert await turns_of(1, POST + b"content-length: 2\r\n\r\n!", b"!") >= 20 // 2


@pytest.mark.parametrize("path", [b"/echo", b"/unread"])
async def test_of_the_chunks_that_come_at_one_moment_some_are_parsed_in_a_turn_of_the_loop(
    path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of bodies that do not end with them, too, whether they are read or dropped: in chunks of one byte a few KiB take
    as long as a whole request."""
    turns, bodies_begun, parsed = LoopTurns(), list[Chunks](), list[int]()

    class Noting(Chunks):
        def __init__(self) -> None:
            super().__init__()
            bodies_begun.append(self)

        def on_body(self, part: bytes) -> None:
            super().on_body(part)
            parsed.append(turns.number)

    monkeypatch.setattr("gateway.ports.turns.ENTERING_MAX", 1)
    monkeypatch.setattr("gateway.http.llhttp_connection.Chunks", Noting)
    async with serving(app) as port, asyncio.timeout(SOON_S):
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in connections:
            writer.write(CHUNKED.replace(b"/echo", path))
        while len(bodies_begun) < 20:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)  # the last of them waits for its body, too
        for _, writer in connections:
            writer.write(b"1\r\n!\r\n")
        while len(parsed) < 20:
            await asyncio.sleep(0)
        for _, writer in connections:
            writer.transport.abort()

    # Two turns, one after the other, may be counted as one.
    assert len(set(parsed)) >= 20 // 2


@pytest.mark.parametrize(
    ("chunk", "count"),
    [
        (b"10000\r\n" + b"\r\n\r\n" * (1 << 14) + b"\r\n", 1),
        (b"1\r\n!\r\n", 20_000),
        (b"1;" + b"a" * 100_000 + b"\r\n!\r\n", 1),
    ],
    ids=["empty lines", "small chunks", "long extension"],
)
async def test_a_body_in_chunks_keeps_nobody_waiting(chunk: bytes, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty line may be the body's end, and is parsed by itself; small chunks are many; and of an extension nothing
    is told to the application."""
    monkeypatch.setattr("gateway.http.llhttp_connection.TURN_S", -1.0)
    read: list[str] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        read.append(scope["path"])

    async with serving(noting) as port, asyncio.timeout(SOON_S):
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        connections[0][1].write(CHUNKED + chunk * count + b"0\r\n\r\n")
        connections[1][1].write(GET)
        for (reader, writer), path in zip(connections, (b"/echo", b"/A"), strict=True):
            assert (await reader.readuntil(path + b"|")).startswith(b"HTTP/1.1 200 ")
            writer.close()

    assert ["/A", "/echo"] == read

"""A connection whose HTTP/1.1 is parsed by llhttp, the C parser of Node.js, through httptools.

Bytes wait in one buffer. The connection takes a head out of it, then the application its body, then comes the next
head: nothing is parsed ahead, and a client that sends faster is not read.

A head ends with an empty line, and so does a body in chunks. llhttp never gets bytes beyond such a line, so it never
begins with the request that follows, and a head always comes to it in one piece. llhttp is strict: what two servers
could read differently is refused, above all a request with both a length and chunks. It never sees a body that has a
length.
"""

from __future__ import annotations

import asyncio
import re
import time
from functools import lru_cache
from http import HTTPStatus
from itertools import chain
from typing import Any, cast

from httptools import HttpParserError, HttpRequestParser
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from starlette.types import ASGIApp, Message, Scope

from gateway.bounds.unread_answers import UnreadAnswers
from gateway.http.connection import AHEAD_BYTES, CLOSE, KEEP_ALIVE_S, LINGER_S, REASONS, Connection, error_body
from gateway.http.llhttp_request import CHUNKED_HEAD, EMPTY_LINE, NO_REQUEST, Chunks, Request, parsable, read_head
from gateway.ports.seats import Seat
from gateway.ports.turns import TURN_S, LoopTurns
from shared.process import logs

SPLITTING = re.compile(rb"[\0\r\n]")
"""What must not stand in a header of an answer."""
BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_BODY = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})
DISCONNECT: Message = {"type": "http.disconnect"}


class LlhttpConnection(Connection, asyncio.Protocol):
    """A connection whose HTTP/1.1 llhttp reads."""

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        context: WorkerContext,
        seat: Seat,
        unread: UnreadAnswers,
        turns: LoopTurns,
    ) -> None:
        super().__init__(seat, unread, turns)
        self._app = app
        self._config = config
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._ends: dict[str, Any] = {}
        self._buffer = bytearray()
        self._is_at_eof = False
        self._is_paused = False
        self._arrival: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = asyncio.Event()
        self._request: Request | None = None
        self._answer: Message = {}
        self._is_chunked = False
        self._served = 0

    # -- what the transport calls --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        if self._abort_at is not None:
            self._linger()
            return
        self._buffer += data
        if self._request is not None and self._request.chunks is None:
            self._request.received += len(data)
        if len(self._buffer) > AHEAD_BYTES:
            self._transport.pause_reading()
            self._is_paused = True
        self._wake()

    def eof_received(self) -> bool:
        self._is_at_eof = True
        self._wake()
        # Our side stays open for the answer; of TLS both end at once.
        return self._abort_at is None and not self._is_tls

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_at_eof = True
        self._abort_at = self._now()
        self._buffer.clear()
        self._writable.set()
        self._lost.set()
        self._wake()

    # -- what the server calls -----------------------------------------------------------------------------------------

    @property
    def protocol(self) -> asyncio.Protocol:
        return self

    async def run(self, transport: asyncio.Transport) -> None:
        try:
            socket = transport.get_extra_info("socket")
            self._ends = {
                "scheme": "https" if self._is_tls else "http",
                "client": socket.getpeername()[:2],
                "server": socket.getsockname()[:2],
            }
            is_ahead = False
            while self._abort_at is None and (request := await self._next()) is not None:
                if not is_ahead:
                    await self._turns.entered(self._seat.client)
                await self._serve(request)
                if is_ahead := bool(self._buffer):
                    # Of the clients that send ahead, one goes on in each turn of the loop, however many they are.
                    await self._turns.turn()
        except OSError:
            pass  # the client left before the beginning
        finally:
            if self._abort_at is None:
                self._finish(lingering=False)
            try:
                await self._lost.wait()
            finally:
                transport.abort()

    @property
    def _incoming(self) -> Request | None:
        return self._request

    @property
    def _is_within_request(self) -> bool:
        return bool(self._buffer) if self._request is None else not self._request.is_whole

    @property
    def ahead_bytes(self) -> int:
        return len(self._buffer)

    def _refusal(self, status: int, error: str) -> bytes:
        request = self._request
        if request is not None and request.is_begun:
            return b""
        body = error_body(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), CLOSE]
        head = self._head(status, headers)
        return head if request is not None and request.method == "HEAD" else head + body

    def _abandon(self) -> None:
        self._buffer.clear()
        if self._is_at_eof:
            self._transport.close()
        self._resume()
        self._wake()

    async def _drained(self) -> None:
        if not self._writable.is_set():
            await self._writable.wait()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _next(self) -> Request | None:
        """The next request; None when none comes, or the connection has been ended."""
        if self._context.terminated.is_set():
            return None
        searched = 0
        while True:
            if self._buffer.startswith((b"\r", b"\n")):
                # Some clients send an empty line after a body.
                self._buffer = self._buffer.lstrip(b"\r\n")
            if self._buffer and not self._buffer[:1].isalpha():
                # No method begins so, but TLS does, and its client would wait for ever for an empty line to be sent.
                self.end(HTTPStatus.BAD_REQUEST, NO_REQUEST)
                return None
            end = self._buffer.find(EMPTY_LINE, searched)
            if (len(self._buffer) if end < 0 else end) > self._config.h11_max_incomplete_size:
                self.end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's head is too large")
                return None
            if end >= 0:
                return self._parsed(bytes(self._buffer[: end + len(EMPTY_LINE)]))
            if self._is_at_eof:
                if self._buffer:
                    self.end(HTTPStatus.BAD_REQUEST, "the request's head ends early")
                return None
            if BARE_LINE_FEED.search(self._buffer, searched):
                # Its client may take the head for whole, and wait for an answer.
                self.end(HTTPStatus.BAD_REQUEST, "a line of the request's head ends without a carriage return")
                return None
            if self._buffer:
                self._note_head()
            searched = max(0, len(self._buffer) - len(EMPTY_LINE) + 1)
            await self._more()
            if self._abort_at is not None:
                return None

    def _parsed(self, head: bytes) -> Request | None:
        """The request of this head, which begins the buffer; None when it is refused."""
        request = read_head(head, self._now())
        if not isinstance(request, Request):
            self.end(*request)
            return None
        del self._buffer[: len(head)]
        self._served += 1
        if request.encoding is not None:
            request.chunks = Chunks()
            request.parser = HttpRequestParser(request.chunks)
            request.parser.feed_data(CHUNKED_HEAD)
        else:
            request.received = len(self._buffer)
        self._seat.work()
        return request

    async def _serve(self, request: Request) -> None:
        self._request, self._answer = request, {}
        scope: Scope = {**request.scope, "extensions": {}, **self._ends}
        try:
            await self._app(scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001  the last place before the connection
            logs.error("http request failed unexpectedly", error, path=scope["path"])
        if self._abort_at is None:
            if not request.is_answered:
                request.is_last = True
                if not self._is_at_eof:  # otherwise the client has left
                    text = "the request was not answered"
                    self._transport.write(self._refusal(HTTPStatus.INTERNAL_SERVER_ERROR, text))
            if request.is_last:
                self._finish(lingering=not request.is_whole)
                self._abandon()
            else:
                self._seat.wait(self._now(), KEEP_ALIVE_S)
        self._request = None

    async def _receive(self) -> Message:
        """The next part of the request's body, or that the client has left, as ASGI's `receive`."""
        request = self._request
        while request is not None and self._abort_at is None:
            if not request.is_told:
                part = await self._take(request)
                request.is_told = request.is_taken
                if part or request.is_told:
                    return {"type": "http.request", "body": part, "more_body": not request.is_told}
                if self._abort_at is not None:
                    break  # the body is broken
            if self._is_at_eof and not (request.is_taken and self._buffer):
                if not request.is_taken:
                    self.end(HTTPStatus.BAD_REQUEST, "the request's body ends early")
                break
            if request.expects and not request.received:
                request.expects = False
                self._transport.write(CONTINUE)
            await self._more_of_body()
        return DISCONNECT

    async def _take(self, request: Request) -> bytes:
        """Takes what has come of a body out of the buffer, or a part of it. Ends the connection if that is broken."""
        if request.parser is None or request.chunks is None:
            part = bytes(self._buffer[: request.missing])
            del self._buffer[: request.missing]
            request.missing -= len(part)
            return part
        try:
            until = self._now() + TURN_S
            while not request.chunks.is_whole and (size := parsable(self._buffer)):
                request.parser.feed_data(self._buffer[:size])
                del self._buffer[:size]
                if self._now() > until:
                    await self._turns.turn()
                    if request.chunks.parts:
                        break
                    until = self._now() + TURN_S
        except HttpParserError as error:
            self.end(HTTPStatus.BAD_REQUEST, str(error))
        part = b"".join(request.chunks.parts)
        request.chunks.parts.clear()
        request.received += len(part)
        return part

    async def _drop_rest(self, request: Request) -> None:
        """Drops the rest of an answered request's body, which may take LINGER_S to come."""
        try:
            async with asyncio.timeout(LINGER_S):
                while not (request.is_taken or self._is_at_eof or self._abort_at is not None):
                    if not await self._take(request) and self._abort_at is None:
                        await self._more_of_body()
        except TimeoutError:
            pass

    async def _more(self) -> None:
        """Returns when bytes have come, the client sends no more, or the connection has been ended."""
        self._arrival = self._loop.create_future()
        self._resume()
        await self._arrival

    async def _more_of_body(self) -> None:
        """As `_more`, in a turn of the loop that has time for what follows: parsing small chunks, and what becomes of a
        body, take milliseconds, and parts of many bodies may come at one moment."""
        await self._more()
        await self._turns.entered(self._seat.client)

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _resume(self) -> None:
        if self._is_paused and len(self._buffer) <= AHEAD_BYTES and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _send(self, message: Message) -> None:
        """Sends a part of the answer, as ASGI's `send`; its head together with the first part of its body."""
        request = self._request
        assert request is not None, "an application answers its own request"
        if message["type"] == "http.response.start":
            if not request.is_taken:
                if CLOSE not in message.get("headers", ()) and not request.expects:
                    await self._drop_rest(request)
                request.is_last |= not request.is_taken
            self._answer = message
            return
        if self._abort_at is not None:
            return  # nobody hears it
        head = b"" if request.is_begun else self._answer_head(request)
        request.is_begun, request.is_answered = True, not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        if request.method == "HEAD" or self._answer["status"] in NO_BODY:
            parts = [head]
        elif self._is_chunked:
            chunk = (b"%x\r\n" % len(body), body, b"\r\n") if body else ()
            parts = [head, *chunk, b"0\r\n\r\n" if request.is_answered else b""]
        else:
            parts = [head, body]
        try:
            await self._deliver(parts)
        except TimeoutError:
            self._transport.abort()
            self._abort_at = self._now()

    def _answer_head(self, request: Request) -> bytes:
        headers: list[tuple[bytes, bytes]] = list(self._answer.get("headers", ()))
        self._is_chunked = request.version == "1.1" and b"content-length" not in [name for name, _ in headers]
        if self._is_chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        request.is_last |= CLOSE in headers or self._served >= self._config.keep_alive_max_requests
        if request.is_last and CLOSE not in headers:
            headers.append(CLOSE)
        return self._head(self._answer["status"], headers)

    def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Raises ValueError for a header that would end early."""
        lines = header_lines(tuple(headers)) + common_lines(self._config, int(time.time()))
        return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, REASONS.get(status, b""), lines)


@lru_cache(maxsize=64)
def header_lines(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """Headers as they are sent. Raises ValueError for one that would end early."""
    if SPLITTING.search(b"".join(chain.from_iterable(headers))):
        raise ValueError("a header of the answer has a line's end in it")
    return b"".join([b"%b: %b\r\n" % header for header in headers])


@lru_cache(maxsize=4)
def common_lines(config: Config, _second: int) -> bytes:
    """The headers of every answer of that second."""
    return header_lines(tuple(config.response_headers("h11")))

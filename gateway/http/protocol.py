"""HTTP/1.1 on one connection, and no other protocol.

Hypercorn's protocol for h11 would go over to HTTP/2 when a client begins with it or asks for an upgrade, and to
WebSocket. Here `Upgrade` is ignored, as RFC 9110 (7.8) allows, and the preface of HTTP/2 is refused: Hypercorn 0.18
never frees what a client of HTTP/2 has not taken when it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

import h11
import orjson
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.protocol.events import Body, EndBody, Event, Request, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import AppWrapper, Scope
from starlette.types import Message

VERSIONS = (b"1.0", b"1.1")
AHEAD_BYTES = 128 << 10
"""Of a body, that wait for the application; the rest waits for them."""
PART_BYTES = 512
"""What a part of a body takes beside its bytes: a chunk may have a single one."""
LINGER_S = 2.0
"""How long an answer to a request that has not come whole waits for the rest of it."""
DISCONNECT: Message = {"type": "http.disconnect"}
CLOSE = (b"connection", b"close")


class RequestReceiver:
    """What one application receives of its request."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._bytes = 0
        self._room: asyncio.Event | None = None

    async def receive(self) -> Message:
        """The next message."""
        message = await self._messages.get()
        self._bytes -= size_of(message)
        if self._room is not None and self._bytes <= AHEAD_BYTES:
            self._room.set()
        return message

    async def put(self, message: Message) -> None:
        """Returns when there is room for another one. The client's departure needs none, and makes it."""
        self._messages.put_nowait(message)
        self._bytes += size_of(message)
        if message["type"] == "http.disconnect":
            if self._room is not None:
                self._room.set()
        elif self._bytes > AHEAD_BYTES:
            self._room = asyncio.Event()
            await self._room.wait()


def size_of(message: Message) -> int:
    """What a message takes while it waits, in bytes."""
    return PART_BYTES + len(message.get("body", b""))


class Applications(TaskGroup):
    """The tasks of one connection."""

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        """Begins to answer a request; returns where its body goes."""
        inbox = RequestReceiver()
        self.spawn(self._answered, app, config, scope, inbox.receive, send)
        return inbox.put

    async def _answered(self, app: AppWrapper, config: Config, scope: Scope, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send, _unused, _unused)
        except Exception:  # noqa: BLE001  the last place before the connection, as in Hypercorn
            await config.log.exception("Error in ASGI Framework")
        finally:
            await send(None)


def _unused() -> None:
    """For WSGI."""


class Exchange(HTTPStream):
    """One request and its answer.

    When it is answered before it has come whole, the rest is read and thrown away for a moment, so that the connection
    can go on; when that does not do, the answer says `Connection: close`.

    began          when its head had come, by the loop's clock
    received       bytes of its body, so far
    is_whole       whether all of it has come
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.began = asyncio.get_running_loop().time()
        self.received = 0
        self.is_whole = False
        self._rest: asyncio.Event | None = None

    async def handle(self, event: Event) -> None:
        """What has come."""
        if isinstance(event, Body):
            self.received += len(event.data)
            if self._rest is not None:
                return
        elif isinstance(event, EndBody | StreamClosed):
            self.is_whole = True
            if self._rest is not None:
                self._rest.set()
        await super().handle(event)

    async def app_send(self, message: Any) -> None:
        """What the application answers; None when it has ended."""
        if message is not None and message["type"] == "http.response.start" and not self.is_whole:
            message = await self._early(message)
        await super().app_send(message)

    async def _early(self, answer: Message) -> Message:
        """That answer, when it can be sent."""
        self._rest = asyncio.Event()
        await self.app_put(cast("Any", DISCONNECT))  # nobody reads the rest
        headers = list(answer.get("headers", ()))
        if CLOSE not in headers:
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._rest.wait()
            except TimeoutError:
                headers.append(CLOSE)
        return {**answer, "headers": headers}


class Ended:
    """In place of an h11 connection of which nothing more is read or written."""

    our_state = None
    their_state = h11.ERROR
    they_are_waiting_for_100_continue = False
    trailing_data = (b"", False)

    def receive_data(self, data: bytes) -> None:
        """Thrown away."""

    def next_event(self) -> type[h11.NEED_DATA]:
        """None."""
        return h11.NEED_DATA

    def send(self, event: h11.Event) -> bytes:
        """Refuses; the protocol expects that of a connection whose client has made an error."""
        raise h11.LocalProtocolError("the connection is being closed")


class Http1(H11Protocol):
    """One connection's requests, in order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_head = False

    @property
    def exchange(self) -> Exchange | None:
        """What is being answered."""
        return cast("Exchange | None", self.stream)

    @property
    def is_within_request(self) -> bool:
        """Whether part of a request has come, and part of it is still to come."""
        their_state = self.connection.their_state
        return their_state in {h11.SEND_BODY, h11.ERROR} or (
            their_state is h11.IDLE and bool(self.connection.trailing_data[0])
        )

    def refusal(self, status: int, error: str) -> bytes:
        """An answer after which the connection ends; nothing when part of another answer has been sent."""
        if self.connection.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return b""
        connection = cast("h11.Connection", self.connection)
        body = orjson.dumps({"error": error})
        length = (b"content-length", b"%d" % len(body))
        headers = [*self.config.response_headers("h11"), (b"content-type", b"application/json"), length, CLOSE]
        events = [h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()]
        if self._is_head:
            del events[1]
        try:
            return b"".join(connection.send(event) or b"" for event in events)
        except h11.LocalProtocolError:
            return b""  # there is nothing that such a client would understand

    async def end(self) -> None:
        """From now on nothing that comes is heard, and nothing is answered; the application is told."""
        self.connection = cast("Any", Ended())
        await self.can_read.set()
        await self.handle(Closed())

    async def _check_protocol(self, event: h11.Request) -> None:
        """Here Hypercorn would go over to HTTP/2."""

    async def _create_stream(self, request: h11.Request) -> None:
        self._is_head = request.method == b"HEAD"
        if request.http_version not in VERSIONS:
            version = request.http_version.decode()
            refusal = self.refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, f"HTTP/{version} is not served: use HTTP/1.1")
            await self.send(RawData(refusal))
            await self.send(Closed())
            return
        self.stream = Exchange(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def _send_error_response(self, status_code: int) -> None:
        await self.send(RawData(self.refusal(status_code, HTTPStatus(status_code).phrase)))

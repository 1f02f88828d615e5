"""HTTP/1.1 on one connection, and no other protocol.

Hypercorn's protocol for h11 changes to HTTP/2 or to WebSocket when a client asks for it. Here `Upgrade` is ignored, as
RFC 9110 (7.8) allows, and the preface of HTTP/2 is refused. The reason: when an HTTP/2 client leaves, Hypercorn 0.18
never frees the answers that the client has not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

import h11
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.protocol.events import Body, EndBody, Event, Request, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import AppWrapper, H11SendableEvent, Scope
from starlette.types import Message

from gateway.http.connection import AHEAD_BYTES, CLOSE, LINGER_S, NOT_SERVED, REASONS, VERSIONS, error_body, origin_form

PART_BYTES = 512
"""Memory that a part of a body takes beside its bytes. It counts, because a chunk may have a single byte."""
DISCONNECT: Message = {"type": "http.disconnect"}


class RequestReceiver:
    """The queue of ASGI messages by which an application receives its request's body."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._bytes = 0
        self._room: asyncio.Event | None = None

    async def receive(self) -> Message:
        """The next message, as ASGI's `receive`."""
        message = await self._messages.get()
        self._bytes -= size_of(message)
        if self._room is not None and self._bytes <= AHEAD_BYTES:
            self._room.set()
        return message

    async def put(self, message: Message) -> None:
        """Queues a message, and returns when there is room for another one.

        A disconnect message does not wait. It also wakes a `put` that does: the reader must not hang on an application
        that reads no further.
        """
        self._messages.put_nowait(message)
        self._bytes += size_of(message)
        if message["type"] == "http.disconnect":
            if self._room is not None:
                self._room.set()
        elif self._bytes > AHEAD_BYTES:
            self._room = asyncio.Event()
            await self._room.wait()


def size_of(message: Message) -> int:
    """The memory that a message takes while it waits, bytes."""
    return PART_BYTES + len(message.get("body", b""))


class Applications(TaskGroup):
    """The tasks of one connection."""

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        """Starts the application for a request. Returns the function that takes the request's body."""
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
    """Stands for the two arguments that Hypercorn passes for WSGI applications."""


class Exchange(HTTPStream):
    """One request and its answer.

    If the application answers before the whole request has come, the rest is read and dropped for up to LINGER_S. If it
    has then come, the connection can serve another request; if not, the answer says `Connection: close`.

    began     when the request's head had come, by the loop's clock
    received  bytes of its body so far
    is_whole  whether the whole request has come
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.began = asyncio.get_running_loop().time()
        self.received = 0
        self.is_whole = False
        self._rest: asyncio.Event | None = None

    async def handle(self, event: Event) -> None:
        if isinstance(event, Body):
            self.received += len(event.data)
            if self._rest is not None:
                # The request is answered already: this part is dropped.
                return
        elif isinstance(event, EndBody | StreamClosed):
            self.is_whole = True
            if self._rest is not None:
                self._rest.set()
        await super().handle(event)

    async def app_send(self, message: Any) -> None:
        """Takes a message of the application's answer; None when the application has ended."""
        if message is not None and message["type"] == "http.response.start" and not self.is_whole:
            message = await self._early(message)
        await super().app_send(message)

    async def _early(self, answer: Message) -> Message:
        """Holds back an early answer until the rest of the request has come, or LINGER_S have passed."""
        self._rest = asyncio.Event()
        # The application reads no further. A `put` that waits for it must end, or the connection would not be read.
        await self.app_put(cast("Any", DISCONNECT))
        headers = list(answer.get("headers", ()))
        if CLOSE not in headers:
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._rest.wait()
            except TimeoutError:
                headers.append(CLOSE)
        return {**answer, "headers": headers}


class RequestReader(h11.Connection):
    """h11, but what comes behind a request that ends its connection is dropped, as RFC 9112 (9.6) says. For h11 it is
    the client's error, which would be answered in place of the request: a stray line end does not undo a step.
    """

    def receive_data(self, data: bytes) -> None:
        if self.their_state is not h11.MUST_CLOSE:
            super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        return h11.NEED_DATA if self.their_state is h11.MUST_CLOSE else super().next_event()


class Ended:
    """Replaces the h11 connection once nothing more is to be read or written."""

    our_state = None
    their_state = h11.ERROR
    they_are_waiting_for_100_continue = False
    trailing_data = (b"", False)

    def receive_data(self, data: bytes) -> None:
        """Drops what comes behind the end of the connection."""

    def next_event(self) -> type[h11.NEED_DATA]:
        return h11.NEED_DATA

    def send(self, event: h11.Event) -> bytes:
        """Raises, as h11 does after a client's error; Hypercorn's protocol expects that."""
        raise h11.LocalProtocolError("the connection is being closed")


class Http1(H11Protocol):
    """HTTP/1.1 on one connection: its requests one after the other."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connection = RequestReader(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)
        self._is_head = False

    @property
    def exchange(self) -> Exchange | None:
        """The request that is being answered, if there is one."""
        return cast("Exchange | None", self.stream)

    @property
    def is_within_request(self) -> bool:
        """Whether part of a request has come, and part of it is still to come."""
        their_state = self.connection.their_state
        return their_state in {h11.SEND_BODY, h11.ERROR} or (
            their_state is h11.IDLE and bool(self.connection.trailing_data[0])
        )

    def refusal(self, status: int, error: str) -> bytes:
        """The bytes of an error answer after which the connection ends.

        Empty when part of another answer has been sent: the client would read them as part of that one.
        """
        if self.connection.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return b""
        connection = cast("h11.Connection", self.connection)
        body = error_body(error)
        length = (b"content-length", b"%d" % len(body))
        headers = [*self.config.response_headers("h11"), (b"content-type", b"application/json"), length, CLOSE]
        head = h11.Response(status_code=status, headers=headers, reason=REASONS[status])
        events = [head, h11.Data(data=body), h11.EndOfMessage()]
        if self._is_head:
            del events[1]
        try:
            return b"".join(connection.send(event) or b"" for event in events)
        except h11.LocalProtocolError:
            # After this client's error h11 has no valid answer.
            return b""

    async def end(self) -> None:
        """Stops reading and answering. The application is told that its client has left."""
        self.connection = cast("Any", Ended())
        await self.can_read.set()
        await self.handle(Closed())

    async def _check_protocol(self, event: h11.Request) -> None:
        """Overrides the method in which Hypercorn changes to HTTP/2, and does nothing."""

    async def _create_stream(self, request: h11.Request) -> None:
        self._is_head = request.method == b"HEAD"
        if request.http_version not in VERSIONS:
            version = NOT_SERVED.format(version=request.http_version.decode())
            refusal = self.refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, version)
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
                raw_path=origin_form(request.target),
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        if isinstance(event, h11.Response | h11.InformationalResponse):
            reason = REASONS.get(event.status_code, b"")
            event = type(event)(status_code=event.status_code, headers=list(event.headers), reason=reason)
        await super()._send_h11_event(event)

    async def _send_error_response(self, status_code: int) -> None:
        await self.send(RawData(self.refusal(status_code, HTTPStatus(status_code).phrase)))

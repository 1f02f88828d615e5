"""POST .../generate and .../generate_stream: JSON to a call, its answers to JSON or to server-sent events.

Both take the answers of a request one at a time (`answers_of`), however many there are.
Source: triton-spec 5.5; observed answers of Triton 2.51.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import orjson
from starlette.types import Receive, Scope, Send

from gateway.requests.answers import answers_of
from gateway.requests.infer_call import InferCall
from gateway.requests.inference import Inference
from gateway.requests.status import http_error, told_of
from gateway.requests.waiting import Answer
from gateway.rest.body import client_in, read_headers
from gateway.rest.client_watch import ClientWatch
from gateway.rest.compression import is_packed
from gateway.rest.encoding import Encoding
from gateway.rest.generate_request import decode_generate
from gateway.rest.operations import (
    ERROR,
    EVENTS,
    EVENTS_TYPE,
    GENERATE_REQUEST,
    GENERATE_RESPONSE,
    JSON_TYPE,
    OF_INFERENCE,
    SESSION_TEXT,
    described,
    json_content,
)
from gateway.rest.receiver import Receiver
from gateway.rest.reply import JSON, Header, send_bytes, session_headers
from gateway.rest.response import encode_generated
from shared.contract.errors import MeshError, ModelError, RequestError

NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
EVENT_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
"""Headers of a stream of events. Proxies would otherwise keep events back, or keep them for others."""

REFUSED_OR_FAILED = {JSON_TYPE: ERROR, EVENTS_TYPE: EVENTS}
SESSION = {"Inference-Session-Id": SESSION_TEXT}


class Generate:
    """The endpoints of the generate extension."""

    def __init__(self, inference: Inference, receiver: Receiver, encoding: Encoding) -> None:
        self._inference = inference
        self._receiver = receiver
        self._encoding = encoding

    @described(GENERATE_RESPONSE, errors=OF_INFERENCE, body=json_content(GENERATE_REQUEST), headers=SESSION)
    async def one(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../generate: one inference. Inputs, outputs and parameters are members of plain JSON objects."""
        found: list[Answer] = []
        async with self._answers(scope, receive) as answers:
            async for answer in answers:
                if isinstance(answer, MeshError):
                    raise answer
                if found:
                    raise ModelError(NOT_ONE)
                found.append(answer)
        if not found:
            raise ModelError(NOT_ONE)
        content = await self._encoded(scope, found[0])
        await send_bytes(send, 200, content, (JSON, *session_headers(found[0].session_id)))

    @described(
        (200, {EVENTS_TYPE: EVENTS}),
        *((status, REFUSED_OR_FAILED) for status in (400, 404, 500, 501, 503)),
        errors=OF_INFERENCE,
        body=json_content(GENERATE_REQUEST),
        headers=SESSION,
    )
    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../generate_stream: one inference, whose answers come as server-sent events.

        The first answer decides the status. A model's error is an event, too: in place of the first answer, with its
        own status, or behind it. What is refused before the inference is JSON.
        """
        events = Events(send)
        async with self._answers(scope, receive) as answers:
            async for answer in answers:
                try:
                    if isinstance(answer, MeshError):
                        raise answer
                    await events.send(await self._encoded(scope, answer), 200, session_headers(answer.session_id))
                except MeshError as error:
                    # What was refused before the inference is answered as everywhere else.
                    if not events.begun and not error.accepted:
                        raise
                    await events.send_error(error.released())
        await events.end()

    @asynccontextmanager
    async def _answers(self, scope: Scope, receive: Receive) -> AsyncGenerator[AsyncIterator[Answer | MeshError]]:
        """Receives a request. Gives its answers, and errors in their places, as they come.

        Leaving them early gives the request up.

        raises  ClientLeftError when the client leaves meanwhile
        """
        # All of the body is JSON, whatever the header says.
        path, headers = scope["path_params"], replace(read_headers(scope), header_length=None)
        record = await self._inference.look_up(path["model"], path.get("version", ""))
        if is_packed(headers.content_encoding):
            raise RequestError("Unsupported content-encoding, only 'identity' is supported.")

        def decoded(body: bytes, call: InferCall) -> tuple[InferCall, None]:
            return decode_generate(body, call, record.config), None

        with self._inference.budget.reserve(client_in(scope)) as reservation:
            call, _ = await self._receiver.call(scope, receive, headers, reservation, decoded)
        answers = answers_of(self._inference, call, client_in(scope))
        del call  # it is not needed while the answers are awaited
        try:
            with ClientWatch(receive) as client:
                yield _while_present(answers, client, scope)
        finally:
            await answers.aclose()

    async def _encoded(self, scope: Scope, answer: Answer) -> bytes:
        """The body of an answer. One that cannot be written is an answer, too: its error counts as accepted."""
        try:
            return await self._encoding.of(scope, answer.output_bytes, partial(encode_generated, answer))
        except MeshError as error:
            error.accepted = True
            raise


class Events:
    """A response of server-sent events. begun: its status has been sent, or is about to be"""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def send(self, content: bytes, status: int = 200, headers: tuple[Header, ...] = ()) -> None:
        """Sends one event. Of the first one the response has its status and its headers."""
        await self._begin(status, headers)
        await self._send({"type": "http.response.body", "body": b"data: %b\n\n" % content, "more_body": True})

    async def send_error(self, error: MeshError) -> None:
        status, body = http_error(error)
        await self.send(orjson.dumps(body), status)

    async def end(self) -> None:
        """Ends the stream. One without an event gets its head first, with status 200."""
        await self._begin(200)
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, headers: tuple[Header, ...] = ()) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": status, "headers": [*EVENT_HEADERS, *headers]})


async def _while_present(
    answers: AsyncGenerator[Answer | MeshError], client: ClientWatch, scope: Scope
) -> AsyncIterator[Answer | MeshError]:
    async def following() -> Answer | MeshError | None:
        try:
            return await anext(answers, None)
        except Exception as error:  # noqa: BLE001  a response that has begun can only end with an event
            return told_of(error, "request failed unexpectedly", path=scope["path"])

    while (answer := await client.while_present(asyncio.ensure_future(following()))) is not None:
        yield answer

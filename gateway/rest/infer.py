"""POST .../infer: body to call, wait, answer to body."""

from __future__ import annotations

import asyncio
import re

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.bounds.byte_budget import Reservation
from gateway.models.catalog import Catalog
from gateway.requests.admission import InferCall, has_many_strings, with_strings_read
from gateway.requests.inference import Inference
from gateway.requests.regions import NO_REGIONS, Regions
from gateway.requests.waiting import Answer
from gateway.rest.body import BULKY_BYTES, ClientLeftError, Headers, read_body, read_headers
from gateway.rest.compression import choose, pack
from gateway.rest.json_values import parsing_bytes
from gateway.rest.reply import BINARY, JSON, Header, send_bytes
from gateway.rest.request import OutputForms, decode, forwarded_headers
from gateway.rest.response import encode_answer
from shared.contract.errors import Code, RequestError

GENERATE_REFUSAL = "the generate extension is not supported: send the request to the model's 'infer' endpoint"
WATCH_AFTER_S = 1.0
"""After this time the connection is watched for the client's leaving. Not before: each watch costs a task."""


class Infer:
    """The inference endpoint.

    size_max  largest body, unpacked, bytes
    regions   shared memory of clients
    forward   headers whose names match this pattern become parameters of the request
    """

    def __init__(
        self,
        inference: Inference,
        catalog: Catalog,
        *,
        size_max: int,
        forward: re.Pattern[str] | None = None,
        regions: Regions = NO_REGIONS,
    ) -> None:
        self._inference = inference
        self._catalog = catalog
        self._size_max = size_max
        self._forward = forward
        self._regions = regions

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = read_headers(scope)
        with self._inference.budget.reserve() as reservation:
            call, forms = await self._receive(scope, receive, headers, reservation)
        future = self._inference.submit(call)
        del call  # it is not needed while the answer is awaited, and taken
        answer = await answer_while_present(future, receive)
        if json_bytes(answer, forms) > BULKY_BYTES:
            content, header_length = await asyncio.to_thread(encode_answer, answer, forms)
        else:
            content, header_length = encode_answer(answer, forms)
        extra: list[Header] = [JSON] if header_length is None else [BINARY]
        if header_length is not None:
            extra.append((b"inference-header-content-length", b"%d" % header_length))
        if answer.session_id is not None:
            extra.append((b"inference-session-id", answer.session_id.encode()))
        encoding = choose(headers.accept_encoding) if headers.accept_encoding else ""
        if encoding:
            content = await asyncio.to_thread(pack, content, encoding)
            extra.append((b"content-encoding", encoding.encode()))
        del answer, future
        await send_bytes(send, 200, content, extra)

    async def refuse_generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../generate and .../generate_stream (triton-spec 5.5): not served yet."""
        path = scope["path_params"]
        self._catalog.find(path["model"], path.get("version", ""))
        raise RequestError(GENERATE_REFUSAL, Code.UNSUPPORTED)

    async def _receive(
        self, scope: Scope, receive: Receive, headers: Headers, reservation: Reservation
    ) -> tuple[InferCall, OutputForms]:
        """Receives and decodes the body. Of it, only the call keeps bytes."""
        body = await read_body(receive, headers, self._size_max, reservation)
        if (len(body) if headers.header_length is None else headers.header_length) > BULKY_BYTES:
            async with self._inference.budget.decoding:
                reservation.hold_decoded(len(body), parsing_bytes(body[: headers.header_length]))
                call, forms = await asyncio.to_thread(self._decode, scope, headers, body)
        else:
            call, forms = self._decode(scope, headers, body)
        if has_many_strings(call):
            call = await asyncio.to_thread(with_strings_read, call)
        return call, forms

    def _decode(self, scope: Scope, headers: Headers, body: bytes) -> tuple[InferCall, OutputForms]:
        path = scope["path_params"]
        model, version = path["model"], path.get("version", "")
        call = InferCall(model, version, session_id=headers.session_id, trace_headers=headers.trace)
        try:
            call, forms = decode(
                body,
                call,
                lambda: self._catalog.find(model, version)[0].config,
                header_length=headers.header_length,
                regions=self._regions,
            )
        except RequestError:
            # As in Triton, the error of an unknown model comes before errors of the body.
            self._catalog.find(model, version)
            raise
        if self._forward is not None:
            forwarded = forwarded_headers(scope["headers"], self._forward)
            if forwarded:
                call = msgspec.structs.replace(call, parameters={**call.parameters, **forwarded})
        return call, forms


def json_bytes(answer: Answer, forms: OutputForms) -> int:
    """Bytes of the outputs that will be written as JSON or into shared memory, or classified."""
    outputs = ((output, forms.of(output.name)) for output in answer.message.outputs)
    return sum(len(output.raw) for output, form in outputs if form.classes or not form.binary)


async def answer_while_present(future: asyncio.Future[Answer], receive: Receive) -> Answer:
    """Waits for the answer. Raises ClientLeftError when the client leaves after it has waited for WATCH_AFTER_S.

    The request is then cancelled (`gateway.requests.cancellation`).
    """
    if future.done():
        return future.result()
    watches: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        future.cancel()

    def begin() -> None:
        watches.append(asyncio.get_running_loop().create_task(watch(), name="client watch"))

    timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, begin)
    try:
        return await future
    except asyncio.CancelledError:
        # Cancelled by the watch, because the client left; otherwise this handler itself is being cancelled.
        if watches and watches[0].done():
            raise ClientLeftError("the client left before the answer came") from None
        raise
    finally:
        timer.cancel()
        for task in watches:
            task.cancel()

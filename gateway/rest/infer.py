"""POST .../infer: body to call, wait, answer to body."""

from __future__ import annotations

from functools import partial

from starlette.types import Receive, Scope, Send

from gateway.models.catalog import Catalog
from gateway.requests.classification import WEIGHT
from gateway.requests.infer_call import InferCall
from gateway.requests.inference import Inference
from gateway.requests.refusals import decoupled_refusal
from gateway.requests.regions import NO_REGIONS, Regions
from gateway.requests.waiting import Answer
from gateway.rest.body import client_in, read_headers
from gateway.rest.client_watch import ClientWatch
from gateway.rest.compression import choose
from gateway.rest.encoding import Encoding, packed
from gateway.rest.operations import (
    BINARY_TYPE,
    BYTES,
    INFER_REQUEST,
    INFER_RESPONSE,
    JSON_TYPE,
    OF_INFERENCE,
    SESSION_TEXT,
    described,
)
from gateway.rest.receiver import Receiver
from gateway.rest.reply import BINARY, JSON, Header, send_bytes, session_headers
from gateway.rest.request import OutputForms, decode
from gateway.rest.response import encode_answer
from shared.contract.errors import RequestError
from shared.contract.model_config import ModelConfig


class Infer:
    """The inference endpoint. regions: shared memory of clients"""

    def __init__(
        self,
        inference: Inference,
        catalog: Catalog,
        receiver: Receiver,
        encoding: Encoding,
        regions: Regions = NO_REGIONS,
    ) -> None:
        self._inference = inference
        self._catalog = catalog
        self._receiver = receiver
        self._encoding = encoding
        self._regions = regions

    @described(
        (200, {JSON_TYPE: INFER_RESPONSE, BINARY_TYPE: BYTES}),
        errors=OF_INFERENCE,
        body={JSON_TYPE: INFER_REQUEST, BINARY_TYPE: BYTES},
        headers={
            "Inference-Header-Content-Length": "Bytes of JSON at the body's beginning; binary data of tensors follows.",
            "Inference-Session-Id": SESSION_TEXT,
        },
    )
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../infer: one inference. The answer comes as JSON, with binary data of tensors behind it if wanted."""
        headers = read_headers(scope)
        decoded = partial(self._decode, header_length=headers.header_length)
        with self._inference.budget.reserve(client_in(scope)) as reservation:
            call, forms = await self._receiver.call(scope, receive, headers, reservation, decoded)
        future = self._inference.submit(call, client=client_in(scope))
        del call  # it is not needed while the answer is awaited, and taken
        if future.done():
            answer = future.result()
        else:
            with ClientWatch(receive) as client:
                answer = await client.while_present(future)
        size = json_bytes(answer, forms)
        content, header_length = await self._encoding.of(scope, size, partial(encode_answer, answer, forms))
        extra: list[Header] = [JSON] if header_length is None else [BINARY]
        if header_length is not None:
            extra.append((b"inference-header-content-length", b"%d" % header_length))
        extra += session_headers(answer.session_id)
        encoding = choose(headers.accept_encoding) if headers.accept_encoding else ""
        if encoding:
            content = await packed(content, encoding)
            extra.append((b"content-encoding", encoding.encode()))
        del answer, future
        await send_bytes(send, 200, content, extra)

    def _decode(self, body: bytes, call: InferCall, header_length: int | None) -> tuple[InferCall, OutputForms]:
        def found() -> ModelConfig:
            config = self._catalog.find(call.model, call.version)[0].config
            if config.decoupled:
                raise decoupled_refusal(call.endpoint)
            return config

        try:
            return decode(body, call, found, header_length=header_length, regions=self._regions)
        except RequestError:
            # As in Triton, what is wrong with the model comes before errors of the body.
            found()
            raise


def json_bytes(answer: Answer, forms: OutputForms) -> int:
    """Bytes of the outputs that will be written as JSON or into shared memory. One that is classified takes as long as
    WEIGHT times as many.
    """
    outputs = [(output, forms.of(output.name)) for output in answer.message.outputs]
    of_classes = WEIGHT * sum([len(output.raw) for output, form in outputs if form.classes])
    return of_classes + sum([len(output.raw) for output, form in outputs if not (form.classes or form.binary)])

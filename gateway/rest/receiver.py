"""Receives requests for inference: body and headers to a call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from gateway.bounds.byte_budget import Reservation
from gateway.bounds.fair_lock import through_in_thread
from gateway.requests.forms import has_many_strings, with_strings_read
from gateway.requests.headers import forwarded
from gateway.requests.infer_call import InferCall
from gateway.requests.inference import Inference
from gateway.rest.body import BULKY_BYTES, Headers, client_in, read_body
from gateway.rest.json_values import parsing_bytes
from shared.contract.endpoints import Endpoint

T = TypeVar("T")
Decode = Callable[[bytes, InferCall], tuple[InferCall, T]]
"""Body, and what path and headers say of the call -> the call, and how its answer is wanted. Raises RequestError."""


class Receiver:
    """Receives the requests of all endpoints of inference.

    size_max  largest body, unpacked, bytes
    forward   headers whose names match this pattern become parameters of the request
    """

    def __init__(self, inference: Inference, *, size_max: int, forward: re.Pattern[str] | None = None) -> None:
        self._budget = inference.budget
        self._size_max = size_max
        self._forward = forward

    async def call(
        self, scope: Scope, receive: Receive, headers: Headers, reservation: Reservation, decode: Decode[T]
    ) -> tuple[InferCall, T]:
        """Receives and decodes the body. Of it, only the call keeps bytes."""
        body = await read_body(receive, headers, self._size_max, reservation)
        if (len(body) if headers.header_length is None else headers.header_length) > BULKY_BYTES:
            async with self._budget.decoding.held(client_in(scope)):
                reservation.hold_decoded(len(body), parsing_bytes(body[: headers.header_length]))
                call, wanted = await through_in_thread(self._decoded, scope, headers, body, decode)
        else:
            call, wanted = self._decoded(scope, headers, body, decode)
        if has_many_strings(call):
            call = await self._budget.decoding.in_thread(client_in(scope), with_strings_read, call)
        return call, wanted

    def _decoded(self, scope: Scope, headers: Headers, body: bytes, decode: Decode[T]) -> tuple[InferCall, T]:
        path = scope["path_params"]
        call = InferCall(
            path["model"],
            path.get("version", ""),
            session_id=headers.session_id,
            tenant=headers.tenant,
            trace_headers=headers.trace,
            endpoint=Endpoint.INFER,
        )
        call, wanted = decode(body, call)
        if self._forward is not None:
            texts = ((name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in scope["headers"])
            if found := forwarded(texts, self._forward):
                call = msgspec.structs.replace(call, parameters={**call.parameters, **found})
        return call, wanted

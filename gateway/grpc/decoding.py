"""Decodes inference requests without blocking the event loop: in a thread where one takes long."""

from __future__ import annotations

import asyncio

from gateway.grpc.codec import OutputForms, decode_request, requested_forms
from gateway.grpc.metadata import CallMetadata
from gateway.grpc.pb import InferRequest
from gateway.requests.forms import has_many_strings, with_strings_read
from gateway.requests.infer_call import InferCall
from gateway.requests.regions import Regions
from shared.contract.endpoints import Endpoint

VALUES_MAX = 1 << 14
"""Typed values that are packed on the event loop, about a millisecond."""
PARTS_MAX = 1 << 10
"""Inputs, outputs and parameters that are read on the event loop, about as long."""


async def decoded_call(
    request: InferRequest, metadata: CallMetadata, regions: Regions, endpoint: Endpoint = Endpoint.MODEL_INFER
) -> tuple[InferCall, OutputForms]:
    """The call that a request makes, and the forms that its client wants. Raises as `gateway.grpc.codec`."""
    if takes_long(request):
        return await asyncio.to_thread(_decode_all, request, metadata, regions, endpoint)
    call, forms = _decode(request, metadata, regions, endpoint)
    if has_many_strings(call):
        call = await asyncio.to_thread(with_strings_read, call)
    return call, forms


def takes_long(request: InferRequest) -> bool:
    """Whether the request has so many typed values, or so many parts, that decoding it blocks the event loop."""
    inputs = request.inputs
    if len(inputs) + len(request.outputs) + len(request.parameters) > PARTS_MAX:
        return True
    if request.raw_input_contents:
        return False
    return sum([len(values) for tensor in inputs for _, values in tensor.contents.ListFields()]) > VALUES_MAX


def _decode(
    request: InferRequest, metadata: CallMetadata, regions: Regions, endpoint: Endpoint
) -> tuple[InferCall, OutputForms]:
    return decode_request(request, metadata, regions, endpoint), requested_forms(request, regions)


def _decode_all(
    request: InferRequest, metadata: CallMetadata, regions: Regions, endpoint: Endpoint
) -> tuple[InferCall, OutputForms]:
    """With its strings read: for a thread."""
    call, forms = _decode(request, metadata, regions, endpoint)
    return with_strings_read(call) if has_many_strings(call) else call, forms

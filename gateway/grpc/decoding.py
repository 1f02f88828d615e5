"""Decodes inference requests without blocking the event loop: in a thread where one takes long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from gateway.grpc.codec import OutputForms, decode_request, requested_forms
from gateway.grpc.metadata import CallMetadata
from gateway.grpc.pb import InferRequest
from gateway.requests.forms import has_many_strings, with_strings_read
from gateway.requests.infer_call import InferCall
from gateway.requests.refusals import decoupled_refusal
from gateway.requests.regions import Regions
from shared.contract.endpoints import Endpoint
from shared.contract.errors import RequestError
from shared.contract.messages import ModelRecord

Find = Callable[[str, str], tuple[ModelRecord, str]]
InThread = Callable[..., Awaitable[Any]]
Decode = Callable[[InferRequest], Awaitable[tuple[InferCall, OutputForms]]]
"""`decoded_call` for one client."""

VALUES_MAX = 1 << 14
"""Typed values that are packed on the event loop, about a millisecond."""
PARTS_MAX = 1 << 10
"""Inputs, outputs and parameters that are read on the event loop, about as long."""


async def decoded_call(
    request: InferRequest,
    metadata: CallMetadata,
    regions: Regions,
    find: Find,
    in_thread: InThread,
    endpoint: Endpoint = Endpoint.MODEL_INFER,
) -> tuple[InferCall, OutputForms]:
    """The call that a request makes, and the forms that its client wants.

    find       looks its model up, as `Catalog.find`
    in_thread  calls a function in a thread, when it is the client's turn
    raises     as `gateway.grpc.codec`; as `find`
    """
    try:
        if takes_long(request):
            return await in_thread(_decode_all, request, metadata, regions, endpoint)
        call, forms = _decode(request, metadata, regions, endpoint)
    except RequestError:
        # As in Triton, what is wrong with the model comes before what is wrong with the request.
        record, _ = find(request.model_name, request.model_version)
        if record.config.decoupled and endpoint is Endpoint.MODEL_INFER:
            raise decoupled_refusal(endpoint) from None
        raise
    if has_many_strings(call):
        call = await in_thread(with_strings_read, call)
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

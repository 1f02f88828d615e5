"""What takes long to decode is decoded beside the event loop, to the same."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from gateway.grpc import decoding
from gateway.grpc.codec import decode_request, requested_forms
from gateway.grpc.decoding import PARTS_MAX, VALUES_MAX, Find, decoded_call
from gateway.grpc.metadata import NO_METADATA
from gateway.grpc.pb import pb
from gateway.requests.regions import NO_REGIONS
from shared.contract.endpoints import Endpoint
from shared.contract.errors import Code, RequestError
from shared.contract.messages import ModelRecord
from tests.gateway.fake_executor import echo


def typed(count: int, *, datatype: str = "INT32") -> Any:
    request = pb.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="INPUT", datatype=datatype, shape=[count])
    if datatype == "BYTES":
        tensor.contents.bytes_contents.extend([b"ab"] * count)
    else:
        tensor.contents.int_contents.extend(range(count))
    return request


def with_outputs(count: int) -> Any:
    request = typed(1)
    for number in range(count):
        request.outputs.add(name=str(number))
    return request


def raw(size: int) -> Any:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(size)])
    request.inputs.add(name="INPUT", datatype="UINT8", shape=[size])
    return request


def nothing_found(model: str, version: str) -> tuple[ModelRecord, str]:
    raise RequestError(f"no model '{model}'", Code.NOT_FOUND)


def decoupled_found(model: str, version: str) -> tuple[ModelRecord, str]:
    return ModelRecord(msgspec.structs.replace(echo(model), decoupled=True), "{}", ("1",)), version


@pytest.mark.parametrize(
    ("request_", "is_beside"),
    [
        (typed(3), False),
        (typed(VALUES_MAX), False),
        (typed(VALUES_MAX + 1), True),
        (typed(VALUES_MAX + 1, datatype="BYTES"), True),
        (with_outputs(PARTS_MAX + 1), True),
        (raw(1 << 20), False),
    ],
    ids=["few values", "as many as the loop takes", "more", "strings", "outputs", "raw contents"],
)
async def test_where_a_request_is_decoded(request_: Any, is_beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noticed(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return decode_request(*given)

    monkeypatch.setattr(decoding, "decode_request", noticed)
    call, forms = await decoded_call(request_, NO_METADATA, NO_REGIONS, nothing_found, asyncio.to_thread)

    assert (decode_request(request_), requested_forms(request_)) == (call, forms)
    assert [is_beside] == [thread != threading.get_ident() for thread in threads]


async def test_many_strings_are_decoded_and_walked_in_one_go() -> None:
    went: list[Any] = []

    async def noticed(work: Any, *given: Any) -> Any:
        went.append(work)
        return work(*given)

    request = typed(1 << 16, datatype="BYTES")
    call, _ = await decoded_call(request, NO_METADATA, NO_REGIONS, nothing_found, noticed)

    assert {"INPUT": ""} == call.string_problems
    assert 1 == len(went)


@pytest.mark.parametrize("size", [1, PARTS_MAX], ids=["on the loop", "beside it"])
async def test_what_is_wrong_with_the_model_comes_before_what_is_wrong_with_the_request(size: int) -> None:
    broken = with_outputs(size)
    broken.raw_input_contents.append(b"beside typed data")

    async def refused(find: Find, endpoint: Endpoint) -> Code:
        with pytest.raises(RequestError) as caught:
            await decoded_call(broken, NO_METADATA, NO_REGIONS, find, asyncio.to_thread, endpoint)
        return caught.value.code

    unary, streamed = Endpoint.MODEL_INFER, Endpoint.MODEL_STREAM_INFER
    assert [Code.NOT_FOUND] * 2 == [await refused(nothing_found, endpoint) for endpoint in (unary, streamed)]
    assert Code.UNSUPPORTED == await refused(decoupled_found, unary)
    assert Code.INVALID_ARG == await refused(decoupled_found, streamed)

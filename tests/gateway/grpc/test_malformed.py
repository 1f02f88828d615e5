"""A message that is none, and a call without one: INTERNAL for every rpc, and nothing in the log."""

from __future__ import annotations

import gzip
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from gateway.grpc.pb import pb
from gateway.grpc.server import GrpcServer
from tests.gateway.grpc.test_stream import request

_health: Any = health_pb2
RPCS = [
    (f"/{service.full_name}/{method.name}", method.client_streaming or method.server_streaming)
    for service in (
        pb.DESCRIPTOR.services_by_name["GRPCInferenceService"],
        _health.DESCRIPTOR.services_by_name["Health"],
    )
    for method in service.methods
]
GARBAGE = (b"\xff\xff\xff\xff", b"\x1f\x8b\x08\x00", b"\x78\x9c", gzip.compress(b"\xff")[:-9])
"""No protobuf, and what only begins to be packed."""


@pytest.fixture
async def channel(rpc_server: GrpcServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rpc_server.port}") as channel:
        yield channel


@pytest.mark.parametrize(("path", "streams"), RPCS)
async def test_a_malformed_message_is_refused_and_not_logged(
    channel: Any, path: str, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for garbage in GARBAGE:
        call = channel.stream_stream(path)(iter([garbage])) if streams else channel.unary_unary(path)(garbage)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (call.read() if streams else call)

        if path.endswith("Health/Watch"):
            assert grpc.StatusCode.OK != refused.value.code()
        else:
            assert grpc.StatusCode.INTERNAL == refused.value.code()
            assert str(refused.value.details()).startswith("failed to ")
    assert [] == [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("path", "streams"), [rpc for rpc in RPCS if not rpc[1]])
async def test_a_unary_call_without_a_message_is_refused(channel: Any, path: str, streams: bool) -> None:
    call = channel.stream_unary(path)(iter([]))
    with pytest.raises(grpc.aio.AioRpcError, match=r"there is no (inference|grpc)\.") as refused:
        await call
    assert grpc.StatusCode.INTERNAL == refused.value.code()


async def test_what_a_stream_brought_before_is_answered_first(stub: Any, channel: Any) -> None:
    call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
    await call.write(request(1).SerializeToString())
    await call.write(GARBAGE[0])

    assert "1" == pb.ModelStreamInferResponse.FromString(await call.read()).infer_response.id
    with pytest.raises(grpc.aio.AioRpcError, match=r"the message is no inference\.ModelInferRequest"):
        await call.read()


async def test_a_text_that_is_no_utf_8_is_malformed(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"the message is no inference\.ModelInferRequest"):
        await channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\x0a\x02\xff\xfe")


async def test_a_path_that_is_no_utf_8_does_not_end_the_port(channel: Any) -> None:
    """It ends that of grpcio 1.84 and 1.85."""
    with pytest.raises(grpc.aio.AioRpcError):
        await channel.unary_unary(b"/inference.GRPC\x8aInferenceService/ModelInfer")(b"")

    await channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")

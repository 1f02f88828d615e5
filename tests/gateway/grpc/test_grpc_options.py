"""What an operator may set for gRPC: TLS, restricted parts, forwarded metadata, compression of answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.grpc.pb import pb
from gateway.grpc.restricted import CATEGORY
from gateway.grpc.server import GrpcServer, serve_grpc
from gateway.grpc.servicer import InferenceServicer
from gateway.grpc.wire.messages import prefixed
from gateway.settings import GatewaySettings
from shared.contract.errors import UnavailableError
from shared.process.lifecycle import end
from tests.gateway.stubs import pb_grpc

aio: Any = grpc.aio  # the checker does not see all that it exports
TLS = Path(__file__).parents[2] / "fixtures" / "tls"
SETTINGS = GatewaySettings(redis_url="", grpc_port=0)
SECURE = replace(
    SETTINGS,
    grpc_use_ssl=True,
    grpc_server_cert=str(TLS / "server.pem"),
    grpc_server_key=str(TLS / "server.key"),
    grpc_root_cert=str(TLS / "ca.pem"),
)
Running = contextlib.AbstractAsyncContextManager[GrpcServer]


@pytest.fixture
def serving(make_servicer: Callable[..., InferenceServicer]) -> Callable[[GatewaySettings], Running]:
    """Serves the twins as the settings say."""

    @contextlib.asynccontextmanager
    async def serve(settings: GatewaySettings) -> AsyncGenerator[GrpcServer]:
        settings = settings.bounded()
        server = await serve_grpc(make_servicer(settings), settings)
        try:
            yield server
        finally:
            await server.stop(0)

    return serve


def stub_of(channel: grpc.aio.Channel) -> Any:
    """The inference service's stub."""
    return pb_grpc.GRPCInferenceServiceStub(channel)


async def status_of(call: Any) -> tuple[str, str]:
    """Code and text of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(60):
            await call
    return caught.value.code().name, caught.value.details() or ""


def bytes_of(name: str) -> bytes:
    """A file of the test's authority."""
    return (TLS / name).read_bytes()


# -- TLS --------------------------------------------------------------------------------------------------------------


async def test_a_port_with_a_certificate_speaks_tls_alone(serving: Callable[[GatewaySettings], Running]) -> None:
    async with serving(SECURE) as server:
        credentials = grpc.ssl_channel_credentials(bytes_of("ca.pem"))
        async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials) as channel:
            assert (await stub_of(channel).ServerLive(pb.ServerLiveRequest())).live
        async with grpc.aio.insecure_channel(f"localhost:{server.port}") as channel:
            code, _ = await status_of(stub_of(channel).ServerLive(pb.ServerLiveRequest()))
            assert code == "UNAVAILABLE"


async def test_mutual_tls_asks_clients_for_a_certificate_and_the_log_says_who_had_none(
    serving: Callable[[GatewaySettings], Running], caplog: pytest.LogCaptureFixture
) -> None:
    """It implies TLS."""
    async with serving(replace(SECURE, grpc_use_ssl=False, grpc_use_ssl_mutual=True)) as server:
        known = grpc.ssl_channel_credentials(bytes_of("ca.pem"), bytes_of("client.key"), bytes_of("client.pem"))
        async with grpc.aio.secure_channel(f"localhost:{server.port}", known) as channel:
            assert (await stub_of(channel).ServerLive(pb.ServerLiveRequest())).live
        unknown = grpc.ssl_channel_credentials(bytes_of("ca.pem"))
        async with grpc.aio.secure_channel(f"localhost:{server.port}", unknown) as channel:
            code, _ = await status_of(stub_of(channel).ServerLive(pb.ServerLiveRequest()))
            assert code == "UNAVAILABLE"
    (told,) = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "TLS handshake failed"]
    assert ("127.0.0.1", "PEER_DID_NOT_RETURN_A_CERTIFICATE") == (told["client"], told["error"])


async def test_a_certificate_that_cannot_be_read_keeps_the_server_from_starting(
    serving: Callable[[GatewaySettings], Running],
) -> None:
    with pytest.raises(UnavailableError, match=r"nowhere\.pem"):
        await serving(replace(SECURE, grpc_server_cert="nowhere.pem")).__aenter__()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"grpc_use_ssl": True}, "--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key"),
        (
            {"grpc_use_ssl_mutual": True, "grpc_server_cert": "a", "grpc_server_key": "b"},
            "--grpc-use-ssl-mutual needs --grpc-root-cert",
        ),
        (
            {"grpc_server_cert": "a", "grpc_server_key": "b"},
            "--grpc-server-cert, --grpc-server-key and --grpc-root-cert need --grpc-use-ssl",
        ),
        ({"grpc_restricted_protocol": ("health",)}, "--grpc-restricted-protocol: the last text must end with"),
        ({"grpc_header_forward_pattern": "("}, "--grpc-header-forward-pattern: missing )"),
    ],
)
def test_options_that_mean_nothing_are_refused_at_the_start(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        replace(SETTINGS, **changes)

    assert caught.value.message.startswith(text)


# -- restricted parts -------------------------------------------------------------------------------------------------


def test_every_rpc_belongs_to_a_category() -> None:
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    assert {method.name for method in service.methods} == CATEGORY.keys()


async def test_calls_and_streams_and_health_are_restricted_by_category(
    serving: Callable[[GatewaySettings], Running],
) -> None:
    settings = replace(SETTINGS, grpc_restricted_protocol=("inference,health:key=secret", "statistics:other=x"))
    refusal = ("UNAVAILABLE", "This protocol is restricted, expecting header 'triton-grpc-protocol-key'")
    key = (("triton-grpc-protocol-key", "secret"),)
    messages: Any = health_pb2
    stubs: Any = health_pb2_grpc
    async with serving(settings) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub, health = stub_of(channel), stubs.HealthStub(channel)
        asking = messages.HealthCheckRequest()

        assert refusal == await status_of(stub.ModelInfer(pb.ModelInferRequest()))
        assert refusal == await status_of(stub.ModelStreamInfer().read())
        assert refusal == await status_of(health.Check(asking))
        assert refusal == await status_of(health.Watch(asking).read())
        wrong = stub.ModelStatistics(pb.ModelStatisticsRequest(), metadata=key)
        assert (await status_of(wrong))[1].endswith("'triton-grpc-protocol-other'")

        assert (await stub.ModelInfer(pb.ModelInferRequest(id="r1"), metadata=key)).id == "r1"
        stream = stub.ModelStreamInfer(metadata=key)
        await stream.write(pb.ModelInferRequest(id="r2"))
        await stream.done_writing()
        assert (await stream.read()).infer_response.id == "r2"
        assert await stream.read() is aio.EOF
        assert messages.HealthCheckResponse.SERVING == (await health.Check(asking, metadata=key)).status
        assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name, "what is not restricted needs no key"


async def test_a_key_whose_values_are_bytes_opens_what_it_restricts(
    serving: Callable[[GatewaySettings], Running],
) -> None:
    settings = replace(SETTINGS, grpc_restricted_protocol=("metadata:key-bin=secret",))
    key = (("triton-grpc-protocol-key-bin", b"secret"),)
    async with serving(settings) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        assert (await stub_of(channel).ServerMetadata(pb.ServerMetadataRequest(), metadata=key)).name


# -- metadata as parameters -------------------------------------------------------------------------------------------


async def test_metadata_becomes_parameters_by_its_names(
    twin: Any, serving: Callable[[GatewaySettings], Running]
) -> None:
    settings = replace(SETTINGS, grpc_header_forward_pattern="^My_|prio")
    metadata = (("my_key", "x"), ("other", "y"), ("my_raw-bin", b"z"))
    async with serving(settings) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = stub_of(channel)
        await stub.ModelInfer(pb.ModelInferRequest(), metadata=metadata)
        stream = stub.ModelStreamInfer(metadata=metadata)
        for _ in range(2):
            await stream.write(pb.ModelInferRequest())
        await stream.done_writing()
        while await stream.read() is not aio.EOF:
            pass

        assert [{"my_key": "x"}] * 3 == [call.parameters for call in twin.calls]
        refusal = ("INVALID_ARGUMENT", "Header 'priority' is reserved for Triton usage and cannot be forwarded.")
        reserved = (("priority", "1"),)
        assert refusal == await status_of(stub.ModelInfer(pb.ModelInferRequest(), metadata=reserved))
        assert refusal == await status_of(stub.ModelStreamInfer(metadata=reserved).read())


# -- compression ------------------------------------------------------------------------------------------------------

SIZE = 1_000_000


async def answered_bytes(server: GrpcServer, *, stream: bool) -> int:
    """How many bytes a client is sent for an answer of a megabyte of zeros."""
    seen = 0

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool) -> None:
        nonlocal seen
        try:
            while data := await reader.read(1 << 16):
                seen += len(data) if count else 0
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    connections: list[asyncio.Task[Any]] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this_task = asyncio.current_task()
        assert this_task is not None
        connections.append(this_task)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(forward(reader, up_writer, count=False), forward(up_reader, writer, count=True))

    made = pb.ModelInferRequest()
    made.inputs.add(name="INPUT", datatype="UINT8", shape=[SIZE])
    made.raw_input_contents.append(bytes(SIZE))
    proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = stub_of(channel)
        if stream:
            call = stub.ModelStreamInfer()
            await call.write(made)
            await call.done_writing()
            response = (await call.read()).infer_response
            assert await call.read() is aio.EOF
        else:
            response = await stub.ModelInfer(made)
    proxy.close()
    # gRPC keeps the connection of a closed channel for a while.
    await end(connections)
    assert bytes(SIZE) == response.raw_output_contents[0]
    return seen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("level", ["low", "medium", "high"])
async def test_answers_are_compressed_at_a_level(
    serving: Callable[[GatewaySettings], Running], level: Any, stream: bool
) -> None:
    async with serving(replace(SETTINGS, grpc_infer_response_compression_level=level)) as server:
        assert await answered_bytes(server, stream=stream) < SIZE / 10


@pytest.mark.parametrize("stream", [False, True])
async def test_large_answers_are_compressed_beside_the_loop(
    serving: Callable[[GatewaySettings], Running], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    packers: list[int] = []

    def packed(message: bytes, encoding: str) -> bytes:
        packers.append(threading.get_ident())
        return prefixed(message, encoding)

    monkeypatch.setattr("gateway.grpc.wire.rpc.prefixed", packed)
    async with serving(replace(SETTINGS, grpc_infer_response_compression_level="low")) as server:
        await answered_bytes(server, stream=stream)

    assert 1 == len(packers)
    assert threading.get_ident() not in packers


async def test_answers_are_as_they_are_by_default(serving: Callable[[GatewaySettings], Running]) -> None:
    async with serving(SETTINGS) as server:
        assert await answered_bytes(server, stream=False) > SIZE

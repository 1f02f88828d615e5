"""The transport: health for those who balance load, limits, and a stop that loses nothing accepted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.grpc.pb import pb
from gateway.grpc.server import GrpcServer, connection_rules, serve_grpc
from gateway.grpc.servicer import InferenceServicer
from gateway.grpc.wire.pings import PingRules
from gateway.settings import GatewaySettings
from seqmesh_client import AsyncClient
from shared.contract.calls import CALL_KEY, call_value
from shared.contract.errors import UnavailableError
from tests.gateway.stubs import pb_grpc, stub_at

aio: Any = grpc.aio  # the checker does not see all that it exports
messages: Any = health_pb2
Status: Any = messages.HealthCheckResponse
Servicers = Callable[[], InferenceServicer]


def health_stub(channel: grpc.aio.Channel) -> Any:
    stubs: Any = health_pb2_grpc
    return stubs.HealthStub(channel)


def asking(service: str = "") -> Any:
    return messages.HealthCheckRequest(service=service)


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
async def test_health_follows_readiness(rpc_server: GrpcServer, catalog: Any, service: str) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rpc_server.port}") as channel:
        health = health_stub(channel)
        assert Status.SERVING == (await health.Check(asking(service))).status

        catalog.serves = False

        assert Status.NOT_SERVING == (await health.Check(asking(service))).status


async def test_an_unknown_service_is_not_found(rpc_server: GrpcServer) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rpc_server.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_stub(channel).Check(asking("other"))

        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert Status.SERVICE_UNKNOWN == (await health_stub(channel).Watch(asking("other")).read()).status


async def test_every_watcher_is_told_of_a_change_also_when_another_has_left(
    rpc_server: GrpcServer, catalog: Any
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rpc_server.port}") as channel:
        first, second = (health_stub(channel).Watch(asking()) for _ in range(2))
        assert [Status.SERVING] * 2 == [(await watch.read()).status for watch in (first, second)]
        first.cancel()

        catalog.serves = False

        assert Status.NOT_SERVING == (await second.read()).status


async def test_stopping_tells_the_watchers_and_answers_what_comes_until_the_clients_have_heard(
    twin: Any, make_servicer: Servicers, grpc_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin.respond = twin.hold
    closes = asyncio.Event()

    async def quieten(_listening: socket.socket) -> None:
        await closes.wait()

    monkeypatch.setattr("gateway.ports.serving.quieten", quieten)
    server = await serve_grpc(make_servicer(), grpc_settings)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        watch = health_stub(channel).Watch(asking())
        await watch.read()
        before = stub.ModelInfer(pb.ModelInferRequest(id="before"))
        await twin.wait_for_calls(1)

        stopping = asyncio.create_task(server.stop(60))

        assert Status.NOT_SERVING == (await watch.read()).status
        assert await watch.read() is aio.EOF
        late = stub.ModelInfer(pb.ModelInferRequest(id="late"))
        await twin.wait_for_calls(2)
        asked = pb.ModelReadyRequest(name="sum")
        assert not (await stub.ModelReady(asked)).ready
        # A model asks for the other model, wherever that is.
        assert (await stub.ModelReady(asked, metadata=[(CALL_KEY, call_value("", ["caller"]))])).ready
        closes.set()
        twin.finish(0)
        assert (await before).id == "before"
        assert not stopping.done()
        twin.finish(1)
        assert (await late).id == "late"
        async with asyncio.timeout(60):
            await stopping
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(pb.ModelInferRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_stopping_under_calls_without_end_cancels_none_and_answers_what_it_takes(
    twin: Any, make_servicer: Servicers, grpc_settings: GatewaySettings
) -> None:
    """The callers of one connection that is never quiet: each is answered, or told to come again."""
    server = await serve_grpc(make_servicer(), grpc_settings)
    codes: list[grpc.StatusCode] = []
    answered = 0

    async def call_until_refused(stub: Any) -> None:
        nonlocal answered
        try:
            while True:
                await stub.ModelInfer(pb.ModelInferRequest())
                answered += 1
        except grpc.aio.AioRpcError as error:
            codes.append(error.code())

    async with stub_at(server.port) as stub, asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(call_until_refused(stub))
        async with asyncio.timeout(60):
            while not twin.calls:
                await asyncio.sleep(0)
        await server.stop(60)

    assert [grpc.StatusCode.UNAVAILABLE] * 8 == codes
    assert answered == len(twin.calls)


async def test_a_client_that_numbers_steps_waits_for_room_among_the_calls(
    twin: Any, make_servicer: Servicers, grpc_settings: GatewaySettings
) -> None:
    """Its step was not refused for good: this gateway, or another one, has room later."""
    twin.respond = twin.hold
    server = await serve_grpc(make_servicer(), replace(grpc_settings, grpc_max_concurrent_rpcs=1))
    address = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(address) as channel, AsyncClient([address]) as client:
        holds = pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer(pb.ModelInferRequest())
        await twin.wait_for_calls(1)
        twin.respond = twin.answer
        step = asyncio.create_task(client.sequence("sum", id=7).step({"INPUT": np.array([[3]], np.int32)}))
        async with asyncio.timeout(60):
            while not (server.limit.refused or step.done()):
                await asyncio.sleep(0)

        twin.finish(0)
        await holds

        assert 3 == (await step).single.item()
    await server.stop(0)


async def test_the_listening_socket_closes_first_and_leaves_the_others_alone(
    make_servicer: Servicers, grpc_settings: GatewaySettings, twin: Any
) -> None:
    twin.respond = twin.hold
    server, other = [await serve_grpc(make_servicer(), grpc_settings) for _ in range(2)]
    async with stub_at(server.port) as stub:
        call = stub.ModelInfer(pb.ModelInferRequest(id="r1"))
        await twin.wait_for_calls(1)
        stopping = asyncio.create_task(server.stop(60))

        async with asyncio.timeout(60):
            while await accepts_connections(server.port):
                await asyncio.sleep(0.01)
        assert await accepts_connections(other.port)
        twin.finish(0)
        assert (await call).id == "r1"
        await stopping
    await other.stop(0)


async def accepts_connections(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_a_loop_that_failed_is_told_of_and_stopping_still_answers_what_is_open(
    twin: Any, make_servicer: Servicers, grpc_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: GrpcServer) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(GrpcServer, "_watch_health", fail)
    twin.respond = twin.hold
    server = await serve_grpc(make_servicer(), grpc_settings)
    async with stub_at(server.port) as stub:
        call = stub.ModelInfer(pb.ModelInferRequest(id="r1"))
        await twin.wait_for_calls(1)
        with pytest.raises(RuntimeError, match="a mistake of ours"):
            await server.watched()
        stopping = asyncio.create_task(server.stop(60))
        twin.finish(0)

        assert "r1" == (await call).id
        await stopping


async def test_what_is_not_answered_within_the_grace_is_cancelled(
    twin: Any, make_servicer: Servicers, grpc_settings: GatewaySettings
) -> None:
    twin.respond = twin.hold
    server = await serve_grpc(make_servicer(), grpc_settings)
    async with stub_at(server.port) as stub:
        unary, stream = stub.ModelInfer(pb.ModelInferRequest()), stub.ModelStreamInfer()
        await stream.write(pb.ModelInferRequest())
        await twin.wait_for_calls(2)

        await server.stop(0.1)

        for call in (unary, stream):
            assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        # The transport is done with a call before it tells the task that serves it.
        _, open_calls = await asyncio.wait(twin.futures, timeout=60)
        assert (set(), True) == (open_calls, all(future.cancelled() for future in twin.futures))


async def test_messages_beyond_the_bound_are_refused_and_the_server_goes_on(
    make_servicer: Servicers, grpc_settings: GatewaySettings
) -> None:
    server = await serve_grpc(make_servicer(), replace(grpc_settings, grpc_max_input_size=10_000))
    async with stub_at(server.port) as stub:
        large = pb.ModelInferRequest()
        large.inputs.add(name="INPUT", datatype="UINT8", shape=[20_000])
        large.raw_input_contents.append(b"x" * 20_000)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(large)

        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    await server.stop(0)


async def test_calls_beyond_the_bound_are_refused_until_there_is_room_but_those_of_health(
    make_servicer: Servicers, grpc_settings: GatewaySettings, twin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve_grpc(make_servicer(), replace(grpc_settings, grpc_max_concurrent_rpcs=2))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        twin.respond = twin.hold
        taken = [stub.ModelInfer(pb.ModelInferRequest()) for _ in range(2)]
        await twin.wait_for_calls(2)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ServerMetadata(pb.ServerMetadataRequest())

        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (1, 2) == (server.limit.refused, server.limit.most)
        assert "grpc calls refused" in caplog.messages
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert health_pb2.HealthCheckResponse.SERVING == (await health.Check(health_pb2.HealthCheckRequest())).status
        # Not one by one: calls of the same moment may arrive in any order.
        for number in range(len(taken)):
            twin.finish(number)
        await asyncio.gather(*taken)
        async with asyncio.timeout(60):
            while True:
                # The end of a call reaches its client before it counts.
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name
                    break
    await server.stop(0)


async def test_messages_beyond_grpcs_own_default_pass_both_ways(rpc_server: GrpcServer) -> None:
    """grpc's own default would be 4 MiB."""
    size = 6 << 20
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rpc_server.port}", options=options) as channel:
        made = pb.ModelInferRequest()
        made.inputs.add(name="INPUT", datatype="UINT8", shape=[size])
        made.raw_input_contents.append(bytes(size))

        response = await pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer(made)

    assert size == len(response.raw_output_contents[0])


async def test_a_port_that_is_taken_is_refused(
    rpc_server: GrpcServer, make_servicer: Servicers, grpc_settings: GatewaySettings
) -> None:
    """Two gateways on one port would each get some of the connections."""
    with pytest.raises(UnavailableError, match=f"gRPC cannot listen on 127.0.0.1:{rpc_server.port}"):
        await serve_grpc(make_servicer(), replace(grpc_settings, grpc_port=rpc_server.port))


def test_keepalive_is_tritons_by_default() -> None:
    rules = connection_rules(GatewaySettings(redis_url="").bounded())

    assert rules.pings == PingRules(
        time_s=7200.0, timeout_s=20.0, without_rpcs=False, without_data=2, client_pause_s=300.0, strikes_max=2
    )
    assert not rules.age_s

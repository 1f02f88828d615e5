"""How a gateway ends: by SIGTERM as a process, and what callers see of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import threading
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_client
from redis import Redis
from tritonclient.utils import InferenceServerException

import gateway.parts
from deploy.local.embedded import held_port
from gateway.grpc.server import GrpcServer
from gateway.ports.serving import PortServer
from gateway.requests.exchange.replies import Replies
from gateway.settings import GatewaySettings
from shared.contract.ids import sequence_id
from shared.process.lifecycle import Tasks
from shared.store.connections.fitness import UnfitRedisError
from shared.store.keyspace import Keyspace
from shared.traces.tracing import Tracing
from tests.embedded_redis import EmbeddedRedis
from tests.gateway.fake_executor import FakeExecutor, gateway_running
from tests.gateway.gateway_process import gateway_process
from tests.gateway.requests.test_cancellation import until

STEP = {"inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [1]}]}
SUM = "/v2/models/running_sum/infer"
SOON_S = 60.0


def step(sequence: int, *, start: bool = False) -> dict[str, Any]:
    return STEP | {"parameters": {"sequence_id": sequence, "sequence_start": start}}


async def test_what_is_in_flight_is_answered_before_the_gateway_ends(
    gateway_settings: GatewaySettings, executor: FakeExecutor
):
    """Stopping with a step open: the port closes, the step is answered, then the gateway ends."""
    async with (
        gateway_running(gateway_settings, grace_s=SOON_S) as gateway,
        aiohttp.ClientSession(f"http://{gateway.url}", raise_for_status=False) as session,
    ):

        async def post(document: dict[str, Any]) -> tuple[int, Any]:
            async with session.post(SUM, json=document) as response:
                return response.status, await response.json()

        await post(step(1, start=True))
        await executor.pause()
        # Two connections that are busy while the stop comes; idle ones are closed.
        busy = asyncio.create_task(post(step(1)))
        _, second = await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port)
        second.write(b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\n")
        metrics = f"http://127.0.0.1:{gateway.addresses.metrics_port}/metrics"
        page = ""
        while "seqmesh_gateway_requests_in_flight 1\n" not in page:
            async with session.get(metrics) as response:
                page = await response.text()
        stopping = asyncio.create_task(gateway.stop())
        await asyncio.sleep(0.1)
        assert not busy.done()
        executor.paused.clear()

        assert (await busy)[1]["outputs"][0]["data"] == [2]
        second.close()
        await stopping


async def test_what_comes_while_stopping_is_served_and_its_caller_told_to_leave(
    gateway_settings: GatewaySettings, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    """A START too. The connection is kept for that moment, and ends with the answer."""
    monkeypatch.setattr("gateway.http.connection.LEAVING_PATIENCE_S", SOON_S)
    async with gateway_running(gateway_settings, grace_s=SOON_S) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port)
        head = f"POST {SUM} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        body = json.dumps(step(5, start=True)).encode()
        # The request has begun when the stop comes (the gateway asks for its body), but its body has not.
        writer.write(f"{head}expect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        stopping = asyncio.create_task(gateway.stop())
        await until(lambda: refuses_connections(gateway.addresses.http_port))
        writer.write(body)
        response = await reader.read()
        await stopping

    assert b" 200 " in response.split(b"\r\n")[0]
    assert b"connection: close" in response.lower()
    assert b'"data":[1]' in response
    writer.close()


async def test_who_is_not_answered_within_the_grace_is_told_so_over_both_protocols(
    gateway_settings: GatewaySettings, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.service.LAST_WORD_S", SOON_S)
    async with (
        gateway_running(gateway_settings, grace_s=0.2) as gateway,
        aiohttp.ClientSession(f"http://{gateway.url}", raise_for_status=False) as session,
        grpc_client.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc_port}") as client,
    ):
        await executor.pause()
        number = grpc_client.InferInput("INPUT", [1, 1], "INT32")
        number.set_data_from_numpy(np.array([[1]], np.int32))

        async def over_http() -> tuple[int, str]:
            async with session.post(SUM, json=step(6, start=True)) as response:
                return response.status, await response.text()

        async def over_grpc() -> str:
            with pytest.raises(InferenceServerException) as caught:
                await client.infer("running_sum", [number], sequence_id=7, sequence_start=True)
            return str(caught.value)

        calls = asyncio.gather(over_http(), over_grpc())
        for sequence in (6, 7):
            await until(lambda sequence=sequence: is_known(executor, sequence))
        await gateway.stop()
        (http_status, http_text), grpc_text = await calls

    assert http_status == 503
    assert "[StatusCode.UNAVAILABLE]" in grpc_text
    for text in (http_text, grpc_text):
        assert "the gateway has stopped: it is not known whether the step of sequence" in text


SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 4, 6, 7, 8
NEWEST, NONE = bytes.fromhex("7fffffff 00000000"), bytes(8)
"""What a GOAWAY without an error says: every call is served; no further call is."""


async def frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """Kind, flags and content of the next frame."""
    head = await reader.readexactly(9)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


async def test_a_grpc_client_is_told_to_leave_and_served_until_it_goes(
    gateway_settings: GatewaySettings, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    for module in ("ports.serving", "grpc.wire.connection"):
        monkeypatch.setattr(f"gateway.{module}.SEE_OFF_S", SOON_S)
    async with gateway_running(gateway_settings, grace_s=SOON_S) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.grpc_port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0)))
        assert (await frame(reader))[0] == SETTINGS
        stopping = asyncio.create_task(gateway.stop())
        while (said := await frame(reader))[0] in (SETTINGS, WINDOW_UPDATE):
            pass
        writer.write(bytes((0, 0, 8, PING, 0, 0, 0, 0, 0)) + b"the ping")
        answer = await frame(reader)
        writer.close()
        await stopping

    assert said == (GOAWAY, 0, NEWEST)
    assert answer == (PING, 1, b"the ping")


async def test_a_grpc_client_that_does_not_go_is_cut_off(gateway_settings: GatewaySettings, executor: FakeExecutor):
    async with gateway_running(gateway_settings) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.grpc_port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0)))
        assert (await frame(reader))[0] == SETTINGS
        stopping = asyncio.create_task(gateway.stop())
        said: list[tuple[int, int, bytes]] = []
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                said.append(await frame(reader))
        writer.close()
        await stopping

    assert [content for kind, _, content in said if kind == GOAWAY] == [NEWEST, NONE]


async def is_known(executor: FakeExecutor, sequence: int) -> bool:
    record = executor.keys.sequence(sequence_id("running_sum", "", sequence)).record
    return bool(await executor.commands.exists(record))


async def refuses_connections(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False


async def test_process_says_where_it_listens_and_ends_with_code_0_on_sigterm(redis_url: str, key_prefix: str):
    async with gateway_process(redis_url, key_prefix) as process:
        assert {"http", "grpc", "metrics"} == process.ports.keys()
        await process.stop()


@pytest.mark.usefixtures("executor")
async def test_a_stop_does_not_wait_for_a_name_server(
    gateway_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which a gateway on every interface looks for its own address."""
    stopped = threading.Event()

    def found(*_: object) -> str:
        assert stopped.wait(10)
        return ""

    monkeypatch.setattr("gateway.service.call_address", found)
    async with gateway_running(gateway_settings) as gateway:
        await gateway.stop()
        stopped.set()


async def test_who_is_in_flight_when_a_loop_of_the_gateway_fails_is_told_what_to_do(
    gateway_settings: GatewaySettings, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    async def fail(_: Replies) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("gateway.service.LAST_WORD_S", SOON_S)
    with pytest.raises(ExceptionGroup):  # noqa: PT012 - what is raised is the gateway's end, of which the rest hears
        async with gateway_running(gateway_settings) as gateway:
            await executor.pause()
            async with (
                aiohttp.ClientSession(f"http://{gateway.url}") as session,
                grpc_client.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc_port}") as client,
            ):
                value = grpc_client.InferInput("INPUT", [1, 1], "INT32")
                value.set_data_from_numpy(np.ones((1, 1), np.int32))
                over_grpc = asyncio.create_task(
                    client.infer("running_sum", [value], sequence_id=2, sequence_start=True)
                )
                over_http = asyncio.create_task(session.post(SUM, json=step(1, start=True)))
                page = ""
                while "seqmesh_gateway_requests_in_flight 2\n" not in page:
                    async with session.get("/metrics") as response:
                        page = await response.text()
                monkeypatch.setattr(Replies, "_read", fail)

                answer = await over_http
                assert (503, True) == (answer.status, "ended before its time" in (await answer.json())["error"])
                with pytest.raises(InferenceServerException, match="ended before its time"):
                    await over_grpc


@pytest.mark.parametrize(
    ("server", "loop"), [(PortServer, "_accept"), (PortServer, "_check"), (GrpcServer, "_watch_health")]
)
async def test_a_gateway_ends_when_a_loop_of_one_of_its_ports_fails(
    gateway_settings: GatewaySettings,
    server: type[Any],
    loop: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    async def fail(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(server, loop, fail)
    with pytest.raises(ExceptionGroup):  # noqa: PT012 - what is raised is the gateway's end
        async with gateway_running(gateway_settings), asyncio.timeout(60):
            while "task failed" not in caplog.messages:
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("executor")
async def test_a_background_task_that_loses_a_cancellation_holds_no_stop_up(
    gateway_settings: GatewaySettings, keys: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.wait_for`, by which redis-py writes, loses one in Python 3.11 that comes just as it is done."""
    begun = asyncio.Event()

    async def deaf(*_: object) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            begun.set()
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway.parts, "tell", deaf)
    async with (
        asyncio.timeout(SOON_S),
        asyncio.TaskGroup() as group,
        gateway.parts.running_parts(gateway_settings.bounded(), "g", keys, Tracing(), Tasks(group)),
    ):
        await begun.wait()


async def test_a_redis_that_is_lost_before_the_gateway_is_open_is_told_without_a_traceback(
    gateway_settings: GatewaySettings,
) -> None:
    """A Cluster that recovers is there one moment and not the next."""
    settings = dataclasses.replace(gateway_settings.bounded(), redis_url=f"redis://127.0.0.1:{held_port()}")

    async with asyncio.TaskGroup() as group:
        with pytest.raises(UnfitRedisError, match="cannot be reached"):
            async with gateway.parts.running_parts(settings, "g", Keyspace(), Tracing(), Tasks(group)):
                raise AssertionError("it is open")


async def test_a_gateway_that_starts_waits_for_a_redis_that_takes_no_writes_yet(
    gateway_settings: GatewaySettings, private_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk is full, or its replicas are not there yet."""
    settings = dataclasses.replace(gateway_settings.bounded(), redis_url=private_server.url)
    with Redis.from_url(private_server.url) as server:
        cast("Any", server).config_set("min-replicas-to-write", 1)

        async def heal() -> None:
            while "waiting for redis" not in caplog.text:
                await asyncio.sleep(0.01)
            cast("Any", server).config_set("min-replicas-to-write", 0)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(heal())
            async with gateway.parts.running_parts(settings, "g", Keyspace(), Tracing(), Tasks(group)) as parts:
                assert 0 == parts.inference.in_flight


async def test_a_stop_does_not_wait_for_a_redis_that_hangs(
    gateway_settings: GatewaySettings, private_server: EmbeddedRedis
) -> None:
    """The grace is over by then: what stops services would kill the gateway."""
    settings = dataclasses.replace(gateway_settings.bounded(), redis_url=private_server.url, redis_timeout_ms=600_000)

    async with (
        asyncio.timeout(60),
        asyncio.TaskGroup() as group,
        gateway.parts.running_parts(settings, "g", Keyspace(), Tracing(), Tasks(group)),
    ):
        private_server.send(signal.SIGSTOP)
    private_server.send(signal.SIGCONT)

"""Several gateways on the same two ports: who may be there, and that clients find one server."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import click
import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from deploy.local.embedded import held_port
from gateway.settings import GatewaySettings
from shared.contract.errors import MeshError
from tests.gateway.fake_executor import FakeExecutor, gateway_running
from tests.gateway.test_shared_memory import INT_BYTES, Client, Memory, memory

HOST = "127.0.0.1"
SOON_S = 60.0
CLIENTS = 16
"""Connections: that all of them reach one of two gateways has a chance of 1 in 32768."""


@pytest.fixture
def shared_settings(gateway_settings: GatewaySettings) -> GatewaySettings:
    return dataclasses.replace(
        gateway_settings,
        reuse_port=True,
        http_port=held_port(),
        grpc_port=held_port(),
        allow_client_shm=True,
        client_shm_prefix="seqmesh-test-",
    )


@pytest.fixture
async def two_gateways(shared_settings: GatewaySettings, executor: FakeExecutor) -> AsyncIterator[GatewaySettings]:
    async with gateway_running(shared_settings), gateway_running(shared_settings):
        yield shared_settings


async def test_a_port_is_shared_only_if_all_who_listen_there_say_so(
    shared_settings: GatewaySettings, executor: FakeExecutor
) -> None:
    alone = dataclasses.replace(shared_settings, reuse_port=False)
    async with gateway_running(shared_settings):
        assert "HTTP cannot listen" in await refusal(alone)
    async with gateway_running(alone):
        assert "HTTP cannot listen" in await refusal(alone)
        assert "something else listens there" in await refusal(shared_settings)


async def test_a_gateway_that_looks_for_its_own_address_keeps_no_other_from_starting(
    shared_settings: GatewaySettings, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server may be silent for longer than the other one waits."""
    both_serve = threading.Event()

    def found(*_: object) -> str:
        assert both_serve.wait(10)
        return ""

    monkeypatch.setattr("gateway.service.call_address", found)
    async with gateway_running(shared_settings), gateway_running(shared_settings):
        both_serve.set()


async def test_a_gateway_of_another_mesh_is_refused(shared_settings: GatewaySettings, executor: FakeExecutor) -> None:
    other = dataclasses.replace(shared_settings, key_prefix=f"{shared_settings.key_prefix}-other", shards=1)
    async with gateway_running(shared_settings):
        assert "requests would be mixed up" in await refusal(other)


async def test_a_grpc_server_of_the_same_user_is_refused(
    shared_settings: GatewaySettings, executor: FakeExecutor
) -> None:
    """It shares its port with everybody, by gRPC's own default, and would get half of the connections."""
    stranger = grpc.aio.server()
    stranger.add_insecure_port(f"{HOST}:{shared_settings.grpc_port}")
    await stranger.start()
    assert f"gRPC cannot share {HOST}:{shared_settings.grpc_port}" in await refusal(shared_settings)
    await stranger.stop(0)


async def refusal(settings: GatewaySettings) -> str:
    """Why a gateway does not start."""
    with pytest.raises(BaseExceptionGroup) as refused:
        async with gateway_running(settings):
            pass
    (cause,) = refused.value.exceptions
    assert isinstance(cause, MeshError)
    return cause.message


@pytest.mark.parametrize(("http_port", "grpc_port"), [(0, 8001), (8000, 0)])
def test_a_port_that_the_system_chooses_cannot_be_shared(http_port: int, grpc_port: int) -> None:
    with pytest.raises(click.UsageError, match="--reuse-port needs --http-port and --grpc-port"):
        GatewaySettings(reuse_port=True, http_port=http_port, grpc_port=grpc_port)


class Clients:
    """Clients with a connection each, so that some of them reach each gateway."""

    def __init__(self, settings: GatewaySettings, protocol: str) -> None:
        self._stack = AsyncExitStack()
        self._settings = settings
        self._protocol = protocol

    async def __aenter__(self) -> list[Client]:
        return [await self._client() for _ in range(CLIENTS)]

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _client(self) -> Client:
        if self._protocol == "http":
            url = f"{HOST}:{self._settings.http_port}"
            return Client(http_client, await self._stack.enter_async_context(http_aio.InferenceServerClient(url)))
        url = f"{HOST}:{self._settings.grpc_port}"
        alone: Any = [("grpc.use_local_subchannel_pool", 1)]
        service = grpc_aio.InferenceServerClient(url, channel_args=alone)
        return Client(grpc_client, await self._stack.enter_async_context(service))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_region_that_is_registered_at_one_gateway_serves_requests_at_each(
    two_gateways: GatewaySettings, protocol: str
) -> None:
    with memory() as place, memory() as result:
        async with Clients(two_gateways, protocol) as (first, *others):
            await first.register(place, result)
            for number, client in enumerate((first, *others)):
                place.put(number)
                inputs, outputs = [client.given("INPUT", place)], [client.wanted("OUTPUT", result)]
                await client.step(inputs, outputs, sequence_id=number + 1, sequence_start=True, sequence_end=True)

                assert [number] == result.get(1)
                with pytest.raises(InferenceServerException, match="already in manager"):
                    await client.register(place)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_region_that_is_unregistered_at_one_gateway_is_gone_at_each(
    two_gateways: GatewaySettings, protocol: str
) -> None:
    """And another one of its name is another one, also at gateways that have used the first."""
    async with Clients(two_gateways, protocol) as clients:
        for number in range(3):
            with memory() as place:
                place.put(number)
                own = open_files(place)
                name = await registered_as_one(clients[number], place)
                answers = [await answered(client, name, 100 * number + index) for index, client in enumerate(clients)]
                assert own < open_files(place)
                await clients[-1 - number].service.unregister_system_shared_memory(name)

                assert [number] * CLIENTS == answers
                for client in clients:
                    with pytest.raises(InferenceServerException, match="Unable to find shared memory region"):
                        await answered(client, name, 1)
                async with asyncio.timeout(SOON_S):
                    while own != open_files(place):
                        await asyncio.sleep(0.05)


def open_files(place: Memory) -> int:
    """How many open files of this process, in which gateways and clients run, are this memory."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += file.readlink() == place.path
    return found


async def registered_as_one(client: Client, place: Memory) -> str:
    """Registers memory under the name that all tests' memories take in turn."""
    await client.service.register_system_shared_memory("in turn", place.key, place.size)
    return "in turn"


async def answered(client: Client, region: str, sequence: int) -> int:
    tensor = client.module.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_shared_memory(region, INT_BYTES)
    answer = await client.step(
        [tensor], [client.wanted("OUTPUT")], sequence_id=sequence + 1, sequence_start=True, sequence_end=True
    )
    found: Any = answer.as_numpy("OUTPUT")
    return int(np.asarray(found).item())

"""What tritonclient hears of readiness while one model is broken, with and without --strict-readiness."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio

from gateway.settings import GatewaySettings
from shared.contract.messages import RepositoryEntry
from tests.gateway.fake_executor import FakeExecutor, RunningGateway, gateway_running

BROKEN = RepositoryEntry("broken", "1", "UNAVAILABLE", "it is broken")
UNLOADED = RepositoryEntry("broken", "1", "UNAVAILABLE", "unloaded")


async def show(executor: FakeExecutor, line: RepositoryEntry) -> None:
    """The executor's repository index has this line too."""
    others = tuple(one for one in executor.registration.repository if one.model != line.model)
    executor.registration = msgspec.structs.replace(executor.registration, repository=(*others, line))
    await executor.membership.update(executor.registration)


async def ready(gateway: RunningGateway) -> dict[str, bool]:
    """What each protocol says of the server; and that a model which works is ready in any case."""
    async with (
        http_aio.InferenceServerClient(gateway.url) as http,
        grpc_aio.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc_port}") as rpc,
    ):
        clients: dict[str, Any] = {"http": http, "grpc": rpc}
        assert all([await client.is_model_ready("echo") for client in clients.values()])
        assert all([await client.is_server_live() for client in clients.values()])
        return {name: await client.is_server_ready() for name, client in clients.items()}


@pytest.mark.parametrize("strict", [False, True])
async def test_one_broken_model_counts_only_when_readiness_is_strict(
    gateway_settings: GatewaySettings, executor: FakeExecutor, strict: bool
) -> None:
    await show(executor, BROKEN)
    async with gateway_running(dataclasses.replace(gateway_settings, strict_readiness=strict)) as gateway:
        assert {"http": not strict, "grpc": not strict} == await ready(gateway)

        # What was unloaded is not missed.
        await show(executor, UNLOADED)
        async with asyncio.timeout(60):
            while not all((await ready(gateway)).values()):
                await asyncio.sleep(0.05)

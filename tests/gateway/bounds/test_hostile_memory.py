"""Fifty clients that want a gateway's memory do not get more than it may have, and health does not wait for them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psutil
import pytest

from shared.store.keyspace import Keyspace
from tests.fuzz.fuzzing import peak_bytes
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.gateway.hostile import INFER, LIVE, request

CLIENTS = 50
ATTACK_S = 4.0
MEMORY_MAX = 512 << 20
SLACK = 64 << 20
"""What arrives, and is decoded, between two looks at the memory."""
HEALTH_S = 1.0
ASK_EVERY_S = 0.05
SERVED_S = 60.0


async def health_times(gateway: GatewayProcess, attack: asyncio.subprocess.Process) -> list[float]:
    """How long each question for health took, in both protocols, until the attack is over; seconds.

    What the gateway did meanwhile, if that is less: where others have the cores, its answer comes late all the same.
    """
    took = list[float]()
    process = psutil.Process(gateway.process.pid)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}") as channel:
        untyped: Any = channel
        live = untyped.unary_unary(LIVE)
        while attack.returncode is None:
            for ask in (lambda: live(b""), lambda: http_live(gateway.ports["http"])):
                began, worked = time.monotonic(), worked_s(process)
                try:
                    await ask()
                except grpc.aio.AioRpcError as error:
                    story = gateway.said.decode(errors="replace")
                    raise AssertionError(
                        f"{error.details()}; gateway: {gateway.process.returncode}\n{story}"
                    ) from error
                took.append(min(time.monotonic() - began, worked_s(process) - worked))
            await asyncio.sleep(ASK_EVERY_S)
    return took


def worked_s(process: psutil.Process) -> float:
    """The processor's time that it has taken."""
    times = process.cpu_times()
    return times.user + times.system


@asynccontextmanager
async def attacking(gateway: GatewayProcess) -> AsyncGenerator[asyncio.subprocess.Process]:
    """The hostile clients, as a process that does not outlive the block."""
    attack = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.gateway.hostile", "--clients", str(CLIENTS), "--seconds", str(ATTACK_S)),
        *("--grpc-port", str(gateway.ports["grpc"]), "--http-port", str(gateway.ports["http"])),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield attack
    finally:
        if attack.returncode is None:
            attack.kill()
        await attack.wait()


async def served(port: int) -> None:
    """Returns when a request is answered: the gateway has to hear of the executor, and memory to be given back."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(SERVED_S):
        untyped: Any = channel
        while True:
            try:
                await untyped.unary_unary(INFER)(request(1 << 20))
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(ASK_EVERY_S)
            else:
                return


async def http_live(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("executor")
async def test_fifty_hostile_clients_get_neither_the_memory_nor_the_loop(redis_url: str, keys: Keyspace) -> None:
    async with gateway_process(redis_url, keys.prefix, f"--memory-max={MEMORY_MAX}") as gateway:
        held = gateway.memory_bytes
        async with attacking(gateway) as attack:
            took = await health_times(gateway, attack)
            peak = peak_bytes(psutil.Process(gateway.process.pid))

            assert 0 == attack.returncode
        assert peak < MEMORY_MAX + SLACK
        # Of the questions nearly all were answered in time.
        assert sorted(took)[len(took) * 9 // 10] < HEALTH_S
        # The attack has taken hold at all, and everybody is served again when it is over.
        assert peak > held + (16 << 20)
        await served(gateway.ports["grpc"])

"""A gateway as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

STOP_S = 60.0
GRACE = f"--exit-timeout-secs={10 * STOP_S:.0f}"


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A gateway: its ports by name, and what it has written to its log."""

    process: asyncio.subprocess.Process
    ports: dict[str, int]
    said: bytearray

    @property
    def memory_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    @property
    def http_connections(self) -> int:
        """Open ones, whatever their state."""
        found = psutil.Process(self.process.pid).net_connections()
        mine = [each for each in found if each.laddr and each.laddr.port == self.ports["http"]]
        return len([each for each in mine if each.status != psutil.CONN_LISTEN])

    async def stop(self) -> None:
        """Ends it by SIGTERM. Raises TimeoutError: a gateway with GRACE waits for its clients as long as that."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            assert await self.process.wait() == 0


@asynccontextmanager
async def gateway_process(
    redis_url: str, prefix: str, *options: str, descriptors: int | None = None
) -> AsyncGenerator[GatewayProcess]:
    """Starts a gateway on free ports; descriptors: how many open files it may have."""
    # Limited by a shell: a function to be called between fork and exec would run in a copy of this process, in which
    # gRPC's handlers for forks now and then end it.
    limited = () if descriptors is None else ("sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh")
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    process = await asyncio.create_subprocess_exec(
        *(*limited, sys.executable, "-m", "gateway", f"--key-prefix={prefix}", *ports, *options),
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONUNBUFFERED": "1", "SEQMESH_REDIS_URL": redis_url},
        stderr=asyncio.subprocess.PIPE,
    )
    errors = process.stderr
    assert errors is not None
    said = bytearray()
    while b"gateway ready" not in said:
        line = await errors.readline()
        assert line, said.decode()
        said += line

    async def listen() -> None:
        while line := await errors.readline():
            said.extend(line)

    listening = asyncio.create_task(listen())
    fields = [word.partition("=") for word in said.decode().split()]
    try:
        names = ("http", "grpc", "metrics")
        yield GatewayProcess(process, {name: int(port) for name, _, port in fields if name in names}, said)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await listening

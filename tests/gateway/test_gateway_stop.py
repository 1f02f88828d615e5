"""How a gateway ends: by SIGTERM as a process, and what callers see of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp

from gateway.settings import GatewaySettings
from tests.gateway.fake_executor import FakeExecutor, gateway_running

STEP = {"inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [1]}]}
SUM = "/v2/models/running_sum/infer"


def step(sequence: int, *, start: bool = False) -> dict[str, Any]:
    return STEP | {"parameters": {"sequence_id": sequence, "sequence_start": start}}


async def test_what_is_in_flight_is_answered_and_nothing_new_begins(
    gateway_settings: GatewaySettings, executor: FakeExecutor
):
    """Stopping with a step open: the port closes, the step is answered, then the gateway ends."""
    async with (
        gateway_running(gateway_settings) as gateway,
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


async def test_start_is_refused_while_stopping(gateway_settings: GatewaySettings, executor: FakeExecutor):
    async with gateway_running(gateway_settings) as gateway:
        await executor.pause()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port)
        head = f"POST {SUM} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        body = b'{"inputs":[{"name":"INPUT","datatype":"INT32","shape":[1,1],"data":[1]}],"parameters":'
        body += b'{"sequence_id":5,"sequence_start":true}}'
        # The request has begun when the stop comes (the gateway asks for its body), but its body has not.
        writer.write(f"{head}expect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        stopping = asyncio.create_task(gateway.stop())
        await asyncio.sleep(0.1)
        writer.write(body)
        response = await reader.read(4096)
        await stopping

    assert b" 503 " in response.split(b"\r\n")[0]
    assert b"Server is stopping, scheduler for model has stopped accepting new inference requests" in response
    writer.close()


async def test_process_says_where_it_listens_and_ends_with_code_0_on_sigterm(
    redis_url: str, key_prefix: str, tmp_path: Path
):
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        f"--redis-url={redis_url}",
        f"--key-prefix={key_prefix}",
        *ports,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    line = b""
    while b"gateway ready" not in line:
        line = await process.stderr.readline()
        assert line, "the gateway ended before it was ready"

    process.send_signal(signal.SIGTERM)
    rest = (await process.communicate())[1]

    assert process.returncode == 0, rest.decode()
    assert b"http=" in line

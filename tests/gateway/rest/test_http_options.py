"""What an operator may set for HTTP: restricted parts, headers as parameters, TLS, the server's name."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
import tritonclient.http as blocking_client

from gateway.grpc.pb import pb
from gateway.settings import GatewaySettings
from tests.gateway.fake_executor import FakeExecutor, gateway_running
from tests.gateway.stubs import stub_at

TLS = Path(__file__).parents[2] / "fixtures" / "tls"
ECHO = "/v2/models/echo/infer"
ONE: dict[str, Any] = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}


async def test_a_restricted_part_answers_only_to_those_who_know_the_header(
    gateway_settings: GatewaySettings, executor: FakeExecutor
):
    options = ("model-repository,health:admin-key=secret", "inference:x=y")
    settings = dataclasses.replace(gateway_settings, http_restricted_api=options)
    refused = {"error": "This API is restricted, expecting header 'admin-key'"}
    async with gateway_running(settings) as gateway, aiohttp.ClientSession(f"http://{gateway.url}") as session:

        async def ask(method: str, path: str, **headers: str) -> tuple[int, Any]:
            async with session.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}) as r:
                return r.status, await r.json() if await r.read() else None

        assert (403, refused) == await ask("GET", "/v2/health/live")
        assert (403, refused) == await ask("POST", "/v2/repository/index", admin_key="guess")
        assert (200, {"live": True}) == await ask("GET", "/v2/health/live", admin_key="secret")
        assert 200 == (await ask("POST", "/v2/repository/index", Admin_Key="secret"))[0]
        assert 200 == (await ask("GET", "/v2"))[0]
        assert 403 == (await ask("POST", ECHO, admin_key="secret"))[0]
        async with session.post(ECHO, json=ONE, headers={"x": "y"}) as response:
            assert 200 == response.status


async def test_one_restriction_holds_for_every_port(gateway_settings: GatewaySettings, executor: FakeExecutor):
    settings = dataclasses.replace(gateway_settings, restricted_api=("statistics,trace:admin-key=secret",))
    async with gateway_running(settings) as gateway, aiohttp.ClientSession() as session:
        metrics = f"http://127.0.0.1:{gateway.addresses.metrics_port}/metrics"
        for page in (metrics, f"http://{gateway.url}/metrics", f"http://{gateway.url}/v2/trace/setting"):
            for key, status in (("", 403), ("secre", 403), ("secret", 200)):
                async with session.get(page, headers={"admin-key": key}) as response:
                    assert status == response.status, page
        async with stub_at(gateway.addresses.grpc_port) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="expecting header 'triton-grpc-protocol-admin-key'"):
                await stub.TraceSetting(pb.TraceSettingRequest())
            key = ("triton-grpc-protocol-admin-key", "secret")
            assert (await stub.TraceSetting(pb.TraceSettingRequest(), metadata=(key,))).settings


async def test_headers_become_parameters_by_their_names(gateway_settings: GatewaySettings, executor: FakeExecutor):
    settings = dataclasses.replace(gateway_settings, http_header_forward_pattern="^(X-|my_).*|^prio")
    async with gateway_running(settings) as gateway, aiohttp.ClientSession(f"http://{gateway.url}") as session:

        async def infer(headers: dict[str, str], **parameters: Any) -> tuple[int, Any]:
            async with session.post(ECHO, json=ONE | {"parameters": parameters}, headers=headers) as response:
                return response.status, await response.json()

        assert 200 == (await infer({"X-One": "1", "my_two": "zwei", "other": "3"}, own=4, my_two=2))[0]
        status, document = await infer({"priority": "1"})

        assert {"x-one": "1", "my_two": "zwei", "own": 4} == executor.received[-1].parameters
        message = "Header 'priority' is reserved for Triton usage and cannot be forwarded."
        assert (400, {"error": message}) == (status, document)


def trusting(**client: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    if client:
        context.load_cert_chain(TLS / "client.pem", TLS / "client.key")
    return context


async def test_tls_shows_a_certificate_and_asks_for_one(
    gateway_settings: GatewaySettings, executor: FakeExecutor, caplog: pytest.LogCaptureFixture
):
    settings = dataclasses.replace(
        gateway_settings,
        http_server_cert=str(TLS / "server.pem"),
        http_server_key=str(TLS / "server.key"),
        http_root_cert=str(TLS / "ca.pem"),
    )

    def drive(url: str) -> list[list[float]]:
        with blocking_client.InferenceServerClient(
            url, ssl=True, ssl_context_factory=lambda: trusting(client="yes")
        ) as triton:
            made = blocking_client.InferInput("INPUT0", [1, 2], "FP32")
            made.set_data_from_numpy(np.array([[1, 2]], np.float32))
            result: Any = triton.infer("echo", [made])
            return result.as_numpy("OUTPUT0").tolist()

    async with gateway_running(settings) as gateway, aiohttp.ClientSession() as session:
        assert [[1, 2]] == await asyncio.to_thread(drive, gateway.url)
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"https://{gateway.url}/v2", ssl=trusting())
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://{gateway.url}/v2")
        async with session.get(f"https://{gateway.url}/v2", ssl=trusting(client="yes")) as response:
            assert 200 == response.status
    assert 1 == caplog.messages.count("TLS handshake failed"), "once a minute"


async def test_the_server_has_the_name_it_was_given(gateway_settings: GatewaySettings, executor: FakeExecutor):
    settings = dataclasses.replace(gateway_settings, server_id="harbour")
    async with (
        gateway_running(settings) as gateway,
        aiohttp.ClientSession() as session,
        session.get(f"http://{gateway.url}/v2") as response,
    ):
        document = await response.json()

    assert "harbour" == document["name"]
    assert [
        "classification",
        "sequence",
        "sequence(string_id)",
        "sequence(step_numbers)",
        "model_repository",
        "model_repository(unload_dependents)",
        "schedule_policy",
        "model_configuration",
        "binary_tensor_data",
        "parameters",
        "statistics",
        "trace",
        "logging",
    ] == document["extensions"]

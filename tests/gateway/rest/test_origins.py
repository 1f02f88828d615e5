"""Whose web pages may use the HTTP ports, and what every other client may go on doing."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import aiohttp
import click
import numpy as np
import pytest
import tritonclient.http as blocking_client

from gateway.settings import GatewaySettings
from shared.origins import Origins, is_loopback
from tests.gateway.fake_executor import FakeExecutor, gateway_running

PUBLIC, LOCAL = Origins(["https://App.example.com", "http://[::5]:81"]), Origins(is_loopback=True)
CHANGES = (
    "/v2/models/echo/infer",
    "/v2/repository/models/echo/load",
    "/v2/repository/models/echo/unload",
    "/v2/repository/index",
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/models/echo/trace/setting",
    "/v2/systemsharedmemory/register",
)
PAGES = ("/v2", "/v2/health/ready", "/v2/models/echo/config", "/metrics")


def refusal(origins: Origins, *, method: str = "POST", **headers: str) -> str:
    """What a request with these headers hears."""
    given = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return origins.refusal({"type": "http", "method": method, "headers": given})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "gateway:8000"},
        {"host": "gateway:8000", "origin": "http://gateway:8000"},
        {"host": "GATEWAY", "origin": "http://gateway"},
        {"host": "gateway:80", "origin": "http://gateway"},
        {"host": "gateway", "origin": "https://gateway", "sec_fetch_site": "same-origin"},
        {"host": "gateway", "sec_fetch_site": "none"},
        {"host": "10.0.0.7", "origin": "https://app.example.com", "sec_fetch_site": "cross-site"},
        {"host": "10.0.0.7", "origin": "http://[::5]:81"},
    ],
)
def test_clients_and_pages_of_this_server_pass(headers: dict[str, str]) -> None:
    assert not refusal(PUBLIC, **headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://gateway:3000"},
        {"origin": "https://gateway:8000@evil.example"},
        {"origin": "http://app.example.com"},
        {"origin": "https://app.example.com.evil.example"},
        {"origin": "https://app.example.com:99999"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "file://"},
        {"origin": "http://\xff\xfe"},
        {"origin": "http://["},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "?"},
    ],
)
def test_other_pages_may_change_nothing(headers: dict[str, str]) -> None:
    assert refusal(PUBLIC, host="gateway:8000", **headers)
    # They may ask; the browser does not show them the answer.
    assert not refusal(PUBLIC, method="GET", host="gateway:8000", **headers)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "a.localhost", "x", ""]
)
def test_a_loopback_port_answers_under_names_that_lead_nowhere_else(host: str) -> None:
    assert not refusal(LOCAL, host=host)
    assert not refusal(LOCAL, host=host, method="GET")


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[.", "a.b:c"]
)
def test_a_loopback_port_answers_under_no_other_name(host: str) -> None:
    for method in ("GET", "POST"):
        assert "does not go by the name" in refusal(LOCAL, method=method, host=host, origin=f"http://{host}")
    assert not refusal(PUBLIC, method="GET", host=host)


def test_an_allowed_origins_name_is_the_servers_too() -> None:
    proxied = Origins(["https://app.example.com"], is_loopback=True)

    assert not refusal(proxied, host="app.example.com", origin="https://app.example.com")


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.2", True), ("::1", True), ("0.0.0.0", False), ("::", False)]
)
def test_a_loopback_address_is_one_that_only_this_machine_reaches(address: str, *, expected: bool) -> None:
    assert expected == is_loopback(address)


@pytest.mark.parametrize(
    "text", ["*", "app.example.com", "ftp://app.example.com", "https://", "https://a/b", "http://a:b"]
)
def test_an_allowed_origin_that_is_none_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(click.UsageError, match=r"^--http-allowed-origin: "):
        GatewaySettings(http_allowed_origin=(text,))


async def test_a_foreign_page_changes_nothing_on_any_port(
    gateway_settings: GatewaySettings, executor: FakeExecutor
) -> None:
    foreign = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    async with gateway_running(gateway_settings) as gateway, aiohttp.ClientSession() as session:

        async def ask(method: str, url: str, headers: dict[str, str]) -> tuple[int, Any]:
            async with session.request(method, url, data=b"{}", headers=headers) as response:
                return response.status, await response.text()

        for path in CHANGES:
            status, text = await ask("POST", f"http://{gateway.url}{path}", foreign)
            assert 403 == status, path
            assert "other origins may not use this server" in text
        for path in ("/v2/repository/index", "/v2/logging"):
            assert 200 == (await ask("POST", f"http://{gateway.url}{path}", {"Content-Type": "text/plain"}))[0], path
        metrics = f"127.0.0.1:{gateway.addresses.metrics_port}"
        for url in (*(f"http://{gateway.url}{path}" for path in PAGES), f"http://{metrics}/metrics"):
            assert 403 == (await ask("GET", url, {"Host": "evil.example"}))[0], url
            assert 200 == (await ask("GET", url, {}))[0], url
    assert [] == [request for request in executor.received if request.inputs]


async def test_tritons_client_is_no_browser(gateway_settings: GatewaySettings, executor: FakeExecutor) -> None:
    def drive(url: str) -> Any:
        with blocking_client.InferenceServerClient(url) as triton:
            made = blocking_client.InferInput("INPUT0", [1, 1], "FP32")
            made.set_data_from_numpy(np.ones([1, 1], np.float32))
            result: Any = triton.infer("echo", [made])
            return result.as_numpy("OUTPUT0").tolist()

    settings = dataclasses.replace(gateway_settings, http_allowed_origin=("https://app.example.com",))
    async with gateway_running(settings) as gateway:
        for host in ("localhost", "127.0.0.1"):
            assert [[1]] == await asyncio.to_thread(drive, f"{host}:{gateway.addresses.http_port}")

"""What of a gateway is open to everybody: what is off beyond loopback, and what is warned of."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from typing import Any

import aiohttp
import grpc
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from click.testing import CliRunner

from deploy import cli
from gateway.exposure import Exposure
from gateway.grpc.pb import pb
from gateway.models.repository import RepositoryControl
from gateway.settings import GatewaySettings
from shared.contract.errors import Code, RequestError
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration
from shared.store.keyspace import Keyspace
from shared.store.membership import Member
from tests.gateway.fake_executor import FakeExecutor, gateway_running
from tests.gateway.stubs import pb_grpc

SETTINGS = GatewaySettings(redis_url="")
CLOSED = dataclasses.replace(SETTINGS, restricted_api=("model-repository,logging,trace:admin-key=secret",))
REFUSAL = "failed to load 'm', a configuration or files may not be brought to a gateway that listens beyond loopback"


class Picture:
    """In place of a catalog: one executor, which loads on request after some looks."""

    def __init__(self, *modes: str) -> None:
        self.modes = list(modes)

    def live_members(self) -> list[Member]:
        mode = self.modes.pop(0) if len(self.modes) > 1 else self.modes[0]
        return [Member(ExecutorRegistration(ExecutorId("a"), "a", "h", 1, 1, control_mode=mode), alive=True)]


def warnings_of(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in log.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("settings", "is_loopback", "takes"),
    [
        (SETTINGS, True, (True, True)),
        (SETTINGS, False, (False, False)),
        (CLOSED, False, (True, True)),
        (dataclasses.replace(SETTINGS, allow_load_overrides=True), False, (True, True)),
        (dataclasses.replace(SETTINGS, http_restricted_api=("model-repository:a=b",)), False, (True, False)),
        (dataclasses.replace(SETTINGS, grpc_restricted_protocol=("model-repository:a=b",)), False, (False, True)),
    ],
)
def test_code_from_callers_is_taken_on_loopback_or_with_the_operators_word(
    settings: GatewaySettings, takes: tuple[bool, bool], *, is_loopback: bool
) -> None:
    exposure = Exposure(settings, is_loopback)

    assert takes == tuple(map(exposure.takes_overrides, (settings.http_restrictions, settings.grpc_restrictions)))


def test_sequences_are_shown_on_loopback_or_to_those_who_know_a_secret() -> None:
    restricted = dataclasses.replace(SETTINGS, restricted_api=("sequences:a=b",))
    for settings, is_loopback, shown in ((SETTINGS, True, True), (SETTINGS, False, False), (restricted, False, True)):
        assert shown is Exposure(settings, is_loopback).shows_sequences(settings.http_restrictions)


def test_open_parts_are_warned_of_beyond_loopback(caplog: pytest.LogCaptureFixture) -> None:
    for settings, is_loopback in ((SETTINGS, True), (CLOSED, False)):
        Exposure(settings, is_loopback).warn()
    assert [] == warnings_of(caplog)

    half = dataclasses.replace(SETTINGS, restricted_api=("trace:a=b",), http_restricted_api=("logging:a=b",))
    Exposure(half, is_loopback=False).warn()
    assert ["OPEN TO EVERYBODY WHO REACHES THIS GATEWAY"] == warnings_of(caplog)
    assert "model-repository,logging" == vars(caplog.records[-1])["fields"]["parts"]
    Exposure(dataclasses.replace(CLOSED, allow_client_shm=True), is_loopback=False).warn()
    assert "shared-memory" == vars(caplog.records[-1])["fields"]["parts"]


@pytest.mark.parametrize(("is_loopback", "code"), [(True, ", AND RUN CODE IN THE EXECUTORS"), (False, "")])
async def test_open_model_control_is_warned_of_once_somebody_loads_on_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, is_loopback: bool, code: str
) -> None:
    monkeypatch.setattr("gateway.exposure.LOOK_S", 0.0)
    catalog: Any = Picture("none", "none", "explicit")

    await Exposure(CLOSED, is_loopback).warn_of_model_control(catalog)
    assert [] == warnings_of(caplog)
    async with asyncio.timeout(30):
        await Exposure(SETTINGS, is_loopback).warn_of_model_control(catalog)

    assert ["OPEN MODEL CONTROL: WHO REACHES THIS GATEWAY MAY LOAD AND UNLOAD MODELS" + code] == warnings_of(caplog)


async def test_beyond_loopback_both_protocols_refuse_code_and_take_it_with_the_key(
    gateway_settings: GatewaySettings, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []

    async def explicit(_self: RepositoryControl) -> None: ...

    async def told(_self: RepositoryControl, word: Any) -> None:
        loads.append(word.model)
        raise RequestError("it was told to the executors", Code.INTERNAL)

    monkeypatch.setattr(RepositoryControl, "_check_mode", explicit)
    monkeypatch.setattr(RepositoryControl, "_carry_out", told)
    public = dataclasses.replace(gateway_settings, host="0.0.0.0")
    brings: list[dict[str, Any]] = [{"config": "{}"}, {"config": "{}", "files": {"file:1/model.py": b"x"}}]
    for settings, headers, expected in (
        (public, {}, REFUSAL),
        (
            dataclasses.replace(public, restricted_api=("model-repository:admin-key=secret",)),
            {"admin-key": "secret"},
            "told",
        ),
        (dataclasses.replace(public, allow_load_overrides=True), {}, "told"),
    ):
        async with (
            gateway_running(settings) as gateway,
            http_aio.InferenceServerClient(f"127.0.0.1:{gateway.addresses.http_port}") as http,
            grpc_aio.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc_port}") as rpc,
        ):
            metadata = {f"triton-grpc-protocol-{name}": value for name, value in headers.items()}
            for client, own in ((http, headers), (rpc, metadata)):
                web: Any = client
                for what in brings:
                    with pytest.raises(Exception, match=expected):
                        await web.load_model("m", headers=own, **what)
            # What lies in the repository may be loaded.
            with pytest.raises(Exception, match="told"):
                await http.load_model("m", headers=headers)
    assert len(loads) == 1 + 2 * (4 + 1)


async def test_what_is_not_allowed_is_said_with_the_protocols_own_status(
    gateway_settings: GatewaySettings, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def explicit(_self: RepositoryControl) -> None: ...

    monkeypatch.setattr(RepositoryControl, "_check_mode", explicit)
    public = dataclasses.replace(gateway_settings, host="0.0.0.0")
    async with (
        gateway_running(public) as gateway,
        grpc.aio.insecure_channel(f"127.0.0.1:{gateway.addresses.grpc_port}") as channel,
    ):
        request = pb.RepositoryModelLoadRequest(model_name="m")
        request.parameters["config"].string_param = "{}"
        stub: Any = pb_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.RepositoryModelLoad(request)
    assert grpc.StatusCode.PERMISSION_DENIED is refused.value.code()


async def test_whoever_changes_settings_is_remembered_and_an_operator_takes_it_back(
    gateway_settings: GatewaySettings, executor: FakeExecutor, keys: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        gateway_running(gateway_settings) as gateway,
        aiohttp.ClientSession() as session,
        session.post(f"http://{gateway.url}/v2/trace/setting", json={"trace_rate": "7"}) as response,
    ):
        assert 200 == response.status
    monkeypatch.setenv("SEQMESH_REDIS_URL", gateway_settings.redis_url)

    async def said(*more: str) -> str:
        # On a thread of its own: it runs an event loop.
        done = await asyncio.to_thread(
            CliRunner().invoke, cli.main, ["settings", f"--key-prefix={keys.prefix}", *more], catch_exceptions=False
        )
        assert 0 == done.exit_code, done.output
        return done.output

    assert re.fullmatch(
        r"trace_rate = 7\ntraces changed last by HTTP client 127.0.0.1:\d+ through gateway at .*\n", await said()
    )
    assert (await said("--reset")).startswith("as each process was started\nlogs changed last by ")
    assert "trace_rate" not in await said()

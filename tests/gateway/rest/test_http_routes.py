"""Routes beside inference: health, repository, metrics, what is refused, and sessions of the dialect."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.rest.reply import RouteEndpoint
from gateway.rest.server import ServerRoutes
from gateway.settings import GatewaySettings
from shared.contract.messages import ControlMessage, LoadFailure, ModelRecord, RepositoryEntry
from shared.contract.model_config import EnsembleStep
from shared.origins import Origins
from shared.process.lifecycle import Stop
from shared.statistics.tally import packed
from tests.gateway.fake_executor import FakeExecutor, RunningGateway, gateway_running, running_sum

ONE = {"inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [1]}]}


@pytest.fixture
async def session(gateway: RunningGateway):
    async with aiohttp.ClientSession(f"http://{gateway.url}") as made:
        yield made


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "/v2/health/live", 200, None),
        ("GET", "/v2/health/ready", 200, None),
        ("GET", "/v2/models/echo/ready", 200, None),
        ("GET", "/v2/models/echo/versions/1/ready", 200, None),
        ("GET", "/v2/models/echo/versions/2/ready", 400, "Model version not ready"),
        ("GET", "/v2/models/nobody/ready", 400, "Model version not ready"),
        ("GET", "/v2/models/nobody", 404, "Request for unknown model: 'nobody' is not found"),
        ("GET", "/v2/models/nobody/stats", 400, "requested model 'nobody' is not available"),
        ("GET", "/v2/models/echo/versions/3/stats", 400, "requested model version is not available for model 'echo'"),
        ("GET", "/v2/unknown", 404, "Not Found"),
        ("GET", "/v2/models/echo/versions/x/ready", 404, "Not Found"),
        ("GET", "/v2/models/echo/infer", 405, "Method Not Allowed"),
        ("POST", "/v2/health/live", 405, "Method Not Allowed"),
        ("GET", "/v2/trace/setting", 200, None),
        ("POST", "/v2/models/nobody/trace/setting", 400, "Request for unknown model : nobody"),
        ("GET", "/v2/logging", 200, None),
        ("GET", "/v2/trace/setting/", 404, "Not Found"),
        ("GET", "/v2/models/echo/versions/1/trace/setting", 404, "Not Found"),
        ("HEAD", "/v2/health/live", 405, None),
        ("PUT", "/v2/models/echo/infer", 405, "Method Not Allowed"),
        ("PATCH", "/v2/nowhere", 404, "Not Found"),
        ("GET", "/v2/", 404, "Not Found"),
        ("GET", "/v2/models", 404, "Not Found"),
        ("GET", "/v2/models/stats", 200, None),
        ("GET", "/v2/models/stats/ready", 400, "Model version not ready"),
        ("GET", "/v2/models/echo/generate", 405, "Method Not Allowed"),
        ("GET", "/v2/models/echo/versions/1/generate_stream", 405, "Method Not Allowed"),
        ("POST", "/v2/models/nobody/generate", 404, "Request for unknown model: 'nobody' is not found"),
        ("POST", "/v2/repository/models/echo/foo", 404, "Not Found"),
        ("GET", "/v2/repository/index", 405, "Method Not Allowed"),
        ("GET", "/v2/systemsharedmemory/status", 200, None),
        (
            "GET",
            "/v2/cudasharedmemory/region/r/status",
            404,
            "Unable to find cuda shared memory region: 'r'",
        ),
        ("POST", "/v2/systemsharedmemory/status", 405, "Method Not Allowed"),
        ("POST", "/v2/systemsharedmemory/unregister", 200, None),
        ("POST", "/v2/systemsharedmemory/region/r/unregister", 200, None),
        ("POST", "/v2/cudasharedmemory/unregister", 200, None),
        (
            "POST",
            "/v2/cudasharedmemory/region/r/register",
            501,
            "failed to register CUDA shared memory region: 'r', GPUs not supported",
        ),
        ("POST", "/v2/repository/other/models/echo/load", 501, "'repository_name' specification is not supported"),
    ],
)
async def test_status_and_error_of_each_route(
    session: aiohttp.ClientSession, method: str, path: str, status: int, error: Any
):
    async with session.request(method, path + "?ignored=1") as response:
        content = await response.read()

    assert response.status == status
    if status != 200 and method != "HEAD":
        assert error is None or json.loads(content) == {"error": error}
        assert json.loads(content)["error"]
        assert response.content_type == "application/json"


async def test_metrics_count_this_gateway_and_the_mesh_on_both_ports(
    gateway: RunningGateway,
    session: aiohttp.ClientSession,
    executor: FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("gateway.models.metrics.MESH_LIMIT_S", 60)
    counts = {"success_count": 3, "inference_count": 12345678, "queue_ns": 5_000_000, "fail_BACKEND": 2}
    tally = executor.keys.tally(executor.keys.home_shard("echo"), "echo", "1", "0")
    await executor.commands.rpush(tally, packed(counts))
    async with session.post("/v2/models/echo/infer", json={"inputs": []}) as response:
        assert response.status == 400
    async with session.get("/metrics") as response:
        page = await response.text()
    async with session.get(f"http://127.0.0.1:{gateway.addresses.metrics_port}/metrics") as response:
        other = await response.text()

    assert 'nv_inference_request_success{model="echo",version="1"} 3\n' in page
    assert 'nv_inference_count{model="echo",version="1"} 12345678\n' in page
    assert 'nv_inference_queue_duration_us{model="echo",version="1"} 5000\n' in page
    assert 'nv_inference_request_failure{model="echo",reason="BACKEND",version="1"} 2\n' in page
    assert re.search(r"^seqmesh_gateway_requests_in_flight 0$", page, re.MULTILINE)
    assert "seqmesh_gateway_mesh_up 1.0" in other


async def test_a_path_is_served_again_as_it_was_whatever_was_asked_of_it(session: aiohttp.ClientSession):
    """The route of a path is kept; the same headers mean the same, and each endpoint makes its own of them."""
    ready, generate, infer = ("/v2/models/echo/ready", "/v2/models/echo_text/generate", "/v2/models/echo_text/infer")
    head = {"Inference-Header-Content-Length": "0"}
    seen: list[list[int]] = []
    for _ in range(2):
        asked = [
            ("GET", ready),
            ("POST", ready),
            ("PUT", infer),
            ("POST", generate),
            ("POST", infer),
            ("POST", generate),
        ]
        statuses: list[int] = []
        for method, path in asked:
            async with session.request(method, path, data=b'{"TEXT": "a"}', headers=head) as response:
                statuses.append(response.status)
                await response.read()
        seen.append(statuses)

    assert seen[0] == seen[1]
    assert [200, 405, 405] == seen[0][:3]
    assert seen[0][3] == seen[0][5]


# -- sessions -------------------------------------------------------------------------------------------------------


async def infer(session: Any, model: str, headers: dict[str, str] | None = None, **parameters: Any) -> Any:
    document = ONE | ({"parameters": parameters} if parameters else {})
    async with session.post(f"/v2/models/{model}/infer", json=document, headers=headers or {}) as response:
        return response.status, response.headers.get("Inference-Session-Id"), await response.json()


async def test_session_header_begins_a_sequence_and_continues_it(session: aiohttp.ClientSession):
    header = {"Inference-Session-Id": "session_abc"}
    sums = [(await infer(session, "session_sum", header))[2]["outputs"][0]["data"] for _ in range(3)]

    assert sums == [[1], [2], [3]]


async def test_session_header_begins_a_sequence_on_any_sequence_model(session: aiohttp.ClientSession):
    status, echoed, document = await infer(session, "running_sum", {"Inference-Session-Id": "s"})

    assert (status, echoed, document["outputs"][0]["data"]) == (200, "s", [1])


async def test_server_names_a_session_when_the_client_did_not_and_the_name_works(session: aiohttp.ClientSession):
    _, made, document = await infer(session, "session_sum")
    _, other, _ = await infer(session, "session_sum")
    _, _, by_header = await infer(session, "session_sum", {"Inference-Session-Id": made})
    _, _, by_parameter = await infer(session, "session_sum", sequence_id=made)

    assert str(uuid.UUID(made)) == document["parameters"]["sequence_id"] == made != other
    assert by_header["outputs"][0]["data"] == [2]
    assert by_parameter["outputs"][0]["data"] == [3]


async def test_session_and_sequence_id_must_not_contradict_each_other(session: aiohttp.ClientSession):
    status, _, document = await infer(session, "session_sum", {"Inference-Session-Id": "a"}, sequence_id="b")

    assert status == 400
    assert "name one of them" in document["error"]


# -- raw binary requests --------------------------------------------------------------------------------------------


async def test_raw_body_is_the_models_only_input_and_a_variable_dimension_follows_from_it(
    session: aiohttp.ClientSession,
):
    async with session.post(
        "/v2/models/echo/infer", data=bytes(range(12)), headers={"Inference-Header-Content-Length": "0"}
    ) as response:
        content = await response.read()
        head = int(response.headers["Inference-Header-Content-Length"])

    assert content[head:] == bytes(range(12))
    assert json.loads(content[:head])["outputs"][0]["shape"] == [1, 3]


async def test_raw_text_body_becomes_one_element(session: aiohttp.ClientSession):
    async with session.post(
        "/v2/models/one_text/infer", data=b"hello", headers={"Inference-Header-Content-Length": "0"}
    ) as response:
        content = await response.read()

    assert content.endswith(b"\x05\x00\x00\x00hello")


async def test_raw_body_for_a_model_with_two_inputs_is_refused(session: aiohttp.ClientSession):
    async with session.post(
        "/v2/models/add_sub/infer", data=b"hello", headers={"Inference-Header-Content-Length": "0"}
    ) as response:
        assert response.status == 400
        assert "2 inputs in 'add_sub' model configuration" in (await response.json())["error"]


# -- repository -----------------------------------------------------------------------------------------------------


async def obey(executor: FakeExecutor, *, outcome: RepositoryEntry) -> ControlMessage:
    """What an executor does with the next control message: carries it out, then says so in its registration."""
    found: list[tuple[bytes, dict[bytes, bytes]]] = []
    while not found:
        found = await executor.commands.xrange(executor.keys.control)
        await asyncio.sleep(0.01)
    entry, model = found[-1][0].decode(), found[-1][1][b"n"].decode()
    word = await executor.commands.hget(executor.keys.wanted, model)
    failures = (LoadFailure(entry, model, "INVALID_ARG", outcome.reason),) if outcome.reason else ()
    executor.registration = msgspec.structs.replace(
        executor.registration,
        applied=entry,
        failures=failures,
        repository=(*(e for e in executor.registration.repository if e.model != outcome.model), outcome),
    )
    await executor.membership.update(executor.registration)
    return msgspec.msgpack.decode(word, type=ControlMessage)


@pytest.mark.parametrize(
    ("outcome", "status", "error"),
    [
        (RepositoryEntry("extra", "1", "READY"), 200, ""),
        (RepositoryEntry("extra", "1", "UNAVAILABLE", "failed to load 'extra', so"), 400, "failed to load 'extra', so"),
        (RepositoryEntry("extra", "1", "UNAVAILABLE"), 500, "failed to load 'extra', no version is available"),
    ],
)
async def test_load_returns_when_every_executor_has_carried_it_out(
    session: aiohttp.ClientSession, executor: FakeExecutor, outcome: RepositoryEntry, status: int, error: Any
):
    obeying = asyncio.create_task(obey(executor, outcome=outcome))
    # As programs write base64 that break its lines.
    parameters = {"config": "{}", "file:1/model.py": "aGVs\r\nbG8=\n"}
    async with session.post("/v2/repository/models/extra/load", json={"parameters": parameters}) as response:
        content = await response.read()

    message = await obeying
    assert (message.action, message.model, message.files) == ("load", "extra", {"1/model.py": b"hello"})
    assert response.status == status
    assert (json.loads(content)["error"] if content else "") == error


async def test_loading_an_ensemble_fails_with_its_steps_model_though_another_executor_has_that(
    session: aiohttp.ClientSession, executor: FakeExecutor
):
    """The executor that could not load the model will not try again."""
    part = running_sum("part")
    names = tuple({tensor.name: tensor.name for tensor in specs} for specs in (part.inputs, part.outputs))
    config = msgspec.structs.replace(
        part, name="extra", sequence_batching=None, ensemble=(EnsembleStep("part", "", *names),)
    )
    for one in (part, config):
        await executor.membership.publish(ModelRecord(one, "{}", ("1",)))

    async def obey_twice() -> list[ControlMessage]:
        first = await obey(executor, outcome=RepositoryEntry("extra", "1", "READY"))
        while await executor.commands.xlen(executor.keys.control) < 2:
            await asyncio.sleep(0.01)
        return [first, await obey(executor, outcome=RepositoryEntry("part", "1", "READY", "no luck"))]

    obeying = asyncio.create_task(obey_twice())
    async with session.post("/v2/repository/models/extra/load") as response:
        assert response.status == 400
        assert await response.json() == {"error": "no luck"}

    assert ["extra", "part"] == [word.model for word in await obeying]


async def test_unload_returns_when_every_executor_has_carried_it_out(
    session: aiohttp.ClientSession, executor: FakeExecutor
):
    obeying = asyncio.create_task(obey(executor, outcome=RepositoryEntry("echo", "1", "UNAVAILABLE")))
    async with session.post("/v2/repository/models/echo/unload") as response:
        assert response.status == 200

    assert (await obeying).action == "unload"


async def test_unload_that_leaves_a_version_in_service_says_which(
    session: aiohttp.ClientSession, executor: FakeExecutor
):
    obeying = asyncio.create_task(obey(executor, outcome=RepositoryEntry("echo", "1", "READY")))
    async with session.post("/v2/repository/models/echo/unload") as response:
        assert response.status == 500
        error = "failed to unload 'echo', versions that are still available: 1"
        assert await response.json() == {"error": error}

    await obeying


@pytest.mark.parametrize("document", [None, {"parameters": None}], ids=["no body", "null parameters"])
async def test_unload_of_something_unknown_succeeds(
    session: aiohttp.ClientSession, executor: FakeExecutor, document: Any
):
    async with session.post("/v2/repository/models/never_loaded/unload", json=document) as response:
        assert response.status == 200

    assert not await executor.commands.exists(executor.keys.control)


@pytest.mark.parametrize(
    ("path", "document", "error"),
    [
        ("models/../load", {}, None),
        ("models/x%5Cy/load", {}, "path traversal"),
        ("models/x/load", {"parameters": {"file:1/m": "aGVsbG8="}}, "override files were provided"),
        ("models/x/load", {"parameters": {"config": "{}", "file:1/m": "?"}}, "must be base64"),
        ("models/x/load", {"parameters": {"config": "{}", "file:1/m": "é"}}, "must be base64"),
        ("models/x/load", {"parameters": {"other": "{}"}}, "unrecognized load parameter 'other'"),
        ("models/x/load", {"parameters": {"config": {}}}, "attempt to access JSON non-string as string"),
        ("models/x/unload", {"parameters": {"unload_dependents": 1}}, "Unable to parse 'unload_dependents'"),
        ("models/x/load", {"parameters": []}, "attempt to get members for non-object"),
        ("index", {"ready": 1}, "Invalid value for 'ready': expected a boolean"),
    ],
)
async def test_bad_repository_requests_are_refused(
    session: aiohttp.ClientSession, path: str, document: Any, error: Any
):
    async with session.post(f"/v2/repository/{path}", json=document) as response:
        content = await response.json()

    assert response.status == (404 if error is None else 500 if "attempt to" in content["error"] else 400)
    assert error is None or error in content["error"]


async def test_load_is_refused_unless_every_executor_is_in_explicit_mode(
    session: aiohttp.ClientSession, executor: FakeExecutor
):
    executor.registration = msgspec.structs.replace(executor.registration, control_mode="none")
    await executor.membership.update(executor.registration)

    async with session.post("/v2/repository/models/echo/load") as response:
        assert response.status == 503
        assert await response.json() == {
            "error": "explicit model load / unload is not allowed if polling is enabled: start every executor with "
            "--model-control-mode explicit"
        }


async def test_index_of_ready_models_only(session: aiohttp.ClientSession, executor: FakeExecutor):
    executor.registration = msgspec.structs.replace(
        executor.registration,
        repository=(RepositoryEntry("echo", "1", "READY"), RepositoryEntry("broken", "1", "UNAVAILABLE", "why")),
    )
    await executor.membership.update(executor.registration)
    lines: Any = []
    async with asyncio.timeout(60):
        while len(lines) != 2:
            await asyncio.sleep(0.05)
            async with session.post("/v2/repository/index") as response:
                lines = await response.json()
    async with session.post("/v2/repository/index", json={"ready": True}) as response:
        ready = await response.json()

    assert lines == [
        {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "why"},
        {"name": "echo", "version": "1", "state": "READY"},
    ]
    assert ready == [{"name": "echo", "version": "1", "state": "READY"}]


async def test_gateway_without_executors_is_live_but_not_ready(gateway_settings: GatewaySettings):
    async with (
        gateway_running(gateway_settings) as gateway,
        aiohttp.ClientSession(f"http://{gateway.url}") as session,
        session.get("/v2/health/live") as live,
        session.get("/v2/health/ready") as ready,
    ):
        assert (live.status, ready.status) == (200, 400)
        assert await live.json() == {"live": True}
        assert await ready.json() == {"ready": False, "error": "no executor serves"}


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
async def test_health_says_so_while_the_gateway_stops(path: str):
    """Seen by those whose question had begun when the stop came; the port closes for all others."""
    stop = Stop()
    stop.request("test")
    unused: Any = None
    server = ServerRoutes(unused, unused, stop, name="", shared_memory=False)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    handler = server.live if path.endswith("live") else server.ready
    await RouteEndpoint({"GET": handler}, Origins())(
        {"type": "http", "method": "GET", "headers": [], "path": path}, unused, send
    )

    assert (503, b'{"error":"Server exiting"}') == (sent[0]["status"], sent[1]["body"])

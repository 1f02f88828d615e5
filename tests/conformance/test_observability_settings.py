"""Trace and log settings over both protocols, as Triton answers; of a mesh they hold for every process. (triton-spec
5.8)"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc as grpc_library
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2 as untyped_service_pb2
from tritonclient.grpc import service_pb2_grpc as untyped_service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.conformance.targets import Target
from tests.mesh.running_mesh import wait

service_pb2: Any = untyped_service_pb2
service_pb2_grpc: Any = untyped_service_pb2_grpc
LOG_DEFAULTS = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
MODEL = "stateless"
UNKNOWN = "no_such_model"


@pytest.fixture
def http(target: Target) -> Iterator[Any]:
    with httpclient.InferenceServerClient(target.http) as client:
        yield client
        client.update_log_settings({"log_info": True, "log_verbose_level": 0, "log_format": "default"})
        for model in ("", MODEL):
            client.update_trace_settings(model, dict.fromkeys(("trace_rate", "trace_count", "log_frequency")))


@pytest.fixture
def grpc(target: Target) -> Iterator[Any]:
    with grpcclient.InferenceServerClient(target.grpc) as client:
        yield client


def post(target: Target, path: str, body: str) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://{target.http}{path}", data=body.encode(), method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_log_settings_are_read_and_changed_over_both_protocols(http: Any, grpc: Any) -> None:
    assert http.get_log_settings() == LOG_DEFAULTS

    changed = http.update_log_settings({"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"})
    assert changed == {**LOG_DEFAULTS, "log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"}

    told = grpc.get_log_settings(as_json=True)["settings"]
    assert told["log_info"] == {"bool_param": False}
    assert told["log_verbose_level"] == {"uint32_param": 1}
    told = grpc.update_log_settings({"log_info": True}, as_json=True)["settings"]
    assert told["log_info"] == {"bool_param": True}
    assert http.get_log_settings()["log_info"] is True


def test_trace_settings_of_a_model_override_the_servers_until_they_are_taken_back(http: Any, grpc: Any) -> None:
    default = http.get_trace_settings()
    assert default["trace_level"] == ["OFF"]
    assert (default["trace_rate"], default["trace_count"], default["log_frequency"]) == ("1000", "-1", "0")

    assert http.update_trace_settings(settings={"trace_rate": "7"})["trace_rate"] == "7"
    assert grpc.update_trace_settings(MODEL, {"trace_rate": "9"}, as_json=True)["settings"]["trace_rate"] == {
        "value": ["9"]
    }
    assert http.get_trace_settings(MODEL)["trace_rate"] == "9"
    assert http.get_trace_settings()["trace_rate"] == "7"

    assert http.update_trace_settings(MODEL, {"trace_rate": None})["trace_rate"] == "7"
    assert grpc.update_trace_settings(settings={"trace_rate": None}, as_json=True)["settings"]["trace_rate"] == {
        "value": ["1000"]
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v2/trace/setting", '{"trace_rate":"x"}', 400, "Unable to parse 'trace_rate', got: x"),
        ("/v2/trace/setting", '{"trace_rate":5}', 500, "attempt to access JSON non-string as string"),
        (
            "/v2/trace/setting",
            '{"trace_rate":"99999999999999"}',
            400,
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 99999999999999",
        ),
        (
            "/v2/trace/setting",
            '{"trace_level":["OFF","TENSORS"]}',
            400,
            "Expect only one trace level 'OFF' is specified",
        ),
        ("/v2/trace/setting", '{"trace_level":"OFF"}', 500, "attempt to access JSON non-array as array"),
        ("/v2/trace/setting", '{"trace_count":"x"}', 400, "Unable to parse 'trace_count', got: x"),
        (
            "/v2/trace/setting",
            '{"trace_file":"a"}',
            501,
            "trace file location can not be updated through network protocol",
        ),
        (
            "/v2/trace/setting",
            '{"trace_level":"OFF","trace_file":"a"}',
            501,
            "trace file location can not be updated through network protocol",
        ),
        (f"/v2/models/{UNKNOWN}/trace/setting", "{}", 400, f"Request for unknown model : {UNKNOWN}"),
        (f"/v2/models/{UNKNOWN}/trace/setting", "no JSON", 400, f"Request for unknown model : {UNKNOWN}"),
        ("/v2/logging", '{"log_info":"x"}', 500, "attempt to access JSON non-boolean as boolean"),
        (
            "/v2/logging",
            '{"log_verbose_level":-1}',
            500,
            "attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ("/v2/logging", '{"log_file":"x"}', 501, "log file location can not be updated through network protocol"),
        (
            "/v2/logging",
            '{"log_info":3,"log_file":4}',
            501,
            "log file location can not be updated through network protocol",
        ),
    ],
)
def test_wrong_settings_over_http(target: Target, path: str, body: str, status: int, message: str) -> None:
    assert post(target, path, body) == (status, {"error": message})


@pytest.mark.parametrize("body", ['{"color":1}', "[]", '{"trace_level":null}', '{"trace_level":["FOO"]}'])
def test_what_is_no_setting_changes_nothing(target: Target, http: Any, body: str) -> None:
    before = http.get_trace_settings()

    assert post(target, "/v2/trace/setting", body) == (200, before)


@pytest.mark.parametrize(
    ("settings", "status", "message"),
    [
        ({"trace_rate": ["1", "2"]}, "INVALID_ARGUMENT", "expect only 1 value for 'trace_rate'"),
        ({"trace_rate": "x"}, "INVALID_ARGUMENT", "Unable to parse 'trace_rate', got: x"),
        ({"trace_count": "-5"}, "INVALID_ARGUMENT", "Unable to parse 'trace_count'. Expecting value >= -1, got: -5"),
        ({"trace_file": "x"}, "UNIMPLEMENTED", "trace file location can not be updated through network protocol"),
    ],
)
def test_wrong_trace_settings_over_grpc(grpc: Any, settings: dict[str, Any], status: str, message: str) -> None:
    with pytest.raises(InferenceServerException) as refused:
        grpc.update_trace_settings(settings=settings)

    assert refused.value.status() == f"StatusCode.{status}"
    assert refused.value.message() == message


@pytest.mark.parametrize(
    ("wrong", "status", "message"),
    [
        ({"log_info": {"string_param": "x"}}, "INVALID_ARGUMENT", "expect boolean for 'log_info'"),
        ({"log_verbose_level": {"bool_param": True}}, "INVALID_ARGUMENT", "expect int32 for 'log_verbose_level'"),
        ({"log_format": {"uint32_param": 1}}, "INVALID_ARGUMENT", "expect string for 'log_format'"),
        ({"log_format": {"string_param": "x"}}, "INVALID_ARGUMENT", "invalid argument for log_format, got: x"),
        (
            {"log_format": {"uint32_param": 1}, "log_info": {"string_param": "x"}},
            "INVALID_ARGUMENT",
            "expect boolean for 'log_info'",
        ),
        (
            {"log_info": {"string_param": "x"}, "log_file": {"bool_param": True}},
            "UNIMPLEMENTED",
            "log file location can not be updated through network protocol",
        ),
    ],
)
def test_wrong_log_settings_over_grpc(target: Target, wrong: dict[str, Any], status: str, message: str) -> None:
    # tritonclient itself sends each setting with its right type only.
    settings = {name: service_pb2.LogSettingsRequest.SettingValue(**value) for name, value in wrong.items()}
    with grpc_library.insecure_channel(target.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc_library.RpcError) as refused:
            stub.LogSettings(service_pb2.LogSettingsRequest(settings=settings), timeout=60)

    error: Any = refused.value
    assert (error.code(), error.details()) == (grpc_library.StatusCode[status], message)


def test_a_level_needs_somewhere_to_send_traces(grpc: Any) -> None:
    with pytest.raises(InferenceServerException, match="Attempting to set invalid trace setting :") as refused:
        grpc.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})

    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.mesh_only("a Triton is one process")
def test_log_settings_reach_every_process(target: Target, http: Any) -> None:
    http.update_log_settings({"log_verbose_level": 1})
    assert target.mesh is not None
    logs = target.mesh.directory / "logs"

    def processes_that_say_so() -> set[str]:
        return {path.stem for path in logs.glob("*.log") if "log settings" in path.read_text(errors="replace")}

    def services() -> set[str]:
        return {name.rstrip("-0123456789") for name in processes_that_say_so()}

    wait(lambda: {"gateway", "scheduler", "executor"} <= services(), "every service has applied the settings")

"""The document of the HTTP routes: it is valid, it names every route and no other, and the answers are as it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import aiohttp
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from gateway.rest.app import build_app
from gateway.rest.infer import Infer
from gateway.rest.openapi import PATH, document
from gateway.rest.operations import operation_of
from gateway.rest.reply import RouteEndpoint
from gateway.restrictions import Restriction
from gateway.settings import GatewaySettings, HttpParser
from shared.origins import Origins
from tests.gateway.fake_executor import FakeExecutor, RunningGateway, gateway_running

PLACES = {"model": "echo_text", "version": "1", "id": "5", "region": "r", "repository": "any"}
TENSOR = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}
BODIES: dict[str, list[Any]] = {
    "infer": [{"inputs": [TENSOR]}, {"id": "r", "inputs": [TENSOR], "parameters": {"binary_data_output": True}}],
    "generate": [{"INPUT0": "a"}, {"INPUT0": ["a", "b"], "id": "r"}],
    "generate_stream": [{"INPUT0": "a"}],
    "setting": [{"trace_rate": "7"}, {"trace_rate": None}],
    "logging": [{"log_info": True}],
    "index": [{"ready": True}],
    "unload": [{"parameters": {"unload_dependents": 1}}],
    "load": [{"parameters": {"config": 1}}],
}
"""By the last word of a path: bodies that are sent beside an empty one and a broken one."""


@pytest.fixture
def http_parser() -> HttpParser:
    """One does: the document is the same whatever parses."""
    return "llhttp"


async def document_of(running: RunningGateway) -> dict[str, Any]:
    async with aiohttp.ClientSession(f"http://{running.url}") as http, http.get(PATH) as response:
        assert 200 == response.status
        return await response.json()


def operations(of: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and operation."""
    for path, entry in of["paths"].items():
        for method, operation in entry.items():
            if method != "parameters":
                yield method.upper(), path, operation


async def test_the_document_is_valid_and_says_something_of_every_operation(gateway: RunningGateway) -> None:
    made = await document_of(gateway)

    OpenAPIV31SpecValidator(made).validate()
    for method, path, operation in operations(made):
        assert operation["summary"].endswith("."), (method, path)
        assert " .../" not in operation["summary"], (method, path)


async def test_the_document_is_made_once(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for it ever again keeps nobody waiting."""
    made = await document_of(gateway)
    monkeypatch.setattr("gateway.rest.app.document", MagicMock(side_effect=AssertionError))

    assert made == await document_of(gateway)


async def test_no_schema_has_a_title(gateway: RunningGateway) -> None:
    """A generator of clients makes a type of each title, and leaves out a route where two have the same."""
    made = await document_of(gateway)

    assert '"title"' not in json.dumps(made["paths"])


async def test_every_route_has_an_entry_and_every_entry_a_route(gateway: RunningGateway) -> None:
    nobody = MagicMock()
    app = build_app(nobody, nobody, nobody, nobody, nobody, nobody, nobody, nobody, {})
    routes = {
        (method, re.sub(r":[a-z]+}", "}", route.path))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }

    assert routes == {(method, path) for method, path, _ in operations(await document_of(gateway))}


def test_a_handler_without_a_description_cannot_be_documented() -> None:
    async def handler(*arguments: Any) -> None:
        """GET /x: nothing."""

    with pytest.raises(TypeError, match="is not described"):
        document([("health", "/x", RouteEndpoint({"GET": handler}, Origins()))])
    assert operation_of(Infer.handle).body is not None


async def test_the_header_of_a_restricted_category_is_named_and_its_secret_is_not(
    gateway_settings: GatewaySettings, executor: FakeExecutor
) -> None:
    restrictions = {"inference": Restriction("x-key", "s3cret"), "metadata": Restriction("x-meta", "other")}
    settings = replace(gateway_settings, restricted_api=("inference:x-key=s3cret", "metadata:x-meta=other"))
    assert restrictions == settings.http_restrictions
    async with gateway_running(settings) as running, aiohttp.ClientSession(f"http://{running.url}") as http:
        async with http.get(PATH) as response:
            assert 403 == response.status
        async with http.get(PATH, headers={"x-meta": "other"}) as response:
            text = await response.text()
    made = json.loads(text)

    OpenAPIV31SpecValidator(made).validate()
    assert {"type": "apiKey", "in": "header", "name": "x-key"} == made["components"]["securitySchemes"]["inference"]
    assert [{"inference": []}] == made["paths"]["/v2/models/{model}/infer"]["post"]["security"]
    assert "s3cret" not in text


async def test_every_answer_is_one_that_the_document_tells(gateway: RunningGateway) -> None:
    """Status, media type and body, of right and wrong requests to every operation."""
    made = await document_of(gateway)
    surprises: list[str] = []
    fine = 0
    async with aiohttp.ClientSession(f"http://{gateway.url}") as http:
        for method, path, operation in operations(made):
            for version in ("1", "9") if "{version}" in path else ("1",):
                for body in (b"", b"{", *(json.dumps(each).encode() for each in BODIES.get(path.split("/")[-1], []))):
                    if not body and path.endswith("load"):
                        continue  # that would be carried out, by executors that are not there
                    target = path.format(**(PLACES | {"version": version}))
                    async with http.request(method, target, data=body if method == "POST" else None) as response:
                        problem = surprise(made, operation, response, await response.read())
                    fine += response.status == 200
                    if problem:
                        surprises.append(f"{method} {target} {body[:60]!r}: {response.status} {problem}")

    assert not surprises
    assert fine > 50


def surprise(made: dict[str, Any], operation: dict[str, Any], response: aiohttp.ClientResponse, body: bytes) -> str:
    """What the document does not tell of an answer."""
    told = operation["responses"].get(str(response.status))
    if told is None:
        return "is no status of this operation"
    if "$ref" in told:
        told = made["components"]["responses"][told["$ref"].rsplit("/", 1)[1]]
    content = told.get("content", {})
    if not content or not body:
        return "" if bool(content) == bool(body) or response.content_type in content else "has or lacks a body"
    if response.content_type not in content:
        return f"has the type {response.content_type}"
    if response.content_type != "application/json":
        return ""
    schema = content["application/json"]["schema"]
    if "$ref" in schema:
        schema = made["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return "; ".join(error.message for error in Draft202012Validator(schema).iter_errors(json.loads(body)))

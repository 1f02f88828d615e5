"""generate and generate_stream, against a fake executor. What Triton does too is compared in tests/conformance."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.requests.infer_call import InferCall
from gateway.requests.inference import Inference
from gateway.requests.waiting import Answer
from gateway.rest import generate
from gateway.rest.generate_request import decode_generate, fitted
from gateway.settings import GatewaySettings
from shared.contract.errors import MeshError, ModelError, RequestError
from shared.contract.tensors import Tensor
from tests.gateway.fake_executor import FakeExecutor, RunningGateway, echo, gateway_running, running_sum
from tests.gateway.flow_control import needs_flow_control

TEXT = "/v2/models/echo_text/generate"
SUM = "/v2/models/running_sum/generate"
NOT_ONE = "generate expects model to produce exactly 1 response"
Story = Callable[[Answer], AsyncGenerator[Answer | MeshError]]
ANSWERS_OF = generate.answers_of


@pytest.fixture
async def http(gateway: RunningGateway) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{gateway.url}") as session:
        yield session


async def ask(http: aiohttp.ClientSession, path: str, document: Any, **headers: str) -> tuple[int, str, bytes]:
    async with http.post(path, data=json.dumps(document), headers=headers) as response:
        return response.status, response.headers["content-type"], await response.read()


def streaming(path: str, body: bytes) -> bytes:
    """The bytes of a request of generate_stream."""
    return b"POST %b_stream HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body


def events(content: bytes) -> list[Any]:
    """The documents of a stream of events. Nothing else may stand between them."""
    *parts, rest = content.split(b"\n\n")
    assert not rest
    assert all(part.startswith(b"data: ") for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [
        ((-1, -1), 3, (1, 3)),
        ((-1, 4), 8, (2, 4)),
        ((-1, 2, -1), 6, (1, 2, 3)),
        ((4,), 4, (4,)),
        ((), 1, ()),
        ((-1,), 0, (0,)),
    ],
)
def test_the_right_most_free_dimension_takes_the_elements(shape: Any, count: int, expected: Any) -> None:
    assert expected == fitted("X", shape, count)


@pytest.mark.parametrize(("shape", "count"), [((4,), 3), ((4,), 8), ((-1, 4), 6), ((), 2), ((0, -1), 1)])
def test_elements_that_fit_no_shape_are_refused(shape: Any, count: int) -> None:
    with pytest.raises(RequestError, match="The schema can not convert input 'X' to tensor with proper shape"):
        fitted("X", shape, count)


def test_controls_are_parameters_of_a_model_without_sequences() -> None:
    body = b'{"INPUT0":1,"INPUT":1,"sequence_id":7,"parameters":{"timeout":5,"sequence_start":true}}'

    plain = decode_generate(body, InferCall("echo"), echo())
    stateful = decode_generate(body, InferCall("running_sum"), running_sum())

    assert (0, {"sequence_id": 7, "timeout": 5, "sequence_start": True, "INPUT": 1}) == (
        plain.correlation_id,
        plain.parameters,
    )
    assert (7, True, 5, {"INPUT0": 1}) == (
        stateful.correlation_id,
        stateful.start,
        stateful.timeout_us,
        stateful.parameters,
    )


def test_a_tensor_named_parameters_leaves_no_room_for_nested_keys() -> None:
    config = echo()
    (spec,) = config.inputs
    config = msgspec.structs.replace(config, inputs=(msgspec.structs.replace(spec, name="parameters"),))

    with pytest.raises(RequestError, match="Keyword 'parameters' for nested schema also given as input tensor name"):
        decode_generate(b'{"parameters":{}}', InferCall("echo"), config)


@pytest.mark.parametrize("path", [TEXT, TEXT + "_stream"])
async def test_a_text_becomes_a_tensor_and_back(http: aiohttp.ClientSession, path: str) -> None:
    status, kind, content = await ask(http, path, {"id": "r", "INPUT0": "straße\n\nend"}, accept="text/event-stream")
    expected = {"id": "r", "OUTPUT0": "straße\n\nend", "model_name": "echo_text", "model_version": "1"}

    assert 200 == status
    if path == TEXT:
        assert ("application/json", expected) == (kind, json.loads(content))
    else:
        assert ("text/event-stream; charset=utf-8", [expected]) == (kind, events(content))


async def test_of_a_key_that_is_given_twice_the_last_one_counts(http: aiohttp.ClientSession) -> None:
    async with http.post(TEXT, data=b'{"INPUT0":"a","INPUT0":"b"}') as response:
        assert "b" == (await response.json())["OUTPUT0"]


async def test_the_steps_of_a_sequence_add_up_over_all_endpoints(http: aiohttp.ClientSession) -> None:
    begun = await ask(http, SUM, {"INPUT": 1, "sequence_id": 5, "sequence_start": True})
    then = await ask(http, SUM + "_stream", {"INPUT": [2], "parameters": {"sequence_id": 5}})
    ended = await ask(http, SUM, {"INPUT": 3, "sequence_id": 5, "sequence_end": True, "sequence_step": 3})

    assert 1 == json.loads(begun[2])["OUTPUT"]
    assert [3] == [event["OUTPUT"] for event in events(then[2])]
    assert (6, 3) == (json.loads(ended[2])["OUTPUT"], json.loads(ended[2])["sequence_step"])


async def test_a_repeated_step_gets_its_stored_reply(http: aiohttp.ClientSession) -> None:
    step = {"INPUT": 4, "sequence_id": 6, "sequence_start": True, "id": "first"}
    told = [await ask(http, SUM + "_stream", step) for _ in range(2)]

    assert [[4], [4]] == [[event["OUTPUT"] for event in events(content)] for _, _, content in told]


async def test_a_session_that_the_gateway_names_is_told_in_the_header(http: aiohttp.ClientSession) -> None:
    async with http.post("/v2/models/session_sum/generate_stream", json={"INPUT": 2}) as first:
        session = first.headers["inference-session-id"]
    async with http.post(
        "/v2/models/session_sum/generate", json={"INPUT": 3}, headers={"inference-session-id": session}
    ) as second:
        document = await second.json()

    assert (5, session) == (document["OUTPUT"], second.headers["inference-session-id"])


async def test_an_error_before_the_inference_is_plain_and_the_models_own_is_an_event(
    http: aiohttp.ClientSession,
) -> None:
    unknown = await ask(http, SUM + "_stream", {"INPUT": 1, "sequence_id": 404})
    status, kind, content = await ask(http, SUM + "_stream", {"INPUT": -666, "sequence_id": 7, "sequence_start": True})

    assert (400, "application/json") == unknown[:2]
    assert "never_seen" == json.loads(unknown[2])["reason"]
    assert (500, "text/event-stream; charset=utf-8") == (status, kind)
    assert ["the model does not like -666"] == [event["error"] for event in events(content)]


async def test_an_output_without_a_form_in_json_is_an_error_of_the_answer(
    http: aiohttp.ClientSession, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(tensor: Tensor) -> None:
        raise RequestError("no form")

    monkeypatch.setattr("gateway.rest.response.json_of_tensor", refusing)

    assert (400, "text/event-stream; charset=utf-8", b'data: {"error":"no form"}\n\n') == await ask(
        http, TEXT + "_stream", {"INPUT0": "a"}
    )
    assert (400, "application/json", b'{"error":"no form"}') == await ask(http, TEXT, {"INPUT0": "a"})


async def test_forwarded_headers_reach_the_model(gateway_settings: GatewaySettings, executor: FakeExecutor) -> None:
    settings = replace(gateway_settings, http_header_forward_pattern="x-.*")
    async with gateway_running(settings) as running, aiohttp.ClientSession(f"http://{running.url}") as session:
        await ask(session, TEXT, {"INPUT0": "a", "warm": True}, **{"X-Who": "me"})

        assert {"x-who": "me", "warm": True} == executor.received[-1].parameters


# -- many answers: what the endpoints do with an iterator of answers -------------------------------------------------


def answering(monkeypatch: pytest.MonkeyPatch, story: Story) -> None:
    """Every request is answered as the story tells, which gets the real answer."""

    async def told(real: AsyncGenerator[Answer | MeshError]) -> AsyncGenerator[Answer | MeshError]:
        async with contextlib.aclosing(real):
            answer = await anext(real)
        assert isinstance(answer, Answer)
        async with contextlib.aclosing(story(answer)) as answers:
            async for each in answers:
                yield each

    def answers_of(inference: Inference, call: InferCall, client: str) -> AsyncGenerator[Answer | MeshError]:
        return told(ANSWERS_OF(inference, call, client))

    monkeypatch.setattr(generate, "answers_of", answers_of)


async def twice(answer: Answer) -> AsyncGenerator[Answer | MeshError]:
    yield answer
    yield answer


async def never(answer: Answer) -> AsyncGenerator[Answer | MeshError]:
    for _ in ():
        yield answer


async def once_and_then_failing(answer: Answer) -> AsyncGenerator[Answer | MeshError]:
    yield answer
    raise ModelError("An Error Occurred")


async def an_error_between_two(answer: Answer) -> AsyncGenerator[Answer | MeshError]:
    yield answer
    yield ModelError("An Error Occurred")
    yield answer


async def once_and_then_broken(answer: Answer) -> AsyncGenerator[Answer | MeshError]:
    yield answer
    raise KeyError("a mistake of ours")


@pytest.mark.parametrize(
    ("story", "streamed"),
    [
        (twice, ["a", "a"]),
        (never, []),
        (once_and_then_failing, ["a", "An Error Occurred"]),
        (an_error_between_two, ["a", "An Error Occurred", "a"]),
        (once_and_then_broken, ["a", "internal error in the gateway: KeyError"]),
    ],
)
async def test_other_than_one_answer(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, story: Story, streamed: list[str]
) -> None:
    answering(monkeypatch, story)

    status, _, content = await ask(http, TEXT + "_stream", {"INPUT0": "a"})
    assert (200, streamed) == (status, [event.get("OUTPUT0", event.get("error")) for event in events(content)])

    status, kind, content = await ask(http, TEXT, {"INPUT0": "a"})
    assert (500, "application/json") == (status, kind)
    if story in (twice, never):
        assert json.loads(content)["error"].startswith(NOT_ONE)

    # The connection can be used again.
    assert 404 == (await ask(http, "/v2/models/nobody/generate", {}))[0]


async def test_each_event_is_sent_when_it_is_there(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asyncio.Event()

    async def waiting(answer: Answer) -> AsyncGenerator[Answer | MeshError]:
        yield answer
        await seen.wait()
        yield answer

    answering(monkeypatch, waiting)

    async with http.post(TEXT + "_stream", json={"INPUT0": "a"}) as response:
        first = await response.content.readuntil(b"\n\n")
        seen.set()
        rest = await response.content.read()

    assert events(first) == events(rest)


@pytest.mark.parametrize("reads", [True, pytest.param(False, marks=needs_flow_control)], ids=["leaves", "never reads"])
async def test_a_client_that_takes_no_more_ends_an_endless_stream(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """Whether it leaves, or stays and reads nothing. Meanwhile the stream does not run ahead of it."""
    monkeypatch.setattr("gateway.rest.client_watch.WATCH_AFTER_S", 0.01)
    monkeypatch.setattr("gateway.http.connection.PATIENCE_S", 0.3)
    ended = asyncio.Event()
    count = 0

    async def endless(answer: Answer) -> AsyncGenerator[Answer | MeshError]:
        nonlocal count
        try:
            while True:
                count += 1
                yield answer
                await asyncio.sleep(0.001 if reads else 0)
        finally:
            ended.set()

    answering(monkeypatch, endless)
    body = json.dumps({"INPUT0": "a" * (10 if reads else 100_000)}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port)
    writer.write(
        b"POST %b_stream HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (TEXT.encode(), len(body)) + body
    )
    if reads:
        await reader.readuntil(b"\n\n")
        writer.close()
    async with asyncio.timeout(60):
        await ended.wait()
    writer.close()

    assert reads or count < 1000


async def test_a_client_that_leaves_while_it_waits_gives_the_step_up(
    gateway: RunningGateway, executor: FakeExecutor, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.rest.client_watch.WATCH_AFTER_S", 0.01)
    await executor.pause()
    body = b'{"INPUT":1,"sequence_id":8,"sequence_start":true}'
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port)
    writer.write(streaming(SUM, body))

    async def in_flight_becomes(number: int) -> None:
        page = ""
        while f"seqmesh_gateway_requests_in_flight {number}\n" not in page:
            async with http.get(f"http://127.0.0.1:{gateway.addresses.metrics_port}/metrics") as response:
                page = await response.text()

    async with asyncio.timeout(60):
        await in_flight_becomes(1)
        writer.close()
        await in_flight_becomes(0)
    assert not executor.received

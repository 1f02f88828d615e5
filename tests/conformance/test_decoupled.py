"""Decoupled models: any number of answers to a request, over streams. Source: triton-spec 4, 5.3, 5.7, 6 and 8;
Triton's suites L0_decoupled and L0_iterative_scheduling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from tests.conformance.calls import fresh_id
from tests.conformance.targets import Target
from tests.mesh.running_mesh import PATIENCE_S
from tests.mesh.streams import Got, with_empty_finals

MODEL = "repeating"


@pytest.fixture
async def client(target: Target) -> AsyncIterator[Any]:
    async with grpc_aio.InferenceServerClient(target.grpc) as client:
        yield client


def tensor(*values: int, batched: bool = False) -> Any:
    array = np.array([values] if batched else values, np.int32)
    made = grpc_aio.InferInput("INPUT", array.shape, "INT32")
    made.set_data_from_numpy(array)
    return made


def asked(*values: int, model: str = MODEL, name: str = "", sequence: int = 0, **said: Any) -> dict[str, Any]:
    """A request of a stream. said: its parameters, and its flags"""
    flags = {flag: said.pop(flag) for flag in ("sequence_start", "sequence_end") if flag in said}
    return {
        "model_name": model,
        "inputs": [tensor(*values, batched=model != MODEL)],
        "request_id": name,
        "sequence_id": sequence,
        "parameters": said,
        **flags,
    }


async def streamed(client: Any, requests: Sequence[dict[str, Any]]) -> Got:
    """All that comes back for these requests."""

    async def each() -> AsyncIterator[dict[str, Any]]:
        for one in requests:
            yield one

    got = Got()
    async with asyncio.timeout(PATIENCE_S):
        async for result, error in client.stream_infer(each()):
            got.add(result, error)
    return got


@pytest.mark.parametrize("thread", [False, True])
async def test_a_request_has_none_one_or_many_answers(client: Any, *, thread: bool) -> None:
    requests = [asked(*range(count), name=f"r{count}", thread=thread) for count in (0, 1, 5)]

    got = await streamed(client, requests)

    assert [[], [0], [0, 1, 2, 3, 4]] == [got.of(name) for name in ("r0", "r1", "r5")]
    assert {False} == set(got.finals)


async def test_the_last_answer_carries_the_final_flag_or_it_comes_alone_if_it_is_asked_for(
    target: Target, client: Any
) -> None:
    with_it = await asyncio.to_thread(with_empty_finals, target.grpc, asked(7, 8, flag=True))
    alone = await asyncio.to_thread(with_empty_finals, target.grpc, asked(7, 8))
    nothing = await asyncio.to_thread(with_empty_finals, target.grpc, asked())
    unasked = await streamed(client, [asked(7, 8)])

    assert ([("", 7), ("", 8)], [False, True]) == (with_it, with_it.finals)
    assert ([("", 7), ("", 8), ("", None)], [False, False, True]) == (alone, alone.finals)
    assert ([("", None)], [True]) == (nothing, nothing.finals)
    assert ([("", 7), ("", 8)], [False, False]) == (unasked, unasked.finals)


async def test_an_error_is_an_answer_and_others_follow_it(client: Any) -> None:
    got = await streamed(client, [asked(1, 2, 3, fail_at=1), asked(4, name="next")])

    assert [("", 1), ("", "answer 1 failed"), ("", 3), ("next", 4)] == got


async def test_the_final_flag_may_come_with_an_error(client: Any) -> None:
    got = await streamed(client, [asked(1, fail_last=True)])

    assert [("", 1), ("", "all of it failed")] == got


@pytest.mark.differs("a wrong tensor is refused; Triton hands it on")
async def test_a_wrong_tensor_is_an_error_in_its_place(target: Target, client: Any) -> None:
    if not target.is_mesh:
        pytest.skip("Triton hands it on")
    got = await streamed(client, [asked(1, 2, 3, wrong_at=1)])

    assert (1, 3) == (got[0][1], got[2][1])
    assert "returned a wrong output 'OUTPUT': expected INT32 [1], got FP64 [1]" in got[1][1]


async def test_what_execute_raises_ends_its_requests(client: Any) -> None:
    got = await streamed(client, [asked(1, 2, raises=True)])

    assert [1, 2] == [content for _, content in got[:2]]
    assert "raised on request" in got[2][1]
    assert 3 == len(got)


@pytest.mark.mesh_only("in Triton such a request stays open for ever")
@pytest.mark.parametrize("thread", [False, True])
async def test_a_request_whose_sender_is_dropped_ends_with_an_error(client: Any, *, thread: bool) -> None:
    got = await streamed(client, [asked(1, forget=True, thread=thread)])

    assert [1] == [content for _, content in got[:1]]
    assert "let go of the request's response sender" in got[1][1]


async def test_no_answer_follows_the_final_flag(client: Any) -> None:
    assert [("", 1)] == await streamed(client, [asked(1, late=True)])


async def answered(client: Any) -> int:
    """How many requests of the model have been counted."""
    (found,) = (await client.get_inference_statistics(MODEL, as_json=True))["model_stats"]
    return sum(int(found["inference_stats"].get(kind, {}).get("count", 0)) for kind in ("success", "fail"))


async def test_answers_of_one_request_do_not_wait_for_those_of_another(client: Any) -> None:
    """The first request answers for ever: the answers of the second, and of a model that is not decoupled, come."""
    stop = asyncio.Event()
    plain = {"model_name": "stateless", "inputs": [tensor(5, batched=True)], "request_id": "plain"}

    async def each() -> AsyncIterator[dict[str, Any]]:
        yield asked(0, endless=True, thread=True, name="endless")
        yield asked(1, 2, name="short")
        yield plain
        await stop.wait()

    before, asks = await answered(client), 0
    responses = client.stream_infer(each())
    names: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        async for result, error in responses:
            assert error is None
            names.append(result.get_response().id)
            if {"endless", "short", "plain"} <= set(names) and names.count("endless") > 3:
                break
        responses.cancel()
        # The model sees that its caller has gone.
        while True:
            got = await streamed(client, [asked(asked=True)])
            asks += 1
            if got[0][1] >= 1:
                break
            await asyncio.sleep(0.05)
        # And ends the request: another test, which counts, must not meet it.
        while await answered(client) < before + 2 + asks:
            await asyncio.sleep(0.05)


async def test_unary_calls_are_refused(target: Target, client: Any) -> None:
    with pytest.raises(InferenceServerException) as unary:
        await client.infer(MODEL, [tensor(1)])
    assert "ModelInfer RPC doesn't support models with decoupled transaction policy" == unary.value.message()
    assert str(grpc.StatusCode.UNIMPLEMENTED) == unary.value.status()

    array = np.array([1], np.int32)
    made = http_aio.InferInput("INPUT", array.shape, "INT32")
    made.set_data_from_numpy(array)
    async with http_aio.InferenceServerClient(target.http) as over_http:
        with pytest.raises(InferenceServerException) as refused:
            await over_http.infer(MODEL, [made])
    assert "HTTP end point doesn't support models with decoupled transaction policy" == refused.value.message()
    assert "501" == refused.value.status()


async def test_a_sequence_goes_on_behind_the_last_answer_of_each_step(client: Any) -> None:
    one, other = fresh_id(), fresh_id()
    requests = [
        asked(3, model="streamed", sequence=one, name="a", sequence_start=True),
        asked(2, model="streamed", sequence=other, name="b", sequence_start=True),
        asked(2, model="streamed", sequence=one, name="a"),
        asked(0, model="streamed", sequence=other, name="b2"),
        asked(1, model="streamed", sequence=one, name="a", sequence_end=True),
        asked(2, model="streamed", sequence=other, name="b", sequence_end=True),
    ]

    got = await streamed(client, requests)

    assert ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4], []) == (got.of("a"), got.of("b"), got.of("b2"))


async def test_an_iterative_request_streams_an_answer_with_each_pass(client: Any) -> None:
    requests = [asked(count, model="countdown", name=f"c{count}") for count in (1, 4, 6)]

    got = await streamed(client, requests)

    for count in (1, 4, 6):
        assert list(reversed(range(count))) == got.of(f"c{count}")


@pytest.mark.mesh_only("the Python backend of 2.51 reports no responses: its response_stats stay empty")
async def test_answers_are_counted_by_their_place(client: Any) -> None:
    before = (await client.get_inference_statistics(MODEL, as_json=True))["model_stats"][0]
    await streamed(client, [asked(1, 2), asked(1, 2, fail_at=1)])
    after = (await client.get_inference_statistics(MODEL, as_json=True))["model_stats"][0]

    def gained(place: str, kind: str) -> int:
        found = [one.get("response_stats", {}).get(place, {}).get(kind, {}).get("count", 0) for one in (before, after)]
        return int(found[1]) - int(found[0])

    assert 2 == gained("0", "success")
    assert (1, 1) == (gained("1", "success"), gained("1", "fail"))
    assert 2 == gained("2", "empty_response")
    assert 2 == int(after["inference_count"]) - int(before.get("inference_count", 0))

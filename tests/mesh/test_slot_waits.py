"""Who waits for a slot and asks hears its place and an estimate, over both protocols; and who would wait too long."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import grpc
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from tritonclient.grpc import service_pb2_grpc

from shared.contract.ids import sequence_id
from tests.mesh.raw_http import get, infer_document, posted
from tests.mesh.running_mesh import RunningMesh, eventually, seqmesh
from tests.mesh.test_outcomes import message
from tests.mesh.traffic import GrpcCaller, Step, sum_of, tensor

MODEL = "scarce_sum"
LINE = 20
PATIENCE_MS = 3000
"""How long the impatient wait at most: less than they are told, and long enough to be told on a busy machine."""


def waiting(mesh: RunningMesh, name: str) -> bool:
    return mesh.record(sequence_id(MODEL, "", name)).get("st") == "w"


def shown(mesh: RunningMesh, name: str) -> Any:
    return get(mesh.http(1), f"/v2/models/{MODEL}/sequences/{name}").document


async def hold(mesh: RunningMesh, caller: GrpcCaller) -> list[str]:
    """Sequences in every slot. Three slots have become free while none was, so their rate is known."""
    holders = [f"holds-{number}" for number in range(mesh.slots(MODEL))]
    for name in holders:
        await caller(MODEL, Step(name, 1, start=True))
    for _ in range(3):
        await caller(MODEL, Step(holders[0], 1, end=True))
        await eventually(lambda: mesh.slots_held(MODEL) == len(holders) - 1, "the slot is free")
        await caller(MODEL, Step(holders[0], 1, start=True))
    return holders


async def test_who_asks_hears_its_place_and_how_long_it_has_waited(mesh: RunningMesh) -> None:
    caller = GrpcCaller(mesh.grpc())
    holders = await hold(mesh, caller)
    over_grpc: Any = grpc_aio.InferenceServerClient(mesh.grpc(1))
    over_http: Any = http_aio.InferenceServerClient(mesh.http(1))
    asks: dict[str, Any] = {"sequence_start": True, "sequence_end": True, "parameters": {"sequence_wait_info": True}}

    async def streamed() -> Any:
        yield {"model_name": MODEL, "inputs": [tensor(grpc_aio.InferInput, 5)], "sequence_id": "streams", **asks}

    heard: list[Any] = []

    async def read() -> None:
        async for result, error in over_grpc.stream_infer(streamed()):
            assert error is None
            heard.append(result)

    async with asyncio.TaskGroup() as group:
        # The first step of a stream, a unary call and an HTTP request, one behind the other in the line.
        group.create_task(read())
        await eventually(lambda: waiting(mesh, "streams"), "the stream waits")
        unary = group.create_task(over_grpc.infer(MODEL, [tensor(grpc_aio.InferInput, 6)], sequence_id="calls", **asks))
        await eventually(lambda: waiting(mesh, "calls"), "the call waits")
        posted = group.create_task(
            over_http.infer(MODEL, [tensor(http_aio.InferInput, 7)], sequence_id="posts", **asks)
        )
        await eventually(lambda: waiting(mesh, "posts"), "the HTTP request waits")
        await eventually(lambda: "wait_ms" in shown(mesh, "posts"), "an operator sees an estimate")
        seen, table = shown(mesh, "posts"), await seqmesh(mesh, "seq", "ls", MODEL, "--state", "waiting")
        printed = await seqmesh(mesh, "seq", "show", MODEL, "posts")
        as_json = json.loads(await seqmesh(mesh, "seq", "show", MODEL, "calls", "--json"))
        await eventually(lambda: bool(heard), "the stream hears of its wait")
        await caller(MODEL, Step(holders[0], 1, end=True))

    assert (3, 2) == (seen["place"], as_json["place"])
    assert seen["wait_low_ms"] <= seen["wait_ms"] <= seen["wait_high_ms"]
    assert "place in the line" in printed
    assert "3, about " in printed
    assert ["waiting, ends, place 1", "waiting, ends, place 2", "waiting, ends, place 3"] == sorted(
        line[line.index("waiting") :].split("  ")[0] for line in table.splitlines() if "waiting" in line
    )
    *news, last = [result.get_response() for result in heard]
    first = news[0].parameters
    assert 1 == first["sequence_place"].int64_param
    assert first["sequence_wait_low_ms"].int64_param <= first["sequence_wait_high_ms"].int64_param
    assert not any(one.outputs or one.parameters["triton_final_response"].bool_param for one in news)
    assert 5 == sum_of(heard[-1])
    assert last.parameters["triton_final_response"].bool_param
    assert last.parameters["sequence_waited_ms"].int64_param > 0
    assert 6 == sum_of(unary.result())
    assert unary.result().get_response().parameters["sequence_waited_ms"].int64_param > 0
    assert 7 == sum_of(posted.result())
    assert posted.result().get_response()["parameters"]["sequence_waited_ms"] > 0
    at_once = await over_http.infer(MODEL, [tensor(http_aio.InferInput, 1)], sequence_id="later", **asks)
    assert ["sequence_waited_ms"] == list(at_once.get_response()["parameters"])
    for name in holders[1:]:
        await caller(MODEL, Step(name, 1, end=True))
    for client in (over_grpc, over_http, caller):
        await client.close()


async def test_who_would_wait_too_long_is_refused_and_told_when_to_come_again(mesh: RunningMesh) -> None:
    caller = GrpcCaller(mesh.grpc())
    holders = await hold(mesh, caller)
    asked: dict[str, Any] = {"sequence_start": True, "sequence_end": True, "sequence_wait_max_ms": PATIENCE_MS}
    async with asyncio.TaskGroup() as group:
        names = [f"in-line-{number}" for number in range(LINE)]
        line = [group.create_task(caller(MODEL, Step(name, 2, start=True, end=True))) for name in names]
        for name in names:
            await eventually(lambda name=name: waiting(mesh, name), "it waits")
        # Nothing becomes free meanwhile, so the estimate grows.
        await eventually(
            lambda: shown(mesh, names[-1]).get("wait_low_ms", 0) > 2 * PATIENCE_MS, "no slot becomes free for long"
        )
        refused = await posted(mesh.http(), f"/v2/models/{MODEL}/infer", infer_document(1, sequence_id="no", **asked))
        async with grpc.aio.insecure_channel(mesh.grpc(1)) as channel:
            stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(message(MODEL, "neither", **asked))
        gone = get(mesh.http(), f"/v2/models/{MODEL}/sequences/no").status
        for name in holders:
            await caller(MODEL, Step(name, 1, end=True))

    told = refused.document
    assert (HTTPStatus.SERVICE_UNAVAILABLE, "wait_too_long", "same", 0) == (
        refused.status,
        told["reason"],
        told["retry"],
        told["last_step"],
    )
    assert (LINE + 1, str(-(-told["wait_ms"] // 1000))) == (told["place"], refused.headers["retry-after"])
    trailing: dict[str, Any] = dict(caught.value.trailing_metadata() or ())
    status, reason, retry = Status.FromString(trailing["grpc-status-details-bin"]), ErrorInfo(), RetryInfo()
    assert "UNAVAILABLE" == caught.value.code().name
    assert (str(LINE + 1), "wait_too_long") == (trailing["seqmesh-place"], trailing["seqmesh-reason"])
    assert status.details[0].Unpack(reason)
    assert status.details[1].Unpack(retry)
    assert ("WAIT_TOO_LONG", str(LINE + 1)) == (reason.reason, reason.metadata["place"])
    assert retry.retry_delay.seconds > PATIENCE_MS / 1000
    assert HTTPStatus.NOT_FOUND == gone
    assert [2] * LINE == [waits.result() for waits in line]
    await caller.close()


async def test_a_place_that_nobody_asked_for_is_not_told(mesh: RunningMesh) -> None:
    response = await posted(
        mesh.http(),
        f"/v2/models/{MODEL}/infer",
        infer_document(1, sequence_id="plain", sequence_start=True, sequence_end=True),
    )

    assert (HTTPStatus.OK, False) == (response.status, "parameters" in response.document)


@pytest.mark.parametrize(
    ("given", "status", "told"),
    [
        ({"sequence_wait_info": 1}, HTTPStatus.INTERNAL_SERVER_ERROR, "Unable to parse 'sequence_wait_info'"),
        (
            {"sequence_wait_max_ms": 0},
            HTTPStatus.BAD_REQUEST,
            "Unable to parse 'sequence_wait_max_ms': milliseconds are counted from 1",
        ),
        ({"sequence_wait_max_ms": -5}, HTTPStatus.INTERNAL_SERVER_ERROR, "non-unsigned-integer"),
        ({"sequence_wait_max_ms": "soon"}, HTTPStatus.INTERNAL_SERVER_ERROR, "non-unsigned-integer"),
    ],
)
async def test_what_cannot_be_asked(mesh: RunningMesh, given: dict[str, Any], status: HTTPStatus, told: str) -> None:
    """A value of another type is Triton's own error of its JSON, of status 500."""
    refused = await posted(
        mesh.http(), f"/v2/models/{MODEL}/infer", infer_document(1, sequence_id="odd", sequence_start=True, **given)
    )

    assert status == refused.status
    assert told in refused.error

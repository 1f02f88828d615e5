"""What a client hears when a step is not done: for each reason its status, last step and advice, over every protocol.

The table below is the promise; a mesh is brought into each situation once, and then asked over HTTP, gRPC and a stream.
`late` needs a connection to Redis that breaks: tests/gateway/requests/test_lost_connections.py. `wait_too_long` and
`quota` say more than the others: tests/mesh/test_slot_waits.py and test_tenants.py.
"""

from __future__ import annotations

import asyncio
import signal
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from shared.contract.errors import Reason
from shared.contract.ids import sequence_id
from shared.store.keyspace import Keyspace
from tests.mesh.conftest import MakeMesh
from tests.mesh.model_repository import MISBEHAVING, add_forgetful_model, add_sum_model
from tests.mesh.raw_http import infer_document, posted
from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.traffic import tensor

pb: Any = service_pb2

OUTCOMES = {
    Reason.NEVER_SEEN: (400, "INVALID_ARGUMENT", "start", 0),
    Reason.ENDED: (400, "INVALID_ARGUMENT", "start", 1),
    Reason.EXPIRED: (400, "INVALID_ARGUMENT", "start", 1),
    Reason.FAILED: (400, "INVALID_ARGUMENT", "start", 1),
    Reason.LOST: (400, "INVALID_ARGUMENT", "start", 1),
    Reason.CANCELLED: (400, "INVALID_ARGUMENT", "start", 2),
    Reason.WRONG_STEP: (400, "INVALID_ARGUMENT", "no", 1),
    Reason.EXISTS: (400, "ALREADY_EXISTS", "no", 2),
    Reason.ANSWERED: (400, "ALREADY_EXISTS", "no", 3),
    Reason.BUSY: (429, "RESOURCE_EXHAUSTED", "same", 2),
    Reason.BACKLOG_FULL: (503, "UNAVAILABLE", "same", 0),
}
"""Reason -> HTTP status, gRPC status, what to do, last step of the situation that the test makes."""

MODELS = {
    Reason.EXPIRED: "brief_sum",
    Reason.FAILED: "moody_sum",
    Reason.LOST: "forgetful_sum",
    Reason.BUSY: "narrow_sum",
    Reason.BACKLOG_FULL: "narrow_sum",
}
ASKED: dict[Reason, dict[str, Any]] = {
    Reason.WRONG_STEP: {"sequence_step": 5},
    Reason.EXISTS: {"sequence_start": True, "sequence_step": 1},
    Reason.BACKLOG_FULL: {"sequence_start": True},
}
"""What is asked beside the sequence's id, which is the reason's name."""


def model_of(reason: Reason) -> str:
    return MODELS.get(reason, "running_sum")


def request_id_of(reason: Reason) -> str:
    return "second" if reason is Reason.ANSWERED else ""


def message(model: str, sequence: str, *, value: int = 1, request_id: str = "", **parameters: Any) -> Any:
    """A step as gRPC carries it."""
    made = pb.ModelInferRequest(model_name=model, id=request_id)
    made.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    made.raw_input_contents.append(struct.pack("<i", value))
    for name, given in {"sequence_id": sequence, **parameters}.items():
        kind = "bool_param" if isinstance(given, bool) else "string_param" if isinstance(given, str) else "int64_param"
        setattr(made.parameters[name], kind, given)
    return made


def asking(reason: Reason) -> Any:
    """The step that is refused for that reason."""
    return message(model_of(reason), reason.value, request_id=request_id_of(reason), **ASKED.get(reason, {}))


@pytest.fixture
def mesh(make_mesh: MakeMesh, tmp_path: Path) -> RunningMesh:
    models = tmp_path / "models"
    for name, slots, idle_us in (
        ("running_sum", 32, 600_000_000),
        ("narrow_sum", 1, 600_000_000),
        ("brief_sum", 32, 300_000),
    ):
        add_sum_model(models, name, slots=slots, idle_us=idle_us)
        with (models / name / "config.pbtxt").open("a") as config:
            config.write('parameters: { key: "retry_replies", value: { string_value: "1" } }\n')
            config.write('parameters: { key: "virtual_slots", value: { string_value: "false" } }\n')
    add_forgetful_model(models)
    bounds = {"SEQMESH_SHARDS": "1", "SEQMESH_BACKLOG_MAX": "1", "SEQMESH_SEQUENCE_INFLIGHT_MAX": "2"}
    bounds["SEQMESH_TOMBSTONE_SECONDS"] = "3600"
    # A busy machine must not look like a dead executor: the situations would be others.
    bounds["SEQMESH_LEASE_MS"] = "3000"
    mesh = make_mesh(models=(models, MISBEHAVING), gateways=2, environment=bounds)
    mesh.keys = Keyspace(mesh.keys.prefix, 1)
    return mesh


class Situations:
    """Brings a mesh into each situation."""

    def __init__(self, mesh: RunningMesh, stub: Any) -> None:
        self._mesh = mesh
        self._stub = stub
        self.open: list[asyncio.Task[Any]] = []

    async def make(self) -> None:
        """Those that need processes to suffer come first."""
        await self.cancelled()
        await self.lost()
        await self.step(Reason.ENDED, sequence_start=True, sequence_end=True)
        await self.step(Reason.EXPIRED, sequence_start=True)
        with pytest.raises(grpc.aio.AioRpcError, match="does not like -1"):
            await self.step(Reason.FAILED, value=-1, sequence_start=True)
        await self.step(Reason.WRONG_STEP, sequence_start=True)
        for reason in (Reason.EXISTS, Reason.ANSWERED):
            await self.step(reason, request_id="first", sequence_start=True)
            await self.step(reason, request_id="second")
        await self.step(Reason.ANSWERED, request_id="third")
        await self.crowded()
        await eventually(lambda: self.record(Reason.EXPIRED).get("st") == "x", "the sequence expires")

    def record(self, reason: Reason) -> dict[str, str]:
        return self._mesh.record(sequence_id(model_of(reason), "", reason.value))

    async def step(self, reason: Reason, **given: Any) -> Any:
        return await self._stub.ModelInfer(message(model_of(reason), reason.value, **given))

    async def cancelled(self) -> None:
        """The executor is frozen until its sequence is taken away: nobody can run the step before its caller goes."""
        await self.step(Reason.CANCELLED, sequence_start=True)
        self._mesh.send("executor-1", signal.SIGSTOP)
        leaving = self._stub.ModelInfer(message("running_sum", Reason.CANCELLED.value))
        waiting = asyncio.ensure_future(leaving)
        await eventually(lambda: self.record(Reason.CANCELLED).get("nx") == "2", "the step is accepted")
        await eventually(lambda: self.record(Reason.CANCELLED).get("st") == "m", "its sequence has no owner")
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await eventually(lambda: self.record(Reason.CANCELLED).get("ca") == "2", "its caller is known to have gone")
        self._mesh.send("executor-1", signal.SIGCONT)
        await eventually(lambda: self.record(Reason.CANCELLED).get("st") == "c", "the step is cancelled")

    async def lost(self) -> None:
        await self.step(Reason.LOST, sequence_start=True)
        await self._mesh.kill_executor("executor-1")
        await eventually(lambda: self.record(Reason.LOST).get("st") == "o", "what it held is given up")

    async def crowded(self) -> None:
        """One sequence holds the only slot, another one waits with as many steps as it may have."""
        await self._stub.ModelInfer(message("narrow_sum", "holder", sequence_start=True))
        for accepted, given in enumerate(({"sequence_start": True}, {}), 1):
            self.open.append(asyncio.create_task(self.step(Reason.BUSY, **given)))
            await eventually(
                lambda accepted=accepted: self.record(Reason.BUSY).get("nx") == str(accepted), "the step is accepted"
            )


async def check_http(mesh: RunningMesh, reason: Reason) -> None:
    status, _, retry, last_step = OUTCOMES[reason]
    document = infer_document(1, sequence_id=reason.value, **ASKED.get(reason, {}))
    if request_id_of(reason):
        document["id"] = request_id_of(reason)
    refused = await posted(mesh.http(0), f"/v2/models/{model_of(reason)}/infer", document)

    facts = {"reason": reason.value, "last_step": last_step, "retry": retry}
    assert (status, {**facts, "error": refused.error}) == (refused.status, refused.document)


async def check_grpc(stub: Any, reason: Reason) -> None:
    _, code, retry, last_step = OUTCOMES[reason]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(asking(reason))

    trailing: dict[str, Any] = dict(caught.value.trailing_metadata() or ())
    status, info = Status.FromString(trailing["grpc-status-details-bin"]), ErrorInfo()
    assert status.details[0].Unpack(info)
    assert code == caught.value.code().name
    assert (reason.value, str(last_step), retry) == (
        trailing["seqmesh-reason"],
        trailing["seqmesh-last-step"],
        trailing["seqmesh-retry"],
    )
    assert (caught.value.code().value[0], caught.value.details()) == (status.code, status.message)
    assert (reason.upper(), {"last_step": str(last_step), "retry": retry}) == (info.reason, dict(info.metadata))


async def check_stream(stub: Any, reason: Reason) -> None:
    _, _, retry, last_step = OUTCOMES[reason]

    async def one() -> AsyncIterator[Any]:
        yield asking(reason)

    (answer,) = [answer async for answer in stub.ModelStreamInfer(one())]
    told = answer.infer_response.parameters
    assert answer.error_message
    assert (reason.value, last_step, retry) == (
        told["reason"].string_param,
        told["last_step"].int64_param,
        told["retry"].string_param,
    )


async def check_tritonclient(mesh: RunningMesh, reason: Reason) -> None:
    """The ordinary client, over both protocols: it shows status and text."""
    status, code, _, _ = OUTCOMES[reason]
    parameters = dict(ASKED.get(reason, {}))
    start = parameters.pop("sequence_start", False)
    for library, url, expected in (
        (http_aio, mesh.http(1), f"{status}"),
        (grpc_aio, mesh.grpc(0), f"StatusCode.{code}"),
    ):
        client: Any = library.InferenceServerClient(url)
        with pytest.raises(InferenceServerException) as caught:
            await client.infer(
                model_of(reason),
                [tensor(library.InferInput, 1)],
                request_id=request_id_of(reason),
                sequence_id=reason.value,
                sequence_start=start,
                parameters=parameters or None,
            )
        await client.close()
        assert (expected, True) == (caught.value.status(), bool(caught.value.message()))


async def test_every_reason_is_told_with_its_status_last_step_and_advice_over_every_protocol(mesh: RunningMesh) -> None:
    assert set(Reason) - {Reason.LATE, Reason.WAIT_TOO_LONG, Reason.QUOTA} == set(OUTCOMES)
    async with grpc.aio.insecure_channel(mesh.grpc(1)) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        situations = Situations(mesh, stub)
        await situations.make()
        for reason in OUTCOMES:
            try:
                await check_http(mesh, reason)
                await check_grpc(stub, reason)
                await check_stream(stub, reason)
                await check_tritonclient(mesh, reason)
            except AssertionError as error:
                error.add_note(f"reason {reason}")
                raise
        asked = infer_document(1, sequence_id="asks", sequence_start=True, sequence_wait_info=True)
        refused = await posted(mesh.http(0), "/v2/models/narrow_sum/infer", asked)
        assert (Reason.BACKLOG_FULL, 2) == (refused.document["reason"], refused.document["place"])
        for call in situations.open:
            call.cancel()

"""Tenants on a running mesh: how many sequences each may have, how many steps a second, and its share of slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, cast

import grpc
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from shared.contract.ids import sequence_id
from shared.contract.tenants import TENANT_HEADER
from tests.mesh.raw_http import get, infer_document, posted
from tests.mesh.running_mesh import RunningMesh, eventually, seqmesh
from tests.mesh.test_outcomes import message
from tests.mesh.traffic import sum_of, tensor

MODEL = "narrow_sum"


class TenantClients:
    """Steps of tenants over gRPC through the first gateway, and over HTTP through the second one."""

    def __init__(self, mesh: RunningMesh) -> None:
        self.grpc: Any = grpc_aio.InferenceServerClient(mesh.grpc())
        self.http: Any = http_aio.InferenceServerClient(mesh.http(1))

    async def step(self, name: str, tenant: str, *, model: str = MODEL, http: bool = False, **flags: Any) -> int:
        headers = {TENANT_HEADER: tenant} if tenant else None
        client, kind = (self.http, http_aio.InferInput) if http else (self.grpc, grpc_aio.InferInput)
        return sum_of(await client.infer(model, [tensor(kind, 3)], sequence_id=name, headers=headers, **flags))

    async def end(self, *names: str, tenant: str = "") -> None:
        for name in names:
            await self.step(name, tenant, sequence_end=True)


@pytest.fixture
async def clients(mesh: RunningMesh) -> AsyncIterator[TenantClients]:
    clients = TenantClients(mesh)
    yield clients
    await clients.grpc.close()
    await clients.http.close()


@asynccontextmanager
async def limited(mesh: RunningMesh, tenant: str, *limits: str) -> AsyncGenerator[str]:
    """A tenant with limits, which every gateway and scheduler knows, for the block. Its name."""
    await seqmesh(mesh, "tenants", "set", tenant, *limits)
    # Services look twice a second. One look may be under way.
    logs = [*mesh.names("gateway"), *mesh.names("scheduler")]
    await eventually(lambda: all(f"{tenant}: " in mesh.log(name) for name in logs), "every service knows the limits")
    try:
        yield tenant
    finally:
        await seqmesh(mesh, "tenants", "rm", tenant)


async def test_a_tenant_has_as_many_sequences_as_it_may_over_all_gateways(
    mesh: RunningMesh, clients: TenantClients
) -> None:
    async with limited(mesh, "quota", "--live-max", "2") as tenant:
        assert 3 == await clients.step("quota 1", tenant, sequence_start=True)
        assert 3 == await clients.step("quota 2", tenant, http=True, sequence_start=True)
        for http in (False, True):
            with pytest.raises(InferenceServerException, match="as many live sequences as it may"):
                await clients.step("quota 3", tenant, http=http, sequence_start=True)
        assert 6 == await clients.step("quota 1", tenant, http=True)
        assert 3 == await clients.step("of another", "another", sequence_start=True, sequence_end=True)

        listed = get(mesh.http(1), f"/v2/models/{MODEL}/sequences?tenant={tenant}").document["sequences"]
        assert [("quota 1", tenant), ("quota 2", tenant)] == [(one["id"], one["tenant"]) for one in listed]
        assert ["tenant", tenant] in [
            line.split() for line in (await seqmesh(mesh, "seq", "show", MODEL, "quota 2")).splitlines()
        ]
        (line,) = [one for one in (await seqmesh(mesh, "tenants", "ls")).splitlines() if one.startswith(tenant)]
        assert [tenant, "2", "2", "any", "any", "1"] == line.split()
        page = get(mesh.http(), "/metrics").body.decode()
        assert f'seqmesh_tenant_sequences{{tenant="{tenant}"}} 2' in page

        await clients.end("quota 1", tenant=tenant)
        assert 3 == await clients.step("quota 3", tenant, sequence_start=True)
        await clients.end("quota 2", "quota 3")
    with pytest.raises(InferenceServerException, match="has to name a tenant"):
        await clients.step("no name", "of two words", sequence_start=True)


async def test_a_tenant_sends_no_more_steps_than_it_may_and_hears_when_it_may_again(
    mesh: RunningMesh, clients: TenantClients
) -> None:
    # Nothing comes back within the test: one step in 1000 s.
    async with limited(mesh, "slow", "--steps-per-s", "0.001", "--burst", "4") as tenant:
        assert 3 == await clients.step("slow 1", tenant, sequence_start=True)
        assert 6 == await clients.step("slow 1", tenant, http=True)
        assert 9 == await clients.step("slow 1", tenant)
        assert 12 == await clients.step("slow 1", tenant, http=True)

        document = infer_document(3, sequence_id="slow 1")
        answer = await posted(mesh.http(), f"/v2/models/{MODEL}/infer", document, {TENANT_HEADER: tenant})
        assert HTTPStatus.TOO_MANY_REQUESTS == answer.status
        assert "sends more than the 0.001 requests a second that it may" in answer.document["error"]
        assert ("quota", "same") == (answer.document["reason"], answer.document["retry"])
        assert "last_step" not in answer.document
        assert 900 < int(answer.headers["retry-after"]) <= 1000

        async with grpc.aio.insecure_channel(mesh.grpc(1)) as channel:
            stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelInfer(message(MODEL, "slow 1", value=3), metadata=((TENANT_HEADER, tenant),))
            assert grpc.StatusCode.RESOURCE_EXHAUSTED is refused.value.code()
            trailing = dict(refused.value.trailing_metadata() or ())
            details = Status.FromString(cast(bytes, trailing["grpc-status-details-bin"])).details
            about, when = ErrorInfo(), RetryInfo()
            assert any(one.Unpack(about) for one in details) and any(one.Unpack(when) for one in details)
            assert "QUOTA" == about.reason and when.retry_delay.seconds > 900

        async def streamed() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": MODEL,
                "inputs": [tensor(grpc_aio.InferInput, 3)],
                "sequence_id": "slow 1",
            }

        async for result, error in clients.grpc.stream_infer(streamed(), headers={TENANT_HEADER: tenant}):
            assert result is None and "that it may" in str(error)
            break
        # Another tenant's step, and one of nobody, goes on with the sequence: ids are not tenants' own.
        assert 15 == await clients.step("slow 1", "")
        await clients.end("slow 1")


async def test_where_slots_are_short_tenants_take_turns_by_their_shares(
    mesh: RunningMesh, clients: TenantClients
) -> None:
    held = [f"holds {number}" for number in range(mesh.slots(MODEL))]
    for name in held:
        await clients.step(name, "", sequence_start=True)
    served: list[str] = []

    async def wait_in_line(name: str, tenant: str) -> None:
        await clients.step(name, tenant, sequence_start=True)
        served.append(name)

    async with limited(mesh, "large", "--share", "2"), asyncio.TaskGroup() as group:
        # The small tenant comes last.
        line = [*((f"large {number}", "large") for number in range(5)), ("small", "small")]
        for name, tenant in line:
            group.create_task(wait_in_line(name, tenant))
            sequence = sequence_id(MODEL, "", name)
            await eventually(lambda sequence=sequence: mesh.record(sequence).get("st") == "w", f"'{name}' waits")
        for number, name in enumerate(held[:4]):
            await clients.end(name)
            await eventually(lambda number=number: len(served) > number, "the next one gets the slot")
        # Of three slots two are the large tenant's.
        assert ["large 0", "large 1", "small", "large 2"] == served
        await clients.end(*held[4:], *served)
    await clients.end("large 3", "large 4")

"""What both clients take as arguments. Nothing is sent."""

from __future__ import annotations

import asyncio

import pytest

from seqmesh_client import AsyncClient, Client

GATEWAYS = ["localhost:1"]


@pytest.mark.parametrize("headers", [{"Seqmesh-Tenant": "acme"}, [("seqmesh-tenant", "acme")]])
def test_headers_are_given_as_to_tritonclient_or_in_pairs_and_sent_as_grpc_takes_them(
    headers: dict[str, str] | list[tuple[str, str]],
) -> None:
    assert (("seqmesh-tenant", "acme"),) == Client(GATEWAYS, headers=headers).headers


@pytest.mark.parametrize("ahead", [0, -1])
def test_no_step_ahead_is_refused_and_drops_no_step_silently(ahead: int) -> None:
    async def asynchronous() -> None:
        async for _ in AsyncClient(GATEWAYS).sequence("sum").steps([[1]], ahead=ahead):
            raise AssertionError("nobody answers")

    with pytest.raises(ValueError, match="at least 1"):
        list(Client(GATEWAYS).sequence("sum").steps([[1]], ahead=ahead))
    with pytest.raises(ValueError, match="at least 1"):
        asyncio.run(asynchronous())

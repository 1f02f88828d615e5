"""What becomes of a request that cannot be admitted yet, or never."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.models.catalog import Catalog
from gateway.requests import inference
from gateway.requests.allowances import Allowances
from gateway.requests.infer_call import InferCall
from gateway.settings import GatewaySettings
from shared.contract.errors import Code, MeshError, RequestError, UnavailableError
from shared.contract.tenants import TenantLimits
from shared.store.keyspace import Keyspace
from shared.store.tenants import StoredTenants
from tests.gateway.fake_executor import FakeExecutor
from tests.gateway.requests.test_lost_connections import step, total, without_ports


class BrokenError(Exception):
    """A defect of the gateway's own."""


async def test_a_defect_harms_the_one_request_and_keeps_no_bytes(
    gateway_settings: GatewaySettings, keys: Keyspace, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held request is admitted by the catalog's task: were that to fail, the gateway would end."""

    def broken(*_: Any, **__: Any) -> Any:
        raise BrokenError

    async with without_ports(gateway_settings, keys) as parts, asyncio.timeout(60):
        before = parts.inference.budget.taken
        with monkeypatch.context() as patched:
            patched.setattr(inference, "admit", broken)
            at_once = parts.inference.submit(step(1, start=True))
            patched.setattr(Catalog, "find", find_once_unknown(Catalog.find))
            held = parts.inference.submit(step(1, start=True))
            patched.setattr(Allowances, "enter", broken)
            of_a_tenant = parts.inference.submit(msgspec.structs.replace(step(1, start=True), tenant="acme"))
            assert at_once.done()
            assert not held.done()
            for future in (at_once, held, of_a_tenant):
                with pytest.raises(MeshError, match="internal error in the gateway: BrokenError") as failure:
                    await future
                assert Code.INTERNAL == failure.value.code
        assert before == parts.inference.budget.taken
        assert 0 == parts.inference.in_flight

        assert 1 == total(await parts.inference.submit(step(1, start=True, end=True)))


def find_once_unknown(find: Any) -> Any:
    """`Catalog.find` that knows the model only from the second time on."""
    asked: list[str] = []

    def found(self: Catalog, model: str, version: str) -> Any:
        asked.append(model)
        if len(asked) == 1:
            raise RequestError("not yet")
        return find(self, model, version)

    return found


def never(*_: Any) -> None:
    """A refresh that does not come."""


async def test_a_version_that_nobody_serves_holds_up_no_other_request_for_the_model(
    gateway_settings: GatewaySettings, keys: Keyspace, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with without_ports(gateway_settings, keys) as parts, asyncio.timeout(60):
        # The catalog is never refreshed: what is held stays held.
        monkeypatch.setattr(Catalog, "ask", never)
        good = step(2, start=True, end=True)
        held = parts.inference.submit(InferCall(good.model, version="7", inputs=good.inputs))
        behind = parts.inference.submit(InferCall(good.model, version="7", inputs=good.inputs))

        assert 2 == total(await parts.inference.submit(good))
        assert not held.done()
        assert not behind.done()
        for future in (held, behind):
            future.cancel()


async def test_what_was_never_sent_is_told_so_when_the_gateway_gives_up(
    gateway_settings: GatewaySettings, keys: Keyspace, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await StoredTenants(executor.redis, keys).set("acme", TenantLimits(steps_per_s=1.0))
    async with without_ports(gateway_settings, keys) as parts, asyncio.timeout(60):
        monkeypatch.setattr(Catalog, "ask", never)
        held = parts.inference.submit(InferCall("not_there_yet"))
        too_fast = parts.inference.submit(msgspec.structs.replace(step(1, start=True), tenant="acme"))
        parts.inference.give_up("the gateway has stopped")

        for future in (held, too_fast):
            with pytest.raises(UnavailableError, match="the gateway has stopped before the request was sent"):
                await future
        # What the tenant may send is told too late, and changes nothing.
        while parts.inference.in_flight > 1:
            await asyncio.sleep(0)
        assert [] == executor.received

"""What becomes of a request that cannot be admitted yet, or never."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gateway.models.catalog import Catalog
from gateway.parts import GatewayParts
from gateway.requests import inference
from gateway.requests.allowances import Allowances, Enters
from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Answer
from shared.contract.errors import Code, MeshError, RequestError, UnavailableError
from shared.contract.tenants import TenantLimits
from shared.store.keyspace import Keyspace
from shared.store.tenants import StoredTenants
from tests.gateway.fake_executor import FakeExecutor
from tests.gateway.requests.portless import step, total


class BrokenError(Exception):
    """A defect of the gateway's own."""


async def test_all_that_a_client_may_make_large_counts_until_the_answer(
    parts: GatewayParts, executor: FakeExecutor
) -> None:
    """Else requests that wait, each with a long parameter, would fill the memory of the gateway, and of Redis."""
    plain = step(1, start=True, end=True)
    budget, before = parts.inference.budget, parts.inference.budget.taken
    for fields in ({}, {"request_id": "r" * 1000}, {"parameters": {"text": "t" * 1000}}):
        answer = parts.inference.submit(msgspec.structs.replace(plain, **fields))
        assert before + 1000 * bool(fields) <= budget.taken < before + 1000 * bool(fields) + 200
        await answer
        assert before == budget.taken

    many = msgspec.structs.replace(plain, parameters={f"p{number}": 1 for number in range(1000)})
    answer = parts.inference.submit(many)
    assert before + 100_000 < budget.taken
    await answer


async def test_a_defect_harms_the_one_request_and_keeps_no_bytes(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held request is admitted by the catalog's task: were that to fail, the gateway would end."""

    def broken(*_: Any, **__: Any) -> Any:
        raise BrokenError

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


def looks_that_wait(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The catalog is not refreshed any more. Returns what would be called after its refreshes."""
    looks: list[Callable[[], None]] = []

    def ask(_self: Catalog, then: Callable[[], None]) -> None:
        looks.append(then)

    monkeypatch.setattr(Catalog, "ask", ask)
    return looks


def never(*_: Any) -> None:
    """A refresh that does not come."""


async def test_a_version_that_nobody_serves_holds_up_no_other_request_for_the_model(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_each_request_for_an_unknown_model_takes_as_long_as_any_other(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may make up thousands of names, and all of them are looked at in one turn."""
    looks = looks_that_wait(monkeypatch)

    def taken_s(count: int) -> float:
        for number in range(count):
            parts.inference.submit(InferCall(f"not there {number}")).cancel()
        began_s = time.thread_time()
        for look in looks:
            look()
        looks.clear()
        return time.thread_time() - began_s

    # Where each took as long as all before it, this would be 256 times as long.
    assert min(taken_s(8192) for _ in range(3)) < 64 * min(taken_s(512) for _ in range(5))
    assert 0 == parts.inference.in_flight


@pytest.mark.settings(max_requests_in_flight=2)
async def test_a_request_whose_model_is_looked_for_is_in_flight(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the generate extension cannot be read before its model is known."""
    looks = looks_that_wait(monkeypatch)
    first, second = (asyncio.create_task(parts.inference.look_up("not_there_yet", "")) for _ in range(2))
    while len(looks) < 2:
        await asyncio.sleep(0)

    assert 2 == parts.inference.in_flight
    with pytest.raises(UnavailableError, match="2 requests in flight, which is its limit"):
        await parts.inference.look_up("not_there_yet", "")
    assert "running_sum" == (await parts.inference.look_up("running_sum", "")).config.name
    second.cancel()
    for look in looks:
        look()
    with pytest.raises(RequestError, match="'not_there_yet' is not found"):
        await first
    await asyncio.gather(second, return_exceptions=True)
    assert 0 == parts.inference.in_flight


@pytest.mark.settings(max_requests_in_flight=8)
async def test_requests_that_wait_leave_room_to_those_that_go_on(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a slot, in a queue or for their model they wait as long as it takes: a model whose line is full would keep
    out the live sequences of all others."""
    await parts.inference.submit(step(1, start=True))
    looks = looks_that_wait(monkeypatch)
    waiting = [parts.inference.submit(InferCall("not_there_yet")) for _ in range(7)]

    for new in (step(1, 2, start=True), InferCall("not_there_yet")):
        with pytest.raises(UnavailableError, match="7 requests in flight, which is its limit"):
            await parts.inference.submit(new)
    assert 3 == total(await parts.inference.submit(step(2)))
    for look in looks:
        look()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("greedy", "other"), [(("a", ""), ("b", "")), (("a", "acme"), ("a", "")), (("a", "acme"), ("a", "umbrella"))]
)
@pytest.mark.settings(max_requests_in_flight=128)
async def test_a_client_whose_requests_wait_leaves_room_to_others(
    parts: GatewayParts,
    keys: Keyspace,
    executor: FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    greedy: tuple[str, str],
    other: tuple[str, str],
) -> None:
    """A client is an address; behind a proxy, a tenant with limits of its own."""
    await StoredTenants(executor.redis, keys).set("acme", TenantLimits(live_max=1000))
    await parts.tenants.refresh()
    await parts.inference.submit(step(1, start=True))
    looks = looks_that_wait(monkeypatch)

    def sent(whose: tuple[str, str], call: InferCall) -> asyncio.Future[Answer]:
        client, tenant = whose
        return parts.inference.submit(msgspec.structs.replace(call, tenant=tenant), client=client)

    waiting = [sent(greedy, InferCall("not_there_yet")) for _ in range(98)]
    refused = str(sent(greedy, InferCall("not_there_yet")).exception())
    assert "this client has 98 requests in flight, and others need room beside the 98 that it may have" in refused
    waiting.append(sent(other, InferCall("not_there_yet")))
    going_on = InferCall("not_there_yet", correlation_id=1)
    waiting += [sent(greedy, going_on) for _ in range(28)]
    assert "this client has 126 requests in flight, " in str(sent(greedy, going_on).exception())

    assert 3 == total(await sent(other, step(2)))
    for look in looks:
        look()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert 0 == parts.inference._submitted.taken


@pytest.mark.settings(request_timeout_ms=50)
async def test_the_gateways_own_time_for_a_request_runs_while_it_cannot_be_sent(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the catalog is not refreshed, and while Redis does not say what a tenant may send."""
    looks = looks_that_wait(monkeypatch)
    decisions: list[Enters] = []

    def waits(_self: Allowances, _tenant: str, enters: Enters) -> None:
        decisions.append(enters)

    monkeypatch.setattr(Allowances, "enter", waits)
    held = parts.inference.submit(InferCall("not_there_yet"))
    of_a_tenant = parts.inference.submit(msgspec.structs.replace(step(1, start=True), tenant="acme"))
    own_limit = parts.inference.submit(InferCall("not_there_yet", timeout_us=60_000_000))
    looked_for = asyncio.create_task(parts.inference.look_up("not_there_yet", ""))

    for future in (held, of_a_tenant, looked_for):
        with pytest.raises(UnavailableError, match="50 ms were over before the request was sent: send it again"):
            await future
    assert not own_limit.done()
    # They are let in too late, and are sent no more.
    decisions[0](None)
    for look in looks:
        look()
    assert 0 == parts.inference.in_flight
    assert isinstance(own_limit.exception(), RequestError)
    assert [] == executor.received


async def test_a_held_request_whose_caller_has_left_is_not_sent(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        looks = looks_that_wait(patched)
        patched.setattr(Catalog, "find", find_once_unknown(Catalog.find))
        parts.inference.submit(step(1, start=True)).cancel()
        looks[0]()
    assert 0 == parts.inference.in_flight
    assert 2 == total(await parts.inference.submit(step(2, 2, start=True, end=True)))
    assert 1 == len(executor.received)


@pytest.mark.parametrize("fields", [{"model": "nobody"}, {"tenant": "acme"}])
@pytest.mark.settings(request_timeout_ms=600_000)
async def test_nothing_is_kept_of_requests_whose_callers_have_left(
    parts: GatewayParts,
    executor: FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, str],
) -> None:
    """Else a client that sends and leaves again and again would fill the gateway: such requests count no longer."""
    waits, before = list[tuple[Any, ...]](), parts.inference.budget.taken

    def wait(*given: Any) -> None:
        waits.append(given)

    looks_that_wait(monkeypatch)
    monkeypatch.setattr(Allowances, "enter", wait)
    inputs = step(1).inputs
    references = sys.getrefcount(inputs)
    for _ in range(10):
        parts.inference.submit(msgspec.structs.replace(step(1, start=True), inputs=inputs, **fields)).cancel()
    await asyncio.sleep(0)

    assert before == parts.inference.budget.taken
    assert references == sys.getrefcount(inputs)


@pytest.mark.settings(request_timeout_ms=600_000)
async def test_a_request_that_was_held_has_no_more_time_for_its_answer_than_others(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await executor.pause()
    looks = looks_that_wait(monkeypatch)
    monkeypatch.setattr(Catalog, "find", find_once_unknown(Catalog.find))
    held = parts.inference.submit(step(1, start=True))
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 601, time_ns=time.time_ns)
    monkeypatch.setattr(inference, "time", later)
    looks[0]()

    with pytest.raises(UnavailableError, match="600000 ms were over before the request was sent: send it again"):
        await held
    executor.paused.clear()


async def test_a_tenants_request_that_is_let_in_is_answered(
    parts: GatewayParts, keys: Keyspace, executor: FakeExecutor
) -> None:
    await StoredTenants(executor.redis, keys).set("acme", TenantLimits(steps_per_s=1000.0))
    await parts.tenants.refresh()
    of_acme = msgspec.structs.replace(step(1, start=True, end=True), tenant="acme")

    assert 1 == total(await parts.inference.submit(of_acme))


async def test_what_was_never_sent_is_told_so_when_the_gateway_gives_up(
    parts: GatewayParts, keys: Keyspace, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await StoredTenants(executor.redis, keys).set("acme", TenantLimits(steps_per_s=1.0))
    await parts.tenants.refresh()
    monkeypatch.setattr(Catalog, "ask", never)
    parts.inference.submit(InferCall("not_there_yet")).cancel()
    held = parts.inference.submit(InferCall("not_there_yet"))
    too_fast = parts.inference.submit(msgspec.structs.replace(step(1, start=True), tenant="acme"))
    looked_for = asyncio.create_task(parts.inference.look_up("not_there_yet", ""))
    await asyncio.sleep(0)
    parts.inference.give_up("the gateway has stopped")

    for future in (held, too_fast, looked_for):
        with pytest.raises(UnavailableError, match="the gateway has stopped before the request was sent"):
            await future
    # What the tenant may send is told too late, and changes nothing.
    while parts.inference.in_flight > 2:
        await asyncio.sleep(0)
    assert [] == executor.received

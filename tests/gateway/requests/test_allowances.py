"""Which requests of a tenant enter, in which order, and how often Redis is asked."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as LostError

from gateway.requests.allowances import TENANTS_MAX, Allowances
from shared.contract.errors import Code, MeshError, Reason, SequenceError
from shared.contract.tenants import EVERY_OTHER, TenantLimits, Tenants
from shared.store.script_values import Drawn

Entered = list[tuple[int, MeshError | None]]


class Server:
    """Grants at most `left` requests in all; with `lost` it is away, with `broken` it answers nonsense.

    asked  how many it was asked for
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self.lost = self.broken = False
        self.asked: list[int] = []
        self.open = asyncio.Event()
        self.open.set()

    async def draw(self, tenant: str, limits: TenantLimits, wanted: int) -> Drawn:
        self.asked.append(wanted)
        await self.open.wait()
        if self.lost:
            raise LostError
        if self.broken:
            raise ValueError
        granted = min(wanted, self.left)
        self.left -= granted
        return Drawn(granted, 250_001)


def send(gate: Allowances, entered: Entered, tenant: str, *numbers: int) -> None:
    """Requests of a tenant, which are noted by number when it is decided upon them."""
    for number in numbers:
        gate.enter(tenant, lambda refusal, number=number: entered.append((number, refusal)))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def allowances(server: Server, **named: TenantLimits) -> Allowances:
    return Allowances(lambda: Tenants(named), server.draw)


async def test_a_tenant_without_a_rate_enters_at_once() -> None:
    server, entered = Server(0), Entered()
    gate = allowances(server, acme=TenantLimits(live_max=1))
    send(gate, entered, "acme", *range(3))

    assert [(0, None), (1, None), (2, None)] == entered
    assert [] == server.asked


async def test_requests_enter_in_their_order_and_those_too_many_hear_when_to_come_back() -> None:
    server, entered = Server(2), Entered()
    gate = allowances(server, acme=TenantLimits(steps_per_s=10))
    send(gate, entered, "acme", *range(3))
    assert [] == entered and 3 == len(gate)
    await settle()

    assert [0, 1, 2] == [number for number, _ in entered]
    assert [None, None] == [refusal for _, refusal in entered[:2]]
    refusal = entered[2][1]
    assert isinstance(refusal, SequenceError)
    assert (Reason.QUOTA, Code.RESOURCE_EXHAUSTED, 1) == (refusal.reason, refusal.code, refusal.retry_after_s)
    assert {"reason": "quota", "retry": "same", "wait_ms": 251} == refusal.facts
    assert refusal.message == "tenant 'acme' sends more than the 10 requests a second that it may: try again later"
    assert 0 == len(gate)


async def test_a_fast_tenant_draws_ahead_and_later_requests_ask_nobody() -> None:
    server, entered = Server(1000), Entered()
    gate = allowances(server, acme=TenantLimits(steps_per_s=500))
    send(gate, entered, "acme", 0)
    await settle()
    send(gate, entered, "acme", *range(1, 12))

    assert [11] == server.asked[:1]
    assert list(range(11)) == [number for number, _ in entered]
    await settle()
    assert list(range(12)) == [number for number, _ in entered]
    assert 2 == len(server.asked)


async def test_nobody_overtakes_those_who_wait_and_other_tenants_do_not_wait() -> None:
    server, entered = Server(1000), Entered()
    gate = allowances(server, acme=TenantLimits(steps_per_s=1000))
    server.open.clear()
    send(gate, entered, "acme", 0)
    await settle()
    send(gate, entered, "acme", 1)
    send(gate, entered, "blue", 2)
    assert [(2, None)] == entered
    server.open.set()
    await settle()

    assert [2, 0, 1] == [number for number, _ in entered]
    assert {None} == {refusal for _, refusal in entered}


async def test_without_redis_everybody_enters() -> None:
    server, entered = Server(0), Entered()
    server.lost = True
    gate = allowances(server, acme=TenantLimits(steps_per_s=1))
    send(gate, entered, "acme", *range(2))
    await settle()

    assert [(0, None), (1, None)] == entered


async def test_a_rate_that_is_taken_back_holds_nobody_up() -> None:
    server, entered = Server(1), Entered()
    named = {"acme": TenantLimits(steps_per_s=1)}
    gate = Allowances(lambda: Tenants(named), server.draw)
    send(gate, entered, "acme", 0)
    await settle()
    named = {}
    send(gate, entered, "acme", 1, 2)

    assert [(0, None), (1, None), (2, None)] == entered


async def test_made_up_names_take_no_memory_and_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    server, entered = Server(10**9), Entered()
    gate = Allowances(lambda: Tenants({"acme": TenantLimits(), EVERY_OTHER: TenantLimits(steps_per_s=5)}), server.draw)
    for number in range(TENANTS_MAX + 50):
        send(gate, entered, f"made-up-{number}", number)
        await settle()

    assert TENANTS_MAX + 50 == len(entered)
    assert TENANTS_MAX + 1 >= len(gate._known)
    assert ("acme", EVERY_OTHER) == (gate.counted_as("acme"), gate.counted_as("made-up-7"))


async def test_who_was_quiet_for_longest_is_forgotten_and_who_sends_is_not() -> None:
    server, entered = Server(10**9), Entered()
    gate = Allowances(lambda: Tenants({EVERY_OTHER: TenantLimits(steps_per_s=5)}), server.draw)
    send(gate, entered, "busy", 0)
    busy = gate._known["busy"]
    for number in range(1, 2 * TENANTS_MAX):
        send(gate, entered, "busy" if not number % 100 else f"made-up-{number}", number)
        await settle()

    assert busy is gate._known["busy"]
    assert "made-up-1" not in gate._known


async def test_more_tenants_than_are_remembered_may_wait_at_once() -> None:
    server, entered = Server(10**9), Entered()
    gate = Allowances(lambda: Tenants({EVERY_OTHER: TenantLimits(steps_per_s=5)}), server.draw)
    for number in range(TENANTS_MAX + 2):
        send(gate, entered, f"made-up-{number}", number)
    assert TENANTS_MAX + 2 == len(gate)
    await settle()

    assert {(number, None) for number in range(TENANTS_MAX + 2)} == {*entered}


async def test_those_who_wait_are_counted_without_a_look_at_the_tenants() -> None:
    """Each request to the gateway asks for the number, also one without a tenant."""
    server, entered = Server(1), Entered()
    gate = Allowances(lambda: Tenants({EVERY_OTHER: TenantLimits(steps_per_s=1)}), server.draw)
    for number in range(3):
        send(gate, entered, f"made-up-{number}", number)
    gate._known.clear()

    assert 3 == len(gate)
    await settle()
    assert (3, 0) == (len(entered), len(gate))


async def test_requests_whose_allowance_cannot_be_read_are_answered_and_later_ones_enter() -> None:
    server, entered = Server(9), Entered()
    gate = allowances(server, acme=TenantLimits(steps_per_s=1))
    server.broken = True
    send(gate, entered, "acme", *range(2))
    await settle()
    server.broken = False
    send(gate, entered, "acme", 2)
    await settle()

    assert [0, 1, 2] == [number for number, _ in entered]
    assert [Code.INTERNAL] * 2 == [refusal.code for _, refusal in entered if refusal is not None]
    assert 0 == len(gate)


async def test_those_who_wait_when_the_gateway_gives_up_are_told_that_they_were_not_sent() -> None:
    server, entered = Server(9), Entered()
    server.open.clear()
    gate = allowances(server, acme=TenantLimits(steps_per_s=1), blue=TenantLimits(steps_per_s=1))
    for number, tenant in enumerate(("acme", "acme", "blue")):
        send(gate, entered, tenant, number)
    await settle()

    gate.give_up("the gateway has stopped")

    told = [(number, str(refusal)) for number, refusal in entered]
    assert [
        (number, "the gateway has stopped before the request was sent: send it again") for number in range(3)
    ] == told
    server.open.set()
    await settle()
    assert 0 == len(gate), "the draws that were under way end"

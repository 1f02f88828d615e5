"""Tenants in the scripts: whose a sequence is, how many a tenant has, and how many requests it may send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from scheduler.ingest import Source, StreamEntry, StreamKind, waiting
from shared.contract.errors import Reason
from shared.contract.ids import ExecutorId, ShardId
from shared.contract.messages import ExecutorRegistration, ReplyMessage, ServedModel, StepFlag, encode
from shared.contract.record import CANCELLED
from shared.contract.tenants import EVERY_OTHER, NO_LIMITS, TenantLimits, Tenants
from shared.store import reading
from shared.store.membership import Membership
from shared.store.script_values import Ending, LedShard, SubmitCode, Submitted
from shared.store.sequence_status import Wanted
from shared.store.sequences import Sequences
from shared.store.tenants import TOLD_MAX, KnownTenants, StoredTenants
from tests.scripted_mesh import ScriptedMesh

ALICE = ExecutorId("alice-1")
ONE = {"INPUT": np.ones((1, 1), np.int32)}
SHARD = ShardId(0)
pytestmark = pytest.mark.leaves_sequences


async def begin(mesh: ScriptedMesh, name: int | str, tenant: str = "acme", at_most: int = 0) -> Submitted:
    submission = mesh.submission(name, ONE, StepFlag.START | StepFlag.PAGEABLE)
    return await mesh.submit(msgspec.structs.replace(submission, tenant=tenant, tenant_max=at_most))


async def members(mesh: ScriptedMesh, tenant: str = "acme") -> set[str]:
    return {name.decode() for name in await mesh.redis.smembers(mesh.keys.tenant(SHARD, tenant))}


async def test_a_sequence_is_the_tenant_s_of_its_first_step_until_it_is_over(mesh: ScriptedMesh) -> None:
    assert SubmitCode.WAITING is (await begin(mesh, 1)).code
    step = msgspec.structs.replace(mesh.submission(1, ONE), tenant="blue")
    await mesh.submit(step)

    assert {mesh.sequence(1)} == await members(mesh)
    assert set() == await members(mesh, "blue")
    assert b"acme" == await mesh.redis.hget(mesh.keys.sequence(mesh.sequence(1)).record, "tn")


async def test_a_tenant_begins_no_more_than_it_may_and_its_steps_and_retries_go_on(mesh: ScriptedMesh) -> None:
    for name in (1, 2):
        assert SubmitCode.WAITING is (await begin(mesh, name, at_most=2)).code
    refused = await begin(mesh, 3, at_most=2)

    assert (SubmitCode.QUOTA, 0) == (refused.code, refused.step)
    assert not await mesh.redis.exists(mesh.keys.sequence(mesh.sequence(3)).record)
    step = msgspec.structs.replace(mesh.submission(1, ONE, expected_step=2), tenant="acme", tenant_max=2)
    assert SubmitCode.WAITING is (await mesh.submit(step)).code
    assert SubmitCode.JOINED is (await mesh.submit(msgspec.structs.replace(step, token="again"))).code
    assert SubmitCode.WAITING is (await begin(mesh, 3, "blue", at_most=2)).code
    assert SubmitCode.WAITING is (await begin(mesh, 4, "")).code


async def ended_by_its_step(mesh: ScriptedMesh) -> None:
    await mesh.assign(1, ALICE)
    await mesh.commit(1, ALICE)
    await mesh.submit(mesh.submission(1, ONE, StepFlag.END))
    await mesh.commit(1, ALICE)


async def refused_while_it_waits(mesh: ScriptedMesh) -> None:
    await mesh.scripts.run(
        mesh.scripts.end([Ending(mesh.sequence(1))], tombstone=CANCELLED, reply=encode(ReplyMessage("")))
    )


async def not_readable_any_more(mesh: ScriptedMesh) -> None:
    await mesh.redis.hset(mesh.keys.sequence(mesh.sequence(1)).record, "nx", "garbage")
    await mesh.submit(mesh.submission(1, ONE))


async def idle_for_too_long(mesh: ScriptedMesh) -> None:
    await mesh.assign(1, ALICE)
    await mesh.commit(1, ALICE)
    await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(1)).idle)
    led = LedShard(SHARD, mesh.model, mesh.term)
    assert [True] == await mesh.scripts.run(mesh.scripts.expire([mesh.sequence(1)], led, tombstone_ms=10_000))


ENDS = (ended_by_its_step, refused_while_it_waits, not_readable_any_more, idle_for_too_long)


@pytest.mark.parametrize("ends", ENDS, ids=lambda ends: ends.__name__)
async def test_a_sequence_that_is_over_counts_no_longer_and_another_may_begin(
    mesh: ScriptedMesh, ends: Callable[[ScriptedMesh], Coroutine[Any, Any, None]]
) -> None:
    await begin(mesh, 1)
    await ends(mesh)

    assert set() == await members(mesh)
    assert SubmitCode.WAITING is (await begin(mesh, 2, at_most=1)).code
    assert {mesh.sequence(2)} == await members(mesh)


async def test_what_is_no_sequence_of_the_tenant_makes_room(mesh: ScriptedMesh) -> None:
    await begin(mesh, 1)
    await mesh.redis.sadd(mesh.keys.tenant(SHARD, "acme"), "sum||i98", "garbage")

    assert SubmitCode.WAITING is (await begin(mesh, 2, at_most=2)).code
    assert {mesh.sequence(1), mesh.sequence(2)} == await members(mesh)
    assert SubmitCode.QUOTA is (await begin(mesh, 3, at_most=2)).code


async def test_a_set_of_another_type_is_removed_and_no_client_notices(mesh: ScriptedMesh) -> None:
    await mesh.redis.set(mesh.keys.tenant(SHARD, "acme"), "garbage")

    assert SubmitCode.WAITING is (await begin(mesh, 1, at_most=1)).code
    assert {mesh.sequence(1)} == await members(mesh)


async def test_every_entry_by_which_a_sequence_waits_names_its_tenant(mesh: ScriptedMesh) -> None:
    async def last_entry() -> str:
        ((entry, fields),) = await mesh.redis.xrevrange(mesh.keys.starts(SHARD, "sum"), count=1)
        return waiting(StreamEntry(Source(StreamKind.STARTS, SHARD), entry, fields)).tenant

    await begin(mesh, 1)
    assert "acme" == await last_entry()
    await mesh.assign(1, ALICE)
    await mesh.take_over(ALICE)
    assert "acme" == await last_entry()


async def test_a_list_shows_whose_sequences_are_and_a_copy_is_the_tenant_s_too(mesh: ScriptedMesh) -> None:
    served = ServedModel("sum", "1", instances=1, slots=8, pageable=True, idle_ms=60_000)
    about = ExecutorRegistration(ALICE, "alice", host="", pid=1, started_ms=0, models=(served,))
    membership = Membership(mesh.redis, mesh.keys)
    await membership.register(about, lease_ms=60_000)
    sequences = Sequences(mesh.redis, mesh.keys, membership)
    for name, tenant in ((1, "acme"), (2, "")):
        await begin(mesh, name, tenant)
        await mesh.assign(name, ALICE, slot=name)
        await mesh.commit(name, ALICE)
    await sequences.fork(mesh.sequence(1), mesh.sequence(7))

    shown, _ = await sequences.page("sum", Wanted(tenant="acme"))
    assert [(1, "acme"), (7, "acme")] == [(one.id, one.tenant) for one in shown]
    assert {mesh.sequence(1), mesh.sequence(7)} == await members(mesh)


# -- requests a second -----------------------------------------------------------------------------------------------


async def draw(mesh: ScriptedMesh, wanted: int, limits: TenantLimits) -> tuple[int, int]:
    drawn = await mesh.scripts.run(mesh.scripts.draw("acme", limits, wanted))
    return drawn.granted, drawn.next_us


async def test_a_tenant_gets_a_burst_at_once_and_then_what_its_rate_gives(mesh: ScriptedMesh) -> None:
    # So slow that nothing comes back while the test runs.
    slow = TenantLimits(steps_per_s=0.001, burst=3)

    assert (2, 0) == await draw(mesh, 2, slow)
    granted, next_us = await draw(mesh, 2, slow)
    assert 1 == granted and 900e6 < next_us <= 1000e6
    assert 0 == (await draw(mesh, 1, slow))[0]
    assert 0 < await mesh.redis.pttl(mesh.keys.allowance("acme")) <= 3000_000


async def test_what_a_slow_rate_took_does_not_hold_up_a_fast_one(mesh: ScriptedMesh) -> None:
    await draw(mesh, 9, TenantLimits(steps_per_s=0.001, burst=9))
    granted, next_us = await draw(mesh, 1, TenantLimits(steps_per_s=100.0))

    assert 0 == granted and next_us <= 10_000
    assert await mesh.redis.pttl(mesh.keys.allowance("acme")) <= 1_000, "a burst of the fast one is all that is owed"


async def test_a_clock_that_was_set_back_costs_a_tenant_a_burst_and_no_more(mesh: ScriptedMesh) -> None:
    limits, (seconds, _) = TenantLimits(steps_per_s=1000.0, burst=5), await mesh.redis.time()
    await mesh.redis.set(mesh.keys.allowance("acme"), (seconds + 3600) * 1_000_000, px=3_600_000)

    async with asyncio.timeout(60):
        while not (await draw(mesh, 1, limits))[0]:
            pass


async def test_a_garbled_allowance_is_none(mesh: ScriptedMesh) -> None:
    for garbage in ("x", "-5", "1e300", "nan"):
        await mesh.redis.set(mesh.keys.allowance("acme"), garbage)
        assert 1 <= (await draw(mesh, 5, TenantLimits(steps_per_s=0.001, burst=5)))[0] or garbage == "1e300"


# -- what the operator sets ------------------------------------------------------------------------------------------


async def test_a_process_knows_the_limits_that_were_set_and_garbage_is_left_out(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "found", reading.Found())
    stored = StoredTenants(mesh.redis, mesh.keys)
    known = KnownTenants(stored)
    limits = TenantLimits(live_max=7, share=3)
    await stored.set("acme", limits)
    await stored.set(EVERY_OTHER, TenantLimits(live_max=1))
    for name, garbage in (("blue", b"\xff"), ("corp", b'{"share":0}'), ("dull", b'{"live_max":"many"}')):
        await mesh.redis.hset(mesh.keys.tenants, name, garbage)
    await known.refresh()

    assert Tenants({"acme": limits, EVERY_OTHER: TenantLimits(live_max=1)}) == known.now
    assert 3 == reading.found.counts["tenants"]
    assert (limits, TenantLimits(live_max=1)) == (known.now.of("acme"), known.now.of("blue"))
    assert {"acme": 3} == known.now.shares
    assert await stored.remove("acme") and not await stored.remove("acme")
    await mesh.redis.delete(mesh.keys.tenants)
    await known.refresh()
    assert NO_LIMITS == known.now.of("acme")
    assert Reason.QUOTA in set(Reason)


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines about limits."""
    return [vars(record)["fields"] for record in caplog.records if record.getMessage() == "limits of tenants"]


async def test_limits_are_read_anew_and_told_when_they_have_changed_and_only_those(
    mesh: ScriptedMesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stored = StoredTenants(mesh.redis, mesh.keys)
    known = KnownTenants(stored)
    for number in range(2 * TOLD_MAX):
        await stored.set(f"tenant{number:02d}", TenantLimits(live_max=5))
    await known.refresh()
    first = known.now
    for _ in range(3):
        await known.refresh()
    assert first is known.now
    assert [(2 * TOLD_MAX, 2 * TOLD_MAX, TOLD_MAX)] == [
        (line["tenants"], line["changed"], line["limits"].count("tenant")) for line in told(caplog)
    ]

    caplog.clear()
    await stored.set("tenants", TenantLimits(live_max=7))
    await stored.remove("tenant00")
    await known.refresh()
    assert [
        {"tenants": 2 * TOLD_MAX, "changed": 2, "limits": "tenant00: share 1; tenants: live_max 7, share 1"}
    ] == told(caplog)

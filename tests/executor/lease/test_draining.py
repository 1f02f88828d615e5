"""An executor that an operator has drained says so, with what makes it serve again."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from redis.exceptions import NoPermissionError

from executor.lease.draining import Draining
from shared.contract.ids import ExecutorId
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership


@pytest.mark.parametrize(
    ("lost_calls", "loss"), [(0, None), (3, ConnectionError("not yet")), (3, NoPermissionError("not now"))]
)
@pytest.mark.parametrize("who", ["executor-1", "executor-1-ab"])
async def test_a_drained_process_warns_with_the_name_under_which_it_serves_again(
    redis: Redis,
    key_prefix: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    who: str,
    lost_calls: int,
    loss: Exception | None,
) -> None:
    """The launcher shows warnings on its terminal: else nobody hears why no gateway becomes ready."""
    membership, is_drained, lost = Membership(redis, Keyspace(key_prefix)), Membership.is_drained, count()

    async def asked(membership: Membership, *names: str) -> bool:
        if next(lost) < lost_calls:
            assert loss is not None
            raise loss
        return await is_drained(membership, *names)

    monkeypatch.setattr(Membership, "is_drained", asked)
    await membership.drain(who, 1)
    draining = Draining(membership, "executor-1", period_s=0)
    draining.executor = ExecutorId("executor-1-ab")

    waiting = asyncio.create_task(draining.over())
    while not caplog.records:
        await asyncio.sleep(0)
    await membership.undrain(who)
    await waiting

    fields = [(record.levelname, vars(record)["fields"]) for record in caplog.records]
    assert [("WARNING", {"executor": who, "remedy": f"seqmesh drain {who} --undo"})] == fields


async def test_a_process_that_is_not_drained_warns_of_nothing(
    redis: Redis, key_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    await Draining(Membership(redis, Keyspace(key_prefix)), "executor-1", period_s=0).over()

    assert [] == caplog.records

"""Moves that an operator wants, by a scheduler on a real server."""

from __future__ import annotations

import pytest

from scheduler.service import Scheduler
from shared.ids import ExecutorId, SequenceId, sequence_id
from tests.scheduler.stage import MODEL, Stage


@pytest.mark.leaves_sequences
async def test_a_wish_for_a_move_outlives_the_leader_and_goes_when_it_has_come_true(stage: Stage) -> None:
    """Also when nobody leads as it is written, and though the sequence has a step in flight at first."""
    executors = [await stage.join(name) for name in ("e1", "e2")]
    async with stage.scheduler():
        await stage.submit(7, start=True)
        (record,) = await stage.live(7)
    owner = ExecutorId(record["ow"])
    sequence = sequence_id(MODEL, "", 7)
    starts = stage.keys.starts(stage.keys.shard_of(sequence), MODEL)
    await stage.commands.xadd(starts, {"k": "v", "q": sequence, "x": ""})

    async with stage.scheduler(name="s2") as second:
        await stage.until(lambda: is_pursued(second, sequence))
        assert owner == (await stage.record(7))["ow"]
        await stage.commit(await stage.inbox(owner), owner)

        async def is_elsewhere() -> bool:
            return (await stage.record(7)).get("ow") not in (owner, None)

        await stage.until(is_elsewhere)

        async def is_dismissed() -> bool:
            return await stage.backlog_length() == 0

        await stage.until(is_dismissed)
    assert {(await stage.record(7))["ow"]} == {*executors} - {owner}
    assert "1" == (await stage.record(7))["cm"]


async def is_pursued(scheduler: Scheduler, sequence: SequenceId) -> bool:
    leader = scheduler.leaders.get(MODEL)
    known = leader.state.sequences.get(sequence) if leader else None
    return known is not None and known.times_kept > 0

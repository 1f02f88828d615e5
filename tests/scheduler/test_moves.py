"""Moves that an operator wants, by a scheduler on a real server."""

from __future__ import annotations

import pytest

from scheduler.service import Scheduler
from shared.contract.ids import ExecutorId, SequenceId, sequence_id
from tests.scheduler.stage import MODEL, Stage


@pytest.mark.leaves_sequences
async def test_a_wish_for_a_move_outlives_the_leader_and_goes_when_it_has_come_true(stage: Stage) -> None:
    """Also when nobody leads as it is written, and though the sequence has a step in flight at first."""
    executors = [await stage.join(name) for name in ("e1", "e2")]
    async with stage.scheduler():
        (record,) = await stage.begin(7)
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


@pytest.mark.leaves_sequences
async def test_a_paged_sequence_gets_a_slot_where_it_is_wished_and_nowhere_else(stage: Stage) -> None:
    sequences = [sequence_id(MODEL, "", number) for number in (1, 2, 3)]
    await stage.join("e1")
    async with stage.scheduler():
        await stage.begin(1, 2, 3, pageable=True)
        await stage.commit(await stage.inbox(ExecutorId("e1")), ExecutorId("e1"))
    for number in (1, 2, 3):
        await stage.page(number)
    await stage.join("e2")
    # The last one is over before anybody reads of the wish.
    await stage.commands.delete(stage.keys.sequence(sequences[2]).record)
    for sequence, to in zip(sequences, ("e2", "", "e2"), strict=True):
        await stage.commands.xadd(
            stage.keys.starts(stage.keys.shard_of(sequence), MODEL), {"k": "v", "q": sequence, "x": to}
        )

    async with stage.scheduler(name="s2"):

        async def is_dismissed() -> bool:
            return await stage.backlog_length() == 0

        await stage.until(is_dismissed)

    records = [await stage.record(number) for number in (1, 2)]
    assert [("l", "e2"), ("p", "e1")] == [(record["st"], record["ow"]) for record in records]


async def is_pursued(scheduler: Scheduler, sequence: SequenceId) -> bool:
    leader = scheduler.leaders.get(MODEL)
    known = leader.state.sequences.get(sequence) if leader else None
    return known is not None and known.times_stayed > 0

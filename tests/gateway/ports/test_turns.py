"""Connections that have much to do take turns."""

from __future__ import annotations

import asyncio
from functools import partial

from gateway.ports.turns import LoopTurns


async def test_one_connection_goes_on_in_each_turn_of_the_loop() -> None:
    turns, went = LoopTurns(), list[list[str]]()

    def go_on(name: str, times: int) -> None:
        went[-1].append(name)
        if times > 1:
            turns.wait(partial(go_on, name, times - 1))

    for name in "abc":
        turns.wait(partial(go_on, name, 2))
    while not went or went[-1]:
        went.append([])
        await asyncio.sleep(0)

    assert ["a", "b", "c", "a", "b", "c"] == [name for (name,) in went[:-1]]


async def test_who_does_not_wait_for_its_turn_any_more_takes_none() -> None:
    turns = LoopTurns()
    waiting = [asyncio.create_task(turns.turn()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.wait(waiting)

    assert [False, True, False] == [one.cancelled() for one in waiting]


async def test_turns_of_the_loop_are_told_apart() -> None:
    turns = LoopTurns()
    first = turns.number
    assert first == turns.number
    await asyncio.sleep(0)

    assert first != turns.number

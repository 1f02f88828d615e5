"""Connections that have much to do take turns."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from gateway.ports.turns import LoopTurns

MANY = 1000


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


async def test_clients_take_turns_in_which_connections_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a thousand connections, for all of which something has come at once, keeps another one from little."""
    monkeypatch.setattr("gateway.ports.turns.ENTERING_MAX", 2)
    monkeypatch.setattr("gateway.ports.turns.ENTERING_S", 1e9)
    turns, begun = LoopTurns(), list[str]()
    for number in range(MANY):
        turns.enter("many", partial(begun.append, f"many {number}"))
    assert ["many 0", "many 1"] == begun, "the others wait"

    turns.enter("one", partial(begun.append, "one"))
    await asyncio.sleep(0)
    turns.enter("many", partial(begun.append, "late"))
    assert ["many 2", "one"] == begun[2:]

    await asyncio.sleep(0)
    assert ["many 3", "many 4"] == begun[4:]
    while len(begun) < MANY + 2:
        await asyncio.sleep(0)
    assert "late" == begun[-1]


async def test_connections_that_take_long_to_begin_leave_the_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, begun = LoopTurns(), list[int]()
    clock = iter(range(MANY))
    monkeypatch.setattr("gateway.ports.turns.ENTERING_S", 3)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: next(clock))
    for number in range(9):
        turns.enter("a", partial(begun.append, number))
    assert [0, 1, 2] == begun
    await asyncio.sleep(0)
    monkeypatch.undo()

    assert [0, 1, 2, 3, 4] == begun


class Clock:
    """The loop's time, which goes on by what is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)
        monkeypatch.setattr("gateway.ports.turns.ENTERING_S", 3)
        monkeypatch.setattr("gateway.ports.turns.PAUSE_S", MANY)


async def test_connections_that_are_woken_together_go_on_while_the_turn_has_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others go on in later turns: each client's in the order in which they came, and the clients by turns."""
    turns, clock, went = LoopTurns(), Clock(monkeypatch), [list[str]()]

    async def go_on(name: str) -> None:
        await turns.entered(name[0])
        went[-1].append(name)
        clock.now += 2

    async with asyncio.TaskGroup() as tasks:
        for name in ("a0", "a1", "a2", "a3", "a4", "a5", "a6", "b0"):
            tasks.create_task(go_on(name))
        while sum(map(len, went)) < 8:
            await asyncio.sleep(0)
            went.append([])

    assert [["a0", "a1"], ["a2", "b0"], ["a3", "a4"], ["a5", "a6"]] == [names for names in went if names]


async def test_nobody_begins_before_those_that_are_woken_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, clock, went = LoopTurns(), Clock(monkeypatch), list[str]()

    async def go_on(name: str) -> None:
        await turns.entered("a")
        went.append(name)

    await go_on("first")
    clock.now += 3
    woken = asyncio.create_task(go_on("woken"))
    await asyncio.sleep(0)
    turns.wait(partial(turns.enter, "a", partial(went.append, "late")))
    await woken
    await asyncio.sleep(0)

    assert ["first", "woken", "late"] == went


async def test_a_failure_is_that_of_its_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ports.turns.ENTERING_MAX", 1)
    turns, failures = LoopTurns(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context["exception"]))
    failure = ValueError("one fails")

    def fail() -> None:
        raise failure

    await turns.entered("a")
    turns.enter("a", fail)
    await turns.entered("a")
    await turns.entered("b")

    assert [failure] == failures


async def test_who_does_not_wait_to_begin_any_more_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ports.turns.ENTERING_MAX", 1)
    turns = LoopTurns()
    waiting = [asyncio.create_task(turns.entered("a")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.wait(waiting)

    assert [False, True, False] == [one.cancelled() for one in waiting]

"""Looks for deadlocks, of several executors, over a real Redis."""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec
import pytest

from executor.calls.watch import DeadlockWatch, process_name
from shared.contract.calls import WaitingCall, WaitingCalls
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, ServedModel
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership

HERE = process_name(socket.gethostname(), os.getpid())
THERE = process_name("elsewhere", 7)
TTL_MS = 600_000
"""How long what a process has told counts here: longer than any test."""


class Failed:
    """Stands for the client: keeps the calls that were failed."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.text = ""

    def fail(self, number: int, text: str) -> None:
        self.numbers.append(number)
        self.text = text


class Connections:
    def __init__(self, redis: Any, keys: Keyspace) -> None:
        self.commands, self.keys, self.membership = redis, keys, Membership(redis, keys)


@pytest.fixture
async def connections(redis: Any, key_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Connections:
    """A mesh of two executors, with one instance of `a` here and one of `b` there."""
    monkeypatch.setattr("shared.store.waiting_calls.TTL_MS", TTL_MS)
    made = Connections(redis, Keyspace(key_prefix))
    for name, host, pid, model in (("here", socket.gethostname(), os.getpid(), "a"), ("there", "elsewhere", 7, "b")):
        registration = ExecutorRegistration(ExecutorId(name), name, host, pid, 0, (ServedModel(model, "1", 1, 0),))
        await made.membership.register(registration, lease_ms=60_000)
    return made


def watch_of(connections: Connections) -> tuple[DeadlockWatch, Failed]:
    failed: Any = Failed()
    stands_for: Any = connections
    return DeadlockWatch(failed, stands_for), failed


async def tell_there(connections: Connections, since_ms: int, *, age_ms: int = 0) -> None:
    seconds, _ = await connections.commands.time()
    line = WaitingCalls(seconds * 1000 - age_ms, (WaitingCall(since_ms, THERE, 1, "b/1", "b0", "a/1"),))
    await connections.commands.hset(connections.keys.calls, THERE, msgspec.json.encode(line))


OWN = WaitingCall(5, HERE, 9, "a/1", "a0", "b/")


async def test_the_youngest_call_fails_when_two_looks_have_seen_the_deadlock(connections: Connections) -> None:
    watch, failed = watch_of(connections)
    await tell_there(connections, 4)

    await watch.look([OWN])
    assert not failed.numbers
    await watch.look([OWN])
    assert [9] == failed.numbers
    assert "a -> b -> a" in failed.text
    assert 0 < await connections.commands.pttl(connections.keys.calls)


async def test_an_idle_version_beside_one_that_waits_answers_no_call_to_that(connections: Connections) -> None:
    """A call without a version goes to the highest one."""
    served = ServedModel("a", "2", 1, 0), ServedModel("b", "0", 1, 0)
    registration = ExecutorRegistration(ExecutorId("third"), "third", "third", 8, 0, served)
    await connections.membership.register(registration, lease_ms=60_000)
    watch, failed = watch_of(connections)
    await tell_there(connections, 4)

    for _ in range(3):
        await watch.look([msgspec.structs.replace(OWN, target="b/0")])
    assert not failed.numbers
    for _ in range(2):
        await watch.look([OWN])
    assert [9] == failed.numbers


async def test_another_executor_fails_its_own_call(connections: Connections) -> None:
    watch, failed = watch_of(connections)
    await tell_there(connections, 6)

    for _ in range(3):
        await watch.look([OWN])

    assert not failed.numbers


async def test_calls_that_come_and_go_are_no_deadlock(connections: Connections) -> None:
    watch, failed = watch_of(connections)
    await tell_there(connections, 4)

    for number in range(3):
        await watch.look([msgspec.structs.replace(OWN, number=number)])

    assert not failed.numbers


@pytest.mark.parametrize("case", ["late", "dead", "unreadable"])
async def test_who_is_not_there_waits_for_nothing(connections: Connections, case: str) -> None:
    watch, failed = watch_of(connections)
    await tell_there(connections, 4, age_ms=2 * TTL_MS if case == "late" else 0)
    if case == "dead":
        await connections.membership.give_up(ExecutorId("there"))
    elif case == "unreadable":
        await connections.commands.hset(connections.keys.calls, THERE, b"?")

    for _ in range(3):
        await watch.look([OWN])

    assert not failed.numbers


async def test_a_process_without_calls_says_nothing(connections: Connections) -> None:
    watch, _ = watch_of(connections)

    await watch.look([OWN])
    assert [HERE.encode()] == await connections.commands.hkeys(connections.keys.calls)
    await watch.look([])
    assert not await connections.commands.exists(connections.keys.calls)


async def test_the_line_of_a_killed_process_goes_while_others_renew_theirs(connections: Connections) -> None:
    watch, _ = watch_of(connections)
    await tell_there(connections, 4, age_ms=2 * TTL_MS)

    await watch.look([OWN])
    assert [HERE.encode()] == await connections.commands.hkeys(connections.keys.calls)

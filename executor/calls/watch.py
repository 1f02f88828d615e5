"""Looks once a second whether instances wait for each other for ever, and fails one of their calls.

Nearly all calls are answered before this module sees them. Those that have waited for a second are told to all
executors, through Redis. A deadlock stays as it is, so it counts when two looks in a row find it, with the same calls.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from executor.calls.client import CallClient
from executor.calls.deadlocks import error_text, find
from executor.connections import RedisConnections
from executor.engine.python.calls import waits
from shared.contract.calls import WaitingCall, version_name
from shared.process import logs
from shared.store.intervals import at_intervals
from shared.store.membership import Member
from shared.store.waiting_calls import forget_waiting, tell_waiting

LOOK_S = 1.0


class DeadlockWatch:
    """Tells the mesh which calls of this process wait, and fails one of those that wait for each other."""

    def __init__(self, client: CallClient, connections: RedisConnections) -> None:
        self._client = client
        self._connections = connections
        self._process = process_name(socket.gethostname(), os.getpid())
        self._told = False
        self._seen: frozenset[WaitingCall] = frozenset()

    async def run(self) -> None:
        """Looks for circles of waiting calls every `LOOK_S`, for ever."""
        await at_intervals(LOOK_S, lambda: self.look(self._old_waits()), "look for deadlocks delayed")

    def _old_waits(self) -> list[WaitingCall]:
        since_ms = time.time_ns() // 1_000_000 - int(LOOK_S * 1000)
        return [
            WaitingCall(wait.since_ms, self._process, wait.number, wait.caller, wait.instance, wait.target)
            for wait in waits()
            if wait.since_ms <= since_ms
        ]

    async def look(self, own: Sequence[WaitingCall]) -> None:
        """One look. own: calls of this process that have waited for a while"""
        redis, keys = self._connections.commands, self._connections.keys
        if not own:
            if self._told:
                await forget_waiting(redis, keys, self._process)
                self._told = False
            self._seen = frozenset()
            return
        self._told = True
        members = [member for member in await self._connections.membership.members() if member.alive]
        instances = instances_of(members)
        everyone = await tell_waiting(redis, keys, self._process, [_to_a_version(one, instances) for one in own])
        alive = {process_name(member.registration.host, member.registration.pid) for member in members}
        deadlock = find([call for call in everyone if call.process in alive], instances)
        before, self._seen = self._seen, deadlock.calls if deadlock is not None else frozenset()
        if deadlock is not None and deadlock.calls <= before and deadlock.victim.process == self._process:
            text = error_text(deadlock)
            logs.warning("models wait for each other, one call fails", instance=deadlock.victim.instance, cause=text)
            self._client.fail(deadlock.victim.number, text)


def process_name(host: str, pid: int) -> str:
    """The name of an executor's process among all of the mesh."""
    return f"{host}/{pid}"


def instances_of(members: Sequence[Member]) -> Counter[str]:
    """How many instances each version of a model has."""
    count: Counter[str] = Counter()
    for member in members:
        for served in member.registration.models:
            count[version_name(served.model, served.version)] += served.instances
    return count


def _to_a_version(call: WaitingCall, instances: Mapping[str, int]) -> WaitingCall:
    """The call with the version that serves it: where it names none, the highest one, as in every gateway."""
    model, _, version = call.target.partition("/")
    if version or not model:
        return call
    served = (int(name.removeprefix(call.target)) for name in instances if name.startswith(call.target))
    return msgspec.structs.replace(call, target=version_name(model, str(max(served, default=""))))

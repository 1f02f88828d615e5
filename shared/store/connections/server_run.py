"""Binds a process's connections to one run of the Redis server.

A server that was restarted, or replaced by its replica, may hold older data than it has acknowledged: the append-only
file is written once a second, and a replica lags. A service that went on with what it knew would commit steps that were
never accepted, or wait for answers that will never come. So a service's connections are bound to one run of the server.
They do not open to another run until the service has compared what it knows with what that server holds, and has agreed
to go on there.

Of a Cluster, each home (`shared.store.connections.homes`) is a server with a run of its own.

Nor does anything that the earlier run says count from then on: a primary that was frozen while another one took its
place wakes up, carries out what lies in its sockets, and answers. So the connections to a run are cut when another one
is met.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol
from weakref import WeakSet

from redis.exceptions import ConnectionError as RedisConnectionError


class AnotherRunError(RedisConnectionError):
    """The server was restarted or replaced. Nothing was sent to it."""


class BoundConnection(Protocol):
    """A connection, as the run that it is bound to sees it."""

    def cut(self) -> None:
        """Ends the connection at once: what it waits for is lost, and its next use connects anew."""


class ServerRun:
    """The run that connections are bound to: the first one that they meet, until the service agrees to another.

    met      the run that was met last, of each home
    others   the homes of which another run was met that the service has not agreed to
    changed  set while there are such homes
    """

    def __init__(self) -> None:
        self.bound: dict[str, str] = {}
        self.met: dict[str, str] = {}
        self.others: set[str] = set()
        self.changed = asyncio.Event()
        self._connections: defaultdict[str, WeakSet[BoundConnection]] = defaultdict(WeakSet)
        """Those to the bound run of each home; and those that have ended, until they are used or collected."""

    def meet(self, run: str, connection: BoundConnection, home: str = "") -> None:
        """A connection has been made to this run. Raises AnotherRunError if it is not the bound run; the connections to
        that one are cut.

        run   the server's process and its time as a primary (INFO's run_id, master_replid); "" if the server does not
              tell
        home  of a Cluster
        """
        self.met[home] = run
        if not self.bound.get(home):
            self.bound[home] = run
        if run == self.bound[home]:
            self._connections[home].add(connection)
        else:
            self.others.add(home)
            self.changed.set()
            self._cut(home)
            raise AnotherRunError("Redis was restarted or replaced: what it holds is compared first")

    def hold_off(self, home: str) -> None:
        """The home is away. Whatever run is met there is another one, to which the service has yet to agree."""
        self.bound[home] = "none"

    def agree(self, runs: Mapping[str, str]) -> None:
        """The service goes on with these runs of the homes."""
        for home, run in runs.items():
            if run != self.bound.get(home):
                # Some may have been made since the other run was met: where Sentinels disagree, say.
                self._cut(home)
        self.bound |= runs
        self.others.difference_update(runs)
        if not self.others:
            self.changed.clear()

    def _cut(self, home: str) -> None:
        for connection in self._connections.pop(home, ()):
            connection.cut()

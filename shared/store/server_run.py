"""Which run of the Redis server a process's picture of the mesh was taken from.

A server that was restarted, or replaced by its replica, may hold older data than it acknowledged: the append-only file
is written out once a second, a replica lags. Whoever goes on with what it knew would then commit steps that were never
accepted, or wait for answers that nobody owes any more. So a service's connections are bound to one run of the server:
to another one they do not open, until the service has compared what it knows with what that server holds, and has
agreed to go on there.
"""

from __future__ import annotations

import asyncio

from redis.exceptions import ConnectionError as RedisConnectionError


class AnotherRunError(RedisConnectionError):
    """The server was restarted or replaced. Nothing was sent to it."""


class ServerRun:
    """The run that connections are bound to: the first one they meet, until another is agreed to.

    changed  set while another run was met and not agreed to
    met      the one that was met last
    """

    def __init__(self) -> None:
        self.bound = ""
        self.met = ""
        self.changed = asyncio.Event()

    def meet(self, run: str) -> None:
        """A connection has been made to this run. Raises AnotherRunError when it is not the one that is bound to.

        run  the server's process and its time as a primary (INFO's run_id, master_replid); "" where it does not tell
        """
        self.met = run
        self.bound = self.bound or run
        if run != self.bound:
            self.changed.set()
            raise AnotherRunError("Redis was restarted or replaced: what it holds is compared first")

    def agree(self, run: str) -> None:
        """Goes on with that run."""
        self.bound = run
        self.changed.clear()

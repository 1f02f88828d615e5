"""The executors as a scheduler sees them: one poll at a time, for all of its loops and leaders.

What a poll costs grows with the number of models. So leaders that rebuild at the same moment share a poll.
"""

from __future__ import annotations

import asyncio

from scheduler.ingest import Poll
from shared.store.membership import Membership


class Polls:
    """latest  what the last poll brought"""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._polling = asyncio.Lock()
        self._begun = 0
        self._ended = 0
        self._now_ms = 0
        self.latest = Poll(())

    async def next(self) -> tuple[Poll, int]:
        """A poll that begins after this call, and the clock of Redis then, ms. Calls that come while another poll is
        under way share the next one. While no executor changes, every poll is the same object.

        Raises one of `redis_py.CONNECTION_LOST`.
        """
        wanted = self._begun + 1
        async with self._polling:
            if self._ended < wanted:
                self._begun = number = self._begun + 1
                members, self._now_ms = await self._membership.look()
                if members != self.latest.members:
                    self.latest = Poll(members)
                self._ended = number
            return self.latest, self._now_ms

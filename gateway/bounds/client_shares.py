"""Divides a bound among clients: however much one of them has, another one finds room.

A client may have only a part of what the others leave. So it need not be known who will come, or how many: where N
clients take all they can get and leave 1/P of that, 1/(1 + N * (P - 1)) of the bound is free for a newcomer.

Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (1998).
"""

from __future__ import annotations

OTHERS_PART, SMALL_OTHERS_PART = 8, 64
"""What a client leaves of what it could have: an eighth. A small request may take more, but for an eighth of that
again. No more of it: behind a proxy all clients are one."""


class ClientShares:
    """What clients have of a bound. The client "" is the gateway itself, which may have all of it."""

    def __init__(self) -> None:
        self.taken = 0
        """What all clients together have."""
        self._of: dict[str, int] = {}

    def of(self, client: str) -> int:
        return self._of.get(client, 0)

    def most(self, client: str, room: int, *, is_small: bool) -> int:
        """What the client may have, of a bound that has room for so much.

        is_small  what it asks for: it may have a little more of it
        """
        left = room - (self.taken - self.of(client))
        return left - left // (SMALL_OTHERS_PART if is_small else OTHERS_PART) if client else left

    def take(self, client: str, size: int) -> None:
        """Counts what the client has taken; negative if it gives it back."""
        self.taken += size
        if now := self._of.get(client, 0) + size:
            self._of[client] = now
        else:
            self._of.pop(client, None)

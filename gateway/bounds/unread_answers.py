"""Answers that their clients have not taken yet, of both protocols: they have a bound together.

Beyond it the client that has taken nothing for longest loses its connection, whoever the newcomer is: a client that
reads its answers is never the one. What it had asked for is done, and can be asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shared.process import logs

UNLIMITED = 1 << 62
MUCH_BYTES = 1 << 20
"""A client that keeps less than this waiting is left alone while memory is short."""


class UnreadAnswers:
    """Those of one gateway. bytes_max: of all answers; one that is larger is kept when it is alone."""

    def __init__(self, bytes_max: int) -> None:
        self.taken = 0
        self._bytes_max = bytes_max
        # By client, the one first that has taken nothing for longest: bytes, and what closes its connection.
        self._clients: dict[Hashable, tuple[int, Callable[[], None]]] = {}

    def add(self, client: Hashable, size: int, cut: Callable[[], None]) -> None:
        """An answer waits to be taken. cut: closes the client's connection, now."""
        before, _ = self._clients.get(client, (0, cut))
        self._clients[client] = (before + size, cut)
        self.taken += size
        while self.taken > self._bytes_max and len(self._clients) > 1:
            self._cut(next(iter(self._clients)))

    def took(self, client: Hashable, size: int) -> None:
        """The client has taken so much, or left it."""
        held, cut = self._clients.pop(client, (0, _nothing))
        self.taken -= min(size, held)
        if held > size:
            self._clients[client] = (held - size, cut)

    def relieve(self, excess: int) -> int:
        """Closes connections until so many bytes are given back; returns how many are."""
        given = 0
        for client, (size, _) in list(self._clients.items()):
            if given >= excess:
                break
            if size >= MUCH_BYTES:
                self._cut(client)
                given += size
        return given

    def _cut(self, client: Hashable) -> None:
        size, cut = self._clients.pop(client)
        self.taken -= size
        logs.warning("answers are not taken, their client's connection is closed", unread_bytes=size)
        cut()


def _nothing() -> None:
    pass

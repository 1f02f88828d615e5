"""Bounds the answers that clients have not read yet, of both protocols together.

At the bound, the client that has read nothing for the longest time loses its connection. A client that reads is never
the one. The requests of the lost connection were carried out; a repeatable one can be sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shared.process import logs

UNLIMITED = 1 << 62
MUCH_BYTES = 1 << 20
"""When memory is short, only clients with at least so many unread bytes lose their connection."""


class UnreadAnswers:
    """Counts the unread answers of one gateway. bytes_max: bound of all; a larger single answer is kept if alone."""

    def __init__(self, bytes_max: int) -> None:
        self.taken = 0
        self._bytes_max = bytes_max
        # Per client: its unread bytes, and the function that closes its connection. The client that has read nothing
        # for the longest time comes first.
        self._clients: dict[Hashable, tuple[int, Callable[[], None]]] = {}

    def add(self, client: Hashable, size: int, cut: Callable[[], None]) -> None:
        """Counts an answer that waits to be read. cut: closes the client's connection at once."""
        before, _ = self._clients.get(client, (0, cut))
        self._clients[client] = (before + size, cut)
        self.taken += size
        while self.taken > self._bytes_max and len(self._clients) > 1:
            self._cut(next(iter(self._clients)))

    def is_beyond(self, client: Hashable) -> bool:
        """Whether this client alone reaches the bound."""
        return client in self._clients and self._clients[client][0] > self._bytes_max

    def took(self, client: Hashable, size: int) -> None:
        """Counts bytes off: the client has read them, or has left. The client goes to the end of the order."""
        if client not in self._clients:
            return
        counted, cut = self._clients.pop(client)
        self.taken -= min(size, counted)
        if counted > size:
            self._clients[client] = (counted - size, cut)

    def relieve(self, excess: int) -> int:
        """Closes connections until so many bytes are free. Returns how many are."""
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

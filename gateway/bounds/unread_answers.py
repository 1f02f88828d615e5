"""Bounds the answers that clients have not read yet, of both protocols together.

At the bound, the client that has read nothing for the longest time loses its connection, of those that leave much
unread if there are any. A client that reads is never the one. The requests of the lost connection were carried out; a
repeatable one can be sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from shared.contract.tensors import Tensor
from shared.process import logs

UNLIMITED = 1 << 62
ENTRY_BYTES = 2048
"""Memory of an answer besides its tensors."""
MUCH_BYTES = 1 << 20
"""Unread bytes of a client that are much. When memory is short, no other client loses its connection."""


def answer_bytes(outputs: Iterable[Tensor]) -> int:
    """Memory that an answer takes with its outputs, bytes."""
    return ENTRY_BYTES + sum([len(output.raw) for output in outputs])


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
            # A connection through which another one's answers trickle holds little, and is not what fills the bound.
            much = (client for client, (unread, _) in self._clients.items() if unread >= MUCH_BYTES)
            self.cut(next(much, next(iter(self._clients))))

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
                self.cut(client)
                given += size
        return given

    def cut(self, client: Hashable) -> None:
        """Closes a client's connection, unless that was done before: what it has not read counts no longer."""
        if client not in self._clients:
            return
        size, cut = self._clients.pop(client)
        self.taken -= size
        logs.warning("answers are not taken, their client's connection is closed", unread_bytes=size)
        cut()

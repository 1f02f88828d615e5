"""A queue in which clients take turns: one with thousands of entries does not keep another one waiting for them all."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T")


class ClientQueue(Generic[T]):
    """Each client's entries leave in their order. A connection is one client's: what comes over it stays in order."""

    def __init__(self) -> None:
        self._of_clients: OrderedDict[str, deque[T]] = OrderedDict()
        """The client whose turn it is comes first. None is empty."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        """The next one first. Of the others each client's are in their order."""
        return chain.from_iterable(self._of_clients.values())

    def append(self, client: str, entry: T) -> None:
        self._count += 1
        waiting = self._of_clients.get(client)
        if waiting is None:
            self._of_clients[client] = deque((entry,))
        else:
            waiting.append(entry)

    def popleft(self) -> T:
        self._count -= 1
        client, waiting = self._of_clients.popitem(last=False)
        entry = waiting.popleft()
        if waiting:
            self._of_clients[client] = waiting
        return entry

    def clear(self) -> None:
        self._of_clients.clear()
        self._count = 0

"""Requests of one kind that wait for their round trip."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import chain

from gateway.requests.waiting import PendingRequest


class ClientQueue:
    """The clients take turns, and each client's requests leave in their order. So one that has sent thousands ahead
    keeps nobody else waiting for them all.

    A connection is one client's: what comes over it stays in order.
    """

    def __init__(self) -> None:
        self._of_clients: OrderedDict[str, deque[PendingRequest]] = OrderedDict()
        """The client whose turn it is comes first. None is empty."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PendingRequest]:
        """The next one first. Of the others each client's are in their order."""
        return chain.from_iterable(self._of_clients.values())

    def append(self, pending: PendingRequest) -> None:
        self._count += 1
        waiting = self._of_clients.get(pending.client)
        if waiting is None:
            self._of_clients[pending.client] = deque((pending,))
        else:
            waiting.append(pending)

    def popleft(self) -> PendingRequest:
        self._count -= 1
        client, waiting = self._of_clients.popitem(last=False)
        pending = waiting.popleft()
        if waiting:
            self._of_clients[client] = waiting
        return pending

    def replace(self, wanted: Iterable[PendingRequest]) -> None:
        """Has these wait in the place of all that does."""
        self._of_clients.clear()
        self._count = 0
        for pending in wanted:
            self.append(pending)

"""Bounds the connections of a port: a connection needs a seat. Pure: `now` is the loop's clock, in seconds.

A connection *waits* while it does not have the whole head of a request. It has just begun, a head is on its way, or it
is idle. When all seats are taken, the connection that has waited longest is ended for a new one. So clients that send
their heads slowly cannot keep others out: their own connections are the first to end.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

SETTLED_S = 1.0
"""How long a connection must have waited before it can be ended for a new one. Otherwise clients that start all at once
would end one another's new connections."""
IPV6_CLIENT_BITS = 64
"""Addresses with the same first 64 bits count as one client: a single machine may use all of them."""

FEW = 64
"""Connections of one client that wait and are left alone when memory is short: they take little of it, and the client
may be about to use them."""
OTHERS_PART = 8
"""An eighth of what a client could have is left to the others. No more of it: behind a proxy all clients are one."""


@dataclass(slots=True, eq=False)
class Seat:
    """One connection's seat in a share.

    since      when the connection began to wait
    until      when its client has to have sent a head
    end        ends the connection; set by the server that serves it
    """

    share: Share
    client: str
    since: float
    until: float
    is_waiting: bool = True
    end: Callable[[], object] = bool

    def wait(self, now: float, patience_s: float) -> None:
        """Notes that the connection waits for a request."""
        self.share.wait(self)
        self.since, self.until, self.is_waiting = now, now + patience_s, True

    def work(self) -> None:
        """Notes that the connection has a request: it cannot be ended for another one."""
        self.share.waiting.pop(self, None)
        self.is_waiting = False

    def leave(self) -> None:
        """Gives the seat back: the connection has ended or is about to. May be called twice."""
        self.share.leave(self)


class Share:
    """The seats for connections of one kind. connections_max: seats; per_client: seats of one client at most."""

    def __init__(self, connections_max: int, per_client: int) -> None:
        self.connections_max = connections_max
        self.per_client = per_client
        self.refused = 0
        """How many connections got no seat."""
        self.waiting: dict[Seat, None] = {}
        """Seats whose connections wait, in the order in which they began to."""
        self._taken: set[Seat] = set()
        self._of_client: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        return len(self._taken)

    def take(self, client: str, now: float, patience_s: float) -> Seat | None:
        """A seat for a new connection, which waits for its first request. None if there is none."""
        if self._of_client[client] >= self.per_client:
            # A client at its own bound may end only connections of its own, not another client's.
            is_free = self.relieve(now, client)
        else:
            is_free = self.taken < self.connections_max or self.relieve(now)
        if not is_free:
            self.refused += 1
            return None
        seat = Seat(self, client, now, now + patience_s)
        self._taken.add(seat)
        self._of_client[client] += 1
        self.waiting[seat] = None
        return seat

    def wait(self, seat: Seat) -> None:
        if seat in self._taken:
            self.waiting.pop(seat, None)
            self.waiting[seat] = None

    def leave(self, seat: Seat) -> None:
        if seat in self._taken:
            self._taken.remove(seat)
            self.waiting.pop(seat, None)
            self._of_client[seat.client] -= 1
            if not self._of_client[seat.client]:
                del self._of_client[seat.client]

    def relieve(self, now: float, client: str | None = None) -> bool:
        """Ends the connection, of that client, that has waited longest. False if none has waited long enough."""
        for seat in self.waiting:
            if seat.since > now - SETTLED_S:
                break
            if client in (None, seat.client):
                self.leave(seat)
                seat.end()
                return True
        return False

    def relieve_memory(self, now: float, count: int) -> int:
        """Ends so many connections that have waited, of the client that has most of them. Returns how many it ends."""
        settled = Counter(seat.client for seat in self.waiting if seat.since <= now - SETTLED_S)
        for client, most in settled.most_common(1):
            return sum([self.relieve(now, client) for _ in range(min(count, most - FEW))])
        return 0


def of_one_client(most: int) -> int:
    """How many of so many calls, or connections, one client may have."""
    return most - most // OTHERS_PART


@lru_cache(maxsize=4096)
def client_of(host: str) -> str:
    """The client that an address counts for: an IPv4 address itself, an IPv6 address's network."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_CLIENT_BITS), strict=False))

"""Who may hold a connection. Pure: `now` is the loop's clock, in seconds.

A connection *waits* while it has no whole head of a request: it has just begun, a head is on its way, or nothing is. At
a bound, the connection that has waited for longest makes room for a new one. So clients that send their heads slowly
keep out nobody: theirs are the connections that go.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

SETTLED_S = 1.0
"""How long a connection waits before it has to make room: a herd of clients that starts at once must not push itself
out."""
IPV6_CLIENT_BITS = 64
"""Of an address; one client has all of those that share them."""


@dataclass(slots=True, eq=False)
class Seat:
    """One connection's place in a share.

    since, until  of its waiting
    make_room     ends the connection; belongs to whoever serves it
    """

    share: Share
    client: str
    since: float
    until: float
    is_waiting: bool = True
    make_room: Callable[[], object] = bool

    def wait(self, now: float, patience_s: float) -> None:
        """The connection has no request."""
        self.share.wait(self)
        self.since, self.until, self.is_waiting = now, now + patience_s, True

    def work(self) -> None:
        """It has one."""
        self.share.waiting.pop(self, None)
        self.is_waiting = False

    def leave(self) -> None:
        """The connection has ended, or is about to; may be said twice."""
        self.share.leave(self)


class Share:
    """Connections of one kind. connections_max: at once; per_client: of one client."""

    def __init__(self, connections_max: int, per_client: int) -> None:
        self.connections_max = connections_max
        self.per_client = per_client
        self.refused = 0
        """Connections for which there was no seat."""
        self.waiting: dict[Seat, None] = {}
        """In the order in which they began to wait."""
        self._taken: set[Seat] = set()
        self._of_client: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """Connections that there are."""
        return len(self._taken)

    def take(self, client: str, now: float, patience_s: float) -> Seat | None:
        """A seat for a new connection, which waits for its first request; None: there is none."""
        if self._of_client[client] >= self.per_client:
            has_room = self._relieved(now, client)
        else:
            has_room = self.taken < self.connections_max or self._relieved(now)
        if not has_room:
            self.refused += 1
            return None
        seat = Seat(self, client, now, now + patience_s)
        self._taken.add(seat)
        self._of_client[client] += 1
        self.waiting[seat] = None
        return seat

    def wait(self, seat: Seat) -> None:
        """See `Seat.wait`."""
        if seat in self._taken:
            self.waiting.pop(seat, None)
            self.waiting[seat] = None

    def leave(self, seat: Seat) -> None:
        """See `Seat.leave`."""
        if seat in self._taken:
            self._taken.remove(seat)
            self.waiting.pop(seat, None)
            self._of_client[seat.client] -= 1
            if not self._of_client[seat.client]:
                del self._of_client[seat.client]

    def relieve(self, now: float) -> None:
        """The connection that has waited for longest makes room, if there is one."""
        self._relieved(now)

    def _relieved(self, now: float, client: str | None = None) -> bool:
        for seat in self.waiting:
            if seat.since > now - SETTLED_S:
                break
            if client in (None, seat.client):
                self.leave(seat)
                seat.make_room()
                return True
        return False


def client_of(host: str) -> str:
    """Whose an address is: IPv4 by address, IPv6 by network."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_CLIENT_BITS), strict=False))

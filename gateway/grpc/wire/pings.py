"""When a connection is pinged, and how many pings of a client are too many. Pure: times are the loop's, in seconds.

Source: gRPC's keepalive (doc/keepalive.md of grpc) and its proposals A8 and A9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WITHOUT_CALLS_S = 7200.0
"""Shortest time between two pings of a client without calls, where such pings are not allowed."""


@dataclass(frozen=True, slots=True)
class PingRules:
    """Settings of a port's connections.

    time_s          a connection on which nothing comes is pinged after this
    timeout_s       and closed, if nothing has come this long after the ping
    without_rpcs    also one that has no calls; and clients may ping without calls
    without_data    pings between which nothing was sent; 0: any number
    client_pause_s  time that a client must let pass between two pings
    strikes_max     earlier pings before the connection is closed; 0: any number
    """

    time_s: float
    timeout_s: float
    without_rpcs: bool
    without_data: int
    client_pause_s: float
    strikes_max: int


class Pings:
    def __init__(self, rules: PingRules, now: float) -> None:
        self._rules = rules
        self._heard = now
        self._asked = math.inf
        self._sent = 0
        self._client_at = -math.inf
        self._strikes = 0

    def heard(self, now: float) -> None:
        """Bytes have come."""
        self._heard = now
        self._asked = math.inf

    def wrote(self) -> None:
        """Headers or data are sent."""
        self._sent = self._strikes = 0
        self._client_at = -math.inf

    def is_dead(self, now: float) -> bool:
        """Whether a ping was not answered in time."""
        return now - self._asked > self._rules.timeout_s

    def is_due(self, now: float, *, has_rpcs: bool) -> bool:
        """Whether the connection is to be pinged now; it counts as pinged then."""
        rules = self._rules
        is_due = (
            now - self._heard >= rules.time_s
            and self._asked == math.inf
            and (has_rpcs or rules.without_rpcs)
            and (not rules.without_data or self._sent < rules.without_data)
        )
        if is_due:
            self._asked = now
            self._sent += 1
        return is_due

    def are_too_many(self, now: float, *, has_rpcs: bool) -> bool:
        """A client has pinged. Whether it did so too often."""
        rules = self._rules
        pause_s = rules.client_pause_s if has_rpcs or rules.without_rpcs else WITHOUT_CALLS_S
        if now - self._client_at < pause_s:
            self._strikes += 1
        self._client_at = now
        return bool(rules.strikes_max) and self._strikes > rules.strikes_max

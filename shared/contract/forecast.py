"""How long a sequence will wait for its slot: an estimate from what its model's leader has seen lately. Pure.

Slots become free at a rate. The leader counts how many did in the time in which none was free; the sequence at place k
gets the k-th slot from now on. If slots become free at random, the time of the k-th one, over the time in which n were
seen, is a ratio of two gamma variables. Its logarithm has the mean psi(k) - psi(n) and the variance psi'(k) + psi'(n),
so the fewer slots were seen, the wider is the estimate. Slots that come in bursts say less: they count as fewer.

Where the rate says nothing yet, the idle timeouts of the sequences that hold slots do: they pass unless a client goes
on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

FREED_MIN = 3
"""Slots that must have become free before their rate says anything."""
Z = 1.2816
"""Standard deviations to either side that hold four fifths of a normal distribution."""
WAIT_MS_MAX = 24 * 3600 * 1000
"""An estimate beyond a day says nothing: long before, something will have changed."""


class LineForecast(msgspec.Struct, frozen=True, array_like=True):
    """What the leader knows of the waiting line of one version.

    version      of the model
    line         the waiting sequences, next first
    observed_ms  for how long no slot was free, lately
    freed        how many slots became free meanwhile
    spread       how uneven the times between them were: their variance over their squared mean, at least 1
    expiries_ms  in how many ms the idle sequences that hold slots expire if their clients stay silent, ascending
    """

    version: str
    line: tuple[str, ...] = ()
    observed_ms: int = 0
    freed: int = 0
    spread: float = 1.0
    expiries_ms: tuple[int, ...] = ()


class Outlook(NamedTuple):
    """What a waiting sequence can be told.

    place    in the line, from 1
    wait_ms  how long it will wait: later is as likely as sooner. None: nothing is known
    low_ms, high_ms  four of five such waits end between them; None: nothing is known
    """

    place: int
    wait_ms: int | None = None
    low_ms: int | None = None
    high_ms: int | None = None

    @property
    def facts(self) -> dict[str, int]:
        """What is known of it, by the names that clients read."""
        known = {"place": self.place, "wait_ms": self.wait_ms, "wait_low_ms": self.low_ms, "wait_high_ms": self.high_ms}
        return {name: value for name, value in known.items() if value is not None}


class Forecast:
    """The waiting lines of a model's versions."""

    def __init__(self, lines: Iterable[LineForecast]) -> None:
        self._lines = {line.version: line for line in lines}
        self._places = {
            sequence: (line, place) for line in self._lines.values() for place, sequence in enumerate(line.line, 1)
        }

    def of(self, sequence: str) -> Outlook | None:
        """The outlook of a waiting sequence; None if it stands in no line."""
        found = self._places.get(sequence)
        return outlook(*found) if found is not None else None

    def behind(self, version: str) -> Outlook | None:
        """The outlook of a sequence that would come last in a version's line; None for a line that is not known."""
        line = self._lines.get(version)
        return outlook(line, len(line.line) + 1) if line is not None else None


def outlook(line: LineForecast, place: int) -> Outlook:
    """When the sequence at a place, from 1, will have its slot."""
    expiry_ms = line.expiries_ms[place - 1] if place <= len(line.expiries_ms) else None
    # Any of the sequences that expire may end sooner, or go on.
    by_expiry = Outlook(place) if expiry_ms is None else Outlook(place, expiry_ms, 0)
    if line.freed < FREED_MIN or line.observed_ms <= 0:
        return by_expiry
    # Whoever begins to wait meets a long time between two slots more often than a short one.
    awaited = place + (line.spread - 1) / 2
    wait_ms = line.observed_ms * (awaited - 1 / 3) / (line.freed - 1 / 3)
    if wait_ms > WAIT_MS_MAX:
        return by_expiry
    bursts_seen, bursts_awaited = max(1.0, line.freed / line.spread), max(1.0, awaited / line.spread)
    middle = math.log(line.observed_ms * awaited / line.freed) + _bias(bursts_awaited) - _bias(bursts_seen)
    deviation = Z * math.sqrt(_trigamma(bursts_awaited) + _trigamma(bursts_seen))
    low_ms, high_ms = math.exp(middle - deviation), math.exp(middle + deviation)
    if expiry_ms is not None:
        low_ms = min(low_ms, expiry_ms)
    return Outlook(place, round(wait_ms), math.floor(min(low_ms, wait_ms)), math.ceil(max(high_ms, wait_ms)))


def _bias(x: float) -> float:
    """psi(x) - ln(x), from x = 1 on within 0.01."""
    return -1 / (2 * x) - 1 / (12 * x * x)


def _trigamma(x: float) -> float:
    """psi'(x), from x = 1 on within 0.03."""
    return 1 / x + 1 / (2 * x * x) + 1 / (6 * x**3)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[LineForecast, ...])
encode_forecast = _encoder.encode
"""The lines of a model's versions to bytes."""


def decode_forecast(raw: bytes) -> Forecast:
    """Raises one of `shared.store.reading.FAILURES` for what no leader writes."""
    lines = _decoder.decode(raw)
    for line in lines:
        if not 1 <= line.spread < math.inf:
            raise ValueError("a forecast of an impossible spread")
        if any(not 0 <= number < 1 << 53 for number in (line.observed_ms, line.freed, *line.expiries_ms)):
            raise ValueError("a forecast of impossible numbers")
    return Forecast(lines)

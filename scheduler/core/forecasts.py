"""Tells those who ask how a model's waiting lines stand and move (`shared.contract.forecast`).

Nothing is told unless somebody has asked lately. Then the forecast is made anew every second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from scheduler.core.actions import Action, Dismiss, LookAtIdle, Publish
from scheduler.core.events import ForecastAsked, IdleSeen
from scheduler.core.state import CONFIRMED, LeaderState
from shared.contract.forecast import LineForecast
from shared.contract.ids import SequenceId

ASKED_MS = 10_000
"""How long a forecast is made anew after somebody has asked."""
EVERY_MS = 1000
"""Pause between two forecasts."""
EXPIRIES = 64
"""Idle sequences that are looked at for a forecast: those with the earliest deadlines."""


def asked(state: LeaderState, event: ForecastAsked) -> list[Action]:
    """Somebody asks. The question is removed, and answered by the next forecast."""
    state.forecast_until_ms = state.now_ms + ASKED_MS
    return [Dismiss(event.sequence, event.entry, event.cause), *time_passed(state, event.cause)]


def time_passed(state: LeaderState, cause: str) -> list[Action]:
    """Begins a forecast, if somebody has asked and the last one is old enough."""
    if not is_due(state, state.now_ms):
        return []
    state.forecast_next_ms = state.now_ms + EVERY_MS
    return [LookAtIdle(EXPIRIES, cause)]


def is_due(state: LeaderState, now_ms: int) -> bool:
    """Whether a forecast is wanted at that time."""
    # A clock that was set back must not stop the forecasts until it has come so far again.
    is_old = now_ms >= state.forecast_next_ms or now_ms + EVERY_MS < state.forecast_next_ms
    return now_ms < state.forecast_until_ms and is_old


def idle_seen(state: LeaderState, event: IdleSeen) -> list[Action]:
    """The forecast: every version's line, with what is known of its slots."""
    expiries = _by_version(state, event.expiries)
    # Whoever waits has been looked for a place in the version's ring (`decide.serve`), also if the ring is empty.
    lines = tuple(_of_line(state, version, expiries[version]) for version in sorted(state.rings))
    return [Publish(lines, event.cause)]


def _by_version(state: LeaderState, expiries: Iterable[tuple[SequenceId, int]]) -> defaultdict[str, list[int]]:
    """When the slots of each version become free, if the clients of idle sequences stay silent."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for sequence, left_ms in expiries:
        known = state.sequences.get(sequence)
        if known is not None and known.phase in CONFIRMED:
            found[known.version].append(left_ms)
    return found


def _of_line(state: LeaderState, version: str, expiries: list[int]) -> LineForecast:
    observed_ms, freed, spread = state.freed[version].seen(state.now_ms)
    line = tuple(waiting.sequence for waiting in state.backlogs[version].in_order(state.turns(version)))
    return LineForecast(version, line, observed_ms, freed, spread, tuple(sorted(expiries)))

"""The figures of the recovery dial: medians, and their table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.dial_positions import settings
from benchmarks.results import markdown


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of one setting. takeover_ms: None for a setting whose sequences are lost with their executor."""

    setting: str
    steps_per_s: float
    redis_bytes: float
    takeover_ms: float | None


def summary(turns: Sequence[Turn]) -> list[Turn]:
    """The medians of each setting's figures, in the order of the dial."""
    by_setting: dict[str, list[Turn]] = {}
    for turn in turns:
        by_setting.setdefault(turn.setting, []).append(turn)
    return [
        Turn(
            name,
            statistics.median(turn.steps_per_s for turn in group),
            statistics.median(turn.redis_bytes for turn in group),
            _median([turn.takeover_ms for turn in group if turn.takeover_ms is not None]),
        )
        for name in (setting.name for setting in settings())
        if (group := by_setting.get(name))
    ]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def one_line(turn: Turn) -> str:
    """A turn in a few words."""
    took = "none" if turn.takeover_ms is None else f"{turn.takeover_ms:.0f} ms"
    return f"{turn.setting}: {turn.steps_per_s:.0f} steps/s, {turn.redis_bytes:.0f} Redis bytes/step, takeover {took}"


def table(turns: Sequence[Turn]) -> str:
    """The medians as a Markdown table."""
    rows = [
        [
            turn.setting.rsplit("_", 1)[0],
            turn.setting.rsplit("_", 1)[1] if "_" in turn.setting else "",
            f"{turn.steps_per_s:.0f}",
            f"{turn.redis_bytes:.0f}",
            "lost" if turn.takeover_ms is None else f"{turn.takeover_ms:.0f}",
        ]
        for turn in turns
    ]
    return markdown(["state", "every", "steps/s", "Redis bytes/step", "takeover ms"], rows)


def checkpointed(turns: Sequence[Turn]) -> Iterator[tuple[int, Turn]]:
    """The turns with declared state, each with its checkpoint interval."""
    intervals = {setting.name: setting.interval for setting in settings() if setting.source == "declared"}
    return ((intervals[turn.setting], turn) for turn in turns if turn.setting in intervals)

"""The recovery dial: its positions, which are settings that are measured side by side, and their figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.results import markdown, medians

INTERVALS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Setting:
    """One position of the dial. source: file of its model; recovers: whether its sequences outlive their executor."""

    name: str
    source: str
    parameters: dict[str, str]
    recovers: bool = True

    @property
    def interval(self) -> int:
        """The checkpoint interval in steps; only for a setting with checkpoints."""
        return int(self.parameters.get("checkpoint_interval", "1"))


def settings() -> list[Setting]:
    """All positions of the dial."""
    every = [Setting(f"declared_{n}", "declared", {"checkpoint_interval": str(n)}) for n in INTERVALS]
    handed = [Setting(f"methods_{n}", "handed", {"checkpoint_interval": str(n)}) for n in (1, 8)]
    replay = Setting("replay", "kept", {"sequence_recovery": "replay"})
    return [*every, *handed, replay, Setting("nothing", "kept", {"sequence_recovery": "none"}, recovers=False)]


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of one setting. takeover_ms: None for a setting whose sequences are lost with their executor."""

    setting: str
    steps_per_s: float
    redis_bytes: float
    takeover_ms: float | None


def summary(turns: Sequence[Turn]) -> list[Turn]:
    """The medians of each setting's figures, in the order of the dial."""
    groups = ([turn for turn in turns if turn.setting == setting.name] for setting in settings())
    return [medians(group) for group in groups if group]


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

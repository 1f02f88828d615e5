"""The plot of the recovery dial: three figures over the checkpoint interval; other settings as horizontal lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from benchmarks.dial_figures import Turn

FIGURES = (
    ("steps_per_s", "steps per second"),
    ("redis_bytes", "bytes into Redis per step"),
    ("takeover_ms", "takeover, ms (with a lease of 1 s)"),
)
OTHERS = {"methods_1": "#d55e00", "methods_8": "#e69f00", "replay": "#009e73", "nothing": "#bbbbbb"}
"""Colours that people with the common forms of colour blindness can tell apart (Okabe and Ito)."""


def draw_dial(checkpointed: Sequence[tuple[int, Turn]], turns: Sequence[Turn], path: Path) -> None:
    """Writes a PNG. checkpointed: by interval, of declared state."""
    figure, axes = plt.subplots(1, len(FIGURES), figsize=(16, 4.4), squeeze=False, layout="constrained")
    for axis, (name, title) in zip(axes[0], FIGURES, strict=True):
        draw_figure(axis, checkpointed, turns, name)
        axis.set_title(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_figure(axis: Any, checkpointed: Sequence[tuple[int, Turn]], turns: Sequence[Turn], name: str) -> None:
    """One figure over the interval."""
    intervals = [interval for interval, _ in checkpointed]
    values = [getattr(turn, name) for _, turn in checkpointed]
    axis.plot(intervals, values, marker="o", color="#0072b2", label="declared state")
    for turn in turns:
        level = getattr(turn, name)
        if turn.setting in OTHERS and level is not None:
            axis.axhline(level, linestyle="--", color=OTHERS[turn.setting], label=turn.setting)
    axis.set_xscale("log", base=2)
    axis.set_xticks(intervals, [str(interval) for interval in intervals])
    axis.set_xlabel("steps between two checkpoints")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)

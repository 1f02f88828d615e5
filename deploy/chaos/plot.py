"""The picture of a run: throughput and latency over time, and under them, line by line, the faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogFormatter

from deploy.chaos.faults import KINDS, Victim
from deploy.chaos.history import Strike
from deploy.chaos.report import Report, Timeline

VICTIM_COLORS = {
    Victim.GATEWAY: "#0072b2", Victim.SCHEDULER: "#cc79a7", Victim.EXECUTOR: "#e69f00", Victim.REDIS: "#d55e00",
    Victim.REDIS_LINKS: "#a6761d", Victim.CLIENT_LINKS: "#56b4e9", Victim.CLIENTS: "#009e73", Victim.SLOTS: "#666666",
    Victim.REPLICA: "#f0e442",
}  # fmt: skip
"""Colours that people with the common forms of colour blindness can tell apart (Okabe and Ito)."""
BINS = 240
BIN_S_MIN = 0.25
BAR_SHARE_MIN = 0.003
"""A fault without a length is drawn this wide, as a share of the run."""


def draw(report: Report, timeline: Timeline, strikes: Sequence[Strike], path: Path) -> None:
    """Writes a PNG."""
    kinds = [name for name in KINDS if any(strike.kind == name for strike in strikes)]
    heights = [3.0, 3.0, 0.6 + 0.24 * len(kinds)]
    figure, axes = plt.subplots(
        3, 1, figsize=(15, sum(heights) + 1), sharex=True, height_ratios=heights, layout="constrained"
    )
    edges = time_bins(report.seconds)
    draw_throughput(axes[0], timeline, edges)
    draw_latency(axes[1], timeline, edges)
    draw_faults(axes[2], kinds, strikes, report.seconds)
    for axis in axes[:2]:
        for strike in strikes:
            shade(axis, strike, report.seconds)
    axes[0].set_title(
        f"{report.verdict}: {report.steps:,} steps, {len(strikes)} faults, seed {report.seed}", fontsize=13
    )
    axes[-1].set_xlabel("seconds since the beginning")
    axes[-1].set_xlim(0, report.seconds)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def time_bins(seconds: float) -> npt.NDArray[np.float64]:
    """The edges of equal pieces of the run."""
    count = max(1, min(BINS, int(seconds / BIN_S_MIN)))
    return np.linspace(0.0, max(seconds, BIN_S_MIN), count + 1)


def draw_throughput(axis: Any, timeline: Timeline, edges: npt.NDArray[np.float64]) -> None:
    """Answers per second."""
    counted, _ = np.histogram(timeline.answered_s, edges)
    rates = counted / np.diff(edges)
    axis.fill_between(edges[:-1], rates, step="post", color="#0072b2", alpha=0.35, linewidth=0)
    axis.step(edges[:-1], rates, where="post", color="#0072b2", linewidth=1)
    axis.set_ylabel("answers per second")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def draw_latency(axis: Any, timeline: Timeline, edges: npt.NDArray[np.float64]) -> None:
    """Median, 99th percentile and longest, of the steps answered in each piece."""
    answered, took = np.asarray(timeline.answered_s), np.asarray(timeline.took_s) * 1000
    pieces = np.split(took, np.searchsorted(answered, edges[1:-1]))
    for name, share, color in (("median", 50, "#009e73"), ("99 %", 99, "#e69f00"), ("longest", 100, "#d55e00")):
        values = [float(np.percentile(piece, share)) if len(piece) else float("nan") for piece in pieces]
        axis.plot(
            (edges[:-1] + edges[1:]) / 2, values, label=name, color=color, linewidth=1.1, marker=".", markersize=2
        )
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.set_ylabel("ms from first sending to answer")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right", ncols=3, fontsize=9)


def draw_faults(axis: Any, kinds: Sequence[str], strikes: Sequence[Strike], seconds: float) -> None:
    """One line per kind: a bar from the beginning of each fault until what it hit was back."""
    for row, kind in enumerate(kinds):
        bars = [
            (strike.begin_s, max(strike.end_s - strike.begin_s, seconds * BAR_SHARE_MIN))
            for strike in strikes
            if strike.kind == kind
        ]
        axis.broken_barh(bars, (row - 0.4, 0.8), color=VICTIM_COLORS[KINDS[kind].victim])
    axis.set_yticks(range(len(kinds)), kinds, fontsize=9)
    axis.set_ylim(max(1, len(kinds)) - 0.5, -0.5)
    axis.grid(alpha=0.3, axis="x")


def shade(axis: Any, strike: Strike, seconds: float) -> None:
    """A pale band where a fault was under way."""
    end_s = max(strike.end_s, strike.begin_s + seconds * BAR_SHARE_MIN)
    axis.axvspan(strike.begin_s, end_s, color=VICTIM_COLORS[KINDS[strike.kind].victim], alpha=0.13, linewidth=0)

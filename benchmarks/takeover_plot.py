"""The picture of takeovers: time after the lease's end, by the age of sequences and by their number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from benchmarks.takeover_figures import Takeover


def draw_takeovers(by_age: Sequence[Takeover], by_number: Sequence[Takeover], path: Path) -> None:
    """Two plots of takeover times in one PNG: by the age of sequences, and by their number."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), squeeze=False, sharey=True, layout="constrained")
    left, right = axes[0]
    for axis, kills, xs, label in (
        (left, by_age, [kill.case.steps for kill in by_age], "steps that a sequence has had"),
        (right, by_number, [kill.case.sequences for kill in by_number], "live sequences"),
    ):
        axis.plot(xs, [kill.first_ms for kill in kills], marker="o", color="#0072b2", label="first answer")
        axis.plot(xs, [kill.last_ms for kill in kills], marker="s", color="#d55e00", label="last answer")
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    left.set_ylabel("ms after the end of the lease")
    figure.savefig(path, dpi=110)
    plt.close(figure)

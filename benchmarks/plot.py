"""The pictures of the benchmarks. It alone imports matplotlib, which takes a second."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogFormatter

from benchmarks.dial_figures import Turn
from benchmarks.paging_figures import Point
from benchmarks.results import Result
from benchmarks.takeover_figures import Takeover

PROTOCOL_COLORS = {"http": "#0072b2", "grpc": "#d55e00", "grpc-stream": "#009e73"}
SERVER_STYLES = {"seqmesh": ("-", "o"), "triton": ("--", "s")}
GROUP_COLORS = {
    "gateway": "#0072b2", "scheduler": "#cc79a7", "executor": "#e69f00", "redis": "#d55e00", "triton": "#009e73",
    "client": "#bbbbbb",
}  # fmt: skip
"""Colours that people with the common forms of colour blindness can tell apart (Okabe and Ito)."""
DIAL_FIGURES = (
    ("steps_per_s", "steps per second"),
    ("redis_bytes", "bytes into Redis per step"),
    ("takeover_ms", "takeover, ms (with a lease of 1 s)"),
)
DIAL_COLORS = {"methods_1": "#d55e00", "methods_8": "#e69f00", "replay": "#009e73", "nothing": "#bbbbbb"}
"""Of the settings that have no checkpoint interval."""
CPU_CONCURRENCY = 32
"""The CPU bars are those of this concurrency, or of the highest measured below it."""


@contextmanager
def panels(path: Path, rows: int, columns: int, **options: Any) -> Generator[Any]:
    """Rows of panels for the block, which become a PNG behind it."""
    size = (5.4 * columns, 4.4 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    yield axes
    figure.savefig(path, dpi=110)
    plt.close(figure)


def over(axis: Any, what: str, ticks: Sequence[int] = ()) -> None:
    """What lines are drawn over: each step of that axis is a multiple of the one before. ticks: powers of two"""
    axis.set_xscale("log", base=2 if ticks else 10)
    if ticks:
        axis.set_xticks(ticks, [str(number) for number in ticks])
    axis.set_xlabel(what)
    axis.grid(alpha=0.3, which="both" if axis.get_yscale() == "log" else "major")
    axis.legend(fontsize=8)


def draw(results: Sequence[Result], path: Path) -> None:
    """Writes a PNG: one row per model; throughput, 99th percentile, CPU time per step."""
    models = list(dict.fromkeys(result.cell.model for result in results))
    with panels(path, len(models), 3) as axes:
        for (rates, tails, cpu), model in zip(axes, models, strict=True):
            of_model = [result for result in results if result.cell.model == model and result.steps]
            draw_lines(rates, of_model, "steps_per_s", f"{model}: steps per second")
            draw_lines(tails, of_model, "p99_ms", f"{model}: 99th percentile, ms")
            draw_cpu(cpu, of_model, model)


def draw_lines(axis: Any, results: Sequence[Result], figure: str, title: str) -> None:
    """One line per server and protocol over the concurrency."""
    lines = dict.fromkeys((result.cell.server, result.cell.protocol) for result in results)
    for server, protocol in lines:
        points = sorted(
            (r.cell.concurrency, getattr(r, figure))
            for r in results
            if (r.cell.server, r.cell.protocol) == (server, protocol)
        )
        style, marker = SERVER_STYLES.get(server, ("-", "o"))
        axis.plot(
            *zip(*points, strict=True),
            style,
            marker=marker,
            color=PROTOCOL_COLORS[protocol],
            label=f"{server} {protocol}",
        )
    axis.set_title(title)
    if figure == "steps_per_s":
        axis.set_ylim(bottom=0)
    else:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    over(axis, "concurrency", sorted({result.cell.concurrency for result in results}))


def draw_cpu(axis: Any, results: Sequence[Result], model: str) -> None:
    """A stacked bar per protocol and server."""
    concurrency = cpu_concurrency({result.cell.concurrency for result in results})
    bars = [result for result in results if result.cell.concurrency == concurrency]
    bars.sort(key=lambda result: (list(PROTOCOL_COLORS).index(result.cell.protocol), result.cell.server))
    names = [f"{result.cell.protocol}\n{result.cell.server}" for result in bars]
    below = [0.0] * len(bars)
    for group in (name for name in GROUP_COLORS if any(name in result.cpu_us for result in bars)):
        heights = [result.cpu_us.get(group, 0.0) for result in bars]
        axis.bar(names, heights, bottom=below, label=group, color=GROUP_COLORS[group], width=0.7)
        below = [bottom + height for bottom, height in zip(below, heights, strict=True)]
    axis.set_title(f"{model}: CPU per step, us, at concurrency {concurrency}")
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(alpha=0.3, axis="y")
    axis.set_axisbelow(b=True)
    axis.legend(fontsize=8)


def cpu_concurrency(measured: set[int]) -> int:
    """The concurrency whose CPU time is shown; 0 when nothing was measured."""
    return max((number for number in measured if number <= CPU_CONCURRENCY), default=min(measured, default=0))


def draw_live(points: Sequence[Point], title: str, path: Path) -> None:
    """Writes a PNG: throughput, latency and CPU time by the number of live sequences; a line per number of slots."""
    with panels(path, 1, 3) as ((rates, tails, cpu),):
        styles = dict(zip(dict.fromkeys(point.slots for point in points), ("-", "--", ":", "-."), strict=False))
        for slots, style in styles.items():
            line = [point for point in points if point.slots == slots]
            live = [point.live for point in line]
            name = f"{slots} slots"
            rates.plot(live, [point.share for point in line], style, marker="o", color="#0072b2", label=name)
            tails.plot(live, [point.p50_ms for point in line], style, marker="o", color="#0072b2", label=f"p50, {name}")
            tails.plot(live, [point.p99_ms for point in line], style, marker="s", color="#d55e00", label=f"p99, {name}")
            for group in (group for group in GROUP_COLORS if group in line[0].cpu_us):
                heights = [point.cpu_us[group] for point in line]
                cpu.plot(live, heights, style, marker="o", color=GROUP_COLORS[group], label=f"{group}, {name}")
        rates.set_title("throughput, as a share of that of the fewest")
        tails.set_title("ms from a step to its answer")
        cpu.set_title("CPU per step, us")
        for axis in (rates, tails, cpu):
            axis.set_ylim(bottom=0)
            over(axis, "live sequences")
        rates.figure.suptitle(title)


def draw_dial(checkpointed: Sequence[tuple[int, Turn]], turns: Sequence[Turn], path: Path) -> None:
    """Writes a PNG: three figures over the checkpoint interval; other settings as horizontal lines. checkpointed: by
    interval, of declared state
    """
    with panels(path, 1, len(DIAL_FIGURES)) as (axes,):
        for axis, (name, title) in zip(axes, DIAL_FIGURES, strict=True):
            draw_figure(axis, checkpointed, turns, name)
            axis.set_title(title)


def draw_figure(axis: Any, checkpointed: Sequence[tuple[int, Turn]], turns: Sequence[Turn], name: str) -> None:
    """One figure over the interval."""
    intervals = [interval for interval, _ in checkpointed]
    values = [getattr(turn, name) for _, turn in checkpointed]
    axis.plot(intervals, values, marker="o", color="#0072b2", label="declared state")
    for turn in turns:
        level = getattr(turn, name)
        if turn.setting in DIAL_COLORS and level is not None:
            axis.axhline(level, linestyle="--", color=DIAL_COLORS[turn.setting], label=turn.setting)
    axis.set_ylim(bottom=0)
    over(axis, "steps between two checkpoints", intervals)


def draw_takeovers(by_age: Sequence[Takeover], by_number: Sequence[Takeover], path: Path) -> None:
    """Two plots of takeover times in one PNG: by the age of sequences, and by their number."""
    with panels(path, 1, 2, sharey=True) as ((left, right),):
        for axis, kills, xs, label in (
            (left, by_age, [kill.case.steps for kill in by_age], "steps that a sequence has had"),
            (right, by_number, [kill.case.sequences for kill in by_number], "live sequences"),
        ):
            axis.plot(xs, [kill.first_ms for kill in kills], marker="o", color="#0072b2", label="first answer")
            axis.plot(xs, [kill.last_ms for kill in kills], marker="s", color="#d55e00", label="last answer")
            axis.set_ylim(bottom=0)
            over(axis, label)
        left.set_ylabel("ms after the end of the lease")

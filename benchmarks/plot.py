"""The picture of a benchmark: throughput and tail by concurrency, and where the CPU time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogFormatter

from benchmarks.paging_figures import Point
from benchmarks.results import Result

PROTOCOL_COLORS = {"http": "#0072b2", "grpc": "#d55e00", "grpc-stream": "#009e73"}
SERVER_STYLES = {"seqmesh": ("-", "o"), "triton": ("--", "s")}
GROUP_COLORS = {
    "gateway": "#0072b2", "scheduler": "#cc79a7", "executor": "#e69f00", "redis": "#d55e00", "triton": "#009e73",
    "client": "#bbbbbb",
}  # fmt: skip
"""Colours that people with the common forms of colour blindness can tell apart (Okabe and Ito)."""
CPU_CONCURRENCY = 32
"""The CPU bars are those of this concurrency, or of the highest measured below it."""


def draw(results: Sequence[Result], path: Path) -> None:
    """Writes a PNG: one row per model; throughput, 99th percentile, CPU time per step."""
    models = list(dict.fromkeys(result.cell.model for result in results))
    figure, axes = plt.subplots(len(models), 3, figsize=(16, 4.4 * len(models)), squeeze=False, layout="constrained")
    for (rates, tails, cpu), model in zip(axes, models, strict=True):
        of_model = [result for result in results if result.cell.model == model and result.steps]
        draw_lines(rates, of_model, "steps_per_s", f"{model}: steps per second")
        draw_lines(tails, of_model, "p99_ms", f"{model}: 99th percentile, ms")
        draw_cpu(cpu, of_model, model)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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
    concurrencies = sorted({result.cell.concurrency for result in results})
    axis.set_xscale("log", base=2)
    axis.set_xticks(concurrencies, [str(number) for number in concurrencies])
    axis.set_xlabel("concurrency")
    axis.set_title(title)
    if figure == "steps_per_s":
        axis.set_ylim(bottom=0)
    else:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)


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
    figure, (rates, tails, cpu) = plt.subplots(1, 3, figsize=(16, 4.4), layout="constrained")
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
        axis.set_xscale("log")
        axis.set_xlabel("live sequences")
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)

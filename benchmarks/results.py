"""A cell's result, the summary over rounds, and the tables. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from benchmarks.clients import ProtocolName
from benchmarks.load import Tally
from benchmarks.usage import CLIENT, Meter, RedisCost, cpu_us_per_step, other_cores, redis_cost

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Figures = TypeVar("Figures", bound="DataclassInstance")

QUIET_CORES = 0.15
"""A cell is marked as disturbed if other processes used more cores than this during it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: one server under one kind of load."""

    server: str
    model: str
    protocol: ProtocolName
    concurrency: int


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement of one cell. Without an answered step all figures are 0, and `examples` says why."""

    cell: Cell
    round: int
    steps: int
    steps_per_s: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    mean_batch: float | None = None
    cpu_us: dict[str, float] = field(default_factory=dict[str, float])
    redis: RedisCost | None = None
    other_cores: float = 0.0
    wrong: int = 0
    errors: int = 0
    examples: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def server_cpu_us(self) -> float:
        """CPU of all processes but the client."""
        return sum(us for name, us in self.cpu_us.items() if name != CLIENT)


def result_of(cell: Cell, round_number: int, tally: Tally, meter: Meter, mean_batch: float | None) -> Result:
    """Puts a cell's figures together from what was counted and the two readings at the window's edges."""
    steps = len(tally.latencies_ns)
    examples = dict(tally.examples)
    if not steps or len(meter.readings) != 2:
        return Result(cell, round_number, 0, wrong=tally.wrong, errors=tally.errors, examples=examples)
    before, after = meter.readings
    p50, p99 = np.percentile(np.asarray(tally.latencies_ns) / 1e6, [50, 99])
    return Result(
        cell=cell,
        round=round_number,
        steps=steps,
        steps_per_s=steps / (after.at_s - before.at_s),
        p50_ms=float(p50),
        p99_ms=float(p99),
        mean_batch=mean_batch,
        cpu_us=cpu_us_per_step(before, after, steps),
        redis=redis_cost(before, after, steps),
        other_cores=other_cores(before, after),
        wrong=tally.wrong,
        errors=tally.errors,
        examples=examples,
    )


def summary(results: Iterable[Result]) -> list[Result]:
    """Per cell the round with the median throughput, with the errors of all rounds; in the order of first appearance.

    A whole round is chosen instead of the median of each figure, so that the figures belong together. Disturbed rounds
    are left out if there are others.
    """
    by_cell: dict[Cell, list[Result]] = {}
    for result in results:
        by_cell.setdefault(result.cell, []).append(result)
    return [middle(rounds) for rounds in by_cell.values()]


def middle(rounds: Sequence[Result]) -> Result:
    """The representative of a cell's rounds."""
    quiet = [result for result in rounds if result.other_cores <= QUIET_CORES and result.steps] or list(rounds)
    at = statistics.median_low([result.steps_per_s for result in quiet])
    chosen = next(result for result in quiet if result.steps_per_s == at)
    examples: Counter[str] = Counter()
    for result in rounds:
        examples.update(result.examples)
    return Result(
        **{name: getattr(chosen, name) for name in Result.__slots__ if name not in {"wrong", "errors", "examples"}},
        wrong=sum(result.wrong for result in rounds),
        errors=sum(result.errors for result in rounds),
        examples=dict(examples),
    )


def medians(group: Sequence[Figures]) -> Figures:
    """The first of a group, with the medians of all in the place of its figures. A figure of None is not known."""
    figures: dict[str, float] = {}
    for name in group[0].__dataclass_fields__:
        values = [value for one in group if isinstance(value := getattr(one, name), int | float)]
        if values:
            middle = statistics.median(values)
            figures[name] = round(middle) if isinstance(values[0], int) else middle
    return dataclasses.replace(group[0], **figures)


def table(results: Sequence[Result]) -> str:
    """One server's results as a Markdown table; a `*` after the throughput marks a cell that others disturbed."""
    groups = list(dict.fromkeys(name for result in results for name in result.cpu_us))
    has_redis = any(result.redis for result in results)
    head = ["model", "protocol", "conc.", "steps/s", "p50 ms", "p99 ms", "batch", *(f"{name} us" for name in groups)]
    head += ["Redis cmds", "scripts", "bytes in", "out", "file"] if has_redis else []
    return markdown([*head, "wrong", "errors"], [row(result, groups, has_redis=has_redis) for result in results])


def row(result: Result, groups: Sequence[str], *, has_redis: bool) -> list[str]:
    """One line of a server's table."""
    cell, cost = result.cell, result.redis
    batch = "" if result.mean_batch is None else f"{result.mean_batch:.1f}"
    figures = [
        cell.model, cell.protocol, str(cell.concurrency), rate(result), f"{result.p50_ms:.2f}", f"{result.p99_ms:.2f}",
        batch, *(f"{result.cpu_us.get(name, 0.0):.0f}" for name in groups),
    ]  # fmt: skip
    if has_redis and cost is not None:
        wire = (cost.bytes_in, cost.bytes_out, cost.file_bytes)
        figures += [f"{cost.commands:.2f}", f"{cost.scripts:.2f}", *(f"{size_bytes:.0f}" for size_bytes in wire)]
    elif has_redis:
        figures += [""] * 5
    return [*figures, str(result.wrong), str(result.errors)]


def rate(result: Result) -> str:
    """Throughput, marked when it was disturbed."""
    return f"{result.steps_per_s:.0f}" + (" *" if result.other_cores > QUIET_CORES else "")


def comparison(results: Sequence[Result], ours: str, theirs: str) -> str:
    """Both servers side by side, for the cells that both have; "" when there are none."""
    by_cell = {result.cell: result for result in results}
    lines: list[list[str]] = []
    for cell, mine in by_cell.items():
        other = by_cell.get(dataclasses.replace(cell, server=theirs)) if cell.server == ours else None
        if other is None or not mine.steps or not other.steps:
            continue
        lines.append([
            cell.model, cell.protocol, str(cell.concurrency), rate(mine), rate(other),
            f"{mine.steps_per_s / other.steps_per_s:.2f}",
            f"{mine.p50_ms:.2f}", f"{other.p50_ms:.2f}", f"{mine.p99_ms:.2f}", f"{other.p99_ms:.2f}",
            f"{mine.server_cpu_us:.0f}", f"{other.server_cpu_us:.0f}",
        ])  # fmt: skip
    if not lines:
        return ""
    pair = [ours, theirs]
    head = ["model", "protocol", "conc.", *(f"{s} steps/s" for s in pair), "ratio", *(f"{s} p50 ms" for s in pair),
            *(f"{s} p99 ms" for s in pair), *(f"{s} CPU us" for s in pair)]  # fmt: skip
    return markdown(head, lines)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, so that it can be read as plain text."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    left = 2  # model and protocol; everything else is a number

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * width if column < left else "-" * (width - 1) + ":") for column, width in enumerate(widths)]
    return "\n".join([line(head), line(rule), *(line(cells) for cells in rows)])

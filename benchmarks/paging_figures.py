"""The figures of live sequences, in a line and in a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.results import markdown
from benchmarks.usage import CLIENT


@dataclass(frozen=True, slots=True)
class Point:
    """One window.

    share         of the throughput of the fewest sequences on the same mesh
    paged_out, paged_in, commands, cpu_us  per step; commands of Redis, CPU by service
    memory_mb     of a service's processes now; for Redis what it has allocated
    other_cores   that other processes used
    """

    slots: int
    live: int
    steps: int
    steps_per_s: float
    share: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    paged_out: float
    paged_in: float
    commands: float
    by_command: dict[str, float]
    cpu_us: dict[str, float]
    memory_mb: dict[str, float]
    other_cores: float


def one_line(point: Point) -> str:
    """A point in a few words."""
    cpu = ", ".join(f"{name} {us:.0f}" for name, us in point.cpu_us.items())
    return (
        f"{point.slots} slots, {point.live} live: {point.steps_per_s:.0f} steps/s ({point.share:.2f}), "
        f"p50 {point.p50_ms:.0f} ms, p99 {point.p99_ms:.0f} ms, {point.paged_out:.2f} paged out a step; "
        f"CPU us: {cpu}; Redis {point.commands:.1f} commands; others {point.other_cores:.2f} cores"
    )


def table(points: Sequence[Point]) -> str:
    """The figures as a Markdown table."""
    services = [name for name in points[0].cpu_us if name != CLIENT]
    rows = [
        [
            str(point.slots),
            str(point.live),
            f"{point.steps_per_s:.0f}",
            f"{point.share:.2f}",
            *(f"{wait:.0f}" for wait in (point.p50_ms, point.p99_ms, point.longest_ms)),
            f"{point.paged_out:.2f}",
            *(f"{point.cpu_us[name]:.0f}" for name in services),
            f"{point.commands:.1f}",
            *(f"{point.memory_mb[name]:.0f}" for name in ("executor", "redis")),
            f"{point.other_cores:.2f}",
        ]
        for point in points
    ]
    head = ["slots", "live", "steps/s", "share", "p50 ms", "p99 ms", "longest ms", "paged out"]
    costs = [*(f"{name} us" for name in services), "Redis commands", "executor MB", "Redis MB", "others' cores"]
    return markdown([*head, *costs], rows)

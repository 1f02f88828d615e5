"""A long run of one kind of load. It fails if an answer is wrong, a process dies, or memory grows.

`make soak`. Starts a mesh of its own, keeps as many streams as asked busy for as long as asked, looks at the memory of
every process once a second, and judges at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
import uvloop
from redis import Redis

from benchmarks.clients import PROTOCOLS, ProtocolName, client_for
from benchmarks.load import LoadRun, Tally, new_sequence_ids
from benchmarks.servers import MeasuredServer, build_models, running_mesh
from benchmarks.usage import family
from benchmarks.workloads import RunningSums
from shared.settings import NumberRange

HELP = """Keeps a mesh under load for minutes and says whether it stayed whole.

Every answer is a running sum and is checked exactly. At the end: steps, wrong answers, errors, processes that died, and
the memory of each service, median of the run's second quarter against its last one. Exit code 1 for a wrong answer, an
error, a dead process, or memory that grew by more than the bound.
"""
MODEL = "accumulate"
WARMUP_S = 1.0
TELL_EVERY_S = 10.0
SAMPLE_EVERY_S = 1.0
GROWTH_BOUND = 1.10
"""Memory counts as grown if its median in the last quarter is above this multiple of that in the second quarter. The
first quarter is for warming up."""
GROWTH_SLACK_BYTES = 8 << 20
"""Growth that is tolerated on top, because allocators keep freed memory. A leak exceeds it within minutes."""
DATA = "redis data"
"""Name of the sample with the size of Redis' data as Redis reports it; its process is sampled too."""


@dataclass(slots=True)
class MemorySamples:
    """Bytes over time, by service."""

    samples: dict[str, list[int]] = field(default_factory=dict)

    def add(self, bytes_by_name: Mapping[str, int]) -> None:
        """One more sample of each."""
        for name, size in bytes_by_name.items():
            self.samples.setdefault(name, []).append(size)

    def quarters(self, name: str) -> tuple[float, float]:
        """Medians of the second and of the last quarter, bytes."""
        samples = self.samples[name]
        quarter = max(1, len(samples) // 4)
        second = samples[quarter : 2 * quarter] or samples
        return statistics.median(second), statistics.median(samples[-quarter:])

    def grown(self) -> list[str]:
        """The services whose last quarter is above the bound."""
        names: list[str] = []
        for name in self.samples:
            early, late = self.quarters(name)
            if late > early * GROWTH_BOUND + GROWTH_SLACK_BYTES:
                names.append(name)
        return names


class Watch:
    """The processes of a server: which have died, and what the living take."""

    def __init__(self, server: MeasuredServer) -> None:
        self._processes = {
            name: [process for pid in pids for process in family(pid, children=True)]
            for name, pids in server.groups.items()
        }
        self._redis = Redis.from_url(server.redis_url) if server.redis_url else None

    def memory(self) -> dict[str, int]:
        """Resident bytes by service, and what Redis counts as data."""
        sizes = {name: sum(map(resident_bytes, processes)) for name, processes in self._processes.items()}
        if self._redis is not None:
            sizes[DATA] = int(self._redis.info("memory")["used_memory_dataset"])  # pyright: ignore[reportIndexIssue]
        return sizes

    def dead(self) -> list[str]:
        """Services with a process that is gone."""
        return [name for name, all_of in self._processes.items() if not all(p.is_running() for p in all_of)]


def resident_bytes(process: psutil.Process) -> int:
    """0 for a process that has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


@click.command("soak", help=HELP, context_settings={"max_content_width": 110})
@click.option("--minutes", type=NumberRange(0.05), default=10.0, show_default=True, metavar="M", help="How long.")
@click.option(
    "--streams", type=click.IntRange(1), default=128, show_default=True, metavar="N", help="Sequences at once."
)
@click.option("--protocol", type=click.Choice(PROTOCOLS), default="grpc-stream", show_default=True)
@click.option("--executors", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Of the mesh.")
def soak(*, minutes: float, streams: int, protocol: ProtocolName, executors: int) -> None:
    with contextlib.ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seqmesh-models-")))
        click.echo("making the models and starting the mesh", err=True)
        build_models(repository)
        server = stack.enter_context(running_mesh(repository, executors))
        watch, memory = Watch(server), MemorySamples()
        tally = uvloop.run(run(server, protocol, streams, minutes * 60, watch, memory))
        dead = watch.dead()
    sys.exit(judge(tally, memory, dead))


async def run(
    server: MeasuredServer, protocol: ProtocolName, streams: int, seconds: float, watch: Watch, memory: MemorySamples
) -> Tally:
    """Runs the load, and observes the processes meanwhile."""
    workload = RunningSums()
    client = client_for(protocol, server.address, MODEL, workload.form)
    load = LoadRun(client, workload, new_sequence_ids())
    observer = asyncio.create_task(observe(load.tally, watch, memory), name="observer")
    try:
        return await load.run(streams, warmup_s=WARMUP_S, seconds=seconds, at_edge=lambda: None)
    finally:
        observer.cancel()
        await client.close()


async def observe(tally: Tally, watch: Watch, memory: MemorySamples) -> None:
    """Samples the memory until it is cancelled, and prints the progress now and then."""
    began = told = time.monotonic()
    told_steps = 0
    while True:
        await asyncio.sleep(SAMPLE_EVERY_S)
        memory.add(await asyncio.to_thread(watch.memory))
        now = time.monotonic()
        if now - told < TELL_EVERY_S:
            continue
        steps = len(tally.latencies_ns)
        sizes = ", ".join(f"{name} {samples[-1] / 2**20:.1f}" for name, samples in memory.samples.items())
        click.echo(
            f"[{now - began:5.0f} s] {(steps - told_steps) / (now - told):.0f} steps/s, {tally.wrong} wrong, "
            f"{tally.errors} errors; MiB: {sizes}",
            err=True,
        )
        told, told_steps = now, steps


def judge(tally: Tally, memory: MemorySamples, dead: Sequence[str]) -> int:
    """Tells the result; 0 when the mesh stayed whole."""
    click.echo(f"{len(tally.latencies_ns)} steps, {tally.wrong} wrong, {tally.errors} errors")
    for text, count in tally.examples.items():
        click.echo(f"error, {count} times: {text}")
    for name in memory.samples:
        early, late = memory.quarters(name)
        click.echo(f"memory of {name}: {early / 2**20:.1f} -> {late / 2**20:.1f} MiB")
    grown = memory.grown()
    for name in grown:
        click.echo(f"memory of {name} grew beyond {GROWTH_BOUND:.2f} times and {GROWTH_SLACK_BYTES >> 20} MiB")
    for name in dead:
        click.echo(f"a process of {name} died")
    whole = bool(tally.latencies_ns) and not (tally.wrong or tally.errors or dead or grown)
    click.echo("the mesh stayed whole" if whole else "NOT whole")
    return 0 if whole else 1


if __name__ == "__main__":
    soak(prog_name="make soak")

"""Live sequences: what a step costs by how many sequences are live, where all their states fit and where they do not.

For each number of slots one mesh with one executor, whose memory bound gives it so many. Sequences are started and left
open, more and more of them; at each number, callers take any sequence that has no open step, by chance, and send its
next step. Where all states fit, the figures should not depend on the number of sequences. Where they do not, chance is
hard on paging, because no sequence is used more than another: of so many slots for ten times as many sequences, nine
steps of ten page one sequence in and another one out. Every sum is checked.

A machine that others use changes from minute to minute: compare the shares, and look at the cores that others used.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import click
import psutil
import uvloop
from redis import Redis

from benchmarks.clients import BenchClient, LoadSession, StepError, client_for
from benchmarks.load import new_sequence_ids
from benchmarks.memory import FILE, used
from benchmarks.paging_figures import Point, one_line, table
from benchmarks.servers import BenchmarkMesh, mesh_of
from benchmarks.usage import Meter, cpu_us_per_step, other_cores, redis_cost
from benchmarks.workloads import RunningSums, SumTrack
from deploy.local.private_mesh import private_mesh
from shared.store.keyspace import Keyspace
from shared.store.waiting_line import WaitingLine

MODEL = "wide_sum"
STATE_BYTES = 4096
ROWS = 64
"""Of a batch; there are never fewer slots."""
CONFIG = f"""
name: "{MODEL}"
backend: "python"
max_batch_size: {ROWS}
input [ {{ name: "INPUT", data_type: TYPE_INT32, dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT", data_type: TYPE_INT32, dims: [ 1 ] }} ]
sequence_batching {{
  max_sequence_idle_microseconds: 3600000000
  oldest {{ max_candidate_sequences: {ROWS} }}
  state [
    {{ input_name: "STATE_IN", output_name: "STATE_OUT", data_type: TYPE_INT32, dims: [ {STATE_BYTES // 4} ] }}
  ]
}}
"""
SEED = 64
FEWEST = 512
STEPS_BETWEEN = 10
"""Numbers of live sequences: each so many times the one before."""
SCARCE = 10
"""Where the states do not fit, the most sequences are so many times the slots."""
WARMUP_S = 1.0


def live_numbers(most: int) -> list[int]:
    """The numbers of live sequences up to the most that are wanted."""
    numbers = [most]
    while numbers[0] > FEWEST:
        numbers.insert(0, max(FEWEST, numbers[0] // STEPS_BETWEEN))
    return numbers


def measure_paging(*, most: int, slots: Sequence[int], callers: int, seconds: float, out: Path) -> None:
    """Measures every number of live sequences with each number of slots; writes paging.json, paging.md and paging.png.
    seconds: of a window
    """
    points: list[Point] = []
    for room in slots or (most, max(ROWS, most // SCARCE)):
        with tempfile.TemporaryDirectory(prefix="seqmesh-paging-") as directory:
            write_model(Path(directory))
            bound = {"SEQMESH_STATE_BYTES_MAX": str(room * STATE_BYTES)}
            with private_mesh(executors=1, models=(Path(directory),), settings=bound) as state:
                points += uvloop.run(curve(mesh_of(state), room, live_numbers(most), callers, seconds))
    write(points, callers, out)


def write_model(repository: Path) -> None:
    """A running sum with a state of STATE_BYTES."""
    version = repository / MODEL / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(FILE)
    (version.parent / "config.pbtxt").write_text(CONFIG)


async def curve(mesh: BenchmarkMesh, slots: int, numbers: Iterable[int], callers: int, seconds: float) -> list[Point]:
    """A point for each number of live sequences, rising. Raises StepError when an answer is wrong or missing."""
    client = client_for("grpc", mesh.address, MODEL, RunningSums.form)
    ids, sums = new_sequence_ids(), RunningSums()
    play, points = Play(client, callers), list[Point]()
    try:
        for live in numbers:
            await play.start([OpenSequence(next(ids), sums.begin()) for _ in range(live - len(play))])
            await play.go_on(WARMUP_S)
            before, meter = pages(mesh), Meter(mesh.groups, mesh.redis_url)
            meter.read()
            waits_ms = await play.go_on(seconds)
            meter.read()
            point = point_of(mesh, slots, live, waits_ms, meter, before)
            base = points[0].steps_per_s if points else point.steps_per_s
            points.append(replace(point, share=point.steps_per_s / base))
            click.echo(one_line(points[-1]), err=True)
            meter.close()
    finally:
        await client.close()
    return points


def point_of(
    mesh: BenchmarkMesh, slots: int, live: int, waits_ms: Sequence[float], meter: Meter, pages_before: tuple[int, int]
) -> Point:
    """The figures of the window that has just ended."""
    before, after = meter.readings
    ordered, steps = sorted(waits_ms), len(waits_ms)
    outs, ins = ((now - then) / steps for now, then in zip(pages(mesh), pages_before, strict=True))
    cost = redis_cost(before, after, steps)
    assert cost is not None
    memory = {name: sum(psutil.Process(pid).memory_info().rss for pid in pids) for name, pids in mesh.groups.items()}
    with Redis.from_url(cast("str", mesh.redis_url)) as redis:
        memory["redis"] = used(redis)
    return Point(
        slots=slots,
        live=live,
        steps=steps,
        steps_per_s=steps / (after.at_s - before.at_s),
        share=1.0,
        p50_ms=ordered[steps // 2],
        p99_ms=ordered[steps * 99 // 100],
        longest_ms=ordered[-1],
        paged_out=outs,
        paged_in=ins,
        commands=cost.commands,
        by_command=cost.by_command,
        cpu_us=cpu_us_per_step(before, after, steps),
        memory_mb={name: size / 1e6 for name, size in memory.items()},
        other_cores=other_cores(before, after),
    )


@dataclass(slots=True)
class OpenSequence:
    """A live sequence: its correlation id, and the sums that its answers must be."""

    id: int
    sums: SumTrack


class Play:
    """Callers that play the steps of open sequences, and those sequences that have no open step."""

    def __init__(self, client: BenchClient, callers: int) -> None:
        self._client = client
        self._callers = callers
        self._idle: list[OpenSequence] = []
        self._chance = random.Random(SEED)

    def __len__(self) -> int:
        return len(self._idle)

    async def start(self, sequences: Sequence[OpenSequence]) -> None:
        """Starts sequences and leaves them open."""
        await self._play(iter(sequences), start=True)

    async def go_on(self, seconds: float) -> list[float]:
        """Sends next steps for so long. Returns how long each was waited for, ms."""
        return await self._play(self._by_chance(seconds), start=False)

    def _by_chance(self, seconds: float) -> Iterator[OpenSequence]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            index = self._chance.randrange(len(self._idle))
            self._idle[index], self._idle[-1] = self._idle[-1], self._idle[index]
            yield self._idle.pop()

    async def _play(self, sequences: Iterator[OpenSequence], *, start: bool) -> list[float]:
        waits_ms: list[float] = []
        gc.collect()
        gc.disable()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._callers):
                    group.create_task(self._call(await self._client.session(), sequences, waits_ms, start=start))
        finally:
            gc.enable()
        return waits_ms

    async def _call(
        self, session: LoadSession, sequences: Iterator[OpenSequence], waits_ms: list[float], *, start: bool
    ) -> None:
        for track in sequences:
            data, began = track.sums.next_input(), time.perf_counter()
            answer = await session.step(track.id, data, start=start, end=False)
            waits_ms.append((time.perf_counter() - began) * 1000)
            if not track.sums.is_right(answer):
                raise StepError(f"sequence {track.id}: {answer.hex()} is not its sum")
            self._idle.append(track)
        await session.close()


def pages(mesh: BenchmarkMesh) -> tuple[int, int]:
    """How often a sequence gave up its slot, and wanted one again."""
    redis: Any = Redis.from_url(cast("str", mesh.redis_url))
    keys, line = Keyspace(), WaitingLine()
    for shard in keys.shards:
        for name, number in redis.hgetall(keys.line(shard, MODEL)).items():
            line.add(name.decode(), int(number))
    redis.close()
    return line.paged_out.total(), line.paged_in.total()


def write(points: Sequence[Point], callers: int, out: Path) -> None:
    """The three files, and the table on standard output."""
    from benchmarks.plot import draw_live  # noqa: PLC0415 -- matplotlib takes a second

    out.mkdir(parents=True, exist_ok=True)
    title = f"live sequences with {STATE_BYTES} bytes of state, {callers} callers, one executor"
    (out / "paging.json").write_text(json.dumps([asdict(point) for point in points], indent=2))
    (out / "paging.md").write_text(f"{title}\n\n{table(points)}\n")
    draw_live(points, title, out / "paging.png")
    click.echo(f"{title}\n\n{table(points)}\n\nwritten: {out}/paging.json, paging.md, paging.png")

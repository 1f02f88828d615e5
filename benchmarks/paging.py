"""Virtual slots: how long a step waits when many more sequences are live than there are slots.

One mesh with one executor and 64 slots. First every sequence is started and left open; then callers take the sequences
in turn, in random order, and send each one's next step: nearly every step pages a sequence in and another one out.
Every sum is checked. A wait is the time from sending a step to its answer. The number of waiting callers is constant,
namely the callers beyond the number of slots. So if the backlog is fair, all waits are similar: the report compares the
longest wait of any sequence with the median.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import click
import uvloop
from redis import Redis

from benchmarks.clients import Client, LoadSession, StepError, client_for
from benchmarks.load import new_sequence_ids
from benchmarks.results import markdown
from benchmarks.servers import BenchmarkMesh, mesh_of
from benchmarks.workloads import RunningSums, SumTrack
from deploy.local.private_mesh import private_mesh
from shared.store.keyspace import Keyspace
from shared.store.waiting_line import WaitingLine

MODEL = "paged_sum"
SLOTS = 64
SOURCE = Path(__file__).with_name("models") / "accumulate" / "1" / "model.py"
CONFIG = f"""
name: "{MODEL}"
backend: "python"
max_batch_size: {SLOTS}
input [ {{ name: "INPUT", data_type: TYPE_INT32, dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT", data_type: TYPE_INT32, dims: [ 1 ] }} ]
sequence_batching {{
  max_sequence_idle_microseconds: 3600000000
  oldest {{ max_candidate_sequences: {SLOTS} }}
  control_input [
    {{ name: "START", control [ {{ kind: CONTROL_SEQUENCE_START, int32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "END", control [ {{ kind: CONTROL_SEQUENCE_END, int32_false_true: [ 0, 1 ] }} ] }}
  ]
  state [ {{ input_name: "SUM_IN", output_name: "SUM_OUT", data_type: TYPE_INT32, dims: [ 1 ] }} ]
}}
"""
TELL_EVERY_S = 5.0
SEED = 64


@dataclass(frozen=True, slots=True)
class Waits:
    """One part of the run. longest_ms: of any sequence; by_sequence_ms: the median of the sequences' longest waits."""

    name: str
    steps: int
    steps_per_s: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    by_sequence_ms: float


@dataclass(frozen=True, slots=True)
class Paging:
    """The result. paged_out, paged_in: per step of the second part."""

    sequences: int
    callers: int
    parts: tuple[Waits, ...]
    paged_out: float
    paged_in: float


def measure_paging(*, sequences: int, callers: int, seconds: float, out: Path) -> None:
    """Runs both parts, the second for so many seconds; writes paging.json, paging.md and paging.png."""
    with tempfile.TemporaryDirectory(prefix="seqmesh-paging-") as directory:
        repository = Path(directory)
        write_model(repository)
        # As many slots as the configuration says: with slots by memory nothing would be paged.
        few = {"SEQMESH_STATE_BYTES_MAX": "0"}
        with private_mesh(executors=1, models=(repository,), settings=few) as state:
            result, waits_ms = uvloop.run(run(mesh_of(state), sequences, callers, seconds))
    write(result, waits_ms, out)


def write_model(repository: Path) -> None:
    """The running sum, with few slots."""
    version = repository / MODEL / "1"
    version.mkdir(parents=True)
    shutil.copy(SOURCE, version / "model.py")
    (version.parent / "config.pbtxt").write_text(CONFIG)


async def run(mesh: BenchmarkMesh, sequences: int, callers: int, seconds: float) -> tuple[Paging, list[float]]:
    """Both parts; also every wait of the second one, ms. Raises StepError when an answer is wrong or missing."""
    client = client_for("grpc", mesh.address, MODEL, RunningSums.form)
    ids, sums = new_sequence_ids(), RunningSums()
    tracks = [PagedTrack(next(ids), sums.begin()) for _ in range(sequences)]
    try:
        started = await Part("start", client, callers).play(iter(tracks), sequences, start=True)
        for track in tracks:
            track.longest_ms = 0.0
        before, deadline = pages(mesh), time.monotonic() + seconds
        part = Part("go on", client, callers)
        went_on = await part.play(in_turn(tracks, lambda: time.monotonic() < deadline), 0)
        after = pages(mesh)
    finally:
        await client.close()
    outs, ins = ((after[index] - before[index]) / max(1, went_on.steps) for index in (0, 1))
    return Paging(sequences, callers, (started, went_on), outs, ins), part.waits_ms


@dataclass(slots=True)
class PagedTrack:
    """One sequence, and the longest wait of its steps."""

    id: int
    sums: SumTrack
    waits: bool = False
    longest_ms: float = 0.0


def in_turn(tracks: Sequence[PagedTrack], goes_on: Callable[[], bool]) -> Iterator[PagedTrack]:
    """All sequences in random order, then again in the same order: each one's last step is answered by then."""
    order = random.Random(SEED).sample(tracks, len(tracks))
    for track in itertools.takewhile(lambda _: goes_on(), itertools.cycle(order)):
        assert not track.waits, f"sequence {track.id} is overtaken by itself: more sequences or fewer callers"
        yield track


class Part:
    """Callers that play sequences' steps, each the next one in turn."""

    def __init__(self, name: str, client: Client, callers: int) -> None:
        self.waits_ms: list[float] = []
        self._name = name
        self._client = client
        self._callers = callers

    async def play(self, tracks: Iterator[PagedTrack], total: int, *, start: bool = False) -> Waits:
        """Plays until there are no more. total: how many, for the progress; 0 when nobody knows."""
        touched: dict[int, PagedTrack] = {}
        began = time.monotonic()
        teller = asyncio.create_task(self._tell(began, total))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._callers):
                    group.create_task(self._call(await self._client.session(), tracks, touched, start=start))
        finally:
            teller.cancel()
        took = time.monotonic() - began
        ordered = sorted(self.waits_ms)
        longest = [track.longest_ms for track in touched.values()]
        return Waits(
            self._name,
            len(ordered),
            len(ordered) / took,
            ordered[len(ordered) // 2],
            ordered[len(ordered) * 99 // 100],
            ordered[-1],
            statistics.median(longest),
        )

    async def _call(
        self, session: LoadSession, tracks: Iterator[PagedTrack], touched: dict[int, PagedTrack], *, start: bool
    ) -> None:
        for track in tracks:
            touched[track.id], track.waits = track, True
            data, began = track.sums.next_input(), time.perf_counter()
            answer = await session.step(track.id, data, start=start, end=False)
            wait_ms = (time.perf_counter() - began) * 1000
            if not track.sums.is_right(answer):
                raise StepError(f"sequence {track.id}: {answer.hex()} is not its sum")
            track.waits = False
            self.waits_ms.append(wait_ms)
            track.longest_ms = max(track.longest_ms, wait_ms)
        await session.close()

    async def _tell(self, began: float, total: int) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            done, took = len(self.waits_ms), time.monotonic() - began
            of = f" of {total}" if total else ""
            click.echo(f"[{took:4.0f} s] {self._name}: {done}{of} steps, {done / took:.0f}/s", err=True)


def pages(mesh: BenchmarkMesh) -> tuple[int, int]:
    """How often a sequence gave up its slot, and wanted one again."""
    redis: Any = Redis.from_url(cast("str", mesh.redis_url))
    keys, line = Keyspace(), WaitingLine()
    for shard in keys.shard_ids():
        for name, number in redis.hgetall(keys.line(shard, MODEL)).items():
            line.add(name.decode(), int(number))
    redis.close()
    return line.paged_out.total(), line.paged_in.total()


def table(result: Paging) -> str:
    """The figures as a Markdown table."""
    rows = [
        [
            part.name,
            str(part.steps),
            f"{part.steps_per_s:.0f}",
            f"{part.p50_ms:.0f}",
            f"{part.p99_ms:.0f}",
            f"{part.longest_ms:.0f}",
            f"{part.by_sequence_ms:.0f}",
        ]
        for part in result.parts
    ]
    head = ["part", "steps", "steps/s", "p50 ms", "p99 ms", "longest ms", "median of sequences' longest ms"]
    return markdown(head, rows)


def write(result: Paging, waits_ms: Sequence[float], out: Path) -> None:
    """The three files, and the table on standard output."""
    from benchmarks.plot import draw_waits  # noqa: PLC0415 -- matplotlib takes a second

    out.mkdir(parents=True, exist_ok=True)
    title = f"{result.sequences} live sequences over {SLOTS} slots, {result.callers} callers"
    (out / "paging.json").write_text(json.dumps(asdict(result), indent=2))
    (out / "paging.md").write_text(f"{title}\n\n{table(result)}\n")
    draw_waits(waits_ms, title, out / "paging.png")
    click.echo(f"{title}; per step {result.paged_out:.2f} paged out, {result.paged_in:.2f} paged in\n\n{table(result)}")
    click.echo(f"\nwritten: {out}/paging.json, paging.md, paging.png")

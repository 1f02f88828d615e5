"""The recovery dial: measures, for each way of keeping state safe, its cost per step and the time of a takeover.

One mesh with two executors serves one small model in many settings: declared state with a checkpoint every 1, 2, 4, ...
steps; state that the model keeps, recovered by its methods or by replaying its steps; and state that is lost with the
executor, as in Triton. The settings take turns, round by round, so that load from other users of the machine is spread.

Per setting and round: steps per second, and bytes into Redis per step (beyond those of an idle mesh), under closed-loop
load; then sequences of various ages are left open, the executor that owns most of them is killed, and the next step of
each is sent at once. The takeover's time is that of the last answer: with the executor's lease, which has to expire
first.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, cast

import click
import msgspec
import uvloop
from redis import Redis

from benchmarks.clients import Addresses, BenchClient, LoadSession, StepError, client_for
from benchmarks.dial_figures import Setting, Turn, checkpointed, one_line, settings, summary, table
from benchmarks.load import LoadRun, new_sequence_ids
from benchmarks.servers import mesh_of
from benchmarks.usage import Meter, Reading
from benchmarks.workloads import RunningSums
from deploy.local.data_directory import MeshState
from deploy.local.private_mesh import private_mesh
from shared.contract.ids import SequenceId, sequence_id
from shared.contract.messages import ExecutorRegistration
from shared.contract.record import OWNER
from shared.store.keyspace import Keyspace

MODELS = Path(__file__).with_name("dial_models")
MEMORY = 1024
"""FP32 elements of a sequence's state: 4 KiB."""
CONCURRENCY = 32
OPEN = 16
"""Sequences that are open when their executor is killed."""
AGE_MIN, AGE_STEP = 30, 4
"""Steps of these sequences: 30, 34, ... So takeovers happen at different points of a checkpoint interval."""
LEASE_MS = 1000
WARMUP_S = 0.5
IDLE_S = 1.0
PATIENCE_S = 60.0
POLL_S = 0.02

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 64
input [ {{ name: "INPUT", data_type: TYPE_INT32, dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT", data_type: TYPE_INT32, dims: [ 1 ] }} ]
sequence_batching {{
  max_sequence_idle_microseconds: 120000000
  oldest {{ max_candidate_sequences: 128 }}
  {states}
}}
{parameters}
"""
STATES = f"""state [
    {{ input_name: "SUM_IN", output_name: "SUM_OUT", data_type: TYPE_INT32, dims: [ 1 ] }},
    {{ input_name: "MEMORY_IN", output_name: "MEMORY_OUT", data_type: TYPE_FP32, dims: [ {MEMORY} ] }}
  ]"""


class LongSums(RunningSums):
    """Running sums of sequences much longer than every checkpoint interval."""

    def steps(self) -> int:
        """How many steps the next sequence has."""
        return self._chance.randint(180, 220)


def measure_dial(*, seconds: float, rounds: int, out: Path) -> None:
    """Measures every setting in turn; writes dial.json, dial.md and dial.png."""
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="seqmesh-dial-") as directory:
        repository = Path(directory)
        for setting in settings():
            write_model(repository, setting)
        mesh = private_mesh(executors=2, models=(repository,), settings={"SEQMESH_LEASE_MS": str(LEASE_MS)})
        with mesh as state:
            bench = Dial(state, seconds)
            for round_number in range(1, rounds + 1):
                # In another order each round: a turn is disturbed by what the one before left, such as a restarting
                # executor.
                for setting in Random(round_number).sample(settings(), k=len(settings())):
                    turns.append(uvloop.run(bench.turn(setting)))
                    click.echo(f"[{round_number}/{rounds}] {one_line(turns[-1])}", err=True)
    write(summary(turns), turns, out)


def write(medians: Sequence[Turn], turns: Sequence[Turn], out: Path) -> None:
    """The three files, and the table on standard output."""
    from benchmarks.plot import draw_dial  # noqa: PLC0415 -- matplotlib takes a second

    out.mkdir(parents=True, exist_ok=True)
    (out / "dial.json").write_text(json.dumps([asdict(turn) for turn in turns], indent=2))
    (out / "dial.md").write_text(table(medians) + "\n")
    draw_dial(list(checkpointed(medians)), medians, out / "dial.png")
    click.echo(table(medians))
    click.echo(f"\nwritten: {out}/dial.json, dial.md, dial.png")


def write_model(repository: Path, setting: Setting) -> None:
    """The model of one setting."""
    version = repository / setting.name / "1"
    version.mkdir(parents=True)
    shutil.copy(MODELS / f"{setting.source}.py", version / "model.py")
    if setting.source == "handed":
        shutil.copy(MODELS / "kept.py", version / "kept.py")
    entry = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}'
    text = CONFIG.format(
        name=setting.name,
        states=STATES if setting.source == "declared" else "",
        parameters="\n".join(entry.format(*each) for each in setting.parameters.items()),
    )
    (version.parent / "config.pbtxt").write_text(text)


class Dial:
    """The mesh in which the settings are measured."""

    def __init__(self, state: MeshState, seconds: float) -> None:
        mesh = mesh_of(state)
        self._address: Addresses = mesh.address
        self._groups = mesh.groups
        self._redis_url = cast("str", mesh.redis_url)
        self._redis: Any = Redis.from_url(self._redis_url)
        self._keys = Keyspace()
        self._seconds = seconds
        self._ids = new_sequence_ids()
        self._sums: dict[int, int] = {}

    async def turn(self, setting: Setting) -> Turn:
        """One setting. Raises StepError when an answer is wrong or missing."""
        client = client_for("grpc", self._address, setting.name, LongSums.form)
        try:
            rate, redis_bytes = await self._load(client)
            takeover_ms = await self._take_over(client, setting.name) if setting.recovers else None
        finally:
            await client.close()
        return Turn(setting.name, rate, redis_bytes, takeover_ms)

    async def _load(self, client: BenchClient) -> tuple[float, float]:
        # Only Redis is metered: executors are killed here, and their CPU time would be lost.
        meter = Meter({"redis": self._groups["redis"]}, self._redis_url)
        try:
            # First an idle mesh: leases, polls and statistics cost bytes without any step, which are subtracted.
            meter.read()
            await asyncio.sleep(IDLE_S)
            meter.read()
            load = LoadRun(client, LongSums(), self._ids)
            tally = await load.run(CONCURRENCY, warmup_s=WARMUP_S, seconds=self._seconds, at_edge=meter.read)
        finally:
            meter.close()
        steps = len(tally.latencies_ns)
        if not steps or tally.errors or tally.wrong:
            raise StepError(f"{steps} steps, {tally.wrong} wrong answers, {tally.errors} errors {tally.examples}")
        idle, loaded = (_bytes_per_s(*readings) for readings in (meter.readings[:2], meter.readings[2:]))
        rate = steps / (meter.readings[3].at_s - meter.readings[2].at_s)
        return rate, max(0.0, loaded - idle) / rate

    async def _take_over(self, client: BenchClient, model: str) -> float:
        """Milliseconds from the owner's death to the last answer."""
        sessions = {next(self._ids): await client.session() for _ in range(OPEN)}
        self._sums = dict.fromkeys(sessions, 0)

        async def play(index: int, name: int) -> None:
            for number in range(AGE_MIN + AGE_STEP * index):
                await self._step(sessions[name], name, start=not number)

        await asyncio.gather(*(play(index, name) for index, name in enumerate(sessions)))
        victim = self._owner_of_most([sequence_id(model, "", name) for name in sessions])
        os.kill(victim.pid, signal.SIGKILL)
        began = time.perf_counter()
        await asyncio.gather(*(self._step(session, name) for name, session in sessions.items()))
        took_ms = (time.perf_counter() - began) * 1000
        await asyncio.gather(*(self._step(session, name, end=True) for name, session in sessions.items()))
        await self._whole(victim)
        return took_ms

    async def _step(self, session: LoadSession, name: int, *, start: bool = False, end: bool = False) -> None:
        """Adds 1 to a sequence. Raises StepError when the answer is not its sum."""
        self._sums[name] += 1
        answer = await session.step(name, (1).to_bytes(4, "little"), start=start, end=end)
        if answer != self._sums[name].to_bytes(4, "little"):
            raise StepError(f"sequence {name}: {answer.hex()} is not {self._sums[name]}")

    def _owner_of_most(self, sequences: Sequence[SequenceId]) -> ExecutorRegistration:
        owners = [self._redis.hget(self._keys.sequence(sequence).record, OWNER).decode() for sequence in sequences]
        most = statistics.mode(owners)
        return next(one for one in self._registered() if one.executor == most)

    def _registered(self) -> list[ExecutorRegistration]:
        decode = msgspec.json.Decoder(ExecutorRegistration).decode
        return [decode(data) for data in self._redis.hgetall(self._keys.executors).values()]

    async def _whole(self, dead: ExecutorRegistration) -> None:
        """Waits until the killed executor is back, under another id."""
        async with asyncio.timeout(PATIENCE_S):
            while not any(self._succeeds(one, dead) for one in self._registered()):  # noqa: ASYNC110 -- it is in Redis
                await asyncio.sleep(POLL_S)

    def _succeeds(self, one: ExecutorRegistration, dead: ExecutorRegistration) -> bool:
        is_another = one.name == dead.name and one.executor != dead.executor
        return is_another and bool(self._redis.exists(self._keys.executor_lease(one.executor)))


def _bytes_per_s(before: Reading, after: Reading) -> float:
    return (after.redis["bytes_in"] - before.redis["bytes_in"]) / (after.at_s - before.at_s)

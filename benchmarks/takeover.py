"""Takeovers: how long callers wait when an executor is killed, by the age of its sequences and by their number.

One mesh with two executors and declared state that is checkpointed with every step. Sequences are played and left open.
Then the executor that owns most of them is killed, and the next step of every sequence is sent at once. Reported are
the times from the end of the dead executor's lease, as Redis shows it, to the first and to the last answer of the
sequences that it owned. Every answer is checked.

Then the same with idle sequences, of a model whose sequences keep their slots. They are taken over without a step, and
their new owner fetches their states at once. When all have moved, each sequence gets two steps, one after the other.
Reported are the times of the first and of the second steps, and the slowest step meanwhile of a sequence on the other
executor.

At most `REAL_STEPS_MAX` steps per sequence are really played. To make a sequence older, the step numbers in its record
and checkpoint are raised between the kill and the end of the lease, when no executor writes them. A takeover reads
nothing else of a sequence's past.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import click
import uvloop

from benchmarks.clients import LoadSession, client_for
from benchmarks.dial import LEASE_MS, Dial, LongSums, write_model
from benchmarks.dial_figures import settings
from benchmarks.takeover_figures import (
    AGED,
    Case,
    IdleTakeover,
    Takeover,
    idle_line,
    idle_summary,
    idle_table,
    one_line,
    summary,
    table,
)
from deploy.local.data_directory import MeshState
from deploy.local.private_mesh import private_mesh
from shared.contract.ids import ExecutorId, SequenceId, sequence_id
from shared.contract.messages import ExecutorRegistration
from shared.contract.record import ACCEPTED, CHECKPOINTED, COMMITTED, OWNER

AGES = (100, 10_000, 1_000_000)
COUNTS = (10, 100, 1000)
YOUNG = 3
"""Steps of each of them."""
REAL_STEPS_MAX = 10_000
QUICK_STEPS_MAX = 300
IDLE_COUNTS = (100, 1000)
SAMPLED = 100
"""Idle sequences whose steps are timed."""
SLOTS = 2048
SESSIONS = 64
POLL_S = 0.002
IDLE_POLL_S = 0.05
"""A longer pause between polls, because each poll reads all sequences."""


def measure_takeovers(*, rounds: int, quick: bool, out: Path) -> None:
    """Kills executors, case by case, round by round; writes takeover.json, takeover.md and takeover.png."""
    played_max = QUICK_STEPS_MAX if quick else REAL_STEPS_MAX
    cases = [Case(age, AGED, min(age, played_max)) for age in AGES] + [Case(YOUNG, count, YOUNG) for count in COUNTS]
    kills: list[Takeover] = []
    idle: list[IdleTakeover] = []
    setting = settings()[0]
    keeping = replace(setting, name="keeping", parameters={**setting.parameters, "virtual_slots": "false"})
    with tempfile.TemporaryDirectory(prefix="seqmesh-takeover-") as directory:
        for each in (setting, keeping):
            write_model(Path(directory), each)
            config = Path(directory) / each.name / "config.pbtxt"
            config.write_text(
                config.read_text().replace("max_candidate_sequences: 128", f"max_candidate_sequences: {SLOTS}")
            )
        mesh = private_mesh(executors=2, models=(Path(directory),), settings={"SEQMESH_LEASE_MS": str(LEASE_MS)})
        with mesh as state:
            for round_number in range(1, rounds + 1):
                for case in cases:
                    kills.append(uvloop.run(Kills(state, setting.name).kill(case)))
                    click.echo(f"[{round_number}/{rounds}] {one_line(kills[-1])}", err=True)
                for count in IDLE_COUNTS:
                    idle.append(uvloop.run(Kills(state, keeping.name).kill_beside_idle(count)))
                    click.echo(f"[{round_number}/{rounds}] {idle_line(idle[-1])}", err=True)
    write(kills, idle, out)


def write(kills: Sequence[Takeover], idle: Sequence[IdleTakeover], out: Path) -> None:
    """The three files, and the table on standard output."""
    from benchmarks.plot import draw_takeovers  # noqa: PLC0415 -- matplotlib takes a second

    medians = summary(kills)
    out.mkdir(parents=True, exist_ok=True)
    both = f"{table(medians)}\n\n{idle_table(idle_summary(idle))}\n"
    (out / "takeover.json").write_text(json.dumps([asdict(kill) for kill in (*kills, *idle)], indent=2))
    (out / "takeover.md").write_text(both)
    by_age = [kill for kill in medians if kill.case.sequences == AGED]
    draw_takeovers(by_age, [kill for kill in medians if kill not in by_age], out / "takeover.png")
    click.echo(both)
    click.echo(f"\nwritten: {out}/takeover.json, takeover.md, takeover.png")


class Kills(Dial):
    """The mesh whose executors are killed."""

    def __init__(self, state: MeshState, model: str) -> None:
        super().__init__(state, seconds=0.0)
        self._model = model

    async def kill(self, case: Case) -> Takeover:
        """One kill of the executor that owns most of the sequences. Raises StepError when an answer is wrong."""
        async with self._played(case) as (sessions, names):
            return await self._take(case, sessions, names)

    async def kill_beside_idle(self, count: int) -> IdleTakeover:
        """The same while its sequences are idle."""
        async with self._played(Case(YOUNG, count, YOUNG)) as (sessions, names):
            return await self._take_idle(dict(zip(names, sessions, strict=True)))

    @asynccontextmanager
    async def _played(self, case: Case) -> AsyncGenerator[tuple[list[LoadSession], list[int]]]:
        """Sequences that have had their steps; they are ended afterwards."""
        client = client_for("grpc", self._address, self._model, LongSums.form)
        try:
            sessions = [await client.session() for _ in range(case.sequences)]
            names = [next(self._ids) for _ in sessions]
            self._sums = dict.fromkeys(names, 0)
            limit = asyncio.Semaphore(SESSIONS)

            async def play(session: LoadSession, name: int) -> None:
                async with limit:
                    for number in range(case.played):
                        await self._step(session, name, start=not number)

            await asyncio.gather(*map(play, sessions, names))
            yield sessions, names
            await asyncio.gather(*(self._step(s, name, end=True) for s, name in zip(sessions, names, strict=True)))
        finally:
            await client.close()

    def _victim(self, names: Sequence[int]) -> tuple[ExecutorRegistration, set[int]]:
        """The executor that owns most of the sequences, and which ones."""
        sequences = [sequence_id(self._model, "", name) for name in names]
        victim = self._owner_of_most(sequences)
        owners = zip(names, map(self._owner, sequences), strict=True)
        return victim, {name for name, owner in owners if owner == victim.executor}

    async def _take_idle(self, sessions: Mapping[int, LoadSession]) -> IdleTakeover:
        victim, theirs = self._victim(list(sessions))
        neighbour = next(name for name in sessions if name not in theirs)
        moved = asyncio.Event()

        async def timed(name: int) -> float:
            began = time.perf_counter()
            await self._step(sessions[name], name)
            return (time.perf_counter() - began) * 1000

        async def go_on() -> float:
            slowest = 0.0
            while not moved.is_set():
                slowest = max(slowest, await timed(neighbour))
            return slowest

        going_on = asyncio.create_task(go_on())
        os.kill(victim.pid, signal.SIGKILL)
        while not await asyncio.to_thread(self._have_moved, theirs, victim):  # noqa: ASYNC110 -- it is in Redis
            await asyncio.sleep(IDLE_POLL_S)
        moved.set()
        slowest = await going_on
        await self._whole(victim)
        sample = sorted(theirs)[:SAMPLED]
        first, second = [[await timed(name) for name in sample] for _ in range(2)]
        return IdleTakeover(len(sessions), len(theirs), statistics.median(first), statistics.median(second), slowest)

    def _have_moved(self, names: Iterable[int], victim: ExecutorRegistration) -> bool:
        """Whether all have another owner, which has heard of it."""
        pipe: Any = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hget(self._keys.sequence(sequence_id(self._model, "", name)).record, OWNER)
        owners = {(owner or b"").decode() for owner in pipe.execute()}
        inboxes = [self._keys.inbox(shard, ExecutorId(owner)) for owner in owners for shard in self._keys.shards]
        return owners.isdisjoint({"", victim.executor}) and not any(map(self._redis.xlen, inboxes))

    async def _take(self, case: Case, sessions: Sequence[LoadSession], names: Sequence[int]) -> Takeover:
        victim, theirs = self._victim(names)
        os.kill(victim.pid, signal.SIGKILL)
        if case.steps > case.played:
            self._age([sequence_id(self._model, "", name) for name in theirs], case.steps - case.played)
        answered: list[float] = []

        async def step(session: LoadSession, name: int) -> None:
            await self._step(session, name)
            if name in theirs:
                answered.append(time.perf_counter())

        steps = asyncio.gather(*map(step, sessions, names))
        lease = self._keys.executor_lease(victim.executor)
        while await asyncio.to_thread(self._redis.exists, lease):  # noqa: ASYNC110 -- it is in Redis
            await asyncio.sleep(POLL_S)
        ended = time.perf_counter()
        await steps
        await self._whole(victim)
        return Takeover(case, len(theirs), (min(answered) - ended) * 1000, (max(answered) - ended) * 1000)

    def _owner(self, sequence: SequenceId) -> str:
        return cast("bytes", self._redis.hget(self._keys.sequence(sequence).record, OWNER)).decode()

    def _age(self, sequences: Sequence[SequenceId], steps: int) -> None:
        pipe: Any = self._redis.pipeline(transaction=True)
        for sequence in sequences:
            own = self._keys.sequence(sequence)
            for field in (ACCEPTED, COMMITTED, CHECKPOINTED):
                pipe.hincrby(own.record, field, steps)
            pipe.hincrby(own.checkpoint, "n", steps)
        pipe.execute()

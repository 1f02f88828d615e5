"""Takeovers: how long callers wait when an executor is killed, by the age of its sequences and by their number.

One mesh with two executors and declared state that is checkpointed with every step. Sequences are played and left open;
the executor that owns most of them is killed, and the next step of each of all is sent at once. Told are the times from
the end of the dead executor's lease, as Redis shows it, to the first and to the last answer of the sequences that it
owned. Every answer is checked.

Steps are really played up to `REAL_STEPS_MAX` per sequence. Where a sequence is to be older, the numbers in its record
and checkpoint are set forward while nobody owns it, between the kill and the end of the lease: they are all that a
takeover reads of its past.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import click
import uvloop

from deploy.bench.clients import Session, StepError, client_for
from deploy.bench.dial import LEASE_MS, Dial, LongSums, settings, write_model
from deploy.bench.results import markdown
from deploy.launcher import MeshState
from deploy.private_mesh import private_mesh
from shared.ids import SequenceId, sequence_id

AGES = (100, 10_000, 1_000_000)
AGED = 8
"""Sequences of each age."""
COUNTS = (10, 100, 1000)
YOUNG = 3
"""Steps of each of them."""
REAL_STEPS_MAX = 10_000
QUICK_STEPS_MAX = 300
SLOTS = 2048
SESSIONS = 64
POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Case:
    """So many sequences, each with so many steps behind it; played: how many of these were really sent."""

    steps: int
    sequences: int
    played: int


@dataclass(frozen=True, slots=True)
class Takeover:
    """One kill. taken: sequences of the dead executor; times from the end of its lease."""

    case: Case
    taken: int
    first_ms: float
    last_ms: float


def measure_takeovers(*, rounds: int, quick: bool, out: Path) -> None:
    """Kills executors, case by case, round by round; writes takeover.json, takeover.md and takeover.png."""
    played_max = QUICK_STEPS_MAX if quick else REAL_STEPS_MAX
    cases = [Case(age, AGED, min(age, played_max)) for age in AGES] + [Case(YOUNG, count, YOUNG) for count in COUNTS]
    kills: list[Takeover] = []
    setting = settings()[0]
    with tempfile.TemporaryDirectory(prefix="seqmesh-takeover-") as directory:
        write_model(Path(directory), setting)
        config = Path(directory) / setting.name / "config.pbtxt"
        config.write_text(
            config.read_text().replace("max_candidate_sequences: 128", f"max_candidate_sequences: {SLOTS}")
        )
        mesh = private_mesh(executors=2, models=(Path(directory),), settings={"SEQMESH_LEASE_MS": str(LEASE_MS)})
        with mesh as state:
            for round_number in range(1, rounds + 1):
                for case in cases:
                    kills.append(uvloop.run(Kills(state, setting.name).kill(case)))
                    click.echo(f"[{round_number}/{rounds}] {one_line(kills[-1])}", err=True)
    write(kills, out)


class Kills(Dial):
    """The mesh whose executors are killed."""

    def __init__(self, state: MeshState, model: str) -> None:
        super().__init__(state, seconds=0.0)
        self._model = model
        self._sums: dict[int, int] = {}

    async def kill(self, case: Case) -> Takeover:
        """One kill of the executor that owns most of the sequences. Raises StepError when an answer is wrong."""
        client = client_for("grpc", self._address, self._model, LongSums.form)
        try:
            sessions = [await client.session() for _ in range(case.sequences)]
            names = [next(self._ids) for _ in sessions]
            self._sums = dict.fromkeys(names, 0)
            limit = asyncio.Semaphore(SESSIONS)

            async def play(session: Session, name: int) -> None:
                async with limit:
                    for number in range(case.played):
                        await self._step(session, name, start=not number)

            await asyncio.gather(*map(play, sessions, names))
            taken = await self._take(case, sessions, names)
            await asyncio.gather(*(self._step(s, name, end=True) for s, name in zip(sessions, names, strict=True)))
        finally:
            await client.close()
        return taken

    async def _take(self, case: Case, sessions: Sequence[Session], names: Sequence[int]) -> Takeover:
        sequences = [sequence_id(self._model, "", name) for name in names]
        victim = self._owner_of_most(sequences)
        theirs = {n for n, sequence in zip(names, sequences, strict=True) if self._owner(sequence) == victim.executor}
        os.kill(victim.pid, signal.SIGKILL)
        if case.steps > case.played:
            self._age([sequence_id(self._model, "", name) for name in theirs], case.steps - case.played)
        answered: list[float] = []

        async def step(session: Session, name: int) -> None:
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

    async def _step(self, session: Session, name: int, *, start: bool = False, end: bool = False) -> None:
        self._sums[name] += 1
        answer = await session.step(name, (1).to_bytes(4, "little"), start=start, end=end)
        if answer != self._sums[name].to_bytes(4, "little"):
            raise StepError(f"sequence {name}: {answer.hex()} is not {self._sums[name]}")

    def _owner(self, sequence: SequenceId) -> str:
        return cast("bytes", self._redis.hget(self._keys.sequence(sequence).record, "ow")).decode()

    def _age(self, sequences: Sequence[SequenceId], steps: int) -> None:
        pipe: Any = self._redis.pipeline(transaction=True)
        for sequence in sequences:
            own = self._keys.sequence(sequence)
            for field in ("nx", "cm", "ck"):
                pipe.hincrby(own.record, field, steps)
            pipe.hincrby(own.checkpoint, "n", steps)
        pipe.execute()


def summary(kills: Sequence[Takeover]) -> list[Takeover]:
    """The medians of each case."""
    return [
        Takeover(
            case,
            round(statistics.median(kill.taken for kill in kills if kill.case == case)),
            statistics.median(kill.first_ms for kill in kills if kill.case == case),
            statistics.median(kill.last_ms for kill in kills if kill.case == case),
        )
        for case in dict.fromkeys(kill.case for kill in kills)
    ]


def one_line(kill: Takeover) -> str:
    """A kill in a few words."""
    case = kill.case
    return (
        f"{case.sequences} sequences of {case.steps} steps ({case.played} played), {kill.taken} taken over: "
        f"first {kill.first_ms:.0f} ms, last {kill.last_ms:.0f} ms after the lease's end"
    )


def table(kills: Sequence[Takeover]) -> str:
    """The medians as a Markdown table."""
    rows = [
        [
            str(kill.case.steps),
            str(kill.case.played),
            str(kill.case.sequences),
            str(kill.taken),
            f"{kill.first_ms:.0f}",
            f"{kill.last_ms:.0f}",
        ]
        for kill in kills
    ]
    return markdown(["steps behind", "of these played", "sequences", "taken over", "first ms", "last ms"], rows)


def write(kills: Sequence[Takeover], out: Path) -> None:
    """The three files, and the table on standard output."""
    from deploy.bench.takeover_plot import draw_takeovers  # noqa: PLC0415 -- matplotlib takes a second

    medians = summary(kills)
    out.mkdir(parents=True, exist_ok=True)
    (out / "takeover.json").write_text(json.dumps([asdict(kill) for kill in kills], indent=2))
    (out / "takeover.md").write_text(table(medians) + "\n")
    by_age = [kill for kill in medians if kill.case.sequences == AGED]
    draw_takeovers(by_age, [kill for kill in medians if kill not in by_age], out / "takeover.png")
    click.echo(table(medians))
    click.echo(f"\nwritten: {out}/takeover.json, takeover.md, takeover.png")

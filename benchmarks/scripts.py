"""What a step costs inside Redis: the server's CPU time per step in `submit` and in `commit`, without any network.

`python -m benchmarks.scripts`. Starts a server of its own, gives every sequence an owner, and sends whole rounds of
steps by the real scripts, some steps a call. `--against FOLDER` runs other `.lua` files of the same names in turn with
this tree's, round by round, so that the ratio means something on a machine that does other things too. `--journal` does
the same with sequences that keep journals, beside such that keep none.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import Any, cast

import click

from deploy.local.embedded import served
from shared.contract.ids import (
    Epoch,
    ExecutorId,
    GatewayId,
    InstanceIndex,
    ShardId,
    SlotIndex,
    StepNumber,
    Term,
    sequence_id,
)
from shared.contract.messages import StepFlag
from shared.contract.step_digest import step_digest
from shared.statistics.tally import ModelLoad
from shared.store import libraries
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.script_sender import Call
from shared.store.script_values import (
    NO_JOURNAL,
    Assignment,
    JournalBounds,
    LedShard,
    StepCommit,
    StepOutcome,
    Submission,
)
from shared.store.scripts import Scripts

MODEL, VERSION, GATEWAY, EXECUTOR, SHARD = "m", "1", "g", ExecutorId("e"), ShardId(0)
SEQUENCES = 64
MESSAGE, REPLY, STATE = b"m" * 200, b"r" * 120, b"s" * 64
COUNTS = b"c" * 60
IDLE_MS = 60_000


def scripts_of(redis: Any, keys: Keyspace, folder: Path | None) -> Scripts:
    """The scripts of this tree, or those of another folder."""
    ours = libraries.LUA
    try:
        libraries.LUA = folder or ours
        return Scripts(redis, keys)
    finally:
        libraries.LUA = ours


class Naming(Enum):
    """How a client names its steps: so that it may retry them, by a request id or a number, or not at all."""

    PLAIN = "plain"
    NAMED = "named"
    NUMBERED = "numbered"


class Bench:
    """Sequences with an owner, and the next step of each."""

    def __init__(
        self, redis: Any, name: str, folder: Path | None, naming: Naming, *, journal: JournalBounds = NO_JOURNAL
    ) -> None:
        self.spent: Counter[str] = Counter()
        self.steps = 0
        self._redis = redis
        self._keys = Keyspace(name, 1)
        self._scripts = scripts_of(redis, self._keys, folder)
        self._sequences = [sequence_id(MODEL, "", number) for number in range(SEQUENCES)]
        self._epochs: list[Epoch] = []
        self._naming = naming
        self._journal = journal
        self._step = 1
        self._read = "0-0"

    async def open(self) -> None:
        """Every sequence has an owner, and its first step is final."""
        await self._redis.xadd(self._keys.replies(SHARD, GatewayId(GATEWAY)), {"opened": ""})
        born = await self._run(self._submit(0, SEQUENCES, StepFlag.START))
        places = [
            Assignment(sequence, one.birth, EXECUTOR, InstanceIndex(0), SlotIndex(slot))
            for slot, (sequence, one) in enumerate(zip(self._sequences, born, strict=True))
        ]
        self._epochs = await self._run(self._scripts.assign(places, LedShard(SHARD, MODEL, Term(1))))
        await self._finish(SEQUENCES)

    async def round(self, per_call: int) -> None:
        """One step of each sequence."""
        before = await self._cpu_us()
        for first in range(0, SEQUENCES, per_call):
            await self._run(self._submit(first, per_call))
        submitted = await self._cpu_us()
        finished = await self._finish(per_call)
        self.spent += Counter(submit=submitted - before, commit=finished)
        self.steps += SEQUENCES

    def _submit(self, first: int, count: int, flags: StepFlag = StepFlag.NONE) -> Call[Any]:
        steps = [
            Submission(
                sequence,
                flags | StepFlag.DURABLE,
                self._digest(first + at),
                self._step if self._naming is Naming.NUMBERED else None,
                VERSION,
                GATEWAY,
                f"{self._step * SEQUENCES + first + at:x}",
                0,
                MESSAGE,
            )
            for at, sequence in enumerate(self._sequences[first : first + count])
        ]
        return self._scripts.submit(steps, backlog_max=1000, in_flight_max=64)

    def _digest(self, at: int) -> bytes:
        """Of the request id of a sequence's step, if it has one."""
        return step_digest(f"{self._step} {at}" if self._naming is Naming.NAMED else "", StepFlag.NONE, ())

    async def _finish(self, per_call: int) -> int:
        """Makes the open step of each sequence final. Returns the CPU time of the commits, us."""
        inbox = self._keys.inbox(SHARD, EXECUTOR)
        entries = [entry.decode() for entry, _ in await self._redis.xrange(inbox, f"({self._read}")]
        self._read = entries[-1]
        before = await self._cpu_us()
        for first in range(0, SEQUENCES, per_call):
            steps = [
                StepCommit(
                    self._sequences[at],
                    self._epochs[at],
                    StepNumber(self._step),
                    StepFlag.DURABLE | (StepFlag.START if self._step == 1 else StepFlag.NONE),
                    StepOutcome.DONE,
                    GATEWAY,
                    f"{self._step * SEQUENCES + at:x}",
                    REPLY,
                    keep_reply=self._naming is not Naming.PLAIN,
                    entries=(entries[at],),
                    checkpoint=(("s:STATE", STATE),),
                    counts=COUNTS,
                    execution=COUNTS if at == first else b"",
                    entry=entries[at],
                )
                for at in range(first, first + per_call)
            ]
            load = ModelLoad(MODEL, VERSION, "0")
            commit = self._scripts.commit(
                steps,
                shard=SHARD,
                executor=EXECUTOR,
                load=load,
                idle_ms=IDLE_MS,
                tombstone_ms=1000,
                journal=self._journal,
            )
            codes = await self._run(commit)
            assert set(codes) == {1}, codes
        spent = await self._cpu_us() - before
        self._step += 1
        await self._redis.delete(self._keys.tally(SHARD, MODEL, VERSION, "0"))
        await self._redis.xtrim(self._keys.replies(SHARD, GatewayId(GATEWAY)), maxlen=0, approximate=False)
        return spent

    async def _run(self, call: Call[Any]) -> Any:
        return await self._scripts.run(call)

    async def _cpu_us(self) -> int:
        """Of the thread that runs commands, us. (The time of a script, as the server counts it, goes on while other
        processes have the core.)
        """
        cpu = await self._redis.info("cpu")
        return round(1e6 * (cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"]))


async def measured(
    redis: Any, folder: Path | None, per_call: int, rounds: int, naming: Naming, *, journal: bool
) -> list[Bench]:
    """This tree's figures, and then those of the other folder, or of sequences without journals."""
    kept = JournalBounds(rounds + 1, 1 << 30) if journal else NO_JOURNAL
    benches = [Bench(redis, f"ours-{per_call}-{naming.value}", None, naming, journal=kept)]
    if folder or journal:
        benches.append(Bench(redis, f"theirs-{per_call}-{naming.value}", folder, naming))
    for bench in benches:
        await bench.open()
    for _ in range(rounds):
        for bench in benches:
            await bench.round(per_call)
    return benches


async def report(url: str, folder: Path | None, rounds: int, *, journal: bool = False) -> str:
    """A table: us per step of each script."""
    redis = cast("Any", connect(url))
    rows: list[list[Any]] = []
    for naming in Naming:
        for per_call in (1, 4, 8):
            benches = await measured(redis, folder, per_call, rounds, naming, journal=journal)
            costs = [{name: us / bench.steps for name, us in bench.spent.items()} for bench in benches]
            row: list[Any] = [naming.value, per_call]
            for script in ("submit", "commit"):
                row += [round(cost[script], 1) for cost in costs]
                row += [round(costs[0][script] / costs[1][script], 2)] if len(costs) > 1 else []
            rows.append(row)
    await redis.aclose()
    heads = ["us"]
    if folder or journal:
        heads = ["journal", "none", "ratio"] if journal else ["ours", "theirs", "ratio"]
    table = [["client", "a call", *(f"{script} {head}" for script in ("submit", "commit") for head in heads)], *rows]
    return "\n".join("".join(f"{cell:>15}" for cell in row) for row in table)


@click.command(help=__doc__)
@click.option("--against", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Other .lua files.")
@click.option("--rounds", default=60, show_default=True, help="Steps of each sequence.")
@click.option("--journal", is_flag=True, help="With journals, beside without.")
def main(against: Path | None, rounds: int, *, journal: bool) -> None:
    if against and journal:
        raise click.UsageError("either --against or --journal")
    with tempfile.TemporaryDirectory(prefix="seqmesh-") as directory, served(Path(directory)) as url:
        click.echo(asyncio.run(report(url, against, rounds, journal=journal)))


if __name__ == "__main__":
    main()

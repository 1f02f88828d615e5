"""Readings of a small mesh, for the tests of what is made of them."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.console.snapshot import Snapshot
from deploy.operate.operating import ExecutorHolding
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, ModelRecord, ServedModel
from shared.contract.model_config import ModelConfig, Oldest, SequenceBatching
from shared.statistics.tally import Counts, ModelLoad, Timings, added, execution, success
from shared.store.membership import Member
from shared.store.sequence_status import SequenceStatus
from shared.store.waiting_line import WaitingLine

LOAD = ModelLoad("sum", "1", "0")
RECORD = ModelRecord(
    ModelConfig(
        name="sum",
        backend="python",
        platform="",
        max_batch_size=8,
        inputs=(),
        outputs=(),
        sequence_batching=SequenceBatching(Oldest(8), 1_000_000),
    ),
    "{}",
    ("1",),
)


def executor(
    name: str, *, held: int = 0, alive: bool = True, leaving: bool = False, life: str = "1"
) -> ExecutorHolding:
    """An executor that serves `sum` with eight slots."""
    served = (ServedModel("sum", "1", instances=1, slots=8),)
    about = ExecutorRegistration(ExecutorId(f"{name}-{life}"), name, "host", 7, 1000, served, leaving=leaving)
    return ExecutorHolding(Member(about, alive=alive), {"sum": held} if held else {})


def status(
    id_: int | str = 42,
    executor: str = "a-1",
    *,
    state: str = "live",
    epoch: int = 1,
    steps: int = 3,
    begun_ms: int = 500,
) -> SequenceStatus:
    """A sequence of `sum`."""
    return SequenceStatus(
        model="sum",
        id=id_,
        state=state,
        version="1",
        last_step=steps,
        open_steps=0,
        behind=0,
        recoverable=True,
        closed=False,
        begun_ms=begun_ms,
        used_ms=begun_ms,
        executor=executor if state == "live" else "",
        instance=0 if state == "live" else None,
        slot=2 if state == "live" else None,
        epoch=epoch,
    )


def counted(*, steps: int, batches: int, rows: int, ms: float = 10.0) -> Counts:
    """Counts of so many steps, and of batches of so many rows."""
    compute = Timings(1_000_000, 2_000_000, 1_000_000)
    ran = [execution(batch_size=rows, compute=compute, ended_ms=1) for _ in range(batches)]
    answered = [success(rows=1, total_ns=round(ms * 1e6), queue_ns=5_000_000, compute=compute) for _ in range(steps)]
    return added([*ran, *answered])


def reading(
    at_ms: int,
    *executors: ExecutorHolding,
    sequences: tuple[SequenceStatus, ...] = (),
    counts: Counts | None = None,
    line: WaitingLine | None = None,
    records: Mapping[str, ModelRecord] | None = None,
    is_complete: bool = True,
) -> Snapshot:
    """The mesh at a moment."""
    return Snapshot(
        at_ms=at_ms,
        executors=executors,
        usable=frozenset(one.registration.executor for one in executors if one.member.usable),
        records={"sum": RECORD} if records is None else records,
        counts={} if counts is None else {LOAD: counts},
        lines={"sum": line or WaitingLine()},
        live={"sum": len(sequences)},
        sequences=sequences,
        is_complete=is_complete,
    )

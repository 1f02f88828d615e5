"""From readings to what pages show. Pure: numbers are added and subtracted here, and nowhere else."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from deploy.console.history import MESH, NO_NUMBER, ChartPoint, Moment, Moments, Subject
from deploy.console.snapshot import Snapshot, served_loads, unserved_loads
from deploy.console.stories import Stories, Story, StoryLine
from deploy.operate.operating import ExecutorHolding
from shared.contract.messages import ModelRecord, ServedModel
from shared.statistics.tally import ModelLoad, ModelStatistics, statistics_of
from shared.store.sequence_status import OPEN_STATES, SequenceStatus
from shared.store.waiting_line import WaitingLine


class ServedView(msgspec.Struct, frozen=True):
    """One version of a model on one executor. batches: rows of the latest ones; pending: requests that wait there"""

    model: str
    version: str
    instances: int
    slots: int
    held: int
    pending: int
    batches: tuple[int, ...]
    closing: bool


class ExecutorView(msgspec.Struct, frozen=True):
    """One executor. cpu, memory: 0 to 1, of its machine; -1: not told. killable: whether this console may kill it"""

    id: str
    name: str
    host: str
    pid: int
    state: str
    started_ms: int
    drained: bool
    killable: bool
    cpu: float
    memory: float
    gpus: tuple[float, ...]
    models: tuple[ServedView, ...]


class ModelView(msgspec.Struct, frozen=True):
    """One version of a model that executors serve, or whose sequences are open without one.

    Counts of sequences are of all its versions together; means in ms, -1 over nothing.
    """

    name: str
    version: str
    kind: str
    backend: str
    max_batch_size: int
    executors: int
    slots: int
    used: int
    live: int
    waiting: int
    paged: int
    pending: int
    steps_per_s: float
    request_ms: float
    batch: float
    succeeded: int
    failed: int


class SequenceView(msgspec.Struct, frozen=True):
    """One sequence on the map, or in a list. -1: not known, or none.

    id               as text, because a browser's numbers have 53 bits; is_text: 42 and "42" are two ids
    paused_until_ms  end of its pause; changed_ms: when the console saw its owner change, 0 if it did not
    """

    id: str
    is_text: bool
    model: str
    version: str
    requested_version: str
    state: str
    executor: str
    instance: int
    slot: int
    steps: int
    open: int
    behind: int
    recoverable: bool
    closed: bool
    begun_ms: int
    used_ms: int
    idle_left_ms: int
    paused_until_ms: int
    changed_ms: int
    came_from: str


class WatchedView(msgspec.Struct, frozen=True):
    """The story of the sequence that a page looks at; without `sequence` the mesh does not know it."""

    sequence: SequenceView | None
    lines: tuple[StoryLine, ...]


class MeshView(msgspec.Struct, frozen=True):
    """Everything that all pages show.

    drained  names and ids that an operator has drained, and under which no executor is there
    batches  how many ran since the reading before, by their rows
    """

    at_ms: int
    took_ms: float
    executors: tuple[ExecutorView, ...]
    drained: tuple[str, ...]
    models: tuple[ModelView, ...]
    sequences: tuple[SequenceView, ...]
    is_complete: bool
    point: ChartPoint
    batches: tuple[tuple[int, int], ...]


def mesh_view(
    now: Snapshot,
    since: Mapping[ModelLoad, ModelStatistics],
    moments: Moments,
    stories: Stories,
    *,
    killable: frozenset[str] = frozenset(),
) -> MeshView:
    """What pages show of a reading.

    since     what was counted since the reading before, for each load; moments: the same, as charts show it
    killable  names of executors that the launcher can kill
    """
    batches = Counter[int]()
    for statistics in since.values():
        batches.update({each.batch_size: each.compute_infer.count for each in statistics.batches})
    return MeshView(
        at_ms=now.at_ms,
        took_ms=round(now.took_ms, 2),
        executors=tuple(_executor(one, now, killable) for one in now.executors),
        drained=tuple(sorted(now.drained.difference(*(one.names for one in now.executors)))),
        models=tuple(_models(now, moments)),
        sequences=tuple(
            sequence_view(one, stories.of(one.sequence)) for one in now.sequences if one.state in OPEN_STATES
        ),
        is_complete=now.is_complete,
        point=moments[MESH].point,
        batches=tuple(sorted((size, count) for size, count in batches.items() if count)),
    )


def _executor(one: ExecutorHolding, now: Snapshot, killable: frozenset[str]) -> ExecutorView:
    registration = one.registration
    report = now.reports.get(registration.executor)
    machine = report.machine if report is not None else None
    of_model = {(each.model, each.version): each for each in report.models} if report is not None else {}
    served: list[ServedView] = []
    sequences = dict(one.sequences)
    for each in registration.models:
        told = of_model.get((each.model, each.version))
        served.append(
            ServedView(
                each.model,
                each.version,
                each.instances,
                each.slots,
                # The mesh counts a model's sequences, whatever their version: they are shown once.
                sequences.pop(each.model, 0),
                told.pending if told is not None and one.member.alive else 0,
                told.batches if told is not None and one.member.alive else (),
                each.closing,
            )
        )
    return ExecutorView(
        id=registration.executor,
        name=registration.name,
        host=registration.host,
        pid=registration.pid,
        state=one.state,
        started_ms=registration.started_ms,
        drained=not now.drained.isdisjoint(one.names),
        killable=registration.name in killable and one.member.alive,
        cpu=round(machine.cpu_utilization, 3) if machine is not None else NO_NUMBER,
        memory=_share(machine.memory_used, machine.memory_total) if machine is not None else NO_NUMBER,
        gpus=tuple(gpu.utilization or 0.0 for gpu in report.gpus) if report is not None else (),
        models=tuple(served),
    )


def _models(now: Snapshot, moments: Moments) -> Iterable[ModelView]:
    # Made once for all: there may be a thousand models on hundreds of executors.
    offers: dict[tuple[str, str], list[tuple[ExecutorHolding, ServedModel]]] = defaultdict(list)
    for one in now.executors:
        for served in one.registration.models if one.member.usable else ():
            offers[served.model, served.version].append((one, served))
    pending = Counter(now.queued)
    for report in now.reports.values():
        for each in report.models:
            pending[each.model, each.version] += each.pending
    for load in (*unserved_loads(now), *served_loads(now.executors, now.records)):
        record = now.records[load.model]
        serving = offers[load.model, load.version]
        line = now.lines.get(load.model) or WaitingLine()
        whole = statistics_of(load.model, load.version, now.counts.get(load, {}))
        recent = moments.get(Subject(load.model, load.version), Moment(now.at_ms)).point
        yield ModelView(
            name=load.model,
            version=load.version,
            kind=kind_of(record),
            backend=record.config.backend or record.config.platform,
            max_batch_size=record.config.max_batch_size,
            executors=len(serving),
            slots=sum(served.instances * served.slots for _, served in serving),
            used=sum(one.sequences.get(load.model, 0) for one, _ in serving),
            live=now.live.get(load.model, 0),
            waiting=line.first,
            paged=max(0, line.paged.total()),
            pending=pending[load.model, load.version] + line.steps[load.version],
            steps_per_s=recent.steps_per_s,
            request_ms=recent.request_ms,
            batch=recent.batch,
            succeeded=whole.durations["success"].count,
            failed=sum(whole.failures.values()),
        )


def kind_of(record: ModelRecord) -> str:
    """What sort of model it is, in a word."""
    if record.config.ensemble:
        return "ensemble"
    return "stateless" if record.config.sequence_batching is None else "sequences"


def sequence_view(status: SequenceStatus, story: Story | None) -> SequenceView:
    return SequenceView(
        id=str(status.id),
        is_text=isinstance(status.id, str),
        model=status.model,
        version=status.version,
        requested_version=status.requested_version,
        state=status.state,
        executor=status.executor,
        instance=-1 if status.instance is None else status.instance,
        slot=-1 if status.slot is None else status.slot,
        steps=status.last_step,
        open=status.open_steps,
        behind=status.behind,
        recoverable=status.recoverable,
        closed=status.closed,
        begun_ms=status.begun_ms,
        used_ms=status.used_ms,
        idle_left_ms=-1 if status.idle_left_ms is None else status.idle_left_ms,
        paused_until_ms=-1 if status.paused_until_ms is None else status.paused_until_ms,
        changed_ms=story.changed_ms if story is not None else 0,
        came_from=story.came_from if story is not None and story.changed_ms else "",
    )


def watched_view(status: SequenceStatus | None, story: Story | None) -> WatchedView:
    """The story of a sequence. One that the mesh has forgotten keeps what the console has seen of it."""
    shown = status or (story.status if story is not None else None)
    return WatchedView(
        sequence_view(shown, story) if shown is not None else None, tuple(story.lines) if story is not None else ()
    )


def _share(part: int, whole: int) -> float:
    return round(part / whole, 3) if whole else NO_NUMBER

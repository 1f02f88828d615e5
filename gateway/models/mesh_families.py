"""Metrics that Triton has no names for: the times of requests, steps and sequences, executors, Redis. Pure.

Names and units follow Prometheus' conventions: base units, `_total` for counters. Labels have bounded values: models
and versions of the repository, scripts, commands of the server, and words of this code. None comes from a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from gateway.models.catalog import Place
from gateway.models.exposition import Family, ShownExemplar, bound_text, number_family
from gateway.models.metric_families import Labelled, Shown, counter
from gateway.models.observation import EXECUTOR_STATES, Observed, each_model
from gateway.models.redis_figures import CommandUse, RedisFigures
from shared.contract.tenants import EVERY_OTHER
from shared.statistics import meter
from shared.statistics.reports import Sample
from shared.statistics.tally import Counts
from shared.store.script_values import StepOutcome
from shared.store.waiting_line import ENDS
from shared.traces.context import parse

Exemplars = Mapping[Place, Sequence[meter.Exemplar]]

STATELESS_PHASES = (meter.Phase.GATEWAY, meter.Phase.QUEUE, meter.Phase.COMPUTE, meter.Phase.REPLY)
REPEATED = ("repeated", "joined")
MS = 1000


def exemplars_of(observed: Observed, own: Iterable[tuple[str, str, meter.Exemplar]]) -> Exemplars:
    """The latest exemplar of each bucket. own: this gateway's, with model and version"""
    latest: dict[tuple[str, str, str, int], meter.Exemplar] = {}
    reported = ((each.model, each.version, one) for each in each_model(observed.reports) for one in each.exemplars)
    for model, version, found in (*reported, *own):
        bucket = (model, version, found.name, found.bucket)
        before = latest.get(bucket)
        if before is None or before.at_ms < found.at_ms:
            latest[bucket] = found
    shown: dict[Place, list[meter.Exemplar]] = {}
    for (model, version, *_), found in latest.items():
        shown.setdefault((model, version), []).append(found)
    return shown


class _Histograms:
    """Builds a histogram's family, line by line. unit: how many of the distribution's units are one of the family's"""

    def __init__(self, name: str, text: str, bounds: Sequence[float], unit: int = meter.SECOND) -> None:
        self._about = (name, "histogram", text)
        self._bounds = [*(bound_text(float(bound)) for bound in bounds), "+Inf"]
        self._unit = unit
        self._samples: list[Sample] = []
        self._exemplars: dict[int, ShownExemplar] = {}

    def add(
        self, labels: Mapping[str, str], found: meter.Histogram, of: str = "", exemplars: Iterable[meter.Exemplar] = ()
    ) -> None:
        """Adds what has these labels. of: name of the distribution; exemplars: of all distributions"""
        first = len(self._samples)
        upto = list(accumulate(found.buckets))
        self._samples += [
            Sample("_bucket", {**labels, "le": bound}, count) for bound, count in zip(self._bounds, upto, strict=True)
        ]
        self._samples += [
            Sample("_sum", dict(labels), found.total / self._unit),
            Sample("_count", dict(labels), upto[-1]),
        ]
        for one in exemplars:
            # A report of another release may have other buckets, and this gateway may not know of the count yet.
            if one.name == of and 0 <= one.bucket < len(found.buckets) and found.buckets[one.bucket]:
                trace_id, span_id = parse(one.trace)
                self._exemplars[first + one.bucket] = ShownExemplar(
                    f"{trace_id:032x}", f"{span_id:016x}", one.value / self._unit, one.at_ms / 1000
                )

    @property
    def families(self) -> list[Family]:
        """None where nothing was added."""
        return [Family(*self._about, self._samples, self._exemplars)] if self._samples else []


def request_families(models: Sequence[Shown], exemplars: Exemplars) -> list[Family]:
    """The times of all models' requests, and the sizes of their batches."""
    whole = _Histograms(
        "seqmesh_request_duration_seconds",
        "Time of requests that succeeded, from their arrival at a gateway to their answer",
        meter.TIME_BOUNDS_S,
    )
    phases = _Histograms(
        "seqmesh_request_phase_duration_seconds",
        "Time of requests by phase, as their spans are called; schedule, queue and checkpoint of sequences' steps to "
        "the millisecond",
        meter.TIME_BOUNDS_S,
    )
    sizes = _Histograms(
        "seqmesh_batch_size", "Rows of batches, without those that no request filled", meter.ROW_BOUNDS, 1
    )
    for each in models:
        counts, known = each.statistics.counts, exemplars.get((each.statistics.name, each.version), ())
        whole.add(
            each.labels, meter.histogram_of(counts, meter.REQUEST_TIME, meter.TIME_BOUNDS_S), meter.REQUEST_TIME, known
        )
        for phase in meter.Phase if each.record.config.sequence_batching is not None else STATELESS_PHASES:
            field = meter.phase_field(phase)
            phases.add(
                {**each.labels, "phase": phase}, meter.histogram_of(counts, field, meter.TIME_BOUNDS_S), field, known
            )
        sizes.add(each.labels, meter.histogram_of(counts, meter.BATCH_ROWS, meter.ROW_BOUNDS))
    return [family for each in (whole, phases, sizes) for family in each.families]


SUMS: Sequence[tuple[str, str, str]] = (
    (
        "seqmesh_steps_replayed_total",
        "Steps that ran again for their state alone, behind a checkpoint",
        meter.REPLAYED_STEPS,
    ),
    ("seqmesh_checkpoints_total", "Steps that were committed with a checkpoint", meter.CHECKPOINTS),
    (
        "seqmesh_checkpoint_bytes_total",
        "Bytes of these checkpoints; how long they took: the phase checkpoint",
        meter.CHECKPOINT_BYTES,
    ),
)
"""Counters of models with sequences: name, help text, and the field of their counts."""


def sequence_families(models: Sequence[Shown], led: Iterable[str]) -> list[Family]:
    """What became of sequences and their steps; nothing where no model has sequences. led: models with a leader"""
    models = [each for each in models if each.record.config.sequence_batching is not None]
    if not models:
        return []
    leaders = {each.statistics.name: float(each.statistics.name in led) for each in models}
    return [
        number_family(
            "seqmesh_model_has_leader",
            "1 while a scheduler leads the model: gives its sequences slots, ends idle ones, takes over",
            [Sample("", {"model": model}, value) for model, value in leaders.items()],
        ),
        counter(
            models,
            "seqmesh_sequences_started_total",
            "Sequences that began",
            lambda each: [({}, each.line.begun[each.version])],
        ),
        _ended(models),
        counter(
            models,
            "seqmesh_steps_total",
            "Steps that were made final, by outcome",
            lambda each: _by(each, "outcome", meter.STEP_OUTCOME, [outcome.name.lower() for outcome in StepOutcome]),
        ),
        counter(
            models,
            "seqmesh_steps_repeated_total",
            "Retries of accepted steps: answered from store (repeated), or with the first attempt (joined)",
            lambda each: _by(each, "how", meter.REPEATED_STEPS, REPEATED),
        ),
        *(
            counter(models, name, text, lambda each, field=field: [({}, each.statistics.counts.get(field, 0))])
            for name, text, field in SUMS
        ),
        *_slot_waits(models),
    ]


def _ended(models: Sequence[Shown]) -> Family:
    """Sequences are lost with a version that is replaced: what was lost is told of versions that are gone, too."""
    served = counter(
        models,
        "seqmesh_sequences_ended_total",
        "Sequences that are over, by reason; lost: also of versions that are served no more",
        lambda each: [({"reason": reason}, each.line.over[each.version, reason]) for reason in ENDS.values()],
    )
    versions = {(each.statistics.name, each.version) for each in models}
    lines = {each.statistics.name: each.line for each in models}
    gone = [
        Sample("", {"model": model, "version": version, "reason": reason}, count)
        for model, line in lines.items()
        for (version, reason), count in line.over.items()
        if reason == "lost" and (model, version) not in versions
    ]
    return replace(served, samples=[*served.samples, *gone])


def _by(each: Shown, label: str, field: str, values: Sequence[str]) -> Labelled:
    return [({label: value}, each.statistics.counts.get(f"{field}{value}", 0)) for value in values]


def _slot_waits(models: Sequence[Shown]) -> list[Family]:
    waits = _Histograms(
        "seqmesh_slot_wait_duration_seconds",
        "Time that sequences have waited for the slot that they got. `cause`: `start` for their first one, `page` "
        "after they were paged, `takeover` for another one: their owner was lost or left, or they were moved, resumed "
        "or imported",
        meter.SLOT_WAIT_BOUNDS_S,
        MS,
    )
    for each in models:
        for cause in meter.SLOT_WAITS:
            found = meter.histogram_of(each.statistics.counts, f"{meter.SLOT_WAIT}{cause}", meter.SLOT_WAIT_BOUNDS_S)
            waits.add({**each.labels, "cause": cause}, found)
    return waits.families


def tenant_families(sequences: Mapping[str, int], of_mesh: Counts) -> list[Family]:
    """What tenants with limits of their own have, and what they were refused.

    sequences  of each of them, those that are not over
    """
    # What was counted of a tenant stays in Redis when its limits are gone.
    counts = {tenant: of_mesh.get(f"{meter.OVER_QUOTA}{tenant}", 0) for tenant in (EVERY_OTHER, *sequences)}
    refused = {tenant: count for tenant, count in counts.items() if count}
    families = [
        number_family(
            "seqmesh_tenant_sequences",
            "Sequences of tenants that have limits of their own, from the first step on until they are over",
            [Sample("", {"tenant": tenant}, count) for tenant, count in sorted(sequences.items())],
        ),
        number_family(
            "seqmesh_tenant_refusals_total",
            "Requests refused because of their tenant's limits; *: of a tenant that has none of its own",
            [Sample("", {"tenant": tenant}, count) for tenant, count in sorted(refused.items())],
        ),
    ]
    return [family for family in families if family.samples]


def executor_families(observed: Observed) -> list[Family]:
    samples = [Sample("", {"state": state}, observed.executors.get(state, 0)) for state in EXECUTOR_STATES]
    return [
        number_family("seqmesh_executors", "Executors by state", samples),
        number_family(
            "seqmesh_model_unserved",
            "1 for a model without an executor that had one within ten minutes or has open sequences; none if unloaded",
            [Sample("", {"model": model}, 1) for model in sorted(observed.unserved)],
        ),
    ]


REDIS: Sequence[tuple[str, str, Callable[[RedisFigures], float | None]]] = (
    ("seqmesh_redis_memory_used_bytes", "Memory that Redis uses", lambda told: told.memory_used),
    (
        "seqmesh_redis_memory_max_bytes",
        "Memory beyond which Redis refuses new requests; 0: no bound",
        lambda told: told.memory_max,
    ),
    ("seqmesh_redis_clients", "Connections to Redis", lambda told: told.clients),
    ("seqmesh_redis_uptime_seconds", "Time since Redis was started", lambda told: told.uptime_s),
    (
        "seqmesh_redis_evicts",
        "1 if Redis has a maxmemory-policy by which it may drop live sequences",
        lambda told: float(told.evicts),
    ),
    (
        "seqmesh_redis_log_kept",
        "1 if Redis keeps an append-only file; without one a restart loses every sequence",
        lambda told: float(told.log_written is not None),
    ),
    (
        "seqmesh_redis_log_written",
        "1 if Redis wrote its append-only file the last time; absent if it keeps none",
        lambda told: None if told.log_written is None else float(told.log_written),
    ),
    (
        "seqmesh_redis_log_rewritten",
        "0 if Redis could not write its append-only file anew the last time: it grows; absent if it keeps none",
        lambda told: None if told.log_rewritten is None else float(told.log_rewritten),
    ),
    (
        "seqmesh_redis_cpu_seconds_total",
        "Processor time of Redis' thread that runs the commands; at one second a second it is full",
        lambda told: told.cpu_s,
    ),
)
COMMANDS: Sequence[tuple[str, str, Callable[[CommandUse], float]]] = (
    ("seqmesh_redis_commands_total", "Commands that Redis has run; fcall: the mesh's scripts", lambda use: use.calls),
    (
        "seqmesh_redis_command_seconds_total",
        "Time of Redis for these commands; fcall: with the commands that the scripts run, which are counted alone, too",
        lambda use: use.us / 1e6,
    ),
)


def redis_families(told: Mapping[str, RedisFigures], of_mesh: Counts) -> list[Family]:
    """Round trips by service and script; what Redis tells of itself, if it does.

    told     by each server, with the address of its node, "" of an only one
    of_mesh  what belongs to no model
    """
    trips = _Histograms(
        "seqmesh_redis_round_trip_duration_seconds",
        "Time of services for round trips to Redis, by the first script that they called",
        meter.TIME_BOUNDS_S,
    )
    for name in meter.names_of(of_mesh, meter.ROUND_TRIP):
        service, _, call = name.removeprefix(meter.ROUND_TRIP).partition("/")
        trips.add({"service": service, "call": call}, meter.histogram_of(of_mesh, name, meter.TIME_BOUNDS_S))
    families = trips.families
    if not told:
        return families
    servers = [({"node": address} if address else {}, figures) for address, figures in sorted(told.items())]
    for name, text, value in REDIS:
        samples = [Sample("", own, read) for own, figures in servers if (read := value(figures)) is not None]
        if samples:
            families.append(number_family(name, text, samples))
    for name, text, of in COMMANDS:
        samples = [
            Sample("", {"command": command, **own}, of(use))
            for own, figures in servers
            for command, use in sorted(figures.commands.items())
        ]
        families.append(number_family(name, text, samples))
    return families

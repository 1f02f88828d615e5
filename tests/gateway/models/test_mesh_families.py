"""Metrics beside Triton's: what is shown of the sums, with exemplars that lead to the trace."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.models.exposition import Family
from gateway.models.mesh_families import (
    executor_families,
    exemplars_of,
    redis_families,
    request_families,
    sequence_families,
    tenant_families,
)
from gateway.models.metric_families import Shown, shown
from gateway.models.observation import Observed
from gateway.models.redis_figures import figures_of
from shared.contract.messages import ModelRecord
from shared.contract.model_config import Direct, ModelConfig, SequenceBatching
from shared.statistics.meter import OVER_QUOTA, SECOND, Exemplar, LoadMeter, Phase, RoundTripMeter
from shared.statistics.reports import ExecutorReport, HostReport, ModelReport
from shared.statistics.tally import statistics_of
from shared.store.waiting_line import WaitingLine
from shared.traces.context import traceparent

SEQUENCES = SequenceBatching(Direct(), 1)


def models(counts: dict[str, int], *, sequences: bool = True, line: WaitingLine | None = None) -> list[Shown]:
    config = ModelConfig("m", "python", "", 8, (), (), sequence_batching=SEQUENCES if sequences else None)
    seen = Observed([], {}, lines={"m": line or WaitingLine()})
    return shown([statistics_of("m", "1", counts)], {"m": ModelRecord(config, "{}", ("1",))}, seen)


def values(families: Sequence[Family], name: str, **labels: str) -> dict[str, float]:
    """Samples that have these labels, by suffix and the other labels but model and version."""
    (family,) = [family for family in families if family.name == name]
    return {
        sample.suffix
        + ",".join(
            text for label, text in sorted(sample.labels.items()) if label not in {"model", "version", *labels}
        ): (sample.value)
        for sample in family.samples
        if labels.items() <= sample.labels.items()
    }


def test_a_phase_is_a_cumulative_histogram_in_seconds() -> None:
    meter = LoadMeter()
    for ms in (1, 3, 20_000):
        meter.phase(Phase.QUEUE).add(ms * SECOND // 1000)

    families = request_families(models(meter.take()), {})

    queue = values(families, "seqmesh_request_phase_duration_seconds", phase="queue")
    assert (0, 1, 1, 2, 2, 3) == tuple(
        queue[f"_bucket{le}"] for le in ("0.0005", "0.001", "0.0025", "0.005", "10.0", "+Inf")
    )
    assert (3, 20.004) == (queue["_count"], queue["_sum"])


def test_stateless_models_have_no_phases_of_sequences() -> None:
    def phases(*, sequences: bool) -> set[str]:
        families = request_families(models({}, sequences=sequences), {})
        return {sample.labels["phase"] for family in families for sample in family.samples if "phase" in sample.labels}

    assert {"gateway", "schedule", "queue", "compute", "checkpoint", "reply"} == phases(sequences=True)
    assert {"gateway", "queue", "compute", "reply"} == phases(sequences=False)
    assert [] == sequence_families(models({}, sequences=False), ())


def test_the_latest_exemplar_of_a_bucket_is_shown_whoever_measured_it() -> None:
    def at(at_ms: int, span: int, bucket: int = 3, value: int = 4_000_000) -> Exemplar:
        return Exemplar("phase_queue", bucket, traceparent(0xAB, span), value, at_ms)

    machine = HostReport(0.0, 0, 0)
    reports = [
        ExecutorReport(name, "h", machine, (ModelReport("m", "1", exemplars=exemplars),))
        for name, exemplars in (("a", (at(5, 1),)), ("b", (at(7, 2), at(7, 9, bucket=14), at(8, 9, bucket=99))))
    ]
    known = exemplars_of(Observed(reports, {}), [("m", "1", at(6, 3)), ("other", "1", at(9, 4))])
    meter = LoadMeter()
    meter.phase(Phase.QUEUE).add(4_000_000)

    families = request_families(models(meter.take()), known)

    # Without a count there is no exemplar: its executor has not handed the sums on yet.
    (phases,) = [family for family in families if family.name == "seqmesh_request_phase_duration_seconds"]
    ((index, exemplar),) = phases.exemplars.items()
    assert ("queue", "0.005") == (phases.samples[index].labels["phase"], phases.samples[index].labels["le"])
    assert (f"{0xAB:032x}", f"{2:016x}", 0.004, 0.007) == (
        exemplar.trace_id,
        exemplar.span_id,
        exemplar.value,
        exemplar.at_s,
    )


def test_sequences_and_steps_are_counted_by_what_became_of_them() -> None:
    line = WaitingLine()
    for name in ("begun:1", "begun:1", "over_e:1", "over_r:1", "over_o:1", "over_?:1", "begun:2"):
        line.add(name, 1)
    counts = {
        "step_outcome_done": 5,
        "step_outcome_given_up": 1,
        "repeated_step_count_joined": 2,
        "checkpoint_bytes": 64,
    }
    counts |= {"replayed_step_count": 3, "checkpoint_count": 4, "slot_wait_page:2": 1, "slot_wait_page:sum": 40}

    families = sequence_families(models(counts, line=line), ["m"])

    assert {"": 2} == values(families, "seqmesh_sequences_started_total")
    ends = values(families, "seqmesh_sequences_ended_total")
    assert {"end": 1, "rejected": 1, "lost": 1, "expired": 0, "failed": 0, "cancelled": 0} == ends
    steps = values(families, "seqmesh_steps_total")
    assert {"done": 5, "failed": 0, "void": 0, "cancelled": 0, "given_up": 1, "lost": 0} == steps
    assert {"repeated": 0, "joined": 2} == values(families, "seqmesh_steps_repeated_total")
    assert {"": 3} == values(families, "seqmesh_steps_replayed_total")
    assert {"": 4} == values(families, "seqmesh_checkpoints_total")
    assert {"": 64} == values(families, "seqmesh_checkpoint_bytes_total")
    assert {"": 1.0} == values(families, "seqmesh_model_has_leader")
    waits = values(families, "seqmesh_slot_wait_duration_seconds", cause="page")
    assert (0, 1, 0.04) == (waits["_bucket0.01"], waits["_bucket0.05"], waits["_sum"])
    assert {"": 0.0} == values(sequence_families(models({}), ()), "seqmesh_model_has_leader")


def test_what_was_lost_with_a_version_is_told_when_that_is_gone() -> None:
    """So the alert sees it: the sequences are lost as another version takes its place."""
    line = WaitingLine()
    for name in ("over_o:0", "over_o:0", "over_e:0", "over_o:1"):
        line.add(name, 1)

    (family,) = [one for one in sequence_families(models({}, line=line), []) if one.name.endswith("ended_total")]

    lost = {one.labels["version"]: one.value for one in family.samples if one.labels["reason"] == "lost"}
    assert {"0": 2, "1": 1} == lost
    assert {"1"} == {one.labels["version"] for one in family.samples if one.labels["reason"] == "end"}


def test_executors_are_shown_in_every_state() -> None:
    families = executor_families(Observed([], {}, executors={"serving": 2, "lost": 1}, unserved=frozenset("m")))

    assert {"": 1} == values(families, "seqmesh_model_unserved", model="m")
    assert {"serving": 2, "leaving": 0, "lost": 1, "drained": 0} == values(families, "seqmesh_executors")


def test_a_tenant_is_shown_while_it_has_limits_of_its_own() -> None:
    counts = {f"{OVER_QUOTA}{tenant}": 3 for tenant in ("acme", "gone", "*")}

    families = tenant_families({"acme": 1, "calm": 0}, counts)

    assert [{"acme": 1, "calm": 0}, {"acme": 3, "*": 3}] == [
        {sample.labels["tenant"]: sample.value for sample in family.samples} for family in families
    ]


def test_redis_is_shown_as_services_and_as_itself_see_it() -> None:
    trips = RoundTripMeter("executor")
    trips.took("commit", 2_000_000)
    info = {"used_memory": 7, "maxmemory": 9, "connected_clients": 3, "uptime_in_seconds": 60, "aof_enabled": 1}
    info |= {
        "aof_last_write_status": "err",
        "aof_last_bgrewrite_status": "err",
        "used_cpu_user": 3.0,
        "used_cpu_sys": 1.0,
        "cmdstat_fcall": {"calls": 2, "usec": 500_000},
    }
    info |= {"cmdstat_config|get": {"calls": 1, "usec": 1}, "cmdstat_config|set": {"calls": 2, "usec": 2}}

    families = redis_families({"": figures_of(info)}, trips.meter.take())

    name = "seqmesh_redis_round_trip_duration_seconds"
    assert {"_count": 1} == {"_count": values(families, name, service="executor", call="commit")["_count"]}
    assert {"": 9} == values(families, "seqmesh_redis_memory_max_bytes")
    assert {"": 0.0} == values(families, "seqmesh_redis_log_written")
    assert {"": 0.0} == values(families, "seqmesh_redis_log_rewritten")
    assert {"fcall": 0.5, "config": 3e-6} == values(families, "seqmesh_redis_command_seconds_total")
    assert {"fcall": 2, "config": 3} == values(families, "seqmesh_redis_commands_total")
    assert {"": 4.0} == values(families, "seqmesh_redis_cpu_seconds_total")
    of_thread = {"used_cpu_user_main_thread": 2.0, "used_cpu_sys_main_thread": 0.5}
    assert {"": 2.5} == values(
        redis_families({"": figures_of(info | of_thread)}, {}), "seqmesh_redis_cpu_seconds_total"
    )
    assert [] == redis_families({}, {})
    nodes = {"b:1": figures_of({**info, "aof_enabled": 0}), "a:1": figures_of(info)}
    assert {"a:1": 0.0} == values(redis_families(nodes, {}), "seqmesh_redis_log_written")
    assert {"a:1": 7, "b:1": 7} == values(redis_families(nodes, {}), "seqmesh_redis_memory_used_bytes")
    assert {"a:1": 2, "b:1": 2} == values(redis_families(nodes, {}), "seqmesh_redis_commands_total", command="fcall")
    without = redis_families({"": figures_of({**info, "aof_enabled": 0})}, {})
    assert not {"seqmesh_redis_log_written", "seqmesh_redis_log_rewritten"} & {family.name for family in without}
    assert [{"": 1.0}, {"": 0.0}] == [values(each, "seqmesh_redis_log_kept") for each in (families, without)]
    evicting = redis_families({"": figures_of({**info, "maxmemory_policy": "allkeys-lru"})}, {})
    assert [{"": 0.0}, {"": 1.0}] == [values(each, "seqmesh_redis_evicts") for each in (families, evicting)]

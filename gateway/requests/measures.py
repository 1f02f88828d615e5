"""What this gateway measures of its requests: the phases that pass here, the whole time, retries.

Called for every request, so each method does a few additions and nothing else. What was measured leaves with the
process's other measurements, once a second (`shared.store.metering`).
"""

from __future__ import annotations

from shared.contract.messages import ModelRecord
from shared.statistics.meter import OF_MESH, OVER_QUOTA, REPEATED_STEPS, REQUEST_TIME, LoadMeter, Phase, RoundTripMeter
from shared.statistics.metrics_config import FIRST_RESPONSE, FIRST_RESPONSE_BUCKETS_MS, MetricsConfig
from shared.statistics.tally import ModelLoad, Timings, first_response, sketches
from shared.store.script_values import SubmitCode

LOADS_MAX = 4096
"""Model versions whose measures are kept, 6 KB each: where models come and go for weeks, the first are forgotten."""
REPEATED = {code: f"{REPEATED_STEPS}{code.name.lower()}" for code in (SubmitCode.REPEATED, SubmitCode.JOINED)}


class LoadMeasures:
    """Of one load of a model version. Times are wall clock, ns; trace: traceparent of the span, "" for none"""

    def __init__(self, load: ModelLoad) -> None:
        self.load = load
        self.meter = LoadMeter()
        self._gateway, self._reply = map(self.meter.phase, (Phase.GATEWAY, Phase.REPLY))
        self._whole = self.meter.distribution(REQUEST_TIME)

    def accepted(self, arrived_ns: int, accepted_ns: int, trace: str) -> None:
        """Redis has accepted a request."""
        took_ns = accepted_ns - arrived_ns
        self._gateway.add(took_ns)
        if trace:
            self._gateway.show(took_ns, trace, accepted_ns)

    def repeated(self, code: SubmitCode) -> None:
        """A step was accepted before: it is answered from store, or with the first attempt."""
        self.meter.counts[REPEATED[code]] += 1

    def answered(self, arrived_ns: int, replied_ns: int, ended_ns: int, trace: str) -> None:
        """The caller of a request has its answer, which is no error."""
        self._reply.add(ended_ns - replied_ns)
        if trace:
            self._reply.show(ended_ns - replied_ns, trace, ended_ns)
        self.over(arrived_ns, ended_ns, trace)

    def over(self, arrived_ns: int, ended_ns: int, trace: str) -> None:
        """The whole time of such a request. Of one to an ensemble there are no phases: its steps have them."""
        self._whole.add(ended_ns - arrived_ns)
        if trace:
            self._whole.show(ended_ns - arrived_ns, trace, ended_ns)


class Measures:
    """Of all requests of this gateway.

    metrics  which latencies are counted beside the sums
    trips    its round trips to Redis
    """

    def __init__(self, metrics: MetricsConfig) -> None:
        self._metrics = metrics
        self.trips = RoundTripMeter("gateway")
        self._loads: dict[tuple[str, str], LoadMeasures] = {}

    def over_quota(self, tenant: str) -> None:
        """A request was refused because of its tenant's limits. tenant: its name, or `*`"""
        self.trips.meter.counts[f"{OVER_QUOTA}{tenant}"] += 1

    def of(self, record: ModelRecord, version: str) -> LoadMeasures:
        """Those of the load that is served. What is left of the load before it is dropped, as its counts are; also that
        of versions that the model has no more.
        """
        model = record.config.name
        found = self._loads.get((model, version))
        if found is None or found.load.generation != record.generation:
            for gone in [each for each in self._loads if each[0] == model and each[1] not in record.versions]:
                del self._loads[gone]
            if len(self._loads) >= LOADS_MAX:
                del self._loads[next(iter(self._loads))]
            found = self._loads[model, version] = LoadMeasures(ModelLoad(model, version, record.generation))
        return found

    def latencies(self, record: ModelRecord, *, compute: Timings, first_ns: int) -> dict[str, int]:
        """What is counted of a request to an ensemble beside its sums; an executor does so for its own models.

        first_ns  from the request's arrival to its first answer
        """
        counts: dict[str, int] = {}
        if self._metrics.summary_latencies:
            counts |= sketches({"request": compute.compute_infer_ns, "queue": 0, **dict(compute.items())})
        if self._metrics.histogram_latencies:
            bounds_ms = record.config.histogram_buckets.get(FIRST_RESPONSE, FIRST_RESPONSE_BUCKETS_MS)
            counts |= first_response(first_ns, bounds_ms)
        return counts

    def meters(self) -> list[tuple[ModelLoad, LoadMeter]]:
        return [(OF_MESH, self.trips.meter), *((each.load, each.meter) for each in self._loads.values())]

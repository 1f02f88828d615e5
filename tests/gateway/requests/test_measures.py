"""What a gateway counts of requests belongs to one load of a model."""

from __future__ import annotations

import msgspec
import pytest

from gateway.requests.forms import KnownForms
from gateway.requests.infer_call import InferCall
from gateway.requests.measures import Measures
from shared.contract.messages import ModelRecord
from shared.contract.tensors import Tensor
from shared.statistics.meter import REPEATED_STEPS
from shared.statistics.metrics_config import MetricsConfig
from shared.store.script_values import SubmitCode
from tests.gateway.fake_executor import echo, running_sum


def test_counts_are_kept_until_another_load_is_served() -> None:
    measures, record = Measures(MetricsConfig()), ModelRecord(running_sum("m"), "{}", ("1",))
    for code in (SubmitCode.JOINED, SubmitCode.REPEATED, SubmitCode.JOINED):
        measures.of(record, "1").repeated(code)
    _, (_, meter) = measures.meters()
    assert {f"{REPEATED_STEPS}joined": 2, f"{REPEATED_STEPS}repeated": 1} == meter.counts

    measures.of(msgspec.structs.replace(record, generation="2"), "1")

    _, (_, meter) = measures.meters()
    assert not meter.counts


def test_versions_that_a_model_has_no_more_are_forgotten() -> None:
    """A model that gets a new version every hour would fill a gateway that runs for years."""
    measures, record = Measures(MetricsConfig()), ModelRecord(running_sum("m"), "{}", ("1", "2"))
    other = measures.of(ModelRecord(running_sum("n"), "{}", ("1",)), "1")
    for version in record.versions:
        measures.of(record, version)
    new = msgspec.structs.replace(record, versions=("2", "3"), generation="2")
    kept = [measures.of(new, version) for version in new.versions]

    _, *loads = measures.meters()
    assert sorted((each.load.model, each.load.version) for each in (other, *kept)) == sorted(
        (load.model, load.version) for load, _ in loads
    )


def test_models_that_come_and_go_do_not_fill_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.requests.measures.LOADS_MAX", 3)
    monkeypatch.setattr("gateway.requests.forms.KNOWN_FORMS", 3)
    measures, forms = Measures(MetricsConfig()), KnownForms()
    for number in range(9):
        config = echo(f"m{number}")
        measures.of(ModelRecord(config, "{}", ("1",)), "1")
        forms.check(InferCall(config.name, inputs=(Tensor("INPUT0", "FP32", (1, 1), bytes(4)),)), config)

    _, *loads = measures.meters()
    assert ["m6", "m7", "m8"] == [load.model for load, _ in loads]
    assert ["m6", "m7", "m8"] == list(forms._last)

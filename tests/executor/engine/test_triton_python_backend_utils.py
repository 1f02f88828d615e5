"""The interface that a `model.py` imports: what Triton's documentation promises of it."""

from __future__ import annotations

import gc
import json
import logging
import sys
import threading
from typing import Any, cast

import numpy as np
import pytest
import torch

from executor.engine.base import Engine
from executor.engine.python import model_metrics
from executor.engine.python import triton_python_backend_utils as pb_utils
from executor.engine.python.instance_code import InstanceCode
from executor.engine.python.model import called
from executor.engine.python.model_metrics import METRICS_MAX, custom_families, forget_families
from executor.engine.python.tensor import TypedTensor
from shared.contract.errors import LoadError
from shared.statistics.reports import ExecutorReport, HostReport, Sample, decode_report, encode_report
from tests.executor.engine.model_workshop import Workshop, plain_config

CONFIG: dict[str, Any] = {
    "name": "m",
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [3]}],
    "output": [{"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]}],
}


def test_types_translate_both_ways() -> None:
    assert np.float16 is pb_utils.triton_string_to_numpy("TYPE_FP16")
    assert np.object_ is pb_utils.triton_string_to_numpy("TYPE_STRING")
    for number, numpy_type in pb_utils.TRITON_TO_NUMPY_TYPE.items():
        assert number == pb_utils.numpy_to_triton_type(pb_utils.triton_to_numpy_type(number))
        assert number == pb_utils.Tensor("t", np.zeros(1, numpy_type)).triton_dtype()
    assert [None, None] == [pb_utils.triton_to_numpy_type(bf16_or_none) for bf16_or_none in (14, 0)]
    assert pb_utils.numpy_to_triton_type(np.complex64) is None


def test_configurations_are_searched_by_name() -> None:
    assert CONFIG["input"][0] == pb_utils.get_input_config_by_name(CONFIG, "IN")
    assert CONFIG["output"][0] == pb_utils.get_output_config_by_name(CONFIG, "OUT")
    assert pb_utils.get_output_config_by_name(CONFIG, "IN") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(CONFIG)


def test_byte_tensors_survive_their_wire_form() -> None:
    elements = np.array([[b"a", b""], [b"\xff\0", b"long" * 10]], dtype=np.object_)
    encoded = pb_utils.serialize_byte_tensor(elements)

    assert encoded is not None
    assert elements.reshape(-1).tolist() == pb_utils.deserialize_bytes_tensor(encoded).tolist()
    assert pb_utils.serialize_byte_tensor(np.zeros(1)) is None


def test_a_tensor_goes_to_torch_and_back_without_losing_anything() -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = pb_utils.Tensor("t", numbers)

    from_capsule = pb_utils.Tensor.from_dlpack("c", tensor.to_dlpack())
    from_torch = pb_utils.Tensor.from_dlpack("u", torch.from_numpy(numbers))

    assert numbers.tolist() == torch.from_dlpack(tensor).tolist()
    assert numbers.tolist() == from_capsule.as_numpy().tolist() == from_torch.as_numpy().tolist()
    assert ("c", [2, 3], True) == (from_capsule.name(), from_capsule.shape(), from_capsule.is_cpu())


def test_a_tensor_of_bf16_is_taken_as_it_is_given() -> None:
    given = TypedTensor("t", np.array([[0x3F80, 0xC000]], np.uint16), "BF16")

    taken = pb_utils.Tensor.from_dlpack("u", given)

    assert [[1, -2]] == torch.from_dlpack(taken).tolist()


def test_a_negative_view_of_torch_keeps_its_sign() -> None:
    """Torch gives away the memory that such a view negates."""
    imaginary = torch.tensor([[1 + 2j, 3 - 4j]]).conj().imag

    assert [[-2, 4]] == pb_utils.Tensor.from_dlpack("t", imaginary).as_numpy().tolist()


def test_an_environment_without_torch_takes_capsules_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TensorFlow and older releases of others give them; what numpy lacks is told with the remedy."""
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    halves: Any = torch.ones(2, dtype=torch.bfloat16)
    monkeypatch.setitem(sys.modules, "torch", None)
    tensor = pb_utils.Tensor("t", numbers)

    assert numbers.tolist() == pb_utils.Tensor.from_dlpack("c", tensor.to_dlpack()).as_numpy().tolist()
    for given in (halves, halves.__dlpack__()):
        with pytest.raises(pb_utils.TritonModelException, match=r"tensor 'h' .* install torch in the model's"):
            pb_utils.Tensor.from_dlpack("h", given)
    with pytest.raises(pb_utils.TritonModelException, match=r"tensor 'b' .* install torch in the model's"):
        TypedTensor("b", np.zeros(1, np.uint16), "BF16").to_dlpack()


def test_strings_have_no_dlpack() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="tensor 't' is BYTES, which DLPack does not have"):
        pb_utils.Tensor("t", np.array([b"a"], dtype=np.object_)).to_dlpack()


def test_responses_are_searched_by_name_and_carry_errors() -> None:
    tensor = pb_utils.Tensor("y", np.zeros(1))
    fine = pb_utils.InferenceResponse([tensor], parameters={"a": 1})
    failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND))

    assert tensor is pb_utils.get_output_tensor_by_name(fine, "y")
    assert pb_utils.get_output_tensor_by_name(fine, "z") is None
    assert (False, {"a": 1}) == (fine.has_error(), json.loads(fine.parameters()))
    assert failed.has_error()
    error = failed.error()
    assert error is not None
    assert ("NOT_FOUND", "no") == (error.code(), error.message())


def test_response_senders_and_other_memories_are_told_by_name() -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"comes from InferenceRequest.get_response_sender"):
        pb_utils.InferenceResponseSender()
    with pytest.raises(pb_utils.TritonModelException, match="unknown memory type 1"):
        pb_utils.PreferredMemory(1)
    assert 0 == pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU).memory_type_id


def test_a_request_of_the_model_s_own() -> None:
    request = pb_utils.InferenceRequest("id", 7, [pb_utils.Tensor("x", np.zeros(1))], ["y"], "other", flags=1)

    assert ("id", 7, {"y"}, 1) == (
        request.request_id(),
        request.correlation_id(),
        request.requested_output_names(),
        request.flags(),
    )
    assert pb_utils.get_input_tensor_by_name(request, "x") is request.inputs()[0]


def test_an_input_that_a_model_gives_twice_is_not_dropped() -> None:
    """The mesh refuses such a call, as Triton does. With one of the two the answer would be to another question."""
    twice = [pb_utils.Tensor("x", np.full(1, value)) for value in (1, 2)]

    assert twice == pb_utils.InferenceRequest(model_name="other", inputs=twice).inputs()


def test_an_input_that_the_model_itself_did_not_get_is_named_where_the_request_is_made() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="with id 'a' and model name 'other' should not be empty"):
        pb_utils.InferenceRequest(model_name="other", inputs=[pb_utils.Tensor("x", np.zeros(1)), None], request_id="a")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["load_model", "unload_model"])
def test_a_model_does_not_manage_other_models(name: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=rf"\({name}\) is not supported by seqmesh"):
        getattr(pb_utils, name)("other")


def test_constants_have_triton_s_values() -> None:
    names = ("REQUEST_FLAG_SEQUENCE_START", "REQUEST_FLAG_SEQUENCE_END", "RESPONSE_COMPLETE_FINAL")
    names += ("REQUEST_RELEASE_ALL", "REQUEST_RELEASE_RESCHEDULE", "MEMORY_CPU", "MEMORY_GPU")

    assert [1, 2, 1, 1, 2, 0, 2] == [getattr(pb_utils, f"TRITONSERVER_{name}") for name in names]


def test_the_logger_writes_to_the_executor_s_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="seqmesh.model"):
        pb_utils.Logger.log("a", pb_utils.Logger.WARNING)
        pb_utils.Logger.log_info("b")
        pb_utils.Logger.log_warn("c")
        pb_utils.Logger.log_error("d")
        pb_utils.Logger.log_verbose("100%")

    assert [("WARNING", "a"), ("INFO", "b"), ("WARNING", "c"), ("ERROR", "d"), ("DEBUG", "100%")] == [
        (record.levelname, record.message) for record in caplog.records if record.name == "seqmesh.model"
    ]


def test_metrics_of_a_model_are_reported_under_their_own_names() -> None:
    """Two instances that make the same family share it, as in Triton."""
    families = [pb_utils.MetricFamily("model_calls", "calls", pb_utils.MetricFamily.COUNTER) for _ in range(2)]
    for family in families:
        family.Metric({"kind": "a"}).increment(2)
    families[0].Metric({"other": "b"}).increment(1)
    gauge = pb_utils.MetricFamily("model_level", "level", pb_utils.MetricFamily.GAUGE).Metric()
    gauge.set(5)
    gauge.increment(-2)
    histogram = pb_utils.MetricFamily("model_sizes", "sizes", pb_utils.MetricFamily.HISTOGRAM)
    sizes = histogram.Metric({"m": "x"}, buckets=[1, 10])
    for value in (0.5, 1, 5, 50):
        sizes.observe(value)

    reported = {family.name: family for family in custom_families()}

    assert ("counter", "calls") == (reported["model_calls"].kind, reported["model_calls"].help)
    assert (Sample("", {"kind": "a"}, 4.0), Sample("", {"other": "b"}, 1.0)) == reported["model_calls"].samples
    assert (Sample("", {}, 3.0),) == reported["model_level"].samples
    assert (
        Sample("_bucket", {"m": "x", "le": "1"}, 2.0),
        Sample("_bucket", {"m": "x", "le": "10"}, 3.0),
        Sample("_bucket", {"m": "x", "le": "+Inf"}, 4.0),
        Sample("_sum", {"m": "x"}, 56.5),
        Sample("_count", {"m": "x"}, 4.0),
    ) == reported["model_sizes"].samples
    with pytest.raises(pb_utils.TritonModelException, match="already exists as GAUGE"):
        pb_utils.MetricFamily("model_level", "level", pb_utils.MetricFamily.COUNTER)
    with pytest.raises(pb_utils.TritonModelException, match="cannot be incremented by -1"):
        families[0].Metric({"kind": "a"}).increment(-1)


def test_the_metrics_of_a_model_go_with_its_instances_and_are_in_no_other_version_s_way(workshop: Workshop) -> None:
    source = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                family = pb_utils.MetricFamily("going", "", pb_utils.MetricFamily.KIND)
                self.metric = family.Metric({"model": args["model_name"]})

            def execute(self, requests): ...
    """

    def load(kind: str, model: str = "m") -> Engine:
        workshop.python(model, source.replace("KIND", kind))
        return workshop.load(plain_config(model, "python", inputs=[], outputs=[]))

    def kinds() -> list[str]:
        return [family.kind for family in custom_families() if family.name == "going"]

    old = load("COUNTER")
    with pytest.raises(LoadError, match="'going' already exists as COUNTER, not GAUGE"):
        load("GAUGE", "other")
    new = load("GAUGE")
    old.close()
    assert ["gauge"] == kinds()
    new.close()
    assert [] == kinds()
    workshop.engines.clear()


def test_a_label_with_a_value_of_each_request_s_own_ends_at_a_bound() -> None:
    """Each of its metrics is reported every second: so many would keep the executor from renewing its lease."""
    code = InstanceCode("m", "1", "")
    with called(code):
        family = pb_utils.MetricFamily("each", "", pb_utils.MetricFamily.COUNTER)

    def count(requests: int) -> None:
        for number in range(requests):
            family.Metric({"request": str(number)}).increment(1)

    with pytest.raises(pb_utils.TritonModelException, match="no more than 10000 metrics"):
        count(METRICS_MAX + 1)
    count(1)

    (reported,) = [family for family in custom_families() if family.name == "each"]
    assert 2 == reported.samples[0].value
    forget_families(code)


def test_families_of_each_request_s_own_end_at_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_metrics, "METRICS_MAX", 100)
    code = InstanceCode("m", "1", "")

    def make(families: int) -> None:
        for number in range(families):
            pb_utils.MetricFamily(f"each_{number}", "", pb_utils.MetricFamily.COUNTER)

    with called(code), pytest.raises(pb_utils.TritonModelException, match="no more than 100 metrics"):
        make(101)

    forget_families(code)


def test_a_destructor_may_count_while_the_family_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's collector runs it on any thread, in the middle of anything: here, of the executor's report."""
    gauge = pb_utils.MetricFamily("open_sessions", "", pb_utils.MetricFamily.GAUGE).Metric()
    samples = cast("Any", model_metrics)._samples

    class Session:
        def __init__(self) -> None:
            self.itself = self
            gauge.increment(1)

        def __del__(self) -> None:
            gauge.increment(-1)

    def collected(*arguments: Any) -> Any:
        gc.collect()
        return samples(*arguments)

    Session()
    monkeypatch.setattr(model_metrics, "_samples", collected)
    reporting = threading.Thread(target=custom_families, daemon=True)
    reporting.start()
    reporting.join(60)

    assert not reporting.is_alive()
    assert 0 == gauge.value()


def test_whatever_numbers_a_model_measures_can_be_reported() -> None:
    numbers = [np.float32(2), np.float64(2), np.int64(2), torch.tensor(2.0)]
    gauge = pb_utils.MetricFamily("any_level", "", pb_utils.MetricFamily.GAUGE)
    counter = pb_utils.MetricFamily("any_calls", "", pb_utils.MetricFamily.COUNTER).Metric()
    sizes = pb_utils.MetricFamily("any_sizes", "", pb_utils.MetricFamily.HISTOGRAM).Metric(buckets=[1, 10])
    for index, number in enumerate(numbers):
        gauge.Metric({"i": str(index)}).set(number)  # pyright: ignore[reportArgumentType]
        counter.increment(number)  # pyright: ignore[reportArgumentType]
        sizes.observe(number)  # pyright: ignore[reportArgumentType]

    families = tuple(family for family in custom_families() if family.name.startswith("any_"))
    report = decode_report(encode_report(ExecutorReport("e", "h", HostReport(0.0, 0, 0), families=families)))
    values = {family.name: [sample.value for sample in family.samples if not sample.suffix] for family in families}

    assert families == report.families
    assert {"any_level": [2.0] * 4, "any_calls": [8.0], "any_sizes": []} == values


def test_names_and_labels_of_a_metric_may_be_elements_of_arrays() -> None:
    name, label, value = np.array(["array_level", "kind", "a b"])
    pb_utils.MetricFamily(name, name, np.str_("GAUGE")).Metric({label: value}).set(1)

    families = tuple(family for family in custom_families() if family.name == "array_level")
    report = decode_report(encode_report(ExecutorReport("e", "h", HostReport(0.0, 0, 0), families=families)))

    assert (Sample("", {"kind": "a b"}, 1.0),) == report.families[0].samples


@pytest.mark.parametrize(
    ("name", "kind", "labels", "buckets"),
    [
        ("my-metric total", "GAUGE", {}, None),
        ("1st", "GAUGE", {}, None),
        ("", "GAUGE", {}, None),
        ("odd_kind", "SUMMARY", {}, None),
        ("odd_label", "GAUGE", {"b-c": "x"}, None),
        ("odd_label", "GAUGE", {"a:b": "x"}, None),
        ("odd_bound", "HISTOGRAM", {"le": "abc"}, [1]),
        ("odd_bound", "HISTOGRAM", {}, ["a", "b"]),
        ("odd_bound", "HISTOGRAM", {}, [float("nan")]),
        ("odd_bound", "HISTOGRAM", {}, [2, 1]),
    ],
)
def test_a_metric_that_would_spoil_the_page_of_the_mesh_is_refused(
    name: str, kind: str, labels: Any, buckets: Any
) -> None:
    with pytest.raises(pb_utils.TritonModelException):
        pb_utils.MetricFamily(name, "", kind).Metric(labels, buckets)


@pytest.mark.parametrize(("name", "labels"), [("family", {"a": 1}), ("family", {1: "a"}), (5, {}), ("\ud800", {})])
def test_what_could_not_be_reported_of_a_metric_is_refused(name: Any, labels: Any) -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        pb_utils.MetricFamily(name, "", pb_utils.MetricFamily.GAUGE).Metric(labels)

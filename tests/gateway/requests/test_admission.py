"""Admission, pure: what enters, as what, and Triton's words for what does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.models.versions import check_version_text
from gateway.requests.admission import Admitted, admit, admit_end
from gateway.requests.forms import KnownForms, check_form, has_many_strings, string_problem, with_strings_read
from gateway.requests.infer_call import EnsemblePart, InferCall, check_correlation_id
from gateway.requests.sessions import new_session
from shared.contract.calls import CallOrigin
from shared.contract.errors import Code, RequestError
from shared.contract.messages import ModelRecord, StepFlag, encode
from shared.contract.model_config import (
    ControlKind,
    ControlSpec,
    Direct,
    DynamicBatching,
    ModelConfig,
    QueuePolicy,
    SequenceBatching,
    StateSpec,
    TensorSpec,
    TimeoutAction,
)
from shared.contract.tensors import Tensor, bytes_elements, pack_bytes

INT = Tensor("INPUT", "INT32", (1, 1), bytes(4))


def model(**batching: Any) -> ModelConfig:
    settings: dict[str, Any] = {"strategy": Direct(), "idle_us": 1_000_000} | batching
    return ModelConfig(
        name="m",
        backend="python",
        platform="",
        max_batch_size=4,
        inputs=(TensorSpec("INPUT", "INT32", (1,)),),
        outputs=(TensorSpec("OUTPUT", "INT32", (1,)),),
        sequence_batching=SequenceBatching(**settings),
    )


def stateless(**changes: Any) -> ModelConfig:
    return msgspec.structs.replace(model(), sequence_batching=None, **changes)


def admitted(call: InferCall, config: ModelConfig) -> Admitted:
    record = ModelRecord(config, "{}", ("3",))
    return admit(call, record, "3", arrived_ns=5, make_session=lambda: new_session(config))


@pytest.mark.parametrize(
    ("is_named", "call"),
    [
        (True, InferCall("m", request_id="call-1", origin=CallOrigin("call-1", ("a",)))),
        (True, InferCall("m", request_id="call-1", origin=CallOrigin("call-1", ("a",)).within("e/1").within("f/2"))),
        (False, InferCall("m", request_id="mine", origin=CallOrigin("call-1", ("a",)))),
        (False, InferCall("m", request_id="call-1", expected_step=2, origin=CallOrigin("call-1").within("e/1"))),
        (False, InferCall("m", origin=CallOrigin("call-1"))),
        (False, InferCall("m", request_id="call-1")),
    ],
)
def test_a_call_is_known_by_its_name_alone_unless_its_model_or_an_ensemble_has_named_it(
    *, is_named: bool, call: InferCall
) -> None:
    call = msgspec.structs.replace(call, correlation_id=7, inputs=(INT,))

    assert is_named is bool(admitted(call, model()).flags & StepFlag.NAMED)


def refused(call: InferCall, config: ModelConfig) -> str:
    with pytest.raises(RequestError) as caught:
        admitted(call, config)
    return caught.value.message


def call(*inputs: Tensor, **rest: Any) -> InferCall:
    return InferCall("m", inputs=inputs or (INT,), **rest)


def corrid(datatype: str) -> tuple[ControlSpec, ...]:
    return (ControlSpec("CORRID", ControlKind.CORRID, datatype),)


def test_step_of_a_sequence_is_scoped_by_the_version_that_was_asked_for():
    free = admitted(call(correlation_id=7, start=True), model())
    pinned = admitted(call(correlation_id=7, version="3", end=True), model())

    assert (free.sequence, free.flags, free.message.version) == ("m||i7", StepFlag.START, "3")
    assert (pinned.sequence, pinned.flags) == ("m|3|i7", StepFlag.END)


def test_a_step_of_an_ensemble_is_of_another_sequence_than_a_clients():
    part = EnsemblePart("#scope", b"digest")
    step = admitted(call(correlation_id=7, start=True, version="3", part=part), model())

    assert "m|3#scope|i7" == step.sequence


def test_an_answer_is_kept_where_its_request_can_be_sent_again():
    named = (call(correlation_id=7), call(correlation_id=7, request_id="a"), call(correlation_id=7, expected_step=1))

    assert [False, True, True] == [admitted(each, model()).message.keep_reply for each in named]


def test_whoever_asks_about_its_wait_is_told_also_by_an_iterative_model():
    for asks in (call(correlation_id=7, wait_info=True), call(correlation_id=7, wait_max_ms=5)):
        assert admitted(asks, model()).flags & StepFlag.TOLD
        nameless = msgspec.structs.replace(asks, correlation_id=0)
        assert admitted(nameless, model(iterative=True)).flags & StepFlag.TOLD
    assert not admitted(call(), model(iterative=True)).flags & StepFlag.TOLD


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": (INT,)}, "without a step: leave inputs"),
        ({"start": True}, "without a step: leave inputs"),
        ({"end": True}, "without a step: leave inputs"),
        ({"expected_step": 1}, "without a step: leave inputs"),
        ({"correlation_id": 0}, "must specify a non-zero or non-empty correlation ID"),
        ({"correlation_id": "a" * 129}, "128"),
        ({}, ""),
    ],
)
def test_an_end_without_a_step_names_a_sequence_and_brings_nothing(given: dict[str, Any], message: str):
    asked = msgspec.structs.replace(InferCall("m", correlation_id=7, ended_run="1-0.1"), **given)
    record = ModelRecord(model(), "{}", ("3",))
    if not message:
        assert "m||i7" == admit_end(asked, record, "3", arrived_ns=5).sequence
        return

    with pytest.raises(RequestError, match=message):
        admit_end(asked, record, "3", arrived_ns=5)
    with pytest.raises(RequestError, match="and 'm' has none"):
        admit_end(asked, ModelRecord(stateless(), "{}", ("3",)), "3", arrived_ns=5)


def test_answers_keep_their_order_where_the_configuration_says_so_and_there_is_one_for_each():
    for preserves in (False, True):
        batching = DynamicBatching(preserve_ordering=preserves)
        one, many = (stateless(dynamic_batching=batching, decoupled=decoupled) for decoupled in (False, True))
        assert (preserves, False) == tuple(admitted(call(), config).queueing.ordered for config in (one, many))


def test_inputs_of_one_request_have_one_batch_dimension():
    two = stateless(inputs=(TensorSpec("INPUT", "INT32", (1,)), TensorSpec("OTHER", "INT32", (1,))))
    other = Tensor("OTHER", "INT32", (2, 1), bytes(8))

    assert "input 'OTHER' batch size does not match other inputs for 'm'" in refused(call(INT, other), two)
    flat = Tensor("INPUT", "INT32", (), bytes(4))
    assert "input 'INPUT' has no shape but model requires batch dimension for 'm'" in refused(call(flat), stateless())


def test_model_with_declared_states_is_marked_as_held_by_the_mesh():
    state = StateSpec("S", "S_OUT", "FP32", (1,))

    assert admitted(call(correlation_id="a"), model(states=(state,))).flags == StepFlag.DURABLE | StepFlag.PAGEABLE


def test_state_and_control_tensors_must_not_be_sent():
    config = model(states=(StateSpec("S", "S_OUT", "FP32", (1,)),), controls=corrid("UINT64"))

    for name in ("S", "CORRID"):
        stray = Tensor(name, "FP32", (1, 1), bytes(4))
        assert (
            refused(call(INT, stray, correlation_id=1), config) == f"unexpected inference input '{name}' for model 'm'"
        )


@pytest.mark.parametrize(
    ("datatype", "given_id", "message"),
    [
        ("UINT64", "a", "control 'CORRID' data-type is 'BYTES', but model 'm' expects 'UINT64'"),
        ("INT32", "a", "control 'CORRID' data-type is 'BYTES', but model 'm' expects 'INT32'"),
        ("BYTES", 5, "control 'CORRID' data-type is 'UINT64', but model 'm' expects 'BYTES'"),
        ("UINT64", 5, ""),
        ("BYTES", "a", ""),
    ],
)
def test_type_of_the_id_must_suit_the_control(datatype: str, given_id: int | str, message: str):
    step = call(correlation_id=given_id, start=True)
    if message:
        assert (
            refused(step, model(controls=corrid(datatype))) == f"[request id: <id_unknown>] sequence batching {message}"
        )
    else:
        assert admitted(step, model(controls=corrid(datatype))).message.correlation_id == given_id


def test_session_id_in_digits_serves_a_model_with_integer_ids():
    config = model(controls=corrid("UINT64"), implicit_start=True)

    assert admitted(call(session_id="17"), config).sequence == "m||i17"
    assert admitted(call(session_id="17"), model(implicit_start=True)).sequence == "m||s17"
    made = admitted(call(), config)
    assert isinstance(made.message.correlation_id, int)
    assert made.session_id == str(made.message.correlation_id)
    assert made.flags == StepFlag.START | StepFlag.IMPLICIT


def test_a_session_id_of_very_many_digits_is_refused_as_any_long_one():
    """Python refuses to read a number of that many digits."""
    for config in (model(controls=corrid("UINT64")), model()):
        assert "cannot be longer than 128" in refused(call(session_id="9" * 5000), config)


def test_an_empty_input_whose_other_dimensions_no_array_has_is_refused():
    config = msgspec.structs.replace(model(), inputs=(TensorSpec("INPUT", "INT32", (-1, -1)),))
    empty = Tensor("INPUT", "INT32", (1, 1 << 62, 0), b"")

    assert "is empty, and its other dimensions are too large: [1,4611686018427387904,0]" in refused(
        call(empty, correlation_id=5, start=True), config
    )
    assert admitted(call(msgspec.structs.replace(empty, shape=(1, 7, 0)), correlation_id=5, start=True), config)


def test_any_session_serves_a_model_with_wide_integer_ids_without_a_start():
    """The header names a sequence of any sequence model, canonical ones too."""
    wide = [admitted(call(session_id=name), model(controls=corrid("UINT64"))) for name in ("ann", "ann", "bob")]

    first, again, other = [each.message.correlation_id for each in wide]
    assert first == again != other
    assert isinstance(first, int)
    assert 0 < first < 1 << 63
    assert {StepFlag.IMPLICIT} == {each.flags for each in wide}
    assert "data-type is 'BYTES'" in refused(call(session_id="ann"), model(controls=corrid("INT32")))


def test_start_and_end_need_an_id_even_where_sequences_start_by_themselves():
    for flags in ({"start": True}, {"end": True}):
        assert refused(call(**flags), model(implicit_start=True)).endswith("non-zero or non-empty correlation ID")


def test_a_sequence_may_be_named_twice_by_the_same_name_only():
    twice = admitted(call(correlation_id=17, session_id="17"), model(controls=corrid("UINT64")))

    assert "m||i17" == twice.sequence
    assert refused(call(correlation_id=17, session_id="18"), model()).endswith("session '18': name one of them")


def test_request_without_any_id_is_refused_unless_the_model_starts_sequences_by_itself():
    assert refused(call(), model()) == (
        "inference request to model 'm' must specify a non-zero or non-empty correlation ID"
    )
    assert refused(call(session_id=""), model()).endswith("non-empty correlation ID")
    assert admitted(call(), model(implicit_start=True)).session_id is not None


def test_a_start_is_step_1_by_whatever_number_it_is_known():
    assert StepFlag.START == admitted(call(correlation_id=1, start=True, expected_step=1), model()).flags

    told = refused(call(correlation_id=1, start=True, expected_step=5), model())
    assert "for sequence 1 to model 'm' starts it" in told
    assert "says by parameter 'sequence_step' that it is step 5" in told
    assert "is step 5" in refused(call(expected_step=5), model(implicit_start=True))


@pytest.mark.parametrize("given", [{"correlation_id": 1}, {"session_id": "1"}])
def test_a_step_that_follows_others_by_its_number_starts_no_sequence_by_itself(given: dict[str, Any]):
    dialect = model(implicit_start=True)

    assert StepFlag.IMPLICIT == admitted(call(**given), dialect).flags
    assert StepFlag.IMPLICIT == admitted(call(**given, expected_step=1), dialect).flags
    assert StepFlag.NONE == admitted(call(**given, expected_step=2), dialect).flags


def test_timeout_of_a_step_counts_unless_the_model_says_complete():
    """The dialect's `timeout_action: TIMEOUT_COMPLETE`: who waits too long for a slot is served late."""
    late = model(timeout_action=TimeoutAction.DELAY)

    timed = call(correlation_id=1, timeout_us=5)
    assert [False, True] == [admitted(timed, m).timeout_is_ignored for m in (model(), late)]


def test_long_ids_are_unsupported():
    check_correlation_id("x" * 128)
    with pytest.raises(RequestError) as caught:
        check_correlation_id("x" * 129)

    assert caught.value.code is Code.UNSUPPORTED
    assert refused(call(session_id="x" * 129), model()) == "string correlation ID cannot be longer than 128 characters"


def test_sequence_parameters_mean_nothing_to_the_mesh_for_a_stateless_model_which_is_told_of_them():
    entered = admitted(call(correlation_id=9, start=True, end=True), stateless())

    assert (entered.sequence, entered.flags) == (None, StepFlag.NONE)
    assert (entered.message.correlation_id, entered.message.flags) == (9, StepFlag.START | StepFlag.END)


def test_messages_of_the_same_request_end_in_bytes_that_differ():
    """Lua hashes the last byte of every string. Whoever appends a field appends another salt behind it."""
    ends = {encode(admitted(call(correlation_id=1), model()).message)[-1] for _ in range(128)}

    assert set(range(128)) == ends


@pytest.fixture
def unsalted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of the same request are the same."""
    monkeypatch.setattr("gateway.requests.admission.next_salt", int)


@pytest.mark.usefixtures("unsalted")
def test_priority_means_nothing_to_a_sequence():
    assert admitted(call(correlation_id=1, priority=1), model()) == admitted(call(correlation_id=1), model())


@pytest.mark.parametrize(("asked", "level"), [(0, 2), (1, 1), (3, 3), (4, 2)])
def test_priority_outside_the_levels_means_the_default_level(asked: int, level: int):
    batching = DynamicBatching(
        priority_levels=3,
        default_priority_level=2,
        default_queue_policy=QueuePolicy(max_queue_size=5),
        priority_queue_policies={1: QueuePolicy(max_queue_size=9)},
    )

    entered = admitted(call(priority=asked), stateless(dynamic_batching=batching))

    assert (entered.message.priority, entered.queueing.level_bound) == (level, 9 if level == 1 else 5)


@pytest.mark.parametrize(
    ("default", "may_lower", "asked", "timeout"),
    [
        (0, False, 0, 0),
        (100, False, 0, 100),
        (100, False, 50, 100),
        (100, True, 50, 50),
        (100, True, 500, 100),
        # Triton compares with the default, and no timeout is less than a default of 0.
        (0, True, 50, 0),
    ],
)
def test_a_request_may_only_lower_its_levels_timeout(default: int, may_lower: bool, asked: int, timeout: int):
    policy = QueuePolicy(default_timeout_us=default, allow_timeout_override=may_lower)

    entered = admitted(call(timeout_us=asked), stateless(dynamic_batching=DynamicBatching(default_queue_policy=policy)))

    assert timeout == entered.queueing.timeout_us


@pytest.mark.parametrize(("default", "asked", "timeout"), [(0, 5, 5), (0, 0, 0), (9, 5, 5), (9, 12, 9)])
def test_in_the_dialect_a_requests_own_timeout_counts_in_every_level(default: int, asked: int, timeout: int):
    policy = QueuePolicy(default_timeout_us=default)
    batching = DynamicBatching(default_queue_policy=policy, own_timeouts=True)

    assert timeout == admitted(call(timeout_us=asked), stateless(dynamic_batching=batching)).queueing.timeout_us


@pytest.mark.parametrize("action", TimeoutAction)
def test_what_becomes_of_a_request_that_is_late_is_its_own_levels_policy(action: TimeoutAction):
    """Its neighbour's in the batch may be another."""
    (other,) = set(TimeoutAction) - {action}
    policies = {2: QueuePolicy(timeout_action=action, max_queue_size=5)}
    batching = DynamicBatching(
        priority_levels=2,
        default_priority_level=1,
        default_queue_policy=QueuePolicy(timeout_action=other),
        priority_queue_policies=policies,
    )

    queueings = [admitted(call(priority=level), stateless(dynamic_batching=batching)).queueing for level in (1, 2)]

    assert [other, action] == [TimeoutAction.DELAY if one.delays else TimeoutAction.REJECT for one in queueings]
    assert [0, 5] == [one.level_bound for one in queueings]


def test_without_dynamic_batching_there_are_no_levels_and_no_policies():
    queueing = admitted(call(priority=1, timeout_us=5), stateless(dynamic_batching=None)).queueing

    assert (0, 0, 0, False) == (queueing.level, queueing.level_bound, queueing.timeout_us, queueing.ordered)


def test_optional_inputs_may_be_left_out_and_the_message_says_how_many():
    config = stateless(
        inputs=(
            TensorSpec("INPUT", "INT32", (1,)),
            TensorSpec("EXTRA", "INT32", (1,), optional=True),
        )
    )

    assert admitted(call(), config).message.inputs == (INT,)
    assert refused(msgspec.structs.replace(call(), inputs=()), config) == (
        "[request id: <id_unknown>] expected number of inputs between 1 and 2 but got 0 inputs for model 'm'. Got "
        "input(s) [], but missing required input(s) ['INPUT']. Please provide all required input(s)."
    )
    # In Triton, which only counts, it passes.
    extra = msgspec.structs.replace(call(), inputs=(msgspec.structs.replace(INT, name="EXTRA"),))
    assert "but missing required input(s) ['INPUT']" in refused(extra, config)


def test_a_batching_model_whose_inputs_are_all_optional_needs_one_of_them_as_in_triton():
    """Nothing else says the batch size; a step of a sequence is one row."""
    config = stateless(inputs=(TensorSpec("INPUT", "INT32", (1,), optional=True),))
    empty = msgspec.structs.replace(call(), inputs=())

    assert refused(empty, config) == (
        "[request id: <id_unknown>] a request to model 'm' needs one of its inputs ['INPUT'], which says its batch size"
    )
    assert admitted(call(), config).message.inputs == (INT,)
    assert admitted(empty, msgspec.structs.replace(config, max_batch_size=0)).message.inputs == ()
    steps = msgspec.structs.replace(model(), inputs=config.inputs)
    assert admitted(msgspec.structs.replace(empty, correlation_id=1, start=True), steps).message.inputs == ()


def test_outputs_that_are_asked_for_must_be_the_models():
    assert ("OUTPUT",) == tuple(admitted(call(outputs=("OUTPUT",)), stateless()).message.outputs)
    unknown = refused(call(outputs=("OUTPUT", "NOTHING")), stateless())

    assert "unexpected inference output 'NOTHING' for model 'm'" == unknown


def test_a_tensor_has_as_many_bytes_as_its_elements():
    short = refused(call(Tensor("INPUT", "INT32", (2, 1), bytes(7)), request_id="r"), stateless())

    assert short.startswith("[request id: r] ")
    assert short.endswith("byte size mismatch for input 'INPUT' for model 'm'. Expected 8, got 7")


def test_an_input_that_stands_twice_is_refused_by_the_requests_id():
    twice = msgspec.structs.replace(call(), request_id="r7", inputs=(INT, INT))

    assert "[request id: r7] input 'INPUT' already exists in request" == refused(twice, stateless())


def test_strings_that_end_too_early():
    where = "for inference input 'T' for model 'm', expecting"
    assert string_problem(b"\1\0", 1, "T", "m") == (
        f"incomplete string length indicator {where} 4 bytes but only 2 bytes available. Please make sure the string "
        "length indicator is in one buffer."
    )
    assert string_problem(b"\5\0\0\0a", 1, "T", "m") == (
        f"incomplete string data {where} string of length 5 but only 1 bytes available"
    )
    # Bytes behind the last element that cannot be another one are no element too many.
    assert string_problem(b"\0\0\0\0z", 1, "T", "m").endswith(
        "expecting 4 bytes but only 1 bytes available. Please make sure the string length indicator is in one buffer."
    )


@pytest.mark.parametrize(
    ("shape", "dims", "max_batch_size", "fits"),
    [
        ((2, 3), (3,), 4, True),
        ((2, 3), (-1,), 4, True),
        ((2, 0), (-1,), 4, True),
        ((0, 3), (3,), 4, False),
        ((2, 4), (3,), 4, False),
        ((3,), (3,), 0, True),
        ((1, 3), (3,), 0, False),
        ((), (), 0, True),
    ],
)
def test_shapes(shape: tuple[int, ...], dims: tuple[int, ...], max_batch_size: int, fits: bool):
    config = stateless(max_batch_size=max_batch_size, inputs=(TensorSpec("INPUT", "INT8", dims),))
    size = 1
    for dim in shape:
        size *= dim
    request = call(Tensor("INPUT", "INT8", shape, bytes(size)))

    if fits:
        admitted(request, config)
    else:
        assert refused(request, config).startswith("[request id: <id_unknown>] unexpected shape for input 'INPUT'")


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((1, -1), "All input dimensions should be specified"),
        ((1, -1, 2), "All input dimensions should be specified"),
        ((-2, 1, 2), "All input dimensions should be specified"),
        ((1, 1, -2), "unexpected shape"),
        ((1, 1, 3, -1), "unexpected shape"),
        ((1, 1, 3), "unexpected shape"),
        ((-1,), "unexpected shape"),
    ],
)
def test_a_dimension_is_open_only_where_the_shape_fits_up_to_it(shape: tuple[int, ...], problem: str):
    dims = (-1,) if len(shape) == 2 else (-1, 2)
    config = stateless(max_batch_size=4, inputs=(TensorSpec("INPUT", "INT8", dims),))

    told = refused(call(Tensor("INPUT", "INT8", shape, b"")), config)

    assert told.startswith(f"[request id: <id_unknown>] {problem}")


@pytest.mark.parametrize(("given_text", "plain"), [("", ""), ("0", "0"), ("3", "3"), ("03", "3")])
def test_version_in_its_plain_form(given_text: str, plain: str):
    assert check_version_text(given_text) == plain


@pytest.mark.parametrize("text", ["-1", "one", "1.5", " 1", "²"])
def test_version_that_is_no_number_from_0_on_is_refused(text: str):
    with pytest.raises(RequestError, match="version should be an integral value > 0"):
        check_version_text(text)


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_every_packed_text_tensor_passes_and_the_count_must_be_exact(elements: list[bytes]):
    raw = pack_bytes(elements)

    assert string_problem(raw, len(elements), "i", "m") == ""
    assert string_problem(raw, len(elements) + 1, "i", "m") != ""
    assert elements == [] or string_problem(raw, len(elements) - 1, "i", "m") != ""


@given(st.binary(max_size=40), st.integers(0, 4))
def test_text_tensors_pass_exactly_when_they_can_be_read(raw: bytes, count: int):
    try:
        readable = len(list(bytes_elements(raw))) == count
    except ValueError:
        readable = False

    assert (string_problem(raw, count, "i", "m") == "") == readable


@given(st.binary(max_size=40), st.integers(0, 4))
@pytest.mark.usefixtures("unsalted")
def test_strings_that_were_read_beforehand_are_judged_in_the_same_words(raw: bytes, count: int):
    config = stateless(max_batch_size=0, inputs=(TensorSpec("T", "BYTES", (-1,)),))
    request = InferCall("m", request_id="r", inputs=(Tensor("T", "BYTES", (count,), raw),))

    def judged(request: InferCall) -> str:
        try:
            return repr(admitted(request, config).message)
        except RequestError as error:
            return error.message

    assert judged(request) == judged(with_strings_read(request))


def test_only_strings_are_read_beforehand_and_only_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.requests.forms.STRINGS_BYTES_MAX", 8)

    assert not has_many_strings(call(Tensor("T", "BYTES", (2,), bytes(8)), Tensor("U", "INT8", (9,), bytes(9))))
    assert has_many_strings(call(INT, Tensor("T", "BYTES", (3,), bytes(12))))


class TestIterativeSequences:
    def test_a_request_without_a_sequence_is_one_of_its_own(self) -> None:
        step = admitted(InferCall("m", inputs=(INT,)), model(iterative=True))

        assert StepFlag.START | StepFlag.END | StepFlag.ALONE == step.flags
        assert step.message.own_sequence
        assert isinstance(step.message.correlation_id, int)
        assert step.session_id is None
        assert step.sequence != admitted(InferCall("m", inputs=(INT,)), model(iterative=True)).sequence

    def test_its_id_has_the_type_of_the_models_control(self) -> None:
        control = ControlSpec("CORRID", ControlKind.CORRID, "BYTES")

        step = admitted(InferCall("m", inputs=(INT,)), model(iterative=True, controls=(control,)))

        assert isinstance(step.message.correlation_id, str)

    def test_a_request_that_names_its_sequence_is_the_whole_of_it_too(self) -> None:
        step = admitted(InferCall("m", inputs=(INT,), correlation_id=7, start=True), model(iterative=True))
        ending = admitted(InferCall("m", inputs=(INT,), correlation_id=7, start=True, end=True), model(iterative=True))

        assert StepFlag.START | StepFlag.END == step.flags == ending.flags
        assert step.message.own_sequence
        assert not ending.message.own_sequence, "the model hears of an END that the client has said"


MIXED = msgspec.structs.replace(
    model(), inputs=(TensorSpec("INPUT", "INT32", (-1,)), TensorSpec("TEXT", "BYTES", (1,), optional=True))
)
NARROWER = msgspec.structs.replace(MIXED, inputs=(TensorSpec("INPUT", "INT32", (1,)),))
TENSORS = st.builds(
    Tensor,
    st.sampled_from(("INPUT", "TEXT", "OTHER")),
    st.sampled_from(("INT32", "FP32", "BYTES")),
    st.sampled_from(((1, 1), (1, 2), (2, 1), (1,), (9, 1), (0, 1), (1, -1))),
    st.sampled_from((bytes(4), bytes(8), pack_bytes(["a"]), b"\xff\0\0\0")),
)
WIDE = Tensor("INPUT", "INT32", (1, 2), bytes(8))
CALLS = st.builds(
    call,
    st.sampled_from((INT, WIDE)) | TENSORS,
    outputs=st.lists(st.sampled_from(("OUTPUT", "X")), max_size=2).map(tuple),
)
TEXTS = TENSORS.map(lambda tensor: call(INT, msgspec.structs.replace(tensor, name="TEXT", datatype="BYTES")))


def outcome(check: Any, asked: InferCall, config: ModelConfig) -> str:
    try:
        check(asked, config)
    except RequestError as error:
        return error.message
    return "passed"


@example([(call(WIDE), MIXED), (call(WIDE), NARROWER)])
@given(st.lists(st.tuples(CALLS | TEXTS, st.sampled_from((MIXED, NARROWER, stateless()))), min_size=2, max_size=12))
def test_a_request_that_is_like_an_earlier_one_fares_as_if_it_were_the_first(
    asked: list[tuple[InferCall, ModelConfig]],
) -> None:
    """Whatever came before, of this configuration or of another one under the same name."""
    forms = KnownForms()
    # Each twice: the second one is compared with the first.
    requests = [each for each in asked for _ in range(2)]

    fresh = [outcome(check_form, *each) for each in requests]

    assert fresh == [outcome(forms.check, *each) for each in requests]

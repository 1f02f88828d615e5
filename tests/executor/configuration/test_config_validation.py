"""Every rule that a configuration can break is answered with Triton's own message."""

from __future__ import annotations

import pytest

from shared.contract.errors import ConfigError
from shared.contract.model_config import BatchInputKind
from tests.executor.configuration.conftest import IN, IO, LoadText

OUT = 'output { name: "Y" data_type: TYPE_FP32 dims: 4 }'
WIDE = f"data_type: TYPE_FP32 dims: {[1] * 65}"
EITHER = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"


def control(body: str, name: str = "C") -> str:
    return f'{IO} sequence_batching {{ control_input {{ name: "{name}" control {{ {body} }} }} }}'


def state(initial: str, dims: str = "[2, -1]") -> str:
    body = f'input_name: "h" output_name: "h2" data_type: TYPE_FP32 dims: {dims}'
    return f"{IO} sequence_batching {{ state {{ {body} {initial} }} }}"


def given(tensor: str, batch: int = 8) -> str:
    return f"max_batch_size: {batch} {OUT} input {{ {tensor} }}"


TENSORS = [
    (given("data_type: TYPE_FP32 dims: 1"), "model input must specify 'name' for m"),
    (given('name: "X" dims: 1'), "model input 'X' must specify 'data_type' for m"),
    (given('name: "X" data_type: TYPE_FP32'), "model input 'X' must specify 'dims' for m"),
    (
        given('name: "X" data_type: TYPE_FP32 dims: 0'),
        "model input 'X' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        given(f'name: "X" {WIDE}'),
        "model input 'X' has 65 dimensions, of at most 64, for m",
    ),
    (
        given(f'name: "X" data_type: TYPE_FP32 dims: 1 reshape {{ shape: {[1] * 65} }}'),
        "model input 'X' reshape has 65 dimensions, of at most 64, for m",
    ),
    (state("", str([1] * 65)), "state 'h' has 65 dimensions, of at most 64, for m"),
    (
        f"{IO} model_warmup {{ name: 's' batch_size: 1 inputs {{ key: 'X' value {{ {WIDE} zero_data: true }} }} }}",
        "warmup sample 's' input 'X' has 65 dimensions, of at most 64, for m",
    ),
    (
        given('name: "X" data_type: TYPE_FP32 dims: 1 reshape { }', batch=0),
        "model input 'X' cannot have empty reshape for non-batching model as scalar tensors are not supported for m",
    ),
    (
        given('name: "X" data_type: TYPE_FP32 dims: [2, 3] reshape { shape: 5 }'),
        "model input 'X' has different size for dims and reshape for m",
    ),
    (
        given('name: "X" data_type: TYPE_FP32 dims: [2, -1, 3] reshape { shape: [-1, -1] }'),
        "model input 'X' has different number of variable-size dimensions for dims and reshape for m",
    ),
    (
        given('name: "X" data_type: TYPE_FP32 dims: [2, -1, 3] reshape { shape: [-1, 6] }'),
        "model input 'X' has different size for dims and reshape for m",
    ),
    (
        given('name: "X" data_type: TYPE_FP32 dims: 1 is_shape_tensor: true'),
        "shape tensors are only supported for TensorRT platform for m",
    ),
    (
        given('name: "X" data_type: TYPE_FP32 dims: 1 is_non_linear_format_io: true'),
        "Non-linear IO format is only supported for the TensorRT platform for m",
    ),
    (
        given('name: "X" data_type: TYPE_FP32 dims: [1, 2] format: FORMAT_NCHW'),
        "model input NHWC/NCHW require 3 dims for m",
    ),
    (
        given('name: "X" data_type: TYPE_FP32 dims: 1 reshape { shape: 0 }'),
        ("model input 'X' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for m"),
    ),
    (
        f'{IN} output {{ name: "Y" data_type: TYPE_FP32 dims: 1 is_shape_tensor: true }}',
        "shape tensors are only supported for TensorRT platform for m",
    ),
    (
        f'{IN} output {{ name: "Y" data_type: TYPE_FP32 dims: 1 is_non_linear_format_io: true }}',
        "Non-linear IO format is only supported for the TensorRT platform for m",
    ),
    (f'{IN} output {{ name: "Y" dims: 1 }}', "model output 'Y' must specify 'data_type' for m"),
    (f"max_batch_size: -1 {IN} {OUT}", "'max_batch_size' must be non-negative value for m"),
    (f"{IO} {OUT}", "model output 'Y' is specified more than once for m"),
    (IN, "must specify at least one 'output' for m: its backend could not complete them; declare them in config.pbtxt"),
    (OUT, "must specify at least one 'input' for m: its backend could not complete them; declare them in config.pbtxt"),
]

CONTROLS = [
    (
        control("kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1]", name=""),
        "sequence batching control tensor must have a name for m",
    ),
    (
        (
            f"{IO} sequence_batching {{"
            ' control_input { name: "C" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }'
            ' control_input { name: "C" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } } }'
        ),
        "sequence batching control tensor 'C' is specified for multiple control kinds for m",
    ),
    (
        (
            f"{IO} sequence_batching {{"
            ' control_input { name: "C" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } }'
            ' control_input { name: "D" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } } }'
        ),
        "sequence batching specifies multiple CONTROL_SEQUENCE_END tensors for m",
    ),
    (
        control("kind: CONTROL_SEQUENCE_START"),
        f"sequence batching must specify either {EITHER} for CONTROL_SEQUENCE_START for m",
    ),
    (
        control("kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] bool_false_true: [false, true]"),
        (
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            "'bool_false_true' for CONTROL_SEQUENCE_START for m"
        ),
    ),
    (
        control("kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, inf]"),
        "'fp32_false_true' must be finite, not inf, for m",
    ),
    (
        control("kind: CONTROL_SEQUENCE_READY fp32_false_true: [0]"),
        "sequence batching control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_READY for m",
    ),
    (
        control("kind: CONTROL_SEQUENCE_CORRID int32_false_true: [0, 1]"),
        f"sequence batching must not specify either {EITHER} for CONTROL_SEQUENCE_CORRID for m",
    ),
    (
        control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"),
        (
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        ),
    ),
]

SEQUENCES = [
    (
        f"{IO} sequence_batching {{ oldest {{ preferred_batch_size: 0 }} }}",
        "sequence batching preferred batch size must be positive for m",
    ),
    (
        f"{IO} sequence_batching {{ oldest {{ preferred_batch_size: 9 }} }}",
        "sequence batching preferred batch size must be <= max batch size for m",
    ),
    (
        f"{IO} sequence_batching {{ direct {{ minimum_slot_utilization: 1.5 }} }}",
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
    ),
    (
        f"{IO} sequence_batching {{ direct {{ minimum_slot_utilization: nan }} }}",
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
    ),
    (
        f"{IO} sequence_batching {{ }} response_cache {{ enable: true }}",
        (
            "Response Cache does not currently support model m with sequence batching scheduler. "
            "Please disable the response cache."
        ),
    ),
    (
        f"{IO} model_transaction_policy {{ decoupled: true }} response_cache {{ enable: true }}",
        (
            "Response Cache does not currently support model m with 'decoupled' transaction policy. "
            "Please disable the response cache."
        ),
    ),
]

ZERO = 'initial_state { name: "i" data_type: TYPE_FP32 dims: [2, 3] zero_data: true }'
STATES = [
    (
        state(ZERO + ZERO),
        "initial_state field for state input 'h' must contain exactly one or zero element. Found '2' elements.",
    ),
    (
        state(ZERO.replace("FP32", "INT32")),
        "The data type used for 'initial_state' field of state 'h' does not match the state data type.",
    ),
    (state(ZERO.replace('"i"', '""')), "Field 'name' must be set when using initial_state for state input 'h'."),
    (
        state(ZERO, dims="[2]"),
        (
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input 'h'. "
            "2 != 1"
        ),
    ),
    (
        state(ZERO.replace("[2, 3]", "[2, -1]")),
        "'initial_state' field for state input name 'h' contains variable dimensions.",
    ),
    (
        state(ZERO.replace("[2, 3]", "[5, 3]")),
        "'initial_state' dim for input name 'h' doesn't match 'state' dim description. 5 != 2",
    ),
    (
        state(ZERO.replace("zero_data: true", "")),
        "initial_state setting expects state'h' to have state_data set",
    ),
    (
        state(ZERO.replace("zero_data: true", 'data_file: "../../secret"')),
        "initial_state file '../../secret' of state 'h' must lie in 'initial_state'",
    ),
    (
        (
            f"{IO} sequence_batching {{"
            f' state {{ input_name: "h" output_name: "a" data_type: TYPE_FP32 dims: [2, 3] {ZERO} }}'
            f' state {{ input_name: "h" output_name: "b" data_type: TYPE_FP32 dims: [2, 3] {ZERO} }} }}'
        ),
        "State input name 'h' specified more than once.",
    ),
]

DYNAMIC = [
    ("preferred_batch_size: -1", "dynamic batching preferred size must be positive for m"),
    ("preferred_batch_size: [4, 9]", "dynamic batching preferred size must be <= max batch size for m"),
    ("priority_levels: 3", "default priority level must be in range [1, 3] for m"),
    ("priority_levels: 3 default_priority_level: 4", "default priority level must be in range [1, 3] for m"),
    (
        "priority_levels: 3 default_priority_level: 1 priority_queue_policy { key: 4 value { } }",
        "priority queue policy must have priority level in range [1, 3] for m",
    ),
    (
        "priority_levels: 2 default_priority_level: 1 preserve_ordering: true",
        "Only one priority level is allowed when 'preserve_ordering' is true for m",
    ),
    (
        "preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }",
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
    ),
]

INSTANCES = [
    (
        f"{IO} instance_group {{ kind: KIND_CPU gpus: 0 }}",
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
    ),
    (
        f"{IO} instance_group {{ kind: KIND_GPU }}",
        "instance group m_0 of model m has kind KIND_GPU but no GPUs are available: KIND_CPU needs none",
    ),
    (
        f"{IO} instance_group {{ kind: KIND_MODEL gpus: 0 }}",
        "instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs",
    ),
    (
        f'{IO} instance_group {{ profile: "1" }}',
        (
            "instance group m_0 of model m and platform specifies profile field which is only supported for TensorRT "
            "models"
        ),
    ),
    (
        f"{IO} instance_group {{ kind: KIND_MODEL }}",
        "instance group m_0 of model m has kind KIND_MODEL, which is not supported: say KIND_CPU or KIND_GPU",
    ),
    (f"{IO} instance_group {{ kind: 9 }}", "instance group m_0 of model m has unexpected kind 9"),
    (
        f"{IO} instance_group [ {{ count: 1000 kind: KIND_CPU }}, {{ count: 25 kind: KIND_CPU }} ]",
        "model 'm' has 1025 instances, more than 1024 in one executor",
    ),
]

PARAMETERS = [
    (
        f'{IO} sequence_batching {{ }} parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}',
        f"parameter '{name}' must be a positive integer for m, got '{value}'",
    )
    for name in ("checkpoint_interval", "sequence_log_steps", "sequence_log_bytes")
    for value in ("0", "-1", "two", "", "1.5", "٣", "1" * 40)
] + [
    (
        f'{IO} sequence_batching {{ }} parameters {{ key: "fixed_shape" value {{ string_value: "yes" }} }}',
        "parameter 'fixed_shape' must be true, rows or false for m, got 'yes'",
    ),
    (
        f'{IO} sequence_batching {{ }} parameters {{ key: "sequence_recovery" value {{ string_value: "Replay" }} }}',
        "parameter 'sequence_recovery' must be none, replay or methods for m, got 'Replay'",
    ),
    (
        f'{IO} sequence_batching {{ }} parameters {{ key: "virtual_slots" value {{ string_value: "no" }} }}',
        "parameter 'virtual_slots' must be 'true' or 'false' for m, got 'no'",
    ),
    (
        f'{IO} parameters {{ key: "TRITON_BATCH_STRATEGY_PATH" value {{ string_value: "/x.so" }} }}',
        (
            "parameter 'TRITON_BATCH_STRATEGY_PATH' names '/x.so', which is not supported for m: a batch strategy is a "
            "Python file here"
        ),
    ),
]

RETRY_PARAMETERS = [
    (
        f'{IO} sequence_batching {{ }} parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}',
        f"parameter '{name}' must be {rule} for m, got '{value}'",
    )
    for name, rule, values in (
        ("retry_replies", "an integer from 1 to 64", ("0", "65", "-1", "all", "", "1" * 40)),
        ("retry_reply_bytes", "a non-negative integer", ("-1", "1e6", "64 KiB", "")),
    )
    for value in values
]

ENSEMBLE = f'platform: "ensemble" {IO}'


def step(model: str, given: str, made: str) -> str:
    """A step of an ensemble; maps as `A=x B=y`."""

    def entries(kind: str, pairs: str) -> str:
        named = (pair.split("=") for pair in pairs.split())
        return " ".join(f'{kind} {{ key: "{key}" value: "{value}" }}' for key, value in named)

    return f'step {{ model_name: "{model}" {entries("input_map", given)} {entries("output_map", made)} }}'


def ensemble(*steps: str, more: str = "") -> str:
    return f"{ENSEMBLE} {more} ensemble_scheduling {{ {' '.join(steps)} }}"


PASS = step("a", "I=X", "O=Y")
ENSEMBLES = [
    (
        f"{IO} ensemble_scheduling {{ {PASS} }}",
        "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
    ),
    (ensemble(), "must specify 'step' for ensemble 'm'"),
    (ENSEMBLE, "must specify 'step' for ensemble 'm'"),
    (ensemble(PASS, more="instance_group { count: 1 }"), "instance group should not be specified for ensemble 'm'"),
    (ensemble(PASS, more="optimization { }"), "optimization should not be specified for ensemble 'm'"),
    (
        ensemble(PASS, more="model_warmup { name: 'w' }"),
        "model_warmup can not be specified for ensemble 'm'",
    ),
    (
        ensemble(PASS, more='metric_tags { key: "a b" value: "c" }'),
        "metric tag 'a b' must consist of letters, digits and underscores for m",
    ),
    (
        ensemble(
            PASS,
            more="model_metrics { metric_control { metric_identifier { family: 'f' } histogram_options { buckets: inf "
            "} } }",
        ),
        "'buckets' must be finite, not inf, for m",
    ),
    (ensemble(PASS, more='backend: "python"'), "ensemble 'm' must not specify 'backend', which is 'python'"),
    (ensemble(step("", "I=X", "O=Y")), "must specify 'model_name' in step 0 of ensemble 'm'"),
    (ensemble(step("a", "", "O=Y")), "must specify 'input_map' in step 0 of ensemble 'm'"),
    (ensemble(step("a", "I=X", "")), "must specify 'output_map' in step 0 of ensemble 'm'"),
    (
        ensemble(PASS.replace("{", "{ model_version: -2 ", 1)),
        "'model_version' must be positive, or -1 for the newest, in step 0 of ensemble 'm'",
    ),
    (
        ensemble(PASS, step("b", "I=X", "O=Y")),
        "ensemble tensor 'Y' can appear in an output map only once for ensemble 'm' step 1",
    ),
    (ensemble(step("a", "I=other", "O=Y")), "ensemble input 'X' for ensemble m is not used"),
    (ensemble(step("a", "I=X", "O=other")), "ensemble output 'Y' for ensemble m is not used"),
    (
        ensemble(step("a", "I=X J=later", "O=Y"), step("b", "I=Y", "O=later")),
        "output 'Y' for ensemble 'm' is not written",
    ),
    (
        ensemble(step("a", "I=z", "O=Y"), step("b", "I=X J=later", "O=z")),
        "output 'Y' for ensemble 'm' is not written: at least one of its depending tensors, 'later', is not connected",
    ),
    (ensemble(PASS, step("b", "I=X", "O=idle")), "ensemble tensor 'idle' is unused in ensemble 'm'"),
    (
        ensemble(PASS, step("b", "I=round", "O=about"), step("b", "I=about", "O=round")),
        "ensemble tensor 'about' is unused in ensemble 'm'",
    ),
    (
        ensemble(PASS, step("b", "I=Y", "O=X")),
        "ensemble input 'X' for ensemble 'm' is written by one of its steps",
    ),
    (
        ensemble(step("a", "I=X", "O=t0"), *(step("a", f"I=t{n}", f"O=t{n + 1}") for n in range(256))),
        "ensemble 'm' has 257 steps, more than 256",
    ),
]

NOT_SERVED = [
    ('runtime: "r"', "runtime", "a backend has one runtime"),
    (
        "instance_group { secondary_devices { kind: KIND_NVDLA device_id: 0 } }",
        "instance_group.secondary_devices",
        "the mesh has no secondary devices",
    ),
    (
        'model_repository_agents { agents { name: "a" } }',
        "model_repository_agents",
        "the mesh has no repository agents",
    ),
    (
        'cc_model_filenames { key: "8.0" value: "x" }',
        "cc_model_filenames",
        "the mesh does not choose model files by compute capability",
    ),
    (
        'model_operations { op_library_filename: "x" }',
        "model_operations",
        "the mesh loads no custom operation libraries",
    ),
]


def batch_input(body: str) -> str:
    return f"{IO} batch_input {{ {body} }}"


def batch_output(body: str) -> str:
    return f"{IO} batch_output {{ {body} }}"


BATCH_IO = [
    *(
        (
            batch_input(f'kind: {kind} target_name: "b" data_type: TYPE_INT32'),
            f"batch input kind '{kind}' expects 1 source input, got 0 for m",
        )
        for kind in BatchInputKind
    ),
    (
        batch_input('target_name: "b" data_type: TYPE_INT32 source_input: ["X", "X"]'),
        "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 2 for m",
    ),
    (
        batch_input('target_name: "b" data_type: TYPE_INT64 source_input: "X"'),
        "batch input data type must be TYPE_INT32 or TYPE_FP32 for m",
    ),
    (
        batch_input('target_name: "b" data_type: TYPE_FP32 source_input: "Z"'),
        "unknown source input name 'Z' for m",
    ),
    (batch_input('data_type: TYPE_FP32 source_input: "X"'), "batch input must specify 'target_name' for m"),
    (
        batch_input('target_name: "X" data_type: TYPE_FP32 source_input: "X"'),
        "batch input target 'X' is also a model input for m",
    ),
    (
        batch_output('target_name: "Y"'),
        "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m",
    ),
    (batch_output('target_name: "Y" source_input: "Z"'), "unknown source input name 'Z' for m"),
    (batch_output('target_name: "Z" source_input: "X"'), "unknown target output name 'Z' for m"),
    (
        batch_output('target_name: ["Y", "Y"] source_input: "X"'),
        "target output name 'Y' can only be specified once for m",
    ),
]


def metric(body: str) -> str:
    return f"{IO} model_metrics {{ metric_control {{ {body} }} }}"


METRICS = [
    (
        f'{IO} metric_tags {{ key: "a b" value: "c" }}',
        "metric tag 'a b' must consist of letters, digits and underscores for m",
    ),
    (metric(""), "metric control must specify 'metric_identifier'"),
    (metric("metric_identifier { }"), "metric identifier must specify non-empty 'family'"),
    (metric('metric_identifier { family: "f" }'), "metric control must specify 'histogram_options'"),
    (
        metric('metric_identifier { family: "f" } histogram_options { }'),
        "histogram options must specify non-empty 'buckets'",
    ),
    (
        metric('metric_identifier { family: "f" } histogram_options { buckets: [2, 1] }'),
        "histogram options must specify rising 'buckets' for family 'f' of m",
    ),
]


def warmup(tensor: str, batch: int = 1) -> str:
    return f'{IO} model_warmup {{ name: "w" batch_size: {batch} inputs {{ key: "X" value {{ {tensor} }} }} }}'


WARMUP = [
    (
        warmup("data_type: TYPE_FP32 dims: [-1] zero_data: true"),
        "warmup setting expects all variable-size dimensions are specified for input 'X'",
    ),
    (
        warmup("data_type: TYPE_FP32 dims: 4"),
        "[request id: <id_unknown>] warmup setting expects input 'X' to have input_data_type set",
    ),
    (
        warmup("dims: 4 zero_data: true"),
        "warmup sample 'w' must specify 'data_type' of input 'X' for m",
    ),
    (
        warmup('data_type: TYPE_FP32 dims: 4 input_data_file: "../x"'),
        "warmup file '../x' of input 'X' must lie in 'warmup' for m",
    ),
    (
        warmup("data_type: TYPE_FP32 dims: 4 zero_data: true", batch=9),
        "warmup sample 'w' has batch_size 9, but max_batch_size is 8 for m",
    ),
    (
        warmup("data_type: TYPE_FP32 dims: 4 zero_data: true", batch=2).replace("max_batch_size: 8", ""),
        "warmup sample 'w' has batch_size 2, but max_batch_size is 0 for m",
    ),
]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *TENSORS,
        *BATCH_IO,
        *METRICS,
        *WARMUP,
        *ENSEMBLES,
        *CONTROLS,
        *SEQUENCES,
        *STATES,
        *((f"{IO} dynamic_batching {{ {body} }}", message) for body, message in DYNAMIC),
        *INSTANCES,
        *PARAMETERS,
        *RETRY_PARAMETERS,
        *(
            (f"{IO} {text}", f"model 'm' sets '{path}', which is not supported: {why}")
            for text, path, why in NOT_SERVED
        ),
    ],
)
def test_broken_rule_is_answered_with_its_message(load_text: LoadText, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(text)

    assert message == refusal.value.message


@pytest.mark.parametrize(("version", "asked_for"), [(-1, ""), (0, ""), (3, "3")])
def test_a_step_of_an_ensemble_names_a_version_or_has_the_newest(
    load_text: LoadText, version: int, asked_for: str
) -> None:
    config = load_text(ensemble(PASS.replace("{", f"{{ model_version: {version} ", 1))).config

    assert [asked_for] == [step.version for step in config.ensemble]


def test_an_environment_of_its_own_needs_a_process(load_text: LoadText) -> None:
    environment = f'{IO} parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "/env.tar.gz" }} }}'
    in_thread = f'{environment} parameters {{ key: "instance_process" value {{ string_value: "false" }} }}'

    assert load_text(environment).config.instance_process
    with pytest.raises(ConfigError, match="needs a process for each instance, and 'instance_process' says 'false'"):
        load_text(in_thread)


def test_growable_memory_needs_one_buffer(load_text: LoadText) -> None:
    """Triton says so when it makes the state of a sequence."""
    with pytest.raises(ConfigError, match=r"for state input name 'h'.*use_same_buffer_for_input_output"):
        load_text(state("use_growable_memory: true"))


def test_minimum_slot_utilization_of_zero_is_accepted(load_text: LoadText) -> None:
    """The message says (0.0, 1.0], but Triton accepts zero."""
    load_text(f"{IO} sequence_batching {{ direct {{ minimum_slot_utilization: 0.0 }} }}")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (f"{given('dims: 1')} instance_group {{ kind: 9 }}", "has unexpected kind 9"),
        (f"{given('dims: 1')} sequence_batching {{ state {{ }} }}", "model input must specify 'name'"),
        (f"{IO} sequence_batching {{ state {{ }} }} batch_input {{ }}", "kind 'BATCH_ELEMENT_COUNT' expects 1 source"),
        (f"{IO} sequence_batching {{ state {{ }} control_input {{ }} }}", "control tensor must have a name"),
    ],
)
def test_of_two_broken_rules_the_one_is_told_that_triton_tells(load_text: LoadText, text: str, first: str) -> None:
    with pytest.raises(ConfigError, match=first):
        load_text(text)


@pytest.mark.parametrize("reshape", ["[8]", "[2, 4]", "[1, 8, 1]"])
def test_reshape_of_the_same_size_is_accepted(load_text: LoadText, reshape: str) -> None:
    tensor = f'name: "X" data_type: TYPE_FP32 dims: [4, 2] reshape {{ shape: {reshape} }}'

    loaded = load_text(given(tensor))

    assert tuple(int(dim) for dim in reshape.strip("[]").split(",")) == loaded.config.inputs[0].reshape


def test_scalar_reshape_needs_a_batching_model_and_one_element(load_text: LoadText) -> None:
    loaded = load_text(given('name: "X" data_type: TYPE_FP32 dims: 1 reshape { }'))

    assert () == loaded.config.inputs[0].reshape


def test_same_trunks_around_variable_dimensions_are_a_valid_reshape(load_text: LoadText) -> None:
    loaded = load_text(given('name: "X" data_type: TYPE_FP32 dims: [2, 4, -1, 6] reshape { shape: [8, -1, 1, 6] }'))

    assert (8, -1, 1, 6) == loaded.config.inputs[0].reshape


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other", "unexpected directory name 'm' for model 'other', directory name must equal model name"),
        ("../m", "invalid model name '../m', model name must not contain path traversal characters"),
        ("a/b", "invalid model name 'a/b', model name must not contain path traversal characters"),
        ("..", "invalid model name '..', model name must not contain path traversal characters"),
        ("a|b", "invalid model name 'a|b', model name must not contain '|' or unprintable characters"),
        ("a\\nb", "invalid model name 'a\\nb', model name must not contain '|' or unprintable characters"),
    ],
)
def test_name_is_the_directory_and_fit_for_paths_and_keys(load_text: LoadText, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(f'name: "{name}" {IO}')

    assert message == refusal.value.message


def test_gpu_that_is_not_there_is_refused(load_text: LoadText) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(f"{IO} instance_group {{ kind: KIND_GPU gpus: 2 }}", gpu_count=2)

    expected = (
        "instance group m_0 of model m specifies invalid or unsupported gpu id 2. GPUs with at least the minimum "
        "required CUDA compute compatibility of 6.000000 are: 0, 1"
    )
    assert expected == refusal.value.message


def test_initial_state_file_must_be_there_and_long_enough(load_text: LoadText) -> None:
    """A short file is refused in Triton's words, the missing space included; a longer one is accepted."""
    text = state(ZERO.replace("zero_data: true", 'data_file: "h0"'))
    with pytest.raises(ConfigError, match="there is no such file"):
        load_text(text)
    model_dir = load_text(f"{IO} sequence_batching {{ }}").model_dir
    (model_dir / "initial_state").mkdir()
    file = model_dir / "initial_state" / "h0"

    file.write_bytes(bytes(23))
    with pytest.raises(ConfigError) as refusal:
        load_text(text)
    expected = "initial_state setting expects 24 bytes, but the data provided from h0only has 23 bytes."
    assert expected == refusal.value.message

    file.write_bytes(bytes(30))
    batching = load_text(text).config.sequence_batching
    assert batching is not None
    assert ("h0", (2, 3)) == (batching.states[0].initial_file, batching.states[0].initial_dims)


def test_warmup_file_must_be_there_and_long_enough(load_text: LoadText) -> None:
    """In Triton's words, the request without an id and the missing space included; a longer file is cut."""
    text = warmup('data_type: TYPE_FP32 dims: 4 input_data_file: "x"')
    with pytest.raises(ConfigError, match="there is no such file"):
        load_text(text)
    folder = load_text(IO).model_dir / "warmup"
    folder.mkdir()

    (folder / "x").write_bytes(bytes(15))
    with pytest.raises(ConfigError) as refusal:
        load_text(text)
    expected = "warmup setting expects 16 bytes, but the data provided from xonly has 15 bytes"
    assert f"[request id: <id_unknown>] {expected}" == refusal.value.message

    (folder / "x").write_bytes(bytes(17))
    assert "x" == load_text(text).config.warmup[0].inputs["X"].file


def test_batching_library_beside_the_model_is_refused(load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match=r"batchstrategy\.so is not supported for m"):
        load_text(f"{IO} dynamic_batching {{ }}", files=["model.py", "batchstrategy.so"])


def test_batch_strategy_in_python_takes_the_librarys_place(load_text: LoadText) -> None:
    named = 'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "1/mine.py" } }'

    load_text(f"{IO} dynamic_batching {{ }} {named}", files=["model.py", "batchstrategy.so"])
    load_text(f"{IO} dynamic_batching {{ }}", files=["batchstrategy.py"])


@pytest.mark.parametrize("path", ["../model.py", "/model.py", "a/../../model.py"])
def test_model_file_stays_in_its_version_directory(load_text: LoadText, path: str) -> None:
    with pytest.raises(ConfigError, match="must name a file inside the version directory for m"):
        load_text(f'{IO} backend: "python" default_model_filename: "{path}"')

"""Triton's JSON of a configuration: its form, the way back from it, and the real protobuf message made of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tritonclient.grpc import model_config_pb2, service_pb2

from executor.configuration import fields
from executor.configuration.backends import Surroundings
from executor.configuration.build import build
from executor.configuration.canonical import to_json
from executor.configuration.normalise import fill_identity, normalise
from executor.configuration.rules.validate import validate
from shared.configuration.lenient_json import as_strict_json
from shared.configuration.parse import parse_json, parse_text
from shared.configuration.proto import config_proto
from shared.configuration.schema import CONFIG_DESCRIPTOR, is_dialect
from shared.contract.errors import ConfigError
from shared.contract.limits import ERROR_CHARACTERS_MAX, INSTANCES_MAX
from shared.contract.model_config import BatchInputKind, ModelConfig
from tests.executor.configuration.conftest import IO, LoadText

FIXTURES = Path(__file__).parents[2] / "fixtures"
AROUND = Surroundings("m", frozenset({"model.py"}), frozenset({"python"}))


def test_json_prints_every_default_in_order_with_numbers(load_text: LoadText) -> None:
    """As Triton's config endpoint answers, to the letter."""
    loaded = load_text(
        'input { name: "X" data_type: TYPE_FP32 dims: [-1, 9007199254740993] } '
        'output { name: "Y" data_type: TYPE_STRING dims: 1 label_filename: "l" } max_batch_size: 2 '
        'sequence_batching { oldest { } state { input_name: "h" output_name: "h" data_type: TYPE_FP32 dims: 3 '
        'initial_state { name: "i" data_type: TYPE_FP32 dims: 3 zero_data: false } } '
        'control_input { name: "S" control { fp32_false_true: [0, 0.1] } } }'
    )

    expected = (
        '{"name":"m","platform":"","backend":"python","runtime":"","version_policy":{"latest":{"num_versions":1}},'
        '"max_batch_size":2,"input":[{"name":"X","data_type":"TYPE_FP32","format":"FORMAT_NONE",'
        '"dims":[-1,9007199254740993],"is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,'
        '"is_non_linear_format_io":false}],"output":[{"name":"Y","data_type":"TYPE_STRING","dims":[1],'
        '"label_filename":"l","is_shape_tensor":false,"is_non_linear_format_io":false}],"batch_input":[],'
        '"batch_output":[],"optimization":{"priority":"PRIORITY_DEFAULT","input_pinned_memory":{"enable":true},'
        '"output_pinned_memory":{"enable":true},"gather_kernel_buffer_threshold":0,"eager_batching":false},'
        '"sequence_batching":{"oldest":{"max_candidate_sequences":0,"preferred_batch_size":[2],'
        '"max_queue_delay_microseconds":0,"preserve_ordering":false},"max_sequence_idle_microseconds":1000000,'
        '"control_input":[{"name":"S","control":[{"kind":"CONTROL_SEQUENCE_START","int32_false_true":[],'
        '"fp32_false_true":[0,0.1],"bool_false_true":[],"data_type":"TYPE_INVALID"}]}],'
        '"state":[{"input_name":"h","output_name":"h","data_type":"TYPE_FP32","dims":[3],"initial_state":['
        '{"data_type":"TYPE_FP32","dims":["3"],"name":"i","zero_data":false}],'
        '"use_same_buffer_for_input_output":false,"use_growable_memory":false}],"iterative_sequence":false},'
        '"instance_group":[{"name":"m","kind":"KIND_CPU","count":1,"gpus":[],"secondary_devices":[],"profile":[],'
        '"passive":false,"host_policy":""}],"default_model_filename":"model.py","cc_model_filenames":{},'
        '"metric_tags":{},"parameters":{},"model_warmup":[]}'
    )
    assert expected == loaded.json


def test_json_says_what_triton_says_of_an_ensembles_transactions_and_of_a_strategy_that_is_not_chosen(
    load_text: LoadText,
) -> None:
    steps = 'step { model_name: "a" input_map { key: "I" value: "X" } output_map { key: "O" value: "Y" } }'
    ensemble = json.loads(load_text(f'platform: "ensemble" {IO} ensemble_scheduling {{ {steps} }}').json)
    sequences = json.loads(load_text(f"{IO} sequence_batching {{ }}").json)

    assert {"decoupled": False} == ensemble["model_transaction_policy"]
    assert {"direct", "oldest"}.isdisjoint(sequences["sequence_batching"])


@pytest.mark.parametrize("number", ["3.4028234663852886e+38", "-3.4028235e38", "1e-45", "0.1"])
def test_a_single_reads_back_the_same(number: str) -> None:
    """The largest one too: rounded up, as digits, it would be refused as too large."""
    config = parse_text(
        f'name: "m" sequence_batching {{ direct {{ minimum_slot_utilization: {number} }} }}', "config.pbtxt"
    )

    assert config == parse_json(to_json(config))


@pytest.mark.parametrize(
    ("number", "printed"),
    [
        ("-0.0", "0"),
        ("-1", "-1"),
        ("999999", "999999"),
        ("1000000", "1000000.0"),
        ("1234567", "1234567"),
        ("16777216", "16777216"),
        ("3e9", "3000000000.0"),
        ("12345.6789", "12345.6787"),
        ("2.5", "2.5"),
    ],
)
def test_a_single_is_written_with_tritons_digits(number: str, printed: str) -> None:
    """As a running Triton 2.51 writes it."""
    control = f'control_input {{ name: "S" control {{ fp32_false_true: {number} }} }}'

    assert f'"fp32_false_true":[{printed}]' in to_json(parse_text(f"sequence_batching {{ {control} }}", "config.pbtxt"))


def test_numbers_that_triton_forgets_stay_strings() -> None:
    """64-bit integers beside those that its fix-up knows: what a client of Triton sees in the config endpoint."""
    config = parse_json(
        json.dumps(
            {
                "optimization": {"cuda": {"graph_spec": [{"input": {"X": {"dim": [4]}}}]}},
                "instance_group": [{"secondary_devices": [{"device_id": 1}]}],
                "sequence_batching": {"state": [{"dims": [3], "initial_state": [{"dims": [3]}]}]},
                "model_warmup": [{"inputs": {"X": {"dims": [2]}}}],
            }
        )
    )

    printed = json.loads(to_json(config))

    assert ["4"] == printed["optimization"]["cuda"]["graph_spec"][0]["input"]["X"]["dim"]
    assert "1" == printed["instance_group"][0]["secondary_devices"][0]["device_id"]
    assert (["3"], [3]) == (
        printed["sequence_batching"]["state"][0]["initial_state"][0]["dims"],
        printed["sequence_batching"]["state"][0]["dims"],
    )
    assert [2] == printed["model_warmup"][0]["inputs"]["X"]["dims"]


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("T", True), ("Yes", True), ("1", True), ("FALSE", False), ("n", False)]
)
def test_a_bool_may_be_a_text(text: str, value: bool) -> None:
    assert value is parse_json(f'{{"response_cache": {{"enable": "{text}"}}}}').response_cache.enable


def test_load_request_may_bring_its_own_configuration(load_text: LoadText) -> None:
    """It replaces config.pbtxt; names of enum values are read in any case, 64-bit numbers in either form."""
    override = {
        "max_batch_size": 3,
        "input": [{"name": "O", "data_type": "type_fp32", "dims": ["5"]}],
        "output": [{"name": "P", "dataType": "Type_String", "dims": [5]}],
        "instance_group": [{"kind": "kind-cpu"}],
        "parameters": {"Key": {"string_value": "Value"}},
        "dynamic_batching": {"priority_levels": 1, "default_priority_level": "1",
                             "priority_queue_policy": {"1": {"timeout_action": "delay"}}},
    }  # fmt: skip

    config = load_text("this is not even parsed", override_json=json.dumps(override)).config

    assert (3, "O", "FP32", "BYTES") == (
        config.max_batch_size, config.inputs[0].name, config.inputs[0].datatype, config.outputs[0].datatype
    )  # fmt: skip
    assert {"Key": "Value"} == config.parameters
    assert config.dynamic_batching is not None
    assert "DELAY" == config.dynamic_batching.priority_queue_policies[1].timeout_action


@pytest.mark.parametrize(
    "text",
    [
        '{max_batch_size: 3, input: [{name: "O", data_type: "TYPE_FP32", dims: [5]}]}',
        """{'max_batch_size': 3, 'input': [{'name': 'O', 'data_type': 'TYPE_FP32', 'dims': [5]}]}""",
        '{"max_batch_size": 3, "input": [{"name": "O", "data_type": "TYPE_FP32", "dims": [5,],},],}',
        """ {max_batch_size:3,\n'input':[{name:"O",data_type:'TYPE_FP32',dims:['5',],}],}\n""",
        '{"max_batch_size": 3, "input": {"name": "O", "data_type": "type_fp32", "dims": 5}}',
    ],
)
def test_an_override_may_be_written_as_loosely_as_triton_reads_it(text: str) -> None:
    """Bare keys, single quotes, trailing commas, lists of one without brackets: protobuf's C++ parser takes them."""
    config = parse_json(text)

    assert (3, "O", [5]) == (config.max_batch_size, config.input[0].name, list(config.input[0].dims))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"""{parameters: {a: {string_value: 'it\'s "so"'}}}""", 'it\'s "so"'),
        (r"""{parameters: {a: {string_value: "it's \"so\""}}}""", 'it\'s "so"'),
        (r"""{parameters: {a: {string_value: 'tab\t \v \q \u00e9'}}}""", "tab\t \v q \u00e9"),
        ("{parameters: {a: {string_value: 'two\nlines {a: 1,}, \"b\": [2,]'}}}", 'two\nlines {a: 1,}, "b": [2,]'),
    ],
)
def test_strings_of_a_loose_configuration_keep_their_content(text: str, value: str) -> None:
    (parameter,) = parse_json(text).parameters.values()

    assert value == parameter.string_value


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
        max_leaves=12,
    )
)
def test_json_itself_is_read_the_same_by_the_loose_rules(document: Any) -> None:
    for text in (json.dumps(document), json.dumps(document, ensure_ascii=False, indent=1)):
        assert document == json.loads(as_strict_json(text))


@pytest.mark.parametrize(
    "text", ["{,}", "[,]", "[1,,]", "{a 1}", "{'a: 1}", "{a: b}", "{a: 1}}", "{1: 2}", "{a: #}", "{true: 1}"]
)
def test_what_triton_does_not_read_either_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="failed to parse"):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"max_batch_syze": 1}', 'named "max_batch_syze" at "ModelConfig". Did you mean max_batch_size?'),
        ('{"input": [{"colour": 1}]}', "colour"),
        ('{"max_batch_size": 1, "max_batch_size": 2}', "repeated key max_batch_size"),
        ('{"max_batch_size": "many"}', "max_batch_size"),
        ('{"max_batch_size": 4294967296}', "max_batch_size"),
        ('{"input": {"colour": 1}}', "colour"),
        ('{"input": [null]}', "input"),
        ('{"input": 3}', "input"),
        ('{"dynamic_batching": []}', "'dynamic_batching' has a list where one value is expected"),
        ('{"input": [{"dims": [[1]]}]}', "'dims' has a list where one value is expected"),
        ('{"parameters": []}', "parameters"),
        ('{"parameters": {"a": 3}}', "parameters"),
        ('{"instance_group": [{"kind": "KIND_TOASTER"}]}', "KIND_TOASTER"),
        ('{"instance_group": [{"kind": "GPU"}]}', ". There are: KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL."),
        ('{"instance_group": [{"kind": 2.5}]}', "'kind' has 2.5 where a name or a whole number is expected"),
        ('{"instance_group": [{"kind": true}]}', "'kind' has true where a name or a whole number is expected"),
        ('{"response_cache": {"enable": "maybe"}}', "Expected true or false"),
        ('{"instance_group": [{"kind": {}}]}', "kind"),
        ('{"sequence_batching": {"direct": {}, "oldest": {}}}', "oneof"),
        ("[]", "expected a JSON object"),
        ("", "Expecting value"),
        ("{", "Expecting"),
        (r'{"\ud800": 1}', "surrogates not allowed"),
        (r'{"input": "\ud800"}', "surrogates not allowed"),
        ('{"parameters": {"a": 1e400}}', "failed to parse"),
        ('{"max_batch_size": 1e400}', "failed to parse"),
        ('{"' + "x" * 100_000 + '": 1}', "[...]"),
        ("[" * 100_000, "recursion"),
        ('{"max_batch_size": ' + "9" * 5000 + "}", "failed to parse"),
        (" " * (1 << 20) + "{}", "longer than"),
    ],
)
def test_json_that_is_no_configuration_is_refused(load_text: LoadText, text: str, what: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(IO, override_json=text)

    assert what in refusal.value.message
    assert "override configuration of model 'm'" in refusal.value.message
    assert len(refusal.value.message) < 2 * ERROR_CHARACTERS_MAX


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/*.pbtxt")), ids=lambda path: path.stem)
def test_configuration_loads_again_from_its_own_json(load_text: LoadText, path: Path) -> None:
    """What the config endpoint answers is a configuration, and it means the same."""

    def complete(config_json: str, version_dir: Path) -> str:
        tensor = {"name": "T", "data_type": "TYPE_FP32", "dims": [1]}
        config = json.loads(config_json)
        config["input"], config["output"] = config["input"] or [tensor], config["output"] or [tensor]
        return json.dumps(config)

    arguments: dict[str, Any] = {"name": path.stem, "backends": {"python": complete}}
    first = load_text(path.read_text().replace("pytorch_libtorch", ""), **arguments)
    second = load_text(None, override_json=first.json, **arguments)

    assert first.json == second.json
    # What was completed once needs no second note.
    ours, theirs = (msgspec.structs.replace(loaded.config, notes=()) for loaded in (first, second))
    assert ours == theirs


# Properties

Fields = dict[str, Any]


def some(
    always: Mapping[str, SearchStrategy[Any]] | None = None, **maybe: SearchStrategy[Any]
) -> SearchStrategy[Fields]:
    """JSON objects with those members, the keyword ones sometimes."""
    return st.fixed_dictionaries(dict(always or {}), optional=maybe)


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
types = st.sampled_from(["TYPE_FP32", "TYPE_INT64", "TYPE_STRING", "TYPE_BF16", "TYPE_BOOL"])
dims = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)
int32 = st.integers(-(2**31), 2**31 - 1)
sizes = st.lists(int32, max_size=3)
uint64 = st.integers(0, 2**64 - 1)
# Triton writes no sign of a zero.
single = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0),
    st.sampled_from(["Infinity", "-Infinity"]),
)
flag = st.booleans()
policy = some(
    timeout_action=st.sampled_from(["REJECT", "DELAY"]),
    default_timeout_microseconds=uint64,
    allow_timeout_override=flag,
    max_queue_size=st.integers(0, 2**32 - 1),
)
control = some(
    {"kind": st.sampled_from(["CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_CORRID"])},
    int32_false_true=sizes,
    fp32_false_true=st.lists(single, max_size=2),
    bool_false_true=st.lists(flag, max_size=2),
    data_type=types,
)
initial = some({"name": names, "dims": dims}, zero_data=flag)
state = some(
    {"data_type": types, "dims": dims}, input_name=names, output_name=names, initial_state=st.lists(initial, max_size=1)
)
# They exclude each other.
batchers: list[dict[str, SearchStrategy[Any]]] = [
    {},
    {"direct": some(minimum_slot_utilization=single)},
    {"oldest": some(preferred_batch_size=sizes)},
    {"reusable_batch": some(max_size=st.integers(0, 9), candidate_batch_size=sizes)},
]
sequence = st.one_of(
    [
        some(
            batcher,
            max_sequence_idle_microseconds=uint64,
            control_input=st.lists(some({"name": names, "control": st.lists(control, max_size=2)}), max_size=2),
            state=st.lists(state, max_size=2),
            default_batch_size=int32,
            timeout_action=st.sampled_from(["TIMEOUT_REJECT", "TIMEOUT_COMPLETE"]),
        )
        for batcher in batchers
    ]
)
dynamic = some(
    preferred_batch_size=sizes,
    max_queue_delay_microseconds=uint64,
    preserve_ordering=flag,
    priority_levels=uint64,
    default_queue_policy=policy,
    priority_queue_policy=st.dictionaries(uint64.map(str), policy, max_size=2),
    default_batch_size=int32,
    timeout_action=st.just("TIMEOUT_COMPLETE"),
)
tensor = some(
    {"name": names, "data_type": types, "dims": dims},
    reshape=some({"shape": dims}),
    optional=flag,
    format=st.just("FORMAT_NHWC"),
)
group = some(
    {"kind": st.sampled_from(["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"])}, name=names, count=int32, gpus=sizes
)
warmup = some({"data_type": types, "dims": dims}, zero_data=flag) | some(
    {"data_type": types, "dims": dims, "input_data_file": names}
)
metric = some(
    metric_identifier=some(family=names), histogram_options=some(buckets=st.lists(st.floats(0, 1e9), max_size=3))
)
config_json = some(
    {"max_batch_size": int32},
    batch_input=st.lists(
        some(
            kind=st.sampled_from([*BatchInputKind]),
            target_name=st.lists(names, max_size=2),
            data_type=types,
            source_input=st.lists(names, max_size=2),
        ),
        max_size=2,
    ),
    batch_output=st.lists(some(target_name=st.lists(names, max_size=2), source_input=st.lists(names)), max_size=1),
    model_warmup=st.lists(
        some(name=names, batch_size=st.integers(0, 9), count=st.integers(0, 9), inputs=st.dictionaries(names, warmup)),
        max_size=2,
    ),
    metric_tags=st.dictionaries(names, names, max_size=2),
    model_metrics=some(metric_control=st.lists(metric, max_size=2)),
    response_cache=some(enable=flag),
    input=st.lists(tensor, max_size=2),
    dynamic_batching=dynamic,
    sequence_batching=sequence,
    instance_group=st.lists(group, max_size=2),
    parameters=st.dictionaries(names, some({"string_value": names}), max_size=2),
    version_policy=some({"specific": some({"versions": dims})}),
    model_transaction_policy=some({"stateful_model_policy": some(timeout_action=st.just("DESCRIBE"))}),
)


@settings(max_examples=100, deadline=None)
@given(config_json, st.integers(0, 2))
def test_normalised_configuration_is_its_own_normal_form(given_fields: Fields, gpu_count: int) -> None:
    """JSON -> message -> defaults -> JSON: a second turn changes nothing, whatever was in it, valid or not."""
    around = Surroundings(AROUND.directory, AROUND.files, AROUND.backends, gpu_count)

    first = parse_json(json.dumps(given_fields))
    fill_identity(first, "m")
    normalise(first, around)
    printed = to_json(first)
    second = parse_json(printed)
    fill_identity(second, "m")
    normalise(second, around)

    assert first == second
    assert printed == to_json(second)


@settings(max_examples=80, deadline=None)
@given(config_json, st.integers(0, 2))
def test_any_configuration_has_values_or_is_refused(given_fields: Fields, gpu_count: int) -> None:
    """No configuration, however odd, ends in anything but values that travel, or a refusal in words."""
    config = parse_json(json.dumps(given_fields))
    fill_identity(config, "m")
    with contextlib.suppress(ConfigError):
        notes = normalise(config, Surroundings(AROUND.directory, AROUND.files, AROUND.backends, gpu_count))
        dialect = is_dialect(config)
        notes += validate(config, dialect=dialect, gpu_count=gpu_count) + fields.review_fields(config)
        values = build(config, dialect=dialect, notes=tuple(notes))

        assert values == msgspec.json.decode(msgspec.json.encode(values), type=ModelConfig)


small_dims = st.lists(st.sampled_from([-1, 1, 2, 3]), min_size=1, max_size=3)
fixed_dims = st.lists(st.integers(1, 3), max_size=2)
sound_state = st.tuples(st.sampled_from("abc"), types, fixed_dims, flag).map(
    lambda drawn: {
        "input_name": f"{drawn[0]}_in",
        "output_name": f"{drawn[0]}_out",
        "data_type": drawn[1],
        "dims": [-1 if drawn[3] else dim for dim in drawn[2]],
        "initial_state": [{"name": "i", "data_type": drawn[1], "dims": drawn[2], "zero_data": drawn[3]}],
    }
)
sound_control = st.one_of(
    st.sampled_from(["START", "READY", "END"]).map(
        lambda kind: {"kind": f"CONTROL_SEQUENCE_{kind}", "bool_false_true": [False, True]}
    ),
    st.sampled_from(["TYPE_UINT64", "TYPE_STRING"]).map(
        lambda data_type: {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": data_type}
    ),
).map(lambda control: {"name": control["kind"], "control": [control]})
sound_sequence = st.one_of(
    [
        some(
            batcher,
            state=st.lists(sound_state, max_size=3, unique_by=lambda state: state["input_name"]),
            control_input=st.lists(sound_control, max_size=4, unique_by=lambda control: control["name"]),
        )
        for batcher in (
            {},
            {"direct": some(minimum_slot_utilization=st.floats(0, 1, width=32))},
            {"oldest": some(max_candidate_sequences=int32, max_queue_delay_microseconds=uint64)},
            {"reusable_batch": some(max_size=st.integers(0, 9))},
        )
    ]
)
sound_warmup = some({"data_type": types, "dims": fixed_dims}, random_data=st.just(value=True)).map(
    lambda tensor: tensor if "random_data" in tensor else tensor | {"zero_data": True}
)
sound = some(
    {
        "max_batch_size": st.integers(0, 4),
        "input": st.lists(
            some({"name": st.sampled_from("XYZ"), "data_type": types, "dims": small_dims}, optional=flag),
            min_size=1,
            max_size=3,
            unique_by=lambda tensor: tensor["name"],
        ),
        "output": st.just([{"name": "O", "data_type": "TYPE_FP32", "dims": [1]}]),
    },
    sequence_batching=sound_sequence,
    instance_group=st.lists(some(name=names, count=st.integers(-1, INSTANCES_MAX // 2)), max_size=2),
    model_warmup=st.lists(
        some(name=names, batch_size=st.integers(0, 1), inputs=st.dictionaries(names, sound_warmup, max_size=2)),
        max_size=2,
    ),
    metric_tags=st.dictionaries(st.from_regex(r"[a-z_]{1,4}", fullmatch=True), names, max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(sound, st.sampled_from([*BatchInputKind]))
def test_sound_configuration_has_values_that_travel(given_fields: Fields, kind: BatchInputKind) -> None:
    """What keeps every rule is never refused; each state keeps its own pair of names, in the order given."""
    source = {"kind": kind, "target_name": ["b"], "data_type": "TYPE_INT32", "source_input": ["X"]}
    known = [source] if any(tensor["name"] == "X" for tensor in given_fields["input"]) else []
    config = parse_json(json.dumps(given_fields | {"batch_input": known}))
    fill_identity(config, "m")
    notes = normalise(config, AROUND)
    dialect = is_dialect(config)
    notes += validate(config, dialect=dialect, gpu_count=0)

    values = build(config, dialect=dialect, notes=tuple(notes))

    assert values == msgspec.json.decode(msgspec.json.encode(values), type=ModelConfig)
    assert [kind] * len(known) == [each.kind for each in values.batch_inputs]
    assert values.sequence_batching is None or values.configured_slots >= 1
    states = given_fields.get("sequence_batching", {}).get("state", [])
    assert [(state["input_name"], state["output_name"]) for state in states] == [
        (state.input_name, state.output_name)
        for state in (values.sequence_batching.states if values.sequence_batching else ())
    ]


@settings(max_examples=50, deadline=None)
@given(config_json)
def test_text_and_json_say_the_same(given_fields: Fields) -> None:
    message = parse_json(json.dumps(given_fields))

    assert message == parse_text(text_format.MessageToString(message), "printed")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="{}[]:,<>\"'\\ \n#0179-.xnameTYPE_", max_size=40))
def test_any_text_is_a_configuration_or_a_config_error(text: str) -> None:
    for parse in (parse_text, parse_json):
        with contextlib.suppress(ConfigError):
            parse(text, "somewhere")


# The real message

# Generated modules have no types.
triton_messages: Any = model_config_pb2
triton_services: Any = service_pb2


def test_real_message_is_what_tritons_own_parser_makes(load_text: LoadText) -> None:
    """A canonical configuration keeps everything; the message fits the rpc's response."""
    text = (FIXTURES / "triton" / "lstm.pbtxt").read_text()
    loaded = load_text(text, name="lstm")
    expected = text_format.Parse(text, triton_messages.ModelConfig())

    response = triton_services.ModelConfigResponse(config=config_proto(loaded.json))

    assert expected.input == response.config.input
    assert expected.sequence_batching.control_input == response.config.sequence_batching.control_input
    assert "lstm_0" == response.config.instance_group[0].name


def test_real_message_is_made_once_for_all_who_ask(load_text: LoadText) -> None:
    """A thousand calls may ask for it in one turn of a gateway's event loop."""
    config_json = load_text((FIXTURES / "triton" / "lstm.pbtxt").read_text(), name="lstm").json

    assert config_proto(config_json) is config_proto(config_json)


def test_real_message_leaves_the_dialect_out(load_text: LoadText) -> None:
    text = (FIXTURES / "seeds" / "my_lstm_model.pbtxt").read_text()

    message: Any = config_proto(load_text(text, name="my_lstm_model").json)

    assert "sequence_batching" == message.WhichOneof("scheduling_choice")
    assert ("lstm_state", "lstm_state") == (
        message.sequence_batching.state[0].input_name,
        message.sequence_batching.state[0].output_name,
    )
    assert 8 == message.sequence_batching.oldest.max_candidate_sequences
    assert not UnknownFieldSet(message.sequence_batching)
    assert not UnknownFieldSet(message.sequence_batching.state[0])


# The code itself


def test_every_field_of_the_schema_is_served_noted_or_refused() -> None:
    """No field can be ignored in silence: each stands in exactly one table, by itself or by what it lies in."""
    tables = (fields.SERVED, fields.NOTED, fields.REFUSED)
    seen: set[str] = set()

    def walk(descriptor: Descriptor, prefix: str) -> None:
        for field in descriptor.fields:
            path = prefix + field.name
            homes = sum(path in table for table in tables)
            assert homes <= 1, path
            if homes:
                seen.add(path)
            else:
                assert field.message_type is not None, f"nothing is said of {path}"
                walk(field.message_type, f"{path}.")

    walk(CONFIG_DESCRIPTOR, "")

    assert seen == {path for table in tables for path in table}


def test_values_need_no_protobuf() -> None:
    """Schedulers import the values alone: neither protobuf nor tritonclient may come with them."""
    program = (
        "import sys, shared.contract.model_config; "
        "sys.exit(any(m.split('.')[0] in ('google', 'tritonclient', 'grpc') for m in sys.modules))"
    )

    assert 0 == subprocess.run([sys.executable, "-c", program], check=False).returncode

"""From a model's directory to complete values: defaults, backends, versions, completion, notes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from executor.configuration.load import LoadedConfig
from executor.configuration.parameters import misspelt
from shared.contract.errors import ConfigError, LoadError
from shared.contract.model_config import (
    Direct,
    DynamicBatching,
    FixedShape,
    InstanceGroup,
    Oldest,
    QueuePolicy,
    SequenceBatching,
    TensorSpec,
    TimeoutAction,
)
from tests.executor.configuration.conftest import LoadText, sequence_of, unchanged

IO = (
    'input { name: "X" data_type: TYPE_FP32 dims: 4 } output { name: "Y" data_type: TYPE_STRING dims: [-1] } '
    "max_batch_size: 8"
)
FIXTURES = Path(__file__).parents[2] / "fixtures"


# Defaults


def test_defaults_of_a_stateless_model(load_text: LoadText) -> None:
    """Name from the directory, backend and file from the version directory, latest version, one instance on the CPU."""
    loaded = load_text(IO)

    config = loaded.config
    assert ("m", "python", "", "model.py") == (
        config.name,
        config.backend,
        config.platform,
        config.default_model_filename,
    )
    assert (TensorSpec(name="X", datatype="FP32", dims=(4,)),) == config.inputs
    assert (TensorSpec(name="Y", datatype="BYTES", dims=(-1,)),) == config.outputs
    assert (InstanceGroup(name="m", kind="CPU", count=1),) == config.instance_groups
    assert (None, None, (), (1,)) == (config.sequence_batching, config.dynamic_batching, config.notes, loaded.versions)


def test_defaults_of_dynamic_batching(load_text: LoadText) -> None:
    assert (
        DynamicBatching(preferred_batch_sizes=(8,)) == load_text(f"{IO} dynamic_batching {{ }}").config.dynamic_batching
    )


def test_queue_policies_of_dynamic_batching(load_text: LoadText) -> None:
    loaded = load_text(
        f"""{IO} dynamic_batching {{
          priority_levels: 2 default_priority_level: 2 max_queue_delay_microseconds: 7 preferred_batch_size: [4, 2]
          default_queue_policy {{ max_queue_size: 3 }}
          priority_queue_policy {{ key: 1 value {{
            timeout_action: DELAY default_timeout_microseconds: 9 allow_timeout_override: true }} }}
        }}"""
    )

    expected = DynamicBatching(
        preferred_batch_sizes=(2, 4),
        max_queue_delay_us=7,
        priority_levels=2,
        default_priority_level=2,
        default_queue_policy=QueuePolicy(max_queue_size=3),
        priority_queue_policies={1: QueuePolicy(TimeoutAction.DELAY, 9, allow_timeout_override=True)},
    )
    assert expected == loaded.config.dynamic_batching


def test_defaults_of_sequence_batching(load_text: LoadText) -> None:
    """Direct strategy, one second of idle time, no implicit start for a canonical configuration."""
    batching = sequence_of(load_text(f"{IO} sequence_batching {{ }}"))

    assert SequenceBatching(strategy=Direct(), idle_us=1_000_000) == batching


def test_defaults_of_the_oldest_strategy(load_text: LoadText) -> None:
    loaded = load_text(f"{IO} sequence_batching {{ oldest {{ }} }}")

    assert Oldest(max_candidate_sequences=8, preferred_batch_sizes=(8,)) == sequence_of(loaded).strategy
    assert 8 == loaded.config.configured_slots


def test_sequence_model_without_batch_dimension_has_one_slot(load_text: LoadText) -> None:
    loaded = load_text(f"{IO.replace('max_batch_size: 8', '')} sequence_batching {{ oldest {{ }} }}")

    assert Oldest(max_candidate_sequences=1) == sequence_of(loaded).strategy
    assert 1 == loaded.config.configured_slots


def test_later_state_of_the_same_name_is_left_out_with_a_note(load_text: LoadText) -> None:
    state = 'state { input_name: "h" output_name: "%s" data_type: TYPE_FP32 dims: 2 }'

    loaded = load_text(f"{IO} sequence_batching {{ {state % 'a'} {state % 'b'} }}")

    assert ["a"] == [state.output_name for state in sequence_of(loaded).states]
    assert ("state 'h' is declared more than once; the first declaration counts",) == loaded.config.notes


@pytest.mark.parametrize(
    ("form", "dims", "initial"),
    [
        ("FP32 dims: [2, -1]", (2, -1), None),
        # As in Triton's own suite: it begins so, and grows.
        ("INT8 dims: [1024, 2]", (-1, 2), (1024, 2)),
        ("FP32 dims: [-1, -1]", (-1, -1), None),
        ("STRING dims: -1", (-1,), None),
    ],
)
def test_state_grows_along_one_dimension_or_is_kept_whole_with_a_note(
    load_text: LoadText, form: str, dims: tuple[int, ...], initial: tuple[int, ...] | None
) -> None:
    grows = "use_same_buffer_for_input_output: true use_growable_memory: true"
    state = f'state {{ input_name: "h" output_name: "g" data_type: TYPE_{form} {grows} }}'

    loaded = load_text(f"{IO} sequence_batching {{ {state} }}")

    (spec,) = sequence_of(loaded).states
    assert (dims, initial) == (spec.dims, spec.initial_dims)
    told = "'use_growable_memory' of state 'h' has no effect: it has strings, or several dimensions of -1"
    assert (spec.growth_axis is None) == any(told in note for note in loaded.config.notes)


def test_a_state_may_begin_empty(load_text: LoadText) -> None:
    """As in Triton 2.51: an attention cache has no position before the first step."""
    empty = 'initial_state { name: "e" data_type: TYPE_FP32 dims: [2, 0] zero_data: true }'
    state = f'state {{ input_name: "h" output_name: "g" data_type: TYPE_FP32 dims: [2, -1] {empty} }}'

    loaded = load_text(f"{IO} sequence_batching {{ {state} }}")

    (spec,) = sequence_of(loaded).states
    assert (2, 0) == spec.initial_dims


# Instances


@pytest.mark.parametrize(
    ("group", "gpu_count", "expected"),
    [
        ("", 0, InstanceGroup("m_0", "CPU", 1)),
        ("", 2, InstanceGroup("m_0", "GPU", 1, (0, 1))),
        ("count: -1", 0, InstanceGroup("m_0", "CPU", 1)),
        ("kind: KIND_CPU count: 3", 2, InstanceGroup("m_0", "CPU", 3)),
        ("kind: KIND_AUTO gpus: 1", 2, InstanceGroup("m_0", "GPU", 1, (1,))),
        ("kind: KIND_AUTO gpus: 5", 2, InstanceGroup("m_0", "CPU", 1)),
        ('name: "g" kind: KIND_GPU gpus: [1]', 2, InstanceGroup("g", "GPU", 1, (1,))),
    ],
)
def test_kind_is_resolved_by_the_gpus_there_are(
    load_text: LoadText, group: str, gpu_count: int, expected: InstanceGroup
) -> None:
    loaded = load_text(f"{IO} instance_group {{ {group} }}", gpu_count=gpu_count)

    assert (expected,) == loaded.config.instance_groups


def test_automatic_group_without_its_gpus_is_noted(load_text: LoadText) -> None:
    """Triton refuses it where they are missing; here one repository serves executors with and without GPUs."""
    loaded = load_text(f"{IO} instance_group {{ gpus: [0, 1] }}")

    expected = "instance group m_0 has kind KIND_AUTO, and gpus 0, 1 are not all here: it runs on the CPU"
    assert (expected,) == loaded.config.notes


@pytest.mark.parametrize(("kind", "count"), [("KIND_CPU", 2), ("KIND_GPU", 1)])
def test_onnxruntime_has_two_instances_on_the_cpu(load_text: LoadText, kind: str, count: int) -> None:
    backends = {"onnxruntime": unchanged}

    loaded = load_text(f"{IO} instance_group {{ kind: {kind} }}", files=["model.onnx"], backends=backends, gpu_count=1)

    assert [count] == [group.count for group in loaded.config.instance_groups]


def test_groups_may_share_a_name_and_the_missing_one_is_called_like_the_model(load_text: LoadText) -> None:
    shared = load_text(f'{IO} instance_group [ {{ name: "a" }}, {{ name: "a" count: 2 }} ]')
    missing = load_text(IO)

    assert ["a", "a"] == [group.name for group in shared.config.instance_groups]
    assert ["m"] == [group.name for group in missing.config.instance_groups]


def test_count_of_a_gpu_group_is_meant_for_each_gpu(load_text: LoadText) -> None:
    loaded = load_text(f"{IO} instance_group [ {{ count: 2 kind: KIND_GPU }}, {{ kind: KIND_CPU }} ]", gpu_count=2)

    assert 5 == loaded.config.instance_count
    assert ["m_0", "m_1"] == [group.name for group in loaded.config.instance_groups]


# Backends


@pytest.mark.parametrize(
    ("text", "files", "expected"),
    [
        ("", ["model.pt"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ("", ["model.pt2"], ("pytorch", "pytorch_libtorch", "model.pt2")),
        ("", ["model.py", "model.pt"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ("", ["model.py", "model.plan"], ("python", "", "model.py")),
        ('backend: "pytorch"', ["model.py", "model.pt2"], ("pytorch", "pytorch_libtorch", "model.pt2")),
        ('platform: "pytorch_libtorch"', ["model.pt"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ('backend: "python" default_model_filename: "mine.py"', ["mine.py"], ("python", "", "mine.py")),
    ],
)
def test_backend_platform_and_file_are_told_from_each_other(
    load_text: LoadText, text: str, files: list[str], expected: tuple[str, str, str]
) -> None:
    config = load_text(f"{IO} {text}", files=files).config

    assert expected == (config.backend, config.platform, config.default_model_filename)


def test_of_several_model_files_the_one_counts_that_triton_takes(load_text: LoadText) -> None:
    """As a running Triton 2.51 chose, of each two of them."""
    order = {
        "model.graphdef": "tensorflow",
        "model.savedmodel": "tensorflow",
        "model.plan": "tensorrt",
        "model.onnx": "onnxruntime",
        "model.xml": "openvino",
        "model.pt": "pytorch",
        "model.py": "python",
    }
    files, backends = list(order), dict.fromkeys(order.values(), unchanged)

    for number, file in enumerate(files):
        loaded = load_text(IO, name=f"m{number}", files=files[number:], backends=backends)

        assert (order[file], file) == (loaded.config.backend, loaded.config.default_model_filename)


def test_a_platform_and_a_backend_are_a_pair_where_triton_knows_both(load_text: LoadText) -> None:
    backends = dict.fromkeys(("tensorrt", "onnxruntime", "python"), unchanged)

    filled = load_text(f'{IO} backend: "tensorrt"', files=["model.plan"], backends=backends)
    ignored = load_text(f'{IO} backend: "python" platform: "onnxruntime_onnx"', backends=backends)

    assert "tensorrt_plan" == filled.config.platform
    assert ("python", "onnxruntime_onnx") == (ignored.config.backend, ignored.config.platform)
    assert "platform onnxruntime_onnx has no effect: the backend is python" in ignored.config.notes
    with pytest.raises(ConfigError, match="unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime"):
        load_text(f'{IO} backend: "onnxruntime" platform: "tensorrt_plan"', files=["model.onnx"], backends=backends)


@pytest.mark.parametrize(
    ("name", "backend", "file"), [("m.python", "python", "model.py"), ("m.my.own", "my.own", "model.my.own")]
)
def test_backend_is_told_from_the_models_name(load_text: LoadText, name: str, backend: str, file: str) -> None:
    """By all that follows its first dot."""
    config = load_text(IO, name=name, files=["other.py"], backends={backend: unchanged}).config

    assert (backend, file) == (config.backend, config.default_model_filename)


@pytest.mark.parametrize(
    ("text", "files", "message"),
    [
        (
            "",
            ["weights.bin"],
            (
                "Invalid model name: Could not determine backend for model 'm' with no backend in model configuration. "
                "Expected model name of the form 'model.<backend_name>'."
            ),
        ),
        (
            'backend: "tensorrt"',
            ["model.plan"],
            (
                "unable to find backend 'tensorrt' for model 'm'; installed backends: python, pytorch (platform "
                "pytorch_libtorch); the mesh has no backend of its own for TensorRT: serve the model as ONNX, or "
                "install a package that announces 'tensorrt' (docs/guides/backends.md)"
            ),
        ),
        (
            "",
            ["model.onnx"],
            (
                "unable to find backend 'onnxruntime' for model 'm'; installed backends: python, pytorch (platform "
                "pytorch_libtorch); install it where the executor runs: pip install 'seqmesh[executor]'"
            ),
        ),
        (
            'platform: "tensorflow_savedmodel"',
            ["model.savedmodel"],
            (
                "platform 'tensorflow_savedmodel' of model 'm' is not installed, and no file of an installed backend "
                "stands in for it; installed backends: python, pytorch (platform pytorch_libtorch); install it where "
                "the executor runs: pip install 'seqmesh[tensorflow]'"
            ),
        ),
        (
            "",
            ["model.xml"],
            (
                "unable to find backend 'openvino' for model 'm'; installed backends: python, pytorch (platform "
                "pytorch_libtorch); install it where the executor runs: pip install 'seqmesh[openvino]'"
            ),
        ),
        (
            'platform: "abacus"',
            ["model.plan"],
            (
                "unexpected platform type 'abacus' for m; installed backends: python, pytorch (platform "
                "pytorch_libtorch)"
            ),
        ),
    ],
)
def test_model_without_an_installed_backend_is_refused(
    load_text: LoadText, text: str, files: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(f"{IO} {text}", files=files)

    assert message == refusal.value.message


@pytest.mark.parametrize(
    ("file", "backend"), [("model.pt", "pytorch"), ("model.pt2", "pytorch"), ("model.py", "python")]
)
def test_platform_that_is_not_installed_is_served_by_the_file_that_is_there(
    load_text: LoadText, file: str, backend: str
) -> None:
    config = load_text(f'{IO} platform: "tensorflow_savedmodel"', files=[file]).config

    assert backend == config.backend
    assert (f"platform tensorflow_savedmodel is not installed; serving {file} with {backend}",) == config.notes


WITH_TENSORFLOW = {"python": unchanged, "pytorch": unchanged, "tensorflow": unchanged}


@pytest.mark.parametrize(
    ("text", "files", "platform", "filename"),
    [
        ("", ["model.savedmodel"], "tensorflow_savedmodel", "model.savedmodel"),
        ("", ["model.graphdef"], "tensorflow_graphdef", "model.graphdef"),
        ('backend: "tensorflow"', ["model.graphdef"], "tensorflow_graphdef", "model.graphdef"),
        ('platform: "tensorflow_graphdef"', ["model.savedmodel"], "tensorflow_graphdef", "model.graphdef"),
        (
            'platform: "tensorflow_savedmodel" default_model_filename: "mine"',
            ["mine", "model.pt"],
            "tensorflow_savedmodel",
            "mine",
        ),
        ('platform: "tensorflow_savedmodel"', [], "tensorflow_savedmodel", "model.savedmodel"),
    ],
)
def test_the_two_kinds_of_tensorflow_models_are_told_apart(
    load_text: LoadText, text: str, files: list[str], platform: str, filename: str
) -> None:
    config = load_text(f"{IO} {text}", files=files, backends=WITH_TENSORFLOW).config

    assert ("tensorflow", platform, filename) == (config.backend, config.platform, config.default_model_filename)


@pytest.mark.parametrize("told", ["", 'default_model_filename: "model.pt"'])
def test_a_tensorflow_model_without_its_file_is_served_by_the_file_that_is_there(
    load_text: LoadText, told: str
) -> None:
    """Installing TensorFlow takes no model away that another backend serves."""
    text = f'{IO} platform: "tensorflow_savedmodel" {told}'

    config = load_text(text, files=["model.pt"], backends=WITH_TENSORFLOW).config

    assert "pytorch" == config.backend
    assert ("platform tensorflow_savedmodel has no file here; serving model.pt with pytorch",) == config.notes


@pytest.mark.parametrize("backend", ["openvino", "tensorflow"])
def test_a_backend_for_cpus_has_cpu_instances_where_there_are_gpus(load_text: LoadText, backend: str) -> None:
    config = load_text(f'{IO} backend: "{backend}"', backends={backend: unchanged}, gpu_count=2).config

    assert [False] == [bool(group.gpus) for group in config.instance_groups]


@pytest.mark.parametrize(
    ("backend", "name", "because"),
    [
        ("openvino", "ENABLE_BATCH_PADDING", "the model is given batches of every size"),
        ("tensorflow", "MAX_SESSION_SHARE_COUNT", "each instance has a session of its own"),
    ],
)
def test_a_parameter_without_effect_is_told_to_the_models_of_its_backend(
    load_text: LoadText, backend: str, name: str, because: str
) -> None:
    text = f'{IO} backend: "{backend}" parameters {{ key: "{name}" value {{ string_value: "1" }} }}'

    assert (f"parameter '{name}' has no effect: {because}",) == load_text(
        text, backends={backend: unchanged}
    ).config.notes


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        (
            "intra_op_thread_count",
            ["parameter 'intra_op_thread_count' has no effect: the backend is pytorch, and onnxruntime models have it"],
        ),
        ("INTRA_OP_THREAD_COUNT", []),
    ],
)
def test_a_parameter_of_another_backend_is_told(load_text: LoadText, name: str, notes: Sequence[str]) -> None:
    text = f'{IO} backend: "pytorch" parameters {{ key: "{name}" value {{ string_value: "1" }} }}'

    assert tuple(notes) == load_text(text, backends={"pytorch": unchanged}).config.notes


def test_a_parameter_that_is_nearly_one_of_the_mesh_s_may_be_misspelt() -> None:
    """Others are the model's own."""
    names = ("checkpoint_intervall", "Fixed-Shape", "EXECUTION_ENV_PTH", "threads", "retry_replies", "vocabulary")

    assert {
        "checkpoint_intervall": "checkpoint_interval",
        "Fixed-Shape": "fixed_shape",
        "EXECUTION_ENV_PTH": "EXECUTION_ENV_PATH",
    } == misspelt(names)


# Versions


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", (10,)),
        ("version_policy { latest { num_versions: 2 } }", (2, 10)),
        ("version_policy { all { } }", (1, 2, 10)),
        ("version_policy { specific { versions: [2, 1] } }", (1, 2)),
    ],
)
def test_versions_follow_the_policy(load_text: LoadText, policy: str, expected: tuple[int, ...]) -> None:
    assert expected == load_text(f"{IO} {policy}", versions=["1", "2", "10"]).versions


def test_directories_that_are_no_versions_are_noted(load_text: LoadText) -> None:
    loaded = load_text(f"{IO} version_policy {{ all {{ }} }}", versions=["3", "03", "0", "-1", "old", "initial_state"])

    assert (0, 3) == loaded.versions
    assert (
        "ignore version directory '-1' which fails to convert to integral number",
        "ignore version directory '03' which contains leading zeros in its directory name",
        "ignore version directory 'old' which fails to convert to integral number",
    ) == loaded.config.notes


def test_specific_version_that_is_missing_is_noted(load_text: LoadText) -> None:
    loaded = load_text(f"{IO} version_policy {{ specific {{ versions: [1, 7] }} }}")

    assert ("version 7 is specified for model 'm', but the version directory is not present",) == loaded.config.notes


@pytest.mark.parametrize("policy", ["", "version_policy { specific { versions: 2 } }", "version_policy { latest { } }"])
def test_model_without_usable_version_is_refused(load_text: LoadText, policy: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(f"{IO} {policy}", versions=["1"] if policy else ["x"])

    there = "it has 1" if policy else "no folder of it is named by a number, such as 1"
    assert (
        f"at least one version must be available under the version policy of model 'm': {there}"
        == refusal.value.message
    )


# Reading


def test_a_number_that_no_value_of_an_enum_can_have_is_an_error_of_its_file(load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match=r"failed to read text proto from .*config\.pbtxt: Value out of range: 9+"):
        load_text('input [ { name: "A" data_type: 99999999999 dims: [ 1 ] } ]')


def test_syntax_error_names_file_line_and_what_was_wrong(load_text: LoadText) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text('name: "m"\nmax_batch_syze: 8\n')

    assert "failed to read text proto from " in refusal.value.message
    assert 'config.pbtxt:2:1: Message type "inference.ModelConfig" has no field named "max_batch_syze"' in (
        refusal.value.message
    )


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("max_batch_syze: 8", '"max_batch_syze". Did you mean max_batch_size?'),
        ("sequence_batching { state { inputname: 'h' } }", '"inputname". Did you mean input_name?'),
        ("colour: 8", '"colour".'),
        (
            "instance_group { kind: GPU }",
            "named GPU. There are: KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL.",
        ),
        ("input { data_type: FLOAT32 }", "named FLOAT32. There are: TYPE_BOOL, TYPE_UINT8, "),
        ("backend: python", "found: 'python': texts stand in quotes"),
    ],
)
def test_a_field_or_a_value_that_is_not_there_is_refused_with_what_there_is(
    load_text: LoadText, text: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(text)

    said = refusal.value.message
    assert said.endswith(remedy) or (remedy.endswith(", ") and remedy in said)


@pytest.mark.parametrize(
    "text",
    [
        "max_batch_size: 1 max_batch_size: 2",
        "max_batch_size: 99999999999",
        "max_batch_size: ",
        'name: "m',
        "input { name: 'x'",
        "instance_group { kind: KIND_TOASTER }",
        "sequence_batching { direct { } oldest { } }",
        "sequence_batching { generative_sequence: true }",
        "\x00",
        "[" * 5000,
        "x" * (1 << 20) + "x",
    ],
)
def test_text_that_is_no_configuration_is_refused(load_text: LoadText, text: str) -> None:
    with pytest.raises(ConfigError, match="failed to read"):
        load_text(text)


@pytest.mark.parametrize(
    ("content", "where"), [(b'# \xff\nname: "\xff"', "2:8"), (b'name: "m" # \xff\n \xff', "2:2"), (b"\xff", "1:1")]
)
def test_text_that_is_no_utf8_is_refused(load_text: LoadText, content: bytes, where: str) -> None:
    model_dir = load_text(IO).model_dir
    (model_dir / "config.pbtxt").write_bytes(content)

    with pytest.raises(ConfigError, match=rf"failed to read text proto from .*config\.pbtxt:{where}: it is no UTF-8"):
        load_text(None)


def test_a_comment_may_be_in_any_encoding(load_text: LoadText) -> None:
    model_dir = load_text(IO).model_dir
    comment = '# Größe \\ "\n'.encode("latin-1")
    (model_dir / "config.pbtxt").write_bytes(comment + IO.encode() + b" " + comment)

    assert load_text(None).config.inputs


def test_escapes_are_those_of_protobuf(load_text: LoadText) -> None:
    """Its Python parser alone would leave the backslash where it is."""
    parameter = """parameters { key: "k" value { string_value: '"#\\?' "\\'\\x41\\101\\u00e9\\n#" # "\\q"\n } }"""

    assert {"k": "\"#?'AAé\n#"} == load_text(f"{IO} {parameter}").config.parameters


@pytest.mark.parametrize("text", ['"C:\\models\\deep"', r"""'\"' '\.'""", r'"\N{BULLET}"', '"\\8"'])
def test_an_escape_that_is_none_is_refused_with_its_place(load_text: LoadText, text: str) -> None:
    parameter = f'parameters {{ key: "k" value {{ string_value: {text} }} }}'

    with pytest.raises(ConfigError, match=r"config\.pbtxt:2:\d+: Invalid escape sequence in string literal\."):
        load_text(f"# \\q\n{parameter} {IO}")


@pytest.mark.parametrize("made", ["a pipe", "a device", "a long file", "a folder"])
def test_what_is_no_configuration_file_is_not_read(load_text: LoadText, made: str) -> None:
    """Of a pipe and of a device the end may never come, and a file may have more than there is memory."""
    path = load_text(IO).model_dir / "config.pbtxt"
    path.unlink()
    match made:
        case "a pipe":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/zero")
        case "a long file":
            path.touch()
            os.truncate(path, 1 << 40)
        case _:
            path.mkdir()

    with pytest.raises(ConfigError, match=r"failed to read .*config\.pbtxt: (it is no file|longer than 1048576 bytes)"):
        load_text(None)


def test_directory_that_is_not_there_is_refused(load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match="failed to read the directory of model 'm'"):
        load_text(None, versions=[])


def test_configuration_of_another_name_is_read_from_configs(load_text: LoadText) -> None:
    """`configs/<name>.pbtxt` where there is one, `config.pbtxt` where there is none."""
    folder = load_text(f"{IO} instance_group {{ count: 2 }}").model_dir / "configs"
    folder.mkdir()
    (folder / "large.pbtxt").write_text(f"{IO} instance_group {{ count: 5 }}")

    counts = [load_text(None, config_name=name).config.instance_count for name in ("", "large", "small")]

    assert [2, 5, 2] == counts
    assert () == load_text(None, config_name="large").config.notes


def test_override_wins_over_a_configuration_of_another_name(load_text: LoadText) -> None:
    folder = load_text(IO).model_dir / "configs"
    folder.mkdir()
    (folder / "large.pbtxt").write_text("not even parsed")
    override = load_text(IO).json

    assert override == load_text(None, config_name="large", override_json=override).json


# Completion by the backend


def test_backend_completes_what_the_configuration_left_out(load_text: LoadText) -> None:
    """Without any config.pbtxt: the backend is told from the file, and what it adds is normalised and noted."""
    seen: dict[str, Any] = {}

    def complete(config_json: str, version_dir: Path) -> str:
        seen.update(json.loads(config_json), version_dir=version_dir)
        tensor = {"name": "T", "data_type": "type_fp32", "dims": ["-1", 3]}
        return json.dumps(json.loads(config_json) | {"input": [tensor], "output": [tensor], "max_batch_size": 4})

    loaded = load_text(None, files=["model.pt"], versions=["1", "4"], backends={"pytorch": complete})

    assert ("m", "pytorch", "4") == (seen["name"], seen["backend"], seen["version_dir"].name)
    assert (TensorSpec("T", "FP32", (-1, 3)),) == loaded.config.inputs
    assert 4 == loaded.config.max_batch_size
    assert ("completed from the model itself: max_batch_size, input, output",) == loaded.config.notes


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("dims contradict"), "dims contradict"),
        (LoadError("no such file"), "no such file"),
    ],
)
def test_failing_completion_is_a_config_error(load_text: LoadText, error: Exception, message: str) -> None:
    def complete(config_json: str, version_dir: Path) -> str:
        raise error

    with pytest.raises(ConfigError) as refusal:
        load_text(IO, backends={"python": complete})

    assert message == refusal.value.message


def test_a_failure_of_the_completion_itself_names_its_place(load_text: LoadText) -> None:
    def complete(config_json: str, version_dir: Path) -> str:
        return str(1 / 0)

    with pytest.raises(ConfigError) as refusal:
        load_text(IO, backends={"python": complete})

    said = "failed to complete the configuration of model 'm': ZeroDivisionError: division by zero, at "
    assert refusal.value.message.startswith(f"{said}{__file__}(")
    assert refusal.value.message.endswith("): complete")


def test_without_completion_the_model_is_not_asked_and_a_configuration_must_be_there(load_text: LoadText) -> None:
    def complete(config_json: str, version_dir: Path) -> str:
        raise AssertionError

    options: dict[str, Any] = {"backends": {"python": complete}, "auto_complete": False}
    with pytest.raises(ConfigError, match=r"failed to open text file for read .*config\.pbtxt: No such file"):
        load_text(None, **options)

    assert "python" == load_text(IO, **options).config.backend


def test_completion_may_not_rename_the_model(load_text: LoadText) -> None:
    def complete(config_json: str, version_dir: Path) -> str:
        return json.dumps(json.loads(config_json) | {"name": "other"})

    with pytest.raises(ConfigError, match="unexpected directory name 'm' for model 'other'"):
        load_text(IO, backends={"python": complete})


@pytest.mark.parametrize("policy", [{"all": {}}, {"specific": {"versions": [1]}}, {}])
def test_completion_may_not_choose_the_versions(load_text: LoadText, policy: dict[str, Any]) -> None:
    """It is made from one of those that were chosen. What it repeats is no change."""
    given = {"latest": {"num_versions": 1}}

    def completed_with(policy: dict[str, Any]) -> LoadedConfig:
        def complete(config_json: str, version_dir: Path) -> str:
            return json.dumps(json.loads(config_json) | {"version_policy": policy, "max_batch_size": 9})

        return load_text(IO, versions=["1", "2"], backends={"python": complete})

    assert (2,) == completed_with(given).versions
    with pytest.raises(ConfigError, match=r"must not change version_policy.*write it into config"):
        completed_with(policy)


def test_a_file_that_cannot_be_read_for_the_completion_is_named(load_text: LoadText, tmp_path: Path) -> None:
    def complete(config_json: str, version_dir: Path) -> str:
        return (version_dir / "model.py" / "nothing").read_text()

    with pytest.raises(ConfigError, match=rf"NotADirectoryError: .*'{tmp_path}/m/1/model\.py/nothing', at "):
        load_text(IO, backends={"python": complete})


def test_a_model_that_lacks_its_configuration_is_told_so_and_of_a_file_that_may_be_it(
    load_text: LoadText, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"in config\.pbtxt; there is no config\.pbtxt in {tmp_path}/m$"):
        load_text(None)
    with pytest.raises(ConfigError, match=rf"'model.<backend_name>'\.; there is no config\.pbtxt in {tmp_path}/no$"):
        load_text(None, name="no", files=())
    (tmp_path / "m" / "config.pbtx").touch()
    with pytest.raises(ConfigError, match=rf"there is no config\.pbtxt in {tmp_path}/m, but config\.pbtx$"):
        load_text(None)


@pytest.mark.parametrize(("text", "override_json"), [("", None), (None, "{}")])
def test_a_configuration_that_is_given_is_not_told_to_be_lacking(
    load_text: LoadText, text: str | None, override_json: str | None
) -> None:
    with pytest.raises(ConfigError, match=r"declare them in config\.pbtxt$"):
        load_text(text, override_json=override_json)


# Notes


def test_field_without_effect_is_noted_once(load_text: LoadText) -> None:
    group = "instance_group { rate_limiter { priority: 1 } }"

    unserved = "model_warmup { name: 'w' }"

    loaded = load_text(f"{IO} {group} {group} {unserved}")

    assert (
        "'instance_group.rate_limiter' has no effect: the mesh has no rate limiter, as Triton by default",
        "skipping batch 0 warmup sample 'w'",
    ) == tuple(sorted(loaded.config.notes))


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            (
                'input { name: "C" data_type: TYPE_INT32 dims: 1 } sequence_batching { control_input { name: "C" '
                "control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } } }"
            ),
            "input 'C' is also a control or state tensor: the server's own value is used",
        ),
        (
            'sequence_batching { } parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "x" } }',
            "parameter 'TRITON_BATCH_STRATEGY_PATH' has no effect on a stateful model",
        ),
        (
            'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "x.py" } }',
            "parameter 'TRITON_BATCH_STRATEGY_PATH' has no effect without dynamic_batching",
        ),
        (
            'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }',
            "parameter 'FORCE_CPU_ONLY_INPUT_TENSORS' has no effect: inputs are on the CPU",
        ),
        (
            'parameters { key: "checkpoint_interval" value { string_value: "4" } }',
            "parameter 'checkpoint_interval' has no effect on a stateless model",
        ),
        (
            (
                'backend: "pytorch" default_model_filename: "model.py" sequence_batching { } '
                'parameters { key: "checkpoint_interval" value { string_value: "4" } }'
            ),
            "parameter 'checkpoint_interval' has no effect: the model declares no state",
        ),
        (
            'parameters { key: "fixed_shape" value { string_value: "true" } }',
            "parameter 'fixed_shape' has no effect on a stateless model",
        ),
        (
            (
                'sequence_batching { state { input_name: "h" output_name: "h" data_type: TYPE_FP32 dims: 2 } } '
                'parameters { key: "sequence_recovery" value { string_value: "none" } }'
            ),
            "parameter 'sequence_recovery' has no effect: the model declares its state",
        ),
        (
            'sequence_batching { } parameters { key: "sequence_log_steps" value { string_value: "4" } }',
            "parameter 'sequence_log_steps' has no effect without sequence_recovery: replay",
        ),
        (
            'parameters { key: "sequence_recovery" value { string_value: "replay" } }',
            "parameter 'sequence_recovery' has no effect on a stateless model",
        ),
        (
            (
                'backend: "pytorch" default_model_filename: "model.py" sequence_batching { } '
                'parameters { key: "virtual_slots" value { string_value: "true" } }'
            ),
            "parameter 'virtual_slots' has no effect: the model declares no state",
        ),
        (
            "dynamic_batching { default_priority_level: 1 }",
            "dynamic_batching: priorities have no effect without priority_levels",
        ),
    ],
)
def test_what_is_odd_but_allowed_is_noted(load_text: LoadText, text: str, note: str) -> None:
    assert (note,) == load_text(f"{IO} {text}").config.notes


def test_what_is_kept_for_retries_is_read_from_the_parameters(load_text: LoadText) -> None:
    parameters = "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
        for name, value in (("retry_replies", 64), ("retry_reply_bytes", 0))
    )

    chosen, default = (load_text(f"{IO} sequence_batching {{ }} {text}").config for text in (parameters, ""))

    assert (64, 0) == (chosen.retry_replies, chosen.retry_reply_bytes)
    assert (8, 65536) == (default.retry_replies, default.retry_reply_bytes)


def test_checkpoint_interval_is_read_from_the_parameters(load_text: LoadText) -> None:
    state = 'state { input_name: "h" output_name: "h" data_type: TYPE_FP32 dims: 2 }'
    parameter = 'parameters { key: "checkpoint_interval" value { string_value: "16" } }'

    config = load_text(f"{IO} sequence_batching {{ {state} }} {parameter}").config

    assert (16, True) == (config.checkpoint_interval, config.state_in_mesh)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sequence_batching { }", FixedShape.OFF),
        ('sequence_batching { } parameters { key: "fixed_shape" value { string_value: "true" } }', FixedShape.PADDED),
        ('sequence_batching { } parameters { key: "fixed_shape" value { string_value: "rows" } }', FixedShape.ROWS),
        ('parameters { key: "fixed_shape" value { string_value: "true" } }', FixedShape.OFF),
    ],
)
def test_fixed_shape_is_a_sequence_model_s(load_text: LoadText, text: str, expected: FixedShape) -> None:
    assert expected is load_text(f"{IO} {text}").config.fixed_shape


@pytest.mark.parametrize(
    ("parameters", "replays", "recoverable", "bound"),
    [
        ({}, False, False, (1000, 16 << 20)),
        ({"sequence_recovery": "none"}, False, False, (1000, 16 << 20)),
        ({"sequence_recovery": "replay"}, True, True, (1000, 16 << 20)),
        (
            {"sequence_recovery": "replay", "sequence_log_steps": "7", "sequence_log_bytes": "999"},
            True,
            True,
            (7, 999),
        ),
    ],
)
def test_how_sequences_are_recovered_is_read_from_the_parameters(
    load_text: LoadText, parameters: dict[str, str], bound: tuple[int, int], *, replays: bool, recoverable: bool
) -> None:
    texts = [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()]

    config = load_text(f"{IO} sequence_batching {{ }} {' '.join(texts)}").config

    assert (replays, recoverable, False) == (config.replays, config.recoverable, config.state_in_mesh)
    assert bound == (config.sequence_log_steps, config.sequence_log_bytes)


@pytest.mark.parametrize(
    ("state", "parameter", "pageable"),
    [
        ('state { input_name: "h" output_name: "h" data_type: TYPE_FP32 dims: 2 }', "", True),
        ('state { input_name: "h" output_name: "h" data_type: TYPE_FP32 dims: 2 }', "false", False),
        ("", "", False),
    ],
)
def test_slots_are_virtual_where_the_mesh_holds_the_state_unless_the_model_says_no(
    load_text: LoadText, state: str, parameter: str, *, pageable: bool
) -> None:
    said = f'parameters {{ key: "virtual_slots" value {{ string_value: "{parameter}" }} }}' if parameter else ""

    assert pageable == load_text(f"{IO} sequence_batching {{ {state} }} {said}").config.pageable


@pytest.mark.parametrize(
    ("name", "strategy", "controls"),
    [
        ("accumulate", Direct(), 4),
        ("accumulate_str", Direct(), 3),
        ("accumulate_oldest", Oldest(max_candidate_sequences=64, preferred_batch_sizes=(32,)), 4),
        ("accumulate_oldest_str", Oldest(max_candidate_sequences=64, preferred_batch_sizes=(32,)), 3),
        ("lstm", Oldest(max_candidate_sequences=64, preferred_batch_sizes=(32,)), 4),
        ("lstm_direct", Direct(), 4),
    ],
)
def test_canonical_sequence_models_load_without_a_note(
    load_text: LoadText, name: str, strategy: Direct | Oldest, controls: int
) -> None:
    loaded = load_text((FIXTURES / "triton" / f"{name}.pbtxt").read_text(), name=name)

    batching = sequence_of(loaded)
    assert (strategy, controls, 60_000_000) == (batching.strategy, len(batching.controls), batching.idle_us)
    assert () == loaded.config.notes


def test_canonical_stateless_model_loads_without_a_note(load_text: LoadText) -> None:
    loaded = load_text((FIXTURES / "triton" / "add_sub.pbtxt").read_text(), name="add_sub")

    assert DynamicBatching(preferred_batch_sizes=(32,)) == loaded.config.dynamic_batching
    assert () == loaded.config.notes

"""The parameters of a configuration that mean something to the mesh. All others are the model's own."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from shared.contract.limits import RETRY_IDS, RETRY_REPLIES, RETRY_REPLY_BYTES


class For(StrEnum):
    """The models for which a parameter has a meaning."""

    SEQUENCES = "sequence models"
    STATELESS = "stateless models"
    PYTORCH = "`pytorch` models"
    PYTHON = "`python` models"
    ONNX = "`onnxruntime` models"
    OPENVINO = "`openvino` models"
    TENSORFLOW = "`tensorflow` models"

    @property
    def backend(self) -> str:
        """The backend whose models these are; "" for models of any."""
        return self.split("`")[1] if "`" in self else ""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that the mesh reads. Its value is always a text (`string_value`).

    of       the models for which it has a meaning
    values   what the text may be
    default  the value where the parameter is not given; "" for none
    """

    of: For
    name: str
    values: str
    default: str
    meaning: str


STRATEGY = "TRITON_BATCH_STRATEGY_PATH"
ENVIRONMENT = "EXECUTION_ENV_PATH"
PROCESS = "instance_process"
CPU_INPUTS = "FORCE_CPU_ONLY_INPUT_TENSORS"

of_sequences = partial(Parameter, For.SEQUENCES)
of_stateless = partial(Parameter, For.STATELESS)
of_pytorch = partial(Parameter, For.PYTORCH)
of_python = partial(Parameter, For.PYTHON)
of_onnx = partial(Parameter, For.ONNX)
of_openvino = partial(Parameter, For.OPENVINO)
of_tensorflow = partial(Parameter, For.TENSORFLOW)

PARAMETERS: tuple[Parameter, ...] = (
    of_sequences(
        "checkpoint_interval",
        "positive integer",
        "1",
        "Steps between two checkpoints of a sequence. A takeover runs the steps behind the last checkpoint again.",
    ),
    of_sequences(
        "sequence_recovery",
        "`none`, `replay` or `methods`",
        "",
        "How the state of a sequence survives its executor where the model keeps it in its own process. `replay`: the "
        "steps since START are kept and run again. `methods`: the model's `checkpoint` and `restore` carry the state; "
        "the default of a model that has them. `none`: the state is lost, the default of all others.",
    ),
    of_sequences(
        "sequence_log_steps",
        "positive integer",
        "1000",
        "With `replay`: steps since START that are kept. A sequence with more can no longer be recovered.",
    ),
    of_sequences(
        "sequence_log_bytes", "positive integer, bytes", str(16 << 20), "With `replay`: bytes of these steps together."
    ),
    of_sequences(
        "journal_steps",
        "positive integer",
        "",
        "Steps of a sequence since START that are kept with their requests and answers, until the sequence is "
        "forgotten (`--tombstone-seconds`): `seqmesh seq replay` runs them on another version, and compares. Without "
        "it none is kept.",
    ),
    of_sequences(
        "journal_bytes",
        "positive integer, bytes",
        str(16 << 20),
        "With `journal_steps`: bytes of these requests and answers together.",
    ),
    of_sequences(
        "retry_replies",
        f"integer from 1 to {RETRY_IDS}",
        str(RETRY_REPLIES),
        "Replies of a sequence that are kept for retries.",
    ),
    of_sequences(
        "retry_reply_bytes",
        "integer, bytes",
        str(RETRY_REPLY_BYTES),
        "Bytes of these replies beyond the newest one, which is always kept.",
    ),
    of_sequences(
        "fixed_shape",
        "`true`, `rows` or `false`",
        "",
        "`true`: no bit of a sequence's results depends on what shares its batches; every batch has the same number of "
        "rows where that is enough, elsewhere rows run alone. `rows`: every row runs alone. Given as `false`: rows "
        "share calls even if they change each other's results, which else is tried at load.",
    ),
    of_sequences(
        "virtual_slots",
        "`true` or `false`",
        "true",
        "Of a model whose state the mesh holds: an idle sequence gives up its slot while others wait, and an instance "
        "has as many slots as declared states of a fixed size fit into memory. `false`: the slots are those of the "
        "configuration, and a sequence keeps its slot until its end.",
    ),
    of_sequences(
        "batch_gathering",
        "`on` or `off`",
        "on",
        "A batch that is not full waits for sequences that are about to come back, where that raises the throughput. "
        "Never longer than four fifths of the time that a batch takes, and never where the configuration gives a queue "
        "delay, a slot utilization, or preferred sizes other than `max_batch_size`.",
    ),
    of_sequences(
        "orphan_grace_microseconds",
        "integer, microseconds",
        "0",
        "Idle time left to a sequence whose connection is gone before its END. 0: all that it had.",
    ),
    of_pytorch(
        "torch_threads",
        "positive integer",
        "",
        "Threads that one kernel may use on a CPU. Without it torch decides, and with `fixed_shape` it is 1.",
    ),
    of_pytorch("INTRA_OP_THREAD_COUNT", "positive integer", "", "Triton's name of `torch_threads`."),
    of_pytorch(
        "INTER_OP_THREAD_COUNT",
        "positive integer",
        "",
        "Threads that run parts of a model beside each other. The first model of an executor decides; for others the "
        "log says that it has no effect.",
    ),
    of_pytorch(
        "INFERENCE_MODE",
        "`true` or `false`",
        "true",
        "`false`: the model runs outside of torch's inference mode, still without gradients.",
    ),
    of_pytorch(
        "DISABLE_OPTIMIZED_EXECUTION",
        "`true` or `false`",
        "false",
        "`true`: TorchScript does not optimize for the shapes that it has seen. So it is with `fixed_shape` too.",
    ),
    of_pytorch(
        "ENABLE_JIT_EXECUTOR",
        "`true` or `false`",
        "",
        "TorchScript's profiling executor; a setting of the whole process. Without it torch's default.",
    ),
    of_pytorch(
        "ENABLE_JIT_PROFILING",
        "`true` or `false`",
        "",
        "TorchScript's profiling mode; a setting of the whole process. Without it torch's default.",
    ),
    of_pytorch(
        "ENABLE_TENSOR_FUSER",
        "`true` or `false`",
        "",
        "TorchScript's fuser; a setting of the whole process. Without it torch's default.",
    ),
    of_pytorch("DISABLE_CUDNN", "`true` or `false`", "false", "On a GPU: without cuDNN."),
    of_pytorch(
        "ENABLE_CACHE_CLEANING",
        "`true` or `false`",
        "false",
        "On a GPU: memory that is free is given back after every batch.",
    ),
    of_pytorch(
        "ENABLE_WEIGHT_SHARING",
        "`true` or `false`",
        "false",
        "`true`: the instances on one device have one copy of the weights. What the model changes stays apart.",
    ),
    of_pytorch("ENABLE_NVFUSER", "`true` or `false`", "", "No effect: torch has no nvFuser any more."),
    of_onnx(
        "intra_op_thread_count",
        "integer",
        "0",
        "Threads that compute one operator. 0: as many as there are cores; with `fixed_shape` 1.",
    ),
    of_onnx("inter_op_thread_count", "integer", "0", "Threads that compute operators beside each other. 0: as above."),
    of_onnx("execution_mode", "`0` or `1`", "0", "1: operators may run beside each other."),
    of_onnx("enable_mem_arena", "`true` or `false`", "true", "Memory is kept for the next call."),
    of_onnx("enable_mem_pattern", "`true` or `false`", "true", "Memory of a call is planned by the last one."),
    of_onnx(
        "memory.enable_memory_arena_shrinkage", "text", "", "Devices whose arena shrinks after each call: `cpu:0`."
    ),
    of_onnx("session.use_device_allocator_for_initializers", "`0` or `1`", "0", "1: weights lie outside of the arena."),
    of_onnx("cudnn_conv_algo_search", "`0`, `1` or `2`", "0", "On a GPU: exhaustive, heuristic or default."),
    of_onnx("gpu_mem_limit", "integer, bytes", "", "Largest arena on a GPU. Without it all of the memory."),
    of_onnx("arena_extend_strategy", "`0` or `1`", "0", "On a GPU: grow by powers of two, or as requested."),
    of_onnx("do_copy_in_default_stream", "`0` or `1`", "1", "On a GPU: copies share the stream of computing."),
    of_openvino(
        "INFERENCE_NUM_THREADS",
        "integer",
        "0",
        "Threads that compute. 0: as many as there are cores; with `fixed_shape` 1.",
    ),
    of_openvino("COMPILATION_NUM_THREADS", "integer", "0", "Threads that compile the model. 0: as above."),
    of_openvino(
        "NUM_STREAMS",
        "integer, `AUTO` or `NUMA`",
        "",
        "Groups of threads. An instance runs one batch at a time, so 1 is enough. Without it OpenVINO decides.",
    ),
    of_openvino("PERFORMANCE_HINT", "`LATENCY` or `THROUGHPUT`", "", "What OpenVINO tunes the model for."),
    of_openvino(
        "HINT_BF16",
        "`YES`",
        "",
        "The model may be computed in bfloat16. Without it, it is computed in its own precision.",
    ),
    of_openvino(
        "RESHAPE_IO_LAYERS",
        "`YES`",
        "",
        "The model's inputs take over the configuration's `dims`. Without it both must agree.",
    ),
    of_openvino(
        "SKIP_OV_DYNAMIC_BATCHSIZE",
        "`YES`",
        "",
        "The model's first dimension stays as it is. Without it, it is made variable where `max_batch_size` is not 0.",
    ),
    of_openvino(
        "ENABLE_BATCH_PADDING",
        "`YES`",
        "",
        "No effect: the model is given batches of every size, and none is filled up.",
    ),
    of_openvino("CPU_EXTENSION_PATH", "absolute path", "", "A shared library with operations of one's own."),
    of_tensorflow(
        "TF_SIGNATURE_DEF",
        "text",
        "serving_default",
        "The signature that is served. Without it, a model's only signature may have any name.",
    ),
    of_tensorflow("TF_GRAPH_TAG", "text", "serve", "The tag of the graph that is served."),
    of_tensorflow(
        "TF_NUM_INTRA_THREADS",
        "integer",
        "0",
        "Threads that compute one operator. 0: as many as there are cores. The first model of an executor decides.",
    ),
    of_tensorflow(
        "TF_NUM_INTER_THREADS",
        "integer",
        "0",
        "Threads that compute operators beside each other. The first model of an executor decides, unless "
        "`TF_USE_PER_SESSION_THREADS` is given.",
    ),
    of_tensorflow(
        "TF_USE_PER_SESSION_THREADS", "`true`, `on`, `yes` or `1`", "", "Each instance has threads of its own for that."
    ),
    of_tensorflow(
        "TF_INIT_OPS_FILE",
        "file name",
        "",
        "Of a `tensorflow_graphdef`: a JSON file with the list `init_ops`, operations that run once after the load. It "
        "lies with the version, or else with the model.",
    ),
    of_tensorflow("MAX_SESSION_SHARE_COUNT", "integer", "1", "No effect: each instance has a session of its own."),
    of_stateless(
        STRATEGY,
        "path that ends in `.py`",
        "",
        "A custom batching strategy, relative to the model's directory and inside the repository or a backend "
        "directory. Without it `batchstrategy.py` of the version, the model or the backend is used, if there is one. "
        "It has no effect without `dynamic_batching`.",
    ),
    of_python(
        ENVIRONMENT,
        "path",
        "",
        "The environment that the model runs in: a folder (conda or venv), or an archive by conda-pack. "
        "`$$TRITON_MODEL_DIRECTORY` in it is the model's folder. Each instance is a process of its own then.",
    ),
    of_python(
        PROCESS,
        "`true` or `false`",
        "false",
        "`true`: each instance is a process of its own. A crash or a leak hurts that instance alone, and no other code "
        "waits for its interpreter.",
    ),
    of_python(CPU_INPUTS, "`yes` or `no`", "yes", "`no` has no effect: inputs are on the CPU."),
)
"""Every parameter that the mesh reads."""

_LIKENESS = 0.85
"""How alike two names are of which one may be meant by the other: `checkpoint_intervall`, `Fixed-Shape`."""


def misspelt(names: Iterable[str]) -> dict[str, str]:
    """Parameters that the mesh does not read -> the one of its own that may be meant."""
    known = {parameter.name.casefold(): parameter.name for parameter in PARAMETERS}
    found: dict[str, str] = {}
    for name in sorted(set(names) - {parameter.name for parameter in PARAMETERS}):
        written = name.casefold().replace("-", "_")
        found.update((name, known[near]) for near in difflib.get_close_matches(written, known, 1, _LIKENESS))
    return found

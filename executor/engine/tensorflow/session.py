"""Opens a SavedModel or a frozen graph in a session of TensorFlow, with the options that a configuration asks for.

A session, and not a loaded object: it has a signature's tensors by name, takes Triton's options, and a call of it takes
half of the time that a call of a loaded signature takes.

Source: Triton tensorflow backend, tensorflow_backend_tf.cc (TRITONTF_ModelCreateFromSavedModel,
TRITONTF_ModelCreateFromGraphDef, NewSessionOptions); its README, "Parameters".
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from executor.engine.error_texts import quoted
from executor.engine.sessions.checks import SessionCall
from executor.engine.sessions.forward import Run
from executor.engine.sessions.signature import SessionSignature, SessionTensor, parameter_of, used_names
from executor.engine.tensorflow.variables import variables_read
from shared.contract.errors import LoadError
from shared.contract.tensors import NUMPY_TYPE

# Its C++ library writes to stderr, past the log; what is wrong is raised as well.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Builds of torch for GPUs import this compiler with their first program. Behind TensorFlow, which has its own LLVM as
# well, that ends the process with a segmentation fault (triton 3.7, TensorFlow 2.21); before it, both work.
with suppress(ImportError):
    importlib.import_module("triton")

import tensorflow as tf

v1: Any = cast("Any", tf).compat.v1
tf.get_logger().setLevel(logging.ERROR)
tf.config.set_visible_devices([], "GPU")  # or it would take all of their memory from the other backends

SERVE, SERVING_DEFAULT = "serve", "serving_default"
_NO_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
_TRUTHS = ("true", "on", "yes", "1")

WIRE_TYPE = {dtype.name: name for name, dtype in NUMPY_TYPE.items()} | {"bfloat16": "BF16", "string": "BYTES"}


class TensorflowModel(msgspec.Struct, frozen=True, eq=False):
    """An open model. feeds, fetches: the graph's names (`node:0`) of the inputs, and of the outputs"""

    session: Any
    signature: SessionSignature
    feeds: Mapping[str, str]
    fetches: Mapping[str, str]

    def run_of(self, call: SessionCall) -> Run:
        """A function from arrays to the outputs that the call wants, compiled once."""
        inputs = [(name, tensor.datatype == "BF16") for name, tensor in call.signature.inputs.items()]
        outputs = [call.signature.outputs[name].datatype == "BF16" for name in call.outputs]
        function = self.session.make_callable(
            [self.fetches[name] for name in call.outputs], [self.feeds[name] for name, _ in inputs]
        )
        bfloat16 = tf.bfloat16.as_numpy_dtype

        def run(arrays: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
            found = function(*(arrays[name].view(bfloat16) if is_bf16 else arrays[name] for name, is_bf16 in inputs))
            return [array.view(np.int16) if is_bf16 else array for array, is_bf16 in zip(found, outputs, strict=True)]

        return run


def open_saved_model(path: Path, config: Mapping[str, Any]) -> TensorflowModel:
    """Opens a SavedModel: the signature `TF_SIGNATURE_DEF` of the graph that is tagged `TF_GRAPH_TAG`.

    config  Triton's JSON of the configuration, decoded
    raises  LoadError
    """
    session = _session(config)
    tag = parameter_of(config, "TF_GRAPH_TAG") or SERVE
    try:
        with session.graph.as_default():
            loaded = v1.saved_model.loader.load(session, [tag], str(path))
    except Exception as error:  # OSError, RuntimeError, and TensorFlow's own classes for what it finds in a file
        raise _failed(path, error) from error
    found = _chosen_signature(loaded.signature_def, config)
    # A signature has no order.
    infos = [dict(sorted(tensors.items())) for tensors in (found.inputs, found.outputs)]
    inputs, outputs = (
        {name: _tensor(config, name, tf.dtypes.as_dtype(info.dtype), info.tensor_shape) for name, info in each.items()}
        for each in infos
    )
    feeds, fetches = ({name: info.name for name, info in each.items()} for each in infos)
    if unset := _unset_variable(session, fetches.values()):
        raise LoadError(
            f"unable to load model '{config.get('name')}': its variable '{unset}' has no value in the file. "
            "tf.saved_model.save writes such a file of layers of Keras 3: write it with the method export of the Keras "
            "model, or with keras.export.ExportArchive"
        )
    return TensorflowModel(session, SessionSignature(inputs, outputs), feeds, fetches)


def _unset_variable(session: Any, fetches: Iterable[str]) -> str:
    """The first variable without a value that the fetched tensors are made from; "" if each has one."""
    graph = session.graph
    names = variables_read(graph.as_graph_def(), fetches)
    with graph.as_default():
        asked: list[Any] = [
            tf.raw_ops.VarIsInitializedOp(resource=graph.get_tensor_by_name(f"{name}:0")) for name in names
        ]
    are_set: Sequence[bool] = session.run(asked)
    return next((name for name, is_set in zip(names, are_set, strict=True) if not is_set), "")


def open_graph(path: Path, config: Mapping[str, Any]) -> TensorflowModel:
    """Opens a frozen graph. It does not say what its inputs and outputs are: any placeholder may be an input, and any
    other node an output.

    config  Triton's JSON of the configuration, decoded
    raises  LoadError
    """
    session, definition = _session(config), v1.GraphDef()
    try:
        definition.ParseFromString(path.read_bytes())
        with session.graph.as_default():
            v1.import_graph_def(definition, name="")
        for name in _init_operations(path.parent, config):
            session.run(session.graph.get_operation_by_name(name))
    except Exception as error:  # as above, and protobuf's
        raise _failed(path, error) from error
    if not definition.node:
        raise LoadError(f"model {config.get('name')} has an empty network")
    inputs: dict[str, SessionTensor] = {}
    outputs: dict[str, SessionTensor] = {}
    for operation in session.graph.get_operations():
        if operation.outputs and (made := operation.outputs[0]).dtype.name in WIRE_TYPE:
            tensors = inputs if operation.type == "Placeholder" else outputs
            tensors[operation.name] = _tensor(config, operation.name, made.dtype, made.shape.as_proto())
    used = used_names(config)
    required = {name: tensor for name, tensor in inputs.items() if name in used}
    spare = {name: tensor for name, tensor in inputs.items() if name not in used}
    signature = SessionSignature(required, outputs, spare)
    return TensorflowModel(
        session, signature, {name: f"{name}:0" for name in inputs}, {name: f"{name}:0" for name in outputs}
    )


def _session(config: Mapping[str, Any]) -> Any:
    options = v1.ConfigProto(
        intra_op_parallelism_threads=_threads(config, "TF_NUM_INTRA_THREADS"),
        inter_op_parallelism_threads=_threads(config, "TF_NUM_INTER_THREADS"),
        use_per_session_threads=parameter_of(config, "TF_USE_PER_SESSION_THREADS").lower() in _TRUTHS,
        allow_soft_placement=True,
    )
    optimization: dict[str, Any] = config.get("optimization") or {}
    graph: dict[str, Any] = optimization.get("graph") or {}
    # Triton: the level switches XLA.
    options.graph_options.optimizer_options.global_jit_level = max(-1, min(2, int(graph.get("level", 0))))
    return v1.Session(graph=tf.Graph(), config=options)


def _threads(config: Mapping[str, Any], name: str) -> int:
    text = parameter_of(config, name) or "0"
    if not text.isdecimal():
        raise LoadError(f"model '{config.get('name')}': parameter {name} must be a non-negative number, not '{text}'")
    return int(text)


def _failed(path: Path, error: Exception) -> LoadError:
    return LoadError(f"failed to load model '{path}': TensorFlow error: {error}")


def _chosen_signature(found: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The signature that is asked for; without a wish `serving_default`, or the only one that there is."""
    wanted = parameter_of(config, "TF_SIGNATURE_DEF")
    names = [name for name in found if name not in _NO_SIGNATURES]
    chosen = wanted or (names[0] if len(names) == 1 else SERVING_DEFAULT)
    if chosen not in names:
        told = quoted(sorted(names)) or "none"
        raise LoadError(
            f"unable to load model '{config.get('name')}', expected '{chosen}' signature; the model has {told}, and "
            "the parameter TF_SIGNATURE_DEF chooses"
        )
    return found[chosen]


def _tensor(config: Mapping[str, Any], name: str, dtype: Any, shape: Any) -> SessionTensor:
    if dtype.name not in WIRE_TYPE:
        raise LoadError(f"unable to process '{name}' for '{config.get('name')}', unsupported datatype '{dtype.name}'")
    dims = None if shape.unknown_rank else tuple(int(dim.size) for dim in shape.dim)
    return SessionTensor(name, WIRE_TYPE[dtype.name], dims)


def _init_operations(version_dir: Path, config: Mapping[str, Any]) -> list[str]:
    """Names of the operations that `TF_INIT_OPS_FILE` asks for; the file lies with the version or with the model."""
    file = parameter_of(config, "TF_INIT_OPS_FILE")
    if not file:
        return []
    found = next((path for path in (version_dir / file, version_dir.parent / file) if path.is_file()), None)
    if found is None:
        raise LoadError(f"model '{config.get('name')}': there is no file '{file}', which TF_INIT_OPS_FILE names")
    return list(json.loads(found.read_text())["init_ops"])

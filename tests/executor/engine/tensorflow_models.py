"""Tiny TensorFlow models. The library is imported by the first that is written; where there is none, the test is
skipped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BATCH = None


def library() -> Any:
    """TensorFlow, set up as the backend sets it up."""
    # It is imported by the backend, which knows what must be imported before it.
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("there is no wheel of TensorFlow for this machine")
    from executor.engine.tensorflow import session  # noqa: PLC0415

    return session.tf


def save(
    path: Path, signatures: Mapping[str, tuple[Any, Mapping[str, tuple[Any, Sequence[int | None] | None]]]]
) -> Path:
    """Writes a SavedModel. signatures: name -> function of tensors, and what these are: dtype and dims by name"""
    tf = library()
    made = {
        signature: tf.function(function).get_concrete_function(
            **{name: tf.TensorSpec(dims, dtype, name=name) for name, (dtype, dims) in tensors.items()}
        )
        for signature, (function, tensors) in signatures.items()
    }
    tf.saved_model.save(tf.Module(), str(path), signatures=made)
    return path


def leaky_sum(path: Path, batch: int | None = BATCH, signature: str = "serving_default") -> Path:
    """s_next = s / 2 + x, y = s_next + offsets[index]: an index that does not exist fails the call."""
    tf = library()

    def step(x: Any, index: Any, s: Any) -> Any:
        s_next = s * 0.5 + x
        return {"y": s_next + tf.gather(tf.constant([0.0, 10.0, 20.0, 30.0]), index), "s_next": s_next}

    tensors = {"x": (tf.float32, [batch, 3]), "index": (tf.int64, [batch, 1]), "s": (tf.float32, [batch, 3])}
    return save(path, {signature: (step, tensors)})


def identity(path: Path, kind: str, dims: Sequence[int | None] | None) -> Path:
    """y = x."""
    tf = library()

    def step(x: Any) -> Any:
        return {"y": tf.identity(x)}

    return save(path, {"serving_default": (step, {"x": (tf.dtypes.as_dtype(kind), dims)})})


def graph(path: Path) -> Path:
    """A frozen graph: s_next = s / 2 + x, y = s_next + scale, which an operation `init` must set to 1."""
    tf = library()
    v1 = tf.compat.v1
    with tf.Graph().as_default() as made:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        s = v1.placeholder(tf.float32, [None, 3], name="s")
        v1.placeholder(tf.float32, [], name="unused")
        scale = v1.get_variable("scale", [], initializer=v1.ones_initializer(), use_resource=True)
        s_next = tf.add(s * 0.5, x, name="s_next")
        tf.add(s_next, scale, name="y")
        v1.group(v1.global_variables_initializer(), name="init")
        path.write_bytes(made.as_graph_def().SerializeToString())
    return path


def keeps_its_sum(path: Path) -> Path:
    """A sum that the model keeps in a variable of its own."""
    tf = library()
    module = tf.Module()
    module.total = tf.Variable([[0.0]])

    def step(x: Any) -> Any:
        return {"y": x + module.total.assign_add(x[:1])}

    made = tf.function(step).get_concrete_function(x=tf.TensorSpec([None, 1], tf.float32, name="x"))
    tf.saved_model.save(module, str(path), signatures={"serving_default": made})
    return path


def saved_layer(path: Path) -> Path:
    """A layer of Keras 3 in a file that `tf.saved_model.save` wrote: its variables have no values there."""
    tf = library()
    module = tf.Module()
    module.layer = importlib.import_module("keras").layers.Dense(1)

    def step(x: Any) -> Any:
        return {"y": module.layer(x)}

    made = tf.function(step).get_concrete_function(x=tf.TensorSpec([None, 1], tf.float32, name="x"))
    tf.saved_model.save(module, str(path), signatures={"serving_default": made})
    return path

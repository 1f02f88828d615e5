"""A model's own method to hear that a sequence is not its own any more."""

from __future__ import annotations

import logging
import textwrap
from typing import Any

import numpy as np
import pytest

from executor.engine.base import ReleasesSequences, Row
from executor.engine.null_rows import NULL_ROW
from executor.engine.python.model_release import has_release
from shared.contract.model_config import ModelConfig, StateSpec, TensorSpec
from shared.contract.tensors import from_numpy, to_numpy
from tests.executor.engine.model_workshop import Workshop, plain_config, sequence_config

KEEPING = """
class TritonPythonModel:
    '''Answers how many sequences it keeps. 13 cannot be released, and 14 asks for the end of the process.'''

    def initialize(self, args):
        self.kept = set()

    def execute(self, requests):
        self.kept |= {request.correlation_id() for request in requests if request.correlation_id()}
        count = np.array([[len(self.kept)]], np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", count)]) for _ in requests]
"""
RELEASE = """
    def release(self, correlation_id):
        if correlation_id == 13:
            raise RuntimeError("thirteen")
        if correlation_id == 14:
            raise SystemExit("fourteen")
        self.kept.remove(correlation_id)
"""
METHODS = """
    def checkpoint(self, correlation_id):
        return {}

    def restore(self, correlation_id, state):
        if correlation_id == 99:
            raise RuntimeError("ninety-nine")
        self.kept.add(correlation_id)
"""
X, Y = TensorSpec("X", "INT64", (1,)), TensorSpec("Y", "INT64", (1,))
CONFIG = sequence_config("keeping", "python", inputs=[X], outputs=[Y])


def row(sequence: int | str, *, slot: int | None = 0) -> Row:
    return Row({"X": from_numpy("X", np.zeros((1, 1), np.int64))}, slot=slot, correlation_id=sequence)


def kept(engine: Any) -> int:
    """How many sequences the model keeps; asked by a row that belongs to none."""
    (answer,) = engine.run([row(0)], [False]).rows
    return int(to_numpy(answer.outputs[0])[0, 0])


@pytest.fixture
def engine(workshop: Workshop) -> Any:
    """Typed loosely: an engine, and what hands state out and releases it."""
    workshop.python("keeping", KEEPING + METHODS + RELEASE)
    return workshop.load(CONFIG)


def test_what_a_model_was_given_is_released_once(engine: Any) -> None:
    """42 and "42" are two; what it never saw, it does not hear of."""
    engine.run([row(42), row("42", slot=1), NULL_ROW], [False, False, False])
    engine.restore_model(7, b"\x90")
    assert 3 == kept(engine)

    for _ in range(2):
        engine.release(42)
        engine.release(1000)

    assert 2 == kept(engine)
    engine.run([row(42)], [False])
    engine.release_all()
    engine.release_all()
    assert 0 == kept(engine)


def test_a_loads_trial_runs_are_no_sequences(engine: Any) -> None:
    engine.run([row(5, slot=None)], [False])

    engine.release(5)

    assert 1 == kept(engine)


@pytest.mark.parametrize(("number", "text"), [(13, "RuntimeError: thirteen"), (14, "SystemExit: fourteen")])
def test_what_it_raises_is_logged_and_holds_up_nobody(
    engine: Any, caplog: pytest.LogCaptureFixture, number: int, text: str
) -> None:
    engine.run([row(number), row(2, slot=1)], [False, False])

    with caplog.at_level(logging.ERROR):
        engine.release_all()

    (record,) = caplog.records
    assert record.getMessage().startswith(f"model 'keeping': release of sequence {number} failed: {text}")
    assert 1 == kept(engine)


def test_a_state_that_was_not_taken_back_is_released_all_the_same(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Who raises may have begun to take it. Here nothing was, and the model's own `remove` says so."""
    with pytest.raises(Exception, match="ninety-nine"):
        engine.restore_model(99, b"\x90")

    with caplog.at_level(logging.ERROR):
        engine.release(99)

    assert ["KeyError: 99" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def release(self, correlation_id): ...", True),
        ("def release(self, correlation_id, reason='') -> None: ...", True),
        ("def release(self, handle): ...", False),
        ("def release(self): ...", False),
        ("def release(self, correlation_id, reason): ...", False),
        ("release = None", False),
        ("", False),
    ],
)
def test_the_method_is_known_by_its_parameters_name(source: str, *, expected: bool) -> None:
    namespace: dict[str, Any] = {}
    exec(f"class Model:\n    pass\n{textwrap.indent(source, '    ')}", namespace)

    assert expected == has_release(namespace["Model"])


@pytest.mark.parametrize(
    ("source", "config", "expected"),
    [
        (KEEPING + RELEASE, CONFIG, True),
        (KEEPING + METHODS, CONFIG, False),
        (
            KEEPING + RELEASE,
            sequence_config("keeping", "python", inputs=[X], outputs=[Y], states=[StateSpec("S", "T", "INT64", (1,))]),
            True,
        ),
        (KEEPING + RELEASE, plain_config("keeping", "python", inputs=[X], outputs=[Y]), False),
    ],
)
def test_which_models_are_told(workshop: Workshop, source: str, config: ModelConfig, *, expected: bool) -> None:
    workshop.python("keeping", source)
    engine = workshop.load(config)

    assert isinstance(engine, ReleasesSequences)
    assert expected == engine.has_release
    engine.release(7)
    engine.release_all()

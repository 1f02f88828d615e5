"""A model's own state, out of it and back by its methods: whatever it holds, and whatever its methods do."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from executor.engine.base import BatchResult, HandsOutState, Row, RowError
from executor.engine.python.instance_code import InstanceCode
from executor.engine.python.model import called
from executor.engine.python.model_state import ModelState, has_methods
from executor.models.recovery import of_versions, with_methods
from shared.contract.errors import Code, LoadError, ModelError
from shared.contract.limits import MODEL_STATE_BYTES_MAX
from shared.contract.model_config import ModelConfig, StateSpec, TensorSpec
from shared.contract.tensors import from_numpy, to_numpy
from tests.executor.engine.model_workshop import Workshop, sequence_config

SUMS = """
class TritonPythonModel:
    '''Running sums by correlation id. A negative number fails, after it was added.'''

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.add(request) for request in requests]

    def add(self, request):
        sequence, value = request.correlation_id(), pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        if request.flags() & 1:
            self.sums[sequence] = np.zeros_like(value)
        self.sums[sequence] += value
        if value[0, 0] < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", self.sums[sequence])])
"""

METHODS = """
    def checkpoint(self, correlation_id):
        if self.sums[correlation_id][0, 0] == 13:
            raise RuntimeError("thirteen")
        if self.sums[correlation_id][0, 0] == 14:
            raise SystemExit("fourteen")
        return {"sum": self.sums[correlation_id]}

    def restore(self, correlation_id, state):
        if state["sum"][0, 0] == 99:
            raise RuntimeError("ninety-nine")
        self.sums[correlation_id] = state["sum"]
"""
X, Y = TensorSpec("X", "INT64", (1,)), TensorSpec("Y", "INT64", (1,))
CONFIG = sequence_config("sums", "python", inputs=[X], outputs=[Y])


def row(sequence: int, value: int, *, start: bool = False, end: bool = False) -> Row:
    tensor = from_numpy("X", np.array([[value]], np.int64))
    return Row({"X": tensor}, slot=sequence, correlation_id=sequence, start=start, end=end)


def told(result: BatchResult) -> list[Any]:
    """Each row's sum, or its error."""
    return [
        each.message if isinstance(each, RowError) else int(to_numpy(each.outputs[0])[0, 0])
        for each in result.rows
        if each is not None
    ]


def saved(result: BatchResult) -> list[bytes]:
    return [each.model_state for each in result.rows if each is not None]


@pytest.fixture
def hands_out(workshop: Workshop) -> Any:
    """An engine of the running sums with methods. Typed loosely: an engine, and what hands its state out."""
    workshop.python("sums", SUMS + METHODS)
    return workshop.load(CONFIG)


def test_a_sequence_goes_on_in_another_engine(workshop: Workshop, hands_out: Any) -> None:
    hands_out.run([row(1, 5, start=True), row(2, 50, start=True)], [False, False])
    (state, none) = saved(hands_out.run([row(1, 6), row(2, 60)], [True, False]))
    hands_out.run([row(1, 1000)], [False])
    assert b"" == none

    other: Any = workshop.load(CONFIG)
    other.restore_model(1, state)

    # What was handed over is the model's own to write to, and was no view of what the first one wrote to later.
    assert [18] == told(other.run([row(1, 7)], [False]))
    other.restore_model(1, state)
    assert [12] == told(other.run([row(1, 1)], [False]))


PICKLED = """
import pickle
from parts.total import Total, zero

class Sum:
    class Step(int):
        pass

    def __init__(self):
        self.total, self.steps, self.made_by = Total(zero()), [], zero

    def add(self, value):
        # Of this instance's classes, whoever has pickled it.
        assert type(self) is Sum and type(self.total) is Total and self.made_by is zero
        assert all(type(step) is Sum.Step for step in self.steps)
        self.steps.append(Sum.Step(value))
        self.total.value += value
        return self.total.value

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.add(request) for request in requests]

    def add(self, request):
        sum = self.sums.setdefault(request.correlation_id(), Sum())
        value = sum.add(pb_utils.get_input_tensor_by_name(request, "X").as_numpy().item())
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[value]]))])

    def checkpoint(self, correlation_id):
        return {"sum": np.frombuffer(pickle.dumps(self.sums[correlation_id]), np.uint8)}

    def restore(self, correlation_id, state):
        self.sums[correlation_id] = pickle.loads(state["sum"])
"""
TOTAL = """
from dataclasses import dataclass

@dataclass
class Total:
    value: "int"

def zero():
    return 0
"""


def test_what_one_instance_has_pickled_every_other_one_reads_as_its_own(workshop: Workshop) -> None:
    """Classes of `model.py` and of a file beside it: in an instance beside the first, which has modules of its own, and
    in one that is loaded when the first is gone and other models were loaded meanwhile, as on another executor.
    """
    parts = workshop.python("sums", PICKLED).parent / "parts"
    parts.mkdir()
    (parts / "total.py").write_text(TOTAL)
    first: Any = workshop.load(CONFIG)
    beside: Any = workshop.load(CONFIG)
    (state,) = saved(first.run([row(1, 5, start=True)], [True]))
    beside.restore_model(1, state)
    (again,) = saved(beside.run([row(1, 6)], [True]))
    for engine in workshop.engines:
        engine.close()
    workshop.engines.clear()
    workshop.python("other", SUMS)
    workshop.load(sequence_config("other", "python", inputs=[X], outputs=[Y]))
    other: Any = workshop.load(CONFIG)
    other.restore_model(1, again)

    assert [18] == told(other.run([row(1, 7)], [False]))


def test_what_a_failed_step_leaves_is_saved_too(workshop: Workshop, hands_out: Any) -> None:
    """Of a START that failed nothing is left, and after an END nothing is needed."""
    failed = hands_out.run([row(1, -5, start=True), row(2, 5, start=True), row(3, 5, start=True)], [True, False, False])
    assert [b"", b"", b""] == saved(failed)
    failed = hands_out.run([row(2, -3), row(3, -3, end=True)], [False, False])
    assert ["negative", "negative"] == told(failed)
    (state, none) = saved(failed)
    assert b"" == none

    other: Any = workshop.load(CONFIG)
    other.restore_model(2, state)

    assert [7] == told(other.run([row(2, 5)], [False]))


@pytest.mark.parametrize(("value", "text"), [(13, "RuntimeError: thirteen"), (14, "SystemExit: fourteen")])
def test_a_checkpoint_that_raises_costs_only_its_own_sequence(hands_out: Any, value: int, text: str) -> None:
    result = hands_out.run([row(1, value, start=True), row(2, 2, start=True)], [True, True])

    bad, good = result.rows
    assert (Code.INTERNAL, True) == (bad.code, bad.lost)
    assert f"model 'sums': checkpoint of sequence 1 failed: {text}" in bad.message
    assert good.model_state


def test_a_failed_step_whose_state_cannot_be_saved_tells_both(hands_out: Any) -> None:
    hands_out.run([row(1, 14, start=True)], [False])

    (bad,) = hands_out.run([row(1, -1)], [False]).rows

    assert bad.lost
    assert bad.message.startswith("negative; model 'sums': checkpoint of sequence 1 failed: RuntimeError: thirteen")


def test_a_restore_that_raises_or_cannot_read_says_so(hands_out: Any) -> None:
    (state,) = saved(hands_out.run([row(1, 99, start=True)], [True]))

    with pytest.raises(ModelError, match="model 'sums': restore of sequence 1 failed: RuntimeError: ninety-nine"):
        hands_out.restore_model(1, state)
    with pytest.raises(ModelError, match="restore of sequence 1 failed: what was kept is not readable"):
        hands_out.restore_model(1, b"\xc1")
    with pytest.raises(ModelError, match="KeyError"):
        hands_out.restore_model(1, b"\x90")


class Held:
    """A model whose state is in the test's hand."""

    def __init__(self, state: object) -> None:
        self.state = state
        self.restored: Mapping[str, Any] | None = None

    def checkpoint(self, correlation_id: object) -> object:
        return self.state

    def restore(self, correlation_id: object, state: Mapping[str, Any]) -> None:
        self.restored = state


def through_redis(state: object, bytes_max: int = MODEL_STATE_BYTES_MAX) -> Mapping[str, Any]:
    """What a model is given back of what it gave."""
    model = Held(state)
    methods = ModelState(model, "m", partial(called, InstanceCode("m", "1", "/")), bytes_max)
    kept = methods.save("x")
    assert kept, "Redis must know that there is a state, though nothing is in it"
    methods.load("x", kept)
    assert model.restored is not None
    return model.restored


def test_a_name_may_be_an_element_of_an_array() -> None:
    """No message takes a subclass of `str`; to fail would fail the whole batch."""
    assert [7] == through_redis({np.array(["sum"])[0]: np.array([7])})["sum"].tolist()


NUMBERS = [np.bool_, "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", ">i4", ">f8"]


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_arrays_of_every_type_and_shape_come_back(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)

    back = through_redis({"a": array.T, "": array})

    assert ["a", ""] == list(back)
    for found, given in ((back["a"], array.T), (back[""], array)):
        assert np.array_equal(given, found)
        assert (given.shape, np.dtype(dtype).newbyteorder("<")) == (found.shape, found.dtype)
        assert found.flags.writeable


def test_special_numbers_strings_and_nothing_at_all_come_back() -> None:
    numbers = np.array([np.nan, np.inf, -0.0, 5e-324])
    assert numbers.tobytes() == through_redis({"n": numbers})["n"].tobytes()
    assert [3] == through_redis({"scalar": np.int64(3)})["scalar"].reshape(-1).tolist()
    assert {} == through_redis({})

    words = through_redis(
        {
            "o": np.array([["ä", b"\x00\xff"], ["", "x"]], np.object_),
            "u": np.array(["ab", "c"]),
            "t": np.array(["ab", "c"], np.dtypes.StringDType()),
        }
    )

    assert [["ä".encode(), b"\x00\xff"], [b"", b"x"]] == words["o"].tolist()
    assert ([b"ab", b"c"], np.object_) == (words["u"].tolist(), words["u"].dtype)
    assert [b"ab", b"c"] == words["t"].tolist()


HALF_MASKED = cast("Any", np.ma).array([1, 2], mask=[False, True])


class Unreadable(dict[str, Any]):
    """What a model might return."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(a=np.zeros(1))
        self._error = error

    def items(self) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (None, "expected a dict of numpy arrays, got NoneType"),
        ([np.zeros(1)], "expected a dict of numpy arrays, got list"),
        ({1: np.zeros(1)}, "expected names that are text, got 1"),
        ({"\ud800": np.zeros(1)}, "expected names that are text"),
        (Unreadable(RuntimeError("no items")), "no items"),
        (Unreadable(KeyboardInterrupt("no time")), "no time"),
        ({"a": [1, 2]}, "expected a numpy array as 'a', got list"),
        ({"a": np.array([1, "x"], np.object_)}, "expected str or bytes as elements of 'a'"),
        ({"a": np.zeros(1, np.complex64)}, "'a' has elements of a type that no tensor has: complex64"),
        ({"a": np.zeros(1, "datetime64[s]")}, r"'a' has elements of a type that no tensor has: datetime64\[s\]"),
        ({"a": HALF_MASKED}, "'a' has masked elements"),
        ({"a": np.array(["\ud800"])}, "surrogates not allowed"),
        ({"a": np.zeros(80), "b": np.zeros(21)}, "returned 808 bytes, and no more than 800 are kept of a sequence"),
        # Measured before it is copied: nobody has memory for that.
        ({"a": np.broadcast_to(np.uint8(0), 1 << 60)}, "returned 1152921504606846976 bytes, and no more than 800"),
    ],
)
def test_what_cannot_be_kept_is_a_clear_error(state: object, text: str) -> None:
    with pytest.raises(ModelError, match=f"model 'm': checkpoint of sequence x failed: .*{text}"):
        through_redis(state, 800)


def test_other_methods_of_the_same_names_are_the_model_s_own() -> None:
    def class_of(source: str) -> type[Any]:
        scope: dict[str, Any] = {}
        exec(f"class Model:\n{textwrap.indent(source, '    ')}", scope)
        return scope["Model"]

    assert has_methods(Held)
    assert has_methods(class_of("def checkpoint(self, c): ...\ndef restore(self, c, s, more=None): ..."))
    for source in (
        "pass",
        "def checkpoint(self, c): ...",
        "def restore(self, c, s): ...",
        "def checkpoint(self): ...\ndef restore(self, c, s): ...",
        "def checkpoint(self, c): ...\ndef restore(self, path): ...",
        "checkpoint = 'model.ckpt'\ndef restore(self, c, s): ...",
    ):
        assert not has_methods(class_of(source)), source


@pytest.mark.parametrize(
    ("source", "config", "expected"),
    [
        (SUMS + METHODS, CONFIG, True),
        (SUMS, CONFIG, False),
        (SUMS + METHODS, {"parameters": {"sequence_recovery": "none"}}, False),
        (SUMS + METHODS, {"parameters": {"sequence_recovery": "replay"}}, True),
        (SUMS + METHODS, {"states": [StateSpec("S", "T", "INT64", (1,))]}, False),
    ],
)
def test_which_models_hand_their_state_out(
    workshop: Workshop, source: str, config: ModelConfig | dict[str, Any], *, expected: bool
) -> None:
    if isinstance(config, dict):
        config = sequence_config("sums", "python", inputs=[X], outputs=[Y], **config)
    workshop.python("sums", source)
    engine = workshop.load(config)

    assert isinstance(engine, HandsOutState)
    assert expected == engine.hands_out_state
    assert expected == with_methods(config, [engine]).state_methods


def test_a_model_that_does_not_have_the_methods_it_is_to_be_recovered_by_is_not_loaded(workshop: Workshop) -> None:
    config = sequence_config("sums", "python", inputs=[X], outputs=[Y], parameters={"sequence_recovery": "methods"})
    workshop.python("sums", SUMS)

    with pytest.raises(LoadError, match="asks for its methods checkpoint"):
        with_methods(config, [workshop.load(config)])


@pytest.mark.parametrize(
    ("methods", "unfit"),
    [
        ("    def checkpoint(self, correlation_id): return {}\n", "no state by its checkpoint:"),
        (
            "    def checkpoint(self): return {}\n    def restore(self, state): ...\n",
            "no state by its checkpoint and restore:",
        ),
        (METHODS, None),
        ("", None),
    ],
)
def test_methods_that_are_not_called_are_named_in_the_log(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, methods: str, unfit: str | None
) -> None:
    workshop.python("sums", SUMS + methods)
    workshop.load(CONFIG)

    told = [message for message in caplog.messages if "no state" in message]
    assert bool(unfit) == bool(told)
    assert all(unfit in message for message in told if unfit)


def test_one_version_without_methods_is_enough_for_none_to_be_relied_on(hands_out: Any) -> None:
    version = with_methods(CONFIG, [hands_out])

    assert of_versions(CONFIG, [version, version]).state_methods
    assert not of_versions(CONFIG, [version, CONFIG]).state_methods

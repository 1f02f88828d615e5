"""A model that wants a request again before it answers (triton-spec 1.10)."""

from __future__ import annotations

import msgspec
import pytest

from executor.engine.base import Row, RowError, RowResult
from shared.contract.errors import Code
from shared.contract.model_config import ModelConfig, StateSpec, TensorSpec
from tests.executor.engine.model_workshop import Workshop, array, sequence_config, wire

COUNTDOWN = """
    class TritonPythonModel:
        def initialize(self, args):
            self.passes = {}

        def execute(self, requests):
            responses = []
            for request in requests:
                if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                    self.passes[request.correlation_id()] = 0
                self.passes[request.correlation_id()] += 1
                passes = self.passes[request.correlation_id()]
                wanted = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item()
                state = pb_utils.get_input_tensor_by_name(request, "SUM")
                before = 0 if state is None else state.as_numpy().item()
                response = pb_utils.InferenceResponse([
                    pb_utils.Tensor("OUTPUT", np.array([[passes + before]], np.int32))])
                if passes < wanted or wanted < 0:
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                    responses.append(response if wanted < 0 else None)
                else:
                    responses.append(response)
            return responses
"""


def config(*, iterative: bool = True, states: tuple[StateSpec, ...] = ()) -> ModelConfig:
    made = sequence_config(
        "countdown",
        "python",
        inputs=[TensorSpec("INPUT", "INT32", (1,))],
        outputs=[TensorSpec("OUTPUT", "INT32", (1,))],
        states=states,
    )
    assert made.sequence_batching is not None
    batching = msgspec.structs.replace(made.sequence_batching, iterative=iterative)
    return msgspec.structs.replace(made, sequence_batching=batching)


def row(wanted: int, *, start: bool, correlation_id: int, slot: int = 0) -> Row:
    return Row({"INPUT": wire("INPUT", [[wanted]], "<i4")}, slot=slot, start=start, correlation_id=correlation_id)


def test_a_rescheduled_row_has_no_answer_and_its_neighbour_has_one(workshop: Workshop) -> None:
    workshop.python("countdown", COUNTDOWN)
    engine = workshop.load(config())

    first = engine.run([row(2, start=True, correlation_id=1), row(1, start=True, correlation_id=2)], [True, True])
    second = engine.run([row(2, start=False, correlation_id=1)], [True])

    assert RowResult((), again=True) == first.rows[0]
    assert isinstance(first.rows[1], RowResult)
    assert isinstance(second.rows[0], RowResult)
    assert [1, 2] == [array(result, "OUTPUT").item() for result in (first.rows[1], second.rows[0])]


def test_what_a_start_begins_with_is_there_in_its_later_passes(workshop: Workshop) -> None:
    """A slot's earlier sequence leaves its state behind; the second pass carries no START that would replace it."""
    workshop.python("countdown", COUNTDOWN)
    state = StateSpec("SUM", "SUM_NEXT", "INT32", (1,))
    engine = workshop.load(config(states=(state,)))
    engine.load_states([0], [{"SUM": msgspec.structs.replace(wire("SUM", [100], "<i4"), shape=(1,))}])

    engine.run([row(2, start=True, correlation_id=1)], [True])
    (answer,) = engine.run([row(2, start=False, correlation_id=1)], [True]).rows

    assert isinstance(answer, RowResult)
    assert 2 == array(answer, "OUTPUT").item()


IN_PLACE = """
    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            wanted, sum = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "SUM")
            )
            sum += 1
            if sum.item() < wanted.item():
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                return None
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", sum)])
"""


def test_what_a_model_writes_into_its_state_in_place_is_there_in_the_next_pass(workshop_of_both: Workshop) -> None:
    workshop_of_both.python("countdown", IN_PLACE)
    state = StateSpec("SUM", "SUM_NEXT", "INT32", (1,), same_buffer=True)
    engine = workshop_of_both.load(config(states=(state,)))

    passes = [engine.run([row(3, start=first, correlation_id=1)], [True]).rows[0] for first in (True, False, False)]

    assert [True, True, False] == [isinstance(one, RowResult) and one.again for one in passes]
    assert isinstance(passes[-1], RowResult)
    assert 3 == array(passes[-1], "OUTPUT").item()


def test_a_model_that_is_not_iterative_cannot_reschedule(workshop: Workshop) -> None:
    workshop.python("countdown", COUNTDOWN)
    engine = workshop.load(config(iterative=False))

    (refused,) = engine.run([row(2, start=True, correlation_id=1)], [True]).rows

    assert isinstance(refused, RowError)
    assert Code.INVALID_ARG == refused.code
    assert (
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
        "such a flag." == refused.message
    )


def test_a_rescheduled_request_has_no_response(workshop: Workshop) -> None:
    workshop.python("countdown", COUNTDOWN)
    engine = workshop.load(config())

    (wrong,) = engine.run([row(-1, start=True, correlation_id=1)], [True]).rows

    assert isinstance(wrong, RowError)
    assert "Expected a None object in the execute function return list" in wrong.message


@pytest.mark.parametrize("flags", [0, 3, 4])
def test_unknown_release_flags_are_refused(workshop: Workshop, flags: int) -> None:
    workshop.python("countdown", COUNTDOWN.replace("pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE", str(flags)))
    engine = workshop.load(config())

    (wrong,) = engine.run([row(2, start=True, correlation_id=1)], [True]).rows

    assert isinstance(wrong, RowError)
    assert f"unknown release flags {flags}" in wrong.message

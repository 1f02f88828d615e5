"""Decoupled `model.py`: answers by response senders, from `execute`, from threads and from coroutines."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from executor.engine.base import Engine, Row, RowError, RowResult
from executor.engine.python.process.engine import ProcessEngine
from executor.engine.python.process.messages import NotWanted
from executor.engine.python.response_senders import FORGOTTEN
from executor.workers.worker import EngineWorker
from shared.contract.ids import InstanceIndex
from shared.contract.model_config import ModelConfig, StateSpec, TensorSpec
from tests.executor.engine.model_workshop import Workshop, array, sequence_config, wire

MODEL = """
    import json
    import threading


    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def response(value, name="OUTPUT"):
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([[value]], np.int32))])

    class TritonPythonModel:
        def initialize(self, args):
            self.own = {{}}
            self.kept = []

        {asynchronous}def execute(self, requests):
            for request in requests:
                value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item()
                state = pb_utils.get_input_tensor_by_name(request, "SUM_IN")
                total = 0 if state is None else state.as_numpy().item()
                sender = request.get_response_sender()
{body}
{more}
"""


@pytest.fixture
def workshop(workshop_of_both: Workshop) -> Workshop:
    return workshop_of_both


class Recorded:
    """The answers to one request. keeps_state: whether the request is not over, so that its state may move on"""

    def __init__(self, *, keeps_state: bool = True) -> None:
        self.sent: list[RowResult | RowError] = []
        self.last: RowResult | RowError | None = None
        self.is_cancelled = False
        self.ended = threading.Event()
        self._keeps_state = keeps_state

    def send(self, answer: RowResult | RowError) -> None:
        self.sent.append(answer)

    def end(self, last: RowResult | RowError, keep_state: Callable[[], None] | None = None) -> None:
        if self.last is None:
            if keep_state is not None and self._keeps_state:
                keep_state()
            self.last = last
            self.ended.set()

    @property
    def values(self) -> list[Any]:
        return [one.message if isinstance(one, RowError) else array(one, "OUTPUT").item() for one in self.sent]


def config(*, states: bool = False, iterative: bool = False, same_buffer: bool = False) -> ModelConfig:
    made = sequence_config(
        "many",
        "python",
        inputs=[TensorSpec("INPUT", "INT32", (1,))],
        outputs=[TensorSpec("OUTPUT", "INT32", (1,))],
        states=[StateSpec("SUM_IN", "SUM_OUT", "INT32", (1,), (1,), "", same_buffer)] if states else (),
    )
    assert made.sequence_batching is not None
    batching = msgspec.structs.replace(made.sequence_batching, iterative=iterative)
    return msgspec.structs.replace(made, sequence_batching=batching, decoupled=True)


def load(workshop: Workshop, body: str, made: ModelConfig, *, asynchronous: bool = False, more: str = "") -> Engine:
    indented = "\n".join(" " * 16 + line for line in body.strip().splitlines())
    rest = "\n".join(" " * 8 + line for line in more.strip().splitlines())
    source = MODEL.format(body=indented, more=rest, asynchronous="async " if asynchronous else "")
    workshop.python("many", source)
    return workshop.load(made)


def run(engine: Engine, value: int, answers: Recorded | None, *, start: bool = True, wanted: bool = True) -> Any:
    row = Row({"INPUT": wire("INPUT", [[value]], "<i4")}, slot=0, start=start, correlation_id=7, answers=answers)
    (result,) = engine.run([row], [wanted]).rows
    return result


def finish(engine: Engine, value: int, answers: Recorded, *, start: bool = True, wanted: bool = True) -> None:
    """Runs a request to its last answer."""
    assert run(engine, value, answers, start=start, wanted=wanted).open
    assert answers.ended.wait(60)


COUNTS = """
def count(sender=sender, value=value, total=total):
    for number in range(total + 1, total + value + 1):
        time.sleep(0.002)
        while os.path.exists(f"{pb_utils.get_model_dir()}/../../{number}"):
            time.sleep(0.002)
        if number == 1000 and total:
            os.kill(os.getpid(), signal.SIGKILL)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([[number]], np.int32))
                                                for name in ("OUTPUT", "SUM_OUT")]))
    sender.send(flags=FINAL)
import os, signal, time
threading.Thread(target=count).start()
"""


def killed(engine: Engine) -> None:
    assert isinstance(engine, ProcessEngine)
    assert engine._process.now is not None
    os.kill(engine._process.now.pid, signal.SIGKILL)


def gate(workshop: Workshop, number: int) -> Path:
    """Before this number `COUNTS` waits, in any process, until the gate is taken away."""
    path = workshop.directory / str(number)  # a file of the model that goes is another model
    path.touch()
    return path


async def sent(answers: Recorded, count: int) -> None:
    while len(answers.sent) < count:
        await asyncio.sleep(0.001)


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
async def test_answers_go_on_in_another_process_without_loss_or_repeat(workshop: Workshop) -> None:
    """Of requests whose batches were over when their process was killed, and of the steps behind them."""
    gates = [gate(workshop, number) for number in (21, 51, 111)]
    engine = load(workshop, COUNTS, config(states=True))
    worker = EngineWorker(engine, "many", "many 0", InstanceIndex(0))
    first, second = [Recorded() for _ in range(2)], [Recorded() for _ in range(2)]

    rows = [step(100, one, slot=slot, start=True) for slot, one in enumerate(first)]
    await worker.run(rows, [False, True])
    for count in (20, 50):
        await sent(first[0], count)
        killed(engine)
        gates.pop(0).unlink()
    for one in first:
        await asyncio.to_thread(one.ended.wait)
    rows = [step(50, one, slot=slot) for slot, one in enumerate(second)]
    await worker.run(rows, [False, True])
    await sent(second[1], 10)
    killed(engine)
    gates.pop(0).unlink()
    for one in second:
        await asyncio.to_thread(one.ended.wait)

    for one, two in zip(first, second, strict=True):
        assert list(range(1, 101)) == one.values
        assert list(range(101, 151)) == two.values
    assert [[], [150]] == [states_of(one.last) for one in second]
    await worker.close()
    workshop.engines.clear()


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
async def test_a_request_that_ends_its_processes_fails_and_its_neighbours_do_not(workshop: Workshop) -> None:
    # Until the batch is over, no request ends its process: that would be another error.
    batch = gate(workshop, 991)
    engine = load(workshop, COUNTS, config(states=True))
    worker = EngineWorker(engine, "many", "many 0", InstanceIndex(0))
    neighbour, bad = Recorded(), Recorded()
    loaded = {"SUM_IN": wire("SUM_IN", [990], "<i4")}
    engine.load_states([1], [loaded])

    # One that does not come to its end meanwhile.
    await worker.run([step(10**9, neighbour, slot=0, start=True), step(50, bad, slot=1)], [False, False])
    batch.unlink()
    await asyncio.to_thread(bad.ended.wait)
    before = len(neighbour.sent)
    await sent(neighbour, before + 20)

    assert list(range(991, 1000)) == bad.values
    assert isinstance(bad.last, RowError)
    assert "was killed by SIGKILL while this request was open, 3 times without a further" in bad.last.message
    assert list(range(1, len(neighbour.sent) + 1)) == neighbour.values
    await worker.close()
    workshop.engines.clear()


def step(value: int, answers: Recorded, *, slot: int, start: bool = False) -> Row:
    return Row(
        {"INPUT": wire("INPUT", [[value]], "<i4")}, slot=slot, start=start, correlation_id=slot + 1, answers=answers
    )


def states_of(result: RowResult | RowError | None) -> list[int]:
    assert isinstance(result, RowResult)
    return [int.from_bytes(state.raw, "little") for state in result.states.values()]


def test_answers_come_from_execute_and_from_threads(workshop: Workshop) -> None:
    engine = load(
        workshop,
        """
sender.send(response(1))
threading.Thread(target=lambda sender=sender: (sender.send(response(2)), sender.send(flags=FINAL))).start()
""",
        config(),
    )
    answers = Recorded()

    finish(engine, 1, answers)
    assert [1, 2] == answers.values
    assert isinstance(answers.last, RowResult)
    assert answers.last.empty


def test_execute_may_be_a_coroutine_beside_which_batches_run(workshop: Workshop) -> None:
    engine = load(
        workshop,
        """
import asyncio
if value == 1:
    self.gate = asyncio.Event()
    await self.gate.wait()
else:
    self.gate.set()
sender.send(response(value), FINAL)
""",
        config(),
        asynchronous=True,
    )
    first, second = Recorded(), Recorded()

    run(engine, 1, first)
    run(engine, 2, second)

    assert first.ended.wait(60)
    assert second.ended.wait(60)


def test_the_state_of_the_latest_answer_holds_and_moves_with_the_last_one(workshop: Workshop) -> None:
    body = """
for number in range(value):
    total += 1
    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([[total]], np.int32))
                                            for name in ("OUTPUT", "SUM_OUT")]))
if value == 9:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no")), FINAL)
else:
    sender.send(flags=FINAL)
"""
    engine = load(workshop, body, config(states=True))
    one, failed, two, over, three = Recorded(), Recorded(), Recorded(), Recorded(keeps_state=False), Recorded()

    finish(engine, 3, one)
    finish(engine, 9, failed, start=False)
    finish(engine, 2, two, start=False)
    # Its sequence is another executor's by then: the slot stays as it is.
    finish(engine, 5, over, start=False)
    finish(engine, 1, three, start=False)

    assert ([3], [5], [6]) == (states_of(one.last), states_of(two.last), states_of(three.last))
    assert isinstance(failed.last, RowError)


METHODS = """
def checkpoint(self, correlation_id):
    return {"total": np.array([self.own[correlation_id]])}

def restore(self, correlation_id, state):
    self.own[correlation_id] = state["total"].item()
"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_model_is_asked_for_its_own_state_after_a_step_that_fails(workshop: Workshop, *, asynchronous: bool) -> None:
    body = """
self.own[request.correlation_id()] = value
if value == 1:
    sender.send(response(value), FINAL)
if value == 2:
    raise ValueError("two")
"""
    engine = load(workshop, body, config(), asynchronous=asynchronous, more=METHODS)
    first, raised, dropped = Recorded(), Recorded(), Recorded()

    finish(engine, 1, first)
    finish(engine, 2, raised, start=False)
    finish(engine, 3, dropped, start=False)

    assert first.last is not None
    for failed, before in ((raised, first), (dropped, raised)):
        assert isinstance(failed.last, RowError)
        assert before.last is not None
        assert failed.last.model_state not in (b"", before.last.model_state)


def test_a_model_is_asked_for_its_own_state_with_the_last_answer(workshop: Workshop) -> None:
    body = "self.own[request.correlation_id()] = value\nsender.send(response(value), FINAL)"
    engine = load(workshop, body, config(), more=METHODS)
    asked, unasked = Recorded(), Recorded()

    finish(engine, 1, asked)
    finish(engine, 2, unasked, wanted=False)

    assert isinstance(asked.last, RowResult)
    assert asked.last.model_state
    assert isinstance(unasked.last, RowResult)
    assert not unasked.last.model_state


def test_passes_answer_and_only_the_last_one_ends_the_request(workshop: Workshop) -> None:
    body = """
sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([[total + 1]], np.int32))
                                        for name in ("OUTPUT", "SUM_OUT")]))
if total + 1 < value:
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
else:
    sender.send(flags=FINAL)
"""
    engine = load(workshop, body, config(states=True, iterative=True))
    answers = Recorded()

    again = [run(engine, 3, answers, start=first) for first in (True, False)]
    gc.collect()
    finish(engine, 3, answers, start=False)

    assert [True, True] == [one.again for one in again]
    assert [1, 2, 3] == answers.values
    assert [3] == states_of(answers.last)


def test_what_passes_write_in_place_holds_beside_what_answers_have_returned(workshop: Workshop) -> None:
    body = """
state = pb_utils.get_input_tensor_by_name(request, "SUM_IN").as_numpy()
if total == 0:
    tensors = [pb_utils.Tensor(name, np.array([[5]], np.int32)) for name in ("OUTPUT", "SUM_OUT")]
    sender.send(pb_utils.InferenceResponse(tensors))
else:
    state += 1
if state.item() == value:
    sender.send(flags=FINAL)
else:
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
"""
    engine = load(workshop, body, config(states=True, iterative=True, same_buffer=True))
    answers = Recorded()

    again = [run(engine, 7, answers, start=first) for first in (True, False)]
    finish(engine, 7, answers, start=False)

    assert [True, True] == [one.again for one in again]
    assert [7] == states_of(answers.last)


@pytest.mark.parametrize("raised", ["ValueError('odd')", "__import__('asyncio').CancelledError('odd')"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_execute_raises_ends_the_requests_that_are_open(
    workshop: Workshop, raised: str, *, asynchronous: bool
) -> None:
    body = f"self.kept.append(sender)\nsender.send(response(1))\nraise {raised}"
    engine = load(workshop, body, config(), asynchronous=asynchronous)
    answers = Recorded()

    run(engine, 1, answers)

    assert answers.ended.wait(60)
    assert [1] == answers.values
    assert isinstance(answers.last, RowError)
    assert answers.last.message.startswith("Failed to process the request(s) for model")
    assert "odd" in answers.last.message
    assert "The model asked for 'SUM_IN'." in answers.last.message


@pytest.mark.parametrize("asynchronous", [False, True])
def test_execute_returns_none(workshop: Workshop, *, asynchronous: bool) -> None:
    engine = load(workshop, "sender.send(response(1), FINAL)\nreturn []", config(), asynchronous=asynchronous)
    engine_of_open = load(workshop, "self.kept.append(sender)\nreturn []", config(), asynchronous=asynchronous)
    done, left_open = Recorded(), Recorded()

    finish(engine, 1, done)
    finish(engine_of_open, 1, left_open)

    assert isinstance(done.last, RowResult)
    assert isinstance(left_open.last, RowError)
    text = "Python model 'many_0_1' is using the decoupled mode and the execute function must return None."
    assert text in left_open.last.message


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_log_has_an_error_of_execute_that_comes_behind_the_last_answer(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, *, asynchronous: bool
) -> None:
    body = "sender.send(response(value), FINAL)\nraise ValueError('behind')"
    engine = load(workshop, body, config(), asynchronous=asynchronous)
    answers = Recorded()

    finish(engine, 1, answers)
    engine.close()

    assert isinstance(answers.last, RowResult)
    if not isinstance(engine, ProcessEngine):
        assert "ValueError: behind" in caplog.text


def test_a_request_ends_when_its_sender_is_dropped(workshop: Workshop) -> None:
    engine = load(workshop, "self.kept.append(sender)\nif value == 2:\n    self.kept.clear()", config())
    held, dropped = Recorded(), Recorded()

    run(engine, 1, held)
    assert held.last is None
    finish(engine, 2, dropped)

    for answers in (held, dropped):
        assert answers.ended.wait(60)
        assert isinstance(answers.last, RowError)
        assert FORGOTTEN == answers.last.message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("send(response(2))", "Unable to send response. Response sender has been closed."),
        ("send(flags=FINAL)", "Unable to send response. Response sender has been closed."),
        ("send(response(2), 7)", "Unable to send response. Unsupported flag provided."),
        ("send()", "Inference Response object must be provided when the response flags is set to zero."),
        ("send('text')", "Unable to send response. Expected an InferenceResponse, got str."),
    ],
)
def test_a_sender_refuses_what_there_is_not(workshop: Workshop, call: str, message: str) -> None:
    body = f"""
sender.send(response(1), FINAL)
try:
    sender.{call}
except pb_utils.TritonModelException as refused:
    assert str(refused) == {message!r}, str(refused)
else:
    raise AssertionError('not refused')
"""
    if "closed" not in message:
        body = body.replace("sender.send(response(1), FINAL)\n", "", 1) + "sender.send(flags=FINAL)\n"
    engine = load(workshop, body, config())
    answers = Recorded()

    finish(engine, 1, answers)

    assert isinstance(answers.last, RowResult), answers.last


def test_wrong_tensors_are_an_error_in_their_place(workshop: Workshop) -> None:
    body = """
sender.send(response(1, name="OTHER"))
sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.zeros((2, 2), np.int32))]))
sender.send(response(3))
sender.send(flags=FINAL)
"""
    engine = load(workshop, body, config())
    answers = Recorded()

    finish(engine, 1, answers)

    undeclared, wrong, right = answers.values
    assert "returned output 'OTHER', which its configuration does not declare" in undeclared
    assert "returned a wrong output 'OUTPUT'" in wrong
    assert 3 == right
    assert isinstance(answers.last, RowResult)


@pytest.mark.parametrize("states", [False, True])
def test_a_last_response_that_cannot_be_read_ends_the_request(workshop: Workshop, *, states: bool) -> None:
    body = """
if value == 13:
    sender.send(pb_utils.InferenceResponse(pb_utils.Tensor("OUTPUT", np.zeros((1, 1), np.int32))), FINAL)
else:
    total = np.array([[total + value]], np.int32)
    names = ["OUTPUT"] if state is None else ["OUTPUT", "SUM_OUT"]
    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(name, total) for name in names]), FINAL)
requests.clear()
"""
    engine = load(workshop, body, config(states=states))
    first, wrong, last = Recorded(), Recorded(), Recorded()
    finish(engine, 1, first)

    finish(engine, 13, wrong, start=False)
    finish(engine, 2, last, start=False)

    assert isinstance(wrong.last, RowError)
    assert "cannot be read: TypeError: 'Tensor' object is not iterable" in wrong.last.message
    assert isinstance(last.last, RowResult)
    assert (3 if states else 2) == array(last.last, "OUTPUT").item()


def test_a_model_sees_that_nobody_waits(workshop: Workshop) -> None:
    body = """
def wait(sender=sender):
    while not sender.is_cancelled():
        pass
    sender.send(flags=FINAL)
threading.Thread(target=wait).start()
"""
    engine = load(workshop, body, config())
    answers = Recorded()
    run(engine, 1, answers)
    time.sleep(0.01)
    assert answers.last is None

    answers.is_cancelled = True

    assert answers.ended.wait(60)


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
def test_a_process_keeps_that_nobody_waits_for_a_request_until_its_batch_comes(workshop: Workshop) -> None:
    """One is said beside the calls, the other by a call: either may be the first."""
    engine = load(workshop, "while not sender.is_cancelled():\n    pass\nsender.send(flags=FINAL)", config())
    nobody_waits_for_the_next_one(engine)
    answers = Recorded()

    finish(engine, 1, answers)

    assert isinstance(answers.last, RowResult)


def nobody_waits_for_the_next_one(engine: Engine) -> None:
    """The process of a new engine has heard that nobody waits for its first request."""
    assert isinstance(engine, ProcessEngine)
    assert engine._process.now is not None
    engine._process.now.order(NotWanted(1))
    # The answer to a later order: the one before has been taken.
    engine._process.now.is_ready()


def test_warm_up_has_nobody_to_answer(workshop: Workshop) -> None:
    engine = load(workshop, "sender.send(response(1))\nsender.send(flags=FINAL)", config())
    broken = load(workshop, "raise ValueError('odd')", config())

    assert run(engine, 1, None).open
    assert isinstance(run(broken, 1, None), RowError)

"""Calls of a python model: to which request they belong, what they are named, and how they are answered."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from executor.calls.deadlocks import find
from executor.engine.base import Engine, Origin, ReleasesSequences, Row, RowError, RowResult
from executor.engine.null_rows import NULL_ROW
from executor.engine.python import calls
from executor.engine.python import triton_python_backend_utils as pb_utils
from executor.engine.python.calls import CallAnswer, Execution, ModelCall
from executor.engine.python.process.engine import ProcessEngine
from executor.engine.python.process.made_calls import MadeCalls
from executor.engine.python.process.messages import GiveUpCall, MakeCall, ReadResponse
from executor.lease import hung_calls
from executor.workers.worker import EngineWorker
from shared.contract.calls import CALL_DEPTH_MAX, WaitingCall, waiting
from shared.contract.errors import LoadError
from shared.contract.ids import InstanceIndex, SequenceId, sequence_id
from shared.contract.messages import InferMessage, encode
from shared.contract.model_config import ModelConfig, TensorSpec
from tests.executor.engine.model_workshop import Workshop, error, plain_config, results, sequence_config, wire
from tests.executor.engine.test_decoupled_engine import Recorded

X = TensorSpec("x", "FP32", (2,))


class Door:
    """Answers each call with its own inputs, as output `x`; keeps the calls. wait: until then nothing is answered"""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.futures: list[Future[CallAnswer]] = []
        self.open = threading.Event()
        self.open.set()
        self.cancelled = threading.Event()

    def start(self, call: ModelCall) -> Future[CallAnswer]:
        self.calls.append(call)
        if call.model == "opener":
            self.open.set()
        future: Future[CallAnswer] = Future()
        self.futures.append(future)
        answer = CallAnswer(call.inputs, is_ready=(call.model, call.version) in (("other", ""), ("other", "1")))
        self.give(future, answer)
        return future

    def give(self, future: Future[Any], answer: CallAnswer | None) -> None:
        if self.open.is_set():
            future.set_result(answer)
        else:
            threading.Thread(target=self._answer, args=(future, answer)).start()

    def _answer(self, future: Future[Any], answer: CallAnswer | None) -> None:
        self.open.wait()
        if future.set_running_or_notify_cancel():
            future.set_result(answer)

    def stream(self, call: ModelCall) -> Any:
        self.calls.append(call)
        return AnswersTwice(self, call)

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]


class AnswersTwice:
    def __init__(self, door: Door, call: ModelCall) -> None:
        self._door = door
        self._left: list[CallAnswer | None] = [CallAnswer(call.inputs), CallAnswer(), None]
        self._is_cancelled = False

    def read(self) -> Future[CallAnswer | None]:
        future: Future[CallAnswer | None] = Future()
        self._door.give(future, None if self._is_cancelled else self._left.pop(0))
        return future

    def cancel(self) -> None:
        self._is_cancelled = True
        self._door.cancelled.set()


@pytest.fixture
def workshop(workshop_of_both: Workshop) -> Workshop:
    return workshop_of_both


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    with calls.install(made):
        yield made
    made.open.set()  # a test that has failed leaves nobody waiting


def config(name: str = "caller") -> ModelConfig:
    return sequence_config(name, "python", inputs=[X], outputs=[TensorSpec("y", "FP32", (2,))])


def model(body: str, *, head: str = "def execute(self, requests):") -> str:
    """A model whose `execute` is this body; it returns `responses(requests)`."""
    return f"""
import asyncio
import threading
import numpy as np
import triton_python_backend_utils as pb_utils


def call(request=None, to="other", **more):
    tensor = pb_utils.Tensor("x", np.array([[1, 2]], np.float32))
    trace = {{"trace": request.trace()}} if request is not None else {{}}
    return pb_utils.InferenceRequest(
        model_name=to, inputs=[tensor], requested_output_names=["x"], **trace, **more
    )


def responses(requests):
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(one, "x").as_numpy())])
        for one in requests
    ]


class TritonPythonModel:
    {head}
{textwrap.indent(textwrap.dedent(body), "        ")}
        return responses(requests)
"""


def row(
    id: int | str,
    *,
    step: int = 1,
    arrived_ns: int = 5_000,
    taken_us: int = 0,
    passes: int = 0,
    replayed_in: int = 0,
    **more: Any,
) -> Row:
    """A row of a sequence. more: fields of its message"""
    message = InferMessage("caller", "1", "", id, (), arrived_ns=arrived_ns, **more)
    name = sequence_id("caller", "", id)
    return Row(
        {"x": wire("x", [[1, 2]])},
        slot=int(id) % 8,
        correlation_id=id,
        origin=Origin.of(message, name, taken_us, step, passes, replayed_in),
    )


def run(engine: Engine, *rows: Row) -> None:
    results(engine, list(rows))


@contextmanager
def held_up(engine: Engine, door: Door, one: Row | None = None) -> Generator[None]:
    """Within the block an engine waits for the answer to a call of its model. Behind it it has ended."""
    door.open.clear()
    already = len(calls.waits())
    running = threading.Thread(target=run, args=(engine, one or row(1)))
    running.start()
    _await(lambda: len(calls.waits()) == already + 1)
    try:
        yield
    finally:
        door.open.set()
        running.join()


def test_a_call_has_all_that_the_model_said(workshop: Workshop, door: Door) -> None:
    body = """
    response = call(
        correlation_id="s", request_id="r", model_version=2, flags=1, timeout=9, parameters={"p": 1},
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU),
    ).exec()
    assert not response.has_error()
    assert pb_utils.get_output_tensor_by_name(response, "x").as_numpy().tolist() == [[1, 2]]
    """
    workshop.python("caller", model(body))

    run(workshop.load(config()), row(7, traceparent="00-trace", deadline_ms=11, taken_us=7_000, chain=("first",)))

    (made,) = door.calls
    about = [
        getattr(made, name) for name in ["model", "version", "request_id", "correlation_id", "flags", "timeout_us"]
    ]
    assert ["other", "2", "r", "s", 1, 9] == about
    assert (("x",), {"p": 1}, "00-trace") == (made.outputs, made.parameters, made.traceparent)
    # 11 ms by the gateway's clock, which said 5 us when the request came; 7 ms by this machine's, when it was taken in.
    assert 7_000 + 11_000 - 5 == made.deadline_us
    assert ("first", waiting("caller", sequence_id("caller", "", 7))) == made.chain
    assert b"\x00\x00\x80?\x00\x00\x00@" == made.inputs[0].raw


@pytest.mark.parametrize(("given", "named"), [("np.uint64(2**64 - 1)", 2**64 - 1), ("np.str_('s')", "s"), ("True", 1)])
def test_a_call_s_numbers_may_be_elements_of_arrays(workshop: Workshop, door: Door, given: str, named: object) -> None:
    more = "flags=True, timeout=np.int64(9), model_version=np.int32(2), request_id=np.str_('r')"
    more += ", to=np.str_('other')"
    workshop.python("caller", model(f"call(correlation_id={given}, {more}).exec()"))

    run(workshop.load(config()), row(7))

    (made,) = door.calls
    assert (named, 1, 9, "2") == (made.correlation_id, made.flags, made.timeout_us, made.version)
    assert type(named) is type(made.correlation_id)
    assert type(made.flags) is int
    assert encode(made), "no message takes a subclass of str"


def test_a_step_that_runs_again_makes_the_same_calls(workshop: Workshop, door: Door) -> None:
    """In another instance, beside another request, and though calls to other models come between."""
    body = """
    for request in requests:
        ids = request.correlation_id()
        for to in ("other", "other", "third"):
            call(request, to, correlation_id=ids).exec()
    """
    workshop.python("caller", model(body))

    run(workshop.load(config()), row(1))
    alone = door.names
    door.calls.clear()
    run(workshop.load(config()), row(2), row(1))

    assert 3 == len(set(alone))
    assert alone == door.names[3:]
    assert set(alone).isdisjoint(door.names[:3])


def test_a_replayed_step_makes_the_same_calls_and_waits_for_them_without_a_deadline(
    workshop: Workshop, door: Door
) -> None:
    """Its caller has its answer, or gave up long ago."""
    workshop.python("caller", model("call(correlation_id=3).exec()"))
    engine = workshop.load(config())

    run(engine, row(1, deadline_ms=11))
    run(engine, row(1, deadline_ms=11, replayed_in=7))

    first, again = door.calls
    assert (first.name, None, 11_000 - 5) == (again.name, first.replayed, first.deadline_us)
    assert ((sequence_id("caller", "", 1), 7), 0) == (again.replayed, again.deadline_us)


@pytest.mark.parametrize(
    "another", [row(1, step=2), row(1, arrived_ns=6), row(1, passes=1), row("1"), row(2)], ids=range(5)
)
def test_another_step_makes_other_calls(workshop: Workshop, door: Door, another: Row) -> None:
    workshop.python("caller", model("call(correlation_id=3).exec()"))
    engine = workshop.load(config())

    run(engine, row(1))
    run(engine, another)

    assert 2 == len(set(door.names))


def test_a_stateless_request_that_is_a_call_itself_makes_the_calls_of_its_caller(
    workshop: Workshop, door: Door
) -> None:
    """Though it is another request of the queue each time."""

    def request(arrived_ns: int) -> Row:
        message = InferMessage("caller", "1", "", 0, (), arrived_ns=arrived_ns, call="call-9")
        return Row({"x": wire("x", [[1, 2]])}, origin=Origin.of(message, message.call, 0))

    workshop.python("caller", model("call(correlation_id=3).exec()"))
    engine = workshop.load(plain_config("caller", "python", inputs=[X], outputs=[TensorSpec("y", "FP32", (2,))]))

    run(engine, request(1))
    run(engine, request(2))

    assert [door.names[0]] * 2 == door.names
    assert ("caller",) == door.calls[0].chain


def test_to_which_request_a_call_belongs(workshop: Workshop, door: Door) -> None:
    body = """
    call(correlation_id=2).exec()
    call(requests[0], correlation_id=2).exec()
    call(correlation_id=77).exec()
    call().exec()
    """
    workshop.python("caller", model(body))
    engine = workshop.load(config())

    run(engine, row(1), NULL_ROW, row(2, chain=("deep",)))
    by_id, by_trace, unknown, stateless = door.calls
    of_one, of_two = (waiting("caller", sequence_id("caller", "", id)) for id in (1, 2))
    assert ("deep", of_two) == by_id.chain
    assert (of_one,) == by_trace.chain
    # Nobody knows whose call it is. It is as deep as it might be, and another call when its step runs again.
    assert [("deep", "caller")] * 2 == [unknown.chain, stateless.chain]
    assert "" == stateless.name

    run(engine, row(2))
    assert by_id.name == door.calls[4].name
    assert unknown.name != door.calls[6].name
    assert (of_two,) == door.calls[7].chain


def test_calls_of_threads_belong_to_the_request_whose_trace_they_have(workshop: Workshop, door: Door) -> None:
    body = """
    for made in (call(correlation_id=3), call(requests[0], correlation_id=3)):
        thread = threading.Thread(target=made.exec)
        thread.start()
        thread.join()
    """
    workshop.python("caller", model(body))

    run(workshop.load(config()), row(1))

    assert () == door.calls[0].chain
    assert (waiting("caller", sequence_id("caller", "", 1)),) == door.calls[1].chain


def test_a_request_tells_its_trace_also_to_threads_and_no_request_has_none(workshop: Workshop) -> None:
    """Models of PyTriton begin their spans with it, and those of whoever followed Triton's page about traces."""
    body = """
    told = []
    thread = threading.Thread(target=lambda: told.extend(one.trace().get_context() for one in requests))
    thread.start()
    thread.join()
    assert told == [one.trace().get_context() for one in requests]
    assert told == ['{"traceparent": "00-trace"}', None, None], told
    """
    workshop.python("caller", model(body))

    run(workshop.load(config()), row(1, traceparent="00-trace"), row(2), msgspec.structs.replace(row(3), origin=None))


@pytest.mark.parametrize("head", ["def execute(self, requests):", "async def execute(self, requests):"])
def test_calls_of_a_decoupled_model_belong_to_its_requests(workshop: Workshop, door: Door, head: str) -> None:
    body = """
    for request in requests:
        sender = request.get_response_sender()
        assert not call(request, correlation_id=3).exec().has_error()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    workshop.python("caller", model(body, head=head).replace("return responses(requests)", ""))
    engine = workshop.load(msgspec.structs.replace(config(), decoupled=True))

    for _ in range(2):
        answers = Recorded()
        engine.run([msgspec.structs.replace(row(1), start=True, answers=answers)], [False])
        assert answers.ended.wait(60)
        assert isinstance(answers.last, RowResult), answers.last

    assert [door.names[0]] * 2 == door.names
    assert (waiting("caller", sequence_id("caller", "", 1)),) == door.calls[0].chain


def test_an_async_execute_makes_its_calls_when_they_are_issued(workshop: Workshop, door: Door) -> None:
    body = """
    first, second = (call(correlation_id=3).async_exec() for _ in range(2))
    self.loops = getattr(self, "loops", set()) | {asyncio.get_running_loop()}
    assert len(self.loops) == 1
    await second
    assert not (await first).has_error()
    """
    workshop.python("caller", model(body, head="async def execute(self, requests):"))
    engine = workshop.load(config())

    run(engine, row(1))
    run(engine, row(1))

    assert door.names[:2] == door.names[2:]
    assert 2 == len(set(door.names))
    assert not calls.waits()


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("def execute", "found = call().exec(decoupled=True); said = [list(found), list(found)]"),
        (
            "async def execute",
            "found = await call().async_exec(decoupled=True); said = [[one async for one in found], list(found)]",
        ),
    ],
)
def test_a_stream_of_responses_can_be_iterated_twice(workshop: Workshop, door: Door, head: str, body: str) -> None:
    check = "\nassert [[1, 0]] * 2 == [[len(one.output_tensors()) for one in responses] for responses in said]"
    workshop.python("caller", model(body + check, head=f"{head}(self, requests):"))
    engine = workshop.load(config())

    run(engine, row(1))

    assert not door.cancelled.is_set()


@pytest.mark.parametrize(
    ("head", "taken", "loop"),
    [
        ("def execute", "call().exec(decoupled=True)", "for"),
        ("async def execute", "await call().async_exec(decoupled=True)", "async for"),
    ],
)
def test_a_loop_behind_the_first_response_has_those_that_follow(
    workshop: Workshop, door: Door, head: str, taken: str, loop: str
) -> None:
    """And not the first one again, which its model would count twice; also when all are iterated again."""
    body = f"""
    found = {taken}
    said = [[next(found)], [one {loop} one in found], [one {loop} one in found]]
    {loop} one in found:
        break
    said += [[one {loop} one in found], [one {loop} one in found]]
    assert [[1], [0], [1, 0], [0], [1, 0]] == [[len(one.output_tensors()) for one in responses] for responses in said]
    """
    workshop.python("caller", model(body, head=f"{head}(self, requests):"))

    run(workshop.load(config()), row(1))

    assert not door.cancelled.is_set()


def test_a_model_awaits_the_first_response_of_a_stream_while_its_other_requests_go_on(
    workshop: Workshop, door: Door
) -> None:
    """So a loop over the responses, which does not await, holds up nobody."""
    body = """
    taken = call().async_exec(decoupled=True)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not taken.done()
    await call(to="opener").async_exec()
    assert [1, 0] == [len(one.output_tensors()) for one in await taken]
    """
    workshop.python("caller", model(body, head="async def execute(self, requests):"))
    door.open.clear()

    run(workshop.load(config()), row(1))

    assert ["other", "opener"] == [call.model for call in door.calls]


def test_responses_that_nobody_wants_any_more_are_cancelled(workshop: Workshop, door: Door) -> None:
    workshop.python("caller", model("next(iter(call().exec(decoupled=True)))"))

    run(workshop.load(config()), row(1))

    assert door.cancelled.wait(60)  # a process says it beside the answers


def test_a_model_that_cancels_a_stream_of_responses_hears_that_it_is_cancelled(workshop: Workshop, door: Door) -> None:
    """As an error behind the responses that it had; not if it had all of them."""
    body = """
    def codes(responses):
        return [one.error().code() if one.has_error() else "" for one in responses]

    stopped = call().exec(decoupled=True)
    said = codes([next(stopped)])
    stopped.cancel()
    said += codes(stopped)
    complete = call().exec(decoupled=True)
    said += codes(complete)
    complete.cancel()
    said += codes(complete)
    assert said == ["", pb_utils.TritonError.CANCELLED, "", "", "", ""], said
    """
    workshop.python("caller", model(body))

    run(workshop.load(config()), row(1))

    assert door.cancelled.wait(60)


def test_a_call_that_could_never_be_answered_is_not_made(workshop: Workshop, door: Door) -> None:
    body = """
    own = call(to="caller", correlation_id=1).exec().error()
    above = call(to="first", correlation_id="s").exec().error()
    assert own.code() == above.code() == pb_utils.TritonError.INVALID_ARG
    assert "would wait for itself" in own.message() and "first -> caller -> caller" in own.message()
    assert "would wait for itself" in above.message()
    assert not call(to="caller", correlation_id=2).exec().has_error()
    [failed] = call(to="caller", correlation_id=1).exec(decoupled=True)
    assert failed.has_error()
    """
    workshop.python("caller", model(body))

    run(workshop.load(config()), row(1, chain=(waiting("first", SequenceId("first||ss")),)))

    assert 1 == len(door.calls)


def test_calls_have_a_depth(workshop: Workshop, door: Door) -> None:
    workshop.python("caller", model("raise pb_utils.TritonModelException(call().exec().error().message())"))
    engine = workshop.load(config())

    failed = error(engine, row(1, chain=("a",) * CALL_DEPTH_MAX))

    assert f"more than {CALL_DEPTH_MAX} deep" in failed.message
    assert not door.calls


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("parameters={'timeout': 1}", "the parameter 'timeout' of an InferenceRequest is set by"),
        ("parameters={'x': [1]}", "has invalid type"),
        ("request_id=5", "names, versions and ids are strings, not 5"),
        ("correlation_id=-1", "a correlation id is a str or a uint64, not -1"),
        ("correlation_id=1 << 64", "a correlation id is a str or a uint64"),
        ("correlation_id=1.5", "a correlation id is a str or a uint64, not 1.5"),
        ("correlation_id=b'a'", "a correlation id is a str or a uint64, not b'a'"),
    ],
)
def test_a_request_that_no_protocol_can_carry_is_refused(workshop: Workshop, door: Door, more: str, text: str) -> None:
    workshop.python("caller", model(f"call({more}).exec()"))

    assert text in error(workshop.load(config()), row(1)).message


def test_initialize_may_not_call(workshop: Workshop, door: Door) -> None:
    source = model("pass") + "\n    def initialize(self, args):\n        call().exec()\n"
    workshop.python("caller", source)

    with pytest.raises(LoadError, match="BLS is only supported during the 'execute' function"):
        workshop.load(config())
    with calls.no_calls(), pytest.raises(pb_utils.TritonModelException, match="only supported"):
        pb_utils.InferenceRequest(model_name="other").exec()


QUESTIONS = """[
            pb_utils.is_model_ready("other"),
            pb_utils.is_model_ready(model_name="other", model_version="1"),
            pb_utils.is_model_ready("other", "2"),
            pb_utils.is_model_ready("unknown"),
        ]"""


def test_a_model_may_ask_whether_another_one_is_ready_in_initialize_too(workshop: Workshop, door: Door) -> None:
    source = model(f"assert self.early == {QUESTIONS} == [True, True, False, False], self.early")
    workshop.python("caller", source + f"\n    def initialize(self, args):\n        self.early = {QUESTIONS}\n")

    run(workshop.load(config()), row(1))

    assert [("other", ""), ("other", "1"), ("other", "2"), ("unknown", "")] * 2 == [
        (call.model, call.version) for call in door.calls
    ]


def test_an_instance_that_asks_for_a_model_is_not_hung_and_waits_for_none(workshop: Workshop, door: Door) -> None:
    """A gateway answers, so it can be no part of a deadlock."""
    workshop.python("caller", model('pb_utils.is_model_ready("other")'))
    with held_up(workshop.load(config()), door):
        assert [("caller/1", "")] == [(wait.caller, wait.target) for wait in calls.waits()]
    assert not calls.waits()


def test_instances_of_two_versions_that_wait_are_told_apart(workshop: Workshop, door: Door) -> None:
    """A call goes to one version, and an idle other one does not answer it."""
    workshop.python("caller", model("call().exec()"))
    with held_up(workshop.load(config()), door):
        assert [("caller/1", "caller_0_0")] == [(wait.caller, wait.instance) for wait in calls.waits()]


def test_a_model_hears_why_it_cannot_be_told(workshop: Workshop, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Future[CallAnswer] = Future()
    told.set_result(CallAnswer(error_code="UNAVAILABLE", error="no gateway"))

    def start(_: ModelCall) -> Future[CallAnswer]:
        return told

    monkeypatch.setattr(door, "start", start)
    workshop.python("caller", model('pb_utils.is_model_ready("other")'))

    assert "Failed to check model readiness: no gateway" in error(workshop.load(config()), row(1)).message


def test_without_a_mesh_there_are_no_calls() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="within a mesh only"):
        pb_utils.InferenceRequest(model_name="other").exec()
    with pytest.raises(pb_utils.TritonModelException, match="within a mesh only"):
        pb_utils.is_model_ready("other")


@pytest.mark.starts_processes
def test_a_process_that_a_model_has_forked_is_refused_its_calls_and_the_model_goes_on(
    workshop: Workshop, door: Door
) -> None:
    body = """
    import os

    def called():
        try:
            call().exec()
            return "made"
        except pb_utils.TritonModelException as refused:
            return str(refused)

    reading, writing = os.pipe()
    forked = os.fork()
    if not forked:
        os.write(writing, called().encode())
        os._exit(0)
    said = os.read(reading, 1000).decode()
    os.waitpid(forked, 0)
    assert "not by a process that a model has forked" in said, said
    assert called() == "made"
    """
    workshop.python("caller", model(body))

    run(workshop.load(config()), row(1))

    assert 1 == len(door.calls)


@pytest.fixture
def counted_from_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before an instance in a process has made its first call does not count against the limit."""
    note, are_awaited, have_called = MadeCalls.note, MadeCalls.are_awaited.fget, set[MadeCalls]()

    def noted(made: MadeCalls, one: MakeCall | ReadResponse | GiveUpCall) -> None:
        note(made, one)
        have_called.add(made)

    monkeypatch.setattr(MadeCalls, "note", noted)

    def waits(made: MadeCalls) -> bool:
        assert are_awaited is not None
        return made not in have_called or are_awaited(made)

    monkeypatch.setattr(MadeCalls, "are_awaited", property(waits))


@pytest.mark.usefixtures("counted_from_its_call")
async def test_an_instance_that_waits_for_an_answer_has_not_hung(
    workshop: Workshop, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the answer on it has."""
    # The timer that ends a process whose loop is held up would end this one.
    monkeypatch.setattr(hung_calls, "faulthandler", Mock())
    over = workshop.directory / "over"
    body = f"""
    import os, time
    call(requests[0]).exec()
    while not os.path.exists({str(over)!r}):
        time.sleep(0.01)
    """
    workshop.python("caller", model(body))
    limit_s = 0.5 if workshop.own_process else 0.1
    worker = EngineWorker(workshop.load(config()), "caller", "caller 0", InstanceIndex(0), call_limit_s=limit_s)
    door.open.clear()
    begins = msgspec.structs.replace(row(1), start=True)
    batch = worker.run([begins], [False])
    while not calls.waits():
        await asyncio.sleep(0.005)

    looks: list[EngineWorker] = []

    def looked() -> list[EngineWorker]:
        looks.append(worker)
        return [worker]

    watching = asyncio.create_task(hung_calls.watch(looked, limit_s))
    while len(looks) < 4 * hung_calls.LOOKS_PER_LIMIT:
        await asyncio.sleep(0.005)
    assert not watching.done()
    assert not batch.done()
    (wait,) = calls.waits()
    assert ("caller/1", "other/") == (wait.caller, wait.target)
    door.open.set()
    if not workshop.own_process:
        assert "caller 0" == (await asyncio.wait_for(watching, 60)).worker
        over.touch()
    (result,) = (await batch).rows
    if workshop.own_process:
        watching.cancel()
        assert isinstance(result, RowError)
        assert "did not come back within 0.5 s" in result.message
        # It has made its call again, by the same name.
        assert [door.names[0]] * 2 == door.names
    assert not calls.waits()


def test_an_instance_that_waits_in_another_method_has_not_hung_either(workshop: Workshop, door: Door) -> None:
    workshop.python("caller", model("pass") + "\n    def release(self, correlation_id):\n        call().exec()\n")
    engine = workshop.load(config())
    run(engine, msgspec.structs.replace(row(7), start=True))
    assert isinstance(engine, ReleasesSequences)
    door.open.clear()
    releasing = threading.Thread(target=engine.release, args=(7,))
    releasing.start()

    _await(lambda: bool(calls.waits()))
    assert [("caller/1", "other/")] == [(wait.caller, wait.target) for wait in calls.waits()]
    door.open.set()
    releasing.join()
    assert not calls.waits()
    (made,) = door.calls
    assert ("", ("caller",)) == (made.name, made.chain)


def test_in_a_deadlock_the_call_of_a_replayed_step_fails_last(workshop: Workshop, door: Door) -> None:
    """However young it is: its sequence would be lost."""
    workshop.python("caller", model('call(to="caller").exec()'))
    live, replaying = workshop.load(config()), workshop.load(config())

    with held_up(live, door, row(1)), held_up(replaying, door, row(2, replayed_in=7)):
        waits = [WaitingCall(wait.since_ms, "p", wait.number, "a", str(wait.number), "a") for wait in calls.waits()]
        deadlock = find(waits, {"a": 2})

    assert deadlock is not None
    assert min(wait.number for wait in waits) == deadlock.victim.number


def test_what_a_model_leaves_open_holds_up_nobody(workshop: Workshop, door: Door) -> None:
    door.open.clear()
    body = "self.kept = call().async_exec(); await asyncio.sleep(0)"
    workshop.python("caller", model(body, head="async def execute(self, requests):"))
    engine = workshop.load(config())

    run(engine, row(1))
    assert not calls.waits()
    engine.close()
    door.open.set()


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
def test_what_is_heard_of_behind_its_batch_holds_up_nobody(
    workshop: Workshop, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call comes by another way than the end of the batch that has left it open: either may be the first."""
    batch_over, heard = threading.Event(), threading.Event()
    note = MadeCalls.note

    def late(made: MadeCalls, call: MakeCall | ReadResponse | GiveUpCall) -> None:
        batch_over.wait()
        note(made, call)
        heard.set()

    monkeypatch.setattr(MadeCalls, "note", late)
    door.open.clear()
    body = "self.kept = call().async_exec(); await asyncio.sleep(0)"
    workshop.python("caller", model(body, head="async def execute(self, requests):"))
    engine = workshop.load(config())

    run(engine, row(1))
    batch_over.set()

    assert heard.wait(60)
    assert 1 == len(door.calls)
    assert not calls.waits()
    engine.close()


def test_an_execute_that_ends_while_its_coroutine_begins_to_wait_waits_for_nothing() -> None:
    """The coroutine is on another thread."""

    class Ending(Execution):
        @property
        def is_waiting_here(self) -> bool:
            is_waiting = super().is_waiting_here
            self.over()
            return is_waiting

    def check() -> None:
        calls.execution.set(Ending("caller", "caller/1", "caller_0", ()))
        with calls.waiting_for(ModelCall(1, "other")):
            assert not calls.waits()

    copy_context().run(check)


def test_a_message_of_an_older_gateway_belongs_to_no_call() -> None:
    message = InferMessage("m", "1", "", 0, ())

    assert ("", (), 0) == (message.call, message.chain, message.deadline_ms)
    assert message == msgspec.msgpack.decode(msgspec.msgpack.encode(message)[:], type=InferMessage)


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
def test_a_process_that_is_killed_in_the_middle_of_a_call_leaves_no_call_behind(workshop: Workshop, door: Door) -> None:
    """Its call is given up, and made again under the same name by the process that runs its step again."""
    workshop.python("caller", model("call(requests[0], correlation_id=3).exec()"))
    engine = workshop.load(config())
    assert isinstance(engine, ProcessEngine)
    door.open.clear()
    ran: list[RowResult] = []
    begins = msgspec.structs.replace(row(1), start=True)
    running = threading.Thread(target=lambda: ran.extend(results(engine, [begins])))
    running.start()
    _await(lambda: len(calls.waits()) == 1)
    assert engine._process.now is not None
    os.kill(engine._process.now.pid, signal.SIGKILL)
    _await(lambda: len(door.calls) == 2 and len(calls.waits()) == 1)
    door.open.set()
    running.join()

    assert 1 == len(ran)
    assert [door.names[0]] * 2 == door.names
    first, second = door.futures
    assert first.cancelled()
    assert not second.cancelled()
    assert not calls.waits()


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
@pytest.mark.parametrize("failing", ["start", "stream", "read"])
def test_a_model_hears_of_a_call_that_could_not_be_made_and_its_process_goes_on(
    workshop: Workshop, door: Door, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream says it in its one response; it looked like one without any. The next call is made."""
    body = """
    request = call(requests[0])
    heard = request.exec() if START else list(request.exec(decoupled=True))
    texts = [str(one.error()) for one in (heard if isinstance(heard, list) else [heard]) if one.has_error()]
    if texts:
        raise pb_utils.TritonModelException("; ".join(texts))
    """
    workshop.python("caller", model(body.replace("START", str(failing == "start"))))
    engine = workshop.load(config())
    assert isinstance(engine, ProcessEngine)
    engine.limit_calls(60)

    def fails(*_: object) -> Any:
        raise ImportError("no such library")

    with monkeypatch.context() as patched:
        patched.setattr(AnswersTwice if failing == "read" else Door, failing, fails)
        text = error(engine, row(1)).message
    assert "the call failed: ImportError: no such library" in text

    run(engine, row(2))
    assert 1 + (failing == "read") == len(door.calls)
    assert not calls.waits()


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_model_hears_why_no_call_can_be_made(workshop: Workshop, *, streamed: bool) -> None:
    body = """
    heard = call(requests[0]).exec(decoupled=STREAMED)
    texts = [one.error().message() for one in (heard if STREAMED else [heard])]
    raise pb_utils.TritonModelException("; ".join(texts))
    """
    workshop.python("caller", model(body.replace("STREAMED", str(streamed))))

    assert calls.NOT_HERE in error(workshop.load(config()), row(1)).message


def test_tensors_of_any_size_go_both_ways_beside_each_other(workshop: Workshop, door: Door) -> None:
    body = """
    sizes = [1, 1 << 14, 3 << 20, 1 << 14, 5 << 20]

    def one(size):
        sent = np.arange(size, dtype=np.float32)[None]
        tensor = pb_utils.Tensor("x", sent)
        answer = pb_utils.InferenceRequest(model_name="other", inputs=[tensor], requested_output_names=["x"]).exec()
        return (pb_utils.get_output_tensor_by_name(answer, "x").as_numpy() == sent).all()

    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, sizes * 4))
    """
    workshop.python("caller", model(body))

    run(workshop.load(config()), row(1))

    assert 20 == len(door.calls)


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)

"""Response senders of models that are not decoupled: one response, from `execute` or later."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from executor.engine.base import BatchResult, Engine, LateAnswer, Row, RowError, RowResult
from executor.engine.python.process import instance_process
from executor.engine.python.process.engine import ProcessEngine
from executor.engine.python.response_senders import CLOSED, SECOND, TOO_EARLY, UNANSWERED
from executor.workers.worker import EngineWorker
from shared.contract.ids import InstanceIndex
from shared.contract.model_config import ModelConfig, Oldest, StateSpec, TensorSpec
from tests.executor.engine.model_workshop import Workshop, array, nobody_waits, plain_config, sequence_config, wire
from tests.executor.engine.test_decoupled_engine import Recorded, nobody_waits_for_the_next_one

SOURCE = """
    import asyncio
    import threading
    import time


    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def response(value, *names):
        made = np.array([[value]], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, made) for name in ("OUTPUT", *names)])

    class TritonPythonModel:
        def initialize(self, args):
            self.own = {{}}
            self.kept = []
            self.returned = threading.Event()

        {head}
            responses = []
            for request in requests:
                value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item()
                state = pb_utils.get_input_tensor_by_name(request, "SUM_IN")
                total = value if state is None else state.as_numpy().item() + value
                responses.append(self.one(request, value, total))
            {end}

        def one(self, request, value, total):
{body}
{more}
"""
CALLS = """
# 0 returns; 1 sends; 2 sends and is behind; 3 sends later; 4 never; 5 sends and returns; 6 raises; 7 releases 3's
if value % 10 == 0:
    return response(total)
if value % 10 == 6:
    raise ValueError("odd")
if value % 10 == 7:
    while self.kept:
        self.kept.pop()()
    return response(total)
sender = request.get_response_sender()
if value % 10 in (1, 2, 5):
    sender.send(response(total, *(["SUM_OUT"] if self.sums else [])), FINAL if value % 10 == 1 else 0)
if value % 10 == 3:
    self.kept.append(lambda: sender.send(response(total, *(["SUM_OUT"] if self.sums else [])), FINAL))
if value % 10 == 5:
    return response(-1)
"""
RETURNS, SENDS, LATER, NEVER, BOTH, RAISES, RELEASES = 10, 11, 13, 14, 15, 16, 17


@pytest.fixture
def workshop(workshop_of_both: Workshop) -> Workshop:
    return workshop_of_both


def config(*, states: bool = False, iterative: bool = False, ordered: bool = False, recovery: str = "") -> ModelConfig:
    made = sequence_config(
        "sole",
        "python",
        inputs=[TensorSpec("INPUT", "INT32", (1,))],
        outputs=[TensorSpec("OUTPUT", "INT32", (1,))],
        states=[StateSpec("SUM_IN", "SUM_OUT", "INT32", (1,), (1,), "")] if states else (),
        parameters={"sequence_recovery": recovery} if recovery else {},
    )
    batching = made.sequence_batching
    assert batching is not None
    if ordered:
        assert isinstance(batching.strategy, Oldest)
        batching = msgspec.structs.replace(
            batching, strategy=msgspec.structs.replace(batching.strategy, preserve_ordering=True)
        )
    return msgspec.structs.replace(made, sequence_batching=msgspec.structs.replace(batching, iterative=iterative))


def stateless() -> ModelConfig:
    return plain_config(
        "sole",
        "python",
        inputs=[TensorSpec("INPUT", "INT32", (1,))],
        outputs=[TensorSpec("OUTPUT", "INT32", (1,))],
    )


def load(
    workshop: Workshop,
    made: ModelConfig,
    body: str = CALLS,
    *,
    head: str = "def execute(self, requests):",
    end: str = "return responses",
    more: str = "",
) -> Engine:
    batching = made.sequence_batching
    sums = batching is not None and bool(batching.states)
    lines = [f"self.sums = {sums}", *body.strip().splitlines()]
    indented = "\n".join(" " * 12 + line for line in lines)
    rest = "\n".join(" " * 8 + line for line in more.strip().splitlines())
    workshop.python("sole", SOURCE.format(body=indented, more=rest, head=head, end=end))
    return workshop.load(made)


def row(value: int, *, slot: int | None = 0, start: bool = True) -> Row:
    return Row({"INPUT": wire("INPUT", [[value]], "<i4")}, slot=slot, start=start, correlation_id=(slot or 0) + 7)


def run(engine: Engine, *rows: Row, wanted: bool = True) -> Sequence[Any]:
    return engine.run(rows, [wanted] * len(rows)).rows


class Given(Recorded):
    """Where a late answer goes, and how often one came."""

    count = 0

    def send(self, answer: RowResult | RowError) -> None:
        raise AssertionError("there is one answer")

    def end(self, last: RowResult | RowError, keep_state: Callable[[], None] | None = None) -> None:
        self.count += 1
        super().end(last, keep_state)

    @classmethod
    def of(cls, result: Any, *, keeps: bool = True) -> Given:
        given = cls(keeps_state=keeps)
        assert isinstance(result.late, LateAnswer), result
        assert result.open
        result.late.give(given)
        return given

    def answer(self) -> RowResult | RowError:
        assert self.ended.wait(60)
        assert self.last is not None
        return self.last


def value_of(result: Any) -> int:
    assert isinstance(result, RowResult), result
    return int(array(result, "OUTPUT").item())


@pytest.mark.parametrize("made", [stateless(), config(), config(states=True)], ids=["stateless", "own", "declared"])
def test_rows_of_a_batch_are_returned_sent_and_sent_later(workshop: Workshop, made: ModelConfig) -> None:
    engine = load(workshop, made)

    returned, sent, later = run(engine, *(row(value, slot=i) for i, value in enumerate((RETURNS, SENDS, LATER))))
    given = Given.of(later)
    assert given.last is None
    (released,) = run(engine, row(RELEASES, slot=3))

    assert [RETURNS, SENDS, RELEASES] == [value_of(one) for one in (returned, sent, released)]
    assert LATER == value_of(given.answer())
    assert not (returned.open or sent.open)
    assert 1 == given.count


def test_what_is_sent_is_what_it_was_then_though_the_model_writes_to_its_array_again(workshop: Workshop) -> None:
    body = """
self.buffer = getattr(self, "buffer", np.zeros((1, 1), np.int32))
self.buffer[:] = value
request.get_response_sender().send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", self.buffer)]), FINAL)
"""
    engine = load(workshop, stateless(), body, end="return None")

    assert [1, 2, 3] == [value_of(one) for one in run(engine, row(1), row(2), row(3))]


def test_execute_may_return_none_for_all_of_them(workshop: Workshop) -> None:
    engine = load(workshop, stateless(), end="return None")

    sent, later, neither = run(engine, row(SENDS), row(LATER), row(RETURNS))

    assert SENDS == value_of(sent)
    assert later.open
    assert isinstance(neither, RowError)
    assert "Expected an 'InferenceResponse' object in the execute function return list" in neither.message


def test_declared_states_move_on_with_the_answer_and_an_owner_that_lost_the_row_keeps_its_own(
    workshop: Workshop,
) -> None:
    engine = load(workshop, config(states=True))
    run(engine, row(SENDS))  # 11
    first = Given.of(run(engine, row(LATER, start=False))[0])
    run(engine, row(RELEASES, slot=1))
    state = first.answer()
    second = Given.of(run(engine, row(LATER, start=False), wanted=False)[0], keeps=False)
    run(engine, row(RELEASES, slot=1))
    dropped = second.answer()

    (last,) = run(engine, row(SENDS, start=False))

    assert 24 == value_of(state)
    assert isinstance(state, RowResult)
    assert 24 == int.from_bytes(state.states["SUM_IN"].raw, "little")
    assert 37 == value_of(dropped)
    assert isinstance(dropped, RowResult)
    assert not dropped.states
    assert 35 == value_of(last)


def test_a_model_that_hands_its_state_out_is_asked_for_it_with_the_answer(workshop: Workshop) -> None:
    more = """
def checkpoint(self, correlation_id):
    return {"total": np.array([self.own.get(correlation_id, 0)])}

def restore(self, correlation_id, state):
    self.own[correlation_id] = state["total"].item()
"""
    body = "self.own[request.correlation_id()] = value\n" + CALLS
    engine = load(workshop, config(), body, more=more)

    sent, later = run(engine, row(SENDS), row(LATER, slot=1))
    given = Given.of(later)
    run(engine, row(RELEASES, slot=2))

    assert sent.model_state
    forgotten = Given.of(run(engine, row(NEVER, start=False))[0]).answer()
    assert isinstance(forgotten, RowError)
    assert forgotten.model_state not in (b"", sent.model_state)
    late = given.answer()
    assert isinstance(late, RowResult)
    assert late.model_state
    assert late.model_state != sent.model_state


def test_a_request_whose_sender_is_dropped_ends_with_an_error(workshop: Workshop) -> None:
    body = "self.kept.append(request.get_response_sender())\nif value == 2:\n    self.kept.clear()"
    engine = load(workshop, stateless(), body)

    held = Given.of(run(engine, row(1))[0])
    assert held.last is None
    dropped = Given.of(run(engine, row(2))[0])

    for failed in (held.answer(), dropped.answer()):
        assert isinstance(failed, RowError)
        assert UNANSWERED == failed.message


def test_what_is_sent_goes_before_what_is_returned_and_the_log_says_so(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(workshop, stateless())

    with caplog.at_level(logging.ERROR):
        both, neighbour = run(engine, row(BOTH), row(RETURNS))

    assert [BOTH, RETURNS] == [value_of(both), value_of(neighbour)]
    if not isinstance(engine, ProcessEngine):
        assert SECOND in caplog.text


def test_the_log_has_an_error_of_execute_that_comes_behind_the_answer(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    body = "request.get_response_sender().send(response(value), FINAL)\nraise ValueError('behind')"
    engine = load(workshop, stateless(), body)

    (sent,) = run(engine, row(1))

    assert 1 == value_of(sent)
    if not isinstance(engine, ProcessEngine):
        assert "ValueError: behind" in caplog.text


@pytest.mark.parametrize("made", [stateless(), config(), config(states=True)], ids=["stateless", "own", "declared"])
def test_when_execute_raises_what_was_sent_stands_and_the_others_are_as_without_senders(
    workshop: Workshop, made: ModelConfig
) -> None:
    engine = load(workshop, made)

    sent, returned, raised = run(engine, *(row(v, slot=i) for i, v in enumerate((SENDS, RETURNS, RAISES))))

    assert SENDS == value_of(sent)
    assert isinstance(raised, RowError)
    assert "odd" in raised.message
    if made.sequence_batching is None or made.sequence_batching.states:
        assert RETURNS == value_of(returned)
    else:
        assert isinstance(returned, RowError)


@pytest.mark.parametrize(
    ("before", "call", "message"),
    [
        ("", "send(flags=FINAL)", TOO_EARLY),
        ("sender.send(response(1))", "send(response(2))", SECOND),
        ("sender.send(response(1), FINAL)", "send(response(2), FINAL)", SECOND),
        ("sender.send(response(1)); sender.send(flags=FINAL)", "send(flags=FINAL)", CLOSED),
        ("", "send(response(2), 7)", "Unable to send response. Unsupported flag provided."),
        ("", "send()", "Inference Response object must be provided when the response flags is set to zero."),
        ("", "send('text')", "Unable to send response. Expected an InferenceResponse, got str."),
    ],
)
@pytest.mark.parametrize("workshop_of_both", ["thread"], indirect=True)
def test_a_sender_refuses_in_triton_s_words(workshop: Workshop, before: str, call: str, message: str) -> None:
    body = f"sender = request.get_response_sender()\n{before}\nsender.{call}"
    engine = load(workshop, stateless(), body)

    (one,) = run(engine, row(5))

    if before:
        assert 1 == value_of(one)
    else:
        assert isinstance(one, RowError)
        assert message in one.message


@pytest.mark.parametrize("workshop_of_both", ["thread"], indirect=True)
def test_a_sender_is_closed_by_what_is_returned_or_raised(workshop: Workshop) -> None:
    body = """
if value == 9:
    said = []
    for sender, response_of in self.kept:
        try:
            sender.send(response_of)
        except pb_utils.TritonModelException as refused:
            said.append(str(refused))
    raise ValueError("; ".join(said))
self.kept.append((request.get_response_sender(), response(0)))
if value == 2:
    raise ValueError("odd")
return response(value)
"""
    engine = load(workshop, stateless(), body)
    run(engine, row(1))
    run(engine, row(2))

    (said,) = run(engine, row(9))

    assert isinstance(said, RowError)
    assert f"{SECOND}; {CLOSED}" in said.message


def test_a_model_sees_that_nobody_waits_for_an_open_request(workshop: Workshop) -> None:
    body = """
sender = request.get_response_sender()
def wait():
    while not (sender.is_cancelled() and request.is_cancelled()):
        time.sleep(0.001)
    sender.send(response(value), FINAL)
threading.Thread(target=wait).start()
"""
    engine = load(workshop, stateless(), body)
    given = Given.of(run(engine, row(1))[0])
    assert given.last is None

    given.is_cancelled = True

    assert 1 == value_of(given.answer())


def test_a_model_sees_in_execute_that_nobody_waits(workshop: Workshop) -> None:
    body = """
sender = request.get_response_sender()
while not (sender.is_cancelled() and request.is_cancelled()):
    time.sleep(0.001)
sender.send(response(value), FINAL)
"""
    engine = load(workshop, stateless(), body)
    one = row(1)

    with nobody_waits(engine, one):
        (result,) = run(engine, one)

    assert 1 == value_of(result)


def test_a_model_sees_that_nobody_waits_where_its_instance_waits_for_it_to_keep_the_order(workshop: Workshop) -> None:
    body = """
sender = request.get_response_sender()
def wait():
    self.returned.wait()
    while not sender.is_cancelled():
        time.sleep(0.001)
    sender.send(response(value), FINAL)
threading.Thread(target=wait).start()
self.returned.set()
"""
    engine = load(workshop, config(ordered=True), body)
    one = row(1)

    with nobody_waits(engine, one):
        (result,) = run(engine, one)

    assert 1 == value_of(result)


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
@pytest.mark.parametrize("later", [False, True])
def test_a_process_keeps_that_nobody_waits_for_a_row_until_its_batch_comes(workshop: Workshop, *, later: bool) -> None:
    """Whether the model looks in `execute` or behind it."""
    body = """
sender = request.get_response_sender()
def wait():
    while not sender.is_cancelled():
        time.sleep(0.001)
    sender.send(response(value), FINAL)
"""
    engine = load(workshop, stateless(), body + ("threading.Thread(target=wait).start()" if later else "wait()"))
    nobody_waits_for_the_next_one(engine)

    (result,) = run(engine, row(1))

    # Even a thread may be through before `execute` has returned.
    assert 1 == value_of(Given.of(result).answer() if later and result.open else result)


def test_coroutines_that_execute_leaves_behind_answer_beside_the_next_batches(workshop: Workshop) -> None:
    body = """
if value == 2:
    self.gate.set()
    return response(value)
self.gate = asyncio.Event()
sender = request.get_response_sender()
async def answer():
    await self.gate.wait()
    sender.send(response(value), FINAL)
self.kept.append(asyncio.get_running_loop().create_task(answer()))
"""
    engine = load(workshop, stateless(), body, head="async def execute(self, requests):")

    given = Given.of(run(engine, row(1))[0])
    (second,) = run(engine, row(2))

    assert 2 == value_of(second)
    assert 1 == value_of(given.answer())


def test_a_sent_response_ends_an_iterative_request_and_a_pass_closes_its_sender(workshop: Workshop) -> None:
    body = """
if value == 3:
    request.get_response_sender().send(response(total), FINAL)
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    return None
if not self.kept:
    self.kept.append(request.get_response_sender())
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    return None
try:
    self.kept[0].send(response(-1), FINAL)
except pb_utils.TritonModelException as refused:
    request.get_response_sender().send(response(total))
"""
    engine = load(workshop, config(iterative=True), body)

    (sent,) = run(engine, row(3))
    (again,) = run(engine, row(4))
    (answered,) = run(engine, row(4, start=False))

    assert (3, False) == (value_of(sent), sent.again)
    assert again.again
    assert 4 == value_of(answered)


def test_where_order_is_preserved_the_instance_waits_for_its_late_answers(workshop: Workshop) -> None:
    body = """
sender = request.get_response_sender()
threading.Thread(target=lambda: (self.returned.wait(), time.sleep(0.05), sender.send(response(value), FINAL))).start()
self.returned.set()
"""
    engine = load(workshop, config(ordered=True), body)

    (one,) = run(engine, row(1))

    assert 1 == value_of(one)


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
def test_a_state_that_moved_on_with_a_late_answer_outlives_a_batch_that_cannot_be_sent(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(workshop, config(states=True))
    given = Given.of(run(engine, row(LATER))[0])
    run(engine, row(RELEASES, slot=1))
    given.answer()

    with monkeypatch.context() as without_memory:
        without_memory.setattr(instance_process.messages, "encode", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            run(engine, row(RETURNS, slot=2))

    assert LATER + SENDS == value_of(run(engine, row(SENDS, start=False))[0])


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
def test_a_request_that_was_given_up_does_not_run_again_over_the_next_sequence_of_its_slot(workshop: Workshop) -> None:
    once = workshop.directory / "once"
    body = f"""
import os
sender = request.get_response_sender()
if value == 100 and not os.path.exists({str(once)!r}):
    open({str(once)!r}, "w").close()
    self.kept.append(sender)
else:
    sender.send(response(total, "SUM_OUT"), FINAL)
"""
    engine, posted = load(workshop, config(states=True), body), list[Callable[[], None]]()
    assert isinstance(engine, ProcessEngine)
    engine.run_again_on(posted.append)
    (left,) = run(engine, row(100))
    left.late.give_up()
    run(engine, row(1))
    assert engine._process.now is not None
    os.kill(engine._process.now.pid, signal.SIGKILL)

    run(engine, row(5, slot=1))
    for call in posted:
        call()

    assert 3 == value_of(run(engine, row(2, start=False))[0])


@pytest.mark.starts_processes
@pytest.mark.parametrize("workshop_of_both", ["process"], indirect=True)
@pytest.mark.parametrize("kind", ["stateless", "declared", "replayed"])
async def test_open_requests_are_answered_once_though_their_process_is_killed(workshop: Workshop, kind: str) -> None:
    made = {"stateless": stateless(), "declared": config(states=True), "replayed": config(recovery="replay")}[kind]
    own = "self.own[request.correlation_id()] = total = self.own.get(request.correlation_id(), 0) + value\n"
    engine = load(workshop, made, (own if kind == "replayed" else "") + CALLS)
    assert isinstance(engine, ProcessEngine)
    worker = EngineWorker(engine, "sole", "sole 0", InstanceIndex(0))
    slot = None if kind == "stateless" else 1

    async def ran(*rows: Row) -> BatchResult:
        return await worker.run(rows, [True] * len(rows))

    first = Given.of((await ran(row(LATER, slot=slot))).rows[0])
    for _ in range(2):
        assert engine._process.now is not None
        os.kill(engine._process.now.pid, signal.SIGKILL)
        # The batch notices it, and what it finds open runs again behind it.
        await ran(row(RETURNS, slot=None if slot is None else 0))
        assert first.last is None
    while not first.ended.is_set():
        await ran(row(RELEASES, slot=None if slot is None else 0))
    second = Given.of((await ran(row(LATER, slot=slot, start=False))).rows[0])
    while not second.ended.is_set():
        await ran(row(RELEASES, slot=None if slot is None else 0))

    assert LATER == value_of(first.answer())
    assert (LATER if kind == "stateless" else 2 * LATER) == value_of(second.answer())
    assert [1, 1] == [first.count, second.count]
    await worker.close()
    workshop.engines.clear()

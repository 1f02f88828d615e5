"""Requests to ensembles: what a gateway holds for one, and how long."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.bounds.unread_answers import UNLIMITED, UnreadAnswers
from gateway.requests.admission import IMPLICIT, Admitted, admit, session_number
from gateway.requests.caller import Caller
from gateway.requests.ensembles import runs
from gateway.requests.ensembles.requests import Ensembles
from gateway.requests.ensembles.runs import EnsembleServices, SendRequest
from gateway.requests.infer_call import InferCall
from gateway.requests.measures import Measures
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.waiting import Accepted, Answer, PendingRequest
from shared.contract.errors import MeshError, ModelError, Reason, RequestError, SequenceError, UnavailableError
from shared.contract.ids import CorrelationId, sequence_id
from shared.contract.messages import ModelRecord, ReplyMessage
from shared.contract.model_config import ControlKind, ControlSpec
from shared.contract.record import ENDED
from shared.contract.tensors import Tensor
from shared.statistics.meter import REQUEST_TIME
from shared.statistics.metrics_config import FIRST_RESPONSE_BUCKETS_MS, MetricsConfig
from shared.statistics.tally import ModelLoad, first_response_of, sketch_of, unpacked
from shared.store.script_values import Ending
from shared.traces.context import sequence_root_id
from shared.traces.spans import FinishedSpan, SpanSink
from shared.traces.tracing import Tracing
from tests.gateway.requests.ensembles.test_progress import MODELS, STATEFUL, model, step
from tests.shared.traces.test_tracing import Kept

pytestmark = pytest.mark.unit


class Raw(bytes):
    """A tensor's bytes, which say when they go."""

    gone: list[bytes]

    def __del__(self) -> None:
        self.gone.append(bytes(self))


def found(name: str, _: str) -> tuple[ModelRecord, str]:
    return MODELS[name], "1"


def not_counted(*_: object) -> None:
    return


def ensembles_of(
    send: SendRequest,
    sink: SpanSink | None = None,
    measures: Measures | None = None,
    *,
    count: Any = not_counted,
    end: Any = not_counted,
    withdraw: Any = not_counted,
    catalog: Any = None,
) -> Ensembles:
    """Ensembles whose steps go to `send`, what is counted of their requests to `count`, what ends to `end`, and steps
    that are taken back to `withdraw`."""
    catalog = catalog or SimpleNamespace(offer=object(), find=found)
    notices = cast(Any, SimpleNamespace(count=count, end=end))
    replies = cast(Any, SimpleNamespace(has_given_up=False))
    dispatch = cast(Any, SimpleNamespace(withdraw=withdraw))
    services = EnsembleServices(dispatch, replies, notices, send, lambda _size, _client: None)
    measures = measures or Measures(MetricsConfig())
    return Ensembles(catalog, services, Tracing(sink), UnreadAnswers(UNLIMITED), measures)


def asked(ensembles: Ensembles, of: ModelRecord, call: InferCall) -> asyncio.Future[Answer]:
    """The answer to a request, which is begun."""
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    ensembles.begin(call, Caller(answer, None, None), of, "1", ConnectionSequences(lambda _: None))
    return answer


def answer_of(record: ModelRecord) -> Answer:
    """What a step of this model has answered."""
    return Answer(ReplyMessage("1", (Tensor("O", "INT8", (1, 1), b"1"),)), record, "1", "", None)


TWO_STATES = model("e", steps=(step("state", "I", "a"), step("state", "a", "O")))


class Sent:
    """The steps that are sent in place of the mesh, for the test to answer."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def __call__(self, call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        admitted = admit(call, record, version, arrived_ns=1, make_session=list[str]().pop)
        self.steps.append(SimpleNamespace(call=call, future=caller.future, admitted=admitted, accepted=None))
        return self.steps[-1]


class Chain:
    """A request to an ensemble of three steps, one behind the other, which the test answers. `gone`: tensors that
    nobody holds any more
    """

    def __init__(self) -> None:
        Raw.gone = self.gone = []
        self.open: list[asyncio.Future[Answer]] = []
        steps = (step("plain", "I", "a"), step("plain", "a", "b"), step("plain", "b", "O"))
        call = InferCall("e", "", inputs=(self.tensor("I", b"given"),))
        self.answer = asked(ensembles_of(self.send), model("e", steps=steps), call)

    def tensor(self, name: str, raw: bytes) -> Tensor:
        return Tensor(name, "INT8", (1, 1), Raw(raw[:1]))

    def send(self, call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        self.open.append(caller.future)
        return cast(Any, SimpleNamespace(call=call, future=caller.future))

    async def answered(self, raw: bytes) -> None:
        message = ReplyMessage("1", (self.tensor("O", raw),))
        self.open.pop().set_result(Answer(message, MODELS["plain"], "1", "", None))
        del message
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """What goes, goes by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_a_tensor_goes_when_no_step_needs_it_any_more() -> None:
    chain = Chain()
    await chain.answered(b"a")
    assert [] == chain.gone, "the second step has the first one's tensor"
    await chain.answered(b"b")
    assert b"a" in chain.gone


async def test_everything_goes_with_the_request() -> None:
    chain = Chain()
    for raw in (b"a", b"b", b"O"):
        await chain.answered(raw)
    assert b"O" == chain.answer.result().message.outputs[0].raw
    del chain.answer

    assert {b"g", b"a", b"b", b"O"} == {*chain.gone}


async def test_everything_goes_with_a_request_that_fails() -> None:
    chain = Chain()
    await chain.answered(b"a")
    chain.open.pop().set_exception(ModelError("no"))
    await asyncio.sleep(0)
    assert isinstance(chain.answer.exception(), ModelError)
    del chain.answer

    assert {b"g", b"a"} == {*chain.gone}


class OneState:
    """A request to an ensemble of one step, which keeps state. It was accepted as given, and is answered.

    spans   of the request, by name
    counts  what was counted of it
    sent    how often its step was sent
    """

    def __init__(self, call: InferCall, accepted: Accepted | None, measures: Measures | None = None) -> None:
        self.accepted = accepted
        self.counts: dict[str, int] = {}
        self.sent = 0
        sink = Kept()
        self.ensembles = ensembles_of(self.send, sink, measures, count=self.count)
        self.answer = asked(self.ensembles, model("e", steps=(step("state", "I", "O"),)), call)
        self.sink = sink

    def send(self, call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        if self.accepted is None:
            raise ZeroDivisionError
        self.sent += 1
        caller.future.set_result(answer_of(record))
        admitted = admit(call, record, version, arrived_ns=1, make_session=list[str]().pop)
        made = SimpleNamespace(
            call=call, future=caller.future, accepted=self.accepted, admitted=admitted, repeatable=bool(call.request_id)
        )
        return cast(Any, made)

    def count(self, _: ModelLoad, counts: bytes) -> None:
        self.counts |= unpacked(counts)

    async def spans(self) -> dict[str, FinishedSpan]:
        await self.answer
        return {span.name: span for span in self.sink.spans}


def begun(*, end: bool = False) -> InferCall:
    given = Tensor("I", "INT8", (1, 1), b"1")
    return InferCall("e", "", correlation_id=1, start=True, end=end, inputs=(given,))


async def test_a_defect_while_a_step_is_sent_is_its_requests_error_and_holds_nobody_up() -> None:
    request = OneState(begun(), None)
    with pytest.raises(MeshError, match="internal error in the gateway: ZeroDivisionError"):
        await request.answer

    assert 0 == len(request.ensembles.lines)


async def test_a_step_that_was_answered_before_its_sequence_began_anew_is_no_step_of_the_new_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gateway sends it again, because it has lost the connection; a START came through another one meanwhile."""
    monkeypatch.setattr(runs, "STAND_PATIENCE_S", 0.0)
    named = msgspec.structs.replace(begun(), start=False, request_id="second")
    request = OneState(named, Accepted(step=2, run="", repeated=True))

    with pytest.raises(SequenceError, match="was answered, and the sequence has begun anew since") as told:
        await asyncio.wait_for(request.answer, 30)
    assert (Reason.ANSWERED, 1) == (told.value.reason, request.sent)
    assert 0 == len(request.ensembles.lines)


@pytest.mark.parametrize(("session", "known_as"), [("7", 7), ("007", 7), ("ada", session_number("ada"))])
async def test_a_session_names_the_sequence_of_an_anchor_with_integer_ids(
    monkeypatch: pytest.MonkeyPatch, session: str, known_as: int
) -> None:
    config = MODELS["state"].config
    control = ControlSpec("ID", ControlKind.CORRID, "UINT64")
    batching = msgspec.structs.replace(STATEFUL, controls=(control,))
    record = ModelRecord(msgspec.structs.replace(config, sequence_batching=batching), "{}", ("1",))
    monkeypatch.setitem(MODELS, "state", record)
    sent = Sent()
    call = InferCall("e", "", session_id=session, inputs=begun().inputs)
    asked(ensembles_of(sent), model("e", steps=(step("state", "I", "O"),)), call)

    (step_of_anchor,) = sent.steps
    assert known_as == step_of_anchor.admitted.message.correlation_id
    assert IMPLICIT & step_of_anchor.admitted.flags


@pytest.mark.parametrize(("session", "known_as"), [("7", {7}), ("ada", {session_number("ada")}), (None, None)])
async def test_states_have_an_integer_id_where_one_behind_the_first_needs_it(
    monkeypatch: pytest.MonkeyPatch, session: str | None, known_as: set[int] | None
) -> None:
    """Whether the client names a session, or the gateway makes an id."""
    config = MODELS["state"].config
    dialect = msgspec.structs.replace(STATEFUL, implicit_start=True)
    numbered = msgspec.structs.replace(dialect, controls=(ControlSpec("ID", ControlKind.CORRID, "UINT64"),))
    for name, batching in (("state", dialect), ("numbered", numbered)):
        changed = msgspec.structs.replace(config, name=name, sequence_batching=batching)
        monkeypatch.setitem(MODELS, name, ModelRecord(changed, "{}", ("1",)))
    sent: list[Admitted] = []

    def send(call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        admitted = admit(call, record, version, arrived_ns=1, make_session=list[str]().pop)
        sent.append(admitted)
        caller.future.set_result(answer_of(record))
        accepted = Accepted("1-0", 1, "1-0.1", at_ns=1)
        return cast(Any, SimpleNamespace(call=call, future=caller.future, accepted=accepted, admitted=admitted))

    call = InferCall("e", "", session_id=session, inputs=begun().inputs)
    of = model("e", steps=(step("state", "I", "a"), step("numbered", "a", "O")))
    async with asyncio.timeout(30):
        told = (await asked(ensembles_of(send), of, call)).session_id

    ids = {each.message.correlation_id for each in sent}
    assert ["state", "numbered"] == [each.message.model for each in sent]
    assert (known_as or {int(told or "")}) == ids
    assert IMPLICIT & sent[0].flags


@pytest.mark.parametrize(
    ("needed", "refused", "taken"), [("UINT64", "ada", 7), ("BYTES", 7, "ada")], ids=["integer", "text"]
)
async def test_an_id_that_a_later_state_does_not_take_is_refused_before_any_state_has_done_the_step(
    monkeypatch: pytest.MonkeyPatch, needed: str, refused: CorrelationId, taken: CorrelationId
) -> None:
    """Else the first state would have done it alone, and the sequence would be over."""
    needs = msgspec.structs.replace(STATEFUL, controls=(ControlSpec("ID", ControlKind.CORRID, needed),))
    config = msgspec.structs.replace(MODELS["state"].config, name="needs", sequence_batching=needs)
    monkeypatch.setitem(MODELS, "needs", ModelRecord(config, "{}", ("1",)))
    sent = Sent()
    ensembles, of = ensembles_of(sent), model("e", steps=(step("state", "I", "a"), step("needs", "a", "O")))

    with pytest.raises(RequestError, match=f"in ensemble 'e'.*model 'needs' expects '{needed}'"):
        asked(ensembles, of, msgspec.structs.replace(begun(), correlation_id=refused))
    assert ([], 0) == (sent.steps, len(ensembles.lines))

    asked(ensembles, of, msgspec.structs.replace(begun(), correlation_id=taken))
    assert [("state", taken)] == [(one.call.model, one.call.correlation_id) for one in sent.steps]


async def test_a_first_state_that_fails_before_its_acceptance_is_told_ends_the_run_at_once() -> None:
    """What Redis says of the step may come later than its answer. Its sequence has counted the step, and the others
    have not: the next step would wait for them in vain."""
    sent, ended = Sent(), list[Ending]()

    def end(ending: Ending, tombstone: bytes) -> None:
        ended.append(ending)

    answer = asked(ensembles_of(sent, end=end), TWO_STATES, begun())
    failure = ModelError("it broke")
    failure.accepted = True
    sent.steps[0].future.set_exception(failure)
    await asyncio.sleep(0)
    sent.steps[0].accepted = Accepted("1-0", 1, "1-0.1")

    with pytest.raises(SequenceError, match="the sequence is over"):
        await asyncio.wait_for(answer, 30)
    assert {sequence_id("state", "@e//0", 1), sequence_id("state", "@e//1#1-0.1", 1)} == {one.sequence for one in ended}


async def test_a_state_that_is_refused_for_the_moment_is_asked_again_for_the_same_step() -> None:
    sent = Sent()
    answer = asked(ensembles_of(sent), TWO_STATES, begun())
    first, *_ = sent.steps
    first.accepted = Accepted("1-0", 1, "1-0.1")
    first.future.set_result(answer_of(MODELS["state"]))
    await asyncio.sleep(0)
    sent.steps[1].future.set_exception(UnavailableError("full"))
    async with asyncio.timeout(30):
        while len(sent.steps) < 3:
            await asyncio.sleep(0)
    sent.steps[2].future.set_result(answer_of(MODELS["state"]))

    assert (await answer).message.step == 1
    _, refused, again = [one.call for one in sent.steps]
    assert refused == again


@pytest.mark.parametrize("accepted", [None, Accepted("1-0", 1, "1-0.1")], ids=["on its way", "accepted"])
async def test_a_state_s_step_is_taken_back_when_redis_has_it(accepted: Accepted | None) -> None:
    """On its way, it is taken back by whoever hears that Redis has accepted it. Its answer tells whether it ran."""
    sent, withdrawn = Sent(), list[Any]()
    ensembles = ensembles_of(sent, withdraw=withdrawn.append)
    caller = Caller(asyncio.get_running_loop().create_future(), None, None)
    request = ensembles.begin(begun(), caller, TWO_STATES, "1", ConnectionSequences(lambda _: None))
    (step_of_anchor,) = sent.steps
    step_of_anchor.sent, step_of_anchor.accepted = 1.0, accepted
    request.left()

    assert step_of_anchor.withdrawn
    assert ([step_of_anchor] if accepted else []) == withdrawn
    assert not step_of_anchor.future.done()


async def test_a_start_that_cuts_off_a_run_ends_its_followers_when_no_request_is_ahead_any_more() -> None:
    """The requests ahead are of the run that is cut off: their steps of the followers are run before."""
    sent, ended = Sent(), list[tuple[Ending, bytes]]()

    async def answer_next(accepted: Accepted) -> None:
        one = sent.steps.pop(0)
        one.accepted = accepted
        one.future.set_result(answer_of(MODELS["state"]))
        await asyncio.sleep(0)

    def end(ending: Ending, tombstone: bytes) -> None:
        ended.append((ending, tombstone))

    ensembles = ensembles_of(sent, end=end)
    for call in (msgspec.structs.replace(begun(), start=False), begun()):
        asked(ensembles, TWO_STATES, call)
    last, start = Accepted("1-0", 2, "1-0.1"), Accepted("1-0", 3, "1-0.3", cut_off="1-0.1")

    await answer_next(last)
    await answer_next(start)
    assert [] == ended, "the request ahead has not done its step of the follower"
    await answer_next(last)

    assert [(Ending(sequence_id("state", "@e//1#1-0.1", 1), ""), ENDED)] == ended


async def test_when_a_model_changes_nothing_is_kept_of_ensembles_that_are_gone() -> None:
    """Neither their plans nor the models as they were: a mesh may see any number of them."""

    class Offer:
        pass

    catalog = cast(Any, SimpleNamespace(offer=Offer(), find=found))
    before = weakref.ref(catalog.offer)

    ensembles = ensembles_of(Sent(), catalog=catalog)

    def ask(name: str) -> None:
        asked(ensembles, model(name, steps=(step("plain", "I", "O"),)), InferCall(name, "", inputs=begun().inputs))

    ask("first")
    catalog.offer = Offer()
    ask("second")

    assert before() is None
    assert [("second", "1")] == list(ensembles._plans)


async def test_a_requested_version_is_read_as_a_number() -> None:
    """Requests that write it otherwise are steps of the same sequence, one behind the other."""
    sent = Sent()
    ensembles, of = ensembles_of(sent), model("e", steps=(step("state", "I", "O"),))
    for version in ("1", "01"):
        asked(ensembles, of, msgspec.structs.replace(begun(), version=version))

    first, second = sent.steps
    assert first.admitted.sequence == second.admitted.sequence
    assert 1 == len(ensembles.lines)


ROOT = sequence_root_id(sequence_id("e", "", 1))
ACCEPTED_NS = 1 << 62
"""Behind every arrival."""


async def test_the_begin_of_a_sequence_is_recorded_when_its_anchor_is_accepted() -> None:
    first = await OneState(begun(), Accepted("1-0", 1, "1-0.1", at_ns=ACCEPTED_NS)).spans()
    again = await OneState(begun(), Accepted("1-0", 5, "1-0.5", at_ns=ACCEPTED_NS)).spans()

    start, later = first["sequence.start"], again["sequence.start"]
    assert (ROOT, 0, ACCEPTED_NS) == (start.span_id, start.parent_id, start.end_ns)
    assert ROOT != later.span_id
    assert ROOT == later.parent_id
    assert 5 == again["step"].attributes["seqmesh.step"]


async def test_a_repeated_step_records_no_begin_and_no_end_again() -> None:
    accepted = Accepted(step=1, run="1-0.1", repeated=True, at_ns=ACCEPTED_NS)

    assert {"step"} == {*await OneState(begun(end=True), accepted).spans()}


async def test_the_end_of_a_sequence_is_recorded() -> None:
    spans = await OneState(begun(end=True), Accepted("1-0", 1, "1-0.1", at_ns=ACCEPTED_NS)).spans()

    assert {"sequence.start", "step", "sequence.end"} == {*spans}
    assert ROOT == spans["sequence.end"].parent_id
    assert sequence_id("e", "", 1) == spans["sequence.end"].attributes["seqmesh.sequence"]


async def test_times_are_measured_as_those_of_plain_requests() -> None:
    measures = Measures(MetricsConfig(summary_latencies=True, histogram_latencies=True))
    request = OneState(begun(), Accepted("1-0", 1, "1-0.1", at_ns=ACCEPTED_NS), measures)
    await request.answer

    assert 1 == sum(sketch_of(request.counts, "request").values())
    assert 1 == sum(first_response_of(request.counts, len(FIRST_RESPONSE_BUCKETS_MS) + 1)[0])
    (_, _), (load, meter) = measures.meters()
    assert "e" == load.model
    measured = meter.take()
    assert 1 == sum(by for name, by in measured.items() if name.startswith(f"{REQUEST_TIME}:") and "sum" not in name)

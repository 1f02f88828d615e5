"""Carries requests to ensembles through: sends what `progress` decides, and tells it what came of it.

Everything happens in callbacks of futures, without a task of its own: the first stateful step of a request is queued
for Redis before `begin` returns, if it needs no other step, so the order of requests is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from gateway.models.catalog import Catalog, CatalogView
from gateway.requests.admission import (
    EnsemblePart,
    InferCall,
    Parameter,
    check_inputs,
    check_outputs,
    named_sequence,
)
from gateway.requests.dispatch import Dispatch
from gateway.requests.ensembles.lines import LinePlace, StepLines
from gateway.requests.ensembles.notices import EnsembleNotices
from gateway.requests.ensembles.plan import EnsemblePlan, PlannedStep, plan_of
from gateway.requests.ensembles.progress import (
    AbandonRun,
    AnswerRequest,
    EnsembleAction,
    EnsembleProgress,
    FailRequest,
    HeldTensor,
    SendAgain,
    SendStep,
    Stand,
    WithdrawStep,
)
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.replies import Replies, unknown_outcome
from gateway.requests.sessions import new_session
from gateway.requests.waiting import Answer, PendingRequest
from shared.contract.errors import Code, MeshError
from shared.contract.ids import CorrelationId, sequence_id
from shared.contract.messages import ModelRecord, ReplyMessage, StepFlag
from shared.contract.step_digest import step_digest
from shared.contract.tensors import Tensor
from shared.statistics.tally import Compute, FailureReason, ModelLoad, execution, failure, packed, success
from shared.store.scripts import Ending
from shared.traces.tracing import StepSpan, Tracing

STAND_POLL_S = 0.01
STAND_PATIENCE_S = 2.0
"""How long an answered anchor waits for what Redis said when it accepted the step: that comes over another connection.
"""


class SendsRequests(Protocol):
    """Sends a request to a model that is no ensemble (`gateway.requests.inference`)."""

    def __call__(
        self,
        call: InferCall,
        record: ModelRecord,
        version: str,
        future: asyncio.Future[Answer],
        connection: ConnectionSequences | None,
    ) -> PendingRequest:
        """Queues it. Raises MeshError when it is refused at once."""
        ...


class Ensembles:
    """The requests to ensembles of one gateway.

    send   sends the request of a step
    hold   counts bytes of tensors that this gateway holds between steps, negative ones when they are given back
    """

    def __init__(
        self,
        catalog: Catalog,
        dispatch: Dispatch,
        replies: Replies,
        tracing: Tracing,
        notices: EnsembleNotices,
        *,
        send: SendsRequests,
        hold: Callable[[int], None],
    ) -> None:
        self._catalog = catalog
        self.dispatch = dispatch
        self.replies = replies
        self.tracing = tracing
        self.notices = notices
        self.send = send
        self.hold = hold
        self.lines = StepLines()
        self._plans: dict[tuple[str, str], tuple[CatalogView, EnsemblePlan]] = {}

    def begin(
        self,
        call: InferCall,
        record: ModelRecord,
        version: str,
        future: asyncio.Future[Answer],
        connection: ConnectionSequences,
    ) -> Callable[[], None]:
        """Begins a request; the future gets its answer or its error. Returns what to call when the client has left.

        Raises MeshError when the request does not fit the ensemble.
        """
        check_outputs(call, record.config)
        check_inputs(call, record.config)
        request = EnsembleRequest(self, call, self._plan(record, version), future, connection)
        request.begin()
        return request.left

    def _plan(self, record: ModelRecord, version: str) -> EnsemblePlan:
        """The plan, made once for each view of the mesh."""
        name, view = (record.config.name, version), self._catalog.view
        known = self._plans.get(name)
        if known is None or known[0] is not view:
            known = self._plans[name] = view, plan_of(record, version, self._catalog.find)
        return known[1]


class EnsembleRequest:
    """One request to an ensemble, until its last step is answered. Its client may have left before."""

    def __init__(
        self,
        ensembles: Ensembles,
        call: InferCall,
        plan: EnsemblePlan,
        future: asyncio.Future[Answer],
        connection: ConnectionSequences,
    ) -> None:
        self._of = ensembles
        self._call = call
        self._plan = plan
        self._future = future
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._correlation_id, self._made = self._sequence()
        batched = plan.record.config.max_batch_size > 0
        inputs = {
            tensor.name: HeldTensor(tensor, tensor.shape[0] if batched and tensor.shape else 0)
            for tensor in call.inputs
        }
        self._rows = max((held.rows for held in inputs.values()), default=1)
        self._progress = EnsembleProgress(plan, inputs, call.outputs, is_named=self._is_named)
        self._pending: dict[int, PendingRequest] = {}
        self._stand: Stand | None = None
        self._is_over = False
        self._arrived_ns = time.time_ns()
        self._span: StepSpan = ensembles.tracing.begin_step(
            None,
            call.model,
            start=False,
            trace_headers=call.trace_headers,
            arrived_ns=self._arrived_ns,
            endpoint=call.endpoint,
        )
        self._line = (call.model, call.version, self._correlation_id)
        self._place: LinePlace | None = ensembles.lines.join(self._line) if plan.stateful else None

    def begin(self) -> None:
        self._perform(self._progress.begin())

    def left(self) -> None:
        """The client has left before its answer."""
        if not self._is_over:
            self._perform(self._progress.left())

    @property
    def _is_named(self) -> bool:
        return bool(self._call.request_id) or self._call.expected_step is not None

    def _sequence(self) -> tuple[CorrelationId, int | str | None]:
        """The correlation id of the request's sequences, and the same if it is made here because the client named none
        (see `admission`).
        """
        if self._plan.anchor is None:
            return self._call.correlation_id, None
        config = self._plan.steps[self._plan.anchor].config
        named = named_sequence(self._call, config)
        if named or config.sequence_batching is None or not config.sequence_batching.implicit_start:
            return named, None
        made = new_session(config)
        return made, made

    # -- actions ----------------------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[EnsembleAction]) -> None:
        for action in actions:
            match action:
                case SendStep():
                    self._send_in_line(action)
                case SendAgain(index, pause_ms):
                    self._loop.call_later(pause_ms / 1000, self._send_again, index)
                case WithdrawStep(index):
                    self._withdraw(index)
                case AbandonRun(stand):
                    self._abandon(stand)
                case AnswerRequest(outputs):
                    self._answer(outputs)
                case FailRequest(error):
                    self._fail(error)

    def _send_in_line(self, step: SendStep) -> None:
        if self._place is not None and step.index in self._plan.stateful:
            self._place.take(step.index, partial(self._send, step))
        else:
            self._send(step)

    def _send_again(self, index: int) -> None:
        for action in self._progress.again(index):
            # In the order of turns already: it was sent once.
            assert isinstance(action, SendStep), "a pause ends with the same request"
            self._send(action)

    def _send(self, step: SendStep) -> None:
        planned = self._plan.steps[step.index]
        future: asyncio.Future[Answer] = self._loop.create_future()
        size = sum(len(tensor.raw) for tensor in step.inputs)
        self._of.hold(size)
        future.add_done_callback(lambda _: self._of.hold(-size))
        future.add_done_callback(partial(self._done, step.index))
        try:
            self._pending[step.index] = self._of.send(
                self._inner_call(planned, step), planned.record, planned.version, future, self._connection
            )
        except MeshError as error:
            future.set_exception(error.released())

    def _inner_call(self, planned: PlannedStep, step: SendStep) -> InferCall:
        """The request of a step, with the flags, id, priority, timeout and parameters of the whole request."""
        call = self._call
        request = InferCall(
            planned.config.name,
            planned.requested,
            request_id=call.request_id,
            start=call.start,
            end=call.end,
            priority=call.priority,
            timeout_us=call.timeout_us,
            inputs=step.inputs,
            outputs=step.outputs,
            parameters=call.parameters,
            trace_headers={"traceparent": self._span.traceparent} if self._span.traceparent else call.trace_headers,
            origin=call.origin.within(str(step.index)) if call.origin is not None else None,
            # Admission has walked the client's, and an executor's are right.
            string_problems={tensor.name: "" for tensor in step.inputs},
        )
        if step.index not in self._plan.stateful:
            # A request of an iterative model is a sequence of its own, whatever sequence the client has.
            own = planned.config.sequence_batching is not None
            return msgspec.structs.replace(request, correlation_id=0 if own else self._correlation_id)
        start = call.start or self._made is not None if step.stand is None else step.stand.step == 1
        return msgspec.structs.replace(
            request,
            correlation_id=self._correlation_id,
            start=start,
            expected_step=call.expected_step if step.stand is None else step.stand.step,
            session_id=call.session_id if step.stand is None else None,
            part=self._part(planned, step.stand),
        )

    def _part(self, planned: PlannedStep, stand: Stand | None) -> EnsemblePart:
        """The name of a stateful step's sequence, and the name of this very step.

        stand  of a follower: its sequence is the run's, and the step is the anchor's
        """
        flags = StepFlag(
            (StepFlag.START if self._call.start else StepFlag.NONE)
            | (StepFlag.END if self._call.end else StepFlag.NONE)
        )
        scope = scope_of(self._call, planned, stand)
        if stand is None:
            return EnsemblePart(scope, step_digest(self._call.request_id, flags, self._call.inputs))
        return EnsemblePart(scope, step_digest(f"{stand.run} {stand.step}", flags, ()))

    def _withdraw(self, index: int) -> None:
        pending = self._pending.get(index)
        if pending is None:
            # Refused at once, or not sent yet, because the request ahead of it has not sent its own.
            if self._place is not None and self._place.waiting.pop(index, None) is not None:
                self._loop.call_soon(self._failed, index, MeshError("", Code.CANCELLED), None)
            return
        if pending.future.done():
            return
        if index not in self._plan.stateful or not pending.sent:
            pending.future.cancel()
            return
        # Whether the step is cancelled or runs already, only its answer tells. So the answer is awaited.
        pending.withdrawn = True
        if pending.accepted is not None:
            self._of.dispatch.withdraw(pending)

    def _abandon(self, stand: Stand) -> None:
        for index in self._plan.stateful:
            planned = self._plan.steps[index]
            is_anchor = index == self._plan.anchor
            scope = scope_of(self._call, planned, None if is_anchor else stand)
            sequence = sequence_id(planned.config.name, planned.requested + scope, self._correlation_id)
            self._of.notices.abandon(Ending(sequence, stand.run if is_anchor else ""))

    # -- outcomes of steps ------------------------------------------------------------------------------------------

    def _done(self, index: int, future: asyncio.Future[Answer]) -> None:
        pending = self._pending.get(index)
        if future.cancelled():
            self._failed(index, MeshError("", Code.CANCELLED), None)
        elif (error := future.exception()) is not None:
            told = error if isinstance(error, MeshError) else MeshError(str(error), Code.INTERNAL)
            self._failed(index, told, stand_of(pending) if pending is not None and told.accepted else None)
        elif index != self._plan.anchor:
            self._perform(self._progress.answered(index, future.result().message.outputs))
        else:
            assert pending is not None, "it was sent"
            self._anchored(pending, future.result(), self._loop.time() + STAND_PATIENCE_S)

    def _anchored(self, pending: PendingRequest, answer: Answer, until: float) -> None:
        """The anchor has run. Where its sequence stands, Redis has told with the acceptance, which may come later than
        the answer, or be lost.
        """
        assert self._plan.anchor is not None
        self._stand = stand_of(pending)
        if self._stand is not None:
            self._perform(self._progress.answered(self._plan.anchor, answer.message.outputs, self._stand))
        elif self._loop.time() < until:
            self._loop.call_later(STAND_POLL_S, self._anchored, pending, answer, until)
        elif pending.repeatable:
            # Asked again, it is answered from its record.
            self._send_again(self._plan.anchor)
        else:
            self._failed(self._plan.anchor, unknown_outcome(pending, "the connection to Redis was lost"), None)

    def _failed(self, index: int, error: MeshError, stand: Stand | None) -> None:
        now_ms = int(self._loop.time() * 1000)
        is_final = self._of.replies.has_given_up
        self._perform(self._progress.failed(index, error, now_ms=now_ms, stand=stand, is_final=is_final))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _answer(self, outputs: tuple[Tensor, ...]) -> None:
        record, call = self._plan.record, self._call
        step = 0 if self._stand is None else self._stand.step
        parameters: dict[str, Parameter] = {}
        if self._made is not None:
            parameters["sequence_id"] = str(self._made)
        if call.expected_step is not None and step:
            parameters["sequence_step"] = step
        message = ReplyMessage(self._plan.version, outputs, step=step)
        session = str(self._made) if self._made is not None else call.session_id if self._plan.stateful else None
        if not self._future.done():
            self._future.set_result(Answer(message, record, self._plan.version, call.request_id, session, parameters))
        took_ns = time.time_ns() - self._arrived_ns
        # What its steps took in which stage is in their own models' statistics.
        compute = Compute(0, took_ns, 0)
        counts = success(rows=max(1, self._rows), total_ns=took_ns, queue_ns=0, compute=compute)
        ended_ms = time.time_ns() // 1_000_000
        self._end("", counts | execution(batch_size=max(1, self._rows), compute=compute, ended_ms=ended_ms))

    def _fail(self, error: MeshError) -> None:
        if not self._future.done():
            self._future.set_exception(error.released())
        # As in Triton, whatever the reason was: the step's own model counts it.
        self._end(error.message, failure(FailureReason.OTHER, total_ns=time.time_ns() - self._arrived_ns))

    def _end(self, error: str, counts: dict[str, int]) -> None:
        self._is_over = True
        self._pending.clear()
        self._span.replied()
        self._span.end(error)
        if self._place is not None:
            self._of.lines.leave(self._line, self._place)
        load = ModelLoad(self._call.model, self._plan.version, self._plan.record.generation)
        self._of.notices.count(load, packed(counts))


def scope_of(call: InferCall, planned: PlannedStep, stand: Stand | None) -> str:
    """What stands in the name of a step's sequence, beside the model, its version and the correlation id: the ensemble,
    its requested version and the step's place; for a follower also the anchor's run.
    """
    scope = f"@{call.model}/{call.version}/{planned.place}"
    return scope if stand is None else f"{scope}#{stand.run}"


def stand_of(pending: PendingRequest) -> Stand | None:
    """Where the anchor's sequence stands with a step that Redis has accepted; None before that is known."""
    if pending.accepted is None or not pending.accepted.run:
        return None
    start = int(pending.accepted.run.rpartition(".")[2])
    return Stand(pending.accepted.run, pending.accepted.step - start + 1)

"""Requests to ensembles: what each has from its client, what it is answered, how it is counted and traced.

What is sent for it, `runs` carries out.
"""

from __future__ import annotations

import time

import msgspec

from gateway.bounds.unread_answers import UnreadAnswers
from gateway.models.catalog import Catalog
from gateway.models.versions import check_version_text
from gateway.requests.admission import check_id, named_sequence, wants_integer_id
from gateway.requests.caller import Caller
from gateway.requests.ensembles.in_order import RunAnswer
from gateway.requests.ensembles.lines import LinePlace, StepLines
from gateway.requests.ensembles.plan import EnsemblePlan, plan_of
from gateway.requests.ensembles.progress import HeldTensor, within_ensembles
from gateway.requests.ensembles.runs import EnsembleServices, RequestContext, StageRun, WaitingBytes
from gateway.requests.forms import check_form
from gateway.requests.infer_call import InferCall
from gateway.requests.measures import Measures
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.sessions import new_session
from gateway.requests.waiting import Accepted, Answer, OpenRequest, end_span
from shared.contract.errors import MeshError, RequestError
from shared.contract.ids import CorrelationId, sequence_id
from shared.contract.messages import ModelRecord, ReplyMessage
from shared.contract.parameters import Parameter
from shared.contract.tensors import Tensor
from shared.statistics.tally import FailureReason, ModelLoad, Timings, execution, failure, packed, success
from shared.traces.spans import SpanName
from shared.traces.tracing import StepSpan, Tracing


class Ensembles:
    """The requests to ensembles of one gateway."""

    def __init__(
        self, catalog: Catalog, services: EnsembleServices, tracing: Tracing, unread: UnreadAnswers, measures: Measures
    ) -> None:
        self._catalog = catalog
        self.services = services
        self.tracing = tracing
        self.unread = unread
        self.measures = measures
        self.lines = StepLines()
        self._plans: dict[tuple[str, str], EnsemblePlan] = {}
        self._planned_for = catalog.offer

    def begin(
        self, call: InferCall, caller: Caller, record: ModelRecord, version: str, connection: ConnectionSequences
    ) -> EnsembleRequest:
        """Begins a request. connection: of the caller, or one for this request alone

        Raises MeshError when the request does not fit the ensemble.
        """
        check_form(call, record.config)
        # In its plain form it is part of the names of sequences.
        call = msgspec.structs.replace(call, version=check_version_text(call.version))
        request = EnsembleRequest(self, call, self._plan(record, version), caller, connection)
        if record.config.decoupled and caller.on_open is not None:
            caller.on_open(request)
        request.begin()
        return request

    def _plan(self, record: ModelRecord, version: str) -> EnsemblePlan:
        """The plan. When any model has changed, all are made anew."""
        if self._planned_for is not self._catalog.offer:
            self._planned_for, self._plans = self._catalog.offer, {}
        name = record.config.name, version
        if name not in self._plans:
            self._plans[name] = plan_of(record, version, self._catalog.find)
        return self._plans[name]


class EnsembleRequest(OpenRequest):
    """One request to an ensemble, until its last step is answered. Its client may have left before."""

    def __init__(
        self,
        ensembles: Ensembles,
        call: InferCall,
        plan: EnsemblePlan,
        caller: Caller,
        connection: ConnectionSequences,
    ) -> None:
        self._of = ensembles
        self._call = call
        self._plan = plan
        self.future = caller.future
        self.is_many = plan.record.config.decoupled
        self._correlation_id, self._made = self._sequence()
        batched = plan.record.config.max_batch_size > 0
        inputs = {
            tensor.name: HeldTensor(tensor, tensor.shape[0] if batched and tensor.shape else 0)
            for tensor in call.inputs
        }
        self._rows = max((held.rows for held in inputs.values()), default=1)
        self._is_over = False
        self._error: MeshError | None = None
        self._arrived_ns = time.time_ns()
        self._first_ns = 0
        self._line = (call.model, call.version, self._correlation_id)
        self._span: StepSpan = ensembles.tracing.begin_step(
            sequence_id(*self._line) if plan.stateful else None,
            call.model,
            start=call.start,
            trace_headers=call.trace_headers,
            arrived_ns=self._arrived_ns,
            of_ensemble=True,
            endpoint=call.endpoint,
        )
        self._place: LinePlace | None = ensembles.lines.join(self._line) if plan.stateful else None
        context = RequestContext(
            ensembles.services,
            call,
            connection,
            caller.client,
            self._correlation_id,
            self._made,
            self._span.traceparent,
            self._place,
            WaitingBytes(call.model, ensembles.unread, self.failed),
        )
        # Answers of the only decoupled step are this request's own. Behind two of them, only the whole can be counted.
        self._number = call.first_answer - 1 if len(plan.stages) == 2 else 0
        self._run = StageRun(context, plan.stages, inputs, self._given, taken=self._number)

    def begin(self) -> None:
        self._run.begin()

    def left(self) -> None:
        """The client has left before its answer."""
        if not self._is_over:
            self._run.left()

    def failed(self, error: MeshError) -> None:
        """The client gets an error, unless it has its last answer. What keeps the states equal goes on."""
        self._error = self._error or error
        if not self.future.done():
            self.future.set_exception(error.released())
        if not self._is_over:
            self._run.unwanted()

    def _sequence(self) -> tuple[CorrelationId, int | str | None]:
        """The correlation id of the request's sequences, and the same if it is made here because the client named none
        (see `admission`). Raises RequestError for an id that a state does not take: no state has done anything yet.
        """
        if self._plan.anchor is None:
            return self._call.correlation_id, None
        steps = [self._plan.steps[index] for index in self._plan.stateful]
        configs = [step.config for step in steps]
        # All states have the same id, so one that needs an integer decides for all.
        decides = next(filter(wants_integer_id, configs), configs[0])
        named, anchor = named_sequence(self._call, decides), configs[0].sequence_batching
        made = new_session(decides) if not named and anchor is not None and anchor.implicit_start else None
        correlation_id = made or named
        if correlation_id:
            for step in steps:
                try:
                    check_id(self._call, step.config, correlation_id)
                except RequestError as error:
                    raise within_ensembles(step, error) from None
        return correlation_id, made

    # -- answers ----------------------------------------------------------------------------------------------------

    def _given(self, answer: RunAnswer) -> None:
        outcome, is_last = answer
        self._is_over = is_last
        if isinstance(outcome, MeshError):
            self.failed(outcome)
        elif self._error is None and not self.future.done():
            self._answer(outcome, is_last=is_last)
        if is_last:
            self._end()

    def _answer(self, outputs: tuple[Tensor, ...] | None, *, is_last: bool) -> None:
        """outputs: None for a last answer that has nothing to give"""
        decoupled = self._plan.record.config.decoupled
        self._number += outputs is not None
        if outputs is not None and decoupled and self._number < self._call.first_answer:
            # Of a retry: the client has this answer.
            outputs = None
        if outputs is None and not is_last:
            return
        self.heard = time.monotonic()
        self._first_ns = self._first_ns or time.time_ns() - self._arrived_ns
        answer = self._answer_of(outputs, number=self._number if decoupled else 0, more=not is_last)
        if is_last:
            self.future.set_result(answer)
        elif self.take is not None:
            self.take(answer)

    def _answer_of(self, outputs: tuple[Tensor, ...] | None, *, number: int, more: bool) -> Answer:
        call, stand = self._call, self._run.stand
        step = 0 if stand is None else stand.step
        # The parameters that Triton adds to each answer of an ensemble.
        parameters: dict[str, Parameter] = {}
        if outputs is not None:
            parameters |= {
                "sequence_id": signed(call.correlation_id),
                "sequence_start": call.start,
                "sequence_end": call.end,
            }
        if self._made is not None:
            parameters["sequence_id"] = str(self._made)
        if call.expected_step is not None and step:
            parameters["sequence_step"] = step
        message = ReplyMessage(
            self._plan.version, outputs or (), step=step, number=number, more=more, empty=outputs is None
        )
        session = str(self._made) if self._made is not None else call.session_id if self._plan.stateful else None
        return Answer(message, self._plan.record, self._plan.version, call.request_id, session, parameters)

    def _end(self) -> None:
        ended_ns = time.time_ns()
        if self._run.accepted is not None:
            self._trace(self._run.accepted, ended_ns)
        end_span(self._span, self.future)
        if self._place is not None:
            self._of.lines.leave(self._line, self._place)
        load = ModelLoad(self._call.model, self._plan.version, self._plan.record.generation)
        self._of.services.notices.count(load, packed(self._counts(ended_ns)))
        if self._error is None and not self.future.cancelled():
            measures = self._of.measures.of(self._plan.record, self._plan.version)
            measures.over(self._arrived_ns, ended_ns, self._span.traceparent)
        # It calls back here. Both, and the tensors that they have, would wait for the garbage collector.
        del self._run

    def _trace(self, accepted: Accepted, ended_ns: int) -> None:
        """The begin and the end of the ensemble's sequence, which its anchor has had."""
        self._span.accepted(accepted.step, repeated=accepted.repeated, at_ns=accepted.at_ns)
        if self._call.end and self._error is None and not accepted.repeated and self._span.traceparent:
            sequence = sequence_id(*self._line)
            self._of.tracing.record_of_sequence(sequence, SpanName.END, ended_ns, ended_ns, step=accepted.step)

    def _counts(self, ended_ns: int) -> dict[str, int]:
        took_ns = ended_ns - self._arrived_ns
        if self._error is not None:
            # As in Triton, whatever the reason was: the step's own model counts it.
            return failure(FailureReason.OTHER, total_ns=took_ns)
        # What its steps took in which stage is in their own models' statistics.
        compute = Timings(0, took_ns, 0)
        counts = success(rows=max(1, self._rows), total_ns=took_ns, queue_ns=0, compute=compute)
        first_ns = self._first_ns or took_ns
        counts |= self._of.measures.latencies(self._plan.record, compute=compute, first_ns=first_ns)
        return counts | execution(batch_size=max(1, self._rows), compute=compute, ended_ms=ended_ns // 1_000_000)


def signed(correlation_id: CorrelationId) -> CorrelationId:
    """A correlation id as it stands in an answer's parameters, which have 64 bits with a sign."""
    return correlation_id - (1 << 64) if isinstance(correlation_id, int) and correlation_id >> 63 else correlation_id

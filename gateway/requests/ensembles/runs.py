"""Carries out the runs of an ensemble's stages (`plan`): sends what `progress` decides, and tells it what came of it.

Everything happens in callbacks of futures, without a task of its own: the first stateful step of a request is queued
for Redis before `begin` returns, if it needs no other step, so the order of requests is kept.

A stage that ends with a decoupled step is followed by a run of the next stage for each of its answers. These runs go on
side by side, and their answers leave in order (`in_order`). Answers that come while RUNS_MAX runs go on wait here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from gateway.bounds.unread_answers import UnreadAnswers, answer_bytes
from gateway.requests.caller import Caller
from gateway.requests.ensembles import progress
from gateway.requests.ensembles.in_order import NOTHING_MORE, AnswersInOrder, Give, Outcome, RunAnswer
from gateway.requests.ensembles.lines import LinePlace
from gateway.requests.ensembles.plan import EnsemblePlan, PlannedStep
from gateway.requests.ensembles.progress import EnsembleAction, EnsembleProgress, HeldTensor, Stand
from gateway.requests.exchange.dispatch import Dispatch
from gateway.requests.exchange.notices import Notices
from gateway.requests.exchange.replies import Replies, unknown_outcome
from gateway.requests.infer_call import EnsemblePart, InferCall, has_own_name
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.status import told_of
from gateway.requests.waiting import Accepted, Answer, OpenRequest, PendingRequest
from shared.contract.errors import Code, MeshError, Reason, SequenceError, UnavailableError
from shared.contract.ids import CorrelationId, SequenceId, sequence_id
from shared.contract.messages import END, START, ModelRecord
from shared.contract.record import ENDED, FAILED
from shared.contract.step_digest import step_digest
from shared.contract.tensors import Tensor
from shared.store.script_values import Ending

STAND_POLL_S = 0.01
STAND_PATIENCE_S = 2.0
"""How long an answered anchor waits for what Redis said when it accepted the step: that comes over another connection.
"""
RUNS_MAX = 64
"""Runs behind one decoupled step whose answers are not given on, unless the ensemble sets `max_inflight_requests`."""
WAITING_BYTES_MAX = 64 << 20
"""Bytes of a request's answers that wait between its steps. Beyond it the request fails."""


SendRequest = Callable[[InferCall, Caller, ModelRecord, str], PendingRequest]
"""Queues a request to this version of a model that is no ensemble. Raises MeshError when it is refused at once."""


@dataclass(frozen=True, slots=True)
class EnsembleServices:
    """What the runs of all requests share.

    send   sends the request of a step
    hold   counts bytes of tensors that this gateway holds between steps, negative ones when they are given back, as
           those of a client
    """

    dispatch: Dispatch
    replies: Replies
    notices: Notices
    send: SendRequest
    hold: Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the runs of one request share.

    client          as of its `Caller`
    correlation_id  of its sequences; made: the same, if this gateway made it, because the client named none
    traceparent     of the request's span, "" if it is not traced
    place           in the line of its sequence
    waiting         counts its answers that wait
    """

    services: EnsembleServices
    call: InferCall
    connection: ConnectionSequences
    client: str
    correlation_id: CorrelationId
    made: int | str | None
    traceparent: str
    place: LinePlace | None
    waiting: WaitingBytes


class WaitingBytes:
    """Those of a request's answers that wait for what is behind their step, or for answers before them.

    They count with the answers that clients have not read. fail: fails the request
    """

    def __init__(self, ensemble: str, unread: UnreadAnswers, fail: Callable[[MeshError], None]) -> None:
        self._ensemble = ensemble
        self._unread = unread
        self._fail = fail
        self._taken = 0

    def count(self, size: int) -> None:
        """Counts the bytes of an answer; negative ones when it goes."""
        self._taken += size
        if size > 0:
            self._unread.add(self, size, self._too_fast)
        else:
            self._unread.took(self, -size)

    def check(self) -> None:
        """Fails the request if too many wait."""
        if self._taken > WAITING_BYTES_MAX or (self._taken and self._unread.is_beyond(self)):
            self._too_fast()

    def _too_fast(self) -> None:
        self._fail(
            UnavailableError(
                f"in ensemble '{self._ensemble}', answers of a decoupled model come faster than the steps behind it "
                "take them: those that wait have reached the gateway's bound"
            )
        )


class WaitingAnswer(NamedTuple):
    """A decoupled step's answer that waits for its run. give: takes the answers of the run"""

    number: int
    outputs: tuple[Tensor, ...]
    size: int
    give: Give


class StageRun:
    """One run of a stage, with the runs behind it.

    stages  the stage, and those that follow
    give    takes the answers of the last stage
    name    tells the run from others of the request; "" for the first stage's
    taken   answers of this stage's decoupled step that are not wanted, because the client has them
    """

    def __init__(
        self,
        context: RequestContext,
        stages: Sequence[EnsemblePlan],
        inputs: Mapping[str, HeldTensor],
        give: Give,
        *,
        name: str = "",
        taken: int = 0,
    ) -> None:
        self._of = context.services
        self._context = context
        self._call = context.call
        self._plan, *self._behind = stages
        self._give = give
        self._name = name
        self._taken = taken
        self._loop = asyncio.get_running_loop()
        named = not name and (bool(self._call.request_id) or self._call.expected_step is not None)
        self._progress = EnsembleProgress(self._plan, inputs, self._call.outputs, is_named=named)
        self._pending: dict[int, PendingRequest] = {}
        self.stand: Stand | None = None
        """Where the anchor's sequence stands, if this stage has one and it has run."""
        self.accepted: Accepted | None = None
        """What Redis said when it first accepted the anchor's step."""
        self._is_over = False
        self._is_unwanted = False
        self._following = AnswersInOrder(give, context.waiting.count)
        self._runs: dict[int, tuple[StageRun, Give]] = {}
        self._waiting: deque[WaitingAnswer] = deque()

    def begin(self) -> None:
        """Sends the steps that need nothing but the request's own inputs."""
        self._perform(self._progress.begin())

    def left(self) -> None:
        """The client has left: see `EnsembleProgress.left`."""
        if not self._is_over:
            self._perform(self._progress.left())
        self._drop()

    def unwanted(self) -> None:
        """The request has failed: no further answer is wanted."""
        if not self._is_over:
            self._perform(self._progress.unwanted())
        self._drop()

    # -- actions ----------------------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[EnsembleAction]) -> None:
        for action in actions:
            match action:
                case progress.SendStep():
                    self._send_in_line(action)
                case progress.SendAgain(index, pause_ms):
                    self._loop.call_later(pause_ms / 1000, self._send_again, index)
                case progress.WithdrawStep(index):
                    self._withdraw(index)
                case progress.EndFollowers(run):
                    assert self._context.place is not None, "a request to steps that keep state has a place in a line"
                    self._context.place.when_first(partial(self._end_followers, run, ENDED))
                case progress.AbandonRun(stand):
                    self._abandon(stand)
                case progress.AnswerRequest(outputs):
                    self._end(outputs)
                case progress.FailRequest(error):
                    self._end(error)

    def _send_in_line(self, step: progress.SendStep) -> None:
        if self._context.place is not None and step.index in self._plan.stateful:
            self._context.place.take(step.index, partial(self._send, step))
        else:
            self._send(step)

    def _send_again(self, index: int) -> None:
        # Its turn in the line came when it was sent first.
        self._send(self._progress.again(index))

    def _send(self, step: progress.SendStep) -> None:
        planned = self._plan.steps[step.index]
        future: asyncio.Future[Answer] = self._loop.create_future()
        size = sum(len(tensor.raw) for tensor in step.inputs)
        self._of.hold(size, self._context.client)
        try:
            self._pending[step.index] = self._of.send(
                self._inner_call(planned, step),
                Caller(
                    future, self._context.connection, partial(self._opened, step.index), client=self._context.client
                ),
                planned.record,
                planned.version,
            )
        except Exception as error:  # noqa: BLE001  of this step alone: the request leaves its line, for those behind it
            told = told_of(error, "step of an ensemble failed unexpectedly", model=planned.config.name)
            future.set_exception(told)
        # Behind the callbacks of the request itself: its span ends within that of the whole request.
        future.add_done_callback(lambda _: self._of.hold(-size, self._context.client))
        future.add_done_callback(partial(self._done, step.index))

    def _inner_call(self, planned: PlannedStep, step: progress.SendStep) -> InferCall:
        """The request of a step, with the flags, id, priority, timeout and parameters of the whole request."""
        call = self._call
        request = InferCall(
            planned.config.name,
            planned.requested,
            request_id=call.request_id,
            correlation_id=self._context.correlation_id,
            start=call.start,
            end=call.end,
            priority=call.priority,
            timeout_us=call.timeout_us,
            inputs=step.inputs,
            outputs=step.outputs,
            parameters=call.parameters,
            within=self._context.traceparent,
            origin=call.origin.within(f"{self._name}{planned.place}") if call.origin is not None else None,
            # Admission has walked the client's, and an executor's are right.
            string_problems={tensor.name: "" for tensor in step.inputs},
            first_answer=self._taken + 1,
        )
        if step.index not in self._plan.stateful:
            # A request of an iterative model is a sequence of its own, whatever sequence the client has.
            own = planned.config.sequence_batching is not None
            return msgspec.structs.replace(request, correlation_id=0) if own else request
        part = self._part(planned, step.stand)
        if step.stand is not None:
            return msgspec.structs.replace(
                request,
                start=step.stand.step == 1,
                expected_step=step.stand.step,
                part=part,
            )
        return msgspec.structs.replace(
            request,
            start=call.start or self._context.made is not None,
            expected_step=call.expected_step,
            # The session is known by its id, which may be a number made of its text.
            session_id=call.session_id and str(self._context.correlation_id),
            # The ensemble's sequence is the anchor's: it counts once for the tenant, and no follower is refused.
            tenant=call.tenant,
            part=part,
        )

    def _part(self, planned: PlannedStep, stand: Stand | None) -> EnsemblePart:
        """The name of a stateful step's sequence, and the name of this very step.

        stand  of a follower: its sequence is the run's, and the step is the anchor's
        """
        flags = (START if self._call.start else 0) | (END if self._call.end else 0)
        scope = scope_of(self._call, planned, None if stand is None else stand.run)
        if stand is None:
            inputs = () if has_own_name(self._call) else self._call.inputs
            return EnsemblePart(scope, step_digest(self._call.request_id, flags, inputs))
        if stand.step == 1 and not self._call.end:
            # Its number tells all: sent again behind END, a first step with a digest would begin the sequence anew.
            return EnsemblePart(scope, b"")
        return EnsemblePart(scope, step_digest(f"{stand.run} {stand.step}", flags, ()))

    def _withdraw(self, index: int) -> None:
        pending = self._pending.get(index)
        if pending is None:
            # Refused at once, or not sent yet, because the request ahead of it has not sent its own.
            if self._context.place is not None and self._context.place.waiting.pop(index, None) is not None:
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
        assert self._plan.anchor is not None, "its sequence has counted a step"
        self._of.notices.end(Ending(self._sequence_of(self._plan.anchor, None), stand.run), FAILED)
        self._end_followers(stand.run, FAILED)

    def _end_followers(self, run: str, tombstone: bytes) -> None:
        for index in self._plan.stateful:
            if index != self._plan.anchor:
                self._of.notices.end(Ending(self._sequence_of(index, run), ""), tombstone)

    def _sequence_of(self, index: int, run: str | None) -> SequenceId:
        """The sequence of a stateful step. run: of the anchor; None for the anchor's own sequence"""
        planned = self._plan.steps[index]
        scope = scope_of(self._call, planned, run)
        return sequence_id(planned.config.name, planned.requested + scope, self._context.correlation_id)

    # -- outcomes of steps ------------------------------------------------------------------------------------------

    def _done(self, index: int, future: asyncio.Future[Answer]) -> None:
        # It has the step's inputs, which nobody needs any more.
        pending = self._pending.pop(index, None)
        if future.cancelled():
            self._failed(index, MeshError("", Code.CANCELLED), None)
            return
        if (error := future.exception()) is not None:
            told = error if isinstance(error, MeshError) else MeshError(str(error), Code.INTERNAL)
            if pending is None or index != self._plan.anchor:
                self._failed(index, told, None)
            else:
                # What was refused, or lost with Redis, has no acceptance to wait for.
                until = self._loop.time() + STAND_PATIENCE_S if told.accepted else 0.0
                self._anchored(pending, told, until)
            return
        if index == self._plan.source and not future.result().message.empty:
            self._follow(future.result())
        if index != self._plan.anchor:
            self._perform(self._progress.answered(index, future.result().message.outputs))
        else:
            assert pending is not None, "it was sent"
            self._anchored(pending, future.result(), self._loop.time() + STAND_PATIENCE_S)

    def _anchored(self, pending: PendingRequest, outcome: Answer | MeshError, until: float) -> None:
        """The anchor has run, or failed. Where its sequence stands, Redis has told with the acceptance, which may come
        later than the answer, or be lost.
        """
        assert self._plan.anchor is not None
        self.accepted = self.accepted or pending.accepted
        self.stand = stand_of(pending)
        if pending.accepted is None and self._loop.time() < until:
            self._loop.call_later(STAND_POLL_S, self._anchored, pending, outcome, until)
        elif isinstance(outcome, MeshError):
            self._failed(self._plan.anchor, outcome, self.stand if outcome.accepted else None)
        elif self.stand is not None:
            self._perform(self._progress.answered(self._plan.anchor, outcome.message.outputs, self.stand))
        elif pending.accepted is not None:
            self._failed(self._plan.anchor, of_earlier_run(pending), None)
        elif pending.repeatable:
            # Asked again, it is answered from its record.
            self._send_again(self._plan.anchor)
        else:
            self._failed(self._plan.anchor, unknown_outcome(pending, "the connection to Redis was lost"), None)

    def _failed(self, index: int, error: MeshError, stand: Stand | None) -> None:
        now_ms = int(self._loop.time() * 1000)
        is_final = self._of.replies.has_given_up
        self._perform(self._progress.failed(index, error, now_ms=now_ms, stand=stand, is_final=is_final))

    # -- the stages behind ------------------------------------------------------------------------------------------

    def _opened(self, index: int, request: OpenRequest) -> None:
        request.take = partial(self._take, index)

    def _take(self, index: int, content: Answer | MeshError) -> None:
        """An answer of the decoupled step that is not its last one."""
        if isinstance(content, Answer):
            self._follow(content)
        elif not self._is_unwanted:
            error = progress.within_ensembles(self._plan.steps[index], content)
            self._following.add()(RunAnswer(error, is_last=True))

    def _follow(self, answer: Answer) -> None:
        message = answer.message
        self._taken = message.number
        if self._is_unwanted:
            return
        size = answer_bytes(message.outputs)
        self._waiting.append(WaitingAnswer(message.number, message.outputs, size, self._following.add()))
        self._context.waiting.count(size)
        self._begin_runs()
        self._context.waiting.check()

    def _begin_runs(self) -> None:
        runs_max = self._plan.record.config.ensemble_inflight_max or RUNS_MAX
        while self._waiting and len(self._following) - len(self._waiting) < runs_max:
            waiting = self._waiting.popleft()
            self._context.waiting.count(-waiting.size)
            assert self._plan.source is not None, "only a decoupled step has answers that are followed"
            inputs = progress.held_tensors(self._plan.steps[self._plan.source], waiting.outputs)
            name = f"{self._name}{waiting.number}/"
            run = StageRun(self._context, self._behind, inputs, partial(self._followed, waiting.number), name=name)
            self._runs[waiting.number] = run, waiting.give
            run.begin()

    def _followed(self, number: int, answer: RunAnswer) -> None:
        _, give = self._runs[number]
        if answer.is_last:
            del self._runs[number]
        give(answer)
        if answer.is_last:
            self._begin_runs()
        self._context.waiting.check()

    def _drop(self) -> None:
        self._is_unwanted = True
        while self._waiting:
            waiting = self._waiting.popleft()
            self._context.waiting.count(-waiting.size)
            waiting.give(NOTHING_MORE)
        for run, _ in list(self._runs.values()):
            run.left()

    def _end(self, outcome: Outcome) -> None:
        self._is_over = True
        self._pending.clear()
        if not self._behind:
            self._give(RunAnswer(outcome, is_last=True))
            return
        if isinstance(outcome, MeshError):
            self._following.add()(RunAnswer(outcome, is_last=True))
        self._following.conclude()


def scope_of(call: InferCall, planned: PlannedStep, run: str | None) -> str:
    """What stands in the name of a step's sequence, beside the model, its version and the correlation id: the ensemble,
    its requested version and the step's place; for a follower also the anchor's run.
    """
    scope = f"@{call.model}/{call.version}/{planned.place}"
    return scope if run is None else f"{scope}#{run}"


def stand_of(pending: PendingRequest) -> Stand | None:
    """Where the anchor's sequence stands with a step that Redis has accepted; None before that is known, and for a step
    of an earlier run, which a START has cut off.
    """
    if pending.accepted is None or not pending.accepted.run:
        return None
    start = int(pending.accepted.run.rpartition(".")[2])
    return Stand(pending.accepted.run, pending.accepted.step - start + 1, pending.accepted.cut_off)


def of_earlier_run(pending: PendingRequest) -> SequenceError:
    """The error of an anchor's step that had been answered when the sequence began anew. Nobody knows the run that it
    was a step of, and sent again it would be a step of the new one.
    """
    text = (
        f"the step of sequence {pending.admitted.message.correlation_id} of model '{pending.call.model}' was answered, "
        "and the sequence has begun anew since: the step does not run again"
    )
    return SequenceError(text, Reason.ANSWERED, None)

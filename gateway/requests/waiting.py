"""One request that waits for its answer, from its admission until its future ends.

The protocol's handler awaits the future. An answer, an error or the client's leaving ends it, once. Later news of the
same request is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gateway.requests.admission import TOLD, Admitted
from gateway.requests.infer_call import InferCall, input_bytes
from gateway.requests.measures import LoadMeasures
from shared.contract.errors import (
    Code,
    MeshError,
    ModelError,
    Reason,
    RequestError,
    SequenceError,
    UnavailableError,
    code_of,
)
from shared.contract.forecast import Outlook
from shared.contract.ids import SequenceId, ShardId
from shared.contract.messages import WAITED_MS, ModelRecord, ReplyMessage, read_reply
from shared.contract.parameters import Parameter
from shared.store.reading import FAILURES, noted
from shared.traces.tracing import NO_STEP, StepSpan


class Answer(msgspec.Struct, frozen=True):
    """A successful inference.

    message        the executor's reply; its outputs are the requested ones, in the order of the configuration
    model          the record that the request was checked against
    version        the version that ran
    request_id     as the client gave it, "" for none
    session_id     value of `Inference-Session-Id`: the client's own, or the one that the gateway made; else None
    parameters     the response's parameters: the model's own; also `sequence_id` if the gateway named the sequence,
                   `sequence_step` if the request numbered its step, `sequence_run` if it asked for the run's name, and
                   what it has asked of its wait for a slot

    The answers of a decoupled model are numbered (`ReplyMessage.number`); `message.more` says that others follow.
    """

    message: ReplyMessage
    model: ModelRecord
    version: str
    request_id: str
    session_id: str | None
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict[str, Parameter])

    @property
    def output_bytes(self) -> int:
        """Of its outputs' tensors together."""
        return sum([len(output.raw) for output in self.message.outputs])


class Accepted(NamedTuple):
    """What Redis said when it accepted a request; empty for a stateless one.

    birth    tells the sequence from earlier and later ones under the same id
    step     the step's number in the record; it does not begin anew with START
    run      tells what began with the latest START from everything else
    cut_off  the run before it, if it went on until this START
    repeated  it was accepted before
    at_ns    when this gateway learned it, wall clock
    """

    birth: str = ""
    step: int = 0
    run: str = ""
    cut_off: str = ""
    repeated: bool = False
    at_ns: int = 0


@dataclass(slots=True)
class SlotWait:
    """What is known of a request's wait for a slot, because it has asked.

    is_new     its sequence has had no slot yet: it may be taken back
    waited_ms  how long it has waited, all in all; None: it waits, or nobody knows
    outlook    the latest that was known of its place and the time; None: nothing yet
    refusal    why it is being taken back; None: it is not
    """

    is_new: bool = False
    waited_ms: int | None = None
    outlook: Outlook | None = None
    refusal: SequenceError | None = None


class OpenRequest:
    """A request whose answers come one by one. It is told to its caller before it is sent (`OnOpen`).

    is_many  its model is decoupled, so it has any number of answers
    take    takes each answer but the last one, which ends the future. Its caller sets it
    hear    takes what is said of its wait before it has an answer: answers without outputs. Its caller may set it
    heard   when the latest answer came; seconds, monotonic clock
    limit   ends the request when the gateway's own time for it is over; None: there is no limit
    """

    future: asyncio.Future[Answer]
    is_many: bool
    hear: Callable[[Answer], None] | None = None
    take: Callable[[Answer | MeshError], None] | None = None
    heard: float = 0.0
    limit: asyncio.TimerHandle | None = None

    def failed(self, error: MeshError) -> None:
        """Ends the future with an error, unless it has ended already."""
        raise NotImplementedError


OnOpen = Callable[[OpenRequest], None]
"""Told of a request to a decoupled model, or of one that asks about its wait, before it is sent."""


class PendingRequest(OpenRequest):
    """A request on its way.

    token       the request's name in reply streams, unique within this gateway's life
    size        bytes of its inputs
    client      as of its `Caller`
    used        called when Redis has accepted the request, or knew it (`gateway.requests.orphans`); None: not needed
    span        records what happens to the request, if it is traced
    measures    those of the model's load; None: of a request that ends a sequence without a step
    replied_ns  when its answer came, wall clock; 0 before
    take        None: there is only one answer, or the last one has come
    taken       number of the newest answer of a decoupled model that the client has
    accepted    what Redis said when it accepted the request; None before
    early       the last answer, if it came before `accepted`, of a request that asked for the name of its run
    wait        of a request that has asked about its wait for a slot; else None
    withdrawn   the client has left, and the request is to be taken back
    held_bytes  what it has of the gateway's budget. It is in flight until its future ends, and then gives them back.
                None: this counts elsewhere
    sent        when it was last sent, 0 while it is queued for the first time; seconds, monotonic clock
    first_sent  when it was first sent, if the outcome of that attempt is unknown; seconds, monotonic clock
    redis_ahead_ms  what the clock of Redis had more than the monotonic one before it was first sent
    """

    replied_ns: int = 0
    used: Callable[[PendingRequest], None] | None = None
    accepted: Accepted | None = None
    early: ReplyMessage | None = None
    wait: SlotWait | None = None
    withdrawn: bool = False
    held_bytes: int | None = None
    sent: float = 0.0
    first_sent: float | None = None
    redis_ahead_ms: float = 0.0

    def __init__(
        self,
        call: InferCall,
        record: ModelRecord,
        admitted: Admitted,
        future: asyncio.Future[Answer],
        *,
        shard: ShardId,
        token: str,
        client: str = "",
        span: StepSpan = NO_STEP,
        measures: LoadMeasures | None = None,
    ) -> None:
        self.call = call
        self.record = record
        self.admitted = admitted
        self.future = future
        self.shard = shard
        self.token = token
        self.client = client
        self.size = input_bytes(call)
        self.span = span
        self.measures = measures
        self.is_many = record.config.decoupled
        self.taken = max(0, call.first_answer - 1)
        if admitted.flags & TOLD:
            self.wait = SlotWait()

    @property
    def sequence(self) -> SequenceId:
        assert self.admitted.sequence is not None, "a stateless request is of no sequence"
        return self.admitted.sequence

    @property
    def repeatable(self) -> bool:
        """Whether the request may be sent twice and still has one effect.

        The mesh recognises a step by its request id or its number. A stateless request changes no state, and a run
        ends once.
        """
        call = self.call
        named = bool(call.request_id) or call.expected_step is not None or bool(call.ended_run)
        return self.admitted.sequence is None or named

    def was_accepted(self, accepted: Accepted) -> None:
        """Redis has accepted the request, or knew it. Gives out the answer that waited for this."""
        self.accepted = accepted
        if self.early is not None and not self.future.done():
            self.future.set_result(self._answer(self.early))

    def answered(self, raw: bytes, key: str) -> bool:
        """Takes an encoded reply, which ends the future, unless other answers follow (True).
        key: the Redis key that it was read from, for the log
        """
        if self.future.done():
            return False
        if self.early is not None:
            # After a retry answers may come again.
            return True
        self.replied_ns = time.time_ns()
        self.span.replied()
        try:
            message = read_reply(raw)
        except FAILURES as failure:
            noted(key, failure)
            self.future.set_exception(unreadable_answer(self))
            return False
        if message.notice:
            self._has_slot(message)
            return True
        if message.number and self.take is not None:
            return self._one_of_many(message, self.take)
        self._end(message)
        return self.early is not None

    def _one_of_many(self, message: ReplyMessage, take: Callable[[Answer | MeshError], None]) -> bool:
        """Hands an answer of a decoupled model on, once: after a takeover, or for a retry, answers may come again."""
        number = message.number
        if number > self.taken + 1:
            self.future.set_exception(lost_answers(self, number, message.step))
            return False
        if not message.more:
            if number <= self.taken and not message.error_code:
                # A model that ran again had less to say than the first time. What it says last was handed on before.
                message = msgspec.structs.replace(message, outputs=(), empty=True)
            self._end(message)
            return self.early is not None
        if number > self.taken:
            self.taken, self.heard = number, time.monotonic()
            take(error_of(message) if message.error_code else self._answer(message))
        return True

    @property
    def waits(self) -> bool:
        """Whether the request has asked about its wait for a slot, and still waits, as far as is known."""
        return self.wait is not None and self.wait.waited_ms is None and not self.future.done()

    def foretold(self, outlook: Outlook) -> None:
        """The request's place in the line and the time that it will wait, as they are now known."""
        assert self.wait is not None, "it has asked"
        before, self.wait.outlook = self.wait.outlook, outlook
        if before is None or before.place != outlook.place or (before.wait_ms is None) != (outlook.wait_ms is None):
            self._say({f"sequence_{name}": value for name, value in outlook.facts.items()})

    def _has_slot(self, notice: ReplyMessage) -> None:
        waited_ms = notice.parameters[WAITED_MS]
        if self.wait is not None and isinstance(waited_ms, int):
            # After a takeover it may wait once more.
            self.wait.waited_ms = (self.wait.waited_ms or 0) + waited_ms
            self._say({WAITED_MS: self.wait.waited_ms})

    def _say(self, parameters: dict[str, Parameter]) -> None:
        if self.hear is not None:
            self.hear(self._answer(ReplyMessage("", parameters=parameters, more=True)))

    def _end(self, message: ReplyMessage) -> None:
        self.take = None
        if message.error_code:
            self.future.set_exception(self._error(message))
        elif self.call.run_info and self.accepted is None and self.admitted.sequence is not None:
            # What Redis says of the step comes over another connection, and tells the run.
            self.early = message
        else:
            self.future.set_result(self._answer(message))

    def ended(self) -> None:
        """Answers a request that ended its sequence, without outputs."""
        if not self.future.done():
            self.future.set_result(self._answer(ReplyMessage(self.admitted.message.version)))

    def failed(self, error: MeshError) -> None:
        """Ends the future with an error, unless it has ended already, or an answer waits for the name of its run."""
        if self.future.done():
            return
        if self.early is not None:
            self.future.set_result(self._answer(self.early))
        else:
            self.future.set_exception(error)

    def _error(self, message: ReplyMessage) -> MeshError:
        error, wait = error_of(message), self.wait
        if wait is not None:
            if wait.refusal is not None and error.code is Code.CANCELLED:
                # It may have got its slot just before it was taken back.
                return wait.refusal
            if wait.waited_ms is None:
                error.outlook = wait.outlook
        return error

    def _answer(self, message: ReplyMessage) -> Answer:
        call, made = self.call, self.admitted.session_id
        parameters: Mapping[str, Parameter] = message.parameters
        wait = self.wait
        run = self.accepted.run if call.run_info and self.accepted is not None else ""
        if made is not None or call.expected_step is not None or wait is not None or run:
            parameters = dict(parameters)
            if wait is not None and wait.waited_ms is not None:
                parameters[WAITED_MS] = wait.waited_ms
            if made is not None:
                parameters["sequence_id"] = made
            if call.expected_step is not None and message.step:
                parameters["sequence_step"] = message.step
            if run:
                parameters["sequence_run"] = run
        return Answer(
            message,
            self.record,
            message.version or self.admitted.message.version,
            call.request_id,
            made or (call.session_id if self.admitted.sequence else None),
            parameters,
        )


def end_span(span: StepSpan, done: asyncio.Future[Answer]) -> None:
    """The request is over. Its span says what became of it."""
    if done.cancelled():
        span.end("the caller left", Code.CANCELLED)
    elif error := done.exception():
        span.end(str(error), error.code if isinstance(error, MeshError) else type(error).__name__)
    else:
        span.end()


def error_of(message: ReplyMessage) -> MeshError:
    """The error in a reply of an executor or of the scheduler. Its class says what the client can do."""
    code = code_of(message.error_code)
    error: MeshError
    if message.reason:
        error = SequenceError(message.error, message.reason, message.step, code)
    elif code is Code.UNAVAILABLE:
        error = UnavailableError(message.error)
    elif code in (Code.INTERNAL, Code.UNKNOWN):
        error = ModelError(message.error, code)
    else:
        error = RequestError(message.error, code)
    # One caller of many who gives way hears nothing of the step, which goes on.
    error.accepted = message.reason != Reason.BUSY
    return error


def lost_answers(pending: PendingRequest, number: int, step: int) -> MeshError:
    """The error of a caller that cannot have all answers of a decoupled model. number: of the first that there is"""
    model = f"model '{pending.call.model}'"
    error: MeshError
    if pending.admitted.sequence is None:
        error = UnavailableError(f"answers of the request to {model} were lost: send it again")
    else:
        text = (
            f"the step of sequence {pending.admitted.message.correlation_id} of {model} has answers from "
            f"{pending.taken + 1} to {number - 1} that are kept no longer: with 'sequence_answer' {number} it can be "
            "sent again for the later ones"
        )
        error = SequenceError(text, Reason.ANSWERED, step)
    error.accepted = True
    return error


def unreadable_answer(pending: PendingRequest) -> MeshError:
    """The error of a request whose reply this gateway cannot decode."""
    request = f"a request to model '{pending.call.model}'"
    if pending.admitted.sequence is not None:
        request = f"a step of sequence {pending.admitted.message.correlation_id} of model '{pending.call.model}'"
    error = MeshError(f"{request} was answered, but its answer cannot be read: the log names the key", Code.INTERNAL)
    error.accepted = True
    return error

"""One caller who waits for an answer, from admission to the future's end.

The future is the caller's. Whatever ends it (an answer, an error, the caller leaving) ends it once; later news of the
same request is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import msgspec

from gateway.requests.admission import Admitted, InferCall, Parameter
from shared.contract.errors import Code, MeshError, ModelError, RequestError, SequenceError, UnavailableError, code_of
from shared.contract.ids import ShardId
from shared.contract.messages import ModelRecord, ReplyMessage, read_reply
from shared.store.reading import FAILURES, noted
from shared.traces.tracing import NO_STEP, StepSpan


class Answer(msgspec.Struct, frozen=True):
    """A successful inference.

    message        the executor's reply; its outputs are the ones asked for, in the order of the configuration
    model          the record that the request was checked against
    version        the version that ran
    request_id     as the caller gave it, "" for none
    session_id     what to put into `Inference-Session-Id`: the caller's, or the one that was made; None for neither
    sequence_step  the step's number since START; 0 for a stateless model
    parameters     the response's parameters: the model's own, and `sequence_id` of a sequence that the server named,
                   `sequence_step` where the request numbered its steps
    """

    message: ReplyMessage
    model: ModelRecord
    version: str
    request_id: str
    session_id: str | None
    sequence_step: int
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict[str, Parameter])


class Accepted(NamedTuple):
    """What the mesh calls a request that it has accepted. birth: of its sequence; both empty for a stateless one."""

    birth: str = ""
    step: int = 0


class User(Protocol):
    """Who sends the steps of sequences (`gateway.requests.orphans`)."""

    def used(self, waiting: PendingRequest) -> None:
        """The mesh has accepted this step, or knew it."""
        ...


class PendingRequest:
    """A request on its way.

    token       its name in reply streams, unique within this gateway's life
    user        wants to know when it is accepted; None: nobody does
    span        records what happens to it, if it is traced
    accepted    set when Redis has said so
    withdrawn   its caller has left, and it is to be given up
    sent        when it was sent last; seconds, monotonic
    first_sent  when it was first sent, if the answer to that was lost; likewise
    """

    __slots__ = (
        "accepted",
        "admitted",
        "call",
        "first_sent",
        "future",
        "record",
        "sent",
        "shard",
        "span",
        "token",
        "user",
        "withdrawn",
    )

    def __init__(
        self,
        call: InferCall,
        record: ModelRecord,
        admitted: Admitted,
        future: asyncio.Future[Answer],
        *,
        shard: ShardId,
        token: str,
        span: StepSpan = NO_STEP,
    ) -> None:
        self.call = call
        self.record = record
        self.admitted = admitted
        self.future = future
        self.shard = shard
        self.token = token
        self.span = span
        self.accepted: Accepted | None = None
        self.user: User | None = None
        self.withdrawn = False
        self.sent = 0.0
        self.first_sent: float | None = None

    @property
    def repeatable(self) -> bool:
        """Whether sending it again cannot make the model run twice on one sequence.

        The mesh knows a step by its request id or its number, and a stateless request leaves nothing behind.
        """
        return self.admitted.sequence is None or bool(self.call.request_id) or self.call.expected_step is not None

    def answered(self, raw: bytes, key: str) -> None:
        """The encoded reply has come. key: where it was read."""
        if self.future.done():
            return
        self.span.replied()
        try:
            message = read_reply(raw)
        except FAILURES as failure:
            noted(key, failure)
            self.future.set_exception(unreadable_answer(self))
            return
        if message.error_code:
            self.future.set_exception(error_of(message))
        else:
            self.future.set_result(self._answer(message))

    def failed(self, error: MeshError) -> None:
        """There will be no answer."""
        if not self.future.done():
            self.future.set_exception(error)

    def _answer(self, message: ReplyMessage) -> Answer:
        call, made = self.call, self.admitted.session_id
        parameters: Mapping[str, Parameter] = message.parameters
        if made is not None or call.expected_step is not None:
            parameters = dict(parameters)
            if made is not None:
                parameters["sequence_id"] = made
            if call.expected_step is not None and message.step:
                parameters["sequence_step"] = message.step
        return Answer(
            message,
            self.record,
            message.version or self.admitted.message.version,
            call.request_id,
            made or (call.session_id if self.admitted.sequence else None),
            message.step,
            parameters,
        )


def error_of(message: ReplyMessage) -> MeshError:
    """The error that an executor (or the scheduler) answered with, as the family that says what the caller can do."""
    error = _error_of(message)
    error.accepted = True
    return error


def unreadable_answer(waiting: PendingRequest) -> MeshError:
    """The error of a request whose answer is there, and is none that this gateway can read."""
    request = f"a request to model '{waiting.call.model}'"
    if waiting.admitted.sequence is not None:
        request = f"a step of sequence {waiting.admitted.message.correlation_id} of model '{waiting.call.model}'"
    error = MeshError(f"{request} was answered, but its answer cannot be read: the log names the key", Code.INTERNAL)
    error.accepted = True
    return error


def _error_of(message: ReplyMessage) -> MeshError:
    code = code_of(message.error_code)
    if message.reason:
        return SequenceError(message.error, message.reason, message.step, code)
    match code:
        case Code.UNAVAILABLE:
            return UnavailableError(message.error)
        case Code.INTERNAL | Code.UNKNOWN:
            return ModelError(message.error, code)
        case _:
            return RequestError(message.error, code)

"""What can go wrong, split by what the caller can do.

    SeqmeshError
    ├── NoAnswer            in time; the same call again goes on with the same step
    │   └── NotDescribed    what the model's inputs are was not told: nothing of the step was sent
    ├── NotEnded            a sequence that cannot be ended without a step: it is left to its idle time
    ├── OutcomeUnknown      the server does not number steps, and the connection broke: only a new sequence is sure
    ├── NotNumbered         the server does not number steps, and `strict` is on
    ├── WrongAnswer         the server says what the protocol does not allow
    ├── WrongToken          a token that this library did not write, or that was cut
    └── StepRefused         the server's error: `reason`, `code`, `last_step`, `counted`
        ├── SequenceGone    begin another sequence
        │   └── NeverSeen, SequenceEnded, SequenceExpired, SequenceFailed, SequenceLost, SequenceCancelled
        ├── StepMismatch    the sequence is elsewhere than its caller believes
        │   └── SequenceExists, WrongStep, AnswerDropped
        └── TryLater        repeated already until the time was over; the same call again is right
            └── StepLate, SequenceBusy, BacklogFull, WaitTooLong, OverQuota

Every class has a `remedy`. `REASONS` names the class of each reason that a mesh gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class SeqmeshError(Exception):
    """The base of every error of this library. `remedy` says what the caller can do."""

    remedy: ClassVar[str] = ""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"{self.text.rstrip()} ({self.remedy})" if self.remedy else self.text


class NoAnswer(SeqmeshError, TimeoutError):
    """No gateway answered in time; the text ends with what the last one said. Whether the step ran, or the sequence was
    ended, is not known.
    """

    remedy = (
        "Call again. A step with the same inputs is the same step, and does not run twice; an end is safe to repeat."
    )


class NotDescribed(NoAnswer):
    """No gateway said in time what the inputs of the model are, which a list or a single array does not tell."""

    remedy = "Look at the address, and at what stands between client and server. Nothing of the step was sent."


class NotEnded(SeqmeshError):
    """No answer has told the client how the mesh calls this run of the sequence: it might end another one."""

    remedy = "It ends when its model's idle time is over, or with a step that has last=True."


class OutcomeUnknown(SeqmeshError):
    """The connection broke, and this server runs a repeated step again. Nobody can tell whether the step ran."""

    remedy = "Begin another sequence, or serve the model by seqmesh."


class NotNumbered(SeqmeshError):
    """The server is no mesh that numbers steps, for example a Triton."""

    remedy = "Client(..., strict=False) sends every step once, and a broken connection ends the sequence."


class WrongAnswer(SeqmeshError):
    """The server says what the protocol does not allow: it is no inference server, or of an unknown release."""

    remedy = "Look at the address, and at what stands between client and server."


class WrongToken(SeqmeshError):
    """This text is no token of a sequence, was cut on its way, or is of a newer release."""

    remedy = "Begin another sequence, or update seqmesh-client."


class StepRefused(SeqmeshError):
    """The server's own error about a step. Without a more exact class it is about the request or the model.

    reason     the mesh's word, "" where it gives none
    code       name of the error's kind: INVALID_ARG, INTERNAL, UNAVAILABLE ...; "" where the server gives none
    last_step  the last step that the mesh had accepted, -1 where it does not say
    counted    True: the step had been accepted and has its number, the next one goes on behind it (a model that fails a
               step leaves the state as it was). False: the step was never part of the sequence; it may be corrected
    """

    remedy = "Correct what the text names: the request, or the model."
    reason: str = ""

    def __init__(
        self, text: str, *, reason: str = "", code: str = "", last_step: int = -1, counted: bool = False
    ) -> None:
        super().__init__(text)
        self.reason = reason or self.reason
        self.code = code
        self.last_step = last_step
        self.counted = counted


class SequenceGone(StepRefused):
    """There is no such sequence any more, or there never was."""

    remedy = "Begin another sequence."


class NeverSeen(SequenceGone):
    """The mesh knows no sequence of this id, or has forgotten it."""

    reason = "never_seen"


class SequenceEnded(SequenceGone):
    """The sequence's last step was accepted before."""

    reason = "ended"


class SequenceExpired(SequenceGone):
    """The sequence was idle for longer than its model allows."""

    reason = "expired"
    remedy = "Begin another sequence. The model's max_sequence_idle_microseconds is the time that clients have."


class SequenceFailed(SequenceGone):
    """Its first step failed in the model, or the states of an ensemble's steps would differ."""

    reason = "failed"


class SequenceLost(SequenceGone):
    """The state is gone; the text says why, and what keeps the state of later sequences."""

    reason = "lost"


class SequenceCancelled(SequenceGone):
    """An operator or another client has ended the sequence, or a step was withdrawn."""

    reason = "cancelled"


class StepMismatch(StepRefused):
    """The sequence is not where its caller believes. Nothing has run."""


class SequenceExists(StepMismatch):
    """A sequence of this id is open. Its first step had other inputs, or its reply is kept no longer."""

    reason = "exists"
    remedy = "Take another id, or go on: client.sequence(model, id=..., after=error.last_step)."


class WrongStep(StepMismatch):
    """The mesh has this number with other inputs, or has forgotten steps: its Redis was set back."""

    reason = "wrong_step"
    remedy = (
        "A step without an outcome is sent again with the same inputs. If the mesh was set back, go on with the step "
        "behind error.last_step: client.sequence(model, id=..., after=error.last_step)."
    )


class AnswerDropped(StepMismatch):
    """The step ran long ago, and its answer is kept no longer."""

    reason = "answered"
    remedy = "Go on behind it: client.sequence(model, id=..., after=error.last_step)."


class TryLater(StepRefused):
    """Nothing is wrong with the step. It was repeated until its time was over."""

    remedy = "Call again with the same inputs, later."


class StepLate(TryLater):
    """A gateway lost Redis while it sent the step."""

    reason = "late"


class SequenceBusy(TryLater):
    """The sequence has too many open steps, or too many callers wait for one."""

    reason = "busy"


class BacklogFull(TryLater):
    """Too many sequences of the model wait for a slot."""

    reason = "backlog_full"


class WaitTooLong(TryLater):
    """The sequence would wait for a slot for longer than the request's `sequence_wait_max_ms`."""

    reason = "wait_too_long"


class OverQuota(TryLater):
    """The tenant of the request (header `seqmesh-tenant`) has as many sequences, or sends as much, as it may."""

    reason = "quota"


REASONS: Mapping[str, type[StepRefused]] = {
    one.reason: one for kind in (SequenceGone, StepMismatch, TryLater) for one in kind.__subclasses__()
}
"""The class of each reason. A reason of a newer mesh, which is not here, is a plain `StepRefused` (or `TryLater`)."""

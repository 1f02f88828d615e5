"""Errors, split first by what the caller should do.

    MeshError                      carries a transport-free `Code`; gateways map it to HTTP and gRPC status
    ├── RequestError               fix the request: INVALID_ARG, NOT_FOUND, UNSUPPORTED, ALREADY_EXISTS
    │   ├── SequenceError          why a step of a sequence was not done: reason + last committed step (`OUTCOMES`)
    │   └── NotDoneError           why something was not done with a whole sequence
    ├── UnavailableError           try again later: a bound was reached, a service is missing
    │   └── NotReadyError          ... and no other gateway would say otherwise
    ├── ModelError                 the model itself failed: INTERNAL
    └── LoadError                  a model cannot be loaded
        └── ConfigError            ... because its configuration is wrong

Messages are Triton's where Triton has one (triton-spec: docs/triton); they name the model, the sequence and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Self

from shared.contract.forecast import Outlook
from shared.contract.limits import ERROR_CHARACTERS_MAX

ELLIPSIS = " [...] "
"""Stands for the part of a text that was left out."""

FAILED = 70
"""Exit code of an executor that has logged why it ends (EX_SOFTWARE of sysexits.h). The usual codes would not be
unambiguous: a model's code may end its executor with any of them.
"""


class Explained(StrEnum):
    """Words with a meaning each; a member is its word."""

    meaning: str

    def __new__(cls, word: str, meaning: str) -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning = meaning
        return member


class Code(Explained):
    """Triton's error codes (triton-spec 5.2), and two more: RESOURCE_EXHAUSTED and FORBIDDEN."""

    UNKNOWN = "UNKNOWN", "The error has no other code. A python model may raise it."
    INTERNAL = "INTERNAL", "The model failed, or the mesh did."
    NOT_FOUND = "NOT_FOUND", "The model, the version or the file is not there."
    INVALID_ARG = "INVALID_ARG", "The request is wrong. Sending it again unchanged does not help."
    UNAVAILABLE = "UNAVAILABLE", "Nothing is wrong with the request, but the mesh cannot take it now. Try again later."
    UNSUPPORTED = "UNSUPPORTED", "The mesh does not do what is asked for."
    ALREADY_EXISTS = "ALREADY_EXISTS", "What the request would begin or run was begun or run before."
    CANCELLED = "CANCELLED", "The request was cancelled before it ran."
    RESOURCE_EXHAUSTED = (
        "RESOURCE_EXHAUSTED",
        "This caller asks for too much at once: wait for an answer first. Or a request is too large: the text says so.",
    )
    FORBIDDEN = "FORBIDDEN", "The operator has not allowed this here."


class Reason(StrEnum):
    """Machine-readable cause of a sequence error, beside its text."""

    NEVER_SEEN = "never_seen"
    ENDED = "ended"
    EXPIRED = "expired"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"
    LATE = "late"
    WRONG_STEP = "wrong_step"
    BUSY = "busy"
    BACKLOG_FULL = "backlog_full"
    EXISTS = "exists"
    ANSWERED = "answered"
    WAIT_TOO_LONG = "wait_too_long"
    QUOTA = "quota"


def code_of(text: str) -> Code:
    """A code as another service or a model wrote it. One that is not known here is INTERNAL."""
    return Code(text) if text in CODES else Code.INTERNAL


CODES = frozenset(Code)


class Retry(Explained):
    """What a client can do about a step that was not done."""

    SAME = "same", "The same request may be sent again after a while."
    START = "start", "The sequence is not there. Begin it again with START."
    NO = "no", "Sending the request again does not help."


@dataclass(frozen=True, slots=True)
class ReasonMeaning:
    """What a reason means to the caller.

    happened  what became of the sequence or the step
    remedy    what a client can do
    """

    code: Code
    retry: Retry
    happened: str
    remedy: str


BEGIN_ANEW = "Begin the sequence again with START."
_over = partial(ReasonMeaning, Code.INVALID_ARG, Retry.START, remedy=BEGIN_ANEW)
"""Of a sequence that is not there (any more)."""

OUTCOMES: Mapping[str, ReasonMeaning] = {
    Reason.NEVER_SEEN: _over(
        "The mesh knows no sequence of this id: none began, or what was known of it was forgotten "
        "(`--tombstone-seconds`)."
    ),
    Reason.ENDED: _over("The sequence has ended: END was accepted."),
    Reason.EXPIRED: _over(
        "The sequence was idle for longer than its model allows.",
        remedy=f"{BEGIN_ANEW} Raise the model's `max_sequence_idle_microseconds` if clients need more time.",
    ),
    Reason.FAILED: _over(
        "The step with START failed in the model, so there is no state. Or the states of an ensemble's steps would "
        "differ, because one of them could not do a step."
    ),
    Reason.LOST: _over(
        "The sequence's state is gone: only its executor had it, the model was unloaded or loaded anew, its "
        "`checkpoint` or `restore` failed, or too many executors were lost with one step.",
        remedy=f"{BEGIN_ANEW} The error's text names what keeps the state of later sequences.",
    ),
    Reason.CANCELLED: _over(
        "The caller of an earlier step had gone: that step did not run, so the later ones cannot. Or an operator or a "
        "client has ended the sequence without a step."
    ),
    Reason.LATE: ReasonMeaning(
        Code.INVALID_ARG,
        Retry.NO,
        "The gateway lost Redis while it sent the step, and the sequence went on meanwhile. Nobody can tell whether "
        "the step was accepted.",
        "Compare `last_step` with the steps that were answered. A step that carries its number as `sequence_step`, or "
        "a request id, can be sent again safely.",
    ),
    Reason.WRONG_STEP: ReasonMeaning(
        Code.INVALID_ARG,
        Retry.NO,
        "The step's number (`sequence_step`) is not the next one, or belongs to another request.",
        "Go on with the step that the error's text names.",
    ),
    Reason.EXISTS: ReasonMeaning(
        Code.ALREADY_EXISTS,
        Retry.NO,
        "A START with `sequence_step` 1 meets an open sequence of this id that is beyond its first step.",
        "Go on behind `last_step`, or begin anew with a START that has no `sequence_step`.",
    ),
    Reason.ANSWERED: ReasonMeaning(
        Code.ALREADY_EXISTS,
        Retry.NO,
        "The step was answered before, and its reply is kept no longer. It does not run again.",
        "Go on behind `last_step`. The model parameters `retry_replies` and `retry_reply_bytes` keep more replies.",
    ),
    Reason.BUSY: ReasonMeaning(
        Code.RESOURCE_EXHAUSTED,
        Retry.SAME,
        "The sequence has too many open steps (`--sequence-inflight-max`), or too many callers wait for the same step.",
        "Wait for an answer, then send the same request again.",
    ),
    Reason.BACKLOG_FULL: ReasonMeaning(
        Code.UNAVAILABLE,
        Retry.SAME,
        "Too many sequences of the model wait for a slot (`--backlog-max`), or are live (`--live-max`). The sequence "
        "was not started.",
        "Send the same request again later.",
    ),
    Reason.WAIT_TOO_LONG: ReasonMeaning(
        Code.UNAVAILABLE,
        Retry.SAME,
        "The sequence would wait for a slot for longer than its request allows (`sequence_wait_max_ms`). It was not "
        "started.",
        "Send the same request again later: `wait_ms` says when, if it is known.",
    ),
    Reason.QUOTA: ReasonMeaning(
        Code.RESOURCE_EXHAUSTED,
        Retry.SAME,
        "The request's tenant has as many live sequences as it may, or sends more requests a second than it may "
        "(`seqmesh tenants`). Nothing was begun or run.",
        "End a sequence, or send the same request again later: `wait_ms` says when, if it is known.",
    ),
}
"""The one table of reasons; `gateway.requests.status` turns codes into statuses of HTTP and gRPC. Two answers have
another code, that of the step's own fate: a step that was cancelled before it ran (`cancelled`, CANCELLED), and a step
with which too many executors were lost (`lost`, INTERNAL).
"""


TRY_LATER = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
"""Codes that allow a retry if the reason is unknown."""


def shortened(text: str, characters: int) -> str:
    """The text without its middle, about `characters` long.
    More is kept of the end, which matters most in a traceback.
    """
    return text[: characters // 3] + ELLIPSIS + text[len(text) - 2 * characters // 3 :]


def sendable(text: str) -> str:
    """A text that UTF-8 can encode: a model's text may hold half surrogate pairs, from bytes that were no text. A long
    text loses its middle, because it may quote a request.
    """
    if len(text) > ERROR_CHARACTERS_MAX:
        text = shortened(text, ERROR_CHARACTERS_MAX)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


class MeshError(Exception):
    """Base of every error that a caller may see.

    accepted  True: the request had been accepted, and this is its answer; False: it was refused
    outlook   of a request that has asked about its wait for a slot: what was known of it when it was refused; else None
    wait_ms   when the same request would be taken, if that is known without an outlook
    """

    code: Code = Code.UNKNOWN
    accepted: bool = False
    outlook: Outlook | None = None
    wait_ms: int | None = None

    def __init__(self, message: str, code: Code | None = None) -> None:
        self.message = sendable(message)
        super().__init__(self.message)
        if code is not None:
            self.code = code

    @property
    def facts(self) -> dict[str, str | int]:
        """The machine-readable part beside code and text, in both protocols."""
        if self.outlook is not None:
            return dict(self.outlook.facts)
        return {} if self.wait_ms is None else {"wait_ms": self.wait_ms}

    @property
    def retry_after_s(self) -> int | None:
        """When it is worth trying again, whole seconds from 1; None: nobody knows."""
        wait_ms = self.outlook.wait_ms if self.outlook is not None else self.wait_ms
        return None if wait_ms is None else max(1, (wait_ms + 999) // 1000)

    def within(self, where: str) -> Self:
        """Returns itself with a text that says first where it happened."""
        self.message = sendable(where + self.message)
        self.args = (self.message,)
        return self

    def released(self) -> Self:
        """Returns itself without traceback and causes, whose frames would keep the request's data in memory."""
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self


class RequestError(MeshError):
    """The request is wrong; sending it again unchanged will not help."""

    code = Code.INVALID_ARG


class SequenceError(RequestError):
    """A step was not done, for a reason that says what its caller can do.

    reason     a `Reason`; or, from a service of a newer release, a word that this release does not know
    last_step  the last step that the mesh had accepted of the sequence, 0 if there was none; in the answer to an
               accepted step that was not done, the step before it. None: nobody has looked
    code       the reason's own (`OUTCOMES`) unless another one is given
    """

    def __init__(self, message: str, reason: str, last_step: int | None = 0, code: Code | None = None) -> None:
        outcome = OUTCOMES.get(reason)
        code = code or (outcome.code if outcome else Code.INTERNAL)
        super().__init__(message, code)
        self.reason = reason
        self.last_step = last_step
        self._retry = outcome.retry if outcome else Retry.SAME if code in TRY_LATER else Retry.NO

    @property
    def facts(self) -> dict[str, str | int]:
        """Also reason, last step, and whether to send the request again."""
        known = {} if self.last_step is None else {"last_step": self.last_step}
        return {"reason": str(self.reason), **known, "retry": self._retry.value, **super().facts}


class NotDoneError(RequestError):
    """What was asked for with a whole sequence is not done: a move, a pause, a copy, a replay. The text says why."""


class UnavailableError(MeshError):
    """Nothing is wrong with the request; the mesh cannot take it now."""

    code = Code.UNAVAILABLE


class NotReadyError(UnavailableError):
    """The mesh cannot take it now, and every gateway would say so: its model is not served, or its queue is full."""


class ModelError(MeshError):
    """The model raised or returned the wrong thing."""

    code = Code.INTERNAL


class LoadError(MeshError):
    """A model cannot be loaded."""

    code = Code.INVALID_ARG


class ConfigError(LoadError):
    """A model's configuration is wrong, with Triton's message."""

"""Errors, split first by what the caller should do.

    MeshError                      carries a transport-free `Code`; gateways map it to HTTP and gRPC status
    ├── RequestError               fix the request: INVALID_ARG, NOT_FOUND, UNSUPPORTED, ALREADY_EXISTS
    │   └── SequenceError          why a step of a sequence was not done: reason + last committed step (`OUTCOMES`)
    ├── UnavailableError           try again later: a bound was reached, a service is missing
    ├── ModelError                 the model itself failed: INTERNAL
    └── LoadError                  a model cannot be loaded
        └── ConfigError            ... because its configuration is wrong

Messages are Triton's where Triton has one (triton-spec: docs/triton); they name the model, the sequence and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from shared.contract.limits import ERROR_CHARACTERS_MAX

ELLIPSIS = " [...] "
"""In the place of what was left out of a text."""

FAILED = 70
"""Exit code of an executor that has logged why it ends (EX_SOFTWARE of sysexits.h). A model's code may end its executor
with any of the usual ones."""


class Code(StrEnum):
    """Triton's error codes (triton-spec 5.2), and two more. RESOURCE_EXHAUSTED: it is the caller who asks for too much.
    FORBIDDEN: the operator has not allowed it here."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FORBIDDEN = "FORBIDDEN"


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


def code_of(text: str) -> Code:
    """A code as another service wrote it. One that only a newer release knows is INTERNAL to its caller."""
    return Code(text) if text in CODES else Code.INTERNAL


CODES = frozenset(Code)


class Retry(StrEnum):
    """What a client can do about a step that was not done.

    SAME   nothing was changed: the same request may be sent again, after a while
    START  the sequence is not there: begin it again, with START
    NO     sending the request again does not help
    """

    SAME = "same"
    START = "start"
    NO = "no"


@dataclass(frozen=True, slots=True)
class ReasonMeaning:
    """What a reason means to the caller."""

    code: Code
    retry: Retry


OUTCOMES: Mapping[str, ReasonMeaning] = {
    Reason.NEVER_SEEN: ReasonMeaning(Code.INVALID_ARG, Retry.START),
    Reason.ENDED: ReasonMeaning(Code.INVALID_ARG, Retry.START),
    Reason.EXPIRED: ReasonMeaning(Code.INVALID_ARG, Retry.START),
    Reason.FAILED: ReasonMeaning(Code.INVALID_ARG, Retry.START),
    Reason.LOST: ReasonMeaning(Code.INVALID_ARG, Retry.START),
    Reason.CANCELLED: ReasonMeaning(Code.INVALID_ARG, Retry.START),
    Reason.LATE: ReasonMeaning(Code.INVALID_ARG, Retry.NO),
    Reason.WRONG_STEP: ReasonMeaning(Code.INVALID_ARG, Retry.NO),
    Reason.EXISTS: ReasonMeaning(Code.ALREADY_EXISTS, Retry.NO),
    Reason.ANSWERED: ReasonMeaning(Code.ALREADY_EXISTS, Retry.NO),
    Reason.BUSY: ReasonMeaning(Code.RESOURCE_EXHAUSTED, Retry.SAME),
    Reason.BACKLOG_FULL: ReasonMeaning(Code.UNAVAILABLE, Retry.SAME),
}
"""The one table of reasons; `gateway.requests.status` turns codes into statuses of HTTP and gRPC. Two answers have the
code of what happened to the very step instead: one that was cancelled before it ran (`cancelled`, CANCELLED), and one
that too many executors were lost with (`lost`, INTERNAL)."""


TRY_LATER = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
"""Codes that say what a caller can do where the reason does not."""


def shortened(text: str, characters: int) -> str:
    """The text with its middle left out, about so many characters. Of a traceback the end matters most, of other texts
    the beginning."""
    return text[: characters // 3] + ELLIPSIS + text[len(text) - 2 * characters // 3 :]


def sendable(text: str) -> str:
    """A text that UTF-8 has a form for: a model's may hold half surrogate pairs, from bytes that were no text. Its
    middle is left out where it is long: what a stranger sent is quoted in it."""
    if len(text) > ERROR_CHARACTERS_MAX:
        text = shortened(text, ERROR_CHARACTERS_MAX)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


class MeshError(Exception):
    """Base of every error that a caller may see.

    accepted  the request had been accepted, and this is its answer; otherwise it was refused
    """

    code: Code = Code.UNKNOWN
    accepted: bool = False

    def __init__(self, message: str, code: Code | None = None) -> None:
        self.message = sendable(message)
        super().__init__(self.message)
        if code is not None:
            self.code = code

    def released(self) -> Self:
        """Itself, without what it came from: the frames of a traceback keep alive whatever the request had brought."""
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self


class RequestError(MeshError):
    """The request is wrong; sending it again unchanged will not help."""

    code = Code.INVALID_ARG


class SequenceError(RequestError):
    """A step was not done, for a reason that says what its caller can do.

    reason     a `Reason`; or, from a service of a newer release, a word that this one does not know
    last_step  the last committed step of the sequence, 0 when there was none
    code       the reason's own (`OUTCOMES`) unless another one is given
    """

    def __init__(self, message: str, reason: str, last_step: int = 0, code: Code | None = None) -> None:
        outcome = OUTCOMES.get(reason)
        code = code or (outcome.code if outcome else Code.INTERNAL)
        super().__init__(message, code)
        self.reason = reason
        self.last_step = last_step
        self._retry = outcome.retry if outcome else Retry.SAME if code in TRY_LATER else Retry.NO

    @property
    def facts(self) -> dict[str, str | int]:
        """What machines read of it, in both protocols: reason, last step, and whether to send it again."""
        return {"reason": str(self.reason), "last_step": self.last_step, "retry": self._retry.value}


class UnavailableError(MeshError):
    """Nothing is wrong with the request; the mesh cannot take it now."""

    code = Code.UNAVAILABLE


class ModelError(MeshError):
    """The model raised or returned the wrong thing."""

    code = Code.INTERNAL


class LoadError(MeshError):
    """A model cannot be loaded."""

    code = Code.INVALID_ARG


class ConfigError(LoadError):
    """A model's configuration is wrong, with Triton's message."""

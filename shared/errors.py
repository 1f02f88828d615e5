"""Errors, split first by what the caller should do.

    MeshError                      carries a transport-free `Code`; gateways map it to HTTP and gRPC status
    ├── RequestError               fix the request: INVALID_ARG, NOT_FOUND, UNSUPPORTED, ALREADY_EXISTS
    │   └── SequenceError          the request names a sequence that is not there: reason + last committed step
    ├── UnavailableError           try again later: a bound was reached, a service is missing
    ├── ModelError                 the model itself failed: INTERNAL
    └── LoadError                  a model cannot be loaded
        └── ConfigError            ... because its configuration is wrong

Messages are Triton's where Triton has one (triton-spec); they name the model, the sequence and the remedy.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """Triton's error codes (triton-spec 5.2)."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"


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


def sendable(text: str) -> str:
    """A text that UTF-8 has a form for: a model's may hold half surrogate pairs, from bytes that were no text."""
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


class RequestError(MeshError):
    """The request is wrong; sending it again unchanged will not help."""

    code = Code.INVALID_ARG


class SequenceError(RequestError):
    """The request's sequence does not exist (any more), or not at that step.

    last_step  the last committed step of the sequence, 0 when there was none
    """

    def __init__(self, message: str, reason: Reason, last_step: int = 0, code: Code | None = None) -> None:
        super().__init__(message, code)
        self.reason = reason
        self.last_step = last_step


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

"""Response senders: how a decoupled `model.py` answers its requests (triton-spec 8).

A request stays open until its last answer. A model that lets go of the request and of its sender before that can never
answer it any more: then the request fails, with an error that says so. Python tells it when the last reference goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from executor.engine.base import Answers, RowError, RowResult
from executor.engine.python import triton_python_backend_utils as interface
from executor.engine.python.engine import RowRequest
from shared.contract.errors import Code

FORGOTTEN = (
    "the model let go of the request's response sender without TRITONSERVER_RESPONSE_COMPLETE_FINAL: no further answer "
    "can come"
)


class MadeAnswer:
    """An answer, and what moves the state on if it is the last one."""

    __slots__ = ("keep_state", "result")

    def __init__(self, result: RowResult | RowError, keep_state: Callable[[], None] | None = None) -> None:
        self.result = result
        self.keep_state = keep_state


Make = Callable[["interface.InferenceResponse | None", bool], MadeAnswer]
"""Checks a response and makes an answer of it; True: it is the last one. Does not raise."""


class ResponseSender(interface.InferenceResponseSender):
    """The sender of one request, in one pass over it."""

    __slots__ = ("_answers", "_closed", "_lock", "_make", "rescheduled")

    def __init__(self, make: Make, answers: Answers) -> None:
        self._make = make
        self._answers = answers
        self._lock = threading.Lock()
        self._closed = False
        self.rescheduled = False
        """The request comes back in another pass, with another sender."""

    def send(self, response: interface.InferenceResponse | None = None, flags: int = 0) -> None:
        last = flags == interface.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if flags and not last:
            raise interface.TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not last:
            raise interface.TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if not _is_response(response):
            raise interface.TritonModelException(
                f"Unable to send response. Expected an InferenceResponse, got {type(response).__name__}."
            )
        # Answers of several threads to one request get their numbers in the order in which they are checked.
        with self._lock:
            if self._closed:
                raise interface.TritonModelException("Unable to send response. Response sender has been closed.")
            self._closed = last
            made = self._make(response, last)
            if last:
                self._answers.end(made.result, made.keep_state)
            else:
                self._answers.send(made.result)

    def is_cancelled(self) -> bool:
        return self._answers.is_cancelled

    def fail(self, error: RowError) -> None:
        """Ends the request, if the model has not ended it."""
        # Without the lock, which a thread may hold that waits in `send`.
        self._closed = True
        self._answers.end(error)

    def __del__(self) -> None:
        if not (self._closed or self.rescheduled):
            self._answers.end(RowError(Code.INTERNAL, FORGOTTEN))


class DiscardedAnswers:
    """Nobody waits for the answers: warm-up, and null rows of the direct strategy. failure: the last answer's error"""

    is_cancelled = False

    def __init__(self) -> None:
        self.before: object = None
        self.failure: RowError | None = None

    def send(self, answer: RowResult | RowError) -> None: ...

    def end(self, last: RowResult | RowError, keep_state: Callable[[], None] | None = None) -> None:
        if isinstance(last, RowError):
            self.failure = last


class DecoupledRequest(RowRequest):
    """A request to a decoupled model, with its sender."""

    __slots__ = ("sender",)

    sender: ResponseSender

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def is_cancelled(self) -> bool:
        return self.sender.is_cancelled()


def _is_response(value: object) -> bool:
    """Asked of a value whose type a model may have promised wrongly."""
    return value is None or isinstance(value, interface.InferenceResponse)

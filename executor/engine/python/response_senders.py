"""Response senders: how a `model.py` answers its requests later, or a decoupled one several times (triton-spec 8).

A request stays open until its last answer. A model that lets go of the request and of its sender before that can never
answer it any more: then the request fails, with an error that says so. Python tells it when the last reference goes.

Source: python_backend, response_sender.cc.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from executor.engine.base import Answers, LateAnswer, RowError, RowResult
from executor.engine.python import triton_python_backend_utils as interface
from executor.engine.python.response import InferenceResponse
from shared.contract.errors import Code

_RAISED = "what a thread of the model has raised is in the executor's log"
FORGOTTEN = (
    "the model let go of the request's response sender without TRITONSERVER_RESPONSE_COMPLETE_FINAL: no further answer "
    f"can come; {_RAISED}"
)
UNANSWERED = f"the model let go of the request's response sender without a response: no answer can come; {_RAISED}"
SECOND = "Unable to send response. Non-decoupled model cannot send more than one response."
TOO_EARLY = "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
CLOSED = "Unable to send response. Response sender has been closed."
UNHEARD = "a request had been answered before execute failed, so its caller does not hear of it: %s"

log = logging.getLogger(__name__)


class MadeAnswer(msgspec.Struct, frozen=True, eq=False):
    """An answer, and what moves the state on if it is the last one."""

    result: RowResult | RowError
    keep_state: Callable[[], None] | None = None


Given = InferenceResponse | RowError | None
"""What becomes an answer: a response of the model, none with its last word, or what went wrong in place of one."""
Make = Callable[[Given, bool], MadeAnswer]
"""Checks a response and makes an answer of it; True: it is the last one. Does not raise."""


def is_final(response: object, flags: int) -> bool:
    """Whether the flags of a `send` say that nothing follows. Raises TritonModelException for what cannot be sent."""
    last = flags == interface.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    if flags and not last:
        raise interface.TritonModelException("Unable to send response. Unsupported flag provided.")
    if response is None and not last:
        raise interface.TritonModelException(
            "Inference Response object must be provided when the response flags is set to zero."
        )
    if response is not None and not isinstance(response, InferenceResponse):
        raise interface.TritonModelException(
            f"Unable to send response. Expected an InferenceResponse, got {type(response).__name__}."
        )
    return last


def end_forgotten(end: Callable[[RowError], None], error: RowError, *, asks: bool) -> None:
    """Ends a request whose sender the model has let go of. A destructor runs on any thread, in the middle of anything;
    so where the model is asked for its state, another thread does that.
    """
    if asks:
        threading.Thread(target=end, args=[error], name="seqmesh forgotten sender", daemon=True).start()
    else:
        end(error)


class ResponseSender(interface.InferenceResponseSender):
    """The sender of one request to a decoupled model, in one pass over it.

    asks  the model is asked for its state when the request fails
    """

    __slots__ = ("_answers", "_asks", "_closed", "_lock", "_make", "rescheduled")

    def __init__(self, make: Make, answers: Answers, *, asks: bool = False) -> None:
        self._make = make
        self._answers = answers
        self._asks = asks
        self._lock = threading.Lock()
        self._closed = False
        self.rescheduled = False
        """The request comes back in another pass, with another sender."""

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        last = is_final(response, flags)
        # Answers of several threads to one request get their numbers in the order in which they are checked.
        with self._lock:
            if self._closed:
                raise interface.TritonModelException(CLOSED)
            self._closed = last
            made = self._make(response, last)
            if last:
                self._answers.end(made.result, made.keep_state)
            else:
                self._answers.send(made.result)

    def is_cancelled(self) -> bool:
        return self._answers.is_cancelled

    def fail(self, error: RowError) -> None:
        """Ends the request; if the model has ended it, the log has the error."""
        # Without the lock, which a thread may hold that waits in `send`.
        if self._closed:
            log.error(UNHEARD, error.message)
            return
        self._closed = True
        made = self._make(error, True)  # noqa: FBT003 - see `Make`
        self._answers.end(made.result, made.keep_state)

    def __del__(self) -> None:
        if not (self._closed or self.rescheduled):
            end_forgotten(self.fail, RowError(Code.INTERNAL, FORGOTTEN), asks=self._asks)


class SoleSender(interface.InferenceResponseSender):
    """The sender of one request to a model that is not decoupled, in one pass over it.

    Its one response may come while `execute` runs: then it counts as returned. If none has come by the time it has
    returned, the request stays open (`left_open`).

    is_cancelled_now  whether the request is cancelled, while its batch runs: behind `execute`, too, where the instance
                      waits for the response to keep the order
    """

    __slots__ = ("_asks", "_closed", "_count", "_is_cancelled_now", "_late", "_lock", "_make", "_sent")

    def __init__(self, is_cancelled_now: Callable[[], bool]) -> None:
        self._is_cancelled_now = is_cancelled_now
        self._lock = threading.Lock()
        self._closed = False
        self._count = 0
        self._sent: InferenceResponse | None = None
        self._make: Callable[[InferenceResponse | RowError], MadeAnswer] | None = None
        self._asks = False
        self._late: LateAnswer | None = None

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        last = is_final(response, flags)
        with self._lock:
            if response is not None and self._count:
                raise interface.TritonModelException(SECOND)
            if response is None and not self._count:
                raise interface.TritonModelException(TOO_EARLY)
            if self._closed:
                raise interface.TritonModelException(CLOSED)
            self._closed = last
            self._count += 1
            if response is None:
                return
            if self._make is None or self._late is None:
                self._sent = response.as_it_is()
                return
            self._end(response)

    def _end(self, given: InferenceResponse | RowError) -> None:
        assert self._make is not None and self._late is not None, "left open"
        made = self._make(given)
        self._late.end(made.result, made.keep_state)

    def is_cancelled(self) -> bool:
        return self._is_cancelled_now() or (self._late is not None and self._late.is_cancelled)

    def close(self, returned: object) -> InferenceResponse | None:
        """The call is over, and with it the sender. The response that was sent. returned: by `execute`"""
        with self._lock:
            self._closed = True
            if isinstance(returned, InferenceResponse):
                if self._sent is not None:
                    log.error("%s One was sent, and one returned by execute, which is dropped.", SECOND)
                self._count += 1
            elif isinstance(returned, RowError) and self._sent is not None:
                log.error(UNHEARD, returned.message)
            return self._sent

    def left_open(
        self, make: Callable[[InferenceResponse | RowError], MadeAnswer], *, asks: bool
    ) -> InferenceResponse | LateAnswer:
        """The call is over, and returned nothing: the response that was sent; or else where it will come, made by
        `make`. asks: as of `ResponseSender`
        """
        with self._lock:
            if self._sent is not None:
                return self._sent
            self._make, self._asks, self._late = make, asks, LateAnswer()
            return self._late

    def __del__(self) -> None:
        if self._late is not None and not self._count:
            end_forgotten(self._end, RowError(Code.INTERNAL, UNANSWERED), asks=self._asks)


class DiscardedAnswers:
    """Nobody waits for the answers: warm-up, and null rows of the direct strategy. failure: the last answer's error"""

    is_cancelled = False

    def __init__(self) -> None:
        self.failure: RowError | None = None

    def send(self, answer: RowResult | RowError) -> None: ...

    def end(self, last: RowResult | RowError, keep_state: Callable[[], None] | None = None) -> None:
        if isinstance(last, RowError):
            self.failure = last

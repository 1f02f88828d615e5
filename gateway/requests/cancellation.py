"""Cancels requests whose client has left before the answer (triton-spec 1.8).

A client leaves by closing its HTTP connection, or by cancelling its RPC or its stream. In both protocols this cancels
the request's future. What happens to the request depends on how far it has come:

    not sent yet              `dispatch` drops it, unless it can be sent again and somebody waits for a step behind it
    on its way to Redis       it is withdrawn as soon as Redis has said that it accepted the request
    accepted, not running     a step of a sequence that waits for a slot ends the whole sequence; a step of a sequence
                              in a slot is cancelled when its turn comes, with all steps behind it; a stateless request
                              leaves its queue
    running                   it runs to its end, and its answer is dropped

A cancelled future does not always mean that the client has given up:

- A gateway that is stopping closes connections itself.
- A step with a request id or a number (`sequence_step`) can be sent again. A client that has only lost its connection
  must find its sequence as it was, so such a step runs, and its reply is kept.
"""

from __future__ import annotations

from gateway.requests.exchange.dispatch import Dispatch
from gateway.requests.waiting import PendingRequest


def caller_left(pending: PendingRequest, dispatch: Dispatch, *, is_stopping: bool) -> None:
    """Withdraws a request whose future was cancelled.

    is_stopping  this gateway stops, and so may itself be what closed the connection
    """
    if not is_stopping and is_given_up_with_its_caller(pending):
        # Set even while the request is on its way: `dispatch` then withdraws it when Redis has accepted it.
        pending.withdrawn = True
        if pending.accepted is not None:
            dispatch.withdraw(pending)
    if pending.accepted is None:
        dispatch.forget(pending)


def is_given_up_with_its_caller(pending: PendingRequest) -> bool:
    """Whether the request cannot be sent again: it is stateless, or a step with neither request id nor number."""
    return pending.admitted.sequence is None or not pending.repeatable

"""Callers who leave before their answer: what they asked for need not run any more (triton-spec 1.8).

A caller leaves by closing the HTTP connection, or by cancelling the RPC or the stream; either way the handler's wait
ends, and with it the request's future is cancelled. That is the one entry: `watch` sees it, for both protocols.

    not sent yet              it never is: `dispatch` drops it
    on its way to Redis       withdrawn as soon as it is known where it went
    accepted, not running     a step that waits for a slot takes its sequence with it; one in a slot is cancelled when
                              its turn comes, with all that are behind it; a stateless request leaves its queue
    running                   it goes on, and nobody hears its answer

Two things are no farewell. A gateway that is stopping cuts connections itself. And a step with a request id or with
its number (`sequence_step`) can be asked for again: whoever lost a connection would not find the sequence any more. It
runs, and its reply is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.requests.waiting import Answer, PendingRequest


class CancellationWatch:
    """Hands the accepted requests of callers who have left to `withdraw`, those that are not yet to `forget`.

    listens  False while connections may be closed by this gateway itself
    """

    def __init__(
        self,
        withdraw: Callable[[PendingRequest], None],
        forget: Callable[[PendingRequest], None],
        listens: Callable[[], bool],
    ) -> None:
        self._withdraw = withdraw
        self._forget = forget
        self._listens = listens

    def watch(self, waiting: PendingRequest) -> None:
        """From now on it is noticed if this request's caller leaves."""

        def ended(future: asyncio.Future[Answer]) -> None:
            if not future.cancelled():
                return
            if self._listens() and is_given_up_with_its_caller(waiting):
                waiting.withdrawn = True
                if waiting.accepted is not None:
                    self._withdraw(waiting)
            if waiting.accepted is None:
                self._forget(waiting)

        waiting.future.add_done_callback(ended)


def is_given_up_with_its_caller(waiting: PendingRequest) -> bool:
    """Whether nobody can ask for it again: a stateless request, or a step without request id and number."""
    return waiting.admitted.sequence is None or not waiting.repeatable

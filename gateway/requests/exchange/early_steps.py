"""Numbered steps that came before the steps they follow. They wait a little, instead of being refused.

A client with several connections, or with several gateways, cannot keep its steps in order on their way. A step whose
number (`sequence_step`) is not the next one yet is kept here, in its gateway. It is sent to Redis again when another
step of its sequence was accepted, and now and then, because the missing step may come over another gateway. Redis alone
judges the order, each time anew, and it has not accepted a step that waits. So waiting changes neither the order nor
how often a step runs. A step that waits is lost with its gateway, like any request that was not accepted yet.

A step waits only if its fate is certain, that is, if no earlier attempt to send it was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.requests.waiting import PendingRequest
from shared.contract.ids import SequenceId
from shared.store.script_values import SubmitCode, Submitted

EARLY_STEPS_MAX = 8
"""Steps of one sequence that wait in one gateway, and numbers by which a step may be too early."""
FIRST_PAUSE_S = 0.02
"""Until a step is sent again, if its gateway does not hear of the missing one. The pause doubles each time."""


@dataclass(slots=True, eq=False)
class EarlyStep:
    """until: when its refusal becomes its answer, clock of the loop; last_step: of its sequence, when it was refused"""

    pending: PendingRequest
    until: float
    last_step: int
    pause_s: float = FIRST_PAUSE_S
    timer: asyncio.TimerHandle | None = None


class EarlySteps:
    """The steps of one gateway that wait for earlier ones.

    send    sends a request to Redis again
    wait_s  how long a step waits; 0: no step waits
    """

    def __init__(self, send: Callable[[PendingRequest], None], *, wait_s: float) -> None:
        self._send = send
        self._wait_s = wait_s
        self._waiting: dict[SequenceId, dict[PendingRequest, EarlyStep]] = {}

    def keep(self, pending: PendingRequest, refusal: Submitted) -> bool:
        """Whether the refused step waits, and will be sent again. If not, the refusal is its answer."""
        number = pending.call.expected_step
        if not self._wait_s or number is None or pending.first_sent is not None:
            return False
        if refusal.code not in (SubmitCode.WRONG_STEP, SubmitCode.NEVER_SEEN):
            return False
        missing = number - refusal.step - 1
        if not 1 <= missing <= EARLY_STEPS_MAX or pending.future.done():
            return False
        loop = asyncio.get_running_loop()
        steps = self._waiting.get(pending.sequence, {})
        early = steps.get(pending)
        if early is None:
            if len(steps) >= EARLY_STEPS_MAX:
                return False
            early = EarlyStep(pending, loop.time() + self._wait_s, refusal.step)
            self._begin(early)
        left_s = early.until - loop.time()
        # A lower last step: the sequence has begun anew, and the number meant a step of its former life.
        if left_s <= 0 or refusal.step < early.last_step:
            return False
        early.last_step = refusal.step
        early.timer = loop.call_later(min(early.pause_s, left_s), self._again, early)
        early.pause_s *= 2
        return True

    def accepted(self, pending: PendingRequest) -> None:
        """A step was accepted, and waits no longer. Those of its sequence that do are sent again, in the order of their
        numbers."""
        waiting = self._waiting.get(pending.sequence)
        if waiting is None:
            return
        self._end(pending)
        for early in sorted(waiting.values(), key=lambda each: each.pending.call.expected_step or 0):
            if early.timer is not None:
                early.timer.cancel()
                self._again(early)

    def _again(self, early: EarlyStep) -> None:
        early.timer = None
        self._send(early.pending)

    def _begin(self, early: EarlyStep) -> None:
        self._waiting.setdefault(early.pending.sequence, {})[early.pending] = early
        early.pending.future.add_done_callback(lambda _: self._end(early.pending))

    def _end(self, pending: PendingRequest) -> None:
        steps = self._waiting.get(pending.sequence, {})
        early = steps.pop(pending, None)
        if early is not None and early.timer is not None:
            early.timer.cancel()
        if not steps:
            self._waiting.pop(pending.sequence, None)

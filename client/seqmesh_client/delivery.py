"""Which step is sent when, to whom, and what is told the caller. Pure: no sockets, no clock, chance from outside.

A step is open from `add` until its outcome is taken. All open steps are sent in order over one stream. When the stream
breaks, is silent, or a gateway says "not now", all open steps are sent again, in order and with their numbers, through
the next gateway. The mesh runs none of them twice.

    closed --connected--> linked --broken, silent, "not now"--> quiet --time--> closed (at the next gateway)

A server that does not number steps is spoken to once (`repeats` is False): there, a break ends the sequence.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from seqmesh_client.errors import NoAnswer, OutcomeUnknown, SequenceEnded, StepRefused, TryLater, WrongAnswer
from seqmesh_client.token import Place
from seqmesh_client.wire import StepOutputs, StepRequest, Told, from_answer, message_of

EARLY_S = 1.0
"""Steps behind a refused one are refused within this: a gateway keeps early steps for half a second."""


WAITS = ", perhaps because the sequence still waits for a slot: then a longer timeout helps, or more slots"
"""Of a first step, which any gateway may have had."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds.

    step_s     for news of a step, over all attempts, where the call gives no `timeout`
    silence_s  for news over one connection; then the open steps are sent through another one. A slow model loses
               nothing by that: the repeated step waits for the one that runs
    pause_s, pause_max_s
               before the second attempt and before any later one, at most: pauses double, and are drawn by chance
    """

    step_s: float = 60.0
    silence_s: float = 10.0
    pause_s: float = 0.05
    pause_max_s: float = 2.0

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for what is no time."""
        for name, value in asdict(self).items():
            check_seconds(name, value)
            if value < 0:
                raise ValueError(f"{name} is a number of seconds, 0 or more, not {value}")


def check_seconds(name: str, value: Any) -> None:
    """Raises TypeError for what is no number."""
    if not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} is a number of seconds, not a value of type {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class Quiet:
    """Wait until then, clock of the shell."""

    until: float


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream to a gateway (its index)."""

    gateway: int
    until: float


@dataclass(frozen=True, slots=True)
class Listen:
    """Wait for the stream's next message until then."""

    until: float


@dataclass(slots=True, eq=False)
class OpenStep:
    """message: to send, as often as it takes; last: of the sequence; timeout_s: without news of the sequence; received:
    answers that have come; counted: False if the mesh refused to make it a part of the sequence"""

    number: int
    message: Any
    last: bool
    timeout_s: float
    deadline: float
    contents: deque[StepOutputs | StepRefused] = field(default_factory=deque[StepOutputs | StepRefused])
    received: int = 0
    sent: bool = False
    done: bool = False
    counted: bool = True


class Delivery:
    """The open steps of one sequence.

    gateways             how many there are
    answered, run, over  as in `Place`, by now
    begun                the mesh may know the sequence
    gateway              index of the one that is spoken to
    """

    def __init__(self, place: Place, *, gateways: int, patience: Patience, chance: random.Random) -> None:
        self.answered, self.run, self.over = place.answered, place.run, place.over
        self.begun = place.answered > 0
        self.linked = False
        self.repeats = True
        self._message = partial(message_of, model=place.model, version=place.version, sequence=place.sequence)
        self._gateways = gateways
        self.gateway = chance.randrange(gateways)
        self._patience = patience
        self._chance = chance
        self._open: deque[OpenStep] = deque()
        self._failures = 0
        self._trouble: str | StepRefused = ""
        self._quiet_until = self._heard_at = 0.0

    # -- the caller -------------------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """Steps without an outcome."""
        return len(self._open)

    @property
    def owes_outcome(self) -> bool:
        """Whether there is an open step, and it is not one of which answers have come and others will."""
        return bool(self._open) and (self._open[0].done or not self._open[0].received)

    def add(self, request: StepRequest, now: float, timeout_s: float | None) -> None:
        """The next step of the sequence. Its inputs are read now: the caller may write others over them.

        raises  SequenceEnded behind the last one, and as `message_of`
        """
        if self.over or (self._open and self._open[-1].last):
            raise SequenceEnded(f"the sequence has ended with step {self.answered + len(self._open)}")
        number = self.answered + len(self._open) + 1
        message = self._message(request, number=number)
        if not self._open:
            self._heard_at = now
        timeout_s = self._patience.step_s if timeout_s is None else timeout_s
        self._open.append(OpenStep(number, message, request.last, timeout_s, now + timeout_s))

    def is_ready(self, *, whole: bool) -> bool:
        """Whether the oldest open step has something to take; whole: all of it"""
        head = self._open[0]
        if head.done and not head.counted and self.linked:
            # Those behind must be refused before the caller may send something else under their numbers.
            return all(step.done for step in self._open)
        return head.done or (not whole and bool(head.contents))

    def take(self) -> tuple[StepOutputs | None, bool]:
        """An answer of the oldest open step, and whether it was the step's last. Raises the step's error."""
        head = self._open[0]
        content = head.contents.popleft() if head.contents else None
        over = head.done and not head.contents
        if over:
            self._settle(head)
        if isinstance(content, StepRefused):
            raise content
        return content, over

    def _settle(self, head: OpenStep) -> None:
        self._open.popleft()
        if head.counted:
            self.answered = head.number
            self.over = self.over or head.last
        else:
            self._open.clear()

    def waited_for_caller(self, seconds: float) -> None:
        """For so long the caller took nothing, and nothing was listened to."""
        self._heard_at += seconds
        for step in self._open:
            step.deadline += seconds

    def forget(self) -> None:
        """Drops the open steps: they have no outcome, and their numbers come again."""
        self._open.clear()
        self.linked = False

    # -- the stream -------------------------------------------------------------------------------------------------

    def next(self, now: float) -> Quiet | Connect | Listen:
        """What to do until something is ready. Raises NoAnswer, or the last "not now", when the time is over."""
        head = self._open[0]
        if head.done:
            return Listen(self._heard_at + EARLY_S)
        if not now < head.deadline:  # nor when it is no number: nothing is awaited then
            raise self._overdue(head)
        if self.linked:
            silent = self._heard_at + self._patience.silence_s
            return Listen(min(head.deadline, silent) if self.repeats else head.deadline)
        if now < self._quiet_until:
            return Quiet(min(head.deadline, self._quiet_until))
        return Connect(self.gateway, head.deadline)

    def _overdue(self, head: OpenStep) -> NoAnswer | StepRefused:
        if isinstance(self._trouble, StepRefused):
            return self._trouble
        waits = WAITS if head.number == 1 and self.begun else ""
        return NoAnswer(f"step {head.number} had no answer in time{waits}{self._trouble and f': {self._trouble}'}")

    def connected(self, now: float, *, repeats: bool) -> None:
        """A stream is open. repeats: the server numbers steps"""
        self.linked, self.repeats, self._heard_at = True, repeats, now
        for step in self._open:
            step.sent = False

    def unsent(self) -> Iterator[Any]:
        """The messages to write to the stream now."""
        for step in self._open if self.linked else ():
            if not (step.sent or step.done):
                step.sent = self.begun = True
                yield from_answer(step.message, step.received + 1)

    def heard(self, told: Told, now: float) -> None:
        """A message came. Raises WrongAnswer if it is about no open step."""
        step = next((one for one in self._open if not one.done and told.request_id in ("", str(one.number))), None)
        if step is None or not step.sent:
            raise WrongAnswer(f"the server answered '{told.request_id[:40]}', which was not asked")
        content = told.content
        if isinstance(content, StepRefused):
            if told.final and self.repeats and self._is_passing(step, content):
                self._retreat(content if isinstance(content, TryLater) else content.text, now)
                return
            step.counted = content.counted or not told.final
        self._heard_at, self._failures, self._trouble = now, 0, ""
        self.run = told.run or self.run
        for one in self._open:
            one.deadline = now + one.timeout_s
        if content is not None:
            step.contents.append(content)
            step.received += 1
        step.done = told.final

    def _is_passing(self, step: OpenStep, error: StepRefused) -> bool:
        """Whether the step is sent again: the mesh asks for it, or the step came before an open one."""
        early = error.reason in ("wrong_step", "never_seen") and any(
            not one.done for one in self._open if one.number < step.number
        )
        return early or isinstance(error, TryLater)

    def broken(self, trouble: str, now: float) -> None:
        """The stream broke, could not be opened, or was silent for too long."""
        if self._open and self._open[0].done:
            # Refused, as those behind it will be.
            self._open = deque([self._open[0]])
            self.linked = False
        elif self.repeats or not any(step.sent for step in self._open):
            self._retreat(trouble, now)
        else:
            self.forget()
            self.over = True
            raise OutcomeUnknown(f"the connection broke: {trouble}")

    def _retreat(self, trouble: str | StepRefused, now: float) -> None:
        self.linked, self._trouble = False, trouble
        self.gateway = (self.gateway + 1) % self._gateways
        longest = min(self._patience.pause_max_s, self._patience.pause_s * 2**self._failures)
        self._quiet_until = now + self._chance.uniform(0, longest)
        self._failures = min(self._failures + 1, 16)

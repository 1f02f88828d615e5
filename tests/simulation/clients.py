"""Clients: each runs one sequence after the other and knows what every answer must be.

numbered   every step carries its number (`sequence_step`); what gets no answer is sent again, through any gateway
named      the same by request ids
plain      neither: after an answer that did not come the client begins anew, under another id

Of a decoupled model a client knows all answers, too. Who asks again says which one it lacks first, or takes all of them
once more. Askers send stateless requests, to a decoupled model, one at a time.

Some wait for an answer as long as it takes, some give up after a while and ask elsewhere. Some send several steps
without waiting, some each step through another gateway, and now and then a step through several. Now and then one
pauses for longer than the idle time, leaves its sequence without END, or cancels.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Answer
from shared.contract.errors import Code, MeshError, Reason, SequenceError, UnavailableError
from shared.contract.limits import LOST_EXECUTORS_MAX
from shared.contract.messages import decode_reply
from shared.store.work_scripts import TOO_LATE
from tests.simulation.ledger import Ledger
from tests.simulation.model import (
    CHAIN,
    DEADLY,
    FAILURE,
    INPUT,
    NAME,
    PASS,
    SECOND,
    STATELESS,
    Calls,
    Shape,
    answered,
    before_last,
    fold,
    number,
    value_of,
)
from tests.simulation.story import Story


class Style(StrEnum):
    NUMBERED = "numbered"
    NAMED = "named"
    PLAIN = "plain"


class LostError(Exception):
    """The connection to the gateway broke, or could not be made."""


Take = Callable[[InferCall, Answer | MeshError], None]
"""Takes each answer of a decoupled model to this request, but the last one."""


class Door(Protocol):
    """One gateway as clients reach it."""

    async def infer(self, calls: list[InferCall], take: Take) -> list[asyncio.Future[Answer]]:
        """Sends requests, in order; their last answers. LostError in them when the gateway is gone."""
        ...

    def stream(self) -> Stream:
        """A connection for the requests of one sequence, through which what is sent first arrives first."""
        ...


class Stream(Protocol):
    """Such a connection. It breaks with the gateway's process, and when an answer is cancelled."""

    async def infer(self, calls: list[InferCall], take: Take) -> list[asyncio.Future[Answer]]:
        """See `Door`."""
        ...

    def close(self) -> None:
        """Nobody listens any more to what is open."""
        ...


@dataclass(frozen=True)
class Habit:
    """How a client behaves.

    window     steps sent without waiting
    bold       a START may fail; and the next sequence may have the id of the last one, or begin in the midst of it when
               all steps are answered (by the number 1 alone the mesh would not know it from the START before)
    deadly     the share of inputs that end whoever runs them
    tenant     in whose name it asks
    hurries    the share of steps with a timeout
    iterative  each of its sequences is one step, over which the model makes several passes. Unless steps carry their
               numbers, some have no id: the gateway makes one
    spreads    each step goes through whichever gateway, some through several. Steps without a number wait for each
               other
    copies     so many at most
    model      that it uses; calls: who calls whom then; chain: of which models, if it is the ensemble
    patience_s how long it waits for an answer before it asks elsewhere, while there are faults; None: for ever
    """

    style: Style
    window: int = 1
    patience_s: float | None = None
    pause_s: float = 0.5
    leaves: float = 0.1
    sleeps: float = 0.05
    fails: float = 0.05
    cancels: float = 0.0
    steps_max: int = 8
    bold: bool = False
    deadly: float = 0.0
    tenant: str = ""
    hurries: float = 0.0
    iterative: bool = False
    spreads: bool = False
    copies: int = 2
    model: str = NAME
    calls: Calls = field(default_factory=dict[str, tuple[str, ...]])
    chain: tuple[str, ...] = (NAME, SECOND)


PASSES_MAX, NAMELESS = 4, 0.5
EQUAL = 9
"""So many different requests come where a cache may answer."""
GIVEN_UP = f"was given up: {LOST_EXECUTORS_MAX} executors were lost"
TWICE = 0.4
"""Of the steps of a client that spreads them: how many it sends through several gateways."""
TIMEOUTS_US = 300_000, 1_000_000, 3_000_000
AGAIN, RESTARTS = 0.5, 0.1
"""Of bold clients: how often the next sequence has the id of the last one, and how often a START comes in between."""


class GivenUpError(Exception):
    """The client cannot go on with this sequence; why is told."""


EXCUSED = frozenset({Reason.EXPIRED, Reason.NEVER_SEEN, Reason.LOST})
"""What may end a sequence under its client. Whether it was right to expire, and to be forgotten, is for the ledger to
say; only a model whose state nobody else holds may lose it."""
AGAIN_LATER = frozenset({Reason.QUOTA, Reason.WRONG_STEP, Reason.BUSY})
"""What is sent again: among others a step that came too early for longer than its gateway waits, and one for which too
many callers wait."""
EXCUSED_OF_RETRIES = frozenset({Reason.LATE, Reason.ANSWERED})
"""What a step may hear that was sent more than once: it ran, or may have."""


class Client:
    """One client. is_over: whether it should stop after its present sequence."""

    def __init__(
        self,
        index: int,
        habit: Habit,
        doors: list[Door],
        chance: random.Random,
        story: Story,
        ledger: Ledger,
        *,
        idle_s: float,
        decoupled: bool = False,
        is_over: Callable[[], bool],
    ) -> None:
        self.index = index
        self.habit = habit
        self.answered = 0
        self.doing = "nothing"
        self._doors = doors
        self._chance = chance
        self._story = story
        self._ledger = ledger
        self._idle_s = idle_s
        self._decoupled = decoupled
        self._is_over = is_over
        self._lives = 0
        self.excused: frozenset[Reason | Code] = EXCUSED
        self.losses = 0
        """How often the store has lost its newest data."""

    @property
    def patience_s(self) -> float | None:
        """How long it waits for an answer. In calm weather it waits as long as it takes: no answer is lost then, and a
        client that asks again every two seconds may bring more than a slow model works off.
        """
        return None if self._is_over() else self.habit.patience_s

    async def run(self) -> None:
        """Sequence after sequence."""
        goes_on, name = False, 0
        while not self._is_over():
            await asyncio.sleep(self._chance.random() * self.habit.pause_s * 2)
            self._lives += 1
            unique = self.index * 1000 + self._lives
            name, goes_on = name if goes_on else unique, False
            try:
                is_over = await self._sequence(name, unique).run()
                goes_on = self.habit.bold and (is_over or not self.counts) and self._chance.random() < AGAIN
            except GivenUpError as error:
                self._story.tell(f"client {self.index} gives up: {error}")
        self.doing = "nothing"

    def _sequence(self, name: int, unique: int) -> Sequence:
        return Sequence(self, name, unique)

    @property
    def counts(self) -> bool:
        """Whether its steps carry their numbers."""
        return self.habit.style is Style.NUMBERED


class Sequence:
    """One sequence of a client. Inputs are unique in the whole run; negative ones fail.

    unique  a number that no other sequence has, also if one has the same id
    """

    def __init__(self, client: Client, correlation_id: int, unique: int) -> None:
        self._client = client
        self._id = correlation_id
        self._unique = unique
        self._chance = client._chance
        self._habit = client.habit
        self._state = 0
        self._states: dict[str, int] = {}
        self._repeated = False
        self._has_failed = False
        self._is_deadly = False
        self._losses = client.losses
        self._had: dict[int, list[Answer | MeshError]] = {}

    async def run(self) -> bool:
        """From START to END, or until it is left; whether it has ended."""
        steps = 1 if self._habit.iterative else self._chance.randint(1, self._habit.steps_max)
        ends = self._chance.random() >= self._habit.leaves
        at = 0
        while at < steps:
            count = min(self._chance.randint(1, self._habit.window), steps - at)
            first = at if at == 0 or self._begins_again() else -1
            await self._perform(
                [self._step(n, first=n == first, last=ends and n == steps - 1) for n in range(at, at + count)]
            )
            at += count
            if at < steps:
                await self._pause()
        return ends

    def _begins_again(self) -> bool:
        return self._habit.bold and not self._client.counts and self._chance.random() < RESTARTS

    async def _pause(self) -> None:
        if self._chance.random() < self._habit.sleeps:
            await asyncio.sleep(self._client._idle_s * self._chance.uniform(0.8, 1.4))
        else:
            await asyncio.sleep(self._chance.expovariate(1 / self._habit.pause_s))

    def _step(self, index: int, *, first: bool, last: bool) -> InferCall:
        value, habit = self._unique * 1000 + index, self._habit
        if habit.iterative:
            value += self._chance.randrange(PASSES_MAX) * PASS
        if (index or habit.bold) and self._chance.random() < habit.fails:
            value = -value
        elif habit.deadly and self._chance.random() < habit.deadly:
            value, self._is_deadly = value + DEADLY, True
        style = habit.style
        is_nameless = habit.iterative and style is not Style.NUMBERED and self._chance.random() < NAMELESS
        return InferCall(
            habit.model,
            correlation_id=0 if is_nameless else self._id,
            start=first,
            end=last,
            request_id=f"r{value}" if style is Style.NAMED else "",
            expected_step=index + 1 if style is Style.NUMBERED else None,
            inputs=(number(INPUT, value),),
            tenant=habit.tenant,
            timeout_us=self._timeout_us() if habit.hurries else 0,
        )

    def _timeout_us(self) -> int:
        return self._chance.choice(TIMEOUTS_US) if self._chance.random() < self._habit.hurries else 0

    async def _perform(self, calls: list[InferCall]) -> None:
        """Sends steps until each is answered. Raises GivenUpError."""
        while calls:
            self._client.doing = f"sequence {self._id}: waits for {[value_of(call.inputs[0]) for call in calls]}"
            if self._client._decoupled:
                calls = [self._asking(call) for call in calls]
            answers = await (self._spread(calls) if self._habit.spreads else self._through_one(calls))
            calls = await self._heard(calls, answers)
            if calls:
                self._repeated = True
                if self._habit.style is Style.PLAIN:
                    raise GivenUpError(f"sequence {self._id}: what became of a step is not known")
                await asyncio.sleep(self._chance.uniform(0.05, 0.6))

    async def _through_one(self, calls: list[InferCall]) -> list[asyncio.Future[Answer]]:
        return await self._chance.choice(self._client._doors).infer(calls, self._take)

    async def _spread(self, calls: list[InferCall]) -> list[asyncio.Future[Answer]]:
        return [await self._through_some(call) for call in calls]

    async def _through_some(self, call: InferCall) -> asyncio.Future[Answer]:
        """Whoever has it twice knows it by its number, or by its id if it is no START (docs/guides/promises.md). Of
        several answers to a step it could not be told which copy gave them.
        """
        is_known = call.expected_step is not None or (call.request_id != "" and not call.start)
        twice = is_known and not self._client._decoupled and self._chance.random() < TWICE
        copies = self._chance.randint(2, self._habit.copies) if twice and self._habit.copies > 2 else 1 + twice
        sent = [(await self._through_one([call]))[0] for _ in range(copies)]
        self._repeated |= twice
        return all_of(sent, partial(self._same, call)) if twice else sent[0]

    def _same(self, call: InferCall, answers: list[int]) -> None:
        if len(set(answers)) > 1:
            self._client._story.violate(f"sequence {self._id}: {value_of(call.inputs[0])} is answered with {answers}")

    def _asking(self, call: InferCall) -> InferCall:
        """A request as it is sent now: for all answers, or for those that are still to come."""
        had = self._had.setdefault(value_of(call.inputs[0]), [])
        if self._chance.random() < 0.5:
            had.clear()
        return replace(call, first_answer=len(had) + 1)

    def _take(self, call: InferCall, content: Answer | MeshError) -> None:
        self._had[value_of(call.inputs[0])].append(content)

    async def _heard(self, calls: list[InferCall], answers: list[asyncio.Future[Answer]]) -> list[InferCall]:
        """Takes answers in; returns what must be sent again, from the first step without one."""
        if self._chance.random() < self._habit.cancels:
            # From here on: a gateway that has told it an error meanwhile takes the step back.
            self._give_up(calls)
            await asyncio.sleep(self._chance.uniform(0.0, 0.3))
            self._let_go(calls, answers)
            raise GivenUpError(f"sequence {self._id}: its caller leaves")
        for index, (call, answer) in enumerate(zip(calls, answers, strict=True)):
            if call.start:
                self._state = 0
                self._states.clear()
                self._has_failed = False
            try:
                # One that comes late would begin the sequence again, after the client went on elsewhere (promises.md).
                is_waited_for = call.start and self._habit.style is Style.NAMED
                async with asyncio.timeout(None if is_waited_for else self._client.patience_s):
                    # Shielded, as in a stream: who leaves gives up all that is open in one turn.
                    self._check(call, await asyncio.shield(answer))
            except (LostError, TimeoutError):
                self._let_go(calls[index:], answers[index:])
                return calls[index:]
            except MeshError as error:
                if isinstance(error, UnavailableError) or _reason(error) in AGAIN_LATER:
                    self._client._story.tell(f"sequence {self._id}: {error.message}")
                    if call.start:
                        # What came for the steps behind it is of the run before, by their numbers.
                        self._had.clear()
                    self._let_go(calls[index:], answers[index:])
                    return calls[index:]
                self._refused(call, error)
        return []

    def _let_go(self, calls: list[InferCall], answers: list[asyncio.Future[Answer]]) -> None:
        """The caller does not wait for these any more; the mesh may cancel those that cannot be asked for again."""
        self._give_up(calls)
        for answer in answers:
            answer.cancel()

    def _give_up(self, calls: list[InferCall]) -> None:
        if self._habit.style is Style.PLAIN:
            values = [value_of(call.inputs[0]) for call in calls]
            if self._habit.model == CHAIN and self._habit.chain[0] == STATELESS:
                # The first state of the ensemble has what that one gives.
                values = [fold(0, value) for value in values]
            self._client._ledger.given_up.update(values)

    def _check(self, call: InferCall, answer: Answer) -> None:
        value, had = value_of(call.inputs[0]), self._had.get(value_of(call.inputs[0]))
        if answer.message.empty and had and isinstance(last := had[-1], Answer):
            # The last answer of a decoupled ensemble is known for that only when it has been given.
            answer = last
            had.pop()
        outputs = answer.message.outputs
        got, story = value_of(outputs[-1]) if outputs else None, self._client._story
        before, expected = self._expected(value)
        story.tell(f"sequence {self._id}: {value} is answered")
        if value < 0:
            story.violate(f"sequence {self._id}: {value} should have failed")
        elif got != expected:
            # Calls have no numbers.
            if self._lacks_steps and (self._habit.calls or not self._client.counts):
                raise GivenUpError(f"sequence {self._id}: the store has lost a step of it")
            story.violate(f"sequence {self._id}: {value} is answered with {got} instead of {expected}")
        self._check_all(value, before)
        self._state = expected
        self._client.answered += 1

    def _expected(self, value: int) -> tuple[list[int], int]:
        """The answers to a step before its last one, if it has any number, and the last one. Of an ensemble the states
        of all models move on.
        """
        habit, states, before = self._habit, self._states, list[int]()
        if habit.model != CHAIN:
            heard = answered(states, habit.calls, habit.model, value) if habit.calls else fold(self._state, value)
            return before_last(heard, value), heard
        for model in habit.chain:
            if model == NAME:
                value = answered(states, habit.calls, NAME, value)
            elif model == STATELESS:
                before, value = [fold(0, one) for one in before], fold(0, value)
            else:
                # The sequence of the ensemble, which is none that a model calls.
                states[CHAIN] = fold(states.get(CHAIN, 0), value)
                before, value = before_last(states[CHAIN], value), states[CHAIN]
        return before, value

    @property
    def _lacks_steps(self) -> bool:
        """Whether the store may have lost some of its steps."""
        return self._client.losses > self._losses

    def _check_all(self, value: int, before: list[int]) -> None:
        """The answers before the last one."""
        if self._client._decoupled:
            check_all(self._client._story, f"sequence {self._id}", self._had[value], before)

    def _refused(self, call: InferCall, error: MeshError) -> None:
        """An answer that is an error. Raises GivenUpError unless the model was meant to fail."""
        value, story = value_of(call.inputs[0]), self._client._story
        if value < 0 and error.message == FAILURE:
            story.tell(f"sequence {self._id}: {value} has failed")
            self._check_all(value, before_last(self._state, value))
            self._has_failed |= call.start
            return
        reason = _reason(error)
        excused = (reason or error.code) in self._client.excused or (self._repeated and reason in EXCUSED_OF_RETRIES)
        ledger, calls = self._client._ledger, bool(self._habit.calls)
        # One of an ensemble has failed where nobody can ask again, and for those who do when a state has expired.
        has_failed = self._has_failed or (
            self._habit.model == CHAIN and (self._habit.style is Style.PLAIN or f"i{self._id}" in ledger.expired)
        )
        has_failed |= calls and ledger.impatient
        excused |= calls and ledger.may_fail(f"i{self._id}", error.message)
        excused |= (has_failed and reason == Reason.FAILED) or (self._lacks_steps and reason is not None)
        # No answer of this model is ever too large to be kept.
        excused = excused and "kept no longer: with" not in error.message
        is_lost_with_callee = calls and ledger.is_callee_over(f"i{self._id}")
        survives = ledger.declared and not self._is_deadly and not is_lost_with_callee
        if not excused or (reason == Reason.LOST and survives):
            story.violate(f"sequence {self._id}: {value} is refused: {reason or error.code} {error.message}")
        raise GivenUpError(f"sequence {self._id}: {reason or error.message}")


def all_of(copies: list[asyncio.Future[Answer]], same: Callable[[list[int]], None]) -> asyncio.Future[Answer]:
    """An answer to a step when each of its copies is answered or refused; an error if all are refused. same: is told of
    all answers
    """
    whole: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def heard(_: asyncio.Future[Answer]) -> None:
        if whole.done() or not all(one.done() for one in copies):
            return
        errors = [error for one in copies if (error := one.exception())]
        answers = [one.result() for one in copies if not one.exception()]
        same([value_of(answer.message.outputs[0]) for answer in answers])
        if answers:
            whole.set_result(answers[0])
        else:
            # Lost on its way is what can be asked again.
            whole.set_exception(next((error for error in errors if isinstance(error, LostError)), errors[0]))

    for one in copies:
        one.add_done_callback(heard)
    whole.add_done_callback(lambda _: [one.cancel() for one in copies if whole.cancelled()])
    return whole


def _reason(error: MeshError) -> str | None:
    return error.reason if isinstance(error, SequenceError) else None


class Asker:
    """A client of the model without state: one request after the other, each until it is answered. Where a cache may
    answer, equal requests come again and again.
    """

    def __init__(
        self,
        index: int,
        doors: list[Door],
        chance: random.Random,
        story: Story,
        shape: Shape,
        *,
        is_over: Callable[[], bool],
    ) -> None:
        self.index = index
        self.answered = 0
        self.excused = frozenset({Code.UNAVAILABLE})
        self._shape = shape
        self.doing = "nothing"
        self._doors = doors
        self._chance = chance
        self._story = story
        self._is_over = is_over

    async def run(self) -> None:
        """Request after request."""
        asked = 0
        while not self._is_over():
            await asyncio.sleep(self._chance.expovariate(2))
            asked += 1
            value = self._chance.randint(1, EQUAL) if self._shape.cached else self.index * 1000 + asked
            self.doing = f"waits for {value}"
            while not await self._is_answered(value):
                await asyncio.sleep(self._chance.uniform(0.05, 0.6))
        self.doing = "nothing"

    async def _is_answered(self, value: int) -> bool:
        """Sends a request, perhaps once more: it is another one then, and all of its answers come anew."""
        had: list[Answer | MeshError] = []
        priority = self._chance.choice((0, 1, 2)) if self._shape.stateless else 0
        call = InferCall(STATELESS, priority=priority, inputs=(number(INPUT, value),))
        (answer,) = await self._chance.choice(self._doors).infer([call], lambda _, content: had.append(content))
        place, state = f"request {value}", fold(0, value)
        try:
            async with asyncio.timeout(self._chance.choice((None, None, 3.0))):
                got = value_of((await answer).message.outputs[0])
        except (LostError, TimeoutError, MeshError) as error:
            self._story.tell(f"{place}: {error!r}")
            if isinstance(error, MeshError) and error.code not in self.excused and GIVEN_UP not in error.message:
                self._story.violate(f"{place}: is refused: {error.code} {error.message}")
            if had and str(error) == decode_reply(TOO_LATE).error:
                self._story.violate(f"{place}: is refused as too late, although it has answers: {had}")
            return False
        if got != state:
            self._story.violate(f"{place} is answered with {got} instead of {state}")
        check_all(self._story, place, had, before_last(state, value) if self._shape.decoupled else [])
        self.answered += 1
        return True


def check_all(story: Story, place: str, had: list[Answer | MeshError], expected: list[int]) -> None:
    """The answers of a decoupled model before its last one: each once, in their order."""
    got = [(one.message.number, value_of(one.message.outputs[0])) if isinstance(one, Answer) else one for one in had]
    if got != list(enumerate(expected, 1)):
        story.violate(f"{place}: its answers are {got} instead of {expected}")

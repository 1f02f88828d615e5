"""What both clients do, as programs: generators that yield a `Wish` and get its result. Pure, as `delivery` is.

A shell fulfils wishes with asyncio (`aio`) or with threads (`sync`). Links are opened by it; to write to one and to
close one never waits, so programs do that themselves.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from tritonclient import utils

from seqmesh_client.delivery import Connect, Delivery, Listen, Patience, Quiet, check_seconds
from seqmesh_client.errors import NoAnswer, NotDescribed, NotEnded, NotNumbered, StepRefused
from seqmesh_client.token import Place
from seqmesh_client.wire import (
    NUMBERED,
    OUT_OF_TIME,
    Array,
    LinkBroken,
    StepOutputs,
    StepRequest,
    end_message,
    pb,
    told_by,
)

Inputs = Mapping[str, Any] | Any
"""Arrays by the names of the inputs; or, for a model with one input, its array. Nested lists become arrays of the type
that the model declares."""
LOG = logging.getLogger("seqmesh_client")
UNANSWERED_S = 1.0
"""How long no gateway may have answered before the log tells of it: one that is just started does within."""
ASK_S = 5.0
"""How long a gateway may take to say what it or a model is; then the next one is asked."""


class StreamLink(Protocol):
    """One ModelStreamInfer call."""

    def send(self, message: Any) -> None:
        """Hands a message over to be written; never waits, never fails."""
        ...

    def close(self) -> None:
        """Breaks the call off, at once."""
        ...

    def receive(self, until: float) -> Any:
        """The next message, or an awaitable of it. Raises LinkBroken when there is none until then."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """Make a unary call of that name; its result is the response."""

    gateway: int
    method: str
    message: Any
    until: float


Wish = Quiet | Connect | Listen | Ask
"""Connect gives a StreamLink, Listen a message. Listen and Ask raise LinkBroken, also when their time is over, and
errors that no other gateway can mend."""
ResultT = TypeVar("ResultT")
Program = Generator[Wish, Any, ResultT]


@dataclass(slots=True)
class Mesh:
    """What is known of the servers.

    numbered       by gateway
    inputs         datatypes by name, by model and version
    failing_since  when the first call failed, where no gateway had answered before; None: none has failed so
    is_told        the log has told of that
    """

    gateways: Sequence[str]
    patience: Patience
    strict: bool
    numbered: dict[int, bool]
    inputs: dict[tuple[str, str], Mapping[str, str]]
    failing_since: float | None = None
    is_told: bool = False

    def failed(self, trouble: str, now: float) -> None:
        """A call failed. The log tells of it once, where none has succeeded: the caller may wait for a minute."""
        if self.numbered or self.inputs or self.is_told:
            return
        if self.failing_since is None:
            self.failing_since = now
        elif now - self.failing_since >= UNANSWERED_S:
            self.is_told = True
            LOG.warning("no gateway has answered yet, trying again: %s", trouble)


class Conversation:
    """One sequence, without the shell: what is sent under which number, and how far its caller is."""

    def __init__(self, mesh: Mesh, place: Place, now: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self._mesh = mesh
        self._now = now
        chance = Random(secrets.randbits(64))
        self.delivery = Delivery(place, gateways=len(mesh.gateways), patience=mesh.patience, chance=chance)
        self._link: StreamLink | None = None
        self._busy = False
        self._left_at = now()
        self.passed_over = 0
        """How many answers, or refusals, were taken for a caller that had left before."""

    @property
    def link(self) -> StreamLink:
        """The link that is open: the shell listens to it when it is wished so."""
        assert self._link is not None, "what is sent and heard goes over an open link"
        return self._link

    def token(self) -> str:
        delivery = self.delivery
        return replace(self.place, answered=delivery.answered, run=delivery.run, over=delivery.over).token()

    def give(self, inputs: Inputs, outputs: Sequence[str], timeout_s: float | None, *, last: bool) -> Program[None]:
        """The next step, as a caller gives it. Its time begins here. Raises as `arrays` and `Delivery.add`."""
        check_seconds("timeout", 0 if timeout_s is None else timeout_s)
        began = self._now()
        arrays = yield from self.arrays(inputs, timeout_s)
        self.add(StepRequest(arrays, outputs, last), timeout_s, began)

    def add(self, request: StepRequest, timeout_s: float | None, began: float | None = None) -> None:
        """The next step. It is sent now if there is a stream, otherwise by `next_answer`. began: None: now"""
        self.delivery.add(request, self._now() if began is None else began, timeout_s)
        self._flush()

    def arrival(self, *, whole: bool) -> Program[None]:
        """Waits until the oldest open step has something to take; whole: all of it

        raises  NoAnswer or the last "not now" when its time is over; WrongAnswer; what no other gateway can mend
        """
        delivery = self.delivery
        while not delivery.is_ready(whole=whole):
            wish = delivery.next(self._now())
            try:
                if isinstance(wish, Connect):
                    yield from self._connect(wish)
                else:
                    heard = yield wish
                    if isinstance(wish, Listen):
                        delivery.heard(told_by(heard), self._now())
            except LinkBroken as broken:
                self._mesh.failed(str(broken), self._now())
                delivery.broken(str(broken), self._now())
            if not delivery.linked:
                self.hang_up()

    def next_answer(self) -> Program[tuple[StepOutputs | None, bool]]:
        """The next answer of the oldest open step (None: it has no further one), and whether the step is over."""
        yield from self.arrival(whole=False)
        return self.delivery.take()

    def outcome(self) -> Program[StepOutputs]:
        """The only answer of the oldest open step; raises as `take_only`."""
        yield from self.arrival(whole=True)
        return self.take_only()

    def take_only(self) -> StepOutputs:
        """The only answer of a step that has arrived whole. It counts as the caller's from here on.

        raises  the step's error; ValueError if it has another number of answers
        """
        answers: list[StepOutputs] = []
        over = False
        while not over:
            content, over = self.delivery.take()
            answers += [content] if content is not None else []
        if len(answers) != 1:
            step = f"step {self.delivery.answered} of model '{self.place.model}'"
            raise ValueError(f"{step} has {len(answers)} answers: ask a decoupled model by answers()")
        return answers[0]

    def has_room(self, ahead: int) -> bool:
        """Whether one more step may be open beside those that are. Raises ValueError if `ahead` allows none at all."""
        if ahead < 1:
            raise ValueError(f"ahead says how many steps may be without an answer, at least 1: {ahead} would send none")
        return self.delivery.open < ahead

    def drain(self) -> Program[None]:
        """Waits for the outcomes of steps whose caller has left `steps` or `answers` early. Raises as `arrival`."""
        while self.delivery.open:
            yield from self._pass_over()

    def _pass_over(self) -> Program[None]:
        """Waits for an answer of the oldest open step, or its refusal, which nobody asks for any more."""
        # What is raised here left the step open: to wait on would be to hear it again, at once and for ever.
        yield from self.arrival(whole=False)
        self.passed_over += 1
        with suppress(StepRefused):
            self.delivery.take()

    def end(self, timeout_s: float | None = None) -> Program[None]:
        """Ends the sequence without another step, when all open steps have their outcomes. Safe to repeat.

        A step that has begun to answer runs to its end in the mesh; its answers may be many, and nobody waits for them.

        raises  NotEnded if the mesh may have the sequence, and has not told which run it is
        """
        check_seconds("timeout", 0 if timeout_s is None else timeout_s)
        while self.delivery.owes_outcome:
            yield from self._pass_over()
        place, delivery = self.place, self.delivery
        if delivery.begun and not delivery.over:
            about = f"sequence {place.sequence} of model '{place.model}'"
            if not delivery.run:
                raise NotEnded(f"{about} is not ended: no answer has named its run")
            message = end_message(model=place.model, version=place.version, sequence=place.sequence, run=delivery.run)
            yield from self._ask("ModelInfer", message, f"no gateway has ended {about}", timeout_s)
        delivery.over = True

    def leave(self) -> Program[None]:
        """Ends the sequence if that can be done; otherwise its idle time does."""
        with self.turn():
            try:
                yield from self.end()
            except NotEnded as error:
                LOG.debug("%s", error)
            except (NoAnswer, StepRefused) as error:
                LOG.warning("%s: it ends when its idle time is over", error.text)
            except RuntimeError as error:
                # The client was closed before.
                LOG.warning("sequence %s ends when its idle time is over: %s", self.place.sequence, error)

    @contextmanager
    def turn(self, passed_over: int | None = None) -> Generator[None]:
        """One call of the caller. If it fails, open steps are dropped: they have no outcome, their numbers come again.
        The time since its last call is the caller's own, and counts as nobody's silence.

        passed_over  of a caller that goes on: what `passed_over` was when it began
        raises       RuntimeError if another call is under way, or has taken answers of the one that goes on
        """
        if self._busy:
            raise RuntimeError("a call for this sequence is under way: `steps` sends several steps at once")
        if passed_over not in (None, self.passed_over):
            raise RuntimeError(
                "another call for this sequence came in between, and took the answers of open steps: take all answers "
                "before the next call, or use ahead=1"
            )
        self._busy = True
        self.delivery.waited_for_caller(self._now() - self._left_at)
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                # The model may have been loaded anew, with other inputs.
                self._mesh.inputs.pop((self.place.model, self.place.version), None)
            self.delivery.forget()
            self.hang_up()
            raise
        finally:
            self._busy = False
            self._left_at = self._now()

    def _connect(self, wish: Connect) -> Program[None]:
        numbered = self._mesh.numbered
        if wish.gateway not in numbered:
            until = min(wish.until, self._now() + ASK_S)
            said = yield Ask(wish.gateway, "ServerMetadata", pb.ServerMetadataRequest(), until)
            numbered[wish.gateway] = NUMBERED in said.extensions
        if self._mesh.strict and not numbered[wish.gateway]:
            raise NotNumbered(f"{self._mesh.gateways[wish.gateway]} does not number steps: a repeated step runs twice")
        self._link = yield wish
        self.delivery.connected(self._now(), repeats=numbered[wish.gateway])
        self._flush()

    def _flush(self) -> None:
        for message in self.delivery.unsent():
            self.link.send(message)

    def hang_up(self) -> None:
        """Closes the stream. The next call opens another one."""
        self.delivery.linked = False
        if self._link is not None:
            self._link.close()
            self._link = None

    # -- inputs -----------------------------------------------------------------------------------------------------

    def arrays(self, inputs: Inputs, timeout_s: float | None = None) -> Program[Mapping[str, Array]]:
        """The inputs as arrays by name; asks for the model's metadata where names or types are missing.

        raises  NotDescribed in time; ValueError if the model has several inputs and the only array names none; and as
                `as_array`, with the input's name
        """
        if isinstance(inputs, Mapping):
            named = cast(Mapping[str, Any], inputs)
            if all(isinstance(value, np.ndarray) for value in named.values()):
                return named
        declared = yield from self._declared(timeout_s)
        if not isinstance(inputs, Mapping):
            if len(declared) != 1:
                raise ValueError(f"model '{self.place.model}' has the inputs {sorted(declared)}: give arrays by name")
            inputs = {next(iter(declared)): inputs}
        given = cast(Mapping[str, Any], inputs)
        return {name: named_array(name, value, declared.get(name)) for name, value in given.items()}

    def _declared(self, timeout_s: float | None) -> Program[Mapping[str, str]]:
        """Datatypes of the model's inputs, by name."""
        key = (self.place.model, self.place.version)
        if key not in self._mesh.inputs:
            request = pb.ModelMetadataRequest(name=key[0], version=key[1])
            failure = f"no gateway described model '{key[0]}' over gRPC (port 8001 by default)"
            said = yield from self._ask("ModelMetadata", request, failure, timeout_s, NotDescribed)
            self._mesh.inputs[key] = {one.name: one.datatype for one in said.inputs}
        return self._mesh.inputs[key]

    def _ask(
        self, method: str, message: Any, failure: str, timeout_s: float | None, error: type[NoAnswer] = NoAnswer
    ) -> Program[Any]:
        """The response of the first gateway that answers a unary call. Raises `error`, which begins with `failure` and
        ends with what was said last."""
        patience, attempt, said = self._mesh.patience, 0, ""
        until = self._now() + (patience.step_s if timeout_s is None else timeout_s)
        while True:
            gateway = (self.delivery.gateway + attempt) % len(self._mesh.gateways)
            try:
                return (yield Ask(gateway, method, message, min(until, self._now() + ASK_S)))
            except LinkBroken as broken:
                self._mesh.failed(str(broken), self._now())
                # The last attempt mostly ends with the time, which says nothing.
                said = said if said and str(broken).startswith(OUT_OF_TIME) else str(broken)
                if not self._now() < until:  # nor when it is no number
                    raise error(f"{failure}: {said}") from None
            attempt += 1
            yield Quiet(min(until, self._now() + min(patience.pause_s * attempt, 1.0)))


def named_array(name: str, value: Any, datatype: str | None) -> Array:
    """As `as_array`, whose error gets the name of the input."""
    try:
        return as_array(value, datatype)
    except (TypeError, ValueError, OverflowError) as error:
        # Subclasses, as UnicodeError's, are made of other arguments than a text.
        kind = type(error) if type(error) in (TypeError, OverflowError) else ValueError
        raise kind(f"input '{name}' is {datatype or 'unknown to the model'}: {error}") from error


TRUTHS = (int, np.integer, np.bool_)
"""Python's bool is an int."""


def as_array(value: Any, datatype: str | None) -> Array:
    """Arrays as they are; anything else as an array of the declared type. Raises TypeError for fractions among
    integers and what is no value of the type, ValueError for lists of different lengths, and OverflowError."""
    if isinstance(value, np.ndarray) or datatype is None:
        return np.asarray(cast(Any, value))
    # As objects: numpy's own texts end before their last NUL, and its integers beyond int64 become floats.
    array = np.asarray(value, np.object_)
    kinds = {type(one) for one in cast(Iterable[object], array.flat)}
    if kinds & {list, tuple}:
        raise ValueError("the lists are of different lengths: give lists of one shape, or an array")
    if datatype == "BYTES":
        if others := sorted(kind.__name__ for kind in kinds if not issubclass(kind, str | bytes)):
            raise TypeError(f"there are values of type {others[0]}: give strings or bytes")
        return array
    wanted = np.dtype(cast(Any, utils).triton_to_np_dtype(datatype))
    if wanted.kind in "biu" and any(issubclass(kind, float | np.floating) for kind in kinds):
        raise TypeError("the values have fractions: give an array of the right type")
    # numpy makes NaN of None, and True of every text that is not empty.
    strange = {one for one in kinds if one is type(None) or (wanted.kind == "b" and not issubclass(one, TRUTHS))}
    if others := sorted(one.__name__ for one in strange):
        raise TypeError(f"there are values of type {others[0]}: give values of type {datatype}")
    return array.astype(wanted)

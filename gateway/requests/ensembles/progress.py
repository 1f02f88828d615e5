"""One run of a stage of an ensemble (`plan`): what has been answered, and what is to be done next. Pure.

The first stage runs once for each request. If it ends with a decoupled step, the next stage runs for each answer of
that step, and so on (`runs`). Only the first stage has steps that keep state.

    begin, answered, failed, again, left, unwanted
      ->  SendStep, SendAgain, WithdrawStep, EndFollowers, AbandonRun, AnswerRequest, FailRequest

The sequences of an ensemble. Each stateful step has a sequence of its own under the client's correlation id. The first
stateful step of the plan, the *anchor*, decides about a step of the ensemble: it accepts the step or refuses it,
recognises its retries by the client's request id or number, and gives it its number. The other stateful steps, the
*followers*, run only when the anchor has run: with the anchor's number, in a sequence that is named after the anchor's
run. So each of them takes each step once and in the anchor's order, whoever sends it and however often. A START that
cuts off a run ends its followers: no step comes to them any more, and the new run may need their slots.

What is kept equal. A step of the ensemble is done by all stateful steps or by none. Once the anchor has run, everything
that a follower needs is sent, even if the request has failed or its client has left. What is refused for the moment is
sent again for a while. If a follower's step cannot be done after all, the states differ for good. Then the run is
abandoned, and the client is told to begin again. Only if the client can send the same step again (it named the step,
and nothing but the moment was wrong), the sequences stay as they are: the retry does what is missing. They also stay if
the step is a retry, and a follower that has done it has forgotten its answer: the client is told so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from gateway.requests.ensembles.plan import EnsemblePlan, PlannedStep, TensorView
from shared.contract.errors import OUTCOMES, Code, MeshError, Reason, Retry, SequenceError
from shared.contract.errors import UnavailableError as NotNowError
from shared.contract.tensors import Tensor, are_alike, reshaped

PATIENCE_MS = 10_000
"""How long a step behind an anchor that has run is sent again: as long as requests wait while Redis is away."""
FIRST_PAUSE_MS, PAUSE_MAX_MS = 10, 500
"""The pause before a step is sent again. It doubles each time."""
FORGOTTEN = (Reason.ANSWERED, Reason.EXISTS)
"""What a follower says of a step that it has answered, and whose answer it does not keep: of the first step, that it is
beyond it."""
EARLY = (Reason.WRONG_STEP, Reason.NEVER_SEEN)
"""What a follower says of a step that comes before those that it follows: before all of them, that it knows no such
sequence."""


class HeldTensor(NamedTuple):
    """A tensor of the plan that is there. rows: its batch size; 0 if what made it has no batch dimension"""

    tensor: Tensor
    rows: int


class Stand(NamedTuple):
    """Where the anchor's sequence stands with this request. run, cut_off: see `Submitted`; step: number since START"""

    run: str
    step: int
    cut_off: str = ""


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send a step's request. stand: of a follower's step; None for the anchor's and for stateless ones"""

    index: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    stand: Stand | None


@dataclass(frozen=True, slots=True)
class SendAgain:
    """Call `again` for this step after a pause."""

    index: int
    pause_ms: int


@dataclass(frozen=True, slots=True)
class WithdrawStep:
    """The client has left: take the step's request back, unless it runs already. Its outcome is still to be told."""

    index: int


@dataclass(frozen=True, slots=True)
class EndFollowers:
    """This request's START has cut off a run: end the followers' sequences of it when its own requests are over."""

    run: str


@dataclass(frozen=True, slots=True)
class AbandonRun:
    """The sequences of this run cannot go on: end them all."""

    stand: Stand


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """The run has succeeded. outputs: those that were asked for and that the steps have given, in the order of the
    configuration; () where another stage follows
    """

    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The run has failed. error: what its caller is told"""

    error: MeshError


EnsembleAction = SendStep | SendAgain | WithdrawStep | EndFollowers | AbandonRun | AnswerRequest | FailRequest


class _State(Enum):
    WAITING = auto()
    SENT = auto()
    PAUSED = auto()
    DONE = auto()
    FAILED = auto()


class EnsembleProgress:
    """The state of one run. After `AnswerRequest` or `FailRequest` nothing more follows."""

    def __init__(
        self, plan: EnsemblePlan, inputs: Mapping[str, HeldTensor], wanted: Sequence[str], *, is_named: bool
    ) -> None:
        """wanted: outputs asked for; none means all. is_named: the client can send the step again."""
        self._plan = plan
        self._wanted = [name for name in plan.results if not wanted or name in wanted]
        tensors = frozenset(plan.results[name] for name in self._wanted)
        self._states = dict.fromkeys(sorted(plan.needed(tensors)), _State.WAITING)
        # What the stateful steps are made of: it is sent even when nobody waits for an answer any more.
        self._owed = plan.owed
        # Tensor -> how many need it: steps that are not over yet, and the answer.
        self._needed = Counter(tensors)
        for index in self._states:
            self._needed.update(tensor for _, tensor in plan.steps[index].inputs)
        self._held: dict[str, HeldTensor] = {}
        self._hold(inputs)
        self._is_named = is_named
        self._stand: Stand | None = None
        self._error: MeshError | None = None
        # Everything that has failed so far may go well with the next try, or was done before.
        self._only_for_now = True
        # The anchor's sequence has counted the step, but the step was not done.
        self._is_spent = False
        self._asking: dict[int, tuple[int, int]] = {}

    # -- events -----------------------------------------------------------------------------------------------------

    def begin(self) -> list[EnsembleAction]:
        """The steps that need nothing but the request's own inputs."""
        return self._next()

    def answered(self, index: int, outputs: Sequence[Tensor], stand: Stand | None = None) -> list[EnsembleAction]:
        """A step's request has succeeded, a decoupled step's with its last answer. stand: of the anchor's step"""
        self._hold(held_tensors(self._plan.steps[index], outputs))
        self._is_over(index, _State.DONE)
        if index != self._plan.anchor:
            return self._next()
        assert stand is not None, "the anchor's answer says where its sequence stands"
        return [*self._counted(stand), *self._next()]

    def failed(
        self, index: int, error: MeshError, *, now_ms: int, stand: Stand | None = None, is_final: bool = False
    ) -> list[EnsembleAction]:
        """A step's request was refused or has failed.

        stand     of the anchor's step, if its sequence had accepted it
        is_final  nothing can be sent any more
        """
        is_for_now = self._is_for_now(index, error)
        if is_for_now and not is_final and self._anchor_has_run and index != self._plan.anchor:
            since, pause = self._asking.get(index, (now_ms, FIRST_PAUSE_MS))
            if now_ms - since < PATIENCE_MS:
                self._asking[index] = since, min(2 * pause, PAUSE_MAX_MS)
                self._states[index] = _State.PAUSED
                return [SendAgain(index, pause)]
        actions: list[EnsembleAction] = []
        if index == self._plan.anchor and stand is not None:
            self._is_spent = True
            actions += self._counted(stand)
        self._only_for_now &= is_for_now or self._was_done(index, error) or index not in self._owed
        self._is_over(index, _State.FAILED)
        self._error = self._error or within_ensembles(self._plan.steps[index], error)
        return [*actions, *self._next()]

    def again(self, index: int) -> SendStep:
        """The pause of a step is over: its request once more."""
        self._states[index] = _State.SENT
        return self._request(index)

    def left(self) -> list[EnsembleAction]:
        """The client waits no longer. A step that it can send again, or that the anchor has done, is brought to its
        end in all states. Anything else is taken back.
        """
        self._error = self._error or MeshError("", Code.CANCELLED)
        return self._withdrawn(all_steps=not (self._is_named or self._anchor_has_run))

    def unwanted(self) -> list[EnsembleAction]:
        """What comes behind this stage has failed. The states go on together; anything else is taken back."""
        self._error = self._error or MeshError("", Code.CANCELLED)
        return self._withdrawn(all_steps=False)

    # -- decisions --------------------------------------------------------------------------------------------------

    def _hold(self, tensors: Mapping[str, HeldTensor]) -> None:
        """Holds what is needed of these tensors and their views."""
        found = _with_views(tensors, self._plan)
        self._held |= {name: held for name, held in found.items() if self._needed[name]}

    def _is_over(self, index: int, state: _State) -> None:
        """Notes the end of a step. Tensors that nobody else needs go: in a long chain they would be many."""
        self._states[index] = state
        for _, tensor in self._plan.steps[index].inputs:
            self._needed[tensor] -= 1
            if not self._needed[tensor]:
                self._held.pop(tensor, None)

    def _withdrawn(self, *, all_steps: bool) -> list[EnsembleAction]:
        return [
            WithdrawStep(index)
            for index, state in self._states.items()
            if state is _State.SENT and (all_steps or index not in self._owed)
        ]

    @property
    def _anchor_has_run(self) -> bool:
        anchor = self._plan.anchor
        return anchor is not None and self._states[anchor] is _State.DONE

    def _counted(self, stand: Stand) -> list[EnsembleAction]:
        """The anchor's sequence has counted the step."""
        self._stand = stand
        return [EndFollowers(stand.cut_off)] if stand.cut_off and len(self._plan.stateful) > 1 else []

    def _is_for_now(self, index: int, error: MeshError) -> bool:
        """Whether the same request may be accepted later."""
        if error.accepted:
            return False
        if not isinstance(error, SequenceError):
            return isinstance(error, NotNowError)
        if index != self._plan.anchor and self._stand is not None:
            if error.reason in EARLY:
                # The steps before this one are on their way, through this gateway or another one.
                return (error.last_step or 0) + 1 < self._stand.step
            if error.reason == Reason.LATE:
                # Asked anew, the sequence knows by its number whether it has had the step.
                return True
        outcome = OUTCOMES.get(error.reason)
        return outcome is not None and outcome.retry is Retry.SAME

    def _was_done(self, index: int, error: MeshError) -> bool:
        """Whether a follower has answered the step before, and its answer is kept no longer: it is not behind."""
        return index != self._plan.anchor and isinstance(error, SequenceError) and error.reason in FORGOTTEN

    def _next(self) -> list[EnsembleAction]:
        actions: list[EnsembleAction] = []
        for index, state in self._states.items():
            if state is _State.WAITING and self._may_be_sent(index):
                self._states[index] = _State.SENT
                actions.append(self._request(index))
        if not any(state in (_State.SENT, _State.PAUSED) for state in self._states.values()):
            actions += self._end()
        return actions

    def _may_be_sent(self, index: int) -> bool:
        if self._error is not None and not (self._anchor_has_run and index in self._owed):
            return False
        if index in self._plan.stateful and index != self._plan.anchor and not self._anchor_has_run:
            return False
        step = self._plan.steps[index]
        return all(tensor in self._held or self._is_left_out(tensor) for _, tensor in step.inputs)

    def _is_left_out(self, tensor: str) -> bool:
        """Whether the tensor will not come, because the request or an answer lacks it. A request to a model that
        needs it is sent nevertheless, and refused as any request without it.
        """
        writer = self._plan.writers.get(tensor)
        return writer is None or self._states[writer] is _State.DONE

    def _request(self, index: int) -> SendStep:
        step = self._plan.steps[index]
        specs, batched = step.config.inputs_by_name, step.config.max_batch_size > 0
        inputs = tuple(
            _named(name, self._held[tensor], specs[name].dims, batched=batched)
            for name, tensor in step.inputs
            if tensor in self._held
        )
        is_follower = index in self._plan.stateful and index != self._plan.anchor
        return SendStep(index, inputs, tuple(name for name, _ in step.outputs), self._stand if is_follower else None)

    def _end(self) -> list[EnsembleAction]:
        config = self._plan.record.config
        actions: list[EnsembleAction] = []
        if self._differs and not (self._is_named and self._only_for_now):
            assert self._stand is not None, "known since the anchor's step was counted"
            actions.append(AbandonRun(self._stand))
            self._error = _told_to_begin(self._error, self._stand)
        if self._error is not None:
            return [*actions, FailRequest(self._error)]
        specs = config.outputs_by_name
        outputs = tuple(
            _named(name, self._held[self._plan.results[name]], specs[name].dims, batched=config.max_batch_size > 0)
            for name in self._wanted
            if self._plan.results[name] in self._held
        )
        return [*actions, AnswerRequest(outputs)]

    @property
    def _differs(self) -> bool:
        """Whether the stateful steps have not all done this step, though one of their sequences has counted it."""
        stateful = self._plan.stateful
        done = sum(self._states[index] is _State.DONE for index in stateful)
        return len(stateful) > 1 and (self._is_spent or 0 < done < len(stateful))


def held_tensors(step: PlannedStep, outputs: Sequence[Tensor]) -> dict[str, HeldTensor]:
    """Tensor of the plan -> what one answer of the step has given for it."""
    given = {tensor.name: tensor for tensor in outputs}
    batched = step.config.max_batch_size > 0
    return {
        tensor: HeldTensor(found, found.shape[0] if batched and found.shape else 0)
        for name, tensor in step.outputs
        if (found := given.get(name)) is not None
    }


def _with_views(held: Mapping[str, HeldTensor], plan: EnsemblePlan) -> dict[str, HeldTensor]:
    """Tensors of the plan, and their views."""
    found = dict(held)
    waiting = list(held) if plan.views else []
    while waiting:
        name = waiting.pop()
        for view in plan.views.get(name, ()):
            found[view.tensor] = _seen(found[name], view)
            waiting.append(view.tensor)
    return found


def _seen(held: HeldTensor, view: TensorView) -> HeldTensor:
    """What a view makes of a tensor. A tensor of another shape than was declared stays as it is; the next step's own
    check says so.
    """
    tensor = _named(view.tensor, held, view.dims, batched=view.batched)
    rows, dims = tensor.shape[: int(view.batched)], tensor.shape[int(view.batched) :]
    if are_alike(view.dims, dims):
        tensor = msgspec.structs.replace(tensor, shape=(*rows, *reshaped(dims, view.dims, view.shape)))
    return HeldTensor(tensor, rows[0] if rows else 0)


def within_ensembles(step: PlannedStep, error: MeshError) -> MeshError:
    """A step's error, with the names of the ensembles around it. A step that was cancelled has no text of its own."""
    if error.code is Code.CANCELLED and not error.message:
        error.message = "the request was cancelled"
    return error.within("".join(f"in ensemble '{name}', " for name in step.ensembles))


_ADVICE = re.compile(r"[:,][^:,]*\btry again( later)?$")
"""What ends the text of a refusal for the moment. Nobody should do it when the sequence is over."""


def _told_to_begin(error: MeshError | None, stand: Stand) -> MeshError:
    """The error of a request with which a run ends."""
    assert error is not None, "a stateful step that was not done has failed"
    if isinstance(error, SequenceError) and error.facts["retry"] == Retry.START.value:
        return error
    cause = _ADVICE.sub("", error.message)
    text = (
        f"{cause} (the sequence is over, because the states of the ensemble's steps would differ from now on: the next "
        "request must specify the START flag)"
    )
    return SequenceError(text, Reason.FAILED, stand.step - 1, error.code)


def _named(name: str, held: HeldTensor, dims: Sequence[int], *, batched: bool) -> Tensor:
    """A tensor of the plan under the name that a model has for it, in that model's shape.

    Between a model with a batch dimension and one without, the dimension is added or taken away if the shapes fit only
    so. Source: Triton core, ensemble_scheduler.cc (ReshapeTensorDims).
    """
    tensor, rows = held
    shape = tensor.shape
    if batched and not rows and are_alike(dims, shape):
        shape = (1, *shape)
    elif not batched and rows == 1 and not are_alike(dims, shape):
        shape = shape[1:]
    return msgspec.structs.replace(tensor, name=name, shape=shape)

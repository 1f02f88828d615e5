"""What a takeover needs of a sequence, and what a step's commit changes about it.

Redis holds a sequence's state as of one step, its *base*. The inbox entries of the steps after the base stay in the
owner's inbox until there is a later base; a takeover replays these steps. There are three ways, one per kind of model:

    Checkpoints   the state itself goes to Redis every N steps: the base is the last checkpointed step, or the step
                  before a later START
    Log           the state stays with the model: the base is the step before START, and all later entries are kept
    Nothing       the state stays with the model and is lost with it: every step is its own base

Pure: says which entries may go; the caller commits that.

Source: docs/design/step.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from executor.core.sequences import OwnedSequence, QueuedStep
from shared.contract.ids import StepNumber
from shared.contract.messages import StepFlag
from shared.contract.model_config import ModelConfig


class Change(msgspec.Struct, frozen=True):
    """What a step's commit changes about its sequence's recovery.

    entries      inbox entries that a takeover does not need any more
    base         the step whose state Redis holds from now on; 0: as before
    recoverable  whether a takeover finds the sequence's state from now on; None: as before
    """

    entries: Sequence[str] = ()
    base: StepNumber = StepNumber(0)
    recoverable: bool | None = None


class Recovery(Protocol):
    """How a model's sequences survive their executor."""

    def is_due(self, owned: OwnedSequence) -> bool:
        """Whether the state after the running step goes to Redis with its commit.
        (For an END the caller does not ask.)
        """
        ...

    def succeeded(self, owned: OwnedSequence, queued: QueuedStep) -> Change:
        """The change by a running step that has succeeded. Its state, if it was due, is in the commit."""
        ...

    def failed(self, owned: OwnedSequence, queued: QueuedStep, *, saved: bool) -> Change:
        """The change by a running step that has failed. saved: the state that it left is in the commit nevertheless"""
        ...


def recovery_of(config: ModelConfig) -> Recovery:
    """The recovery of a model's sequences."""
    if config.state_in_mesh:
        return Checkpoints(config.checkpoint_interval)
    if config.replays:
        return Log(config.sequence_log_steps, config.sequence_log_bytes)
    return Nothing()


@dataclass(frozen=True, slots=True)
class Nothing:
    """A takeover needs nothing: each step's entry goes with its commit."""

    def is_due(self, owned: OwnedSequence) -> bool:
        return False

    def succeeded(self, owned: OwnedSequence, queued: QueuedStep) -> Change:
        return closed(owned, queued)

    def failed(self, owned: OwnedSequence, queued: QueuedStep, *, saved: bool) -> Change:
        return closed(owned, queued)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The state of every `interval`-th step goes to Redis."""

    interval: int

    def is_due(self, owned: OwnedSequence) -> bool:
        return not owned.replays and len(owned.open_entries) >= self.interval

    def succeeded(self, owned: OwnedSequence, queued: QueuedStep) -> Change:
        if self.is_due(owned) or StepFlag.END in queued.step.flags:
            return closed(owned, queued)
        if StepFlag.START in queued.step.flags:
            # A replay can begin with this START, whatever state came before. (The owner may not even have fetched that
            # state.)
            return Change(owned.closed_before(queued), StepNumber(queued.step.step - 1))
        return Change()

    def failed(self, owned: OwnedSequence, queued: QueuedStep, *, saved: bool) -> Change:
        """A failed step did not change the state. If the step before it was checkpointed, what Redis holds is the state
        after this step too, and nothing needs replaying. Else the entries before it stay, and only its own goes.
        """
        # One open entry is this step's own: the step before it was checkpointed.
        if saved or _voids(queued) or len(owned.open_entries) == 1:
            return closed(owned, queued)
        return Change([owned.passed_over(queued)])


@dataclass(frozen=True, slots=True)
class Log:
    """Keeps all steps since START, as long as there are at most `steps` of them, with `payload_bytes` together. Beyond
    that the sequence goes on, but is lost if its executor is lost; a new START begins a new log.
    """

    steps: int
    payload_bytes: int

    def is_due(self, owned: OwnedSequence) -> bool:
        return False

    def succeeded(self, owned: OwnedSequence, queued: QueuedStep) -> Change:
        if StepFlag.END in queued.step.flags:
            return closed(owned, queued)
        if StepFlag.START in queued.step.flags:
            owned.log_dropped = False
            change = Change(owned.closed_before(queued), StepNumber(queued.step.step - 1), recoverable=True)
            return change if self._has_room(owned) else self._dropped(owned, queued, change.entries)
        if owned.log_dropped:
            return closed(owned, queued)
        return Change() if self._has_room(owned) else self._dropped(owned, queued)

    def failed(self, owned: OwnedSequence, queued: QueuedStep, *, saved: bool) -> Change:
        if owned.log_dropped or _voids(queued):
            return closed(owned, queued)
        return Change([owned.passed_over(queued)])

    def _has_room(self, owned: OwnedSequence) -> bool:
        return len(owned.open_entries) <= self.steps and owned.open_bytes <= self.payload_bytes

    def _dropped(self, owned: OwnedSequence, queued: QueuedStep, before: Sequence[str] = ()) -> Change:
        owned.log_dropped = True
        return Change([*before, *owned.closed()], queued.step.step, recoverable=False)


def closed(owned: OwnedSequence, queued: QueuedStep) -> Change:
    """No step up to this one will be replayed."""
    return Change(owned.closed(), queued.step.step)


def _voids(queued: QueuedStep) -> bool:
    """Whether no state is left if this step fails (START), or none is needed any more (END)."""
    return bool(queued.step.flags & (StepFlag.START | StepFlag.END))

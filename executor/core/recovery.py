"""What a takeover needs of a sequence, and what a step's commit changes about it.

Redis holds a sequence's state as of one step, its *base*. The inbox entries of the steps after the base stay in the
owner's inbox until there is a later base; a takeover replays these steps. There are three ways, one per kind of model:

    Checkpoints   the state itself goes to Redis every N steps: the base is the last checkpointed step, or the step
                  before a later START
    Log           the state stays with the model: the base is the step before START, and all later entries are kept
    (neither)     the state stays with the model and is lost with it: every step is its own base (`Recovery`)

Pure: says which entries may go; the caller commits that.

Source: docs/design/step.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shared.contract.ids import StepNumber
from shared.contract.messages import END, START, InboxStep
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


@dataclass(slots=True)
class KeptSteps:
    """The steps of a sequence that a takeover would replay: those since the base, with the running one.

    entries  their inbox entries, in order
    size     bytes of their messages
    dropped  there were too many, or too large ones, to keep them all (see `Log`)
    """

    entries: list[str] = field(default_factory=list[str])
    size: int = 0
    dropped: bool = False

    def add(self, step: InboxStep) -> None:
        """Notes a step that begins to run: a takeover would run it again."""
        self.entries.append(step.entry)
        self.size += len(step.message)

    def close(self) -> list[str]:
        """No takeover will need any of them: takes their entries out."""
        entries, self.entries, self.size = self.entries, [], 0
        return entries

    def close_before(self, step: InboxStep) -> list[str]:
        """Takes the entries out, without that of the latest step."""
        entries = self.close()[:-1]
        self.add(step)
        return entries

    def pass_over(self, step: InboxStep) -> str:
        """Takes the entry of the latest step out, because no replay may run that step again."""
        self.size -= len(step.message)
        return self.entries.pop()


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a model's sequences survive their executor. By default not: a takeover needs nothing, and each step's entry
    goes with its commit.
    """

    def is_due(self, kept: KeptSteps, step: InboxStep) -> bool:
        """Whether the state after the running step goes to Redis with its commit. (Never asked for a replayed step.)"""
        return False

    def needs_start(self, checkpointed: StepNumber, *, holds_state: bool) -> bool:
        """Whether nothing but a START can follow the checkpointed step, because Redis holds no state of it. If it is
        another step, Redis has lost the state.
        """
        return False

    def succeeded(self, kept: KeptSteps, step: InboxStep, *, saved: bool) -> Change:
        """The change by a running step that has succeeded. saved: its state is in the commit"""
        return closed(kept, step)

    def failed(self, kept: KeptSteps, step: InboxStep, *, saved: bool) -> Change:
        """The change by a running step that has failed, and left its sequence a state. saved: it is in the commit"""
        return closed(kept, step)


def recovery_of(config: ModelConfig) -> Recovery:
    if config.state_in_mesh:
        return Checkpoints(config.checkpoint_interval)
    if config.replays:
        return Log(config.sequence_log_steps, config.sequence_log_bytes)
    return Recovery()


@dataclass(frozen=True, slots=True)
class Checkpoints(Recovery):
    """The state of every `interval`-th step goes to Redis. No state is empty: neither declared ones, nor what a model
    hands out (`ModelState.save`).
    """

    interval: int

    def needs_start(self, checkpointed: StepNumber, *, holds_state: bool) -> bool:
        # The base before a START that is not checkpointed has no state.
        return checkpointed > 0 and not holds_state

    def is_due(self, kept: KeptSteps, step: InboxStep) -> bool:
        return not step.flags & END and len(kept.entries) >= self.interval

    def succeeded(self, kept: KeptSteps, step: InboxStep, *, saved: bool) -> Change:
        if saved or step.flags & END:
            return closed(kept, step)
        if step.flags & START:
            # A replay can begin with this START, whatever state came before. (The owner may not even have fetched that
            # state.)
            return Change(kept.close_before(step), StepNumber(step.step - 1))
        return Change()

    def failed(self, kept: KeptSteps, step: InboxStep, *, saved: bool) -> Change:
        """A failed step did not change the state. If the step before it was checkpointed, what Redis holds is the state
        after this step too, and nothing needs replaying. Else the entries before it stay, and only its own goes.
        """
        # One kept entry is this step's own: the step before it was checkpointed.
        if saved or step.flags & END or len(kept.entries) == 1:
            return closed(kept, step)
        return Change([kept.pass_over(step)])


@dataclass(frozen=True, slots=True)
class Log(Recovery):
    """Keeps all steps since START, as long as there are at most `steps` of them, with `payload_bytes` together. Beyond
    that the sequence goes on, but is lost if its executor is lost; a new START begins a new log.
    """

    steps: int
    payload_bytes: int

    def succeeded(self, kept: KeptSteps, step: InboxStep, *, saved: bool) -> Change:
        if step.flags & END:
            return closed(kept, step)
        if step.flags & START:
            kept.dropped = False
            change = Change(kept.close_before(step), StepNumber(step.step - 1), recoverable=True)
            return change if self._has_room(kept) else self._dropped(kept, step, change.entries)
        if kept.dropped:
            return closed(kept, step)
        return Change() if self._has_room(kept) else self._dropped(kept, step)

    def failed(self, kept: KeptSteps, step: InboxStep, *, saved: bool) -> Change:
        if kept.dropped or step.flags & END:
            return closed(kept, step)
        return Change([kept.pass_over(step)])

    def _has_room(self, kept: KeptSteps) -> bool:
        return len(kept.entries) <= self.steps and kept.size <= self.payload_bytes

    def _dropped(self, kept: KeptSteps, step: InboxStep, before: Sequence[str] = ()) -> Change:
        kept.dropped = True
        return Change([*before, *kept.close()], step.step, recoverable=False)


def closed(kept: KeptSteps, step: InboxStep) -> Change:
    """No step up to this one will be replayed."""
    return Change(kept.close(), step.step)

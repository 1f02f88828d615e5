"""Compares what happened with what must have happened. Pure.

Answers are compared with the oracle (`fold.py`), exactly. A wrong one is named by what explains it: a step is missing
in it (lost), twice in it (doubled), in another place (reordered), or it is nothing of that sort (wrong). An error is
allowed when something that the run did explains it: a fault at that time, an earlier step that is still open, a
silence beyond the model's limit. A client's own leaving, and an answer that it did not wait for, need no explanation:
what counts is that the step is answered in the end, rightly.

A stale replica that was made primary takes steps back that were answered. Whoever numbers steps must be told so by an
error, never by a wrong answer. Of a client that does not, the mesh cannot know that it goes on from elsewhere: its
sequences are not judged beyond such a fault.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate, pairwise

import msgspec

from deploy.chaos import fold
from deploy.chaos.faults import KINDS, Victim
from deploy.chaos.fold import FoldState
from deploy.chaos.history import Attempt, AttemptOutcome, SequenceHistory, Strike
from deploy.chaos.models import variant

AFTERMATH_S = 10.0
"""A fault explains errors until so long after what it hit is back: clients and gateways reconnect with back-off."""
FOREWARNING_S = 0.5
"""The moment of a fault is known less exactly than that of an error."""
REPLIES_KEPT = 8
"""Replies of a sequence that the mesh keeps for retries, by default."""
GONE = frozenset({"never_seen", "expired", "lost", "failed", "ended", "cancelled"})
"""Reasons that mean that the sequence, or its state, is not there any more."""
TEXT_MAX = 300


class Sort(StrEnum):
    """How a promise was broken."""

    LOST = "lost"
    DOUBLED = "doubled"
    REORDERED = "reordered"
    WRONG = "wrong"
    UNEXPLAINED = "unexplained"


class Finding(msgspec.Struct, frozen=True):
    """One broken promise: which step of which sequence, and the story."""

    sort: Sort
    sequence: int
    correlation_id: int | str
    step: int
    at_s: float
    story: str


class Strikes:
    """The faults of a run, asked by time."""

    def __init__(self, strikes: Sequence[Strike]) -> None:
        ordered = sorted(strikes, key=lambda strike: strike.begin_s)
        self._victims = [KINDS[strike.kind].victim for strike in ordered]
        self._begins = [strike.begin_s - FOREWARNING_S for strike in ordered]
        self._ends = [strike.end_s + AFTERMATH_S for strike in ordered]
        self._longest = list(accumulate(self._ends, max))

    def victims(self, from_s: float, to_s: float) -> set[Victim]:
        """Whom faults hit, or had hit shortly before, in that time."""
        last = bisect_right(self._begins, to_s)
        first = bisect_left(self._longest, from_s, hi=last)
        return {self._victims[i] for i in range(first, last) if self._ends[i] >= from_s}


TRANSPORT = frozenset({Victim.GATEWAY, Victim.CLIENT_LINKS, Victim.CLIENTS})
"""What may break a client's connection."""
SERVICE = frozenset(
    {Victim.GATEWAY, Victim.SCHEDULER, Victim.EXECUTOR, Victim.REDIS, Victim.REDIS_LINKS, Victim.REPLICA}
)
"""What may leave a gateway unable to serve for a while, which it says."""
UNSURE = frozenset({Victim.REDIS, Victim.REDIS_LINKS, Victim.GATEWAY, Victim.REPLICA})
"""What may leave a gateway in doubt whether a step was accepted."""
CROWD = frozenset({Victim.SLOTS})
FORGETTING = frozenset({Victim.REPLICA})
"""What may take steps back that were answered."""


def check(told: SequenceHistory, strikes: Strikes) -> list[Finding]:
    """What is wrong with one sequence: at most one finding about its answers, and one for each unexplained error."""
    return [*answer_findings(told, strikes), *error_findings(told, strikes), *silence_findings(told)]


def finding(told: SequenceHistory, sort: Sort, step: int, at_s: float, story: str) -> Finding:
    """A finding about a step of this sequence."""
    return Finding(sort, told.script.index, told.script.correlation_id, step, at_s, story)


# -- answers ----------------------------------------------------------------------------------------------------------


def answer_findings(told: SequenceHistory, strikes: Strikes) -> list[Finding]:
    """The first wrong answer, explained by it and by those after it: later ones mostly follow from the first."""
    right = fold.answers(told.script.values)
    answered = sorted(
        (a for a in told.attempts if a.outcome is AttemptOutcome.ANSWERED), key=lambda a: (a.step, a.done_s)
    )
    if told.forsaken:
        # Steps behind one that was refused ran without it: the mesh cannot know better, and the client saw it.
        steps = {attempt.step for attempt in answered}
        answered = [a for a in answered if all(step in steps for step in range(1, a.step))]
    wrong = [attempt for attempt in answered if FoldState(attempt.fold, attempt.length) != right[attempt.step - 1]]
    if not wrong:
        return []
    first, last = wrong[0], wrong[-1]
    if not told.script.numbered and strikes.victims(told.attempts[0].sent_s, first.done_s) & FORGETTING:
        return []
    went_on_rightly = any(attempt.step > last.step for attempt in answered)
    mixed_up = all(FoldState(attempt.fold, attempt.length) in right for attempt in wrong)
    sort, story = explained(told.script.values, first, right, state_was_right=went_on_rightly or mixed_up)
    story += f"; {len(wrong)} of {len(answered)} answers of the sequence are wrong"
    return [finding(told, sort, first.step, first.done_s, story)]


def explained(
    values: Sequence[int], attempt: Attempt, right: Sequence[FoldState], *, state_was_right: bool
) -> tuple[Sort, str]:
    """What a wrong answer shows.

    state_was_right  the answers after it are right, or all wrong ones belong to other steps: only they were mixed up
    """
    step, got = attempt.step, FoldState(attempt.fold, attempt.length)
    expected = right[step - 1]
    said = f"step {step} was answered {tuple(got)} instead of {tuple(expected)}"
    if state_was_right:
        whose = f": that is the answer to step {right.index(got) + 1}" if got in right else ""
        return Sort.WRONG, f"{said}{whose}; the state was right"
    if twice := doubled_step(values, step, got):
        return Sort.DOUBLED, f"{said}: step {twice} is in it twice"
    if missing := missing_step(values, step, got):
        return Sort.LOST, f"{said}: step {missing} is missing in it"
    if moved := exchanged_step(values, step, got):
        return Sort.REORDERED, f"{said}: step {moved} came after step {moved + 1}"
    if got.length > expected.length:
        return Sort.DOUBLED, f"{said}: {got.length - expected.length} steps too many are in it"
    if got.length < expected.length:
        return Sort.LOST, f"{said}: {expected.length - got.length} steps are missing in it"
    return Sort.WRONG, f"{said}: steps of another sequence, or in another order"


def doubled_step(values: Sequence[int], step: int, got: FoldState) -> int:
    """The step that ran a second time, at once or shortly before or after the one that was answered wrongly.

    0 when that does not explain the state.
    """
    if got.length != step + 1:
        return 0
    for twice in range(1, step + 1):
        for place in {twice, step - 1, step}:
            if fold.folded([*values[:place], values[twice - 1], *values[place:step]]) == got:
                return twice
    return 0


def missing_step(values: Sequence[int], step: int, got: FoldState) -> int:
    """The step that did not run; 0 when that does not explain the state."""
    if got.length != step - 1:
        return 0
    without = (n for n in range(1, step + 1) if fold.folded([*values[: n - 1], *values[n:step]]) == got)
    return next(without, 0)


def exchanged_step(values: Sequence[int], step: int, got: FoldState) -> int:
    """The step that ran right after its successor; 0 when that does not explain the state.

    The last step may have been overtaken by the one after it, whose own value is in the state then.
    """
    for first in range(1, min(step, len(values) - 1) + 1):
        exchanged = [*values[: first - 1], values[first], values[first - 1], *values[first + 1 :]]
        if got in (fold.folded(exchanged[:step]), fold.folded(exchanged[: step + 1])):
            return first
    return 0


# -- errors -----------------------------------------------------------------------------------------------------------


def error_findings(told: SequenceHistory, strikes: Strikes) -> list[Finding]:
    """The refusals and broken connections that nothing explains: the first of each sort, and how many there were."""
    alike: dict[tuple[AttemptOutcome, str], list[Attempt]] = {}
    for attempt in told.attempts:
        if attempt.outcome in (AttemptOutcome.REFUSED, AttemptOutcome.BROKEN) and not is_explained(
            told, attempt, strikes
        ):
            alike.setdefault((attempt.outcome, attempt.reason), []).append(attempt)
    return [unexplained(told, attempts[0], len(attempts)) for attempts in alike.values()]


def unexplained(told: SequenceHistory, first: Attempt, count: int) -> Finding:
    """The finding about errors of one sort."""
    what = f"{first.outcome} {first.reason}".strip()
    story = f"step {first.step} was {what}, last step {first.last_step}: {first.text[:TEXT_MAX]}"
    if count > 1:
        story += f"; {count - 1} more attempts of the sequence alike"
    return finding(told, Sort.LOST if first.reason in GONE else Sort.UNEXPLAINED, first.step, first.done_s, story)


def is_explained(told: SequenceHistory, attempt: Attempt, strikes: Strikes) -> bool:
    """Whether something that the run did accounts for this error."""
    victims = strikes.victims(attempt.sent_s, attempt.done_s)
    if attempt.outcome is AttemptOutcome.BROKEN:
        return bool(victims & TRANSPORT)
    if attempt.reason and strikes.victims(told.attempts[0].sent_s, attempt.done_s) & FORGETTING:
        return True
    match attempt.reason:
        case "":
            return bool(victims & (SERVICE | TRANSPORT))
        case "wrong_step" | "answered" if 0 < attempt.step <= attempt.last_step:
            # It ran, and its reply is kept no longer.
            return attempt.last_step - attempt.step >= REPLIES_KEPT
        case "wrong_step" | "never_seen":
            return has_open_step_before(told, attempt)
        case "expired":
            return was_silent(told, attempt)
        case "late":
            return bool(victims & UNSURE)
        case "backlog_full" | "busy":
            return bool(victims & CROWD)
        case _:
            return False


def has_open_step_before(told: SequenceHistory, attempt: Attempt) -> bool:
    """Whether an earlier step was still without an answer: then the mesh may not have had it when this one came.

    On a stream steps arrive in order, so what was answered by the time of the refusal had arrived before. Unary calls
    arrive in any order.
    """
    by_s = attempt.done_s if told.script.protocol == "stream" else attempt.sent_s
    answered = {a.step for a in told.attempts if a.outcome is AttemptOutcome.ANSWERED and a.done_s <= by_s}
    return any(step not in answered for step in range(1, attempt.step))


def was_silent(told: SequenceHistory, attempt: Attempt) -> bool:
    """Whether the sequence may have expired: for as long as its model allows, nothing was committed, and nothing open.

    The idle time counts from a commit, which comes after the first sending of its step. The client may have heard of it
    much later: it lost a connection, and a retry got the stored reply.
    """
    answered = max((a.step for a in told.attempts if a.outcome is AttemptOutcome.ANSWERED), default=0)
    first_sent_s = min((a.sent_s for a in told.attempts if a.step == attempt.last_step), default=0.0)
    return attempt.last_step >= answered and attempt.done_s - first_sent_s >= variant(told.script.model).idle_s


# -- silence ----------------------------------------------------------------------------------------------------------


def silence_findings(told: SequenceHistory) -> list[Finding]:
    """A step that was asked for and never answered, although its client did not give up."""
    answered = {a.step for a in told.attempts if a.outcome is AttemptOutcome.ANSWERED}
    ran = {a.step for a in told.attempts if a.outcome is AttemptOutcome.REFUSED and a.step <= a.last_step}
    open_steps = {a.step for a in told.attempts} - answered - ran
    if not open_steps or told.forsaken:
        return []
    step = min(open_steps)
    tries = [attempt for attempt in told.attempts if attempt.step == step]
    story = f"step {step} was sent {len(tries)} times in {tries[-1].done_s - tries[0].sent_s:.0f} s and never answered"
    return [finding(told, Sort.LOST, step, tries[-1].done_s, story)]


# -- the run ----------------------------------------------------------------------------------------------------------


def longest_gap(answered_s: Sequence[float], from_s: float, to_s: float) -> float:
    """The longest time without any answer, seconds, that begins in [from_s, to_s]. answered_s: sorted."""
    first = max(0, bisect_right(answered_s, from_s) - 1)
    last = bisect_right(answered_s, to_s)
    return max((b - a for a, b in pairwise(answered_s[first : last + 1])), default=0.0)

"""Checks the history of a run: compares every answer with the right one, and looks for an explanation of every error.
Pure.

Answers must equal those of the oracle (`fold.py`) exactly. A wrong answer is classified by what explains it: a step is
missing in the state (lost), counted twice (doubled), in another position (reordered), or none of these (wrong).

An error is allowed if the run itself explains it: by a fault at that time, an earlier step that is still open, or a
silence beyond the model's limit. Attempts that the client itself broke off need no explanation. Every step must be
answered rightly in the end.

When a stale replica is made primary, it forgets steps that were answered. A client that numbers its steps must then get
an error, never a wrong answer. If a client does not number them, the mesh cannot notice; its sequences are not judged
after such a fault.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec

from deploy.chaos import fold
from deploy.chaos.faults import KINDS, OF_REDIS, Victim
from deploy.chaos.fold import FoldState
from deploy.chaos.history import Attempt, AttemptOutcome, SequenceHistory, Strike
from deploy.chaos.models import variant

AFTERMATH_S = 10.0
"""A fault explains errors until this long after its victim is back: clients and gateways reconnect with back-off."""
FOREWARNING_S = 0.5
"""A fault explains errors from this long before its noted begin, which is less exact than an error's time."""
REPLIES_KEPT = 8
"""Replies of a sequence that the mesh keeps for retries, by default."""
GONE = frozenset({"never_seen", "expired", "lost", "failed", "ended", "cancelled"})
"""Reasons of errors that say that the sequence or its state does not exist any more."""
NOT_NOW = frozenset({"", "UNAVAILABLE", "502", "503", "504"})
"""Codes of refusals without a reason that a fault may explain. "": nobody has told the code."""
TEXT_MAX = 300


class Sort(StrEnum):
    """Which promise was broken."""

    LOST = "lost"
    DOUBLED = "doubled"
    REORDERED = "reordered"
    WRONG = "wrong"
    UNEXPLAINED = "unexplained"


class Finding(msgspec.Struct, frozen=True):
    """One broken promise: the step, its sequence, and a text that says what happened."""

    sort: Sort
    sequence: int
    correlation_id: int | str
    step: int
    at_s: float
    story: str


class Strikes:
    """The faults of a run, asked by time."""

    def __init__(self, strikes: Sequence[Strike]) -> None:
        self._effects = [
            (strike.begin_s - FOREWARNING_S, strike.end_s + AFTERMATH_S, KINDS[strike.kind].victim)
            for strike in strikes
        ]

    def victims(self, from_s: float, to_s: float) -> set[Victim]:
        """The victims of faults that explain errors in that time."""
        return {victim for begin_s, end_s, victim in self._effects if begin_s <= to_s and end_s >= from_s}


TRANSPORT = frozenset({Victim.GATEWAY, Victim.CLIENT_LINKS, Victim.CLIENTS})
"""Victims whose faults may break a client's connection."""
SERVICE = frozenset({Victim.GATEWAY, Victim.SCHEDULER, Victim.EXECUTOR, Victim.REDIS_LINKS, *OF_REDIS})
"""Victims whose faults may make a gateway refuse steps as unavailable for a while."""
UNSURE = frozenset({Victim.GATEWAY, Victim.REDIS_LINKS, *OF_REDIS})
"""Victims whose faults may leave a gateway in doubt whether a step was accepted."""
CROWD = frozenset({Victim.SLOTS})
FORGETTING = frozenset({Victim.REPLICA})
"""Victims whose faults may make Redis forget steps that were answered."""


def check(told: SequenceHistory, strikes: Strikes) -> list[Finding]:
    """The findings about one sequence: at most one about its answers; others about errors and silence."""
    return [*answer_findings(told, strikes), *error_findings(told, strikes), *silence_findings(told)]


def finding(told: SequenceHistory, sort: Sort, step: int, at_s: float, story: str) -> Finding:
    return Finding(sort, told.script.index, told.script.correlation_id, step, at_s, story)


# -- answers ----------------------------------------------------------------------------------------------------------


def answer_findings(told: SequenceHistory, strikes: Strikes) -> list[Finding]:
    """The first wrong answer, with its explanation. Later wrong answers mostly follow from the first."""
    right = fold.answers(told.script.values)
    answered = sorted(
        (a for a in told.attempts if a.outcome is AttemptOutcome.ANSWERED), key=lambda a: (a.step, a.done_s)
    )
    if told.forsaken:
        # A step that was refused is not in the state of later ones. The mesh cannot know that the client meant to send
        # it again, and the client saw the refusal.
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

    state_was_right  the answers after it are right, or every wrong answer is that of another step: answers were mixed
                     up, and the state was right
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
    """The step that ran twice; 0 if that does not explain the state.

    Steps at or near the one with the wrong answer are tried.
    """
    if got.length != step + 1:
        return 0
    for twice in range(1, step + 1):
        for place in {twice, step - 1, step}:
            if fold.folded([*values[:place], values[twice - 1], *values[place:step]]) == got:
                return twice
    return 0


def missing_step(values: Sequence[int], step: int, got: FoldState) -> int:
    """The step that did not run; 0 if that does not explain the state."""
    if got.length != step - 1:
        return 0
    without = (n for n in range(1, step + 1) if fold.folded([*values[: n - 1], *values[n:step]]) == got)
    return next(without, 0)


def exchanged_step(values: Sequence[int], step: int, got: FoldState) -> int:
    """The step that ran right after its successor; 0 if that does not explain the state.

    This may also be the step with the wrong answer: then the state holds its successor's value.
    """
    for first in range(1, min(step, len(values) - 1) + 1):
        exchanged = [*values[: first - 1], values[first], values[first - 1], *values[first + 1 :]]
        if got in (fold.folded(exchanged[:step]), fold.folded(exchanged[: step + 1])):
            return first
    return 0


# -- errors -----------------------------------------------------------------------------------------------------------


def error_findings(told: SequenceHistory, strikes: Strikes) -> list[Finding]:
    """The unexplained refusals and broken connections: the first of each sort, with their number."""
    alike: dict[tuple[AttemptOutcome, str], list[Attempt]] = {}
    for attempt in told.attempts:
        if attempt.outcome in (AttemptOutcome.REFUSED, AttemptOutcome.BROKEN) and not is_explained(
            told, attempt, strikes
        ):
            alike.setdefault((attempt.outcome, attempt.reason), []).append(attempt)
    return [unexplained(told, attempts[0], len(attempts)) for attempts in alike.values()]


def unexplained(told: SequenceHistory, first: Attempt, count: int) -> Finding:
    """The finding about unexplained errors of one sort."""
    what = f"{first.outcome} {first.reason}".strip()
    story = f"step {first.step} was {what}, last step {first.last_step}: {first.text[:TEXT_MAX]}"
    if count > 1:
        story += f"; {count - 1} more attempts of the sequence alike"
    return finding(told, Sort.LOST if first.reason in GONE else Sort.UNEXPLAINED, first.step, first.done_s, story)


def is_explained(told: SequenceHistory, attempt: Attempt, strikes: Strikes) -> bool:
    """Whether something in the run explains this error."""
    victims = strikes.victims(attempt.sent_s, attempt.done_s)
    if attempt.outcome is AttemptOutcome.BROKEN:
        return bool(victims & TRANSPORT)
    if attempt.reason and strikes.victims(told.attempts[0].sent_s, attempt.done_s) & FORGETTING:
        return True
    match attempt.reason:
        case "":
            # A gateway that is in error, or calls the request wrong, is no consequence of a fault.
            return attempt.code in NOT_NOW and bool(victims & (SERVICE | TRANSPORT))
        case "wrong_step" | "answered" if 0 < attempt.step <= attempt.last_step:
            # The step ran, and the mesh does not keep its reply any more. Steps up to the last one may still be open.
            return attempt.last_step - attempt.step >= REPLIES_KEPT
        case "wrong_step" if was_answered(told, attempt.last_step + 1, attempt.sent_s):
            # The mesh has gone back behind what it had answered; that another step is open explains nothing of it.
            return False
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
    """Whether an earlier step was still unanswered: the mesh may then have got this step before that one.

    On a stream steps arrive in order, so a step that was answered by the time of the refusal had arrived before. Unary
    calls arrive in any order.
    """
    by_s = attempt.done_s if told.script.protocol in ("client", "stream") else attempt.sent_s
    answered = {a.step for a in told.attempts if a.outcome is AttemptOutcome.ANSWERED and a.done_s <= by_s}
    return any(step not in answered for step in range(1, attempt.step))


def was_answered(told: SequenceHistory, step: int, before_s: float) -> bool:
    return any(a.step == step and a.outcome is AttemptOutcome.ANSWERED and a.done_s < before_s for a in told.attempts)


def was_silent(told: SequenceHistory, attempt: Attempt) -> bool:
    """Whether the sequence may have expired: for its model's idle time no step was committed and none was open.

    The idle time counts from a commit. The client knows only that the commit came after it first sent the step; the
    answer may have come much later, as the stored reply to a retry. A commit of a step that it never sent explains
    nothing.
    """
    answered = max((a.step for a in told.attempts if a.outcome is AttemptOutcome.ANSWERED), default=0)
    first_sent_s = min((a.sent_s for a in told.attempts if a.step == attempt.last_step), default=math.inf)
    return attempt.last_step >= answered and attempt.done_s - first_sent_s >= variant(told.script.model).idle_s


# -- silence ----------------------------------------------------------------------------------------------------------


def silence_findings(told: SequenceHistory) -> list[Finding]:
    """The steps that were sent and never answered, although the client did not give up."""
    answered = {a.step for a in told.attempts if a.outcome is AttemptOutcome.ANSWERED}
    ran = {a.step for a in told.attempts if a.reason in ("wrong_step", "answered") and a.step <= a.last_step}
    open_steps = {a.step for a in told.attempts} - answered - ran
    if not open_steps or told.forsaken:
        return []
    step = min(open_steps)
    tries = [attempt for attempt in told.attempts if attempt.step == step]
    story = f"step {step} was sent {len(tries)} times in {tries[-1].done_s - tries[0].sent_s:.0f} s and never answered"
    return [finding(told, Sort.LOST, step, tries[-1].done_s, story)]


# -- the run ----------------------------------------------------------------------------------------------------------


def longest_gap(answered_s: Sequence[float], from_s: float, to_s: float) -> float:
    """The longest time without an answer, in seconds, that begins in [from_s, to_s].

    answered_s  times of all answers, sorted
    """
    first = max(0, bisect_right(answered_s, from_s) - 1)
    last = bisect_right(answered_s, to_s)
    return max((b - a for a, b in pairwise(answered_s[first : last + 1])), default=0.0)

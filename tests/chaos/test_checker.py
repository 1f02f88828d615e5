"""The checker finds what is wrong with a history, names it rightly, and finds nothing in a good one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.chaos import fold
from deploy.chaos.checker import AFTERMATH_S, Sort, Strikes, check, longest_gap
from deploy.chaos.history import Attempt, AttemptOutcome, SequenceHistory, Strike
from tests.chaos.histories import answered, history, refused

QUIET = Strikes([])
VALUES = st.lists(st.integers(0, 2**40), min_size=3, max_size=14, unique=True)


def sorts(told: SequenceHistory, strikes: Strikes = QUIET) -> list[Sort]:
    return [found.sort for found in check(told, strikes)]


def states_of(order: list[int]) -> list[fold.FoldState]:
    return fold.answers(order)


@given(VALUES)
def test_nothing_is_wrong_with_right_answers(values: list[int]) -> None:
    assert [] == sorts(history(values))


@given(VALUES, st.data())
def test_a_step_whose_effect_is_lost_after_its_answer_is_found(values: list[int], data: st.DataObject) -> None:
    lost = data.draw(st.integers(1, len(values) - 1))
    right = states_of(values)
    after = states_of(values[: lost - 1] + values[lost:])

    assert [Sort.LOST] == sorts(history(values, right[:lost] + after[lost - 1 :]))


@given(VALUES, st.data())
def test_a_step_that_runs_twice_is_found(values: list[int], data: st.DataObject) -> None:
    """At once, or as a late retry after the steps behind it."""
    twice = data.draw(st.integers(1, len(values) - 1))
    place = data.draw(st.integers(twice, len(values) - 1))
    right = states_of(values)
    after = states_of([*values[:place], values[twice - 1], *values[place:]])

    (found,) = check(history(values, right[:place] + after[place + 1 :]), QUIET)
    assert (Sort.DOUBLED, place + 1) == (found.sort, found.step)
    assert f"step {twice} is in it twice" in found.story


@given(VALUES, st.data())
def test_two_steps_in_the_wrong_order_are_found(values: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(values) - 1))
    states = states_of([*values[: first - 1], values[first], values[first - 1], *values[first + 1 :]])
    states[first - 1], states[first] = states[first], states[first - 1]

    (found,) = check(history(values, states), QUIET)
    assert Sort.REORDERED is found.sort
    assert f"step {first} came after step {first + 1}" in found.story


@given(VALUES, st.data())
def test_answers_that_are_exchanged_within_a_sequence_are_found(values: list[int], data: st.DataObject) -> None:
    one, other = sorted(data.draw(st.sets(st.integers(0, len(values) - 1), min_size=2, max_size=2)))
    states = states_of(values)
    states[one], states[other] = states[other], states[one]

    (found,) = check(history(values, states), QUIET)
    assert (Sort.WRONG, one + 1) == (found.sort, found.step)
    assert f"that is the answer to step {other + 1}" in found.story


@given(VALUES, st.data())
def test_the_answer_of_another_sequence_is_found(values: list[int], data: st.DataObject) -> None:
    swapped = data.draw(st.integers(0, len(values) - 1))
    states = states_of(values)
    states[swapped] = states_of([value + 1 for value in values])[swapped]

    assert [Sort.WRONG] == sorts(history(values, states))


@given(VALUES, st.data())
def test_state_that_goes_back_many_steps_is_found(values: list[int], data: st.DataObject) -> None:
    """As after a Redis that came back with older data."""
    back_to = data.draw(st.integers(0, len(values) - 2))
    states = states_of(values)
    states[-1] = fold.folded([*values[:back_to], values[-1]])

    assert [Sort.LOST] == sorts(history(values, states))


@pytest.mark.parametrize("numbered", [True, False])
def test_after_a_stale_replica_wrong_answers_are_found_where_the_mesh_could_know_better(*, numbered: bool) -> None:
    """Who numbers steps must be told that some are gone; who does not goes on from another state unawares."""
    states = states_of([1, 2, 3])
    states[-1] = fold.folded([1, 3])
    told = history([1, 2, 3], states, numbered=numbered)
    promoted = Strikes([Strike(0, "promote-replica", 2.6, 2.8)])

    assert ([Sort.LOST] if numbered else []) == sorts(told, promoted)
    assert [Sort.LOST] == sorts(told, Strikes([Strike(0, "kill-redis", 2.6, 2.8)]))


def test_a_step_that_is_never_answered_is_lost() -> None:
    told = history([1, 2, 3])
    told.attempts[2] = Attempt(3, 1, 0, 3.0, 8.0, AttemptOutcome.LATE)

    assert [Sort.LOST] == sorts(told)


def test_only_what_the_client_saw_before_it_gave_up_is_checked() -> None:
    """Steps with names alone, several open: one that is refused is overtaken by those behind it, and both know it."""
    told = history([1, 2, 3, 4], numbered=False, window=3)
    told.attempts[1:] = [refused(2), *map(answered, (3, 4), fold.answers([1, 3, 4])[1:])]
    told.forsaken = "a step was refused, and those behind it were not"
    fault = Strikes([Strike(0, "kill-redis", 1.0, 2.0)])

    assert [] == sorts(told, fault)
    assert [Sort.UNEXPLAINED] == sorts(told)


BROKEN = Attempt(2, 1, 0, 1.6, 1.7, AttemptOutcome.BROKEN, text="connection lost")


@pytest.mark.parametrize(
    ("error", "fault", "explained"),
    [
        (BROKEN, "kill-gateway", True),
        (BROKEN, "cut-client-links", True),
        (BROKEN, "kill-executor", False),
        (refused(2), "kill-redis", True),
        (refused(2), "kill-executor", True),
        (refused(2), "fill-slots", False),
        (refused(2, code="UNAVAILABLE"), "kill-redis", True),
        (refused(2, code="503"), "kill-gateway", True),
        (refused(2, code="INTERNAL"), "kill-redis", False),
        (refused(2, code="500"), "kill-gateway", False),
        (refused(2, code="INVALID_ARG"), "kill-executor", False),
        (refused(2, "late"), "cut-redis-links", True),
        (refused(2, "late"), "kill-executor", False),
        (refused(2, "backlog_full"), "fill-slots", True),
        (refused(2, "backlog_full"), "kill-redis", False),
        (refused(2, "cancelled"), "kill-gateway", False),
        (refused(2, "lost"), "kill-executor", False),
        (refused(2, "exists"), "kill-gateway", False),
        (refused(2), "promote-replica", True),
        (refused(2, "lost"), "promote-replica", True),
        (refused(2, "wrong_step", last_step=0), "promote-replica", True),
        (refused(2, "wrong_step", last_step=0), "kill-redis", False),
        (BROKEN, "promote-replica", False),
    ],
)
def test_an_error_is_allowed_only_where_a_fault_of_the_right_kind_explains_it(
    error: Attempt, fault: str, explained: bool
) -> None:
    told = history([1, 2, 3])
    told.attempts.insert(1, error)
    at_that_time = Strikes([Strike(0, fault, 0.0, 1.0), Strike(1, "drop-clients", 90.0, 91.0)])
    long_ago = Strikes([Strike(0, fault, -AFTERMATH_S - 9.0, -AFTERMATH_S - 1.0)])

    assert explained is (sorts(told, at_that_time) == [])
    assert 1 == len(sorts(told, long_ago))
    assert 1 == len(sorts(told))


def test_a_step_may_come_too_early_while_one_before_it_is_open_and_not_otherwise() -> None:
    open_before, nothing_open = history([1, 2, 3], window=2), history([1, 2, 3], window=2)
    open_before.attempts.insert(0, refused(3, "wrong_step", last_step=0, at_s=0.7))
    nothing_open.attempts.insert(2, refused(3, "wrong_step", last_step=2, at_s=2.7))

    assert [] == sorts(open_before)
    assert [Sort.UNEXPLAINED] == sorts(nothing_open)


def test_a_mesh_that_has_forgotten_answered_steps_is_told_though_a_step_before_the_refused_one_is_open() -> None:
    told = history([1, 2, 3, 4, 5], window=2)
    broken = Attempt(4, 1, 0, 4.0, 4.1, AttemptOutcome.BROKEN)
    told.attempts[3:] = [broken, refused(5, "wrong_step", last_step=2, at_s=4.0)]
    told.forsaken = "set back"

    assert [Sort.UNEXPLAINED] == sorts(told, Strikes([Strike(0, "kill-gateway", 4.0, 5.0)]))


def test_an_answer_that_is_kept_no_longer_is_allowed_only_beyond_the_number_that_is_kept() -> None:
    far_behind, near = history(range(12)), history(range(12))
    far_behind.attempts.append(refused(2, "answered", last_step=12, at_s=13.0))
    near.attempts.append(refused(9, "answered", last_step=12, at_s=13.0))

    assert [] == sorts(far_behind)
    assert [Sort.UNEXPLAINED] == sorts(near)


def test_an_open_step_that_was_refused_once_must_be_answered_all_the_same() -> None:
    told = history([1, 2])
    told.attempts.append(refused(3, "busy", last_step=3, at_s=3.0))

    assert Sort.LOST in sorts(told, Strikes([Strike(0, "fill-slots", 2.5, 3.5)]))


def expired(*, after_s: float, last_step: int = 2) -> SequenceHistory:
    """Two steps are answered, the second after 2.5 s; the third is told that the sequence has expired."""
    told = history([1, 2], model="chaos_brief")
    told.script = msgspec.structs.replace(told.script, values=(1, 2, 3))
    told.attempts.append(refused(3, "expired", last_step=last_step, at_s=after_s))
    told.forsaken = "expired"
    return told


def test_a_sequence_may_expire_only_after_a_silence_and_with_all_its_steps() -> None:
    assert [] == sorts(expired(after_s=6.5))
    assert [Sort.LOST] == sorts(expired(after_s=3.5))
    assert [Sort.LOST] == sorts(expired(after_s=6.5, last_step=1))
    assert [Sort.LOST] == sorts(expired(after_s=6.5, last_step=4)), "a step that was never sent"


def test_a_silence_begins_with_the_commit_and_not_with_the_stored_reply_to_a_retry() -> None:
    """The gateway froze after it had sent the step: another one tells the reply, and the limit is nearly over."""
    told = expired(after_s=5.2)
    told.attempts[1:2] = [Attempt(2, 1, 0, 2.0, 5.0, AttemptOutcome.LATE), answered(2, fold.answers([1, 2])[1])]
    told.attempts[2].sent_s, told.attempts[2].done_s = 5.05, 5.1

    assert [] == sorts(told)


def test_the_longest_gap_is_one_that_touches_the_given_time() -> None:
    answers = [0.0, 1.0, 5.0, 6.0, 9.0]

    assert 4.0 == longest_gap(answers, 1.5, 2.0)
    assert 1.0 == longest_gap(answers, 5.0, 5.5)
    assert 3.0 == longest_gap(answers, 5.0, 9.0)
    assert 0.0 == longest_gap([], 0.0, 9.0)

"""Requests of one sequence send their stateful steps in the order in which they came."""

from __future__ import annotations

from gateway.requests.ensembles.lines import StepLines


def test_a_step_waits_until_the_request_ahead_has_sent_its_own() -> None:
    lines, sent = StepLines(), list[str]()
    first, second, third = (lines.join("s") for _ in range(3))
    third.take(0, lambda: sent.append("third"))
    second.take(0, lambda: sent.append("second"))
    first.take(0, lambda: sent.append("first"))

    assert ["first", "second", "third"] == sent


def test_each_step_of_the_ensemble_has_its_own_order() -> None:
    lines, sent = StepLines(), list[str]()
    first, second = lines.join("s"), lines.join("s")
    first.take(0, lambda: sent.append("first 0"))
    second.take(0, lambda: sent.append("second 0"))
    second.take(2, lambda: sent.append("second 2"))
    first.take(2, lambda: sent.append("first 2"))

    assert ["first 0", "second 0", "first 2", "second 2"] == sent


def test_a_request_that_is_over_holds_nobody_up() -> None:
    lines, sent = StepLines(), list[str]()
    first, second, third = (lines.join("s") for _ in range(3))
    third.take(0, lambda: sent.append("third"))
    lines.leave("s", second)
    lines.leave("s", first)

    assert ["third"] == sent


def test_sequences_do_not_wait_for_each_other_and_leave_nothing_behind() -> None:
    lines, sent = StepLines(), list[str]()
    one, other = lines.join("s"), lines.join("t")
    other.take(0, lambda: sent.append("other"))
    lines.leave("s", one)
    lines.leave("t", other)

    assert ["other"] == sent
    assert 0 == len(lines)


def test_the_last_of_a_line_that_leaves_is_followed_by_the_one_ahead() -> None:
    lines, sent = StepLines(), list[str]()
    first, second = lines.join("s"), lines.join("s")
    lines.leave("s", second)
    third = lines.join("s")
    third.take(0, lambda: sent.append("third"))
    first.take(0, lambda: sent.append("first"))

    assert ["first", "third"] == sent


def test_a_line_of_thousands_is_no_deep_recursion() -> None:
    lines, sent = StepLines(), list[int]()
    line = [lines.join("s") for _ in range(5000)]
    for number, place in reversed(list(enumerate(line))):
        place.take(0, lambda number=number: sent.append(number))

    assert list(range(5000)) == sent


def test_what_is_to_be_done_when_a_request_is_first_waits_for_all_ahead() -> None:
    lines, done = StepLines(), list[str]()
    first, second, third = (lines.join("s") for _ in range(3))
    first.when_first(lambda: done.append("first"))
    third.when_first(lambda: done.append("third"))
    lines.leave("s", second)
    lines.leave("s", third)
    assert ["first"] == done

    lines.leave("s", first)
    assert ["first", "third"] == done

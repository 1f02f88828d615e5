"""Which calls are never answered, and in which order models can stop."""

from __future__ import annotations

import itertools

import pytest

from executor.calls.deadlocks import error_text, find, in_order
from shared.contract.calls import WaitingCall

_numbers = itertools.count(1)


def call(edge: str, instance: str = "0", process: str = "p") -> WaitingCall:
    """A call, younger than those before it. edge: caller and target, as in "ab"."""
    number = next(_numbers)
    return WaitingCall(number, process, number, edge[0], f"{edge[0]}{instance}", edge[1])


def test_models_whose_only_instances_wait_for_each_other() -> None:
    calls = [call("ab"), call("ba")]

    found = find(calls, {"a": 1, "b": 1})

    assert found is not None
    assert set(calls) == found.calls
    assert calls[1] == found.victim
    assert ["b", "a", "b"] == found.cycle
    assert "the call of model 'b' to model 'a' would never be answered" in error_text(found)
    assert "b -> a -> b" in error_text(found)


def test_a_model_that_calls_itself() -> None:
    found = find([call("aa")], {"a": 1})

    assert found is not None
    assert ["a", "a"] == found.cycle


@pytest.mark.parametrize(
    ("edges", "instances", "why"),
    [
        (["ab", "ba"], {"a": 1, "b": 2}, "an instance of b is free"),
        (["ab", "ba"], {"a": 2, "b": 1}, "an instance of a is free"),
        (["ab", "bc"], {"a": 1, "b": 1, "c": 1}, "c computes"),
        (["ab", "bc", "cd"], {"a": 1, "b": 1, "c": 1}, "d is an ensemble, or is not served"),
        (["ab", "ba"], {"b": 1}, "the executor of a is gone"),
    ],
)
def test_no_deadlock(edges: list[str], instances: dict[str, int], why: str) -> None:
    assert find([call(edge) for edge in edges], instances) is None, why


def test_an_instance_goes_on_while_one_of_its_calls_may_be_answered() -> None:
    calls = [call("ab"), call("ac"), call("ba")]

    assert find(calls, {"a": 1, "b": 1, "c": 1}) is None
    found = find([calls[0], calls[2]], {"a": 1, "b": 1, "c": 1})
    assert found is not None
    assert calls[2] == found.victim


def test_who_waits_for_a_deadlock_is_no_part_of_it() -> None:
    """Its call is answered once those that wait for each other are."""
    calls = [call("ab"), call("ba"), call("da"), call("ed")]

    found = find(calls, {"a": 1, "b": 1, "d": 1, "e": 1})

    assert found is not None
    assert (set(calls[:2]), calls[1]) == (found.calls, found.victim)


def test_instances_of_all_executors_count() -> None:
    calls = [call("ab", process="p"), call("ab", process="q"), call("ba", process="p"), call("ba", process="q")]

    assert find(calls, {"a": 2, "b": 2}) is not None
    assert find(calls[:3], {"a": 2, "b": 2}) is None


def test_who_calls_others_stops_before_them() -> None:
    assert ["c", "b", "a"] == in_order("abc", {("c", "b"), ("b", "a"), ("z", "c")})
    assert ["a", "b"] == in_order("ab", {("a", "a")})
    assert ["c", "a", "b"] == in_order("abc", {("a", "b"), ("b", "a"), ("c", "a")})

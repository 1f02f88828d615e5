"""Finds instances that wait for each other for ever. Pure.

An instance that waits for the answer to a call runs nothing else. So when all instances of model A wait for B, and all
instances of B for A, none of these calls is ever answered; and so with any number of models. Which instance would serve
a call cannot be known, so models are compared, not instances: models are *stuck* if all of their instances wait, each
of them for stuck models alone. It does not matter which requests led to it. A model here is one version of it: a call
goes to one version, and another one's instances do not serve it.

A call may also wait for one certain instance, that of its sequence. That is not seen here; the call's deadline answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shared.contract.calls import WaitingCall

Waiting = dict[str, dict[tuple[str, str], list[WaitingCall]]]
"""Calls by model and instance (process and name)."""


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Calls that are never answered.

    calls   all of them; others may wait for these
    victim  the one that should fail, so that the others are answered: the youngest, whose model others wait for
    cycle  models, from the victim's caller until one comes again
    """

    calls: frozenset[WaitingCall]
    victim: WaitingCall
    cycle: Sequence[str]


def find(calls: Iterable[WaitingCall], instances: Mapping[str, int]) -> Deadlock | None:
    """The deadlock among the calls that wait now; None if there is none.

    instances  how many each model has, over all executors
    """
    waiting: Waiting = defaultdict(lambda: defaultdict(list))
    for call in calls:
        waiting[call.caller][call.process, call.instance].append(call)
    stuck = {model for model, open_calls in waiting.items() if 0 < instances.get(model, 0) <= len(open_calls)}
    while free := {model for model in stuck if any(may_go_on(one, stuck) for one in waiting[model].values())}:
        stuck -= free
    while outside := stuck - {call.target for call in _calls_of(stuck, waiting)}:
        # Nobody waits for these: they are answered when the others are.
        stuck -= outside
    if not stuck:
        return None
    stuck_calls = frozenset(_calls_of(stuck, waiting))
    victim = max(stuck_calls)
    return Deadlock(stuck_calls, victim, _cycle(victim, stuck_calls))


def may_go_on(calls: Sequence[WaitingCall], stuck: set[str]) -> bool:
    """Whether one of an instance's calls may be answered."""
    return any(call.target not in stuck for call in calls)


def _calls_of(models: Iterable[str], waiting: Waiting) -> Iterator[WaitingCall]:
    return (call for model in models for one in waiting[model].values() for call in one)


def _cycle(victim: WaitingCall, calls: Iterable[WaitingCall]) -> list[str]:
    following = {call.caller: call.target for call in sorted(calls)}
    cycle = [victim.caller, victim.target]
    while cycle[-1] not in cycle[:-1]:
        cycle.append(following[cycle[-1]])
    return cycle


def error_text(deadlock: Deadlock) -> str:
    """What the victim's caller is told."""
    cycle = [version.partition("/")[0] for version in deadlock.cycle]
    return (
        f"deadlock: the call of model '{cycle[0]}' to model '{cycle[1]}' would never be answered, because all "
        f"instances of these models wait for each other: {' -> '.join(cycle)}. More instances of one of them let more "
        "requests call each other at once"
    )


def in_order(models: Iterable[str], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Models in the order in which they can stop: who calls others before those that are called.

    edges  (caller, called); where models call each other in a circle, the order of `models` decides
    """
    left = list(models)
    callers: dict[str, set[str]] = defaultdict(set)
    for caller, called in edges:
        if caller != called:
            callers[called].add(caller)
    ordered: list[str] = []
    while left:
        following = next((model for model in left if not callers[model].intersection(left)), left[0])
        left.remove(following)
        ordered.append(following)
    return ordered

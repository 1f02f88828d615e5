"""Schedulers that ask for the lead of a model, keep it, give it back, or do not hear that they have it, beside the rest
of the fuzz (`script_fuzz`). At most one has it, and each time under a newer term.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.contract.ids import SchedulerId, Term
from tests.simulation.script_bench import Bench
from tests.simulation.script_truth import MODEL

LEASE_MS = 100
FREE = Term(0)


@dataclass
class Scheduler:
    """term: under which it leads, as far as it knows"""

    name: SchedulerId
    term: Term = FREE


class Leases:
    """Who leads, as this has seen it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._chance = bench.chance
        self._schedulers = [Scheduler(SchedulerId("s1")), Scheduler(SchedulerId("s2"))]
        self._holder: tuple[SchedulerId, Term] | None = None
        self._newest = FREE

    def move(self) -> None:
        """One of them does something."""
        one = self._chance.choice(self._schedulers)
        if self._chance.random() < 0.7:
            self._contend(one)
        else:
            self._resign(one)

    def next_term(self) -> Term:
        """Somebody leads who did not lead before."""
        while True:
            for one in self._schedulers:
                if self._chance.random() < 0.5:
                    self._resign(one)
                one.term = FREE
            self._bench.now_us += self._chance.choice((0, LEASE_MS)) * 1000
            if self._contend(self._chance.choice(self._schedulers)):
                return self._newest

    def _contend(self, one: Scheduler) -> bool:
        """It asks for the lead, or keeps it, and may not hear of it. True if it leads from now on."""
        left_ms, fence = self._left_ms(), self._newest + self._chance.choice((0, 0, 2))
        call = self._bench.scripts.lead({MODEL: one.term}, one.name, lease_ms=LEASE_MS, fences={MODEL: Term(fence)})
        (term,) = self._bench.run(call)
        self._bench.tell(f"{one.name} asks for the lead, with term {one.term}: {term}")
        assert isinstance(term, int)
        if one.term:
            right = term == (one.term if left_ms != -2 and self._holder == (one.name, one.term) else FREE)
        elif left_ms > 0 and self._holder is not None and self._holder[0] != one.name:
            right = term == FREE
        else:
            right = term > fence
        if not right:
            self._bench.truth.violate(f"{one.name} with {one.term} gets {term}; {self._holder} has {left_ms} ms left")
        gains = term > self._newest
        if term:
            self._holder, self._newest = (one.name, Term(term)), max(self._newest, Term(term))
        if not term or self._chance.random() < 0.8:
            one.term = Term(term)
        return gains

    def _resign(self, one: Scheduler) -> None:
        """It gives the lead back; without a term, what it may have got and has not heard of."""
        is_held = self._left_ms() != -2 and self._holder is not None and self._holder[0] == one.name
        is_own = is_held and self._holder is not None and one.term in (FREE, self._holder[1])
        given_back = self._bench.run(self._bench.scripts.resign(MODEL, one.name, term=one.term))
        self._bench.tell(f"{one.name} gives term {one.term} back: {given_back}")
        if given_back is not is_own:
            self._bench.truth.violate(f"{one.name} gives {one.term} back: {given_back}; {self._holder} has it")
        one.term = FREE

    def _left_ms(self) -> int:
        return self._bench.store.ttl_ms(self._bench.keys.leader(MODEL).encode())

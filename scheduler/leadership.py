"""Leadership: which scheduler leads which model. One lease per model, with a term that only grows.

A scheduler renews the leases that it holds, and asks for all others, in one call. So a standby leads within a lease
after the leader's death, and at once after a leader has given its leases back.

A leader that was frozen may wake up after its lease has ended. This module does not prevent that. Every script of a
scheduler carries its term, and Redis refuses a term older than the newest that it has seen (`leader.lua`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from redis.exceptions import ResponseError

from shared.contract.ids import SchedulerId, Term
from shared.store.scripts import Scripts

FREE = Term(0)


@dataclass(frozen=True, slots=True)
class Contest:
    """The result of one round of asking for leases.

    gained   models that are led from now on -> term
    lost     models that are not led any more
    refused  models for which Redis returned an error
    """

    gained: dict[str, Term]
    lost: list[str]
    refused: dict[str, ResponseError]


class Leadership:
    """The leases of one scheduler.

    clock  seconds, monotonic
    """

    def __init__(self, scripts: Scripts, scheduler: SchedulerId, *, lease_ms: int, clock: Callable[[], float]) -> None:
        self._scripts = scripts
        self._scheduler = scheduler
        self._lease_ms = lease_ms
        self._clock = clock
        self._held_until = 0.0
        self._maybe_held: set[str] = set()
        self._fences: dict[str, Term] = {}
        self.terms: dict[str, Term] = {}

    async def contend(self, models: Iterable[str]) -> Contest:
        """Renews the leases that are held and asks for all others.

        Raises one of `redis_py.CONNECTION_LOST`; the leases then count as held until `expired`.
        """
        asked_at = self._clock()
        terms = {name: self.terms.get(name, FREE) for name in sorted({*models, *self.terms})}
        # Remembered before the call: if its reply is lost, Redis may have granted these leases (see `resign`).
        self._maybe_held.update(name for name in terms if name not in self.terms)
        call = self._scripts.lead(terms, self._scheduler, lease_ms=self._lease_ms, fences=self._fences)
        (outcomes,) = await self._scripts.run_all([call]) if terms else [[]]
        if isinstance(outcomes, ResponseError):
            outcomes = [outcomes] * len(terms)
        elif isinstance(outcomes, Exception):
            raise outcomes
        self._maybe_held.clear()
        contest = Contest({}, [], {})
        for name, outcome in zip(terms, outcomes, strict=True):
            if isinstance(outcome, ResponseError):
                contest.refused[name] = outcome
            else:
                self._count(name, terms[name], outcome, contest)
        # Counted from when the call was sent: Redis renewed the leases at that time or later, never earlier.
        if contest.refused.keys().isdisjoint(self.terms):
            self._held_until = asked_at + self._lease_ms / 1000
        return contest

    def _count(self, model: str, asked: Term, term: Term, contest: Contest) -> None:
        if term and model not in self.terms:
            # Not the term that was to be kept: it was dropped meanwhile, and what its leader had sent may still be on
            # its way. The next round takes a new one.
            if term != asked:
                contest.gained[model] = self.terms[model] = term
        elif not term and model in self.terms:
            del self.terms[model]
            contest.lost.append(model)

    def expired(self) -> bool:
        """Whether the leases may have ended since they were last renewed. Another scheduler may then lead."""
        return bool(self.terms) and self._clock() >= self._held_until

    def drop(self, model: str, term: Term) -> None:
        """Forgets the lease of a term. Another scheduler has it, or it is asked for anew, or given back by `resign`."""
        if self.terms.get(model) == term:
            del self.terms[model]
            self._maybe_held.add(model)

    async def give_back(self, model: str, term: Term) -> None:
        """Gives back the lease of a term in which nobody has led. Raises one of `redis_py.CONNECTION_LOST`."""
        self.drop(model, term)
        await self._scripts.run(self._scripts.resign(model, self._scheduler, term=term))

    def fenced(self, model: str, term: Term, refusal: ResponseError) -> None:
        """Forgets the lease of a term that a script has refused, and asks for newer terms than the fence from then on.

        Their counter may have been lost or changed, and would take as many terms to get there as the fence has seen.
        """
        self._fences[model] = Term(int(str(refusal).rpartition(" ")[2]))
        self.drop(model, term)

    def drop_all(self) -> list[str]:
        """Forgets every lease. Returns the models."""
        models = sorted(self.terms)
        self._maybe_held.update(models)
        self.terms.clear()
        return models

    async def resign(self) -> None:
        """Gives every lease back, so that a standby leads at once.

        Also those that were forgotten, or asked for without an answer: in Redis they may be this scheduler's.
        """
        terms = dict.fromkeys(sorted(self._maybe_held), FREE) | self.terms
        calls = [self._scripts.resign(model, self._scheduler, term=term) for model, term in terms.items()]
        self.terms.clear()
        self._maybe_held.clear()
        if calls:
            await self._scripts.run_all(calls)

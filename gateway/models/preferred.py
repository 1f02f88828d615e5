"""Which executor a new sequence prefers: there it may take a spare slot without asking the leader.

The rule is the leader's own (`shared.contract.hashing`). Where this gateway knows the executors of a moment ago, the
sequence may find no spare slot, and waits in line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.models.catalog import Catalog, Place
from shared.contract.hashing import HashRing
from shared.contract.ids import ExecutorId, SequenceId
from shared.store.membership import Member


class Offer(NamedTuple):
    """The versions that some executors offer to new sequences, and these executors."""

    places: frozenset[Place]
    executors: list[ExecutorId]


class PreferredExecutors:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._members: Sequence[Member] = ()
        self._offers: Sequence[Offer] = ()
        self._executors: dict[Place, tuple[ExecutorId, ...]] = {}
        self._rings: dict[tuple[ExecutorId, ...], HashRing] = {}

    def of(self, model: str, version: str, sequence: SequenceId) -> str:
        """The executor that the sequence prefers; "" if none offers the version to new sequences."""
        members = self._catalog.view.members
        if members is not self._members:
            if members != self._members:
                self._offers, self._executors, self._rings = offers_of(members), {}, {}
            self._members = members
        place = (model, version)
        executors = self._executors.get(place)
        if executors is None:
            found = (executor for offer in self._offers if place in offer.places for executor in offer.executors)
            executors = self._executors[place] = tuple(sorted(found))
        if len(executors) < 2:
            return executors[0] if executors else ""
        ring = self._rings.get(executors)
        if ring is None:
            ring = self._rings[executors] = HashRing(executors)
        return next(ring.walk(sequence))


def offers_of(members: Sequence[Member]) -> list[Offer]:
    """What the members offer. Executors of one repository offer alike: their lines, which are thousands, are one object
    (`Membership`), and are gone over once.
    """
    offers: dict[int, Offer] = {}
    for one in (member.registration for member in members if member.usable):
        if id(one.models) not in offers:
            places = ((each.model, each.version) for each in one.models if each.slots and not each.closing)
            offers[id(one.models)] = Offer(frozenset(places), [])
        offers[id(one.models)].executors.append(one.executor)
    return list(offers.values())

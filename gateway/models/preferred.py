"""Which executor a new sequence prefers: there it may take a spare slot without asking the leader.

The rule is the leader's own (`shared.contract.hashing`). Where this gateway knows the executors of a moment ago, the
sequence may find no spare slot, and waits in line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.models.catalog import Catalog, Place
from shared.contract.hashing import HashRing
from shared.contract.ids import SequenceId
from shared.store.membership import Member


class PreferredExecutors:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._members: Sequence[Member] = ()
        self._offering: Mapping[Place, tuple[str, ...]] = {}
        self._rings: dict[tuple[str, ...], HashRing] = {}

    def of(self, model: str, version: str, sequence: SequenceId) -> str:
        """The executor that the sequence prefers; "" if none offers the version to new sequences."""
        members = self._catalog.view.members
        if members is not self._members:
            if members != self._members:
                self._offering, self._rings = offering(members), {}
            self._members = members
        executors = self._offering.get((model, version), ())
        if len(executors) < 2:
            return executors[0] if executors else ""
        ring = self._rings.get(executors)
        if ring is None:
            ring = self._rings[executors] = HashRing(executors)
        return next(ring.walk(sequence))


def offering(members: Sequence[Member]) -> dict[Place, tuple[str, ...]]:
    """The executors that new sequences of each version may go to, by name."""
    found: dict[Place, list[str]] = {}
    for registration in (member.registration for member in members if member.usable):
        for served in registration.models:
            if served.slots and not served.closing:
                found.setdefault((served.model, served.version), []).append(registration.executor)
    return {place: tuple(sorted(executors)) for place, executors in found.items()}

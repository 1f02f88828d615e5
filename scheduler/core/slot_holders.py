"""The sequences that hold the slots of one version: how many each tenant has, and which may be asked for theirs.

For the asking see `scheduler.core.paging`, for the tenants `scheduler.core.backlog`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from shared.contract.ids import SequenceId

ASKS_PER_TICK_MAX = 256
"""Sequences that may be asked between two ticks and turn out to be busy: each costs Redis a few us."""


class SlotHolders:
    """The live sequences of one version, in the order in which they are asked. A sequence that was busy comes last.

    asked      number of sequences that were asked and have not answered; they are not in the line
    busy       number of sequences that were asked and kept their slot, since the last tick
    wanted     slots that `commit` may still free by itself, as far as the leader has heard
    told       whether `commit` was told to free slots. Each shard has its own count, so this stays true at `wanted` 0
    by_tenant  slots that each tenant has, also those that Redis has not confirmed yet; no entry is 0
    """

    def __init__(self) -> None:
        self._line: OrderedDict[SequenceId, None] = OrderedDict()
        self.asked = 0
        self.busy = 0
        self.wanted = 0
        self.told = False
        self.by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._line

    def add(self, sequence: SequenceId) -> None:
        """Puts a sequence that holds a slot at the end of the line."""
        self._line[sequence] = None

    def remove(self, sequence: SequenceId) -> None:
        del self._line[sequence]

    def count(self, tenant: str, change: int) -> None:
        """A tenant has a slot more (1), or one less (-1)."""
        self.by_tenant[tenant] += change
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]

    def next_to_ask(self) -> SequenceId | None:
        """The next sequence to ask; None when all were asked since the last tick, or ASKS_PER_TICK_MAX were."""
        if self.busy + self.asked >= min(len(self._line) + self.asked, ASKS_PER_TICK_MAX):
            return None
        return next(iter(self._line))

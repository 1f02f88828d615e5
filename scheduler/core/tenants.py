"""Live sequences that may be asked for their slots, and how far the asking has come. See `scheduler.core.paging`."""

from __future__ import annotations

from collections import OrderedDict

from shared.contract.ids import SequenceId

ASKS_PER_TICK_MAX = 256
"""Busy sequences that are asked in vain between two ticks: each costs Redis a few us."""


class Tenants:
    """The live sequences of one version, in the order in which they are asked: who was asked in vain comes last.

    asked   sequences that are being asked, and have not answered; they are not in line
    busy    how many were asked in vain since the last tick
    wanted  slots that `commit` may still free by itself, as far as has been heard
    told    it was told of some: every shard has its share, so there may be more than are wanted
    """

    def __init__(self) -> None:
        self._line: OrderedDict[SequenceId, None] = OrderedDict()
        self.asked = 0
        self.busy = 0
        self.wanted = 0
        self.told = False

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._line

    def add(self, sequence: SequenceId) -> None:
        """It holds a slot, and is asked after all others."""
        self._line[sequence] = None

    def remove(self, sequence: SequenceId) -> None:
        """It is asked no more."""
        del self._line[sequence]

    def next_to_ask(self) -> SequenceId | None:
        """Whose turn it is; None when everybody was asked since the last tick, or as many as may be."""
        if self.busy + self.asked >= min(len(self._line) + self.asked, ASKS_PER_TICK_MAX):
            return None
        return next(iter(self._line))

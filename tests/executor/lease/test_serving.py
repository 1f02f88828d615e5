"""Which entries of the inbox a version takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from executor.lease.serving import has_place
from shared.contract.ids import InstanceIndex, SlotIndex
from tests.executor.core.owner import coming


@pytest.mark.parametrize(
    ("instance", "slot", "has"),
    [(0, 0, True), (1, 3, True), (2, 0, False), (0, 4, False), (-1, 0, False), (0, -1, False), (0, -3, False)],
)
def test_a_place_is_one_of_those_that_the_version_has(instance: int, slot: int, *, has: bool) -> None:
    """What counts from the end in Python would be a neighbour's state, or the one that every sequence begins with."""
    served: Any = SimpleNamespace(workers=["first", "second"], slots=4)
    entry = msgspec.structs.replace(coming(), instance=InstanceIndex(instance), slot=SlotIndex(slot))

    assert has == has_place(served, entry)

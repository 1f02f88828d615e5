"""Each fault can be put in: seen at once when the code has moved on, and not only where the fault is played."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_the_fault_changes_is_still_there(mutant: Mutant) -> None:
    with mutant.applied():
        pass

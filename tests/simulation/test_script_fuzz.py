"""The scripts under random calls, some seeds of them; `python -m tests.simulation --scripts` plays more."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import first_failing, run_mutant, summary
from tests.simulation.mutants import MUTANTS
from tests.simulation.script_fuzz import fuzz

SEEDS = range(1, 201)

# A seed takes a few hundredths of a second, and a loaded machine as long as it likes.
pytestmark = pytest.mark.timeout(900)


def test_scripts_keep_their_promises_whoever_is_late_or_asks_twice() -> None:
    results = [fuzz(seed) for seed in SEEDS]

    assert [] == [summary(result) for result in results if result.violations]
    assert sum(result.answers for result in results) > 10 * len(SEEDS)


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS if mutant.edits and not mutant.only])
def test_a_fault_that_is_put_into_a_script_is_found(name: str) -> None:
    """Above all an older leader that goes on deciding: of whole meshes, it takes hundreds of seeds to see one."""
    found = first_failing(run_mutant(name, seed, play=fuzz) for seed in SEEDS)

    assert found is not None


def test_the_same_seed_tells_the_same_story() -> None:
    assert fuzz(7).digest == fuzz(7).digest != fuzz(8).digest

"""Nothing takes longer than it must, on virtual time: what a slower fallback repairs is seen here, and only here."""

from __future__ import annotations

from functools import partial

import pytest

from tests.simulation.__main__ import first_failing, run_mutant, summary
from tests.simulation.drills import DRILLS, drilled
from tests.simulation.mutants import MUTANTS

# A seed takes about a second, and a loaded machine as long as it likes.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", DRILLS)
def test_everything_comes_within_its_time(name: str) -> None:
    result = drilled(name, 1)

    assert [] == result.violations, summary(result)
    assert result.answers > 10


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS if mutant.late])
def test_an_effect_that_is_late_is_found(name: str) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)

    assert first_failing(run_mutant(name, seed, partial(drilled, mutant.late)) for seed in range(1, 4))

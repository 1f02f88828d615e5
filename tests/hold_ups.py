"""Runs of tests whose processes stand still now and then (`pytest --hold-ups=MEAN_S,LONGEST_S`).

A test that passes on an idle machine and fails on a busy one assumes something about time or order. Such runs find it.
"""

from __future__ import annotations

import os
from pathlib import Path

LONGEST_S = 3600.0
FOLDER = Path(__file__).parent / "fixtures" / "hold_ups"


def hold_up_processes(how: str) -> None:
    """Has every Python process that is started from now on held up: pytest's workers, and the services of tests.

    how     "MEAN_S,LONGEST_S": the mean time between two hold-ups, and how long one takes at most
    raises  ValueError for anything else
    """
    numbers = how.split(",")
    if len(numbers) != 2 or not all(0 < float(number) < LONGEST_S for number in numbers):
        raise ValueError(f"expected two numbers of seconds, above 0 and below {LONGEST_S:g}")
    os.environ["HOLD_UPS"] = how
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))

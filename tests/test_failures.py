"""A test that fails leaves nothing to those behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_behind_a_failed_test_everything_is_opened_anew_and_nothing_of_it_is_left() -> None:
    options = ["-p", "no:randomly", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, TESTS / "fixtures" / "failures" / "one_fails.py"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip

    assert "1 failed, 1 passed" in ran.stdout, ran.stdout
    assert "what it said at last" in ran.stdout

"""Processes that stand still now and then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.hold_ups import hold_up_processes

UNTIL_HELD_UP = """
import threading, time
assert threading.active_count() == 1
begin = before = time.monotonic()
while before - begin < 60:
    now = time.monotonic()
    if now - before > 0.05:
        print("held up")
        break
    before = now
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


def test_a_process_is_held_up_and_none_of_its_threads_runs_meanwhile() -> None:
    hold_up_processes("0.05,0.5")

    run = subprocess.run(
        [sys.executable, "-P", "-c", UNTIL_HELD_UP], env=os.environ, check=True, capture_output=True, text=True
    )

    assert "held up\n" == run.stdout


@pytest.mark.parametrize("how", ["", "1", "1,2,3", "0,1", "1,0", "-1,1", "nan,1", "1,inf", "a,b"])
def test_hold_ups_that_are_none_are_refused(how: str) -> None:
    with pytest.raises(ValueError, match=r"expected two numbers|could not convert"):
        hold_up_processes(how)

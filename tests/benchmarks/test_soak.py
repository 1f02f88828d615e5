"""`make soak`: it tells growth from noise, and a run of seconds works as one of minutes."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.load import Tally
from benchmarks.soak import GROWTH_SLACK_BYTES, MemorySamples, judge

MIB = 1 << 20


def memory_of(*sizes_mib: float) -> MemorySamples:
    memory = MemorySamples()
    for size in sizes_mib:
        memory.add({"gateway": int(size * MIB)})
    return memory


def good_tally() -> Tally:
    return Tally(latencies_ns=[1])


def test_what_warms_up_and_then_stays_has_not_grown() -> None:
    assert memory_of(10, 60, 100, 100, 101, 99, 103, 102).grown() == []


def test_what_goes_on_growing_has_grown() -> None:
    slack = GROWTH_SLACK_BYTES / MIB
    assert memory_of(*(100 + slack * n for n in range(16))).grown() == ["gateway"]


def test_a_wrong_answer_an_error_a_death_and_growth_each_fail_the_run() -> None:
    steady, growing = memory_of(50, 50, 50, 50), memory_of(50, 50, 90, 130)

    assert judge(good_tally(), steady, []) == 0
    assert judge(Tally(latencies_ns=[1], wrong=1), steady, []) == 1
    assert judge(Tally(latencies_ns=[1], errors=1), steady, []) == 1
    assert judge(good_tally(), steady, ["gateway"]) == 1
    assert judge(good_tally(), growing, []) == 1
    assert judge(Tally(), steady, []) == 1, "nothing was answered"


def test_a_short_run_of_the_whole() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.05", "--streams", "8", "--executors", "1"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong, 0 errors" in done.stdout
    assert "memory of redis data" in done.stdout

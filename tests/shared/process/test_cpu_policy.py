"""Which policy the kernel schedules a service by."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process import cpu_policy

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="SCHED_BATCH is a policy of Linux"),
    pytest.mark.starts_processes,
]

POLICIES = """
import os, subprocess, sys, threading
from shared.process.cpu_policy import schedule_by
{before}
schedule_by({policy!r})
found = [os.sched_getscheduler(0)]
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
child = "import os; print(os.sched_getscheduler(0))"
found.append(int(subprocess.run([sys.executable, "-c", child], capture_output=True, check=True).stdout))
print(*found)
"""


def policies(policy: str, before: str = "") -> tuple[list[int], str]:
    """The policies of a process that asks for one, of its later thread and of its child; and what it logged."""
    code = POLICIES.format(policy=policy, before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    *logged, found = done.stdout.splitlines()
    return [int(one) for one in found.split()], "\n".join([*logged, done.stderr])


def test_later_threads_and_children_have_the_policy_batch_as_well() -> None:
    assert ([os.SCHED_BATCH] * 3, "") == policies("batch")


def test_normal_leaves_the_policy_as_it_is() -> None:
    assert ([os.SCHED_OTHER] * 3, "") == policies("normal")


def test_a_process_that_was_started_with_another_policy_keeps_it() -> None:
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"

    assert ([os.SCHED_IDLE] * 3, "") == policies("batch", idle)


def test_a_system_that_forbids_the_change_is_named_in_the_log_and_the_service_goes_on() -> None:
    forbidden = """
from shared.process import logs
logs.configure("info", "text", service="test")
def refuse(*_): raise PermissionError(1, "Operation not permitted")
os.sched_setscheduler = refuse
"""

    found, logged = policies("batch", forbidden)

    assert [os.SCHED_OTHER] * 3 == found
    assert "cpu policy not set" in logged
    assert "Operation not permitted" in logged
    assert "--cpu-policy normal" in logged


def test_a_process_tells_how_long_it_has_waited_for_a_processor() -> None:
    """Two processes compute on one processor, until one of them has waited; the other ends by itself, later."""
    code = """
import os, signal
from shared.process.cpu_policy import waited_s
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
before, child = waited_s(), os.fork()
if not child:
    signal.alarm(60)
    while True: pass
while waited_s() - before <= 0.05: pass
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_system_that_does_not_say_it_reads_as_no_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for told in (None, "", "what?"):
        if told is not None:
            (tmp_path / "schedstat").write_text(told)
        monkeypatch.setattr(cpu_policy, "SCHEDULED", tmp_path / "schedstat")

        assert cpu_policy.waited_s() == 0.0

"""Lines of the log from processes that a model forks."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import os, signal, threading
from shared.process import logs

def write():
    while True:
        logs.info("from a thread", text="x" * 4000)

logs.configure("info", "text")
for _ in range(3):
    threading.Thread(target=write, daemon=True).start()
for _ in range(50):
    if (child := os.fork()) == 0:
        signal.alarm(60)
        logs.info("from a child")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        os._exit(3)
os._exit(0)
"""


def test_a_process_that_was_forked_while_another_thread_wrote_a_line_writes_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], stderr=subprocess.PIPE, text=True, check=True)

    assert 50 == done.stderr.count("from a child")

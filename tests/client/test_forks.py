"""A program that forks, and uses a client in both processes."""

from __future__ import annotations

import subprocess
import sys

FORK = """
import os, signal, sys, threading
from seqmesh_client import Client

opens, forked = threading.Event(), threading.Event()

def open_slowly():
    with Client._lock:
        opens.set()
        forked.wait()

threading.Thread(target=open_slowly, daemon=True).start()
opens.wait()
if (child := os.fork()) == 0:
    signal.alarm(30)
    Client(["localhost:1"])._stub(0)
    os._exit(0)
forked.set()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_what_a_thread_does_at_a_fork_holds_up_no_client_that_is_made_behind_it() -> None:
    """The lock that another thread holds then stays taken in the forked process."""
    assert 0 == subprocess.run([sys.executable, "-c", FORK], check=False).returncode

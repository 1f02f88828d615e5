"""The proxies' process ends with the main process, and with it alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.chaos.links import Links
from tests.mesh.running_mesh import wait

ALONE = """
import multiprocessing, sys
from deploy.chaos.links import Links
with Links():
    print(multiprocessing.active_children()[0].pid, flush=True)
    sys.stdin.read()
"""


INTERRUPTED = """
import os, signal, threading
from deploy.chaos.links import Links
threading.Timer(0.06, os.kill, (os.getpid() * {alone}, signal.SIGINT)).start()
try:
    with Links():
        threading.Event().wait()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with its group"])
def test_who_is_interrupted_while_the_proxies_start_hears_nothing_of_their_process(*, alone: bool) -> None:
    """It said in twenty lines that it was interrupted, too, or that nobody read its address."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(alone=alone)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        timeout=60,
        check=False,
    )

    assert (0, "interrupted\n") == (done.returncode, done.stdout)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_leaves_the_proxies_to_the_main_process(by: signal.Signals) -> None:
    """As Ctrl-C, `timeout`, supervisors, and a terminal that is closed send it."""
    before = multiprocessing.active_children()
    with Links() as links:
        (proxies,) = [one for one in multiprocessing.active_children() if one not in before]
        os.kill(proxies.pid or 0, by)

        assert links.listen("redis", "127.0.0.1", 1)


def test_the_proxies_do_not_outlive_a_main_process_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ALONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as main:
        assert main.stdout is not None
        proxies = Path("/proc", main.stdout.readline().decode().strip())
        assert proxies.exists()
        main.kill()

    wait(lambda: not proxies.exists(), "the proxies' process is gone")

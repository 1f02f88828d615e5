"""Ties a child process to the process that starts it: `python tether.py <parent pid> <signal> <program> [arguments]`.

This script runs in front of the real program. It asks the kernel to send `signal` when the parent dies (Linux:
PR_SET_PDEATHSIG, which survives exec), then becomes the program. It is a wrapper because `preexec_fn` runs Python
between fork and exec, which may deadlock in a parent that has threads. It uses only the standard library, so that it
starts in a few milliseconds under `python -I -S`. Without prctl (macOS), the program runs without the tie.

The kernel's "parent" is the thread that forked: start tethered children from a thread that lives as long as they may.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tethered(command: list[str], death_signal: signal.Signals) -> list[str]:
    """The command line that runs `command` tied to the calling process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(death_signal)), *command]


def ask_for_signal_at_parents_death(parent_pid: int, death_signal: int) -> None:
    """Raises OSError where the kernel refuses; exits at once when the parent is gone already."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # noqa: PLC0415 -- costs more than the rest of this script, and only Linux needs it

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        # The parent died before the request above took effect, so the kernel will never send the signal.
        sys.exit(1)


def main(arguments: list[str]) -> None:
    """Ties this process to its parent and becomes the program."""
    parent_pid, death_signal, *command = arguments
    ask_for_signal_at_parents_death(int(parent_pid), int(death_signal))
    # Python ignores SIGPIPE, and exec keeps ignored signals ignored. The program must get the default.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)  # noqa: S606 -- becoming the given program is this script's whole purpose


if __name__ == "__main__":
    main(sys.argv[1:])

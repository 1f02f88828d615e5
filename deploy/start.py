"""The program `seqmesh`: imports the command line, during which Ctrl-C may come already."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Runs the command line."""
    try:
        from deploy.cli import main as program  # noqa: PLC0415 -- it takes a good part of a second
    except KeyboardInterrupt:
        # As a shell has it, and `deploy.cli.EXIT_INTERRUPTED`, which is not there yet.
        sys.exit(128 + signal.SIGINT)
    program()

"""`python -m deploy.console`: the console of one mesh."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from deploy.console.settings import ConsoleSettings
from shared.process import lifecycle, logs
from shared.settings import parse_settings

HELP = """Serves a page that shows a running mesh: executors and their slots, sequences, models, charts, events.

\b
  seqmesh console         of the mesh that `seqmesh up` runs in this folder
  seqmesh console --redis-url redis://10.0.0.5      of another mesh
"""


def main(arguments: Sequence[str]) -> int:
    """Runs a console to its end; returns the process's exit code."""
    lifecycle.end_when_told()
    settings = parse_settings(ConsoleSettings, arguments, program="seqmesh console", help=HELP)
    logs.configure(settings.log_level, settings.log_format, service="console")
    # Imported here because it takes a while, in which a stop is to be heard.
    from deploy.console.service import serve  # noqa: PLC0415

    return lifecycle.run(lambda tasks, stop: serve(settings, tasks, stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

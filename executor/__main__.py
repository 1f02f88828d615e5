"""`python -m executor`: one executor process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from executor.service import serve
from executor.settings import ExecutorSettings
from shared import lifecycle, logs
from shared.settings import parse_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs an executor to its end; returns the process's exit code."""
    settings = parse_settings(
        ExecutorSettings, arguments, program="seqmesh executor", help="Runs models: pulls steps, batches, commits."
    )
    logs.configure(settings.log_level, settings.log_format, service=settings.name_of("executor"))
    return lifecycle.run(lambda tasks, stop: serve(settings, tasks, stop))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m executor`: one executor process. `python -m executor healthcheck`: does the one of that name live?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from executor.settings import ExecutorSettings
from shared.checks import CHECKS, check_health
from shared.contract.errors import FAILED
from shared.process import lifecycle, logs
from shared.process.cpu_policy import schedule_by
from shared.process.readers import print_patiently
from shared.settings import parse_settings


def main(arguments: Sequence[str]) -> int:
    """Runs an executor to its end, or checks one; returns the process's exit code."""
    lifecycle.end_when_told()
    if arguments and arguments[0] in CHECKS:
        return check_health("executor", ExecutorSettings, *arguments)
    settings = parse_settings(
        ExecutorSettings, arguments, program="seqmesh executor", help="Runs models: pulls steps, batches, commits."
    )
    logs.configure(settings.log_level, settings.log_format, service=settings.name_of("executor"))
    print_patiently()
    schedule_by(settings.cpu_policy)
    # Imported here because the import takes a second or more: a stop signal must work meanwhile, and a health check
    # needs none of it.
    from executor.service import serve  # noqa: PLC0415

    return lifecycle.run(lambda tasks, stop: serve(settings, tasks, stop), FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

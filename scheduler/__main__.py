"""`python -m scheduler` runs a scheduler; `python -m scheduler healthcheck` says whether the one of that name lives."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler.settings import SchedulerSettings
from shared.checks import CHECKS, check_health
from shared.process import lifecycle, logs
from shared.process.cpu_policy import schedule_by
from shared.settings import parse_settings


def main(arguments: Sequence[str]) -> int:
    """Runs a scheduler to its end, or checks one. Returns the process's exit code."""
    lifecycle.end_when_told()
    if arguments and arguments[0] in CHECKS:
        return check_health("scheduler", SchedulerSettings, *arguments)
    settings = parse_settings(
        SchedulerSettings,
        arguments,
        program="seqmesh scheduler",
        help="Gives sequences to executors. One scheduler leads each model, the others stand by.",
    )
    logs.configure(settings.log_level, settings.log_format, service=settings.name_of("scheduler"))
    schedule_by(settings.cpu_policy)
    # Imported here because it takes a while: a signal to stop must be heard during it.
    from scheduler.service import serve  # noqa: PLC0415

    return lifecycle.run(lambda tasks, stop: serve(settings, tasks, stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

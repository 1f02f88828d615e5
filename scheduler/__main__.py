"""`python -m scheduler` runs a scheduler; `python -m scheduler healthcheck` says whether the one of that name lives."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from scheduler.settings import SchedulerSettings
from shared.process import lifecycle, logs
from shared.process.cpu_policy import schedule_by
from shared.settings import parse_settings

CHECKS = {"healthcheck": False, "livecheck": True}
"""The words that ask for a check, and its answer while Redis does not answer: as in an executor."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a scheduler to its end, or checks one. Returns the process's exit code."""
    lifecycle.end_when_told()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in CHECKS:
        return check_health(*given)
    settings = parse_settings(
        SchedulerSettings,
        given,
        program="seqmesh scheduler",
        help="Gives sequences to executors. One scheduler leads each model, the others stand by.",
    )
    logs.configure(settings.log_level, settings.log_format, service=settings.name_of("scheduler"))
    schedule_by(settings.cpu_policy)
    # Imported here because it takes a while: a signal to stop must be heard during it.
    from scheduler.service import serve  # noqa: PLC0415

    return lifecycle.run(lambda tasks, stop: serve(settings, tasks, stop))


def check_health(check: str, *arguments: str) -> int:
    """The exit code: 0 when the scheduler with the name in these settings is alive, else 1."""
    settings = parse_settings(
        SchedulerSettings,
        arguments,
        program=f"seqmesh scheduler {check}",
        help="Whether the scheduler of this name (by default this host's) is alive.",
    )
    from scheduler.service import is_healthy  # noqa: PLC0415 -- as above

    return 0 if asyncio.run(is_healthy(settings, without_redis=CHECKS[check])) else 1


if __name__ == "__main__":
    sys.exit(main())

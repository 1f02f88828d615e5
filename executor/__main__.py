"""`python -m executor`: one executor process. `python -m executor healthcheck`: does the one of that name live?"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from executor.settings import ExecutorSettings
from shared.contract.errors import FAILED
from shared.process import lifecycle, logs
from shared.process.cpu_policy import schedule_by
from shared.settings import parse_settings

CHECKS = {"healthcheck": False, "livecheck": True}
"""The words that ask for a check, and its answer while Redis does not answer. Not healthy: nothing older is stopped for
it. Alive: an orchestrator that restarts what is dead must not restart every executor because Redis is away.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs an executor to its end, or checks one; returns the process's exit code."""
    lifecycle.end_when_told()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in CHECKS:
        return check_health(*given)
    settings = parse_settings(
        ExecutorSettings, given, program="seqmesh executor", help="Runs models: pulls steps, batches, commits."
    )
    logs.configure(settings.log_level, settings.log_format, service=settings.name_of("executor"))
    schedule_by(settings.cpu_policy)
    # Imported here because the import takes a second or more: a stop signal must work meanwhile, and a health check
    # needs none of it.
    from executor.service import serve  # noqa: PLC0415

    return lifecycle.run(lambda tasks, stop: serve(settings, tasks, stop), FAILED)


def check_health(check: str, *arguments: str) -> int:
    """0 when the executor with these settings' name holds its lease, else 1."""
    settings = parse_settings(
        ExecutorSettings,
        arguments,
        program=f"seqmesh executor {check}",
        help="Whether the executor of this name (by default this host's) is alive.",
        spared=("models",),
    )
    from executor.health import is_healthy  # noqa: PLC0415 -- as above

    return 0 if asyncio.run(is_healthy(settings, without_redis=CHECKS[check])) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m gateway`: one gateway process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gateway.settings import GatewaySettings
from shared.process import collector, lifecycle, logs
from shared.process.cpu_policy import schedule_by
from shared.settings import parse_settings

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter: with the default, 5 ms, whoever waits for Redis and its client waits for
each of them so long, while large JSON is read or written in a thread."""


def main(arguments: Sequence[str]) -> int:
    """Runs a gateway to its end; returns the process's exit code."""
    lifecycle.end_when_told()
    settings = parse_settings(
        GatewaySettings, arguments, program="seqmesh gateway", help="Serves the v2 protocol over HTTP and gRPC."
    )
    logs.configure(settings.log_level, settings.log_format, service=settings.name_of("gateway"))
    schedule_by(settings.cpu_policy)
    collector.look_seldom()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Imported here because it takes a while, in which a stop is to be heard.
    from gateway.service import serve  # noqa: PLC0415

    return lifecycle.run(
        lambda tasks, stop: serve(settings, tasks, stop, on_ready=lambda _: collector.leave_what_stays())
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m gateway`: one gateway process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gateway.settings import GatewaySettings
from shared.process import collector, interpreter, lifecycle, logs
from shared.process.cpu_policy import schedule_by
from shared.settings import parse_settings


def main(arguments: Sequence[str]) -> int:
    """Runs a gateway to its end; returns the process's exit code."""
    lifecycle.end_when_told()
    settings = parse_settings(
        GatewaySettings, arguments, program="seqmesh gateway", help="Serves the v2 protocol over HTTP and gRPC."
    )
    logs.configure(settings.log_level, settings.log_format, service=settings.name_of("gateway"))
    schedule_by(settings.cpu_policy)
    collector.look_seldom()
    interpreter.share_often()
    # Imported here because it takes a while, in which a stop is to be heard.
    from gateway.service import serve  # noqa: PLC0415

    return lifecycle.run(
        lambda tasks, stop: serve(settings, tasks, stop, on_ready=lambda _: collector.leave_what_stays())
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m gateway`: one gateway process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gateway.service import serve
from gateway.settings import GatewaySettings
from shared import lifecycle, logs
from shared.settings import parse_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a gateway to its end; returns the process's exit code."""
    settings = parse_settings(
        GatewaySettings, arguments, program="seqmesh gateway", help="Serves the v2 protocol over HTTP and gRPC."
    )
    logs.configure(settings.log_level, settings.log_format, service=settings.name_of("gateway"))
    return lifecycle.run(lambda tasks, stop: serve(settings, tasks, stop))


if __name__ == "__main__":
    sys.exit(main())

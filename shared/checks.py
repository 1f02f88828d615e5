"""`seqmesh executor healthcheck` and its like: the exit code, and for people the cause."""

from __future__ import annotations

import asyncio

import click

from shared.settings import CommonSettings, parse_settings

CHECKS = {"healthcheck": False, "livecheck": True}
"""The words that ask for a check, and its answer while Redis does not answer or takes no writes. Not healthy: nothing
older is stopped for it. Alive: an orchestrator that restarts what is dead must not restart every executor because of
Redis.
"""


def check_health(service: str, settings_type: type[CommonSettings], check: str, *arguments: str) -> int:
    """0 when the process with these settings' name is alive, else 1 and the cause on standard error."""
    settings = parse_settings(
        settings_type,
        arguments,
        program=f"seqmesh {service} {check}",
        help=f"Whether the {service} of this name (by default this host's) is alive.",
        spared=("models",),
    )
    # Imported here because it takes a while, and a service that starts needs none of it.
    from shared.store.health import problem  # noqa: PLC0415

    name, url, prefix = settings.name_of(service), settings.redis_url, settings.key_prefix
    cause = asyncio.run(problem(service, name, url, prefix, without_redis=CHECKS[check]))
    if cause:
        click.echo(f"Error: {cause}", err=True)
    return 1 if cause else 0

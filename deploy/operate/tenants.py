"""`seqmesh tenants`: shows, sets and removes what the operator allows each tenant."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import msgspec

from deploy.operate.operating import found_mesh
from deploy.operate.settings import JSON, OperatorSettings, operator_command
from deploy.operate.texts import aligned, counted
from shared.contract.tenants import EVERY_OTHER, NO_LIMITS, TenantLimits, problem_of_name
from shared.store.tenants import POLL_INTERVAL_S, StoredTenants

HELP = """What each tenant may do: sequences, steps a second, share of slots.

A request names its tenant by the header seqmesh-tenant, which a proxy sets that knows its users. What is set here holds
on every gateway and scheduler when the command is back.

\b
  seqmesh tenants ls
  seqmesh tenants set acme --live-max 500 --steps-per-s 2000 --share 2
  seqmesh tenants set '*' --live-max 50   those without limits of their own
  seqmesh tenants rm acme
"""
SET_HELP = """Sets what a tenant may do. What is left out stays as it is.

NAME is the tenant as its requests name it, or '*' for each tenant that has no limits of its own. 0 takes a bound away.
"""
NAME = click.Argument(["name"])
KNOWN_S = 2 * POLL_INTERVAL_S
"""After this every service has looked. Who is told that limits are set begins to rely on them."""
HEADINGS = ("TENANT", "SEQUENCES", "AT MOST", "STEPS/S", "AT ONCE", "SHARE")


async def list_tenants(settings: OperatorSettings, *, as_json: bool) -> None:
    async with found_mesh(settings) as mesh:
        stored = StoredTenants(mesh.redis, mesh.keys)
        named, sequences = (await stored.read()).named, await stored.sequences()
    if as_json:
        for name, limits in sorted(named.items()):
            about = {"name": name, "sequences": sequences.get(name), **msgspec.structs.asdict(limits)}
            click.echo(msgspec.json.encode(about))
        return
    if not named:
        click.echo("no tenant has limits: seqmesh tenants set NAME --live-max N")
        return
    rows = [
        (
            name,
            str(sequences.get(name, "")),
            str(limits.live_max or "any"),
            f"{limits.steps_per_s:g}" if limits.steps_per_s else "any",
            str(limits.burst_max) if limits.steps_per_s else "any",
            str(limits.share),
        )
        for name, limits in sorted(named.items())
    ]
    click.echo(aligned([HEADINGS, *rows]))


async def set_limits(settings: OperatorSettings, name: str, **changes: Any) -> None:
    given = {field: value for field, value in changes.items() if value is not None}
    if not given:
        raise click.UsageError("what may it do? Give --live-max, --steps-per-s, --burst or --share")
    async with found_mesh(settings) as mesh:
        stored = StoredTenants(mesh.redis, mesh.keys)
        limits = msgspec.structs.replace((await stored.read()).named.get(name, NO_LIMITS), **given)
        if problem := problem_of_name(name) or limits.problem():
            raise click.UsageError(problem)
        if given.get("burst") and not limits.steps_per_s:
            raise click.UsageError(
                f"a burst bounds nothing without a rate, and {name} has none: give --steps-per-s, too"
            )
        await stored.set(name, limits)
        await asyncio.sleep(KNOWN_S)
    click.echo(f"{name}: {said(limits)}")


async def remove(settings: OperatorSettings, name: str) -> None:
    """Raises click.ClickException if the tenant has no limits."""
    async with found_mesh(settings) as mesh:
        stored = StoredTenants(mesh.redis, mesh.keys)
        if not await stored.remove(name):
            names = ", ".join(sorted((await stored.read()).named)) or "none"
            raise click.ClickException(f"'{name}' has no limits; those that have: {names}")
        rest = (await stored.read()).named.get(EVERY_OTHER, NO_LIMITS)
        await asyncio.sleep(KNOWN_S)
    click.echo(f"{name}: {said(rest)}")


def said(limits: TenantLimits) -> str:
    live = f"at most {counted(limits.live_max, 'sequence')}" if limits.live_max else "any number of sequences"
    rate = f"{limits.steps_per_s:g} steps a second, {limits.burst_max} at once" if limits.steps_per_s else "any rate"
    return f"{live}, {rate}, share {limits.share}"


command = click.Group(
    "tenants",
    help=HELP,
    commands=[
        operator_command("ls", "What is set, and how many sequences each tenant has.", list_tenants, [JSON]),
        operator_command(
            "set",
            SET_HELP,
            set_limits,
            [
                NAME,
                click.Option(["--live-max"], type=int, metavar="N", help="Most sequences that are not over."),
                click.Option(["--steps-per-s"], type=float, metavar="RATE", help="Most requests a second, on average."),
                click.Option(
                    ["--burst"], type=int, metavar="N", help="Most requests at one moment. [default: one second's]"
                ),
                click.Option(["--share"], type=int, metavar="N", help="Weight where slots are short. [default: 1]"),
            ],
        ),
        operator_command("rm", "Takes a tenant's limits away.", remove, [NAME]),
    ],
)

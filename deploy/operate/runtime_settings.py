"""`seqmesh settings`: shows which log and trace settings of a running mesh were changed, by whom, and resets them."""

from __future__ import annotations

import getpass
import os
import socket

import click
import msgspec

from deploy.operate.operating import found_mesh
from deploy.operate.settings import JSON, OperatorSettings, operator_command
from shared.stored_settings import ChangedSettings, StoredSettings

HELP = """What was changed in the logging and tracing of a running mesh, and by whom.

Everybody who reaches a gateway may change them (/v2/logging, /v2/trace/setting) unless --restricted-api says otherwise,
and a change holds for every process, also for those that start later. With --reset what holds is again what each
process was started with.
"""


async def run(settings: OperatorSettings, *, reset: bool, as_json: bool) -> None:
    async with found_mesh(settings) as mesh:
        stored = StoredSettings(mesh.redis, mesh.keys)
        if reset:
            await stored.reset(f"{user()} on {socket.gethostname()} (seqmesh settings --reset)")
        changes = await stored.read()
        click.echo(msgspec.json.encode(changes) if as_json else described(changes))


def user() -> str:
    """Who runs the command: by number where the system knows no name, as of a container with a number for its user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the former until Python 3.12
        return f"user {os.getuid()}"


def described(changes: ChangedSettings) -> str:
    lines = [f"{name} = {value}" for name, value in changes.logs.items()]
    for model, changed in sorted(changes.traces.items()):
        lines += [f"{name} = {value}" + (f" (model {model})" if model else "") for name, value in changed.items()]
    lines = lines or ["as each process was started"]
    return "\n".join([*lines, *(f"{what} changed last by {by}" for what, by in sorted(changes.by.items()))])


command = operator_command(
    "settings", HELP, run, [click.Option(["--reset"], is_flag=True, help="Take every change back."), JSON]
)

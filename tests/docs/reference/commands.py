"""commands.md: `seqmesh` with everything behind it, and the targets of `make`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from deploy.cli import LazyCommand, main
from deploy.demo.vad.command import vad
from shared.settings import SettingOption
from tests.docs.reference.markdown import code, help_text, page, table, text
from tests.docs.reference.settings import ORDER, place_of

MAKEFILE = Path(__file__).resolve().parents[3] / "Makefile"
INTRO = """
`seqmesh` runs a mesh, one service of it, or what operates it. Flags that are settings are read from the environment,
too: [settings](settings.md).
"""
HEALTH = """
### Health checks

`seqmesh executor healthcheck` and `seqmesh scheduler healthcheck` end with exit code 0 when the process of that name
(`--name`, by default the host's) lives, else with 1 and the cause on standard error; while Redis does not answer, or
takes no writes, with 1, too. `livecheck` in the place of `healthcheck` ends with 0 then, for what starts again whatever
is dead. They take the settings of their service and need none of them. A gateway is asked over HTTP: `/v2/health/live`
and `/v2/health/ready`.
"""


def commands() -> str:
    """The page."""
    parts: list[str] = []
    for name, command in main.commands.items():
        parts.append(section(name, command))
        if name == "demo":
            parts.append(of_click("demo vad", vad, ""))
    return page("Commands", INTRO, "## `seqmesh`", *parts, HEALTH, make())


def section(name: str, command: click.Command) -> str:
    """One command: its help, and its options unless they stand among the settings."""
    title = f"### `seqmesh {name}`"
    summary = text(command.help or "")
    if not isinstance(command, LazyCommand):
        return of_click(name, command, summary)
    if name in ORDER:
        return f"{title}\n\n{summary} Its flags: {place_of(name)}."
    found = command.real()
    if isinstance(found, click.Group):
        others = [f"Flags that each of these takes beside its own: {place_of(name)}."] if place_of(name) else []
        own = [of_click(f"{name} {each}", command, command.help or "") for each, command in found.commands.items()]
        return "\n\n".join([title, help_text(found.help or summary), *others, *own])
    return of_click(name, found, summary)


def of_click(name: str, found: click.Command, summary: str) -> str:
    """One click command: how it is called, its help, and its options."""
    title = f"### `seqmesh {name}`"
    context = click.Context(found, info_name=f"seqmesh {name}", **found.context_settings)
    usage = found.get_usage(context).removeprefix("Usage: ")
    parts = [title, f"```text\n{usage}\n```", help_text(found.help or summary)]
    rows = [
        [code(record[0]), option_text(record[1])]
        for parameter in found.params
        if not (place_of(name) and isinstance(parameter, SettingOption))
        if (record := parameter.get_help_record(context)) is not None and record[1]
    ]
    if rows:
        parts.append(table(("Option", "Meaning"), rows))
    if found.epilog:
        parts.append(help_text(found.epilog))
    if place_of(name) and " " not in name:
        parts.append(f"All other flags: {place_of(name)}.")
    return "\n\n".join(parts)


def option_text(record: str) -> str:
    """What click says behind an option; the facts in brackets are code."""
    said, bracket, facts = record.partition("  [")
    return text(said) + (f" ({text(facts.removesuffix(']').replace('; ', ', '))})" if bracket else "")


def make() -> str:
    """The targets of the Makefile, and its arguments."""
    lines = MAKEFILE.read_text().splitlines()
    targets = [found.groups() for line in lines if (found := re.match(r"([a-z0-9-]+):.*?## (.*)", line))]
    arguments: list[list[str]] = []
    for line in lines:
        if not line.startswith("#"):
            break
        if found := re.match(r"#   (\S.*?)  +(\S.*)", line):
            arguments.append(list(found.groups()))
        elif arguments:
            arguments[-1][1] += " " + line.strip("# ")
    return "\n\n".join(
        [
            "## `make`",
            table(("Target", "What it does"), [(code(f"make {name}"), text(what)) for name, what in targets]),
            'Arguments are given behind the target, for instance `make test ARGS="-k takeover"`.',
            table(
                ("Argument", "Meaning"),
                [(", ".join(map(code, names.split(", "))), text(what)) for names, what in arguments],
            ),
        ]
    )

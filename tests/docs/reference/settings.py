"""settings.md: every flag and environment variable of the services, of `seqmesh up`, and of what operates a mesh."""

from __future__ import annotations

import dataclasses
import typing
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from deploy.cli import LAZY_COMMANDS
from deploy.operate.settings import OperatorSettings
from shared.contract.locations import ModelLocation
from shared.settings import (
    ENTRY_POINTS,
    Count,
    Meaning,
    SettingsClass,
    option,
    settings_fields,
    size_text,
    variables_of,
)
from tests.docs.reference.markdown import code, page, table, text

HEAD = ("Flag and variable", "Type", "Unit", "Default", "Bounds", "Meaning")
ORDER = ("gateway", "scheduler", "executor", "up", "console")
OPERATING = [name for name, (module, _) in LAZY_COMMANDS.items() if module.startswith("deploy.operate.")]
INTRO = """
A setting `http_port` is the flag `--http-port` and the environment variable `SEQMESH_HTTP_PORT`. The flag wins over the
variable, the variable over the default. A variable that begins with `SEQMESH_` and belongs to no service is refused.

- A secret can be in a file: `SEQMESH_REDIS_URL_FILE` names one that holds the URL. The variable itself counts more.
- A flag of type list may be repeated. In the environment texts are separated by commas, paths by colons.
- A size may be written with a unit: `64MiB`, `1GB`, `1048576`.
- A boolean variable is `true` or `false`.
- Settings of a service can also be given to `seqmesh up`, as variables: it hands them to the processes that it starts.

OpenTelemetry reads its own variables, which begin with `OTEL_`.
"""
NAMES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "boolean",
    Path: "path",
    ModelLocation: "repository",
    Count: "integer or `auto`",
}


def settings() -> str:
    """The page."""
    classes: dict[str, type[SettingsClass]] = {one.name: one.load() for one in entry_points(group=ENTRY_POINTS)}
    assert set(ORDER) == set(classes), "a program with settings is not in the page"
    sections = [section(f"`seqmesh {name}`", classes[name]) for name in ORDER]
    operating = ", ".join(f"`seqmesh {name}`" for name in OPERATING)
    return page("Settings", INTRO, *sections, section(f"Commands that operate a mesh\n\n{operating}", OperatorSettings))


def place_of(command: str) -> str:
    """Where the settings of a command are; "" where it has none."""
    name = command.partition(" ")[0]
    anchor = "commands-that-operate-a-mesh" if name in OPERATING else f"seqmesh-{name}" if name in ORDER else ""
    return anchor and f"[settings](settings.md#{anchor})"


def section(title: str, settings_type: type[SettingsClass]) -> str:
    """One command's settings, under the headings of its help."""
    kinds = typing.get_type_hints(settings_type)
    groups: dict[str, list[list[str]]] = {}
    meanings = settings_fields(settings_type)
    for field in dataclasses.fields(settings_type):
        meaning = meanings[field.name]
        groups.setdefault(meaning.group, []).append(row(field.name, kinds[field.name], field.default, meaning))
    parts = [f"### {group}\n\n{table(HEAD, rows)}" for group, rows in groups.items()]
    return "\n\n".join([f"## {title}", *parts])


def row(name: str, kind: Any, default: Any, meaning: Meaning) -> list[str]:
    """One setting."""
    made = option(name, kind, default, meaning)
    spelled = [*made.opts, *made.secondary_opts, *variables_of(made)]
    return [
        "<br>".join(map(code, spelled)),
        {"url": "URL", "file": "file"}.get(meaning.unit, kind_text(kind)) + (", secret" if meaning.secret else ""),
        {"bytes": "bytes", "ms": "ms", "s": "s"}.get(meaning.unit, ""),
        "required" if meaning.required else default_text(default, meaning),
        bounds(meaning),
        text(meaning.help),
    ]


def kind_text(kind: Any) -> str:
    """A type in words."""
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(code, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"list of {NAMES[typing.get_args(kind)[0]]}s".replace("ys", "ies")
    return NAMES[kind]


def default_text(default: Any, meaning: Meaning) -> str:
    """A default as it would be typed."""
    if default in ("", ()):
        return "none"
    if isinstance(default, bool):
        return code(str(default).lower())
    return code(size_text(default) if meaning.unit == "bytes" else str(default))


def bounds(meaning: Meaning) -> str:
    """Smallest and largest value."""
    if meaning.minimum is None:
        return ""
    return (
        f"at least {meaning.minimum:g}" if meaning.maximum is None else f"{meaning.minimum:g} to {meaning.maximum:.0f}"
    )

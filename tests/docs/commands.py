"""Whether a command line of the documentation could be typed: its program, subcommand and options exist.

`check` reads a line with what would read it for real: the click commands of `seqmesh` and of the tools, the Makefile,
the compose file. Nothing is carried out.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import click
import yaml

from benchmarks.command import bench
from benchmarks.memory import main as memory
from benchmarks.scripts import main as scripts
from benchmarks.soak import soak
from deploy.cli import LazyCommand, main
from deploy.demo.vad.command import vad
from shared.settings import installed_variables
from tests.markdown_pages import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
COMPOSE_FILES = ("compose.yaml", "deploy/compose.traces.yaml", "deploy/compose.gpu.yaml")
COMPOSE_OPTIONS = {
    "build": set[str](),
    "up": {"--build", "--wait", "--scale", "--no-recreate", "-d"},
    "down": {"-v"},
    "logs": {"-f"},
    "ps": set[str](),
    "port": set[str](),
}
SHELL = {".": 1, "cd": 1, "mkdir": 1}
"""Words of the shell, and how many arguments they take here."""


SEQMESH: Mapping[str, click.Command] = {
    **{name: one.real() if isinstance(one, LazyCommand) else one for name, one in main.commands.items()},
    "demo vad": vad,
}
MODULES: Mapping[str, click.Command] = {"benchmarks.memory": memory, "benchmarks.scripts": scripts}
MAKE_VARIABLES: Mapping[str, click.Command | str] = {
    "UP": SEQMESH["up"],
    "CHAOS": SEQMESH["chaos"],
    "BENCH": bench,
    "SOAK": soak,
    "SIM": "tests.simulation",
    "FUZZ": "tests.fuzz",
    "MUTANTS": "tests.mutation",
}
"""What reads the arguments that a variable of `make` hands on: a command, or a module with a `--help`."""


@dataclass(frozen=True, slots=True)
class Line:
    """One command: variables before it, and its words."""

    variables: Mapping[str, str]
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """Its first word; the folder of the virtual environment goes without saying."""
        return self.words[0].removeprefix(".venv/bin/")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The other words."""
        return self.words[1:]


def lines_of(text: str) -> Iterator[Line]:
    """The commands of a shell block. Comments and continued lines are the shell's."""
    for written in text.replace("\\\n", " ").splitlines():
        words = shlex.split(written, comments=True)
        variables: dict[str, str] = {}
        while words and (found := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
            variables[found[1]] = found[2]
            words.pop(0)
        if words:
            yield Line(variables, tuple(words))


def check(line: Line) -> None:
    """Raises AssertionError, or click's own complaint, for a line that could not be typed."""
    check_variables(line.variables)
    match line.program:
        case "make":
            check_make(line.arguments)
        case "seqmesh":
            words = 2 if " ".join(line.arguments[:2]) in SEQMESH else 1
            check_click(SEQMESH[" ".join(line.arguments[:words])], line.arguments[words:])
        case "docker":
            check_docker(line.arguments)
        case "export":
            check_variables(dict(word.split("=", 1) for word in line.arguments))
        case "python" if line.arguments[0] == "-m":
            check_module(line.arguments[1], line.arguments[2:])
        case "pip":
            assert line.arguments[:2] == ("install", "-r")
            assert (ROOT / line.arguments[2]).exists()
        case "curl":
            assert {word for word in line.arguments[:-1] if not word.startswith("{")} <= {"-s", "-X", "POST", "-d"}
        case "python":
            pass  # a file that the page writes: the page is a story, which runs it
        case word:
            assert len(line.arguments) == SHELL[word], f"unknown program: {word}"


def check_variables(variables: Mapping[str, str]) -> None:
    """Variables of the mesh and of the compose file exist; those of OpenTelemetry and torch are others' affair."""
    for name in variables:
        assert is_known(name), name


def is_known(name: str) -> bool:
    """Whether an environment variable means anything."""
    compose = "".join((ROOT / file).read_text() for file in COMPOSE_FILES)
    return name.startswith("OTEL_") or name in installed_variables() or f"${{{name}" in compose


def check_click(command: click.Command, arguments: Sequence[str]) -> None:
    """Raises for an option that the command does not have, or a value that it does not take."""
    if isinstance(command, click.Group):
        check_click(command.commands[arguments[0]], arguments[1:])
        return
    try:
        command.make_context(command.name or "", list(arguments))
    except click.BadParameter as wrong:
        # A file of the reader's, which is not here.
        if "does not exist" not in wrong.message:
            raise


def check_module(module: str, arguments: Sequence[str]) -> None:
    """A module of the project that is a program."""
    if module in MODULES:
        check_click(MODULES[module], arguments)
    else:
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
        assert not arguments, "options that nobody checks"


def check_make(arguments: Sequence[str]) -> None:
    """Targets and variables are the Makefile's, and what reads a variable takes its value."""
    for word in arguments:
        name, is_variable, value = word.partition("=")
        if not is_variable:
            assert re.search(rf"^{name}:", MAKEFILE, re.MULTILINE), f"no target {name}"
            continue
        assert f"$({name})" in MAKEFILE, f"no variable {name}"
        reader = MAKE_VARIABLES.get(name)
        if isinstance(reader, click.Command):
            check_click(reader, shlex.split(value))
        elif reader:
            options = {one.split("=")[0] for one in shlex.split(value) if one.startswith("-")}
            assert options <= options_of_module(reader)


@cache
def options_of_module(module: str) -> frozenset[str]:
    """The options of a program that reads its own command line."""
    text = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return frozenset(re.findall(r"--[a-z-]+", text.stdout))


def check_docker(arguments: Sequence[str]) -> None:
    """Files, services, options and volumes of the compose file; what runs in a container as what is typed here."""
    match list(arguments):
        case ["compose", "exec", service, *words]:
            assert service in COMPOSE["services"]
            check(Line({}, tuple(words)))
        case ["compose", *rest]:
            while rest[0] == "-f":
                assert (ROOT / rest[1]).exists()
                rest = rest[2:]
            while rest[0] == "--profile":
                assert any(rest[1] in service.get("profiles", ()) for service in COMPOSE["services"].values())
                rest = rest[2:]
            subcommand, *words = rest
            while words:
                word = words.pop(0)
                if word.startswith("-"):
                    assert word in COMPOSE_OPTIONS[subcommand], word
                    if word == "--scale":
                        assert words.pop(0).split("=")[0] in COMPOSE["services"]
                else:
                    assert word in COMPOSE["services"] or (subcommand == "port" and word.isdecimal())
        case ["stop" | "rm", *containers]:
            found = [re.fullmatch(rf"{COMPOSE['name']}-(\w+)-\d", one) for one in containers]
            assert all(one and one[1] in COMPOSE["services"] for one in found)
        case ["volume", "rm", volume]:
            assert volume in {f"{COMPOSE['name']}_{one}" for one in COMPOSE["volumes"]}
        case ["buildx", "imagetools", "inspect", image]:
            assert f":-{image}}}" in (ROOT / "compose.yaml").read_text()
        case _:
            raise AssertionError("unknown words of docker")


def every_option() -> set[str]:
    """Every option of every program of the project, with pytest's own that the Makefile and the pages name."""
    behind = [one for group in SEQMESH.values() if isinstance(group, click.Group) for one in group.commands.values()]
    commands = (*SEQMESH.values(), *behind, *MODULES.values(), *MAKE_VARIABLES.values())
    options = {"--help", "--device", "--upgrade"}
    for command in commands:
        if isinstance(command, str):
            options |= options_of_module(command)
        else:
            options |= {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == {"seqmesh"}, "a program whose options are not known here"
    return options

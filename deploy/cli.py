"""The command `seqmesh`: a mesh on this machine, or one service at a time.

Services are imported only when their command is called, so that `seqmesh gateway` works without torch.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points, version
from typing import Any

import click
from click.shell_completion import get_completion_class

from deploy.local.endings import UNWRITABLE, absent, drop_unwritten, importing, prepare_streams, unusable
from deploy.local.launcher import up
from deploy.local.settings import UpSettings
from deploy.local.terminal import show
from deploy.operate.settings import check_is_text
from shared.contract.ids import correlation_id_from
from shared.settings import ENTRY_POINTS as SETTINGS_OF
from shared.settings import SettingsCommand, options, settings_command
from shared.traces.context import describe

UP_HELP = """A whole mesh on this machine, until Ctrl-C.

Starts gateways, schedulers, executors, and a Redis unless --redis-url is given. Prints where they listen when they
are ready. A process that dies is started again and reported. Ctrl-C stops everything in order, a second Ctrl-C at once.
"""
UP_EPILOG = """Every setting of a service can be given here too, as its environment variable: see `seqmesh gateway
--help`, `seqmesh scheduler --help` and `seqmesh executor --help`."""

LAZY_COMMANDS = {
    "new": ("deploy.new.command", "Writes a model that works, to be changed into one's own."),
    "demo": ("deploy.demo.command", "Streams texts while an executor is killed."),
    "doctor": ("deploy.operate.doctor", "Finds what is not well here, and names the remedy."),
    "console": ("deploy.console.__main__", "A page that shows a running mesh: `seqmesh up` starts one."),
    "seq": ("deploy.operate.sequences", "The sequences of a mesh: list, show, move, pause, end, copy."),
    "drain": ("deploy.operate.drain", "Empties executors: their sequences go on elsewhere."),
    "tenants": ("deploy.operate.tenants", "What each tenant may do."),
    "settings": ("deploy.operate.runtime_settings", "Shows what was changed in logging and tracing, and by whom."),
    "analyze": ("deploy.analyze.command", "Finds the configuration of a model that serves most."),
    "reshard": ("deploy.operate.reshard", "Changes the number of shards of a mesh that does not run."),
    "gateway": ("gateway.__main__", "One gateway: the v2 HTTP and gRPC protocols."),
    "scheduler": ("scheduler.__main__", "One scheduler: gives sequences to executors."),
    "executor": ("executor.__main__", "One executor: runs models."),
    "chaos": ("deploy.chaos.command", "Kills a mesh under load, and checks every answer."),
}

SERVICES = ("gateway", "scheduler", "executor", "console")
"""Each has an extra of its name, which brings what it needs."""
GIVEN_BY_UP = ("--name", "--reuse-port", "--no-reuse-port", "--console-control")
"""Options of services that `seqmesh up` gives itself: their variables would change nothing."""
EXIT_INTERRUPTED = 130
"""Of a command that Ctrl-C ends, as a shell has it: of 1 each command says itself what it means."""


class Program(click.Group):
    """The command line. It says for all commands that a file, or what they print, cannot be read or written. Where
    their reader has gone, click ends them without a word. One that Ctrl-C ends has an exit code of its own, unless the
    command knows a better one.
    """

    def main(self, *arguments: Any, **options: Any) -> Any:
        prepare_streams()
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if error.filename is not None:
                said = unusable(error)
            elif isinstance(error, FileNotFoundError):
                said = absent(error)
            elif error.errno in UNWRITABLE:
                said = f"the output cannot be written: {error.strerror}"
            else:
                raise
            click.echo(f"Error: {said}", err=True)
            sys.exit(1)
        finally:
            drop_unwritten()

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which somebody new needs them, and not that of the alphabet."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Closes the line of the terminal's ^C. The terminal may be closed itself.
            show("", sys.stderr)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=Program, context_settings={"max_content_width": 110})
@click.version_option(version("seqmesh"), prog_name="seqmesh")
def main() -> None:
    """Serves recurrent and streaming models over Triton's protocols; loses, doubles and reorders no step."""


class LazyCommand(click.Command):
    """A command of another module, which is imported when it is called, and gets the arguments as they are, also
    `--help`. A shell that completes a line sees the options and commands that stand there.
    """

    def __init__(self, name: str, module: str, summary: str) -> None:
        super().__init__(name, callback=self._run, help=summary, add_help_option=False)
        self._module = module

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leaves the arguments to the command itself: a parser here would take its `--` away."""
        ctx.params["arguments"] = tuple(args)
        return []

    def _run(self, arguments: Sequence[str]) -> None:
        """Calls the module's `main`, which returns the exit code, or the command in it."""
        with importing(str(self.name) if self.name in SERVICES else "gateway,scheduler,executor,local"):
            module = import_module(self._module)
            main: Callable[[Sequence[str]], int | None] | None = getattr(module, "main", None)
            if main is not None:
                sys.exit(main(arguments))
        # Not by the command's own `main`: what ends it, the program makes an exit code of.
        command = self.real()
        with command.make_context(f"seqmesh {self.name}", list(arguments)) as ctx:
            command.invoke(ctx)

    def real(self) -> click.Command:
        """The command as it stands in its module; that of a service is made of its settings."""
        for entry in entry_points(group=SETTINGS_OF, name=str(self.name)):
            return settings_command(entry.load(), print, name=entry.name, help="")
        found = vars(import_module(self._module)).values()
        return next(one for one in found if isinstance(one, click.Command) and one.name == self.name)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if extra.get("resilient_parsing"):
            return self.real().make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


class UpCommand(SettingsCommand):
    """Names the way for what is given to `seqmesh up` and belongs to one of its services, or behind `--models`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        try:
            found = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not (where := setting_of_services(error.option_name)):
                raise
            raise click.UsageError(where, ctx) from error
        if found and not ctx.resilient_parsing:
            remedy = " ".join(f"--models {shlex.quote(one)}" for one in found)
            ctx.fail(f"a model repository stands behind --models: {remedy}")
        return found


def setting_of_services(option: str) -> str:
    """Whose setting an option is, and how `seqmesh up` hands it on; "" if it is of no service."""
    variables = {
        entry.name: one.envvar
        for entry in entry_points(group=SETTINGS_OF)
        for one in options(entry.load())
        if option in (*one.opts, *one.secondary_opts) and option not in GIVEN_BY_UP
    }
    if not variables:
        return ""
    whose = " and ".join(f"{service}s" for service in sorted(variables))
    return f"{option} is a setting of {whose}: set {variables.popitem()[1]} for `seqmesh up`"


@click.command("version")
def show_version() -> None:
    """The version of this program."""
    click.echo(f"seqmesh {version('seqmesh')}")


@click.command("trace")
@click.argument("model")
@click.argument("correlation_id", metavar="ID")
@click.option("--version", default="", help="The version that the client names in its requests, if it names one.")
@click.option("--string", is_flag=True, help='ID is a string even if it looks like a number: 42 and "42" differ.')
def show_trace(model: str, correlation_id: str, version: str, *, string: bool) -> None:
    """The trace id of a sequence, running or not."""
    check_is_text({"model": model, "id": correlation_id, "version": version})
    click.echo(describe(model, version, correlation_id_from(correlation_id, string=string)))


COMPLETION_HELP = """Prints what lets a shell complete a command line.

Commands, options, models, and ids of sequences are completed.

\b
  eval "$(seqmesh completion bash)"    in ~/.bashrc; zsh likewise, in ~/.zshrc
  seqmesh completion fish > ~/.config/fish/completions/seqmesh.fish
"""


@click.command("completion", help=COMPLETION_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def show_completion(shell: str) -> None:
    """Carries `seqmesh completion` out."""
    kind = get_completion_class(shell)
    assert kind is not None, "one of the shells that click knows"
    click.echo(kind(main, {}, "seqmesh", "_SEQMESH_COMPLETE").source())


main.add_command(
    settings_command(
        UpSettings, lambda settings: sys.exit(up(settings)), name="up", help=UP_HELP, epilog=UP_EPILOG, kind=UpCommand
    )
)
for command_name, (command_module, command_summary) in LAZY_COMMANDS.items():
    main.add_command(LazyCommand(command_name, command_module, command_summary))
main.add_command(show_trace)
main.add_command(show_version)
main.add_command(show_completion)


if __name__ == "__main__":
    main()

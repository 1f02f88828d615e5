"""`seqmesh drain`: an executor hands over what it owns, and stays out of the mesh with its models loaded.

The wish lies in Redis under the executor's name (or its id, where several share a name), so it holds for a process that
is started again, too. The executor sees it within a sixth of its lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence

import click

from deploy.operate.operating import ExecutorHolding, OperatedMesh, found_mesh, holdings, matching
from deploy.operate.settings import OperatorSettings
from shared.settings import SettingsCommand, options
from shared.store.company import ServiceLine, services

POLL_S = 0.2
HELP = """Empties executors: their sequences go on elsewhere.

No caller sees an error. The process keeps running with its models loaded, takes nothing, and serves again after --undo.
EXECUTOR is a name or an id, as --list shows them. Waits until nothing is left there: sequences whose state only their
model knows (model parameter sequence_recovery) cannot be moved, and stay until they end; --undo takes effect only
then.

\b
  seqmesh drain --list             who holds how many sequences
  seqmesh drain executor-2         for instance before its machine is taken away
  seqmesh drain executor-2 --undo  it serves again
"""


def main(arguments: Sequence[str]) -> None:
    """The command."""
    command.main(list(arguments), prog_name="seqmesh drain")


def run(executors: tuple[str, ...], *, show: bool, undo: bool, wait: bool, **settings: str) -> None:
    """What the command does. Raises click.ClickException with what to do instead."""
    if not executors and (undo or not show):
        raise click.UsageError("which executor? Give its name or id; --list shows them")
    asyncio.run(_run(OperatorSettings(**settings), executors, show=show, undo=undo, wait=wait))  # pyright: ignore[reportArgumentType]


async def _run(settings: OperatorSettings, executors: tuple[str, ...], *, show: bool, undo: bool, wait: bool) -> None:
    async with found_mesh(settings) as mesh:
        if undo:
            await take_back(mesh, executors)
        elif executors:
            names = await ask(mesh, executors)
            if wait:
                await empty(mesh, names)
        if show:
            click.echo(table(await holdings(mesh), await mesh.membership.drained()))
            click.echo(mixture(await services(mesh.redis, mesh.keys)), nl=False)


async def ask(mesh: OperatedMesh, executors: Iterable[str]) -> list[str]:
    """Says that executors are to be drained; returns the names under which that was said."""
    known = await holdings(mesh)
    names = [wish_name(who, known) for who in executors]
    for name in names:
        await mesh.membership.drain(name, time.time_ns() // 1_000_000)
    for model, served in sorted(alone(names, known).items()):
        click.echo(f"no other executor serves '{model}': {sequences(served)} of it will wait for one")
    return names


def wish_name(who: str, known: list[ExecutorHolding]) -> str:
    """An executor's name, which a process keeps when it is started again; its id where several share the name."""
    found = matching(who, known)
    if not found:
        names = ", ".join(sorted({one.registration.name for one in known})) or "none"
        raise click.ClickException(f"no executor '{who}' in this mesh; there are: {names} (seqmesh drain --list)")
    name = found[0].registration.name
    namesakes = {one.registration.executor for one in known if one.registration.name == name and one.member.usable}
    return who if len(namesakes) > 1 else name


def alone(names: Sequence[str], known: list[ExecutorHolding]) -> dict[str, int]:
    """Models that nobody else serves, with the sequences that the drained executors own of them."""
    leaving = [one for name in names for one in matching(name, known)]
    others = {
        served.model for one in known if one.member.usable and one not in leaving for served in one.registration.models
    }
    held: dict[str, int] = {}
    for one in leaving:
        for model, count in one.sequences.items():
            if model not in others:
                held[model] = held.get(model, 0) + count
    return held


async def empty(mesh: OperatedMesh, names: Sequence[str]) -> None:
    """Returns when the executors own nothing and take no part any more; says how far it has come."""
    said: dict[str, str] = {}
    while True:
        known = await holdings(mesh)
        found = {name: matching(name, known) for name in names}
        for name, ones in found.items():
            news = progress(name, ones)
            if said.get(name) != news:
                said[name] = news
                click.echo(news)
        if not any(one.total or one.member.usable for ones in found.values() for one in ones):
            return
        await asyncio.sleep(POLL_S)


def progress(name: str, ones: Iterable[ExecutorHolding]) -> str:
    """A line about an executor that is being drained."""
    there = [one for one in ones if one.total or one.member.usable]
    if not there:
        return f"{name}: drained"
    total = sum(one.total for one in there)
    bound = sorted({model for one in there if one.state == "closing" for model in one.sequences})
    ends_here = f" (of {', '.join(bound)}: they end here, because only the model knows their state)" if bound else ""
    return f"{name}: {sequences(total)} left{ends_here}"


async def take_back(mesh: OperatedMesh, executors: Iterable[str]) -> None:
    """Lets executors serve again."""
    known = await holdings(mesh)
    for who in executors:
        names = {who, *(one.registration.name for one in matching(who, known))}
        if not any([await mesh.membership.undrain(name) for name in sorted(names)]):
            drained = ", ".join(await mesh.membership.drained()) or "none"
            raise click.ClickException(f"'{who}' is not drained; drained are: {drained}")
        click.echo(f"{who}: serves again{condition(matching(who, known))}")


def condition(ones: Iterable[ExecutorHolding]) -> str:
    """When an executor does that has handed over what can be moved: it registers anew, and so must own nothing."""
    closing = [one for one in ones if one.state == "closing" and one.total]
    if not closing:
        return ""
    models = sorted({model for one in closing for model in one.sequences})
    return f" after the end of its last {sequences(sum(one.total for one in closing))} (of {', '.join(models)})"


def sequences(count: int) -> str:
    """So many of them."""
    return f"{count} sequence{'' if count == 1 else 's'}"


def state(one: ExecutorHolding, drained: Collection[str]) -> str:
    """What an executor is doing; `asked` while it has not heard that it is to be drained."""
    is_asked = one.registration.name in drained or one.registration.executor in drained
    return "asked" if is_asked and one.state == "serving" else one.state


def table(known: Sequence[ExecutorHolding], drained: Sequence[str]) -> str:
    """Every executor, a line each, then those that are drained and hold nothing any more."""
    rows = [("EXECUTOR", "ID", "STATE", "SEQUENCES", "BY MODEL")]
    for one in known:
        by_model = ", ".join(f"{model} {count}" for model, count in sorted(one.sequences.items()))
        rows.append((one.registration.name, one.registration.executor, state(one, drained), str(one.total), by_model))
    usable = {
        who
        for one in known
        if one.total or one.member.usable
        for who in (one.registration.name, one.registration.executor)
    }
    rows += [(name, "", "drained", "0", "") for name in drained if name not in usable]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def mixture(lines: Iterable[ServiceLine]) -> str:
    """Who is of which release, where that differs; otherwise nothing."""
    names: dict[tuple[str, str], list[str]] = {}
    for line in sorted(lines, key=lambda one: (one.service, one.name)):
        names.setdefault((line.release, line.format), []).append(line.name)
    if len(names) < 2:
        return ""
    return "".join(f"release {release}, format {form}: {', '.join(who)}\n" for (release, form), who in names.items())


command = SettingsCommand(
    "drain",
    params=[
        click.Argument(["executors"], nargs=-1, metavar="[EXECUTOR]..."),
        click.Option(["--list", "show"], is_flag=True, help="Show every executor and how many sequences it holds."),
        click.Option(["--undo"], is_flag=True, help="Let the executors serve again."),
        click.Option(["--wait/--no-wait"], default=True, help="Return when nothing is left there, or at once."),
        *options(OperatorSettings),
    ],
    callback=run,
    help=HELP,
    context_settings={"max_content_width": 110},
)

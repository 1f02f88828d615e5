"""`seqmesh drain`: an executor hands over its sequences, and then takes none, with its models still loaded.

The request to drain is kept in Redis under the executor's name (or under its id, if several executors share the name).
So it also holds for a process of that name that is started later. The executor sees it within a sixth of its lease.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import click
import msgspec

from deploy.operate.operating import (
    ExecutorHolding,
    OperatedMesh,
    found_mesh,
    holdings,
    matching,
    unknown_executor,
    whole_or_told,
)
from deploy.operate.settings import OperatorSettings, operator_command
from deploy.operate.texts import aligned, counted
from shared.store.company import ServiceLine, services

POLL_S = 0.2
HELP = """Empties executors: their sequences go on elsewhere.

No caller sees an error. The process keeps running with its models loaded, and takes nothing until --undo; nor does a
process that is started under its name later.

EXECUTOR is a name (an executor's --name; `seqmesh up` calls its own executor-1 and so on) or an id, as --list shows
them. Waits until nothing is left there: sequences whose state only their model knows (model parameter
sequence_recovery) cannot be moved, and stay until they end; --undo takes effect only then.

\b
  seqmesh drain --list             who holds how many; --json for scripts
  seqmesh drain executor-2         before its machine is taken away
  seqmesh drain executor-2 --undo  it serves again
"""


class ListedExecutor(msgspec.Struct, frozen=True):
    """What is shown of an executor, or of a drained name whose executor is gone or holds nothing (`id` is empty).

    state      serving, asked (it has not seen the request to drain), closing, leaving, dead or drained
    sequences  those that it owns, by model; models without any are left out
    """

    executor: str
    id: str
    state: str
    sequences: dict[str, int]


async def run(
    settings: OperatorSettings, executors: tuple[str, ...], *, show: bool, as_json: bool, undo: bool, wait: bool
) -> None:
    if show and (executors or undo):
        raise click.UsageError("--list shows every executor, and drains none: give no name and no --undo with it")
    if not executors and not show:
        raise click.UsageError("which executor? Give its name or id; --list shows them")
    if as_json and not show:
        raise click.UsageError("--json goes with --list")
    async with found_mesh(settings) as mesh:
        if show:
            await list_executors(mesh, as_json=as_json)
        elif undo:
            await take_back(mesh, executors)
        else:
            names, bound = await ask(mesh, executors)
            for line in bound:
                click.echo(line)
            if wait:
                await empty(mesh, names)
            else:
                click.echo(
                    f"{', '.join(names)}: asked to hand over all sequences; `seqmesh drain --list` shows the state"
                )


async def list_executors(mesh: OperatedMesh, *, as_json: bool) -> None:
    async with whole_or_told(mesh) as lost:
        lines = lines_of(await holdings(mesh, without=lost), await mesh.membership.drained())
        if as_json:
            for line in lines:
                click.echo(msgspec.json.encode(line))
            return
        click.echo(table(lines))
        click.echo(mixture(await services(mesh.redis, mesh.keys)), nl=False)


async def ask(mesh: OperatedMesh, executors: Iterable[str]) -> tuple[list[str], list[str]]:
    """Requests that executors are drained. Safe to repeat. Raises click.ClickException for one that is not there.

    Returns the names under which the requests are kept, and lines about what the operator may not have meant: several
    executors of a name, models that nobody else serves.
    """
    known = await holdings(mesh)
    # Each once, also if it was given twice, or by its name and its id.
    names = list(dict.fromkeys(wish_name(who, known) for who in executors))
    for name in names:
        await mesh.membership.drain(name, time.time_ns() // 1_000_000)
    return names, [*namesakes(names, known), *warnings_of(alone(names, known))]


def namesakes(names: Iterable[str], known: list[ExecutorHolding]) -> Iterator[str]:
    """A line for each name that several executors have: all of them are drained."""
    for name in names:
        ids = [one.registration.executor for one in matching(name, known) if one.member.usable]
        if len(ids) > 1:
            yield f"{name}: {len(ids)} executors have this name, all are drained: {', '.join(ids)}; an id drains one"


def warnings_of(unserved: Mapping[str, int]) -> list[str]:
    """What becomes of models that nobody else serves. unserved: their sequences"""
    lines = [
        f"no other executor serves '{model}': {counted(held, 'sequence')} of it will wait for one, or end here if only "
        "the model knows their state"
        for model, held in sorted(unserved.items())
        if held
    ]
    idle = ", ".join(f"'{model}'" for model, held in sorted(unserved.items()) if not held)
    return [*lines, f"no other executor serves {idle}: requests are refused (503) until one does"] if idle else lines


def wish_name(who: str, known: list[ExecutorHolding]) -> str:
    """The name under which an executor's request is kept: its name, which a restarted process has again; its id, if
    several executors share the name."""
    found = matching(who, known)
    if not found:
        raise unknown_executor(who, [one.member for one in known])
    name = found[0].registration.name
    namesakes = {one.registration.executor for one in known if one.registration.name == name and one.member.usable}
    return who if len(namesakes) > 1 else name


def alone(names: Sequence[str], known: list[ExecutorHolding]) -> dict[str, int]:
    """Models that only the drained executors serve -> their sequences that these executors own."""
    leaving = [one for name in names for one in matching(name, known)]
    others = {model for one in known if one.member.usable and one not in leaving for model in models_of(one)}
    owned = Counter[str]()
    for one in leaving:
        owned.update({model: one.sequences.get(model, 0) for model in models_of(one) - others})
    return owned


def models_of(one: ExecutorHolding) -> set[str]:
    """The models that an executor serves, or of which it owns sequences."""
    return {served.model for served in one.registration.models} | set(one.sequences)


async def empty(mesh: OperatedMesh, names: Sequence[str]) -> None:
    """Waits until the executors own no sequence and are drained. Prints the progress."""
    said: dict[str, str] = {}
    while True:
        known = await holdings(mesh, names)
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
    return f"{name}: {counted(total, 'sequence')} left{ends_here}"


async def take_back(mesh: OperatedMesh, executors: Iterable[str]) -> None:
    """Takes drains back, and says so. Raises click.ClickException behind the last one if some are of nobody."""
    strangers: list[str] = []
    for who in dict.fromkeys(executors):
        if said := await serve_again(mesh, who):
            click.echo(f"{who}: {said}")
        else:
            strangers.append(f"'{who}'")
    if strangers:
        drained = ", ".join(await mesh.membership.drained()) or "none"
        verb = "is" if len(strangers) == 1 else "are"
        raise click.ClickException(f"{', '.join(strangers)} {verb} not drained; drained are: {drained}")


async def serve_again(mesh: OperatedMesh, who: str) -> str:
    """Takes a drain back, and says so; "" for a name that is not drained and no executor's. Safe to repeat."""
    meant = matching(who, await holdings(mesh))
    names = {who, *(one.registration.name for one in meant)}
    if any([await mesh.membership.undrain(name) for name in sorted(names)]):
        return f"serves again{condition(meant)}"
    return "was not drained" if meant else ""


def condition(ones: Iterable[ExecutorHolding]) -> str:
    """When an executor can serve again after a drain. It registers under a new id, so it must own nothing before."""
    closing = [one for one in ones if one.state == "closing" and one.total]
    if not closing:
        return ""
    models = sorted({model for one in closing for model in one.sequences})
    return (
        f" after the end of its last {counted(sum(one.total for one in closing), 'sequence')} (of {', '.join(models)})"
    )


def state(one: ExecutorHolding, drained: Collection[str]) -> str:
    """The executor's state in a word; `asked` while it has not seen the request to drain."""
    return "asked" if one.state == "serving" and not one.names.isdisjoint(drained) else one.state


def lines_of(known: Sequence[ExecutorHolding], drained: Sequence[str]) -> list[ListedExecutor]:
    """A line for each executor; then one for each drained name whose executor is gone or holds nothing."""
    in_use = [one for one in known if one.total or one.member.usable or one.names.isdisjoint(drained)]
    lines = [
        ListedExecutor(one.registration.name, one.registration.executor, state(one, drained), dict(one.sequences))
        for one in in_use
    ]
    usable = {name for one in in_use for name in one.names}
    return lines + [ListedExecutor(name, "", "drained", {}) for name in drained if name not in usable]


def table(lines: Iterable[ListedExecutor]) -> str:
    rows = [("EXECUTOR", "ID", "STATE", "SEQUENCES", "BY MODEL")]
    for one in lines:
        by_model = ", ".join(f"{model} {count}" for model, count in sorted(one.sequences.items()))
        rows.append((one.executor, one.id, one.state, str(sum(one.sequences.values())), by_model))
    return aligned(rows)


def mixture(lines: Iterable[ServiceLine]) -> str:
    """Which services are of which release, if the releases differ; else ""."""
    names: dict[tuple[str, str], list[str]] = {}
    for line in sorted(lines, key=lambda one: (one.service, one.name)):
        names.setdefault((line.release, line.format), []).append(line.name)
    if len(names) < 2:
        return ""
    return "".join(f"release {release}, format {form}: {', '.join(who)}\n" for (release, form), who in names.items())


command = operator_command(
    "drain",
    HELP,
    run,
    [
        click.Argument(["executors"], nargs=-1, metavar="[EXECUTOR]..."),
        click.Option(["--list", "show"], is_flag=True, help="Show every executor and how many sequences it holds."),
        click.Option(["--json", "as_json"], is_flag=True, help="With --list: print JSON, one object a line."),
        click.Option(["--undo"], is_flag=True, help="Let the executors serve again."),
        click.Option(["--wait/--no-wait"], default=True, help="Return when nothing is left there, or at once."),
    ],
)

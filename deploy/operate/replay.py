"""`seqmesh seq replay`: the journaled steps of a sequence once more, on another version, and what is different."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from deploy.local.endings import errors_apart, importing
from deploy.operate import completion
from deploy.operate.comparison import Comparison, OutputSummary, ReplayAnswer, Tolerance, compared
from deploy.operate.operating import NAMING, OperatedMesh, found_mesh, named, told
from deploy.operate.settings import OperatorSettings, operator_command
from deploy.operate.texts import aligned, counted, id_text
from shared.contract.ids import correlation_id_of
from shared.settings import NumberRange
from shared.store.company import call_addresses, services
from shared.store.exported import from_file
from shared.store.journals import Journal, JournaledStep, read_journal
from shared.store.sequences import NOT_JOURNALED

DIFFERENT = 1
"""Exit status, as that of diff."""
HELP = """Runs the steps of a sequence once more, and compares the answers.

They run as a new sequence. The model must keep journals (model parameter journal_steps). The steps since START go
through a gateway to the version that clients get now, or to --to-version or --to-model. The sequence may be open, or
over and remembered (--tombstone-seconds); with --file it is one that `seqmesh seq export` wrote, perhaps in another
mesh.

Integers, booleans and texts must be the same. Numbers with a fraction may differ by --atol and --rtol times the number.
The exit status is 0 if nothing is different, 1 if something is, and 2 if nothing could be compared.

\b
  seqmesh seq replay running_sum 42
  seqmesh seq replay running_sum 42 --to-version 2 --rtol 1e-3
  seqmesh seq replay --file 42.sequence --gateway grpc://staging:8001
"""


async def run(settings: OperatorSettings, **given: Any) -> None:
    with errors_apart():
        await replay(settings, **given)


async def replay(
    settings: OperatorSettings,
    model: str,
    correlation_id: str,
    *,
    file: Path | None,
    to_model: str,
    to_version: str,
    steps: int | None,
    gateway: str,
    headers: tuple[str, ...],
    timeout: float,
    atol: float,
    rtol: float,
    as_json: bool,
    version: str,
    string: bool,
    **tls: Any,
) -> None:
    """tls: the files of `Target`"""
    # They take a while to import, and no other command of `seqmesh seq` needs them.
    with importing("local"):
        from deploy.operate.replaying import Target, address_of, header_given, replayed  # noqa: PLC0415

    if [bool(model), bool(correlation_id)] != [file is None] * 2:
        raise click.ClickException("name a sequence by MODEL and ID, or an exported one by --file")
    given = address_of(gateway)
    journal, address = await _found(settings, model, correlation_id, file, given, version=version, string=string)
    wanted = chosen(journal, steps)
    metadata = [header_given(text) for text in headers]
    target = Target(
        address, to_model or journal.model, to_version, metadata, timeout_s=timeout, is_direct=not given, **tls
    )
    answering, answers = await replayed(target, wanted)
    before = [ReplayAnswer(one.reply.outputs, one.reply.error_code and one.reply.error) for one in wanted]
    comparison = compared(before, answers, Tolerance(atol, rtol))
    ran = f"model {journal.model} version {journal.version}"
    now = f"model {target.model} version {answering or to_version or '(none)'}"
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(comparison), "before": ran, "now": now}))
    else:
        click.echo("\n".join(described(comparison, ran, now)))
    if comparison.first is not None:
        raise click.exceptions.Exit(DIFFERENT)


async def _found(
    settings: OperatorSettings, model: str, correlation_id: str, file: Path | None, gateway: str, **naming: Any
) -> tuple[Journal, str]:
    """The journal, and the address of a gateway. A file for a gateway that is given needs no mesh."""
    journal = None if file is None else await asyncio.to_thread(journal_in, file)
    if journal is not None and gateway:
        return journal, gateway
    async with found_mesh(settings, None if journal else model) as mesh:
        if journal is None:
            sequence = named(model, correlation_id, **naming)
            with told(id_text(correlation_id_of(sequence))):
                journal = await mesh.sequences.journal(sequence)
        return journal, gateway or await gateway_of(mesh)


def journal_in(file: Path) -> Journal:
    """The journal of an exported sequence. Raises click.ClickException for a file without one."""
    with told(file):
        exported = from_file(file.read_bytes())
        steps = read_journal(exported.journal, exported.start_step)
    if not steps:
        raise click.ClickException(f"{file}: {NOT_JOURNALED}; then export it again")
    return Journal(exported.model, exported.version, steps, exported.steps)


async def gateway_of(mesh: OperatedMesh) -> str:
    addresses = call_addresses(await services(mesh.redis, mesh.keys))
    if not addresses:
        raise click.ClickException(
            "no gateway of the mesh says where it is (--grpc-advertise): name one by --gateway HOST:PORT"
        )
    return addresses[0]


def chosen(journal: Journal, steps: int | None) -> Sequence[JournaledStep]:
    """The steps to run. Raises click.ClickException if the journal lacks some of them."""
    known = len(journal.steps)
    if (steps or journal.answered) > known:
        raise click.ClickException(
            f"the journal holds the first {known} of {journal.answered} answered steps: it has no room for more "
            "(model parameters journal_steps and journal_bytes), or they were not run; compare these with "
            f"--steps {known}"
        )
    return journal.steps[:steps]


def described(comparison: Comparison, ran: str, now: str) -> list[str]:
    """The lines that an operator reads."""
    lines: list[str] = []
    if comparison.outputs:
        rows = [("OUTPUT", "TYPE", "STEPS", "DIFFERENT", "FIRST", "GREATEST DIFFERENCE", "")]
        rows += [_row(one) for one in comparison.outputs]
        lines.append(aligned(rows))
    if comparison.failure:
        lines.append(f"step {comparison.steps} {comparison.failure}; later steps were not compared")
    steps = f"{counted(comparison.steps, 'step')}, {ran} and {now}"
    lines.append(
        f"{steps}: the same" if comparison.first is None else f"{steps}: different from step {comparison.first} on"
    )
    return lines


def _row(one: OutputSummary) -> tuple[str, ...]:
    greatest = "" if one.greatest is None else "not finite" if math.isinf(one.greatest) else f"{one.greatest:.6g}"
    first = "" if one.first is None else str(one.first)
    return one.name, one.datatype, str(one.compared), str(one.different), first, greatest, one.problem


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
command = operator_command(
    "replay",
    HELP,
    run,
    [
        click.Argument(["model"], required=False, default="", shell_complete=completion.models),
        click.Argument(["correlation_id"], metavar="[ID]", required=False, default="", shell_complete=completion.ids),
        click.Option(["--file"], type=FILE, help="An exported sequence, instead of MODEL and ID."),
        click.Option(["--to-model"], default="", metavar="MODEL", help="Another model that is to run the steps."),
        click.Option(["--to-version"], default="", metavar="VERSION", help="The version that is to run the steps."),
        click.Option(["--steps"], type=click.IntRange(1), help="Only so many steps, from START on."),
        click.Option(["--atol"], type=NumberRange(0), default=0.0, help="Difference that is allowed."),
        click.Option(["--rtol"], type=NumberRange(0), default=0.0, help="Difference that is allowed, of the number."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
        click.Option(
            ["--gateway"], default="", metavar="ADDRESS", help="HOST:PORT of a gateway's gRPC port; grpcs:// for TLS."
        ),
        click.Option(["--header", "headers"], multiple=True, metavar="NAME=VALUE", help="Sent along. Repeatable."),
        click.Option(["--root-cert"], type=FILE, help="Certificates that sign the gateway's one."),
        click.Option(["--client-key"], type=FILE, help="Key for a gateway that asks for a certificate."),
        click.Option(["--client-cert"], type=FILE, help="That certificate."),
        click.Option(
            ["--timeout"], type=NumberRange(0.001), default=60.0, show_default=True, help="Seconds for each step."
        ),
        *NAMING,
    ],
)

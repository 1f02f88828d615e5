"""`seqmesh seq`: the sequences of a running mesh, one by one."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from deploy.operate import pause, replay
from deploy.operate.completion import ID, IDS, MODEL
from deploy.operate.operating import (
    NAMING,
    WHICH,
    OperatedMesh,
    found_mesh,
    named,
    told,
    unknown_executor,
    whole_or_told,
)
from deploy.operate.settings import JSON, OperatorSettings, operator_command
from deploy.operate.texts import aligned, clock, counted, duration, id_text
from shared.contract.ids import SequenceId, correlation_id_from, correlation_id_of, sequence_id
from shared.store.connections.redis_client import redis_now_ms
from shared.store.exported import from_file, to_file
from shared.store.script_values import EndCode
from shared.store.sequence_status import OPEN_STATES, SORT_KEYS, SequenceStatus, Wanted
from shared.store.sequences import StateSizes

LIST_HELP = """Lists the sequences of a model that are not over.

\b
  seqmesh seq ls running_sum
  seqmesh seq ls running_sum --state live --executor executor-2
  seqmesh seq ls running_sum --sort used --limit 20    not used for longest
  seqmesh seq ls running_sum --json | jq .id
"""
SHOW_HELP = """Shows one sequence: where it is, and how far it has come.

ID is what the client calls the sequence. One that is over is shown while the mesh remembers it (--tombstone-seconds).
"""
END_HELP = """Ends sequences, as their idle timeout would.

The model gets no END. Steps that were accepted are run and answered. A later step hears that the sequence was
cancelled, unless it is a START. ID is what the client calls the sequence. Ending a sequence twice does no harm.

With --lost a sequence is over at once, and its callers hear that it is lost: for one whose steps are not answered, as
its record in Redis was changed.

\b
  seqmesh seq end running_sum 42
  seqmesh seq end running_sum customer-7 customer-8
"""
MOVE_HELP = """Moves a sequence to another executor, between two of its steps.

ID is what the client calls the sequence. No caller notices, but for one step that takes a moment longer. The sequence
must be one whose state the mesh holds. Without --to, any other executor with a free slot takes it. One that has given
up its slot (model parameter virtual_slots) gets one with its next step anyway; with --to it gets one there at once.

\b
  seqmesh seq move running_sum 42
  seqmesh seq move running_sum customer-7 --to executor-2
"""
FORK_HELP = """Copies a sequence as it stands, under a new id.

NEW_ID goes on from the present step of ID, with a state of its own. Both go on independently. The sequence must be one
whose state the mesh holds.

\b
  seqmesh seq fork running_sum 42 4200
"""
EXPORT_HELP = """Writes a sequence into a file; it goes on where it is.

The file holds its state, its numbers and its last replies.

\b
  seqmesh seq export running_sum 42 42.sequence
"""
IMPORT_HELP = """Opens a sequence from a file of `seqmesh seq export`.

The file may be another mesh's. The sequence's next step may come through any gateway. The model must be served in the
same version, with the same files: where others are known to have made the state, it is refused.

\b
  seqmesh seq import 42.sequence
  seqmesh seq import 42.sequence --as 4200
"""
NO_SUCH = f"no such sequence: {WHICH}"
TABLE_LINES = 100
"""A person reads no more; a program gets all."""


async def list_sequences(
    settings: OperatorSettings, model: str, *, limit: int | None, as_json: bool, **filters: Any
) -> None:
    if limit is None and not as_json:
        limit = TABLE_LINES
    states: tuple[str, ...] = filters.pop("states")
    async with found_mesh(settings, model) as mesh, whole_or_told(mesh) as lost:
        wanted = Wanted(states=frozenset(states), **filters)
        found, total = await mesh.sequences.page(model, wanted, 0, limit, without=lost)
        if not total and filters["executor"]:
            await check_executor(mesh, filters["executor"])
        shown = await mesh.sequences.foretold(found)
        now_ms = await redis_now_ms(mesh.redis)
        tell(total, shown, now_ms, as_json=as_json)


def tell(total: int, shown: Sequence[SequenceStatus], now_ms: int, *, as_json: bool) -> None:
    """Prints a list. total: how many there are; shown: those of them that are not too many"""
    if as_json:
        for one in shown:
            click.echo(msgspec.json.encode(one))
        return
    if shown:
        click.echo(table(shown, now_ms))
    left = total - len(shown)
    note = f", {left} of them not shown: --limit {total} shows them" if left else ""
    click.echo(f"{counted(total, 'sequence')}{note}")


async def check_executor(mesh: OperatedMesh, who: str) -> None:
    """Raises click.ClickException for an executor that the mesh does not know. who: its name or id"""
    members = await mesh.membership.members()
    if not any(member.registration.is_called(who) for member in members):
        raise unknown_executor(who, members)


async def show(settings: OperatorSettings, model: str, correlation_id: str, *, as_json: bool, **naming: Any) -> None:
    sequence = named(model, correlation_id, **naming)
    async with found_mesh(settings, model) as mesh:
        (status,) = await mesh.sequences.statuses([sequence])
        if status is not None:
            (status,) = await mesh.sequences.foretold([status])
        sizes = await mesh.sequences.state_sizes(sequence)
        now_ms = await redis_now_ms(mesh.redis)
    if status is None:
        raise click.ClickException(f"{id_text(correlation_id_of(sequence))}: {NO_SUCH}")
    if as_json:
        click.echo(msgspec.json.encode(msgspec.to_builtins(status) | msgspec.to_builtins(sizes)))
        return
    click.echo(aligned(described(status, sizes, now_ms)))


async def end(
    settings: OperatorSettings, model: str, correlation_ids: tuple[str, ...], *, lost: bool, **naming: Any
) -> None:
    """Raises click.ClickException when one of the sequences is not there."""
    async with found_mesh(settings, model) as mesh:
        unknown: list[str] = []
        for correlation_id in correlation_ids:
            sequence = named(model, correlation_id, **naming)
            name = id_text(correlation_id_of(sequence))
            if said := await end_one(mesh, sequence, is_lost=lost):
                click.echo(f"{name}: {said}")
            else:
                unknown.append(name)
    if unknown:
        raise click.ClickException(f"{', '.join(unknown)}: {NO_SUCH}")


async def end_one(mesh: OperatedMesh, sequence: SequenceId, *, is_lost: bool = False) -> str:
    """Ends a sequence, and says what becomes of it; "" if the mesh knows none. Safe to repeat."""
    match await mesh.sequences.end(sequence, is_lost=is_lost):
        case EndCode.ENDS:
            return "ends now"
        case EndCode.CLOSED:
            return "ends behind its open steps"
        case EndCode.REMOVED:
            return "given up" if is_lost else "ended before it had a slot"
        case EndCode.NOTHING:
            (status,) = await mesh.sequences.statuses([sequence])
            return "" if status is None or status.state in OPEN_STATES else f"was over already ({status.state})"


async def move(settings: OperatorSettings, model: str, correlation_id: str, to: str, **naming: Any) -> None:
    sequence = named(model, correlation_id, **naming)
    async with found_mesh(settings, model) as mesh:
        with told(id_text(correlation_id_of(sequence))):
            click.echo(await mesh.sequences.move(sequence, to))


async def fork(
    settings: OperatorSettings, model: str, correlation_id: str, new_id: str, *, version: str, string: bool
) -> None:
    origin, copy = (named(model, each, version=version, string=string) for each in (correlation_id, new_id))
    async with found_mesh(settings, model) as mesh:
        of, name = (id_text(correlation_id_of(each)) for each in (origin, copy))
        with told(f"{of} as {name}"):
            exported = await mesh.sequences.fork(origin, copy)
    click.echo(f"{name} goes on behind step {exported.steps} of {of}")


async def export(settings: OperatorSettings, model: str, correlation_id: str, file: Path, **naming: Any) -> None:
    sequence = named(model, correlation_id, **naming)
    name = id_text(correlation_id_of(sequence))
    async with found_mesh(settings, model) as mesh:
        with told(name):
            exported = await mesh.sequences.export_when_idle(sequence)
    data = to_file(exported)
    await asyncio.to_thread(write_whole, file, data)
    steps = counted(exported.steps, "step")
    # Nothing may stand behind the sequence in its file.
    click.echo(f"{file}: {steps} of {name}, {len(data)} bytes", err=descriptor_of(file) is not None)


async def import_file(settings: OperatorSettings, file: Path, *, as_id: str | None, version: str, string: bool) -> None:
    if as_id == "":
        raise click.UsageError("--as: the id is empty")
    data = await asyncio.to_thread(file.read_bytes)
    async with found_mesh(settings) as mesh:
        with told(file):
            exported = from_file(data)
            correlation_id = exported.id if as_id is None else correlation_id_from(as_id, string=string)
            await mesh.sequences.reopen(sequence_id(exported.model, version, correlation_id), exported)
    click.echo(f"{id_text(correlation_id)} goes on behind step {exported.steps}")


def write_whole(file: Path, data: bytes) -> None:
    """Writes a file that is there whole or not at all, and that only its owner reads. What a link leads to is written;
    a device, a pipe or what is open already (`/dev/stdout`) is written into, not replaced.
    """
    descriptor = descriptor_of(file)
    try:
        if descriptor is not None:
            with os.fdopen(descriptor, "wb", closefd=False) as opened:
                opened.write(data)
        elif is_regular(file):
            replace_whole(file.resolve(), data)
        else:
            file.write_bytes(data)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}") from error


def is_regular(file: Path) -> bool:
    """Whether a path leads to an ordinary file, or to none yet. Raises OSError for one that leads nowhere."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except FileNotFoundError:
        return True


def replace_whole(file: Path, data: bytes) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
            written.write(data)
        beside.replace(file)
    finally:
        with suppress(OSError):  # most often it is not there; a folder that cannot be written takes no removal either
            beside.unlink()


def descriptor_of(file: Path) -> int | None:
    """The open file of this process that a path such as /dev/stdout or /dev/fd/3 names; None: it names another one."""
    if named_so := re.fullmatch(r"/(?:dev|proc/self)/fd/([0-9]{1,9})", str(file)):
        return int(named_so[1])
    return {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(file))


def table(shown: Sequence[SequenceStatus], now_ms: int) -> str:
    rows = [("ID", "STATE", "EXECUTOR", "STEPS", "OPEN", "USED", "IDLE LEFT", "AGE")]
    for one in shown:
        left = "" if one.idle_left_ms is None else duration(one.idle_left_ms)
        state = f"{one.state}, ends" if one.closed else one.state
        state = f"{state}, place {one.place}" if one.place is not None else state
        steps, open_steps = str(one.last_step), str(one.open_steps or "")
        used, age = duration(now_ms - one.used_ms), duration(now_ms - one.begun_ms)
        rows.append((name_text(one), state, one.executor, steps, open_steps, used, left, age))
    return aligned(rows)


def name_text(one: SequenceStatus) -> str:
    """The id, with the version if the client names one."""
    return f"{id_text(one.id)} (version {one.requested_version})" if one.requested_version else id_text(one.id)


def described(one: SequenceStatus, sizes: StateSizes, now_ms: int) -> list[tuple[str, str]]:
    """Names and texts about one sequence."""
    lines = [("sequence", name_text(one)), ("model", f"{one.model}, version {one.version or 'not known'}")]
    lines.append(("state", f"{one.state}, accepts nothing but a START" if one.closed else one.state))
    if one.place is not None:
        lines.append(("place in the line", f"{one.place}, {expected_wait(one)}"))
    if one.tenant:
        lines.append(("tenant", one.tenant))
    if one.executor:
        lines.append(("executor", f"{one.executor}, instance {one.instance}, slot {one.slot}, epoch {one.epoch}"))
    if one.last_step:
        lines.append(("steps", f"{one.last_step} since START, {one.open_steps} of them open"))
    if one.state in OPEN_STATES:
        behind = f"; a takeover runs {one.behind} steps again" if one.behind else ""
        lines.append(("state kept", f"{'by the mesh' if one.recoverable else 'by its executor alone'}{behind}"))
    lines += [("checkpoint", f"{name}, {size} bytes") for name, size in sorted(sizes.state_bytes.items())]
    if sizes.model_state_bytes:
        lines.append(("checkpoint", f"from the model's own method, {sizes.model_state_bytes} bytes"))
    if one.begun_ms:
        lines.append(("began", f"{clock(one.begun_ms)}, {duration(now_ms - one.begun_ms)} ago"))
    if one.used_ms:
        lines.append(("last step", f"{clock(one.used_ms)}, {duration(now_ms - one.used_ms)} ago"))
    if one.paused_until_ms is not None:
        lines.append(("resumed", f"in {duration(one.paused_until_ms - now_ms)}, or by `seqmesh seq resume`"))
    if one.idle_left_ms is not None:
        lines.append(("expires", f"in {duration(one.idle_left_ms)}"))
    return lines


def expected_wait(one: SequenceStatus) -> str:
    """How long a sequence will still wait for its slot, as far as is known."""
    if one.wait_ms is None:
        return "for how long is not known"
    if one.wait_high_ms is None:
        return f"{duration(one.wait_ms)} more if the clients of idle sequences stay silent"
    between = f"{duration(one.wait_low_ms or 0)} to {duration(one.wait_high_ms)}"
    return f"about {duration(one.wait_ms)} more, probably {between}"


TO = click.Option(["--to"], default="", metavar="EXECUTOR", help="Name or id of the executor that is to take it.")
NEW_ID = click.Argument(["new_id"], metavar="NEW_ID")
FILE = click.Argument(["file"], type=click.Path(dir_okay=False, path_type=Path))
LIST_OPTIONS = [
    click.Option(
        ["--state", "states"], type=click.Choice(OPEN_STATES), multiple=True, help="In this state. Repeatable."
    ),
    click.Option(["--executor"], default="", help="Owned by this executor: its name or id."),
    click.Option(["--version"], default="", help="That run on this version."),
    click.Option(["--tenant"], default="", help="Of this tenant."),
    click.Option(["--prefix"], default="", help="Whose id begins with this."),
    click.Option(
        ["--sort"],
        type=click.Choice([sign + name for name in SORT_KEYS for sign in ("", "-")]),
        default="id",
        show_default=True,
        help="What to sort by; with - before it the other way round.",
    ),
    click.Option(
        ["--limit"],
        type=click.IntRange(0),
        metavar="N",
        help=f"How many at most. By default {TABLE_LINES}, and all with --json.",
    ),
]
LOST = click.Option(["--lost"], is_flag=True, help="Give them up: do not wait for their open steps.")
command = click.Group(
    "seq",
    help="The sequences of a running mesh: list, show, move, pause, end, copy, replay.",
    commands=[
        operator_command("ls", LIST_HELP, list_sequences, [MODEL, *LIST_OPTIONS, JSON]),
        operator_command("show", SHOW_HELP, show, [MODEL, ID, *NAMING, JSON]),
        operator_command("move", MOVE_HELP, move, [MODEL, ID, TO, *NAMING]),
        pause.pause_command,
        pause.resume_command,
        operator_command("end", END_HELP, end, [MODEL, IDS, LOST, *NAMING]),
        operator_command("fork", FORK_HELP, fork, [MODEL, ID, NEW_ID, *NAMING]),
        operator_command("export", EXPORT_HELP, export, [MODEL, ID, FILE, *NAMING]),
        operator_command(
            "import",
            IMPORT_HELP,
            import_file,
            [
                click.Argument(["file"], type=click.Path(exists=True, dir_okay=False, path_type=Path)),
                click.Option(["--as", "as_id"], metavar="ID", help="Under this id instead of its own."),
                *NAMING,
            ],
        ),
        replay.command,
    ],
    context_settings={"max_content_width": 110},
)

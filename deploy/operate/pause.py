"""`seqmesh seq pause` and `resume`: a sequence runs nothing for a while, and nothing of it is lost."""

from __future__ import annotations

import click

from deploy.operate import completion
from deploy.operate.operating import NAMING, WHICH, OperatedMesh, found_mesh, named
from deploy.operate.settings import OperatorSettings, operator_command
from shared.contract.errors import Code
from shared.contract.ids import SequenceId
from shared.contract.limits import PAUSE_MS_MAX
from shared.store.sequences import PauseError, Sequences

PAUSE_S = 3600
PAUSE_HELP = """Pauses sequences: nothing runs until they are resumed.

They leave their slots. Steps are accepted, and wait; a step that runs at this moment is run again afterwards. Idle
timeouts stand still. A sequence that is paused already gets the new end of its pause.

\b
  seqmesh seq pause running_sum 42
  seqmesh seq pause running_sum customer-7 customer-8 --seconds 600
"""
RESUME_HELP = """Resumes paused sequences: steps that waited are run.

They run in their order. Resuming a sequence that is not paused does no harm.
"""


async def pause(
    settings: OperatorSettings,
    model: str,
    correlation_ids: tuple[str, ...],
    seconds: int,
    version: str,
    *,
    string: bool,
) -> None:
    """Carries `seqmesh seq pause` out. Raises click.ClickException with the reasons if one of them is not paused."""
    async with found_mesh(settings) as mesh:
        wrong: list[str] = []
        for correlation_id in correlation_ids:
            try:
                said = await pause_one(mesh, named(model, correlation_id, version=version, string=string), seconds)
                click.echo(f"{correlation_id}: {said}")
            except PauseError as error:
                wrong.append(_told(correlation_id, error))
    if wrong:
        raise click.ClickException("\n".join(wrong))


async def resume(
    settings: OperatorSettings, model: str, correlation_ids: tuple[str, ...], version: str, *, string: bool
) -> None:
    """Carries `seqmesh seq resume` out. Raises click.ClickException with the reasons if one of them is not open."""
    async with found_mesh(settings) as mesh:
        wrong: list[str] = []
        for correlation_id in correlation_ids:
            try:
                said = await resume_one(mesh, named(model, correlation_id, version=version, string=string))
                click.echo(f"{correlation_id}: {said}")
            except PauseError as error:
                wrong.append(_told(correlation_id, error))
    if wrong:
        raise click.ClickException("\n".join(wrong))


async def pause_one(mesh: OperatedMesh, sequence: SequenceId, seconds: int) -> str:
    """Pauses a sequence, and says so. Raises PauseError if it is not paused. Safe to repeat."""
    status = await _sequences(mesh).pause(sequence, 1000 * seconds)
    waiting = {0: "", 1: ", 1 open step waits"}.get(status.open_steps, f", {status.open_steps} open steps wait")
    return f"paused for {seconds} s at most{waiting}"


async def resume_one(mesh: OperatedMesh, sequence: SequenceId) -> str:
    """Resumes a sequence, and says so. Raises PauseError if it is not open. Safe to repeat."""
    await _sequences(mesh).resume(sequence)
    return "goes on"


def _told(correlation_id: str, error: PauseError) -> str:
    return f"{correlation_id}: {error}{f': {WHICH}' if error.code is Code.NOT_FOUND else ''}"


def _sequences(mesh: OperatedMesh) -> Sequences:
    return Sequences(mesh.redis, mesh.keys, mesh.membership)


MODEL = click.Argument(["model"], shell_complete=completion.models)
IDS = click.Argument(["correlation_ids"], metavar="ID...", nargs=-1, required=True, shell_complete=completion.ids)
SECONDS = click.Option(
    ["--seconds"],
    type=click.IntRange(1, PAUSE_MS_MAX // 1000),
    default=PAUSE_S,
    show_default=True,
    help="How long at most; then they are resumed.",
)
pause_command = operator_command("pause", PAUSE_HELP, pause, [MODEL, IDS, SECONDS, *NAMING])
resume_command = operator_command("resume", RESUME_HELP, resume, [MODEL, IDS, *NAMING])

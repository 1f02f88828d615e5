"""`seqmesh seq pause` and `resume`: a sequence runs nothing for a while, and nothing of it is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import click

from deploy.operate.completion import IDS, MODEL
from deploy.operate.operating import NAMING, OperatedMesh, complaint, found_mesh, named
from deploy.operate.settings import OperatorSettings, operator_command
from deploy.operate.texts import id_text
from shared.contract.errors import NotDoneError
from shared.contract.ids import SequenceId, correlation_id_of
from shared.contract.limits import PAUSE_MS_MAX

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


Act = Callable[[OperatedMesh, SequenceId], Awaitable[str]]
"""What is done to a sequence; says so. Raises NotDoneError if it cannot be done."""


async def pause(
    settings: OperatorSettings, model: str, correlation_ids: tuple[str, ...], seconds: int, **naming: Any
) -> None:
    await act_on_each(settings, model, correlation_ids, act=partial(pause_one, seconds=seconds), **naming)


async def act_on_each(
    settings: OperatorSettings, model: str, correlation_ids: Sequence[str], *, act: Act, **naming: Any
) -> None:
    """Acts on all sequences. Raises click.ClickException with the reasons if it could not act on one of them."""
    wrong: list[str] = []
    async with found_mesh(settings, model) as mesh:
        for correlation_id in correlation_ids:
            sequence = named(model, correlation_id, **naming)
            name = id_text(correlation_id_of(sequence))
            try:
                click.echo(f"{name}: {await act(mesh, sequence)}")
            except NotDoneError as error:
                wrong.append(complaint(name, error))
    if wrong:
        raise click.ClickException("\n".join(wrong))


async def pause_one(mesh: OperatedMesh, sequence: SequenceId, seconds: int) -> str:
    """Pauses a sequence, and says so. Raises NotDoneError if it is not paused. Safe to repeat."""
    status = await mesh.sequences.pause(sequence, 1000 * seconds)
    waiting = {0: "", 1: ", 1 open step waits"}.get(status.open_steps, f", {status.open_steps} open steps wait")
    return f"paused for {seconds} s at most{waiting}"


async def resume_one(mesh: OperatedMesh, sequence: SequenceId) -> str:
    """Resumes a sequence, and says so. Raises NotDoneError if it is not open. Safe to repeat."""
    await mesh.sequences.resume(sequence)
    return "goes on"


SECONDS = click.Option(
    ["--seconds"],
    type=click.IntRange(1, PAUSE_MS_MAX // 1000),
    default=PAUSE_S,
    show_default=True,
    help="How long at most; then they are resumed.",
)
pause_command = operator_command("pause", PAUSE_HELP, pause, [MODEL, IDS, SECONDS, *NAMING])
resume_command = operator_command("resume", RESUME_HELP, partial(act_on_each, act=resume_one), [MODEL, IDS, *NAMING])

"""`seqmesh seq move`: one sequence goes to another executor between two of its steps.

The wish is an entry in the starts stream of the sequence's model. So it reaches the model's present leader, or the next
one. The leader removes it when the sequence has moved, or cannot move.
"""

from __future__ import annotations

import asyncio

import click

from deploy.operate import completion
from deploy.operate.operating import (
    NAMING,
    WHICH,
    ExecutorHolding,
    OperatedMesh,
    found_mesh,
    holdings,
    matching,
    named,
)
from deploy.operate.settings import OperatorSettings, operator_command
from shared.contract.ids import SequenceId
from shared.contract.record import DURABLE, LIVE, MOVING, NO_ENTRY, OWNER, PAGED, STATE, WAIT_ENTRY, WAITING
from shared.store.reading import text_of
from shared.store.sequences import Sequences

POLL_S = 0.1
NO_SLOT = (
    "the sequence holds no slot (others needed it): its state lies in Redis, and it gets a slot with its next step"
)
HELP = """Moves a sequence to another executor, between two of its steps.

ID is what the client calls the sequence. No caller notices, but for one step that takes a moment longer. The sequence
must be one whose state the mesh holds. Without --to, any other executor with a free slot takes it. One that has given
up its slot (model parameter virtual_slots) gets one with its next step anyway; with --to it gets one there at once.

\b
  seqmesh seq move running_sum 42
  seqmesh seq move running_sum customer-7 --to executor-2
"""


async def run(
    settings: OperatorSettings, model: str, correlation_id: str, to: str, version: str, *, string: bool
) -> None:
    """Carries the command out. Raises click.ClickException with the remedy."""
    sequence = named(model, correlation_id, version=version, string=string)
    async with found_mesh(settings) as mesh:
        owner = await owner_of(mesh, sequence)
        if owner is None and not to:
            click.echo(NO_SLOT)
            return
        executor = destination(await holdings(mesh), model, owner, to)
        starts, wish = await Sequences(mesh.redis, mesh.keys, mesh.membership).wish_move(sequence, executor)
        click.echo(await outcome(mesh, sequence, owner, executor, starts, wish))


async def owner_of(mesh: OperatedMesh, sequence: SequenceId) -> str | None:
    """The executor that owns a live sequence; None while the sequence is paged.

    Raises click.ClickException with the reason for a sequence that cannot be moved.
    """
    record = mesh.keys.sequence(sequence).record
    state, owner, durable, waits = await mesh.redis.hmget(record, STATE, OWNER, DURABLE, WAIT_ENTRY)
    if waits == NO_ENTRY:
        raise click.ClickException("the sequence is paused: resume it first (seqmesh seq resume)")
    if state in (WAITING, MOVING):
        raise click.ClickException("the sequence waits for a slot: it has no executor that it could leave")
    if state == PAGED:
        return None
    if state != LIVE:
        raise click.ClickException(f"no such live sequence: {WHICH}")
    if durable != b"1":
        raise click.ClickException(
            "only its model knows the sequence's state, so it cannot be moved: declare the state in the model's "
            "configuration (sequence_batching { state ... }), or name a sequence_recovery among its parameters"
        )
    return text_of(owner or b"")


def destination(known: list[ExecutorHolding], model: str, owner: str | None, to: str) -> str:
    """The id of the wished executor, "" for any other one. Raises click.ClickException if there is none."""
    serving = [
        one
        for one in known
        if one.member.usable and any(each.model == model and not each.closing for each in one.registration.models)
    ]
    names = ", ".join(sorted({one.registration.name for one in serving}))
    if not to:
        if all(one.registration.executor == owner for one in serving):
            raise click.ClickException(f"no other executor serves '{model}': start one, then move")
        return ""
    meant = matching(to, serving)
    if not meant:
        raise click.ClickException(f"no executor '{to}' serves '{model}'; it is served by: {names}")
    if len(meant) > 1:
        ids = ", ".join(one.registration.executor for one in meant)
        raise click.ClickException(f"several executors are called '{to}': name one by its id ({ids})")
    if meant[0].registration.executor == owner:
        raise click.ClickException(f"the sequence is on {owner} already")
    return meant[0].registration.executor


async def outcome(
    mesh: OperatedMesh, sequence: SequenceId, owner: str | None, to: str, starts: str, wish: bytes
) -> str:
    """Waits until the leader has removed the wish, and says what happened. Raises click.ClickException if the sequence
    did not move."""
    while await mesh.redis.xrange(starts, wish, wish):  # noqa: ASYNC110 - the wish lies in Redis
        await asyncio.sleep(POLL_S)
    state, now = await mesh.redis.hmget(mesh.keys.sequence(sequence).record, STATE, OWNER)
    if state == PAGED and to:
        raise click.ClickException(f"{NO_SLOT}; {to} had none free for it")
    if state == PAGED:
        return NO_SLOT
    if now is None:
        return "the sequence has ended meanwhile"
    if owner is None:
        return f"the sequence held no slot; it has one on {text_of(now)} now"
    if text_of(now) == owner:
        raise click.ClickException(
            f"the sequence is still on {owner}: it was never between two steps, or nobody else had a free slot; "
            "try again (seqmesh drain --list shows how much each executor holds)"
        )
    return f"moved from {owner} to {text_of(now)}"


command = operator_command(
    "move",
    HELP,
    run,
    [
        click.Argument(["model"], shell_complete=completion.models),
        click.Argument(["correlation_id"], metavar="ID", shell_complete=completion.ids),
        click.Option(["--to"], default="", metavar="EXECUTOR", help="Name or id of the executor that is to take it."),
        *NAMING,
    ],
)

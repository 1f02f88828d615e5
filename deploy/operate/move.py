"""`seqmesh seq move`: one sequence goes to another executor between two of its steps."""

from __future__ import annotations

import click

from deploy.operate.completion import ID, MODEL
from deploy.operate.operating import NAMING, found_mesh, named, told
from deploy.operate.settings import OperatorSettings, operator_command
from deploy.operate.texts import id_text
from shared.contract.ids import correlation_id_of

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
    sequence = named(model, correlation_id, version=version, string=string)
    async with found_mesh(settings, model) as mesh:
        with told(id_text(correlation_id_of(sequence))):
            click.echo(await mesh.sequences.move(sequence, to))


command = operator_command(
    "move",
    HELP,
    run,
    [
        MODEL,
        ID,
        click.Option(["--to"], default="", metavar="EXECUTOR", help="Name or id of the executor that is to take it."),
        *NAMING,
    ],
)

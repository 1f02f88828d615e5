"""The arguments of `seqmesh seq`, with what a shell offers for them: the models of the mesh, and ids of sequences.

A shell waits for it with each press of a key: a mesh that cannot be found, or takes long, offers nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import fields

import click

from deploy.operate.operating import OperatedMesh, found_mesh
from deploy.operate.settings import OperatorSettings
from shared.contract.ids import correlation_id_from, correlation_id_of
from shared.store.connections.redis_py import CONNECTION_LOST

PATIENCE_S = 2.0
TYPED = re.compile(r"(?!-)[\w.:@%+,=/-]+")
"""An id that a shell takes as it stands. Ids are clients' own: others might be commands in the line of an operator."""
IDS_MAX, LOOKED_AT_MAX = 100, 10_000
"""Ids that are offered, and sequences that are looked at for them."""


def models(context: click.Context, _: click.Parameter, begin: str) -> list[str]:
    """Models whose name begins like that."""

    async def found(mesh: OperatedMesh) -> list[str]:
        return sorted(name for name in await mesh.membership.models() if name.startswith(begin))

    return _offered(context, found)


def ids(context: click.Context, _: click.Parameter, begin: str) -> list[str]:
    """Open sequences of the model before it whose id begins like that, and names them when it is typed."""
    string = bool(context.params.get("string"))

    async def found(mesh: OperatedMesh) -> list[str]:
        model = str(context.params.get("model"))
        names, _ = await mesh.sequences.some(model, begin, found_max=IDS_MAX, looked_at_max=LOOKED_AT_MAX)
        found = [correlation_id_of(name) for name in names]
        return [
            text
            for one in found
            if TYPED.fullmatch(text := str(one)) and one == correlation_id_from(text, string=string)
        ]

    return _offered(context, found)


def _offered(context: click.Context, found: Callable[[OperatedMesh], Awaitable[list[str]]]) -> list[str]:
    given = {each.name: context.params.get(each.name) for each in fields(OperatorSettings)}
    settings = OperatorSettings(**{name: value for name, value in given.items() if value})

    async def asked() -> list[str]:
        async with asyncio.timeout(PATIENCE_S), found_mesh(settings) as mesh:
            return await found(mesh)

    try:
        return asyncio.run(asked())
    except (click.ClickException, TimeoutError, *CONNECTION_LOST):
        return []


MODEL = click.Argument(["model"], shell_complete=models)
ID = click.Argument(["correlation_id"], metavar="ID", shell_complete=ids)
IDS = click.Argument(["correlation_ids"], metavar="ID...", nargs=-1, required=True, shell_complete=ids)

"""What both demos ask of a mesh: where it speaks gRPC, and which executor holds which sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import click

from deploy.demo.local_mesh import LocalMesh
from deploy.demo.screen import Screen, ViewT
from deploy.local.launcher import MeshState
from seqmesh_client import AsyncClient, SeqmeshError

OWNER_INTERVAL_S = 0.2


def grpc_address(mesh: MeshState) -> str:
    """Where the mesh's first gateway speaks gRPC."""
    gateway = next(child for child in mesh.children if child.service == "gateway")
    return f"{mesh.host}:{gateway.grpc_port}"


@asynccontextmanager
async def client_of(url: str) -> AsyncGenerator[AsyncClient]:
    """A client of the gateway at that address, within the block. Raises ClickException if nobody listens there, and for
    every error of the client."""
    host, _, port = url.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host.strip("[]"), port)
        writer.close()
        async with AsyncClient([url]) as client:
            yield client
    except SeqmeshError as failure:
        raise click.ClickException(f"{url}: {failure}") from failure
    except OSError as failure:
        raise click.ClickException(f"no answer from {url}: {failure}") from failure


async def show_owners(mesh: LocalMesh | None, ids: Sequence[str], screen: Screen[ViewT]) -> None:
    """Keeps the screen's owners as they are in the mesh, where that can be known."""
    while mesh is not None:
        for view, owner in zip(screen.views, await mesh.owners(ids), strict=True):
            # A sequence without an owner (over, or being taken over) keeps the last owner's name on the screen.
            view.owner = owner or view.owner
        await asyncio.sleep(OWNER_INTERVAL_S)

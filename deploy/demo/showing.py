"""What both demos do with a mesh: reach a gateway, show which executor holds which sequence, kill one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import click
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from deploy.demo.local_mesh import LocalMesh
from deploy.demo.screen import Screen, ViewT
from seqmesh_client import AsyncClient, SeqmeshError
from shared.process.addresses import host_and_port
from shared.store.connections.redis_py import REDIS_LOST

OWNER_INTERVAL_S = 0.2
ANSWER_S = 5.0
MODEL_TIMEOUT_S = 60.0
MODEL_INTERVAL_S = 0.5
NOT_FOUND = "StatusCode.NOT_FOUND"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS
"""How a client of HTTP/2, and so of gRPC, begins (RFC 9113, 3.4): at last a frame of settings, the server's first."""


@asynccontextmanager
async def client_of(url: str) -> AsyncGenerator[AsyncClient]:
    """A client of the gateway at that address, within the block. Raises ClickException if nobody listens there, or
    speaks gRPC, and for every error of the client."""
    try:
        async with asyncio.timeout(ANSWER_S):
            speaks = await speaks_grpc(url)
    except (OSError, UnicodeError) as failure:  # also one of the time, and of a name that no host can have
        raise click.ClickException(f"no answer from {url}: {failure}") from failure
    if not speaks:
        raise click.ClickException(
            f"{url} does not speak gRPC without TLS: --url names the gRPC port of a gateway that does, and --private "
            "starts a mesh with one"
        )
    try:
        async with AsyncClient([url]) as client:
            yield client
    except SeqmeshError as failure:
        raise click.ClickException(f"{url}: {failure}") from failure


async def speaks_grpc(url: str) -> bool:
    """Whether who listens there begins as gRPC does. Raises OSError if nobody does."""
    reader, writer = await asyncio.open_connection(*host_and_port(url))
    try:
        writer.write(GREETING)
        return (await reader.read(len(SETTINGS)))[3:4] == SETTINGS[3:4]
    finally:
        writer.close()


async def await_model(url: str, model: str) -> None:
    """Waits until an executor behind that gateway serves the model, and says so. Raises click.ClickException when that
    takes too long, or the gateway knows no such model."""
    deadline, said = time.monotonic() + MODEL_TIMEOUT_S, False
    async with InferenceServerClient(url) as gateway:
        while problem := await unavailability(gateway, model):
            if time.monotonic() >= deadline:
                raise click.ClickException(f"{url}: {problem}; `seqmesh doctor` and `seqmesh drain --list` tell why")
            if not said:
                said = True
                click.echo(f"waiting, at most {MODEL_TIMEOUT_S:.0f} s: {problem}")
            await asyncio.sleep(MODEL_INTERVAL_S)


async def unavailability(gateway: Any, model: str) -> str:
    """Why a gateway has nobody to serve a model at the moment; "" if it has. Raises click.ClickException if it has no
    such model."""
    try:
        await gateway.get_model_metadata(model, client_timeout=ANSWER_S)
    except InferenceServerException as refused:
        if refused.status() == NOT_FOUND:
            raise click.ClickException(f"{refused.message()}: a mesh with the sample models has it") from refused
        return str(refused.message())
    return ""


async def show_owners(mesh: LocalMesh | None, ids: Sequence[str], screen: Screen[ViewT]) -> None:
    """Keeps the screen's owners as they are in the mesh, where that can be known."""
    while mesh is not None:
        # Nothing depends on what is shown, and the steps tell whether Redis stays away.
        with suppress(*REDIS_LOST):
            for view, owner in zip(screen.views, await mesh.owners(ids), strict=True):
                # A sequence without an owner (over, or being taken over) keeps the last owner's name on the screen.
                view.owner = owner or view.owner
        await asyncio.sleep(OWNER_INTERVAL_S)


def numbered(noun: str, held: Sequence[int]) -> str:
    """Sequences by their numbers, counted from 1: `no text`, `text 3`, `texts 1, 4`."""
    numbers = ", ".join(str(index + 1) for index in held)
    return f"no {noun}" if not held else f"{noun}{'' if len(held) == 1 else 's'} {numbers}"

"""Who may share a port: gateways of one mesh, and nobody else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local.embedded import free_port
from gateway.ports import sharing as module
from gateway.ports.listening import listen
from gateway.ports.sharing import SharedPorts, sharing
from shared.contract.errors import UnavailableError

HOST = "127.0.0.1"
SOON_S = 60.0


@pytest.fixture
def ports() -> SharedPorts:
    return SharedPorts(HOST, free_port(), free_port(), "redis://127.0.0.1:6379/0 seqmesh")


async def test_gateways_of_one_mesh_share_and_the_last_one_leaves_nothing(ports: SharedPorts, tmp_path: Path) -> None:
    async with sharing(ports, tmp_path) as first:
        first.opened()
        (first.folder / "regions").mkdir()
        async with sharing(ports, tmp_path) as second:
            assert first.folder == second.folder
            second.opened()
        assert (first.folder / "regions").is_dir()

    assert [] == list(tmp_path.iterdir())


OTHERS: list[Callable[[SharedPorts], SharedPorts]] = [
    lambda ports: replace(ports, mesh="redis://127.0.0.1:6379/1 seqmesh"),
    lambda ports: replace(ports, grpc_port=ports.grpc_port + 1),
]


@pytest.mark.parametrize("other", OTHERS, ids=["mesh", "gRPC port"])
async def test_another_mesh_or_another_grpc_port_is_refused(
    ports: SharedPorts, tmp_path: Path, other: Callable[[SharedPorts], SharedPorts]
) -> None:
    """Otherwise each would get some of the other's requests."""
    async with sharing(ports, tmp_path) as first:
        first.opened()
        with pytest.raises(UnavailableError, match="requests would be mixed up") as refused:
            await entered(other(ports), tmp_path)
        assert ports.text in str(refused.value)
        assert other(ports).text in str(refused.value)

    async with sharing(other(ports), tmp_path):
        pass


async def entered(ports: SharedPorts, folders: Path) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(sharing(ports, folders))


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", ["http_port", "grpc_port"])
async def test_a_program_that_listens_already_is_refused_even_if_it_shares(
    ports: SharedPorts, tmp_path: Path, name: str, *, is_shared: bool
) -> None:
    """The system would let them share: both are of one user. gRPC servers share unless told otherwise."""
    port = getattr(ports, name)
    with (
        listen(HOST, port, is_shared=is_shared),
        pytest.raises(UnavailableError, match=f"cannot share {HOST}:{port}.*something else listens there"),
    ):
        await entered(ports, tmp_path)
    assert [] == list(tmp_path.iterdir())


async def test_a_gateway_on_every_interface_is_seen_by_one_on_a_single_one(ports: SharedPorts, tmp_path: Path) -> None:
    every = replace(ports, host="0.0.0.0")
    async with sharing(every, tmp_path) as first:
        with listen(every.host, every.http_port, is_shared=True):
            first.opened()
            with pytest.raises(UnavailableError, match="something else listens there"):
                await entered(ports, tmp_path)


async def test_what_killed_gateways_left_is_cleared(ports: SharedPorts, tmp_path: Path) -> None:
    left = tmp_path / ports.name
    (left / "regions").mkdir(parents=True)
    (left / "mesh").write_text("a longer text than that of this mesh, which nobody who lives has written there")

    async with sharing(ports, tmp_path) as first:
        first.opened()
        assert not (left / "regions").exists()
        async with sharing(ports, tmp_path):
            pass


async def test_gateways_start_one_after_the_other(
    ports: SharedPorts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is alone may find the port free; what another one does meanwhile must not change that."""
    async with sharing(ports, tmp_path) as first, asyncio.timeout(SOON_S):
        second = asyncio.create_task(entered(ports, tmp_path))
        await asyncio.sleep(10 * module.LOOK_S)
        assert not second.done()
        first.opened()
        await second

    monkeypatch.setattr(module, "WAIT_S", 0.05)
    async with sharing(ports, tmp_path):
        with pytest.raises(UnavailableError, match="has been starting"):
            await entered(ports, tmp_path)


async def test_many_may_come_and_go_at_once(ports: SharedPorts, tmp_path: Path) -> None:
    alive = 0

    async def live() -> None:
        nonlocal alive
        for _ in range(5):
            async with sharing(ports, tmp_path) as share:
                alive += 1
                assert ports.text == (share.folder / "mesh").read_text()
                share.opened()
                await asyncio.sleep(0)
                alive -= 1

    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(live())

    assert 0 == alive
    assert [] == list(tmp_path.iterdir())


async def test_a_folder_that_the_last_gateway_removes_before_it_is_locked_is_made_anew(
    ports: SharedPorts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def open_late(folder: Path, flags: int) -> int:
        monkeypatch.setattr(os, "open", opened)
        folder.rmdir()
        return opened(folder, flags)

    monkeypatch.setattr(os, "open", open_late)
    async with sharing(ports, tmp_path) as share:
        assert share.folder.is_dir()


async def test_a_file_in_the_place_of_the_folder_is_refused_at_once(ports: SharedPorts, tmp_path: Path) -> None:
    (tmp_path / ports.name).touch()
    with pytest.raises(UnavailableError, match="cannot be shared"):
        await entered(ports, tmp_path)


async def test_a_folder_of_somebody_else_is_refused(
    ports: SharedPorts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ports.name).mkdir()
    uid = os.geteuid()
    name = ports.name
    monkeypatch.setattr(SharedPorts, "name", name)
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)

    with pytest.raises(UnavailableError, match="it belongs to another user"):
        await entered(ports, tmp_path)

"""The launcher's door for its console."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from deploy.local.control import ControlError, ask_to_kill, control_served, killable_executors


async def test_an_executor_is_killed_by_its_name_and_a_refusal_says_why(tmp_path: Path) -> None:
    killed: list[str] = []

    def kill(name: str) -> str:
        if name != "executor-1":
            return f"there is no executor '{name}' in this mesh"
        killed.append(name)
        return ""

    path = tmp_path / "control.sock"
    async with control_served(path, ["executor-1"], kill):
        assert {"executor-1"} == await killable_executors(path)
        await ask_to_kill(path, "executor-1")
        with pytest.raises(ControlError, match="no executor 'redis'"):
            await ask_to_kill(path, "redis")

    assert ["executor-1"] == killed
    assert not path.exists()


async def test_what_is_no_request_harms_nobody(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with control_served(path, ["executor-1"], lambda _: "not to be called"):
        for sent in (b"\n", b"{}}\n", b'{"kill": 3}\n', b"x" * 100_000 + b"\n", b"\xff\n", b""):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(sent)
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()

        assert {"executor-1"} == await killable_executors(path)


async def test_a_launcher_that_is_gone_is_an_error_with_words(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="the launcher does not answer"):
        await ask_to_kill(tmp_path / "control.sock", "executor-1")

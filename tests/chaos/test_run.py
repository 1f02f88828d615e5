"""A run that is told to stop ends in order, and keeps what is known."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from deploy.chaos.load import Clock, Score
from deploy.chaos.run import played


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_run_that_is_told_to_stop_gives_what_is_known(by: signal.Signals) -> None:
    """By Ctrl-C, a supervisor, or a terminal that is closed."""
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)

    async def direct() -> None:
        os.kill(os.getpid(), by)
        await asyncio.Event().wait()

    load = SimpleNamespace(clock=Clock(), score=Score(), stop=Mock())
    plan = SimpleNamespace(clients=0, steps=1, faults=(), minutes=1.0)
    mesh = SimpleNamespace(refused_commits=AsyncMock(return_value=7))
    director: Any = SimpleNamespace(load=load, plan=plan, mesh=mesh, direct=direct, failures=[], strikes=[])
    try:
        assert 7 == (await played(director)).refused_commits
    finally:
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(one)
        signal.signal(signal.SIGHUP, before)
    load.stop.assert_called_once_with()

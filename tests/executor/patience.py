"""Waits for what must come about, however busy the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable

import pytest

PATIENCE_S = 60.0


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Returns when it is so. condition: may have to be awaited; what: should be so"""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (found := condition()) or (isawaitable(found) and not await found):
                await asyncio.sleep(0.002)
    except TimeoutError:
        pytest.fail(f"not seen: {what}")

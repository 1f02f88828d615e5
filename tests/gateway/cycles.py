"""Whether what a gateway has refused goes by itself, or waits in a cycle for the collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

SOON_S = 60.0


@asynccontextmanager
async def nothing_stays(*kinds: type) -> AsyncGenerator[None]:
    """Runs the block without the collector; afterwards waits until no object of these kinds is left that was not there
    before. Raises TimeoutError."""
    gc.collect()
    gc.disable()
    # By its type: isinstance() also asks for `__class__`, and a proxy (torch.distributed has one) may warn at that.
    # Other tests' are kept here, so that no new one has the id of one of them.
    others = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    known = set(map(id, others))
    try:
        yield
        async with asyncio.timeout(SOON_S):
            while any(issubclass(type(one), kinds) and id(one) not in known for one in gc.get_objects()):
                await asyncio.sleep(0.05)
    finally:
        gc.enable()

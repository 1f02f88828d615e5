"""One address for several gateways, as a node of Kubernetes has for a Service: a connection goes to an endpoint.

A connection that is open stays where it is, whatever becomes of the endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

CHUNK = 1 << 16


class ServiceAddress:
    """endpoints: host:port of each gateway. made: how many connections each has got"""

    def __init__(self, chance: random.Random) -> None:
        self.endpoints: Sequence[str] = ()
        self.made: Counter[str] = Counter()
        self.url = ""
        self._chance = chance
        self._carried: set[asyncio.Task[None]] = set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries one connection. Where the endpoint refuses it, the client's is reset, as by the node."""
        endpoint = self._chance.choice(self.endpoints)
        self.made[endpoint] += 1
        host, port = endpoint.rsplit(":", 1)
        try:
            behind = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        carried = asyncio.gather(carry(reader, behind[1]), carry(behind[0], writer))
        self._carried.add(task := asyncio.ensure_future(ended(carried, writer, behind[1])))
        task.add_done_callback(self._carried.discard)

    async def close(self) -> None:
        """Ends the connections that are open."""
        for task in self._carried:
            task.cancel()
        await asyncio.gather(*self._carried, return_exceptions=True)


async def ended(carried: asyncio.Future[tuple[None, None]], *writers: asyncio.StreamWriter) -> None:
    """Waits for both directions of a connection, and leaves nothing of it open."""
    try:
        await carried
    finally:
        for writer in writers:
            writer.transport.abort()


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction of a connection, until its end."""
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def service_address(chance: random.Random) -> AsyncGenerator[ServiceAddress]:
    """An address of this machine, without endpoints yet."""
    address = ServiceAddress(chance)
    server = await asyncio.start_server(address.connected, "127.0.0.1", 0)
    address.url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield address
    finally:
        server.close()
        await server.wait_closed()
        await address.close()
        # An aborted transport closes its socket in the next turn of the loop.
        await asyncio.sleep(0)

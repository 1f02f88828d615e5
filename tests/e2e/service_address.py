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
        self._open: set[asyncio.StreamWriter] = set()

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
        ends = {writer, behind[1]}
        self._open |= ends
        async with asyncio.TaskGroup() as group:
            group.create_task(carry(reader, behind[1]))
            group.create_task(carry(behind[0], writer))
        self._open -= ends

    async def cut_all(self) -> None:
        """Ends the connections that are open."""
        for writer in self._open:
            writer.transport.abort()
        while self._open:
            await asyncio.sleep(0)


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
        await address.cut_all()

"""The network between processes and the store, and what goes wrong in it.

A connection carries bytes in order, each way with a delay of its own. It may break before what was sent arrives (it is
not carried out), after that and before the answer arrives (it is carried out, and nobody hears of it), or in between.
A process that is cut off sends and hears nothing; when it is reached again what lay in its connections arrives late, or
is lost with them. So it is with a server that is silent. What a process sent before it closed a connection, or died,
still arrives.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.simulation.connections import Dial, Server, Session, TwinTransport
from tests.simulation.virtual import RUNNING, SimulatedProcess

CONNECT_TIMEOUT_S = 5.0


@dataclass
class Trouble:
    """How likely it is that a message is lost with its connection, on its way to the store or back."""

    request_lost: float = 0.0
    reply_lost: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.5


class Network:
    """Every connection of a run. servers: by the home that they are of a Cluster; "" for an only one"""

    def __init__(self, servers: Mapping[str, Server], chance: random.Random) -> None:
        self.servers = servers
        self.chance = chance
        self.trouble = Trouble()
        self.cut: set[SimulatedProcess] = set()
        self._wires: list[NetworkWire] = []

    def dialler(self, home: str) -> Dial:
        """Makes connections for the process that runs now."""
        process, server = RUNNING.get(), self.servers[home]
        assert process is not None

        async def dial(transport: TwinTransport) -> NetworkWire:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.sleep(self.delay_s())
                while self.is_cut(process, server):
                    await asyncio.sleep(0.1)
            if not server.is_up:
                raise ConnectionRefusedError(111, "connection refused")
            wire = NetworkWire(self, process, server, transport)
            self._wires.append(wire)
            return wire

        return dial

    def is_cut(self, process: SimulatedProcess, server: Server) -> bool:
        """Whether nothing passes between the two now."""
        return process in self.cut or server.is_silent

    def delay_s(self) -> float:
        """How long a message takes now."""
        chance = self.chance
        slow = chance.random() < self.trouble.slow
        return chance.uniform(0.0002, 0.002) + (chance.random() * self.trouble.slow_s if slow else 0.0)

    def drop(self, wire: NetworkWire) -> None:
        """A connection is over."""
        if wire in self._wires:
            self._wires.remove(wire)

    def break_all(self, process: SimulatedProcess | None = None, server: Server | None = None) -> None:
        """Breaks the connections of a process, to a server, or all."""
        for wire in [wire for wire in self._wires if process in (None, wire.process) and server in (None, wire.server)]:
            wire.break_()

    def isolate(self, process: SimulatedProcess) -> None:
        """From now on it is cut off."""
        self.cut.add(process)

    def heal(self, process: SimulatedProcess) -> None:
        """It can be reached again. Some of its connections have survived."""
        if process not in self.cut:
            return
        self.cut.discard(process)
        self._reach([wire for wire in self._wires if wire.process is process])

    def silence(self, server: Server, *, is_silent: bool) -> None:
        """It falls silent, or answers again. Some connections have survived."""
        server.is_silent = is_silent
        if not is_silent:
            self._reach([wire for wire in self._wires if wire.server is server])

    def _reach(self, wires: Sequence[NetworkWire]) -> None:
        for wire in wires:
            if self.chance.random() < 0.5:
                wire.break_()
            else:
                wire.flush()

    def abandon(self, process: SimulatedProcess) -> None:
        """It has died: what it had sent still arrives, then its connections are closed."""
        for wire in [wire for wire in self._wires if wire.process is process]:
            wire.close()

    def stop(self, server: Server | None = None) -> None:
        """A server ends, or all: every connection to it breaks, and none is made before it is up again."""
        for one in [server] if server else self.servers.values():
            one.is_up = False
        self.break_all(server=server)


class NetworkWire:
    """One connection (a `connections.Wire`)."""

    def __init__(self, network: Network, process: SimulatedProcess, server: Server, transport: TwinTransport) -> None:
        self.process = process
        self.server = server
        self._network = network
        self._transport = transport
        self._session = Session(server, self._answer)
        self._is_broken = False
        self._is_closed = False
        self._arrives_at = [0.0, 0.0]
        self._held: list[Callable[[], None]] = []

    def send(self, data: bytes) -> None:
        """From the process to the store."""
        if self._is_broken or self._is_closed:
            raise ConnectionResetError(104, "connection reset by peer")
        network = self._network
        if network.chance.random() < network.trouble.request_lost:
            self._later(0, self.break_)
            return
        self._carry(0, lambda: self._session.receive(data))

    def close(self) -> None:
        """The process closes it; what it has sent is on its way."""
        if not self._is_closed:
            self._is_closed = True
            self._carry(0, self._end)

    def break_(self) -> None:
        """Both ends find it broken; what was on its way is lost."""
        if self._is_broken:
            return
        self._is_broken = True
        self._end()
        if not self._is_closed:
            self._transport.lost(ConnectionResetError(104, "connection reset by peer"))

    def flush(self) -> None:
        """What was held back arrives now, if nothing else holds it back."""
        if self._network.is_cut(self.process, self.server):
            return
        held, self._held = self._held, []
        for arrive in held:
            arrive()

    def _answer(self, data: bytes) -> None:
        network = self._network
        if network.chance.random() < network.trouble.reply_lost:
            self._later(1, self.break_)
            return
        self._carry(1, lambda: self._hear(data))

    def _hear(self, data: bytes) -> None:
        if not self._is_closed:
            self._transport.received(data)

    def _carry(self, direction: int, arrive: Callable[[], None]) -> None:
        """Lets something arrive after what was sent before it, and not while the process is cut off."""

        def at_the_other_end() -> None:
            if self._is_broken:
                return
            if self._held or self._network.is_cut(self.process, self.server):
                self._held.append(arrive)
            else:
                arrive()

        self._later(direction, at_the_other_end)

    def _later(self, direction: int, callback: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        # Strictly after the one before: timers of the same moment have no order.
        at = max(loop.time() + self._network.delay_s(), self._arrives_at[direction] + 1e-6)
        self._arrives_at[direction] = at
        loop.call_at(at, callback, context=OUTSIDE)

    def _end(self) -> None:
        self._session.close()
        self._network.drop(self)


OUTSIDE = contextvars.Context()
"""The network's own context: it belongs to no process."""

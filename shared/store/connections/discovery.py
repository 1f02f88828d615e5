"""Asks several servers which one is the primary now, for each new connection.

All are asked at once: one that is dead, silent or faulty costs nothing while the others answer. The majority decides;
between equal votes, the newer configuration does. So a server that was cut off is outvoted. Whether the named server
really is a primary is checked after connecting (`shared.store.connections.redis_client`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from shared.process.lifecycle import end

PATIENCE_S = 1.0
"""How long to wait for further answers once there is one, and no majority."""


class Primary(NamedTuple):
    """An answer. epoch: of its configuration, higher after each failover; 0 where answers have none"""

    host: str
    port: int
    epoch: int


class NoAnswerError(Exception):
    """A server names no usable primary; the message says why."""


class Discovery:
    """Those who know where one primary is.

    nobody       begins the error's text when none of them tells
    connections  makes a connection to each, not yet connected
    question     the command that is sent to each
    read         the primary that a reply names; also gets the connection. Raises NoAnswerError
    found        host and port of the primary that they named last; None before
    """

    def __init__(
        self,
        nobody: str,
        connections: Callable[[], Iterable[Any]],
        question: Sequence[str],
        read: Callable[[Any, Any], Primary],
    ) -> None:
        self._nobody = nobody
        self._connections = connections
        self._question = question
        self._read = read
        self.found: tuple[str, int] | None = None

    async def primary(self) -> tuple[str, int]:
        """The primary's host and port. Raises redis-py's ConnectionError, with everybody's reason, if none names it."""
        asked = [asyncio.create_task(self._ask(made), name="discovery") for made in self._connections()]
        votes: Counter[tuple[str, int]] = Counter()
        epochs: dict[tuple[str, int], int] = {}
        reasons: list[str] = []
        running = set(asked)
        try:
            while running and not _is_majority(votes, of=len(asked)):
                # Without any vote there is nothing to decide by; each connection has a time limit of its own.
                timeout_s = PATIENCE_S if votes else None
                done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for answer in done:
                    if isinstance(found := answer.result(), str):
                        reasons.append(found)
                        continue
                    address = (found.host, found.port)
                    votes[address] += 1
                    epochs[address] = max(found.epoch, epochs.get(address, 0))
        finally:
            await end(asked)
        if not votes:
            raise RedisConnectionError(f"{self._nobody}: {'; '.join(sorted(reasons))}")
        self.found = max(votes, key=lambda address: (votes[address], epochs[address]))
        return self.found

    async def _ask(self, connection: Any) -> Primary | str:
        """The answer over one connection, or the reason why there is none."""
        try:
            await connection.connect()
            await connection.send_command(*self._question)
            return self._read(await connection.read_response(), connection)
        except (RedisError, OSError, NoAnswerError) as problem:
            return f"{connection.host}:{connection.port}: {problem}"
        finally:
            await connection.disconnect(nowait=True)


def _is_majority(votes: Counter[tuple[str, int]], *, of: int) -> bool:
    return any(count * 2 > of for count in votes.values())

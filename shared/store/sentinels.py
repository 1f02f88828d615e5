"""Asks Sentinels which server is the primary now, for each new connection.

All Sentinels are asked at once: one that is dead, silent or faulty costs nothing while the others answer. The majority
decides; between equal votes, the newer configuration does. So a Sentinel that was cut off, or watches other servers, is
outvoted. Whether the named server really is a primary is checked after connecting (`shared.store.redis_client`).

redis-py's own Sentinel client asks one after the other, believes the first, and fails if that one answers nonsense.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from shared.process.lifecycle import end

PATIENCE_S = 1.0
"""How long to wait for further answers once there is one, and no majority."""
DOWN = {"s_down", "o_down"}
"""Flags of a primary that is about to be replaced."""


class Primary(NamedTuple):
    """A Sentinel's answer. epoch: of its configuration, higher after each failover"""

    host: str
    port: int
    epoch: int


class NoAnswerError(Exception):
    """A Sentinel names no usable primary; the message says why."""


class Sentinels:
    """The Sentinels of one service (a primary with its replicas, under the name that the Sentinels have for them).

    connections  for each Sentinel, a function that makes a connection to it, not yet connected
    """

    def __init__(self, service: str, connections: Sequence[Callable[[], Any]]) -> None:
        self._service = service
        self._connections = connections

    async def primary(self) -> tuple[str, int]:
        """The primary's host and port. Raises redis-py's ConnectionError, with every Sentinel's reason, if none names
        it.
        """
        asked = [asyncio.create_task(self._ask(make()), name="sentinel") for make in self._connections]
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
            raise RedisConnectionError(
                f"no Sentinel tells of a primary '{self._service}': {'; '.join(sorted(reasons))}"
            )
        return max(votes, key=lambda address: (votes[address], epochs[address]))

    async def _ask(self, connection: Any) -> Primary | str:
        """One Sentinel's answer, or the reason why there is none."""
        try:
            await connection.connect()
            await connection.send_command("SENTINEL", "MASTER", self._service)
            return primary_of(await connection.read_response())
        except (RedisError, OSError, NoAnswerError) as problem:
            return f"{connection.host}:{connection.port}: {problem}"
        finally:
            await connection.disconnect(nowait=True)


def _is_majority(votes: Counter[tuple[str, int]], *, of: int) -> bool:
    return any(count * 2 > of for count in votes.values())


def primary_of(reply: Any) -> Primary:
    """The reply to SENTINEL MASTER. Raises NoAnswerError."""
    try:
        fields = dict(zip(map(bytes.decode, reply[::2]), map(bytes.decode, reply[1::2]), strict=True))
        primary = Primary(fields["ip"], int(fields["port"]), int(fields["config-epoch"]))
        flags = set(fields["flags"].split(","))
    except (TypeError, ValueError, KeyError) as nonsense:
        raise NoAnswerError("its answer is not a Sentinel's") from nonsense
    if not primary.host or not 0 < primary.port < 1 << 16:
        raise NoAnswerError("its answer names no server")
    if "master" not in flags or flags & DOWN:
        raise NoAnswerError(f"{primary.host}:{primary.port} is down ({fields['flags']})")
    return primary

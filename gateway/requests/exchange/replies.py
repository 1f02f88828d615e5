"""The requests that wait for a reply, by token, and the one blocking read that brings the replies.

This gateway has one reply stream in each shard. The stream is made before the first request is sent, and a heartbeat
renews its TTL. Scripts append only to a stream that exists, so replies to a dead gateway take no memory. Entries that
were read are trimmed. A reply whose client has left is dropped.

A stream's TTL may run out while the gateway lives: this process was frozen, or Redis lost its data. Replies were then
lost, and the requests that waited for them fail with an error that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from gateway.requests.exchange.named_callers import NamedCallers
from gateway.requests.waiting import PendingRequest
from shared.contract.errors import MeshError, Reason, SequenceError, UnavailableError
from shared.contract.ids import GatewayId, ShardId, entry_key
from shared.contract.limits import REPLY_STREAM_TTL_MS
from shared.process import logs
from shared.store.commands import Redis
from shared.store.connections.homes import servers, tag_of, without_lost
from shared.store.connections.link import Link, streams_read
from shared.store.connections.redis_client import pause_s
from shared.store.connections.redis_py import CONNECTION_LOST, LOST_OR_REFUSED
from shared.store.connections.server_run import ServerRun
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of
from shared.store.vital import vital

HEARTBEAT_S = 5.0
"""Far below the streams' TTL, so that one lost beat does no harm."""
CLOSE_S = 1.0
READ_BLOCK_MS = 2_000
"""How long a read waits for entries. A stream that was made again meanwhile is read only with the next read."""
READ_BYTES = 16 << 20
"""What a read of a stream may bring, if its entries are as large as those of the last read. An entry holds a whole
batch's replies; with models whose answers are large, the replies that gather meanwhile would fill this process."""
BEGINNING = b"0-0"
TRIM_AFTER_BYTES = 4 << 20
"""The entries that were read are trimmed, together with the next read, when they are this large. Until then Redis
holds them."""
ENTRY_BYTES = 64 << 10
"""Added to each entry's size in that sum, so that small entries are trimmed at the latest when they are 64."""
READ_ENTRIES_MAX = READ_BYTES // ENTRY_BYTES
TURNS_TO_CALLERS = 3
"""Turns of the event loop that an answer takes from here to its connection. The next read is sent after them: where
cores are few, what is written to Redis runs Redis, and the answers would wait for that."""

DELIVERED_AT_ONCE = 256
"""Replies in one turn of the event loop. An entry of a decoupled model holds thousands, at 10 us each."""


class Replies:
    """The requests that wait for a reply, and the tasks that read replies and keep the reply streams alive."""

    def __init__(self, redis: Redis, keys: Keyspace, gateway: GatewayId, *, where: str = "") -> None:
        self._redis = redis
        self._keys = keys
        self.gateway = gateway
        self._where = where
        self._streams = {shard: keys.replies(shard, gateway) for shard in keys.shards}
        self._positions: dict[bytes, bytes] = {}
        self._untrimmed: dict[bytes, int] = {}
        self._entries_max = dict.fromkeys(map(str.encode, self._streams.values()), READ_ENTRIES_MAX)
        self._waiting: dict[str, PendingRequest] = {}
        self._tokens = itertools.count(1)
        self._named = NamedCallers(redis, keys, gateway)
        self.has_given_up = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def unanswered(self) -> list[PendingRequest]:
        return list(self._waiting.values())

    def token(self) -> str:
        """A token that this gateway has not used before."""
        return format(next(self._tokens), "x")

    def expect(self, pending: PendingRequest) -> None:
        """Begins to wait for the request's reply. `forget` follows when its future ends, however it ends."""
        self._waiting[pending.token] = pending

    def rename(self, pending: PendingRequest) -> None:
        """Gives the request a new token. Only for a request that Redis has refused under the old one."""
        self.forget(pending)
        pending.token = self.token()
        self.expect(pending)

    def forget(self, pending: PendingRequest) -> None:
        """Nobody waits for the request's reply any more."""
        self._waiting.pop(pending.token, None)

    def deliver(self, token: str, raw: bytes, key: str) -> None:
        """Hands a reply to its request, or drops it when nobody waits for it. key: the Redis key it was read from."""
        pending = self._waiting.get(token)
        if pending is not None and not pending.answered(raw, key):
            del self._waiting[token]

    def give_up(self, cause: str) -> None:
        """Fails every waiting request: the outcome of what was sent is not known. cause: begins the error's text."""
        self.has_given_up = True
        for pending in self.unanswered:
            pending.failed(unknown_outcome(pending, cause) if pending.sent else never_sent(cause))

    async def open(self, run: ServerRun) -> None:
        """Makes the reply streams. Must end before the first request is sent.

        run  of the connections: none opens to a node of a Cluster that is away before `reopen` has made its streams
        """
        homes = servers(self._redis, self._keys)
        made = await without_lost(self._create(shards, redis) for redis, shards in homes)
        away = [shards for (_, shards), lost in zip(homes, made, strict=True) if lost is not None]
        for stream in (self._streams[shard] for shards in away for shard in shards):
            self._positions[stream.encode()] = BEGINNING
            run.hold_off(tag_of(stream))
        await self._beat()

    async def reopen(self, redis: Redis, shards: Sequence[ShardId], lost: set[ShardId]) -> None:
        """After a restart of the server that has these shards: makes the streams that it has lost. A stream of which it
        has lost the end is read from its beginning.

        lost  their shards are added; what an attempt that failed has added, and perhaps made again, is made anew
        """
        async with redis.pipeline(transaction=False) as pipe:
            for shard in shards:
                pipe.pexpire(self._streams[shard], REPLY_STREAM_TTL_MS)
            lost.update(shard for shard, exists in zip(shards, await pipe.execute(), strict=True) if not exists)
        await self._create(sorted(lost.intersection(shards)), redis)
        async with redis.pipeline(transaction=False) as pipe:
            for shard in shards:
                pipe.xrevrange(self._streams[shard], count=1)
            for shard, newest in zip(shards, await pipe.execute(), strict=True):
                stream = self._streams[shard].encode()
                # If the server's clock is behind, its next entries have ids that were read before.
                if not newest or entry_key(newest[0][0]) < entry_key(self._positions[stream]):
                    self._positions[stream] = BEGINNING

    async def close(self) -> None:
        """Removes this gateway's keys. Where Redis does not answer within a second, their TTL removes them: by now the
        grace of a stop is over.
        """
        with contextlib.suppress(*CONNECTION_LOST):
            async with asyncio.timeout(CLOSE_S):
                await self._redis.unlink(self._keys.gateway(self.gateway))
                for stream in self._streams.values():
                    await self._redis.unlink(stream)

    async def run(self) -> None:
        """Reads replies until it is cancelled, of each server by itself."""
        async with asyncio.TaskGroup() as group:
            for streams in self._redis.apart(self._streams.values()):
                group.create_task(self._follow([stream.encode() for stream in streams]), name="reply streams")

    async def _follow(self, streams: Sequence[bytes]) -> None:
        failures = 0
        link = Link(self._redis.home(streams[0].decode()))
        try:
            while True:
                try:
                    await link.connect()
                    await self._read(link, streams)
                    failures = 0
                    for _ in range(TURNS_TO_CALLERS):
                        await asyncio.sleep(0)
                except LOST_OR_REFUSED as lost:
                    failures += 1
                    if failures == 1:
                        logs.warning("reply stream lost, reconnecting", error=str(lost))
                    await asyncio.sleep(pause_s(failures))
        finally:
            await link.close()

    async def heartbeat(self) -> None:
        """Renews the TTLs until it is cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                gone = await self._beat()
                if gone:
                    await self._recover(gone)
                for pending in await self._named.removed(self.unanswered, HEARTBEAT_S):
                    pending.failed(removed(pending))
            except LOST_OR_REFUSED as lost:
                logs.warning("heartbeat not written", error=str(lost))

    async def _read(self, link: Link, streams: Sequence[bytes]) -> None:
        """One blocking read of streams that one server has."""
        # Trims travel with the read, so they cost no round trip of their own.
        commands: list[Sequence[Any]] = [
            ("XTRIM", stream, "MINID", _after(self._positions[stream]))
            for stream in streams
            if self._untrimmed.get(stream, 0) >= TRIM_AFTER_BYTES
        ]
        for command in commands:
            self._untrimmed[command[1]] = 0
        positions = [self._positions[stream] for stream in streams]
        count = min(self._entries_max[stream] for stream in streams)
        commands.append(("XREAD", "COUNT", count, "BLOCK", READ_BLOCK_MS, "STREAMS", *streams, *positions))
        *_, news = await link.exchange(commands, blocking_s=READ_BLOCK_MS / 1000)
        if isinstance(news, Exception):
            raise news
        delivered = 0
        self._entries_max.update(dict.fromkeys(streams, READ_ENTRIES_MAX))
        for stream, entries in streams_read(news):
            self._positions[stream] = entries[-1][0]
            size = sum([ENTRY_BYTES + sum(map(len, fields)) for _, fields in entries])
            self._untrimmed[stream] = self._untrimmed.get(stream, 0) + size
            self._entries_max[stream] = min(READ_ENTRIES_MAX, max(1, READ_BYTES * len(entries) // size))
            key = stream.decode()
            for _, fields in entries:
                for index in range(0, len(fields), 2):
                    self.deliver(text_of(fields[index]), fields[index + 1], key)
                    delivered += 1
                    if not delivered % DELIVERED_AT_ONCE:
                        await asyncio.sleep(0)

    async def _create(self, shards: Sequence[ShardId], redis: Redis) -> None:
        for shard in shards:
            stream = self._streams[shard]
            # An entry that nobody waits for: there is no other way to make a stream without a group.
            entry, _ = await redis.eval(*vital(("XADD", stream, "*", "", ""), ("PEXPIRE", stream, REPLY_STREAM_TTL_MS)))
            self._positions[stream.encode()] = entry

    async def _beat(self) -> list[ShardId]:
        """Renews every TTL. Returns the shards whose stream is gone."""
        shards = list(self._streams)
        async with self._redis.pipeline(transaction=False) as pipe:
            for shard in shards:
                pipe.pexpire(self._streams[shard], REPLY_STREAM_TTL_MS)
            for stream, size in self._untrimmed.items():
                if size:
                    pipe.xtrim(stream, minid=_after(self._positions[stream]), approximate=False)
            pipe.eval(*vital(("SET", self._keys.gateway(self.gateway), self._where, "PX", REPLY_STREAM_TTL_MS)))
            self._untrimmed.clear()
            # `alive` also holds the replies to the trims, after those to the PEXPIREs: the `zip` below takes only the
            # first.
            *alive, shown = await pipe.execute(raise_on_error=False)
        if isinstance(shown, Exception):
            logs.warning("sign of life not written", error=str(shown))
        return [shard for shard, exists in zip(shards, alive, strict=False) if not exists]

    async def _recover(self, gone: Sequence[ShardId]) -> None:
        """Makes lost streams again, and tells the callers whose replies may have been lost with them."""
        logs.error("reply streams were lost, waiting callers are told", shards=len(gone), waiting=len(self))
        # Listed before the streams exist again: the reply of a request that is sent after that is not lost.
        lost = [pending for pending in self._waiting.values() if pending.sent and pending.shard in gone]
        try:
            await self._create(gone, self._redis)
        finally:
            # Also if the connection was lost: the next beat may find the streams again.
            for pending in lost:
                pending.failed(unknown_outcome(pending, "the gateway lost its replies"))


def never_sent(cause: str) -> UnavailableError:
    """The error of a request that no other process has heard of. cause: begins the error's text"""
    return UnavailableError(f"{cause} before the request was sent: send it again")


def unknown_outcome(pending: PendingRequest, cause: str) -> UnavailableError:
    """The error of a request that may or may not have been carried out. It says what the client can do about it."""
    if pending.admitted.sequence is None or pending.call.ended_run:
        return UnavailableError(f"{cause} while the request to model '{pending.call.model}' was open: send it again")
    remedy = (
        "send the step again with the same request id and sequence_step: it will not run twice"
        if pending.repeatable
        else "give every step a request id, or its number as parameter 'sequence_step', and it can be sent again safely"
    )
    return UnavailableError(
        f"{cause}: it is not known whether the step of sequence {pending.admitted.message.correlation_id} of model "
        f"'{pending.call.model}' was accepted; {remedy}"
    )


def removed(pending: PendingRequest) -> MeshError:
    """The error of a caller who waits for what was removed from Redis."""
    if pending.admitted.sequence is None:
        return unknown_outcome(pending, "the request was removed from Redis")
    return SequenceError(
        f"sequence {pending.admitted.message.correlation_id} of model '{pending.call.model}' was removed from Redis "
        "while the step was open: the next request must specify the START flag",
        Reason.LOST,
    )


def _after(entry: bytes) -> bytes:
    """The smallest entry id after this one."""
    milliseconds, number = entry_key(entry)
    return b"%d-%d" % (milliseconds, number + 1)

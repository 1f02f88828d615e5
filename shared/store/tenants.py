"""What the operator allows each tenant, in Redis: one hash, which gateways and schedulers read twice a second."""

from __future__ import annotations

import msgspec

from shared.contract.tenants import EVERY_OTHER, NO_TENANTS, TenantLimits, Tenants
from shared.process import logs
from shared.store.commands import Redis
from shared.store.intervals import at_intervals
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of, value_of

POLL_INTERVAL_S = 0.5
TOLD_MAX = 20
"""Tenants whose new limits one line of the log tells: there may be thousands."""


class StoredTenants:
    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        self._redis = redis
        self._keys = keys
        self._raw: dict[bytes, bytes] = {}
        self._read = NO_TENANTS

    async def read(self) -> Tenants:
        """The limits of all tenants: the same object while nothing has changed. Those that cannot be read are left
        out.
        """
        key, raw = self._keys.tenants, await self._redis.hgetall(self._keys.tenants)
        if raw != self._raw:
            named: dict[str, TenantLimits] = {}
            for field, encoded in raw.items():
                limits = value_of(key, encoded, _limits, field=text_of(field))
                if limits is not None:
                    named[text_of(field)] = limits
            self._raw, self._read = raw, Tenants(named)
        return self._read

    async def set(self, name: str, limits: TenantLimits) -> None:
        """Sets a tenant's limits, which were checked."""
        await self._redis.hset(self._keys.tenants, name, msgspec.json.encode(limits))

    async def remove(self, name: str) -> bool:
        """Takes a tenant's limits away. False if it had none."""
        return await self._redis.hdel(self._keys.tenants, name) == 1

    async def sequences(self) -> dict[str, int]:
        """How many sequences of each tenant with limits of its own are not over."""
        named, shards = sorted({*(await self.read()).named} - {EVERY_OTHER}), self._keys.shards
        pipe = self._redis.pipeline(transaction=False)
        for name in named:
            for shard in shards:
                pipe.scard(self._keys.tenant(shard, name))
        counts: list[int] = await pipe.execute()
        return {name: sum(counts[at * len(shards) : (at + 1) * len(shards)]) for at, name in enumerate(named)}


_decode_limits = msgspec.json.Decoder(TenantLimits).decode


def _limits(encoded: bytes) -> TenantLimits:
    limits = _decode_limits(encoded)
    if problem := limits.problem():
        raise ValueError(problem)
    return limits


class KnownTenants:
    """The limits of all tenants as one process knows them. now: as they were read last"""

    def __init__(self, stored: StoredTenants) -> None:
        self._stored = stored
        self.now = NO_TENANTS

    async def run(self) -> None:
        """Reads the limits now and again, for ever."""
        await at_intervals(POLL_INTERVAL_S, self.refresh, "tenants reading delayed", log=logs.debug, at_once=True)

    async def refresh(self) -> None:
        """Reads the limits. Raises what redis-py raises."""
        read = await self._stored.read()
        if read is self.now:
            return
        before, self.now = self.now, read
        changed = [name for name in sorted({*before.named, *read.named}) if before.of(name) != read.of(name)]
        told = "; ".join(f"{name}: {_said(read.of(name))}" for name in changed[:TOLD_MAX])
        logs.info("limits of tenants", tenants=len(read.named), changed=len(changed), limits=told)


def _said(limits: TenantLimits) -> str:
    return ", ".join(f"{name} {value}" for name, value in msgspec.structs.asdict(limits).items() if value)

"""Finds callers who wait for what was removed from Redis, by hand or by an eviction.

A stateless request has an entry in its queue until it is answered. Who joined an open step stands in the record of its
sequence. Nobody else knows of them, so without these keys nobody would answer. Of the first caller of a step the inbox
knows as well: the owner of the sequence tells that one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.requests.waiting import PendingRequest
from shared.contract.ids import GatewayId
from shared.contract.record import BIRTH
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.work_scripts import request_id

LOOKS, LOOKS_AT_WORK = 2, 6
"""Looks at which the name of who joined a step, or waits for a stateless request, is missing before its caller is told.
The record of a sequence stays behind its last answer; a request leaves its queue with it, which may lie unread behind
gigabytes of others."""


class CallerName(NamedTuple):
    """Where Redis names a caller. value: of the field; None for any"""

    key: str
    field: str
    value: bytes | None = None


class NamedCallers:
    """The callers at this gateway whom one key alone names."""

    def __init__(self, redis: Redis, keys: Keyspace, gateway: GatewayId) -> None:
        self._redis = redis
        self._keys = keys
        self._gateway = gateway
        self._missed: Mapping[str, int] = {}

    async def removed(self, waiting: Iterable[PendingRequest], age_s: float) -> list[PendingRequest]:
        """Those whom nothing names at several looks in a row: an answer may have left before the name did, and is here
        by then. Raises one of `LOST_OR_REFUSED`.

        age_s  younger requests are not looked at
        """
        since = time.monotonic() - age_s
        asked: dict[str, list[tuple[PendingRequest, CallerName]]] = defaultdict(list)
        for one in waiting:
            if one.sent < since and (name := self._name_of(one)):
                asked[name.key].append((one, name))
        async with self._redis.pipeline(transaction=False) as pipe:
            for key, named in asked.items():
                pipe.hmget(key, [name.field for _, name in named])
            found: list[list[bytes | None] | Exception] = await pipe.execute(raise_on_error=False) if asked else []
        missing = [
            one
            for named, values in zip(asked.values(), found, strict=True)
            # A node of a Cluster that is away says nothing of its keys.
            if not isinstance(values, Exception)
            for (one, name), value in zip(named, values, strict=True)
            if value is None or name.value not in (None, value)
        ]
        self._missed = {one.token: self._missed.get(one.token, 0) + 1 for one in missing}
        return [
            one for one in missing if self._missed[one.token] >= (LOOKS if one.admitted.sequence else LOOKS_AT_WORK)
        ]

    def _name_of(self, pending: PendingRequest) -> CallerName | None:
        accepted, admitted = pending.accepted, pending.admitted
        if accepted is None:
            return None
        if admitted.sequence is not None:
            record = self._keys.sequence(admitted.sequence).record
            return CallerName(record, BIRTH, accepted.birth.encode()) if accepted.repeated else None
        # An answer that waits for earlier ones lies elsewhere.
        if admitted.queueing.ordered:
            return None
        queue = self._keys.work_queue(admitted.message.model, admitted.message.version)
        return CallerName(queue.meta, request_id(self._gateway, pending.token))

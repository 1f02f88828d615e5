"""The parts of a gateway that both protocols use, and the tasks that keep them at work.

The main tasks: `dispatch` sends requests to Redis, `replies` reads the answers, `heartbeat` keeps the reply streams
alive, `notices` tells Redis of sequences whose client has left, `catalog` watches the mesh. If a task fails, the whole
gateway ends. That loses no state: a gateway holds only waiting requests, and clients go on through another gateway.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.memory import MemoryBound
from gateway.bounds.unread_answers import UnreadAnswers
from gateway.models.catalog import Catalog
from gateway.models.observation import Observation
from gateway.models.preferred import PreferredExecutors
from gateway.models.repository import RepositoryControl
from gateway.models.runtime_settings import RuntimeSettings
from gateway.models.statistics import Statistics
from gateway.requests.allowances import Allowances
from gateway.requests.exchange.dispatch import Dispatch
from gateway.requests.exchange.notices import Notices
from gateway.requests.exchange.recovery import RestartRecovery
from gateway.requests.exchange.replies import Replies
from gateway.requests.exchange.script_calls import ScriptCalls
from gateway.requests.inference import Inference
from gateway.requests.measures import Measures
from gateway.requests.unserved import look_for_unserved
from gateway.settings import GatewaySettings
from shared.contract.ids import GatewayId
from shared.contract.response_cache import parse_cache_config
from shared.process import logs
from shared.process.lifecycle import Tasks, end
from shared.store.agreement import needed_at_start, when_it_serves
from shared.store.commands import Redis
from shared.store.company import Company
from shared.store.connections.fitness import value_bytes_max
from shared.store.connections.redis_client import connect
from shared.store.connections.server_run import ServerRun
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.metering import Metering
from shared.store.reading import tell
from shared.store.scripts import Scripts
from shared.store.sequences import Sequences
from shared.store.tenants import KnownTenants, StoredTenants
from shared.store.totals import Tallies
from shared.stored_settings import ProcessSettings, StoredSettings
from shared.traces.tracing import Tracing


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """What both protocols use. The last three are not used by either, and work in tasks of their own."""

    inference: Inference
    catalog: Catalog
    repository: RepositoryControl
    statistics: Statistics
    observation: Observation
    dispatch: Dispatch
    replies: Replies
    settings: RuntimeSettings
    sequences: Sequences
    memory: MemoryBound
    unread: UnreadAnswers
    company: Company
    metering: Metering
    process: ProcessSettings
    tenants: KnownTenants
    notices: Notices


@asynccontextmanager
async def running_parts(
    settings: GatewaySettings, name: str, keys: Keyspace, tracing: Tracing, tasks: Tasks
) -> AsyncGenerator[GatewayParts]:
    """The parts, with their background tasks running. On leaving, the tasks end and this gateway's keys are removed."""

    def open_client(run: ServerRun) -> Redis:
        # No retries in the client: only `dispatch` knows whether a request may be sent twice.
        timeout_ms = settings.redis_timeout_ms
        return connect(settings.redis_url, retries=0, name=name, timeout_ms=timeout_ms, run=run, keys=keys)

    run = ServerRun()
    async with aclosing(open_client(run)) as redis:
        # A Redis that was there a moment ago may be lost again: while a Cluster recovers, say.
        with needed_at_start(settings.redis_url):
            parts = await _made(settings, name, redis, keys, tracing)
            await when_it_serves(partial(_begin, parts, run))
        recovery = RestartRecovery(open_client, keys, run, parts.replies, parts.dispatch)
        background = [
            *(tasks.start(work, name=work_name) for work_name, work in _work(parts).items()),
            tasks.start(recovery.run(), name="recovery"),
            tasks.start(tell(redis, keys), name="unreadable values"),
        ]
        try:
            yield parts
        finally:
            await end(background)
            await parts.replies.close()


async def _begin(parts: GatewayParts, run: ServerRun) -> None:
    """Reads and writes what must be there before the first request."""
    await parts.replies.open(run)
    await parts.catalog.refresh()
    await parts.tenants.refresh()


async def _made(settings: GatewaySettings, name: str, redis: Redis, keys: Keyspace, tracing: Tracing) -> GatewayParts:
    gateway = GatewayId(f"{'-'.join(name.split())}-{uuid.uuid4().hex[:8]}")
    where = json.dumps({"name": name, "host": socket.gethostname(), "pid": os.getpid()})
    measures = Measures(settings.metrics)
    scripts = Scripts(redis, keys, trips=measures.trips)
    membership = Membership(redis, keys)
    catalog = Catalog(membership, strict_readiness=settings.strict_readiness)
    cache_bytes = parse_cache_config(settings.cache_config)
    observation = Observation(redis, keys, catalog, cache_bytes=cache_bytes)
    tenants = KnownTenants(StoredTenants(redis, keys))
    replies = Replies(redis, keys, gateway, where=where)
    dispatch = _dispatch(settings, redis, keys, scripts, replies, gateway, tenants, catalog)
    notices = Notices(scripts, keys, gateway)
    memory, unread = MemoryBound(settings.memory_max), UnreadAnswers(settings.max_bytes_unread)
    budget = ByteBudget(settings.max_bytes_in_flight, memory)
    inference = Inference(
        catalog,
        dispatch,
        replies,
        keys,
        tracing,
        notices,
        in_flight_max=settings.max_requests_in_flight,
        budget=budget,
        unread=unread,
        request_bytes_max=await value_bytes_max(redis),
        timeout_ms=settings.request_timeout_ms,
        cache_bytes=cache_bytes,
        measures=measures,
        allowances=Allowances(
            lambda: tenants.now, lambda who, limits, wanted: scripts.run(scripts.draw(who, limits, wanted))
        ),
    )
    stored_settings = StoredSettings(redis, keys)
    process = ProcessSettings(stored_settings, tracing.control, logs.Level[settings.log_level.upper()])
    return GatewayParts(
        inference=inference,
        catalog=catalog,
        repository=RepositoryControl(redis, keys, catalog, budget),
        statistics=Statistics(Tallies(scripts, keys), catalog, observation),
        observation=observation,
        dispatch=dispatch,
        replies=replies,
        settings=RuntimeSettings(stored_settings, process, tracing.control, catalog, name),
        sequences=Sequences(redis, keys, membership, live_max=settings.live_max),
        memory=memory,
        unread=unread,
        company=Company(redis, keys, "gateway", name),
        metering=Metering(scripts, keys, measures.meters),
        process=process,
        tenants=tenants,
        notices=notices,
    )


def _dispatch(
    settings: GatewaySettings,
    redis: Redis,
    keys: Keyspace,
    scripts: Scripts,
    replies: Replies,
    gateway: GatewayId,
    tenants: KnownTenants,
    catalog: Catalog,
) -> Dispatch:
    calls = ScriptCalls(
        scripts,
        keys,
        gateway,
        in_flight_max=settings.sequence_inflight_max,
        backlog_max=settings.backlog_max,
        live_max=settings.live_max,
        tenants=lambda: tenants.now,
        prefers=PreferredExecutors(catalog).of,
        summaries=settings.metrics.summary_latencies,
    )
    return Dispatch(redis, scripts, keys, replies, calls, early_wait_s=settings.early_step_wait_ms / 1000)


def _work(parts: GatewayParts) -> dict[str, Coroutine[Any, Any, None]]:
    """The background tasks of the parts, by name."""
    replies, dispatch = parts.replies, parts.dispatch
    return {
        "replies": replies.run(),
        "heartbeat": replies.heartbeat(),
        "dispatch": dispatch.run(),
        "waits for slots": dispatch.waits.run(),
        "notices": parts.notices.run(),
        "catalog": parts.catalog.run(),
        "unserved": look_for_unserved(parts.catalog, lambda: replies.unanswered, dispatch.withdraw),
        "settings": parts.process.run(),
        "tenants": parts.tenants.run(),
        "company": parts.company.run(),
        "measurements": parts.metering.run(),
        "memory": parts.memory.run(),
    }

"""How a sequence comes to this executor: its checkpoint is fetched, and a suspected one waits for its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from executor.connections import RETRY_DELAY_S, RedisConnections, insist
from executor.core.events import CheckpointFetched, SuspectTried
from executor.core.state import OwnedPhase, OwnedSequence
from executor.sequences.checkpoints import read_checkpoints
from executor.sequences.inbox import Inbox, next_count
from executor.sequences.sequence_model import SequenceModel
from shared.contract.ids import ExecutorId
from shared.process import logs
from shared.store.connections.homes import grouped, together
from shared.store.connections.redis_py import LOST_OR_REFUSED

FETCHES_PER_READ, PREFETCHES_PER_READ = 64, 16
"""Most checkpoints that one read fetches: for sequences with a step that waits, and for sequences without. After a
takeover thousands may have to be fetched, and running sequences must not wait for all of them: neither for the read,
nor for the engine, which takes the states of a read in with one call. Of large states a read fetches as many as bring
`executor.sequences.inbox.READ_BYTES`: taking them in keeps the event loop, and so the lease, for a second a GiB.
"""
TRIAL_POLL_S = 0.01
TRIAL_S = 60.0
"""How long a trial holds up the others: one whose model hangs would do so until its executor is ended."""


async def fetch_checkpoints(
    model: SequenceModel, connections: RedisConnections, inbox: Inbox, executor: ExecutorId
) -> None:
    """Fetches the checkpoints of sequences that came from other executors, many in one round trip, for ever."""
    redis, keys = connections.commands, connections.keys
    # Of the first read the size is unknown. The largest state counts for good: states that grow differ much.
    count, largest = 1, 0
    while True:
        await model.fetch_due.wait()
        model.fetch_due.clear()
        while wanted := model.state.next_fetches(count, min(count, PREFETCHES_PER_READ)):
            groups = grouped(redis, wanted, lambda owned: keys.sequence(owned.sequence).record)
            sizes = await together([_fetch(model, connections, inbox, executor, group) for group in groups])
            largest = max(largest, *sizes)
            count = min(FETCHES_PER_READ, next_count(count, largest))
            logs.debug("checkpoints fetched", model=model.model, sequences=len(wanted))


async def _fetch(
    model: SequenceModel,
    connections: RedisConnections,
    inbox: Inbox,
    executor: ExecutorId,
    wanted: Sequence[OwnedSequence],
) -> int:
    """Fetches checkpoints that one server holds. While it is away, others are fetched in between. Returns the bytes of
    the largest state.
    """
    keys, scripts = connections.keys, connections.scripts
    try:
        found = await read_checkpoints(connections.commands, keys, [owned.sequence for owned in wanted])
    except LOST_OR_REFUSED as error:
        logs.warning("restore delayed", cause=str(error))
        await asyncio.sleep(RETRY_DELAY_S)
        for owned in wanted:
            if owned.phase is OwnedPhase.FETCHING:
                model.state.fetch(owned)
        return 0
    for owned in wanted:
        if owned.sequence not in found:
            # Another executor owns it by now (then `lose` does nothing), or its record cannot be read.
            lost = scripts.lose(owned.sequence, executor, owned.epoch)
            await insist("restore", partial(scripts.run, lost))
        if over := model.handle(CheckpointFetched(owned, found.get(owned.sequence))):
            await insist("restore", partial(inbox.remove, keys.shard_of(owned.sequence), over))
    return max((checkpoint.state_bytes for checkpoint in found.values()), default=0)


async def try_suspects(model: SequenceModel, connections: RedisConnections, alone: asyncio.Lock) -> None:
    """Tries suspected sequences, with which several owners in a row were lost, for ever. Redis is told before each
    trial, and only one goes on at a time, from loading the state to the commit of the step. If this owner is lost too,
    the cause is that sequence, one whose trial has hung, or a step that nobody suspects yet.

    A sequence with a step that a model calls is tried at once: the step that waits for it may be on trial.

    alone  of all models together: held during a trial, for TRIAL_S at most
    """
    in_turn: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as trials:
        while True:
            await model.trial_due.wait()
            model.trial_due.clear()
            for owned in model.state.suspects:
                if owned.is_called:
                    trials.create_task(_try_one(model, connections, owned))
            if in_turn is None or in_turn.done():
                in_turn = trials.create_task(_try_in_turn(model, connections, alone))


async def _try_in_turn(model: SequenceModel, connections: RedisConnections, alone: asyncio.Lock) -> None:
    while model.state.suspects:
        async with alone:
            # The sequence that is suspected least comes first, because it is the most likely to succeed.
            owned = min(model.state.suspects, key=lambda suspect: suspect.suspicion, default=None)
            if owned is None:
                return
            before = owned.committed
            await _try_one(model, connections, owned)
            with suppress(TimeoutError):
                async with asyncio.timeout(TRIAL_S):
                    while owned.phase is not OwnedPhase.ABSENT and owned.committed <= before:  # noqa: ASYNC110 - rare, and it has many ways to end
                        await asyncio.sleep(TRIAL_POLL_S)


async def _try_one(model: SequenceModel, connections: RedisConnections, owned: OwnedSequence) -> None:
    attempt = connections.scripts.attempt(owned.sequence, owned.epoch)
    await insist("attempt", partial(connections.scripts.run, attempt))
    logs.warning("suspected sequence tried", sequence=owned.sequence, owners_lost=owned.suspicion)
    model.handle(SuspectTried(owned))

"""How a sequence comes to this executor: its checkpoint is fetched, and a suspected one waits for its turn."""

from __future__ import annotations

import asyncio
from functools import partial

from executor.connections import RedisConnections, insist
from executor.core.events import CheckpointFetched, SuspectTried
from executor.core.state import OwnedPhase
from executor.sequences.checkpoints import read_checkpoints
from executor.sequences.inbox import Inbox
from executor.sequences.sequence_model import SequenceModel
from shared.contract.ids import ExecutorId
from shared.process import logs

FETCHES_PER_READ, PREFETCHES_PER_READ = 64, 16
"""How many checkpoints one read fetches: for sequences with a step that waits, and for sequences without. After a
takeover thousands may have to be fetched, and running sequences must not wait for all of them: neither for the read,
nor for the engine, which takes the states of a read in with one call.
"""
TRIAL_POLL_S = 0.01


async def fetch_checkpoints(
    model: SequenceModel, connections: RedisConnections, inbox: Inbox, executor: ExecutorId
) -> None:
    """Fetches the checkpoints of sequences that came from other executors, many in one round trip, for ever."""
    redis, keys, scripts = connections.commands, connections.keys, connections.scripts
    while True:
        await model.fetch_due.wait()
        model.fetch_due.clear()
        while wanted := model.state.next_fetches(FETCHES_PER_READ, PREFETCHES_PER_READ):
            names = [owned.sequence for owned in wanted]
            found = await insist("restore", partial(read_checkpoints, redis, keys, names))
            for owned in wanted:
                if owned.sequence not in found:
                    # Another executor owns it by now (then `lose` does nothing), or its record cannot be read.
                    lost = scripts.lose(owned.sequence, executor, owned.epoch)
                    await insist("restore", partial(scripts.run, lost))
                if over := model.handle(CheckpointFetched(owned, found.get(owned.sequence))):
                    await insist("restore", partial(inbox.remove, keys.shard_of(owned.sequence), over))
            logs.debug("checkpoints fetched", model=model.model, sequences=len(wanted))


async def try_suspects(model: SequenceModel, connections: RedisConnections, alone: asyncio.Lock) -> None:
    """Tries suspected sequences, with which several owners in a row were lost, for ever. Only one is tried at a time,
    from loading its state to the commit of its step, and Redis is told before. If this owner is lost too, only that
    sequence can be the cause.

    alone  of all models together: held during a trial
    """
    while True:
        await model.trial_due.wait()
        model.trial_due.clear()
        # The sequence that is suspected least comes first, because it is the most likely to succeed.
        while (owned := min(model.state.suspects, key=lambda suspect: suspect.suspicion, default=None)) is not None:
            async with alone:
                before = owned.committed
                attempt = connections.scripts.attempt(owned.sequence, owned.epoch)
                await insist("attempt", partial(connections.scripts.run, attempt))
                logs.warning("suspected sequence tried", sequence=owned.sequence, owners_lost=owned.suspicion)
                model.handle(SuspectTried(owned))
                while owned.phase is not OwnedPhase.ABSENT and owned.committed <= before:  # noqa: ASYNC110 - rare, and it has many ways to end
                    await asyncio.sleep(TRIAL_POLL_S)

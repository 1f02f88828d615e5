"""Takes the entries of the inbox in: whole reads, bounded in bytes.

While the requests that wait here take more than a bound, nothing more is taken in, and the rest waits in Redis. But
that holds only while any of these requests can run. After a takeover steps may come out of order, so the step that lets
all the others run may be one that was not taken in yet. For the same reason, and because control messages come the same
way, no pause is longer than PATIENCE_S, even if a model hangs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress

import msgspec

from executor.lease.serving import Serving
from executor.sequences.inbox import Inbox, InboxPart, Read, ReadEntry
from shared.contract.ids import correlation_id_of, model_of
from shared.contract.messages import InboxStep, InferMessage, decode_infer, inbox_entry
from shared.store.reading import FAILURES, noted

PATIENCE_S = 5.0
"""Longest time in which nothing is taken in."""
BOUND_POLL_S = 0.01


async def take_in(inbox: Inbox, serving: Serving, *, bytes_max: int) -> None:
    """Takes in what comes, for ever. bytes_max: of the requests that wait here while any of them can run"""
    async with asyncio.TaskGroup() as group:
        for part in inbox.parts:
            group.create_task(_take_in_part(part, serving, bytes_max), name="inbox")


async def _take_in_part(part: InboxPart, serving: Serving, bytes_max: int) -> None:
    async with aclosing(part.reads()) as reads:
        async for read in reads:
            if serving.queued_bytes > bytes_max:
                await _below_bound(serving, bytes_max)
            _take_all(part, serving, read)
            # While nothing comes it would be kept: up to READ_BYTES.
            del read
            serving.taken()
            # The commits of batches that were run at once leave before the next read.
            await asyncio.sleep(0)


async def _below_bound(serving: Serving, bytes_max: int) -> None:
    """Returns when a read is within the bound (see the module)."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while serving.queued_bytes > bytes_max and serving.is_busy:  # noqa: ASYNC110 - it ends in many ways
                await asyncio.sleep(BOUND_POLL_S)


def _take_all(part: InboxPart, serving: Serving, read: Read) -> None:
    for stream, entries in read.items():
        for entry in entries:
            if gone := _take(serving, stream, entry):
                part.done(stream, gone)


def _take(serving: Serving, stream: str, read: ReadEntry) -> Sequence[str]:
    """Takes an entry in. Returns the entries that may be removed now; the entry itself, if nothing more is to be done
    for it, or if it means nothing.
    """
    name, flat = read
    try:
        entry = inbox_entry(name, dict(zip(flat[::2], flat[1::2], strict=True)))
    except FAILURES as failure:
        return _meaningless(stream, name, failure)
    if not isinstance(entry, InboxStep):
        return [entry.entry, *serving.tell(entry)]
    try:
        message = decode_infer(entry.message)
    except FAILURES as failure:
        return _take_unreadable(serving, stream, entry, failure)
    return serving.accept(entry, message)


def _meaningless(stream: str, entry: bytes, failure: Exception) -> Sequence[str]:
    """Notes an entry that means nothing: it may be removed."""
    noted(stream, failure)
    return [entry.decode()]


def _take_unreadable(serving: Serving, stream: str, step: InboxStep, failure: Exception) -> Sequence[str]:
    """Takes in a step whose message cannot be read, with an empty message in its place: the step fails in its turn."""
    model = model_of(step.sequence)
    try:
        correlation_id = correlation_id_of(step.sequence)
    except FAILURES:
        return _meaningless(stream, step.entry.encode(), failure)
    noted(stream, failure, field=step.entry)
    message = InferMessage(model, step.version, "", correlation_id, (), arrived_ns=time.time_ns())
    return serving.accept(msgspec.structs.replace(step, unreadable=True), message)

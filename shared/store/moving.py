"""An operator's wish that a sequence goes to another executor between two of its steps (`shared.store.wishes`)."""

from __future__ import annotations

from collections.abc import Sequence

from shared.contract.errors import Code, NotDoneError
from shared.contract.ids import SequenceId, model_of
from shared.contract.record import DURABLE, LIVE, MOVING, NO_ENTRY, OWNER, PAGED, STATE, WAIT_ENTRY, WAITING
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Member
from shared.store.reading import text_of
from shared.store.wishes import NO_LEADER, WishEntry, fulfilled

LEADER_S = 60.0
"""How long a wish waits for its model's leader: longer than a leader pursues one, and a new leader takes to begin."""
NO_SLOT = "the sequence holds no slot: its state lies in Redis, and it gets a slot with its next step"


async def moved(
    redis: Redis, keys: Keyspace, members: Sequence[Member], sequence: SequenceId, to: str, *, leaving: str = ""
) -> str:
    """Moves a sequence to the executor of that name or id, or, if it is "", to any other one.

    leaving  id of the executor that it is to leave: a sequence that has left it already stays where it is, so a wish
             that is uttered twice moves it once. "": the one that has it now
    Returns what has happened. Raises NotDoneError with the reason for a sequence that has not moved.
    """
    owner = await _owner_of(redis, keys, sequence)
    if leaving and owner is not None and owner != leaving:
        return f"the sequence has left {leaving} already: it is on {owner}"
    if owner is None and not to:
        return NO_SLOT
    executor = destination(members, model_of(sequence), owner, to)
    if not await fulfilled(redis, keys, sequence, wish_to_move(executor), patience_s=LEADER_S):
        raise NotDoneError(NO_LEADER, Code.UNAVAILABLE)
    return await _outcome(redis, keys, sequence, owner, executor)


def wish_to_move(executor: str = "") -> WishEntry:
    """executor: its id; "" for any other one than the present one"""
    return WishEntry("v", {"x": executor})


async def _owner_of(redis: Redis, keys: Keyspace, sequence: SequenceId) -> str | None:
    """The executor that owns a live sequence; None for a paged one. Raises NotDoneError for any other."""
    record = keys.sequence(sequence).record
    state, owner, durable, waits = await redis.hmget(record, STATE, OWNER, DURABLE, WAIT_ENTRY)
    if waits == NO_ENTRY:
        raise NotDoneError("the sequence is paused: resume it first (seqmesh seq resume)")
    if state in (WAITING, MOVING):
        raise NotDoneError("the sequence waits for a slot: it has no executor that it could leave")
    if state == PAGED:
        return None
    if state != LIVE:
        raise NotDoneError("there is no such open sequence", Code.NOT_FOUND)
    if durable != b"1":
        raise NotDoneError(
            "only its model knows the sequence's state, so it cannot be moved: declare the state in the model's "
            "configuration (sequence_batching { state ... }), or name a sequence_recovery among its parameters"
        )
    return text_of(owner or b"")


def destination(members: Sequence[Member], model: str, owner: str | None, to: str) -> str:
    """The id of the wished executor, "" for any other one. Raises NotDoneError if there is none."""
    serving = [
        one.registration
        for one in members
        if one.usable and any(each.model == model and not each.closing for each in one.registration.models)
    ]
    names = ", ".join(sorted({one.name for one in serving}))
    if not to:
        if all(one.executor == owner for one in serving):
            raise NotDoneError(f"no other executor serves '{model}': start one, then move")
        return ""
    meant = [one.executor for one in serving if one.is_called(to)]
    if not meant:
        raise NotDoneError(f"no executor '{to}' serves '{model}'; it is served by: {names}")
    if len(meant) > 1:
        raise NotDoneError(f"several executors are called '{to}': name one by its id ({', '.join(meant)})")
    if meant[0] == owner:
        raise NotDoneError(f"the sequence is on {owner} already")
    return meant[0]


async def _outcome(redis: Redis, keys: Keyspace, sequence: SequenceId, owner: str | None, to: str) -> str:
    """What has become of a wish. Raises NotDoneError if the sequence did not move."""
    state, now = await redis.hmget(keys.sequence(sequence).record, STATE, OWNER)
    if state == PAGED and to:
        raise NotDoneError(f"{NO_SLOT}; {to} had none free for it")
    if state == PAGED:
        return NO_SLOT
    if now is None:
        return "the sequence has ended meanwhile"
    if owner is None:
        return f"the sequence held no slot; it has one on {text_of(now)} now"
    if text_of(now) == owner:
        raise NotDoneError(
            f"the sequence is still on {owner}: it was never between two steps, or nobody else had a free slot; "
            "try again (seqmesh drain --list shows how much each executor holds)"
        )
    return f"moved from {owner} to {text_of(now)}"

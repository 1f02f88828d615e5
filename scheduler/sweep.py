"""Repairs the mesh after a key that many sequences share could not be read, from the sequences' own records.

Such keys are: an inbox with steps on their way, the streams and sets that say which sequences wait, which executor owns
them and which tenant they are of, the deadlines of idle sequences, and the list of executors: of one that is not in it
nobody would take sequences over. A key of the wrong type is removed by the process or script that meets it
(`shared.store.connections.mending`, common.lua), and counted. The sequences' records hold all that was in it, except
the steps.

A scheduler watches these counts. When one has grown, the leaders go over every sequence of their models (`sweep.lua`),
and rebuild their state from Redis. So do those of models of which an executor owns sequences that is in no list: the
list was removed by hand, or before this scheduler began, and the leader that had seen the executor is no more.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from scheduler.mesh import MeshAccess
from shared.contract.ids import ExecutorId, SequenceId, Term, model_of
from shared.contract.limits import SCRIPT_STEPS_MAX
from shared.contract.messages import inbox_entry
from shared.contract.record import LIVE, OWNER, STATE
from shared.process import logs
from shared.store.commands import Redis
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.keyspace import SCHEMA_VERSION, Keyspace
from shared.store.membership import REMOVE_EMPTY
from shared.store.reading import read_counts, text_of, value_of
from shared.store.script_values import LedShard

SHARED_BY_SEQUENCES = ("starts", "feed", "inbox", "owned", "spares", "deadlines", "parked", "tenant", "executors")
"""Kinds of keys that many sequences share."""
KEYS_PER_SCAN = 1000


class SpoiltKeys:
    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        self._redis = redis
        self._keys = keys
        self._seen: dict[str, int] | None = None

    async def found(self) -> bool:
        """Whether a key was removed since the last call. Raises one of `CONNECTION_LOST`."""
        try:
            counts = await read_counts(self._redis, self._keys)
        except CONNECTION_LOST:
            # Of a Cluster one node may be away for long. What has happened until it is back shows then.
            await self._redis.home(self._keys.mesh).ping()
            return False
        before, self._seen = self._seen, {kind: counts[kind] for kind in SHARED_BY_SEQUENCES}
        return before is not None and before != self._seen


async def _of_unregistered(mesh: MeshAccess, kind: str) -> list[str]:
    """The keys of a kind, in whose names an executor follows the kind, of executors that are not registered."""
    names = f"{escaped(mesh.keys.prefix)}:{SCHEMA_VERSION}:{{*}}:{kind}:*"
    found = [text_of(key) async for key in mesh.redis.scan_iter(match=names, count=KEYS_PER_SCAN)]
    # Read last: an executor is registered before it owns anything, and until it owns nothing any more.
    registered = tuple(f"{member.registration.executor}:" for member in await mesh.membership.members())
    return [key for key in found if not f"{key.partition(f'}}:{kind}:')[2]}:".startswith(registered)]


async def clear_abandoned(mesh: MeshAccess) -> set[str]:
    """Moves on what lies in the inboxes of dead executors that are not registered, and removes those that are empty
    then. Returns the models of what stays, which by its record is still that executor's. Raises one of
    `CONNECTION_LOST`.

    A stale replica that has become the primary brings an inbox back whose executor was forgotten meanwhile. Or the set
    of what an executor owned was removed before the executor died: then nobody has taken it over.
    """
    removed, left = list[ExecutorId](), set[str]()
    for key in await _of_unregistered(mesh, "inbox"):
        shard = next(shard for shard in mesh.keys.shards if key.startswith(mesh.keys.base(shard)))
        executor = ExecutorId(key.partition("}:inbox:")[2])
        # The list of executors may have been lost: one that lives registers again, and reads its inbox.
        if await mesh.redis.exists(mesh.keys.executor_lease(executor)):
            continue
        await mesh.scripts.drain_whole(executor, shard=shard)
        if await mesh.redis.eval(REMOVE_EMPTY, 1, key):
            removed.append(executor)
        for entry, fields in await mesh.redis.xrange(key, count=SCRIPT_STEPS_MAX):
            read = value_of(key, fields, partial(inbox_entry, entry), field=text_of(entry))
            left |= {model_of(read.sequence)} if read is not None else set()
    if removed:
        named = ", ".join(removed[:SCRIPT_STEPS_MAX])
        logs.warning("inboxes of forgotten executors removed", executors=len(removed), named=named)
    return left


async def stranded(mesh: MeshAccess) -> dict[str, set[ExecutorId]]:
    """Executors that own sequences and are not registered, by model. Raises one of `CONNECTION_LOST`."""
    asked = await _of_unregistered(mesh, "owned")
    found = defaultdict[str, set[ExecutorId]](set)
    for key, member in zip(asked, await mesh.links.ask([("SRANDMEMBER", key) for key in asked]), strict=True):
        if member is not None:
            model = model_of(SequenceId(text_of(member)))
            found[model].add(ExecutorId(key.partition("}:owned:")[2].removesuffix(f":{model}")))
    return found


async def sweep(mesh: MeshAccess, model: str, term: Term) -> set[ExecutorId]:
    """Goes over every sequence of a model. Returns the executors that own some, by the records or by their own sets.
    Raises ResponseError FENCED, or one of `CONNECTION_LOST`.
    """
    looked_at = 0
    owners = (await stranded(mesh)).get(model, set[ExecutorId]())
    for shard in mesh.keys.shards:
        prefix = f"{mesh.keys.base(shard)}seq:"
        found = mesh.redis.scan_iter(match=f"{escaped(prefix + model)}|*", count=KEYS_PER_SCAN)
        named = [SequenceId(text_of(key).removeprefix(prefix)) async for key in found]
        # A call concerns one shard: a record that lies in another one than its own belongs to nobody.
        sequences = [sequence for sequence in named if mesh.keys.shard_of(sequence) == shard]
        for begin in range(0, len(sequences), SCRIPT_STEPS_MAX):
            chunk = sequences[begin : begin + SCRIPT_STEPS_MAX]
            looked_at += sum(await mesh.scripts.run(mesh.scripts.sweep(chunk, LedShard(shard, model, term))))
            asked = [("HMGET", mesh.keys.sequence(sequence).record, STATE, OWNER) for sequence in chunk]
            owners |= {ExecutorId(text_of(owner)) for state, owner in await mesh.links.ask(asked) if state == LIVE}
    logs.warning("sequences looked over, as keys were lost", model=model, sequences=looked_at)
    return owners


def escaped(text: str) -> str:
    """A pattern of Redis that matches only this text."""
    return "".join(f"\\{character}" if character in "*?[]\\^" else character for character in text)

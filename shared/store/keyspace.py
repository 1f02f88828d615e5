"""Every Redis key of the mesh, by name. One method per key; no other code builds a key. What each key
holds, and which services write and read it: `shared.store.key_kinds`.

Keys begin with the prefix and the schema version. `{shard}` is the hash tag of everything that belongs to a sequence,
so that each script's keys live on one node of a Cluster. `{mesh}` is the tag of keys that belong to no sequence.
Lua scripts build some names from a record (`seq:`, `inbox:`, ...); they are the same as below.
"""

from __future__ import annotations

from typing import NamedTuple

import xxhash

from shared.contract.ids import ExecutorId, GatewayId, SequenceId, ShardId, shard_of
from shared.store.key_kinds import KINDS

DEFAULT_PREFIX = "seqmesh"
"""Default beginning of a mesh's keys."""
SCHEMA_VERSION = 1
"""Grows when keys, fields or messages change their meaning. It is part of every key but `MESH`
(`shared.store.release`).
"""
MESH = "{mesh}:mesh"
"""The key without schema version, after the prefix: services of every schema find it."""

PERMANENT = (
    "{mesh}:models",
    "{mesh}:terms",
    "{mesh}:executors",
    "{mesh}:drained",
    "{mesh}:control",
    "{mesh}:wanted",
    "{mesh}:kept",
    "{mesh}:settings",
    "{mesh}:services",
    "*:epoch",
    "*:fence:*",
    # A queue's count of arrivals, and the executors that have taken from it.
    "*:work:*",
    # Two streams per shard and model: emptied, never removed, because a reader's place in them must stay ahead of it.
    "*:starts:*",
    "*:feed:*",
    # A few numbers per shard and model.
    "*:line:*",
    # A count and a name for each kind of key.
    "*:unreadable",
)
"""Key patterns (after prefix and version) of permanent keys, without a TTL: counters and small tables of the mesh
itself.
"""

SEQUENCE_BOUND = (
    "*:seq:*",
    "*:idle:*",
    "*:parked:*",
    "*:checkpoint:*",
    "*:deadlines:*",
    "*:owned:*",
    "*:inbox:*",
)
"""Key patterns without a TTL while a sequence lives. END, expiry or takeover removes them, also after a process has
died.
"""

TYPES = {name: kind.type for name, kind in KINDS.items()}
"""Every kind of key (`kind_of`), with its type in Redis."""


def kind_of(key: str) -> str:
    """The kind of a key of any mesh: the word after its hash tag; for the groups `work` and `cache` with the last
    word.
    """
    first, _, rest = key.partition("}:")[2].partition(":")
    return f"{first}:{rest.rpartition(':')[2]}" if first in ("work", "cache") else first


class WorkKeys(NamedTuple):
    """The keys of one model version's queue of stateless work, in the order in which the scripts take them.
    `shared/store/lua/work.lua` describes each.
    """

    queue: str
    meta: str
    messages: str
    held: str
    takers: str
    deadlines: str
    number: str
    wake: str
    order: str
    early: str


class CacheKeys(NamedTuple):
    """The keys of a shard's response cache, in the order in which the scripts take them
    (`shared/store/lua/cache.lua`)."""

    entries: str
    used: str
    about: str


class SequenceKeys(NamedTuple):
    """The four keys of one sequence."""

    record: str
    idle: str
    parked: str
    checkpoint: str


class Keyspace:
    """All key names of one mesh.

    prefix  tells meshes on one Redis apart
    shards  fixed for the life of a mesh; `shared.store.redis_client.join_mesh` refuses a process with another number
    """

    def __init__(self, prefix: str = DEFAULT_PREFIX, shards: int = 4) -> None:
        self.prefix = prefix
        self.shards = shards
        self.mesh_base = f"{prefix}:{SCHEMA_VERSION}:{{mesh}}:"
        self._shard_bases = [f"{prefix}:{SCHEMA_VERSION}:{{{shard}}}:" for shard in range(shards)]

    def shard_ids(self) -> list[ShardId]:
        """Every shard, in order."""
        return [ShardId(shard) for shard in range(self.shards)]

    def shard_of(self, sequence: SequenceId) -> ShardId:
        """The shard of a sequence."""
        return shard_of(sequence, self.shards)

    def base(self, shard: ShardId) -> str:
        """Beginning of every key of a shard."""
        return self._shard_bases[shard]

    # -- one sequence; created by `submit`, removed by END, expiry or rejection; a tombstone has a TTL ---------------

    def sequence(self, sequence: SequenceId) -> SequenceKeys:
        """Record (hash), idle marker (string, TTL = idle time), parked steps (stream), checkpoint (hash)."""
        base = self._shard_bases[shard_of(sequence, self.shards)]
        return SequenceKeys(
            f"{base}seq:{sequence}",
            f"{base}idle:{sequence}",
            f"{base}parked:{sequence}",
            f"{base}checkpoint:{sequence}",
        )

    # -- one shard --------------------------------------------------------------------------------------------------

    def epoch(self, shard: ShardId) -> str:
        """Counter of ownerships; permanent."""
        return f"{self._shard_bases[shard]}epoch"

    def fence(self, shard: ShardId, model: str) -> str:
        """Newest term of a model's leader that acted in this shard; permanent."""
        return f"{self._shard_bases[shard]}fence:{model}"

    def starts(self, shard: ShardId, model: str) -> str:
        """Stream of sequences that wait for a slot: the backlog itself, with at most one further entry per sequence
        (its deadline was lowered). `submit`, `reclaim` and `vacate` write it; `assign`, `reject`, `cancel` and `expire`
        remove entries.
        """
        return f"{self._shard_bases[shard]}starts:{model}"

    def feed(self, shard: ShardId, model: str) -> str:
        """Stream of sequences that are over, read (and emptied) by the model's leader. It has no more entries than
        slots, and a bounded number for sequences that were cancelled while they waited.
        """
        return f"{self._shard_bases[shard]}feed:{model}"

    def wanted_slots(self, shard: ShardId, model: str, version: str) -> str:
        """String + TTL: how many slots the next commits of a model version may free, because other sequences wait. The
        model's leader sets it.
        """
        return f"{self._shard_bases[shard]}wanted-slots:{model}:{version}"

    def line(self, shard: ShardId, model: str) -> str:
        """Hash: counts of a model's waiting line (`shared.store.waiting_line`); permanent, written by the scripts."""
        return f"{self._shard_bases[shard]}line:{model}"

    def deadlines(self, shard: ShardId, model: str) -> str:
        """Sorted set: sequence -> when to look at its idle marker; Redis clock, ms."""
        return f"{self._shard_bases[shard]}deadlines:{model}"

    def inbox_prefix(self, shard: ShardId) -> str:
        """Beginning of every inbox of a shard."""
        return f"{self._shard_bases[shard]}inbox:"

    def inbox(self, shard: ShardId, executor: ExecutorId) -> str:
        """Stream of steps and control messages for one executor; an entry is removed when a checkpoint covers it."""
        return f"{self._shard_bases[shard]}inbox:{executor}"

    def owned_prefix(self, shard: ShardId) -> str:
        """Beginning of every owned set of a shard."""
        return f"{self._shard_bases[shard]}owned:"

    def owned(self, shard: ShardId, executor: ExecutorId, model: str) -> str:
        """Set of the sequences that an executor owns."""
        return f"{self._shard_bases[shard]}owned:{executor}:{model}"

    def replies_prefix(self, shard: ShardId) -> str:
        """Beginning of every reply stream of a shard."""
        return f"{self._shard_bases[shard]}replies:"

    def replies(self, shard: ShardId, gateway: GatewayId) -> str:
        """Stream of replies for one gateway, {token: reply, ...}; TTL, renewed by the gateway while it lives."""
        return f"{self._shard_bases[shard]}replies:{gateway}"

    # -- stateless work ---------------------------------------------------------------------------------------------

    def home_shard(self, model: str) -> ShardId:
        """The shard that holds a stateless model's work."""
        return ShardId(xxhash.xxh64_intdigest(model.encode()) % self.shards)

    def work_queue(self, model: str, version: str) -> WorkKeys:
        """A model version's queue of stateless requests, on the model's home shard; permanent. An empty queue keeps
        only the count of arrivals.
        """
        base = f"{self.base(self.home_shard(model))}work:{model}:{version}:"
        return WorkKeys(*(base + name for name in WorkKeys._fields))

    def cache(self, shard: ShardId) -> CacheKeys:
        """The response cache of the stateless models whose home the shard is; one day's TTL, renewed while
        it is used."""
        return CacheKeys(*(f"{self._shard_bases[shard]}cache:{name}" for name in CacheKeys._fields))

    # -- statistics -------------------------------------------------------------------------------------------------

    def unreadable(self, shard: ShardId | None) -> str:
        """Hash: per kind of key, how many values could not be read, and the name of the last one
        (`shared.store.reading`). Scripts write a shard's, services the mesh's (None); permanent.
        """
        return f"{self.mesh_base if shard is None else self._shard_bases[shard]}unreadable"

    def tally_prefix(self, shard: ShardId, model: str, generation: str) -> str:
        """Beginning of the tallies of a model's versions; the version follows. generation "": of requests that were
        refused while they waited, by scripts that know of no load. They count for the load that is served.
        """
        return f"{self._shard_bases[shard]}tally:{model}:{generation}:"

    def tally(self, shard: ShardId, model: str, version: str, generation: str) -> str:
        """List of packed counts that are not added up yet; one day's TTL. Written with every answer."""
        return f"{self.tally_prefix(shard, model, generation)}{version}"

    def counts(self, shard: ShardId, model: str, version: str, generation: str) -> str:
        """Hash: sums of one load of a model version in one shard; TTL, renewed by executors that serve it."""
        return f"{self._shard_bases[shard]}counts:{model}:{generation}:{version}"

    def report(self, executor: ExecutorId) -> str:
        """String + TTL: an executor's `ExecutorReport`, about a second old."""
        return f"{self.mesh_base}report:{executor}"

    # -- the mesh ---------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> str:
        """Hash: schema version and number of shards; permanent. Its name contains no schema version."""
        return f"{self.prefix}:{MESH}"

    @property
    def services(self) -> str:
        """Hash: a service's name -> `company.ServiceLine`, written every few seconds; silent services are removed."""
        return f"{self.mesh_base}services"

    @property
    def executors(self) -> str:
        """Hash: executor id -> `ExecutorRegistration`; removed when all of the executor's sequences are moved."""
        return f"{self.mesh_base}executors"

    @property
    def drained(self) -> str:
        """Hash: executor name or id -> since when, ms; written by operators, permanent."""
        return f"{self.mesh_base}drained"

    def executor_lease(self, executor: ExecutorId) -> str:
        """String + TTL: the executor lives."""
        return f"{self.mesh_base}executor-lease:{executor}"

    def leader(self, model: str) -> str:
        """String + TTL: the scheduler that leads a model; its value is `<scheduler id> <term>`."""
        return f"{self.mesh_base}leader:{model}"

    def scheduler(self, name: str) -> str:
        """String + TTL: the scheduler of that name lives; holds the models it leads."""
        return f"{self.mesh_base}scheduler:{name}"

    @property
    def terms(self) -> str:
        """Hash: model -> last term given to a leader; permanent."""
        return f"{self.mesh_base}terms"

    @property
    def models(self) -> str:
        """Hash: model -> `ModelRecord`; written by executors at load."""
        return f"{self.mesh_base}models"

    @property
    def control(self) -> str:
        """Stream that tells executors for which model there is a new command in `wanted`; trimmed to the last
        thousand.
        """
        return f"{self.mesh_base}control"

    @property
    def wanted(self) -> str:
        """Hash: model -> `ControlMessage`, the latest command; written by gateways, permanent."""
        return f"{self.mesh_base}wanted"

    @property
    def kept(self) -> str:
        """Hash: model -> `ControlMessage`, the latest command that an executor carried out; permanent."""
        return f"{self.mesh_base}kept"

    def load_attempts(self, model: str, load: str) -> str:
        """Hash + TTL: the attempts of one load of a model that are running, or that ended their process
        (`executor.models.loader`).
        """
        return f"{self.mesh_base}load:{model}:{load}"

    @property
    def settings(self) -> str:
        """Hash: log and trace settings that were changed at run time, a field each; permanent."""
        return f"{self.mesh_base}settings"

    def gateway(self, gateway: GatewayId) -> str:
        """String + TTL: the gateway lives, and where."""
        return f"{self.mesh_base}gateway:{gateway}"

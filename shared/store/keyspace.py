"""Every Redis key of the mesh, by name. One method per key; nobody builds a key by hand. What each holds, who writes it
and who reads it: `shared.store.key_kinds`.

Keys begin with the prefix and the schema version. `{shard}` is the hash tag of everything that belongs to a sequence,
so that each script's keys live on one node of a Cluster; `{mesh}` is the tag of what belongs to no sequence.
The names in the Lua scripts that follow from a record (`seq:`, `inbox:`, ...) are the ones below.
"""

from __future__ import annotations

from typing import NamedTuple

import xxhash

from shared.contract.ids import ExecutorId, GatewayId, SequenceId, ShardId, shard_of
from shared.store.key_kinds import KINDS

DEFAULT_PREFIX = "seqmesh"
"""What keys of a mesh begin with unless somebody says otherwise."""
SCHEMA_VERSION = 1
"""Grows when keys, fields or messages change their meaning; part of every key but one (`shared.store.release`)."""
MESH = "{mesh}:mesh"
"""That one, after the prefix: services of every schema find it."""

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
    # A queue's count of arrivals, and who has taken from it.
    "*:work:*",
    # Two streams per shard and model: emptied, never removed, because a reader's place in them must stay ahead of it.
    "*:starts:*",
    "*:feed:*",
    # A few numbers per shard and model.
    "*:line:*",
    # A count and a name for each kind of key.
    "*:unreadable",
)
"""Key patterns (after prefix and version) without a TTL, for ever: counters and small tables of the mesh itself."""

SEQUENCE_BOUND = (
    "*:seq:*",
    "*:idle:*",
    "*:parked:*",
    "*:checkpoint:*",
    "*:deadlines:*",
    "*:owned:*",
    "*:inbox:*",
)
"""Key patterns without a TTL while a sequence lives: END, expiry and takeover remove them, whoever dies meanwhile."""

TYPES = {name: kind.type for name, kind in KINDS.items()}
"""Every kind of key (`kind_of`), with its type in Redis."""


def kind_of(key: str) -> str:
    """The kind of a key of any mesh: the word behind its hash tag, of a group of keys also the last one."""
    first, _, rest = key.partition("}:")[2].partition(":")
    return f"{first}:{rest.rpartition(':')[2]}" if first in ("work", "cache") else first


class WorkKeys(NamedTuple):
    """The keys of one model version's queue of stateless work, in the order in which the scripts take them; what each
    holds stands in `shared/store/lua/work.lua`."""

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
    """The four keys that are one sequence's own."""

    record: str
    idle: str
    parked: str
    checkpoint: str


class Keyspace:
    """All key names of one mesh.

    prefix  tells meshes on one Redis apart
    shards  fixed for the life of a mesh; `shared.store.redis_client.join_mesh` refuses a process that disagrees
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
        """What every key of a shard begins with."""
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
        """Stream of sequences that wait for a slot: the backlog itself, with at most one piece of news for each (its
        deadline was lowered). Written by `submit`, `reclaim` and `vacate`, entries removed by `assign`, `reject`,
        `cancel` and `expire`."""
        return f"{self._shard_bases[shard]}starts:{model}"

    def feed(self, shard: ShardId, model: str) -> str:
        """Stream of sequences that are over, read (and emptied) by the model's leader. No more entries than slots, and
        a bounded number for those that were cancelled while they waited."""
        return f"{self._shard_bases[shard]}feed:{model}"

    def wanted_slots(self, shard: ShardId, model: str, version: str) -> str:
        """String + TTL: how many slots the next commits of a model version may free, because others wait; set by the
        model's leader."""
        return f"{self._shard_bases[shard]}wanted-slots:{model}:{version}"

    def line(self, shard: ShardId, model: str) -> str:
        """Hash: what a model's waiting line amounts to (`shared.store.waiting_line`); permanent, counted by the
        scripts."""
        return f"{self._shard_bases[shard]}line:{model}"

    def deadlines(self, shard: ShardId, model: str) -> str:
        """Sorted set: when to look at which sequence's idle marker, Redis clock, ms."""
        return f"{self._shard_bases[shard]}deadlines:{model}"

    def inbox_prefix(self, shard: ShardId) -> str:
        """What every inbox of a shard begins with."""
        return f"{self._shard_bases[shard]}inbox:"

    def inbox(self, shard: ShardId, executor: ExecutorId) -> str:
        """Stream of steps and control messages for one executor; an entry goes when it is checkpointed."""
        return f"{self._shard_bases[shard]}inbox:{executor}"

    def owned_prefix(self, shard: ShardId) -> str:
        """What every owned set of a shard begins with."""
        return f"{self._shard_bases[shard]}owned:"

    def owned(self, shard: ShardId, executor: ExecutorId, model: str) -> str:
        """Set of the sequences that an executor owns."""
        return f"{self._shard_bases[shard]}owned:{executor}:{model}"

    def replies_prefix(self, shard: ShardId) -> str:
        """What every reply stream of a shard begins with."""
        return f"{self._shard_bases[shard]}replies:"

    def replies(self, shard: ShardId, gateway: GatewayId) -> str:
        """Stream of replies for one gateway, {token: reply, ...}; TTL, renewed by the gateway while it lives."""
        return f"{self._shard_bases[shard]}replies:{gateway}"

    # -- stateless work ---------------------------------------------------------------------------------------------

    def home_shard(self, model: str) -> ShardId:
        """The shard in which a stateless model's work lies."""
        return ShardId(xxhash.xxh64_intdigest(model.encode()) % self.shards)

    def work_queue(self, model: str, version: str) -> WorkKeys:
        """A model version's queue of stateless requests, on the model's home shard; permanent, and empty when there is
        nothing to do but for the count of arrivals."""
        base = f"{self.base(self.home_shard(model))}work:{model}:{version}:"
        return WorkKeys(*(base + name for name in WorkKeys._fields))

    def cache(self, shard: ShardId) -> CacheKeys:
        """The response cache of the stateless models whose home the shard is; one day's TTL, renewed while
        it is used."""
        return CacheKeys(*(f"{self._shard_bases[shard]}cache:{name}" for name in CacheKeys._fields))

    # -- statistics -------------------------------------------------------------------------------------------------

    def unreadable(self, shard: ShardId | None) -> str:
        """Hash: of each kind of key, how many values could not be read, and the last one's name
        (`shared.store.reading`). A shard's is written by scripts, the mesh's (None) by services; permanent."""
        return f"{self.mesh_base if shard is None else self._shard_bases[shard]}unreadable"

    def tally_prefix(self, shard: ShardId, model: str, generation: str) -> str:
        """What the tallies of a model's versions begin with; the version follows. generation "": of requests that were
        refused while they waited, by those who know of no load; they count for the one that is served."""
        return f"{self._shard_bases[shard]}tally:{model}:{generation}:"

    def tally(self, shard: ShardId, model: str, version: str, generation: str) -> str:
        """List of packed counts not yet added up; one day's TTL, gone when they are. Written with every answer."""
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
        """Hash: schema version and number of shards; permanent. No schema is in its name."""
        return f"{self.prefix}:{MESH}"

    @property
    def services(self) -> str:
        """Hash: a service's name -> `company.ServiceLine`, written every few seconds; who is silent is removed."""
        return f"{self.mesh_base}services"

    @property
    def executors(self) -> str:
        """Hash: executor id -> `ExecutorRegistration`; an entry goes when the executor's sequences are all moved."""
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
        """Stream that tells executors which model's word in `wanted` is new, trimmed to the last thousand."""
        return f"{self.mesh_base}control"

    @property
    def wanted(self) -> str:
        """Hash: model -> `ControlMessage`, the last that was asked; written by gateways, permanent."""
        return f"{self.mesh_base}wanted"

    @property
    def kept(self) -> str:
        """Hash: model -> `ControlMessage`, the last that an executor carried out; permanent."""
        return f"{self.mesh_base}kept"

    def load_attempts(self, model: str, load: str) -> str:
        """Hash + TTL: the attempts of one load of a model that go on, or that ended their process
        (`executor.models.loader`)."""
        return f"{self.mesh_base}load:{model}:{load}"

    @property
    def settings(self) -> str:
        """Hash: log and trace settings that were changed at run time, a field each; permanent."""
        return f"{self.mesh_base}settings"

    def gateway(self, gateway: GatewayId) -> str:
        """String + TTL: the gateway lives, and where."""
        return f"{self.mesh_base}gateway:{gateway}"

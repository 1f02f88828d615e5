"""Every Redis key of the mesh, by name. No other Python code builds a key.

What each key holds, how long it stays, and which services write and read it: docs/reference/keys.md. Tests compare that
page with the keys below.

Keys begin with the prefix and the schema version. `{shard}` is the hash tag of everything that belongs to a sequence,
so that each script's keys live on one node of a Cluster. `{mesh}` is the tag of keys that belong to no sequence.
Lua scripts build some names from a record (`seq:`, `inbox:`, ...); they are the same as below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from shared.contract.ids import ExecutorId, GatewayId, SequenceId, ShardId, first_shards, shard_of

DEFAULT_PREFIX = "seqmesh"
"""Default beginning of a mesh's keys."""
SHARDS_MAX = 1024
SHARDS_OF_A_NEW_MESH = 1
"""One server runs one script at a time. With more shards the steps of one moment come in more script calls, and each
call costs: four shards on one server take a fifth of the throughput. More than one are for a Cluster.
"""
SCHEMA_VERSION = 2
"""Grows when keys, fields or messages change their meaning. It is part of every key but `MESH`
(`shared.store.release`).
"""
MESH = "{mesh}:mesh"
"""The key without schema version, after the prefix: services of every schema find it."""

TYPES = {
    kind: type_
    for type_, kinds in {
        "hash": "seq checkpoint journal line work:meta work:messages work:held work:takers work:early cache:entries "
        "cache:about counts unreadable mesh services executors drained terms models wanted kept load settings calls "
        "tenants spares lent executor-digests model-digests",
        "string": "idle epoch fence wanted-slots work:number report executor-lease leader scheduler gateway forecast "
        "allowance",
        "stream": "parked starts feed inbox replies control",
        "zset": "deadlines work:queue work:deadlines work:order cache:used",
        "list": "work:wake tally",
        "set": "owned tenant",
    }.items()
    for kind in kinds.split()
}
"""Every kind of key (`kind_of`), with its type in Redis."""


def kind_of(key: str) -> str:
    """The kind of a key of any mesh: the word after its hash tag; for the groups `work` and `cache` with the last
    word.
    """
    first, _, rest = key.partition("}:")[2].partition(":")
    return f"{first}:{rest.rpartition(':')[2]}" if first in ("work", "cache") else first


class WorkKeys(NamedTuple):
    """The keys of one model version's queue of stateless work, in the order in which the scripts take them
    (`shared/store/lua/work.lua`).
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
    """The four keys of one sequence. Scripts are told of the record, and make the others of it."""

    record: str
    idle: str
    parked: str
    checkpoint: str


class Keyspace:
    """All key names of one mesh.

    prefix  tells meshes on one Redis apart
    shards  of the mesh, or how many it has on one server: `shared.store.agreement.join_mesh` tells them. Keys that
            belong to no shard are the same with any
    """

    def __init__(self, prefix: str = DEFAULT_PREFIX, shards: int | Sequence[ShardId] = SHARDS_OF_A_NEW_MESH) -> None:
        self.prefix = prefix
        self.shards = first_shards(shards) if isinstance(shards, int) else tuple(shards)
        self._shard_bases = {shard: f"{prefix}:{SCHEMA_VERSION}:{{{shard}}}:" for shard in self.shards}
        self._mesh_base = f"{prefix}:{SCHEMA_VERSION}:{{mesh}}:"
        self.mesh = f"{prefix}:{MESH}"
        self.services = f"{self._mesh_base}services"
        self.executors = f"{self._mesh_base}executors"
        self.executor_digests = f"{self._mesh_base}executor-digests"
        self.drained = f"{self._mesh_base}drained"
        self.terms = f"{self._mesh_base}terms"
        self.models = f"{self._mesh_base}models"
        self.model_digests = f"{self._mesh_base}model-digests"
        self.control = f"{self._mesh_base}control"
        self.wanted = f"{self._mesh_base}wanted"
        self.kept = f"{self._mesh_base}kept"
        self.settings = f"{self._mesh_base}settings"
        self.calls = f"{self._mesh_base}calls"
        self.tenants = f"{self._mesh_base}tenants"

    def shard_of(self, sequence: SequenceId) -> ShardId:
        return shard_of(sequence, self.shards)

    def base(self, shard: ShardId) -> str:
        """Beginning of every key of a shard."""
        return self._shard_bases[shard]

    def bases(self) -> list[str]:
        """Beginning of the keys of each hash tag."""
        return [self._mesh_base, *self._shard_bases.values()]

    # -- one sequence -----------------------------------------------------------------------------------------------

    def sequence(self, sequence: SequenceId) -> SequenceKeys:
        base = self._shard_bases[shard_of(sequence, self.shards)]
        return SequenceKeys(
            f"{base}seq:{sequence}",
            f"{base}idle:{sequence}",
            f"{base}parked:{sequence}",
            f"{base}checkpoint:{sequence}",
        )

    def records(self, sequences: Iterable[SequenceId]) -> list[str]:
        """The keys by which scripts are told of sequences: the others follow from them."""
        bases, shards = self._shard_bases, self.shards
        return [f"{bases[shard_of(sequence, shards)]}seq:{sequence}" for sequence in sequences]

    def journal(self, sequence: SequenceId) -> str:
        """Of a sequence whose model keeps journals. Scripts make the name of the record's."""
        return f"{self._shard_bases[shard_of(sequence, self.shards)]}journal:{sequence}"

    # -- one shard --------------------------------------------------------------------------------------------------

    def epoch(self, shard: ShardId) -> str:
        return f"{self._shard_bases[shard]}epoch"

    def fence(self, shard: ShardId, model: str) -> str:
        return f"{self._shard_bases[shard]}fence:{model}"

    def starts(self, shard: ShardId, model: str) -> str:
        return f"{self._shard_bases[shard]}starts:{model}"

    def feed(self, shard: ShardId, model: str) -> str:
        return f"{self._shard_bases[shard]}feed:{model}"

    def wanted_slots(self, shard: ShardId, model: str, version: str) -> str:
        return f"{self._shard_bases[shard]}wanted-slots:{model}:{version}"

    def line(self, shard: ShardId, model: str) -> str:
        return f"{self._shard_bases[shard]}line:{model}"

    def deadlines(self, shard: ShardId, model: str) -> str:
        return f"{self._shard_bases[shard]}deadlines:{model}"

    def tenant(self, shard: ShardId, tenant: str) -> str:
        """The sequences of a tenant that are not over."""
        return f"{self._shard_bases[shard]}tenant:{tenant}"

    def inbox(self, shard: ShardId, executor: ExecutorId) -> str:
        return f"{self._shard_bases[shard]}inbox:{executor}"

    def owned(self, shard: ShardId, executor: ExecutorId, model: str) -> str:
        return f"{self._shard_bases[shard]}owned:{executor}:{model}"

    def spares(self, shard: ShardId, executor: ExecutorId, model: str) -> str:
        """The free slots of an executor that scripts may give to new sequences."""
        return f"{self._shard_bases[shard]}spares:{executor}:{model}"

    def replies(self, shard: ShardId, gateway: GatewayId) -> str:
        return f"{self._shard_bases[shard]}replies:{gateway}"

    # -- stateless work ---------------------------------------------------------------------------------------------

    def home_shard(self, model: str) -> ShardId:
        """The shard that holds a stateless model's work."""
        return self.shards[xxhash.xxh64_intdigest(model.encode()) % len(self.shards)]

    def work_queue(self, model: str, version: str) -> WorkKeys:
        """A model version's queue of stateless requests, on the model's home shard."""
        base = f"{self.base(self.home_shard(model))}work:{model}:{version}:"
        return WorkKeys(*(base + name for name in WorkKeys._fields))

    def cache(self, shard: ShardId) -> CacheKeys:
        """The response cache of the stateless models whose home the shard is."""
        return CacheKeys(*(f"{self._shard_bases[shard]}cache:{name}" for name in CacheKeys._fields))

    # -- statistics -------------------------------------------------------------------------------------------------

    def unreadable(self, shard: ShardId | None) -> str:
        """Scripts write a shard's, services the mesh's (None)."""
        return f"{self._mesh_base if shard is None else self._shard_bases[shard]}unreadable"

    def tally(self, shard: ShardId, model: str, version: str, generation: str) -> str:
        """The tally of one load. Generation "" is for requests that were refused while they waited, by scripts that
        know of no load: they count for the load that is served.
        """
        return f"{self._shard_bases[shard]}tally:{model}:{generation}:{version}"

    def counts(self, shard: ShardId, model: str, version: str, generation: str) -> str:
        return f"{self._shard_bases[shard]}counts:{model}:{generation}:{version}"

    def report(self, executor: ExecutorId) -> str:
        return f"{self._mesh_base}report:{executor}"

    # -- the mesh ---------------------------------------------------------------------------------------------------

    def executor_lease(self, executor: ExecutorId) -> str:
        return f"{self._mesh_base}executor-lease:{executor}"

    def leader(self, model: str) -> str:
        return f"{self._mesh_base}leader:{model}"

    def lent(self, model: str) -> str:
        """To which shard of a Cluster each slot of the model was lent last."""
        return f"{self._mesh_base}lent:{model}"

    def forecast(self, model: str) -> str:
        return f"{self._mesh_base}forecast:{model}"

    def allowance(self, tenant: str) -> str:
        """Of a tenant whose steps per second are limited."""
        return f"{self._mesh_base}allowance:{tenant}"

    def scheduler(self, name: str) -> str:
        return f"{self._mesh_base}scheduler:{name}"

    def load_attempts(self, model: str, load: str) -> str:
        return f"{self._mesh_base}load:{model}:{load}"

    def gateway(self, gateway: GatewayId) -> str:
        return f"{self._mesh_base}gateway:{gateway}"

"""Every kind of key: its type in Redis, what it holds, who writes it and who reads it. Names: `shared.store.keyspace`.

A key without a TTL is permanent or ends with its sequence (`keyspace.PERMANENT`, `keyspace.SEQUENCE_BOUND`); what ends
all others is said here. Names in parentheses are scripts (`shared/store/lua`).
"""

from __future__ import annotations

from typing import NamedTuple


class KeyKind(NamedTuple):
    """One kind of key. ends: what gives it an end, beside its patterns in the keyspace."""

    type: str
    holds: str
    writers: str
    readers: str
    ends: str = ""


GATEWAYS, SCHEDULERS, EXECUTORS = "gateways", "schedulers", "executors"
QUEUE_WRITERS = "gateways (`work_enqueue`, `work_withdraw`), executors (all other scripts of work)"
CACHE = "gateways (`work_enqueue`), executors (`work_finish`)"
A_DAY = "TTL of one day"

KINDS: dict[str, KeyKind] = {
    # one sequence
    "seq": KeyKind(
        "hash",
        "The record of a sequence. Its fields stand below.",
        "gateways (`submit`, `cancel`, `orphan`), schedulers (`assign`, `reclaim`, `vacate`, `expire`, `reject`, "
        "`sweep`), executors (`commit`, `attempt`, `reload`, `lose`)",
        "scripts; gateways after a lost connection; a leader that rebuilds; an executor that takes a sequence over",
        "when the sequence is over: TTL `--tombstone-seconds`",
    ),
    "idle": KeyKind(
        "string",
        "Marker of a sequence that is idle. Its TTL is the idle time: when it is gone, the sequence has expired.",
        "gateways (`submit`, `orphan`), executors (`commit`)",
        "schedulers (`expire`)",
        "TTL while no step is open",
    ),
    "parked": KeyKind(
        "stream",
        "Steps of a sequence that waits for a slot.",
        "gateways (`submit`), schedulers (`drain`)",
        "schedulers (`assign`, `reject`), gateways (`cancel`)",
    ),
    "checkpoint": KeyKind(
        "hash",
        "State of a sequence: `n` the step it belongs to, `s:<state>` a tensor, `m` what the model's own method gave, "
        "`t` the trace context.",
        "executors (`commit`)",
        "the executor that takes the sequence over; schedulers, for the description of one that expired",
    ),
    # one shard
    "epoch": KeyKind(
        "string", "Counter of ownerships.", "schedulers (`assign`, `reclaim`, `vacate`)", "the same scripts"
    ),
    "fence": KeyKind(
        "string",
        "Newest term of a model's leader that acted in the shard.",
        "the scripts of schedulers, all but `drain`, which takes no term",
        "the same scripts: one with an older term is refused",
    ),
    "starts": KeyKind(
        "stream",
        "The backlog: sequences that wait for a slot, news of lowered deadlines, and wishes to move a sequence.",
        "gateways (`submit`), schedulers (`reclaim`, `vacate`, `sweep`), `seqmesh move`",
        "the model's leader",
    ),
    "feed": KeyKind(
        "stream",
        "Sequences that are over, or gave up their slot.",
        "executors (`commit`, `reload`, `lose`), schedulers (`expire`, `reclaim`), gateways (`cancel`)",
        "the model's leader, which empties it",
    ),
    "wanted-slots": KeyKind(
        "string",
        "How many slots the next commits of a model version may free, because others wait.",
        "the model's leader; executors (`commit`) count it down",
        "executors (`commit`)",
        "TTL of 2 s",
    ),
    "line": KeyKind(
        "hash",
        "What a model's waiting line amounts to: `w` sequences that wait for their first slot; by version `s:` steps "
        "that wait, `out:`, `in:`, `gone:` of paged sequences, `lost:`, `leaving:`, `moved:` of takeovers, `refused:` "
        "of commits.",
        "the scripts of all services that change the line",
        "gateways, for metrics and bounds",
    ),
    "deadlines": KeyKind(
        "zset",
        "When to look at which sequence's idle marker, Redis clock, ms.",
        "executors (`commit`), gateways (`orphan`), schedulers (`expire`, `sweep`)",
        "the model's leader; gateways (`submit`) count live sequences by it",
    ),
    "inbox": KeyKind(
        "stream",
        "Steps and control messages for one executor. An entry goes when its step is checkpointed.",
        "gateways (`submit`, `cancel`), schedulers (`assign`, `drain`, `vacate`, `expire`)",
        "the executor; schedulers (`drain`), when the executor is gone",
        "removed with the executor's registration",
    ),
    "owned": KeyKind(
        "set",
        "Sequences of one model that an executor owns.",
        "schedulers (`assign`, `reclaim`, `vacate`, `expire`, `sweep`), executors (`commit`, `reload`, `lose`)",
        "schedulers; an executor that is to leave; `seqmesh drain`",
    ),
    "replies": KeyKind(
        "stream",
        "Replies for one gateway.",
        "the scripts that answer; the gateway creates it",
        "the gateway",
        "TTL of 60 s, renewed by the gateway while it lives",
    ),
    # stateless work
    "work:queue": KeyKind(
        "zset", "Requests that wait, in the order in which they are to run.", QUEUE_WRITERS, EXECUTORS
    ),
    "work:meta": KeyKind(
        "hash",
        "Of each request: place, arrival, deadline, rows, and how many executors were lost with it.",
        QUEUE_WRITERS,
        EXECUTORS,
    ),
    "work:messages": KeyKind("hash", "Encoded requests, until they are answered.", QUEUE_WRITERS, EXECUTORS),
    "work:held": KeyKind("hash", "Of each request that runs: its executor.", QUEUE_WRITERS, EXECUTORS),
    "work:takers": KeyKind(
        "hash",
        "Of each executor: what its latest take got, so that a repeated take gets the same.",
        EXECUTORS,
        EXECUTORS,
    ),
    "work:deadlines": KeyKind("zset", "Deadlines of waiting requests, us.", QUEUE_WRITERS, EXECUTORS),
    "work:number": KeyKind("string", "Counter of arrivals.", "gateways (`work_enqueue`)", "the same script"),
    "work:wake": KeyKind(
        "list",
        "At most one token, for an executor that is idle.",
        "the scripts that leave work behind",
        EXECUTORS,
    ),
    "work:order": KeyKind(
        "zset",
        "Arrival numbers, where answers leave in the order of arrival.",
        QUEUE_WRITERS,
        "executors (`work_finish`)",
    ),
    "work:early": KeyKind(
        "hash", "Answers held back until their turn.", "executors (`work_finish`)", "executors (`work_finish`)"
    ),
    "cache:entries": KeyKind(
        "hash", "Answers of the response cache.", CACHE, "gateways", f"{A_DAY}, renewed while the cache is used"
    ),
    "cache:used": KeyKind("zset", "When each answer was last used, us.", CACHE, CACHE, "as `cache:entries`"),
    "cache:about": KeyKind(
        "hash", "Bytes of all answers, and how many had to make room.", CACHE, GATEWAYS, "as `cache:entries`"
    ),
    # statistics
    "tally": KeyKind(
        "list",
        "Packed counts that are not yet added up.",
        "the scripts that answer",
        "gateways and executors (`total`), which empty it",
        A_DAY,
    ),
    "counts": KeyKind(
        "hash",
        "Sums of one load of a model version.",
        "gateways and executors (`total`)",
        GATEWAYS,
        f"{A_DAY}, renewed by executors that serve the load",
    ),
    "report": KeyKind(
        "string",
        "An executor's report: its machine, its GPUs, its models' counts.",
        "the executor",
        GATEWAYS,
        "TTL of 10 s",
    ),
    "unreadable": KeyKind(
        "hash",
        "By kind of key: how many values could not be read, and `last:` the name of the last one.",
        "all scripts and services",
        GATEWAYS,
    ),
    # the mesh
    "mesh": KeyKind(
        "hash", "Schema version and number of shards.", "the first service that starts", "every service at its start"
    ),
    "services": KeyKind(
        "hash",
        "Of each service: release and format.",
        "every service, every 5 s; an entry that is silent for 60 s is removed",
        "every service; `seqmesh drain --list`",
    ),
    "executors": KeyKind(
        "hash",
        "Of each executor: its registration (host, models, slots).",
        "executors; schedulers remove an entry when its sequences are all moved",
        "all services",
    ),
    "drained": KeyKind(
        "hash", "Executors that are to hold nothing, by name or id, and since when, ms.", "`seqmesh drain`", EXECUTORS
    ),
    "executor-lease": KeyKind("string", "The executor lives.", "the executor", "all services", "TTL `--lease-ms`"),
    "leader": KeyKind(
        "string",
        "The scheduler that leads a model, and its term.",
        "schedulers (`lead`, `resign`)",
        SCHEDULERS,
        "TTL `--lease-ms`",
    ),
    "scheduler": KeyKind(
        "string",
        "The scheduler of that name lives; the models that it leads.",
        "the scheduler",
        "its health check",
        "TTL `--lease-ms`, at least 1 s",
    ),
    "terms": KeyKind(
        "hash", "Of each model: the last term given to a leader.", "schedulers (`lead`)", "the same script"
    ),
    "models": KeyKind("hash", "Of each model: its configuration as it was loaded.", EXECUTORS, "all services"),
    "control": KeyKind(
        "stream",
        "Which model's word in `wanted` is new, the last thousand.",
        "gateways",
        EXECUTORS,
    ),
    "wanted": KeyKind("hash", "Of each model: the last load or unload that was asked for.", GATEWAYS, EXECUTORS),
    "kept": KeyKind("hash", "Of each model: the last load or unload that was carried out.", EXECUTORS, EXECUTORS),
    "load": KeyKind(
        "hash",
        "Attempts of one load of a model that go on, or that ended their process.",
        EXECUTORS,
        EXECUTORS,
        "TTL of one hour",
    ),
    "settings": KeyKind(
        "hash",
        "Log and trace settings that were changed at run time.",
        "gateways, `seqmesh settings --reset`",
        "all services",
    ),
    "gateway": KeyKind(
        "string", "The gateway lives, and where.", "the gateway", "operators; no service", "TTL of 60 s, renewed"
    ),
}
"""By the kind's name (`keyspace.kind_of`)."""


class EntryField(NamedTuple):
    """One field of a stream's entries. absent: when an entry lacks it; "" for a field that every entry has."""

    name: str
    meaning: str
    absent: str = ""


STEP_ONLY = "in a control message"

INBOX_FIELDS = (
    EntryField(
        "k", "Kind of a control message: `expired`, `vacated`, `cancelled` or `owned`; the next table.", "in a step"
    ),
    EntryField("q", "Sequence id."),
    EntryField("n", "Number of the step.", STEP_ONLY),
    EntryField("f", "Flags of the step (`shared.contract.messages.StepFlag`), added up.", STEP_ONLY),
    EntryField("e", "Epoch of the ownership for which the entry was written."),
    EntryField("i", "Index of the instance.", "unless the entry is a step, or `owned`"),
    EntryField("l", "Index of the slot in the instance.", "unless the entry is a step, or `owned`"),
    EntryField("c", "Last committed step when the entry was written.", "unless the entry is a step, or `owned`"),
    EntryField("v", "Version that the sequence runs on.", "unless the entry is a step, or `owned`"),
    EntryField("g", "Gateway of the first caller.", STEP_ONLY),
    EntryField("t", "The gateway's token for that caller.", STEP_ONLY),
    EntryField("m", "The request: an encoded `shared.contract.messages.InferMessage`.", STEP_ONLY),
    EntryField("s", "Number of the step whose caller has gone.", "unless the entry is `cancelled`"),
    EntryField(
        "x",
        "The step is not run: `1` its caller has gone, `2` it is given up. `assign` and `drain` write it.",
        "when the step is to run, and from `submit`",
    ),
    EntryField(
        "y",
        "How many owners were lost with the sequence's next step, if they are enough to suspect it. `assign` and "
        "`drain` write it.",
        "when there is no suspicion, and from `submit`",
    ),
)
"""Fields of an inbox's entry. A parked step has `q`, `n`, `f`, `g`, `t` and `m` of them."""

INBOX_KINDS = {
    "owned": "the executor owns the sequence now, which has no open step (`assign`)",
    "cancelled": "the caller of a delivered step has gone (`cancel`)",
    "vacated": "the sequence has given up its slot between two steps (`vacate`)",
    "expired": "the sequence was idle for too long and is over (`expire`)",
}

STARTS_FIELDS = (
    EntryField("k", "Kind of the entry: the next table."),
    EntryField("q", "Sequence id."),
    EntryField("v", "Version that the sequence runs on.", "when the kind is `v`"),
    EntryField("u", "Timeout of the first step, us; `0`: none.", "when the kind is `d` or `v`"),
    EntryField("b", "Entry by which the sequence waits (`be` of the record).", "unless the kind is `d`"),
    EntryField("d", "The lowered deadline, ms.", "unless the kind is `d`"),
    EntryField("x", "Executor that the operator wants; empty: any other one.", "unless the kind is `v`"),
)

STARTS_KINDS = {
    "w": "a new sequence waits for its first slot (`submit`, `sweep`)",
    "m": "a sequence that moves waits for its next slot (`reclaim`, `vacate`, `sweep`)",
    "r": "a paged sequence has a step again and waits for a slot (`submit`)",
    "d": "a waiting sequence got a step whose timeout ends earlier (`submit`)",
    "v": "an operator wishes that a sequence moves (`seqmesh move`)",
}

FEED_FIELDS = (
    EntryField("k", "Kind of the entry: the next table."),
    EntryField("q", "Sequence id."),
    EntryField("e", "Epoch of the ownership that is over; `0` if the sequence had no slot."),
    EntryField("b", "Entry by which the sequence waited.", "unless the sequence waited for a slot"),
)

FEED_KINDS = {
    "e": "ended: the step with END is committed (`commit`)",
    "x": "expired: the sequence was idle for too long (`expire`)",
    "f": "failed: the step with START failed in the model (`commit`)",
    "o": "lost: the sequence's state is gone (`commit`, `reclaim`, `reload`)",
    "c": "cancelled: the callers of a step have gone (`commit`, `cancel`)",
    "p": "paged: the sequence has given up its slot, and lives (`commit`)",
    "u": "unreadable: the record could not be read, so every epoch so far is over (`lose`, and any script that meets "
    "such a record)",
}

"""What `seqmesh doctor` concludes from the facts that it gathered. Pure: facts in, diagnoses out.

Each diagnosis names its subject, says what is so, and has a remedy unless all is well.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from deploy.operate.texts import counted, size
from shared.contract.ids import ExecutorId
from shared.contract.messages import UNLOADED, RepositoryEntry
from shared.store.company import TELL_EVERY_S, ServiceLine
from shared.store.connections.fitness import NO_EVICTION, UnfitRedisError, check_server_info, risks
from shared.store.membership import Member
from shared.store.release import FORMAT, RELEASE
from shared.store.waiting_line import WaitingLine

SERVICES = ("gateway", "scheduler", "executor")
SLOW_ROUND_TRIP_MS = 2.0
"""A step waits for two or three round trips to Redis; at this length they cost more than the mesh itself."""
SKEW_MS = 500.0
FULL = 0.8
"""Share of a bound from which on it is worth a warning."""
SILENT_MS = 3000 * TELL_EVERY_S
"""A service that has told nothing for so long was killed or hangs, for all that one can see; it tells far oftener."""
OPEN_FILES_MIN = 4096
DISK_BYTES_MIN = 1 << 30
DISK_BYTES_TO_START = 8 << 20
"""An empty mesh has written 0.3 MB when it is ready, its scripts and logs; some room is for what follows."""


class Severity(enum.StrEnum):
    """FAIL: the mesh cannot serve, or loses what it holds. WARN: it will be worse than it must."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


class Diagnosis(msgspec.Struct, frozen=True):
    """One line of the report. remedy: what to do; "" if all is well"""

    severity: Severity
    subject: str
    text: str
    remedy: str = ""


class ServerFacts(msgspec.Struct, frozen=True):
    """What a Redis server told. Times in ms.

    info, config  the replies to INFO and CONFIG GET; an empty one: the server does not tell
    round_trip    the median of some PINGs
    skew          its clock less this machine's; known to half a round trip
    is_whole      whether the Cluster of which it is a node works, as the node sees it
    """

    info: Mapping[str, Any]
    config: Mapping[str, str]
    round_trip: float
    skew: float
    is_whole: bool = True


def ok(subject: str, text: str) -> Diagnosis:
    return Diagnosis(Severity.OK, subject, text)


def warn(subject: str, text: str, remedy: str) -> Diagnosis:
    return Diagnosis(Severity.WARN, subject, text, remedy)


def fail(subject: str, text: str, remedy: str) -> Diagnosis:
    return Diagnosis(Severity.FAIL, subject, text, remedy)


# -- Redis ---------------------------------------------------------------------------------------------------------


def of_fitness(info: Mapping[str, Any], *, of_cluster: bool = False) -> Diagnosis:
    """Whether this server can hold a mesh at all. info: the reply to INFO; of_cluster: so says the URL"""
    if not info:
        return warn("redis", "does not tell who it is", "allow the user INFO (ACL: +info)")
    try:
        check_server_info(info, of_cluster=of_cluster)
    except UnfitRedisError as error:
        return fail("redis", error.message, "docs/guides/redis.md")
    # Valkey calls itself Redis 7.2.4 too, for clients that ask what it understands.
    program = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"version {info['redis_version']}"
    return ok("redis", f"{program}, {counted(int(info.get('connected_slaves', 0)), 'replica')}")


def of_server(facts: ServerFacts) -> Iterator[Diagnosis]:
    """Whether a fit server takes writes, keeps what it is given, and is near enough."""
    yield from _writing(facts)
    yield from _keeping(facts)
    yield from _memory(facts.info)
    if facts.round_trip > SLOW_ROUND_TRIP_MS:
        yield warn(
            "redis",
            f"a round trip takes {facts.round_trip:.1f} ms",
            "run the services nearer to Redis, or give its machine less to do",
        )
    else:
        yield ok("redis", f"a round trip takes {facts.round_trip:.2f} ms")
    if abs(facts.skew) > SKEW_MS + facts.round_trip:
        yield warn(
            "clock",
            f"this machine is {abs(facts.skew) / 1000:.1f} s {'behind' if facts.skew > 0 else 'ahead of'} Redis",
            "set the clock (NTP). The mesh keeps time by Redis; logs and traces of this machine do not",
        )
    else:
        yield ok("clock", "this machine and Redis agree")


def of_refused_writes(facts: ServerFacts) -> Diagnosis | None:
    """Why a server takes no writes; None if it takes them. Without writes there is no sign of life in it."""
    good, wanted = _replicas(facts)
    if 0 <= good < wanted:
        return fail(
            "redis",
            f"takes no writes: {good} of {wanted} replicas keep up (min-replicas-to-write)",
            "start its replicas, or look into their logs; callers wait meanwhile",
        )
    if (status := facts.info.get("aof_last_write_status", "ok")) != "ok":
        return fail(
            "redis",
            f"takes no writes: aof_last_write_status is {status}",
            "look into the server's log: its disk may be full; callers wait meanwhile",
        )
    if _is_stopped_by_snapshot(facts):
        return fail(
            "redis",
            "takes no writes: rdb_last_bgsave_status is err (stop-writes-on-bgsave-error)",
            "look into the server's log: its disk may be full; callers wait meanwhile. A server with an append-only "
            'file needs no snapshots (CONFIG SET save "")',
        )
    return None


def _is_stopped_by_snapshot(facts: ServerFacts) -> bool:
    """Whether it takes no writes since a snapshot has failed (MISCONF)."""
    stops = facts.config.get("stop-writes-on-bgsave-error") == "yes" and facts.config.get("save", "")
    return bool(stops) and facts.info.get("rdb_last_bgsave_status", "ok") != "ok"


def _writing(facts: ServerFacts) -> Iterator[Diagnosis]:
    if (refused := of_refused_writes(facts)) is not None:
        yield refused
    good, wanted = _replicas(facts)
    if 0 < good == wanted:
        yield warn(
            "redis",
            f"takes no writes once a replica is lost: {good} keep up, and as many must (min-replicas-to-write)",
            "start the one that is missing, or one more",
        )


def _replicas(facts: ServerFacts) -> tuple[int, int]:
    """How many replicas keep up, -1 if nobody asks, and how many must."""
    # Named so by Redis and by Valkey; there only if some are wanted.
    return int(facts.info.get("min_slaves_good_slaves", -1)), int(facts.config.get("min-replicas-to-write", 0))


def _keeping(facts: ServerFacts) -> Iterator[Diagnosis]:
    info, config = facts.info, facts.config
    policy = config.get("maxmemory-policy", NO_EVICTION)
    if policy != NO_EVICTION:
        yield fail("redis", f"maxmemory-policy {policy} may drop live sequences", f"set it to {NO_EVICTION}")
    told_of = "rdb_last_bgsave_status" if _is_stopped_by_snapshot(facts) else ""
    for name in ("aof_last_bgrewrite_status", "rdb_last_bgsave_status"):
        if info.get(name, "ok") != "ok" and name != told_of:
            yield fail("redis", f"{name} is {info[name]}", "look into the server's log: its disk may be full")
    told = list(risks(config, replicas=int(info.get("connected_slaves", 0)))) if config else []
    for what, remedy in told:
        yield warn("redis", what.removeprefix("redis "), remedy)
    if not config:
        yield warn("redis", "does not tell its configuration", f"make sure that maxmemory-policy is {NO_EVICTION}")
    elif not told and policy == NO_EVICTION:
        yield ok("redis", "keeps what it is given (append-only file, no eviction)")


def _memory(info: Mapping[str, Any]) -> Iterator[Diagnosis]:
    used, bound = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    of = bound or int(info.get("total_system_memory", 0))
    if not of or used <= FULL * of:
        return
    told = f"{used / of:.0%} of its memory is used ({size(used)} of {size(of)})"
    if used >= bound > 0:
        yield fail("redis", f"is full: {told}", "give it more (maxmemory), or let sequences end: it refuses new steps")
    else:
        yield warn("redis", told, "give it more, or bound the sequences (--live-max): a full Redis refuses steps")


# -- a Cluster's nodes -------------------------------------------------------------------------------------------------


def of_node(address: str, diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Diagnoses of a server with its name. address: of a node; "" for a server that is no Cluster's"""
    return [msgspec.structs.replace(one, subject=f"{one.subject} {address}".rstrip()) for one in diagnoses]


def of_lost_node(why: str) -> Diagnosis:
    return fail(
        "redis",
        f"{why.rstrip('.')}: the sequences of its shards wait",
        "if it runs and refuses: docs/guides/redis.md. Else start it; if its machine is lost, let a replica take its "
        "place (redis-cli CLUSTER FAILOVER TAKEOVER, there)",
    )


def of_cluster(facts: Mapping[str, ServerFacts]) -> Iterator[Diagnosis]:
    """Whether the nodes of a Cluster work together; nothing of a server that is no Cluster's."""
    if facts.keys() <= {""}:
        return
    yield _of_wholeness(facts)
    yield from _of_replicas(facts)
    yield from _of_clocks(facts)


def _of_wholeness(facts: Mapping[str, ServerFacts]) -> Diagnosis:
    broken = [address for address, told in facts.items() if not told.is_whole]
    if not broken:
        return ok("cluster", f"{counted(len(facts), 'node')} with slots")
    return fail(
        "cluster",
        f"is down, as {', '.join(broken)} {'sees' if len(broken) == 1 else 'see'} it: slots lack a node, or most "
        "primaries are out of reach",
        "redis-cli --cluster check shows which; start those nodes, or let replicas take their places",
    )


def _of_replicas(facts: Mapping[str, ServerFacts]) -> Iterator[Diagnosis]:
    bare = [address for address, told in facts.items() if told.info.get("connected_slaves") == 0]
    if 0 < len(bare) < len(facts):
        yield warn(
            "cluster",
            f"no replica of {', '.join(bare)} is connected, as those of the others are",
            "start it, or add one: while that node is away, the sequences of its shards wait",
        )


def _of_clocks(facts: Mapping[str, ServerFacts]) -> Iterator[Diagnosis]:
    (behind, least), (ahead, most) = (
        choose(((address, told.skew) for address, told in facts.items()), key=lambda one: one[1])
        for choose in (min, max)
    )
    if most - least > SKEW_MS + max(told.round_trip for told in facts.values()):
        yield warn(
            "clock",
            f"{behind} is {(most - least) / 1000:.1f} s behind {ahead}",
            "set the clocks (NTP): idle sequences, pauses and waits end by so much too early or too late",
        )


def of_unused_nodes(unused: Iterable[str], shards: int) -> Iterator[Diagnosis]:
    """Nodes with slots that hold no key of the mesh. shards: with how many each node would"""
    for address in sorted(unused):
        yield warn(
            f"redis {address}",
            "holds no key of this mesh",
            f"to make use of it, stop the mesh, then `seqmesh reshard {shards}`",
        )


# -- services and models -----------------------------------------------------------------------------------------------


def of_services(lines: Sequence[ServiceLine], now_ms: int, dead: Collection[str]) -> Iterator[Diagnosis]:
    """Whether each kind of service runs, and all are of one format.

    now_ms  clock of Redis
    dead    schedulers whose sign of life, which lasts for a lease, has ended
    """
    for service in SERVICES:
        here = [line for line in lines if line.service == service]
        gone = dead if service == "scheduler" else ()
        spoke = sorted(line.name for line in here if now_ms - line.told_ms < SILENT_MS and line.name not in gone)
        # A service that was killed counts for a while. Not named is one that was started again under its name.
        silent = sorted({(line.name, (now_ms - line.told_ms) // 1000) for line in here if line.name not in spoke})
        told = "; ".join(f"{name} has told nothing for {silent_s} s" for name, silent_s in silent)
        if not spoke:
            yield fail("services", f"no {service} runs{told and f': {told}'}", f"start one: seqmesh {service}")
        elif told:
            remedy = "it was killed, or hangs: look into its log. A minute after its last word it is forgotten"
            yield warn("services", f"{counted(len(spoke), service)}: {', '.join(spoke)}; {told}", remedy)
        else:
            yield ok("services", f"{counted(len(spoke), service)}: {', '.join(spoke)}")
    others = sorted({(line.release, line.name) for line in lines if line.format != FORMAT})
    if others:
        named = ", ".join(f"{name} ({release})" for release, name in others)
        yield warn("services", f"of another format than {RELEASE}: {named}", "bring all services to one release")


def of_executors(members: Sequence[Member], drained: Iterable[str]) -> Iterator[Diagnosis]:
    """Executors that are registered but do not serve, and models that would stop with one process."""
    alive = {member.registration.name for member in members if member.alive}
    for member in members:
        if not member.alive and not member.registration.leaving:
            name = member.registration.name
            yield warn(
                "executors",
                f"{name} has lost its lease; its sequences are being taken over",
                f"look into its log; {'it runs again' if name in alive else 'what started it should start it again'}",
            )
    for name in drained:
        yield warn("executors", f"{name} is drained and serves nothing", f"seqmesh drain {name} --undo, when it may")
    usable = [member for member in members if member.usable]
    if len(usable) == 1:
        yield warn(
            "executors",
            f"{usable[0].registration.name} is the only one: sequences wait while it is away",
            "run a second one",
        )


def of_leaders(led: Mapping[str, bool]) -> Iterator[Diagnosis]:
    """Models whose sequences no scheduler leads. led: whether one does, by model"""
    for model in sorted(model for model, has_leader in led.items() if not has_leader):
        text = "no scheduler leads it: its sequences neither expire nor are taken over, and new ones find no slot soon"
        yield fail(f"model {model}", text, "look into the schedulers' logs, or run another one")


def of_models(
    members: Sequence[Member], lines: Mapping[str, WaitingLine], live: Mapping[str, int]
) -> Iterator[Diagnosis]:
    """Models that cannot be loaded, call themselves not ready, or have sequences that wait for a slot or an executor.

    lines  of the models that are led: without a leader no executor helps who waits
    live   how many sequences of a model live
    """
    usable = [member for member in members if member.usable]
    served: dict[str, set[ExecutorId]] = defaultdict(set)
    for member in usable:
        for one in member.registration.models:
            served[one.model].add(member.registration.executor)
    names = {member.registration.executor: member.registration.name for member in usable}
    yield from _failed(usable)
    for member in usable:
        for one in member.registration.models:
            if not one.says_ready:
                where = f"on {member.registration.name}"
                yield warn(f"model {one.model}", f"calls itself not ready {where}", "look into that executor's log")
    for model, executors in sorted(served.items()):
        waiting = lines[model].first if model in lines else 0
        if waiting:
            yield warn(f"model {model}", f"{counted(waiting, 'sequence')} without a slot", "run more executors")
        else:
            yield ok(f"model {model}", f"served by {', '.join(sorted(names[one] for one in executors))}")
    # What was unloaded may have paged sequences, which go on when it is loaded again.
    listed = {line.model for member in usable for line in member.registration.repository}
    for model in sorted((lines.keys() | live.keys()) - served.keys()) if usable else ():
        line = lines.get(model, WaitingLine())
        waits = line.first or line.steps.total()
        if waits or (model not in listed and live.get(model, 0)):
            what = "sequences wait" if waits else f"it has {counted(live[model], 'open sequence')}"
            yield fail(f"model {model}", f"no executor serves it, and {what}", "run one with this model again")
    if not usable:  # one that is drained is no member any more
        remedy = "seqmesh drain NAME --undo for one that is drained; else look into their logs, or run another one"
        yield fail("models", "no executor takes work, so none is served", remedy)
    if usable and not served:
        yield fail("models", "no model is loaded", _remedy_of_none(usable))


def _failed(usable: Sequence[Member]) -> Iterator[Diagnosis]:
    """Models whose load failed, or has not ended, each once with the executors that say the same of it."""
    executors: dict[RepositoryEntry, list[str]] = {}
    for member in usable:
        for entry in member.registration.repository:
            executors.setdefault(entry, []).append(member.registration.name)
    for entry, names in executors.items():
        who = ", ".join(names)
        if _has_failed(entry):
            where = f"version {entry.version} on {who}" if entry.version else who
            yield fail(f"model {entry.model}", f"is not loaded ({where})", entry.reason)
        elif entry.state == "LOADING":
            remedy = "wait; if its load hangs, mend it and start the executor anew"
            yield warn(f"model {entry.model}", f"is being loaded {entry.reason} ({who})", remedy)
        elif entry.state == "READY" and entry.reason:
            yield warn(f"model {entry.model}", f"is not what its files are ({who})", entry.reason)


def _has_failed(entry: RepositoryEntry) -> bool:
    return entry.state == "UNAVAILABLE" and entry.reason not in ("", UNLOADED)


def _remedy_of_none(usable: Sequence[Member]) -> str:
    """What to do where executors serve no model, by what their repositories hold."""
    entries = [entry for member in usable for entry in member.registration.repository]
    idle = sorted({entry.model for entry in entries if not _has_failed(entry) and entry.state != "LOADING"})
    if idle:
        return f"ask a gateway to load one of {', '.join(idle)}: POST /v2/repository/models/{quote(idle[0], '')}/load"
    return "mend those above" if entries else "give the executors a repository with models (--models)"


# -- this machine ----------------------------------------------------------------------------------------------------


def of_open_files(limit: int) -> Diagnosis:
    """limit: open files that the system allows a process, -1 without a limit"""
    if 0 <= limit < OPEN_FILES_MIN:
        return warn("open files", f"{limit} for a process", f"ulimit -n {OPEN_FILES_MIN}: each connection takes one")
    return ok("open files", "without a limit" if limit < 0 else f"{limit} for a process")


def of_disk(free: int, where: str) -> Diagnosis:
    """Room for the embedded Redis and the logs. free: bytes"""
    text = f"{size(free)} free in {where}"
    if free >= DISK_BYTES_MIN:
        return ok("disk", text)
    said = warn if free >= DISK_BYTES_TO_START else fail
    return said("disk", text, "the embedded Redis and the logs need room")


def of_no_mesh(data_dir: str, *, can_keep_data: bool) -> Diagnosis:
    """What is said in the place of a mesh's diagnoses: whether one could be started with this folder."""
    if not can_keep_data:
        return fail("mesh", f"none runs in {data_dir}, and no data can be kept there", "give another --data-dir")
    return ok("mesh", f"none runs in {data_dir}: start one with `seqmesh up`")


def of_ports(ports: Sequence[tuple[str, int, str]]) -> Iterator[Diagnosis]:
    """ports: option of `seqmesh up`, the port, and why it cannot be listened on; "" if it can"""
    for option, port, why in ports:
        if why:
            yield warn("ports", f"{port}: {why}", f"stop what runs there, or give `seqmesh up` another {option}")
    free = [str(port) for _, port, why in ports if not why]
    if free:
        yield ok("ports", f"free: {', '.join(free)}")


def of_gpus(names: Sequence[str], problem: str, torch: str) -> Diagnosis:
    """names: the machine's GPUs; problem: why they could not be asked; torch: version of its build, "" without one"""
    if problem:
        return warn("gpu", problem, "models compute on the CPU until that is mended")
    if not names:
        return ok("gpu", "none: models compute on the CPU")
    text = ", ".join(names)
    if "+cpu" in torch:
        return warn("gpu", f"{text}, but torch {torch} computes on the CPU alone", "install torch's build for CUDA")
    return ok("gpu", text)

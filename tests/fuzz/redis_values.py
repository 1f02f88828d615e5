"""Garbage, truncated, odd and future values in every kind of key of a running mesh, keys of another type, and removed
ones.

The kinds are those of `shared.store.keyspace`: one that is new there is attacked by construction, and
`test_redis_values` fails while nobody has said here whom it may disturb. Each input is one value, in a key of one kind,
while a sequence of its own is in the middle of its steps.

The sequence that was hit is answered in any case: with the right sum, or with an error; then it can begin anew. No
process ends, and no log has a traceback. Of the bystanders, a sequence and a stateless model that are asked meanwhile,
no answer is ever wrong; and none is an error unless the kind is one that belongs to all of them (`DISTURBS`), and then
only for a while. What Prometheus, clients and operators look at is asked for behind each input: no error of the code
comes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

from deploy import cli
from shared.contract.ids import ExecutorId, GatewayId, sequence_id
from shared.store.keyspace import TYPES, kind_of
from tests.every_key import every_key
from tests.fuzz.mutations import mutated_bytes, mutated_tree
from tests.mesh.model_repository import add_stateless_model, add_sum_model
from tests.mesh.running_mesh import REDIS_URL, RunningMesh, eventually, running_mesh

OWN = frozenset({"seq", "idle", "parked", "checkpoint", "journal"})
"""Kinds of which each key is one sequence's: nobody else may notice anything."""
DISTURBS = frozenset(
    {
        *("starts", "feed", "deadlines", "inbox", "owned", "spares", "replies", "epoch", "fence", "line"),
        *("executors", "executor-lease", "models", "leader", "terms"),
        *(kind for kind in TYPES if kind.startswith(("work:", "cache:"))),
    }
)
"""Kinds of which a key holds what is many sequences', or a member's: these may be told an error, and begin anew."""
HARMLESS = frozenset(
    {
        *("wanted-slots", "tally", "counts", "report", "mesh", "drained", "scheduler", "control", "wanted", "kept"),
        *("load", "services", "settings", "gateway", "unreadable", "calls", "forecast", "tenants", "tenant"),
        *("allowance", "lent", "executor-digests", "model-digests"),
    }
)
"""Kinds without which everything goes on: nobody may notice anything."""
NUMBERS = frozenset({"epoch", "fence", "terms", "work:number"})
"""A truncated number is a number: what cannot be told apart cannot be mended. So a field of a record (`seq`) becomes no
other number at all: its step waits for the ones before it, or its slot is one that nobody has."""
IMPOSSIBLE = (b"", b"-1", b"7.5", b"1e308", b"nan", b"%d" % (1 << 63), b"%d" % -(1 << 63), b"9" * 400, b"7 7 7 7 7")
"""Numbers that nothing counts to."""
FORMS: Sequence[tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = (
    (msgspec.json.decode, lambda tree: json.dumps(tree).encode()),
    (msgspec.msgpack.decode, msgspec.msgpack.encode),
)
"""How values are read and written that have members."""
PAGES = ("/v2/models/stats", "/v2/models/sum/config", "/v2/logging", "/v2/trace/setting", "/v2/sequences?model=sum")
COMMANDS = ("drain --list", "seq ls sum", "seq show sum victim-1", "tenants ls", "doctor", "settings")

SUM = "sum"
ANSWER_S = 40.0
"""How long whoever was hit may wait for an answer."""
DISTURBED_S = 40.0
"""How long others may be told errors after one of `DISTURBS`: a lease, a takeover, a new leader, on a busy machine."""
MEMORY_BYTES_MAX = 6 << 30
HEALTH_S_MAX = 90.0


class RedisValues:
    """The fuzzer (see `fuzzing.Fuzzer`). tried: kinds of keys that were written so far."""

    at_once = 1
    memory_bytes_max = MEMORY_BYTES_MAX
    health_s_max = HEALTH_S_MAX

    def __init__(self, mesh: RunningMesh, stateless: str) -> None:
        self._mesh = mesh
        self._stateless = stateless
        self._pids = [child.pid for child in mesh.state.children if child.pid]
        self._sum = 0
        self._goes_on = False
        self._disturbed_until = 0.0
        self._sequences = 0
        self._told = ""
        self.tried: set[str] = set()

    def attacked(self) -> Collection[int]:
        """Every service of the mesh."""
        return self._pids

    async def attack(self, chance: random.Random, kind: str = "") -> None:
        """Spoils one value. kind: of its key; any, unless it is said."""
        kind = kind or chance.choice(sorted(TYPES))
        self._sequences += 1
        sequence, total = f"victim-{self._sequences}", 0
        await self._begun(sequence)
        total = 1
        asked = None
        if chance.random() < 0.5:
            # In the middle of a step, or between two.
            asked = asyncio.create_task(self._step(sequence))
            await asyncio.sleep(chance.random() * 0.02)
        if kind in DISTURBS:
            self._disturbed_until = time.monotonic() + DISTURBED_S
        await asyncio.to_thread(self._spoil, chance, kind, sequence)
        self.tried.add(kind)
        for number in range(3):
            answer = await asked if asked else await self._step(sequence, end=number == 2)
            asked = None
            if answer is None:
                if kind not in OWN | DISTURBS:
                    self._excuse(f"with {kind} spoilt, a step")
                break
            total += 1
            assert answer == total, f"{kind}: {answer} instead of {total}"
        await self._begun(sequence)
        await self._step(sequence, end=True)
        await self._looked_at(chance)
        assert not (found := self._mesh.tracebacks()), f"with {kind} spoilt: {found[0]}"

    async def _looked_at(self, chance: random.Random) -> None:
        for page in PAGES:
            status, told = await asyncio.to_thread(self._ask, "GET", page)
            assert status != http.HTTPStatus.INTERNAL_SERVER_ERROR, f"{page}: {told[:300]!r}"
        metrics = f"{self._mesh.state.host}:{self._mesh.gateways[0].metrics_port}"
        status, told = await asyncio.to_thread(self._ask, "GET", "/metrics", at=metrics)
        assert status == http.HTTPStatus.OK, f"metrics: {status} {told[:300]!r}"
        environment = {REDIS_URL: self._mesh.state.redis_url}
        for command in chance.sample(COMMANDS, 2):
            # What it says, and whether it finds something wrong, is its own matter; it raises nothing.
            await asyncio.to_thread(
                CliRunner().invoke, cli.main, command.split(), env=environment, catch_exceptions=False
            )

    async def health(self) -> None:
        """A step of the sequence that goes on for ever, and a stateless request."""
        answer = await self._step("bystander", start=not self._goes_on)
        if answer is None:
            self._excuse("a sequence")
            await asyncio.sleep(0.1)
            self._goes_on, self._sum = False, 0
        else:
            self._sum, self._goes_on = self._sum + 1, True
            assert answer == self._sum, f"the bystander's sum is {answer} instead of {self._sum}"
        vector = {"datatype": "FP32", "shape": [1, 16], "data": [3.0] * 16}
        answer = await self._infer(self._stateless, {}, [{"name": "INPUT0", **vector}, {"name": "INPUT1", **vector}])
        if answer is None:
            self._excuse("a stateless request")
        else:
            assert answer == 6, f"3 and 3 are not {answer}"
        assert [] == self._mesh.deaths(), "a process has ended"

    def _excuse(self, what: str) -> None:
        assert time.monotonic() < self._disturbed_until, f"{what} of somebody else was refused: {self._told}"

    async def _begun(self, sequence: str) -> None:
        """Begins it: at once, unless somebody is disturbed; the one that was hit may be as long as that."""
        deadline = time.monotonic() + DISTURBED_S
        while await self._step(sequence, start=True) != 1:
            assert time.monotonic() < max(deadline, self._disturbed_until), f"it cannot begin: {self._told}"
            await asyncio.sleep(0.1)

    async def _step(self, sequence: str, *, start: bool = False, end: bool = False) -> int | None:
        """Adds 1; the sum, or None for an error."""
        flags = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
        return await self._infer(SUM, flags, [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [1]}])

    async def _infer(self, model: str, parameters: dict[str, Any], inputs: list[dict[str, Any]]) -> int | None:
        """The first number of the first output; None for an error."""
        body = json.dumps({"parameters": parameters, "inputs": inputs})
        status, told = await asyncio.to_thread(self._ask, "POST", f"/v2/models/{model}/infer", body)
        self._told = f"{status} {told[:300]!r}"
        return json.loads(told)["outputs"][0]["data"][0] if status == http.HTTPStatus.OK else None

    def _ask(self, method: str, path: str, body: str = "", *, at: str = "") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(at or self._mesh.http(), timeout=ANSWER_S)
        try:
            connection.request(method, path, body or None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    # -- values -------------------------------------------------------------------------------------------------------

    def _spoil(self, chance: random.Random, kind: str, sequence: str) -> None:
        keys, redis = self._mesh.keys, self._mesh.redis
        name = sequence_id(SUM, "", sequence)
        prefix = keys.executor_lease(ExecutorId(""))
        executors = [key.decode().removeprefix(prefix) for key in redis.scan_iter(match=f"{prefix}*")]
        gateways = [key.decode().rpartition(":")[2] for key in redis.scan_iter(match=keys.gateway(GatewayId("*")))]
        model = self._stateless if kind.startswith(("work", "cache")) else SUM
        arguments = {
            "shard": keys.shard_of(name),
            "model": model,
            "version": "1",
            "generation": "0",
            "load": "0",
            "executor": ExecutorId(chance.choice(executors or ["nobody-1"])),
            "gateway": GatewayId(chance.choice(gateways or ["nobody-1"])),
            "name": chance.choice(self._mesh.names("scheduler")),
            "sequence": name,
            "tenant": "acme",
        }
        for key in every_key(keys, arguments):
            if kind_of(key) == kind:
                spoil(chance, redis, key)


def spoil(chance: random.Random, redis: Any, key: str) -> None:
    """Writes one value into a key, or makes it another type's."""
    if chance.random() < 0.25:
        with redis.pipeline(transaction=True) as pipe:
            pipe.delete(key)
            pipe.set(key, b"garbage") if TYPES[kind_of(key)] == "list" else pipe.rpush(key, b"garbage")
            pipe.execute()
        return
    if chance.random() < 0.1:
        redis.delete(key)
        return
    with contextlib.suppress(Exception):  # it may be of another type since the input before
        _write(chance, redis, key)


def _write(chance: random.Random, redis: Any, key: str) -> None:
    match TYPES[kind_of(key)]:
        case "string":
            redis.set(key, spoilt(chance, key, redis.get(key) or b""), keepttl=True)
        case "hash":
            fields = sorted(redis.hkeys(key)) if kind_of(key) != "drained" else []
            field = chance.choice(fields) if fields and chance.random() < 0.8 else chance.randbytes(8)
            if chance.random() < 0.15:
                redis.hdel(key, field)
            else:
                redis.hset(key, field, spoilt(chance, key, redis.hget(key, field) or b""))
        case "stream":
            last = redis.xrevrange(key, count=1)
            fields = dict(last[0][1]) if last else {b"q": b"nobody", b"k": b"w"}
            field = chance.choice(sorted(fields))
            fields[field] = spoilt(chance, key, fields[field])
            if len(fields) > 1 and chance.random() < 0.2:
                del fields[field]
            redis.xadd(key, chance.choice((fields, {chance.randbytes(3): chance.randbytes(9)}, {b"k": b"newer"})))
        case "set":
            redis.sadd(key, chance.randbytes(9))
        case "zset":
            redis.zadd(key, {chance.randbytes(chance.choice((3, 60))): chance.choice((0, -1e300, 1e300, 7.5, "inf"))})
        case _:
            redis.rpush(key, spoilt(chance, key, redis.lindex(key, 0) or b""))


def spoilt(chance: random.Random, key: str, value: bytes) -> bytes:
    """Garbage, the value with its end cut off or bytes of it changed, or what a later release may make of it."""
    garbage = b"\xff" + chance.randbytes(chance.choice((0, 1, 20, 3000)))
    if kind_of(key) in NUMBERS:
        return chance.choice((garbage, *IMPOSSIBLE))
    match chance.randrange(6):
        case _ if kind_of(key) == "seq":
            return garbage
        case 0:
            return garbage
        case 1:
            return value[: chance.randrange(len(value) + 1)] if kind_of(key) != "line" else garbage
        case 2:
            return future(value)
        case 3 | 4:
            return odd(chance, value)
        case _:
            # A changed digit would be another number.
            return garbage if value.isdigit() else b"\xc1" + mutated_bytes(chance, value)


def odd(chance: random.Random, value: bytes) -> bytes:
    """A value of a form that its readers know, with what none of them expects in it."""
    for decode, encode in FORMS:
        with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
            known = decode(value)
            if isinstance(known, dict | list):
                return encode(mutated_tree(chance, known))
    return chance.choice(IMPOSSIBLE)


def future(value: bytes) -> bytes:
    """A value with more in it than this release knows of."""
    with contextlib.suppress(msgspec.MsgspecError):
        known: Any = msgspec.json.decode(value)
        return msgspec.json.encode({**known, "newer": [1]}) if isinstance(known, dict) else value
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        known = msgspec.msgpack.decode(value)
        return msgspec.msgpack.encode([*known, "newer", {"is": 7}]) if isinstance(known, list) else value
    return value


@asynccontextmanager
async def fuzzer(folder: Path) -> AsyncGenerator[RedisValues]:
    """A mesh of real processes, with two executors."""
    models = folder / "models"
    add_sum_model(models, SUM)
    stateless = add_stateless_model(models)
    environment = {"SEQMESH_LOG_LEVEL": "info"}
    with running_mesh(folder / "mesh", [models], executors=2, environment=environment) as mesh:
        attack = RedisValues(mesh, stateless)
        await eventually(mesh.is_ready, "the mesh is ready")
        await attack.health()
        yield attack


def kinds() -> Sequence[str]:
    """Every kind that somebody has said the effect of."""
    return sorted(OWN | DISTURBS | HARMLESS)

"""An executor that is a few lines: it computes sums, but speaks the real scripts. And a gateway to put before it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec

from gateway.service import ListeningPorts, serve
from gateway.settings import GatewaySettings
from shared.contract.ids import ExecutorId, InstanceIndex, SequenceId, SlotIndex, Term
from shared.contract.messages import (
    ExecutorRegistration,
    InboxCancelled,
    InboxStep,
    InferMessage,
    ModelRecord,
    ReplyMessage,
    RepositoryEntry,
    ServedModel,
    StepFlag,
    decode_infer,
    encode,
    inbox_entry,
)
from shared.contract.model_config import (
    ControlKind,
    ControlSpec,
    Direct,
    DynamicBatching,
    ModelConfig,
    SequenceBatching,
    TensorSpec,
)
from shared.contract.tensors import Tensor, from_numpy, to_numpy
from shared.process.lifecycle import Stop, Tasks
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.script_values import Assignment, LedShard, StepOutcome
from shared.store.scripts import Scripts
from shared.store.work_scripts import Take, Taken, WorkDone, WorkScripts
from tests.scripted_mesh import commit_of

IDLE_MS = 1_200_000
GRACE_MS = 600_000
"""Of `left_sum`'s orphans."""
TOMBSTONE_MS = 600_000
"""As the others, longer than any test takes: none is about the end of one."""


def running_sum(name: str = "running_sum", **batching: Any) -> ModelConfig:
    """INT32 [1] in, the sum since START out; a sequence model."""
    return ModelConfig(
        name=name,
        backend="python",
        platform="",
        max_batch_size=8,
        inputs=(TensorSpec("INPUT", "INT32", (1,)),),
        outputs=(TensorSpec("OUTPUT", "INT32", (1,)),),
        sequence_batching=SequenceBatching(
            strategy=Direct(),
            idle_us=IDLE_MS * 1000,
            controls=(ControlSpec("START", ControlKind.START, "INT32", (0, 1)),),
            **batching,
        ),
    )


def echo(
    name: str = "echo", datatype: str = "FP32", dims: tuple[int, ...] = (-1,), max_batch_size: int = 8
) -> ModelConfig:
    """One input, returned as it is; stateless."""
    return ModelConfig(
        name=name,
        backend="python",
        platform="",
        max_batch_size=max_batch_size,
        inputs=(TensorSpec("INPUT0", datatype, dims),),
        outputs=(TensorSpec("OUTPUT0", datatype, dims),),
        dynamic_batching=DynamicBatching(),
    )


def two_inputs(name: str = "add_sub") -> ModelConfig:
    """INT32 [4] twice in, sum and difference out; stateless."""
    return ModelConfig(
        name=name,
        backend="python",
        platform="",
        max_batch_size=8,
        inputs=(TensorSpec("INPUT0", "INT32", (4,)), TensorSpec("INPUT1", "INT32", (4,))),
        outputs=(TensorSpec("OUTPUT0", "INT32", (4,)), TensorSpec("OUTPUT1", "INT32", (4,))),
        dynamic_batching=DynamicBatching(),
    )


LABELS = {"labelled": {"OUTPUT0": ("cat", "dog", "", "bird")}}
MODELS = (
    running_sum(),
    running_sum("session_sum", implicit_start=True),
    msgspec.structs.replace(running_sum("left_sum"), parameters={"orphan_grace_microseconds": f"{GRACE_MS}000"}),
    echo(),
    echo("echo_text", "BYTES"),
    echo("one_text", "BYTES", (1,)),
    echo("labelled", "FP32", (4,)),
    echo("echo_half", "FP16"),
    echo("echo_bool", "BOOL"),
    two_inputs(),
    msgspec.structs.replace(echo("echo_many"), decoupled=True),
)


@dataclass
class FakeExecutor:
    """Scheduler and executor in one, for tests of the gateway: assigns every start at once and runs steps one by one.

    encoded   makes the bytes of a reply
    paused    while set, steps and work are left where they are; `pause` also waits for what is being done
    received  every message that was run, in order
    """

    redis: Redis
    keys: Keyspace
    models: tuple[ModelConfig, ...] = MODELS
    control_mode: str = "explicit"
    encoded: Callable[[ReplyMessage], bytes] = encode
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    received: list[InferMessage] = field(default_factory=list[InferMessage])
    resting: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: set[SequenceId] = field(default_factory=set[SequenceId])
    sums: dict[SequenceId, int] = field(default_factory=dict[SequenceId, int])
    executor: ExecutorId = field(default_factory=lambda: ExecutorId(f"fake-{uuid.uuid4().hex[:6]}"))
    takes: int = 0

    def __post_init__(self) -> None:
        self.scripts = Scripts(self.redis, self.keys)
        self.membership = Membership(self.redis, self.keys)
        self.commands = cast(Any, self.redis)
        self.registration = ExecutorRegistration(
            executor=self.executor,
            name="fake",
            host="here",
            pid=1,
            started_ms=1,
            models=tuple(ServedModel(m.name, "1", 1, m.configured_slots) for m in self.models),
            repository=tuple(RepositoryEntry(m.name, "1", "READY") for m in self.models),
            control_mode=self.control_mode,
        )

    async def join(self) -> None:
        for model in self.models:
            record = ModelRecord(model, f'{{"name":"{model.name}"}}', ("1",), labels=LABELS.get(model.name, {}))
            await self.membership.publish(record)
        await self.membership.register(self.registration, lease_ms=600_000)

    async def pause(self) -> None:
        """From here on nothing is done."""
        self.resting.clear()
        self.paused.set()
        await self.resting.wait()

    async def run(self) -> None:
        while True:
            moved = 0
            if self.paused.is_set():
                self.resting.set()
            elif full := await self._full():
                for model in self.models:
                    if model.sequence_batching is not None:
                        moved += await self._assign(model, full)
                    elif self.keys.work_queue(model.name, "1").queue in full:
                        moved += await self._work(model)
                moved += await self._steps()
            await asyncio.sleep(0 if moved else 0.002)

    async def _full(self) -> set[str]:
        """Streams and queues with entries. One round trip: it is asked hundreds of times a second, mostly in vain."""
        shards = self.keys.shards
        streams = [self.keys.inbox(shard, self.executor) for shard in shards]
        queues: list[str] = []
        for model in self.models:
            if model.sequence_batching is None:
                queues.append(self.keys.work_queue(model.name, "1").queue)
            else:
                streams += [self.keys.starts(shard, model.name) for shard in shards]
        async with self.redis.pipeline(transaction=False) as pipe:
            for stream in streams:
                pipe.execute_command("XLEN", stream)
            for queue in queues:
                pipe.zcard(queue)
            sizes = await pipe.execute()
        return {key for key, size in zip([*streams, *queues], sizes, strict=True) if size}

    async def _assign(self, model: ModelConfig, full: set[str]) -> int:
        moved = 0
        for shard in self.keys.shards:
            if (starts := self.keys.starts(shard, model.name)) not in full:
                continue
            entries = await self.commands.xrange(starts)
            if entries:
                places = [
                    Assignment(
                        SequenceId(fields[b"q"].decode()),
                        entry.decode(),
                        self.executor,
                        InstanceIndex(0),
                        SlotIndex(0),
                    )
                    for entry, fields in entries
                    if fields[b"k"] != b"d"
                ]
                if places:
                    await self.scripts.run(self.scripts.assign(places, LedShard(shard, model.name, Term(1))))
                moved += len(places)
        return moved

    async def _steps(self) -> int:
        moved = 0
        for shard in self.keys.shards:
            inbox = self.keys.inbox(shard, self.executor)
            entries = [inbox_entry(entry, fields) for entry, fields in await self.commands.xrange(inbox)]
            told = {(one.sequence, one.step) for one in entries if isinstance(one, InboxCancelled)}
            for one in entries:
                if isinstance(one, InboxStep):
                    gone = one.cancelled or (one.sequence, one.step) in told
                    await self._commit(shard, one, cancelled=gone)
                    moved += 1
                else:
                    await self.commands.xdel(inbox, one.entry)
        return moved

    async def _commit(self, shard: Any, step: InboxStep, *, cancelled: bool) -> None:
        message = decode_infer(step.message)
        if step.flags & StepFlag.START:
            self.cancelled.discard(step.sequence)
        if cancelled or step.sequence in self.cancelled:
            outcome = StepOutcome.CANCELLED if cancelled else StepOutcome.VOID
            self.cancelled.add(step.sequence)
            reply = ReplyMessage("1", error_code="CANCELLED")
        else:
            self.received.append(message)
            reply = self.answer(message, step)
            outcome = StepOutcome.FAILED if reply.error_code else StepOutcome.DONE
        commit = commit_of(step, self.encoded(reply), outcome, keep_reply=True, entries=(step.entry,))
        call = self.scripts.commit(
            [commit],
            shard=shard,
            executor=self.executor,
            load=ModelLoad(message.model, "", ""),
            idle_ms=IDLE_MS,
            tombstone_ms=TOMBSTONE_MS,
        )
        await self.scripts.run(call)

    def answer(self, message: InferMessage, step: InboxStep) -> ReplyMessage:
        value = int(to_numpy(message.inputs[0]).reshape(-1)[0])
        if value == -666:
            return ReplyMessage("1", error_code="INTERNAL", error="the model does not like -666", step=step.step)
        begun = 0 if step.flags & StepFlag.START else self.sums.get(step.sequence, 0)
        self.sums[step.sequence] = begun + value
        total = message.inputs[0].raw.__class__((begun + value).to_bytes(4, "little", signed=True))
        return ReplyMessage("1", (Tensor("OUTPUT", "INT32", message.inputs[0].shape, total),), step=step.step)

    async def _work(self, model: ModelConfig) -> int:
        load, work = ModelLoad(model.name, "1", "0"), WorkScripts(self.keys)
        self.takes += 1
        pull = work.pull(
            load,
            self.executor,
            f"{self.takes}",
            requests_max=64,
            rows_max=64,
            delay_us=0,
            take=Take.WHEN_PLAIN,
        )
        taken = await self.scripts.run(pull)
        if not isinstance(taken, Taken):
            return 0
        done: list[WorkDone] = []
        for request, raw in taken.requests:
            message = decode_infer(raw)
            self.received.append(message)
            done.append(WorkDone(request, self.encoded(ReplyMessage("1", self.outputs(message)))))
        await self.scripts.run(work.finish(load, self.executor, done))
        return len(done)

    def outputs(self, message: InferMessage) -> tuple[Tensor, ...]:
        if message.model == "add_sub":
            first, second = (to_numpy(tensor) for tensor in message.inputs)
            both = (from_numpy("OUTPUT0", first + second), from_numpy("OUTPUT1", first - second))
            return tuple(output for output in both if not message.outputs or output.name in message.outputs)
        (tensor,) = message.inputs
        return (Tensor("OUTPUT0", tensor.datatype, tensor.shape, tensor.raw),)


@dataclass(slots=True)
class RunningGateway:
    """A gateway in this loop. `stop` ends it and waits."""

    addresses: ListeningPorts
    stop: Callable[[], Coroutine[Any, Any, None]]
    url: str


@contextlib.asynccontextmanager
async def gateway_running(settings: GatewaySettings, *, grace_s: float = 5.0) -> AsyncGenerator[RunningGateway]:
    """Starts a gateway on free ports."""
    settings = replace(settings, exit_timeout_secs=grace_s)
    stop = Stop()
    ready: asyncio.Future[ListeningPorts] = asyncio.get_running_loop().create_future()

    async def life() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = Tasks(group)
            await serve(settings, tasks, stop, on_ready=ready.set_result)
            await tasks.end_all()

    task = asyncio.create_task(life())
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task

    async def end() -> None:
        stop.request("test")
        await task

    addresses = ready.result()
    try:
        yield RunningGateway(addresses, end, f"127.0.0.1:{addresses.http_port}")
    finally:
        await end()

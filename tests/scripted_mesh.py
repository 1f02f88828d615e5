"""A mesh of which a test plays the gateway and the scheduler itself, call by call, on the real server.

For tests of one service against the real scripts: what the other services would send is sent from here, in whatever
order the test wants.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from shared.contract.errors import Code
from shared.contract.ids import (
    CorrelationId,
    Epoch,
    ExecutorId,
    InstanceIndex,
    SequenceId,
    SlotIndex,
    Term,
    sequence_id,
)
from shared.contract.messages import (
    InboxEntry,
    InboxStep,
    InferMessage,
    ReplyMessage,
    StepFlag,
    decode_reply,
    encode,
    inbox_entry,
)
from shared.contract.step_digest import step_digest
from shared.contract.tensors import Tensor, from_numpy
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.connections.redis_client import redis_now_ms
from shared.store.keyspace import Keyspace
from shared.store.script_values import (
    Assignment,
    CancelCode,
    Cancellation,
    CommitCode,
    ExpiryCode,
    LedShard,
    Pausing,
    StepCommit,
    StepOutcome,
    Submission,
    Submitted,
    VacateCode,
    Vacation,
)
from shared.store.scripts import Scripts

GATEWAY = "g-test"
IDLE_MS = 60_000
PATIENCE_S = 60.0
"""How long an answer that must come is waited for; long, because the machine may be busy."""
STATE = encode(from_numpy("h", np.array([7], np.int32)))
"""The state in the checkpoints of `ScriptedMesh.commit`."""


ANSWER = encode(ReplyMessage("1"))


def commit_of(
    step: InboxStep, reply: bytes = ANSWER, outcome: StepOutcome = StepOutcome.DONE, **more: Any
) -> StepCommit:
    """How its owner makes a step final that lay in its inbox. more: other fields"""
    return StepCommit(
        *(step.sequence, step.epoch, step.step, step.flags, outcome, step.gateway, step.token, reply), **more
    )


class ScriptedMesh:
    """One gateway's and one scheduler's part, by hand, for one model.

    A token is `<correlation id>/<n>`, n counting this mesh's submissions from 1, so that a reply says what it answers.
    redis: typed loosely, because tests send commands that the mesh does not.
    """

    def __init__(self, redis: Redis, keys: Keyspace, model: str, version: str = "1") -> None:
        self.redis: Any = redis
        self.keys = keys
        self.scripts = Scripts(redis, keys)
        self.model = model
        self.version = version
        self.term = Term(1)
        self.submitted = 0
        self._positions: dict[str, str] = {}
        self.heard: list[str] = []
        """Tokens, in the order in which their replies came."""
        self._replies: dict[str, ReplyMessage] = {}

    def sequence(self, correlation_id: CorrelationId) -> SequenceId:
        """The mesh's name of a sequence of this model."""
        return sequence_id(self.model, "", correlation_id)

    async def open(self) -> None:
        """Creates the gateway's reply streams."""
        for shard in self.keys.shards:
            stream = self.keys.replies(shard, cast(Any, GATEWAY))
            await self.redis.xadd(stream, {"opened": ""})
            await self.redis.pexpire(stream, 600_000)
            self._positions[stream] = "0-0"

    def submission(
        self,
        correlation_id: CorrelationId,
        inputs: Mapping[str, np.ndarray[Any, Any]],
        flags: StepFlag = StepFlag.NONE,
        *,
        request_id: str = "",
        expected_step: int | None = None,
        timeout_us: int = 0,
        gateway: str = GATEWAY,
        since_ms: int = -1,
    ) -> Submission:
        """A step as a gateway would submit it."""
        self.submitted += 1
        tensors: tuple[Tensor, ...] = tuple(from_numpy(name, array) for name, array in inputs.items())
        message = InferMessage(
            self.model,
            self.version,
            request_id,
            correlation_id,
            tensors,
            arrived_ns=time.time_ns(),
            keep_reply=bool(request_id) or expected_step is not None,
        )
        return Submission(
            sequence=self.sequence(correlation_id),
            flags=flags | StepFlag.DURABLE,
            digest=step_digest(request_id, flags, () if StepFlag.NAMED in flags else tensors),
            expected_step=expected_step,
            version=self.version,
            gateway=gateway,
            token=f"{correlation_id}/{self.submitted}",
            timeout_us=timeout_us,
            message=encode(message),
            since_ms=since_ms,
        )

    async def submit(
        self, submission: Submission, *, backlog_max: int = 100, in_flight_max: int = 100, live_max: int = 100
    ) -> Submitted:
        """Submits one step."""
        call = self.scripts.submit(
            [submission], backlog_max=backlog_max, in_flight_max=in_flight_max, live_max=live_max
        )
        (outcome,) = await self.scripts.run(call)
        return outcome

    async def cancel(self, submission: Submission, accepted: Submitted) -> CancelCode:
        """The caller of an accepted step has gone."""
        gone = Cancellation(
            submission.sequence,
            accepted.birth,
            accepted.step,
            submission.gateway,
            submission.token,
        )
        reply = encode(ReplyMessage("", error_code=Code.CANCELLED))
        (code,) = await self.scripts.run(self.scripts.cancel([gone], reply=reply))
        return code

    async def assign(
        self,
        correlation_id: CorrelationId,
        executor: ExecutorId,
        *,
        slot: int = 0,
        instance: int = 0,
    ) -> Epoch:
        """Gives a waiting sequence to an executor."""
        sequence = self.sequence(correlation_id)
        entry = (await self.record(correlation_id)).get("be", "")
        place = Assignment(sequence, entry, executor, InstanceIndex(instance), SlotIndex(slot))
        call = self.scripts.assign([place], LedShard(self.keys.shard_of(sequence), self.model, self.term))
        (epoch,) = await self.scripts.run(call)
        return epoch

    async def vacate(self, correlation_id: CorrelationId, *, moving: bool = False) -> VacateCode:
        """Takes a live sequence out of its slot between two steps, if it can be, as a scheduler does."""
        sequence, record = self.sequence(correlation_id), await self.record(correlation_id)
        shard = self.keys.shard_of(sequence)
        vacation = Vacation(sequence, Epoch(int(record["ep"])), moving)
        (code,) = await self.scripts.run(self.scripts.vacate([vacation], LedShard(shard, self.model, self.term)))
        if code is VacateCode.UNDRAINED:
            await self.scripts.run(self.scripts.drain(ExecutorId(record["ow"]), shard=shard, alive=True))
        return code

    async def pause(self, correlation_id: CorrelationId, *, pause_ms: int = 60_000) -> bool:
        """Pauses a sequence, if it can be, as a scheduler does."""
        sequence = self.sequence(correlation_id)
        shard, until_ms = self.keys.shard_of(sequence), await redis_now_ms(self.redis) + pause_ms
        pausing = Pausing(sequence, until_ms)
        (owner,) = await self.scripts.run(self.scripts.pause([pausing], LedShard(shard, self.model, self.term)))
        if owner:
            await self.scripts.run(self.scripts.drain(owner, shard=shard, alive=True))
        return owner is not None

    async def resume(self, correlation_id: CorrelationId) -> bool:
        (resumed,) = await self.scripts.run(self.scripts.resume([self.sequence(correlation_id)]))
        return resumed

    async def inbox(self, executor: ExecutorId) -> list[InboxEntry]:
        """What lies in an executor's inboxes."""
        streams = [self.keys.inbox(shard, executor) for shard in self.keys.shards]
        return [inbox_entry(*entry) for stream in streams for entry in await self.redis.xrange(stream)]

    async def steps(self, executor: ExecutorId, correlation_id: CorrelationId | None = None) -> list[InboxStep]:
        """The steps in an executor's inboxes, if wanted of one sequence alone."""
        wanted = None if correlation_id is None else self.sequence(correlation_id)
        found = [entry for entry in await self.inbox(executor) if isinstance(entry, InboxStep)]
        return [step for step in found if wanted in (None, step.sequence)]

    async def expire(self, correlation_id: CorrelationId) -> bool:
        """Ends a sequence whose idle time is over, as a scheduler does; whether it was."""
        sequence = self.sequence(correlation_id)
        shard = self.keys.shard_of(sequence)
        call = self.scripts.expire([sequence], LedShard(shard, self.model, self.term), tombstone_ms=10_000)
        (ended,) = await self.scripts.run(call)
        return ended is not ExpiryCode.OPEN

    async def commit(
        self,
        correlation_id: CorrelationId,
        executor: ExecutorId,
        fields: Sequence[tuple[str, bytes]] = (("s:h", STATE),),
        *,
        outcome: StepOutcome = StepOutcome.DONE,
    ) -> None:
        """Makes the only step in the inbox final. fields: of its checkpoint"""
        (step,) = await self.steps(executor, correlation_id)
        done = commit_of(step, outcome=outcome, entries=[step.entry], checkpoint=fields)
        (code,) = await self.committed(executor, done)
        assert code in (CommitCode.COMMITTED, CommitCode.OVER)

    async def committed(
        self, executor: ExecutorId, *steps: StepCommit, load: ModelLoad | None = None, **more: Any
    ) -> list[CommitCode]:
        """What becomes of an executor's commits, all of one shard. more: what the call says beside the steps"""
        about: dict[str, Any] = {"idle_ms": IDLE_MS, "tombstone_ms": 10_000, **more}
        load = load or ModelLoad(self.model, "", "")
        shard = self.keys.shard_of(steps[0].sequence)
        return await self.scripts.run(self.scripts.commit(steps, shard=shard, executor=executor, load=load, **about))

    async def reclaim(self, dead: ExecutorId, *, tombstone_ms: int = 10_000, lost: bool = False) -> None:
        """Takes all sequences away from an executor, as a scheduler does; their steps stay in its inbox."""
        for shard in self.keys.shards:
            reclaim = self.scripts.reclaim(
                dead, LedShard(shard, self.model, self.term), count=2, tombstone_ms=tombstone_ms, lost=lost
            )
            while await self.scripts.run(reclaim) != (0, 0):
                pass

    async def take_over(self, dead: ExecutorId, *, tombstone_ms: int = 10_000, lost: bool = False) -> None:
        """What a scheduler does when an executor's lease has ended, before it gives the sequences new owners."""
        await self.reclaim(dead, tombstone_ms=tombstone_ms, lost=lost)
        for shard in self.keys.shards:
            after, looked_at = "0-0", 1
            while looked_at:
                after, looked_at, _ = await self.scripts.run(
                    self.scripts.drain(dead, shard=shard, after=after, count=2)
                )

    async def reply(self, submission: Submission) -> ReplyMessage:
        """The reply to a submitted step, waiting for it."""
        return await self.reply_to(submission.token)

    async def reply_to(self, token: str) -> ReplyMessage:
        """The reply to whatever was sent with a token, waiting for it."""
        async with asyncio.timeout(PATIENCE_S):
            while token not in self._replies:
                await self._read(block_ms=100)
        return self._replies.pop(token)

    async def unanswered(self, submission: Submission, *, for_ms: int) -> bool:
        """Whether no reply to a step came within that time."""
        deadline = time.monotonic() + for_ms / 1000
        while time.monotonic() < deadline:
            await self._read(block_ms=20)
        return submission.token not in self._replies

    async def record(self, correlation_id: CorrelationId) -> dict[str, str]:
        """The sequence's record."""
        raw = await self.redis.hgetall(self.keys.sequence(self.sequence(correlation_id)).record)
        return {name.decode(): value.decode(errors="replace") for name, value in raw.items()}

    async def _read(self, block_ms: int) -> None:
        for stream, entries in await self.redis.xread(self._positions, block=block_ms) or ():
            self._positions[stream.decode()] = entries[-1][0]
            for _, fields in entries:
                for token, data in fields.items():
                    if token != b"opened":
                        assert token.decode() not in self.heard, f"{token!r} was answered twice"
                        self.heard.append(token.decode())
                        self._replies[token.decode()] = decode_reply(data)

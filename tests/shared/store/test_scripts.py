"""The atomic steps of the mesh, each on the real server: what docs/design promises of them, script by script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from redis.exceptions import ResponseError

from executor.core.state import VoidCause
from executor.sequences.checkpoints import read_checkpoints
from shared.contract.errors import Reason
from shared.contract.ids import (
    Epoch,
    ExecutorId,
    InstanceIndex,
    ShardId,
    SlotIndex,
    StepNumber,
    Term,
    sequence_id,
)
from shared.contract.limits import LOST_OWNERS_MAX
from shared.contract.messages import (
    InboxCancelled,
    InboxExpired,
    InboxOwned,
    InboxStep,
    InboxVacated,
    ReplyMessage,
    StepFlag,
    decode_reply,
    encode,
)
from shared.contract.record import CANCELLED
from shared.contract.state_fields import GrownState, Parts, checkpointed_states
from shared.contract.tensors import from_numpy
from shared.statistics.tally import ModelLoad
from shared.store.connections.redis_client import connect, redis_now_ms
from shared.store.keyspace import Keyspace
from shared.store.libraries import PRELUDES
from shared.store.script_sender import Call
from shared.store.script_values import (
    Assignment,
    CancelCode,
    CommitCode,
    EndCode,
    Ending,
    LedShard,
    Orphan,
    Rejection,
    StepOutcome,
    SubmitCode,
    VacateCode,
    Vacation,
)
from shared.store.scripts import Scripts
from shared.store.waiting_line import TAKEOVER_CAUSES, read_lines
from tests.embedded_redis import EmbeddedRedis
from tests.scripted_mesh import GATEWAY, ScriptedMesh, commit_of

ALICE, BOB = ExecutorId("alice-1"), ExecutorId("bob-1")
START, END, NONE, PAGEABLE = StepFlag.START, StepFlag.END, StepFlag.NONE, StepFlag.PAGEABLE
ONE = {"INPUT": np.ones((1, 1), np.int32)}
REPLY = encode(ReplyMessage("1"))
GRACE_MS = 30_000
"""Half of the idle time, so that a slow machine takes neither for the other."""


@pytest.fixture
def shards() -> int:
    return 3


pytestmark = pytest.mark.leaves_sequences


async def commit(
    mesh: ScriptedMesh,
    executor: ExecutorId,
    step: InboxStep,
    *,
    outcome: StepOutcome = StepOutcome.DONE,
    epoch: int | None = None,
    request_id: str = "",
    idle_ms: int = 60_000,
    tombstone_ms: int = 10_000,
    checkpoint: bool = True,
    entries: Sequence[str] = (),
    base: int | None = None,
    load: ModelLoad | None = None,
    reply: ReplyMessage | None = None,
    grown: GrownState | None = None,
) -> CommitCode:
    """grown: what the checkpoint holds in the place of a small state"""
    fields = [("s:h", b"state %d" % step.step)] if grown is None else grown.fields
    final = commit_of(
        msgspec.structs.replace(step, epoch=Epoch(step.epoch if epoch is None else epoch)),
        encode(reply or ReplyMessage("1", step=step.step)),
        outcome,
        keep_reply=bool(request_id),
        entries=entries or ([step.entry] if checkpoint else []),
        checkpoint=fields if checkpoint else [],
        anew=grown is not None and grown.anew,
        base=None if base is None else StepNumber(base),
    )
    (code,) = await mesh.committed(executor, final, idle_ms=idle_ms, tombstone_ms=tombstone_ms, load=load)
    return code


async def accepted(
    mesh: ScriptedMesh, flags: StepFlag = START, *, correlation_id: int = 7, executor: ExecutorId = ALICE, **how: Any
) -> InboxStep:
    """A step of a sequence that waits for a slot, as its owner finds it. how: as of `ScriptedMesh.submission`"""
    await mesh.submit(mesh.submission(correlation_id, ONE, flags, **how))
    await mesh.assign(correlation_id, executor)
    (step,) = await mesh.steps(executor, correlation_id)
    return step


async def start(
    mesh: ScriptedMesh, correlation_id: int = 7, executor: ExecutorId = ALICE, *, flags: StepFlag = START
) -> InboxStep:
    """A sequence that has one committed step."""
    step = await accepted(mesh, flags, correlation_id=correlation_id, executor=executor)
    assert await commit(mesh, executor, step) is CommitCode.COMMITTED
    return step


async def orphan(mesh: ScriptedMesh, token: str, *, correlation_id: int = 7, grace_ms: int = GRACE_MS) -> bool:
    """The connection whose latest step had that token is gone; whether the sequence's idle time is the grace now."""
    left = Orphan(mesh.sequence(correlation_id), token, grace_ms)
    call = mesh.scripts.orphan([left], gateway=GATEWAY)
    (changed,) = await mesh.scripts.run(call)
    return changed


async def end(mesh: ScriptedMesh, correlation_id: int = 7, *, run: str = "", reply: bytes = REPLY) -> EndCode:
    """An operator ends a sequence."""
    (code,) = await mesh.scripts.run(
        mesh.scripts.end([Ending(mesh.sequence(correlation_id), run)], tombstone=CANCELLED, reply=reply)
    )
    return code


async def marker_is_gone(mesh: ScriptedMesh) -> None:
    """Waits until the idle time of sequence 7 is over."""
    async with asyncio.timeout(60):
        while await idle_left_ms(mesh) != -2:
            await asyncio.sleep(0.005)


async def idle_left_ms(mesh: ScriptedMesh, correlation_id: int = 7) -> int:
    return await mesh.redis.pttl(mesh.keys.sequence(mesh.sequence(correlation_id)).idle)


async def is_due(mesh: ScriptedMesh, *, within_ms: int) -> bool:
    """Whether the reaper looks at sequence 7 within that time."""
    sequence = mesh.sequence(7)
    score = await mesh.redis.zscore(mesh.keys.deadlines(mesh.keys.shard_of(sequence), mesh.model), sequence)
    seconds, _ = await mesh.redis.time()
    return score is not None and score <= seconds * 1000 + within_ms


async def is_told(mesh: ScriptedMesh) -> bool:
    """Whether the leader, which may sleep until later, has been told once when the reaper looks at sequence 7."""
    sequence = mesh.sequence(7)
    shard = mesh.keys.shard_of(sequence)
    feed = await mesh.redis.xrange(mesh.keys.feed(shard, mesh.model))
    told = [float(fields[b"d"]) for _, fields in feed if fields[b"k"] == b"d"]
    return [await mesh.redis.zscore(mesh.keys.deadlines(shard, mesh.model), sequence)] == told


class TestSubmit:
    async def test_a_first_step_without_start_is_refused_as_never_seen(self, mesh: ScriptedMesh) -> None:
        outcome = await mesh.submit(mesh.submission(7, ONE))

        assert (SubmitCode.NEVER_SEEN, 0) == (outcome.code, outcome.step)

    async def test_steps_of_a_waiting_sequence_are_parked_and_reach_the_owner_in_order(
        self, mesh: ScriptedMesh
    ) -> None:
        for flags in (START, NONE, END):
            outcome = await mesh.submit(mesh.submission(7, ONE, flags))
            assert outcome.code is SubmitCode.WAITING

        await mesh.assign(7, ALICE, slot=5)

        assert [(1, START, 5), (2, NONE, 5), (3, END, 5)] == [
            (s.step, s.flags, s.slot) for s in await mesh.steps(ALICE)
        ]

    async def test_42_and_the_string_42_are_two_sequences(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(42, ONE, START))

        assert SubmitCode.NEVER_SEEN is (await mesh.submit(mesh.submission("42", ONE))).code

    async def test_the_backlog_is_bounded_and_what_waits_stays(self, mesh: ScriptedMesh) -> None:
        keys = Keyspace(mesh.keys.prefix, 1)
        small = ScriptedMesh(mesh.redis, keys, "sum")
        assert SubmitCode.WAITING is (await small.submit(small.submission(1, ONE, START), backlog_max=1)).code

        refused = await small.submit(small.submission(2, ONE, START), backlog_max=1)

        assert SubmitCode.BACKLOG_FULL is refused.code
        assert "w" == (await small.record(1))["st"]
        assert {} == await small.record(2)

    async def test_steps_in_flight_are_bounded_per_sequence(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START), in_flight_max=2)
        await mesh.submit(mesh.submission(7, ONE), in_flight_max=2)

        assert SubmitCode.BUSY is (await mesh.submit(mesh.submission(7, ONE), in_flight_max=2)).code

    async def test_a_step_after_an_accepted_end_hears_ended_and_a_start_goes_on_behind_it(
        self, mesh: ScriptedMesh
    ) -> None:
        await start(mesh)
        await mesh.submit(mesh.submission(7, ONE, END))

        assert SubmitCode.ENDED is (await mesh.submit(mesh.submission(7, ONE))).code
        again = await mesh.submit(mesh.submission(7, ONE, START))
        assert (SubmitCode.DELIVERED, 3) == (again.code, again.step)

    async def test_the_last_step_of_a_refusal_is_the_same_before_and_after_the_owner_has_come_to_it(
        self, mesh: ScriptedMesh
    ) -> None:
        told: list[tuple[SubmitCode, int]] = []

        async def refused() -> None:
            outcome = await mesh.submit(mesh.submission(7, ONE))
            told.append((outcome.code, outcome.step))

        for flags in (START, NONE, END):
            await mesh.submit(mesh.submission(7, ONE, flags))
        await refused()
        await mesh.assign(7, ALICE)
        for step in await mesh.steps(ALICE):
            await refused()
            await commit(mesh, ALICE, step)
        await refused()

        assert [(SubmitCode.ENDED, 3)] * 5 == told

    async def test_an_implicit_start_gets_the_start_flag(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, StepFlag.IMPLICIT))
        await mesh.assign(7, ALICE)

        assert [START] == [s.flags for s in await mesh.steps(ALICE)]


class TestRetry:
    async def test_a_committed_step_is_answered_from_store(self, mesh: ScriptedMesh) -> None:
        step = await accepted(mesh, START, request_id="a")
        await commit(mesh, ALICE, step, request_id="a")

        again = await mesh.submit(mesh.submission(7, ONE, START, request_id="a"))

        assert (SubmitCode.REPEATED, 1) == (again.code, again.step)
        assert encode(ReplyMessage("1", step=1)) == again.extra

    async def test_a_step_in_flight_is_not_accepted_twice_and_both_callers_hear(self, mesh: ScriptedMesh) -> None:
        first = mesh.submission(7, ONE, START, request_id="a")
        second = mesh.submission(7, ONE, START, request_id="a")
        await mesh.submit(first)
        assert SubmitCode.JOINED is (await mesh.submit(second)).code
        await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)

        await commit(mesh, ALICE, step, request_id="a")

        assert 1 == (await mesh.reply(first)).step
        assert 1 == (await mesh.reply(second)).step
        assert [] == [name for name in await mesh.record(7) if name.startswith(("j:", "a:"))], "nobody waits any more"

    async def test_a_retry_of_a_start_names_its_run(self, mesh: ScriptedMesh) -> None:
        first = await mesh.submit(mesh.submission(7, ONE, START, request_id="a"))
        joined = await mesh.submit(mesh.submission(7, ONE, START, request_id="a"))
        await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)
        await commit(mesh, ALICE, step, request_id="a")

        again = await mesh.submit(mesh.submission(7, ONE, START, request_id="a"))

        assert "" != first.run == joined.run == again.run

    async def test_an_end_is_answered_again_after_the_sequence_is_over(self, mesh: ScriptedMesh) -> None:
        step = await accepted(mesh, START | END, request_id="only")
        assert CommitCode.OVER is await commit(mesh, ALICE, step, request_id="only")

        assert SubmitCode.REPEATED is (await mesh.submit(mesh.submission(7, ONE, START | END, request_id="only"))).code

    async def test_sequence_step_names_the_step_without_a_request_id(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START, expected_step=1))
        assert SubmitCode.JOINED is (await mesh.submit(mesh.submission(7, ONE, START, expected_step=1))).code

        wrong = await mesh.submit(mesh.submission(7, ONE, expected_step=3))

        assert (SubmitCode.WRONG_STEP, 1) == (wrong.code, wrong.step)
        assert 2 == (await mesh.submit(mesh.submission(7, ONE, expected_step=2))).step


def grown(length: int, added: int, *, anew: bool = False) -> GrownState:
    """A state of so many numbers, 0, 1, 2 and so on, in parts of one; the last `added` ones are written."""
    parts = [number.to_bytes(4, "little") for number in range(length - added, length)]
    return GrownState("h", Parts(0, 1, "INT32", (length,)), length - added, parts, anew)


class TestGrowingState:
    """A checkpoint in parts."""

    async def state(self, mesh: ScriptedMesh) -> tuple[bytes, int, list[int]]:
        """The checkpoint's step, how many fields it has, and the state."""
        fields = await mesh.redis.hgetall(mesh.keys.sequence(mesh.sequence(7)).checkpoint)
        (tensor,) = checkpointed_states(fields).values()
        return fields[b"n"], len(fields), np.frombuffer(tensor.raw, "<i4").tolist()

    async def begun(self, mesh: ScriptedMesh, length: int) -> InboxStep:
        """A sequence with one committed step and a state of so many parts."""
        step = await accepted(mesh)
        assert CommitCode.COMMITTED is await commit(mesh, ALICE, step, grown=grown(length, length, anew=True))
        return step

    async def next_step(self, mesh: ScriptedMesh, executor: ExecutorId = ALICE) -> InboxStep:
        await mesh.submit(mesh.submission(7, ONE))
        (step,) = await mesh.steps(executor)
        return step

    async def test_what_a_step_adds_is_final_with_it_and_once(self, mesh: ScriptedMesh) -> None:
        await self.begun(mesh, 3)
        step = await self.next_step(mesh)

        assert CommitCode.COMMITTED is await commit(mesh, ALICE, step, grown=grown(5, 2))
        assert CommitCode.BEFORE is await commit(mesh, ALICE, step, grown=grown(9, 6))

        assert (b"2", 2 + 5, [0, 1, 2, 3, 4]) == await self.state(mesh)

    async def test_what_begins_anew_leaves_no_part_of_the_state_before(self, mesh: ScriptedMesh) -> None:
        await self.begun(mesh, 50)
        step = await self.next_step(mesh)

        await commit(mesh, ALICE, step, grown=grown(2, 2, anew=True))

        assert (b"2", 2 + 2, [0, 1]) == await self.state(mesh)

    async def test_what_a_late_owner_adds_is_refused(self, mesh: ScriptedMesh) -> None:
        await self.begun(mesh, 3)
        late = await self.next_step(mesh)
        await mesh.take_over(ALICE)
        await mesh.assign(7, BOB)
        (step,) = await mesh.steps(BOB)
        assert CommitCode.COMMITTED is await commit(mesh, BOB, step, grown=grown(4, 1))

        assert CommitCode.REFUSED is await commit(mesh, ALICE, late, grown=grown(9, 6))
        assert CommitCode.REFUSED is await commit(mesh, ALICE, late, grown=grown(1, 1, anew=True))

        assert (b"2", 2 + 4, [0, 1, 2, 3]) == await self.state(mesh)

    async def test_the_first_checkpoint_of_a_long_state_is_taken(self, mesh: ScriptedMesh) -> None:
        """It has more fields than a Lua function takes values."""
        await self.begun(mesh, 20_000)

        found = await read_checkpoints(mesh.redis, mesh.keys, [mesh.sequence(7)])

        (checkpoint,) = found.values()
        assert list(range(20_000)) == np.frombuffer(checkpoint.states["h"].raw, "<i4").tolist()

    async def test_a_state_of_which_a_part_is_missing_is_lost(self, mesh: ScriptedMesh) -> None:
        """And never taken for a shorter one."""
        await self.begun(mesh, 9)
        await mesh.redis.hdel(mesh.keys.sequence(mesh.sequence(7)).checkpoint, "g:4:h")

        (checkpoint,) = (await read_checkpoints(mesh.redis, mesh.keys, [mesh.sequence(7)])).values()

        assert VoidCause.LOST is checkpoint.void


class TestCommit:
    async def test_checkpoint_number_reply_and_inbox_change_together(self, mesh: ScriptedMesh) -> None:
        submission = mesh.submission(7, ONE, START)
        await mesh.submit(submission)
        await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)

        await commit(mesh, ALICE, step)

        own = mesh.keys.sequence(step.sequence)
        checkpoint = await mesh.redis.hgetall(own.checkpoint)
        record = await mesh.record(7)
        assert {b"n": b"1", b"s:h": b"state 1"} == checkpoint
        assert ("1", "1") == (record["cm"], record["ck"])
        assert [] == await mesh.inbox(ALICE)
        assert 1 == (await mesh.reply(submission)).step

    async def test_a_start_that_is_to_be_replayed_leaves_no_state_of_before(self, mesh: ScriptedMesh) -> None:
        await commit(mesh, ALICE, await start(mesh))
        await mesh.submit(mesh.submission(7, ONE, START))
        (again,) = await mesh.steps(ALICE)

        # Of a model that does not checkpoint every step: the START's entry stays, and is replayed.
        await commit(mesh, ALICE, again, checkpoint=False, base=1)

        (found,) = (await read_checkpoints(mesh.redis, mesh.keys, [again.sequence])).values()
        assert (1, 2, None, False) == (found.checkpointed, found.committed, found.void, found.holds_state)

    async def test_the_idle_marker_has_no_ttl_while_a_step_is_in_flight(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        marker = mesh.keys.sequence(mesh.sequence(7)).idle
        assert 0 < await mesh.redis.pttl(marker) <= 60_000

        await mesh.submit(mesh.submission(7, ONE))

        assert -1 == await mesh.redis.pttl(marker)

    async def test_repeating_a_commit_changes_nothing(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)

        assert CommitCode.BEFORE is await commit(mesh, ALICE, step)
        assert "1" == (await mesh.record(7))["cm"]

    async def test_an_old_epoch_is_refused_and_nothing_of_it_stays(self, mesh: ScriptedMesh) -> None:
        submission = mesh.submission(7, ONE, START)
        await mesh.submit(submission)
        await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)
        await mesh.take_over(ALICE)
        await mesh.assign(7, BOB)

        assert CommitCode.REFUSED is await commit(mesh, ALICE, step)
        assert "0" == (await mesh.record(7))["cm"]
        assert await mesh.unanswered(submission, for_ms=50)

    @pytest.mark.parametrize("begins_anew", [False, True])
    async def test_what_was_kept_for_a_replay_goes_when_its_sequence_has_ended_before_its_owner_asked_again(
        self, mesh: ScriptedMesh, begins_anew: bool
    ) -> None:
        step = await accepted(mesh)
        assert CommitCode.COMMITTED is await commit(mesh, ALICE, step, checkpoint=False, base=0, idle_ms=1)
        await marker_is_gone(mesh)
        assert await mesh.expire(7)
        if begins_anew:
            await mesh.submit(mesh.submission(7, ONE, START))
            await mesh.assign(7, ALICE)

        assert step in await mesh.steps(ALICE)
        assert CommitCode.REFUSED is await commit(mesh, ALICE, step, checkpoint=False, base=0)
        left = await mesh.steps(ALICE)
        assert (False, int(begins_anew)) == (step in left, len(left))

    async def test_what_a_new_owner_may_have_to_replay_stays_when_the_old_one_is_refused(
        self, mesh: ScriptedMesh
    ) -> None:
        step = await accepted(mesh, START | StepFlag.DURABLE)
        assert CommitCode.COMMITTED is await commit(mesh, ALICE, step, checkpoint=False, base=0)
        await mesh.reclaim(ALICE)

        assert CommitCode.REFUSED is await commit(mesh, ALICE, step, checkpoint=False, base=0)
        assert [step] == await mesh.steps(ALICE)

    async def test_a_reload_leaves_nothing_of_what_it_ends(self, mesh: ScriptedMesh) -> None:
        step = await accepted(mesh)
        await commit(mesh, ALICE, step, checkpoint=False, base=0)
        await mesh.redis.hset(mesh.keys.sequence(step.sequence).record, "mk", "old")

        async def reload(mark: str) -> list[bool]:
            shard = mesh.keys.shard_of(step.sequence)
            call = mesh.scripts.reload(
                [step.sequence],
                shard=shard,
                executor=ALICE,
                model="sum",
                version="1",
                mark=mark,
                tombstone_ms=10_000,
            )
            return await mesh.scripts.run(call)

        assert [False] == await reload("old")
        assert [step] == await mesh.steps(ALICE)
        assert [True] == await reload("new")
        assert [] == await mesh.inbox(ALICE)
        assert SubmitCode.LOST is (await mesh.submit(mesh.submission(7, ONE))).code

    async def test_end_frees_the_slot_once_and_leaves_a_tombstone_that_expires(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START | END))
        epoch = await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)

        assert CommitCode.OVER is await commit(mesh, ALICE, step)
        assert CommitCode.REFUSED is await commit(mesh, ALICE, step)

        shard = mesh.keys.shard_of(step.sequence)
        feed = await mesh.redis.xrange(mesh.keys.feed(shard, "sum"))
        assert [{b"q": b"sum||i7", b"e": str(epoch).encode(), b"k": b"e", b"s": b"0"}] == [fields for _, fields in feed]
        assert 0 < await mesh.redis.pttl(mesh.keys.sequence(step.sequence).record) <= 10_000
        assert SubmitCode.ENDED is (await mesh.submit(mesh.submission(7, ONE))).code

    async def test_a_request_that_is_its_own_sequence_leaves_nothing_unless_it_may_be_sent_again(
        self, mesh: ScriptedMesh
    ) -> None:
        flags = START | END | StepFlag.ALONE
        for identity, request_id in ((7, ""), (8, "r8")):
            submission = mesh.submission(identity, ONE, flags, request_id=request_id)
            await mesh.submit(submission)
            await mesh.assign(identity, ALICE)
            (step,) = await mesh.steps(ALICE)
            assert CommitCode.OVER is await commit(mesh, ALICE, step, request_id=request_id, tombstone_ms=3_600_000)
            assert step.step == (await mesh.reply_to(submission.token)).step
            assert CommitCode.REFUSED is await commit(mesh, ALICE, step, request_id=request_id)

        assert {} == await mesh.record(7)
        assert 0 < await mesh.redis.pttl(mesh.keys.sequence(mesh.sequence(8)).record) <= 30_000
        again = await mesh.submit(mesh.submission(8, ONE, flags, request_id="r8"))
        assert SubmitCode.REPEATED is again.code

    async def test_a_failed_start_closes_the_sequence_and_frees_its_slot(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START))
        await mesh.submit(mesh.submission(7, ONE))
        await mesh.assign(7, ALICE)
        first, second = await mesh.steps(ALICE)

        assert CommitCode.COMMITTED is await commit(mesh, ALICE, first, outcome=StepOutcome.FAILED)
        assert SubmitCode.FAILED is (await mesh.submit(mesh.submission(7, ONE))).code
        assert CommitCode.OVER is await commit(mesh, ALICE, second, outcome=StepOutcome.VOID)
        assert SubmitCode.FAILED is (await mesh.submit(mesh.submission(7, ONE))).code

    @pytest.mark.parametrize(
        ("requested", "expected"),
        [
            *(("", SubmitCode.DELIVERED), ("@e//1", SubmitCode.DELIVERED), ("@e#2//1", SubmitCode.DELIVERED)),
            *(("@e//2#5-0.1", SubmitCode.FAILED), ("3@e#2/1/2#5-0.1", SubmitCode.FAILED)),
        ],
    )
    async def test_a_failed_step_closes_a_sequence_that_follows_another(
        self, mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch, requested: str, expected: SubmitCode
    ) -> None:
        monkeypatch.setattr(mesh, "sequence", partial(sequence_id, mesh.model, requested))
        await mesh.submit(mesh.submission("#7", ONE, START))
        await mesh.assign("#7", ALICE)
        await mesh.commit("#7", ALICE)
        await mesh.submit(mesh.submission("#7", ONE))
        (failing,) = await mesh.steps(ALICE)

        await commit(mesh, ALICE, failing, outcome=StepOutcome.FAILED)

        assert expected is (await mesh.submit(mesh.submission("#7", ONE))).code

    async def test_a_new_sequence_under_an_old_id_gets_an_epoch_never_used_before(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START | END))
        before = await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)
        await commit(mesh, ALICE, step, tombstone_ms=1)
        while await mesh.record(7):
            pass
        await mesh.submit(mesh.submission(7, ONE, START))

        assert before < await mesh.assign(7, ALICE)
        assert CommitCode.REFUSED is await commit(mesh, ALICE, step)

    async def test_thousands_of_open_entries_and_of_callers_are_no_bound(self, mesh: ScriptedMesh) -> None:
        """A model with a large checkpoint interval, and a client that retries all the time."""
        step = await accepted(mesh)
        record = mesh.keys.sequence(step.sequence).record
        await mesh.redis.hset(record, "j:1", "".join(f"{GATEWAY} t{n};" for n in range(9_000)))
        entries = [*(f"1-{n}" for n in range(1, 9_000)), step.entry]

        assert CommitCode.COMMITTED is await commit(mesh, ALICE, step, entries=entries)

        assert [] == await mesh.steps(ALICE)
        for token in (step.token, "t0", "t8999"):
            await mesh.reply_to(token)
        assert 9_001 == len(mesh.heard)

    async def test_replies_of_one_commit_leave_in_entries_of_a_few_megabytes(self, mesh: ScriptedMesh) -> None:
        """Redis takes no entry of a GiB, and three callers who wait for one large answer would make one."""
        await mesh.submit(mesh.submission(7, ONE, START, request_id="a"))
        askers = [mesh.submission(7, ONE, START, request_id="a") for _ in range(6)]
        for asker in askers:
            assert SubmitCode.JOINED is (await mesh.submit(asker)).code
        await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)
        large = ReplyMessage("1", (from_numpy("OUTPUT", np.zeros(3 << 16)),))

        assert CommitCode.COMMITTED is await commit(mesh, ALICE, step, reply=large)

        stream = mesh.keys.replies(mesh.keys.shard_of(step.sequence), cast(Any, GATEWAY))
        _opened, *entries = await mesh.redis.xrange(stream)
        assert [2, 2, 2, 1] == [len(fields) for _, fields in entries]
        tokens = [step.token, *(asker.token for asker in askers)]
        for token in tokens:
            assert large == await mesh.reply_to(token)
        assert tokens == mesh.heard

    async def test_a_step_that_skips_one_changes_nothing(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START))
        await mesh.submit(mesh.submission(7, ONE))
        await mesh.assign(7, ALICE)
        _, second = await mesh.steps(ALICE)

        assert CommitCode.OUT_OF_ORDER is await commit(mesh, ALICE, second)
        assert "0" == (await mesh.record(7))["cm"]

    async def test_a_step_that_redis_has_forgotten_is_not_committed(self, mesh: ScriptedMesh) -> None:
        """Redis was restarted with older data: it may give the number to another step."""
        await start(mesh)
        await mesh.submit(mesh.submission(7, ONE))
        (second,) = await mesh.steps(ALICE)
        await mesh.redis.hset(mesh.keys.sequence(second.sequence).record, "nx", "1")

        assert CommitCode.REFUSED is await commit(mesh, ALICE, second)

        assert "1" == (await mesh.record(7))["cm"]


@pytest.mark.parametrize("script", [name for name, preludes in PRELUDES.items() if "leader" in preludes])
async def test_an_older_leader_changes_nothing_whatever_it_calls(mesh: ScriptedMesh, script: str) -> None:
    step = await start(mesh)
    newer = mesh.scripts.sweep([step.sequence], LedShard(mesh.keys.shard_of(step.sequence), "sum", Term(2)))
    await mesh.scripts.run(newer)
    older = Call(script, newer.keys, [1, *["1"] * 9], list)
    before = await mesh.record(7)

    with pytest.raises(ResponseError, match="FENCED"):
        await mesh.scripts.run(older)

    assert before == await mesh.record(7)


class TestTakeover:
    async def test_takeovers_and_what_late_owners_try_are_counted(self, mesh: ScriptedMesh) -> None:
        async def line() -> tuple[dict[str, int], int]:
            line = (await read_lines(mesh.redis, mesh.keys, ["sum"]))["sum"]
            return {cause: line.taken_over["1", cause] for cause in TAKEOVER_CAUSES}, line.refused["1"]

        load = ModelLoad("sum", "1", "")
        step = await start(mesh, flags=START | StepFlag.DURABLE)
        await mesh.submit(mesh.submission(7, ONE))
        for dead, heir, lost in ((ALICE, BOB, True), (BOB, ALICE, False)):
            late = (await mesh.steps(dead))[-1]
            await mesh.take_over(dead, lost=lost)
            await mesh.assign(7, heir)
            assert CommitCode.REFUSED is await commit(mesh, dead, late, load=load)
        assert ({"lost": 1, "leaving": 1, "moved": 0}, 2) == await line()

        (step,) = await mesh.steps(ALICE)
        await commit(mesh, ALICE, step, load=load)
        assert VacateCode.VACATED is await mesh.vacate(7, moving=True)
        await mesh.assign(7, BOB)
        await mesh.submit(mesh.submission(7, ONE, END))
        (step,) = await mesh.steps(BOB)
        assert CommitCode.OVER is await commit(mesh, BOB, step, load=load)
        # The same once more, because its answer was lost, is no other owner's.
        assert CommitCode.REFUSED is await commit(mesh, BOB, step, load=load)
        assert ({"lost": 1, "leaving": 1, "moved": 1}, 2) == await line()

    async def test_uncommitted_steps_reach_the_new_owner_whatever_comes_in_between(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        for _ in range(3):
            await mesh.submit(mesh.submission(7, ONE))
        shard = mesh.keys.shard_of(mesh.sequence(7))
        await mesh.reclaim(ALICE)
        await mesh.submit(mesh.submission(7, ONE))
        after, _, _ = await mesh.scripts.run(mesh.scripts.drain(ALICE, shard=shard, count=1))
        await mesh.assign(7, BOB)
        await mesh.submit(mesh.submission(7, ONE))
        await mesh.scripts.run(mesh.scripts.drain(ALICE, shard=shard, after=after))

        assert [2, 3, 4, 5, 6] == sorted(s.step for s in await mesh.steps(BOB))
        assert [] == await mesh.inbox(ALICE)

    async def test_a_new_owner_is_told_of_a_sequence_that_brings_no_step(self, mesh: ScriptedMesh) -> None:
        """Not of one whose steps are on their way, be they parked or still in the dead owner's inbox: they tell it."""
        for number in (7, 8, 9):
            await start(mesh, number)
        await mesh.submit(mesh.submission(8, ONE))
        await mesh.reclaim(ALICE)
        await mesh.submit(mesh.submission(9, ONE))

        epoch = await mesh.assign(7, BOB, slot=3, instance=1)
        for number in (8, 9):
            await mesh.assign(number, BOB, slot=number)

        told = [entry for entry in await mesh.inbox(BOB) if isinstance(entry, InboxOwned)]
        assert [(mesh.sequence(7), epoch, 1, 3, 1, "1")] == [
            (one.sequence, one.epoch, one.instance, one.slot, one.committed, one.version) for one in told
        ]
        assert [(9, 2)] == [(one.slot, one.step) for one in await mesh.steps(BOB)]

    @pytest.mark.parametrize("alive", [True, False])
    async def test_what_tells_of_a_sequence_is_not_moved_on(self, mesh: ScriptedMesh, *, alive: bool) -> None:
        """The next owner is told by its own assignment; an owner that lives hears even of what it has lost."""
        await start(mesh)
        await mesh.take_over(ALICE)
        await mesh.assign(7, BOB)
        assert VacateCode.VACATED is await mesh.vacate(7, moving=True)
        shard = mesh.keys.shard_of(mesh.sequence(7))

        await mesh.scripts.run(mesh.scripts.drain(BOB, shard=shard, alive=alive))
        await mesh.assign(7, ALICE)

        assert ([InboxOwned, InboxVacated] if alive else []) == [type(entry) for entry in await mesh.inbox(BOB)]
        assert [InboxOwned] == [type(entry) for entry in await mesh.inbox(ALICE)]

    async def test_entries_of_a_sequence_that_is_still_owned_stay(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        await mesh.submit(mesh.submission(7, ONE))
        shard = mesh.keys.shard_of(mesh.sequence(7))

        assert 1 == (await mesh.scripts.run(mesh.scripts.drain(ALICE, shard=shard)))[2]
        assert [2] == [s.step for s in await mesh.steps(ALICE)]

    async def test_committed_steps_without_a_checkpoint_are_moved_for_replay(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        await mesh.submit(mesh.submission(7, ONE))
        (step,) = await mesh.steps(ALICE)
        await commit(mesh, ALICE, step, checkpoint=False)

        await mesh.take_over(ALICE)
        await mesh.assign(7, BOB)

        assert [2] == [s.step for s in await mesh.steps(BOB)]
        record = await mesh.record(7)
        assert ("2", "1") == (record["cm"], record["ck"])

    async def test_steps_that_failed_behind_the_checkpoint_are_remembered_until_the_next_one(
        self, mesh: ScriptedMesh
    ) -> None:
        """As ranges: a client may fail as often as it likes."""
        await start(mesh)
        for _ in range(8):
            await mesh.submit(mesh.submission(7, ONE))
        entries = await mesh.steps(ALICE)
        for step in entries[:-1]:
            failed = step.step not in (2, 4)
            outcome = StepOutcome.FAILED if failed else StepOutcome.DONE
            gone = [step.entry] if failed else []
            code = await commit(mesh, ALICE, step, outcome=outcome, checkpoint=False, entries=gone, base=0)
            assert CommitCode.COMMITTED is code
            assert CommitCode.BEFORE is await commit(mesh, ALICE, step, outcome=outcome, checkpoint=False, base=0)

        assert [2, 4, 9] == [step.step for step in await mesh.steps(ALICE)]
        record = await mesh.record(7)
        assert ("8", "1", "3-3 5-8") == (record["cm"], record["ck"], record["fl"])
        await commit(mesh, ALICE, entries[-1])
        record = await mesh.record(7)
        assert ("9", "9", None) == (record["cm"], record["ck"], record.get("fl"))

    async def test_a_state_that_was_lost_with_a_living_owner_is_lost_for_the_next_one_too(
        self, mesh: ScriptedMesh
    ) -> None:
        await start(mesh)
        await mesh.submit(mesh.submission(7, ONE))
        await mesh.submit(mesh.submission(7, ONE))
        step, _ = await mesh.steps(ALICE)
        assert CommitCode.COMMITTED is await commit(mesh, ALICE, step, outcome=StepOutcome.LOST)

        await mesh.take_over(ALICE)
        await mesh.assign(7, BOB)

        record = await mesh.record(7)
        assert ("2", "o", "1") == (record["vd"], record["vk"], record["cl"])
        (step,) = await mesh.steps(BOB)
        assert CommitCode.OVER is await commit(mesh, BOB, step, outcome=StepOutcome.LOST)
        assert SubmitCode.LOST is (await mesh.submit(mesh.submission(7, ONE))).code

    async def test_a_sequence_whose_state_only_the_dead_process_held_is_lost_and_says_so(
        self, mesh: ScriptedMesh
    ) -> None:
        await start(mesh)
        await mesh.redis.hset(mesh.keys.sequence(mesh.sequence(7)).record, "du", "0")

        await mesh.take_over(ALICE)

        assert SubmitCode.LOST is (await mesh.submit(mesh.submission(7, ONE))).code


class TestPage:
    async def page(
        self, mesh: ScriptedMesh, step: InboxStep, *, executor: ExecutorId = ALICE, epoch: int | None = None
    ) -> bool:
        asked = (step.sequence, Epoch(step.epoch if epoch is None else epoch))
        shard = mesh.keys.shard_of(step.sequence)
        (is_paged,) = await mesh.scripts.run(mesh.scripts.page([asked], shard=shard, executor=executor, model="sum"))
        return is_paged

    async def test_an_idle_sequence_leaves_its_slot_and_the_leader_hears_of_it_once(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh, flags=START | PAGEABLE)
        shard, own = mesh.keys.shard_of(step.sequence), mesh.keys.sequence(step.sequence)

        assert [True, True] == [await self.page(mesh, step) for _ in range(2)], "a lost answer is given again"

        assert "p" == (await mesh.record(7))["st"]
        assert 0 == await mesh.redis.scard(mesh.keys.owned(shard, ALICE, "sum"))
        told = [fields for _, fields in await mesh.redis.xrange(mesh.keys.feed(shard, "sum"))]
        assert [{b"q": step.sequence.encode(), b"e": b"%d" % step.epoch, b"k": b"p", b"s": b"0"}] == told
        assert 0 < await mesh.redis.pttl(own.idle) <= 60_000
        assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE))).code
        assert not await self.page(mesh, step), "it waits for a slot by now"
        assert step.epoch < await mesh.assign(7, ALICE)
        assert not await self.page(mesh, step), "it has another epoch by now"
        assert [(2, 1)] == [(s.step, s.committed) for s in await mesh.steps(ALICE)]

    async def test_another_executor_or_another_epoch_cannot_page_it(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh, flags=START | PAGEABLE)

        assert not await self.page(mesh, step, executor=BOB)
        assert not await self.page(mesh, step, epoch=step.epoch + 1)
        assert "l" == (await mesh.record(7))["st"]

    @pytest.mark.parametrize("field", ["ck", "pg"])
    async def test_one_that_is_to_keep_its_slot_or_has_steps_since_its_checkpoint_stays(
        self, mesh: ScriptedMesh, field: str
    ) -> None:
        step = await start(mesh, flags=START | PAGEABLE)
        await mesh.redis.hdel(mesh.keys.sequence(step.sequence).record, field)

        assert not await self.page(mesh, step)

    async def test_one_with_an_open_step_stays(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh, flags=START | PAGEABLE)
        await mesh.submit(mesh.submission(7, ONE))

        assert not await self.page(mesh, step)


class TestVacate:
    async def vacate(
        self, mesh: ScriptedMesh, step: InboxStep, *, epoch: int | None = None, moving: bool = False
    ) -> VacateCode:
        vacation = Vacation(step.sequence, Epoch(step.epoch if epoch is None else epoch), moving)
        shard = mesh.keys.shard_of(step.sequence)
        (code,) = await mesh.scripts.run(mesh.scripts.vacate([vacation], LedShard(shard, "sum", mesh.term)))
        return code

    async def paged(self, mesh: ScriptedMesh) -> InboxStep:
        """A sequence with one committed step and no slot."""
        step = await start(mesh, flags=START | PAGEABLE)
        assert VacateCode.VACATED is await self.vacate(mesh, step)
        return step

    async def starts(self, mesh: ScriptedMesh) -> list[dict[bytes, bytes]]:
        shard = mesh.keys.shard_of(mesh.sequence(7))
        return [fields for _, fields in await mesh.redis.xrange(mesh.keys.starts(shard, "sum"))]

    async def test_an_idle_sequence_is_paged_once_and_its_owner_is_told(self, mesh: ScriptedMesh) -> None:
        step = await self.paged(mesh)

        assert VacateCode.KEPT is await self.vacate(mesh, step)
        assert [step.epoch] == [told.epoch for told in await mesh.inbox(ALICE) if isinstance(told, InboxVacated)]
        assert "p" == (await mesh.record(7))["st"]
        shard, own = mesh.keys.shard_of(step.sequence), mesh.keys.sequence(step.sequence)
        assert 0 == await mesh.redis.scard(mesh.keys.owned(shard, ALICE, "sum"))
        assert 0 < await mesh.redis.pttl(own.idle) <= 60_000
        assert [] == await self.starts(mesh), "it wants nothing before its next step"

    async def test_a_sequence_that_is_not_idle_or_not_what_it_was_keeps_its_slot(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh, flags=START | PAGEABLE)
        assert VacateCode.KEPT is await self.vacate(mesh, step, epoch=step.epoch + 1)
        await mesh.submit(mesh.submission(7, ONE))

        assert VacateCode.KEPT is await self.vacate(mesh, step)
        assert VacateCode.KEPT is await self.vacate(mesh, step, moving=True)

    async def test_one_that_may_not_be_paged_can_only_move(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)
        assert VacateCode.KEPT is await self.vacate(mesh, step)

        assert VacateCode.VACATED is await self.vacate(mesh, step, moving=True)
        assert step.epoch < await mesh.assign(7, BOB)
        assert SubmitCode.DELIVERED is (await mesh.submit(mesh.submission(7, ONE))).code
        assert [(2, 1)] == [(s.step, s.committed) for s in await mesh.steps(BOB)]

    async def test_one_whose_state_only_its_owner_holds_keeps_its_slot(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh, flags=START | PAGEABLE)
        await mesh.redis.hset(mesh.keys.sequence(step.sequence).record, "du", "0")

        assert VacateCode.KEPT is await self.vacate(mesh, step)
        assert VacateCode.KEPT is await self.vacate(mesh, step, moving=True)

    async def test_the_next_step_takes_its_turn_in_line_and_goes_on_from_the_checkpoint(
        self, mesh: ScriptedMesh
    ) -> None:
        step = await self.paged(mesh)

        returned = await mesh.submit(mesh.submission(7, ONE, request_id="b"), backlog_max=0)
        second = await mesh.submit(mesh.submission(7, ONE))

        assert [(SubmitCode.WAITING, 2), (SubmitCode.WAITING, 3)] == [(s.code, s.step) for s in (returned, second)]
        (waits,) = await self.starts(mesh)
        assert b"r" == waits[b"k"]
        assert -1 == await mesh.redis.pttl(mesh.keys.sequence(step.sequence).idle)
        assert SubmitCode.JOINED is (await mesh.submit(mesh.submission(7, ONE, request_id="b"))).code
        await mesh.assign(7, BOB, slot=3)
        assert [(2, 1, 3), (3, 1, 3)] == [(s.step, s.committed, s.slot) for s in await mesh.steps(BOB)]
        assert "1" == (await mesh.record(7))["ck"]

    async def test_a_late_commit_of_its_old_owner_is_refused(self, mesh: ScriptedMesh) -> None:
        step = await self.paged(mesh)
        late = msgspec.structs.replace(step, step=StepNumber(2))
        assert CommitCode.REFUSED is await commit(mesh, ALICE, late)
        await mesh.submit(mesh.submission(7, ONE))
        assert CommitCode.REFUSED is await commit(mesh, ALICE, late)
        await mesh.assign(7, ALICE)

        assert CommitCode.REFUSED is await commit(mesh, ALICE, late)

    async def test_an_owner_that_reads_on_late_finds_nothing_of_it(self, mesh: ScriptedMesh) -> None:
        step = await self.paged(mesh)

        assert {} == await read_checkpoints(mesh.redis, mesh.keys, [step.sequence])

    async def test_steps_since_the_checkpoint_are_parked_and_replayed(self, mesh: ScriptedMesh) -> None:
        first = await start(mesh, flags=START | PAGEABLE)
        await mesh.submit(mesh.submission(7, ONE))
        (second,) = await mesh.steps(ALICE)
        await commit(mesh, ALICE, second, checkpoint=False)

        assert VacateCode.UNDRAINED is await self.vacate(mesh, first)
        shard = mesh.keys.shard_of(first.sequence)
        await mesh.scripts.run(mesh.scripts.drain(ALICE, shard=shard, alive=True))
        await mesh.submit(mesh.submission(7, ONE))
        await mesh.assign(7, BOB)

        assert [(2, 2), (3, 2)] == [(s.step, s.committed) for s in await mesh.steps(BOB)]
        assert [InboxVacated] == [type(entry) for entry in await mesh.inbox(ALICE)]

    async def test_an_idle_sequence_of_a_lost_owner_is_paged_and_one_with_a_step_moves(
        self, mesh: ScriptedMesh
    ) -> None:
        await start(mesh, 7, flags=START | PAGEABLE)
        await start(mesh, 8, flags=START | PAGEABLE)
        await mesh.submit(mesh.submission(8, ONE))

        await mesh.take_over(ALICE, lost=True)

        assert ["p", "m"] == [(await mesh.record(number))["st"] for number in (7, 8)]
        assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE))).code
        for number in (7, 8):
            await mesh.assign(number, BOB, slot=number)
        assert [(7, 2), (8, 2)] == sorted((s.slot, s.step) for s in await mesh.steps(BOB))

    async def test_it_expires_without_an_owner(self, mesh: ScriptedMesh) -> None:
        step = await self.paged(mesh)
        shard = mesh.keys.shard_of(step.sequence)
        call = mesh.scripts.expire([step.sequence], LedShard(shard, "sum", mesh.term), tombstone_ms=10_000)
        assert [False] == await mesh.scripts.run(call)

        await mesh.redis.delete(mesh.keys.sequence(step.sequence).idle)

        assert SubmitCode.EXPIRED is (await mesh.submit(mesh.submission(7, ONE))).code
        assert [True] == await mesh.scripts.run(call)
        refused = await mesh.submit(mesh.submission(7, ONE))
        assert (SubmitCode.EXPIRED, 1) == (refused.code, refused.step)
        assert 0 == await mesh.redis.xlen(mesh.keys.feed(shard, "sum")), "it held no slot"
        assert 0 == await mesh.redis.exists(mesh.keys.sequence(step.sequence).checkpoint)

    async def test_a_paged_one_gets_a_slot_without_a_step_if_it_is_wanted_so(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh, flags=START | PAGEABLE)
        assert VacateCode.KEPT is await self.vacate(mesh, step, epoch=0, moving=True)
        await self.vacate(mesh, step)
        assert VacateCode.KEPT is await self.vacate(mesh, step, moving=True), "it is not in that slot any more"

        assert VacateCode.VACATED is await self.vacate(mesh, step, epoch=0, moving=True)
        assert VacateCode.KEPT is await self.vacate(mesh, step, epoch=0, moving=True)

        (waits,) = await self.starts(mesh)
        assert b"m" == waits[b"k"]
        await mesh.assign(7, BOB)
        record = await mesh.record(7)
        assert ("l", BOB, "1") == (record["st"], record["ow"], record["cm"])
        line = (await read_lines(mesh.redis, mesh.keys, ["sum"]))["sum"]
        assert (0, 0) == (line.steps["1"], line.paged["1"])
        assert SubmitCode.DELIVERED is (await mesh.submit(mesh.submission(7, ONE))).code

    async def test_a_start_after_its_idle_time_begins_anew_in_its_turn(self, mesh: ScriptedMesh) -> None:
        step = await self.paged(mesh)
        await mesh.redis.delete(mesh.keys.sequence(step.sequence).idle)

        again = await mesh.submit(mesh.submission(7, ONE, START))

        assert (SubmitCode.WAITING, 2) == (again.code, again.step)
        await mesh.assign(7, BOB)
        assert [(2, START)] == [(s.step, s.flags) for s in await mesh.steps(BOB)]
        assert "2" == (await mesh.record(7))["sn"]

    async def test_the_idle_time_goes_on_between_two_slots_and_stops_with_the_next_step(
        self, mesh: ScriptedMesh
    ) -> None:
        step = await start(mesh, flags=START | PAGEABLE)
        assert VacateCode.VACATED is await self.vacate(mesh, step, moving=True)
        idle = mesh.keys.sequence(step.sequence).idle
        assert 0 < await mesh.redis.pttl(idle)

        assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE))).code
        assert -1 == await mesh.redis.pttl(idle)

        await mesh.assign(7, BOB)
        (second,) = await mesh.steps(BOB)
        await commit(mesh, BOB, second)
        assert VacateCode.VACATED is await self.vacate(mesh, second, moving=True)
        await mesh.redis.delete(idle)
        assert SubmitCode.EXPIRED is (await mesh.submit(mesh.submission(7, ONE))).code

    async def test_a_caller_that_leaves_while_it_is_in_line_is_noted_for_the_next_owner(
        self, mesh: ScriptedMesh
    ) -> None:
        await self.paged(mesh)
        submission = mesh.submission(7, ONE)
        accepted = await mesh.submit(submission)

        assert CancelCode.TOLD is await mesh.cancel(submission, accepted)
        await mesh.assign(7, BOB)

        assert [(2, True)] == [(step.step, step.cancelled) for step in await mesh.steps(BOB)]


class TestPagingByCommit:
    """While others wait, a commit that leaves a sequence without a step takes its slot."""

    async def want(self, mesh: ScriptedMesh, slots: int, number: int = 7) -> str:
        key = mesh.keys.wanted_slots(mesh.keys.shard_of(mesh.sequence(number)), "sum", "1")
        await mesh.redis.set(key, slots, px=60_000)
        return key

    async def commit(self, mesh: ScriptedMesh, step: InboxStep, *, checkpoint: bool = True) -> CommitCode:
        return await commit(mesh, ALICE, step, checkpoint=checkpoint, load=ModelLoad("sum", "1", "0"))

    async def delivered(self, mesh: ScriptedMesh, *, flags: StepFlag = START | PAGEABLE) -> InboxStep:
        await mesh.submit(mesh.submission(7, ONE, flags))
        await mesh.assign(7, ALICE)
        return (await mesh.steps(ALICE))[0]

    async def test_a_sequence_without_a_step_is_paged_and_the_leader_hears_of_it(self, mesh: ScriptedMesh) -> None:
        step = await self.delivered(mesh)
        key = await self.want(mesh, 2)

        assert CommitCode.PAGED is await self.commit(mesh, step)
        assert CommitCode.PAGED is await self.commit(mesh, step), "a lost answer is given again"

        shard = mesh.keys.shard_of(step.sequence)
        feed = await mesh.redis.xrange(mesh.keys.feed(shard, "sum"))
        epoch = str(step.epoch).encode()
        assert [{b"q": b"sum||i7", b"e": epoch, b"k": b"p"}] == [fields for _, fields in feed]
        assert b"1" == await mesh.redis.get(key)
        record = await mesh.record(7)
        assert ("p", "1", ALICE) == (record["st"], record["cm"], record["ow"])
        assert 0 == await mesh.redis.scard(mesh.keys.owned(shard, ALICE, "sum"))
        assert 0 < await mesh.redis.pttl(mesh.keys.sequence(step.sequence).idle) <= 60_000
        assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE))).code

    async def test_a_sequence_with_another_step_keeps_its_slot(self, mesh: ScriptedMesh) -> None:
        step = await self.delivered(mesh)
        await mesh.submit(mesh.submission(7, ONE))
        key = await self.want(mesh, 1)

        assert CommitCode.COMMITTED is await self.commit(mesh, step)
        assert b"1" == await mesh.redis.get(key)

    async def test_one_that_may_not_be_paged_keeps_its_slot(self, mesh: ScriptedMesh) -> None:
        step = await self.delivered(mesh, flags=START)
        await self.want(mesh, 1)

        assert CommitCode.COMMITTED is await self.commit(mesh, step)

    async def test_one_whose_state_is_ahead_of_its_checkpoint_keeps_its_slot(self, mesh: ScriptedMesh) -> None:
        step = await self.delivered(mesh)
        await self.want(mesh, 1)

        assert CommitCode.COMMITTED is await self.commit(mesh, step, checkpoint=False)

    async def test_no_more_are_paged_than_slots_are_wanted(self, mesh: ScriptedMesh) -> None:
        step = await self.delivered(mesh)
        assert CommitCode.COMMITTED is await self.commit(mesh, step)
        await self.want(mesh, 0)
        await mesh.submit(mesh.submission(7, ONE))

        assert CommitCode.COMMITTED is await self.commit(mesh, (await mesh.steps(ALICE))[0])

    async def test_an_end_is_an_end(self, mesh: ScriptedMesh) -> None:
        step = await self.delivered(mesh, flags=START | END | PAGEABLE)
        await self.want(mesh, 1)

        assert CommitCode.OVER is await self.commit(mesh, step)

    async def test_the_line_is_counted(self, mesh: ScriptedMesh) -> None:
        async def line() -> tuple[int, int, int, int]:
            line = (await read_lines(mesh.redis, mesh.keys, ["sum"]))["sum"]
            return line.steps["1"], line.paged_out["1"], line.paged_in["1"], line.paged["1"]

        step = await self.delivered(mesh)
        await self.want(mesh, 1)
        await self.commit(mesh, step)
        assert (0, 1, 0, 1) == await line()
        for waiting in (1, 2):
            await mesh.submit(mesh.submission(7, ONE))
            assert (waiting, 1, 1, 0) == await line()
        await mesh.assign(7, BOB)
        assert (0, 1, 1, 0) == await line()


class TestBounds:
    async def test_live_sequences_are_bounded_whether_they_have_slots_or_not(self, mesh: ScriptedMesh) -> None:
        small = ScriptedMesh(mesh.redis, Keyspace(mesh.keys.prefix, 1), "sum")
        await start(small, 1, flags=START | PAGEABLE)
        assert VacateCode.VACATED is await small.vacate(1)

        refused = await small.submit(small.submission(2, ONE, START), live_max=1)

        assert (SubmitCode.BACKLOG_FULL, b"live") == (refused.code, refused.extra)
        assert SubmitCode.WAITING is (await small.submit(small.submission(1, ONE), live_max=1)).code
        assert SubmitCode.WAITING is (await small.submit(small.submission(2, ONE, START), live_max=2)).code

    async def test_only_sequences_that_wait_for_their_first_slot_fill_the_backlog(self, mesh: ScriptedMesh) -> None:
        """Not the news of a lowered patience, nor those that have begun."""
        small = ScriptedMesh(mesh.redis, Keyspace(mesh.keys.prefix, 1), "sum")
        await start(small, 1, flags=START | PAGEABLE)
        await small.vacate(1)
        await small.submit(small.submission(1, ONE))
        await small.submit(small.submission(2, ONE, START))
        await small.submit(small.submission(2, ONE, timeout_us=60_000_000))

        assert SubmitCode.WAITING is (await small.submit(small.submission(3, ONE, START), backlog_max=2)).code
        refused = await small.submit(small.submission(4, ONE, START), backlog_max=2)
        assert (SubmitCode.BACKLOG_FULL, b"waiting") == (refused.code, refused.extra)
        await small.assign(2, ALICE)
        assert SubmitCode.WAITING is (await small.submit(small.submission(4, ONE, START), backlog_max=2)).code


class TestExpiry:
    async def test_only_the_markers_absence_ends_a_sequence(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)
        assert not await mesh.expire(7)

        await mesh.redis.delete(mesh.keys.sequence(step.sequence).idle)

        assert await mesh.expire(7)
        assert not await mesh.expire(7)
        expired = [(e.epoch, e.ended) for e in await mesh.inbox(ALICE) if isinstance(e, InboxExpired)]
        assert [(step.epoch, False)] == expired
        refused = await mesh.submit(mesh.submission(7, ONE))
        assert (SubmitCode.EXPIRED, 1) == (refused.code, refused.step)

    async def test_a_sequence_with_a_step_in_flight_does_not_expire(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)
        await mesh.submit(mesh.submission(7, ONE))
        await mesh.redis.delete(mesh.keys.sequence(step.sequence).idle)

        assert not await mesh.expire(7)
        deadlines = mesh.keys.deadlines(mesh.keys.shard_of(step.sequence), "sum")
        assert await mesh.redis.zscore(deadlines, step.sequence) is None, "the next commit sets it"

    @pytest.mark.parametrize("idle_ms", [60_000, 10_000], ids=["as-before", "shorter"])
    async def test_the_reaper_comes_by_the_latest_idle_time(self, mesh: ScriptedMesh, idle_ms: int) -> None:
        """Also where an earlier load of the model, or a clock that was set back, have said a later time."""
        step = await start(mesh)
        deadlines = mesh.keys.deadlines(mesh.keys.shard_of(step.sequence), "sum")
        await mesh.redis.zadd(deadlines, {step.sequence: 1 << 52})
        await mesh.submit(mesh.submission(7, ONE))
        (second,) = await mesh.steps(ALICE)

        assert CommitCode.COMMITTED is await commit(mesh, ALICE, second, idle_ms=idle_ms)

        assert await is_due(mesh, within_ms=idle_ms + 2_000)
        assert not await is_due(mesh, within_ms=0)

    async def test_between_two_owners_it_expires_as_well_and_leaves_the_line(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)
        await mesh.take_over(ALICE)
        place = (await mesh.record(7))["be"]
        own, shard = mesh.keys.sequence(step.sequence), mesh.keys.shard_of(step.sequence)
        await mesh.redis.zadd(mesh.keys.deadlines(shard, "sum"), {step.sequence: 1})
        assert not await mesh.expire(7)
        assert await is_due(mesh, within_ms=62_000), "its marker lives: the reaper comes by again when that ends"
        assert not await is_due(mesh, within_ms=0)

        await mesh.redis.delete(own.idle)

        assert [True, False] == [await mesh.expire(7) for _ in range(2)]
        assert 0 == await mesh.redis.xlen(mesh.keys.starts(shard, "sum"))
        assert 0 == await mesh.redis.zcard(mesh.keys.deadlines(shard, "sum"))
        assert 0 == await mesh.redis.exists(own.parked, own.checkpoint)
        ((_, told),) = await mesh.redis.xrange(mesh.keys.feed(shard, "sum"))
        assert {b"q": step.sequence.encode(), b"e": b"0", b"k": b"x", b"b": place.encode()} == told
        refused = await mesh.submit(mesh.submission(7, ONE))
        assert (SubmitCode.EXPIRED, 1) == (refused.code, refused.step)
        assert 0 == await mesh.assign(7, BOB), "a leader that has not heard of it yet"

    async def test_between_two_owners_it_stays_while_a_step_is_in_flight(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)
        await mesh.take_over(ALICE)
        await mesh.submit(mesh.submission(7, ONE))
        await mesh.redis.delete(mesh.keys.sequence(step.sequence).idle)

        assert not await mesh.expire(7)
        assert 0 < await mesh.assign(7, BOB)

    async def test_a_step_that_comes_after_the_idle_time_is_refused_before_the_reaper_came(
        self, mesh: ScriptedMesh
    ) -> None:
        step = await start(mesh)
        await mesh.redis.delete(mesh.keys.sequence(step.sequence).idle)

        assert SubmitCode.EXPIRED is (await mesh.submit(mesh.submission(7, ONE))).code
        assert SubmitCode.DELIVERED is (await mesh.submit(mesh.submission(7, ONE, START))).code


class TestReject:
    async def test_every_parked_step_hears_and_no_record_stays(self, mesh: ScriptedMesh) -> None:
        first, second = mesh.submission(7, ONE, START), mesh.submission(7, ONE)
        await mesh.submit(first)
        await mesh.submit(second)
        sequence = mesh.sequence(7)
        late = encode(ReplyMessage("1", error_code="UNAVAILABLE", error="late"))
        first_wait = (await mesh.record(7))["be"]

        (answered,) = await mesh.scripts.run(
            mesh.scripts.reject(
                [Rejection(sequence, first_wait, late)],
                LedShard(mesh.keys.shard_of(sequence), "sum", Term(1)),
                tombstone_ms=60_000,
            )
        )

        assert 2 == answered
        assert "late" == (await mesh.reply(first)).error
        assert "late" == (await mesh.reply(second)).error
        assert {} == await mesh.record(7)
        assert Epoch(0) == await mesh.assign(7, ALICE)

    async def test_steps_that_are_kept_for_their_state_were_answered_before(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        await mesh.submit(mesh.submission(7, ONE))
        (step,) = await mesh.steps(ALICE)
        await commit(mesh, ALICE, step, checkpoint=False)
        last = mesh.submission(7, ONE)
        await mesh.submit(last)
        await mesh.take_over(ALICE)
        refusal = Rejection(step.sequence, (await mesh.record(7))["be"], REPLY)

        shard = mesh.keys.shard_of(step.sequence)
        (answered,) = await mesh.scripts.run(
            mesh.scripts.reject([refusal], LedShard(shard, "sum", Term(1)), tombstone_ms=60_000)
        )

        await mesh.reply(last)
        assert 1 == answered
        assert 1 == mesh.heard.count(step.token)

    async def test_who_asked_again_for_a_step_that_is_still_in_an_inbox_hears(self, mesh: ScriptedMesh) -> None:
        """Of many steps in the inbox of a lost executor, a part is drained before the others."""
        await start(mesh)
        first, again = (mesh.submission(7, ONE, request_id="a") for _ in range(2))
        await mesh.submit(first)
        assert SubmitCode.JOINED is (await mesh.submit(again)).code
        shard = mesh.keys.shard_of(mesh.sequence(7))
        await mesh.reclaim(ALICE)
        refusal = Rejection(mesh.sequence(7), (await mesh.record(7))["be"], REPLY)

        await mesh.scripts.run(mesh.scripts.reject([refusal], LedShard(shard, "sum", mesh.term), tombstone_ms=60_000))
        await mesh.scripts.run(mesh.scripts.drain(ALICE, shard=shard))

        assert decode_reply(REPLY) == await mesh.reply(again)
        assert Reason.LOST == (await mesh.reply(first)).reason

    async def test_a_sequence_that_had_a_slot_before_is_lost_and_its_journal_goes(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)
        journal, shard = mesh.keys.journal(step.sequence), mesh.keys.shard_of(step.sequence)
        await mesh.redis.hset(journal, "n", "1")
        await mesh.submit(mesh.submission(7, ONE))
        await mesh.take_over(ALICE, lost=True)
        refusal = Rejection(step.sequence, (await mesh.record(7))["be"], REPLY)

        await mesh.scripts.run(mesh.scripts.reject([refusal], LedShard(shard, "sum", Term(1)), tombstone_ms=60_000))

        record = await mesh.record(7)
        assert "o" == record["st"]
        kept = [journal, mesh.keys.sequence(step.sequence).record]
        assert all([0 < await mesh.redis.pttl(key) <= 60_000 for key in kept])
        assert 0 == await mesh.redis.zcard(mesh.keys.deadlines(shard, "sum"))
        next_step = await mesh.submit(mesh.submission(7, ONE))
        assert (SubmitCode.LOST, 1) == (next_step.code, next_step.step)

    async def test_more_steps_than_a_call_of_lua_takes_arguments_are_answered_and_counted(
        self, mesh: ScriptedMesh
    ) -> None:
        many = 8_100
        submissions = [mesh.submission(7, ONE, START if n == 0 else StepFlag.NONE) for n in range(many)]
        for first in range(0, many, 900):
            some = submissions[first : first + 900]
            await mesh.scripts.run(mesh.scripts.submit(some, backlog_max=1, in_flight_max=many))
        refusal, shard = (
            Rejection(mesh.sequence(7), (await mesh.record(7))["be"], REPLY),
            mesh.keys.shard_of(mesh.sequence(7)),
        )

        answered = await mesh.scripts.run(
            mesh.scripts.reject([refusal], LedShard(shard, "sum", Term(1)), tombstone_ms=60_000)
        )

        assert [many] == answered
        assert many == await mesh.redis.llen(mesh.keys.tally(shard, "sum", "1", ""))


class TestCancel:
    async def test_a_waiting_sequence_goes_with_all_its_steps(self, mesh: ScriptedMesh) -> None:
        first, second = mesh.submission(7, ONE, START), mesh.submission(7, ONE)
        await mesh.submit(first)
        accepted = await mesh.submit(second)
        entry = (await mesh.record(7))["be"]

        assert CancelCode.REMOVED is await mesh.cancel(second, accepted)
        assert CancelCode.NOTHING is await mesh.cancel(second, accepted)

        for submission in (first, second):
            reply = await mesh.reply(submission)
            assert ("CANCELLED", "") == (reply.error_code, reply.error)
        assert {} == await mesh.record(7)
        shard = mesh.keys.shard_of(mesh.sequence(7))
        assert 0 == await mesh.redis.xlen(mesh.keys.starts(shard, "sum"))
        feed = await mesh.redis.xrange(mesh.keys.feed(shard, "sum"))
        assert [{b"q": b"sum||i7", b"e": b"0", b"k": b"c", b"b": entry.encode()}] == [fields for _, fields in feed]

    async def test_an_assignment_never_hits_a_newer_sequence_of_the_same_id(self, mesh: ScriptedMesh) -> None:
        first = mesh.submission(7, ONE, START)
        accepted = await mesh.submit(first)
        old = (await mesh.record(7))["be"]
        await mesh.cancel(first, accepted)
        await mesh.submit(mesh.submission(7, ONE, START))
        sequence, shard = mesh.sequence(7), mesh.keys.shard_of(mesh.sequence(7))
        place = Assignment(sequence, old, ALICE, InstanceIndex(0), SlotIndex(0))
        late = [Rejection(sequence, old, REPLY)]

        assert [0] == await mesh.scripts.run(mesh.scripts.assign([place], LedShard(shard, "sum", Term(1))))
        assert [-1] == await mesh.scripts.run(
            mesh.scripts.reject(late, LedShard(shard, "sum", Term(1)), tombstone_ms=60_000)
        )
        assert "w" == (await mesh.record(7))["st"]

    async def test_the_owner_is_told_and_its_commit_ends_the_sequence(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        submission, behind = mesh.submission(7, ONE), mesh.submission(7, ONE)
        accepted = await mesh.submit(submission)
        await mesh.submit(behind)

        assert CancelCode.TOLD is await mesh.cancel(submission, accepted)
        assert CancelCode.TOLD is await mesh.cancel(submission, accepted)

        assert [2] == [told.step for told in await mesh.inbox(ALICE) if isinstance(told, InboxCancelled)]
        second, third = await mesh.steps(ALICE)
        assert CommitCode.COMMITTED is await commit(mesh, ALICE, second, outcome=StepOutcome.CANCELLED)
        assert SubmitCode.CANCELLED is (await mesh.submit(mesh.submission(7, ONE))).code
        assert CommitCode.OVER is await commit(mesh, ALICE, third, outcome=StepOutcome.VOID)
        assert SubmitCode.CANCELLED is (await mesh.submit(mesh.submission(7, ONE))).code
        assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE, START))).code

    async def test_an_owner_that_fetches_the_record_finds_what_it_was_told(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START))
        await mesh.assign(7, ALICE)
        submission = mesh.submission(7, ONE)
        await mesh.cancel(submission, await mesh.submit(submission))

        found = await read_checkpoints(mesh.redis, mesh.keys, [submission.sequence])

        assert {2} == found[submission.sequence].cancelled

    async def test_a_start_behind_a_cancelled_step_begins_anew(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        submission = mesh.submission(7, ONE)
        await mesh.cancel(submission, await mesh.submit(submission))
        await mesh.submit(mesh.submission(7, ONE, START))
        cancelled, anew = await mesh.steps(ALICE)

        assert CommitCode.COMMITTED is await commit(mesh, ALICE, cancelled, outcome=StepOutcome.CANCELLED)
        assert CommitCode.COMMITTED is await commit(mesh, ALICE, anew)
        assert SubmitCode.DELIVERED is (await mesh.submit(mesh.submission(7, ONE))).code

    async def test_a_step_that_was_answered_or_is_another_sequences_is_not_cancelled(self, mesh: ScriptedMesh) -> None:
        submission = mesh.submission(7, ONE, START | END)
        accepted = await mesh.submit(submission)
        await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)
        await commit(mesh, ALICE, step)
        assert CancelCode.NOTHING is await mesh.cancel(submission, accepted)
        await mesh.submit(mesh.submission(7, ONE, START))

        assert CancelCode.NOTHING is await mesh.cancel(submission, accepted)
        assert "w" == (await mesh.record(7))["st"]

    async def test_a_step_goes_on_while_one_of_its_callers_waits(self, mesh: ScriptedMesh) -> None:
        """A retry took the step up elsewhere: who leaves first leaves alone, however often it is told."""
        first, retry = mesh.submission(7, ONE, START, request_id="a"), mesh.submission(7, ONE, START, request_id="a")
        accepted, joined = await mesh.submit(first), await mesh.submit(retry)
        assert (SubmitCode.JOINED, accepted.birth) == (joined.code, joined.birth)

        for _ in range(2):
            assert CancelCode.SHARED is await mesh.cancel(first, accepted)
        assert CancelCode.REMOVED is await mesh.cancel(retry, joined)

    async def test_the_mark_follows_the_step_to_its_next_owner(self, mesh: ScriptedMesh) -> None:
        """Cancelled while its sequence moves, with its entry still in the dead owner's inbox or parked already."""
        await start(mesh)
        old = mesh.submission(7, ONE)
        accepted = await mesh.submit(old)
        shard = mesh.keys.shard_of(mesh.sequence(7))
        await mesh.reclaim(ALICE)
        parked = mesh.submission(7, ONE)
        moving = await mesh.submit(parked)

        assert CancelCode.TOLD is await mesh.cancel(old, accepted)
        assert CancelCode.TOLD is await mesh.cancel(parked, moving)
        await mesh.assign(7, BOB)
        await mesh.scripts.run(mesh.scripts.drain(ALICE, shard=shard))

        assert [(2, True), (3, True)] == sorted((step.step, step.cancelled) for step in await mesh.steps(BOB))
        for step in sorted(await mesh.steps(BOB), key=lambda one: one.step):
            await commit(mesh, BOB, step)
        assert "ca" not in await mesh.record(7), "numbers of steps that are over are forgotten"


async def test_a_step_that_kills_its_owners_is_given_up_and_with_it_the_sequence(mesh: ScriptedMesh) -> None:
    await start(mesh)
    for _ in range(2):
        await mesh.submit(mesh.submission(7, ONE))

    async def taken_over(*, lost: bool = True, tried: bool = True) -> list[bool]:
        """Both steps, at the next owner: whether they are to be given up."""
        if tried:
            epoch = Epoch(int((await mesh.record(7))["ep"]))
            assert await mesh.scripts.run(mesh.scripts.attempt(mesh.sequence(7), epoch))
            assert not await mesh.scripts.run(mesh.scripts.attempt(mesh.sequence(7), Epoch(epoch - 1)))
        await mesh.take_over(ALICE, lost=lost)
        await mesh.assign(7, ALICE)
        here = sorted(await mesh.steps(ALICE), key=lambda step: step.step)
        return [step.given_up for step in here[-2:]]

    suspicions: list[int] = []
    for _ in range(LOST_OWNERS_MAX - 1):
        assert [False, False] == await taken_over()
        suspicions.append((await mesh.steps(ALICE))[0].suspicion)
    assert [0, 2, 3, 4] == suspicions
    # Those that only lay beside it were not tried: they stay suspected, and no more than that.
    for _ in range(LOST_OWNERS_MAX):
        assert [False, False] == await taken_over(tried=False)
    assert {4} == {step.suspicion for step in await mesh.steps(ALICE)}
    # Executors that leave are not lost, and a step that was committed was not what killed them.
    assert [False, False] == await taken_over(lost=False)
    second, third = sorted(await mesh.steps(ALICE), key=lambda step: step.step)
    assert CommitCode.COMMITTED is await commit(mesh, ALICE, second)
    for _ in range(LOST_OWNERS_MAX - 1):
        await taken_over()
        assert [(3, False)] == [(step.step, step.given_up) for step in await mesh.steps(ALICE)]
    await mesh.submit(mesh.submission(7, ONE))
    assert [True, False] == await taken_over()

    third, fourth = sorted(await mesh.steps(ALICE), key=lambda step: step.step)
    assert (3, False) == (third.step, third.cancelled)
    assert CommitCode.COMMITTED is await commit(mesh, ALICE, third, outcome=StepOutcome.GIVEN_UP)
    assert SubmitCode.LOST is (await mesh.submit(mesh.submission(7, ONE))).code
    assert CommitCode.OVER is await commit(mesh, ALICE, fourth, outcome=StepOutcome.VOID)
    assert SubmitCode.LOST is (await mesh.submit(mesh.submission(7, ONE))).code
    assert {"tk", "gu"}.isdisjoint(await mesh.record(7))
    assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE, START))).code


class TestPatience:
    async def news(self, mesh: ScriptedMesh) -> list[dict[bytes, bytes]]:
        shard = mesh.keys.shard_of(mesh.sequence(7))
        entries = await mesh.redis.xrange(mesh.keys.starts(shard, "sum"))
        return [fields for _, fields in entries if fields[b"k"] == b"d"]

    async def test_only_a_step_that_waits_less_long_than_those_before_it_is_news(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START, timeout_us=50_000_000))
        await mesh.submit(mesh.submission(7, ONE))
        await mesh.submit(mesh.submission(7, ONE, timeout_us=90_000_000))
        assert [] == await self.news(mesh)

        await mesh.submit(mesh.submission(7, ONE, timeout_us=20_000_000))
        (first,) = await self.news(mesh)
        await mesh.submit(mesh.submission(7, ONE, timeout_us=10_000_000))
        (second,) = await self.news(mesh)

        record = await mesh.record(7)
        assert record["be"].encode() == first[b"b"] == second[b"b"]
        assert int(first[b"d"]) > int(second[b"d"]) == int(record["dl"])

    async def test_the_news_goes_when_the_wait_is_over(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START))
        await mesh.submit(mesh.submission(7, ONE, timeout_us=20_000_000))
        assert 1 == len(await self.news(mesh))

        await mesh.assign(7, ALICE)
        assert [] == await self.news(mesh)
        await mesh.submit(mesh.submission(7, ONE, timeout_us=1))
        assert [] == await self.news(mesh)
        assert {"dl", "dn"}.isdisjoint(await mesh.record(7))


class TestResent:
    async def test_a_step_sent_again_is_late_once_others_steps_may_have_pushed_its_trace_out(
        self, mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It must not run twice: what is not known any more is refused."""
        monkeypatch.setattr("shared.store.scripts.RETRY_IDS", 1)
        await mesh.submit(mesh.submission(7, ONE, START, request_id="a"))
        await mesh.assign(7, ALICE)
        await commit(mesh, ALICE, (await mesh.steps(ALICE))[0], request_id="a")
        first_sent = int((await mesh.record(7))["la"].split()[0])
        for name in "bcdefghi":
            await mesh.submit(mesh.submission(7, ONE, request_id=name, gateway="other"))
            await commit(mesh, ALICE, (await mesh.steps(ALICE))[0], request_id=name)

        again = await mesh.submit(mesh.submission(7, ONE, START, request_id="a", since_ms=first_sent))

        assert (SubmitCode.LATE, 9) == (again.code, again.step)
        assert "9" == (await mesh.record(7))["nx"]

    async def test_a_step_sent_again_is_told_from_others_while_all_ids_are_remembered(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START, request_id="a", gateway="other"))
        begun = int((await mesh.record(7))["bn"].split("-")[0])
        async with asyncio.timeout(60):
            while (now := await mesh.redis.time())[0] * 1000 + now[1] // 1000 <= begun:
                pass
        await mesh.submit(mesh.submission(7, ONE, request_id="x", gateway="other"))

        again = await mesh.submit(mesh.submission(7, ONE, request_id="b", since_ms=begun + 1))

        assert (SubmitCode.WAITING, 3) == (again.code, again.step)

    async def test_a_numbered_step_sent_again_is_told_from_others_by_its_number(self, mesh: ScriptedMesh) -> None:
        """In the first run of a sequence: the number of a step in a later run may have been given in the one before."""
        first = mesh.submission(7, ONE, START, gateway="other")
        await mesh.submit(first)
        begun = int((await mesh.record(7))["bn"].split("-")[0])
        async with asyncio.timeout(60):
            while await redis_now_ms(mesh.redis) <= begun:
                pass
        await mesh.submit(mesh.submission(7, ONE, gateway="other"))

        again = await mesh.submit(mesh.submission(7, ONE, expected_step=3, since_ms=begun + 1))
        assert (SubmitCode.WAITING, 3) == (again.code, again.step)
        await mesh.submit(mesh.submission(7, ONE, gateway="other"))
        earlier = await mesh.submit(mesh.submission(7, ONE, expected_step=5, since_ms=begun))
        assert (SubmitCode.LATE, 4) == (earlier.code, earlier.step), "the sequence may have begun after it was sent"
        await mesh.submit(mesh.submission(7, ONE, START, gateway="other"))
        other_run = await mesh.submit(mesh.submission(7, ONE, expected_step=2, since_ms=begun + 1))
        assert (SubmitCode.LATE, 1) == (other_run.code, other_run.step)

    async def test_a_step_sent_again_is_late_when_another_sequence_has_begun_under_its_id_meanwhile(
        self, mesh: ScriptedMesh
    ) -> None:
        """Of the one that it was sent to nothing is remembered."""
        await mesh.submit(mesh.submission(7, ONE, START, request_id="a", gateway="other"))

        again = await mesh.submit(mesh.submission(7, ONE, request_id="b", since_ms=0))

        assert (SubmitCode.LATE, 1) == (again.code, again.step)

    async def test_a_step_sent_again_is_accepted_when_nobody_else_came_in(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        latest = int((await mesh.record(7))["la"].split()[0])

        own = await mesh.submit(mesh.submission(7, ONE, request_id="b", since_ms=latest))
        assert SubmitCode.DELIVERED is own.code
        elsewhere = await mesh.submit(
            mesh.submission(7, ONE, request_id="c", gateway="other", since_ms=latest + 60_000)
        )
        assert SubmitCode.DELIVERED is elsewhere.code

    async def test_a_step_sent_again_with_those_behind_it_does_not_run_twice(self, mesh: ScriptedMesh) -> None:
        """Both were answered, the replies were not read."""
        first = msgspec.structs.replace(mesh.submission(7, ONE, START, request_id="a"), token="9")
        second = msgspec.structs.replace(mesh.submission(7, ONE, request_id="b"), token="a")
        await mesh.submit(first)
        await mesh.submit(second)
        await mesh.assign(7, ALICE)
        for step, request_id in zip(await mesh.steps(ALICE), "ab", strict=True):
            await commit(mesh, ALICE, step, request_id=request_id)

        again = [await mesh.submit(msgspec.structs.replace(one, since_ms=0)) for one in (first, second)]

        assert [SubmitCode.REPEATED, SubmitCode.REPEATED] == [one.code for one in again]
        assert "2" == (await mesh.record(7))["nx"]

    async def test_steps_sent_again_that_never_came_are_accepted_in_their_order(self, mesh: ScriptedMesh) -> None:
        await start(mesh)

        for request_id, token in (("b", "ff"), ("c", "100")):
            step = mesh.submission(7, ONE, request_id=request_id, since_ms=0)
            outcome = await mesh.submit(msgspec.structs.replace(step, token=token))
            assert SubmitCode.DELIVERED is outcome.code

    async def test_a_step_sent_again_is_cancelled_with_its_only_caller(self, mesh: ScriptedMesh) -> None:
        step = mesh.submission(7, ONE, START, request_id="a")
        await mesh.submit(step)

        again = await mesh.submit(msgspec.structs.replace(step, since_ms=0))

        assert SubmitCode.JOINED is again.code
        assert CancelCode.REMOVED is await mesh.cancel(step, again)

    async def test_what_is_known_of_it_comes_first(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START, request_id="a"))
        await mesh.submit(mesh.submission(7, ONE, request_id="b", gateway="other"))

        again = await mesh.submit(mesh.submission(7, ONE, START, request_id="a", since_ms=0))
        assert SubmitCode.JOINED is again.code


async def test_scripts_are_loaded_again_when_the_server_does_not_have_them(mesh: ScriptedMesh) -> None:
    await mesh.submit(mesh.submission(7, ONE, START))
    await mesh.redis.function_flush()

    outcome = await mesh.submit(mesh.submission(7, ONE))

    assert StepNumber(2) == outcome.step


async def test_a_sequence_stays_with_the_version_of_its_start(mesh: ScriptedMesh) -> None:
    await mesh.submit(mesh.submission(7, ONE, START))
    mesh.version = "2"
    await mesh.submit(mesh.submission(7, ONE))
    await mesh.assign(7, ALICE)
    await mesh.submit(mesh.submission(7, ONE))

    assert ["1", "1", "1"] == [step.version for step in await mesh.steps(ALICE)]


class TestOrphan:
    """A connection is gone that had used a sequence and not ended it."""

    async def test_its_idle_time_shrinks_and_the_reaper_comes_sooner(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)
        assert not await is_due(mesh, within_ms=40_000)

        assert await orphan(mesh, step.token)

        assert 0 < await idle_left_ms(mesh) <= GRACE_MS
        assert await is_due(mesh, within_ms=GRACE_MS + 1_000)
        assert await is_told(mesh)

    async def test_it_expires_after_the_grace(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)
        assert await orphan(mesh, step.token, grace_ms=1)
        await marker_is_gone(mesh)

        assert SubmitCode.EXPIRED is (await mesh.submit(mesh.submission(7, ONE))).code
        assert await mesh.expire(7)
        assert "og" not in await mesh.record(7)

    async def test_the_grace_makes_no_idle_time_longer(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)

        assert not await orphan(mesh, step.token, grace_ms=600_000)

        assert await idle_left_ms(mesh) <= 60_000

    async def test_told_twice_it_is_one_grace(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)
        assert await orphan(mesh, step.token, grace_ms=GRACE_MS)

        assert not await orphan(mesh, step.token, grace_ms=10_000)

        assert int((await mesh.record(7))["og"]) > 1_000_000_000_000
        assert await idle_left_ms(mesh) > 0

    async def test_a_step_in_flight_runs_and_the_grace_begins_with_its_commit(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        second = mesh.submission(7, ONE)
        await mesh.submit(second)

        assert await orphan(mesh, second.token)

        assert await idle_left_ms(mesh) == -1
        (step,) = await mesh.steps(ALICE)
        assert await commit(mesh, ALICE, step) is CommitCode.COMMITTED
        assert 0 < await idle_left_ms(mesh) <= GRACE_MS
        assert await is_due(mesh, within_ms=GRACE_MS + 1_000)
        assert await is_told(mesh)

    async def test_a_later_step_takes_the_sequence_back(self, mesh: ScriptedMesh) -> None:
        first = await start(mesh)
        assert await orphan(mesh, first.token)

        await mesh.submit(mesh.submission(7, ONE, gateway="g-other"))

        (step,) = await mesh.steps(ALICE)
        assert await commit(mesh, ALICE, step) is CommitCode.COMMITTED
        assert await idle_left_ms(mesh) > GRACE_MS
        assert "og" not in await mesh.record(7)

    async def test_a_step_after_the_grace_has_begun_with_a_commit_gives_the_idle_time_back(
        self, mesh: ScriptedMesh
    ) -> None:
        await start(mesh)
        second = mesh.submission(7, ONE, request_id="second")
        await mesh.submit(second)
        assert await orphan(mesh, second.token)
        (step,) = await mesh.steps(ALICE)
        assert await commit(mesh, ALICE, step, request_id="second") is CommitCode.COMMITTED

        retry = mesh.submission(7, ONE, request_id="second", gateway="g-other")
        assert SubmitCode.REPEATED is (await mesh.submit(retry)).code

        assert await idle_left_ms(mesh) > GRACE_MS
        assert "og" not in await mesh.record(7)

    async def test_a_later_step_takes_it_back_while_one_is_in_flight(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        second = mesh.submission(7, ONE)
        await mesh.submit(second)
        assert await orphan(mesh, second.token)

        await mesh.submit(mesh.submission(7, ONE, gateway="g-other"))

        for step in await mesh.steps(ALICE):
            assert await commit(mesh, ALICE, step) is CommitCode.COMMITTED
        assert await idle_left_ms(mesh) > GRACE_MS

    async def test_a_sequence_that_somebody_else_has_used_since_is_no_orphan(self, mesh: ScriptedMesh) -> None:
        first = await start(mesh)
        await mesh.submit(mesh.submission(7, ONE, gateway="g-other"))
        (step,) = await mesh.steps(ALICE)
        await commit(mesh, ALICE, step)

        assert not await orphan(mesh, first.token)

        assert await idle_left_ms(mesh) > GRACE_MS

    @pytest.mark.parametrize("committed", [True, False], ids=["answered", "in flight"])
    async def test_a_retry_elsewhere_takes_it_back(self, mesh: ScriptedMesh, committed: bool) -> None:
        """The end of the old connection is noticed before the retry (where it broke), or after it (where it hung)."""
        await start(mesh)
        second = mesh.submission(7, ONE, request_id="second")
        await mesh.submit(second)
        (step,) = await mesh.steps(ALICE)
        if committed:
            await commit(mesh, ALICE, step, request_id="second")
        assert await orphan(mesh, second.token)

        retry = mesh.submission(7, ONE, request_id="second", gateway="g-other")
        expected = SubmitCode.REPEATED if committed else SubmitCode.JOINED
        assert expected is (await mesh.submit(retry)).code

        assert not await orphan(mesh, second.token)
        if not committed:
            await commit(mesh, ALICE, step, request_id="second")
        assert await idle_left_ms(mesh) > GRACE_MS

    async def test_one_who_asked_again_may_leave_too(self, mesh: ScriptedMesh) -> None:
        first = mesh.submission(7, ONE, START, request_id="first")
        await mesh.submit(first)
        await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)
        await commit(mesh, ALICE, step, request_id="first")
        retry = mesh.submission(7, ONE, START, request_id="first")
        assert SubmitCode.REPEATED is (await mesh.submit(retry)).code

        assert not await orphan(mesh, first.token)
        assert await orphan(mesh, retry.token)

        assert 0 < await idle_left_ms(mesh) <= GRACE_MS

    async def test_a_sequence_whose_end_is_accepted_is_left_alone(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        last = mesh.submission(7, ONE, END)
        await mesh.submit(last)

        assert not await orphan(mesh, last.token)

        (step,) = await mesh.steps(ALICE)
        assert await commit(mesh, ALICE, step) is CommitCode.OVER
        assert not await orphan(mesh, last.token)

    async def test_one_that_waits_for_a_slot_is_served_first(self, mesh: ScriptedMesh) -> None:
        first = mesh.submission(7, ONE, START)
        await mesh.submit(first)
        assert await orphan(mesh, first.token)
        assert await idle_left_ms(mesh) == -1

        await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)
        await commit(mesh, ALICE, step)

        assert 0 < await idle_left_ms(mesh) <= GRACE_MS

    async def test_a_takeover_keeps_the_grace(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        second = mesh.submission(7, ONE)
        await mesh.submit(second)
        assert await orphan(mesh, second.token)

        await mesh.take_over(ALICE)
        await mesh.assign(7, BOB)

        (step,) = await mesh.steps(BOB)
        assert await commit(mesh, BOB, step) is CommitCode.COMMITTED
        assert 0 < await idle_left_ms(mesh) <= GRACE_MS

    async def test_a_paged_one_expires_and_its_next_step_takes_it_back(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh, flags=START | PAGEABLE)
        assert await mesh.vacate(7) is VacateCode.VACATED

        assert await orphan(mesh, step.token)

        assert 0 < await idle_left_ms(mesh) <= GRACE_MS
        assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE))).code
        assert await idle_left_ms(mesh) == -1
        assert "og" not in await mesh.record(7)

    async def test_an_unknown_sequence_is_nobody(self, mesh: ScriptedMesh) -> None:
        assert not await orphan(mesh, "7/1")
        assert {} == await mesh.record(7)


class TestEnd:
    """An operator ends a sequence."""

    async def test_without_open_steps_the_leader_ends_it_at_once(self, mesh: ScriptedMesh) -> None:
        await start(mesh)

        assert await end(mesh) is EndCode.ENDS

        await marker_is_gone(mesh)
        assert await is_due(mesh, within_ms=1_000)
        assert await mesh.expire(7)
        (over,) = await mesh.inbox(ALICE)
        assert isinstance(over, InboxExpired)
        assert over.ended
        assert {"st": "c", "cl": "1"}.items() <= (await mesh.record(7)).items()
        assert await end(mesh) is EndCode.NOTHING

    async def test_open_steps_are_answered_first(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        await mesh.submit(mesh.submission(7, ONE))

        assert await end(mesh) is EndCode.CLOSED

        assert not await mesh.expire(7)
        (step,) = await mesh.steps(ALICE)
        assert await commit(mesh, ALICE, step) is CommitCode.COMMITTED
        await marker_is_gone(mesh)
        assert await mesh.expire(7)

    async def test_it_accepts_no_step_any_more_and_says_why(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        assert await end(mesh) is EndCode.ENDS

        assert SubmitCode.CANCELLED is (await mesh.submit(mesh.submission(7, ONE))).code
        await marker_is_gone(mesh)
        assert SubmitCode.CANCELLED is (await mesh.submit(mesh.submission(7, ONE))).code
        assert await mesh.expire(7)
        assert SubmitCode.CANCELLED is (await mesh.submit(mesh.submission(7, ONE))).code

    async def test_a_start_goes_on_with_its_slot_and_has_its_idle_time_back(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        assert await end(mesh) is EndCode.ENDS

        assert SubmitCode.DELIVERED is (await mesh.submit(mesh.submission(7, ONE, START))).code

        (step,) = await mesh.steps(ALICE)
        assert await commit(mesh, ALICE, step) is CommitCode.COMMITTED
        assert await idle_left_ms(mesh) > GRACE_MS
        assert not await mesh.expire(7)

    async def test_one_that_waits_for_its_first_slot_is_refused_with_its_steps(self, mesh: ScriptedMesh) -> None:
        waiting = [mesh.submission(7, ONE, flags) for flags in (START, NONE)]
        for submission in waiting:
            await mesh.submit(submission)
        entry = (await mesh.record(7))["be"].encode()

        assert await end(mesh) is EndCode.REMOVED

        assert {} == await mesh.record(7)
        told = await mesh.redis.xrange(mesh.keys.feed(mesh.keys.shard_of(mesh.sequence(7)), "sum"))
        assert [entry] == [fields[b"b"] for _, fields in told], "the leader takes it out of the line"
        assert ["1", "1"] == [(await mesh.reply(submission)).version for submission in waiting]
        assert await end(mesh) is EndCode.NOTHING

    async def test_where_no_leader_reads_the_feed_what_it_would_find_out_is_not_added(self, mesh: ScriptedMesh) -> None:
        step = await start(mesh)
        shard = mesh.keys.shard_of(step.sequence)
        other = next(number for number in range(8, 99) if mesh.keys.shard_of(mesh.sequence(number)) == shard)
        feed = mesh.keys.feed(shard, "sum")
        pipe = mesh.redis.pipeline(transaction=False)
        for _ in range(10_000):
            pipe.xadd(feed, {"q": "", "e": 0, "k": "e"})
        await pipe.execute()

        assert await orphan(mesh, step.token)
        assert await is_due(mesh, within_ms=GRACE_MS + 1_000)
        await mesh.submit(mesh.submission(other, ONE, START))
        assert await end(mesh, other) is EndCode.REMOVED
        assert await end(mesh) is EndCode.ENDS

        assert 10_000 == await mesh.redis.xlen(feed)

    async def test_without_a_reply_the_steps_of_one_that_waits_are_run_before_it_ends(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START))

        assert await end(mesh, reply=b"") is EndCode.CLOSED

        assert SubmitCode.CANCELLED is (await mesh.submit(mesh.submission(7, ONE))).code
        await mesh.assign(7, ALICE)
        (step,) = await mesh.steps(ALICE)
        assert await commit(mesh, ALICE, step) is CommitCode.COMMITTED
        await marker_is_gone(mesh)
        assert await is_due(mesh, within_ms=1_000)
        assert await mesh.expire(7)

    async def test_another_run_is_left_alone(self, mesh: ScriptedMesh) -> None:
        accepted = await mesh.submit(mesh.submission(7, ONE, START))
        await mesh.assign(7, ALICE)
        again = await mesh.submit(mesh.submission(7, ONE, START))

        assert accepted.run != again.run
        assert await end(mesh, run=accepted.run) is EndCode.NOTHING
        assert await end(mesh, run=again.run) is EndCode.CLOSED

    async def test_a_retry_still_gets_its_answer(self, mesh: ScriptedMesh) -> None:
        await start(mesh)
        await mesh.submit(named := mesh.submission(7, ONE, request_id="second"))
        (step,) = await mesh.steps(ALICE)
        assert await commit(mesh, ALICE, step, request_id="second") is CommitCode.COMMITTED

        assert await end(mesh) is EndCode.ENDS

        assert SubmitCode.REPEATED is (await mesh.submit(msgspec.structs.replace(named, token="7/again"))).code
        await marker_is_gone(mesh)
        assert await mesh.expire(7)
        assert SubmitCode.REPEATED is (await mesh.submit(msgspec.structs.replace(named, token="7/later"))).code


@pytest.mark.leaves_sequences
async def test_a_takeover_of_large_steps_does_not_hold_copies_of_all_of_them(private_server: EmbeddedRedis) -> None:
    """Redis copies what a script reads: with an inbox of GiB it would need as many again."""
    redis = cast("Any", connect(private_server.url, retries=0))
    keys = Keyspace("large", 1)
    scripts, shard, message = Scripts(redis, keys), ShardId(0), bytes(4 << 20)
    for number in range(32):
        await redis.xadd(keys.inbox(shard, ALICE), {"a": f"1 1 g t sum||i{number}", "o": "1 0 0 0 1", "m": message})
    await redis.sadd(keys.owned(shard, ALICE, "sum"), *(f"sum||i{number}" for number in range(32)))
    before = (await redis.info("memory"))["used_memory_peak"]

    reclaim = scripts.reclaim(
        ALICE, LedShard(shard, "sum", Term(1)), count=256, tombstone_ms=1000, after="0-0", lost=True
    )
    assert (32, 32) == await scripts.run(reclaim)
    _, looked_at, stayed = await scripts.run(scripts.drain(ALICE, shard=shard))

    assert (32, 0) == (looked_at, stayed)
    assert (await redis.info("memory"))["used_memory_peak"] - before < 16 * len(message)
    await redis.aclose()

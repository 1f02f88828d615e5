"""Promise 6: a step that is sent again never runs twice, and gets its stored reply or a typed outcome.

By examples, and by seeded games in which clients run small programs through two gateways, again and again under the
same names, and repeat what they lost, while their sequences are taken over, end, expire and begin anew: whatever they
hear must be the sum of their own run's values, and the owner of a sequence must get these once, in their order.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from shared.contract.ids import ExecutorId, Term
from shared.contract.limits import JOINED_MAX
from shared.contract.messages import InboxStep, ReplyMessage, StepFlag, decode_infer, decode_reply, encode
from shared.contract.tensors import to_numpy
from shared.store.script_values import CommitCode, KeptReplies, LedShard, StepOutcome, Submission, SubmitCode
from tests.scripted_mesh import GATEWAY, ScriptedMesh, commit_of

ONE, TWO = ({"INPUT": np.full((1, 1), value, np.int32)} for value in (1, 2))
START, END, NONE, NAMED = StepFlag.START, StepFlag.END, StepFlag.NONE, StepFlag.NAMED
ALICE, BOB, EVE = ExecutorId("alice-1"), ExecutorId("bob-1"), ExecutorId("eve-1")
OTHER = "g-other"
TOMBSTONE_MS = 600_000

pytestmark = pytest.mark.leaves_sequences


@pytest.fixture
def shards() -> int:
    return 2


async def steps_of(mesh: ScriptedMesh, executor: ExecutorId, correlation_id: int = 7) -> list[InboxStep]:
    """A sequence's steps in an executor's inbox, by number."""
    return sorted(await mesh.steps(executor, correlation_id), key=lambda step: step.step)


async def commit(
    mesh: ScriptedMesh,
    executor: ExecutorId,
    step: InboxStep,
    *,
    size: int = 0,
    text: str = "",
    outcome: StepOutcome = StepOutcome.DONE,
    kept: KeptReplies | None = None,
) -> CommitCode:
    """Makes a step final, with a reply of about that size, or with that text."""
    reply = encode(ReplyMessage("1", step=step.step, error=text or f"{step.token} {'x' * size}"))
    final = commit_of(step, reply, outcome, keep_reply=True, entries=[step.entry], checkpoint=[("s:h", b"state")])
    (code,) = await mesh.committed(executor, final, idle_ms=600_000, tombstone_ms=TOMBSTONE_MS, kept=kept)
    return code


async def run_sequence(
    mesh: ScriptedMesh, ids: str, *, end: bool = False, numbered: bool = False, kept: int = 8, all_of: StepFlag = NONE
) -> None:
    """A sequence on ALICE with a committed step per letter, all of them open at the same time."""
    last = len(ids) - 1
    for index, name in enumerate(ids):
        flags = all_of | (START if index == 0 else NONE) | (END if end and index == last else NONE)
        submission = mesh.submission(
            7, ONE, flags, request_id="" if numbered else name, expected_step=index + 1 if numbered else None
        )
        assert (await mesh.submit(submission)).code >= 0
    await mesh.assign(7, ALICE)
    for step in await steps_of(mesh, ALICE):
        assert await commit(mesh, ALICE, step, kept=KeptReplies(kept)) > 0


async def again(
    mesh: ScriptedMesh,
    name: str = "",
    flags: StepFlag = NONE,
    *,
    step: int | None = None,
    inputs: dict[str, np.ndarray[Any, Any]] = ONE,
    implicit: bool = False,
) -> tuple[SubmitCode, int]:
    """What a retry through another gateway hears."""
    submission = mesh.submission(7, inputs, flags, request_id=name, expected_step=step, gateway=OTHER)
    if implicit:
        submission = msgspec.structs.replace(submission, flags=submission.flags | StepFlag.IMPLICIT)
    outcome = await mesh.submit(submission)
    return outcome.code, outcome.step


class TestCalls:
    """Steps that a model has called for, whose names are no other call's."""

    async def test_a_start_that_comes_late_begins_nothing_again(self, mesh: ScriptedMesh) -> None:
        """It was held up in a gateway, or its executor lost the step long ago: that has gone on elsewhere."""
        await run_sequence(mesh, "abc", all_of=NAMED)

        assert (SubmitCode.REPEATED, 1) == await again(mesh, "a", START | NAMED)
        assert "3" == (await mesh.record(7))["nx"]

    async def test_one_whose_reply_is_kept_no_longer_does_not_run_again(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abc", kept=1, all_of=NAMED)

        assert (SubmitCode.ANSWERED, 3) == await again(mesh, "a", START | NAMED)

    async def test_one_of_an_earlier_run_does_not_run_in_a_later_one(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abc", all_of=NAMED)
        await mesh.submit(mesh.submission(7, ONE, START | NAMED, request_id="d"))

        assert (SubmitCode.REPEATED, 2) == await again(mesh, "b", NAMED)
        assert (SubmitCode.JOINED, 4) == await again(mesh, "d", START | NAMED)

    @pytest.mark.parametrize("runs", [1, 3])
    async def test_one_of_a_run_that_has_ended_does_not_run_in_a_new_sequence_of_its_id(
        self, mesh: ScriptedMesh, runs: int
    ) -> None:
        await run_sequence(mesh, "abc", end=True, all_of=NAMED)
        for run in range(runs):
            last = END if run < runs - 1 else NONE
            await mesh.submit(mesh.submission(7, ONE, START | NAMED | last, request_id=f"d{run}"))
            await mesh.assign(7, ALICE)
            await commit(mesh, ALICE, (await steps_of(mesh, ALICE))[0])

        assert [(SubmitCode.ANSWERED, 1)] * 2 == [await again(mesh, "b", NAMED), await again(mesh, "a", START | NAMED)]
        assert (SubmitCode.DELIVERED, 2) == await again(mesh, "e", NAMED)

    async def test_its_inputs_need_not_be_the_same(self, mesh: ScriptedMesh) -> None:
        """A model may compute other bits when its step runs again."""
        await mesh.submit(mesh.submission(7, ONE, START | NAMED, request_id="a"))

        assert (SubmitCode.JOINED, 1) == await again(mesh, "a", START | NAMED, inputs=TWO)

    async def test_a_start_that_nothing_has_followed_begins_again_what_is_over_without_end(
        self, mesh: ScriptedMesh
    ) -> None:
        """Its caller may have been taken over for so long."""
        await run_sequence(mesh, "a", all_of=NAMED)
        await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)

        assert SubmitCode.DELIVERED is (await again(mesh, "a", START | NAMED))[0]

    @pytest.mark.parametrize("is_told", [False, True])
    async def test_what_is_over_does_not_go_on_without_the_calls_that_have_followed_its_start(
        self, mesh: ScriptedMesh, is_told: bool
    ) -> None:
        """Its caller's step runs again: a new run would lack the second call, which is known and would not be done."""
        await run_sequence(mesh, "ab", all_of=NAMED)
        await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)
        if is_told:
            await mesh.expire(7)

        assert [(SubmitCode.REPEATED, 1), (SubmitCode.REPEATED, 2)] == [
            await again(mesh, "a", START | NAMED), await again(mesh, "b", NAMED)
        ]  # fmt: skip
        assert (SubmitCode.EXPIRED, 2) == await again(mesh, "c", NAMED)


class TestRequestIds:
    async def test_each_of_several_open_steps_is_known_when_it_comes_again(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abc")

        assert [(SubmitCode.REPEATED, 2), (SubmitCode.REPEATED, 3)] == [await again(mesh, name) for name in "bc"]
        assert "3" == (await mesh.record(7))["nx"]

    async def test_replies_go_before_ids_and_a_step_without_reply_does_not_run_again(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abcde", kept=2)

        heard = [await again(mesh, name) for name in "bcde"]

        assert [(SubmitCode.ANSWERED, 5)] * 2 + [(SubmitCode.REPEATED, 4), (SubmitCode.REPEATED, 5)] == heard

    async def test_the_replies_beyond_the_newest_are_bounded_by_bytes(self, mesh: ScriptedMesh) -> None:
        for name in "sabcd":
            await mesh.submit(mesh.submission(7, ONE, START if name == "s" else NONE, request_id=name))
        await mesh.assign(7, ALICE)
        for step, size in zip(await steps_of(mesh, ALICE), (0, 100, 100, 900, 5_000), strict=True):
            await commit(mesh, ALICE, step, size=size, kept=KeptReplies(size=1_100))

        assert [SubmitCode.ANSWERED, SubmitCode.REPEATED, SubmitCode.REPEATED, SubmitCode.REPEATED] == [
            (await again(mesh, name))[0] for name in "abcd"
        ]
        await mesh.submit(mesh.submission(7, ONE, request_id="e"))
        (step,) = await steps_of(mesh, ALICE)
        await commit(mesh, ALICE, step, kept=KeptReplies(size=1_100))
        assert {"p:6"} == {name for name in await mesh.record(7) if name.startswith("p:")}

    async def test_ids_are_remembered_for_so_many_steps_and_as_long_as_they_are_in_flight(
        self, mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shared.store.scripts.RETRY_IDS", 3)

        async def remembered() -> int:
            record = mesh.keys.sequence(mesh.sequence(7)).record
            return sum([await mesh.redis.hstrlen(record, field) for field in ("rd", "ro")]) // 16

        for name in "sabcdefghi":
            await mesh.submit(mesh.submission(7, ONE, START if name == "s" else NONE, request_id=name))
        assert [SubmitCode.JOINED] * 3 == [(await again(mesh, name))[0] for name in "agi"]
        assert 10 == await remembered(), "all are in flight"
        await mesh.assign(7, ALICE)
        for step in await steps_of(mesh, ALICE):
            await commit(mesh, ALICE, step, kept=KeptReplies(1))
        # The last eight have a field of their own; when it is full, those that are answered and too old go.
        for name in "jklmno":
            await mesh.submit(mesh.submission(7, ONE, request_id=name))
            await commit(mesh, ALICE, (await steps_of(mesh, ALICE))[0], kept=KeptReplies(1))
        await mesh.submit(mesh.submission(7, ONE, request_id="p"))

        assert 3 == await remembered()
        assert [SubmitCode.ANSWERED, SubmitCode.REPEATED, SubmitCode.JOINED] == [
            (await again(mesh, name))[0] for name in "nop"
        ]
        assert SubmitCode.DELIVERED is (await again(mesh, "m"))[0]

    async def test_a_client_without_ids_and_numbers_leaves_no_trace_for_retries(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START))

        assert not {"rd", "ro", "rk"} & (await mesh.record(7)).keys()

    async def test_of_too_many_who_wait_for_a_step_the_oldest_retry_gives_way_and_is_told(
        self, mesh: ScriptedMesh
    ) -> None:
        """A client that asks again every second for an hour is no thousands of answers, and no record that grows.

        What it is told names the sequence's last step, as every refusal does. (37 is `%` to a pattern of Lua.)
        """
        last_step = 37
        for number in range(last_step - 1):
            await mesh.submit(mesh.submission(7, ONE, START if number == 0 else NONE))
        await mesh.assign(7, ALICE)
        for step in await steps_of(mesh, ALICE):
            await commit(mesh, ALICE, step)
        first, *retries = [mesh.submission(7, ONE, request_id="a") for _ in range(JOINED_MAX + 3)]
        for asked in (first, *retries, retries[-1]):
            await mesh.submit(asked)
        told = [await mesh.reply(retry) for retry in retries[:2]]
        joined = (await mesh.record(7))[f"j:{last_step}"]
        await commit(mesh, ALICE, (await steps_of(mesh, ALICE))[0], text="the answer")

        assert [("busy", "RESOURCE_EXHAUSTED", last_step)] * 2 == [
            (reply.reason, reply.error_code, reply.step) for reply in told
        ]
        assert [f"{GATEWAY} {retry.token}" for retry in retries[2:]] == joined.split(";")[:-1]
        for waiting in (first, *retries[2:]):
            assert "the answer" == (await mesh.reply(waiting)).error
        assert last_step + len(retries) == len(mesh.heard)

    async def test_a_reply_survives_the_loss_of_its_owner_and_the_end(self, mesh: ScriptedMesh) -> None:
        for name in "abc":
            flags = {"a": START, "c": END}.get(name, NONE)
            await mesh.submit(mesh.submission(7, ONE, flags, request_id=name))
        await mesh.assign(7, ALICE)
        first = (await steps_of(mesh, ALICE))[0]
        await commit(mesh, ALICE, first)
        assert (SubmitCode.JOINED, 2) == await again(mesh, "b")
        await commit(mesh, ALICE, (await steps_of(mesh, ALICE))[0])
        await mesh.take_over(ALICE, lost=True)
        assert (SubmitCode.REPEATED, 2) == await again(mesh, "b")
        assert (SubmitCode.JOINED, 3) == await again(mesh, "c", END)
        await mesh.assign(7, BOB)
        for step in await steps_of(mesh, BOB):
            await commit(mesh, BOB, step)

        assert "e" == (await mesh.record(7))["st"]
        assert [(SubmitCode.REPEATED, 2), (SubmitCode.REPEATED, 3)] == [
            await again(mesh, "b"),
            await again(mesh, "c", END),
        ]


class TestRunsWithTheSameIds:
    """Triton's own clients call their requests `<sequence>_<count>`, under the same correlation ids in every run."""

    async def test_a_request_id_with_other_content_is_not_a_retry(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "ab")

        assert (SubmitCode.DELIVERED, 3) == await again(mesh, "b", inputs=TWO)
        assert (SubmitCode.DELIVERED, 4) == await again(mesh, "b", END)
        assert (SubmitCode.REPEATED, 2) == await again(mesh, "b")

    @pytest.mark.parametrize("ended", [True, False], ids=["ended", "crashed"])
    async def test_a_run_with_the_ids_of_the_last_one_is_a_run_of_its_own(
        self, mesh: ScriptedMesh, ended: bool
    ) -> None:
        await run_sequence(mesh, "abc", end=ended)

        heard = [await again(mesh, name, START if name == "a" else NONE) for name in "ab"]

        first = (SubmitCode.WAITING, 1) if ended else (SubmitCode.DELIVERED, 4)
        assert [first, (first[0], first[1] + 1)] == heard
        assert (SubmitCode.JOINED, heard[1][1]) == await again(mesh, "b")

    @pytest.mark.parametrize("end", [True, False], ids=["START and END", "START"])
    async def test_a_first_step_that_nothing_followed_is_a_retry(self, mesh: ScriptedMesh, end: bool) -> None:
        flags = START | END if end else START
        await mesh.submit(mesh.submission(7, ONE, flags, request_id="a"))
        assert (SubmitCode.JOINED, 1) == await again(mesh, "a", flags)
        await mesh.assign(7, ALICE)
        assert (SubmitCode.JOINED, 1) == await again(mesh, "a", flags)
        await commit(mesh, ALICE, (await steps_of(mesh, ALICE))[0])
        assert (SubmitCode.REPEATED, 1) == await again(mesh, "a", flags)

        code, _ = await again(mesh, "a", flags, inputs=TWO)

        assert code is (SubmitCode.WAITING if end else SubmitCode.DELIVERED)

    @pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "not reaped yet"])
    async def test_a_first_step_begins_anew_when_its_sequence_has_expired(
        self, mesh: ScriptedMesh, reaped: bool
    ) -> None:
        """With the stored reply a client would go on, and its next step would find nothing."""
        await run_sequence(mesh, "a")
        await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)
        if reaped:
            await expire(mesh, 7)

        assert (SubmitCode.WAITING if reaped else SubmitCode.DELIVERED) is (await again(mesh, "a", START))[0]

    async def test_a_first_step_that_failed_may_be_tried_again(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START, request_id="a"))
        await mesh.assign(7, ALICE)
        (step,) = await steps_of(mesh, ALICE)
        assert CommitCode.OVER is await commit(mesh, ALICE, step, outcome=StepOutcome.FAILED)

        assert (SubmitCode.WAITING, 1) == await again(mesh, "a", START)

    async def test_where_a_sequence_begins_without_start_its_first_step_begins_it_again(
        self, mesh: ScriptedMesh
    ) -> None:
        await again(mesh, "a", implicit=True)
        await again(mesh, "b", implicit=True)
        await mesh.assign(7, ALICE)
        for step in await steps_of(mesh, ALICE):
            await commit(mesh, ALICE, step)
        assert (SubmitCode.REPEATED, 1) == await again(mesh, "a", implicit=True)
        await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)
        await expire(mesh, 7)

        assert (SubmitCode.REPEATED, 2) == await again(mesh, "b", implicit=True)
        assert (SubmitCode.WAITING, 1) == await again(mesh, "a", implicit=True)
        assert (SubmitCode.WAITING, 2) == await again(mesh, "b", implicit=True)

    async def test_steps_that_a_gateway_itself_sends_again_are_known_with_their_start(self, mesh: ScriptedMesh) -> None:
        """Its connection to Redis broke before it had read that both were accepted; they are no new run."""
        sent = [
            msgspec.structs.replace(mesh.submission(7, ONE, flags, request_id=name), token=token)
            for name, flags, token in (("a", START, "9"), ("b", END, "a"))
        ]
        for one in sent:
            await mesh.submit(one)
        await mesh.assign(7, ALICE)
        for step in await steps_of(mesh, ALICE):
            await commit(mesh, ALICE, step)

        codes = [(await mesh.submit(msgspec.structs.replace(one, since_ms=0))).code for one in sent]

        assert [SubmitCode.REPEATED, SubmitCode.REPEATED] == codes


class TestNumbers:
    async def test_each_of_several_open_steps_is_known_by_its_number(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abc", numbered=True, kept=2)

        assert [(SubmitCode.ANSWERED, 3), (SubmitCode.REPEATED, 2)] == [
            await again(mesh, step=1),
            await again(mesh, step=2),
        ]

    async def test_a_first_step_for_a_sequence_that_is_beyond_it_hears_that_it_exists(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abc", numbered=True, kept=2)

        assert (SubmitCode.EXISTS, 3) == await again(mesh, "", START, step=1)
        assert (SubmitCode.EXISTS, 3) == await again(mesh, "another", START, step=1)
        assert SubmitCode.DELIVERED is (await again(mesh, "", START))[0]

    async def test_a_number_that_another_request_id_had_is_not_a_retry(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abc")

        assert (SubmitCode.EXISTS, 3) == await again(mesh, "x", START, step=1)
        assert (SubmitCode.WRONG_STEP, 3) == await again(mesh, "x", step=2)
        assert (SubmitCode.REPEATED, 2) == await again(mesh, "b", step=2)
        assert (SubmitCode.REPEATED, 2) == await again(mesh, step=2)

    async def test_a_first_step_after_the_end_begins_anew(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "ab", numbered=True, end=True)
        assert (SubmitCode.REPEATED, 2) == await again(mesh, step=2)

        assert (SubmitCode.WAITING, 1) == await again(mesh, "", START, step=1)
        assert (SubmitCode.WRONG_STEP, 1) == await again(mesh, step=3)

    async def test_while_the_end_is_in_flight_a_first_step_with_another_request_id_begins_anew(
        self, mesh: ScriptedMesh
    ) -> None:
        for step, flags in ((1, START), (2, END)):
            await mesh.submit(mesh.submission(7, ONE, flags, expected_step=step))
        assert (SubmitCode.JOINED, 1) == await again(mesh, "", START, step=1)

        assert (SubmitCode.WAITING, 3) == await again(mesh, "new", START, step=1)

    async def test_open_steps_with_numbers_and_ids_are_known_with_their_start(self, mesh: ScriptedMesh) -> None:
        for step, name in enumerate("abc", 1):
            submission = mesh.submission(7, ONE, START if step == 1 else NONE, request_id=name, expected_step=step)
            await mesh.submit(submission)

        heard = [await again(mesh, name, START if name == "a" else NONE, step=n) for n, name in enumerate("abc", 1)]
        assert [(SubmitCode.JOINED, 1), (SubmitCode.JOINED, 2), (SubmitCode.JOINED, 3)] == heard
        assert (SubmitCode.EXISTS, 3) == await again(mesh, "a", START, step=1, inputs=TWO)

    @pytest.mark.parametrize(
        ("kept", "hears"), [(8, (SubmitCode.REPEATED, 1)), (1, (SubmitCode.EXISTS, 2))], ids=["kept", "forgotten"]
    )
    async def test_a_start_with_number_and_id_that_was_held_up_begins_nothing(
        self, mesh: ScriptedMesh, kept: int, hears: tuple[SubmitCode, int]
    ) -> None:
        # Found by chaos, of a START with an id alone: its client had repeated it elsewhere, and was at step 6.
        await mesh.submit(mesh.submission(7, ONE, START, request_id="a", expected_step=1))
        await mesh.submit(mesh.submission(7, ONE, request_id="b"))
        await mesh.assign(7, ALICE)
        for step in await steps_of(mesh, ALICE):
            await commit(mesh, ALICE, step, kept=KeptReplies(kept))

        assert hears == await again(mesh, "a", START, step=1)

    @pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "not reaped yet"])
    async def test_a_first_step_after_an_expiry_begins_anew(self, mesh: ScriptedMesh, reaped: bool) -> None:
        await run_sequence(mesh, "ab", numbered=True)
        await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)
        if reaped:
            await expire(mesh, 7)

        assert (await again(mesh, "", START, step=1))[0] in {SubmitCode.WAITING, SubmitCode.DELIVERED}

    @pytest.mark.parametrize("over", ["ended", "idle", "expired"])
    async def test_where_a_sequence_begins_without_start_its_first_number_begins_it_again(
        self, mesh: ScriptedMesh, over: str
    ) -> None:
        await run_sequence(mesh, "ab", numbered=True, end=over == "ended")
        if over != "ended":
            assert (SubmitCode.REPEATED, 1) == await again(mesh, step=1, implicit=True)
            await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)
        if over == "expired":
            await expire(mesh, 7)
        assert (SubmitCode.REPEATED, 2) == await again(mesh, step=2)

        assert (await again(mesh, step=1, implicit=True))[0] in {SubmitCode.WAITING, SubmitCode.DELIVERED}
        assert (SubmitCode.JOINED, 1 if over != "idle" else 3) == await again(mesh, step=1, implicit=True)

    @pytest.mark.parametrize("over", ["ended", "idle", "expired"])
    async def test_a_number_beyond_the_end_hears_why_nothing_follows(self, mesh: ScriptedMesh, over: str) -> None:
        await run_sequence(mesh, "ab", numbered=True, end=over == "ended")
        if over != "ended":
            assert (SubmitCode.WRONG_STEP, 2) == await again(mesh, step=9)
            await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)
        if over == "expired":
            await expire(mesh, 7)

        reason = SubmitCode.ENDED if over == "ended" else SubmitCode.EXPIRED
        assert [(reason, 2), (reason, 2)] == [await again(mesh, step=3), await again(mesh, step=9)]
        assert (SubmitCode.WRONG_STEP, 2) == await again(mesh, step=0)

    async def test_a_first_step_after_a_failed_start_begins_anew(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START, expected_step=1))
        await mesh.assign(7, ALICE)
        (step,) = await steps_of(mesh, ALICE)
        assert CommitCode.OVER is await commit(mesh, ALICE, step, outcome=StepOutcome.FAILED)

        assert SubmitCode.WAITING is (await again(mesh, "", START, step=1))[0]


async def test_a_commit_by_anybody_but_the_owner_is_refused_whatever_its_epoch(mesh: ScriptedMesh) -> None:
    """After a restart with older data an epoch may be given out again."""
    await mesh.submit(mesh.submission(7, ONE, START, request_id="a"))
    await mesh.assign(7, ALICE)
    (step,) = await steps_of(mesh, ALICE)

    assert CommitCode.REFUSED is await commit(mesh, BOB, step)
    assert CommitCode.COMMITTED is await commit(mesh, ALICE, step)


async def expire(mesh: ScriptedMesh, correlation_id: int) -> None:
    """What the reaper does with an idle sequence."""
    sequence = mesh.sequence(correlation_id)
    call = mesh.scripts.expire(
        [sequence],
        LedShard(mesh.keys.shard_of(sequence), mesh.model, Term(1)),
        tombstone_ms=TOMBSTONE_MS,
    )
    assert [True] == await mesh.scripts.run(call)


# -- games ----------------------------------------------------------------------------------------------------------

IDS = (1, 2, 3)
IDS_REMEMBERED, REPLIES, REPLY_BYTES = 8, 3, 600
OPEN_MAX = 4
SEEDS, MOVES = 24, 160
LIVE = {"l", "w", "m"}
KNOWN = {SubmitCode.REPEATED, SubmitCode.JOINED, SubmitCode.ANSWERED}
ACCEPTED = {SubmitCode.DELIVERED, SubmitCode.WAITING, SubmitCode.JOINED}


@dataclass(eq=False)
class Request:
    """A step of a client's run. last: as it was last sent; sum: what it has heard; gone: that its answer is gone."""

    place: int
    value: int
    flags: StepFlag
    last: Submission | None = None
    first_sent_ms: int = 0
    sum: int | None = None
    gone: bool = False

    @property
    def is_open(self) -> bool:
        return self.sum is None and not self.gone


@dataclass(eq=False)
class Run:
    """A client's program: it adds values up. Each run calls its requests as every run before did, and many begin with
    the same values. numbered: by `sequence_step` also."""

    values: tuple[int, ...]
    ends: bool
    numbered: bool
    over_live: bool
    asked: list[Request] = field(default_factory=list[Request])

    @property
    def open(self) -> list[Request]:
        return [one for one in self.asked if one.is_open]

    def next(self) -> Request:
        place = len(self.asked) + 1
        flags = (START if place == 1 else NONE) | (END if self.ends and place == len(self.values) else NONE)
        request = Request(place, self.values[place - 1], flags)
        self.asked.append(request)
        return request

    def hear(self, request: Request, total: int) -> None:
        assert sum(self.values[: request.place]) == total, (self, request)
        request.sum = total


@dataclass
class Model:
    """What the owner of a sequence computes: the sum since START, of values that come once and in their order."""

    place: int = 0
    total: int = 0

    def run(self, place: int, value: int, flags: int) -> int:
        if flags & StepFlag.START:
            self.place, self.total = 0, 0
        assert place == self.place + 1
        self.place, self.total = place, self.total + value
        return self.total


class Game:
    """Two gateways, executors that may be lost, and clients with several open steps that repeat them, end, crash, and
    run again under the same names."""

    def __init__(self, mesh: ScriptedMesh, chance: random.Random) -> None:
        self.mesh = mesh
        self.chance = chance
        self.models = {number: Model() for number in IDS}
        self.runs = {number: self.program() for number in IDS}
        self.tokens = itertools.count(1)
        self.slots = itertools.count(1)
        self.listening: dict[str, tuple[Run, Request]] = {}
        self.asked: Counter[str] = Counter()
        self.heard: Counter[str] = Counter()
        self.sent_again: set[str] = set()
        self.positions: dict[str, bytes] = {}
        self.late: list[tuple[ExecutorId, InboxStep]] = []
        self.told: Counter[SubmitCode] = Counter()

    async def open(self) -> None:
        for shard in self.mesh.keys.shards:
            for gateway in (GATEWAY, OTHER):
                stream = self.mesh.keys.replies(shard, cast("Any", gateway))
                self.positions[stream] = await self.mesh.redis.xadd(stream, {"opened": ""})
                await self.mesh.redis.pexpire(stream, 600_000)

    async def move(self) -> None:
        number = self.chance.choice(IDS)
        moves = [self.ask] * 7 + [self.repeat] * 4 + [self.ask_again] * 3 + [self.send_again] + [self.hear] * 2
        moves += [self.crash] + [self.assign] * 4 + [self.run] * 5 + [self.take_over, self.idle]
        await self.chance.choice(moves)(number)

    # clients

    def program(self, *, numbered: bool = False, over_live: bool = False) -> Run:
        values = tuple(self.chance.choice((1, 1, 1, 2)) for _ in range(self.chance.choice((1, 2, 3, 3, 12))))
        return Run(values, self.chance.random() < 0.6, numbered, over_live)

    async def begin(self, number: int, *, numbered: bool) -> None:
        record = await self.mesh.record(number)
        over_live = record.get("st") in LIVE and record["cl"] == "0"
        self.runs[number] = self.program(numbered=numbered, over_live=over_live)

    async def crash(self, number: int) -> None:
        """What was on its way is never asked for again; the next run knows nothing of it."""
        await self.begin(number, numbered=self.chance.random() < 0.3)

    async def ask(self, number: int) -> None:
        """The next step of the program, or the first one of the next run."""
        run = self.runs[number]
        if len(run.asked) == len(run.values) and not run.open:
            await self.crash(number)
            run = self.runs[number]
        if len(run.open) < OPEN_MAX and len(run.asked) < len(run.values):
            await self.send(number, run.next())

    async def repeat(self, number: int) -> None:
        """The connection was lost: everything that was not answered is asked for once more, in its order."""
        run = self.runs[number]
        for request in run.open:
            code = await self.send(number, request)
            assert code in KNOWN or run.asked[0] in run.open or run is not self.runs[number]
            if run is not self.runs[number]:
                return

    async def ask_again(self, number: int) -> None:
        """A step that was answered is asked for once more."""
        run = self.runs[number]
        answered = [one for one in run.asked[-IDS_REMEMBERED:] if not one.is_open and StepFlag.START not in one.flags]
        if answered:
            assert await self.send(number, self.chance.choice(answered)) in KNOWN

    async def send_again(self, number: int) -> None:
        """A gateway lost Redis: it sends again what was not answered, as it was, in its order."""
        run = self.runs[number]
        for request in run.open:
            assert request.last is not None
            self.sent_again.add(request.last.token)
            assert await self.submit(run, request, since_ms=request.first_sent_ms) in KNOWN

    async def send(self, number: int, request: Request) -> SubmitCode:
        run = self.runs[number]
        now = await self.mesh.redis.time()
        request.first_sent_ms = now[0] * 1000 + now[1] // 1000
        submission = self.mesh.submission(
            number,
            {"INPUT": np.full((1, 1), request.value, np.int32)},
            request.flags,
            request_id=f"{number}_{request.place}",
            expected_step=request.place if run.numbered else None,
            gateway=self.chance.choice((GATEWAY, OTHER)),
        )
        request.last = msgspec.structs.replace(submission, token=f"{next(self.tokens):x}")
        code = await self.submit(run, request)
        if code is SubmitCode.EXPIRED:
            await self.begin(number, numbered=False)
        elif code in {SubmitCode.EXISTS, SubmitCode.WRONG_STEP}:
            # It exists by an earlier run, or the answer to its own first step is kept no longer.
            own = code is SubmitCode.EXISTS and self.models[number].place > 1
            assert run.numbered and (run.over_live or own), (run, request)
            await self.begin(number, numbered=False)
        return code

    async def submit(self, run: Run, request: Request, since_ms: int = -1) -> SubmitCode:
        assert request.last is not None
        outcome = await self.mesh.submit(msgspec.structs.replace(request.last, since_ms=since_ms))
        self.told[outcome.code] += 1
        if outcome.code in ACCEPTED:
            self.asked[request.last.token] += 1
            self.listening[request.last.token] = (run, request)
            request.sum = None
        elif outcome.code is SubmitCode.REPEATED:
            run.hear(request, total_of(outcome.extra))
        elif outcome.code is SubmitCode.ANSWERED:
            assert outcome.step > request.place, "the newest reply is always kept"
            request.gone = True
        return outcome.code

    async def hear(self, _number: int) -> None:
        """Everybody reads the answers to what was sent last."""
        for stream, position in self.positions.items():
            for entry, fields in await self.mesh.redis.xrange(stream, f"({position.decode()}"):
                self.positions[stream] = entry
                for token, reply in ((token.decode(), reply) for token, reply in fields.items()):
                    self.heard[token] += 1
                    run, request = self.listening[token]
                    if request.last is not None and request.last.token == token:
                        run.hear(request, total_of(reply))

    # executors

    async def assign(self, number: int) -> None:
        record = await self.mesh.record(number)
        if record.get("st") in {"w", "m"}:
            await self.mesh.assign(number, self.chance.choice((ALICE, BOB, EVE)), slot=next(self.slots))

    async def run(self, number: int) -> None:
        """The owner commits its next steps; some are committed twice, by a process that lost the answer."""
        record = await self.mesh.record(number)
        if record.get("st") != "l":
            return
        owner = ExecutorId(record["ow"])
        for step in (await steps_of(self.mesh, owner, number))[: self.chance.choice((1, 2, 9))]:
            message = decode_infer(step.message)
            (tensor,) = message.inputs
            place = int(message.request_id.split("_")[1])
            total = self.models[number].run(place, int(to_numpy(tensor)[0, 0]), step.flags)
            text = f"{total} {'x' * self.chance.choice((0, 0, 100, 700))}"
            assert await self.commit(owner, step, text) in {CommitCode.COMMITTED, CommitCode.OVER}
            if self.chance.random() < 0.2:
                assert await self.commit(owner, step, text) in {CommitCode.BEFORE, CommitCode.REFUSED}

    async def commit(self, owner: ExecutorId, step: InboxStep, text: str) -> CommitCode:
        return await commit(self.mesh, owner, step, text=text, kept=KeptReplies(REPLIES, REPLY_BYTES))

    async def take_over(self, _number: int) -> None:
        """An executor is lost; it wakes up later and commits what it had."""
        lost = self.chance.choice((ALICE, BOB, EVE))
        for number in IDS:
            self.late += [(lost, step) for step in await steps_of(self.mesh, lost, number)]
        await self.mesh.take_over(lost, tombstone_ms=TOMBSTONE_MS)
        for executor, step in self.late:
            assert await self.commit(executor, step, "-1 ") in {CommitCode.BEFORE, CommitCode.REFUSED}

    async def idle(self, number: int) -> None:
        record = await self.mesh.record(number)
        if record.get("st") == "l" and record["nx"] == record["cm"]:
            await self.mesh.redis.delete(self.mesh.keys.sequence(self.mesh.sequence(number)).idle)
            if self.chance.random() < 0.5:
                await expire(self.mesh, number)

    async def settle(self) -> None:
        for number in IDS:
            while (record := await self.mesh.record(number)).get("nx") != record.get("cm"):
                await self.assign(number)
                await self.run(number)
        await self.hear(0)

    def check(self) -> None:
        """Every caller who was to wait was answered once; what a gateway sent again, at least once."""
        assert self.asked.keys() == self.heard.keys()
        once = self.asked.keys() - self.sent_again
        assert {token: self.asked[token] for token in once} == {token: self.heard[token] for token in once}
        assert not any(run.open for run in self.runs.values())


def total_of(reply: bytes) -> int:
    return int(decode_reply(reply).error.split()[0])


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_retry_runs_twice_and_each_run_hears_its_own_sums(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("shared.store.scripts.RETRY_IDS", IDS_REMEMBERED)
    game = Game(mesh, random.Random(seed))
    await game.open()
    for _ in range(MOVES):
        await game.move()
    await game.settle()

    game.check()
    assert {SubmitCode.DELIVERED, SubmitCode.WAITING, SubmitCode.JOINED} <= set(game.told)

"""A sequence of which something cannot be read, on the real server: it is lost, and nobody else is."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from redis.exceptions import ResponseError

from shared.contract.errors import Code, Reason
from shared.contract.ids import Epoch, ExecutorId, GatewayId, SequenceId, StepNumber, entry_key
from shared.contract.messages import InboxExpired, InboxStep, ReplyMessage, StepFlag, decode_reply, encode
from shared.contract.record import LOST
from shared.statistics.tally import ModelLoad, packed
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.reading import read_counts
from shared.store.script_values import (
    CommitCode,
    EndCode,
    Ending,
    LedShard,
    StepCommit,
    StepOutcome,
    Submission,
    SubmitCode,
    Submitted,
    VacateCode,
)
from shared.store.waiting_line import read_lines
from tests.embedded_redis import EmbeddedRedis
from tests.scripted_mesh import GATEWAY, ScriptedMesh

ALICE, BOB = ExecutorId("alice"), ExecutorId("bob")
ONE = {"x": np.ones(1, np.float32)}
START, NONE = StepFlag.START, StepFlag.NONE
VICTIM, OTHER = 1, 2
ANSWER = encode(ReplyMessage("1"))
GARBAGE = b"\xff\x00 nonsense"
FIELDS = ["st", "ow", "ep", "in", "sl", "nx", "cm", "sn"]
"""Fields of a live sequence's record without which nothing can be done for it."""


async def spoil(mesh: ScriptedMesh, correlation_id: int, kind: str) -> None:
    """A field of the record, or a whole key of a sequence."""
    own, client = mesh.keys.sequence(mesh.sequence(correlation_id)), mesh.redis
    if kind in ("record", "idle", "parked", "checkpoint"):
        await client.delete(getattr(own, kind))
        await client.rpush(getattr(own, kind), "no such type")
    else:
        await client.hset(own.record, kind, GARBAGE)


async def submitted(mesh: ScriptedMesh, *steps: Submission) -> list[Submitted]:
    """Steps that one call carries."""
    call = mesh.scripts.submit(steps, backlog_max=100, in_flight_max=100)
    return await mesh.scripts.run(call)


def done(mesh: ScriptedMesh, step: Submission, number: int, epoch: Epoch, *, flags: StepFlag = NONE) -> StepCommit:
    """A step that its owner has run."""
    return StepCommit(
        step.sequence, epoch, StepNumber(number), flags, StepOutcome.DONE, step.gateway, step.token, ANSWER
    )


async def committed(mesh: ScriptedMesh, *steps: StepCommit) -> list[CommitCode]:
    """Commits that one call carries."""
    return await mesh.committed(ALICE, *steps, tombstone_ms=60_000)


async def both_live(mesh: ScriptedMesh) -> dict[int, Epoch]:
    """Starts both sequences; their first steps are committed."""
    epochs: dict[int, Epoch] = {}
    for slot, number in enumerate((VICTIM, OTHER)):
        step = mesh.submission(number, ONE, START)
        await mesh.submit(step)
        epochs[number] = await mesh.assign(number, ALICE, slot=slot)
        await committed(mesh, done(mesh, step, 1, epochs[number], flags=START))
    # No takeover needs these steps again.
    await mesh.redis.xtrim(mesh.keys.inbox(mesh.keys.shards[0], ALICE), maxlen=0)
    return epochs


async def answers(mesh: ScriptedMesh) -> dict[str, bytes]:
    """The first answer to each token."""
    stream = mesh.keys.replies(mesh.keys.shards[0], GatewayId(GATEWAY))
    found: dict[str, bytes] = {}
    for _, fields in await mesh.redis.xrange(stream):
        for token, reply in fields.items():
            found.setdefault(token.decode(), reply)
    return found


async def slot_is_back(mesh: ScriptedMesh) -> bool:
    """Whether the scheduler hears that the victim is over, and nobody owns it."""
    shard, client = mesh.keys.shards[0], mesh.redis
    victim = mesh.sequence(VICTIM).encode()
    told = [fields[b"q"] for _, fields in await client.xrange(mesh.keys.feed(shard, "sum"))]
    owned = await client.smembers(mesh.keys.owned(shard, ALICE, "sum"))
    return victim in told and mesh.sequence(OTHER).encode() not in told and (victim not in owned)


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("kind", [*FIELDS, "record"])
async def test_a_step_of_it_is_told_that_it_is_lost_and_the_others_in_the_call_go_on(
    mesh: ScriptedMesh, kind: str
) -> None:
    await both_live(mesh)
    await spoil(mesh, VICTIM, kind)

    lost, accepted = await submitted(mesh, mesh.submission(VICTIM, ONE), mesh.submission(OTHER, ONE))

    assert lost.code in (SubmitCode.LOST, SubmitCode.NEVER_SEEN)
    assert (SubmitCode.DELIVERED, 2) == (accepted.code, accepted.step)
    (again,) = await submitted(mesh, mesh.submission(VICTIM, ONE, START))
    assert (SubmitCode.WAITING, 1) == (again.code, again.step)
    assert await read_counts(mesh.redis, mesh.keys)


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("kind", ["st", "ow", "ep", "nx", "cm", "sn", "record", "vr", "og"])
async def test_its_owner_is_refused_its_caller_told_and_the_others_are_committed(mesh: ScriptedMesh, kind: str) -> None:
    epochs = await both_live(mesh)
    steps = [mesh.submission(VICTIM, ONE), mesh.submission(OTHER, ONE)]
    await submitted(mesh, *steps)
    await spoil(mesh, VICTIM, kind)

    codes = await committed(mesh, *(done(mesh, step, 2, epochs[n]) for n, step in enumerate(steps, 1)))

    if kind == "vr":
        assert [CommitCode.COMMITTED] * 2 == codes, "a version of any name is one"
        return
    assert [CommitCode.REFUSED, CommitCode.COMMITTED] == codes
    told = await mesh.reply_to(steps[0].token) if kind != "og" else None
    assert told is None or (Code.INVALID_ARG, Reason.LOST) == (told.error_code, told.reason)
    assert ANSWER == (await answers(mesh))[steps[1].token]
    assert await slot_is_back(mesh)


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("changed", [{}, {"nx": "50"}, {"nx": "50", "cm": "49"}, {"ep": "0"}, {"st": "m"}])
async def test_one_that_an_operator_gives_up_is_over_at_once(mesh: ScriptedMesh, changed: dict[str, str]) -> None:
    """Its numbers may be possible ones, of steps that never came: nothing else would end it."""
    await both_live(mesh)
    if changed:
        await mesh.redis.hset(mesh.keys.sequence(mesh.sequence(VICTIM)).record, mapping=changed)
    step = mesh.submission(VICTIM, ONE)
    await submitted(mesh, step, mesh.submission(OTHER, ONE))
    endings = [Ending(mesh.sequence(number)) for number in (VICTIM, 99)]
    giving_up = mesh.scripts.end(endings, tombstone=LOST, reply=b"")

    assert [EndCode.REMOVED, EndCode.NOTHING] == await mesh.scripts.run(giving_up)

    told = decode_reply((await answers(mesh))[step.token])
    assert (Code.INVALID_ARG, Reason.LOST) == (told.error_code, told.reason)
    assert await slot_is_back(mesh)
    assert [EndCode.NOTHING, EndCode.NOTHING] == await mesh.scripts.run(giving_up)
    lost, begun, other = await submitted(
        mesh, mesh.submission(VICTIM, ONE), mesh.submission(VICTIM, ONE, START), mesh.submission(OTHER, ONE)
    )
    assert [SubmitCode.LOST, SubmitCode.WAITING, SubmitCode.DELIVERED] == [lost.code, begun.code, other.code]


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("kind", ["nx", "record"])
@pytest.mark.parametrize("found_by", ["its owner", "a step", "its owner's end"])
async def test_the_callers_of_all_of_its_open_steps_are_told(mesh: ScriptedMesh, kind: str, found_by: str) -> None:
    """In the middle there are some that only the owner's inbox names."""
    epochs = await both_live(mesh)
    steps = [mesh.submission(VICTIM, ONE) for _ in range(4)]
    await submitted(mesh, *steps, mesh.submission(OTHER, ONE))
    await spoil(mesh, VICTIM, kind)

    if found_by == "its owner":
        await committed(mesh, done(mesh, steps[0], 2, epochs[VICTIM]))
    elif found_by == "a step":
        await submitted(mesh, mesh.submission(VICTIM, ONE))
    if found_by == "its owner's end" or kind == "record":
        await mesh.take_over(ALICE, lost=True)

    told = [await mesh.reply_to(step.token) for step in steps]
    assert [Reason.LOST] * len(steps) == [one.reason for one in told]


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("begins_anew", [False, True])
@pytest.mark.parametrize("found_by", ["a drain", "its former owner"])
async def test_who_waits_for_a_step_in_a_former_owners_inbox_is_told(
    mesh: ScriptedMesh, found_by: str, *, begins_anew: bool
) -> None:
    """The next owner cannot read the record before the scheduler has drained that inbox."""
    epochs = await both_live(mesh)
    steps = [mesh.submission(VICTIM, ONE) for _ in range(3)]
    await submitted(mesh, *steps)
    (shard,) = mesh.keys.shards
    await mesh.reclaim(ALICE)
    epoch = await mesh.assign(VICTIM, BOB)
    assert await mesh.scripts.run(mesh.scripts.lose(mesh.sequence(VICTIM), BOB, epoch))
    if begins_anew:
        await mesh.submit(mesh.submission(VICTIM, ONE, START))

    if found_by == "a drain":
        await mesh.scripts.run(mesh.scripts.drain(ALICE, shard=shard))
    else:
        assert [CommitCode.REFUSED] == await committed(mesh, done(mesh, steps[0], 2, epochs[VICTIM]))

    told = await answers(mesh)
    assert [Reason.LOST] * len(steps) == [decode_reply(told[step.token]).reason for step in steps]
    assert [] == await mesh.redis.xrange(mesh.keys.inbox(shard, ALICE))


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("found_by", ["its owner", "a step", "a fetch of its state"])
async def test_nothing_of_it_stays_in_its_owners_inbox_but_that_it_is_over(mesh: ScriptedMesh, found_by: str) -> None:
    """The owner forgets it, and what it took in of it; nobody else would remove that while the owner lives. It is told
    if another one has found it.
    """
    epochs = await both_live(mesh)
    steps = [mesh.submission(number, ONE) for number in (VICTIM, OTHER, VICTIM)]
    await submitted(mesh, *steps)

    if found_by == "a fetch of its state":
        assert await mesh.scripts.run(mesh.scripts.lose(mesh.sequence(VICTIM), ALICE, epochs[VICTIM]))
    else:
        await spoil(mesh, VICTIM, "nx")
    if found_by == "its owner":
        await committed(mesh, done(mesh, steps[0], 2, epochs[VICTIM]))
    elif found_by == "a step":
        await submitted(mesh, mesh.submission(VICTIM, ONE))

    step, *over = await mesh.inbox(ALICE)
    assert (InboxStep, mesh.sequence(OTHER)) == (type(step), step.sequence)
    told = [InboxExpired(one.entry, mesh.sequence(VICTIM), epochs[VICTIM], ended=True) for one in over]
    assert (told, found_by == "a step") == (over, len(over) == 1)


@pytest.mark.leaves_sequences
@pytest.mark.parametrize(
    "spoilt", [{"an": "2 99999999999999 1 0"}, {"cm": "2", "p:2": "x", "rk": "2:10/1/99999999999999"}]
)
async def test_a_record_that_says_of_more_answers_than_it_has_does_not_hold_redis_up(
    mesh: ScriptedMesh, spoilt: dict[str, str]
) -> None:
    await both_live(mesh)
    first, again = (mesh.submission(VICTIM, ONE, request_id="a") for _ in range(2))
    await submitted(mesh, first)
    await mesh.redis.hset(mesh.keys.sequence(mesh.sequence(VICTIM)).record, mapping=spoilt)

    (code,) = [one.code for one in await submitted(mesh, again)]

    assert SubmitCode.LOST == code


@pytest.mark.leaves_sequences
@pytest.mark.parametrize(
    ("cause", "code"), [(GARBAGE, SubmitCode.LOST), (b"", SubmitCode.LOST), (None, SubmitCode.FAILED)]
)
async def test_a_sequence_without_a_state_of_which_nobody_can_read_why_is_lost(
    mesh: ScriptedMesh, cause: bytes | None, code: SubmitCode
) -> None:
    epochs = await both_live(mesh)
    steps = [mesh.submission(VICTIM, ONE) for _ in range(2)]
    await submitted(mesh, *steps)
    record = mesh.keys.sequence(mesh.sequence(VICTIM)).record
    losing = msgspec.structs.replace(done(mesh, steps[0], 2, epochs[VICTIM]), outcome=StepOutcome.LOST)
    assert [CommitCode.COMMITTED] == await committed(mesh, losing)
    await (mesh.redis.hdel(record, "vk") if cause is None else mesh.redis.hset(record, "vk", cause))

    (refused,) = await submitted(mesh, mesh.submission(VICTIM, ONE))
    void = msgspec.structs.replace(done(mesh, steps[1], 3, epochs[VICTIM]), outcome=StepOutcome.VOID)
    over = await committed(mesh, void)
    (late,) = await submitted(mesh, mesh.submission(VICTIM, ONE))

    assert [CommitCode.OVER] == over
    assert [(code, 3)] * 2 == [(refused.code, refused.step), (late.code, late.step)]


@pytest.mark.leaves_sequences
async def test_a_key_whose_sequence_is_called_like_a_counter_is_not_made_one(mesh: ScriptedMesh) -> None:
    await mesh.submit(mesh.submission("a:epoch", ONE, START))
    idle = mesh.keys.sequence(mesh.sequence("a:epoch")).idle
    await mesh.redis.delete(idle)
    await mesh.redis.rpush(idle, "no such type")

    await mesh.redis.delete(mesh.keys.sequence(mesh.sequence("a:epoch")).record)
    await mesh.submit(mesh.submission("a:epoch", ONE, START))

    assert b"1" == await mesh.redis.get(idle)


@pytest.mark.leaves_sequences
async def test_who_is_counted_as_waiting_and_is_not_keeps_nobody_out(mesh: ScriptedMesh) -> None:
    """So it is after a record that could not be read while its sequence waited."""
    await mesh.redis.hset(mesh.keys.line(mesh.keys.shards[0], "sum"), "w", 99)

    first = await mesh.submit(mesh.submission(VICTIM, ONE, START), backlog_max=1)
    second = await mesh.submit(mesh.submission(OTHER, ONE, START), backlog_max=1)

    assert [SubmitCode.WAITING, SubmitCode.BACKLOG_FULL] == [first.code, second.code]


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("kind", ["nx", "cm", "st", "record", "parked"])
async def test_while_it_waits_its_steps_are_answered_and_it_leaves_the_line(mesh: ScriptedMesh, kind: str) -> None:
    steps = {number: mesh.submission(number, ONE, START) for number in (VICTIM, OTHER)}
    await submitted(mesh, *steps.values())
    place = (await mesh.record(VICTIM))["be"]
    await spoil(mesh, VICTIM, kind)

    epoch = await assign_by(mesh, VICTIM, place)

    assert 0 == epoch
    assert await mesh.assign(OTHER, ALICE, slot=1)
    told = await mesh.reply(steps[VICTIM])
    assert (Code.INVALID_ARG, Reason.LOST) == (told.error_code, told.reason)
    shard = mesh.keys.shards[0]
    assert 0 == await mesh.redis.xlen(mesh.keys.starts(shard, "sum"))
    assert 0 == await mesh.redis.exists(mesh.keys.sequence(mesh.sequence(VICTIM)).parked)
    if kind != "record":
        assert b"0" == await mesh.redis.hget(mesh.keys.line(shard, "sum"), "w")


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_paged_sequence_that_returns_is_lost_if_its_next_step_is_nowhere(
    mesh: ScriptedMesh, *, is_whole: bool
) -> None:
    """Else its owner would wait for the step for ever, and nobody would end the sequence and free its slot."""
    await mesh.submit(mesh.submission(VICTIM, ONE, START | StepFlag.PAGEABLE))
    await mesh.assign(VICTIM, ALICE)
    await mesh.commit(VICTIM, ALICE)
    assert VacateCode.KEPT is not await mesh.vacate(VICTIM)
    await mesh.submit(mesh.submission(VICTIM, ONE))
    if not is_whole:
        await mesh.redis.unlink(mesh.keys.sequence(mesh.sequence(VICTIM)).parked)
    step = mesh.submission(VICTIM, ONE)
    await mesh.submit(step)

    epoch = await mesh.assign(VICTIM, BOB)

    assert is_whole is bool(epoch)
    assert [2, 3] * is_whole == [one.step for one in await mesh.steps(BOB) if one.step > 1]
    if not is_whole:
        assert Reason.LOST == (await mesh.reply(step)).reason


@pytest.mark.leaves_sequences
async def test_nothing_of_its_wait_stays_in_the_line(mesh: ScriptedMesh) -> None:
    """What is left there would make the next leader forget a later sequence of the id."""
    await submitted(mesh, mesh.submission(VICTIM, ONE, START), mesh.submission(VICTIM, ONE, timeout_us=10_000_000))
    starts = mesh.keys.starts(mesh.keys.shards[0], "sum")
    assert 2 == await mesh.redis.xlen(starts), "that it waits, and by when it is to have a slot"
    await spoil(mesh, VICTIM, "nx")

    (again,) = await submitted(mesh, mesh.submission(VICTIM, ONE, START))

    assert (SubmitCode.WAITING, 1) == (again.code, again.step)
    assert [(await mesh.record(VICTIM))["be"]] == [entry.decode() for entry, _ in await mesh.redis.xrange(starts)]


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("kind", ["nx", "record"])
async def test_who_begins_anew_gets_nothing_of_it(mesh: ScriptedMesh, kind: str) -> None:
    """Of a sequence with a checkpoint that waits for its next slot: the callers of its parked steps are told."""
    await mesh.submit(mesh.submission(VICTIM, ONE, START))
    await mesh.assign(VICTIM, ALICE)
    await mesh.commit(VICTIM, ALICE)
    await mesh.take_over(ALICE)
    parked = [mesh.submission(VICTIM, ONE) for _ in range(2)]
    await submitted(mesh, *parked)
    await spoil(mesh, VICTIM, kind)

    again = mesh.submission(VICTIM, ONE, START)
    (accepted,) = await submitted(mesh, again)

    assert (SubmitCode.WAITING, 1) == (accepted.code, accepted.step)
    told = await answers(mesh)
    assert [Reason.LOST] * 2 == [decode_reply(told[step.token]).reason for step in parked]
    assert not await mesh.redis.exists(mesh.keys.sequence(mesh.sequence(VICTIM)).checkpoint)
    assert await mesh.assign(VICTIM, BOB)
    assert [again.token] == [step.token for step in await mesh.steps(BOB)]


async def assign_by(mesh: ScriptedMesh, correlation_id: int, entry: str) -> Epoch:
    """As `ScriptedMesh.assign`, by an entry that was read before the record was spoilt."""
    record = mesh.record

    async def known(_: Any) -> dict[str, str]:
        return {"be": entry}

    mesh.record = known  # type: ignore[method-assign]
    try:
        return await mesh.assign(correlation_id, ALICE)
    finally:
        mesh.record = record  # type: ignore[method-assign]


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("kind", ["st", "ow", "nx", "cm", "record"])
async def test_it_ends_when_it_would_expire(mesh: ScriptedMesh, kind: str) -> None:
    await both_live(mesh)
    await spoil(mesh, VICTIM, kind)
    shard = mesh.keys.shards[0]
    for number in (VICTIM, OTHER):
        await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(number)).idle)

    call = mesh.scripts.expire(
        [mesh.sequence(VICTIM), mesh.sequence(OTHER)], LedShard(shard, "sum", mesh.term), tombstone_ms=1000
    )
    assert [False, True] == await mesh.scripts.run(call)

    client = mesh.redis
    told = {fields[b"q"]: fields[b"k"] for _, fields in await client.xrange(mesh.keys.feed(shard, "sum"))}
    assert {mesh.sequence(VICTIM).encode(): b"u", mesh.sequence(OTHER).encode(): b"x"} == told
    assert 0 == await client.zcard(mesh.keys.deadlines(shard, "sum"))


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("name", ["x", "other||i1", "sum||i1", ""])
async def test_a_deadline_of_what_is_no_sequence_of_the_model_is_gone_after_two_looks(
    mesh: ScriptedMesh, name: str
) -> None:
    """The first one takes it for a sequence that cannot be read, and leaves a tombstone."""
    (shard,) = mesh.keys.shards
    deadlines = mesh.keys.deadlines(shard, "sum")
    await mesh.redis.zadd(deadlines, {name: 1})

    for _ in range(2):
        call = mesh.scripts.expire([SequenceId(name)], LedShard(shard, "sum", mesh.term), tombstone_ms=1000)
        assert [False] == await mesh.scripts.run(call)

    assert 0 == await mesh.redis.zcard(deadlines)


@pytest.mark.leaves_sequences
async def test_who_is_not_idle_for_long_enough_is_not_ended_as_its_owners_set_was_removed(mesh: ScriptedMesh) -> None:
    """Here VICTIM is between two steps, and OTHER has an open one. The leader makes the set again soon (sweep.lua)."""
    await both_live(mesh)
    await submitted(mesh, mesh.submission(OTHER, ONE))
    (shard,) = mesh.keys.shards
    await mesh.redis.delete(mesh.keys.owned(shard, ALICE, "sum"))

    both = [mesh.sequence(VICTIM), mesh.sequence(OTHER)]
    call = mesh.scripts.expire(both, LedShard(shard, "sum", mesh.term), tombstone_ms=1000)
    assert [False, False] == await mesh.scripts.run(call)

    assert ["l", "l"] == [(await mesh.record(number))["st"] for number in (VICTIM, OTHER)]
    assert [1, 1] == await swept(mesh)


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("kind", ["st", "ow", "nx", "cm", "record"])
async def test_a_takeover_passes_it_by(mesh: ScriptedMesh, kind: str) -> None:
    epochs = await both_live(mesh)
    steps = [mesh.submission(VICTIM, ONE), mesh.submission(OTHER, ONE)]
    await submitted(mesh, *steps)
    shard = mesh.keys.shards[0]
    await mesh.redis.xadd(mesh.keys.inbox(shard, ALICE), {GARBAGE: GARBAGE})
    await mesh.redis.sadd(mesh.keys.owned(shard, ALICE, "sum"), "foreign")
    await spoil(mesh, VICTIM, kind)

    await mesh.take_over(ALICE, lost=True)

    assert epochs[OTHER] < await mesh.assign(OTHER, BOB)
    assert 0 == await mesh.redis.xlen(mesh.keys.inbox(shard, ALICE))
    assert Reason.LOST == decode_reply((await answers(mesh))[steps[0].token]).reason


@pytest.mark.leaves_sequences
@pytest.mark.parametrize(
    "value",
    [GARBAGE, b"nan", b"-inf", b"1e400", b"7.5", b"-7", b"%d" % (1 << 53), b"%d" % (1 << 62), b"%d" % -(1 << 63)],
)
async def test_numbers_of_a_shard_that_are_none_or_too_large_to_count_begin_anew(
    mesh: ScriptedMesh, value: bytes
) -> None:
    epochs = await both_live(mesh)
    shard, client = mesh.keys.shards[0], mesh.redis
    await client.set(mesh.keys.epoch(shard), value)
    await client.set(mesh.keys.fence(shard, "sum"), value)
    await client.set(mesh.keys.wanted_slots(shard, "sum", ""), value, px=60_000)
    await client.hset(mesh.keys.line(shard, "sum"), mapping={"w": value, "s:1": value, "refused:": value})

    step = mesh.submission(3, ONE, START)
    assert SubmitCode.WAITING == (await mesh.submit(step)).code
    epoch = await mesh.assign(3, ALICE, slot=2)
    assert max(epochs.values()) < epoch < 10**14
    assert 1 == (await read_counts(mesh.redis, mesh.keys))["epoch"]
    assert [CommitCode.COMMITTED] == await committed(mesh, done(mesh, step, 1, epoch, flags=START))


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("value", [10**14 - 2, 10**14, 1 << 52])
async def test_an_epoch_that_lua_writes_with_an_exponent_is_given_to_nobody(mesh: ScriptedMesh, value: int) -> None:
    """An owner could not read it in the entries of its inbox."""
    await mesh.redis.set(mesh.keys.epoch(mesh.keys.shards[0]), value)
    for number in (1, 2, 3):
        step = mesh.submission(number, ONE, START)
        await mesh.submit(step)
        epoch = await mesh.assign(number, ALICE, slot=number)

        (entry,) = await mesh.steps(ALICE, number)
        assert (epoch, str(epoch)) == (entry.epoch, (await mesh.record(number))["ep"])
        assert [CommitCode.COMMITTED] == await committed(mesh, done(mesh, step, 1, epoch, flags=START))


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("kind", ["starts", "feed", "deadlines", "line", "owned", "inbox", "epoch", "fence", "replies"])
async def test_a_key_of_a_shard_that_has_another_type_is_begun_anew(mesh: ScriptedMesh, kind: str) -> None:
    epochs = await both_live(mesh)
    shard, client = mesh.keys.shards[0], mesh.redis
    name = {
        "starts": mesh.keys.starts(shard, "sum"),
        "feed": mesh.keys.feed(shard, "sum"),
        "deadlines": mesh.keys.deadlines(shard, "sum"),
        "line": mesh.keys.line(shard, "sum"),
        "owned": mesh.keys.owned(shard, ALICE, "sum"),
        "inbox": mesh.keys.inbox(shard, ALICE),
        "epoch": mesh.keys.epoch(shard),
        "fence": mesh.keys.fence(shard, "sum"),
        "replies": mesh.keys.replies(shard, GatewayId(GATEWAY)),
    }[kind]
    await client.delete(name)
    await (client.rpush(name, "x") if kind != "line" else client.set(name, "x"))

    step = mesh.submission(3, ONE, START | StepFlag.END)
    assert SubmitCode.WAITING == (await mesh.submit(step)).code
    epoch = await mesh.assign(3, ALICE, slot=2)
    assert epoch > max(epochs.values())
    assert [CommitCode.OVER] == await committed(mesh, done(mesh, step, 1, epoch, flags=StepFlag.END))
    assert 1 == (await read_counts(mesh.redis, mesh.keys))[kind]


async def test_counts_that_cannot_be_read_are_left_out(mesh: ScriptedMesh) -> None:
    load, shard = ModelLoad("sum", "1", "0"), mesh.keys.shards[0]
    tally, client = mesh.keys.tally(shard, "sum", "1", "0"), mesh.redis
    torn = [GARBAGE, packed({"success_count": 7})[:-2], b"\x07", b"\x92\x01\x02", b"\x91\xa1x", b"\x92\xa1x\xa1y"]
    await client.rpush(tally, packed({"success_count": 1}), *torn, packed({"success_count": 2}))
    counts = mesh.keys.counts(shard, "sum", "1", "0")
    await client.hset(counts, mapping={"success_count": GARBAGE, "success_ns": GARBAGE})

    totals = await mesh.scripts.run(mesh.scripts.total([load], shard=shard))

    assert [{"success_count": 3}] == totals.sums
    await client.delete(counts)


async def swept(mesh: ScriptedMesh) -> list[int]:
    shard = mesh.keys.shards[0]
    sequences = [mesh.sequence(number) for number in (VICTIM, OTHER)]
    return await mesh.scripts.run(mesh.scripts.sweep(sequences, LedShard(shard, "sum", mesh.term)))


@pytest.mark.leaves_sequences
async def test_a_sweep_leaves_what_is_over_as_it_is(mesh: ScriptedMesh) -> None:
    """VICTIM has ended, and OTHER never began."""
    only = mesh.submission(VICTIM, ONE, START | StepFlag.END)
    await submitted(mesh, only)
    epoch = await mesh.assign(VICTIM, ALICE)
    await committed(mesh, done(mesh, only, 1, epoch, flags=START | StepFlag.END))
    tombstone = await mesh.record(VICTIM)

    assert [0, 0] == await swept(mesh)

    assert tombstone == await mesh.record(VICTIM)
    assert 0 == await mesh.redis.exists(mesh.keys.deadlines(mesh.keys.shards[0], "sum"))


@pytest.mark.leaves_sequences
async def test_what_was_removed_with_a_key_of_many_is_made_again_from_the_records(mesh: ScriptedMesh) -> None:
    """Here VICTIM is live, between two steps, and OTHER waits."""
    started = mesh.submission(VICTIM, ONE, START)
    waiting = mesh.submission(OTHER, ONE, START)
    await submitted(mesh, started, waiting)
    epoch = await mesh.assign(VICTIM, ALICE)
    await committed(mesh, done(mesh, started, 1, epoch, flags=START))
    shard, client = mesh.keys.shards[0], mesh.redis
    names = (mesh.keys.owned(shard, ALICE, "sum"), mesh.keys.deadlines(shard, "sum"), mesh.keys.starts(shard, "sum"))
    before = [await client.smembers(names[0]), await client.zrange(names[1], 0, -1)]
    assert [1, 1] == await swept(mesh), "nothing is wrong"
    assert 1 == await client.xlen(names[2])
    await client.delete(*names)

    assert [1, 1] == await swept(mesh)

    assert before == [await client.smembers(names[0]), await client.zrange(names[1], 0, -1)]
    assert await mesh.assign(OTHER, ALICE, slot=1)
    assert 0 == await client.xlen(names[2])


@pytest.mark.leaves_sequences
async def test_who_is_put_back_into_the_line_waits_no_longer_than_its_caller_wants(mesh: ScriptedMesh) -> None:
    patience_us = {VICTIM: 60_000_000, OTHER: 0}
    await submitted(mesh, *(mesh.submission(number, ONE, START, timeout_us=us) for number, us in patience_us.items()))
    (shard,), deadline_ms = mesh.keys.shards, int((await mesh.record(VICTIM))["dl"])
    starts = mesh.keys.starts(shard, "sum")
    await mesh.redis.delete(starts)

    assert [1, 1] == await swept(mesh)

    (victim, of_victim), (_, of_other) = await mesh.redis.xrange(starts)
    assert deadline_ms == entry_key(victim)[0] + int(of_victim[b"u"]) // 1000
    assert b"0" == of_other[b"u"]


@pytest.mark.leaves_sequences
async def test_who_is_put_back_into_the_line_does_not_take_the_place_of_another_for_its_own(mesh: ScriptedMesh) -> None:
    """A line that was removed numbers its entries anew, as before where that is in the same ms."""
    await submitted(mesh, *(mesh.submission(number, ONE, START) for number in (VICTIM, OTHER)))
    (shard,) = mesh.keys.shards
    starts = mesh.keys.starts(shard, "sum")
    places = [(await mesh.record(number))["be"] for number in (VICTIM, OTHER)]
    await mesh.redis.delete(starts)
    await mesh.redis.xadd(starts, {b"q": mesh.sequence(VICTIM)}, id=places[1])
    await mesh.redis.hset(mesh.keys.sequence(mesh.sequence(VICTIM)).record, "be", places[1])

    assert [1, 1] == await swept(mesh)

    lined = [fields[b"q"].decode() for _, fields in await mesh.redis.xrange(starts)]
    assert [mesh.sequence(VICTIM), mesh.sequence(OTHER)] == lined


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("state", ["live", "waiting", "moving"])
async def test_a_sequence_whose_next_step_is_nowhere_is_lost(mesh: ScriptedMesh, state: str) -> None:
    if state != "waiting":
        await both_live(mesh)
    steps = [mesh.submission(number, ONE, START if state == "waiting" else NONE) for number in (VICTIM, OTHER)]
    await submitted(mesh, *steps)
    if state == "moving":
        await mesh.take_over(ALICE)
    assert [1, 1] == await swept(mesh), "both steps are there"
    own = mesh.keys.sequence(mesh.sequence(VICTIM))
    client, inbox = mesh.redis, mesh.keys.inbox(mesh.keys.shards[0], ALICE)
    if state == "live":
        entries = await client.xrange(inbox)
        await client.xdel(
            inbox, *(entry for entry, fields in entries if fields[b"a"].endswith(mesh.sequence(VICTIM).encode()))
        )
    else:
        await client.delete(own.parked)

    assert [0, 1] == await swept(mesh)

    line = (await read_lines(mesh.redis, mesh.keys, ["sum"]))["sum"]
    assert (0 if state == "live" else 1) == line.steps["1"]
    told = await mesh.reply(steps[0])
    assert (Code.INVALID_ARG, Reason.LOST) == (told.error_code, told.reason)
    assert steps[1].token not in await answers(mesh)
    assert [0, 1] == await swept(mesh), "and again"


@contextmanager
def withdrawn(server: Any, right: str) -> Generator[None]:
    """A block whose last call Redis refuses, because the mesh's user may not run this command meanwhile."""
    server.acl_setuser("default", enabled=True, categories=["+@all"], commands=[f"-{right}"])
    with pytest.raises(ResponseError):
        yield
    server.acl_setuser("default", enabled=True, categories=["+@all"])


@pytest.mark.parametrize("right", ["hmget", "hset"])
async def test_a_right_that_is_withdrawn_loses_no_sequence(
    private_server: EmbeddedRedis, server: Any, right: str
) -> None:
    """An operator may take rights from the user of the mesh while it runs. No record is at fault then."""
    async with connect(private_server.url) as redis:
        mesh = ScriptedMesh(redis, Keyspace("p", 1), "sum")
        await mesh.open()
        epochs = await both_live(mesh)
        steps = [mesh.submission(VICTIM, ONE), mesh.submission(OTHER, ONE)]
        await submitted(mesh, *steps)
        finished = [done(mesh, step, 2, epochs[n]) for n, step in enumerate(steps, 1)]

        with withdrawn(server, right):
            await committed(mesh, *finished)

        assert CommitCode.REFUSED not in await committed(mesh, *finished)
        assert {step.token: ANSWER for step in steps}.items() <= (await answers(mesh)).items()
        assert not await read_counts(redis, mesh.keys)


@pytest.mark.parametrize("right", ["hmget", "xadd"])
async def test_a_right_that_is_withdrawn_loses_no_step_of_a_takeover(
    private_server: EmbeddedRedis, server: Any, right: str
) -> None:
    async with connect(private_server.url) as redis:
        mesh = ScriptedMesh(redis, Keyspace("p", 1), "sum")
        await mesh.open()
        await both_live(mesh)
        step = mesh.submission(VICTIM, ONE)
        await submitted(mesh, step)
        await mesh.reclaim(ALICE, lost=True)

        with withdrawn(server, right):
            await mesh.scripts.drain_whole(ALICE, shard=mesh.keys.shards[0])
        await mesh.scripts.drain_whole(ALICE, shard=mesh.keys.shards[0])

        assert 1 == await mesh.redis.xlen(mesh.keys.sequence(step.sequence).parked)
        assert not await read_counts(redis, mesh.keys)

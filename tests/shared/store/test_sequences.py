"""What an operator is shown of a model's sequences, from what the scripts leave in Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from typing import Any, Self

import msgspec
import numpy as np
import pytest

from scheduler.core.events import IdleTimeCut
from scheduler.ingest import Source, StreamEntry, StreamKind, over
from shared.contract.errors import Code, NotDoneError, Reason
from shared.contract.forecast import LineForecast, encode_forecast
from shared.contract.ids import ExecutorId, SequenceId, sequence_id
from shared.contract.messages import ExecutorRegistration, ModelRecord, ServedModel, StepFlag
from shared.contract.record import START, VERSION
from shared.contract.state_fields import GrownState, Parts
from shared.store.commands import Redis
from shared.store.connections.redis_client import redis_now_ms
from shared.store.exported import HEAD, ExportedSequence, from_file, to_file
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.script_values import ReopenCode, StepOutcome
from shared.store.sequence_status import SORT_KEYS, SequenceStatus, Wanted
from shared.store.sequences import READ_AT_ONCE, Sequences, StateSizes
from tests.gateway.fake_executor import running_sum
from tests.scripted_mesh import IDLE_MS, STATE, ScriptedMesh

ALICE, BOB = ExecutorId("alice-1"), ExecutorId("bob-2")
ONE = {"INPUT": np.ones((1, 1), np.int32)}
pytestmark = pytest.mark.leaves_sequences


class InterruptedReads:
    """A pipeline. Something happens before the journal is read."""

    def __init__(self, redis: Any, happens: Callable[[], Awaitable[None]]) -> None:
        self._redis, self._happens = redis, happens
        self._names: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def hgetall(self, name: str) -> None:
        self._names.append(name)

    async def execute(self) -> list[Any]:
        read: list[Any] = []
        for name in self._names:
            if ":journal:" in name:
                await self._happens()
            read.append(await self._redis.hgetall(name))
        return read


@pytest.fixture
async def mesh(redis: Redis, key_prefix: str) -> ScriptedMesh:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 3), "sum")
    await mesh.open()
    for name in (ALICE, BOB):
        served = ServedModel("sum", "1", instances=1, slots=8, pageable=name == BOB, idle_ms=IDLE_MS)
        about = ExecutorRegistration(name, name.partition("-")[0], host="", pid=1, started_ms=0, models=(served,))
        await Membership(redis, mesh.keys).register(about, lease_ms=60_000)
    return mesh


@pytest.fixture
def sequences(mesh: ScriptedMesh) -> Sequences:
    return Sequences(mesh.redis, mesh.keys, Membership(mesh.redis, mesh.keys))


async def wait_for_slot(mesh: ScriptedMesh, *names: int | str) -> None:
    """Sequences whose START is accepted, and that have no slot."""
    for name in names:
        await mesh.submit(mesh.submission(name, ONE, StepFlag.START | StepFlag.PAGEABLE))


async def live(mesh: ScriptedMesh, name: int | str, executor: ExecutorId, steps: int = 1) -> None:
    """A sequence that has a slot, and so many committed steps, each with a checkpoint."""
    await wait_for_slot(mesh, name)
    await mesh.assign(name, executor)
    for number in range(1, steps + 1):
        if number > 1:
            await mesh.submit(mesh.submission(name, ONE))
        await mesh.commit(name, executor)


async def matching(sequences: Sequences, wanted: Wanted | None = None, model: str = "sum") -> list[SequenceStatus]:
    found, total = await sequences.page(model, wanted or Wanted())
    assert total == len(found)
    return found


def ids(found: Iterable[SequenceStatus]) -> list[int | str]:
    return [one.id for one in found]


async def test_a_leader_hears_that_an_idle_time_is_cut(mesh: ScriptedMesh, sequences: Sequences) -> None:
    """Of a sequence that is idle at once, of one with an open step when that is answered."""

    async def cuts(name: int) -> list[IdleTimeCut]:
        shard = mesh.keys.shard_of(mesh.sequence(name))
        entries = await mesh.redis.xrange(mesh.keys.feed(shard, "sum"))
        found = [over(StreamEntry(Source(StreamKind.FEED, shard), entry, fields)) for entry, fields in entries]
        return [one for one in found if isinstance(one, IdleTimeCut) and one.sequence == mesh.sequence(name)]

    for name in (1, 2, 3):
        await live(mesh, name, ALICE)
    await mesh.submit(mesh.submission(2, ONE))
    for name in (1, 2):
        await sequences.end(mesh.sequence(name))
    assert [1, 0, 0] == [len(await cuts(name)) for name in (1, 2, 3)]
    await mesh.commit(2, ALICE)
    now_ms = await redis_now_ms(mesh.redis)

    assert [1, 1, 0] == [len(await cuts(name)) for name in (1, 2, 3)]
    assert all(one.until_ms <= now_ms + 1 for one in [*await cuts(1), *await cuts(2)])


async def test_all_that_are_not_over_are_listed_wherever_they_stand(mesh: ScriptedMesh, sequences: Sequences) -> None:
    await wait_for_slot(mesh, 1, "two")
    await live(mesh, 3, ALICE)
    await live(mesh, 4, BOB, steps=2)
    await mesh.vacate(4)
    await live(mesh, 5, BOB)
    await mesh.vacate(5, moving=True)
    await wait_for_slot(mesh, 6)
    await mesh.assign(6, BOB)

    found = await matching(sequences)

    states = {one.id: (one.state, one.executor, one.last_step, one.open_steps) for one in found}
    assert states == {
        1: ("waiting", "", 1, 1),
        "two": ("waiting", "", 1, 1),
        3: ("live", ALICE, 1, 0),
        4: ("paged", "", 2, 0),
        5: ("moving", "", 1, 0),
        6: ("live", BOB, 1, 1),
    }
    assert [1, 3, 4, 5, 6, "two"] == ids(found)
    assert [] == await matching(sequences, model="other")


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(states=frozenset({"live"})), [11, 12, 20]),
        (Wanted(executor="bob"), [12, 20]),
        (Wanted(executor=BOB), [12, 20]),
        (Wanted(executor="bo"), []),
        (Wanted(prefix="1"), [11, 12, "1x"]),
        (Wanted(version="2"), []),
        (Wanted(sort="-id"), ["1x", 20, 12, 11]),
        (Wanted(sort="-steps"), [20, 11, 12, "1x"]),
        (Wanted(sort="used"), [11, 20, 12, "1x"]),
    ],
)
async def test_a_list_is_filtered_and_sorted(
    mesh: ScriptedMesh, sequences: Sequences, wanted: Wanted, expected: list[int | str]
) -> None:
    await live(mesh, 11, ALICE)
    await live(mesh, 20, BOB, steps=3)
    await live(mesh, 12, BOB)
    await wait_for_slot(mesh, "1x")

    found = await matching(sequences, wanted)

    if wanted.sort == "used":
        assert sorted(one.used_ms for one in found) == [one.used_ms for one in found]
    else:
        assert expected == ids(found)
    for begin, end in ((0, 2), (1, 3), (3, 100)):
        page, total = await sequences.page("sum", wanted, begin, end)
        assert (timeless(found[begin:end]), len(found)) == (timeless(page), total)


def timeless(statuses: list[SequenceStatus]) -> list[SequenceStatus]:
    """Without the idle time, which goes on."""
    return [msgspec.structs.replace(one, idle_left_ms=one.idle_left_ms is not None) for one in statuses]


@pytest.mark.parametrize("sort", SORT_KEYS)
async def test_for_the_order_of_a_list_all_is_read_that_it_needs(
    mesh: ScriptedMesh, sequences: Sequences, sort: str
) -> None:
    for steps, number in enumerate((7, 5, 9, 6), 1):
        await live(mesh, number, ALICE, steps=steps)
    await mesh.submit(mesh.submission(9, ONE))

    for wanted in (Wanted(sort=sort), Wanted(sort=f"-{sort}")):
        found = ids(await matching(sequences, wanted))
        for begin in range(4):
            page, _ = await sequences.page("sum", wanted, begin, begin + 1)
            assert found[begin : begin + 1] == ids(page)


async def test_one_is_shown_with_what_the_record_says(mesh: ScriptedMesh, sequences: Sequences) -> None:
    await live(mesh, 7, ALICE, steps=2)

    (status,) = await sequences.statuses([mesh.sequence(7)])

    record = await mesh.record(7)
    assert status is not None
    assert (7, "sum", "1", "live") == (status.id, status.model, status.version, status.state)
    assert (ALICE, 0, 0, int(record["ep"])) == (status.executor, status.instance, status.slot, status.epoch)
    assert (2, 0, 0, True, False) == (
        status.last_step,
        status.open_steps,
        status.behind,
        status.recoverable,
        status.closed,
    )
    assert 0 < (status.idle_left_ms or 0) <= IDLE_MS
    assert 0 < status.begun_ms <= status.used_ms
    assert StateSizes({"h": len(STATE)}) == await sequences.state_sizes(mesh.sequence(7))


async def test_a_states_size_is_its_own_whatever_the_state_is_called(mesh: ScriptedMesh, sequences: Sequences) -> None:
    """The checkpoint has fields n, m and t of its own, which are no states."""
    await wait_for_slot(mesh, 7)
    await mesh.assign(7, ALICE)
    kept = [("s:n", b"1"), ("s:m", b"12"), ("s:t", b"123"), ("m", b"1234"), ("t", b"12345")]
    await mesh.commit(7, ALICE, kept)

    assert StateSizes({"n": 1, "m": 2, "t": 3}, 4) == await sequences.state_sizes(mesh.sequence(7))


async def test_steps_count_from_the_latest_start(mesh: ScriptedMesh, sequences: Sequences) -> None:
    await live(mesh, 7, ALICE, steps=3)
    await mesh.submit(mesh.submission(7, ONE, StepFlag.START))

    (status,) = await sequences.statuses([mesh.sequence(7)])

    assert status is not None
    assert (1, 1) == (status.last_step, status.open_steps)


async def test_one_that_is_unknown_and_one_that_cannot_be_read_are_left_out(
    mesh: ScriptedMesh, sequences: Sequences
) -> None:
    await live(mesh, 7, ALICE)
    await live(mesh, 8, ALICE)
    await mesh.redis.hset(mesh.keys.sequence(mesh.sequence(8)).record, "nx", "many")

    unknown, broken = await sequences.statuses([mesh.sequence(9), mesh.sequence(8)])

    assert (None, None) == (unknown, broken)
    assert [7] == ids(await matching(sequences))


@pytest.mark.parametrize(("field", "value"), [(START, "many"), (START, None), (VERSION, None)])
async def test_one_that_cannot_be_read_has_no_copy(
    mesh: ScriptedMesh, sequences: Sequences, field: str, value: str | None
) -> None:
    await live(mesh, 7, ALICE)
    record = mesh.keys.sequence(mesh.sequence(7)).record
    await (mesh.redis.hdel(record, field) if value is None else mesh.redis.hset(record, field, value))

    for copied in (sequences.export, sequences.journal):
        with pytest.raises(NotDoneError, match="its record in Redis cannot be read"):
            await copied(mesh.sequence(7))


async def test_those_that_wait_are_told_where_they_stand(mesh: ScriptedMesh, sequences: Sequences) -> None:
    await live(mesh, 7, ALICE)
    await wait_for_slot(mesh, 8, 9)
    lines = [LineForecast("1", (mesh.sequence(9), mesh.sequence(8)))]
    await mesh.redis.set(mesh.keys.forecast("sum"), encode_forecast(lines), ex=60)

    statuses = await sequences.foretold(await matching(sequences))

    assert {7: None, 8: 2, 9: 1} == {one.id: one.place for one in statuses}


async def test_a_list_is_whole_however_many_there_are(mesh: ScriptedMesh, sequences: Sequences) -> None:
    """More than are read in one round trip, all in line."""
    names = range(1, READ_AT_ONCE + 50)
    await mesh.scripts.run_all(
        [
            mesh.scripts.submit(
                [mesh.submission(name, ONE, StepFlag.START)], backlog_max=10_000, in_flight_max=10, live_max=10_000
            )
            for name in names
        ]
    )

    assert list(names) == ids(await matching(sequences, Wanted(states=frozenset({"waiting"}))))


async def test_a_name_in_line_that_is_no_sequence_is_left_out(mesh: ScriptedMesh, sequences: Sequences) -> None:
    """An operator's wish, an entry of a newer release, and one that somebody else wrote."""
    await live(mesh, 7, ALICE)
    stream = mesh.keys.starts(mesh.keys.shard_of(mesh.sequence(7)), "sum")
    for fields in ({"k": "v", "q": SequenceId("sum||i99"), "x": ""}, {"k": "later"}, {"q": "rubbish"}):
        await mesh.redis.xadd(stream, fields)

    assert [7] == ids(await matching(sequences))


class TestExport:
    """A sequence is taken out of the mesh, and opened again."""

    async def test_a_copy_goes_on_with_state_and_numbers(self, mesh: ScriptedMesh, sequences: Sequences) -> None:
        await live(mesh, 7, BOB, steps=3)

        exported = from_file(to_file(await sequences.export(mesh.sequence(7))))
        await sequences.reopen(mesh.sequence("copy"), exported)

        (copy, origin) = await sequences.statuses([mesh.sequence("copy"), mesh.sequence(7)])
        assert copy is not None
        assert origin is not None
        assert ("live", 3) == (origin.state, origin.last_step)
        assert (3, 0, 0, True) == (copy.last_step, copy.open_steps, copy.behind, copy.recoverable)
        assert 0 < (copy.idle_left_ms or 0) <= IDLE_MS
        checkpoint = await mesh.redis.hgetall(mesh.keys.sequence(mesh.sequence("copy")).checkpoint)
        assert {b"n": b"3", b"s:h": STATE} == checkpoint

    async def test_the_next_step_runs_behind_the_copied_ones(self, mesh: ScriptedMesh, sequences: Sequences) -> None:
        await live(mesh, 7, ALICE, steps=2)
        exported = await sequences.export(mesh.sequence(7))
        await sequences.reopen(mesh.sequence("copy"), exported)

        accepted = await mesh.submit(mesh.submission("copy", ONE, expected_step=3))

        assert 3 == accepted.step
        assert await mesh.assign("copy", BOB)
        await mesh.commit("copy", BOB)
        (status,) = await sequences.statuses([mesh.sequence("copy")])
        assert status is not None
        assert ("live", 3, BOB) == (status.state, status.last_step, status.executor)

    async def test_a_copy_gets_no_step_of_a_sequence_whose_record_was_removed(
        self, mesh: ScriptedMesh, sequences: Sequences
    ) -> None:
        await live(mesh, 7, ALICE, steps=1)
        steps = [mesh.submission("copy", ONE, flags) for flags in (StepFlag.START, StepFlag.NONE)]
        for step in steps:
            await mesh.submit(step)
        await mesh.redis.unlink(mesh.keys.sequence(mesh.sequence("copy")).record)

        await sequences.reopen(mesh.sequence("copy"), await sequences.export(mesh.sequence(7)))

        assert [Reason.LOST] * 2 == [(await mesh.reply(step)).reason for step in steps]
        own = mesh.submission("copy", ONE)
        assert 2 == (await mesh.submit(own)).step
        assert await mesh.assign("copy", BOB)
        assert [own.token] == [step.token for step in await mesh.steps(BOB)]

    async def test_a_copy_has_all_parts_of_a_state_that_grows(self, mesh: ScriptedMesh, sequences: Sequences) -> None:
        await wait_for_slot(mesh, 7)
        await mesh.assign(7, ALICE)
        parts = [number.to_bytes(4, "little") for number in range(20_000)]
        grown = GrownState("h", Parts(0, 1, "INT32", (len(parts),)), 0, parts, anew=True)
        await mesh.commit(7, ALICE, grown.fields)

        exported = from_file(to_file(await sequences.export(mesh.sequence(7))))
        await sequences.reopen(mesh.sequence("copy"), exported)

        copies = [await mesh.redis.hgetall(mesh.keys.sequence(mesh.sequence(name)).checkpoint) for name in (7, "copy")]
        assert copies[0] == copies[1]
        sizes = StateSizes({"h": 80_000 + len(copies[0][b"s:h"])})
        assert sizes == await sequences.state_sizes(mesh.sequence("copy"))

    async def test_a_copy_has_all_kept_answers_of_a_decoupled_model(
        self, mesh: ScriptedMesh, sequences: Sequences
    ) -> None:
        await live(mesh, 7, ALICE)
        answers = {f"p:1:{number}": b"%d" % number for number in range(1, 5001)}
        answers |= {"p:1": b"last", "rk": b"1:20000/1/5000"}
        await mesh.redis.hset(mesh.keys.sequence(mesh.sequence(7)).record, mapping=answers)

        await sequences.reopen(mesh.sequence("copy"), await sequences.export(mesh.sequence(7)))

        copied = await mesh.record("copy")
        assert answers == {name: copied[name].encode() for name in answers}

    async def test_a_step_in_the_midst_of_it_is_told(
        self, mesh: ScriptedMesh, sequences: Sequences, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await live(mesh, 7, ALICE)

        async def step() -> None:
            monkeypatch.undo()
            await mesh.submit(mesh.submission(7, ONE))
            await mesh.commit(7, ALICE)

        def pipeline(*, transaction: bool) -> InterruptedReads:
            assert not transaction, "a Redis 7.0 without memory refuses a transaction, also of reads"
            return InterruptedReads(mesh.redis, step)

        monkeypatch.setattr(mesh.redis, "pipeline", pipeline)
        with pytest.raises(NotDoneError, match="try again") as told:
            await sequences.export(mesh.sequence(7))

        assert Code.UNAVAILABLE == told.value.code
        assert 2 == (await sequences.export(mesh.sequence(7))).last_step

    async def test_for_a_moment_it_is_waited_for_open_steps(
        self, mesh: ScriptedMesh, sequences: Sequences, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await live(mesh, 7, ALICE)
        await mesh.submit(mesh.submission(7, ONE))
        waits = iter(("before the second", "before the third"))

        async def wait(_: float) -> None:
            if next(waits) == "before the third":
                await mesh.commit(7, ALICE)

        monkeypatch.setattr("shared.store.sequences.asyncio.sleep", wait)

        assert 2 == (await sequences.export_when_idle(mesh.sequence(7))).last_step
        with pytest.raises(NotDoneError, match="no such open sequence"):
            await sequences.export_when_idle(mesh.sequence(9))

    async def test_an_open_sequence_is_not_overwritten(self, mesh: ScriptedMesh, sequences: Sequences) -> None:
        await live(mesh, 7, ALICE, steps=2)
        await wait_for_slot(mesh, 8)
        exported = await sequences.export(mesh.sequence(7))

        for taken in (7, 8):
            with pytest.raises(NotDoneError, match=f"^{taken} has an open sequence"):
                await sequences.reopen(mesh.sequence(taken), exported)

    async def test_an_opening_that_is_sent_again_finds_its_own_sequence(
        self, mesh: ScriptedMesh, sequences: Sequences
    ) -> None:
        """Its first answer was lost, and its caller would have been told that another one has the id."""
        await live(mesh, 7, ALICE, steps=2)
        exported = await sequences.export(mesh.sequence(7))
        first, other = (
            mesh.scripts.reopen(mesh.sequence("copy"), exported, idle_ms=IDLE_MS, live_max=10, pageable=True)
            for _ in range(2)
        )

        codes = [await mesh.scripts.run(call) for call in (first, first, other)]
        await mesh.submit(mesh.submission("copy", ONE))

        assert [ReopenCode.DONE, ReopenCode.DONE, ReopenCode.EXISTS] == codes
        assert ReopenCode.EXISTS is await mesh.scripts.run(first), "it has gone on meanwhile"

    async def test_what_is_not_wholly_in_redis_stays(self, mesh: ScriptedMesh, sequences: Sequences) -> None:
        await live(mesh, 7, ALICE)
        await mesh.submit(mesh.submission(7, ONE))
        with pytest.raises(NotDoneError, match="it has an open step"):
            await sequences.export(mesh.sequence(7))
        await live(mesh, 8, BOB, steps=2)
        await mesh.redis.hset(mesh.keys.sequence(mesh.sequence(8)).record, "ck", 1)
        with pytest.raises(NotDoneError, match="checkpoint is older"):
            await sequences.export(mesh.sequence(8))
        await live(mesh, 6, BOB)
        await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(6)).checkpoint)
        with pytest.raises(NotDoneError, match=r"no checkpoint of it: .* steps are replayed \(sequence_recovery\)"):
            await sequences.export(mesh.sequence(6))
        with pytest.raises(NotDoneError, match="no such open sequence"):
            await sequences.export(mesh.sequence(9))

    async def test_a_failed_step_leaves_the_state_of_the_one_before(
        self, mesh: ScriptedMesh, sequences: Sequences
    ) -> None:
        """Its commit writes no checkpoint: the one before it is the state behind this step, too."""
        await live(mesh, 7, BOB)
        await mesh.submit(mesh.submission(7, ONE))
        await mesh.commit(7, BOB, outcome=StepOutcome.FAILED, fields=())

        exported = await sequences.export(mesh.sequence(7))

        assert (2, {"s:h": STATE}) == (exported.last_step, exported.checkpoint)

    async def test_a_version_that_nobody_serves_is_refused(self, mesh: ScriptedMesh, sequences: Sequences) -> None:
        await live(mesh, 7, ALICE)
        exported = msgspec.structs.replace(await sequences.export(mesh.sequence(7)), version="4")

        with pytest.raises(NotDoneError, match="no executor serves version 4 of model 'sum'"):
            await sequences.reopen(mesh.sequence("copy"), exported)

    @pytest.mark.parametrize(("requested", "is_refused"), [("", False), ("1", False), ("2", True), ("@ens//0", False)])
    async def test_who_names_a_version_gets_no_sequence_of_another_one(
        self, mesh: ScriptedMesh, sequences: Sequences, requested: str, *, is_refused: bool
    ) -> None:
        await live(mesh, 7, ALICE)
        exported = await sequences.export(mesh.sequence(7))

        with pytest.raises(NotDoneError, match="it is of version 1") if is_refused else nullcontext():
            await sequences.reopen(sequence_id("sum", requested, "copy"), exported)

    @pytest.mark.parametrize(
        ("made_by", "served", "is_refused"),
        [(b"a", ("b", "b"), True), (b"a", ("b", "a"), False), (b"a", ("b", ""), False), (b"", ("b", "b"), False)],
    )
    async def test_a_state_that_no_executor_goes_on_from_is_refused(
        self, mesh: ScriptedMesh, sequences: Sequences, made_by: bytes, served: tuple[str, str], *, is_refused: bool
    ) -> None:
        """Where nothing tells what made it, it is taken."""
        membership = Membership(mesh.redis, mesh.keys)
        for member, mark in zip(await membership.members(), served, strict=True):
            (offer,) = member.registration.models
            offer = msgspec.structs.replace(offer, mark=mark)
            await membership.update(msgspec.structs.replace(member.registration, models=(offer,)))
        await live(mesh, 7, ALICE)
        exported = await sequences.export(mesh.sequence(7))
        exported = msgspec.structs.replace(exported, record={**exported.record, "mk": made_by})

        with pytest.raises(NotDoneError, match="of other files") if is_refused else nullcontext():
            await sequences.reopen(mesh.sequence("copy"), exported)


def exported(**changes: Any) -> ExportedSequence:
    whole = ExportedSequence("sum", "1", 7, 3, 1, {"mk": b"m"}, {"s:h": STATE}, 1, "0.1")
    return msgspec.structs.replace(whole, **changes)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no exported sequence"),
        (b"seqmesh sequence, format 2\n" + to_file(exported())[len(HEAD) :], "no exported sequence of this format"),
        (to_file(exported())[:-1], "it is damaged"),
        (to_file(exported())[: len(HEAD) + 5], "it is damaged"),
        (to_file(exported(last_step=0)), "its step numbers are impossible"),
        (to_file(exported(start_step=4)), "its step numbers are impossible"),
        (to_file(exported(last_step=10**14)), "its step numbers are impossible"),
        (to_file(exported(record={"ow": b"somebody"})), "fields that do not belong into it: ow"),
        (to_file(exported(checkpoint={"n": b"3"})), "fields that do not belong into it: n"),
        (to_file(exported(checkpoint={"s:h": b"rubbish"})), "its state cannot be read"),
        (to_file(exported(version=7)), "it cannot be read"),
    ],
)
def test_a_file_that_was_not_written_so_is_refused(data: bytes, told: str) -> None:
    assert exported() == from_file(to_file(exported()))

    with pytest.raises(NotDoneError, match=told):
        from_file(data)


@pytest.mark.leaves_sequences
async def test_no_copy_is_opened_beyond_what_the_gateway_was_told(mesh: ScriptedMesh) -> None:
    """As no START is taken there. An id of the same shard: the bound is of each."""
    bounded = Sequences(mesh.redis, mesh.keys, Membership(mesh.redis, mesh.keys), live_max=2)
    await live(mesh, 1, ALICE)
    shard = mesh.keys.shard_of(mesh.sequence(1))
    second, third = [n for n in range(2, 100) if mesh.keys.shard_of(mesh.sequence(n)) == shard][:2]

    await bounded.fork(mesh.sequence(1), mesh.sequence(second))
    with pytest.raises(NotDoneError, match="as many live sequences as it may"):
        await bounded.fork(mesh.sequence(1), mesh.sequence(third))


async def test_a_copy_may_be_idle_for_as_long_as_its_origin_however_soon_orphans_expire(
    mesh: ScriptedMesh, sequences: Sequences
) -> None:
    """An executor announces the shortest time after which any sequence of the model may expire."""
    membership = Membership(mesh.redis, mesh.keys)
    config = msgspec.structs.replace(running_sum("sum"), parameters={"orphan_grace_microseconds": "1000"})
    await membership.publish(ModelRecord(config, "{}", ("1",)))
    served = ServedModel("sum", "1", instances=1, slots=8, pageable=True, idle_ms=config.shortest_idle_ms)
    for name in (ALICE, BOB):
        about = ExecutorRegistration(name, name.partition("-")[0], host="", pid=1, started_ms=0, models=(served,))
        await membership.register(about, lease_ms=60_000)
    await live(mesh, 1, ALICE)
    await sequences.fork(mesh.sequence(1), mesh.sequence(2))

    assert config.shortest_idle_ms < await mesh.redis.pttl(mesh.keys.sequence(mesh.sequence(2)).idle) <= config.idle_ms

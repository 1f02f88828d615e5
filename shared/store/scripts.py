"""The atomic steps of the mesh: one typed wrapper per Lua script. Only these wrappers know the order of arguments.

A call concerns one shard. A lost connection leaves the outcome of a call unknown, so every script may be sent again:
`commit` and `assign` recognise what was done before, `submit` recognises a step by its digest or number.
Scripts run atomically in Redis. The header of each `.lua` file describes its keys, arguments and reply.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from redis.exceptions import ResponseError

from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SchedulerId, SequenceId, ShardId, SlotIndex, Term
from shared.contract.limits import ANSWERS_BYTES_MAX, JOINED_MAX, LIVE_MAX, LOST_OWNERS_MAX, RETRY_IDS
from shared.contract.tenants import TenantLimits
from shared.statistics.meter import RoundTripMeter
from shared.statistics.tally import ModelLoad, count_of
from shared.store.commands import Redis
from shared.store.exported import ExportedSequence
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of, value_of
from shared.store.script_sender import Call, ScriptSender, each_as
from shared.store.script_values import (
    COUNTS_TTL_MS,
    GAVE_WAY,
    NO_JOURNAL,
    TOTAL_MAX,
    Assignment,
    CancelCode,
    Cancellation,
    CommitCode,
    Drawn,
    EndCode,
    Ending,
    ExpiryCode,
    JournalBounds,
    KeptReplies,
    LedShard,
    OfSequence,
    Orphan,
    Pausing,
    Rejection,
    ReopenCode,
    StepAnswers,
    StepCommit,
    StepOutcome,
    Submission,
    SubmitCode,
    Submitted,
    Totals,
    VacateCode,
    Vacation,
)

T = TypeVar("T")

MORE, KEPT = 256, 512
"""Flags of a step's arguments, beside its own: what most steps leave out follows, and its reply is kept."""
NOTHING_MORE = (0, -1, "", 0, "")
"""What most steps leave out of their arguments of `submit`."""


class Scripts(ScriptSender):
    """Makes the calls that concern sequences and leaders, and sends any call."""

    def __init__(self, redis: Redis, keys: Keyspace, *, trips: RoundTripMeter | None = None) -> None:
        """trips: measures the round trips; None: nobody does"""
        super().__init__(redis, keys.prefix, trips)
        self._keys = keys

    def submit(
        self, steps: Sequence[Submission], *, backlog_max: int, in_flight_max: int, live_max: int = LIVE_MAX
    ) -> Call[list[Submitted]]:
        """Accepts steps of one shard in this order; each has its own outcome.

        backlog_max  most sequences of a model in this shard that wait for their first slot
        live_max     most sequences of a model in this shard that have had a slot
        """
        args: list[Any] = [backlog_max, in_flight_max, RETRY_IDS, live_max, JOINED_MAX, GAVE_WAY]
        for step in steps:
            rare = (step.timeout_us, step.since_ms, step.tenant, step.tenant_max, step.prefers)
            has_more = rare != NOTHING_MORE
            args += (
                int(step.flags) + MORE if has_more else int(step.flags),
                step.digest,
                "" if step.expected_step is None else step.expected_step,
                step.version,
                step.gateway,
                step.token,
                step.message,
            )
            if has_more:
                args += rare
        return Call("submit", self._keys.records(step.sequence for step in steps), args, _read_submitted)

    def assign(self, assignments: Sequence[Assignment], led: LedShard) -> Call[list[Epoch]]:
        """Gives sequences of one model and shard their owners.

        Returns the new epochs; 0 for a sequence that does not wait any more.
        """
        return self._of_each("assign", assignments, self._of_leader(led), (led.term,), list)

    def lay_out(
        self, slots: Iterable[tuple[InstanceIndex, SlotIndex]], executor: ExecutorId, version: str, led: LedShard
    ) -> Call[int]:
        """Lays out free slots of an executor, for new sequences of one shard."""
        keys = [*self._of_leader(led), self._keys.spares(led.shard, executor, led.model)]
        written = "".join(f"{slot}.{instance} " for instance, slot in slots)
        return Call("lay_out", keys, [led.term, version, written], int)

    def recall(self, executor: ExecutorId, led: LedShard) -> Call[int]:
        """Takes an executor's spare slots back. The feed tells when all is known that was taken: in an entry with the
        number that is returned.
        """
        keys = [*self._of_leader(led), self._keys.spares(led.shard, executor, led.model)]
        return Call("recall", keys, [led.term, executor], int)

    def attempt(self, sequence: SequenceId, epoch: Epoch) -> Call[bool]:
        """Notes that the owner of a suspected sequence runs its next step. False if the sequence has another owner
        now.
        """
        return Call("attempt", self._keys.records([sequence]), [epoch], bool)

    def commit(
        self,
        steps: Sequence[StepCommit],
        *,
        shard: ShardId,
        executor: ExecutorId,
        load: ModelLoad,
        idle_ms: int,
        tombstone_ms: int,
        kept: KeptReplies | None = None,
        mark: str = "",
        journal: JournalBounds = NO_JOURNAL,
    ) -> Call[list[CommitCode]]:
        """Makes steps of one model version and shard final, and answers them. Safe to repeat after a lost connection.

        load  of the model: the steps' counts belong to it
        kept  replies of each sequence that a retry can still get; None: the default number
        mark  names what the states of new sequences depend on (`executor.models.fingerprints`); "": states are not
              compared
        journal  of each sequence
        """
        executions = [step.execution for step in steps if step.execution]
        model, version = load.model, load.version
        keys = [
            self._keys.inbox(shard, executor),
            self._keys.owned(shard, executor, model),
            self._keys.deadlines(shard, model),
            self._keys.feed(shard, model),
            self._keys.tally(shard, model, version, load.generation),
            self._keys.wanted_slots(shard, model, version),
            self._keys.line(shard, model),
            *self._keys.records(step.sequence for step in steps),
        ]
        kept = kept or KeptReplies()
        args: list[Any] = [idle_ms, tombstone_ms, executor, kept.count, kept.size, version, mark]
        args += (journal.steps, journal.size)
        args += (len(executions), *executions)
        for step in steps:
            args += _fields_of(step)
            if journal.steps:
                args.append(step.entry)
        return Call("commit", keys, args, _read_committed)

    def answers(
        self, steps: Sequence[StepAnswers], executor: ExecutorId, *, kept_bytes: int = ANSWERS_BYTES_MAX
    ) -> Call[list[bool]]:
        """Writes answers of open steps of one shard; False for each whose sequence has another owner. Safe to repeat.

        kept_bytes  of the answers of one step that are kept for a retry
        """
        args: list[Any] = [executor, kept_bytes]
        for step in steps:
            args += (step.epoch, step.step, step.gateway, step.token, int(step.keep), len(step.answers))
            for numbered in step.answers:
                args += numbered
        return Call("answers", self._keys.records(step.sequence for step in steps), args, each_as(bool))

    def expire(self, sequences: Sequence[SequenceId], led: LedShard, *, tombstone_ms: int) -> Call[list[ExpiryCode]]:
        """Ends the sequences whose idle marker has run out."""
        keys = self._of_leader(led) + self._keys.records(sequences)
        return Call("expire", keys, [led.term, tombstone_ms], each_as(ExpiryCode))

    def reclaim(
        self,
        executor: ExecutorId,
        led: LedShard,
        *,
        count: int,
        tombstone_ms: int,
        after: str = "",
        only: Iterable[str] = (),
        lost: bool = False,
    ) -> Call[tuple[int, int]]:
        """Takes up to `count` sequences from an executor.

        after    first those with a step in the executor's inbox behind this entry; "": the inbox is not looked at.
                 With `only`: where the call before stopped; "": the first call
        only     takes only sequences of these versions, or with these ids
        lost     the executor is dead: a step with which `LOST_OWNERS_MAX` owners in a row were lost is given up
        returns  how many sequences were taken, and how many entries were looked at; (0, 0) when it owns none. With
                 `only`: how many sequences were taken, and where the next call goes on; 0 when there is none
        """
        keys = [
            *self._of_leader(led),
            self._keys.owned(led.shard, executor, led.model),
            self._keys.inbox(led.shard, executor),
        ]
        owners_max = LOST_OWNERS_MAX if lost else 0
        return Call("reclaim", keys, [led.term, executor, count, tombstone_ms, owners_max, after, *only], tuple)

    def reload(
        self,
        sequences: Sequence[SequenceId],
        *,
        shard: ShardId,
        executor: ExecutorId,
        model: str,
        version: str,
        mark: str,
        tombstone_ms: int,
    ) -> Call[list[bool]]:
        """Ends the sequences that the executor holds between two steps with a state of another mark.

        Returns True for each that was ended.
        """
        keys = [
            self._keys.owned(shard, executor, model),
            self._keys.deadlines(shard, model),
            self._keys.feed(shard, model),
        ]
        keys += self._keys.records(sequences)
        return Call("reload", keys, [executor, version, mark, tombstone_ms], each_as(bool))

    def page(
        self, owned: Sequence[tuple[SequenceId, Epoch]], *, shard: ShardId, executor: ExecutorId, model: str
    ) -> Call[list[bool]]:
        """Pages idle sequences of one model and shard, each in the epoch in which the executor owns it. True for each
        that is paged.
        """
        keys = [
            self._keys.owned(shard, executor, model),
            self._keys.feed(shard, model),
            self._keys.line(shard, model),
            *self._keys.records(sequence for sequence, _ in owned),
        ]
        return Call("page", keys, [executor, *(epoch for _, epoch in owned)], each_as(bool))

    def vacate(self, vacations: Sequence[Vacation], led: LedShard) -> Call[list[VacateCode]]:
        """Takes sequences of one model and shard out of their slots, between two steps, on executors that live."""
        return self._of_each("vacate", vacations, self._of_leader(led), (led.term,), each_as(VacateCode))

    def pause(self, pauses: Sequence[Pausing], led: LedShard) -> Call[list[ExecutorId | None]]:
        """Pauses sequences of one model and shard, also in the middle of a step.

        Returns for each the executor whose inbox is to be drained, "" for none; None if it is not paused.
        """
        return self._of_each("pause", pauses, self._of_leader(led), (led.term,), _read_owners)

    def resume(self, sequences: Sequence[SequenceId]) -> Call[list[bool]]:
        """Resumes sequences of one shard; False for each that is not paused. Safe to repeat."""
        return Call("resume", self._keys.records(sequences), [], each_as(bool))

    def lose(self, sequence: SequenceId, executor: ExecutorId, epoch: Epoch) -> Call[bool]:
        """Ends a sequence whose record its owner cannot read; False if another executor owns it."""
        return Call("lose", self._keys.records([sequence]), [executor, epoch], bool)

    def sweep(self, sequences: Sequence[SequenceId], led: LedShard) -> Call[list[int]]:
        """Writes again what sequences' records say and other keys have lost; 0 for each sequence that is over, or was
        lost.
        """
        keys = self._of_leader(led) + self._keys.records(sequences)
        return Call("sweep", keys, [led.term], list)

    def remove(self, entries: Sequence[str | bytes], stream: str, led: LedShard) -> Call[int]:
        """Removes entries of a model's feed or starts on which its leader has acted; returns how many were there."""
        return Call("remove", [*self._of_leader(led), stream], [led.term, *entries], int)

    def drain(
        self, executor: ExecutorId, *, shard: ShardId, after: str = "0-0", count: int = 256, alive: bool = False
    ) -> Call[tuple[str, int, int]]:
        """Moves inbox entries that do not belong to an executor any more to their present places.

        alive    the executor still reads its inbox: control messages stay there for it
        returns  the last entry looked at, how many were looked at, and how many stayed
        """
        return Call("drain", [self._keys.inbox(shard, executor)], [executor, after, count, int(alive)], _read_drained)

    async def drain_whole(self, executor: ExecutorId, *, shard: ShardId, alive: bool = False) -> None:
        """Goes through every entry of an inbox once, as `drain` says."""
        after, looked_at = "0-0", 1
        while looked_at:
            after, looked_at, _ = await self.run(self.drain(executor, shard=shard, after=after, alive=alive))

    def reject(self, rejections: Sequence[Rejection], led: LedShard, *, tombstone_ms: int) -> Call[list[int]]:
        """Ends waiting sequences.

        Returns for each the number of steps answered, -1 if it does not wait under that entry any more.
        """
        return self._of_each("reject", rejections, self._of_leader(led), (led.term, tombstone_ms), list)

    def cancel(self, cancellations: Sequence[Cancellation], *, reply: bytes) -> Call[list[CancelCode]]:
        """Tells the mesh of steps (of one shard) whose callers have gone.

        reply  encoded `ReplyMessage` for the other steps of a waiting sequence
        """
        return self._of_each("cancel", cancellations, (), (reply,), each_as(CancelCode))

    def orphan(self, orphans: Sequence[Orphan], *, gateway: str) -> Call[list[bool]]:
        """Limits the idle time of sequences (of one shard) whose connections to one gateway were closed."""
        return self._of_each("orphan", orphans, (), (gateway,), each_as(bool))

    def end(self, endings: Sequence[Ending], *, tombstone: bytes, reply: bytes) -> Call[list[EndCode]]:
        """Ends sequences of one shard. Safe to repeat.

        tombstone  one of `shared.contract.record.TOMBSTONES`: what later steps hear. LOST: the sequence is over at
                   once, and its callers are told that it is lost
        reply      encoded `ReplyMessage` for the steps of a sequence that waits for its first slot; b"": they are run
        """
        return self._of_each("end", endings, (), (tombstone, reply), each_as(EndCode))

    def reopen(
        self, sequence: SequenceId, exported: ExportedSequence, *, idle_ms: int, live_max: int, pageable: bool
    ) -> Call[ReopenCode]:
        """Makes an open sequence from an exported one. Safe to repeat.

        live_max  as of `submit`; pageable: whether it may be paged
        """
        hashes = (exported.record, exported.journal, exported.checkpoint)
        record, journal, checkpoint = ([*chain.from_iterable(fields.items())] for fields in hashes)
        about = (exported.version, idle_ms, live_max, int(pageable), exported.last_step, exported.start_step)
        args = [*about, uuid.uuid4().hex, len(record), *record, len(journal), *journal, *checkpoint]
        return Call("reopen", self._keys.records([sequence]), args, ReopenCode)

    def count(self, counts: Sequence[tuple[ModelLoad, bytes]], *, shard: ShardId) -> Call[int]:
        """Counts answered requests, or measurements: packed counts by the load that they belong to; returns how many.
        Not safe to repeat.
        """
        keys = [self._keys.tally(shard, load.model, load.version, load.generation) for load, _ in counts]
        return Call("count", keys, [packed for _, packed in counts], int)

    def lead(
        self,
        terms: Mapping[str, Term],
        scheduler: SchedulerId,
        *,
        lease_ms: int,
        fences: Mapping[str, Term] = MappingProxyType({}),
    ) -> Call[list[Term | ResponseError]]:
        """Takes the lead of models (term 0) or keeps it. fences: terms, by model, that the next one must be newer than

        Returns for each model the term, 0 if another scheduler leads it, or the error that Redis has for it.
        """
        keys = [self._keys.terms]
        args = [scheduler, lease_ms]
        for model, term in terms.items():
            keys += [self._keys.leader(model), self._keys.lent(model)]
            args += [model, term, fences.get(model, 0)]
        return Call("lead", keys, args, list)

    def lend(self, notes: Mapping[str, str], *, model: str, term: Term) -> Call[int]:
        """Notes to which shards slots are lent; a note without a value is removed. Safe to repeat.

        Raises redis.ResponseError that begins with FENCED when a newer leader exists.
        """
        args = [model, term, *chain.from_iterable(notes.items())]
        return Call("lend", [self._keys.terms, self._keys.lent(model)], args, int)

    def resign(self, model: str, scheduler: SchedulerId, *, term: Term) -> Call[bool]:
        """Gives the lead of a model back (term 0: whatever the term is); False if another scheduler has it."""
        return Call("resign", [self._keys.leader(model)], [scheduler, term], bool)

    def draw(self, tenant: str, limits: TenantLimits, wanted: int) -> Call[Drawn]:
        """Takes requests from what a tenant may send now. limits: with `steps_per_s` above 0; wanted: from 1"""
        args = [wanted, round(1e6 / limits.steps_per_s), limits.burst_max]
        return Call("draw", [self._keys.allowance(tenant)], args, lambda reply: Drawn(*map(int, reply)))

    def total(
        self,
        loads: Sequence[ModelLoad],
        *,
        shard: ShardId,
        at_most: int = TOTAL_MAX,
        read: bool = True,
        renew: bool = False,
    ) -> Call[Totals]:
        """Adds up what was counted in one shard, and reads the sums. Safe to repeat.

        at_most  most packed counts to add up; if so many were added up, more may be left: call again
        read     False: only add up, return no sums
        renew    whether the sums get a new TTL also where nothing is added
        """
        keys: list[str] = []
        for load in loads:
            counted = (shard, load.model, load.version, load.generation)
            refused = self._keys.tally(shard, load.model, load.version, "")
            keys += (self._keys.tally(*counted), refused, self._keys.counts(*counted))
        return Call("total", keys, [at_most, COUNTS_TTL_MS, int(read), int(renew)], partial(_read_totals, keys[2::3]))

    def _of_each(
        self,
        script: str,
        told: Sequence[OfSequence],
        keys: Sequence[str],
        args: Sequence[Any],
        read: Callable[[Any], T],
    ) -> Call[T]:
        """A call that concerns several sequences. keys, args: those of the whole call, which come first"""
        # Redis takes no booleans.
        own = [int(arg) if isinstance(arg, bool) else arg for one in told for arg in msgspec.structs.astuple(one)[1:]]
        return Call(script, [*keys, *self._keys.records(one.sequence for one in told)], [*args, *own], read)

    def _of_leader(self, led: LedShard) -> list[str]:
        """The first keys of every script of a model's leader (`leader.lua`)."""
        shard, model, _ = led
        return [
            self._keys.fence(shard, model),
            self._keys.epoch(shard),
            self._keys.starts(shard, model),
            self._keys.feed(shard, model),
            self._keys.deadlines(shard, model),
            self._keys.line(shard, model),
        ]


def _fields_of(step: StepCommit) -> list[Any]:
    """A step as `commit` takes it, but for its entry in a journal."""
    flags = int(step.flags)
    if step.keep_reply:
        flags += KEPT
    base = step.usual_base if step.base is None else step.base
    has_more = (
        base != step.usual_base or step.recoverable is not None or step.anew or step.outcome is not StepOutcome.DONE
    )
    fields: list[Any] = [
        step.epoch,
        step.step,
        flags + MORE if has_more else flags,
        step.gateway,
        step.token,
        step.reply,
        step.counts,
        len(step.entries),
        *step.entries,
        2 * len(step.checkpoint),
    ]
    for named in step.checkpoint:
        fields += named
    if has_more:
        recoverable = "" if step.recoverable is None else int(step.recoverable)
        fields += (int(step.outcome), base, recoverable, int(step.anew))
    return fields


_COMMIT_CODES = {int(code): code for code in CommitCode}


def _read_committed(numbers: list[int]) -> list[CommitCode]:
    # Once for each step: the call of an enumeration takes many times as long.
    return [_COMMIT_CODES[number] for number in numbers]


def _read_totals(keys: Sequence[str], reply: list[Any]) -> Totals:
    """Reads the reply of `total.lua`. keys: of the hashes of sums, in the order of the reply"""
    added_up, *hashes = reply
    return Totals(int(added_up), [_read_sums(key, flat) for key, flat in zip(keys, hashes, strict=False)])


def _read_sums(key: str, flat: list[bytes]) -> dict[str, int]:
    fields = ((text_of(name), data) for name, data in zip(flat[::2], flat[1::2], strict=True))
    sums = {name: value_of(key, data, partial(count_of, name), field=name) for name, data in fields}
    return {name: number for name, number in sums.items() if number is not None}


_SUBMIT_CODES = {int(code): code for code in SubmitCode}
ABSENT = [0, 0, b"", b"", b""]
"""What a reply of `submit` leaves out at its end."""


def _read_submitted(replies: list[list[Any]]) -> list[Submitted]:
    return [
        Submitted(_SUBMIT_CODES[code], step, text_of(run), extra, text_of(cut_off))
        for code, step, run, extra, cut_off in (reply + ABSENT[len(reply) :] for reply in replies)
    ]


def _read_owners(reply: list[Any]) -> list[ExecutorId | None]:
    return [None if owner is None else ExecutorId(text_of(owner)) for owner in reply]


def _read_drained(reply: list[Any]) -> tuple[str, int, int]:
    last, looked_at, stayed = reply
    return text_of(last), looked_at, stayed

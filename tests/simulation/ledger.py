"""The truth about every sequence, kept beside the store, and what must hold of it whatever happens to processes.

The ledger sees each call of a script as the store carries it out, with the record as it was before. It knows what was
accepted from the answers of `submit`, and computes what each step must give by itself. It trusts no check of the
scripts: it makes its own.

    order, one effect    steps of a sequence are committed 1, 2, 3, ..., each once; a request is accepted once in a run
    one owner            a commit that was accepted came from the owner of that moment, in its epoch, and so did every
                         answer before a step's last one
    no lost state        what a step gives is the fold over all steps since START
    one answer           to a stateless request, each time that it is accepted
    one slot             no two live sequences in one place
    a slot kept          where idle sequences do not give up their slots, none does
    journals             hold what the model ran since START, with its answers, and lack nothing that they have room for
    timeouts             end sequences that wait for their first slot, and none before its time
    no early end         a sequence expires only after its idle time, and is remembered for its tombstone's
    orphans              end sooner; nobody is one while another connection than the one that was closed uses it
    ends by name         a run that its client has ended accepts no step any more, and no other run ends with it
    tenants              have no more live sequences than they may, and send no faster
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any
from unittest.mock import patch

from scheduler.core.expiry import TIMEOUT_MESSAGE
from shared.contract.ids import Epoch, SequenceId
from shared.contract.messages import StepFlag, decode_infer, decode_reply
from shared.contract.record import LOST, TOMBSTONES
from shared.contract.tenants import TenantLimits
from shared.store.exported import ExportedSequence
from shared.store.keyspace import Keyspace
from shared.store.script_sender import Call
from shared.store.script_values import (
    CancelCode,
    CommitCode,
    Drawn,
    EndCode,
    Ending,
    Orphan,
    Rejection,
    StepAnswers,
    StepCommit,
    StepOutcome,
    Submission,
    SubmitCode,
    Submitted,
)
from shared.store.scripts import Scripts
from shared.store.work_scripts import Finished, RequestId, WorkDone, WorkItem, WorkScripts, request_id
from tests.simulation.lua_scripts import run_script
from tests.simulation.model import COMPUTED, JOURNAL_STEPS, fold, is_deadly, value_of
from tests.simulation.store import Args, Reply, Store
from tests.simulation.story import Story
from tests.simulation.values import HashValue

IDLE_SLACK_S = 0.05
"""The store's clock has milliseconds, and a deadline is looked at on its way."""
RATE_SLACK = 0.01
"""Requests: times are rounded to microseconds, in the ledger to milliseconds."""

CALL_FAILED, FULL = "Error when running inference", "Redis, which holds every sequence, is full"
LASTING = "must specify the START flag", "kept no longer", "wait for itself", "failed unexpectedly"
"""What no call hears that was only impatient."""

Record = dict[bytes, bytes]
Judge = Callable[[Any, Any, list[Record], Any], None]
"""What to make of a call: who makes it, what the script is told, records before it, and the outcomes."""


@dataclass
class Life:
    """A sequence from its START to its end: one birth. state: None when there is none, states: behind each step; start:
    the latest START; due: when it may be refused because it has waited for too long; user: gateway and token of the
    step that came last; orphaned: since when it may be idle for only so long, s.
    """

    inputs: dict[int, tuple[int, StepFlag]] = field(default_factory=dict[int, tuple[int, StepFlag]])
    state: int | None = None
    start: int = 0
    committed: int = 0
    quiet_since: float = 0.0
    over_at: float | None = None
    due: float = inf
    states: dict[int, int | None] = field(default_factory=dict[int, int | None])
    user: tuple[str, str] | None = None
    orphaned: tuple[float, float] = -inf, inf

    def used(self, step: Submission) -> None:
        """A caller uses it from now on."""
        self.user, self.orphaned = (step.gateway, step.token), (-inf, inf)

    def idle_until(self, idle_s: float) -> float:
        """When it may expire."""
        since, grace_s = self.orphaned
        return min(self.quiet_since + idle_s, max(self.quiet_since, since) + grace_s)


@dataclass(frozen=True)
class Seen:
    """A call that is on its way. before: its sequences' records before it; after: what to make of it then"""

    before: Callable[[], list[Record]]
    after: Callable[[list[Record], Any], None]
    read: Callable[[Any], Any]


class Ledger:
    """All sequences of a run."""

    def __init__(
        self, story: Story, keys: Keyspace, *, idle_s: float, tombstone_s: float, declared: bool, paged: bool
    ) -> None:
        self.story = story
        self.keys = keys
        self._idle_s = idle_s
        self._tombstone_s = tombstone_s
        self.declared = declared
        self._paged = paged
        self._calls: dict[tuple[tuple[bytes, ...], tuple[bytes, ...]], Seen] = {}
        self._lives: dict[tuple[SequenceId, bytes], Life] = {}
        self._accepted: dict[tuple[SequenceId, int], tuple[bytes, int]] = {}
        self._requests = set[RequestId]()
        """Stateless ones that may be answered."""
        self.store: Store
        self.given_up: set[int] = set()
        """Inputs whose callers have gone."""
        self.expired = set[str]()
        """Ids of sequences of which a step heard that."""
        self.ended = set[str]()
        """Ids of sequences that the mesh has ended so."""
        self.calls = False
        """Whether models call each other."""
        self.impatient = False
        """Whether calls are given up before what goes wrong has passed."""
        self.has_lost = False
        """Whether the store has come back without its newest data."""
        self.resurrects = False
        """Whether a sequence may come back to a slot that another shard's has got since."""
        self.known_before = set[int]()
        """Inputs that were sent again."""
        self._ended_runs = set[tuple[SequenceId, str]]()
        self._allowances: dict[str, tuple[float, float]] = {}
        """Of tenants: requests that may be sent at a time."""
        self.journaled = True
        """Whether sequences have journals."""
        self.late_s = float("inf")
        """How long after the end of its idle time a sequence may still be there."""
        self.steps = 0

    # -- what is sent, and what the store makes of it ---------------------------------------------------------------

    def run(self, store: Store, source: bytes, name: bytes, keys: Args, args: Args) -> Reply:
        """Runs a script for the store, and looks at it."""
        seen = self._calls.get((tuple(keys), tuple(args)))
        before = seen.before() if seen else []
        reply = run_script(store, source, name, keys, args)
        if seen:
            seen.after(before, seen.read(reply))
        return reply

    @contextmanager
    def watching(self) -> Generator[None]:
        """While it lasts, the calls that processes make are known here by what they mean."""
        judges: dict[str, Judge] = {
            "submit": lambda _, steps, __, outcomes: self._submitted(steps, outcomes),
            "commit": self._committed,
            "answers": self._answered,
            "assign": lambda _, assignments, __, epochs: self._assigned(assignments, epochs),
            "cancel": lambda _, steps, __, codes: self._removed(steps, [code is CancelCode.REMOVED for code in codes]),
            "end": lambda _, endings, records, codes: self._closed(endings, records, codes),
            "orphan": self._orphaned,
            "draw": lambda limits, tenant, _, drawn: self._drawn(tenant, limits, drawn),
            "expire": lambda _, sequences, records, ended: self._expired(sequences, records, ended),
            "page": lambda executor, owned, _, paged: self._left(executor, owned, paged),
            "reload": self._reclaimed,
            "reclaim": self._reclaimed,
            "reject": lambda _, rejections, records, refused: self._rejected(rejections, records, refused),
        }
        with ExitStack() as stack:
            for script, note in {"enqueue": self._came, "finish": self._finished}.items():
                made = self._watched_work(getattr(WorkScripts, script), note)
                stack.enter_context(patch.object(WorkScripts, script, made))
            for script, judge in judges.items():
                stack.enter_context(patch.object(Scripts, script, self._watched(getattr(Scripts, script), judge)))
            yield

    def _watched(self, make: Callable[..., Call[Any]], judge: Judge) -> Callable[..., Call[Any]]:
        """In the place of a method of `Scripts`. make: that method"""

        def made(scripts: Scripts, told: Any, *place: Any, **where: Any) -> Call[Any]:
            call = make(scripts, told, *place, **where)
            caller = where.get("executor") or where.get("gateway") or next(iter(place), "")
            sequences = [] if isinstance(told, str) else list(map(_sequence_of, told))
            name = tuple(map(_wire, call.keys)), tuple(map(_wire, call.args))
            self._calls[name] = Seen(
                lambda: [self._record(sequence) for sequence in sequences],
                lambda records, outcomes: judge(caller, told, records, outcomes),
                call.read,
            )
            return call

        return made

    def _watched_work(self, make: Callable[..., Call[Any]], note: Callable[..., None]) -> Callable[..., Call[Any]]:
        """In the place of a method of `WorkScripts`. make: that method; note: is told its arguments and its reply"""

        def made(scripts: WorkScripts, *told: Any, **more: Any) -> Call[Any]:
            call = make(scripts, *told, **more)
            name = tuple(map(_wire, call.keys)), tuple(map(_wire, call.args))
            self._calls[name] = Seen(list, lambda _, outcome: note(*told, outcome), call.read)
            return call

        return made

    def _record(self, sequence: SequenceId) -> Record:
        value = self.store.value(self.keys.sequence(sequence).record.encode())
        return dict(value) if isinstance(value, HashValue) else {}

    # -- an operator ------------------------------------------------------------------------------------------------

    def states_behind(self, sequence: SequenceId, step: int) -> set[int | None]:
        """What the state may be behind a step: of each life of the id that has come so far."""
        lives = [life for (name, _), life in self._lives.items() if name == sequence]
        return {life.states[step] for life in lives if step in life.states}

    def copied(self, copy: SequenceId, origin: SequenceId, exported: ExportedSequence) -> None:
        """A sequence was opened that goes on from where another one stood."""
        for (name, _), life in list(self._lives.items()):
            if name == origin and exported.last_step in life.states:
                born = self._record(copy).get(b"bn", b"")
                last = exported.last_step
                inputs = {n: given for n, given in life.inputs.items() if n <= last}
                state = life.states[last]
                # Whoever has opened it may hear of that much later.
                now_s = int(born.partition(b"-")[0] or 0) / 1000
                self._lives[copy, born] = Life(inputs, state, exported.start_step, last, now_s, states={last: state})

    def renamed(self, sequence: SequenceId, before: bytes, now: bytes) -> None:
        """A sequence that waits has another birth: another shard's had the same one (deploy/operate/reshard.py)."""
        if now != before and (life := self._lives.pop((sequence, before), None)) is not None:
            self._lives[sequence, now] = life
            for value, _ in life.inputs.values():
                if (run := self._accepted.get((sequence, value))) is not None and run[0] == before:
                    self._accepted[sequence, value] = (now, run[1])

    # -- judging ----------------------------------------------------------------------------------------------------

    def _submitted(self, steps: Sequence[Submission], outcomes: Sequence[Submitted]) -> None:
        for step, outcome in zip(steps, outcomes, strict=True):
            value = value_of(decode_infer(step.message).inputs[0])
            if outcome.code in (SubmitCode.DELIVERED, SubmitCode.WAITING):
                self._accept(step, outcome, value)
            elif outcome.code in (SubmitCode.REPEATED, SubmitCode.JOINED):
                self._known(step, outcome, value)
            else:
                self.story.tell(f"submit {step.sequence} {value}: {outcome.code.name} {outcome.step}")
            if outcome.code is SubmitCode.EXPIRED:
                self.expired.add(step.sequence.rpartition("|")[2])
                self.ended.add(step.sequence.rpartition("|")[2])
                self._check_idle(step.sequence, self._record(step.sequence))
            elif outcome.code is SubmitCode.NEVER_SEEN:
                self._check_forgotten(step.sequence)

    def _known(self, step: Submission, outcome: Submitted, value: int) -> None:
        self.story.tell(f"submit {step.sequence} {value}: {outcome.code.name} {outcome.step}")
        self.known_before.add(value)
        life = self._lives.get((step.sequence, self._record(step.sequence).get(b"bn", b"")))
        # An answer that is kept is given when the sequence is over, too.
        if life and (life.committed < max(life.inputs) or self._now_s() < life.idle_until(self._idle_s)):
            life.used(step)

    def _accept(self, step: Submission, outcome: Submitted, value: int) -> None:
        self.story.tell(f"submit {step.sequence} {value}: {outcome.code.name} as {outcome.step}")
        life = self._lives.setdefault((step.sequence, outcome.birth.encode()), Life())
        life.used(step)
        if (step.sequence, outcome.run) in self._ended_runs:
            self.story.violate(f"{step.sequence}: step {outcome.step} is of a run that its client has ended")
        if step.tenant_max and outcome.step == 1:
            self._check_live(step)
        ended = [life.over_at for (name, _), life in self._lives.items() if name == step.sequence and life.over_at]
        # One that was refused before it ran may begin again, and so may any that is remembered no longer.
        if step.flags & StepFlag.ALONE and self._now_s() - max(ended, default=-inf) < self._tombstone_s - IDLE_SLACK_S:
            self.story.violate(f"{step.sequence}: request {value} is its own sequence, and has begun twice")
        if outcome.step in life.inputs:
            self.story.violate(f"{step.sequence}: step {outcome.step} was given twice")
        if step.flags & StepFlag.START or outcome.step == 1:
            life.start = outcome.step
        # A START that is asked for again, after others came in or after the end, begins another run, and what followed
        # is repeated in it (submit.lua): once in each. That no run begins in the middle is seen by the answers.
        run = (outcome.birth.encode(), life.start)
        # Sequences in two shards may have one birth, and an ensemble's first state begins with its input plus
        # one, which may be another input of its client.
        if self._accepted.get((step.sequence, value)) == run:
            self.story.violate(f"{step.sequence}: request {value} was accepted twice, now as step {outcome.step}")
        self._accepted[step.sequence, value] = run
        life.inputs[outcome.step] = (value, StepFlag(step.flags))
        if step.timeout_us:
            life.due = min(life.due, self._now_s() + step.timeout_us / 1e6)

    def _answered(
        self, executor: str, steps: Sequence[StepAnswers], records: Sequence[Record], written: Sequence[bool]
    ) -> None:
        for step, record, is_written in zip(steps, records, written, strict=True):
            place, numbers = f"{step.sequence} step {step.step}", [number for number, _ in step.answers]
            self.story.tell(f"answers {numbers} to {place} epoch {step.epoch} of {executor}: {is_written}")
            owner, epoch, committed = record.get(b"ow", b"").decode(), _number(record, b"ep"), _number(record, b"cm")
            is_owner = record.get(b"st") == b"l" and (owner, epoch, committed) == (executor, step.epoch, step.step - 1)
            if is_written is not is_owner:
                self.story.violate(
                    f"{place}: answers of {executor} in epoch {step.epoch}: {is_written}; its owner is "
                    f"{owner or 'nobody'} in {epoch}, after step {committed}"
                )

    def _came(self, items: Sequence[WorkItem], outcomes: Sequence[bool | bytes]) -> None:
        """One that its gateway sends again, as it does not know what became of it, may have been answered before."""
        accepted = zip(items, outcomes, strict=True)
        self._requests |= {request_id(item.gateway, item.token) for item, outcome in accepted if outcome is True}

    def _finished(self, _: object, executor: str, done: Sequence[WorkDone], finished: Finished) -> None:
        for one, is_answered in zip(done, finished.answered, strict=True):
            self.story.tell(f"finish {one.id} of {executor}: {is_answered}")
            if is_answered and one.id not in self._requests:
                self.story.violate(f"request {one.id} is answered twice, now by {executor}, or nobody has asked for it")
            if is_answered:
                self._requests.discard(one.id)

    def _committed(
        self, executor: str, steps: Sequence[StepCommit], records: Sequence[Record], codes: Sequence[CommitCode]
    ) -> None:
        # Of several steps of one sequence in a call only the first meets the record as it was.
        heads: dict[SequenceId, Record] = {}
        ran: dict[SequenceId, StepCommit] = {}
        for step, found, code in zip(steps, records, codes, strict=True):
            record = heads.setdefault(step.sequence, found)
            self.story.tell(f"commit {step.sequence} step {step.step} epoch {step.epoch} of {executor}: {code.name}")
            if code is CommitCode.PAGED:
                self._check_paged(step.sequence)
            # A paged sequence's last commit, sent again, hears the same as the first time.
            if code > 0 and not (code is CommitCode.PAGED and step.step <= _number(record, b"cm")):
                life = self._judge(executor, step, record)
                if code is CommitCode.OVER and life:
                    life.over_at = life.quiet_since
                record[b"cm"] = b"%d" % step.step
                if self.journaled and step.entry and step.outcome in (StepOutcome.DONE, StepOutcome.FAILED):
                    ran[step.sequence] = step
        for step in ran.values():
            if not step.flags & (StepFlag.STREAMED | StepFlag.ALONE):
                self._check_journal(step, heads[step.sequence].get(b"bn", b""))

    def _check_journal(self, step: StepCommit, birth: bytes) -> None:
        """step: the last one of its call that the model ran"""
        value, life = self.store.value(self.keys.journal(step.sequence).encode()), self._lives[step.sequence, birth]
        journal = dict(value) if isinstance(value, HashValue) else {}
        # The START of the run that is committed; another one may have been accepted since.
        starts = [n for n, (_, flags) in life.inputs.items() if n == 1 or StepFlag.START in flags]
        start = max(n for n in starts if n <= step.step)
        last = min(int(step.step), start + JOURNAL_STEPS - 1)
        if journal.get(b"run") != b"%b.%d" % (birth, start) or journal[b"n"] != b"%d" % last:
            self.story.violate(f"{step.sequence} step {step.step} of {start}: is not in the journal {sorted(journal)}")
            return
        own = {b"%b:%d" % (kind, n) for n in range(start, last + 1) for kind in (b"i", b"o")}
        if others := {name for name in journal if b":" in name} ^ own:
            self.story.violate(f"{step.sequence}: its journal of {start} to {last} has other steps: {sorted(others)}")
            return
        for n in range(start, last + 1):
            asked, reply = decode_infer(journal[b"i:%d" % n]), decode_reply(journal[b"o:%d" % n])
            given = value_of(reply.outputs[0]) if reply.outputs else None
            if value_of(asked.inputs[0]) != life.inputs[n][0] or given not in (None, life.states.get(n, given)):
                self.story.violate(f"{step.sequence}: its journal has {given} to {asked.inputs} as step {n}")

    def _judge(self, executor: str, step: StepCommit, record: Record) -> Life | None:
        place = f"{step.sequence} step {step.step}"
        owner, epoch, committed = record.get(b"ow", b"").decode(), _number(record, b"ep"), _number(record, b"cm")
        if record.get(b"st") != b"l" or (owner, epoch) != (executor, step.epoch):
            self.story.violate(
                f"{place}: committed by {executor} in epoch {step.epoch}; its owner is {owner or 'nobody'} in {epoch}"
            )
        if step.step != committed + 1:
            self.story.violate(f"{place}: committed after step {committed}")
        life = self._lives.get((step.sequence, record.get(b"bn", b"")))
        if life is None or step.step not in life.inputs:
            self.story.violate(f"{place}: committed, but nobody asked for it")
            return None
        self._judge_outcome(place, step, life)
        life.committed, life.states[step.step] = step.step, life.state
        life.quiet_since = self._now_s()
        self.steps += 1
        return life

    def _judge_outcome(self, place: str, step: StepCommit, life: Life) -> None:
        value, flags = life.inputs[step.step]
        state = 0 if StepFlag.START in flags or step.step == 1 else life.state
        match step.outcome:
            case StepOutcome.DONE:
                expected = None if state is None else fold(state, value)
                answer = value_of(decode_reply(step.reply).outputs[0])
                if value < 0 or answer != expected:
                    self.story.violate(f"{place}: input {value} gave {answer} instead of {expected}")
                life.state = expected
            case StepOutcome.FAILED:
                error = decode_reply(step.reply).error
                may_fail = self._is_given_up(value) or self.may_fail(step.sequence.rpartition("|")[2], error)
                if value >= 0 and not may_fail:
                    self.story.violate(f"{place}: input {value} failed: {error}")
                if StepFlag.START in flags:
                    life.state = None
            case StepOutcome.VOID:
                if state is not None and self.declared:
                    self.story.violate(f"{place}: was refused, although its state is there")
                life.state = None
            case StepOutcome.CANCELLED:
                if not self._is_given_up(value):
                    self.story.violate(f"{place}: was cancelled, although its caller waits")
                life.state = None
            case StepOutcome.GIVEN_UP:
                if not is_deadly(value):
                    self.story.violate(f"{place}: was given up, although it ends nobody")
                life.state = None
            case StepOutcome.LOST:
                if self.declared and state is not None and not self.is_callee_over(step.sequence.rpartition("|")[2]):
                    self.story.violate(f"{place}: its state was given up")
                life.state = None

    def may_fail(self, correlation_id: str, error: str) -> bool:
        """Whether a step that calls another model may fail so: the sequence that it calls is over, or lacks steps that
        the store has lost; or the store has been full, or a gateway away, for longer than a call is patient.
        """
        has_failed = CALL_FAILED in error and (self.is_callee_over(correlation_id) or FULL in error or self.has_lost)
        return has_failed or (self.impatient and not any(text in error for text in LASTING))

    def is_callee_over(self, correlation_id: str) -> bool:
        """Whether a sequence that is called has expired, or was over for so long that it is forgotten. Then its caller
        may be lost with it, by a replay (docs/guides/calls.md).
        """
        over_s = self._now_s() - self._tombstone_s + IDLE_SLACK_S
        is_forgotten = any(
            name.rpartition("|")[2] == correlation_id and life.over_at is not None and life.over_at < over_s
            for (name, _), life in self._lives.items()
        )
        return self.calls and (correlation_id in self.ended or is_forgotten)

    def _is_given_up(self, value: int) -> bool:
        """Whether its caller has gone. Of what another model has given nobody here knows whose it is."""
        return value in self.given_up or value >= COMPUTED

    def _assigned(self, assignments: Sequence[Any], epochs: Sequence[int]) -> None:
        for one, epoch in zip(assignments, epochs, strict=True):
            self.story.tell(f"assign {one.sequence} to {one.executor}/{one.instance}/{one.slot}: epoch {epoch}")
        taken: dict[tuple[bytes, ...], bytes] = {}
        for key in self.store.present():
            record = self.store.value(key) if b":seq:" in key else None
            if not isinstance(record, HashValue):
                continue
            if record.get(b"st") == b"p":
                self._check_paged(key.decode())
            if record.get(b"st") != b"l":
                continue
            model = key.partition(b":seq:")[2].partition(b"|")[0]
            place = (record[b"ow"], model, record[b"vr"], record[b"in"], record[b"sl"])
            if place in taken and not self.resurrects:
                self.story.violate(f"{key.decode()} and {taken[place].decode()} sit in one slot: {place}")
            taken[place] = key

    def _left(self, executor: str, owned: Sequence[tuple[SequenceId, Epoch]], paged: Sequence[bool]) -> None:
        for (sequence, epoch), is_paged in zip(owned, paged, strict=True):
            self.story.tell(f"page {sequence} epoch {epoch} of {executor}: {is_paged}")
            if is_paged:
                self._check_paged(sequence)

    def _check_paged(self, sequence: str) -> None:
        if not self._paged:
            self.story.violate(f"{sequence}: has given up its slot, which it was to keep")

    def _expired(self, sequences: Sequence[SequenceId], records: Sequence[Record], ended: Sequence[bool]) -> None:
        for sequence, record, is_over in zip(sequences, records, ended, strict=True):
            if is_over:
                self.story.tell(f"expire {sequence}")
                self.ended.add(sequence.rpartition("|")[2])
                late_s = self._check_idle(sequence, record)
                if late_s > self.late_s:
                    self.story.violate(f"{sequence}: expired {late_s:.3f} s after its idle time")
                if life := self._lives.get((sequence, record.get(b"bn", b""))):
                    life.over_at = self._now_s()

    def _reclaimed(self, *_: object) -> None:
        """A sequence between two steps is over if only its lost executor had its state."""
        for (sequence, birth), life in self._lives.items():
            record = self._record(sequence)
            if life.over_at is None and record.get(b"st") == LOST and record.get(b"bn", b"") == birth:
                life.over_at = self._now_s()

    def _rejected(self, rejections: Sequence[Rejection], records: Sequence[Record], refused: Sequence[int]) -> None:
        """A sequence that waited is over. Nothing stays of it, if its START was not committed."""
        for one, record, steps in zip(rejections, records, refused, strict=True):
            life = self._lives.get((one.sequence, record.get(b"bn", b"")))
            if steps >= 0 and life is not None:
                self.story.tell(f"reject {one.sequence}: {steps}")
                has_begun = int(record[b"cm"]) >= int(record[b"sn"])
                life.over_at = self._now_s() if has_begun else -inf
                is_late = record.get(b"st") == b"w" and self._now_s() > life.due - IDLE_SLACK_S
                if not is_late and decode_reply(one.reply).error == TIMEOUT_MESSAGE:
                    self.story.violate(f"{one.sequence}: is refused as late, but it has had a slot, or has time left")

    def _removed(self, told: Sequence[Any], removed: Sequence[bool]) -> None:
        """Sequences that waited for their first slot are gone, as if they had never been there."""
        for one, is_removed in zip(told, removed, strict=True):
            for life in [life for (name, _), life in self._lives.items() if name == one.sequence] * is_removed:
                life.over_at = life.over_at or -inf

    def _closed(self, endings: Sequence[Ending], records: Sequence[Record], codes: Sequence[EndCode]) -> None:
        self._removed(endings, [code is EndCode.REMOVED for code in codes])
        for one, record, code in zip(endings, records, codes, strict=True):
            run = f"{record.get(b'bn', b'').decode()}.{_number(record, b'sn')}"
            self.story.tell(f"end {one.sequence} {one.run}: {code.name}")
            if one.run and code is not EndCode.NOTHING and one.run != run:
                self.story.violate(f"{one.sequence}: run {run} ends with {one.run}")
            if one.run:
                self._ended_runs.add((one.sequence, one.run))

    def _orphaned(
        self, gateway: str, orphans: Sequence[Orphan], records: Sequence[Record], told: Sequence[bool]
    ) -> None:
        for one, record, is_orphan in zip(orphans, records, told, strict=True):
            self.story.tell(f"orphan {one.sequence} {one.token} of {gateway}: {is_orphan}")
            life = self._lives.get((one.sequence, record.get(b"bn", b"")))
            if is_orphan and life is not None:
                if life.user != (gateway, one.token):
                    self.story.violate(f"{one.sequence}: is orphaned, and used by {life.user}")
                life.orphaned = self._now_s(), one.grace_ms / 1000

    def _drawn(self, tenant: str, limits: TenantLimits, drawn: Drawn) -> None:
        now_s = self._now_s()
        left, since = self._allowances.get(tenant, (limits.burst_max, now_s))
        left = min(limits.burst_max, left + (now_s - since) * limits.steps_per_s) - drawn.granted
        self._allowances[tenant] = left, now_s
        if left < -RATE_SLACK:
            self.story.violate(f"tenant {tenant} may send {-left:.3f} requests more than its rate")

    def _check_live(self, step: Submission) -> None:
        records = f"{self.keys.base(self.keys.shard_of(step.sequence))}seq:".encode()
        found = [self.store.value(key) for key in self.store.present() if key.startswith(records)]
        its = [one for one in found if isinstance(one, HashValue) and one.get(b"tn") == step.tenant.encode()]
        count = sum(one.get(b"st") not in TOMBSTONES for one in its)
        if count > step.tenant_max:
            self.story.violate(f"tenant {step.tenant} has {count} sequences in a shard, and may have {step.tenant_max}")

    def has_run(self, value: int) -> bool:
        """Whether a step with this input was run."""
        return any(life.inputs[n][0] == value for life in self._lives.values() for n in life.states if n in life.inputs)

    def _check_idle(self, sequence: SequenceId, record: Record) -> float:
        """Returns how long its idle time has been over, s."""
        life = self._lives.get((sequence, record.get(b"bn", b"")))
        if life is None:
            return -inf
        if life.committed < max(life.inputs):
            self.story.violate(f"{sequence}: expired with step {life.committed + 1} open")
        late_s = self._now_s() - life.idle_until(self._idle_s)
        # An operator may end it sooner, or its client.
        if b"en" not in record and late_s < -IDLE_SLACK_S:
            self.story.violate(f"{sequence}: expired {-late_s:.3f} s before its idle time was over")
        return late_s

    def _now_s(self) -> float:
        """By the clock of the store, which may jump ahead."""
        return self.store.now_ms() / 1000

    def _check_forgotten(self, sequence: SequenceId) -> None:
        """Nobody hears that his sequence was never seen while its tombstone should stand."""
        lives = [life for (name, _), life in self._lives.items() if name == sequence]
        now = self._now_s()
        # Nothing is kept of the lives before the last one.
        for life in lives[-1:]:
            if life.over_at is None or now - life.over_at < self._tombstone_s - IDLE_SLACK_S:
                self.story.violate(f"{sequence}: never seen, although {life.committed} steps of it were committed")


def _sequence_of(told: Any) -> SequenceId:
    """What a script is told of one sequence is its id, begins with that, or has it as a field."""
    return SequenceId(told) if isinstance(told, str) else told.sequence if hasattr(told, "sequence") else told[0]


def _wire(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _number(record: Record, name: bytes) -> int:
    return int(record.get(name, b"0"))

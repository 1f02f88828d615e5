"""What must hold of sequences, by a model that knows of no script: what was accepted, who owns what, what is final.

It is told what each call was and what the scripts answered, and compares that with what it thinks itself; after every
call it counts the store's keys over.

    order, one effect   steps are made final 1, 2, 3, ..., each once, with the request that was accepted as that one
    one owner           only by the owner, in its epoch
    no lost state       a step that succeeds builds on exactly those before it since START
    journals            hold the steps that the model ran since START, in their order, from the first one to where there
                        is no more room; and are gone when the sequence is forgotten
    one answer          every caller hears once, and all callers of a step, whenever they asked, the same
    counts              the waiting line's numbers, and how often the model ran, are what can be counted by hand
    places              slots, owned sets, the starts stream, parked steps, markers and deadlines are the records' own
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from shared.contract.errors import Reason
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId, follows_another
from shared.contract.limits import LOST_OWNERS_MAX
from shared.contract.messages import StepFlag, encode
from shared.contract.record import NO_ENTRY, TOMBSTONES
from shared.store.journals import RUN
from shared.store.keyspace import Keyspace
from shared.store.script_values import (
    CommitCode,
    EndCode,
    JournalBounds,
    ReopenCode,
    StepAnswers,
    StepOutcome,
    Submission,
    SubmitCode,
    Submitted,
)
from tests.simulation.store import Store
from tests.simulation.values import HashValue, SetValue, SortedSet, Stream

LOST_ANSWER = encode(Reason.LOST)
"""The end of the message with which a script tells a caller that the sequence is lost."""

SHARD = ShardId(0)
MODEL, VERSION = "sum", "1"
State = tuple[int, ...]
"""The requests that a sequence has run since its START."""
Caller = tuple[str, str]
"""Gateway and token."""


@dataclass
class Step:
    """An accepted step. request: its number, unique; callers: who waits for it, or has its answer, the first one before
    the others; kept: so are its answers, for those who ask again; answers: by their numbers, those before the last one
    """

    request: int
    flags: StepFlag
    callers: list[Caller]
    kept: bool = True
    reply: bytes | None = None
    answers: dict[int, bytes] = field(default_factory=dict[int, bytes])

    @property
    def whole(self) -> list[bytes | None]:
        """All of its answers."""
        return [*(self.answers[number] for number in sorted(self.answers)), self.reply]


@dataclass
class Life:
    """A sequence from its birth to its end.

    start: the latest accepted START; state: None when there is none; pageable: it may give up its slot before its end;
    closed_after: the newest step when an operator ended it, 0 if none did; copied: steps that another sequence ran
    paused_until: end of its pause, ms; 0 while it is not paused
    journal: number, request and reply of each step that its journal must hold; journal_open: the next one belongs there
    mark: of the load of the model that ran the latest START
    """

    sequence: SequenceId
    durable: bool
    pageable: bool
    steps: dict[int, Step] = field(default_factory=dict[int, Step])
    start: int = 1
    committed: int = 0
    state: State | None = None
    owner: tuple[ExecutorId, int] | None = None
    over: bool = False
    closed_after: int = 0
    copied: int = 0
    paused_until: int = 0
    journal: list[tuple[int, bytes, bytes]] = field(default_factory=list[tuple[int, bytes, bytes]])
    journal_open: bool = False
    mark: str = ""

    @property
    def accepted(self) -> int:
        """The newest step."""
        return max(self.steps)

    @property
    def is_closed(self) -> bool:
        """Whether an operator ended the present run."""
        return self.closed_after >= self.start

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is in flight."""
        return self.committed == self.accepted


@dataclass(frozen=True)
class Done:
    """A step that an executor hands in. state: what the model made of it, None where it made nothing; mark: of the
    executor's load of the model
    """

    sequence: SequenceId
    epoch: int
    step: int
    request: int
    flags: StepFlag
    outcome: StepOutcome
    state: State | None
    reply: bytes
    mark: str


class Truth:
    """All sequences of a run. violations: what must not be, and was."""

    def __init__(self, store: Store, keys: Keyspace, sequences: list[SequenceId], bounds: JournalBounds) -> None:
        self._store = store
        self._keys = keys
        self._bounds = bounds
        self._own = {sequence: keys.sequence(sequence) for sequence in sequences}
        self.lives: dict[tuple[SequenceId, bytes], Life] = {}
        self.violations: list[str] = []
        self.left: set[int] = set()
        """Requests of which a caller has gone."""
        self.sent_again: set[Caller] = set()
        """Who asked twice under one token, and may be answered twice."""
        self.losses = 0
        self.behind_ms = 0
        """By so much idle times may last longer, as the clock of Redis was set back."""
        self.answered: Counter[str] = Counter()
        self.executions = 0

    # -- what was done ------------------------------------------------------------------------------------------------

    def submitted(self, submission: Submission, request: int, outcome: Submitted) -> None:
        """A gateway was answered."""
        sequence, caller = submission.sequence, (submission.gateway, submission.token)
        if outcome.code in (SubmitCode.DELIVERED, SubmitCode.WAITING):
            flags = StepFlag(submission.flags)
            life = self.lives.setdefault(
                (sequence, outcome.birth.encode()),
                Life(sequence, StepFlag.DURABLE in flags, StepFlag.PAGEABLE in flags),
            )
            if life.over or outcome.step != len(life.steps) + 1:
                self.violate(f"{sequence}: {outcome.step} steps accepted after {len(life.steps)}")
            if life.is_closed and StepFlag.START not in flags:
                self.violate(f"{sequence}: a step was accepted after an operator ended it")
            begins = StepFlag.START in flags
            flags, kept = flags & (StepFlag.START | StepFlag.END), submission.message.endswith(b" 1")
            life.steps[outcome.step] = Step(request, flags, [caller], kept)
            if begins:
                life.start = outcome.step
        elif outcome.code is SubmitCode.JOINED:
            step = self.lives[sequence, outcome.birth.encode()].steps[outcome.step]
            if caller in step.callers:
                self.sent_again.add(caller)
            else:
                step.callers.append(caller)
            # Without an id, the number is all that tells a request from a retry. Of a step that is over, many answers
            # come as if it were open.
            if (step.reply is not None and not step.answers) or (submission.digest and step.request != request):
                self.violate(f"{sequence}: request {request} waits for step {outcome.step}, which it is not")
        elif outcome.code is SubmitCode.REPEATED:
            known = self.current(sequence)
            if known is None or known.steps[outcome.step].reply != outcome.extra or known.steps[outcome.step].answers:
                self.violate(f"{sequence}: the stored reply of step {outcome.step} is another's")

    def retried(self, request: int, submission: Submission, before: Life, place: int, outcome: Submitted) -> None:
        """A step of the present run, not its first, was asked for again by id or number."""
        known = before.steps[place]
        is_newest = place == max((n for n, step in before.steps.items() if step.reply is not None), default=0)
        if known.reply is None:
            right = outcome.code is SubmitCode.JOINED
        else:
            again = SubmitCode.JOINED if known.answers else SubmitCode.REPEATED
            right = outcome.code is again or (outcome.code is SubmitCode.ANSWERED and not is_newest)
        if not right or (outcome.step != place and outcome.code is not SubmitCode.ANSWERED):
            self.violate(
                f"{submission.sequence}: step {place}, request {request}, asked for again: {outcome.code.name}"
            )

    def assigned(self, sequence: SequenceId, executor: ExecutorId, epoch: int) -> None:
        """A waiting sequence has an owner."""
        life = self.current(sequence)
        if life is None or life.over or life.owner is not None:
            self.violate(f"{sequence}: {executor} got it, although it waits for nobody")
            return
        life.owner = (executor, epoch)

    def taken(self, sequence: SequenceId, *, lost: bool = False) -> None:
        """It has no owner any more. lost: nor what only the owner held."""
        life = self.current(sequence)
        assert life is not None
        life.owner = None
        if lost and not life.durable:
            life.state = None
            life.over = life.is_idle

    def paged(self, sequence: SequenceId, executor: ExecutorId, epoch: Epoch) -> None:
        """Its owner has paged it, perhaps before."""
        life = self.current(sequence)
        if life is None or life.owner not in (None, (executor, epoch)):
            self.violate(f"{sequence}: {executor} pages it in epoch {epoch}; its owner is {life and life.owner}")
            return
        if life.owner and not (life.durable and life.is_idle):
            self.violate(f"{sequence}: paged with a step open, or though only {executor} has its state")
        life.owner = None

    def forgotten(self, executor: ExecutorId) -> None:
        """An executor has lost what only it held."""
        for life in self.lives.values():
            if life.owner is not None and life.owner[0] == executor and not life.durable:
                life.state = None

    def outdated(self, sequence: SequenceId, executor: ExecutorId, mark: str, *, ended: bool) -> None:
        """An executor wanted the end of a sequence whose state another load than its own has made."""
        life = self.current(sequence)
        is_held = life is not None and life.owner is not None and life.owner[0] == executor and life.is_idle
        if ended is not (is_held and life is not None and life.mark not in ("", mark)):
            self.violate(f"{sequence}: ended by a reload: {ended}, held by {executor}, whose mark is {mark!r}: {life}")
        if ended and life is not None:
            life.over, life.owner = True, None

    def lost(self, sequence: SequenceId, executor: ExecutorId, epoch: Epoch, *, lost: bool) -> None:
        """An executor has said that it cannot read a record."""
        life = self.current(sequence)
        owner = life.owner if life is not None and not life.over else None
        if lost is not (owner == (executor, epoch)):
            self.violate(f"{sequence}: lost: {lost}, as {executor} wants in epoch {epoch}; its owner is {owner}")
        if lost and life is not None:
            for step in life.steps.values():
                step.reply = step.reply or LOST_ANSWER
            life.over, life.owner, life.journal = True, None, []

    def expired(self, sequence: SequenceId, *, idle: bool) -> None:
        """It was ended by the reaper. idle: whether its marker was gone."""
        life = self.current(sequence)
        if life is None or life.over or not life.is_idle or not idle:
            self.violate(f"{sequence}: expired too early")
        if life is not None:
            life.over, life.owner = True, None

    def ended(self, sequence: SequenceId, code: EndCode) -> None:
        """An operator wanted the end of a sequence that does not wait for its first slot."""
        life = self.current(sequence)
        ends = EndCode.ENDS if life is not None and life.is_idle else EndCode.CLOSED
        if code is not (EndCode.NOTHING if life is None or life.over else ends):
            self.violate(f"{sequence}: {code.name} at the wish to end it")
        if life is not None and not life.over:
            life.closed_after = max(life.closed_after, life.accepted)
            life.paused_until = 0

    def paused(self, sequence: SequenceId, state: bytes, until_ms: int, *, is_paused: bool, idle: bool) -> None:
        """An operator wanted a sequence to run nothing. state: of its record before; idle: its marker was gone"""
        life = self.current(sequence)
        is_open = life is not None and not (life.over or life.is_closed or idle)
        is_portable = state in (b"m", b"p") or (state == b"l" and life is not None and life.durable)
        if is_paused is not (is_open and is_portable):
            self.violate(f"{sequence}: paused: {is_paused}, in state {state!r}: {life}")
        if is_paused and life is not None:
            life.owner, life.paused_until = None, until_ms

    def resumed(self, sequence: SequenceId, *, is_resumed: bool) -> None:
        """An operator wanted a sequence to go on."""
        life = self.current(sequence)
        if is_resumed is not (life is not None and not life.over and life.paused_until > 0):
            self.violate(f"{sequence}: resumed: {is_resumed}: {life}")
        if life is not None:
            life.paused_until = 0

    def time_has_come(self, sequence: SequenceId, now_ms: int) -> None:
        """The reaper looks at a sequence: a pause that is over ends."""
        life = self.current(sequence)
        if life is not None and life.paused_until <= now_ms:
            life.paused_until = 0

    def imported(self, origin: Life, copy: SequenceId, code: ReopenCode, *, pageable: bool, with_journal: bool) -> None:
        """An operator wanted a copy of a sequence."""
        present = self.current(copy)
        if code is not (ReopenCode.DONE if present is None or present.over else ReopenCode.EXISTS):
            self.violate(f"{copy}: {code.name} as a copy of {origin.sequence}")
        if code is not ReopenCode.DONE:
            return
        life = Life(copy, durable=True, pageable=pageable, start=origin.start, state=origin.state)
        life.committed = life.copied = origin.committed
        life.steps = {n: Step(0, step.flags, [], reply=b"another's") for n, step in origin.steps.items()}
        if with_journal:
            life.journal, life.journal_open = list(origin.journal), origin.journal_open
        self.lives[copy, self.record(copy)[b"bn"]] = life

    def refused(self, sequence: SequenceId, reply: bytes, steps: int | None) -> None:
        """A waiting sequence was ended with all of its steps; how many were answered, if that is known."""
        life = self.current(sequence)
        assert life is not None
        open_steps = [step for step in life.steps.values() if step.reply is None]
        if life.over or life.owner is not None or steps not in (None, len(open_steps)):
            self.violate(f"{sequence}: {steps} of {len(open_steps)} steps refused")
        for step in open_steps:
            step.reply = reply
        life.over = True

    def committed(self, executor: ExecutorId, done: list[Done], codes: list[CommitCode], births: list[bytes]) -> None:
        """An executor handed steps in, in one call."""
        news = 0
        for one, code, birth in zip(done, codes, births, strict=True):
            life = self.lives.get((one.sequence, birth))
            is_again = code is CommitCode.PAGED and life is not None and one.step <= life.committed
            if code > 0 and not is_again:
                news += 1
                self._judge(executor, one, code, life)
            elif code is CommitCode.BEFORE and (life is None or life.steps[one.step].reply != one.reply):
                self.violate(f"{one.sequence}: step {one.step} is said to be final")
            elif code is CommitCode.REFUSED and life and not life.over and life.owner == (executor, one.epoch):
                self.violate(f"{one.sequence}: step {one.step} of its owner was refused")
        self.news = news

    def answered_one_by_one(self, executor: ExecutorId, given: StepAnswers, birth: bytes, *, written: bool) -> None:
        """An executor wrote answers of an open step, or tried to."""
        place, life = f"{given.sequence} step {given.step}", self.lives.get((given.sequence, birth))
        is_right = (
            life is not None
            and not life.over
            and life.owner == (executor, given.epoch)
            and given.step == life.committed + 1
        )
        if written is not is_right:
            owner = life and life.owner
            self.violate(f"{place}: answers of {executor} in epoch {given.epoch}: {written}; its owner is {owner}")
        if not written or life is None:
            return
        step = life.steps[given.step]
        for number, answer in given.answers:
            if step.answers.setdefault(number, answer) != answer:
                self.violate(f"{place}: answer {number} is {answer}, and was {step.answers[number]}")

    def _judge(self, executor: ExecutorId, done: Done, code: CommitCode, life: Life | None) -> None:
        place = f"{done.sequence} step {done.step}"
        if life is None or life.over or life.owner != (executor, done.epoch):
            self.violate(f"{place}: {executor} in epoch {done.epoch} is not its owner, {life and life.owner}")
            return
        step = life.steps.get(done.step)
        if step is None or done.step != life.committed + 1 or step.request != done.request:
            self.violate(f"{place}: final after step {life.committed}, as request {done.request}")
            return
        begins, is_of_another = StepFlag.START in step.flags, life.mark not in ("", done.mark)
        life.state = self._state_after(place, done, () if begins else life.state, is_of_another=is_of_another)
        if begins and done.outcome is StepOutcome.DONE:
            life.mark = done.mark
        life.committed, step.reply = done.step, done.reply
        self._journal(life, step, done)
        is_last = life.is_idle and (StepFlag.END in step.flags or life.state is None)
        if is_last is not (code is CommitCode.OVER):
            self.violate(f"{place}: {code.name}, with state {life.state}, {step.flags!r}")
        if code in (CommitCode.OVER, CommitCode.PAGED):
            life.owner, life.over = None, code is CommitCode.OVER

    def _journal(self, life: Life, step: Step, done: Done) -> None:
        """Notes what the journal must hold."""
        if done.outcome not in (StepOutcome.DONE, StepOutcome.FAILED):
            return
        if StepFlag.START in step.flags:
            life.journal, life.journal_open = [], True
        request = b"%d %d" % (step.request, step.kept)
        size = sum(len(word) for _, *words in (*life.journal, (0, request, done.reply)) for word in words)
        life.journal_open &= len(life.journal) < self._bounds.steps and size <= self._bounds.size
        if life.journal_open:
            life.journal.append((done.step, request, done.reply))

    def _state_after(self, place: str, done: Done, before: State | None, *, is_of_another: bool) -> State | None:
        match done.outcome:
            case StepOutcome.DONE:
                expected = None if before is None else (*before, done.request)
                if done.state != expected:
                    self.violate(f"{place}: gave {done.state} instead of {expected}")
                return expected
            case StepOutcome.FAILED:
                is_fatal = StepFlag.START in done.flags or follows_another(done.sequence)
                return None if is_fatal else before
            case StepOutcome.CANCELLED:
                if done.request not in self.left:
                    self.violate(f"{place}: was cancelled, although its caller waits")
            case StepOutcome.GIVEN_UP:
                if self.losses < LOST_OWNERS_MAX:
                    self.violate(f"{place}: was given up after {self.losses} losses")
            case StepOutcome.VOID | StepOutcome.LOST:
                if before is not None and not is_of_another:
                    self.violate(f"{place}: was not run, although its state is there: {before}")
        return None

    def violate(self, text: str) -> None:
        """Something must not be."""
        self.violations.append(text)

    def current(self, sequence: SequenceId) -> Life | None:
        """The latest life of a sequence."""
        return next((life for (name, _), life in reversed(self.lives.items()) if name == sequence), None)

    # -- what the store holds -----------------------------------------------------------------------------------------

    def record(self, sequence: SequenceId) -> dict[bytes, bytes]:
        """A sequence's record."""
        value = self._store.value(self._own[sequence].record.encode())
        return dict(value) if isinstance(value, HashValue) else {}

    def journal(self, sequence: SequenceId) -> dict[bytes, bytes]:
        """A sequence's journal."""
        value = self._store.value(self._keys.journal(sequence).encode())
        return dict(value) if isinstance(value, HashValue) else {}

    def check(self) -> None:
        """Counts over what the scripts keep."""
        records = {sequence: self.record(sequence) for sequence in self._own}
        for sequence, record in records.items():
            self._check_record(sequence, record)
            self._check_journal(sequence, record, self.journal(sequence))
        open_records = {s: r for s, r in records.items() if r.get(b"st", b"") in b"wlmp" and r}
        self._check_places(open_records)
        self._check_line(open_records)

    def _check_record(self, sequence: SequenceId, record: dict[bytes, bytes]) -> None:
        life, state = self.current(sequence), record.get(b"st", b"").decode()
        self._check_kept_answers(sequence, record, life)
        is_open = state in ("w", "l", "m", "p")
        if (life is not None and not life.over) is not is_open:
            self.violate(f"{sequence}: its record says {state!r}, which it is not: {life}")
            return
        own = self._own[sequence]
        if not is_open or life is None:
            left = [key for key in (own.idle, own.parked, own.checkpoint) if self._store.ttl_ms(key.encode()) != -2]
            if left:
                self.violate(f"{sequence}: is over, and {left} are left")
            return
        if (int(record[b"nx"]), int(record[b"cm"])) != (life.accepted, life.committed):
            self.violate(f"{sequence}: {record[b'cm']} of {record[b'nx']}, not {life.committed} of {life.accepted}")
        if state == "p" and not life.pageable:
            self.violate(f"{sequence}: has given up its slot, which it was to keep")
        owner = (ExecutorId(record[b"ow"].decode()), int(record[b"ep"])) if state == "l" else None
        if owner != life.owner:
            self.violate(f"{sequence}: its owner is {owner}, not {life.owner}")
        if (record.get(b"be") == NO_ENTRY) is not (life.paused_until > 0):
            self.violate(f"{sequence}: its record says {record.get(b'be')!r}; paused until {life.paused_until}")
        marker = self._store.ttl_ms(own.idle.encode())
        deadlines = self._store.value(self._keys.deadlines(SHARD, MODEL).encode())
        is_due = isinstance(deadlines, SortedSet) and sequence.encode() in deadlines.scores
        if life.is_closed and (marker > 1 + self.behind_ms or (not life.is_idle and record[b"cl"] != b"1")):
            self.violate(f"{sequence}: goes on, although an operator ended it (marker {marker})")
        if life.is_idle and not (is_due and marker != -1):
            self.violate(f"{sequence}: is idle and would never expire (marker {marker}, looked at: {is_due})")
        if life.is_idle and not life.paused_until and isinstance(deadlines, SortedSet) and is_due:
            late = deadlines.scores[sequence.encode()] - self._store.now_ms() - max(0, marker)
            if late > self.behind_ms:
                self.violate(f"{sequence}: is looked at {late} ms after its idle time")
        if not life.is_idle and marker != -1:
            self.violate(f"{sequence}: may expire with a step in flight ({marker})")
        if state == "l" and self._store.ttl_ms(own.parked.encode()) != -2:
            self.violate(f"{sequence}: has an owner, and steps that wait for one")

    def _check_journal(self, sequence: SequenceId, record: dict[bytes, bytes], found: dict[bytes, bytes]) -> None:
        life = self.current(sequence)
        ttl_ms = self._store.ttl_ms(self._keys.journal(sequence).encode())
        is_over = life is None or life.over
        if found and is_over and ttl_ms < 0:
            self.violate(f"{sequence}: is over, and its journal stays for ever")
        if life is None or not record:
            return
        if not life.journal:
            # What an earlier sequence of the id has left stays for a while, until this one has a step.
            if found and (ttl_ms < 0 or found[RUN.encode()].startswith(record.get(b"bn", b"?") + b".")):
                self.violate(f"{sequence}: has a journal of {found}")
            return
        expected = {b"i:%d" % n: request for n, request, _ in life.journal}
        expected |= {b"o:%d" % n: reply for n, _, reply in life.journal}
        size, last = sum(map(len, expected.values())), life.journal[-1][0]
        expected |= {b"run": b"%b.%d" % (record[b"bn"], life.journal[0][0]), b"n": b"%d" % last, b"b": b"%d" % size}
        if StepFlag.END in life.steps[last].flags:
            expected[b"e"] = b"1"
        if found != expected:
            self.violate(f"{sequence}: its journal is {found}, not {expected}")
        if ttl_ms != self._store.ttl_ms(self._own[sequence].record.encode()):
            self.violate(f"{sequence}: its journal stays for {ttl_ms} ms, and its record does not")

    def _check_kept_answers(self, sequence: SequenceId, record: dict[bytes, bytes], life: Life | None) -> None:
        """The record holds the replies and answers that it names, and no other."""
        named: set[bytes] = set()
        for entry in record.get(b"rk", b"").split():
            step, _, sizes = entry.partition(b":")
            size, *span = sizes.split(b"/")
            fields = [b"p:%b:%d" % (step, n) for n in range(int(span[0]), int(span[1]) + 1)] if span else []
            named |= {b"p:%b" % step, *fields}
            if sum(len(record.get(name, b"")) for name in (b"p:%b" % step, *fields)) != int(size):
                self.violate(f"{sequence}: {entry} is not the size of what is kept")
        if b"an" in record:
            step, count, first, size = map(int, record[b"an"].split())
            fields = [b"p:%d:%d" % (step, number) for number in range(first, count + 1)]
            named |= set(fields)
            if sum(len(record.get(name, b"")) for name in fields) != size:
                self.violate(f"{sequence}: {record[b'an']} is not the size of what is kept")
            if life and not life.over and (step != life.committed + 1 or count != len(life.steps[step].answers)):
                self.violate(f"{sequence}: {record[b'an']}, with {life.steps.get(step)}")
        if named != (found := {name for name in record if name.startswith(b"p:")}):
            self.violate(f"{sequence}: holds the answers {sorted(found)}, not {sorted(named)}")

    def _check_places(self, records: dict[SequenceId, dict[bytes, bytes]]) -> None:
        live = {s: r for s, r in records.items() if r[b"st"] == b"l"}
        places = Counter((r[b"ow"], r[b"in"], r[b"sl"]) for r in live.values())
        if places and max(places.values()) > 1:
            self.violate(f"a slot has two holders: {places}")
        owned = self._members("owned")
        if owned != (expected := {(r[b"ow"], s.encode()) for s, r in live.items()}):
            self.violate(f"owned is {owned}, not {expected}")
        tenants = self._members("tenant")
        open_ones = {s: r for s, r in records.items() if r[b"st"] not in TOMBSTONES}
        if tenants != (expected := {(r[b"tn"], s.encode()) for s, r in open_ones.items() if b"tn" in r}):
            self.violate(f"tenants have {tenants}, not {expected}")
        starts = self._store.value(self._keys.starts(SHARD, MODEL).encode())
        fields_of = starts.fields if isinstance(starts, Stream) else {}
        entries = {b"%d-%d" % entry: dict(_pairs(fields)) for entry, fields in fields_of.items()}
        in_line = {entry: fields[b"q"] for entry, fields in entries.items() if fields[b"k"] in (b"w", b"m", b"r")}
        in_wait = {s: r[b"be"] for s, r in records.items() if r[b"st"] in (b"w", b"m") and r[b"be"] != NO_ENTRY}
        if in_line != (expected := {entry: s.encode() for s, entry in in_wait.items()}):
            self.violate(f"in line are {in_line}, not {expected}")
        news = {entry: fields[b"q"] for entry, fields in entries.items() if fields[b"k"] == b"d"}
        if news != (expected := {r[b"dn"]: s.encode() for s, r in records.items() if b"dn" in r}):
            self.violate(f"news in the line is {news}, not {expected}")

    def _members(self, kind: str) -> set[tuple[bytes, bytes]]:
        """What the sets of a kind hold, each member with the word behind the kind in its set's name."""
        prefix = f"{self._keys.base(SHARD)}{kind}:".encode()
        return {
            (key.removeprefix(prefix).split(b":")[0], member)
            for key in self._store.present()
            if key.startswith(prefix) and isinstance(value := self._store.value(key), SetValue)
            for member in value
        }

    def _check_line(self, records: dict[SequenceId, dict[bytes, bytes]]) -> None:
        value = self._store.value(self._keys.line(SHARD, MODEL).encode())
        line = {k.decode(): int(v) for k, v in value.items()} if isinstance(value, HashValue) else {}
        states = Counter(record[b"st"] for record in records.values())
        steps = sum(int(r[b"nx"]) - int(r[b"cm"]) for r in records.values() if r[b"st"] in (b"w", b"m"))
        paged = line.get("out:1", 0) - line.get("in:1", 0) - line.get("gone:1", 0)
        found = (line.get("w", 0), line.get("s:1", 0), paged)
        if found != (states[b"w"], steps, states[b"p"]):
            self.violate(f"the line counts {found}, not {(states[b'w'], steps, states[b'p'])}")

    def check_answers(self, heard: dict[Caller, list[bytes]], *, all_kept: bool) -> None:
        """At the end: whoever waited was answered, once, with the answers of his step in their order. Who asked again
        may lack the first ones, if they are kept no longer. all_kept: they are
        """
        expected: dict[Caller, list[Step]] = {}
        for life in self.lives.values():
            for step in life.steps.values():
                for caller in step.callers:
                    expected.setdefault(caller, []).append(step)
        for caller, steps in expected.items():
            answers = [LOST_ANSWER if one.endswith(LOST_ANSWER) else one for one in heard.get(caller, [])]
            if caller in self.sent_again:
                # Who asks again under the same token may have been answered before: the gateway drops these.
                answers = list(dict.fromkeys(answers))
            while answers[-1:] == [LOST_ANSWER] and {step.whole[-1] for step in steps} <= set(answers[:-1]):
                # The sequence is over, and the step's entry was found afterwards (drain.lua). A gateway that has passed
                # on the last answer knows the caller no longer.
                answers.pop()
            wanted = {answer for step in steps for answer in step.whole}
            is_whole = all(
                _is_end(step, answers, (all_kept and step.kept) or caller == step.callers[0]) for step in steps
            )
            once = len(answers) == len(set(answers)) and (caller in self.sent_again or len(steps) == 1)
            if not (is_whole and once and wanted.issuperset(answers)):
                self.violate(f"{caller} heard {answers}, not {[step.whole for step in steps]}")


def _is_end(step: Step, answers: list[bytes], all_of_it: bool) -> bool:
    """Whether a caller heard a step's answers in their order, up to the last one."""
    whole = step.whole
    mine = [answer for answer in answers if answer in whole]
    return mine == whole if all_of_it else bool(mine) and mine == whole[-len(mine) :]


def _pairs(fields: list[bytes]) -> list[tuple[Any, Any]]:
    return list(zip(fields[::2], fields[1::2], strict=True))

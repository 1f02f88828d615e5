"""The mesh's Lua scripts under random calls, one after the other on the twin: gateways, executors and leaders that are
late, repeat themselves, or are none any more. What must hold of it is `tests.simulation.script_truth`'s to say.

Where the simulation of whole meshes plays what services do, this plays what scripts may meet: a seed takes a twentieth
of the time and comes into corners that no service would look for. The leaders know no policy: whoever waits gets any
free slot. An older one, whose term is over, tries whatever can be done at that moment, and must be refused.

`python -m tests.simulation --scripts --seeds 1000`
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from executor.core.recovery import Checkpoints
from shared.contract.ids import Epoch, ExecutorId, GatewayId, InstanceIndex, SequenceId, SlotIndex, Term
from shared.contract.messages import StepFlag
from shared.contract.record import CANCELLED, NO_ENTRY
from shared.contract.tenants import TenantLimits
from shared.store.exported import ExportedSequence
from shared.store.journals import journal_of
from shared.store.script_sender import Call
from shared.store.script_values import (
    Assignment,
    CancelCode,
    Cancellation,
    Ending,
    LedShard,
    Orphan,
    Pausing,
    Rejection,
    Submission,
    SubmitCode,
    Submitted,
    VacateCode,
    Vacation,
)
from tests.simulation.leftovers import leftovers
from tests.simulation.script_bench import BEGIN_US, Bench, Fenced, pairs
from tests.simulation.script_executor import IDLE_MS, LOAD, TOMBSTONE_MS, Executor
from tests.simulation.script_leases import Leases
from tests.simulation.script_truth import MODEL, SHARD, VERSION, Caller
from tests.simulation.script_work import WorkFuzz
from tests.simulation.store import StoreError
from tests.simulation.values import HashValue
from tests.simulation.world import Result

MOVES = 120
EXECUTORS = 2
GRACE_MS = 300
ROUNDS_MAX = 200
GATEWAYS = (GatewayId("g1"), GatewayId("g2"))
TENANTS = ("", "acme", "blue")
"""Whose the steps are, in turn. A sequence is that of its first step."""
LIMITS = TenantLimits(steps_per_s=50, burst=4)
START, END, NONE = StepFlag.START, StepFlag.END, StepFlag.NONE


@dataclass
class Asked:
    """A request of a client. birth, place: sequence and step as which it was accepted, where it was.

    sent_ms  by the clock of its gateway, which is never set; slow_ms: that of Redis had so much less
    """

    number: int
    sequence: SequenceId
    submission: Submission
    sent_ms: int
    slow_ms: int
    birth: bytes = b""
    place: int = 0


@dataclass
class Waits:
    """A place in the starts stream, as a leader has read it."""

    entry: str
    kind: str


@dataclass(eq=False)
class Leader:
    """One term's picture: who waits, who holds which slot, and which slots are laid out."""

    term: Term
    starts: str = "0-0"
    feed: str = "0-0"
    waiting: dict[SequenceId, Waits] = field(default_factory=dict[SequenceId, Waits])
    slots: dict[SequenceId, tuple[ExecutorId, int, int]] = field(
        default_factory=dict[SequenceId, tuple[ExecutorId, int, int]]
    )
    spare: set[tuple[ExecutorId, int]] = field(default_factory=set[tuple[ExecutorId, int]])
    recalls: dict[ExecutorId, int] = field(default_factory=dict[ExecutorId, int])


class Fuzz:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.bench = Bench(seed)
        self.chance, self.keys, self.scripts = self.bench.chance, self.bench.keys, self.bench.scripts
        self.truth, self.store, self.sequences = self.bench.truth, self.bench.store, self.bench.sequences
        self.run, self.do, self.tell = self.bench.run, self.bench.do, self.bench.tell
        # A run's habits: with the same ones throughout, some corners would be left out.
        self.recovery = Checkpoints(self.chance.randint(1, 3))
        self.end_rate = self.chance.choice((0.02, 0.12))
        self.kinds = self.chance.choice((("named",), ("named", "both"), ("named", "numbered", "plain")))
        # Of models, not of clients. Drawn by itself, so that a seed goes on to mean what it meant in everything else.
        self.calls = self.kinds == ("named",) and random.Random(f"calls {seed}").random() < 0.5
        self.slots = self.chance.choice((1, 2, 2))
        self.live_max, self.tenant_max = self.chance.choice(((10, 0), (10, 0), (10, 0), (2, 0), (10, 1)))
        self.marks = self.chance.choice((("",), ("",), ("a",), ("a", "a", "a", "b")))
        self.asked: list[Asked] = []
        self.tokens = 0
        self.newest: dict[GatewayId, str] = {}
        self.executors: list[Executor] = []
        self.leader = Leader(Term(0))
        self.older: list[Leader] = []
        self.drawn, self.next_draw = 0, (0, 0)
        self.leases = Leases(self.bench)
        self.work = WorkFuzz(self.bench, seed)

    def play(self, moves: int) -> None:
        """The run."""
        self.next_leader()
        for gateway in GATEWAYS:
            self.do("XADD", self.keys.replies(SHARD, gateway), "*", "opened", "")
        choices: list[Callable[[], None]] = (
            [self.submit] * 8
            + [self.ask_again] * 3
            + [self.send_again, self.cancel, self.orphan, self.end, self.fork, self.pause, self.resume, self.draw]
            + [self.executor_moves] * 30
            + [self.lead] * 16
            + [self.older_leader_moves]
            + [self.time_passes] * 2
            + [self.next_leader, self.leases.move]
            + [self.work.move] * self.work.moves
        )
        for _ in range(moves):
            self.bench.now_us += self.chance.randint(0, 5_000)
            if sum(not executor.lost for executor in self.executors) < EXECUTORS:
                self.join()
            before = self.bench.calls
            self.chance.choice(choices)()
            if self.bench.calls != before:
                self.truth.check()
            if self.truth.violations:
                return
        self.settle()

    # -- clients and gateways -----------------------------------------------------------------------------------------

    def submit(self) -> None:
        """A new request of a client."""
        sequence = self.chance.choice(self.sequences)
        life = self.truth.current(sequence)
        is_open = life is not None and not life.over and END not in life.steps[life.accepted].flags
        flags = NONE if is_open and self.chance.random() < 0.93 else START
        if self.chance.random() < self.end_rate:
            flags |= END
        if sequence in self.bench.durable:
            flags |= StepFlag.DURABLE
            if self.chance.random() < 0.6:
                flags |= StepFlag.PAGEABLE
        if self.chance.random() < 0.1:
            flags |= StepFlag.TOLD
        number = len(self.asked) + 1
        kind = self.chance.choice(self.kinds)
        if self.calls:
            flags |= StepFlag.NAMED
        expected = None
        if kind in ("numbered", "both"):
            expected = 1 if START in flags or life is None else life.accepted - life.start + 2
        timeout_us = self.chance.choice((0, 0, 50_000))
        gateway, token = self.next_token()
        submission = Submission(
            sequence=sequence,
            flags=flags,
            digest=hashlib.sha1(b"%d" % number).digest()[:12] if kind in ("named", "both") else b"",
            expected_step=expected,
            version=VERSION,
            gateway=gateway,
            token=token,
            timeout_us=timeout_us,
            message=b"%d %d" % (number, kind != "plain"),
            tenant=TENANTS[number % len(TENANTS)],
            tenant_max=self.tenant_max,
            prefers=self.preferred() if START in flags else "",
        )
        asked = Asked(number, sequence, submission, self.bench.passed_us // 1000, self.bench.slow_ms)
        self.asked.append(asked)
        self.send(asked, submission)

    def preferred(self) -> ExecutorId:
        """Any executor, if none has spare slots: the gateway may know of it what was true a moment ago."""
        names = [executor.name for executor in self.executors]
        offering = [name for name in names if self.do("HGET", self.keys.spares(SHARD, name, MODEL), f"v:{VERSION}")]
        return self.chance.choice(offering or names)

    def send(self, asked: Asked, submission: Submission) -> Submitted:
        call = self.scripts.submit([submission], backlog_max=3, in_flight_max=6, live_max=self.live_max)
        (outcome,) = self.run(call)
        self.tell(
            f"{submission.gateway} asks for {asked.number} of {asked.sequence}, {submission.flags!r}, "
            f"number {submission.expected_step}: {outcome.code.name} {outcome.step}"
        )
        self.truth.submitted(submission, asked.number, outcome)
        life = self.truth.current(submission.sequence)
        if outcome.code is SubmitCode.DELIVERED and life is not None and life.owner is None:
            record = self.truth.record(submission.sequence)
            owner = ExecutorId(record[b"ow"].decode())
            self.tell(f"{submission.sequence} takes a spare slot: {owner}/{int(record[b'sl'])}")
            self.truth.assigned(submission.sequence, owner, int(record[b"ep"]))
            if any(executor.emptied for executor in self.executors if executor.name == owner):
                self.truth.violate(f"{submission.sequence} comes to {owner}, after all was taken from there")
        if outcome.code in (SubmitCode.DELIVERED, SubmitCode.WAITING):
            asked.birth, asked.place = outcome.birth.encode(), outcome.step
        return outcome

    def next_token(self) -> Caller:
        self.tokens += 1
        gateway = self.chance.choice(GATEWAYS)
        self.newest[gateway] = f"{self.tokens:x}"
        return gateway, self.newest[gateway]

    def ask_again(self) -> None:
        """A client retries a request that it can name, through whatever gateway."""
        known = [one for one in self.asked if one.submission.digest or one.submission.expected_step]
        if not known:
            return
        asked = self.chance.choice(known[-8:])
        gateway, token = self.next_token()
        again = _changed(asked.submission, gateway=gateway, token=token)
        life = self.truth.current(asked.sequence)
        is_present = (
            life is not None
            and self.truth.record(asked.sequence).get(b"bn") == asked.birth
            and life is self.truth.lives.get((asked.sequence, asked.birth))
            and asked.place > life.start
            and life.steps[asked.place].request == asked.number
            and life.start == max(n for n, step in life.steps.items() if START in step.flags)
            and self.run_of(asked) == life.start
        )
        place = asked.place
        was_made = self.calls and life is not None and self.truth.record(asked.sequence).get(b"bn") == asked.birth
        # A START begins again what is over without END, or has been idle for too long.
        is_idle = self.store.value(self.keys.sequence(asked.sequence).idle.encode()) is None
        may_begin = life is None or (bool(again.flags & START) and (life.over or life.is_closed or is_idle))
        outcome = self.send(asked, again)
        if was_made and not may_begin and outcome.code in (SubmitCode.DELIVERED, SubmitCode.WAITING):
            self.truth.violate(f"{asked.sequence}: call {asked.number} was accepted twice")
        if is_present:
            assert life is not None
            self.truth.retried(asked.number, again, life, place, outcome)

    def run_of(self, asked: Asked) -> int:
        """The START of the run in which a request was accepted."""
        life = self.truth.lives[asked.sequence, asked.birth]
        return max(n for n, step in life.steps.items() if START in step.flags and n <= asked.place)

    def send_again(self) -> None:
        """A gateway that lost its connection does not know what became of its last request."""
        newest = self.newest.get(self.chance.choice(GATEWAYS))
        asked = next((one for one in self.asked[-8:] if one.submission.token == newest), None)
        if asked is None or (not asked.submission.digest and asked.submission.expected_step is None):
            return
        self.truth.sent_again.add((asked.submission.gateway, asked.submission.token))
        record, was_accepted = self.truth.record(asked.sequence), bool(asked.place)
        # By the clock of Redis as it was then, and as it is now: the earlier time counts.
        since_ms = asked.sent_ms - max(asked.slow_ms, self.bench.slow_ms)
        outcome = self.send(asked, _changed(asked.submission, since_ms=since_ms))
        if record and was_accepted and outcome.code in (SubmitCode.DELIVERED, SubmitCode.WAITING):
            self.truth.violate(f"{asked.sequence}: request {asked.number} was accepted twice")

    def cancel(self) -> None:
        """The caller of an accepted step leaves."""
        accepted = [one for one in self.asked if one.place]
        if not accepted:
            return
        asked = self.chance.choice(accepted[-6:])
        submission, life = asked.submission, self.truth.lives[asked.sequence, asked.birth]
        is_open = life.steps[asked.place].reply is None
        gone = Cancellation(asked.sequence, asked.birth.decode(), asked.place, submission.gateway, submission.token)
        reply = b"cancelled %d" % self.bench.calls
        (code,) = self.run(self.scripts.cancel([gone], reply=reply))
        self.tell(f"the caller of {asked.number} leaves: {code.name}")
        if code in (CancelCode.TOLD, CancelCode.REMOVED):
            self.truth.left.add(asked.number)
            if not is_open:
                self.truth.violate(f"{asked.sequence}: step {asked.place} is cancelled after its answer")
        if code is CancelCode.REMOVED:
            self.truth.refused(asked.sequence, reply, None)

    def orphan(self) -> None:
        """A connection is gone that used a sequence."""
        if self.asked:
            one = self.chance.choice(self.asked[-4:]).submission
            left = Orphan(one.sequence, one.token, GRACE_MS)
            (changed,) = self.run(self.scripts.orphan([left], gateway=one.gateway))
            self.tell(f"a connection of {one.gateway} to {one.sequence} is gone: {changed}")

    def draw(self) -> None:
        """A gateway asks how many requests of a tenant it may let in: never more than the rate gives in all of the
        time, and one when it was told so, unless the clock was set back since.
        """
        wanted, passed_us, back_ms = self.chance.randint(1, 6), self.bench.passed_us, self.bench.back_ms
        drawn = self.run(self.scripts.draw(TENANTS[1], LIMITS, wanted))
        self.tell(f"{drawn.granted} of {wanted} requests are let in, the next one in {drawn.next_us} us")
        self.drawn += drawn.granted
        by_redis_s = (passed_us - BEGIN_US) / 1e6 + self.bench.ahead_ms / 1000
        most = LIMITS.burst_max + 1 + by_redis_s * LIMITS.steps_per_s
        promised_us, promised_by = self.next_draw
        is_due = promised_by == back_ms and promised_us <= passed_us
        if self.drawn > most or not is_due <= drawn.granted <= wanted:
            self.truth.violate(f"{drawn.granted} requests let in, {self.drawn} in all: at most {most}; due: {is_due}")
        self.next_draw = passed_us + drawn.next_us, back_ms

    def end(self) -> None:
        """An operator ends a sequence."""
        sequence = self.chance.choice(self.sequences)
        # Without a reply, the steps of one that waits are run.
        reply = b"" if self.bench.calls % 3 == 0 else b"ended %d" % self.bench.calls
        was = self.truth.record(sequence).get(b"st", b"")
        (code,) = self.run(self.scripts.end([Ending(sequence)], tombstone=CANCELLED, reply=reply))
        self.tell(f"an operator ends {sequence}: {code.name}")
        if was == b"w" and reply:
            self.truth.refused(sequence, reply, None)
        else:
            self.truth.ended(sequence, code)

    def fork(self) -> None:
        """An operator opens a copy of a sequence whose state is in its checkpoint, under any id whose states the mesh
        holds.
        """
        if not (origins := [sequence for sequence in self.sequences if self.is_whole(sequence)]):
            return
        origin, copy = self.chance.choice(origins), self.chance.choice(sorted(self.bench.durable))
        record, life = self.truth.record(origin), self.truth.current(origin)
        checkpoint = self.store.value(self.keys.sequence(origin).checkpoint.encode())
        if life is None or not isinstance(checkpoint, HashValue):
            return
        states = {name.decode(): value for name, value in dict(checkpoint).items() if name != b"n"}
        exported = ExportedSequence(
            MODEL, VERSION, 1, int(record[b"cm"]), int(record[b"sn"]), {}, states, self.bench.now_us // 1000, ""
        )
        # A release that knows of no journals writes files without one.
        with_journal = int(record[b"cm"]) % 2 == 0
        journal = journal_of(self.truth.journal(origin), record) if with_journal else {}
        exported = msgspec.structs.replace(exported, journal=journal)
        pageable = self.chance.random() < 0.6
        call = self.scripts.reopen(copy, exported, idle_ms=IDLE_MS, live_max=10, pageable=pageable)
        code = self.run(call)
        self.tell(f"an operator copies {origin} to {copy}: {code.name}")
        if (again := self.run(call)) is not code:
            self.truth.violate(f"{copy}: {code.name} as a copy of {origin}, and {again.name} when that is sent again")
        self.truth.imported(life, copy, code, pageable=pageable, with_journal=with_journal)

    def is_whole(self, sequence: SequenceId) -> bool:
        """Whether its checkpoint holds all of its steps."""
        record, life = self.truth.record(sequence), self.truth.current(sequence)
        is_covered = record.get(b"nx") == record.get(b"cm") == record.get(b"ck") and record.get(b"du") == b"1"
        return is_covered and life is not None and not life.over

    def pause(self) -> None:
        """An operator wants a sequence to run nothing. The leader may end before it has moved on the steps."""
        sequence, now_ms = self.chance.choice(self.sequences), self.bench.now_us // 1000
        until_ms = now_ms + self.chance.choice((-10 * IDLE_MS, 0, 50, 10 * IDLE_MS))
        record, is_idle, left_ms = self.truth.record(sequence), self.is_marker_gone(sequence), self.idle_ms(sequence)
        pausing = Pausing(sequence, until_ms)
        (owner,) = self.run(self.scripts.pause([pausing], LedShard(SHARD, MODEL, self.leader.term)))
        self.tell(f"an operator pauses {sequence} until {until_ms % 1_000_000}: {owner}")
        self.truth.paused(sequence, record.get(b"st", b""), until_ms, is_paused=owner is not None, idle=is_idle)
        if owner is not None and record.get(b"be") != NO_ENTRY and self.idle_ms(sequence) < left_ms:
            self.truth.violate(f"{sequence}: has {self.idle_ms(sequence)} ms of its idle time left, not {left_ms}")
        if owner and self.chance.random() < 0.8:
            self.drain(next(executor for executor in self.executors if executor.name == owner))
        elif owner:
            self.next_leader()

    def resume(self) -> None:
        """An operator wants a sequence to go on."""
        self.resume_one(self.chance.choice(self.sequences))

    def resume_one(self, sequence: SequenceId) -> None:
        (resumed,) = self.run(self.scripts.resume([sequence]))
        self.tell(f"an operator resumes {sequence}: {resumed}")
        self.truth.resumed(sequence, is_resumed=resumed)

    # -- executors ----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        name, mark = ExecutorId(f"e{len(self.executors) + 1}"), self.chance.choice(self.marks)
        executor = Executor(self.bench, name, self.recovery, self.marks, mark)
        self.executors.append(executor)
        self.tell(f"{name} joins{mark and ' with load '}{mark}")

    def executor_moves(self) -> None:
        """One of them does something, or all that it can; also one that is lost and has not heard of it."""
        executor = self.chance.choice(self.executors[-4:])
        moves = [
            executor.read_inbox,
            executor.attempt,
            executor.fetch,
            executor.restore,
            executor.run_step,
            *([executor.give_answers] if self.bench.decoupled else []),
            executor.hand_in,
            executor.leave,
        ]
        rare = [executor.leave, executor.reload]
        if self.chance.random() < 0.5:
            self.chance.choice([*moves, *[executor.hand_in] * 2, *rare])()
            return
        for move in moves:
            if move != executor.leave or self.chance.random() < 0.3:
                move()

    # -- leaders ------------------------------------------------------------------------------------------------------

    def next_leader(self) -> None:
        """Another scheduler leads: it fences the one before, and knows nothing but what Redis holds."""
        if self.leader.term:
            self.older.append(self.leader)
        self.leader = Leader(self.leases.next_term())
        self.tell(f"term {self.leader.term} begins")
        self.expire_now(self.leader, [])
        if self.chance.random() < 0.2:
            self.sweep(self.leader)
        for executor in self.executors:
            self.recall(self.leader, executor)
        for sequence in self.sequences:
            record = self.truth.record(sequence)
            if record.get(b"st") == b"l" and any(e.name.encode() == record[b"ow"] for e in self.serving()):
                owner = ExecutorId(record[b"ow"].decode())
                self.leader.slots[sequence] = (owner, int(record[b"sl"]), int(record[b"ep"]))
        for executor in self.executors:
            executor.emptied = False
            self.drain(executor)

    def sweep(self, leader: Leader) -> None:
        """A key was unreadable, though nothing was lost with it: the new leader looks over every record."""
        for executor in self.executors:
            self.drain(executor)
        looked_at = self.run(self.scripts.sweep(self.sequences, LedShard(SHARD, MODEL, leader.term)))
        for sequence, is_sound in zip(self.sequences, looked_at, strict=True):
            self.tell(f"{sequence} is looked over: {is_sound}")
            life = self.truth.current(sequence)
            if bool(is_sound) is not (life is not None and not life.over):
                self.truth.violate(f"{sequence}: was looked over: {is_sound}")

    def serving(self) -> list[Executor]:
        return [executor for executor in self.executors if not executor.lost]

    def lead(self) -> None:
        """The present leader does something."""
        moves = [self.hear] * 6 + [self.assign] * 8 + [self.vacate] * 4 + [self.want_slots] * 2
        moves += [self.lay_out] * 4 + [self.recall]
        moves += [self.look_for_expired] * 2 + [self.reject, self.lose, self.withdraw]
        self.chance.choice(moves)(self.leader)
        self.reclaim_lost(self.leader)

    def older_leader_moves(self) -> None:
        """One whose term is over, and who has not heard of it, decides; it must be refused, and nothing happens."""
        if not self.older:
            return
        older = self.chance.choice(self.older)
        before = {key: repr(self.store.value(key)) for key in self.store.present()}
        for call in self.calls_of(older):
            try:
                reply = self.run(call)
            except Fenced:
                continue
            self.truth.violate(f"a leader of term {older.term} does {call.script} in term {self.leader.term}: {reply}")
        if before != {key: repr(self.store.value(key)) for key in self.store.present()}:
            self.truth.violate(f"a leader of term {older.term} changed something")

    def calls_of(self, leader: Leader) -> list[Call[Any]]:
        """Whatever a leader can do now, as if it knew everything."""
        led = LedShard(SHARD, MODEL, leader.term)
        owner = self.chance.choice(self.executors).name
        calls: list[Call[Any]] = [
            self.scripts.expire(self.sequences, led, tombstone_ms=TOMBSTONE_MS),
            self.scripts.reclaim(owner, led, count=10, tombstone_ms=TOMBSTONE_MS),
            self.scripts.lay_out([(InstanceIndex(0), SlotIndex(0))], owner, VERSION, led),
            self.scripts.recall(owner, led),
        ]
        feed = self.keys.feed(SHARD, MODEL)
        if news := self.do("XRANGE", feed, "-", "+"):
            calls.append(self.scripts.remove([entry for entry, _ in news], feed, led))
        for sequence in self.sequences:
            record = self.truth.record(sequence)
            if entry := record.get(b"be"):
                place = Assignment(sequence, entry.decode(), owner, InstanceIndex(0), SlotIndex(0))
                calls.append(self.scripts.assign([place], led))
                refused = Rejection(sequence, entry.decode(), b"rejected")
                calls.append(self.scripts.reject([refused], led, tombstone_ms=TOMBSTONE_MS))
            if epoch := record.get(b"ep"):
                calls.append(self.scripts.vacate([Vacation(sequence, Epoch(int(epoch)))], led))
                calls.append(self.scripts.pause([Pausing(sequence, 0)], led))
        return calls

    def hear(self, leader: Leader) -> None:
        """Reads feed and starts, from where it was."""
        feed, starts = self.keys.feed(SHARD, MODEL), self.keys.starts(SHARD, MODEL)
        for entry, flat in self.do("XRANGE", feed, f"({leader.feed}", "+"):
            leader.feed, news = entry.decode(), {k.decode(): v.decode() for k, v in pairs(flat)}
            sequence = SequenceId(news["q"])
            if "b" in news:
                waits = leader.waiting.get(sequence)
                if waits is not None and waits.entry == news["b"]:
                    del leader.waiting[sequence]
            elif news["k"] == "t":
                place = ExecutorId(news["x"]), int(news["l"])
                if place in leader.spare:
                    leader.spare.remove(place)
                    leader.slots[sequence] = (*place, int(news["n"]))
            elif news["k"] == "r":
                executor = ExecutorId(news["x"])
                if leader.recalls.get(executor) == int(news["n"]):
                    del leader.recalls[executor]
                    leader.spare = {place for place in leader.spare if place[0] != executor}
            elif sequence in leader.slots and (
                leader.slots[sequence][2] == int(news["e"])
                or (news["k"] == "u" and leader.slots[sequence][2] < int(news["e"]))
            ):
                owner, slot, _ = leader.slots.pop(sequence)
                if news.get("s") == "1":
                    leader.spare.add((owner, slot))
            self.run(self.scripts.remove([entry], feed, LedShard(SHARD, MODEL, leader.term)))
        for entry, flat in self.do("XRANGE", starts, f"({leader.starts}", "+"):
            leader.starts, news = entry.decode(), {k.decode(): v.decode() for k, v in pairs(flat)}
            if news["k"] in "wmr":
                leader.waiting[SequenceId(news["q"])] = Waits(entry.decode(), news["k"])
                leader.slots.pop(SequenceId(news["q"]), None)

    def free(self, leader: Leader) -> list[tuple[ExecutorId, int]]:
        """The slots that are neither taken nor spare, as far as a leader knows."""
        taken = {(owner, slot) for owner, slot, _ in leader.slots.values()} | leader.spare
        return [(e.name, slot) for e in self.serving() for slot in range(self.slots) if (e.name, slot) not in taken]

    def lay_out(self, leader: Leader) -> None:
        """A free slot is laid out."""
        if free := [(name, slot) for name, slot in self.free(leader) if name not in leader.recalls]:
            executor, slot = self.chance.choice(free)
            laid_out = [(InstanceIndex(0), SlotIndex(slot))]
            self.run(self.scripts.lay_out(laid_out, executor, VERSION, LedShard(SHARD, MODEL, leader.term)))
            self.tell(f"{executor}/{slot} is laid out")
            leader.spare.add((executor, slot))

    def recall(self, leader: Leader, executor: Executor | None = None) -> None:
        """What is laid out at an executor is taken back. The leader knows it when it hears of it."""
        name = (executor or self.chance.choice(self.executors)).name
        leader.recalls[name] = self.run(self.scripts.recall(name, LedShard(SHARD, MODEL, leader.term)))
        self.tell(f"the spare slots of {name} are recalled")

    def assign(self, leader: Leader) -> None:
        """Somebody who waits gets a slot that is free."""
        free = self.free(leader)
        if not leader.waiting or not free:
            return
        sequence = self.chance.choice(sorted(leader.waiting))
        waits, (executor, slot) = leader.waiting.pop(sequence), self.chance.choice(free)
        place = Assignment(sequence, waits.entry, executor, InstanceIndex(0), SlotIndex(slot))
        (epoch,) = self.run(self.scripts.assign([place], LedShard(SHARD, MODEL, leader.term)))
        self.tell(f"{sequence} is assigned to {executor}/{slot}: epoch {epoch}")
        if epoch:
            leader.slots[sequence] = (executor, slot, epoch)
            self.truth.assigned(sequence, executor, epoch)

    def vacate(self, leader: Leader) -> None:
        """A sequence is asked for its slot, or moved; one that is paged may get a slot before its next step."""
        if self.chance.random() < 0.1:
            self.move_paged(leader)
        if not leader.slots:
            return
        sequence = self.chance.choice(sorted(leader.slots))
        owner, _, epoch = leader.slots[sequence]
        asked = Vacation(sequence, Epoch(epoch), moving=self.chance.random() < 0.5)
        (code,) = self.run(self.scripts.vacate([asked], LedShard(SHARD, MODEL, leader.term)))
        self.tell(f"{sequence} is asked for its slot, moving: {asked.moving}: {code.name}")
        if code is VacateCode.KEPT:
            return
        del leader.slots[sequence]
        self.truth.taken(sequence)
        if code is VacateCode.UNDRAINED:
            self.drain(next(executor for executor in self.executors if executor.name == owner))

    def move_paged(self, leader: Leader) -> None:
        """A sequence gets a slot without a step, if it is paged."""
        paged = [sequence for sequence in self.sequences if self.truth.record(sequence).get(b"st") == b"p"]
        sequence = self.chance.choice(paged or self.sequences)
        is_paged = sequence in paged
        asked = Vacation(sequence, Epoch(0), moving=True)
        (code,) = self.run(self.scripts.vacate([asked], LedShard(SHARD, MODEL, leader.term)))
        self.tell(f"{sequence} is to have a slot: {code.name}")
        if (code is VacateCode.VACATED) is not is_paged:
            self.truth.violate(f"{sequence}: is paged: {is_paged}, and gets a slot: {code.name}")

    def withdraw(self, leader: Leader) -> None:
        """An executor serves the version no longer: what it owns of it is taken, though it lives."""
        executor = self.chance.choice(self.serving())
        only = self.chance.choice((VERSION, VERSION, "2"))
        # What was taken before must not be heard of as new behind it.
        self.hear(leader)
        # One call: so few sequences are looked at together.
        self.reclaim(leader, executor, lost=False, only=(only,))
        self.drain(executor)
        self.tell(f"{executor.name} serves version {only} no longer")
        if only == VERSION:
            # One that was lost with its state has given its slot back to the spare ones.
            self.recall(leader, executor)
        if left := only == VERSION and self.do("SMEMBERS", self.keys.owned(SHARD, executor.name, MODEL)):
            self.truth.violate(f"{executor.name} serves no version, and owns {left}")

    def look_for_expired(self, leader: Leader) -> None:
        """The reaper's look at what is due."""
        due = self.do("ZRANGEBYSCORE", self.keys.deadlines(SHARD, MODEL), 0, self.bench.now_us // 1000)
        self.expire_now(leader, [SequenceId(name.decode()) for name in due])

    def expire_now(self, leader: Leader, sequences: list[SequenceId]) -> None:
        # Gone, or in its last millisecond.
        idle = [self.is_marker_gone(one) for one in sequences]
        for sequence in sequences:
            self.truth.time_has_come(sequence, self.bench.now_us // 1000)
        call = self.scripts.expire(sequences, LedShard(SHARD, MODEL, leader.term), tombstone_ms=TOMBSTONE_MS)
        for sequence, ended, is_idle in zip(sequences, self.run(call), idle, strict=True):
            self.tell(f"{sequence} expires: {ended}")
            if ended:
                self.truth.expired(sequence, idle=is_idle)

    def is_marker_gone(self, sequence: SequenceId) -> bool:
        return self.idle_ms(sequence) in (-2, 0)

    def idle_ms(self, sequence: SequenceId) -> int:
        """What is left of its idle time; negative if it has none."""
        return self.store.ttl_ms(self.keys.sequence(sequence).idle.encode())

    def reject(self, leader: Leader) -> None:
        """Somebody who waits for its first slot has waited for too long."""
        waiting = [sequence for sequence, waits in sorted(leader.waiting.items()) if waits.kind == "w"]
        if not waiting:
            return
        sequence = self.chance.choice(waiting)
        one = Rejection(sequence, leader.waiting.pop(sequence).entry, b"rejected %d" % self.bench.calls)
        (steps,) = self.run(self.scripts.reject([one], LedShard(SHARD, MODEL, leader.term), tombstone_ms=TOMBSTONE_MS))
        self.tell(f"{sequence} is rejected: {steps}")
        if steps >= 0:
            self.truth.refused(sequence, one.reply, steps)

    def want_slots(self, _: Leader) -> None:
        """Commits are to free a slot."""
        self.do("SET", self.keys.wanted_slots(SHARD, MODEL, VERSION), 1, "PX", 50)

    def lose(self, leader: Leader) -> None:
        """An executor's lease has ended; it may well live."""
        executor = self.chance.choice(self.serving())
        executor.lost = True
        self.tell(f"{executor.name} is lost")
        leader.slots = {s: place for s, place in leader.slots.items() if place[0] != executor.name}
        leader.spare = {place for place in leader.spare if place[0] != executor.name}

    def reclaim_lost(self, leader: Leader) -> None:
        """Takes from lost executors what they own, in pieces; perhaps not all of it before somebody else leads."""
        for executor in self.executors:
            if executor.lost and not executor.emptied and self.chance.random() < 0.5:
                counts = self.chance.random() < 0.7
                while self.reclaim(leader, executor, lost=counts):
                    if self.chance.random() < 0.3:
                        return
                self.drain(executor)
                executor.emptied = True

    def reclaim(self, leader: Leader, executor: Executor, *, lost: bool, only: Sequence[str] = ()) -> bool:
        """One call: it takes any sequence, or one with a step in the inbox. False if there are no more.

        only  all of these versions
        """
        owned = self.keys.owned(SHARD, executor.name, MODEL)
        before = self.do("SMEMBERS", owned)
        looked_at = "" if only else self.chance.choice((executor.looked_at, ""))
        call = self.scripts.reclaim(
            executor.name,
            LedShard(SHARD, MODEL, leader.term),
            count=1,
            tombstone_ms=TOMBSTONE_MS,
            after=looked_at,
            only=only,
            lost=lost,
        )
        taken, entries = self.run(call)
        after = self.do("SMEMBERS", owned)
        self.truth.losses += taken if lost else 0
        assert not (only and entries), "a second call would be needed"
        if entries:
            drain = self.scripts.drain(executor.name, shard=SHARD, after=looked_at, count=entries)
            executor.looked_at, _, _ = self.run(drain)
        for name in before:
            if name not in after:
                sequence = SequenceId(name.decode())
                self.tell(f"{sequence} is taken from {executor.name}")
                self.truth.taken(sequence, lost=True)
                # Elsewhere it has been before, and the end of that is still to be heard of.
                if sequence in leader.slots and leader.slots[sequence][0] == executor.name:
                    del leader.slots[sequence]
        return bool(taken or entries)

    def drain(self, executor: Executor) -> None:
        """Moves what is not its own on."""
        after, looked_at = "0-0", 2
        while looked_at == 2:
            call = self.scripts.drain(executor.name, shard=SHARD, after=after, count=2, alive=not executor.lost)
            after, looked_at, _ = self.run(call)

    # -- time and the end ---------------------------------------------------------------------------------------------

    def time_passes(self) -> None:
        if self.bench.steps_back and self.chance.random() < 0.2:
            self.bench.set_back(self.chance.choice((50, IDLE_MS, 5_000, 5_000, 300_000)))
        elif self.bench.steps_ahead and self.chance.random() < 0.2:
            self.bench.set_ahead(self.chance.choice((50, 50, 5 * IDLE_MS, 60_000, 10 * 3_600_000)))
        else:
            self.bench.now_us += self.chance.choice((10, 10, 100, IDLE_MS + 1)) * 1000
            self.tell("time passes")
        if self.chance.random() < 0.5:
            self.look_for_expired(self.leader)

    def settle(self) -> None:
        """Everybody does his part until all is answered; then all of it ends, and nothing may be left. Redis' clock is
        where it was before it was set back: until then, nobody is promised the end of an idle time.
        """
        self.bench.now_us = max(self.bench.now_us, self.bench.latest_us)
        for executor in self.executors:
            executor.hand_in_all()
        for sequence in self.sequences:
            self.resume_one(sequence)
        for _ in range(ROUNDS_MAX):
            self.turn()
            if self.truth.violations:
                return
            if all(life.over or life.is_idle for life in self.truth.lives.values()):
                break
        else:
            stuck = [(life.sequence, life) for life in self.truth.lives.values() if not (life.over or life.is_idle)]
            self.truth.violate(f"never answered: {stuck}")
            return
        self.work.settle()
        self.truth.check_answers(self.heard(), all_kept=self.bench.keeps_all)
        # A pause has kept what was left of an idle time by a clock that was behind.
        self.bench.now_us += (IDLE_MS + self.bench.back_ms + 1) * 1000
        for _ in range(2):
            self.look_for_expired(self.leader)
            self.turn()
        for executor in self.executors:
            # By chance it may have begun from the beginning in both turns, and not have come to the end.
            executor.read_inbox(count=1000)
            if executor.was_late:
                # It does not know which of its entries are those of an earlier sequence of an id; a leader does.
                self.drain(executor)
        self.truth.check()
        if self.leader.slots or self.leader.waiting:
            self.truth.violate(f"all is over, and the leader knows of {self.leader.slots} and {self.leader.waiting}")
        self.check_counts()
        self.bench.now_us += (TOMBSTONE_MS + 1) * 1000
        for gateway in GATEWAYS:
            self.do("DEL", self.keys.replies(SHARD, gateway))
        self.truth.violations += leftovers(self.store)

    def turn(self) -> None:
        """One round of everybody. Time passes as well: who waits may need the slot of one that is idle."""
        self.bench.now_us += 20_000
        self.look_for_expired(self.leader)
        self.hear(self.leader)
        for executor in self.executors:
            if executor.lost and not executor.emptied:
                while self.reclaim(self.leader, executor, lost=False):
                    pass
                self.drain(executor)
                executor.emptied = True
        self.hear(self.leader)
        if sum(not executor.lost for executor in self.executors) < EXECUTORS:
            self.join()
        if self.leader.spare and not self.free(self.leader):
            for executor in self.serving():
                self.recall(self.leader, executor)
            self.hear(self.leader)
        for _ in self.sequences:
            self.assign(self.leader)
        for executor in self.executors:
            executor.read_inbox()
            executor.attempt()
            executor.fetch()
            executor.restore()
            executor.run_step()
            executor.hand_in_all()
        self.truth.check()

    def heard(self) -> dict[Caller, list[bytes]]:
        """What every caller was told, but for how long it waited for a slot."""
        heard: dict[Caller, list[bytes]] = defaultdict(list)
        for gateway in GATEWAYS:
            for _, flat in self.do("XRANGE", self.keys.replies(SHARD, gateway), "-", "+"):
                for token, reply in pairs(flat):
                    if b"sequence_waited_ms" in reply:
                        continue
                    heard[gateway, token.decode()].append(reply)
        return heard

    def check_counts(self) -> None:
        """Statistics: the model's runs, and steps that were answered by it."""
        sums = self.run(self.scripts.total([LOAD], shard=SHARD, at_most=100_000)).sums[0]
        if sums.get("batch:1:count", 0) != self.truth.executions:
            self.truth.violate(f"{sums.get('batch:1:count', 0)} executions counted, not {self.truth.executions}")
        committed = sum(life.committed - life.copied for life in self.truth.lives.values())
        if sums.get("success_count", 0) != committed:
            self.truth.violate(f"{sums.get('success_count', 0)} steps counted, not {committed}")


def fuzz(seed: int) -> Result:
    """Runs one seed."""
    run = Fuzz(seed)
    try:
        run.play(MOVES)
    except (AssertionError, StoreError, Fenced) as error:
        run.truth.violate(f"{type(error).__name__}: {error}")
    lines = [*run.bench.lines, *(f"VIOLATION: {text}" for text in run.truth.violations)]
    return Result(
        seed=seed,
        violations=run.truth.violations,
        lines=lines,
        digest=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        events=run.bench.calls,
        answers=sum(step.reply is not None for life in run.truth.lives.values() for step in life.steps.values()),
        steps=sum(life.committed for life in run.truth.lives.values()),
        virtual_s=(run.bench.now_us - BEGIN_US) / 1e6,
    )


def _changed(submission: Submission, **fields: Any) -> Submission:
    return msgspec.structs.replace(submission, **fields)

"""Faults that are put into the mesh on purpose: a simulation that does not find them proves nothing.

A mutant changes the text of scripts, or a piece of a service. That what it changes is still there is checked when the
mutant is used, so that none of them goes blind when the code changes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence, Sized
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from executor.calls.client import CallClient
from executor.calls.protocol import request_of
from executor.core.actions import BatchMember
from executor.core.decide import conclude
from executor.core.state import OwnedSequence, OwnedSequences
from executor.engine.python.calls import ModelCall
from executor.sequences.committer import CommitOwner, _Group
from executor.sequences.open_steps import OpenSteps
from executor.workers.open_rows import OpenRow
from gateway.requests.allowances import Allowance, Allowances
from gateway.requests.ensembles.in_order import AnswersInOrder, Give, RunAnswer
from gateway.requests.waiting import Answer, PendingRequest
from scheduler.core.actions import Action, WantSlots
from scheduler.core.backlog import Entry
from scheduler.core.decide import LOOK_MS_MAX
from scheduler.core.events import Looked
from scheduler.core.slots import InstanceSlots, SlotAddress
from scheduler.core.state import LeaderState, Lent
from scheduler.effects import EffectPerformer
from scheduler.ingest import StreamEntry
from scheduler.leader import Leader
from scheduler.lent_slots import LentSlots
from shared.contract.errors import MeshError
from shared.contract.forecast import Outlook
from shared.contract.ids import ExecutorId, ShardId, SlotIndex
from shared.contract.messages import ReplyMessage
from shared.store import libraries
from shared.store.script_values import StepCommit


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one `.lua` file. before: a regular expression"""

    file: str
    before: str
    after: str = ""

    def applied(self, text: str) -> str:
        """The text with the change. A fault that cannot be put in any more must not look like one that is found."""
        changed, times = re.subn(self.before, self.after, text)
        assert times == 1, f"{self.file}.lua has changed: {self.before!r} stands there {times} times"
        return changed


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault. story: what goes wrong with it; code: what stands in the place of what.

    scripts_only  only random calls of the scripts are to find it: whole meshes hardly ever come into that situation
    only          only the meshes of this flag are to find it
    late          only the drill of that name is to find it: its answers are right, and late
    """

    name: str
    story: str
    edits: tuple[Edit, ...] = ()
    code: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scripts_only: bool = False
    only: str = ""
    late: str = ""

    @contextmanager
    def applied(self) -> Generator[None]:
        """While it lasts, the mesh has this fault."""
        text, texts = libraries.file_text, dict[str, str]()
        for edit in self.edits:
            texts[edit.file] = edit.applied(texts.get(edit.file) or text(edit.file))

        def edited(name: str) -> str:
            return texts.get(name) or text(name)

        with ExitStack() as stack:
            stack.enter_context(patch("shared.store.libraries.file_text", edited))
            for target, replacement in self.code.items():
                stack.enter_context(patch(target, replacement))
            yield


async def never_behind(*_: object) -> bool:
    """In the place of `holdings.is_behind`."""
    return False


def always_known(*_: object) -> bool:
    """In the place of `Dispatch._is_known`."""
    return True


def grouped_by_shard(taken: Iterable[tuple[CommitOwner, ShardId, StepCommit, int]]) -> list[_Group]:
    """In the place of `committer._grouped`."""
    groups: dict[ShardId, _Group] = {}
    for owner, shard, step, size in taken:
        group = groups.setdefault(shard, _Group(owner, shard, []))
        group.steps.append(step)
        group.size += size
    return list(groups.values())


async def inbox_before_sequences(self: EffectPerformer, executor: ExecutorId) -> bool:
    """In the place of `EffectPerformer._reclaim_part`: what was in the inbox still belongs to the lost executor."""
    await self.drain(executor, alive=False)
    shards = self._keys.shards
    while any(taken for taken, _ in await self._run([self._taking(executor, shard, lost=True) for shard in shards])):
        pass
    return True


def delivered_without_waking(self: Leader, stream: str, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
    """In the place of `Leader.deliver`."""
    self._positions[stream] = entries[-1][0].decode()
    self._mailbox += [StreamEntry(self.streams[stream], entry, fields) for entry, fields in entries]


async def nothing_wanted(self: EffectPerformer, wants: Sequence[WantSlots]) -> None:
    """In the place of `EffectPerformer._want`."""


def replays_no_longer(_client: CallClient, call: ModelCall, *, is_patient: bool) -> bool:
    """In the place of `CallClient._goes_on`."""
    return is_patient and call.replayed is None


@asynccontextmanager
async def at_any_time(*_: object) -> AsyncGenerator[None]:
    """In the place of `CallClient.turn`."""
    yield


async def for_all_answers(call: ModelCall, _first_answer: int = 0) -> bytes:
    """In the place of `client.encoded_request`, of a stream of answers."""
    return request_of(call, _first_answer and 1)


def looked_for_rarely(state: LeaderState, event: Looked) -> list[Action]:
    """In the place of `decide.looked`: whatever deadlines were found."""
    state.look_ms = event.now_ms + LOOK_MS_MAX
    return []


def laid_out_and_free(self: InstanceSlots, _shard: ShardId) -> SlotIndex:
    """As `InstanceSlots.lay_out_lowest`, but the leader goes on giving the slot."""
    return self._lowest()


def handed_on(self: PendingRequest, message: ReplyMessage, take: Callable[[Answer | MeshError], None]) -> bool:
    """In the place of `PendingRequest._one_of_many`."""
    if message.more:
        take(self._answer(message))
    else:
        self._end(message)
    return message.more


def taken_for_unchanged(before: Sized, after: Sized) -> int:
    """In the place of `written_states.leading_equal`: a state that grows is taken for one that changes nowhere else."""
    return min(len(before), len(after))


def opened_with_each_pass(
    self: OpenSteps, member: BatchMember, opened: Callable[..., OpenRow[BatchMember]] = OpenSteps._opened
) -> OpenRow[BatchMember]:
    """In the place of `OpenSteps._opened`."""
    self._by_sequence.pop(member.owned.sequence, None)
    return opened(self, member)


def kept_whoever_sits_there(
    self: OpenRow[Any], last: Any, keep_state: Callable[[], None] | None = None, end: Callable[..., None] = OpenRow.end
) -> None:
    """In the place of `OpenRow.end`: the state in the slot moves on, although the slot may be another sequence's."""
    if self.is_over and keep_state is not None:
        keep_state()
    end(self, last, keep_state)


async def nothing_claimed(*_: object) -> None:
    """In the place of `WorkModel.claim_from`."""


def due_at_once(entry: Entry, _timeout_us: int) -> int:
    """In the place of `expiry.deadline_ms`."""
    return entry.ms


def concluded_in_the_midst(
    state: OwnedSequences, owned: OwnedSequence, conclude: Callable[..., None] = conclude
) -> None:
    """In the place of `decide.conclude`: the next step of the sequence goes on with the passes of this one."""
    passes = owned.passes
    conclude(state, owned)
    owned.passes = passes


def given_as_they_come(self: AnswersInOrder) -> Give:
    """In the place of `AnswersInOrder.add`, where each run has one answer."""
    run = deque[RunAnswer]()
    self._runs.append(run)

    def give(answer: RunAnswer) -> None:
        self._runs.remove(run)
        self._give(RunAnswer(answer.outcome, self._is_concluded and not self._runs))

    return give


async def any_term(*_: object) -> None:
    """In the place of `rebuild.check_new`."""


def without_digest(*_: object) -> bytes:
    """In the place of `step_digest`."""
    return b""


def never_unfit(_: Exception) -> bool:
    """In the place of `redis_py.is_unfit`."""
    return False


def nothing_lent(_: LentSlots, shards: Iterable[ShardId]) -> Lent:
    """In the place of `LentSlots.of`."""
    return dict.fromkeys(shards, frozenset[SlotAddress]())


def beyond_at_once(_: Outlook, max_ms: int) -> bool:
    """In the place of `slot_waits.is_beyond`."""
    return bool(max_ms)


def decided_and_counted(self: Allowances, allowance: Allowance, refusal: MeshError | None) -> None:
    """In the place of `Allowances._decide`."""
    self._waiting -= refusal is None
    allowance.waiting.popleft()(refusal)


MUTANTS = (
    Mutant(
        "spare twice",
        "submit leaves a spare slot among the others when it gives it to a new sequence",
        (Edit("submit", r"redis\.call\('HSET', spares, 'v:' \.\. version, string\.sub.*\)\n", "\n"),),
    ),
    Mutant(
        "laid out and given",
        "the leader gives slots to those who wait that it has laid out for new sequences",
        code={"scheduler.core.slots.InstanceSlots.lay_out_lowest": laid_out_and_free},
    ),
    Mutant(
        "spare of the dead",
        "reclaim leaves the spare slots of a dead executor, and new sequences begin there when it has taken all others",
        (Edit("reclaim", r"if not only then redis\.call\('DEL', spares_of\(ARGV\[2\], MODEL\)\) end"),),
    ),
    Mutant(
        "epoch",
        "an owner that lost its sequence still commits",
        (
            Edit("commit", r"if epoch ~= step.epoch or got\[5\] ~= EXECUTOR then", "if false then"),
            Edit("commit", r"epoch ~= ARGV\[at\] or owner ~= EXECUTOR or "),
        ),
    ),
    Mutant(
        "committed",
        "a commit that is sent again is made again",
        (Edit("commit", r"if before then return 0 end"),),
    ),
    Mutant(
        "left",
        "an executor pages a sequence that has an open step",
        (Edit("page", r"got\[4\] ~= got\[5\] or "),),
        scripts_only=True,
    ),
    Mutant(
        "fence",
        "a leader that lost its model goes on deciding",
        (Edit("leader", r"if seen > term then", "if false then"),),
        scripts_only=True,
    ),
    Mutant(
        "two leaders",
        "a scheduler takes the lead of a model that another one has",
        (Edit("lead", r"if other and other ~= ARGV\[1\] and [^\n]*"),),
        scripts_only=True,
    ),
    Mutant(
        "needless reload",
        "a load ends sequences of a load of the same files",
        (Edit("reload", r"and got\[6\] ~= ARGV\[3\] "),),
        scripts_only=True,
    ),
    Mutant(
        "marker",
        "a sequence ends at the first look, although its idle time is not over",
        (Edit("expire", r"if left > 0 then", "if false then"),),
    ),
    Mutant(
        "known request",
        "a request that is sent again runs again",
        (Edit("submit", r"if named then return repeated\(.*\) end"),),
    ),
    Mutant(
        "request that follows",
        "a request that is sent again is taken for the next step, without a judgement",
        (Edit("submit", r"string\.find\(recent, digest, 1, true\) or "),),
    ),
    Mutant(
        "idle, and followed",
        "a step that comes after the idle time is taken for the next one, without a judgement",
        (Edit("submit", r"or taken == done and redis\.call\('PERSIST', idle_of\(sid\)\) == 0"),),
        scripts_only=True,
    ),
    Mutant(
        "unnamed request",
        "a gateway sends again what the mesh cannot recognise",
        code={"gateway.requests.waiting.PendingRequest.repeatable": property(lambda _: True)},
    ),
    Mutant(
        "lost reply",
        "who asks again for a step in flight is not answered",
        (Edit("commit", r"if step.joined then", "if false then"),),
    ),
    Mutant(
        "lone caller",
        "a step is concluded as if its first caller were the only one",
        (Edit("commit", r"void or joined or cancelled", "void or cancelled"),),
    ),
    Mutant(
        "lost step",
        "steps in a dead executor's inbox are lost",
        (Edit("drain", r"elseif got\[1\] == 'w' or got\[1\] == 'm' [^\n]*then", "elseif false then"),),
    ),
    Mutant(
        "answered twice",
        "a new owner writes the answers again that the one before has written",
        (Edit("answers", r"if nth > count then", "if true then"),),
        scripts_only=True,
    ),
    Mutant(
        "answers of another",
        "an owner that lost its sequence still writes answers",
        (Edit("answers", r"got\[1\] ~= 'l' or tonumber\(got\[2\]\) ~= step.epoch or got\[3\] ~= EXECUTOR or ", ""),),
    ),
    Mutant(
        "kept answers",
        "who asks again for an open step hears only the answers to come",
        (Edit("submit", r"if join\(step, n, record\) then", "if join(step, n, record) and false then"),),
    ),
    Mutant(
        "heard twice",
        "a gateway hands on again what its client has had, when answers come again",
        code={"gateway.requests.waiting.PendingRequest._one_of_many": handed_on},
    ),
    Mutant(
        "request answered twice",
        "an executor writes the answers of a request again that the one before has written",
        (Edit("work_answers", r"if nth > meta.sent then", "if true then"),),
        scripts_only=True,
    ),
    Mutant(
        "request of another",
        "an executor writes answers of a request that another one runs",
        (Edit("work_answers", r"redis.call\('HGET', keys.held, id\) == ARGV\[1\] and ", ""),),
        scripts_only=True,
    ),
    Mutant(
        "finished by another",
        "an executor gives the last answer to a request that another one runs",
        (Edit("work_finish", r"holders\[i\] == ARGV\[1\]", "holders[i]"),),
        scripts_only=True,
    ),
    Mutant(
        "lost too often",
        "a request goes back to its queue however many executors were lost with it",
        (Edit("work_requeue", r"if meta.lost >= lost_max then", "if false then"),),
        scripts_only=True,
    ),
    Mutant(
        "order of ends",
        "answers leave in the order in which they are computed, although it was to be that of arrival",
        (Edit("work_finish", r"if ordered and redis.call\('ZSCORE', keys.order, id\) then", "if false then"),),
        scripts_only=True,
    ),
    Mutant(
        "held back for nobody",
        "answers go on waiting for a request that was given up",
        (Edit("work", r"if meta.ordered then send_ordered\(keys\) end"),),
        scripts_only=True,
    ),
    Mutant(
        "held back, and unknown",
        "a request that is sent again while its answer is held back is run again",
        (Edit("work_enqueue", r" or ordered and redis.call\('HEXISTS', keys.early, id\) == 1"),),
        scripts_only=True,
    ),
    Mutant(
        "level",
        "a level of a queue takes one request more than it may",
        (Edit("work_enqueue", r"in_level\(level, 0\) >= own", "in_level(level, 0) > own"),),
        scripts_only=True,
    ),
    Mutant(
        "first answer for ever",
        "the cache keeps the answer that was stored first under a name",
        (
            Edit(
                "cache",
                r"redis.call\('HSET', cache.entries, name, reply\)",
                "redis.call('HSETNX', cache.entries, name, reply)",
            ),
            Edit("cache", r"redis.call\('HDEL', cache.entries, name\)\n", "\n"),
        ),
        scripts_only=True,
    ),
    Mutant(
        "stale state",
        "a new owner goes on from an older state than the last one",
        (Edit("commit", r"if from > to then return end", "if from > to or name % 2 == 0 then return end"),),
    ),
    Mutant(
        "journal of another run",
        "a START goes on in the journal of the run before it",
        (Edit("commit", r"redis.call\('UNLINK', journal\)"),),
    ),
    Mutant(
        "journal for ever",
        "a journal stays when its sequence is forgotten",
        (Edit("common", r"redis.call\('PEXPIRE', journal_of[^\n]*"),),
        scripts_only=True,
    ),
    Mutant(
        "undrained pause",
        "steps that a paused sequence's owner had are lost",
        (Edit("pause", r"return state == 'l' and [^\n]* or ''", "return ''"),),
    ),
    Mutant(
        "pause in line",
        "a sequence that is paused while it waits for a slot gets one",
        (Edit("pause", r"redis.call\('XDEL', STARTS, waits\)"),),
    ),
    Mutant(
        "restless pause",
        "a step that is accepted in a pause ends it",
        (Edit("submit", r"state == 'p' and return_from_page", "state ~= 'w' and return_from_page"),),
    ),
    Mutant(
        "kept slot",
        "sequences give up their slots though their model's configuration forbids it",
        code={"shared.contract.model_config.ModelConfig.pageable": property(lambda config: config.state_in_mesh)},
    ),
    Mutant(
        "kept slot at takeover",
        "an idle sequence whose owner is lost gets no other slot though it was to keep one",
        (Edit("reclaim", r"if accepted == committed and got\[9\] then", "if accepted == committed then"),),
    ),
    Mutant(
        "slot",
        "nobody hears of a sequence that has ended, and its slot stays taken",
        (Edit("common", r"redis.call\('XADD', keys.feed, [^\n]*'k', kind, 's', spare\)"),),
    ),
    Mutant(
        "owned",
        "a sequence that has ended stays among those that its owner owns",
        (Edit("common", r"redis.call\('SREM', keys.owned, sid\)"),),
    ),
    Mutant(
        "tenant",
        "a sequence that is over still counts for its tenant",
        (Edit("common", r"leave_tenant\(keys.record, sid\)\n  (?=redis.call\('ZREM', keys.deadlines)"),),
    ),
    Mutant(
        "untried",
        "a suspected sequence is given up though it was never tried alone: it lay beside the one that ends its owners",
        (Edit("reclaim", r"if suspicion\(got\[1\], step\) and got\[2\] ~= epoch then return end"),),
        only="--vary",
    ),
    Mutant(
        "grown alone",
        "of a state that has grown only what is behind its former end is written, though it has changed before it",
        code={"executor.sequences.written_states.leading_equal": taken_for_unchanged},
        only="--vary",
    ),
    Mutant(
        "late in another's slot",
        "an answer that comes behind its batch moves the state of the sequence on that has the slot by then",
        code={"executor.workers.open_rows.OpenRow.end": kept_whoever_sits_there},
        only="--vary",
    ),
    Mutant(
        "work of the dead",
        "nobody puts the stateless requests back that a lost executor held",
        code={"executor.stateless.work_model.WorkModel.claim_from": nothing_claimed},
        only="--vary",
    ),
    Mutant(
        "numbered by pass",
        "the answers of each pass of an iterative decoupled model are counted from one",
        code={"executor.sequences.open_steps.OpenSteps._opened": opened_with_each_pass},
        only="--vary",
    ),
    Mutant(
        "passes kept",
        "the next request of a sequence to an iterative model goes on with the passes of the one before it",
        code={"executor.core.decide.conclude": concluded_in_the_midst},
        only="--vary",
    ),
    Mutant(
        "impatient",
        "a sequence whose step has a timeout is refused at once when it waits for a slot",
        code={"scheduler.core.expiry.deadline_ms": due_at_once},
        only="--vary",
    ),
    Mutant(
        "late in the midst",
        "a stateless request whose timeout ends is refused though an executor runs it",
        (Edit("work_withdraw", r"if meta and not is_held\n[^\n]* then", "if meta then"),),
        only="--vary",
    ),
    Mutant(
        "orphan in use",
        "a sequence is orphaned with a connection that was closed, though its client uses another one",
        (Edit("orphan", r" or string.match\(got\[1\] or '', '%S\+ %S\+\$'\) [^\n]*token then", " then"),),
        only="--ask",
    ),
    Mutant(
        "orphan for good",
        "a sequence whose client is back over another connection keeps the short idle time of an orphan",
        (Edit("submit", r"redis.call\('PEXPIRE', step.idle, math.max\(1, tonumber\(record.orphaned\)[^\n]*"),),
        only="--ask",
    ),
    Mutant(
        "overslept orphan",
        "nobody tells a leader that the idle time of a sequence is cut when its client leaves",
        (Edit("orphan", r"look_by\(sid, clock_ms\(\) \+ grace_ms\)"),),
        late="left sequences",
    ),
    Mutant(
        "whichever run",
        "a client that ends a run ends the next one of its sequence, too",
        (Edit("end", r"if run ~= '' and run ~= [^\n]* then return 0 end"),),
        only="--ask",
    ),
    Mutant(
        "untold wait",
        "nobody tells a caller how long it has waited for its slot",
        (Edit("assign", r"if has\(number\(flags\), TOLD\) then[^\n]*"),),
        only="--ask",
    ),
    Mutant(
        "guessed wait",
        "a START is refused that may well get its slot in time",
        code={"gateway.requests.exchange.slot_waits.is_beyond": beyond_at_once},
        only="--ask",
    ),
    Mutant(
        "one too fast",
        "a tenant may send a request more than its rate each time that it asks",
        (Edit("draw", r"math.floor\(\(most - full\) / each\)", "1 + math.floor((most - full) / each)"),),
        only="--ask",
    ),
    Mutant(
        "one too many",
        "a tenant may have a sequence more than its limit",
        (Edit("submit", r"(>= most then\n    clear)", "> most then\n    clear"),),
        only="--ask",
    ),
    Mutant(
        "refused, and in flight",
        "a gateway counts requests of tenants as in flight that were refused",
        code={"gateway.requests.allowances.Allowances._decide": decided_and_counted},
        only="--ask",
    ),
    Mutant(
        "newer than the store",
        "an executor goes on from states and steps that the store has lost",
        code={"executor.lease.registration.is_behind": never_behind},
        only="--lose",
    ),
    Mutant(
        "waits in vain",
        "a gateway waits on for a step that the store has lost",
        code={"gateway.requests.exchange.dispatch.Dispatch._is_known": always_known},
        only="--lose",
    ),
    Mutant(
        "finishes nothing",
        "a store without memory makes no step final, and so has none again",
        code={"shared.store.libraries.FINISHING": libraries.FINISHING - {"commit"}},
        only="--refuse",
    ),
    Mutant(
        "not serving",
        "a store that cannot serve now is taken for one that refuses this command",
        code={"shared.store.connections.redis_py.is_unfit": never_unfit},
        only="--refuse",
    ),
    Mutant(
        "lent and given",
        "while a shard is away its sequences' slots are given to others",
        code={"scheduler.lent_slots.LentSlots.of": nothing_lent},
        only="--cluster",
    ),
    Mutant(
        "term given twice",
        "the node that counts terms has lost its newest one, and two schedulers lead in it",
        code={"scheduler.service.check_new": any_term},
        only="--lose-node",
    ),
    Mutant(
        "latest caller",
        "a step that is sent through two gateways at once is answered at the one that came later",
        (
            Edit(
                "commit", r"if step.gateway ~= '' then answer", "if step.gateway ~= '' and not step.joined then answer"
            ),
        ),
        only="--chain",
    ),
    Mutant(
        "unknown to its ensemble",
        "a step that is sent again to an ensemble runs again in the first of its models",
        code={"gateway.requests.ensembles.runs.step_digest": without_digest},
        only="--chain",
    ),
    Mutant(
        "as they come",
        "answers of what stands behind a decoupled model of an ensemble leave in the order in which they are computed",
        code={"gateway.requests.ensembles.in_order.AnswersInOrder.add": given_as_they_come},
        only="--chain",
    ),
    Mutant(
        "called late",
        "a START that a model calls for comes late, and begins its sequence again",
        (Edit("submit", r"if has\(flags, NAMED\) and follows then return n end"),),
        only="--calls",
    ),
    Mutant(
        "replay fails",
        "a step that is replayed takes a passing error for the answer to its call",
        code={"executor.calls.client.CallClient._goes_on": replays_no_longer},
        only="--calls",
    ),
    Mutant(
        "calls overtake",
        "the calls of a step to one sequence are made side by side, and arrive in any order",
        code={"executor.calls.client.CallClient.turn": at_any_time},
        only="--calls",
    ),
    Mutant(
        "called for all again",
        "a call whose gateway is gone asks the next one for the answers that its model has had, too",
        code={"executor.calls.client.encoded_request": for_all_answers},
        only="--calls",
    ),
    Mutant(
        "told to another's leader",
        "an executor makes steps of several models final in one call, as if they were of the first one's",
        code={"executor.sequences.committer._grouped": grouped_by_shard},
        only="--beside",
    ),
    Mutant(
        "inbox first",
        "steps in a lost executor's inbox wait until it is forgotten",
        code={"scheduler.effects.EffectPerformer._reclaim_part": inbox_before_sequences},
        late="killed executor",
    ),
    Mutant(
        "drowsy leader",
        "a leader reads of a new sequence and sleeps on until its next tick",
        code={"scheduler.leader.Leader.deliver": delivered_without_waking},
        late="nothing",
    ),
    Mutant(
        "slots not wanted",
        "a sequence keeps its slot as its step ends, and is asked for it again later",
        code={"scheduler.effects.EffectPerformer._want": nothing_wanted},
        late="busy turns",
    ),
    Mutant(
        "reaper",
        "idle sequences are looked for too rarely",
        code={"scheduler.core.decide.looked": looked_for_rarely},
        late="turns",
    ),
)

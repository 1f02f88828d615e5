"""Stories of the core: text files of commands and exact actions.

A line that begins with `>` is a command, the lines below it are what the core wants done, `#` tells the story.
REWRITE_TRANSCRIPTS=1 writes the files anew from what the core does; the diff is then to be reviewed.

    > joins e1 1:1x2p           its sequences may be paged
    > joins e1 1:2x4 2:1x1      executor e1 serves version 1 with 2 instances of 4 slots, and version 2
    > lost e1                   its lease has ended, or it is leaving
    > waits a 100-0@2           sequence a is new: starts entry 100-0 of shard 2
    > waits a v2 100-0 50ms     ... of version 2, with a timeout
    > moves a 100-0             sequence a comes from a lost executor
    > returns a 100-0           sequence a was paged, and has a step again
    > allows a 500              a has less idle time from now on, and may be due at 500 ms
    > patience a 100-0 500      a, waiting there, must have its slot by 500 ms: a later step of it waits less long
    > cancelled a 100-0         a does not wait there any more: a caller has gone
    > expired a 100-0           a does not wait there any more: its idle time ended between two owners
    > paused a 100-0            a does not wait there any more: an operator has paused it
    > assigned a 7              Redis gave a the epoch 7 (0: it did not wait any more), for its latest entry
    > over a 7                  a, of epoch 7, has ended; `> over a 7 spare`: its slot is a spare one
    > unreadable a 7            a's record could not be read: whatever epoch up to 7 it had is over
    > epochs 20                 rebuilding: the newest epoch
    > took a e1/1/0/3 7         new sequence a took this spare slot, in epoch 7
    > recall e1 8               e1's spare slots were recalled; the feed will say so under the number 8
    > recalled e1 8             the feed says so
    > spares 4                  at most 4 slots of an executor and version are laid out from now on; none before
    > paged a 7                 a, of epoch 7, gave up its slot with a commit
    > vacated a 7 yes           a was asked for its slot, in epoch 7, and has given it up, or (no) keeps it
    > found a e1/1/0/3 7        rebuilding: a holds this slot
    > turn 900                  a turn of the leader begins, at 900 ms
    > reclaimed e1 part         some of e1's sequences were taken (all: it has none any more)
    > forgotten e1
    > out a 7                   a, of epoch 7, was taken out of its slot to be moved; `> kept a 7`: it was not
    > wish a e2 300-0           an operator wants a on e2 (any: wherever but here), by entry 300-0
    > pauses a 900 300-0        an operator wants a to run nothing until 900 ms, by entry 300-0
    > closes e1 1:2x4           e1 gives no slot of version 1 any more
    > tick 1000
    > state                     what the leader has in mind
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.core import invariants
from scheduler.core.actions import (
    Action,
    Assign,
    Dismiss,
    Forget,
    LayOut,
    LookAtIdle,
    LookForExpired,
    MoveOut,
    Pause,
    Publish,
    Recall,
    Reclaim,
    ReclaimPart,
    Reject,
    Vacate,
    WantSlots,
)
from scheduler.core.backlog import Entry
from scheduler.core.decide import UNREADABLE, decide, is_due
from scheduler.core.events import (
    Assigned,
    ClockRead,
    EpochsFound,
    Event,
    ExecutorLost,
    ExecutorSeen,
    ForecastAsked,
    Forgotten,
    IdleSeen,
    IdleTimeCut,
    Looked,
    MovedOut,
    MoveWished,
    PatienceLowered,
    PauseWished,
    RecallSent,
    Reclaimed,
    SequenceFound,
    SequenceOver,
    SequenceWaits,
    SparesRecalled,
    SpareTaken,
    Tick,
    Vacated,
    WaitEnded,
)
from scheduler.core.slots import OfferedVersion, SlotAddress
from scheduler.core.state import LeaderState, Policy
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, ShardId, SlotIndex
from tests.scheduler.state_view import view

FOLDER = Path(__file__).parents[2] / "transcripts" / "scheduler"
FILES = sorted(FOLDER.glob("*.txt"))
rewrite = os.environ.get("REWRITE_TRANSCRIPTS") == "1"


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_core_does_exactly_what_the_transcript_says(file: Path) -> None:
    told = file.read_text()
    happened = replay(told)
    if rewrite:
        file.write_text(happened)

    assert told == happened


def test_there_are_transcripts() -> None:
    assert {
        "assignment",
        "backlog",
        "cancellation",
        "direct",
        "oldest",
        "expiry",
        "looks",
        "takeover",
        "late",
        "rebuild",
        "paging",
        "balance",
        "move",
        "forecast",
        "spares",
        "recall",
    } <= {file.stem for file in FILES}


def replay(told: str) -> str:
    """The transcript with what the core really does after each command."""
    state = LeaderState(Policy(load_factor=1.25, virtual_nodes=16, forget_after_ms=5000, spare_slots=0))
    happened: list[str] = []
    is_quiet = False
    for line in told.splitlines():
        if not line.startswith(("#", ">")) and line:
            continue
        happened.append(line)
        if line.startswith(">"):
            words = line[1:].split()
            answers = obey(state, words, may_be_left_out=is_quiet)
            is_quiet = words[0] in {"tick", "looked"} and all("look for" in a or "nothing" in a for a in answers)
            happened += answers
            invariants.check(state)
    # A blank line that stood between a command's old output and the next paragraph is kept, but never two.
    return "\n".join(happened).replace("\n\n\n", "\n\n") + "\n"


def obey(state: LeaderState, words: list[str], *, may_be_left_out: bool) -> list[str]:
    """What the core answers to one command. may_be_left_out: a tick that is not due may; it must have nothing to do."""
    if words == ["state"]:
        return shown(state)
    if words[0] == "spares":
        state.policy = replace(state.policy, spare_slots=int(words[1]))
        return []
    told = event(state, words)
    is_needed = not isinstance(told, Tick) or not may_be_left_out or is_due_without_looking(state, told.now_ms)
    actions = decide(state, told)
    assert is_needed or all(isinstance(action, LookForExpired) for action in actions)
    return [told_action(action) for action in actions] or ["  nothing"]


def is_due_without_looking(state: LeaderState, now_ms: int) -> bool:
    """Most transcripts say nothing of what was found, and so the core looks with each of their ticks."""
    look_ms, state.look_ms = state.look_ms, now_ms + 1
    is_needed = is_due(state, now_ms)
    state.look_ms = look_ms
    return is_needed


def event(state: LeaderState, words: list[str]) -> Event:
    """The event that a command stands for."""
    command, subject, *rest = words
    return COMMANDS[command](state, subject, rest)


def joins(_: LeaderState, subject: str, rest: list[str]) -> Event:
    return ExecutorSeen(ExecutorId(subject), tuple(served(word) for word in rest))


def closes(_: LeaderState, subject: str, rest: list[str]) -> Event:
    return ExecutorSeen(ExecutorId(subject), tuple(served(word, closing=True) for word in rest))


def served(word: str, *, closing: bool = False) -> OfferedVersion:
    version, size = word.split(":")
    instances, slots = size.split("x")
    slots, _, idle_ms = slots.partition("i")
    return OfferedVersion(
        version,
        int(instances),
        int(slots.removesuffix("p")),
        pageable=slots.endswith("p"),
        closing=closing,
        idle_ms=int(idle_ms or 0),
    )


def waits(_: LeaderState, subject: str, rest: list[str]) -> SequenceWaits:
    version = next((word[1:] for word in rest if word.startswith("v")), "1")
    timeout_ms = next((int(word[:-2]) for word in rest if word.endswith("ms")), 0)
    return SequenceWaits(
        SequenceId(subject),
        version,
        place(next(word for word in rest if "-" in word)),
        timeout_us=timeout_ms * 1000,
    )


def moves(state: LeaderState, subject: str, rest: list[str]) -> Event:
    return replace(waits(state, subject, rest), moving=True)


def returns(state: LeaderState, subject: str, rest: list[str]) -> Event:
    return replace(waits(state, subject, rest), returning=True)


def place(word: str) -> Entry:
    entry, shard = (*word.split("@"), "0")[:2]
    ms, number = entry.split("-")
    return Entry(int(ms), int(number), ShardId(int(shard)))


def assigned(state: LeaderState, subject: str, rest: list[str]) -> Event:
    known = state.sequences.get(SequenceId(subject))
    entry = known.entry if known is not None and known.entry is not None else Entry(0, 0, ShardId(0))
    return Assigned(SequenceId(subject), entry, Epoch(int(rest[0])))


def over(_: LeaderState, subject: str, rest: list[str]) -> Event:
    return SequenceOver(SequenceId(subject), Epoch(int(rest[0])), is_spare="spare" in rest)


def found(_: LeaderState, subject: str, rest: list[str]) -> Event:
    return SequenceFound(SequenceId(subject), slot(rest[0]), Epoch(int(rest[1])))


def took(_: LeaderState, subject: str, rest: list[str]) -> Event:
    return SpareTaken(SequenceId(subject), slot(rest[0]), Epoch(int(rest[1])))


def slot(word: str) -> SlotAddress:
    executor, version, instance, number = word.split("/")
    return SlotAddress(ExecutorId(executor), version, InstanceIndex(int(instance)), SlotIndex(int(number)))


def wish(_: LeaderState, subject: str, rest: list[str]) -> Event:
    to, entry = rest
    return MoveWished(SequenceId(subject), None if to == "any" else ExecutorId(to), place(entry))


def expiries(words: list[str]) -> tuple[tuple[SequenceId, int], ...]:
    return tuple((SequenceId(name), int(ms)) for name, ms in zip(words[::2], words[1::2], strict=True))


COMMANDS: dict[str, Callable[[LeaderState, str, list[str]], Event]] = {
    "joins": joins,
    "waits": waits,
    "moves": moves,
    "returns": returns,
    "paged": lambda _, subject, rest: SequenceOver(SequenceId(subject), Epoch(int(rest[0])), "p"),
    "vacated": lambda _, subject, rest: Vacated(SequenceId(subject), Epoch(int(rest[0])), rest[1] == "yes"),
    "allows": lambda _, subject, rest: IdleTimeCut(SequenceId(subject), int(rest[0])),
    "patience": lambda _, subject, rest: PatienceLowered(SequenceId(subject), place(rest[0]), int(rest[1])),
    "cancelled": lambda _, subject, rest: WaitEnded(SequenceId(subject), place(rest[0])),
    "expired": lambda _, subject, rest: WaitEnded(SequenceId(subject), place(rest[0]), "x"),
    "paused": lambda _, subject, rest: WaitEnded(SequenceId(subject), place(rest[0]), "h"),
    "assigned": assigned,
    "over": over,
    "unreadable": lambda _, subject, rest: SequenceOver(SequenceId(subject), Epoch(int(rest[0])), UNREADABLE),
    "epochs": lambda _, subject, __: EpochsFound({ShardId(0): Epoch(int(subject))}),
    "took": took,
    "recall": lambda _, subject, rest: RecallSent(ExecutorId(subject), ShardId(0), int(rest[0])),
    "recalled": lambda _, subject, rest: SparesRecalled(ExecutorId(subject), ShardId(0), int(rest[0])),
    "closes": closes,
    "wish": wish,
    "pauses": lambda _, subject, rest: PauseWished(SequenceId(subject), int(rest[0]), place(rest[1])),
    "asks": lambda _, subject, rest: ForecastAsked(SequenceId(subject), place(rest[0])),
    "idle": lambda _, subject, rest: IdleSeen(expiries([subject, *rest])),
    "out": lambda _, subject, rest: MovedOut(SequenceId(subject), Epoch(int(rest[0])), is_taken=True),
    "kept": lambda _, subject, rest: MovedOut(SequenceId(subject), Epoch(int(rest[0])), is_taken=False),
    "found": found,
    "lost": lambda _, subject, __: ExecutorLost(ExecutorId(subject)),
    "reclaimed": lambda _, subject, rest: Reclaimed(ExecutorId(subject), is_all=rest[0] == "all"),
    "forgotten": lambda _, subject, __: Forgotten(ExecutorId(subject)),
    "looked": lambda _, subject, rest: Looked(int(subject), None if rest[0] == "-" else int(rest[0])),
    "turn": lambda _, subject, __: ClockRead(int(subject)),
    "tick": lambda _, subject, __: Tick(int(subject)),
}


def told_action(action: Action) -> str:
    """An action as the transcripts write it."""
    match action:
        case Assign(sequence, place, _, moving):
            return f"  assign {sequence} to {place}{' (moving)' if moving else ''}"
        case Vacate(sequence, place):
            return f"  ask {sequence} at {place}"
        case WantSlots(version, count):
            return f"  want {count} slots of version {version}"
        case LayOut(executor, version, _, slots):
            return f"  lay out {' '.join(f'{executor}/{version}/{instance}/{slot}' for instance, slot in slots)}"
        case Recall(executor):
            return f"  recall the spare slots of {executor}"
        case Reclaim(executor, _, only):
            return f"  reclaim {executor}{', only ' if only else ''}{' '.join(only)}"
        case ReclaimPart(executor):
            return f"  reclaim a part of {executor}"
        case Forget(executor):
            return f"  forget {executor}"
        case Reject(sequence, _, _, message):
            return f"  reject {sequence}: {message}"
        case MoveOut(sequence, _, None):
            return f"  move {sequence} (paged) into a slot"
        case MoveOut(sequence, epoch, executor):
            return f"  move {sequence} (epoch {epoch}) out of {executor}"
        case Pause(sequence, until_ms, entry):
            return f"  pause {sequence} until {until_ms}, as the wish {entry} says"
        case Dismiss(sequence, entry):
            return f"  dismiss the wish {entry} for {sequence}"
        case LookForExpired(now_ms):
            return f"  look for expired at {now_ms}"
        case LookAtIdle(count):
            return f"  look when {count} idle sequences expire"
        case Publish(lines):
            told = [
                f"version {line.version}: {', '.join(line.line) or 'nobody'} waits, {line.freed} slots in "
                f"{line.observed_ms} ms, expiries {list(line.expiries_ms)}"
                for line in lines
            ]
            return f"  publish {' | '.join(told)}"


def shown(state: LeaderState) -> list[str]:
    """The state as the transcripts write it."""
    seen = view(state)
    return [
        *(f"  {executor} {phase}" for executor, phase in seen.executors),
        *(f"  {sequence} at {place} epoch {epoch}" for sequence, place, epoch in seen.live),
        *(f"  {sequence} waits for version {v}{' (moving)' if m else ''}" for v, sequence, m in seen.waiting),
    ] or ["  nothing"]

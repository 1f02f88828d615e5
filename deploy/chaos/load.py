"""The clients of a run: each plays one sequence after the other, and records every attempt.

A client sends a step again, through another gateway, until it is answered. It never skips a step. So either every step
of a sequence is answered rightly, or the mesh has broken a promise.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from deploy.chaos.clients import BrokenError, Gateway, RefusedError, Session
from deploy.chaos.fold import FoldState
from deploy.chaos.history import Attempt, AttemptOutcome, SequenceHistory
from deploy.chaos.models import variant
from deploy.chaos.scripts import IDLE_FACTOR, Script

SET_BACK = "set back"
"""Why a client gives a sequence up: the mesh has forgotten steps that were answered."""
BUDGET_S = 120.0
"""A step that is not answered within this, over all attempts, counts as lost. Every fault is shorter."""
RETRY_PAUSE_S = 0.4
"""Longest pause before another attempt."""
OVER = frozenset({"expired", "ended", "lost", "failed", "cancelled", "exists"})
"""Reasons after which a sequence cannot go on."""


class Clock:
    """Seconds since the run began."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._began


@dataclass(slots=True, eq=False)
class Sent:
    """A step that was sent and not answered yet."""

    step: int
    sent_s: float
    answer: asyncio.Future[FoldState]
    done_s: float = 0.0


@dataclass(slots=True)
class Score:
    """Counts of the run so far. answered_s: when the last step was answered; wrong: sequences with wrong answers"""

    answered: int = 0
    answered_s: float = 0.0
    sequences: int = 0
    wrong: int = 0


class Player:
    def __init__(self, script: Script, gateways: Sequence[Gateway], clock: Clock, score: Score, seed: int) -> None:
        self.told = SequenceHistory(script, [])
        self._gateways = gateways
        self._clock = clock
        self._score = score
        self._chance = random.Random(f"player {seed} {script.index}")
        self._gateway = self._chance.randrange(len(gateways)) if gateways else 0
        self._done: dict[int, float] = {}
        self._hung_up: set[int] = set()
        self._sessions = 0
        self._open: deque[Sent] = deque()
        self._leave = asyncio.get_running_loop().create_future()
        self._cut_short = False
        self._last_progress_s = 0.0

    @property
    def script(self) -> Script:
        """The script that is played. It is cut short when the run ends."""
        return self.told.script

    def hang_up(self) -> None:
        """Breaks the connection off, also with open steps. The sequence goes on over another connection."""
        if not self._leave.done():
            self._leave.set_result(None)

    def cut_short(self) -> None:
        """Ends the sequence with its next step."""
        self._cut_short = True

    async def play(self) -> SequenceHistory:
        self._last_progress_s = self._clock.now()
        while not self.told.forsaken and len(self._done) < len(self.script.values):
            if self._clock.now() - self._last_progress_s > BUDGET_S:
                break
            self._leave = asyncio.get_running_loop().create_future()
            self._sessions += 1
            if not await self._go_on():
                await asyncio.sleep(self._chance.uniform(0.02, RETRY_PAUSE_S))
        return self.told

    async def _go_on(self) -> bool:
        """Sends steps over a new connection. False when it was given up."""
        session = self._gateways[self._gateway].session(self.script.protocol)
        if await self._converse(session):
            await session.close()
            return True
        await self._abandon(session)
        self._gateway = self._another_gateway()
        return False

    def _another_gateway(self) -> int:
        others = [number for number in range(len(self._gateways)) if number != self._gateway]
        return self._chance.choice(others) if others else self._gateway

    async def _converse(self, session: Session) -> bool:
        """Sends the unanswered steps, in order. False when the connection must be given up."""
        steps = self._steps()
        following = next(steps, 0)
        while following or self._open:
            if following and len(self._open) < self.script.window and not (self._must_be_quiet(following)):
                await self._pause(following)
                self._send(session, following)
                if following in self.script.hang_ups and following not in self._hung_up:
                    self._hung_up.add(following)
                    return False
                following = next(steps, 0)
                continue
            if not await self._settle_head():
                return False
        return True

    def _steps(self) -> Iterator[int]:
        """The unanswered steps, each once. When the run ends, the next step becomes the last."""
        step = 1
        while step <= len(self.script.values):
            if step not in self._done:
                if self._cut_short and step < len(self.script.values) and not self._was_sent(step):
                    self._end_with(step)
                yield step
            step += 1

    def _end_with(self, step: int) -> None:
        """Makes a step the last one of the script."""
        values = self.script.values[:step]
        self.told.script = msgspec.structs.replace(self.script, values=values, ends=True, silent_at=0)

    def _was_sent(self, step: int) -> bool:
        """Whether the mesh may know this step, or a later one, already."""
        return any(sent.step >= step for sent in self._open) or any(a.step >= step for a in self.told.attempts)

    def _must_be_quiet(self, step: int) -> bool:
        """Whether all earlier steps must be answered before this one, because the script has a silence before it."""
        return bool(self._open) and step == self.script.silent_at and not self._was_sent(step)

    async def _pause(self, step: int) -> None:
        if step == self.script.silent_at and not self._was_sent(step):
            await asyncio.sleep(IDLE_FACTOR * variant(self.script.model).idle_s)
        elif self.script.pause_s and not self._cut_short:
            await asyncio.sleep(self._chance.uniform(0, 2 * self.script.pause_s))

    def _send(self, session: Session, step: int) -> None:
        sent = Sent(step, self._clock.now(), session.send(self.script, step))
        sent.answer.add_done_callback(lambda _: self._stamp(sent))
        self._open.append(sent)

    def _stamp(self, sent: Sent) -> None:
        sent.done_s = self._clock.now()

    async def _settle_head(self) -> bool:
        """Waits for the oldest open step. False if it was not answered."""
        head = self._open[0]
        if not head.answer.done():
            rest_s = head.sent_s + self.script.patience_s - self._clock.now()
            await asyncio.wait((head.answer, self._leave), timeout=max(0.0, rest_s), return_when="FIRST_COMPLETED")
        if not head.answer.done():
            return False
        self._open.popleft()
        return self._note(head, AttemptOutcome.LEFT) is AttemptOutcome.ANSWERED

    async def _abandon(self, session: Session) -> None:
        """Gives a connection up, after a refusal, a break, a timeout or on purpose. Records the open attempts."""
        refused = bool(self.told.attempts) and self.told.attempts[-1].outcome is AttemptOutcome.REFUSED
        if refused and self._open:
            # The mesh may still answer the other open steps, and those answers are checked too.
            await asyncio.wait([sent.answer for sent in self._open], timeout=self.script.patience_s)
        out_of_patience = self._clock.now() - self.script.patience_s
        await session.hang_up()
        for sent in self._open:
            outcome = self._note(sent, AttemptOutcome.LATE if sent.sent_s <= out_of_patience else AttemptOutcome.LEFT)
            if outcome is AttemptOutcome.ANSWERED and refused and not self.script.numbered:
                self.told.forsaken = "a step without a number was refused, and those behind it were not"
        self._open.clear()

    def _was_known(self, attempt: Attempt, step: int) -> bool:
        """Whether that step was answered before this attempt was sent, so that the mesh had it."""
        return self._done.get(step, attempt.sent_s) < attempt.sent_s

    def _note(self, sent: Sent, otherwise: AttemptOutcome) -> AttemptOutcome:
        """Records an attempt. otherwise: its outcome if it has no answer."""
        # A step that was answered in this very turn of the loop has no time stamp yet.
        done_s = sent.done_s or self._clock.now()
        attempt = Attempt(sent.step, self._sessions, self._gateway, round(sent.sent_s, 4), round(done_s, 4), otherwise)
        if sent.answer.done() and not sent.answer.cancelled():
            error = sent.answer.exception()
            match error:
                case None:
                    attempt.outcome = AttemptOutcome.ANSWERED
                    attempt.fold, attempt.length = sent.answer.result()
                case RefusedError():
                    attempt.outcome = AttemptOutcome.REFUSED
                    attempt.text, attempt.reason, attempt.last_step = error.text, error.reason, error.last_step
                    attempt.code = error.code
                case BrokenError():
                    attempt.outcome = AttemptOutcome.BROKEN
                    attempt.text = str(error)
                case _:
                    raise error
        self.told.attempts.append(attempt)
        self._learn(attempt)
        return attempt.outcome

    def _learn(self, attempt: Attempt) -> None:
        if attempt.outcome is AttemptOutcome.ANSWERED:
            self._last_progress_s = self._clock.now()
            if attempt.step not in self._done:
                self._score.answered += 1
                self._score.answered_s = self._clock.now()
            self._done.setdefault(attempt.step, attempt.done_s)
        elif attempt.outcome is AttemptOutcome.REFUSED:
            if attempt.reason in ("wrong_step", "answered") and 0 < attempt.step <= attempt.last_step:
                # The step ran, and the mesh does not keep its reply any more.
                self._done[attempt.step] = attempt.done_s
            elif attempt.reason in OVER or (
                attempt.reason == "never_seen" and self._was_known(attempt, attempt.step - 1)
            ):
                self.told.forsaken = attempt.reason
            elif attempt.reason == "wrong_step" and self._was_known(attempt, attempt.last_step + 1):
                self.told.forsaken = SET_BACK


@dataclass(eq=False)
class ClientLoad:
    """The clients of a run, each with one sequence at a time, until they are told to stop.

    player  makes what plays a script
    keep    called with the history of each sequence that is over
    """

    player: Callable[[Script, Clock, Score], Player]
    clock: Clock
    make: Callable[[int], Script]
    keep: Callable[[SequenceHistory], None]
    score: Score = field(default_factory=Score)
    _stopping: bool = False
    _index: int = -1
    _players: set[Player] = field(default_factory=set["Player"])

    async def client(self) -> None:
        """One client. Ends when the load is stopped and its sequence is over."""
        while not self._stopping:
            self._index += 1
            await self.play(self.make(self._index))

    async def play(self, script: Script) -> None:
        player = self.player(script, self.clock, self.score)
        self._players.add(player)
        try:
            if self._stopping:
                player.cut_short()
            self.keep(await player.play())
            self.score.sequences += 1
        finally:
            self._players.discard(player)

    def hang_up(self, share: float, chance: random.Random) -> int:
        """Some of the clients drop their connections; returns how many."""
        players = sorted(self._players, key=lambda player: player.script.index)
        leaving = chance.sample(players, int(len(players) * share))
        for player in leaving:
            player.hang_up()
        return len(leaving)

    def stop(self) -> None:
        """No new sequences; those under way end with their next step."""
        self._stopping = True
        for player in self._players:
            player.cut_short()

"""Decides for the launcher when a child is started, restarted, given up and stopped. Pure: no processes, no clock.

    start      redis first; the services when redis takes commands
    restart    a child that exits is started again after a pause that doubles with each quick failure
    give up    only before the mesh was ready for the first time: on a refused command line (exit code 2), or after a
               few quick failures. An executor that crashes may fail more often: a model's code may end its process, and
               executors give such a model up themselves. A mesh that has served is never given up
    stop       the console, then gateways, executors, schedulers, and redis last, so that each service still has what it
               needs to drain. Each stage has a grace period, then SIGKILL; a second request to stop kills at once

`launcher.py` performs the actions and feeds back what happened.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from shared.contract.errors import FAILED
from shared.process.endings import SAME_STOP_S, ending

STOP_ORDER = ("console", "gateway", "executor", "scheduler", "redis")
SERVER = "redis"
"""The service that must take commands before the others start."""
FIRST_PAUSE_MS = 200
STEADY_MS = 30_000
"""A child that ran this long has recovered: its next failure counts as the first one."""
QUICK_FAILURES_MAX = 3
"""How often a child may fail in a row before the mesh is ready for the first time."""
CRASHES_MAX = 12
"""The same bound for an executor that crashes. Executors give a model up after it has ended three of them, so this is
enough for three such models."""
REPORTED_IN_A_ROW = 4
"""The first quick failures of a child are all reported; after them only the 8th, the 16th and so on."""
USAGE_ERROR = 2
"""Exit code of a refused command line. Starting it again cannot help."""
GRACE_MS = 15_000
"""Grace period of each stage of a stop. An executor's own drain takes up to 10 s."""


class Status(StrEnum):
    """Where a child stands between two of its starts."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSING = "pausing"
    ENDED = "ended"


@dataclass(slots=True)
class Child:
    """One process to keep running. `since_ms`: start of the run, or end of the pause."""

    name: str
    service: str
    status: Status = Status.WAITING
    since_ms: int = 0
    quick_failures: int = 0


class MeshEvent(Enum):
    """What happens to the mesh as a whole."""

    BEGIN = "the launcher is set up"
    SERVER_READY = "Redis takes commands"
    MESH_READY = "every gateway says that it is ready"
    STOP_REQUESTED = "the user wants the mesh to stop; a second request means at once"
    TIME_PASSED = "deadlines may be due"


@dataclass(frozen=True, slots=True)
class Exited:
    """A child's process ended; `code` as in `subprocess`: negative for a signal."""

    name: str
    code: int


Event = MeshEvent | Exited


@dataclass(frozen=True, slots=True)
class Start:
    """Start the child's process."""

    name: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send the child's process a signal."""

    name: str
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class UserNotice:
    """Tell the user, in one line."""

    text: str


@dataclass(frozen=True, slots=True)
class ShowLog:
    """Show the user the end of the child's log."""

    name: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Everything has ended: leave with this exit code."""

    code: int


Action = Start | Send | UserNotice | ShowLog | Finish


class Supervision:
    """The state of all children. `handle` takes each event in, and returns the actions to be carried out, in order."""

    def __init__(self, children: Sequence[tuple[str, str]], *, longest_pause_ms: int) -> None:
        """children: (name, service) in the order in which they start."""
        self._children = {name: Child(name, service) for name, service in children}
        self._longest_pause_ms = longest_pause_ms
        self._was_ready = False
        self._stage: int | None = None
        self._stage_deadline_ms = 0
        self._asked_ms = -1 << 62
        self._killed = False
        self._finished = False
        self._exit_code = 0

    @property
    def stopping(self) -> bool:
        """Whether the mesh is stopping, by request or by decision."""
        return self._stage is not None

    def wake_ms(self) -> int | None:
        """When a `TIME_PASSED` is needed next; None if only other events can change anything."""
        times = [child.since_ms for child in self._children.values() if child.status is Status.PAUSING]
        if self.stopping and not self._killed and not self._finished:
            times.append(self._stage_deadline_ms)
        return min(times, default=None)

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """Takes one event in and returns the actions that follow from it."""
        match event:
            case MeshEvent.BEGIN:
                return self._begin(now_ms)
            case MeshEvent.SERVER_READY:
                return [] if self.stopping else self._start_waiting(now_ms)
            case MeshEvent.MESH_READY:
                self._was_ready = True
                return []
            case Exited(name, code):
                return self._exited(self._children[name], code, now_ms)
            case MeshEvent.STOP_REQUESTED:
                return self._asked_to_stop(now_ms)
            case MeshEvent.TIME_PASSED:
                return self._tick(now_ms)

    def _begin(self, now_ms: int) -> list[Action]:
        servers = [child for child in self._children.values() if child.service == SERVER]
        if not servers:
            return self._start_waiting(now_ms)
        return [self._start(child, now_ms) for child in servers]

    def _start_waiting(self, now_ms: int) -> list[Action]:
        return [self._start(child, now_ms) for child in self._children.values() if child.status is Status.WAITING]

    def _start(self, child: Child, now_ms: int) -> Action:
        child.status = Status.RUNNING
        child.since_ms = now_ms
        return Start(child.name)

    def _exited(self, child: Child, code: int, now_ms: int) -> list[Action]:
        ran_ms = now_ms - child.since_ms
        if self.stopping:
            child.status = Status.ENDED
            # A process that is still loading the interpreter has no handler yet: SIGTERM ends it with that exit code.
            unexpected: list[Action] = (
                []
                if code in (0, -signal.SIGTERM) or self._killed
                else [UserNotice(f"{child.name} {ending(code)} while stopping")]
            )
            return [*unexpected, *self._next_stage(now_ms)]
        child.quick_failures = 1 if ran_ms >= STEADY_MS else child.quick_failures + 1
        row = f", {child.quick_failures} times in a row" if child.quick_failures > REPORTED_IN_A_ROW else ""
        what = f"{child.name} {ending(code)} after {ran_ms / 1000:.1f} s{row}"
        if not self._was_ready and (code == USAGE_ERROR or child.quick_failures >= patience(child, code)):
            child.status = Status.ENDED
            return [UserNotice(f"{what}; giving up"), ShowLog(child.name), *self._stop(1, now_ms)]
        pause_ms = min(self._longest_pause_ms, FIRST_PAUSE_MS << (child.quick_failures - 1))
        child.status = Status.PAUSING
        child.since_ms = now_ms + pause_ms
        return [UserNotice(f"{what}; starting it again in {pause_ms / 1000:.1f} s")] if is_news(child, code) else []

    def _tick(self, now_ms: int) -> list[Action]:
        if self.stopping:
            return self._kill_stage() if not self._killed and now_ms >= self._stage_deadline_ms else []
        return [
            self._start(child, now_ms)
            for child in self._children.values()
            if child.status is Status.PAUSING and now_ms >= child.since_ms
        ]

    def _asked_to_stop(self, now_ms: int) -> list[Action]:
        if self.stopping:
            return self._kill() if now_ms - self._asked_ms >= 1000 * SAME_STOP_S else []
        self._asked_ms = now_ms
        return self._stop(0, now_ms)

    def _stop(self, exit_code: int, now_ms: int) -> list[Action]:
        self._exit_code = exit_code
        for child in self._children.values():
            if child.status is not Status.RUNNING:
                child.status = Status.ENDED
        self._stage = -1
        return self._next_stage(now_ms)

    def _next_stage(self, now_ms: int) -> list[Action]:
        """Moves on to the next stage with running children. Finishes after the last stage."""
        assert self._stage is not None
        if self._stage >= 0 and self._running(STOP_ORDER[self._stage]):
            return []
        while self._stage + 1 < len(STOP_ORDER):
            self._stage += 1
            running = self._running(STOP_ORDER[self._stage])
            if running:
                self._stage_deadline_ms = now_ms + GRACE_MS
                return [] if self._killed else [Send(child.name, signal.SIGTERM) for child in running]
        if self._finished:
            return []
        self._finished = True
        return [Finish(self._exit_code)]

    def _kill_stage(self) -> list[Action]:
        """Kills the children of a stage whose grace period is over. The stage has no deadline then: a process cannot
        ignore SIGKILL."""
        assert self._stage is not None
        running = self._running(STOP_ORDER[self._stage])
        self._stage_deadline_ms = 1 << 62
        late = ", ".join(child.name for child in running)
        return [
            UserNotice(f"{late} did not stop within {GRACE_MS / 1000:.0f} s; killing"),
            *(Send(child.name, signal.SIGKILL) for child in running),
        ]

    def _kill(self) -> list[Action]:
        if self._killed:
            return []
        self._killed = True
        self._exit_code = 1
        running = [child for child in self._children.values() if child.status is Status.RUNNING]
        return [UserNotice("killing everything"), *(Send(child.name, signal.SIGKILL) for child in running)]

    def _running(self, service: str) -> list[Child]:
        return [
            child for child in self._children.values() if child.service == service and child.status is Status.RUNNING
        ]


def patience(child: Child, code: int) -> int:
    """How many quick failures a child may have in a row, given how it ended."""
    return CRASHES_MAX if child.service == "executor" and code != FAILED else QUICK_FAILURES_MAX


def is_news(child: Child, code: int) -> bool:
    """Whether the end of a child is reported. Repeated ends of a child that logs its own reason are reported at growing
    intervals."""
    times = child.quick_failures
    return code <= 0 or times <= REPORTED_IN_A_ROW or times.bit_count() == 1

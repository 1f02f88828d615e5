"""The launcher's decisions: order of start and stop, restarts with growing pauses, when to give up."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from deploy.local.supervision import (
    CRASHES_MAX,
    GRACE_MS,
    QUICK_FAILURES_MAX,
    STEADY_MS,
    Action,
    Exited,
    Finish,
    MeshEvent,
    Send,
    ShowLog,
    Start,
    Supervision,
    UserNotice,
)
from shared.contract.errors import FAILED

LONGEST_PAUSE_MS = 5_000
CHILDREN = [("redis", "redis"), ("scheduler-1", "scheduler"), ("executor-1", "executor"), ("gateway-1", "gateway")]


def supervising(children: Sequence[tuple[str, str]] = CHILDREN) -> Supervision:
    return Supervision(children, longest_pause_ms=LONGEST_PAUSE_MS)


def begun() -> Supervision:
    """A mesh whose processes all run since time 0, not ready yet."""
    supervision = supervising()
    supervision.handle(MeshEvent.BEGIN, 0)
    supervision.handle(MeshEvent.SERVER_READY, 0)
    return supervision


def ready() -> Supervision:
    supervision = begun()
    supervision.handle(MeshEvent.MESH_READY, 0)
    return supervision


def effects(actions: list[Action]) -> list[Action]:
    """Without what is only said."""
    return [action for action in actions if not isinstance(action, UserNotice)]


def reports(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, UserNotice)]


def test_the_server_starts_first_and_the_others_when_it_takes_commands() -> None:
    supervision = supervising()

    assert supervision.handle(MeshEvent.BEGIN, 0) == [Start("redis")]
    assert supervision.handle(MeshEvent.SERVER_READY, 50) == [
        Start("scheduler-1"),
        Start("executor-1"),
        Start("gateway-1"),
    ]


def test_with_a_server_of_somebody_elses_everything_starts_at_once() -> None:
    supervision = supervising(CHILDREN[1:])

    assert supervision.handle(MeshEvent.BEGIN, 0) == [Start("scheduler-1"), Start("executor-1"), Start("gateway-1")]


def test_a_child_that_dies_is_reported_and_started_again_after_a_pause() -> None:
    supervision = ready()

    actions = supervision.handle(Exited("executor-1", -signal.SIGKILL), 12_300)

    assert actions == [UserNotice("executor-1 was killed by SIGKILL after 12.3 s; starting it again in 0.2 s")]
    assert supervision.wake_ms() == 12_500
    assert supervision.handle(MeshEvent.TIME_PASSED, 12_499) == []
    assert supervision.handle(MeshEvent.TIME_PASSED, 12_500) == [Start("executor-1")]
    assert supervision.wake_ms() is None


def test_pauses_double_up_to_a_bound_and_a_mesh_that_served_is_never_given_up() -> None:
    supervision = ready()
    pauses: list[int] = []
    now_ms = 0
    for _ in range(12):
        supervision.handle(Exited("executor-1", 1), now_ms)
        wake_ms = supervision.wake_ms()
        assert wake_ms is not None
        pauses.append(wake_ms - now_ms)
        now_ms = wake_ms
        assert supervision.handle(MeshEvent.TIME_PASSED, now_ms) == [Start("executor-1")]

    assert pauses[:4] == [200, 400, 800, 1600]
    assert pauses[-1] == LONGEST_PAUSE_MS


def test_of_a_child_that_fails_again_and_again_a_few_ends_are_told_and_each_time_it_is_killed() -> None:
    def told(code: int) -> list[int]:
        supervision = ready()
        ends: list[int] = []
        for time in range(1, 20):
            if reports(supervision.handle(Exited("executor-1", code), 10_000 * time)):
                ends.append(time)
            supervision.handle(MeshEvent.TIME_PASSED, 10_000 * time + LONGEST_PAUSE_MS)
        return ends

    assert [1, 2, 3, 4, 8, 16] == told(1)
    assert list(range(1, 20)) == told(-signal.SIGKILL)


def test_a_child_that_ran_steadily_starts_again_with_the_shortest_pause() -> None:
    supervision = ready()
    supervision.handle(Exited("executor-1", 1), 0)
    supervision.handle(MeshEvent.TIME_PASSED, 200)

    supervision.handle(Exited("executor-1", 1), 200 + STEADY_MS)

    assert supervision.wake_ms() == 200 + STEADY_MS + 200


def test_a_refused_command_line_ends_the_start_at_once_with_the_childs_log() -> None:
    supervision = begun()

    actions = supervision.handle(Exited("executor-1", 2), 100)

    assert reports(actions) == ["executor-1 exited with code 2 after 0.1 s; giving up"]
    assert effects(actions) == [ShowLog("executor-1"), Send("gateway-1", signal.SIGTERM)]


def test_a_few_quick_failures_before_the_mesh_is_ready_end_the_start_with_code_1() -> None:
    supervision = begun()
    now_ms = 0
    for _ in range(QUICK_FAILURES_MAX - 1):
        assert effects(supervision.handle(Exited("gateway-1", 1), now_ms)) == []
        now_ms = supervision.wake_ms() or 0
        supervision.handle(MeshEvent.TIME_PASSED, now_ms)

    actions = supervision.handle(Exited("gateway-1", 1), now_ms)

    assert effects(actions) == [ShowLog("gateway-1"), Send("executor-1", signal.SIGTERM)]
    for name in ("executor-1", "scheduler-1", "redis"):
        actions = supervision.handle(Exited(name, 0), now_ms)
    assert actions == [Finish(1)]


@pytest.mark.parametrize(
    ("code", "failures"), [(FAILED, QUICK_FAILURES_MAX), (1, CRASHES_MAX), (-signal.SIGSEGV, CRASHES_MAX)]
)
def test_an_executor_that_does_not_say_why_it_ends_may_give_models_up_before_it_is_given_up(
    code: int, failures: int
) -> None:
    """A model that ends its process takes three of them with it."""
    supervision = begun()
    now_ms = 0
    for _ in range(failures - 1):
        assert effects(supervision.handle(Exited("executor-1", code), now_ms)) == []
        now_ms = supervision.wake_ms() or 0
        supervision.handle(MeshEvent.TIME_PASSED, now_ms)

    assert ShowLog("executor-1") in supervision.handle(Exited("executor-1", code), now_ms)


def test_a_stop_goes_from_the_edge_to_the_server_one_stage_after_the_other() -> None:
    supervision = ready()

    assert supervision.handle(MeshEvent.STOP_REQUESTED, 0) == [Send("gateway-1", signal.SIGTERM)]
    assert supervision.handle(Exited("gateway-1", 0), 10) == [Send("executor-1", signal.SIGTERM)]
    assert supervision.handle(Exited("executor-1", 0), 20) == [Send("scheduler-1", signal.SIGTERM)]
    assert supervision.handle(Exited("scheduler-1", 0), 30) == [Send("redis", signal.SIGTERM)]
    assert supervision.handle(Exited("redis", 0), 40) == [Finish(0)]


def test_a_stage_waits_for_all_of_its_processes() -> None:
    supervision = supervising([*CHILDREN, ("gateway-2", "gateway")])
    supervision.handle(MeshEvent.BEGIN, 0)
    supervision.handle(MeshEvent.SERVER_READY, 0)
    supervision.handle(MeshEvent.STOP_REQUESTED, 0)

    assert supervision.handle(Exited("gateway-2", 0), 5) == []
    assert supervision.handle(Exited("gateway-1", 0), 6) == [Send("executor-1", signal.SIGTERM)]


def test_a_process_that_does_not_stop_in_time_is_killed_and_the_stop_goes_on() -> None:
    supervision = ready()
    supervision.handle(MeshEvent.STOP_REQUESTED, 0)

    assert supervision.wake_ms() == GRACE_MS
    actions = supervision.handle(MeshEvent.TIME_PASSED, GRACE_MS)

    assert reports(actions) == ["gateway-1 did not stop within 15 s; killing"]
    assert effects(actions) == [Send("gateway-1", signal.SIGKILL)]
    assert supervision.handle(MeshEvent.TIME_PASSED, GRACE_MS + 1) == []
    actions = supervision.handle(Exited("gateway-1", -signal.SIGKILL), GRACE_MS + 2)
    assert effects(actions) == [Send("executor-1", signal.SIGTERM)]


def test_a_second_request_kills_everything_at_once() -> None:
    supervision = ready()
    supervision.handle(MeshEvent.STOP_REQUESTED, 0)

    killed = effects(supervision.handle(MeshEvent.STOP_REQUESTED, 500))

    assert killed == [Send(name, signal.SIGKILL) for name, _ in CHILDREN]
    assert supervision.handle(MeshEvent.STOP_REQUESTED, 600) == []
    ended = [supervision.handle(Exited(name, -signal.SIGKILL), 700) for name, _ in CHILDREN]
    assert ended == [[], [], [], [Finish(1)]]


def test_a_request_that_comes_twice_in_a_moment_is_one() -> None:
    """As that of GNU's `timeout`."""
    supervision = ready()
    supervision.handle(MeshEvent.STOP_REQUESTED, 1000)

    assert supervision.handle(MeshEvent.STOP_REQUESTED, 1001) == []
    assert supervision.handle(Exited("gateway-1", 0), 1002) == [Send("executor-1", signal.SIGTERM)]


def test_a_child_that_was_waiting_for_its_restart_is_not_started_during_a_stop() -> None:
    supervision = ready()
    supervision.handle(Exited("gateway-1", 1), 0)

    assert supervision.handle(MeshEvent.STOP_REQUESTED, 10) == [Send("executor-1", signal.SIGTERM)]
    assert supervision.handle(MeshEvent.TIME_PASSED, 1000) == []


def test_a_stop_before_the_server_was_ready_starts_nothing_more() -> None:
    supervision = supervising()
    supervision.handle(MeshEvent.BEGIN, 0)

    assert supervision.handle(MeshEvent.STOP_REQUESTED, 1) == [Send("redis", signal.SIGTERM)]
    assert supervision.handle(MeshEvent.SERVER_READY, 2) == []
    assert supervision.handle(Exited("redis", 0), 3) == [Finish(0)]


@pytest.mark.parametrize("code", [1, -signal.SIGSEGV])
def test_a_process_that_ends_badly_while_stopping_is_reported(code: int) -> None:
    supervision = ready()
    supervision.handle(MeshEvent.STOP_REQUESTED, 0)

    (said,) = reports(supervision.handle(Exited("gateway-1", code), 1))

    assert said.endswith("while stopping")

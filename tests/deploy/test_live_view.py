"""The live view of `seqmesh up`: what its lines say of the console's messages.

`test_launcher.py` has it on a terminal.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import msgspec
import pytest
from rich.console import Console

from deploy.console.events import MeshNews
from deploy.console.history import ChartPoint
from deploy.console.live import Begin
from deploy.console.view import ExecutorView, MeshView, ServedView
from deploy.local.live_view import EXECUTORS_SHOWN, MeshLines, blocks

encode = msgspec.json.encode


def executor(
    name: str, held: int = 0, *, state: str = "serving", pending: int = 0, batches: tuple[int, ...] = ()
) -> ExecutorView:
    return ExecutorView(
        id=f"{name}@1",
        name=name,
        host="here",
        pid=7,
        state=state,
        started_ms=0,
        drained=False,
        killable=False,
        cpu=0.5,
        memory=0.5,
        gpus=(),
        models=(ServedView("sum", "1", 1, 64, held, pending, batches, closing=False),),
    )


def view(executors: Sequence[ExecutorView] = (), **figures: float) -> bytes:
    """The console's message of a mesh, as the console writes it."""
    point = msgspec.convert({"at_ms": 0, **figures}, ChartPoint)
    return encode(MeshView(0, 0.0, tuple(executors), (), (), (), True, point, ()))


def news(number: int, text: str) -> MeshNews:
    return MeshNews(number, 0, "warn", text)


def lines_of(screen: MeshLines, columns: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=columns, color_system=None).print(screen)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_mesh_at_work_is_a_headline_and_a_line_for_each_executor() -> None:
    screen = MeshLines()
    executors = [executor("executor-1", 12, batches=(1, 4, 8), pending=1200), executor("executor-2", 1)]

    screen.take(
        "view", view(executors, live=1013, waiting=2, steps_per_s=1234.5, request_ms=2.34, batch=3.4, failed_per_s=2)
    )

    assert lines_of(screen, 120)[1:] == [
        "2 executors · 1,013 sequences, 2 waiting · 1,234 steps/s · 2.3 ms a request · 3.4 rows a batch · 2 failed/s",
        "executor-1  serving  ━━━━━━━━━━━━━━━━  12 sequences  batches ▁▄█  1,200 wait",
        "executor-2  serving  ━                 1 sequence",
    ]
    assert lines_of(screen, 40)[1] == "2 executors · 1,013 sequences, 2 waitin…"


def test_what_was_not_measured_is_not_shown() -> None:
    screen = MeshLines()

    screen.take("view", view([executor("executor-1", state="dead")]))

    assert lines_of(screen)[1:] == [
        "1 executor · 0 sequences · 0 steps/s",
        "executor-1  dead                    0 sequences",
    ]


def test_many_executors_and_long_news_leave_the_terminal_its_messages() -> None:
    screen = MeshLines()

    screen.take("view", view([executor(f"executor-{number}") for number in range(30)]))
    screen.take("events", encode([news(number, f"news {number} " * 40) for number in range(1, 40)]))

    lines = lines_of(screen)
    assert lines[2 + EXECUTORS_SHOWN] == "and 22 more: the console shows them"
    assert [line[10:17] for line in lines[-3:]] == ["news 37", "news 38", "news 39"]
    assert all(len(line) <= 80 for line in lines)


def test_news_that_are_offered_again_are_shown_once() -> None:
    screen = MeshLines()

    screen.take("events", encode([news(1, "first")]))
    screen.take("events", encode([news(1, "first"), news(2, "second")]))

    assert [line[10:] for line in lines_of(screen)[1:-1]] == ["first", "second"]


def test_a_console_that_was_started_again_counts_its_news_anew() -> None:
    screen = MeshLines()
    screen.take("events", encode([news(7, "of the console before")]))

    screen.take("begin", encode(Begin([news(1, "seen while nobody looked")], 1000, can_kill=False, release="1")))
    screen.take("events", encode([news(2, "of this one")]))

    assert [line[10:] for line in lines_of(screen)[1:-1]] == ["of the console before", "of this one"]


def test_a_mesh_that_cannot_be_read_is_still_shown_as_it_was() -> None:
    screen = MeshLines()
    screen.take("view", view(live=3))

    screen.take("problem", encode({"text": "Redis cannot be read: gone"}))
    assert lines_of(screen)[1].startswith("0 executors · 3 sequences")
    assert lines_of(screen)[-1] == "Redis cannot be read: gone"

    screen.take("view", view(live=4))
    assert lines_of(screen)[-1] == "0 executors · 4 sequences · 0 steps/s"


def test_a_name_is_text_and_no_markup_and_moves_no_cursor() -> None:
    screen = MeshLines()

    screen.take("view", view([executor("[red]x\x1b[2J")]))

    assert "[red]x" in lines_of(screen)[2]
    assert "\x1b" not in "".join(lines_of(screen))


@pytest.mark.parametrize(
    ("batches", "drawn"),
    [((), ""), ((0, 0), ""), ((1,), "█"), ((1, 2, 3, 4, 5, 6, 7, 8), "▁▂▃▄▅▆▇█"), ((1, 800), "▁█")],
)
def test_batches_are_blocks_as_high_as_their_rows(batches: tuple[int, ...], drawn: str) -> None:
    assert blocks(batches) == drawn

"""The diagram of docs/design/architecture.md: the services, what lies in Redis between them, which way data goes."""

from __future__ import annotations

from tests.design.canvas import BOX, BOX_EDGE, LINE, QUIET, STORE, STORE_EDGE, Canvas

KEPT = (
    ("one sequence", ("seq: record", "idle: idle marker", "parked: parked steps", "checkpoint: state")),
    ("between services", ("starts, feed: leader", "inbox: per executor", "replies: per gateway", "work: stateless")),
    ("the mesh", ("executors, leases", "leaders, terms", "models, control", "tally, counts")),
)
"""What Redis holds, in three columns."""


def service(canvas: Canvas, x: float, y: float, title: str, lines: tuple[str, ...], *, width: float = 230) -> None:
    """A service of which there may be several: boxes behind a box."""
    height = 34 + 18 * len(lines)
    canvas.box(x + 10, y - 10, width, height, fill=BOX, edge=BOX_EDGE)
    canvas.box(x + 5, y - 5, width, height, fill=BOX, edge=BOX_EDGE)
    canvas.box(x, y, width, height, fill=BOX, edge=BOX_EDGE)
    canvas.text(x + 12, y + 22, title, size=15, bold=True)
    for index, line in enumerate(lines):
        canvas.text(x + 12, y + 42 + 18 * index, line, size=12)


def architecture() -> str:
    """The diagram."""
    canvas = Canvas(
        980,
        508,
        "The services of seqmesh",
        "Clients talk to gateways; gateways, schedulers and executors talk to each other through Redis alone.",
    )
    canvas.box(20, 236, 120, 66, fill=QUIET, edge=LINE)
    canvas.text(80, 264, "clients", size=15, bold=True, middle=True)
    canvas.text(80, 284, "HTTP, gRPC", size=12, middle=True)

    service(canvas, 20, 400, "gateways", ("admit requests", "keep waiting callers", "no model repository"))
    service(
        canvas, 375, 30, "schedulers", ("one leads each model", "slots, backlog, idle time", "not on every step's way")
    )
    service(
        canvas, 720, 400, "executors", ("order steps, form batches", "run models in threads", "state: a cache of Redis")
    )

    canvas.box(280, 200, 420, 150, fill=STORE, edge=STORE_EDGE)
    canvas.text(490, 224, "Redis: all that must survive", size=15, bold=True, middle=True)
    for column, (title, keys) in enumerate(KEPT):
        x = 294 + 138 * column
        canvas.text(x, 250, title, size=12, bold=True)
        for index, key in enumerate(keys):
            canvas.text(x, 270 + 18 * index, key, size=11)

    canvas.line([(60, 302), (60, 387)])
    canvas.line([(100, 388), (100, 305)])
    canvas.pill(80, 345, "request, answer")

    canvas.line([(440, 122), (440, 197)])
    canvas.line([(545, 197), (545, 122)])
    canvas.pill(400, 160, "assign, reclaim, drain, expire")
    canvas.pill(560, 160, "starts, feed")

    canvas.line([(262, 424), (345, 424), (345, 353)])
    canvas.line([(430, 353), (430, 470), (263, 470)])
    canvas.pill(345, 390, "submit, work_enqueue")
    canvas.pill(350, 470, "replies")

    canvas.line([(717, 424), (635, 424), (635, 353)])
    canvas.line([(550, 353), (550, 470), (716, 470)])
    canvas.pill(635, 390, "commit, work_finish")
    canvas.pill(632, 470, "inbox, work_pull")
    return canvas.svg()

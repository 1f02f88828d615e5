"""A step's way from its client to its answer, as docs/design/step.md draws and numbers it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.design.canvas import BOX, BOX_EDGE, LETTER, LINE, QUIET, STORE, STORE_EDGE, Canvas

PARTIES = ("client", "gateway", "Redis", "scheduler", "executor", "engine thread")


@dataclass(frozen=True, slots=True)
class Leg:
    """One arrow. to: the same as `of` for what somebody does alone; script: that Redis runs, "" for none."""

    number: int
    of: str
    to: str
    words: str
    script: str = ""
    back: bool = False


LEGS = (
    Leg(1, "client", "gateway", "request"),
    Leg(2, "gateway", "gateway", "decode, admit"),
    Leg(3, "gateway", "gateway", "queue"),
    Leg(4, "gateway", "Redis", "submit: number, place", "submit"),
    Leg(5, "Redis", "scheduler", "starts stream"),
    Leg(6, "scheduler", "Redis", "assign: owner, slot, epoch", "assign"),
    Leg(7, "Redis", "executor", "inbox stream"),
    Leg(8, "Redis", "executor", "record, checkpoint"),
    Leg(9, "executor", "executor", "order, batch"),
    Leg(10, "executor", "engine thread", "run", back=True),
    Leg(11, "executor", "Redis", "commit: state, step, reply", "commit"),
    Leg(12, "Redis", "gateway", "reply stream"),
    Leg(13, "gateway", "client", "answer"),
)
ONLY_WITHOUT_SLOT = (5, 6)
ONLY_FROM_ELSEWHERE = (8, 8)

LEFT, APART, TOP, ROW = 80, 160, 96, 50


def step_diagram() -> str:
    """The diagram."""
    height = TOP + ROW * len(LEGS) + 24
    width = LEFT * 2 + APART * (len(PARTIES) - 1)
    about = "; ".join(f"{leg.number} {leg.of} to {leg.to}: {leg.words}" for leg in LEGS)
    canvas = Canvas(width, height, "A step's life", about)
    place = {party: LEFT + APART * index for index, party in enumerate(PARTIES)}
    for first, last, words, right in (
        (*ONLY_WITHOUT_SLOT, "only when the sequence has no slot", "scheduler"),
        (*ONLY_FROM_ELSEWHERE, "only when it ran elsewhere before", "executor"),
    ):
        top = TOP + ROW * (first - 1) - 26
        x = place["Redis"] - 58
        canvas.box(x, top, place[right] + 68 - x, ROW * (last - first + 1) - 2, fill="none", edge=LINE, dashed=True)
        width = len(words) * 11 * LETTER + 14
        canvas.pill(x - 8 - width / 2, top + ROW * (last - first + 1) / 2 - 1, words, size=11, css="note")
    for party, x in place.items():
        fill, edge = (STORE, STORE_EDGE) if party == "Redis" else (BOX, BOX_EDGE)
        fill, edge = (QUIET, LINE) if party == "client" else (fill, edge)
        canvas.line([(x, 50), (x, height - 10)], arrow=False, dashed=True)
        canvas.box(x - 62, 14, 124, 36, fill=fill, edge=edge)
        canvas.text(x, 37, party, size=14, bold=True, middle=True)
    for leg in LEGS:
        draw_leg(canvas, leg, place, TOP + ROW * (leg.number - 1))
    return canvas.svg()


def draw_leg(canvas: Canvas, leg: Leg, place: dict[str, int], y: float) -> None:
    """One arrow with its number and words."""
    begin, end = place[leg.of], place[leg.to]
    words = f"{leg.number}  {leg.words}"
    if leg.of == leg.to:
        canvas.line([(begin, y - 6), (begin + 34, y - 6), (begin + 34, y + 12), (begin + 3, y + 12)])
        canvas.pill(begin + 42 + 0.28 * 12 * len(words) + 7, y - 4, words)
        return
    canvas.line([(begin, y + 10), (end - (3 if end > begin else -3), y + 10)])
    if leg.back:
        canvas.line([(end, y + 18), (begin + 3, y + 18)], dashed=True)
    canvas.pill((begin + end) / 2, y - 5, words)

"""The report's plots: SVG, written as text, readable on light and dark pages. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 20, 40, 52
INK, GRID = "#5f6b7a", "#9aa5b166"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Colours that people with the common forms of colour blindness can tell apart (Okabe and Ito)."""
TICKS = 5


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour. names: beside each point; is_line: the points are joined"""

    title: str
    points: Sequence[tuple[float, float]]
    names: Sequence[str] = ()
    is_line: bool = False


def plot(title: str, across: str, up: str, series: Sequence[Series], bound_up: float = 0.0) -> str:
    """A plot of both axes from 0. bound_up: where a line is drawn across; 0: none"""
    points = [point for one in series for point in one.points]
    across_max = nice(max((x for x, _ in points), default=1.0))
    # A bound far above all points would press them together.
    highest = max((y for _, y in points), default=1.0)
    up_max = nice(max(highest, bound_up if bound_up < 2 * highest else 0.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return (LEFT + x / across_max * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / up_max * (HEIGHT - TOP - BOTTOM))

    parts = [text(WIDTH / 2, 20, title, anchor="middle", weight="bold")]
    for tick in range(TICKS + 1):
        x, y = across_max * tick / TICKS, up_max * tick / TICKS
        parts += [line(at(x, 0), at(x, up_max), GRID), line(at(0, y), at(across_max, y), GRID)]
        parts += [text(at(x, 0)[0], HEIGHT - BOTTOM + 18, short(x), anchor="middle")]
        parts += [text(LEFT - 8, at(0, y)[1] + 4, short(y), anchor="end")]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, across, anchor="middle"))
    parts.append(f'<g transform="rotate(-90 16 {HEIGHT / 2})">{text(16, HEIGHT / 2, up, anchor="middle")}</g>')
    if 0 < bound_up <= up_max:
        parts.append(line(at(0, bound_up), at(across_max, bound_up), "#c0392b", dash=True))
        parts.append(text(WIDTH - RIGHT, at(0, bound_up)[1] - 5, "bound", anchor="end"))
    for number, one in enumerate(series):
        parts += drawn(one, [at(x, y) for x, y in one.points], COLOURS[number % len(COLOURS)])
        parts.append(f'<circle cx="{LEFT + 14}" cy="{TOP + 8 + 18 * number}" r="5" fill="{COLOURS[number % 4]}"/>')
        parts.append(text(LEFT + 26, TOP + 12 + 18 * number, one.title))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def drawn(series: Series, places: Sequence[tuple[float, float]], colour: str) -> list[str]:
    """A series' points, with their names, and the line through them."""
    parts: list[str] = []
    if series.is_line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" fill-opacity="0.8"/>' for x, y in places]
    parts += [text(x + 8, y - 6, name) for (x, y), name in zip(places, series.names, strict=False)]
    return parts


def text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    """SVG of a text. anchor: which part of it stands at (x, y)"""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{INK}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(words, quote=False)}</text>"
    )


def line(start: tuple[float, float], end: tuple[float, float], colour: str, *, dash: bool = False) -> str:
    (x1, y1), (x2, y2) = start, end
    dashes = ' stroke-dasharray="6 4"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'


def nice(value: float) -> float:
    """The end of an axis: the least of 1, 2, 2.5, 4, 5, 8 and 10 times a power of ten that is not below the value."""
    if value <= 0:
        return 1.0
    unit = 10 ** math.floor(math.log10(value))
    return next(unit * factor for factor in (1, 2, 2.5, 4, 5, 8, 10) if unit * factor >= value * (1 - 1e-9))


def short(value: float) -> str:
    """A number as an axis shows it: no digits that nobody reads."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"

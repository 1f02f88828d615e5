"""Boxes, arrows and labels of the diagrams in docs/design, as SVG that can be read on any background.

Text stands in filled boxes of its own; what lies on the page itself (lines, arrow heads) is of a middle grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

FONT = "Helvetica, Arial, sans-serif"
INK = "#17212b"
LINE = "#7c8794"
PILL = "#e9edf2"
BOX, BOX_EDGE = "#d6e4f5", "#5b7ea6"
STORE, STORE_EDGE = "#fbe9d3", "#b9803a"
QUIET = "#dfe4ea"
LETTER = 0.56
"""Width of a letter of FONT, as a share of its size: a little more than the mean."""


@dataclass(slots=True)
class Canvas:
    """One diagram. title, about: for those who do not see it."""

    width: int
    height: int
    title: str
    about: str
    parts: list[str] = field(default_factory=list[str])

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = BOX,
        edge: str = BOX_EDGE,
        dashed: bool = False,
    ) -> None:
        """A rectangle with round corners. fill: "none" for one that only frames."""
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}" '
            f'stroke="{edge}"{dash}/>'
        )

    def text(self, x: float, y: float, words: str, *, size: int = 13, bold: bool = False, middle: bool = False) -> None:
        """One line; it must lie on something that is filled."""
        weight = ' font-weight="bold"' if bold else ""
        anchor = ' text-anchor="middle"' if middle else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{INK}"{weight}{anchor}>'
            f"{escape(words, quote=False)}</text>"
        )

    def pill(self, x: float, y: float, words: str, *, size: int = 12, css: str = "label") -> None:
        """A label, centred on a point."""
        width = len(words) * size * LETTER + 14
        self.parts.append(
            f'<rect x="{x - width / 2:g}" y="{y - size / 2 - 4:g}" width="{width:g}" height="{size + 8}" rx="5" '
            f'fill="{PILL}"/>'
        )
        self.parts.append(
            f'<text class="{css}" x="{x:g}" y="{y + size * 0.36:g}" font-size="{size}" fill="{INK}" '
            f'text-anchor="middle">{escape(words, quote=False)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], *, arrow: bool = True, dashed: bool = False) -> None:
        """A line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.6"{head}{dash}/>')

    def svg(self) -> str:
        """The file."""
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{LINE}"/></marker>'
        )
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<desc>{escape(self.about)}</desc>",
            f"<defs>{head}</defs>",
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

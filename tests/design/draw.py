"""Draws the diagrams of docs/design: `python -m tests.design.draw`. States need Graphviz' `dot`.

The tests compare what a diagram says with the code, not where its lines lie; so no test needs `dot`.
"""

from __future__ import annotations

import re
import subprocess
from html import escape
from pathlib import Path

from tests.design.architecture import architecture
from tests.design.canvas import BOX, BOX_EDGE, INK, LINE, PILL
from tests.design.states import COPY, DRAWINGS, Drawing
from tests.design.step import step_diagram

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design"
FONT = "Helvetica,Arial,sans-serif"


def label_of(words: tuple[str, ...]) -> str:
    """An edge's label: a line for each move, on a ground of its own."""
    rows = "".join(f"<TR><TD>{escape(word)}</TD></TR>" for word in words)
    return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="2" BGCOLOR="{PILL}">{rows}</TABLE>>'


def dot_of(drawing: Drawing) -> str:
    """The graph as `dot` reads it."""
    node = f'fillcolor="{BOX}", color="{BOX_EDGE}", fontcolor="{INK}", fontname="{FONT}", fontsize=14'
    lines = [
        f"digraph {drawing.name.replace('-', '_')} {{",
        f'rankdir={drawing.rankdir}; bgcolor="transparent"; nodesep=0.45; ranksep=0.5; pad=0.1;',
        f'node [shape=box, style="rounded,filled", {node}, margin="0.2,0.1"];',
        f'edge [color="{LINE}", fontcolor="{INK}", fontname="{FONT}", fontsize=12, arrowsize=0.8];',
    ]
    names = list(dict.fromkeys(name for ends in drawing.edges for name in ends))
    for name in names:
        lines.append(f'"{name}" [label="{drawing.labels.get(name, name)}"];')
        if name in drawing.sinks:
            lines.append(f'"{name}{COPY}" [label="{drawing.labels.get(name, name)}"];')
    for (before, after), words in drawing.edges.items():
        end = after + COPY if after in drawing.sinks else after
        constraint = "false" if (before, after) in drawing.back else "true"
        lines.append(f'"{before}" -> "{end}" [label={label_of(words)}, constraint={constraint}];')
    return "\n".join([*lines, "}"])


def drawn(drawing: Drawing) -> str:
    """The diagram, laid out."""
    made = subprocess.run(["dot", "-Tsvg"], input=dot_of(drawing), capture_output=True, text=True, check=True).stdout
    svg = made[made.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\n", "", svg, flags=re.DOTALL)
    return svg.replace("<g id=", f"<title>{escape(drawing.title)}</title>\n<g id=", 1)


def hand_laid() -> dict[str, str]:
    """Every hand-laid diagram by its name: these are the same wherever they are drawn."""
    return {"architecture": architecture(), "step": step_diagram()}


if __name__ == "__main__":
    for name, text in hand_laid().items():
        (DESIGN / f"{name}.svg").write_text(text)
    for one in DRAWINGS:
        (DESIGN / f"{one.name}.svg").write_text(drawn(one))

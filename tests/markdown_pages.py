"""The fenced blocks of a page of the documentation, by the heading that they stand under."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$|^#+ (?P<heading>[^\n]*)$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. language: the word behind the fence; text: what lies between, with its last line break."""

    heading: str
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    found: list[Block] = []
    heading = ""
    for match in _FENCE.finditer(page.read_text()):
        if match["heading"] is not None:
            heading = match["heading"]
        else:
            found.append(Block(heading, match["language"], match["text"]))
    return found


def headings_of(pages: Iterable[Path]) -> list[str]:
    """All headings of pages, without what stands in their blocks."""
    texts = (re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL) for page in pages)
    return [heading for text in texts for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]


def table_rows(text: str) -> list[list[str]]:
    """The cells of every row of every table in a Markdown text, headers and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = {index for index, line in enumerate(lines) if set(line) <= set("|-: ")}
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for index, line in enumerate(lines)
        if index not in rules and index + 1 not in rules
    ]

"""The pages of the documentation, read as Markdown: code blocks, headings, tables, and marks.

A mark says how a block is checked. It is an HTML comment alone before a block, so that readers do not see it:

    <!-- output -->               what the blocks before it print
    <!-- not run: REASON -->      nothing can check it
    <!-- test: ... -->            how the test treats it; `test: story` holds for the whole page
    <!-- text blocks: REASON -->  none of the page's `text` blocks is checked: they quote, and nobody types them
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTPUT = "output"
STORY = "test: story"
HOLDER = "test: executor-1 is the holder"
"""In this block `executor-1` stands for whichever executor holds a sequence."""
QUOTED = ("text blocks: ", "Written by `make reference`")
"""How a mark begins that speaks for all `text` blocks of its page."""
NOT_RUN = re.compile(r"not run: \S.*")
_MARK = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One code block. heading: that it stands under, without its `#`."""

    page: str
    heading: str
    line: int
    language: str
    title: str
    text: str
    marks: tuple[str, ...]

    @property
    def where(self) -> str:
        """File and line, for messages and names of tests."""
        return f"{self.page}:{self.line}"

    @property
    def is_excused(self) -> bool:
        """Whether a mark says why nothing checks it."""
        return any(NOT_RUN.fullmatch(mark) for mark in self.marks)


def pages() -> list[Path]:
    """Every page: the site's, and those at the top of the repository that people read first."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    folders = [ROOT / "deploy" / "models" / "README.md", ROOT / "examples" / "README.md"]
    return [*top, *folders, *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


@cache
def tokens_of(page: Path) -> list[Token]:
    """A page, read as Markdown."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def blocks_of(page: Path) -> Iterator[Block]:
    """The code blocks of a page, in order."""
    quoted = page_mark(page, QUOTED)
    marks: list[str] = []
    heading, in_heading = "", False
    for token in tokens_of(page):
        if in_heading:
            heading = token.content
        in_heading = token.type == "heading_open"
        if token.type == "html_block":
            marks += _MARK.findall(token.content)
        elif token.type in ("fence", "code_block"):
            title = re.search(r'title="(.+?)"', token.info)
            if quoted and token.info == "text":
                marks.append(f"not run: {quoted}")
            yield Block(
                page=name_of(page),
                heading=heading,
                line=(token.map or [0])[0] + 1,
                language=token.info.split(" ")[0] if token.type == "fence" else "",
                title=title[1] if title else "",
                text=token.content,
                marks=tuple(marks),
            )
            marks = []
        elif token.level == 0 and not token.hidden:
            marks = []


def page_mark(page: Path, beginnings: tuple[str, ...]) -> str:
    """The mark of a page that begins in one of these ways, or ""."""
    marks = [mark for token in tokens_of(page) if token.type == "html_block" for mark in _MARK.findall(token.content)]
    return next((mark for mark in marks if mark.startswith(beginnings)), "")


def story_mark(page: Path) -> str:
    """The mark that makes a page a story, or ""."""
    return page_mark(page, (STORY,))


@cache
def all_blocks() -> tuple[Block, ...]:
    """The code blocks of every page. They are read when a test asks: to read every page takes a second."""
    return tuple(block for page in pages() for block in blocks_of(page))


@cache
def story_names() -> frozenset[str]:
    """The pages that are stories."""
    return frozenset(name_of(page) for page in pages() if story_mark(page))


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def code_spans(page: Path) -> list[str]:
    """What stands between backticks in the text of a page."""
    spans: list[str] = []
    for token in tokens_of(page):
        spans += [child.content for child in token.children or () if child.type == "code_inline"]
    return spans


def headings_of(pages: Iterable[Path]) -> list[str]:
    """All headings of pages, without their `#`."""
    return [heading for page in pages for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)]


def anchors_of(page: Path) -> set[str]:
    """The names by which headings of a page are linked to."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings_of([page])}


def section(page: Path, heading: str) -> str:
    """The text between a heading, given with its `#`, and the next one."""
    _, found, below = f"\n{page.read_text()}".partition(f"\n{heading}\n")
    assert found, f"no {heading!r} in {page.name}"
    return re.split(r"^#+ ", below, maxsplit=1, flags=re.MULTILINE)[0]


def table_rows(text: str) -> list[list[str]]:
    """The cells of every row of every table in a Markdown text, headers and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = {index for index, line in enumerate(lines) if set(line) <= set("|-: ")}
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for index, line in enumerate(lines)
        if index not in rules and index + 1 not in rules
    ]


def rows_below(page: Path, heading: str) -> list[list[str]]:
    """The rows of the tables between a heading, given with its `#`, and the next one."""
    rows = table_rows(section(page, heading))
    assert rows, f"no table below {heading!r} in {page.name}"
    return rows

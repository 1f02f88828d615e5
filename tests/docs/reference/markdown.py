"""Pieces of Markdown: tables, and text that was written for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

TYPED = re.compile(r"(?<![\w-])([A-Z_]{2,}=(?:\"[^\"]*\"|[^\s,;]+)|--[a-z][a-z0-9-]*\w|SEQMESH_[A-Z_]*[A-Z])")
"""What is typed at a shell: arguments of make, flags, environment variables."""


def page(title: str, *parts: str) -> str:
    """A whole page. It begins with its heading, from which the site takes the page's name."""
    note = "<!-- Written by `make reference` from the code. Change the code, not this page. -->"
    return "\n\n".join([f"# {title}", note, *(part.strip("\n") for part in parts)]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown already."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        assert len(row) == len(head), row
        assert not any("|" in cell or "\n" in cell for cell in row), row
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def text(plain: str) -> str:
    """A sentence as Markdown: what is between backticks stays, what is typed is code, nothing else is markup."""
    parts = " ".join(plain.split()).split("`")
    for index in range(0, len(parts), 2):
        outside = re.sub(r"([*\[\]])", r"\\\1", parts[index].replace("&", "&amp;").replace("<", "&lt;"))
        parts[index] = TYPED.sub(r"`\1`", outside)
    return "`".join(parts)


def code(plain: str) -> str:
    """As it is typed. Tables end a cell at every bar, so choices are parted by slashes."""
    return f"`{plain.replace('|', '/')}`" if plain else ""


def help_text(plain: str) -> str:
    """A command's help: paragraphs, and what stands behind a line with \\b as it is."""
    parts: list[str] = []
    for paragraph in plain.strip("\n").split("\n\n"):
        if paragraph.startswith("\b\n"):
            parts.append(f"```text\n{paragraph[2:]}\n```")
        else:
            parts.append(text(paragraph))
    return "\n\n".join(parts)

"""What a terminal is told."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

import click


def printable(text: str) -> str:
    """The text as one line: characters that would move the cursor become blanks."""
    return "".join(character if character.isprintable() else " " for character in text)


def styled(text: str, **style: Any) -> str:
    """The text as `click.style` makes it, unless NO_COLOR is set (https://no-color.org)."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


def can_redraw(output: TextIO) -> bool:
    """Whether lines can be drawn again there: it is a terminal, and no dumb one."""
    return output.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def say(text: str) -> None:
    # With the file named: click has its own way to standard output, past the live view, which stands in its place.
    show(f"seqmesh: {text}", sys.stdout)


def show(line: str, output: TextIO) -> None:
    """Writes a line, if it can be written: a mesh runs on when its reader has gone, or the disk is full. Its logs have
    what matters.
    """
    with suppress(OSError):
        click.echo(line, file=output)

"""What a terminal is told."""

import os
import sys
from contextlib import suppress
from functools import cache
from typing import IO, Any, TextIO

import click

from shared.process.readers import Reader


def printable(text: str) -> str:
    """The text as one line: characters that would move the cursor become blanks."""
    return "".join(character if character.isprintable() else " " for character in text)


def styled(text: str, **style: Any) -> str:
    """The text as `click.style` makes it, unless NO_COLOR is set (https://no-color.org), or the terminal is dumb."""
    return text if os.environ.get("NO_COLOR") or is_dumb() else click.style(text, **style)


def is_dumb() -> bool:
    """Whether the terminal, if there is one, knows no escape sequences."""
    return os.environ.get("TERM") in ("dumb", "unknown")


def can_redraw(output: TextIO) -> bool:
    """Whether lines can be drawn again there: it is a terminal, and no dumb one."""
    return output.isatty() and not is_dumb()


def say(text: str) -> None:
    # With the file named: click has its own way to standard output, past the live view, which stands in its place.
    show(f"seqmesh: {text}", sys.stdout)


def show(line: str, output: TextIO) -> None:
    """Writes a line, if it can be written: a mesh runs on when its reader has gone or does not read, or the disk is
    full. Its logs have what matters.
    """
    if is_read(output):
        with suppress(OSError):
            click.echo(line, file=output)


def is_read(output: IO[str]) -> bool:
    """Whether somebody reads it: nobody does at a terminal that was stopped with Ctrl-S."""
    try:
        return reader(output.fileno()).is_reading()
    except OSError:  # no file of the system's
        return True


@cache
def reader(descriptor: int) -> Reader:
    return Reader(descriptor)

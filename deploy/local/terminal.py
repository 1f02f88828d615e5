"""What a terminal is told."""

import sys

import click


def printable(text: str) -> str:
    """The text as one line: characters that would move the cursor become blanks."""
    return "".join(character if character.isprintable() else " " for character in text)


def say(text: str) -> None:
    # With the file named: click has its own way to standard output, past the live view, which stands in its place.
    click.echo(f"seqmesh: {text}", file=sys.stdout)

"""How a command ends that runs a mesh of its own: in order, and with an exit code that says what it is."""

from __future__ import annotations

import errno
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click

EXIT_NOT_BEGUN, EXIT_TOO_SOON = 2, 3
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Why an open file cannot be written. That of standard output, above all."""


class NotBegunError(click.ClickException):
    """There is no verdict; the message says why."""

    exit_code = EXIT_NOT_BEGUN


@contextmanager
def terminated_as_interrupted() -> Generator[None]:
    """Within the block SIGTERM does what Ctrl-C does, so that meshes and files do not outlive the command."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ending_by_verdict() -> Generator[None]:
    """For a command whose exit code 1 is a verdict. An error, also a full disk, ends it with EXIT_NOT_BEGUN; Ctrl-C
    and SIGTERM, where the block itself does not take them, with EXIT_TOO_SOON.
    """
    try:
        with terminated_as_interrupted():
            yield
    except KeyboardInterrupt:
        click.echo("Error: interrupted before anything was known", err=True)
        raise SystemExit(EXIT_TOO_SOON) from None
    except click.UsageError:
        raise
    except click.ClickException as error:
        raise NotBegunError(error.message) from error
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise NotBegunError(f"the results cannot be written: {error.strerror}") from error


def make_folder(folder: Path) -> None:
    """Makes a folder for results, unless it is there. Raises click.UsageError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"{folder} cannot be made: {error.strerror}") from error

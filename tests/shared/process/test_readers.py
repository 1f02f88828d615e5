"""What a model prints holds nobody up, whoever reads it."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from shared.process.readers import print_patiently

PRINTED = "x" * (1 << 20)
"""More than a pipe holds."""


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    monkeypatch.setattr("shared.process.readers.READER_WAIT_S", 0.01)
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def print_into(descriptor: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a descriptor in the place of a standard stream, and has it printed to patiently. To be called in a test's
    body: for each phase of a test pytest puts streams of its own there.
    """
    plain = io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), "ascii", "replace")
    monkeypatch.setattr(sys, name, plain)
    print_patiently()


@pytest.mark.timeout(20)  # without the bound it waits for ever
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_nobody_waits_for_a_reader_who_does_not_read_what_is_printed(
    pipe: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    print_into(pipe[1], name, monkeypatch)

    print(PRINTED, file=getattr(sys, name), flush=True)
    unread = len(os.read(pipe[0], len(PRINTED)))
    print("read again", file=getattr(sys, name), flush=True)

    assert 0 < unread < len(PRINTED)
    assert b"read again\n" == os.read(pipe[0], len(PRINTED))


def test_a_reader_who_reads_gets_all_of_it_as_before(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.process.readers.READER_WAIT_S", 60.0)
    print_into(pipe[1], "stdout", monkeypatch)
    writer = threading.Thread(target=lambda: print(PRINTED + "ü", flush=True))
    writer.start()
    got = b""
    while not got.endswith(b"\n"):
        got += os.read(pipe[0], 1 << 16)
    writer.join()

    assert (len(PRINTED) + 2, b"x?\n") == (len(got), got[-3:])
    assert ("ascii", "replace", False) == (sys.stdout.encoding, sys.stdout.errors, sys.stdout.isatty())

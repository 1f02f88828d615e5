"""The history of a run: every attempt of every step, and every fault. Plain values, written to a file as they come."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from deploy.chaos.scripts import Script

COMPRESSION = 1
"""Compression level. A million steps are 100 MB of text; the fastest level shrinks it to a quarter."""


class AttemptOutcome(StrEnum):
    """The outcome of an attempt.

    ANSWERED  the mesh answered with the state after the step
    REFUSED   the mesh answered with an error
    BROKEN    the connection was lost or refused; whether the step ran is not known
    LATE      no answer came within the client's patience, so the client broke off
    LEFT      the client broke off on purpose
    """

    ANSWERED = "answered"
    REFUSED = "refused"
    BROKEN = "broken"
    LATE = "late"
    LEFT = "left"


class Attempt(msgspec.Struct, array_like=True, gc=False):
    """One sending of a step. Times are seconds since the run began.

    step     number of the step, from 1
    session  number of the connection, among those that the sequence's client has made
    gateway  number of the gateway that it was sent to, from 0
    code     of a refusal, as `clients.RefusedError` has it; "" also in histories of older releases
    """

    step: int
    session: int
    gateway: int
    sent_s: float
    done_s: float
    outcome: AttemptOutcome
    fold: int = 0
    length: int = 0
    reason: str = ""
    last_step: int = -1
    text: str = ""
    code: str = ""


class SequenceHistory(msgspec.Struct, gc=False):
    """One sequence: its script and all attempts. forsaken: why its client gave it up, or ""."""

    script: Script
    attempts: list[Attempt]
    forsaken: str = ""


class Strike(msgspec.Struct):
    """A fault that was carried out. end_s: when it was over and its victim back; note: what exactly was hit."""

    number: int
    kind: str
    begin_s: float
    end_s: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class ChaosRun:
    """Facts about a finished run; all else is in its history. failures: faults that were not carried out, or whose
    victim did not come back; clients that came to no end."""

    seconds: float
    strikes: Sequence[Strike]
    failures: Sequence[str]
    refused_commits: int | None


@contextmanager
def history_file(path: Path) -> Generator[Callable[[SequenceHistory], object]]:
    """A file of sequences, one JSON document per line, compressed. Yields what adds one."""
    with gzip.open(path, "wb", COMPRESSION) as file:
        yield lambda told: file.write(msgspec.json.encode(told) + b"\n")


def read_history(path: Path) -> Iterator[SequenceHistory]:
    decoder = msgspec.json.Decoder(SequenceHistory)
    with gzip.open(path, "rb") as file:
        for line in file:
            yield decoder.decode(line)

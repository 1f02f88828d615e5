"""What a search has measured so far, in a file: an interrupted search goes on with it, and the report is made of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from deploy.analyze.inputs import Input
from deploy.analyze.search import Measured, Setting

FILE = "measurements.json"


class Circumstances(msgspec.Struct, frozen=True):
    """What measurements depend on, beside the setting: others are not comparable.

    model  hash of the model's files
    load   concurrency, rounds and seconds, and what is sent
    cores  of the machine
    """

    model: str
    load: str
    cores: int


class Measurement(Measured, frozen=True, kw_only=True):
    """What one trial measured, as the notes of a run keep it. why: what the search hoped for"""

    setting: dict[str, int | str]
    why: str


class CurvePoint(msgspec.Struct, frozen=True):
    """A setting under another number of callers."""

    setting: dict[str, int | str]
    concurrency: int
    steps_per_s: float
    p99_ms: float


class Notes(msgspec.Struct):
    """Everything that is known.

    config  the given configuration, as the mesh completed it; inputs: of the model
    again   the given and the chosen setting, measured once more when the search was over
    """

    circumstances: Circumstances
    config: dict[str, Any]
    inputs: list[Input]
    trials: list[Measurement] = []
    again: list[Measurement] = []
    curve: list[CurvePoint] = []

    @property
    def found(self) -> dict[Setting, Measured]:
        """The trials by their settings, in the order in which they were made."""
        return by_setting(self.trials)


def measurement(setting: Setting, why: str, found: Measured) -> Measurement:
    """A trial as the notes keep it."""
    return Measurement(**msgspec.structs.asdict(found), setting=dict(setting), why=why)


def by_setting(trials: Sequence[Measurement]) -> dict[Setting, Measured]:
    return {tuple(one.setting.items()): one for one in trials}


def read_notes(folder: Path, circumstances: Circumstances) -> Notes | None:
    """The notes of an earlier run; None if there are none.

    raises  click.UsageError if they were made under other circumstances, or cannot be read
    """
    try:
        notes = msgspec.json.decode((folder / FILE).read_bytes(), type=Notes)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise click.UsageError(f"{folder / FILE} cannot be read ({error}): give --anew") from error
    if notes.circumstances != circumstances:
        raise click.UsageError(
            f"{folder} holds measurements of another model, load or machine: give another --output, or --anew"
        )
    return notes


def write_notes(folder: Path, notes: Notes) -> None:
    """Writes the notes, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f"{FILE}.new"
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(notes)))
    beside.replace(folder / FILE)


def hash_of(folder: Path) -> str:
    """A hash of a model's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]

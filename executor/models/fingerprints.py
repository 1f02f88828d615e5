"""Fingerprints of what a model's sequences and engines depend on: short texts that change when it does.

They decide what a load changes. A version with the same content goes on with its sequences. If the rest is the same
too, it keeps its engines. Files count by size and time of change, as in Triton. Two kinds of files count by content:
override files, which are written again for every load, and the files of models whose answers are cached, which are
equal on all executors but were written at different times.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.configuration.load import LoadedConfig

SERVED_BY = ("dynamic_batching", "model_warmup", "optimization", "response_cache")
BATCHED_BY = ("direct", "oldest", "max_sequence_idle_microseconds")
PARAMETERS = (
    "batch_gathering",
    "checkpoint_interval",
    "instance_process",
    "orphan_grace_microseconds",
    "retry_replies",
    "retry_reply_bytes",
    "virtual_slots",
)
"""Parts of the configuration, of `sequence_batching` and of the parameters on which a state that the mesh holds does
not depend: they say how the model is served. In Triton they end sequences too.
"""
CONFIG_FILES = ("config.pbtxt", "configs")
"""Not counted as files, because the parsed configuration is counted."""
UNSEEN = ("__pycache__",)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """content: of all that a sequence's state may depend on; rest: of everything else that the engines depend on"""

    content: str
    rest: str


def fingerprint(
    loaded: LoadedConfig, version: int, *, by_content: bool, backend_dir: Path | None = None
) -> Fingerprint:
    """The fingerprint of one version of a model. Of each file in the directory only size and time are read, unless
    `by_content`.

    backend_dir  the folder of a python-based backend: its code is the model's
    """
    config = json.loads(loaded.json)
    # Which versions are served changes nothing about any of them (triton-spec 1.11).
    _leave_out(config, ("version_policy",))
    rest = json.dumps(config, sort_keys=True)
    if loaded.config.state_in_mesh:
        _leave_out(config, SERVED_BY)
        _leave_out(config.get("sequence_batching", {}), BATCHED_BY)
        _leave_out(config.get("parameters", {}), PARAMETERS)
    if loaded.config.sequence_batching is None or loaded.config.state_in_mesh:
        # Elsewhere only the engine holds the state, so a change of the instances ends the sequences.
        _leave_out(config, ("instance_group",))
    parts = [json.dumps(config, sort_keys=True)]
    # Other versions' folders do not count: a change there leaves this version as it is.
    others = {path.name for path in loaded.model_dir.iterdir() if path.name.isdigit()} - {str(version)}
    parts += _lines(loaded.model_dir, by_content=by_content, skip=others | {*CONFIG_FILES})
    if backend_dir is not None:
        parts += [f"backend {line}" for line in _lines(backend_dir, by_content=by_content, skip=())]
    return Fingerprint(_digest(parts), _digest([rest]))


def _leave_out(values: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        values.pop(name, None)


def folder_fingerprint(folder: Path) -> str:
    """A text that changes when anything in a model's directory changes.
    Raises OSError if the directory cannot be read.
    """
    return _digest(_lines(folder, by_content=False, skip=frozenset()))


def _lines(folder: Path, *, by_content: bool, skip: Collection[str]) -> Iterator[str]:
    for path in _files(folder, skip):
        state = _content(path) if by_content else str(path.stat().st_mtime_ns)
        yield f"{path.relative_to(folder)} {path.stat().st_size} {state}"


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path, skip: Collection[str]) -> Iterator[Path]:
    """Every file of a model's directory, in a fixed order. skip: names in the directory itself that are left out"""
    for path in sorted(folder.iterdir()):
        if path.name not in skip and path.name not in UNSEEN and not path.name.startswith("."):
            yield from _below(path, ())


def _below(path: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """The file itself, or every file of the folder. above: the folders that lead here, to which links may lead back"""
    if path.is_file():
        yield path
    elif path.is_dir():
        state = path.stat()
        here = (state.st_dev, state.st_ino)
        # Of a folder that may not be read, the model reads nothing either.
        if here not in above and os.access(path, os.R_OK | os.X_OK):
            for inner in sorted(path.iterdir()):
                if inner.name not in UNSEEN:
                    yield from _below(inner, (*above, here))


def _digest(parts: Iterable[str]) -> str:
    # Names of files may be bytes that are no text.
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]

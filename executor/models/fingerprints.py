"""Fingerprints of what a model's sequences and engines depend on: short texts that change when it does.

They decide what a load changes. A version with the same content goes on with its sequences. If the rest is the same
too, it keeps its engines. Files count by size and time of change, as in Triton. Two kinds of files count by content:
override files, which are written again for every load, and the files of models whose answers are cached, which are
equal on all executors but were written at different times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.configuration.load import LoadedConfig
from executor.configuration.version_files import ALL_CONTENT, NO_CONTENT, lines, lines_of_version

SERVED_BY = ("dynamic_batching", "model_warmup", "optimization", "response_cache")
BATCHED_BY = ("direct", "oldest", "max_sequence_idle_microseconds")
SERVED_BY_PARAMETERS = (
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
        _leave_out(config.get("parameters", {}), SERVED_BY_PARAMETERS)
    if loaded.config.sequence_batching is None or loaded.config.state_in_mesh:
        # Elsewhere only the engine holds the state, so a change of the instances ends the sequences.
        _leave_out(config, ("instance_group",))
    parts = [json.dumps(config, sort_keys=True)]
    content_max = ALL_CONTENT if by_content else NO_CONTENT
    parts += lines_of_version(loaded.model_dir, str(version), backend_dir, content_max=content_max)
    return Fingerprint(_digest(parts), _digest([rest]))


def _leave_out(values: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        values.pop(name, None)


def folder_fingerprint(folder: Path) -> str:
    """A text that changes when anything in a model's directory changes.
    Raises OSError if the directory cannot be read.
    """
    return _digest(lines(folder))


def _digest(parts: Iterable[str]) -> str:
    # Names of files may be bytes that are no text.
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]

"""Which version directories of a model are served.

Source: triton-spec section 4, "version_policy"; Triton core, model_repository_manager.cc (VersionsToLoad).
"""

from __future__ import annotations

from pathlib import Path

from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError

VERSION_MAX = (1 << 63) - 1
"""Largest version number: versions are int64 in the protocols' configuration."""

_OTHER_DIRECTORIES = frozenset({"configs", "initial_state", "warmup"})
"""Directories that Triton's layout puts beside the versions."""


def find_versions(model_dir: Path) -> tuple[list[int], list[str]]:
    """Numbers of the version directories, rising, and a note for each directory that looks like none."""
    versions: list[int] = []
    notes: list[str] = []
    for entry in sorted(model_dir.iterdir()):
        name = entry.name
        if name.startswith((".", "_")) or name in _OTHER_DIRECTORIES or not entry.is_dir():
            continue
        if not (name.isascii() and name.isdigit()) or int(name) > VERSION_MAX:
            notes.append(f"ignore version directory '{name}' which fails to convert to integral number")
        elif name.startswith("0") and name != "0":
            notes.append(f"ignore version directory '{name}' which contains leading zeros in its directory name")
        else:
            versions.append(int(name))
    return sorted(versions), notes


def choose_versions(config: ConfigMessage, existing: list[int]) -> tuple[tuple[int, ...], list[str]]:
    """The versions that the policy asks for, rising, and notes on named versions that do not exist.

    existing  version directories, rising
    raises    ConfigError if none is left
    """
    policy, notes = config.version_policy, list[str]()
    chosen = existing
    if policy.HasField("specific"):
        wanted = set(policy.specific.versions)
        chosen = [version for version in existing if version in wanted]
        notes = [
            f"version {version} is specified for model '{config.name}', but the version directory is not present"
            for version in sorted(wanted.difference(existing))
        ]
    elif policy.HasField("latest"):
        count = policy.latest.num_versions
        chosen = existing[-count:] if count else []
    if not chosen:
        there = (
            f"it has {', '.join(map(str, existing))}" if existing else "no folder of it is named by a number, such as 1"
        )
        raise ConfigError(
            f"at least one version must be available under the version policy of model '{config.name}': {there}"
        )
    return tuple(chosen), notes

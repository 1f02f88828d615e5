"""From a model's directory to its configuration: read, complete, normalise, validate. The only entry for the executor.

    configs/<name>.pbtxt, config.pbtxt or override -> message -> name, versions -> defaults -> backend's completion
                             -> defaults -> validation -> fields, files -> values, canonical JSON, versions

Nothing is written, and no model is loaded here; only the backend's completion may read the model's file.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.configuration.absence import absence
from executor.configuration.backends import Surroundings
from executor.configuration.build import build
from executor.configuration.canonical import to_json
from executor.configuration.fields import review_fields
from executor.configuration.files import check_files, check_readable
from executor.configuration.normalise import fill_identity, normalise
from executor.configuration.rules.batching import check_response_cache
from executor.configuration.rules.ensembles import is_ensemble
from executor.configuration.rules.validate import check_name, validate
from executor.configuration.versions import choose_versions, find_versions
from shared.configuration.parse import CONFIG_BYTES_MAX, parse_json, parse_text
from shared.configuration.schema import ConfigMessage, is_dialect, new_config
from shared.contract.errors import ConfigError, MeshError
from shared.contract.model_config import ModelConfig

AutoComplete = Callable[[str, Path], str]
"""A backend's completion: (configuration JSON, version directory) -> configuration JSON."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A model's configuration, complete and valid.

    json      Triton's JSON of the normalised configuration
    versions  the versions that the version policy chose, rising; never empty
    """

    config: ModelConfig
    json: str
    versions: tuple[int, ...]
    model_dir: Path


def load_model_config(
    model_dir: Path,
    *,
    backends: Mapping[str, AutoComplete],
    gpu_count: int = 0,
    override_json: str | None = None,
    config_name: str = "",
    auto_complete: bool = True,
) -> LoadedConfig:
    """Reads the configuration of the model in that directory.

    backends       the installed backends, each with its completion
    gpu_count      GPUs of this executor
    override_json  a load request's configuration, in place of the directory's own
    config_name    read `configs/<config_name>.pbtxt` where there is one, in place of `config.pbtxt`
    auto_complete  the backend may complete the configuration; if not, there must be one
    raises         ConfigError, whatever is wrong
    """
    directory = model_dir.name
    config = _read(model_dir, override_json, config_name, required=not auto_complete)
    is_given = override_json is not None or bool(config.ListFields())
    fill_identity(config, directory)
    check_name(config.name, directory)
    check_response_cache(config)
    existing, version_notes = _list(model_dir)
    versions, policy_notes = choose_versions(config, existing)
    version_dir = model_dir / str(versions[-1])
    around = Surroundings(directory, _files(version_dir), frozenset(backends), gpu_count)
    dialect = is_dialect(config)
    with _telling_absence(model_dir, is_given=is_given):
        notes = version_notes + policy_notes + normalise(config, around)

    # An ensemble has no file from which a backend could complete it.
    completes = auto_complete and not is_ensemble(config)
    completed = _complete(config, backends[config.backend], version_dir) if completes else config
    changed = _differences(json.loads(to_json(config)), json.loads(to_json(completed)))
    if changed:
        notes.append(f"completed from the model itself: {', '.join(changed)}")
        check_name(completed.name, directory)
        if "version_policy" in changed:
            raise ConfigError(
                f"the completion of model '{directory}' must not change version_policy, by which its versions were "
                "chosen before: write it into config.pbtxt"
            )
        notes += normalise(completed, around)
    with _telling_absence(model_dir, is_given=is_given):
        notes += validate(completed, dialect=dialect, gpu_count=gpu_count)
    notes += review_fields(completed)
    check_files(completed, model_dir, version_dir)
    return LoadedConfig(
        config=build(completed, dialect=dialect, notes=tuple(dict.fromkeys(notes))),
        json=to_json(completed),
        versions=versions,
        model_dir=model_dir,
    )


def _read(model_dir: Path, override_json: str | None, config_name: str, *, required: bool) -> ConfigMessage:
    """The configuration as given. Without any, unless one is required, everything is told from the files."""
    if override_json is not None:
        return parse_json(override_json, f"override configuration of model '{model_dir.name}'")
    path = model_dir / "configs" / f"{config_name}.pbtxt"
    if not config_name or not path.is_file():
        path = model_dir / "config.pbtxt"
    try:
        check_readable(path, CONFIG_BYTES_MAX)
        return parse_text(path.read_text(encoding="utf-8", errors="surrogateescape"), str(path))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"failed to open text file for read {path}: No such file or directory") from None
        return new_config()
    except OSError as error:
        raise ConfigError(f"failed to read {path}: {error}") from error


@contextmanager
def _telling_absence(model_dir: Path, *, is_given: bool) -> Generator[None]:
    """Within it an error says, too, that the configuration has no file, if that is so: it may have been misspelt."""
    try:
        yield
    except ConfigError as error:
        if is_given or (model_dir / "config.pbtxt").exists():
            raise
        raise ConfigError(f"{error.message}; {absence('config.pbtxt', model_dir)}") from error


def _list(model_dir: Path) -> tuple[list[int], list[str]]:
    try:
        return find_versions(model_dir)
    except OSError as error:
        raise ConfigError(f"failed to read the directory of model '{model_dir.name}': {error}") from error


def _files(version_dir: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in version_dir.iterdir())
    except OSError as error:
        raise ConfigError(f"failed to read version directory {version_dir}: {error}") from error


def _complete(config: ConfigMessage, auto_complete: AutoComplete, version_dir: Path) -> ConfigMessage:
    try:
        text = auto_complete(to_json(config), version_dir)
    except MeshError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(error.message) from error
    except Exception as error:  # The model's own code runs here; whatever it raises, the load failed.
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"failed to complete the configuration of model '{config.name}': {type(error).__name__}: {error}, "
            f"at {where.filename}({where.lineno}): {where.name}"
        ) from error
    return parse_json(text, f"completed configuration of model '{config.name}'")


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names of the fields that differ, one level into sequence_batching."""
    names: list[str] = []
    for name in dict.fromkeys((*new, *old)):
        if old.get(name) == new.get(name):
            continue
        if name == "sequence_batching" and name in old and name in new:
            names += [f"{name}.{inner}" for inner in _differences(old[name], new[name])]
        else:
            names.append(name)
    return names

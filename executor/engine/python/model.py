"""Imports a `model.py`, each instance as a module object of its own.

Triton runs every instance in a process of its own, so models rely on module globals being theirs alone. Here the
instances of an executor share a process: `model.py` and the modules beside it are executed anew for each instance,
under names that no other module has. While a model is being imported its directory comes first on `sys.path`; later it
stays there, last, for imports inside of its methods (two models that import equally named siblings that late would
meet; imports at the top of a file never do).

What runs is what stands in the files, those in folders of the model's too: bytecode is known by its file's size and
the second of its last change, and two versions of a model may have both in common (a repository whose files have no
times of their own, a change of one digit).
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from importlib.abc import PathEntryFinder
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from executor.engine.python import triton_python_backend_utils
from executor.engine.python.triton_python_backend_utils import current_model_dir
from shared.contract.errors import LoadError

MODEL_FILE = "model.py"
INTERFACE_NAME = "triton_python_backend_utils"
CLASS_NAME = "TritonPythonModel"

_import_lock = threading.RLock()
_serial = itertools.count()
_importable: Counter[str] = Counter()
"""How many instances need a directory at the end of `sys.path`."""
_importing: Counter[str] = Counter()
"""How many imports that go on have a directory at its front."""
_MODULE_PREFIX = "seqmesh_model_"


class SourceLoader(SourceFileLoader):
    """Compiles a file each time; bytecode is neither read nor left behind."""

    def get_code(self, fullname: str) -> CodeType:
        """The file's code."""
        return self.source_to_code(self.get_data(self.path), self.path)


def model_path(version_dir: Path, default_model_filename: str) -> Path:
    """The file to import: in the version's directory or, as Triton allows, in the model's. Raises LoadError."""
    name = default_model_filename or MODEL_FILE
    for directory in (version_dir, version_dir.parent):
        if (directory / name).is_file():
            return directory / name
    raise LoadError(f"there is no {name} in {version_dir}")


def import_model_class(path: Path) -> type[Any]:
    """The class `TritonPythonModel` of a freshly executed `model.py`. Raises LoadError with the model's own error."""
    with _import_lock, _importing_from(path.parent):
        module = _executed(path)
    found = getattr(module, CLASS_NAME, None)
    if not isinstance(found, type):
        raise LoadError(f"{path} has no class {CLASS_NAME}")
    return found


def keep_importable(directory: Path) -> None:
    """Lets imports inside of a model's methods find its siblings, after everything else, until it is forgotten."""
    with _import_lock:
        if _importable[str(directory)] == 0:
            sys.path.append(str(directory))
        _importable[str(directory)] += 1


def forget(model_class: type[Any], directory: Path | None = None) -> None:
    """Undoes the import of a model, and `keep_importable` where its directory is given."""
    with _import_lock:
        if model_class.__module__.startswith(_MODULE_PREFIX):
            sys.modules.pop(model_class.__module__, None)
        if directory is None:
            return
        _importable[str(directory)] -= 1
        if _importable[str(directory)] == 0:
            del _importable[str(directory)]
            sys.path.remove(str(directory))
            _forget_finders(directory)
            _drop_siblings(directory, set(sys.modules))  # what methods imported: the next load may find new code


@contextmanager
def model_dir_known(directory: str) -> Generator[None]:
    """`get_model_dir` answers with this directory inside of the block."""
    token = current_model_dir.set(directory)
    try:
        yield
    finally:
        current_model_dir.reset(token)


def error_text(error: BaseException) -> str:
    """An exception of a model, with the place it came from, as Triton writes it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames[1:]))
    text = f"{type(error).__name__}: {error}"
    return f"{text}\n\nAt:\n{where}" if where else text


def _executed(path: Path) -> ModuleType:
    name = f"{_MODULE_PREFIX}{next(_serial)}"
    loader = SourceLoader(name, str(path)) if path.suffix in SOURCE_SUFFIXES else None
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    # Registered because dataclasses and pickle look a class's module up by its name.
    sys.modules[name] = module
    try:
        with model_dir_known(str(path.parent)):
            spec.loader.exec_module(module)
    except Exception as error:  # the model's own code
        del sys.modules[name]
        raise LoadError(f"cannot import {path}: {error_text(error)}") from error
    return module


@contextmanager
def _importing_from(directory: Path) -> Generator[None]:
    """The directory first on `sys.path`; the siblings that were imported meanwhile are the importer's alone."""
    sys.modules[INTERFACE_NAME] = triton_python_backend_utils
    importlib.invalidate_caches()
    before = set(sys.modules)
    sys.path.insert(0, str(directory))
    _importing[str(directory)] += 1
    _forget_finders(directory)
    if _finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder)
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        _importing[str(directory)] -= 1
        if _importing[str(directory)] == 0:
            del _importing[str(directory)]
        _drop_siblings(directory, set(sys.modules) - before)


def _finder(path: str) -> PathEntryFinder:
    """Finds modules in a directory of a model's, or in a folder there; for `sys.path_hooks`."""
    if not any(Path(path).is_relative_to(directory) for directory in (*_importing, *_importable)):
        raise ImportError(f"{path} is no model's")
    return FileFinder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceLoader, SOURCE_SUFFIXES))


def _forget_finders(directory: Path) -> None:
    for path in list(sys.path_importer_cache):
        if Path(path).is_relative_to(directory):
            del sys.path_importer_cache[path]


def _drop_siblings(directory: Path, names: set[str]) -> None:
    # All are found before one goes: where a folder is, its package is asked.
    found = [name for name in names if not name.startswith(_MODULE_PREFIX) and _lies_in(directory, sys.modules[name])]
    for name in found:
        del sys.modules[name]


def _lies_in(directory: Path, module: ModuleType) -> bool:
    # Not by its attributes: there are modules that have any (`torch.classes`).
    known = vars(module)
    if known.get("__file__"):
        return Path(known["__file__"]).is_relative_to(directory)
    try:
        # A folder without `__init__.py` is a module without a file.
        return any(Path(place).is_relative_to(directory) for place in known.get("__path__", ()))
    except KeyError:
        return False  # somebody has dropped its package

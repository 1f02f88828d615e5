"""Imports a `model.py`, each instance as a module object of its own.

Triton runs every instance in a process of its own, so models rely on having their module globals to themselves. Here
the instances of an executor share a process. So `model.py` and the modules beside it are executed for each instance,
and belong to it (`instance_code`). While a model is being imported, its directory comes first on `sys.path`, and behind
it the directory of all its versions. Later they stay there, last, for imports inside the model's methods. (What a
method imports absolutely is found under its plain name by every other model that imports that name later, also at the
top of a file. Relative imports never meet.)

The code in the files runs, never bytecode; also for folders of the model. Bytecode is matched by its file's size and
the second of its last change, and two versions of a model may have both in common (a repository whose files have no
times of their own; a change of one digit).

As in Triton, where `model.py` is a module of the package that its folder is, its files may import each other relatively
(`from .sort import ...`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib.abc import PathEntryFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import xxhash

from executor.configuration.absence import absence
from executor.engine.error_texts import class_and_text
from executor.engine.python import triton_python_backend_utils
from executor.engine.python.import_turns import LIMIT_S, ImportTurn, ImportTurns
from executor.engine.python.instance_code import MODULE_PREFIX, InstanceCode, current_code
from executor.engine.python.model_metrics import forget_families
from shared.contract.errors import LoadError

MODEL_FILE = "model.py"
INTERFACE_NAME = "triton_python_backend_utils"
CLASS_NAME = "TritonPythonModel"
PACKAGE_PREFIX = "seqmesh_folder_"
"""How the names of the packages begin that models' folders are."""

log = logging.getLogger(__name__)

_turns = ImportTurns()
_importable: Counter[str] = Counter()
"""Per directory: how many instances need it at the end of `sys.path`."""
_importing: Counter[str] = Counter()
"""Per directory: how many running imports have it at the front of `sys.path`."""


class SourceLoader(SourceFileLoader):
    """Compiles a file each time; bytecode is neither read nor left behind."""

    source: bytes | None = None
    """What was compiled."""

    def get_code(self, fullname: str) -> CodeType:
        self.source = self.get_data(self.path)
        return self.source_to_code(self.source, self.path)

    @property
    def is_outdated(self) -> bool:
        """Whether the file is another one by now."""
        try:
            return self.source is not None and self.source != self.get_data(self.path)
        except OSError:
            return True


class SiblingLoader(SourceLoader):
    """Of the files beside a `model.py`: those that it imports belong to its instance."""

    is_shared = False
    """A method imports it, and all instances share it."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's own. It is asked before others can see the module."""
        code = current_code.get(None)
        self.is_shared = code is not None and not code.adopts

    def exec_module(self, module: ModuleType) -> None:
        code = current_code.get(None)
        if code is not None and code.given_up:
            raise ImportError("the import of this model was given up")
        super().exec_module(module)
        if code is not None and code.adopts:
            name = self.name.partition(".")[2] if self.name.startswith(PACKAGE_PREFIX) else self.name
            code.adopt(module, f"{code.name}.{name}")
            code.imported.add(self.name)


def model_path(version_dir: Path, default_model_filename: str) -> Path:
    """The file to import: in the version's directory or, as Triton allows, in the model's. Raises LoadError."""
    name = default_model_filename or MODEL_FILE
    for directory in (version_dir, version_dir.parent):
        if (directory / name).is_file():
            return directory / name
    raise LoadError(absence(name, version_dir))


def import_model_class(path: Path, code: InstanceCode) -> type[Any]:
    """The class `TritonPythonModel` of a freshly executed `model.py`. Raises LoadError with the model's own error."""
    with _turns.alone() as turn:
        try:
            with _importing_from(path.parent, code, turn), called(code):
                module = _executed(path, code)
        finally:
            if turn.next is not None:
                forget(code)
                raise LoadError(
                    f"the import of {path} took longer than {LIMIT_S:g} s and was given up, because others waited for "
                    "it: load the model again, or set its parameter instance_process, which keeps its import apart"
                )
    found = getattr(module, CLASS_NAME, None)
    if not isinstance(found, type):
        forget(code)
        raise LoadError(f"{path} has no class {CLASS_NAME}")
    return found


def takes(method: object, *arguments: object, **named: object) -> bool:
    """Whether a model's class has a method that can be called with these arguments.

    A method of the same name with another purpose is recognised by its parameters.
    """
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(None, *arguments, **named)  # None: the model itself
    except (TypeError, ValueError):
        return False
    return True


def keep_importable(directory: Path) -> None:
    """Lets imports inside a model's methods find its siblings, after everything else, until `forget`."""
    with _turns.alone():
        for folder in _searched(directory):
            if _importable[str(folder)] == 0:
                sys.path.append(str(folder))
            _importable[str(folder)] += 1
        _make_package(directory)


def forget(code: InstanceCode, directory: Path | None = None) -> None:
    """Undoes the import of a model, and `keep_importable` if its directory is given."""
    forget_families(code)
    undone = [code.forget] if directory is None else [code.forget, partial(_not_importable, directory)]
    _turns.soon(*undone)


def _not_importable(directory: Path) -> None:
    for folder in _searched(directory):
        _importable[str(folder)] -= 1
        if _importable[str(folder)] == 0:
            del _importable[str(folder)]
            _leave_path(folder)
            _forget_finders(folder)
            _drop_siblings(folder, set(sys.modules))  # what methods imported: the next load may find new code
    _leave_package(directory)


CallBlock = Callable[[], AbstractContextManager[object]]
"""Makes a block in which an instance's model is called."""


@contextmanager
def called(code: InstanceCode) -> Generator[None]:
    """Inside the block a model is called: an instance of that code."""
    token, process = current_code.set(code), os.getpid()
    try:
        yield
    finally:
        end_if_forked(process)
        current_code.reset(token)


def end_if_forked(process: int) -> None:
    """Ends this process if it is not the one that called the model, but one that the model has forked, and that has
    come back from the call (because its `exec` failed, say): it would answer the call a second time.
    """
    if os.getpid() != process:
        os.write(2, b"a process that a model has forked came back from the model, and is ended\n")
        os._exit(1)


def error_text(error: BaseException) -> str:
    """The text of a model's exception with the place of its origin, as Triton writes it. Python's own import and this
    file are no place where a model has gone wrong.
    """
    frames = reversed(traceback.extract_tb(error.__traceback__)[1:])
    places = [frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith("<frozen ")]
    where = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in places)
    text = class_and_text(error)
    return f"{text}\n\nAt:\n{where}" if where else text


def _executed(path: Path, code: InstanceCode) -> ModuleType:
    name = code.name
    if path.suffix in SOURCE_SUFFIXES:
        part = f"{_package_name(path.parent)}.{path.stem}"
        spec = importlib.util.spec_from_file_location(part, path, loader=SourceLoader(part, str(path)))
    else:
        spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{path} is no file that Python imports: a model's file is called NAME.py")
    try:
        module = importlib.util.module_from_spec(spec)
        module.__name__ = name
        # Before it runs, because dataclasses look a class's module up by its name.
        code.adopt(module, name)
        code.adopts = True
        spec.loader.exec_module(module)
    except BaseException as error:  # the model's own code
        forget(code)
        raise LoadError(f"cannot import {path}: {error_text(error)}") from error
    finally:
        code.adopts = False
    return module


@contextmanager
def _importing_from(directory: Path, code: InstanceCode, turn: ImportTurn) -> Generator[None]:
    """Puts the directory first on `sys.path`. The siblings that are imported meanwhile belong to this import alone."""
    sys.modules[INTERFACE_NAME] = triton_python_backend_utils
    importlib.invalidate_caches()
    folders = _searched(directory)
    for folder in folders:
        _drop_outdated(folder)
        _tell_of_hidden(folder, code.model)
    before = set(sys.modules)
    sys.path[:0] = map(str, folders)
    _make_package(directory)
    for folder in folders:
        _importing[str(folder)] += 1
        _forget_finders(folder)
    if _finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder)

    def leave() -> None:
        code.given_up = turn.next is not None
        _leave_package(directory)
        for folder in folders:
            _leave_path(folder)
            _importing[str(folder)] -= 1
            if _importing[str(folder)] == 0:
                del _importing[str(folder)]
            for name, module in _siblings(folder, set(sys.modules) - before).items():
                loader = vars(module).get("__loader__")
                if not (isinstance(loader, SiblingLoader) and loader.is_shared):
                    sys.modules.pop(name, None)
        for name in list(code.imported):
            sys.modules.pop(name, None)

    with turn.importing(str(directory), leave):
        yield


def _leave_path(directory: Path) -> None:
    # From a copy: a method that imports on another thread goes through the list, and would miss the entry that moves
    # into the place of the removed one.
    path = list(sys.path)
    # The model's own code may have taken it away.
    with suppress(ValueError):
        path.remove(str(directory))
    sys.path = path


def _searched(directory: Path) -> tuple[Path, ...]:
    """Where a model's imports look: in the directory of its file; if that is a version's, in that of all its versions,
    too, as in Triton.
    """
    return (directory, directory.parent) if directory.name.isdecimal() else (directory,)


def _package_name(directory: Path) -> str:
    return PACKAGE_PREFIX + xxhash.xxh3_64_hexdigest(str(directory).encode())


def _make_package(directory: Path) -> None:
    """Makes the folder a package, which holds no module yet."""
    package = ModuleType(_package_name(directory))
    package.__path__ = [str(directory)]
    sys.modules[package.__name__] = package


def _leave_package(directory: Path) -> None:
    """What an import has put into the package belongs to its instance. Methods of others may import from it."""
    if _importable[str(directory)]:
        _make_package(directory)
    else:
        sys.modules.pop(_package_name(directory), None)


def _finder(path: str) -> PathEntryFinder:
    """Finds modules in a model's directory, or in a folder below it; for `sys.path_hooks`."""
    if not any(str(folder) in _importing or str(folder) in _importable for folder in (Path(path), *Path(path).parents)):
        raise ImportError(f"{path} is no model's")
    return FileFinder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (SiblingLoader, SOURCE_SUFFIXES))


def _forget_finders(directory: Path) -> None:
    below = f"{directory}{os.sep}"
    for path in list(sys.path_importer_cache):
        if path.startswith(below) or path == str(directory):
            del sys.path_importer_cache[path]


def _drop_outdated(directory: Path) -> None:
    """Drops what methods imported, if any of it was changed: a load runs the code that is there. All of it, because
    modules hold one another; and else none, because the other instances of the version share it.
    """
    loaders = (vars(module).get("__loader__") for module in _siblings(directory, set(sys.modules)).values())
    if any(isinstance(loader, SourceLoader) and loader.is_outdated for loader in loaders):
        _drop_siblings(directory, set(sys.modules))


def _tell_of_hidden(directory: Path, model: str) -> None:
    """Warns of files whose name a module has already, which an absolute import finds in their place: one of the
    executor's own, of a library, or one that a method of another model has imported.
    """
    below = f"{directory}{os.sep}"
    files = {path.stem: path for path in directory.glob("*.py") if path.stem != INTERFACE_NAME}
    for name in files.keys() & sys.modules.keys():
        module: object = sys.modules.get(name)
        if not isinstance(module, ModuleType) or _lies_in(below, module):
            continue
        if any(_imports(path, name) for path in files.values()):
            log.warning(
                "model '%s': 'import %s' finds %s, not %s: rename that, or import it relatively (from . import %s)",
                model,
                name,
                module,
                files[name],
                name,
            )


def _imports(path: Path, name: str) -> bool:
    """Whether a file imports a module of that name absolutely, as far as its lines tell."""
    try:
        code = path.read_bytes()
    except OSError:
        return False
    return re.search(rf"^\s*(import|from)\s+{name}\b".encode(), code, re.MULTILINE) is not None


def _drop_siblings(directory: Path, names: set[str]) -> None:
    for name in _siblings(directory, names):
        sys.modules.pop(name, None)


def _siblings(directory: Path, names: set[str]) -> dict[str, ModuleType]:
    """Of the modules of these names, those that methods imported from the directory."""
    below = f"{directory}{os.sep}"
    # Other threads import meanwhile, and drop what fails. In a module's place code may put None, or any other object.
    modules = {name: module for name in names if isinstance(module := sys.modules.get(name), ModuleType)}
    return {
        name: module
        for name, module in modules.items()
        if not name.startswith(MODULE_PREFIX) and _lies_in(below, module)
    }


def _lies_in(below: str, module: ModuleType) -> bool:
    """below: beginning of the paths in a directory"""
    # Each load and unload asks for thousands of modules, so this compares strings.
    # Not with `getattr`: some modules have every attribute (`torch.classes`).
    known = vars(module)
    if known.get("__file__"):
        return str(known["__file__"]).startswith(below)
    # A folder without `__init__.py` is a module without a file. Its `__path__`, when it is read, looks for the folder
    # in each entry of `sys.path`, where each model has one; what it has found before is in `_path`.
    places = known.get("__path__", ())
    return any(str(place).startswith(below) for place in getattr(places, "_path", places))

"""Which backends there are: the built-in ones, those that other packages add, and those written as a `model.py`.

A package adds a backend by an entry point in the group `seqmesh.backends`. The entry point's name is what `backend:`
says in a configuration; its object is a `Backend`, or a class of one without arguments. Nothing here imports torch: the
first model that needs it does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from executor.engine.base import Backend
from executor.engine.python.backend import PythonBackend
from executor.engine.python.model import MODEL_FILE
from executor.engine.python.model_completion import LIMIT_S
from executor.engine.runtimes import RUNTIMES, RuntimeBackend

ENTRY_POINT_GROUP = "seqmesh.backends"

log = logging.getLogger(__name__)


@cache
def announced_backends() -> tuple[EntryPoint, ...]:
    """What installed packages announce. Read once in a process: it takes a hundredth of a second, and a repository has
    hundreds of models.
    """
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


@cache
def installed_runtimes() -> tuple[RuntimeBackend, ...]:
    """The built-in backends whose packages are there. Looked for once in a process: the search for one that is missing
    goes through the folders of all loaded models.
    """
    return tuple(backend for backend in RUNTIMES if backend.is_installed)


def installed_backends(folders: Sequence[Path] = (), *, completion_limit_s: float = LIMIT_S) -> dict[str, Backend]:
    """Every backend that can load a model here, by name. The built-in ones come first, and cannot be replaced.

    folders             where python-based backends are: NAME/model.py serves the models of the backend NAME
    completion_limit_s  how long a python model may take to complete its configuration

    A backend of another package that cannot be imported is logged and left out; the others stay.
    """
    backends: dict[str, Backend] = {backend.name: backend for backend in installed_runtimes()}
    backends["python"] = PythonBackend(completion_limit_s)
    for name, code in _python_based(folders).items():
        if name in backends:
            log.warning("backend %r in %s is ignored: that name is taken", name, code)
            continue
        backends[name] = PythonBackend(completion_limit_s, name, code)
    for entry in announced_backends():
        if entry.name in backends:
            log.warning("backend %r of %s is ignored: that name is taken", entry.name, entry.value)
            continue
        backend = _loaded(entry)
        if backend is not None:
            backends[entry.name] = backend
    return backends


def folder_of(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder with the code of a python-based backend; None for another backend."""
    code = _python_based(folders).get(name)
    return None if code is None else code.parent


def _python_based(folders: Sequence[Path]) -> dict[str, Path]:
    """The code of each python-based backend, by its name; the first folder that has a name wins."""
    found: dict[str, Path] = {}
    for folder in folders:
        for code in sorted(folder.glob(f"*/{MODEL_FILE}")):
            found.setdefault(code.parent.name, code)
    return found


def _loaded(entry: EntryPoint) -> Backend | None:
    try:
        found = entry.load()
        return found() if isinstance(found, type) else found
    except Exception:  # another package's code: whatever it raises, the other backends stay
        log.exception("backend %r of %s cannot be imported", entry.name, entry.value)
        return None

"""Which backends there are: the built-in ones, and those that other packages add.

A package adds a backend by an entry point in the group `seqmesh.backends`. The entry point's name is what `backend:`
says in a configuration; its object is a `Backend`, or a class of one without arguments. Nothing here imports torch: the
first model that needs it does.
"""

from __future__ import annotations

import importlib.util
import logging
from importlib.metadata import EntryPoint, entry_points

from executor.engine.base import Backend
from executor.engine.onnx.backend import OnnxBackend
from executor.engine.python.backend import PythonBackend
from executor.engine.python.model_completion import LIMIT_S
from executor.engine.pytorch.backend import PytorchBackend
from shared.contract.errors import LoadError

ENTRY_POINT_GROUP = "seqmesh.backends"

log = logging.getLogger(__name__)


def installed_backends(*, completion_limit_s: float = LIMIT_S) -> dict[str, Backend]:
    """Every backend that can load a model here, by name. The built-in ones come first, and cannot be replaced.

    completion_limit_s  how long a python model may take to complete its configuration

    A backend of another package that cannot be imported is logged and left out; the others stay.
    """
    backends: dict[str, Backend] = {}
    if importlib.util.find_spec("torch") is not None:
        backends["pytorch"] = PytorchBackend()
        if importlib.util.find_spec("onnxruntime") is not None:
            backends["onnxruntime"] = OnnxBackend()
    backends["python"] = PythonBackend(completion_limit_s)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name in backends:
            log.warning("backend %r of %s is ignored: that name is taken", entry.name, entry.value)
            continue
        backend = _loaded(entry)
        if backend is not None:
            backends[entry.name] = backend
    return backends


def find_backend(name: str) -> Backend:
    """The backend of that name. Raises LoadError that names those available."""
    backends = installed_backends()
    backend = backends.get(name)
    if backend is None:
        raise LoadError(f"backend '{name}' is not installed; available are: {', '.join(sorted(backends))}")
    return backend


def _loaded(entry: EntryPoint) -> Backend | None:
    try:
        found = entry.load()
        return found() if isinstance(found, type) else found
    except Exception:  # another package's code: whatever it raises, the other backends stay
        log.exception("backend %r of %s cannot be imported", entry.name, entry.value)
        return None

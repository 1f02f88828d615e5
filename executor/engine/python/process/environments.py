"""The environment of a python model (`EXECUTION_ENV_PATH`): its own interpreter and packages.

A path is a folder (a conda environment, unpacked, or a venv) or an archive of one, as `conda-pack` makes it.
`$$TRITON_MODEL_DIRECTORY` in it is the model's folder. An archive is unpacked once for all instances that use it at the
same time, into a folder that goes with the last of them. Conda's packages may bring scripts that set variables when
their environment is activated (`etc/conda/activate.d`): they are run, since Triton activates an environment.

Source: Triton python_backend, README.md ("Creating Custom Execution Environments"), pb_env.cc, stub_launcher.cc.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary, finalize

from executor.configuration.parameters import ENVIRONMENT
from executor.engine.mkl import VARIABLE
from shared.contract.errors import LoadError
from shared.process.locked_folders import TemporaryFolder

UNPACKED = "seqmesh-unpacked-"
"""Begins the names of temporary folders that hold unpacked archives. Not `seqmesh-environment-`, as it was before there
were locks on them: who finds such a folder cannot tell whether it is in use."""
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
ROOT = Path(__file__).resolve().parents[4]
BOOTSTRAP = Path(__file__).with_name("bootstrap.py")

LENT = ("msgspec", "xxhash")
"""Packages of the executor that another environment may use."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Environment:
    """An interpreter.

    folder     of its environment; None: the executor's own
    activated  the environment variables of its processes; none: the executor's
    """

    python: str
    folder: Path | None = None
    activated: Mapping[str, str] = field(default_factory=dict[str, str])

    def command(self, module: str, arguments: Sequence[str] = (), answer_socket: int | None = None) -> list[str]:
        """The command line that runs `main` of a module of the executor. answer_socket: see `bootstrap.tell`"""
        start = {
            "root": str(ROOT),
            "module": module,
            "arguments": list(arguments),
            "socket": answer_socket,
            "version": list(sys.version_info[:2]),
            "lent": {name: str(_folder_of(name)) for name in LENT},
        }
        return [self.python, str(BOOTSTRAP), json.dumps(start)]

    @property
    def variables(self) -> dict[str, str]:
        """The process's environment variables."""
        return dict(self.activated or own_variables())


def own_variables() -> dict[str, str]:
    """The executor's variables as they were at its start. Models in its own process may have changed them since, for
    themselves.
    """
    return {**AT_START, **({VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {})}


AT_START: dict[str, str] = dict(os.environ)
EXECUTORS_OWN = Environment(sys.executable)

ACTIVATION_LIMIT_S = 60.0
"""Time for the scripts of an environment: they set variables."""

Archive = tuple[str, int, int]
_unpacked: WeakValueDictionary[Archive, Environment] = WeakValueDictionary()
_turns: WeakValueDictionary[Archive, threading.Lock] = WeakValueDictionary()
"""Who unpacks an archive has its lock. A large one takes minutes, and holds up no other."""
_looking = threading.Lock()


def environment_of(parameters: Mapping[str, str], model_dir: Path) -> Environment:
    """The environment that a model's parameters name; the executor's own if they name none. May unpack an archive.

    Raises LoadError for a path where there is none.
    """
    given = parameters.get(ENVIRONMENT, "")
    if not given:
        return EXECUTORS_OWN
    path = Path(given.replace(MODEL_DIRECTORY, str(model_dir)))
    if path.is_dir():
        return _in_folder(path)
    if not path.is_file():
        raise LoadError(f"parameter '{ENVIRONMENT}' names {path}, and there is no such folder or archive")
    found = path.stat()
    key = (str(path.resolve()), found.st_mtime_ns, found.st_size)
    with _looking:
        turn = _turns.setdefault(key, threading.Lock())
    with turn:
        environment = _unpacked.get(key)
        if environment is None:
            environment = _unpacked[key] = _from_archive(path)
        return environment


def _from_archive(path: Path) -> Environment:
    folder = TemporaryFolder(UNPACKED)
    try:
        if not tarfile.is_tarfile(path):
            raise LoadError(
                f"parameter '{ENVIRONMENT}': {path} is no tar, plain or packed with gzip, bzip2 or xz "
                "(conda-pack --format tar.gz makes one)"
            )
        with tarfile.open(path) as archive:
            # An environment is code that runs as the executor: links to an interpreter elsewhere are its own affair.
            # Python 3.11 knows filters from its fourth release on; Debian 12 has an earlier one.
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)
            archive.extractall(folder.path)  # noqa: S202 - with the filter, where there is one
        environment = _in_folder(folder.path)
    except Exception as error:  # a cut archive raises what its compression does: EOFError, zlib.error
        folder.remove()
        if isinstance(error, LoadError):
            raise
        raise LoadError(f"parameter '{ENVIRONMENT}': {path} cannot be unpacked: {error}") from error
    finalize(environment, folder.remove)
    return environment


def _in_folder(folder: Path) -> Environment:
    python = folder / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise LoadError(f"parameter '{ENVIRONMENT}': the environment has no interpreter {python}")
    return Environment(str(python), folder, _activated(folder))


def _activated(folder: Path) -> dict[str, str]:
    """The executor's variables with what `activate` would set. Raises LoadError if its scripts cannot be run."""
    own = own_variables()
    # The executor's own path is no business of a foreign interpreter.
    for name in ("PYTHONPATH", "PYTHONHOME"):
        own.pop(name, None)
    own["PYTHONNOUSERSITE"] = "1"
    own["VIRTUAL_ENV"] = own["CONDA_PREFIX"] = str(folder)
    own["PATH"] = os.pathsep.join([str(folder / "bin"), own.get("PATH", os.defpath)])
    libraries = [str(folder / "lib"), *filter(None, [own.get("LD_LIBRARY_PATH", "")])]
    own["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    scripts = sorted(map(str, folder.glob("etc/conda/activate.d/*.sh")))
    return _after(scripts, own) if scripts else own


def _after(scripts: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables as the scripts leave them. As with conda, a command of theirs may fail. Raises LoadError."""
    command = ["bash", "-c", 'for script; do . "$script" >&2; done; exec env -0', "bash", *scripts]
    told = f"parameter '{ENVIRONMENT}': bash cannot run {', '.join(scripts)}"
    try:
        shell = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise LoadError(f"{told}: {error}") from error
    try:
        output, _ = shell.communicate(timeout=ACTIVATION_LIMIT_S)
    except subprocess.TimeoutExpired:
        end_with_children(shell)
        raise LoadError(f"{told}: they take longer than {ACTIVATION_LIMIT_S:g} s") from None
    if not output:
        raise LoadError(f"{told}: one of them ended it with status {shell.returncode}")
    said = (os.fsdecode(one).partition("=") for one in output.split(b"\0") if one)
    return {name: value for name, _, value in said}


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kills the process, if it still runs, and what it started, if it leads a session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"the executor itself has {package}"
    return Path(spec.origin).parent

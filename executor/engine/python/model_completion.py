"""Runs a python model's `auto_complete_config` in a process of its own, as Triton does (triton-spec 8).

If the model's code ends its process, exhausts memory or never returns, only that process is lost, not the executor.
What the model imports and changes ends with that process too. The process reads the configuration from its standard
input and writes its answer to its standard output; what the model prints goes to the executor's standard error.

This module is both sides: `completed_apart` in the executor, `main` in the process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from executor.engine.python.instance_code import InstanceCode
from executor.engine.python.model import called, error_text, forget, import_model_class, takes
from executor.engine.python.process.environments import EXECUTORS_OWN, Environment, end_with_children
from executor.engine.python.triton_python_backend_utils import ModelConfig
from shared.contract.errors import ConfigError, LoadError
from shared.process.endings import ending
from shared.process.machine import fill_standard_streams

LIMIT_S = 60.0
"""Time for starting Python, importing the model and running the function. Triton allows 30 s for starting."""

_FAILSAFE_S = 5.0
"""How long after the limit the process ends itself, if it holds the interpreter's lock and the executor is gone."""
_PARENT_POLL_S = 0.5


class CompletionResult(msgspec.Struct, frozen=True):
    """The answer of the process: a configuration, or an error.

    is_import_error  the model's file cannot be imported, so the load fails
    """

    config: str = ""
    error: str = ""
    is_import_error: bool = False


def completed_apart(
    config_json: str, path: Path, limit_s: float = LIMIT_S, environment: Environment = EXECUTORS_OWN
) -> str:
    """The configuration as the model in that file completes it; Triton's JSON in, and out. Blocks.

    Raises ConfigError if the model refuses the configuration, or its process ends early or is late; LoadError if the
    model cannot be imported.
    """
    name = _name(config_json)
    # A model beside it may have closed some.
    fill_standard_streams()
    process = subprocess.Popen(
        environment.command(__name__, [str(path), str(limit_s + _FAILSAFE_S)]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment.variables,
        start_new_session=True,
    )
    try:
        answer, _ = process.communicate(config_json.encode(), timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"auto_complete_config of model '{name}' did not finish within {limit_s:g} s "
            "(setting auto_complete_timeout_secs)"
        ) from None
    finally:
        end_with_children(process)
    try:
        outcome = msgspec.json.decode(answer, type=CompletionResult)
    except msgspec.DecodeError:
        raise ConfigError(f"auto_complete_config of model '{name}': its process {ending(process.returncode)}") from None
    if outcome.error:
        raise (LoadError if outcome.is_import_error else ConfigError)(outcome.error)
    return outcome.config


def completed_here(config_json: str, path: Path) -> str:
    """As `completed_apart`, in this process."""
    code = InstanceCode(_name(config_json), path.parent.name, str(path.parent))
    model_class = import_model_class(path, code)
    try:
        return _completed(model_class, config_json, code)
    finally:
        forget(code)


def main() -> None:
    """Completes one configuration. Arguments: the model's file, and the seconds after which the process ends in any
    case.
    """
    path, end_after_s = Path(sys.argv[1]), float(sys.argv[2])
    signal.setitimer(signal.ITIMER_REAL, end_after_s)
    threading.Thread(target=_end_with_parent, args=[os.getppid()], daemon=True).start()
    answers = os.dup(sys.stdout.fileno())
    # From here on whatever prints to standard output, in any language, prints to standard error.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    outcome = _outcome(sys.stdin.read(), path)
    with suppress(Exception):  # the model may have closed it, or put something else in its place
        sys.stdout.flush()
    with os.fdopen(answers, "wb") as stream:
        stream.write(msgspec.json.encode(outcome))
    # Neither threads of the model nor processes that it started keep the executor waiting.
    os.killpg(0, signal.SIGKILL)


def _end_with_parent(parent: int) -> None:
    """Ends this process, and the processes that the model started, when the executor has ended."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def _outcome(config_json: str, path: Path) -> CompletionResult:
    try:
        return CompletionResult(config=completed_here(config_json, path))
    except LoadError as error:
        return CompletionResult(error=error.message, is_import_error=not isinstance(error, ConfigError))


def _completed(model_class: type[Any], config_json: str, code: InstanceCode) -> str:
    name = _name(config_json)
    complete = getattr(model_class, "auto_complete_config", None)
    if complete is None:
        return config_json
    try:
        with called(code):
            completed = complete(ModelConfig(config_json))
            if isinstance(completed, ModelConfig):
                return completed.to_json()
    except BaseException as error:  # the model's own code, or a value of it
        remedy = "" if takes(complete) else "; it must be a @staticmethod with one parameter, the ModelConfig"
        raise ConfigError(f"auto_complete_config of model '{name}': {error_text(error)}{remedy}") from error
    raise ConfigError(
        f"auto_complete_config of model '{name}' must return the ModelConfig it was given, "
        f"not {type(completed).__name__}"
    )


def _name(config_json: str) -> str:
    return json.loads(config_json).get("name", "")

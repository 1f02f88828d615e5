"""The process of an instance, and another one in its place when it has ended.

A call that takes longer than the limit ends the process, not the executor. If processes end one after the other before
they have run anything, there is none until the next one is due (`Restarts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from executor.configuration.version_files import lines_of_version
from executor.engine.base import LoadRequest
from executor.engine.python.process.environments import EXECUTORS_OWN, Environment
from executor.engine.python.process.instance_process import CannotStartError, InstanceProcess, ProcessLostError
from executor.engine.python.process.messages import Answer, Answered, Call, Load, Loaded, Raised
from executor.engine.python.process.restarts import Restarts
from shared.contract.errors import Code, LoadError, MeshError, ModelError
from shared.process import logs

START_LIMIT_S = 60.0
"""Time for another process to load the model, or `START_FACTOR` times what the first one took, if that is longer."""
START_FACTOR = 10
CODE_BYTES_MAX = 1 << 20
"""Files up to this size may be touched, as long as their content stays. To read it of larger ones takes long."""


class NotNowError(MeshError):
    """There is no process, and none may be started yet."""

    code = Code.UNAVAILABLE


class CurrentProcess:
    """answered, lost  hear the process's answers to open requests, on a thread of its own; and that it has ended

    abilities  what the model can do, as the process says
    is_first   no process of the instance has ended yet
    limit_s    how long a call may take; 0: without a limit
    now        the process, which may have ended unnoticed; None if its end was noticed
    """

    def __init__(
        self,
        load: Load,
        environment: Environment,
        *,
        answered: Callable[[InstanceProcess, Answered], None],
        lost: Callable[[], None],
    ) -> None:
        """Starts the process and loads the model there. Raises LoadError."""
        self._load = load
        self._instance = load.request.instance_name
        self._environment = environment
        self._answered = answered
        self._lost = lost
        self._files = _lines(load.request) if load.request.config.sequence_batching else frozenset[str]()
        self.restarts = Restarts()
        self.is_first = True
        self.limit_s = 0.0
        self.now: InstanceProcess | None = None
        began_s = time.monotonic()
        try:
            self.now, self.abilities = self._started(0.0)
        except ProcessLostError as error:
            raise LoadError(f"the process of model instance '{self._instance}' {error}") from error
        except CannotStartError as error:
            raise LoadError(f"model instance '{self._instance}' has no process: {error}") from error
        except ModelError as error:
            raise LoadError(error.message) from error
        self._start_limit_s = max(START_LIMIT_S, START_FACTOR * (time.monotonic() - began_s))

    def _started(self, limit_s: float) -> tuple[InstanceProcess, Loaded]:
        """A process that has loaded the model. Raises ProcessLostError, CannotStartError or ModelError."""
        request = self._load.request
        process = InstanceProcess(self._instance, request.version_name, self._environment, self._answered)
        try:
            loaded = _checked(process.call(self._load, limit_s))
            if not isinstance(loaded, Loaded):
                raise ProcessLostError("answered a load with something else")
        except BaseException:
            process.kill()
            raise
        logs.debug("process of an instance started", instance=self._instance, pid=process.pid)
        return process, loaded

    @property
    def is_alive(self) -> bool:
        return self.now is not None and self.now.is_alive

    @property
    def is_ready(self) -> bool:
        """False while none may be started. Without a process the next batch has another one started. May be asked from
        any thread."""
        if self.restarts.wait_s(time.monotonic()):
            return False
        process = self.now
        if process is None or not process.is_alive or not self.abilities.has_readiness:
            return True
        return process.is_ready()

    def start(self) -> None:
        """Sees to it that there is a process. Raises NotNowError."""
        self.notice_end()
        while self.now is None:
            if wait_s := self.restarts.wait_s(time.monotonic()):
                raise NotNowError(
                    f"model instance '{self._instance}' has no process: the last one {self.restarts.reason}; "
                    f"the next one is started in {wait_s:.1f} s"
                )
            try:
                self._check_files()
                self.now, self.abilities = self._started(self._start_limit_s)
            except (ProcessLostError, CannotStartError, ModelError) as error:
                reason = error.message if isinstance(error, ModelError) else str(error)
                self.restarts.ended(f"could not be started again: {reason}", time.monotonic())
                logs.error("instance has no process", instance=self._instance, cause=self.restarts.reason)

    def _check_files(self) -> None:
        """Raises CannotStartError if the process would load another model: the states that it gets, and the other
        instances, belong to the one that was loaded.
        """
        if not self._files:
            return
        request = self._load.request
        try:
            gone = self._files.difference(_lines(request))
        except OSError as error:
            raise CannotStartError(f"the files of model '{request.config.name}' cannot be read: {error}") from error
        # What has come since may be the model's own.
        if gone:
            path = min(gone).rsplit(" ", 2)[0]
            raise CannotStartError(f"{path} of model '{request.config.name}' was changed since: load the model again")

    def call(self, call: Call) -> Answer:
        """Makes a call. Raises what the instance raised, or ProcessLostError."""
        assert self.now is not None, "started before"
        try:
            return _checked(self.now.call(call, self.limit_s))
        except ProcessLostError as lost:
            self.end(str(lost))
            raise

    def tell(self, call: Call) -> Answer | None:
        """Makes a call of the present process. None if there is none, or it ends. Raises what the instance raised."""
        if not self.is_alive:
            return None
        try:
            return self.call(call)
        except ProcessLostError:
            return None

    def notice_end(self) -> None:
        """Ends what is left of a process that has ended."""
        if self.now is not None and not self.now.is_alive:
            self.end(self.now.end())

    def end(self, reason: str) -> None:
        """Ends the process. reason: what has become of it."""
        assert self.now is not None
        logs.error("process of an instance ended", instance=self._instance, pid=self.now.pid, cause=reason)
        self.now.kill()
        self.now, self.is_first = None, False
        self.restarts.ended(reason, time.monotonic())
        self._lost()

    def close(self) -> None:
        if self.now is not None:
            process, self.now = self.now, None
            process.close()
        # Engines are circles, and what the environment's archive was unpacked to is not to wait for the collector.
        self._environment = EXECUTORS_OWN


def _lines(request: LoadRequest) -> frozenset[str]:
    code_dir = request.code.parent if request.code else None
    return frozenset(lines_of_version(request.model_dir, request.version, code_dir, content_max=CODE_BYTES_MAX))


def _checked(answer: Answer) -> Answer:
    """The answer. Raises ModelError for what the instance raised."""
    if isinstance(answer, Raised):
        raise ModelError(answer.message, Code(answer.code))
    return answer

"""One process of an instance, seen from its executor."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import threading
from contextlib import suppress

from executor.engine.python.model_metrics import forget_reported, report_families
from executor.engine.python.process import messages
from executor.engine.python.process.environments import Environment
from executor.engine.python.process.frames import EndedError, FrameError, Frames, SharedMemory
from executor.engine.python.process.host import SHOW_STACK
from executor.engine.python.process.messages import (
    Answer,
    AskReadiness,
    Call,
    Cancel,
    Close,
    Families,
    LogLine,
    ModelReady,
    Note,
)
from shared.process import logs

CLOSE_LIMIT_S = 5.0
"""Time for the model's `finalize`, and for the end of its process."""
END_LIMIT_S = 5.0
"""Time for a process to end that has closed its sockets: the kernel may have much memory to write into a core dump."""
READY_LIMIT_S = 10.0
"""Longer than anybody waits for whether a model is ready."""
_STACK_S = 0.3
"""Time for a process to write where it hangs."""
_COMPLAINT = ord("!")
"""First byte of an answer that says why the process cannot start (`bootstrap.tell`)."""

model_log = logging.getLogger("seqmesh.model")


class ProcessLostError(Exception):
    """The process has ended, or was ended; the text says how. It answers nothing more."""


class CannotStartError(Exception):
    """The environment cannot run an instance; the text says what it lacks."""


class InstanceProcess:
    """A process, from its start to its end. One call at a time; `is_ready` may be asked beside it.

    The kernel ends the process with the thread that started it, so the thread must live as long as the process.
    """

    def __init__(self, name: str, environment: Environment) -> None:
        self._name = name
        self._environment = environment
        outgoing, incoming = SharedMemory.made(), SharedMemory.made()
        calls, their_calls = socket.socketpair()
        notes, their_notes = socket.socketpair()
        theirs = (their_calls.fileno(), their_notes.fileno(), incoming.descriptor, outgoing.descriptor)
        try:
            self._process = subprocess.Popen(
                environment.command(
                    "executor.engine.python.process.host", [*map(str, theirs), str(os.getpid())], theirs[0]
                ),
                env=environment.variables,
                stdin=subprocess.DEVNULL,
                pass_fds=theirs,
                start_new_session=True,
            )
        except OSError as error:
            raise CannotStartError(f"cannot start {environment.python}: {error}") from error
        finally:
            their_calls.close()
            their_notes.close()
        self._frames = Frames(calls, outgoing, incoming)
        self._notes = Frames(notes)
        # A process that the model started may hold the socket open, so its end tells nothing: the descriptor of the
        # process does.
        self._descriptor = os.pidfd_open(self._process.pid)
        self._waiting = select.poll()
        self._waiting.register(calls, select.POLLIN)
        self._waiting.register(self._descriptor, select.POLLIN)
        self._asking = threading.Lock()
        self._is_over = False
        self._answered = threading.Event()
        self._says_ready = True
        self._reader = threading.Thread(target=self._read_notes, name=f"{name} notes", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._is_over and not self._ends_within(0.0)

    def call(self, call: Call, limit_s: float = 0.0) -> Answer:
        """Makes a call. limit_s: how long it may take; 0: for ever. Raises ProcessLostError, also after it has ended
        a process that was late, or that answered with nonsense. CannotStartError can only come of the first call.
        """
        try:
            self._frames.send(messages.encode(call))
            ready = self._waiting.poll(limit_s * 1000 if limit_s else None)
            if not ready:
                raise self._late(limit_s)
            return self._frames.receive(_decoded)
        except EndedError as error:
            # Its sockets close a moment before it has ended.
            if self._ends_within(END_LIMIT_S):
                raise ProcessLostError(self.end()) from error
            self.kill()
            raise ProcessLostError(f"was ended: {error}") from error
        except FrameError as error:
            self.kill()
            raise ProcessLostError(f"was ended, because it sent {error}") from error

    def _late(self, limit_s: float) -> ProcessLostError:
        logs.error("model hangs, its process is ended", instance=self._name, pid=self.pid, seconds=limit_s)
        with suppress(ProcessLookupError):
            os.kill(self.pid, SHOW_STACK)
            self._ends_within(_STACK_S)
        self.kill()
        return ProcessLostError(f"did not come back within {limit_s:g} s and was ended")

    def is_ready(self) -> bool:
        """Asks the model whether it is ready; False if the process has ended."""
        self._answered.clear()
        try:
            with self._asking:
                self._notes.send(messages.encode(AskReadiness()))
        except FrameError:
            return False
        return self._answered.wait(READY_LIMIT_S) and self._says_ready and self.is_alive

    def cancel(self, number: int, row: int) -> None:
        """Tells the model that nobody waits for a row of a batch any more. May be called from any thread."""
        with suppress(FrameError), self._asking:  # a process that has ended runs nothing
            self._notes.send(messages.encode(Cancel(number, row)))

    def close(self) -> None:
        """Has the model finalized, and waits for the end of the process; not for ever."""
        try:
            self.call(Close(), CLOSE_LIMIT_S)
            self._ends_within(CLOSE_LIMIT_S)
        except ProcessLostError as lost:
            logs.error("model not finalized", instance=self._name, pid=self.pid, cause=str(lost))
        self.kill()

    def kill(self) -> None:
        """Ends the process, if it lives, and those that the model started; frees what it was given."""
        if self._is_over:
            return
        self._is_over = True
        with suppress(ProcessLookupError):
            # Of a process that has ended, too: it may have left others behind.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # Whoever reads it is woken.
        with suppress(OSError):
            self._notes.socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._answered.set()
        forget_reported(self)
        self._frames.close()
        self._notes.close()
        os.close(self._descriptor)

    def end(self) -> str:
        """Takes leave of a process that has ended by itself. Says how it ended."""
        self._process.wait()
        self.kill()
        code = self._process.returncode
        if code >= 0:
            return f"ended with exit status {code}"
        return f"ended with signal {-code} ({signal.Signals(-code).name})"

    def _ends_within(self, seconds: float) -> bool:
        """Whether the process has ended, or does within a time. May be called from any thread."""
        ended = select.poll()
        ended.register(self._descriptor, select.POLLIN)
        return bool(ended.poll(seconds * 1000))

    def _read_notes(self) -> None:
        while True:
            try:
                note: Note = self._notes.receive(messages.decode_note)
            except FrameError:
                return
            match note:
                case LogLine():
                    fields = {"instance": self._name, **note.fields}
                    model_log.log(note.level, "%s", note.message, extra={"fields": fields})
                case Families():
                    report_families(self, note.families)
                case ModelReady():
                    self._says_ready = note.is_ready
                    self._answered.set()


def _decoded(frame: memoryview) -> Answer:
    if len(frame) and frame[0] == _COMPLAINT:
        raise CannotStartError(bytes(frame[1:]).decode(errors="replace"))
    return messages.decode_answer(frame)

"""One process of an instance, seen from its executor.

Beside the thread that makes calls of it, one thread reads what the process says by itself, and one sends it orders: so
whoever gives an order, the event loop too, never waits for a process that does not read.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from queue import SimpleQueue

from executor.engine.python.model_metrics import forget_reported, report_families
from executor.engine.python.process import messages
from executor.engine.python.process.environments import Environment
from executor.engine.python.process.frames import EndedError, FrameError, pair
from executor.engine.python.process.host import SHOW_STACK
from executor.engine.python.process.made_calls import MadeCalls
from shared.process import logs
from shared.process.endings import ending
from shared.process.machine import fill_standard_streams

CLOSE_LIMIT_S = 5.0
"""Time for the model's `finalize`, and for the end of its process."""
END_LIMIT_S = 5.0
"""Time for a process to end that has closed its sockets: the kernel may have much memory to write into a core dump."""
READY_LIMIT_S = 10.0
"""Longer than anybody waits for whether a model is ready."""
LOOKS_PER_LIMIT = 8
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
    """A process, from its start to its end. One call at a time; `is_ready` and `order` may be called beside it, from
    any thread.

    version   of the model, while the instance waits for answers to calls (`version_name`)
    answered  called with each answer to an open request, on a thread that must not wait

    The kernel ends the process with the thread that started it, so the thread must live as long as the process.
    """

    def __init__(
        self,
        name: str,
        version: str,
        environment: Environment,
        answered: Callable[[InstanceProcess, messages.Answered], None],
    ) -> None:
        self._name = name
        self._said = answered
        try:
            self._start(environment)
        except OSError as error:
            raise CannotStartError(f"cannot start {environment.python}: {error}") from error
        self._waiting = select.poll()
        self._waiting.register(self._frames.socket, select.POLLIN)
        self._waiting.register(self._descriptor, select.POLLIN)
        self._orders: SimpleQueue[messages.Order | None] = SimpleQueue()
        self._calls = MadeCalls(version, name, self.order)
        self._is_over = False
        self._answered = threading.Event()
        self._says_ready = True
        self._beside = [
            threading.Thread(target=work, name=f"{name} {what}", daemon=True)
            for work, what in ((self._read_notes, "notes"), (self._send_orders, "orders"))
        ]
        for thread in self._beside:
            thread.start()

    def _start(self, environment: Environment) -> None:
        """Starts the process. Raises OSError, and leaves nothing open then."""
        # A model beside it may have closed some.
        fill_standard_streams()
        with ExitStack() as theirs, ExitStack() as mine:
            self._frames, their_calls = pair()
            mine.callback(self._frames.close)
            theirs.enter_context(their_calls.socket)
            self._notes, their_notes = pair(waits=True)
            mine.callback(self._notes.close)
            theirs.enter_context(their_notes.socket)
            given = (*their_calls.descriptors, *their_notes.descriptors)
            self._process = subprocess.Popen(
                environment.command(
                    "executor.engine.python.process.host", [*map(str, given), str(os.getpid())], given[0]
                ),
                env=environment.variables,
                stdin=subprocess.DEVNULL,
                pass_fds=[one for one in given if one >= 0],
                start_new_session=True,
            )
            mine.callback(self._process.wait)
            mine.callback(self._process.kill)
            # A process that the model started may hold the socket open, so its end tells nothing: the descriptor of
            # the process does.
            self._descriptor = os.pidfd_open(self._process.pid)
            mine.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._is_over and not self._ends_within(0.0)

    def call(self, call: messages.Call, limit_s: float = 0.0) -> messages.Answer:
        """Makes a call. limit_s: how long it may take, but for the time in which the instance waits for the answer to
        a call of its own; 0: for ever. Raises ProcessLostError, also after it has ended a process that was late, or
        that answered with nonsense. CannotStartError can only come of the first call.
        """
        try:
            # A process that has ended may have said why before: `receive` finds that, or that it has ended.
            with suppress(EndedError):
                self._frames.send(messages.encode(call))
            if not self._comes_within(limit_s):
                raise self._late(limit_s)
            if self._ends_within(0.0):
                # What it has said is there. A process that the model has forked may hold the socket open for ever.
                self._frames.shut_down()
            answer = self._frames.receive(_decoded)
            self._calls.turn_over()
            return answer
        except EndedError as error:
            # Its sockets close a moment before it has ended.
            if self._ends_within(END_LIMIT_S):
                raise ProcessLostError(self.end()) from error
            self.kill()
            raise ProcessLostError(f"was ended: {error}") from error
        except FrameError as error:
            self.kill()
            raise ProcessLostError(f"was ended, because of {error}") from error

    def _comes_within(self, limit_s: float) -> bool:
        """Whether the answer to a call comes in time. Counts looks, as `executor.lease.hung_calls` does."""
        if not limit_s:
            return bool(self._waiting.poll())
        looks = 0
        while looks < LOOKS_PER_LIMIT:
            if self._waiting.poll(limit_s * 1000 / LOOKS_PER_LIMIT):
                return True
            looks = 0 if self._calls.are_awaited else looks + 1
        return False

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
        self.order(messages.AskReadiness())
        return self._answered.wait(READY_LIMIT_S) and self._says_ready and self.is_alive

    def order(self, order: messages.Order) -> None:
        """Tells the process something; nothing happens if it has ended. Returns at once."""
        self._orders.put(order)

    def close(self) -> None:
        """Has the model finalized, and waits for the end of the process; not for ever."""
        try:
            self.call(messages.Close(), CLOSE_LIMIT_S)
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
        # What it has said before its end is read; then both threads end.
        self._notes.shut_down()
        self._orders.put(None)
        for thread in self._beside:
            thread.join()
        self._calls.cancel_all()
        self._answered.set()
        forget_reported(self)
        self._frames.close()
        self._notes.close()
        os.close(self._descriptor)

    def end(self) -> str:
        """Takes leave of a process that has ended by itself. Says how it ended."""
        self._process.wait()
        self.kill()
        return ending(self._process.returncode)

    def _ends_within(self, seconds: float) -> bool:
        """Whether the process has ended, or does within a time. May be called from any thread."""
        ended = select.poll()
        ended.register(self._descriptor, select.POLLIN)
        return bool(ended.poll(seconds * 1000))

    def _read_notes(self) -> None:
        while True:
            try:
                note: messages.Note = self._notes.receive(messages.decode_note)
            except EndedError:
                return
            except FrameError as error:
                # Nobody would read its calls any more.
                self._give_up(error)
                return
            match note:
                case messages.LogLine():
                    fields = {"instance": self._name, **note.fields}
                    model_log.log(note.level, "%s", note.message, extra={"fields": fields})
                case messages.Families():
                    report_families(self, note.families)
                case messages.ModelReady():
                    self._says_ready = note.is_ready
                    self._answered.set()
                case messages.Answered():
                    self._said(self, note)
                case _:
                    self._calls.note(note)
            # While the process says nothing more it would be kept, with its tensors.
            del note

    def _send_orders(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                self._notes.send(messages.encode(order))
                del order  # As of a note.
        except EndedError:
            return
        except FrameError as error:
            # It would wait for the order for ever.
            self._give_up(error)

    def _give_up(self, error: FrameError) -> None:
        """Has the process end, on a thread beside the calls; who waits for an answer learns of it."""
        logs.error("process of an instance is ended", instance=self._name, pid=self.pid, cause=str(error))
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _decoded(frame: memoryview) -> messages.Answer:
    if len(frame) and frame[0] == _COMPLAINT:
        raise CannotStartError(bytes(frame[1:]).decode(errors="replace"))
    return messages.decode_answer(frame)

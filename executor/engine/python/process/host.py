"""The process of an instance: makes calls of a `PythonEngine` for its executor. `bootstrap.py` starts it.

The model's methods run on the main thread, as in Triton. A thread beside it takes the executor's orders, sends what the
model counts, and ends the process, with all that the model started, when the executor has ended. If a model holds the
interpreter then, the kernel does that (Linux: PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from executor.engine.base import BatchResult, Row, RowError, RowResult
from executor.engine.error_texts import class_and_text
from executor.engine.python.calls import install
from executor.engine.python.decoupled import DecoupledEngine, in_this_process
from executor.engine.python.engine import PythonEngine
from executor.engine.python.model_metrics import custom_families
from executor.engine.python.process import messages
from executor.engine.python.process.frames import FrameError, Frames
from executor.engine.python.process.remote_answers import RemoteAnswers, Window
from executor.engine.python.process.remote_calls import RemoteCalls
from shared.contract.errors import Code, MeshError, sendable
from shared.process.readers import print_patiently

SHOW_STACK = signal.SIGUSR2
"""Has the process write its threads' stacks to standard error, whatever it is doing."""
COUNTS_INTERVAL_S = 1.0
_PR_SET_PDEATHSIG = 1
_TEXT_MAX = 1 << 16


def main() -> None:
    """Serves one instance until it is closed, or the executor has ended. Arguments: the descriptors of two connections
    (`Frames.descriptors`), and the executor's process id.
    """
    *descriptors, executor = map(int, sys.argv[1:])
    half = len(descriptors) // 2
    frames, side = Frames.inherited(descriptors[:half]), Side(Frames.inherited(descriptors[half:]))
    _end_with(executor)
    print_patiently()
    faulthandler.enable()
    faulthandler.register(SHOW_STACK)
    try:
        with install(side.calls):
            serve(frames, side)
    except FrameError as error:
        _end_because_of(error)
    # Threads of the model, or what it registered for the end, must not keep a closed instance alive.
    with suppress(Exception):  # the model may have closed what is written to, or put something else there
        logging.shutdown()
        sys.stdout.flush()
    os._exit(0)


def serve(frames: Frames, side: Side) -> None:
    """Makes calls until the instance is closed. Raises FrameError when the executor has ended."""
    engine: PythonEngine | None = None
    while True:
        call = frames.receive(messages.decode_call)
        side.calls.turn += 1
        try:
            if isinstance(call, messages.Load):
                engine, answer = _load(call, side)
            else:
                assert engine is not None, "an instance is loaded first"
                answer = _made(engine, call, side)
        except BaseException as error:  # noqa: BLE001 - the model's own code; it is for the executor
            answer = _raised(error)
        if isinstance(call, messages.Close):
            side.count()
        frames.send(messages.encode(answer))
        if isinstance(call, messages.Close):
            return
        # While the instance waits it would keep its last batch.
        del call, answer


def _load(call: messages.Load, side: Side) -> tuple[PythonEngine, messages.Answer]:
    logging.basicConfig(level=call.log_level, handlers=[Forwarding(side)], force=True, format="%(message)s")
    # The executor's level may change meanwhile, and is applied there.
    logging.getLogger("seqmesh.model").setLevel(logging.DEBUG)
    side.start()
    engine = side.engine = in_this_process(call.request)
    return engine, msgspec.convert(engine, messages.Loaded, from_attributes=True)


def _made(engine: PythonEngine, call: messages.Call, side: Side) -> messages.Answer:
    match call:
        case messages.Run():
            return _ran(engine, call, side)
        case messages.LoadStates():
            engine.load_states(call.slots, call.states)
        case messages.Restore():
            engine.restore_model(call.correlation_id, call.state)
        case messages.ReleaseSequences():
            if call.correlation_id is None:
                engine.release_all()
            else:
                engine.release(call.correlation_id)
        case messages.DescribeState():
            return messages.Done(engine.describe_state(call.slot))
        case messages.Close():
            engine.close()
        case messages.Load():
            raise AssertionError("an instance is loaded once")
    return messages.Done()


def _ran(engine: PythonEngine, call: messages.Run, side: Side) -> messages.Ran:
    for slot, states in call.states.items():
        if states is None:
            engine.drop_state(slot)
        else:
            engine.load_states([slot], [states])
    given = call.rows
    if isinstance(engine, DecoupledEngine):
        given = [
            msgspec.structs.replace(row, answers=side.answers_to(number)) if number else row
            for row, number in zip(call.rows, call.answers, strict=True)
        ]
    result = side.run(engine, given, call)
    rows: list[RowResult | None] = []
    errors: dict[int, RowError] = {}
    for index, (row, one) in enumerate(zip(given, result.rows, strict=True)):
        if isinstance(one, RowResult) and one.late is not None:
            one.late.give(side.answers_to(call.answers[index]))
            one = RowResult((), open=True)  # noqa: PLW2901
        rows.append(_with_states(engine, row, one) if isinstance(one, RowResult) else None)
        if isinstance(one, RowError):
            errors[index] = messages.sendable_error(one)
    return messages.Ran(rows, errors, result.timings)


def _with_states(engine: PythonEngine, row: Row, result: RowResult) -> RowResult:
    """A result; between two passes with the states that the next one begins with, for the executor to keep."""
    if not result.again or row.slot is None:
        return result
    return msgspec.structs.replace(result, states=engine.states_at(row.slot))


def _raised(error: BaseException) -> messages.Raised:
    if isinstance(error, MeshError):
        return messages.Raised(error.code, sendable(error.message))
    return messages.Raised(Code.INTERNAL, sendable(class_and_text(error)))


class Side:
    """What goes on beside the calls. May be used from any thread."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._process = os.getpid()
        # Re-entrant: the collector of garbage may have something sent on a thread that sends (`RemoteAnswers.end`).
        self._sending = threading.RLock()
        self._due: deque[bytes] = deque()
        self._is_sending = False
        self._sent = messages.encode(messages.Families(()))
        self._running: Mapping[int, Row] = {}
        """The rows of the batch that runs now, or ran last, by the numbers of their requests."""
        self._unwanted: set[int] = set()
        """Requests that nobody waits for any more: of that batch, or of the next one, which such an order may overtake
        on its way."""
        self._cancelling = threading.Lock()
        self._window = Window()
        self._answers: WeakValueDictionary[int, RemoteAnswers] = WeakValueDictionary()
        self._is_asking = False
        """Whether the model has not said yet whether it is ready."""
        self.calls = RemoteCalls(self.send)
        self.engine: PythonEngine | None = None
        """None: the model is being loaded, and already asks for other models (`is_model_ready`)."""

    def start(self) -> None:
        """From now on the executor's orders are taken."""
        threading.Thread(target=self._listen, name="seqmesh side", daemon=True).start()

    def run(self, engine: PythonEngine, rows: Sequence[Row], call: messages.Run) -> BatchResult:
        """Runs a batch, whose rows may be cancelled meanwhile."""
        running = dict(zip(call.answers, rows, strict=True))
        with self._cancelling:
            self._running = running
            self._unwanted &= running.keys()
            for number in self._unwanted:
                engine.cancel(running[number])
        return engine.run(rows, call.want_state)

    def answers_to(self, number: int) -> RemoteAnswers:
        """Where the answers to an open request go."""
        answers = RemoteAnswers(number, self._window, self.send)
        with self._cancelling:
            self._answers[number] = answers
            if number in self._unwanted:
                answers.not_wanted()
        return answers

    @property
    def is_forked(self) -> bool:
        """Whether this is not the instance's process, but one that the model has forked. It must say nothing here: its
        words would come among those of the instance, whose threads may have held any lock when they were copied.
        """
        return os.getpid() != self._process

    def send(self, note: messages.Note) -> None:
        """Says something. If the executor has ended, nobody needs it."""
        if self.is_forked:
            raise RuntimeError("a process that a model has forked answers no request")
        self._send(messages.encode(note))

    def count(self) -> None:
        """Sends the model's metrics, if they have changed."""
        families = messages.encode(messages.Families(custom_families()))
        if families != self._sent:
            self._sent = families
            self._send(families)

    def _send(self, frame: bytes) -> None:
        with self._sending:
            self._due.append(frame)
            if self._is_sending:
                return
            self._is_sending = True
            try:
                while self._due:
                    self._frames.send(self._due.popleft())
            except FrameError as error:
                # The executor has ended, or it would wait for ever for what was not sent.
                _end_because_of(error)
            finally:
                self._is_sending = False

    def _listen(self) -> None:
        waiting = select.poll()
        waiting.register(self._frames.socket, select.POLLIN)
        counted_s = time.monotonic()
        while True:
            # By the clock: with enough to do, an order comes before each second is over.
            if time.monotonic() - counted_s >= COUNTS_INTERVAL_S:
                self.count()
                counted_s = time.monotonic()
            if not waiting.poll(COUNTS_INTERVAL_S * 1000):
                continue
            try:
                order: messages.Order = self._frames.receive(messages.decode_order)
            except FrameError:
                _end_all()
                return
            self._take(order)
            del order  # Else an answer to a call stays while no other order comes.

    def _take(self, order: messages.Order) -> None:
        match order:
            case messages.AskReadiness():
                self._ask_readiness()
            case messages.CallAnswered():
                self.calls.answered(order)
            case messages.AnswersTaken():
                self._window.left(order)
            case messages.NotWanted():
                self._cancel(order.number)

    def _cancel(self, number: int) -> None:
        with self._cancelling:
            self._unwanted.add(number)
            answers, row = self._answers.get(number), self._running.get(number)
            if answers is not None:
                answers.not_wanted()
            elif self.engine is not None and row is not None:
                self.engine.cancel(row)

    def _ask_readiness(self) -> None:
        # The answer that is to come answers this too: a model that hangs there would have a thread for each time.
        if not self._is_asking:
            self._is_asking = True
            # The model may wait in it for something that another order brings.
            threading.Thread(target=self._tell_readiness, name="seqmesh ready", daemon=True).start()

    def _tell_readiness(self) -> None:
        is_ready = self.engine is not None and self.engine.is_ready()
        self._is_asking = False
        self.send(messages.ModelReady(is_ready))


class Forwarding(logging.Handler):
    """Sends records to the executor's log."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self._side = side

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields: dict[Any, Any] = getattr(record, "fields", {})
            text = self.format(record)[:_TEXT_MAX].encode(errors="replace").decode()
            said = {sendable(str(name)): sendable(str(value)) for name, value in fields.items()}
            if self._side.is_forked:
                os.write(2, f"{text}\n".encode())
                return
            self._side.send(messages.LogLine(record.levelno, text, said))
        except Exception:  # noqa: BLE001 - the model logs with wrong arguments: as everywhere, it goes on
            self.handleError(record)


def _end_with(executor: int) -> None:
    """Has this process end when the executor does. Ends it at once if that was so already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != executor:
        _end_all()


def _end_because_of(error: FrameError) -> None:
    with suppress(Exception):  # as in `main`
        print(f"the process of an instance ends: {error}", file=sys.stderr)  # noqa: T201 - nothing reaches the log
    _end_all()


def _end_all() -> None:
    """Ends this process and those that the model started."""
    os.killpg(0, signal.SIGKILL)

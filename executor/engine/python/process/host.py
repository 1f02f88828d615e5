"""The process of an instance: makes calls of a `PythonEngine` for its executor. `bootstrap.py` starts it.

The model's methods run on the main thread, as in Triton. A thread beside it answers whether the model is ready, sends
what the model counts, and ends the process, with all that the model started, when the executor has ended. If a model
holds the interpreter then, the kernel does that (Linux: PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from executor.engine.base import LoadRequest, RowError, RowResult
from executor.engine.python.engine import PythonEngine
from executor.engine.python.model_metrics import custom_families
from executor.engine.python.process import messages
from executor.engine.python.process.frames import FrameError, Frames, SharedMemory
from executor.engine.python.process.messages import (
    Answer,
    AskReadiness,
    Call,
    Cancel,
    Close,
    DescribeState,
    Done,
    DropState,
    Families,
    Load,
    Loaded,
    LoadStates,
    LogLine,
    ModelReady,
    Raised,
    Ran,
    ReleaseSequences,
    Restore,
    Run,
)
from shared.contract.errors import Code, MeshError, sendable

SHOW_STACK = signal.SIGUSR2
"""Has the process write its threads' stacks to standard error, whatever it is doing."""
COUNTS_INTERVAL_S = 1.0
_PR_SET_PDEATHSIG = 1
_TEXT_MAX = 1 << 16


def main() -> None:
    """Serves one instance until it is closed, or the executor has ended. Arguments: the descriptors of the two sockets
    and of the two segments (this side's, the executor's), and the executor's process id.
    """
    calls, notes, outgoing, incoming, executor = map(int, sys.argv[1:])
    for descriptor in (calls, notes, outgoing, incoming):
        # Processes that the model starts must not hold them open.
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - a function of C
    _end_with(executor)
    faulthandler.enable()
    faulthandler.register(SHOW_STACK)
    side = Side(Frames(socket.socket(fileno=notes)))
    frames = Frames(socket.socket(fileno=calls), SharedMemory(outgoing), SharedMemory(incoming))
    try:
        serve(frames, side)
    except FrameError:
        _end_all()
    # Threads of the model, or what it registered for the end, must not keep a closed instance alive.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def serve(frames: Frames, side: Side) -> None:
    """Makes calls until the instance is closed. Raises FrameError when the executor has ended."""
    engine: PythonEngine | None = None
    while True:
        call = frames.receive(messages.decode_call)
        try:
            if isinstance(call, Load):
                engine, answer = _load(call, side)
            else:
                assert engine is not None, "an instance is loaded first"
                side.running = call
                answer = _made(engine, call)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's own code; it is for the executor
            answer = _raised(error)
        if isinstance(call, Close):
            side.count()
        frames.send(messages.encode(answer))
        if isinstance(call, Close):
            return


def _load(call: Load, side: Side) -> tuple[PythonEngine, Answer]:
    logging.basicConfig(level=call.log_level, handlers=[Forwarding(side)], force=True, format="%(message)s")
    # The executor's level may change meanwhile, and is applied there.
    logging.getLogger("seqmesh.model").setLevel(logging.DEBUG)
    engine = PythonEngine(
        LoadRequest(
            config=call.config,
            config_json=call.config_json,
            model_dir=Path(call.model_dir),
            version=call.version,
            instance_name=call.instance_name,
            device=call.device,
            slots=call.slots,
            state_value_bytes_max=call.state_value_bytes_max,
            code=Path(call.code) if call.code else None,
        )
    )
    side.start(engine)
    return engine, Loaded(
        engine.hands_out_state,
        engine.has_release,
        engine.has_readiness,
        engine.batch_rows,
        engine.alone_because,
        engine.is_testable,
    )


def _made(engine: PythonEngine, call: Call) -> Answer:
    match call:
        case Run():
            result = engine.run(call.rows, call.want_state)
            rows = [row if isinstance(row, RowResult) else None for row in result.rows]
            errors = {
                index: msgspec.structs.replace(row, message=sendable(row.message))
                for index, row in enumerate(result.rows)
                if isinstance(row, RowError)
            }
            return Ran(rows, errors, result.timings)
        case LoadStates():
            engine.load_states(call.slots, call.states)
        case Restore():
            engine.restore_model(call.correlation_id, call.state)
        case ReleaseSequences():
            if call.correlation_id is None:
                engine.release_all()
            else:
                engine.release(call.correlation_id)
        case DropState():
            engine.drop_state(call.slot)
        case DescribeState():
            return Done(engine.describe_state(call.slot))
        case Close():
            engine.close()
        case Load():
            raise AssertionError("an instance is loaded once")
    return Done()


def _raised(error: BaseException) -> Raised:
    if isinstance(error, MeshError):
        return Raised(error.code, sendable(error.message))
    return Raised(Code.INTERNAL, sendable(f"{type(error).__name__}: {error}"))


class Side:
    """What goes on beside the calls. May be used from any thread."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._sending = threading.Lock()
        self._sent = messages.encode(Families(()))
        self.running: Call | None = None
        """The call that runs now, or ran last."""

    def start(self, engine: PythonEngine) -> None:
        """From now on the executor may ask whether the model is ready, and cancel rows."""
        threading.Thread(target=self._listen, args=(engine,), name="seqmesh side", daemon=True).start()

    def send(self, note: LogLine | Families | ModelReady) -> None:
        """Says something. If the executor has ended, nobody needs it."""
        self._send(messages.encode(note))

    def count(self) -> None:
        """Sends the model's metrics, if they have changed."""
        families = messages.encode(Families(custom_families()))
        if families != self._sent:
            self._sent = families
            self._send(families)

    def _send(self, frame: bytes) -> None:
        with self._sending:
            try:
                self._frames.send(frame)
            except FrameError as error:
                # It ends this process; or a model has more metrics than a frame takes.
                print(f"not sent to the executor: {error}", file=sys.stderr)  # noqa: T201 - the log goes there itself

    def _listen(self, engine: PythonEngine) -> None:
        waiting = select.poll()
        waiting.register(self._frames.socket, select.POLLIN)
        while True:
            if not waiting.poll(COUNTS_INTERVAL_S * 1000):
                self.count()
                continue
            try:
                order: AskReadiness | Cancel = self._frames.receive(messages.decode_order)
            except FrameError:
                _end_all()
                return
            if isinstance(order, AskReadiness):
                self.send(ModelReady(engine.is_ready()))
                continue
            running = self.running
            if isinstance(running, Run) and running.number == order.number:
                engine.cancel(running.rows[order.row])


class Forwarding(logging.Handler):
    """Sends records to the executor's log."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self._side = side

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = getattr(record, "fields", {})
        text = self.format(record)[:_TEXT_MAX].encode(errors="replace").decode()
        self._side.send(LogLine(record.levelno, text, {name: str(value) for name, value in fields.items()}))


def _end_with(executor: int) -> None:
    """Has this process end when the executor does. Ends it at once if that was so already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != executor:
        _end_all()


def _end_all() -> None:
    """Ends this process and those that the model started."""
    os.killpg(0, signal.SIGKILL)

"""The parts of an instance's process that need none: frames from a damaged process, what is kept, when to restart."""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
import struct
import sys
import tarfile
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from executor.engine.base import Row, RowError, RowResult, Timings
from executor.engine.python.process import host, messages
from executor.engine.python.process.environments import EXECUTORS_OWN, UNPACKED, environment_of
from executor.engine.python.process.frames import (
    INLINE_BYTES,
    KEPT_BYTES,
    EndedError,
    FrameError,
    Frames,
    SharedMemory,
    pair,
)
from executor.engine.python.process.host import Forwarding
from executor.engine.python.process.instance_process import CannotStartError, InstanceProcess
from executor.engine.python.process.kept import KeptByMethods, KeptForReplay, KeptStates
from executor.engine.python.process.messages import Answered, AnswersTaken, LoadStates, LogLine, Ran, Restore, Run
from executor.engine.python.process.open_requests import OpenRequests
from executor.engine.python.process.restarts import AT_ONCE, DELAY_MAX_S, Restarts
from shared.contract.errors import LoadError
from shared.contract.tensors import Tensor
from shared.process.locked_folders import remove_abandoned

Ends = tuple[Frames, Frames]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The executor's end and the process's."""
    mine, theirs = pair(waits=True)
    made = mine, Frames.inherited([os.dup(one) for one in theirs.descriptors])
    theirs.socket.close()
    yield made
    for end in made:
        end.close()


@pytest.mark.parametrize("size", [0, 1, INLINE_BYTES, INLINE_BYTES + 1, 3 << 20, KEPT_BYTES + 1])
def test_a_frame_arrives_as_it_was_sent_whatever_went_before(ends: Ends, size: int) -> None:
    for content in (b"a" * (2 << 20), os.urandom(size), b"short", os.urandom(size)):
        ends[0].send(content)
        assert content == ends[1].receive(bytes)


def test_a_segment_gives_the_memory_of_a_large_frame_back() -> None:
    segment = SharedMemory.made()
    segment.write(b"x" * (KEPT_BYTES + 1))
    segment.write(b"y" * INLINE_BYTES)

    assert os.fstat(segment.descriptor).st_blocks * 512 <= 2 * INLINE_BYTES
    segment.close()


def test_nobody_can_cut_off_what_another_reads(ends: Ends) -> None:
    """A read behind the end of the file would end the reader with SIGBUS."""
    segment = SharedMemory.made()
    segment.write(b"x" * INLINE_BYTES)

    with pytest.raises(PermissionError):
        os.truncate(segment.descriptor, 0)
    segment.close()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<BQ", 0, INLINE_BYTES + 1),  # longer than any that goes through the socket
        struct.pack("<BQ", 0, (1 << 64) - 1),
        struct.pack("<BQ", 1, 1),  # in a segment that has nothing
        struct.pack("<BQ", 1, (1 << 64) - 1),
        struct.pack("<BQ", 7, 1) + b"x",  # nowhere
        struct.pack("<BQ", 0, 4) + b"\xff\xff\xff\xff",  # no msgpack
        struct.pack("<BQ", 0, 0),
        struct.pack("<BQ", 0, 2) + b"\x91\x07",  # no answer
        struct.pack("<BQ", 0, 100) + b"x",  # cut off
        b"\x00",
        b"",
    ],
)
def test_what_is_no_answer_is_an_error_and_nothing_worse(ends: Ends, sent: bytes) -> None:
    ends[1].socket.sendall(sent)
    ends[1].socket.shutdown(socket.SHUT_WR)

    with pytest.raises(FrameError):
        ends[0].receive(messages.decode_answer)


def test_a_frame_without_memory_is_no_end_of_the_other_side(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends[0].send(b"x" * (INLINE_BYTES + 1))
    monkeypatch.setattr("mmap.mmap", Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))

    for failing in (lambda: ends[1].receive(bytes), lambda: ends[1].send(b"y" * (INLINE_BYTES + 1))):
        with pytest.raises(FrameError, match=r"^no memory for frames .*Cannot allocate memory") as failed:
            failing()
        assert FrameError is failed.type
    ends[0].send(b"short")
    with pytest.raises(FrameError, match=r"^no memory for what a frame of 5 bytes says"):
        ends[1].receive(Mock(side_effect=MemoryError))


def test_messages_arrive_as_they_were() -> None:
    row = Row({"X": Tensor("X", "FP32", (1, 1), b"1234")}, slot=3, start=True, correlation_id="é", parameters={"a": 1})
    null = Row({}, null=True)
    run = Run([row, null], [True, False])
    ran = Ran(
        [RowResult([Tensor("Y", "BYTES", (0,), b"")], grown=[]), None],
        {1: RowError("INTERNAL", "no")},
        Timings(1, 2, 3),
    )

    assert run == messages.decode_call(messages.encode(run))
    assert ran == messages.decode_answer(messages.encode(ran))


def test_what_a_model_logs_fails_nothing_and_is_sent_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    side, odd = (
        Mock(is_forked=False),
        {"msg": "half a pair: \ud800", "levelno": logging.WARNING, "fields": {1: "\ud800"}},
    )

    for record in ({"msg": "%d in use", "args": ("three",)}, odd):
        Forwarding(side).handle(logging.makeLogRecord(record))

    assert "'three'" in capsys.readouterr().err
    ((line,),) = [call.args for call in side.send.call_args_list]
    line = messages.decode_note(messages.encode(line))
    assert LogLine(logging.WARNING, "half a pair: ?", {"1": "\\ud800"}) == line


@pytest.mark.parametrize("call", ["os.memfd_create", "os.eventfd", "os.pidfd_open", "subprocess.Popen"])
def test_an_instance_that_cannot_start_says_so_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    gc.collect()
    process, before = Mock(), set(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr("subprocess.Popen", Mock(return_value=process))
    monkeypatch.setattr(call, Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))

    with pytest.raises(CannotStartError, match=r"cannot start .*: .*Too many open files"):
        InstanceProcess("m_0", "m/1", EXECUTORS_OWN, Mock())

    # The threads of tests before may close something of theirs at any time.
    assert before >= set(Path("/proc/self/fd").iterdir())
    assert ([("kill",), ("wait",)] if call == "os.pidfd_open" else []) == [one[:1] for one in process.mock_calls]


class Said(list[None]):
    """Something that one side says, and to which a test can refer weakly."""


class Heard:
    """One end: it hears something, and then nothing more."""

    socket: Any = None

    def __init__(self) -> None:
        self.kept: list[weakref.ref[Said]] = []
        self.keeps = True

    def receive(self, _: object) -> Said:
        if self.kept:
            self.keeps = self.kept[0]() is not None
            raise EndedError("the end")
        said = Said()
        self.kept.append(weakref.ref(said))
        return said

    def send(self, _: object) -> None: ...


def nothing(*_: object) -> bytes:
    """In the place of what takes something said; unlike a Mock, it keeps nothing."""
    return b""


def test_what_was_heard_is_not_kept_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance may be idle for days, and its last batch may have megabytes."""
    calls, orders, notes = Heard(), Heard(), Heard()
    monkeypatch.setattr(host, "_end_all", lambda: None)
    with pytest.raises(EndedError):
        host.serve(cast("Any", calls), Mock(calls=Mock(turn=0)))
    with Path(os.devnull).open() as orders.socket:
        host.Side._listen(Mock(_frames=orders, _take=nothing))
    InstanceProcess._read_notes(Mock(_notes=notes, _calls=SimpleNamespace(note=nothing)))

    assert [False, False, False] == [end.keeps for end in (calls, orders, notes)]


def test_what_was_said_is_not_kept_while_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    class Queue(Heard):
        def get(self, **_: object) -> Any:
            with suppress(EndedError):
                return self.receive(None)
            return None

    orders, answers = Queue(), Queue()
    monkeypatch.setattr(messages, "encode", nothing)
    InstanceProcess._send_orders(Mock(_orders=orders))
    OpenRequests._work(Mock(_came=answers, _open={}, _take=nothing))

    assert [False, False] == [queue.keeps for queue in (orders, answers)]


def test_an_answer_behind_which_another_request_is_opened_is_told_as_taken() -> None:
    """Else the model would wait for room for its next answer, and no further one would come."""
    taken, may_end, told = threading.Event(), threading.Event(), threading.Event()

    def send(_: object) -> None:
        taken.set()
        may_end.wait()

    def order(given: object) -> None:
        if given == AnswersTaken(1, 4):
            told.set()

    answers, process = Mock(is_cancelled=False, send=send), Mock(order=order)
    opened = OpenRequests("m_0", ended=Mock(), process=lambda: process, stray=Mock())
    number = opened.opened(Row({}, answers=answers), wanted=False)
    opened.came(process, Answered(number, RowResult([STATE["S"]]), None, last=False))
    assert taken.wait(60)

    opened.opened(Row({}, answers=Mock(is_cancelled=False)), wanted=False)
    may_end.set()

    assert told.wait(60)
    opened.close()


STATE = {"S": Tensor("S", "INT32", (1,), b"1234")}
OTHER = {"S": Tensor("S", "INT32", (1,), b"5678")}
FAILED = RowError("INTERNAL", "it failed")


def step(*, start: bool = False, end: bool = False, size: int = 4) -> Row:
    inputs = {"X": Tensor("X", "UINT8", (size,), bytes(size))}
    return Row(inputs, slot=2, start=start, end=end, correlation_id=7)


def test_declared_states_are_those_after_the_last_step_that_succeeded() -> None:
    kept = KeptStates()
    assert () == kept.calls(2), "the initial state, which every process has"
    kept.ran(step(start=True), RowResult((), STATE))
    kept.ran(step(), FAILED)
    assert (LoadStates([2], [STATE]),) == kept.calls(2)

    kept.ran(step(start=True), RowResult((), OTHER, again=True))
    assert (LoadStates([2], [OTHER]),) == kept.calls(2), "a later pass goes on from the pass before"
    kept.ran(step(), RowResult((), OTHER))
    kept.ran(step(), FAILED)
    assert (LoadStates([2], [OTHER]),) == kept.calls(2)
    kept.ran(step(end=True), RowResult((), STATE))
    assert () == kept.calls(2)


def test_of_methods_the_last_that_they_gave_is_kept_also_after_a_failed_step() -> None:
    kept = KeptByMethods()
    assert None is kept.calls(7)
    kept.ran(step(start=True), RowResult((), model_state=b"a"))
    kept.ran(step(), RowError("INTERNAL", "it failed", model_state=b"b"))
    assert (Restore(7, b"b"),) == kept.calls(7)
    kept.ran(step(), RowError("INVALID_ARG", "it was refused"))
    assert (Restore(7, b"b"),) == kept.calls(7)

    kept.ran(step(), RowError("INTERNAL", "it failed", lost=True))
    assert None is kept.calls(7)


def test_a_replay_has_the_steps_that_succeeded_since_start_within_its_bounds() -> None:
    kept = KeptForReplay(steps_max=3, bytes_max=100)
    kept.ran(step(), RowResult(()))
    assert None is kept.calls(2), "its START was elsewhere"
    first, second = step(start=True), step(size=5)
    kept.ran(first, RowResult(()))
    kept.ran(step(), FAILED)
    kept.ran(second, RowResult(()))
    assert [Run([first], [False]), Run([second], [False])] == kept.calls(2)

    for _ in range(2):
        kept.ran(step(), RowResult(()))
    assert None is kept.calls(2), "too many steps"
    kept.ran(first, RowResult(()))
    kept.ran(step(size=97), RowResult(()))
    assert None is kept.calls(2), "too many bytes"
    kept.ran(first, FAILED)
    assert None is kept.calls(2), "a failed START leaves no state"


def test_processes_that_run_nothing_are_replaced_ever_more_slowly() -> None:
    restarts = Restarts()
    for _ in range(10):
        restarts.ran()
        restarts.ended("was killed", 100.0)
        assert 0 == restarts.wait_s(100.0), "it had run something"

    waits: list[float] = []
    for _ in range(14):
        restarts.ended("was killed", 100.0)
        waits.append(restarts.wait_s(100.0))
    assert [0.0] * (AT_ONCE - 2) == waits[: AT_ONCE - 2]
    assert waits == sorted(waits)
    assert DELAY_MAX_S == waits[-1]
    assert 0 == restarts.wait_s(100.0 + DELAY_MAX_S)
    restarts.ran()
    restarts.ended("was killed", 200.0)
    assert 0 == restarts.wait_s(200.0)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/nowhere/env.tar.gz", "names /nowhere/env.tar.gz, and there is no such folder or archive"),
        ("$$TRITON_MODEL_DIRECTORY/empty", "the environment has no interpreter"),
        ("$$TRITON_MODEL_DIRECTORY/text.tar.gz", "text.tar.gz is no tar, .* --format tar.gz makes one"),
        ("$$TRITON_MODEL_DIRECTORY/env.zip", "env.zip is no tar, .* --format tar.gz makes one"),
        ("$$TRITON_MODEL_DIRECTORY/cut.tar.gz", "cannot be unpacked"),
    ],
)
def test_a_path_without_an_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tar.gz").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "env.zip", "w") as other:
        other.writestr("bin/python", "")
    (tmp_path / "large").write_bytes(os.urandom(1 << 16))
    with tarfile.open(tmp_path / "cut.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "large", "large")
    os.truncate(tmp_path / "cut.tar.gz", 1 << 15)

    with pytest.raises(LoadError, match=problem):
        environment_of({"EXECUTION_ENV_PATH": path}, tmp_path)
    assert not list(tmp_path.glob(f"{UNPACKED}*"))
    assert EXECUTORS_OWN is environment_of({}, tmp_path)


def test_an_archive_is_unpacked_by_a_python_without_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.11.0 to 3.11.3: Debian 12 has 3.11.2."""

    def of_then(archive: tarfile.TarFile, path: str) -> None:
        extract(archive, path)

    extract = tarfile.TarFile.extractall
    monkeypatch.setattr(tarfile.TarFile, "extractall", of_then)
    (tmp_path / "python").symlink_to(sys.executable)
    with tarfile.open(tmp_path / "env.tar", "w") as archive:
        archive.add(tmp_path / "python", "bin/python")

    assert Path(environment_of({"EXECUTION_ENV_PATH": str(tmp_path / "env.tar")}, tmp_path).python).name == "python"


def test_an_unpacked_environment_outlives_a_killed_executor_until_another_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not longer, and none that is in use goes."""
    temporary = tmp_path / "temporary"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    # Without the lock of a process, as one that was killed leaves it.
    left = temporary / f"{UNPACKED}killed"
    (left / "bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with tarfile.open(tmp_path / "env.tar", "w") as archive:
        archive.add(tmp_path / "bin", "bin")
    used = environment_of({"EXECUTION_ENV_PATH": str(tmp_path / "env.tar")}, tmp_path)

    remove_abandoned(UNPACKED)

    assert [used.folder] == list(temporary.iterdir())
    assert Path(used.python).exists()
    del used
    assert [] == list(temporary.iterdir())

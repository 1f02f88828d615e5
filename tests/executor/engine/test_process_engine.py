"""Python models whose instances are processes: as in the executor's own process, and better off when they break."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
import venv
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from executor.engine.base import LimitsCalls, LoadRequest, Row, RowError, RowResult, SeesCancellation
from executor.engine.null_rows import NULL_ROW
from executor.engine.python.backend import PythonBackend
from executor.engine.python.calls import CallAnswer
from executor.engine.python.model_metrics import custom_families
from executor.engine.python.process import current_process, environments, instance_process
from executor.engine.python.process.engine import ProcessEngine
from executor.engine.python.process.environments import Environment, environment_of
from executor.engine.python.process.instance_process import InstanceProcess
from executor.engine.python.process.messages import CallAnswered, Run
from executor.models.repository import ModelRepository
from executor.workers.devices import Devices
from shared.contract.errors import LoadError
from shared.contract.model_config import ModelConfig, StateSpec, TensorSpec
from shared.contract.tensors import from_numpy, to_numpy
from shared.statistics.reports import CustomFamily
from tests.executor.engine.model_workshop import (
    MODEL_HEAD,
    Workshop,
    find_backend,
    nobody_waits,
    plain_config,
    sequence_config,
)
from tests.executor.engine.test_python_engine import (
    test_every_datatype_passes_through_input_state_and_output_bit_by_bit,
    test_the_running_sum_written_for_triton_runs_unchanged,
    test_whatever_a_model_says_can_be_answered,
)

__all__ = [  # these hold for an engine in a process too, with the workshop below
    "test_every_datatype_passes_through_input_state_and_output_bit_by_bit",
    "test_the_running_sum_written_for_triton_runs_unchanged",
    "test_whatever_a_model_says_can_be_answered",
]

MODEL = """
    import os
    import signal
    import time

    class TritonPythonModel:
        def initialize(self, args):
            self.sums = {{}}
            self.name = args["model_name"]

        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            match value.item():
                case 1001:
                    os.kill(os.getpid(), signal.SIGSEGV)
                case 1002:
                    os._exit(3)
                case 1003:
                    open(pb_utils.get_model_dir() + "/hangs", "w").close()
                    time.sleep(600)
                case 1004:
                    value = np.full((1, 1), os.getpid(), np.int32)
                case 1005:
                    signal.pause() if os.fork() == 0 else os._exit(3)
            return self.sum(request, value)
    {method}
"""
DECLARED = """
        def sum(self, request, value):
            total = pb_utils.get_input_tensor_by_name(request, "SUM").as_numpy() + value
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total), pb_utils.Tensor("SUM_NEXT", total)])
"""
OWN = """
        def sum(self, request, value):
            id = request.correlation_id()
            if id:  # null rows are requests too
                self.sums[id] = value if request.flags() & 1 else self.sums[id] + value
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", self.sums.get(id, value))])
"""
METHODS = f"""{OWN}
        def checkpoint(self, correlation_id):
            return {{"sum": self.sums[correlation_id]}}

        def restore(self, correlation_id, state):
            self.sums[correlation_id] = state["sum"]
"""
BY_PLACE = """
        def execute(self, requests):
            return [self.add(place, request) for place, request in enumerate(requests)]

        def add(self, place, request):
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            if request.correlation_id():  # null rows are requests too
                self.sums[place] = value if request.flags() & 1 else self.sums[place] + value
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", self.sums.get(place, value))])
"""
STATELESS = """
        def sum(self, request, value):
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)])
"""
GOES_ON = """
        def execute(self, requests):
            for request in requests:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [None for _ in requests]
"""
CRASHES, EXITS, HANGS, PID, LEAVES_A_CHILD = range(1001, 1006)


@pytest.fixture
def workshop(workshop: Workshop) -> Workshop:
    workshop.own_process = True
    return workshop


def sum_config(*, declares: bool, recovery: str = "", direct: bool = False) -> ModelConfig:
    return sequence_config(
        "sum",
        "python",
        inputs=[TensorSpec("INPUT", "INT32", (1,))],
        outputs=[TensorSpec("OUTPUT", "INT32", (1,))],
        states=[StateSpec("SUM", "SUM_NEXT", "INT32", (1,))] if declares else (),
        parameters={"sequence_recovery": recovery} if recovery else {},
        direct=direct,
    )


def loaded(workshop: Workshop, method: str, config: ModelConfig) -> ProcessEngine:
    workshop.python(config.name, textwrap.dedent(MODEL).format(method=textwrap.indent(textwrap.dedent(method), "    ")))
    engine = workshop.load(config)
    assert isinstance(engine, ProcessEngine)
    return engine


def row(slot: int, value: int, *, start: bool = False, end: bool = False, name: int = 0) -> Row:
    """name: the correlation id; 0 for one of the slot's own"""
    inputs = {"INPUT": from_numpy("INPUT", np.array([[value]], np.int32))}
    return Row(inputs, slot=slot, start=start, end=end, correlation_id=name or slot + 1)


def answers(engine: ProcessEngine, *rows: Row) -> list[int | str]:
    """Sums, or what is said in place of one."""
    results = engine.run(rows, [False] * len(rows)).rows
    return [
        to_numpy(result.outputs[0]).item() if isinstance(result, RowResult) else result.message
        for result in results
        if result is not None
    ]


def kill(engine: ProcessEngine) -> None:
    pid = pid_of(engine)
    os.kill(pid, signal.SIGKILL)
    while f"{pid} " in Path(f"/proc/{pid}/stat").read_text() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.001)


def pid_of(engine: ProcessEngine) -> int:
    assert engine._process.now is not None
    return engine._process.now.pid


@pytest.mark.parametrize(
    ("method", "config"),
    [
        (DECLARED, sum_config(declares=True)),
        (DECLARED, sum_config(declares=True, direct=True)),
        (METHODS, sum_config(declares=False)),
        (OWN, sum_config(declares=False, recovery="replay")),
        (OWN, sum_config(declares=False, recovery="replay", direct=True)),
    ],
)
def test_sequences_go_on_in_another_process(workshop: Workshop, method: str, config: ModelConfig) -> None:
    """Whether it ended between two batches or in one; a step that ends it twice fails, and its neighbours do not."""
    engine = loaded(workshop, method, config)
    assert [1, 2] == answers(engine, row(0, 1, start=True), row(1, 2, start=True))
    kill(engine)
    assert [11, 22] == answers(engine, row(0, 10), row(1, 20))

    first, second, third = answers(engine, row(0, 100), row(1, CRASHES), row(2, 3, start=True))
    assert (111, 3) == (first, third)
    assert "was killed by SIGSEGV while it ran this request, for the second time" in str(second)
    assert [222, 1111, 8] == answers(engine, row(1, 200), row(0, 1000), row(2, 5))
    assert ["exited with code 3" in str(text) for text in answers(engine, row(0, EXITS))] == [True]
    assert [1112, 223] == answers(engine, row(0, 1, end=True), row(1, 1))


def test_the_end_of_a_process_is_seen_though_one_that_it_forked_holds_its_sockets(workshop: Workshop) -> None:
    engine = loaded(workshop, DECLARED, sum_config(declares=True))
    assert [1] == answers(engine, row(0, 1, start=True))

    (said,) = answers(engine, row(0, LEAVES_A_CHILD))

    assert "exited with code 3" in str(said)
    assert [3] == answers(engine, row(0, 2))


def test_a_state_that_the_process_alone_held_is_lost_with_it_and_sequences_that_begin_are_not(
    workshop: Workshop,
) -> None:
    engine = loaded(workshop, OWN, sum_config(declares=False))
    assert [1, 2] == answers(engine, row(0, 1, start=True), row(1, 2, start=True))
    kill(engine)

    (lost,) = engine.run([row(0, 1)], [False]).rows
    assert isinstance(lost, RowError)
    assert lost.lost
    assert "only that process held the sequence's state" in lost.message
    results = engine.run([row(2, 7, start=True), row(1, 1)], [False, False]).rows
    assert [False, True] == [isinstance(result, RowError) for result in results]
    assert [8] == answers(engine, row(2, 1))


@pytest.mark.parametrize("recovery", ["replay", ""])
def test_sequences_of_one_correlation_id_stay_apart_in_another_process(workshop: Workshop, recovery: str) -> None:
    """As two steps of an ensemble have them. They go on, each with its own steps, or are lost, each by itself."""
    engine = loaded(workshop, BY_PLACE, sum_config(declares=False, recovery=recovery, direct=True))
    assert [1, 2] == answers(engine, row(0, 1, start=True, name=9), row(1, 2, start=True, name=9))
    kill(engine)

    assert [7] == answers(engine, NULL_ROW, NULL_ROW, row(2, 7, start=True, name=9))
    (first,) = answers(engine, row(0, 10, name=9))
    engine.drop_state(2)
    engine.release(9)
    kill(engine)
    (second,) = answers(engine, NULL_ROW, row(1, 20, name=9))
    if recovery:
        assert (11, 22) == (first, second)
    else:
        assert "was lost with the process" in str(first)
        assert "was lost with the process" in str(second)


def test_the_state_of_a_sequence_that_is_released_is_not_kept_for_the_next_process(workshop: Workshop) -> None:
    engine = loaded(workshop, METHODS, sum_config(declares=False))
    assert [1] == answers(engine, row(0, 1, start=True, name=9))

    engine.release(9)
    kill(engine)

    (told,) = answers(engine, row(0, 10, name=9))
    assert "only that process held the sequence's state" in str(told)


def test_states_that_come_from_elsewhere_reach_the_next_process(workshop: Workshop) -> None:
    """Also those that come while there is none."""
    engine = loaded(workshop, DECLARED, sum_config(declares=True))
    state = {"SUM": from_numpy("SUM", np.array([40], np.int32))}
    engine.load_states([3], [state])
    kill(engine)
    engine.load_states([4], [state])

    assert [41, 42] == answers(engine, row(3, 1), row(4, 2))


def test_a_batch_that_hangs_ends_its_process_alone_and_says_where(
    workshop: Workshop, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, comes_within = workshop.version_dir("sum") / "hangs", InstanceProcess._comes_within

    def counted_from_there(process: InstanceProcess, limit_s: float) -> bool:
        """A process that is only late is waited for."""
        while not hangs.exists():
            if process._waiting.poll(10):
                return True
        hangs.unlink()
        return comes_within(process, limit_s)

    monkeypatch.setattr(InstanceProcess, "_comes_within", counted_from_there)
    engine = loaded(workshop, DECLARED, sum_config(declares=True))
    assert isinstance(engine, LimitsCalls)
    assert [1] == answers(engine, row(0, 1, start=True))
    engine.limit_calls(0.5)

    (first, second) = answers(engine, row(0, HANGS), row(1, 5, start=True))
    assert "did not come back within 0.5 s and was ended while it ran this request, for the second time" in str(first)
    assert 5 == second
    assert [3] == answers(engine, row(0, 2))
    assert "in answer" in capfd.readouterr().err


def test_processes_that_cannot_start_are_waited_for_and_the_instance_is_not_ready(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = tmp_path / "breaks"
    broken = f"if os.path.exists({str(breaks)!r}): raise ValueError('it is broken now')"
    engine = loaded(workshop, f"{DECLARED}\n        {broken}", sum_config(declares=True))
    assert [5] == answers(engine, row(0, 5, start=True))
    assert engine.is_ready()
    breaks.touch()
    clock = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr(current_process, "time", SimpleNamespace(monotonic=lambda: clock.now))
    kill(engine)

    text = [answers(engine, row(0, 1)) for _ in range(3)][-1]
    assert "has no process: the last one could not be started again: " in str(text)
    assert "it is broken now" in str(text)
    assert not engine.is_ready()
    breaks.unlink()
    clock.now += 60
    assert engine.is_ready()
    assert [6] == answers(engine, row(0, 1)), "its state waited"


def test_no_process_goes_on_with_the_states_of_other_files(workshop: Workshop) -> None:
    """What another process would load may be another model than that of the states, and of the other instances."""
    engine = loaded(workshop, DECLARED, sum_config(declares=True))
    assert [5] == answers(engine, row(0, 5, start=True))
    path = workshop.version_dir("sum") / "model.py"
    code = path.read_text()
    (path.parent / "written by the model").touch()
    path.write_text(code.replace("+ value", "- value"))
    kill(engine)

    text = [answers(engine, row(0, 1)) for _ in range(3)][-1]
    assert "1/model.py of model 'sum' was changed since: load the model again" in str(text)
    assert not engine.is_ready()
    path.write_text(code)
    while not engine.is_ready():
        time.sleep(0.01)
    assert [6] == answers(engine, row(0, 1)), "its state waited"


def test_large_tensors_pass_through_shared_memory(workshop: Workshop) -> None:
    config = plain_config(
        "echo", "python", inputs=[TensorSpec("INPUT", "FP32", (-1,))], outputs=[TensorSpec("OUTPUT", "FP32", (-1,))]
    )
    workshop.python(
        "echo",
        """
        class TritonPythonModel:
            def execute(self, requests):
                given = [pb_utils.get_input_tensor_by_name(request, "INPUT") for request in requests]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", one.as_numpy())]) for one in given]
        """,
    )
    engine = workshop.load(config)
    values = np.arange(3_000_000, dtype=np.float32)
    for size in (3_000_000, 1, 20_000):
        sent = from_numpy("INPUT", values[:size].reshape(1, -1))
        (result,) = engine.run([Row({"INPUT": sent})], [False]).rows
        assert isinstance(result, RowResult)
        assert sent.raw == result.outputs[0].raw


@pytest.mark.parametrize("large", ["INPUT", "OUTPUT"])
def test_without_memory_for_a_frame_its_row_fails_and_the_instance_goes_on(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, large: str
) -> None:
    config = plain_config(
        "echo", "python", inputs=[TensorSpec("INPUT", "UINT8", (-1,))], outputs=[TensorSpec("OUTPUT", "UINT8", (-1,))]
    )
    workshop.python(
        "echo",
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                values = np.zeros((1, 100_000 if {large == "OUTPUT"} else 1), np.uint8)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", values)]) for _ in requests]
        """,
    )
    engine = workshop.load(config)
    assert isinstance(engine, ProcessEngine)
    sent = from_numpy("INPUT", np.zeros((1, 100_000 if large == "INPUT" else 1), np.uint8))
    with monkeypatch.context() as without_memory:
        without_memory.setattr("mmap.mmap", Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
        (failed,) = engine.run([Row({"INPUT": sent})], [False]).rows

    assert isinstance(failed, RowError)
    assert "was ended, because of no memory for frames" in failed.message
    (result,) = engine.run([Row({"INPUT": sent})], [False]).rows
    assert isinstance(result, RowResult)


@contextmanager
def memory_for(runs: int, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Within the block so many batches can be sent, and then none."""
    encode, memory = instance_process.messages.encode, [True] * runs

    def encoded(message: object) -> bytes:
        if isinstance(message, Run) and not (memory and memory.pop()):
            raise MemoryError
        return encode(message)

    with monkeypatch.context() as without_memory:
        without_memory.setattr(instance_process.messages, "encode", encoded)
        yield


@pytest.mark.parametrize("runs", [0, 1], ids=["with its batch", "alone, when its batch has ended a process"])
def test_a_row_that_could_not_be_sent_does_not_run_later(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """Its caller has been told that it failed, and that the state stayed as it was. runs: that can be sent before"""
    engine, posted = loaded(workshop, DECLARED, sum_config(declares=True)), list[Callable[[], None]]()
    engine.run_again_on(posted.append)
    assert [5] == answers(engine, row(0, 5, start=True))
    with memory_for(runs, monkeypatch), nullcontext() if runs else pytest.raises(MemoryError):
        told = answers(engine, row(0, 100), row(1, CRASHES, start=True))
        assert ["model 'sum' failed: MemoryError: "] * 2 == told
    kill(engine)
    assert [6] == answers(engine, row(0, 1))
    for call in posted:
        call()

    assert [7] == answers(engine, row(0, 1))


def test_a_row_that_could_not_be_sent_alone_fails_alone(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it have run, and their states have moved on."""
    engine = loaded(workshop, DECLARED, sum_config(declares=True))
    assert [5, 6] == answers(engine, row(0, 5, start=True), row(1, 6, start=True))
    kill(engine)

    with memory_for(2, monkeypatch):
        told = answers(engine, row(0, 100), row(1, CRASHES), row(2, 7, start=True))

    assert [105, "model 'sum' failed: MemoryError: ", "model 'sum' failed: MemoryError: "] == told
    assert [106, 7] == answers(engine, row(0, 1), row(1, 1))


def test_passes_that_are_over_are_kept_nowhere(workshop: Workshop) -> None:
    """A request may take any number of them, and each has the request's inputs."""
    config = sum_config(declares=False)
    assert config.sequence_batching is not None
    batching = msgspec.structs.replace(config.sequence_batching, iterative=True)
    engine = loaded(workshop, GOES_ON, msgspec.structs.replace(config, sequence_batching=batching))

    for step in range(3):
        (result,) = engine.run([row(0, 1, start=step == 0)], [False]).rows
        assert isinstance(result, RowResult)
        assert result.again

    assert [] == engine._open._all()


def test_a_process_that_cannot_be_told_something_is_ended(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(workshop, DECLARED, sum_config(declares=True))
    process = engine._process.now
    assert process is not None
    with monkeypatch.context() as without_memory:
        without_memory.setattr("mmap.mmap", Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
        process.order(CallAnswered(1, CallAnswer(error="x" * 100_000)))
        assert process._ends_within(60)

    assert [5] == answers(engine, row(0, 5, start=True)), "in another process"


def test_each_instance_has_its_process_and_nothing_is_left_when_they_are_closed(workshop: Workshop) -> None:
    config = sum_config(declares=True)
    engines = [loaded(workshop, DECLARED, config) for _ in range(2)]
    pids = [answers(engine, row(0, PID, start=True))[0] for engine in engines]
    assert [pid_of(engine) for engine in engines] == pids
    assert os.getpid() not in pids

    os.kill(pid_of(engines[0]), signal.SIGKILL)
    assert [8] == answers(engines[1], row(1, 8, start=True)), "the other one hears nothing of it"
    before = len(list(Path("/proc/self/fd").iterdir()))
    for engine in engines:
        engine.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("left", ["sys.stdout.close()", "sys.stdout = None", "os.close(1)"])
def test_a_model_that_closes_its_output_and_leaves_a_thread_behind_ends_in_order(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setattr(instance_process, "CLOSE_LIMIT_S", 60)
    thread = "import sys, threading; threading.Thread(target=time.sleep, args=(600,)).start()"
    method = DECLARED.replace("            total", f"            {thread}; {left}\n            total")
    engine = loaded(workshop, method, sum_config(declares=True))
    assert [1] == answers(engine, row(0, 1, start=True))
    assert engine._process.now is not None
    process = engine._process.now._process

    engine.close()

    assert 0 == process.returncode


FORKS = """
        def initialize(self, args):
            import threading
            for _ in range(3):
                threading.Thread(target=self.log, daemon=True).start()

        def log(self):
            while True:
                pb_utils.Logger.log_info("x" * 4000)

        def sum(self, request, value):
            for _ in range(50):
                if (child := os.fork()) == 0:
                    signal.alarm(60)
                    pb_utils.Logger.log_info("from a child")
                    os._exit(0)
                value = value * (os.waitpid(child, 0)[1] == 0)
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)])
"""


def test_a_process_that_a_model_forks_says_nothing_in_the_place_of_its_instance(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does it wait for a lock that a thread of the instance had when it was copied."""
    config = plain_config(
        "sum", "python", inputs=[TensorSpec("INPUT", "INT32", (1,))], outputs=[TensorSpec("OUTPUT", "INT32", (1,))]
    )
    engine = loaded(workshop, FORKS, config)

    assert [7] == answers(engine, row(0, 7))

    assert 50 == capfd.readouterr().err.count("from a child")


def test_what_the_model_logs_and_counts_is_the_executor_s(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a model that is asked something all the time."""
    monkeypatch.setattr(instance_process, "READY_LIMIT_S", 60)
    workshop.python(
        "talker",
        """
        class TritonPythonModel:
            def initialize(self, args):
                family = pb_utils.MetricFamily("process_test_seen", "seen", pb_utils.MetricFamily.COUNTER)
                self.seen = family.Metric({"who": "me"})

            def execute(self, requests):
                self.seen.increment(len(requests))
                pb_utils.Logger.log_warn("odd")
                pb_utils.Logger.log_verbose("fine")
                pb_utils.Logger.log_error(pb_utils.get_model_dir())
                return [pb_utils.InferenceResponse([]) for _ in requests]

            def is_ready(self):
                return True
        """,
    )
    config = plain_config("talker", "python", inputs=[], outputs=[TensorSpec("OUTPUT", "FP32", (1,))])
    caplog.set_level(logging.DEBUG, logger="seqmesh.model")
    engine = workshop.load(config)
    assert isinstance(engine, ProcessEngine)
    engine.run([Row({})], [False])
    deadline = time.monotonic() + 60
    families: list[CustomFamily] = []
    records: list[logging.LogRecord] = []
    while time.monotonic() < deadline:
        families = [family for family in custom_families() if family.name == "process_test_seen"]
        records = [record for record in caplog.records if record.name == "seqmesh.model"]
        if families and families[0].samples[0].value == 1 and len(records) >= 3:
            break
        assert engine.is_ready()
        time.sleep(0.05)
    said = [(record.levelname, record.getMessage()) for record in records]
    assert [("WARNING", "odd"), ("DEBUG", "fine"), ("ERROR", str(workshop.version_dir("talker")))] == said
    assert "talker" == vars(records[-1])["fields"]["model"]
    assert 1 == families[0].samples[0].value
    engine.close()
    assert "process_test_seen" not in [family.name for family in custom_families()]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import os; os._exit(5)", "exited with code 5"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why_and_the_executor_lives(
    workshop: Workshop, source: str, problem: str
) -> None:
    workshop.python("sum", source)

    with pytest.raises(LoadError, match=problem):
        workshop.load(sum_config(declares=True))


@pytest.fixture(params=[False, True])
def patient(workshop: Workshop, request: pytest.FixtureRequest) -> Any:
    """A model, in both places, that says for which requests nobody waits. If the first one has an id, it waits until
    there is such a request."""
    workshop.own_process = request.param
    workshop.python(
        "patient",
        """
        import time

        class TritonPythonModel:
            def execute(self, requests):
                deadline = time.monotonic() + 60
                while requests[0].request_id() and time.monotonic() < deadline:
                    if any(request.is_cancelled() for request in requests):
                        break
                    time.sleep(0.001)
                seen = [np.array([[request.is_cancelled()]]) for request in requests]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", one)]) for one in seen]
        """,
    )
    config = plain_config("patient", "python", inputs=[], outputs=[TensorSpec("OUTPUT", "BOOL", (1,))])
    engine = workshop.load(config)
    assert isinstance(engine, SeesCancellation)
    return engine


def seen_by(engine: Any, *rows: Row) -> list[bool]:
    """For which of the rows the model saw that nobody waits."""
    results = engine.run(rows, [False] * len(rows)).rows
    return [to_numpy(one.outputs[0]).item() for one in results]


def test_a_model_sees_that_nobody_waits_for_a_row_of_a_batch_that_has_yet_to_begin(patient: Any) -> None:
    """The batch was given while another one ran."""
    ahead, unwanted = Row({}, request_id="waits"), Row({})
    patient.cancel(unwanted)

    assert [False] == seen_by(patient, Row({}))
    assert [False, True] == seen_by(patient, ahead, unwanted)
    assert [False, False] == seen_by(patient, Row({}), unwanted)


def test_a_model_sees_that_nobody_waits_for_a_row_any_more(patient: Any) -> None:
    """Only for the row that was cancelled, and only while it runs."""
    engine = patient
    rows = [Row({}, request_id="waits"), Row({}, request_id="waits")]
    with nobody_waits(engine, rows[1]):
        seen = seen_by(engine, *rows)
    engine.cancel(rows[1])
    assert [False, True] == seen
    assert [False, False] == seen_by(engine, Row({}), Row({}))


def test_a_model_that_hangs_when_it_is_asked_for_its_readiness_has_one_thread_for_that(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_process, "READY_LIMIT_S", 0.01)
    workshop.python(
        "hangs",
        """
        import threading
        import time

        class TritonPythonModel:
            def is_ready(self):
                time.sleep(600)

            def execute(self, requests):
                while not requests[0].is_cancelled():
                    time.sleep(0.001)
                names = [thread.name for thread in threading.enumerate()]
                asking = np.array([[names.count("seqmesh ready")]], np.int32)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", asking)])]
        """,
    )
    config = plain_config("hangs", "python", inputs=[], outputs=[TensorSpec("OUTPUT", "INT32", (1,))])
    engine = workshop.load(config)
    assert isinstance(engine, ProcessEngine)

    assert [False] * 3 == [engine.is_ready() for _ in range(3)]

    # The order to cancel comes behind those to ask.
    waits = Row({})
    with nobody_waits(engine, waits):
        assert [1] == answers(engine, waits)
    engine.close()


ORPHAN = """
import sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from typing import Any
from tests.executor.engine.test_process_engine import DECLARED, loaded, sum_config, pid_of
from tests.executor.engine.model_workshop import Workshop
workshop = Workshop(Path({directory!r}))
workshop.own_process = True
engine = loaded(workshop, DECLARED, sum_config(declares=True))
print(pid_of(engine), flush=True)
time.sleep(600)
"""


def named_memory(pid: int) -> list[str]:
    """What a process has of the folder of shared memory, where others come and go."""
    named = [line.partition("/")[1:] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    found = ["".join(path) for path in named]
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.startswith("/dev/shm/") and not path.endswith(" (deleted)")]


def test_a_process_ends_with_its_executor_and_leaves_no_memory(tmp_path: Path) -> None:
    """Also if the executor is killed without warning; the memory has no name that could stay."""
    code = ORPHAN.format(path=[path for path in sys.path if path], directory=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert [] == named_memory(parent.pid) + named_memory(pid)
        parent.kill()
    deadline = time.monotonic() + 60
    # It may be gone at any time.
    with suppress(FileNotFoundError, ProcessLookupError):
        while " Z " not in Path(f"/proc/{pid}/stat").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)


PACKAGE = "unheard_of_package"
IN_ENVIRONMENT = f"""
    import sys
    import {PACKAGE}

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            import {PACKAGE}
            config.set_max_batch_size({PACKAGE}.ANSWER)
            return config

        def execute(self, requests):
            try:
                import redis
            except ImportError:
                found = {PACKAGE}.ANSWER
            else:
                found = 0
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([[found]], np.int32))])
                for _ in requests
            ]
"""


def make_environment(folder: Path, *packages: str) -> None:
    """A venv with a package of its own, and some of those of the tests."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / f"{PACKAGE}.py").write_text("ANSWER = 42")
    for package in packages:
        shutil.copytree(
            Path(next(iter(__import__(package).__path__))), site / package, ignore=shutil.ignore_patterns("tests")
        )
        libraries = Path(next(iter(__import__(package).__path__))).with_name(f"{package}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, site / libraries.name)


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_runs_in_an_environment_of_its_own(workshop: Workshop, packed: bool) -> None:
    """A folder, or an archive of one; it sees nothing of the executor's packages."""
    workshop.own_process = False
    workshop.python("foreign", IN_ENVIRONMENT)
    folder = workshop.directory / "foreign" / "environment"
    make_environment(folder, "numpy")
    if packed:
        with tarfile.open(folder.with_suffix(".tar.gz"), "w:gz", compresslevel=1) as archive:
            archive.add(folder, ".")
        shutil.rmtree(folder)
    path = f"$$TRITON_MODEL_DIRECTORY/environment{'.tar.gz' if packed else ''}"
    config = ModelConfig(
        "foreign",
        "python",
        "",
        8,
        (),
        (TensorSpec("OUTPUT", "INT32", (1,)),),
        parameters={"EXECUTION_ENV_PATH": path},
    )
    config_json = json.dumps(
        {"name": "foreign", "parameters": {"EXECUTION_ENV_PATH": {"string_value": path}}, "max_batch_size": 0}
    )
    completed = PythonBackend().auto_complete(config_json, workshop.version_dir("foreign"))
    assert 42 == json.loads(completed)["max_batch_size"]

    engine = workshop.load(config)
    (result,) = engine.run([Row({})], [False]).rows
    assert isinstance(result, RowResult), result
    assert 42 == to_numpy(result.outputs[0]).item()


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_process_imports_from_the_executor_s_path(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, safe: str
) -> None:
    """Also where PYTHONSAFEPATH keeps the folder of a script out of it, as in the image."""
    (workshop.directory / "team").mkdir()
    (workshop.directory / "team" / "of_the_team.py").touch()
    monkeypatch.setitem(environments.AT_START, "PYTHONPATH", str(workshop.directory / "team"))
    monkeypatch.setitem(environments.AT_START, "PYTHONSAFEPATH", safe)
    method = DECLARED.replace("            total", "            import of_the_team\n            total")
    engine = loaded(workshop, method, sum_config(declares=True))

    assert [1] == answers(engine, row(0, 1, start=True))


def test_a_process_has_the_variables_of_the_executor_s_start(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that a model in the executor's own process has set for itself, but what `fixed_shape` has."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MKL_CBWR", "AUTO,STRICT")
    said = "np.array([[int(os.environ.get('OMP_NUM_THREADS') == '7') + 2 * ('MKL_CBWR' in os.environ)]], np.int32)"
    method = DECLARED.replace(".as_numpy() + value", f".as_numpy() + {said}")
    engine = loaded(workshop, method, sum_config(declares=True))

    assert [2] == answers(engine, row(0, 1, start=True))


@pytest.mark.parametrize("late", [False, True], ids=["at once", "called after its end"])
def test_an_environment_that_lacks_something_says_what(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    def after_its_end(process: InstanceProcess, *arguments: Any) -> Any:
        while process.is_alive:
            time.sleep(0.01)
        return call(process, *arguments)

    call = InstanceProcess.call
    if late:
        monkeypatch.setattr(InstanceProcess, "call", after_its_end)
    workshop.python("foreign", IN_ENVIRONMENT)
    make_environment(workshop.directory / "env")
    config = plain_config("foreign", "python", inputs=[], outputs=[TensorSpec("OUTPUT", "INT32", (1,))])
    parameters = {"EXECUTION_ENV_PATH": str(workshop.directory / "env")}

    told = r"has no process: the environment of .* has Python 3\.\d+ and lacks numpy \(the executor has Python 3"
    with pytest.raises(LoadError, match=told):
        workshop.load(msgspec.structs.replace(config, parameters=parameters))


@pytest.fixture
def unpacked(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The model `foreign` with its environment in an archive; what that is unpacked to, one after the other."""
    folders: list[Path] = []

    class Told(environments.TemporaryFolder):
        def __init__(self, prefix: str) -> None:
            super().__init__(prefix)
            folders.append(self.path)

    monkeypatch.setattr(environments, "TemporaryFolder", Told)
    workshop.python("foreign", IN_ENVIRONMENT)
    folder = workshop.directory / "foreign" / "environment"
    make_environment(folder, "numpy")
    with tarfile.open(folder.with_suffix(".tar"), "w") as archive:
        archive.add(folder, ".")
    return folders


PACKED = {"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/environment.tar"}


def foreign_load(workshop: Workshop) -> LoadRequest:
    config = plain_config("foreign", "python", inputs=[], outputs=[TensorSpec("OUTPUT", "INT32", (1,))])
    config = msgspec.structs.replace(config, parameters=PACKED)
    return LoadRequest(config, "{}", workshop.version_dir("foreign").parent, "1", "foreign_0_0", "cpu", 0)


def test_what_an_archive_was_unpacked_to_goes_when_the_last_instance_is_closed(
    workshop: Workshop, unpacked: list[Path]
) -> None:
    """And not when Python's collector happens to come by: environments are large."""
    first, second = (PythonBackend().load(foreign_load(workshop)) for _ in range(2))

    first.close()
    (folder,) = unpacked
    assert folder.exists()
    second.close()
    assert not folder.exists()


async def test_an_archive_is_unpacked_once_for_a_model_that_completes_its_configuration(
    workshop: Workshop, unpacked: list[Path]
) -> None:
    """A large environment takes minutes."""
    parameters = "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{path}" }} }}' for name, path in PACKED.items()
    )
    output = 'output { name: "OUTPUT" data_type: TYPE_INT32 dims: 1 } input { name: "X" data_type: TYPE_INT32 dims: 1 }'
    (workshop.version_dir("foreign").parent / "config.pbtxt").write_text(parameters + output)
    repository = ModelRepository((workshop.directory,), Devices())

    repository.load("foreign")

    (folder,) = unpacked
    await repository.close()
    assert not folder.exists()


def bare_environment(folder: Path, **scripts: str) -> Path:
    """Enough of an environment to be taken for one, and its scripts of activation, by name."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "etc" / "conda" / "activate.d").mkdir(parents=True)
    for name, text in scripts.items():
        (folder / "etc" / "conda" / "activate.d" / f"{name}.sh").write_text(text)
    return folder


def test_an_environment_is_activated_with_the_scripts_of_its_packages(tmp_path: Path) -> None:
    """As Triton does: packages of conda find their data by the variables that their scripts set."""
    folder = bare_environment(
        tmp_path / "env",
        a='echo "some words"; false; export DATA="$CONDA_PREFIX/share"; PRIVATE=1',
        b='export LINES="$DATA\n=\xe4"; unset TERM; return 1',
    )

    variables = environment_of({"EXECUTION_ENV_PATH": str(folder)}, tmp_path).variables

    assert f"{folder}/share" == variables["DATA"]
    assert f"{folder}/share\n=\xe4" == variables["LINES"]
    assert str(folder) == variables["CONDA_PREFIX"]
    assert variables["PATH"].startswith(f"{folder}/bin{os.pathsep}")
    assert not {"PRIVATE", "TERM"} & variables.keys()


def test_a_script_of_activation_that_hangs_fails_its_load_and_holds_up_no_other_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that it has started is left."""
    begun = tmp_path / "begun"
    for name, text in {"hangs": f"sleep 600 & echo $! > {begun}; wait", "quick": "export DATA=1"}.items():
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            archive.add(bare_environment(tmp_path / name, script=text), arcname="")
    monkeypatch.setattr(environments, "ACTIVATION_LIMIT_S", 3600.0)

    def environment(name: str) -> Environment:
        return environment_of({"EXECUTION_ENV_PATH": str(tmp_path / f"{name}.tar")}, tmp_path)

    with ThreadPoolExecutor() as pool:
        waits = pool.submit(environment, "hangs")
        while not begun.exists() or not begun.read_text():
            time.sleep(0.01)
        assert "1" == pool.submit(environment, "quick").result(60).variables["DATA"]
        os.kill(int(begun.read_text()), signal.SIGKILL)
        assert waits.result(60).folder is not None

    monkeypatch.setattr(environments, "ACTIVATION_LIMIT_S", 0.5)
    begun.unlink()
    (tmp_path / "hangs.tar").touch()
    with pytest.raises(LoadError, match=r"bash cannot run .*/script\.sh: they take longer than 0\.5 s"):
        environment("hangs")
    if begun.exists() and (child := begun.read_text().strip()):
        while Path(f"/proc/{child}").exists() and ") Z " not in Path(f"/proc/{child}/stat").read_text():
            time.sleep(0.01)


@pytest.mark.parametrize("status", [0, 3])
def test_a_script_of_activation_that_ends_its_shell_is_named(tmp_path: Path, status: int) -> None:
    folder = bare_environment(tmp_path / "env", ends=f"exit {status}")

    with pytest.raises(LoadError, match=rf"bash cannot run .*/ends\.sh: one of them ended it with status {status}"):
        environment_of({"EXECUTION_ENV_PATH": str(folder)}, tmp_path)


BACKEND = """
    class TritonPythonModel:
        def initialize(self, args):
            self.text = f"{args['model_name']} {pb_utils.get_model_dir()}"

        def execute(self, requests):
            told = np.array([[self.text]], np.object_)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", told)]) for _ in requests]
"""


@pytest.mark.parametrize("own_process", [False, True])
def test_a_folder_with_a_model_py_is_a_backend_for_many_models(workshop: Workshop, own_process: bool) -> None:
    backends = workshop.directory / "backends"
    (backends / "tells").mkdir(parents=True)
    (backends / "tells" / "model.py").write_text(MODEL_HEAD + textwrap.dedent(BACKEND))
    backend = find_backend("tells", [backends])

    for name in ("one", "two"):
        version = workshop.version_dir(name)
        outputs = [TensorSpec("OUTPUT", "BYTES", (1,))]
        config = plain_config(name, "tells", inputs=[], outputs=outputs)
        if own_process:
            config = msgspec.structs.replace(config, parameters={"instance_process": "true"})
        engine = backend.load(LoadRequest(config, "{}", version.parent, "1", f"{name}_0_0", "cpu", 0))
        (result,) = engine.run([Row({})], [False]).rows
        assert isinstance(result, RowResult), result
        assert f"{name} {version}".encode() == to_numpy(result.outputs[0]).item()
        engine.close()

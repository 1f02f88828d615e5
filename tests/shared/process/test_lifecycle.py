"""A service process: stops in order when asked, and never goes on with one of its loops dead."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process import lifecycle
from shared.process.lifecycle import Stop, Tasks, run, serve_until_stopped


@pytest.fixture
def uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    """For services that run in the tests' own process, which does not end with them."""
    monkeypatch.setattr(lifecycle, "CUT_OFF_S", 86_400.0)


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    return [(record.getMessage(), getattr(record, "fields", {})) for record in caplog.records]


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_the_service_drain_and_exit_with_0(stop_signal: signal.Signals) -> None:
    story: list[str] = []

    async def serve(tasks: Tasks, stop: Stop) -> None:
        stop.started()
        os.kill(os.getpid(), stop_signal)
        await stop.wait()
        await asyncio.sleep(0)
        story.append(f"drained after {stop.reason}")

    assert run(serve) == 0
    assert story == [f"drained after {stop_signal.name}"]


@pytest.mark.usefixtures("uncut")
def test_the_log_says_what_fails_in_the_loop_but_not_that_bytes_came_for_a_connection_that_was_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def serve(tasks: Tasks, stop: Stop) -> None:
        stop.started()
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        transport, _ = await loop.create_unix_connection(asyncio.Protocol, sock=ours)
        transport.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError) as given_up:
            transport.write(b"late")
        theirs.close()
        for failure in (given_up.value, RuntimeError("a fault of ours")):
            loop.call_exception_handler({"message": str(failure), "exception": failure})

    assert run(serve) == 0
    assert ["a fault of ours"] == [record.getMessage() for record in caplog.records if record.name == "asyncio"]


@pytest.mark.usefixtures("uncut")
def test_that_a_client_takes_nothing_more_is_no_failure_of_the_service(caplog: pytest.LogCaptureFixture) -> None:
    failures = iter((TimeoutError(errno.ETIMEDOUT, "Connection timed out"), RuntimeError("a fault of ours")))

    async def fails(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        raise next(failures)

    async def serve(tasks: Tasks, stop: Stop) -> None:
        stop.started()
        async with await asyncio.start_server(fails, "127.0.0.1", 0) as server:
            for _ in range(2):
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                assert b"" == await reader.read()
                writer.close()

    assert run(serve) == 0
    told = [record.exc_info[0] for record in caplog.records if record.name == "asyncio" and record.exc_info]
    assert [RuntimeError] == told


async def test_the_second_signal_cancels_a_drain_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "SAME_STOP_S", 0)
    story: list[str] = []

    async def serve(tasks: Tasks, stop: Stop) -> None:
        stop.started()
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            story.append("cleaned up")

    assert await serve_until_stopped(serve) == 1
    assert story == ["cleaned up"]


async def test_a_signal_that_comes_twice_in_a_moment_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of GNU's `timeout`."""
    monkeypatch.setattr(lifecycle, "SAME_STOP_S", 60)
    story: list[str] = []

    async def serve(tasks: Tasks, stop: Stop) -> None:
        stop.started()
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
        story.append("drained")

    assert await serve_until_stopped(serve) == 0
    assert story == ["drained"]


@pytest.mark.parametrize("is_abstract", [False, True])
async def test_systemd_is_told_when_the_service_has_started_and_not_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_abstract: bool
) -> None:
    address = f"@seqmesh-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address.replace("@", "\0"))
        systemd.setblocking(False)

        async def serve(tasks: Tasks, stop: Stop) -> None:
            with pytest.raises(BlockingIOError):
                systemd.recv(64)
            stop.started()

        assert await serve_until_stopped(serve) == 0
        assert b"READY=1" == systemd.recv(64)


async def test_a_service_starts_although_nobody_hears_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))

    async def serve(tasks: Tasks, stop: Stop) -> None:
        stop.started()

    assert await serve_until_stopped(serve) == 0
    assert "systemd not told of the start" in [event for event, _ in logged(caplog)]


async def test_a_signal_cancels_a_service_that_still_starts() -> None:
    story: list[str] = []

    async def serve(tasks: Tasks, stop: Stop) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            story.append("cleaned up")

    assert await serve_until_stopped(serve, lambda: story.append("told")) == 0
    assert story == ["told", "cleaned up"]


LIMITED = """
import resource, sys
from shared.process.lifecycle import run

async def serve(tasks, stop):
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
run(serve)
"""


@pytest.mark.parametrize(("allowed", "taken"), [(100, 100), (20_000, 16_384)])
def test_a_service_may_open_as_many_files_as_the_system_allows_up_to_what_it_wants(allowed: int, taken: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < allowed:
        pytest.skip(f"the system allows {hard}")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(allowed)], timeout=60, check=True, capture_output=True, text=True
    )
    assert f"{taken}\n" == done.stdout


THREADS = """
import asyncio, os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from shared.process.lifecycle import run

async def serve(tasks, stop):
    if sys.argv[1] in ("has ended, and left a pool", "has failed, and left one"):
        ThreadPoolExecutor().submit(threading.Event().wait)
        assert "failed" not in sys.argv[1]
        return
    for_ever = asyncio.create_task(asyncio.to_thread(threading.Event().wait))
    await asyncio.sleep(0)
    if sys.argv[1] == "starts":
        os.kill(os.getpid(), signal.SIGTERM)
        await for_ever

sys.exit(run(serve, 70))
"""


@pytest.mark.parametrize(
    ("when", "code"),
    [("starts", 0), ("has ended", 0), ("has ended, and left a pool", 0), ("has failed, and left one", 70)],
)
def test_a_thread_that_does_not_end_is_cut_off_when_the_service(when: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", THREADS, when], timeout=60, check=False)

    assert code == done.returncode


FORKS = """
import asyncio, os, signal
from shared.process.lifecycle import run

def ended_by():
    reads, writes = os.pipe()
    if not (child := os.fork()):
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    # At once, as `Pool` does it to workers for which there was no work.
    os.kill(child, signal.SIGTERM)
    os.close(writes)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

async def serve(tasks, stop):
    stop.started()
    ends = {await asyncio.to_thread(ended_by) for _ in range(5)}
    print(ends == {-signal.SIGTERM}, stop.requested, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()

run(serve)
"""


def test_a_stop_signal_to_a_process_that_a_library_has_forked_ends_that_process_and_not_the_service() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], timeout=60, check=True, capture_output=True, text=True)

    assert "True False set()\n" == done.stdout


async def test_a_failing_task_is_logged_by_name_and_ends_the_service_with_1(caplog: pytest.LogCaptureFixture) -> None:
    story: list[str] = []

    async def inbox() -> None:
        raise ConnectionError("gone")

    async def serve(tasks: Tasks, stop: Stop) -> None:
        tasks.start(inbox(), name="inbox reader")
        try:
            await stop.wait()
        finally:
            story.append("cleaned up")

    with caplog.at_level(logging.INFO, "seqmesh"):
        assert await serve_until_stopped(serve) == 1

    assert story == ["cleaned up"]
    assert [("task failed", {"task": "inbox reader"})] == logged(caplog)


async def test_a_failing_service_is_logged_and_takes_its_tasks_along(caplog: pytest.LogCaptureFixture) -> None:
    story: list[str] = []

    async def loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            story.append("task ended")

    async def serve(tasks: Tasks, stop: Stop) -> None:
        tasks.start(loop(), name="loop")
        await asyncio.sleep(0)
        raise RuntimeError("no port")

    with caplog.at_level(logging.INFO, "seqmesh"):
        assert await serve_until_stopped(serve) == 1

    assert story == ["task ended"]
    assert [("service failed", {})] == logged(caplog)


async def test_tasks_that_still_run_when_the_service_returns_are_cancelled() -> None:
    story: list[str] = []

    async def loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            story.append("task ended")

    async def serve(tasks: Tasks, stop: Stop) -> None:
        tasks.start(loop(), name="loop")
        await asyncio.sleep(0)

    assert await serve_until_stopped(serve) == 0
    assert story == ["task ended"]


async def test_a_task_may_return_without_ending_the_service() -> None:
    async def warm_up() -> None:
        await asyncio.sleep(0)

    async def serve(tasks: Tasks, stop: Stop) -> None:
        await tasks.start(warm_up(), name="warm-up")
        stop.request("test")
        await stop.wait()

    assert await serve_until_stopped(serve) == 0


async def test_cancellation_from_outside_passes_through() -> None:
    async def serve(tasks: Tasks, stop: Stop) -> None:
        await asyncio.Event().wait()

    service = asyncio.create_task(serve_until_stopped(serve))
    await asyncio.sleep(0.01)
    service.cancel()

    with pytest.raises(asyncio.CancelledError):
        await service


@pytest.mark.filterwarnings("error")
async def test_a_task_that_is_cancelled_before_its_first_turn_leaves_no_work_behind() -> None:
    async def work() -> None:
        raise AssertionError("it must not begin")

    async def serve(tasks: Tasks, stop: Stop) -> None:
        coroutine = work()
        tasks.start(coroutine, name="late").cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert coroutine.cr_frame is None

    assert await serve_until_stopped(serve) == 0

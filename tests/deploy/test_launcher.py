"""`seqmesh up`, as a process, with stand-ins for the services: ready, restart, stop, and nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import psutil
import pytest

from deploy.local.child_logs import LogFile
from deploy.local.control import ControlError, ask_to_kill, killable_executors
from deploy.local.data_directory import ChildState, LauncherError, MeshState, has_state, locked, read_state
from deploy.local.endings import stop_signals
from deploy.local.launcher import next_command, up
from deploy.local.plans import gateway_ports, number_of_gateways, shares_of_memory
from deploy.local.settings import UpSettings
from shared.contract.limits import GATEWAY_MEMORY_MIN
from shared.process.endings import SAME_STOP_S
from shared.process.logs import Level
from shared.process.machine import available_bytes
from tests.markdown_pages import ROOT
from tests.mesh.running_mesh import PATIENCE_S, wait

FAKE_SERVICE = Path(__file__).parent / "fake_service.py"
PROGRAM = f"""
import os, signal, sys, pathlib
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests themselves run under nohup
from deploy.local import launcher
from deploy.local.launcher import up
from deploy.local.settings import UpSettings
launcher.PROGRESS_INTERVAL_S = float(os.environ.get("GIVEN_PROGRESS_S", "3600"))  # a busy machine starts slowly
sizes = dict(gateways=2, executors=2)
ports = dict(http_port=0, grpc_port=0, metrics_port=0, console_port=0)
token = os.environ.get("GIVEN_TOKEN", "")
models = tuple(map(pathlib.Path, os.environ.get("GIVEN_MODELS", "").split()))
given = dict(console_token=token, models=models, live=os.environ.get("GIVEN_LIVE") != "no")
settings = UpSettings(data_dir=pathlib.Path(sys.argv[1]), **given, **ports, **sizes)
sys.exit(up(settings, lambda service: [sys.executable, {str(FAKE_SERVICE)!r}, service]))
"""


FIGURES = '"steps_per_s": 7, "failed_per_s": 0, "request_ms": -1, "batch": -1, "live": 5, "waiting": 0'
STREAM = f'event: view\ndata: {{"executors": [], "point": {{{FIGURES}}}}}\n\n'
"""What a console tells: a mesh without executors that somehow takes steps."""


class Launched:
    """A launcher's process and what it says."""

    def __init__(self, data_dir: Path, environment: dict[str, str]) -> None:
        self.data_dir = data_dir
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(data_dir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )

    def reads_until(self, text: str) -> str:
        """The next line that contains `text`. Fails with all that was said when the output ends first."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if text in line:
                return line
        pytest.fail(f"{text!r} was not said:\n{''.join(self.said)}")

    def children(self) -> dict[str, ChildState]:
        return {child.name: child for child in self.state().children}

    def state(self) -> MeshState:
        return read_state(self.data_dir)

    def comes_back(self, name: str, before: int) -> bool:
        """Waits for a new process under the name; False when the launcher ends first."""
        while self.children()[name].pid in (0, before):
            if self.process.poll() is not None:
                return False
            time.sleep(0.02)
        return True

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def log_of(self, name: str) -> str:
        """The log of a stand-in when it has begun: the launcher is ready with its gateways, whatever the others do."""
        path = self.data_dir / "logs" / f"{name}.log"
        wait(lambda: re.search(r"umask=\d+\n", path.read_text()), f"{name} has begun")
        return path.read_text()

    def end(self) -> None:
        with self.process:
            self.process.kill()


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launched: list[Launched] = []

    def start(**environment: str) -> Launched:
        launched.append(Launched(tmp_path / "mesh", environment))
        return launched[-1]

    yield start
    for launcher in launched:
        launcher.end()


def all_end(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    return not alive


def test_says_one_line_when_ready_and_stops_everything_on_ctrl_c(launch: Launch) -> None:
    launcher = launch()

    line = launcher.reads_until("ready: ")

    children = launcher.children()
    assert set(children) == {"redis", "scheduler-1", "executor-1", "executor-2", "gateway-1", "gateway-2", "console"}
    assert launcher.state().ready
    assert launcher.state().redis_url in line
    first, second = children["gateway-1"], children["gateway-2"]
    assert (first.http_port, first.grpc_port) == (second.http_port, second.grpc_port)
    assert 1 == line.count(f"http://127.0.0.1:{first.http_port}, grpc 127.0.0.1:{first.grpc_port} (2 gateways)")
    for gateway in (first, second):
        assert f"http://127.0.0.1:{gateway.metrics_port}/metrics" in line
    assert not any("waiting for" in said for said in launcher.said[:-1])
    processes = launcher.processes()
    assert {child.pid for child in children.values()} == {process.pid for process in processes}

    launcher.process.send_signal(signal.SIGINT)

    assert launcher.process.wait(PATIENCE_S) == 0
    assert all_end(processes)
    assert not (launcher.data_dir / "mesh.json").exists()


def test_a_terminal_that_is_closed_stops_everything_in_order(launch: Launch) -> None:
    launcher = launch()
    launcher.reads_until("ready: ")
    processes = launcher.processes()

    launcher.process.send_signal(signal.SIGHUP)

    assert launcher.process.wait(PATIENCE_S) == 0
    assert all_end(processes)
    assert not (launcher.data_dir / "mesh.json").exists()


def test_under_nohup_a_terminal_that_is_closed_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_says_that_an_http_port_speaks_tls(launch: Launch) -> None:
    launcher = launch(SEQMESH_HTTP_SERVER_CERT="cert.pem", SEQMESH_HTTP_SERVER_KEY="key.pem")

    line = launcher.reads_until("ready: ")

    gateway = launcher.children()["gateway-1"]
    assert f"https://127.0.0.1:{gateway.http_port}, grpc " in line
    assert f"metrics http://127.0.0.1:{gateway.metrics_port}/metrics" in line


def test_who_waits_for_models_is_told_the_log_of_the_executor_that_loads_them_and_the_doctor(launch: Launch) -> None:
    launcher = launch(FAKE_READY="400", GIVEN_PROGRESS_S="0.2")
    log = launcher.data_dir / "logs" / "executor-1.log"

    # Before, it may be told of one of them that it does not listen yet.
    told = [f"gateway-{number} (no executor serves yet; {log})" for number in (1, 2)]
    launcher.reads_until(f"waiting for {'; '.join(told)}. `seqmesh doctor --data-dir ")


def test_warnings_of_children_reach_the_terminal_and_everything_reaches_their_logs(launch: Launch) -> None:
    launcher = launch()

    relayed = launcher.reads_until("executor-2 | ")

    assert "WARNING loud name=executor-2 url=unix:///" in relayed
    assert "INFO    quiet" in launcher.log_of("executor-2")
    assert not any("quiet" in said for said in launcher.said)


def test_a_child_that_is_killed_is_reported_and_comes_back_under_the_same_name(launch: Launch) -> None:
    launcher = launch()
    launcher.reads_until("ready: ")
    before = launcher.children()["executor-1"].pid

    os.kill(before, signal.SIGKILL)

    assert "starting it again" in launcher.reads_until("executor-1 was killed by SIGKILL")
    assert launcher.comes_back("executor-1", before)


def test_a_mesh_whose_state_cannot_be_written_goes_on(launch: Launch) -> None:
    """As on a full disk."""
    launched = launch()
    launched.reads_until("ready")
    (launched.data_dir / "mesh.new").mkdir()
    os.kill(launched.children()["executor-2"].pid, signal.SIGKILL)
    launched.reads_until("mesh.json cannot be written")
    launched.reads_until("executor-2 was killed by SIGKILL")
    launched.reads_until("mesh.json cannot be written")  # it runs again

    launched.process.send_signal(signal.SIGINT)
    assert 0 == launched.process.wait(PATIENCE_S)


def test_a_mesh_whose_health_is_restricted_is_announced(launch: Launch) -> None:
    """The launcher does not know the header: a gateway that refuses to say whether it is ready has started."""
    launch(FAKE_READY="403").reads_until("ready: ")


def test_a_process_that_cannot_be_started_is_tried_again_and_the_mesh_goes_on(launch: Launch) -> None:
    """As where there are too many processes. Here its log cannot be opened."""
    launched = launch()
    launched.reads_until("ready")
    before, log = launched.children()["executor-2"].pid, launched.data_dir / "logs" / "executor-2.log"
    log.unlink()
    log.mkdir()
    os.kill(before, signal.SIGKILL)
    launched.reads_until(f"executor-2 cannot be started: [Errno 21] Is a directory: '{log}'")
    log.rmdir()

    assert launched.comes_back("executor-2", before)
    launched.process.send_signal(signal.SIGINT)
    assert 0 == launched.process.wait(PATIENCE_S)


def test_a_mesh_whose_messages_nobody_reads_any_more_goes_on(launch: Launch) -> None:
    launcher = launch()
    launcher.reads_until("ready: ")
    assert launcher.process.stdout is not None
    launcher.process.stdout.close()

    for _ in range(2):
        before = launcher.children()["executor-1"].pid
        os.kill(before, signal.SIGKILL)
        assert launcher.comes_back("executor-1", before)


def test_what_a_child_has_forked_ends_with_it(launch: Launch) -> None:
    """It would keep the memory of the dead child, and its connections to Redis."""
    launcher = launch(FAKE_FORKS="executor-1")
    launcher.reads_until("ready: ")
    before = launcher.children()["executor-1"].pid
    while not (forked := psutil.Process(before).children()):
        time.sleep(0.02)

    os.kill(before, signal.SIGKILL)

    assert launcher.comes_back("executor-1", before)
    assert all_end(forked)
    launcher.process.send_signal(signal.SIGINT)  # so that those of the second process end as well
    assert launcher.process.wait(PATIENCE_S) == 0


def test_nothing_of_a_mesh_is_open_to_other_users_but_what_its_services_write_themselves(launch: Launch) -> None:
    launcher = launch()
    line = launcher.reads_until("ready: ")

    kept = [launcher.data_dir, *launcher.data_dir.rglob("*")]

    assert {"mesh.json", "lock", "redis.sock", "appendonlydir", "executor-1.log"} <= {path.name for path in kept}
    assert dict.fromkeys(kept, 0) == {path: path.stat().st_mode & 0o077 for path in kept}
    server = psutil.Process(launcher.children()["redis"].pid)
    assert [] == [
        at for at in server.net_connections() if at.status == psutil.CONN_LISTEN and at.family != socket.AF_UNIX
    ]
    assert f"redis unix://{launcher.data_dir}/redis/redis.sock" in line
    (umask,) = re.findall(r"umask=(\d+)\n", launcher.log_of("executor-1"))
    assert usual_umask() == int(umask)


def usual_umask() -> int:
    """Of this process."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_data_directory_that_others_can_read_is_used_and_warned_of(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "mesh").mkdir()
    (tmp_path / "mesh").chmod(0o755)

    launcher = launch()

    assert "mode 755" in launcher.reads_until("warning: ")
    launcher.reads_until("ready: ")


def test_the_address_of_the_console_is_one_with_any_token(launch: Launch) -> None:
    line = launch(GIVEN_TOKEN="a+b/c&d%e#f==;?:@").reads_until("ready: ")

    (fragment,) = re.findall(r"console http://127.0.0.1:\d+/#(\S+);", line)
    assert {"token": ["a+b/c&d%e#f==;?:@"]} == parse_qs(fragment)


def test_what_can_be_tried_next_works_whatever_protects_the_ports(launch: Launch, tmp_path: Path) -> None:
    """Not a call of a port, which may ask for a certificate, a key or a header."""
    (tmp_path / "models" / "mine").mkdir(parents=True)

    line = launch(GIVEN_MODELS=str(tmp_path / "models")).reads_until("ready: ")

    assert f"Try, in another terminal: seqmesh doctor --data-dir {tmp_path / 'mesh'}\n" == line[line.index("Try") :]


@pytest.mark.parametrize("program", [Path(".venv/bin/seqmesh"), Path.cwd() / ".venv/bin/seqmesh"])
def test_what_can_be_tried_next_begins_as_the_program_was_called(program: Path) -> None:
    """As `make run` calls it, it is not on PATH. Without models of one's own there is the demo."""
    assert ".venv/bin/seqmesh demo" == next_command(program, UpSettings())
    assert "seqmesh demo" == next_command(Path("/site-packages/deploy/cli.py"), UpSettings())


def test_make_run_gives_no_models_so_the_demo_is_what_can_be_tried_next() -> None:
    (recipe,) = re.findall(r"^run: .*\n\t@exec \$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)

    assert "seqmesh up $(UP)" == recipe


def test_the_console_alone_gets_a_token_and_kills_an_executor_through_the_launcher(launch: Launch) -> None:
    launcher = launch(SEQMESH_CONSOLE_TOKEN="somebody's own token")
    line = launcher.reads_until("ready: ")
    console, before = launcher.children()["console"], launcher.children()["executor-1"].pid
    (token,) = re.findall(r"console http://127.0.0.1:\d+/#token=(\S+);", line)

    for name in launcher.children().keys() - {"redis"}:
        launcher.log_of(name)  # it has become the program that has the environment
    given = {name: psutil.Process(child.pid).environ() for name, child in launcher.children().items()}
    assert {"console"} == {name for name, found in given.items() if "SEQMESH_CONSOLE_TOKEN" in found}
    assert token == given["console"]["SEQMESH_CONSOLE_TOKEN"]
    assert not any(token in word for word in psutil.Process(console.pid).cmdline())

    control = Path(given["console"]["SEQMESH_CONSOLE_CONTROL"])
    assert {"executor-1", "executor-2"} == asyncio.run(killable_executors(control))
    with pytest.raises(ControlError, match="there is no executor 'gateway-1'"):
        asyncio.run(ask_to_kill(control, "gateway-1"))
    asyncio.run(ask_to_kill(control, "executor-1"))

    launcher.reads_until("executor-1 was killed by SIGKILL")
    assert launcher.comes_back("executor-1", before)


def test_a_server_that_is_killed_comes_back_at_the_same_address(launch: Launch) -> None:
    launcher = launch()
    launcher.reads_until("ready: ")
    url, before = launcher.state().redis_url, launcher.children()["redis"].pid

    os.kill(before, signal.SIGKILL)
    launcher.reads_until("redis was killed by SIGKILL")

    assert launcher.comes_back("redis", before)
    launcher.reads_until("redis takes commands again")
    assert launcher.state().redis_url == url


def test_a_mesh_that_cannot_start_ends_with_the_childs_reason_and_code_1(launch: Launch) -> None:
    launcher = launch(FAKE_FAILS="gateway-2")

    launcher.reads_until("gateway-2 exited with code 1")
    launcher.reads_until("giving up")
    launcher.reads_until("the reason of the failure")

    assert launcher.process.wait(PATIENCE_S) == 1


def test_data_of_a_newer_server_are_told_from_a_server_that_only_ends(launch: Launch, tmp_path: Path) -> None:
    written = tmp_path / "mesh" / "redis" / "appendonlydir"
    written.mkdir(parents=True)
    (written / "appendonly.aof.manifest").write_text("file appendonly.aof.1.base.rdb seq 1 type b\n")
    (written / "appendonly.aof.1.base.rdb").write_bytes(b"REDIS9999" + bytes(64))

    launcher = launch()

    launcher.reads_until("giving up")
    launcher.reads_until("redis cannot read its data: a newer server has written them")
    assert launcher.process.wait(PATIENCE_S) == 1
    assert (written / "appendonly.aof.1.base.rdb").read_bytes().startswith(b"REDIS9999")


def test_a_second_ctrl_c_kills_a_child_that_does_not_stop(launch: Launch) -> None:
    launcher = launch(FAKE_STUBBORN="gateway-1")
    launcher.reads_until("ready: ")
    processes = launcher.processes()

    launcher.process.send_signal(signal.SIGINT)
    launcher.reads_until("stopping")
    time.sleep(2 * SAME_STOP_S)
    launcher.process.send_signal(signal.SIGINT)

    launcher.reads_until("killing everything")
    assert launcher.process.wait(PATIENCE_S) == 1
    assert all_end(processes)


def test_no_child_outlives_a_launcher_that_is_killed(launch: Launch) -> None:
    launcher = launch()
    launcher.reads_until("ready: ")
    processes = launcher.processes()
    assert len(processes) == 7

    launcher.process.kill()

    assert all_end(processes)


def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port: int = somebody.getsockname()[1]
        settings = UpSettings(data_dir=tmp_path / "mesh", http_port=0, grpc_port=port, metrics_port=0)

        with pytest.raises(LauncherError, match=rf"gateway-1 cannot listen on 127\.0\.0\.1:{port}.*--grpc-port"):
            up(settings)

    assert not (tmp_path / "mesh" / "mesh.json").exists()


@pytest.mark.parametrize("http_port", [0, 9650])
@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("192.0.2.1", "192.0.2.1 is no address of this machine"),
        ("no host", "no host is no address of this machine"),
        ("", "there is no host to listen on"),
    ],
)
def test_a_host_that_is_not_this_machines_is_told(tmp_path: Path, host: str, told: str, http_port: int) -> None:
    with pytest.raises(LauncherError, match=f"{told}: give another --host"):
        up(UpSettings(data_dir=tmp_path / "mesh", host=host, http_port=http_port))


@pytest.mark.parametrize(
    ("ports", "told"),
    [
        (
            {"http_port": 9650, "grpc_port": 9650},
            "the http port of gateway-1 and the grpc port of gateway-1 are both 9650",
        ),
        (
            {"http_port": 9650, "grpc_port": 9660, "gateways": 2, "share_ports": False},
            "the grpc port of gateway-1 and the http port of gateway-2 are both 9660: give another --http-port",
        ),
        (
            {"http_port": 9650, "console_port": 9650},
            "the http port of gateway-1 and the console port of console are both 9650",
        ),
        (
            {"metrics_port": 65530, "gateways": 2},
            "the metrics port of gateway-2 would be 65540, and the last one is 65535: give a lower --metrics-port",
        ),
    ],
)
def test_ports_that_two_of_the_meshs_own_services_would_share_or_that_are_none_are_refused(
    tmp_path: Path, ports: dict[str, Any], told: str
) -> None:
    chosen: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "console_port": 0, **ports}

    with pytest.raises(LauncherError, match=told):
        up(UpSettings(data_dir=tmp_path / "mesh", **chosen))


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/mesh"])
def test_a_data_directory_that_cannot_be_made_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()

    with (
        pytest.raises(LauncherError, match=r"no data can be kept in .*: give another --data-dir"),
        locked(tmp_path / place),
    ):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_a_data_directory_without_room_is_told(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("/dev/full")

    with pytest.raises(LauncherError, match=r"no data can be kept in .*: give another --data-dir"), locked(tmp_path):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_servers_directory_of_another_user_is_told(tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    directory.mkdir()
    os.chown(directory, 54321, -1)

    with pytest.raises(LauncherError, match=r"no data can be kept in .*redis .*another user.*give another --data-dir"):
        up(UpSettings(data_dir=tmp_path, http_port=0, grpc_port=0, metrics_port=0, console_port=0))


@pytest.mark.parametrize(
    ("cores", "executors", "redis_url", "expected"),
    [(1, 1, "", 1), (2, 1, "", 1), (4, 1, "", 2), (4, 2, "", 1), (4, 2, "redis://elsewhere", 2), (64, 1, "", 4)],
)
def test_auto_leaves_cores_to_executors_and_redis_and_runs_no_more_than_redis_can_keep_busy(
    cores: int, executors: int, redis_url: str, expected: int
) -> None:
    settings = UpSettings(gateways="auto", executors=executors, redis_url=redis_url)

    assert expected == number_of_gateways(settings, cores)
    assert 7 == number_of_gateways(dataclasses.replace(settings, gateways=7), cores)


def test_gateways_share_two_ports_and_none_their_metrics() -> None:
    settings = UpSettings(gateways=3)
    ports = [{"http_port": 8000, "grpc_port": 8001, "metrics_port": port} for port in (8002, 8012, 8022)]

    assert ports == gateway_ports(settings)

    chosen = gateway_ports(dataclasses.replace(settings, http_port=0, grpc_port=0, metrics_port=0))
    assert [1, 1, 3] == [len({one[name] for one in chosen}) for name in ("http_port", "grpc_port", "metrics_port")]


def test_gateways_that_share_nothing_have_ports_ten_apart() -> None:
    settings = UpSettings(gateways=2, share_ports=False)

    assert [(8000, 8001, 8002), (8010, 8011, 8012)] == [tuple(one.values()) for one in gateway_ports(settings)]


def test_several_gateways_together_may_take_the_memory_of_one() -> None:
    assert {} == shares_of_memory(1)
    half = available_bytes() // 2
    assert {"SEQMESH_MEMORY_MAX": str(max(GATEWAY_MEMORY_MIN, half // 2))} == shares_of_memory(2)
    assert {"SEQMESH_MEMORY_MAX": str(GATEWAY_MEMORY_MIN)} == shares_of_memory(half)


def test_several_gateways_share_a_port_on_linux_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(LauncherError, match="--no-share-ports"):
        up(UpSettings(gateways=2, data_dir=tmp_path / "mesh"))


def test_two_launchers_never_share_a_data_directory(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(LauncherError, match=rf"in use by another launcher \(process {os.getpid()}\)"),
        locked(tmp_path),
    ):
        pass


def test_the_lock_of_a_dead_launcher_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("12345678")

    with locked(tmp_path):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_reading_the_state_where_no_mesh_runs_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="seqmesh up"):
        read_state(tmp_path)


def test_a_state_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "mesh.json").write_text("{broken")

    with pytest.raises(LauncherError, match=r"mesh\.json cannot be read .*seqmesh up"):
        read_state(tmp_path)


def test_a_state_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    """Tests may run as root, who may read everything: a folder cannot be read as a file either."""
    (tmp_path / "mesh.json").mkdir()

    with pytest.raises(LauncherError, match=r"mesh\.json cannot be read \(.*\): only the user who .* --redis-url"):
        read_state(tmp_path)


def test_a_directory_that_may_not_be_entered_may_hold_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_state(tmp_path)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    assert has_state(tmp_path)


def test_a_log_shows_warnings_with_their_tracebacks_once_and_only_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("2026-01-01T00:00:00.000Z ERROR   of an earlier run\n")
    log = LogFile(path)
    with log.open_for_child() as file:
        file.write(b"2026-01-01T00:00:00.000Z INFO    fine\n    detail\n")
        file.write(b"2026-01-01T00:00:00.000Z ERROR   broken\n    Traceback\nprinted\n2026-01-01T00:00:00.000Z WARN")
        file.flush()

        assert log.new_important_lines() == ["2026-01-01T00:00:00.000Z ERROR   broken", "    Traceback"]

        file.write(b"ING late\n")
        file.flush()
        assert log.new_important_lines() == ["2026-01-01T00:00:00.000Z WARNING late"]

        file.write(b"2026-01-01T00:00:00.000Z WARNING no redis\n2026-01-01T00:00:00.000Z ERROR   older data\n")
    assert log.new_important_lines(Level.ERROR) == ["2026-01-01T00:00:00.000Z ERROR   older data"]
    assert log.new_important_lines() == []


def test_the_end_of_a_log_is_of_this_run(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("of an earlier run\n")
    log = LogFile(path)

    for reason in (b"a reason\n", b"the reason\n"):
        with log.open_for_child() as file:
            assert "    (empty)" == log.tail()
            file.write(reason)
    assert "    the reason" == log.tail()

    path.write_text("later\n")  # somebody has emptied it
    log.new_important_lines()
    assert "    later" == log.tail()


def test_a_log_shows_what_a_process_says_at_each_of_its_ends_once(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    with log.open_for_child() as file:
        for second in range(9):
            file.write(b"2026-01-01T00:00:0%d.000Z ERROR   no redis\n    Traceback\n" % second)
            file.flush()

            assert [2, 0][second > 0] == len(log.new_important_lines())


@pytest.mark.parametrize("by", ["moving", "emptying"])
def test_a_log_that_somebody_rotates_shows_what_comes_then(tmp_path: Path, by: str) -> None:
    log = LogFile(tmp_path / "a.log")
    with log.open_for_child() as file:
        file.write(b"2026-01-01T00:00:00.000Z ERROR   " + b"x" * 100 + b"\n")
    assert 1 == len(log.new_important_lines())

    if by == "moving":
        log.path.rename(tmp_path / "a.log.old")
    else:
        log.path.write_bytes(b"")
    with log.open_for_child() as file:  # of the next process
        file.write(b"2026-01-01T00:00:01.000Z ERROR   later\n")

    assert ["2026-01-01T00:00:01.000Z ERROR   later"] == log.new_important_lines()


def test_a_log_is_cut_at_its_bound_and_one_old_file_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.local.child_logs.LOG_BYTES_MAX", 100)
    log = LogFile(tmp_path / "a.log")
    with log.open_for_child() as file:
        for number in range(3):
            file.write(b"2026-01-01T00:00:00.000Z WARNING %d " % number + b"x" * 100 + b"\n")
            file.flush()

            assert len(log.new_important_lines()) == 1
            assert log.path.stat().st_size == 0

    assert len((tmp_path / "a.log.1").read_text().splitlines()) == 1


def test_a_log_that_cannot_be_kept_is_cut_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, which this makes room on."""
    monkeypatch.setattr("deploy.local.child_logs.LOG_BYTES_MAX", 100)
    (tmp_path / "a.log.1").mkdir()
    log = LogFile(tmp_path / "a.log")
    with log.open_for_child() as file:
        file.write(b"2026-01-01T00:00:00.000Z WARNING " + b"x" * 100 + b"\n")

    assert 1 == len(log.new_important_lines())
    assert 0 == log.path.stat().st_size


def test_a_log_that_is_gone_or_cannot_be_read_ends_no_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is moved away just before it is cut, and as on a disk that fails."""
    monkeypatch.setattr("deploy.local.child_logs.LOG_BYTES_MAX", 100)
    log = LogFile(tmp_path / "a.log")
    with log.open_for_child() as file:
        file.write(b"2026-01-01T00:00:00.000Z WARNING " + b"x" * 100 + b"\n")

    def move_away(path: Path, _: Path) -> None:
        path.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(shutil, "copyfile", move_away)
    assert 1 == len(log.new_important_lines())

    log.path.symlink_to("/proc/self/mem")
    assert [] == log.new_important_lines()


def test_a_line_without_an_end_is_read_once_and_cut_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A progress bar of a model writes one for as long as it runs."""
    monkeypatch.setattr("deploy.local.child_logs.LOG_BYTES_MAX", 100)
    monkeypatch.setattr("deploy.local.child_logs.LINE_BYTES_MAX", 30)
    log, sizes = LogFile(tmp_path / "a.log"), list[int]()
    with log.open_for_child() as file:
        for _ in range(6):
            file.write(b"\r 50% of an epoch" * 2)
            file.flush()

            assert [] == log.new_important_lines()
            sizes.append(log.path.stat().st_size)
        file.write(b"\n2026-01-01T00:00:00.000Z WARNING later\n")

    assert [34, 68, 0] * 2 == sizes
    assert ["2026-01-01T00:00:00.000Z WARNING later"] == log.new_important_lines()


class LaunchedTerminal:
    """What a launcher of stand-ins tells a terminal. other_end: of the terminal"""

    def __init__(self, other_end: int) -> None:
        self.told = ""
        self._other_end = other_end

    def types(self, key: bytes) -> None:
        os.write(self._other_end, key)

    def reads_until(self, text: str) -> None:
        """Reads on until `text` is among all that was told."""
        while text not in self.told:
            try:
                self.told += os.read(self._other_end, 1 << 16).decode(errors="replace")
            except OSError:
                pytest.fail(f"{text!r} was not said:\n{self.told}")


@contextmanager
def on_a_terminal(data_dir: Path, **environment: str) -> Generator[LaunchedTerminal]:
    """A launcher on a terminal; behind the block it is told to stop, and ends in order."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(data_dir)],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
    )
    os.close(theirs)
    terminal = LaunchedTerminal(ours)
    try:
        yield terminal
        process.send_signal(signal.SIGINT)
        terminal.reads_until("stopping")
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_terminal_shows_the_mesh_below_the_messages_and_is_left_in_order(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path / "mesh", FAKE_STREAM=STREAM) as terminal:
        terminal.reads_until("0 executors · 5 sequences · 7 steps/s")

    assert terminal.told.index("ready:\r\n    http://127.0.0.1:") < terminal.told.index("0 executors ·")


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("event: view\ndata: {}\n\n", "the console tells what this release does not read"),
        ("nothing of the kind\n\n", "waiting for the console"),
    ],
)
def test_what_cannot_be_read_harms_no_mesh(tmp_path: Path, told: str, shown: str) -> None:
    with on_a_terminal(tmp_path / "mesh", FAKE_STREAM=told) as terminal:
        terminal.reads_until(shown)


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"GIVEN_LIVE": "no"}])
def test_a_terminal_that_cannot_draw_or_need_not_gets_plain_lines(tmp_path: Path, environment: dict[str, str]) -> None:
    with on_a_terminal(tmp_path / "mesh", FAKE_STREAM="", **environment) as terminal:
        terminal.reads_until("ready:")
        (killed,) = [one.pid for one in read_state(tmp_path / "mesh").children if one.name == "executor-1"]
        os.kill(killed, signal.SIGKILL)
        # By then there would be a drawing.
        terminal.reads_until("executor-1 was killed by SIGKILL")

    assert "\x1b" not in terminal.told


@pytest.mark.parametrize(
    ("drawn", "environment"), [("7 steps/s", {"FAKE_STREAM": STREAM}), ("/mesh\r\n", {"GIVEN_LIVE": "no"})]
)
def test_a_mesh_whose_terminal_is_stopped_goes_on(tmp_path: Path, drawn: str, environment: dict[str, str]) -> None:
    """By Ctrl-S, until Ctrl-Q: a launcher that waited to be read would start nobody again."""

    def pid() -> int:
        return next(one.pid for one in read_state(tmp_path / "mesh").children if one.name == "executor-1")

    with on_a_terminal(tmp_path / "mesh", **environment) as terminal:
        terminal.reads_until(drawn)
        terminal.types(b"\x13")
        for _ in range(3):
            before = pid()
            os.kill(before, signal.SIGKILL)
            wait(lambda before=before: pid() not in (0, before), "executor-1 runs again")
        terminal.types(b"\x11")

"""The embedded server: persistent, refuses to evict, and never outlives the process that started it."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click
import psutil
import pytest
from redis import Redis
from redis.exceptions import AuthenticationError

from deploy.chaos.node import HOST, ServerFailedError
from deploy.local import embedded
from deploy.local.data_directory import LauncherError, locked
from deploy.local.embedded import (
    FREE_PORTS,
    SOCKET_NAME,
    ServerNotFoundError,
    free_port,
    held_port,
    on_socket,
    served,
    server_command,
    serves,
    socket_path,
)
from deploy.local.private_files import make_private
from tests.embedded_redis import EmbeddedRedis


def client_of(server: EmbeddedRedis) -> Redis:
    return Redis.from_url(server.url, decode_responses=True)


def test_persists_by_append_only_file_and_never_evicts(private_server: EmbeddedRedis) -> None:
    with client_of(private_server) as client:
        configured = client.config_get("append*", "maxmemory-policy", "bind", "save")

    assert configured["appendonly"] == "yes"
    assert configured["appendfsync"] == "everysec"
    assert configured["maxmemory-policy"] == "noeviction"
    assert configured["save"] == ""
    assert configured["bind"] == "127.0.0.1"


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_data_and_port_survive_a_stop_and_a_crash(private_server: EmbeddedRedis, end: str) -> None:
    port = private_server.port
    with client_of(private_server) as client:
        client.set("kept", "1")
    getattr(private_server, end)()

    private_server.start()

    assert port == private_server.port
    with client_of(private_server) as client:
        assert client.get("kept") == "1"


OF_A_TEST = """
from tests.embedded_redis import EmbeddedRedis
server = EmbeddedRedis(pathlib.Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""
OF_A_COMMAND = """
from redis import Redis
from deploy.local.embedded import served
with served(pathlib.Path(sys.argv[1])) as url:
    print(Redis.from_url(url).info()["process_id"], flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("program", [OF_A_TEST, OF_A_COMMAND], ids=["of a test", "of a command"])
def test_dies_with_its_parent(tmp_path: Path, program: str) -> None:
    program = f"import pathlib, sys, time\n{program}"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)

    gone, alive = psutil.wait_procs([server], timeout=60)

    assert ([server], []) == (gone, alive)


def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(
    private_server: EmbeddedRedis, tmp_path: Path
) -> None:
    rival = EmbeddedRedis(tmp_path / "rival")
    rival.port = private_server.port

    with pytest.raises(ServerFailedError, match=r"(?s)did not start on.*Address already in use"):
        rival.start()

    assert not rival.is_running


def test_the_bundled_server_comes_before_the_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_server(tmp_path, "valkey-server", "v=8.0.1")))

    assert embedded.bundled_server() == embedded.find_server()


def test_without_the_bundle_a_new_enough_server_on_path_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "bundled_server", lambda: None)
    monkeypatch.setenv("PATH", str(fake_server(tmp_path, "redis-server", "v=7.0.15")))

    assert tmp_path / "redis-server" == embedded.find_server()


def test_without_any_usable_server_the_error_says_what_was_found_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "bundled_server", lambda: None)
    monkeypatch.setenv("PATH", str(fake_server(tmp_path, "redis-server", "v=6.2.1")))

    with pytest.raises(ServerNotFoundError, match=r"redis-server is version 6\.2\.1.*SEQMESH_REDIS_URL"):
        embedded.find_server()


def fake_server(directory: Path, name: str, version: str) -> Path:
    """A program that only knows `--version`; returns the directory, for PATH."""
    program = directory / name
    program.write_text(f"#!/bin/sh\necho 'Redis server {version} sha=00000000:0'\n")
    program.chmod(0o755)
    return directory


@pytest.mark.parametrize("temporary", ["t", "t" * 100])
def test_a_socket_lies_with_the_data_or_where_the_path_is_too_long_in_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str
) -> None:
    (tmp_path / temporary).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / temporary))

    with socket_path(Path("/tmp/mesh")) as near:
        assert Path("/tmp/mesh").resolve() / "redis.sock" == near

    with socket_path(tmp_path / ("x" * 100)) as far:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(far))
        assert 0o700 == mode(far.parent)
    assert not far.parent.exists()


def test_a_data_directory_whose_path_is_too_long_is_named_where_there_is_no_other_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/absent")

    with pytest.raises(click.ClickException) as refused, socket_path(tmp_path / ("x" * 100)):
        pass

    assert re.search(r"longer than the 103 bytes .*/absent/.* shorter --data-dir", refused.value.message)


def test_nobody_gets_in_without_the_password_which_no_list_of_processes_shows(private_server: EmbeddedRedis) -> None:
    with (
        Redis(host=HOST, port=private_server.port) as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.ping()

    assert private_server.password in private_server.url
    assert private_server.password not in " ".join(psutil.Process(private_server.pid).cmdline())


def test_what_the_server_keeps_is_its_owners_alone(private_server: EmbeddedRedis) -> None:
    with client_of(private_server) as client:
        client.set("kept", "1")

    kept = [private_server.data_dir, *private_server.data_dir.rglob("*")]

    assert {"appendonlydir", "redis.conf", "redis.log"} <= {path.name for path in kept}
    assert dict.fromkeys(kept, 0) == {path: mode(path) & 0o077 for path in kept}


@contextmanager
def former_server(data_dir: Path) -> Generator[subprocess.Popen[bytes]]:
    """A server on that data, as of another launcher. It ends with the block."""
    with socket_path(data_dir) as path:
        command = server_command(data_dir, on_socket(path), "everysec")
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=data_dir) as process:
            while not serves(path, process.pid):
                time.sleep(0.02)
            try:
                yield process
            finally:
                process.terminate()


def test_a_server_starts_when_the_one_before_has_written_out_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers wrote into one file, and the one that ended took the socket of the other with it."""
    said: list[str] = []
    with former_server(tmp_path) as former:
        # As its launcher's death would tell it. It takes as long as it takes the other one to see it.
        former.send_signal(signal.SIGSTOP)
        former.terminate()

        def say(text: str) -> None:
            said.append(text)
            former.send_signal(signal.SIGCONT)

        monkeypatch.setattr(embedded, "say", say)
        with served(tmp_path) as url, Redis.from_url(url) as client:
            former.wait()
            assert client.ping()
            assert (tmp_path / SOCKET_NAME).exists()
    assert ["waiting for the end of a server that runs there already"] == [text.partition(",")[0] for text in said]


def test_a_server_that_does_not_end_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "FORMER_SERVER_S", 0.0)
    with (
        former_server(tmp_path),
        pytest.raises(click.ClickException, match=f"a server still listens on {tmp_path / SOCKET_NAME}: end it"),
        served(tmp_path),
    ):
        pass


def mode(path: Path) -> int:
    """Who may do what with a file."""
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_that_is_there_keeps_its_mode_and_it_is_said_who_else_may_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    assert (
        make_private(folder) == f"{folder} is open to other users of this machine (mode 755): chmod -R go= '{folder}'"
    )
    assert 0o755 == mode(folder)

    folder.chmod(0o700)
    assert make_private(folder) == ""
    assert make_private(tmp_path / "new" / "newer") == ""
    assert 0o700 == mode(tmp_path / "new" / "newer")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 54321, -1)

    with pytest.raises(PermissionError, match=r"belongs to another user \(54321\)"):
        make_private(tmp_path)
    with pytest.raises(LauncherError, match="--data-dir"), locked(tmp_path):
        pass
    assert [] == list(tmp_path.iterdir())


def test_free_ports_are_none_that_the_system_gives_and_none_is_given_twice() -> None:
    """A port that the system gives to an outgoing connection could be taken before it is listened on."""
    ports = [free_port() for _ in range(200)]

    assert {*ports} <= {*FREE_PORTS}
    assert len(ports) == len({*ports})
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_a_held_port_is_given_to_nobody_else_and_can_be_listened_on_again_and_again() -> None:
    port = held_port()
    with socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind(("127.0.0.1", port))

    for _ in range(2):
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()


def test_a_host_on_which_nothing_can_listen_is_told() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("203.0.113.7")

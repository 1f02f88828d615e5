"""`seqmesh demo`: its pure parts, and once as the user would run it."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import click
import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from tritonclient.utils import InferenceServerException

from deploy.cli import main as cli
from deploy.demo.command import demo, is_gateway_of, reason_for_mercy, refuse_drained, running_mesh, target
from deploy.demo.local_mesh import LocalMesh, busiest, joined
from deploy.demo.screen import Screen, TextView
from deploy.demo.showing import await_model, client_of, numbered, show_owners, unavailability
from deploy.demo.texts import SAMPLE_TEXTS, pieces_of, sample_texts
from deploy.demo.transcript import AnsweredPiece, felt, first_differences
from deploy.local.data_directory import ChildState, LauncherError, MeshState, locked, read_state, write_state
from deploy.local.embedded import free_port
from deploy.local.endings import EXIT_NOT_BEGUN
from deploy.local.private_mesh import environment_without_settings, private_mesh, ready_state
from deploy.local.terminal import styled
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, RepositoryEntry
from shared.store.agreement import agree
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership


def answer(text: str, *, sent_s: float = 0.0, waited_s: float = 0.01) -> AnsweredPiece:
    return AnsweredPiece((text[:1].encode(), text.encode()), sent_s, sent_s + waited_s)


async def test_a_port_that_speaks_http_alone_is_told_at_once() -> None:
    async def answer_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer_http, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()

        with pytest.raises(click.ClickException, match="does not speak gRPC without TLS: --url names the gRPC port"):
            async with client_of(f"{host}:{port}"):
                pass


async def test_a_reader_that_has_gone_is_not_told_as_a_gateway_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`seqmesh demo | head -1`"""
    monkeypatch.setattr("deploy.demo.showing.speaks_grpc", AsyncMock())

    with pytest.raises(BrokenPipeError):
        async with client_of("127.0.0.1:1"):
            raise BrokenPipeError


async def test_a_name_that_no_host_can_have_is_told() -> None:
    with pytest.raises(click.ClickException, match=r"no answer from un\.\.named:8001: "):
        async with client_of("un..named:8001"):
            pass


def mesh_of(*gateway_ports: int) -> MeshState:
    gateways = [ChildState("gateway", "gateway", 1, "", grpc_port=port) for port in gateway_ports]
    return MeshState(1, "127.0.0.1", "redis://127.0.0.1:1/0", ready=True, children=gateways)


def mesh_of_executors(*names: str) -> MeshState:
    executors = [ChildState(name, "executor", 1, "") for name in names]
    return msgspec.structs.replace(mesh_of(1), children=executors)


@given(st.text(st.characters(max_codepoint=127)).filter(str.strip))
def test_pieces_joined_are_the_text(text: str) -> None:
    assert text == b"".join(pieces_of(text)).decode()


def test_pieces_end_with_the_blanks_behind_the_word() -> None:
    assert (b"Down ", b"the  ", b"rabbit-hole.") == pieces_of("Down the  rabbit-hole.")


@pytest.mark.parametrize("text", ["", "  \n", "caf\u00e9"])
def test_a_text_that_the_model_cannot_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"words|ASCII"):
        pieces_of(text)


def test_sample_texts_begin_again_when_more_are_asked_for() -> None:
    assert (*SAMPLE_TEXTS, SAMPLE_TEXTS[0]) == sample_texts(len(SAMPLE_TEXTS) + 1)


def test_equal_runs_have_no_difference_whatever_the_waiting_times() -> None:
    first = [[answer("a", waited_s=0.1)], [answer("b")]]
    second = [[answer("a", waited_s=3.0)], [answer("b")]]

    assert [] == first_differences(first, second)


def test_a_difference_tells_where_a_text_parts() -> None:
    first = [[answer("a"), answer("b"), answer("c")], [answer("x")]]
    second = [[answer("a"), answer("B"), answer("C")], [answer("x")]]

    (difference,) = first_differences(first, second)

    assert (0, 1, "'b'", "'B'") == (difference.text, difference.piece, difference.expected, difference.got)


def test_a_missing_answer_is_a_difference() -> None:
    (difference,) = first_differences([[answer("a"), answer("b")]], [[answer("a")]])

    assert (1, "no answer") == (difference.piece, difference.got)


def test_waiting_is_told_apart_by_who_held_the_text() -> None:
    held = [answer("a", sent_s=0.0, waited_s=0.01), answer("b", sent_s=0.9, waited_s=3.5)]
    other = [answer("x", sent_s=0.0, waited_s=0.03), answer("y", sent_s=1.5, waited_s=0.2)]

    takeover = felt([held, other], held=[0], killed_s=1.0)

    assert {0: 3.5} == pytest.approx(takeover.longest_wait_s)
    assert 0.2 == pytest.approx(takeover.others_wait_s)
    assert 0.03 == pytest.approx(takeover.usual_wait_s)


def test_nobody_else_waits_when_the_killed_executor_held_every_text() -> None:
    assert felt([[answer("a")]], held=[0], killed_s=0.0).others_wait_s is None


def test_the_executor_with_most_texts_is_chosen_and_the_first_among_equals() -> None:
    assert "b" == busiest(["a", "b", "b", ""], ["a", "b", "c"])
    assert "a" == busiest(["b", "a"], ["b", "a"])


@pytest.mark.parametrize(("texts", "words"), [((), "no text"), ((2,), "text 3"), ((0, 2), "texts 1, 3")])
def test_texts_are_counted_from_one_for_people(texts: tuple[int, ...], words: str) -> None:
    assert words == numbered("text", texts)


@pytest.mark.parametrize("columns", [10, 39, 60, 80, 200])
@pytest.mark.parametrize("waiting_since_s", [None, 0.0])
def test_a_live_line_fits_the_terminal(columns: int, waiting_since_s: float | None) -> None:
    view = TextView(40, "word " * 100, "c" * 24, 7, owner="executor-with-a-long-name", waiting_since_s=waiting_since_s)

    line = re.sub(r"\x1b\[[0-9;]*m", "", view.line(1, columns, now_s=5.0))

    assert columns >= len(line)


def test_a_live_line_says_how_long_an_answer_is_waited_for() -> None:
    assert "... 2.5 s" in TextView(40, waiting_since_s=1.0).line(1, 80, now_s=3.5)


def test_what_would_move_the_cursor_becomes_a_blank() -> None:
    assert "one two" in TextView(1, "one\ntwo").line(1, 80, now_s=0.0)


def test_without_a_terminal_every_line_is_plain_and_the_last_piece_is_told() -> None:
    out = io.StringIO()
    view = TextView(5, "Down the rabbit-hole", "s and down", 5, owner="executor-1")

    Screen([view], out).plain(view.plain_line(1))

    assert "  text 1 on executor-1, 5/5: ...Down the rabbit-hole[s and down]\n" == out.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("name", "value", "drawn"), [("TERM", "dumb", ""), ("NO_COLOR", "1", "\r\x1b[2K 1 executor-1     5/5   ")]
)
def test_a_terminal_gets_only_what_it_can_show(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, drawn: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    out = Terminal()

    Screen([TextView(5, "rabbit-hole", "s", 5, owner="executor-1")], out).refresh()

    assert drawn == out.getvalue()[: len(drawn) or None]
    assert 1 >= out.getvalue().count("\x1b")


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_a_terminal_without_colours_gets_none(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "equal" != styled("equal", fg="green")

    monkeypatch.setenv(name, value)

    assert "equal" == styled("equal", fg="green")


@pytest.mark.parametrize(
    ("url", "is_ours"),
    [("127.0.0.1:8001", True), ("localhost:8011", True), ("127.0.0.1:9001", False), ("elsewhere.example:8001", False)],
)
def test_only_a_gateway_of_this_machines_mesh_lets_an_executor_be_killed(url: str, is_ours: bool) -> None:
    assert is_ours == is_gateway_of(mesh_of(8001, 8011), url)


def test_a_directory_without_a_mesh_has_none(tmp_path: Path) -> None:
    assert running_mesh(tmp_path) is None


def test_the_mesh_of_another_user_runs_though_no_signal_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    write_state(tmp_path, mesh_of(8001))

    with locked(tmp_path):
        assert mesh_of(8001) == running_mesh(tmp_path)


def test_a_mesh_whose_process_id_is_another_programs_by_now_does_not_run(tmp_path: Path) -> None:
    with locked(tmp_path):
        write_state(tmp_path, msgspec.structs.replace(mesh_of(8001), pid=os.getpid()))

    assert running_mesh(tmp_path) is None


@pytest.mark.parametrize(("before", "within"), [({}, "127.0.0.1"), ({"NO_PROXY": "here"}, "here,127.0.0.1")])
def test_a_mesh_of_this_machine_is_reached_past_the_proxies_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], within: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)

    with target("", mesh_of(8001)) as (address, _):
        assert ("127.0.0.1:8001", within) == (address, os.environ["no_proxy"])
    assert "no_proxy" not in os.environ


def test_an_address_and_a_private_mesh_exclude_each_other() -> None:
    result = CliRunner().invoke(demo, ["--url", "127.0.0.1:1", "--private"])

    assert 2 == result.exit_code
    assert "give one of them" in result.output


def test_an_address_where_nobody_listens_is_told_at_once() -> None:
    result = CliRunner().invoke(cli, ["demo", "--url", f"127.0.0.1:{free_port()}"])

    assert EXIT_NOT_BEGUN == result.exit_code
    assert "no answer from 127.0.0.1:" in result.output


@pytest.mark.parametrize("url", ["foo", "http://foo", "http://foo:8001", "foo:", ":8001", "foo:0", "foo:65536"])
def test_an_address_without_host_or_port_is_refused(url: str) -> None:
    result = CliRunner().invoke(demo, ["--url", url])

    assert 2 == result.exit_code
    assert f"'{url}' is not host:port" in result.output


async def test_a_mesh_that_lacks_the_model_is_told_at_once(redis: Redis, redis_url: str, key_prefix: str) -> None:
    await agree(redis, key_prefix, 1)
    state = msgspec.structs.replace(mesh_of(1), redis_url=redis_url, key_prefix=key_prefix)

    async with AsyncExitStack() as stack:
        with pytest.raises(click.ClickException, match="no model 'text_lstm': --private starts"):
            await stack.enter_async_context(joined(state, "text_lstm"))


async def test_a_model_that_could_not_be_loaded_is_told_with_the_reason(
    redis: Redis, redis_url: str, key_prefix: str
) -> None:
    """Also of the demo's own mesh: `--private` would start the same once more."""
    keys = await agree(redis, key_prefix, 1)
    failed = RepositoryEntry("text_lstm", state="UNAVAILABLE", reason="unable to find backend 'pytorch'")
    executor = ExecutorRegistration(ExecutorId("one-a"), "one", "host", 1, 1, repository=(failed,))
    await Membership(redis, keys).register(executor, lease_ms=60_000)
    state = msgspec.structs.replace(mesh_of(1), redis_url=redis_url, key_prefix=key_prefix)

    with pytest.raises(click.ClickException, match="'text_lstm' is not loaded: unable to find backend 'pytorch'"):
        async with joined(state, "text_lstm"):
            pass


async def test_a_mesh_whose_redis_is_lost_is_told_with_the_remedy() -> None:
    with pytest.raises(click.ClickException, match=r"Redis of the mesh cannot be reached \(.*\): `seqmesh doctor`"):
        async with joined(msgspec.structs.replace(mesh_of(1), redis_url=f"redis://127.0.0.1:{free_port()}"), "m"):
            pass


async def test_owners_are_shown_again_when_redis_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.demo.showing.OWNER_INTERVAL_S", 0.0)
    screen = Mock(views=[TextView(1)])
    mesh = Mock(owners=AsyncMock(side_effect=[RedisConnectionError("lost"), ["one"], asyncio.CancelledError]))

    with pytest.raises(asyncio.CancelledError):
        await show_owners(mesh, ["id"], screen)

    assert "one" == screen.views[0].owner


async def test_a_mesh_whose_executors_are_all_drained_is_told_at_once_with_the_remedy(
    redis: Redis, key_prefix: str
) -> None:
    mesh = LocalMesh(mesh_of_executors("one", "two"), "text_lstm", redis, Keyspace(key_prefix))
    membership = Membership(redis, Keyspace(key_prefix))
    for name in ("elsewhere", "one"):
        await membership.drain(name, 1)
    await refuse_drained(mesh)

    await membership.drain("two", 1)

    with pytest.raises(click.ClickException, match=r"every executor is drained.* `seqmesh drain --undo one two`"):
        await refuse_drained(mesh)


async def test_a_drained_executor_is_not_waited_for(redis: Redis, key_prefix: str) -> None:
    mesh = LocalMesh(mesh_of_executors("one", "two"), "text_lstm", redis, Keyspace(key_prefix))
    await Membership(redis, Keyspace(key_prefix)).drain("two", 1)

    assert "drained: two; `seqmesh drain --undo` takes it back" == await reason_for_mercy(mesh)


async def test_no_process_is_killed_that_is_no_executor_any_more(redis: Redis, key_prefix: str) -> None:
    """mesh.json was read before the first run. The id of an executor that ended since may be another program's, and
    between two runs of one it is 0: the whole group of the demo's own processes."""
    keys = Keyspace(key_prefix)
    await redis.hset(keys.mesh, "shards", 1)
    membership = Membership(redis, await agree(redis, key_prefix))
    with sleeping() as stranger, sleeping() as executor:
        children = [
            ChildState("one", "executor", stranger.pid, ""),
            ChildState("two", "executor", executor.pid, ""),
            ChildState("three", "executor", 0, ""),
        ]
        mesh = LocalMesh(msgspec.structs.replace(mesh_of(1), children=children), "text_lstm", redis, keys)
        for name, pid in (("one", executor.pid + 1), ("two", executor.pid), ("three", executor.pid + 2)):
            about = ExecutorRegistration(ExecutorId(f"{name}-1"), name, host="h", pid=pid, started_ms=0, models=())
            await membership.register(about, lease_ms=60_000)

        assert ("two", executor.pid) == ((killed := await mesh.kill_one([])).name, killed.pid)
        assert (None, -signal.SIGKILL) == (stranger.poll(), executor.wait())

        again = msgspec.structs.replace(about, executor=ExecutorId("two-1"), name="two")
        await membership.register(again, lease_ms=60_000)
        with pytest.raises(click.ClickException, match="every executor was started again meanwhile"):
            await mesh.kill_one([])


@contextmanager
def sleeping() -> Generator[subprocess.Popen[bytes]]:
    """A process that does nothing, for the block."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_executors_that_are_waited_for_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], redis: Redis, key_prefix: str
) -> None:
    monkeypatch.setattr("deploy.demo.local_mesh.EXECUTORS_TIMEOUT_S", 0.0)
    mesh = LocalMesh(mesh_of_executors("one", "two"), "text_lstm", redis, Keyspace(key_prefix))
    monkeypatch.setattr(mesh, "_serving", AsyncMock(return_value={"one", "elsewhere"}))

    assert not await mesh.executors_ready()
    assert "waiting for two (at most 0 s)\n" == capsys.readouterr().out


async def test_a_model_that_nobody_serves_is_waited_for_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deploy.demo.showing.MODEL_INTERVAL_S", 0.0)
    monkeypatch.setattr("deploy.demo.showing.unavailability", AsyncMock(side_effect=["none serves", "none serves", ""]))

    await await_model("127.0.0.1:1", "text_lstm")

    assert "waiting, at most 60 s: none serves\n" == capsys.readouterr().out


async def test_a_model_that_nobody_comes_to_serve_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.demo.showing.MODEL_TIMEOUT_S", 0.0)
    monkeypatch.setattr("deploy.demo.showing.unavailability", AsyncMock(return_value="none serves"))

    with pytest.raises(click.ClickException, match=r"127[.]0[.]0[.]1:1: none serves; `seqmesh doctor`"):
        await await_model("127.0.0.1:1", "text_lstm")


async def test_a_model_that_the_gateway_does_not_know_is_not_waited_for() -> None:
    def refusing(status: str) -> Mock:
        refused = InferenceServerException("why", f"StatusCode.{status}")
        return Mock(get_model_metadata=AsyncMock(side_effect=refused))

    assert "why" == await unavailability(refusing("UNAVAILABLE"), "text_lstm")
    with pytest.raises(click.ClickException, match="why: a mesh with the sample models has it"):
        await unavailability(refusing("NOT_FOUND"), "text_lstm")


def test_a_text_that_cannot_be_read_is_refused_before_anything_starts() -> None:
    result = CliRunner().invoke(demo, ["--private", "caf\u00e9"])

    assert 2 == result.exit_code
    assert "ASCII" in result.output


def test_the_callers_settings_do_not_reach_a_private_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQMESH_REDIS_URL", "redis://somebody-elses-data/0")

    assert "SEQMESH_REDIS_URL" not in environment_without_settings()


def test_a_private_mesh_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(LauncherError, match="no model repository"),
        private_mesh(executors=1, models=(tmp_path / "absent",)),
    ):
        pytest.fail("it cannot have started")


def test_a_private_mesh_that_ends_while_its_state_is_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes mesh.json with it. What was told then was that only another user may read it."""
    write_state(tmp_path, mesh_of(1))
    (tmp_path / "said").write_text("the reason\n")

    def ends(path: Path) -> bytes:
        path.unlink(missing_ok=True)
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "read_bytes", ends)

    with pytest.raises(LauncherError, match=r"the mesh ended; .*:\nthe reason"):
        ready_state(Mock(poll=Mock(side_effect=[None, 1, 1])), tmp_path, tmp_path / "said")
    with pytest.raises(LauncherError, match="no mesh runs in"):
        read_state(tmp_path)


@pytest.mark.timeout(300)
def test_killing_an_executor_half_way_changes_no_answer(tmp_path: Path) -> None:
    """The whole demo, with a mesh of its own, since the running one has a single executor: two runs, one kill, equal
    answers, exit code 0. Also where the environment names a proxy, which gRPC would ask for this machine, too.
    """
    state = msgspec.structs.replace(mesh_of(1), pid=os.getpid())
    state.children.append(ChildState("executor-1", "executor", 1, ""))
    (tmp_path / "mesh.json").write_bytes(msgspec.json.encode(state))
    command = [sys.executable, "-m", "deploy.cli", "demo", f"--data-dir={tmp_path}", "--texts=4", "--pace-ms=0"]

    proxy = {"http_proxy": f"http://127.0.0.1:{free_port()}", "no_proxy": "", "NO_PROXY": ""}

    with locked(tmp_path):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, **proxy}
        )

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "has one executor only" in done.stdout
    assert "is killed; it held text" in done.stdout
    assert "equal: all" in done.stdout

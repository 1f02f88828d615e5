"""The command `seqmesh`: every command is there, and a service is imported only when it is called."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from deploy import cli, start
from deploy.local.endings import EXIT_NOT_BEGUN
from deploy.local.settings import UpSettings
from deploy.operate import operating, sequences
from shared.contract.ids import sequence_id
from shared.traces.context import sequence_trace_id


def test_the_help_names_every_command() -> None:
    text = CliRunner().invoke(cli.main, ["--help"]).output

    services = ("gateway", "scheduler", "executor")
    for command in ("up", *services, "drain", "seq", "new", "doctor", "chaos", "demo", "trace", "version"):
        assert f"\n  {command} " in text


def test_a_command_that_is_interrupted_while_it_is_imported_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> None:
            if fullname == "deploy.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "deploy.cli")
    monkeypatch.delattr("deploy.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])

    with pytest.raises(SystemExit) as end:
        start.main()

    assert cli.EXIT_INTERRUPTED == end.value.code
    assert ("", "") == capsys.readouterr()


@pytest.mark.parametrize("error", [None, RuntimeError("does not include http support")])
@pytest.mark.parametrize(
    ("words", "extras"), [(["executor"], "executor"), (["chaos"], "gateway,scheduler,executor,local")]
)
def test_a_command_whose_packages_are_not_installed_says_which_and_what_brings_them(
    words: list[str], extras: str, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image of a gateway. tritonclient makes an error of its own of it."""
    missing = ModuleNotFoundError("No module named 'psutil'", name="psutil")

    def refused(_: str) -> None:
        if error is None:
            raise missing
        raise error from missing

    monkeypatch.setattr(cli, "import_module", refused)

    ended = CliRunner().invoke(cli.main, words)

    assert 1 == ended.exit_code
    assert f"Error: this needs psutil, which is not installed here: pip install 'seqmesh[{extras}]'" in ended.output


@pytest.mark.parametrize("words", [["version"], ["seq", "ls", "sum"], ["demo"], ["demo", "vad"]])
def test_a_command_that_is_interrupted_has_the_exit_code_of_that(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever Ctrl-C comes. 1 would be what the command itself has to say."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "version", interrupted)
    monkeypatch.setattr(operating, "located", interrupted)
    monkeypatch.setattr("deploy.demo.command.sample_texts", interrupted)
    monkeypatch.setattr("deploy.demo.vad.command.require_packages", interrupted)

    assert cli.EXIT_INTERRUPTED == CliRunner().invoke(cli.main, words).exit_code


@pytest.mark.parametrize("command", [cli.main, sequences.command])
def test_what_a_command_does_stands_whole_in_the_list(command: click.Command) -> None:
    text = CliRunner().invoke(command, ["--help"], terminal_width=80).output

    assert "..." not in text.partition("\nCommands:\n")[2]


@pytest.mark.parametrize("command", ["doctor", "new", "drain", "seq ls", "seq move", "seq end", "chaos"])
def test_the_help_of_what_operates_a_mesh_shows_an_example_on_a_line_of_its_own(command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *command.split(), "--help"], capture_output=True, text=True, check=True
    )

    assert "\\b" not in result.stdout
    assert re.search(r"^ +(seqmesh \w+( \w+)? \S+|--pids \S+)", result.stdout, re.MULTILINE)


def commands_below(command: click.Command, *words: str) -> Iterator[tuple[str, click.Command]]:
    """Every command with its words, also those that are imported late."""
    if isinstance(command, cli.LazyCommand):
        command = command.real()
    yield " ".join(words), command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands_below(below, *words, name)


def test_every_help_is_read_on_eighty_columns() -> None:
    """But for a line that has one option's name and nothing else: no word of it may be broken."""
    for words, command in commands_below(cli.main):
        text = CliRunner().invoke(command, ["--help"], prog_name=f"seqmesh {words}", terminal_width=80).output
        long = [line for line in text.splitlines() if len(line) > 80 and not line.strip().startswith("--")]
        assert [] == long, words


def test_the_help_of_up_shows_every_setting() -> None:
    result = CliRunner().invoke(cli.main, ["up", "--help"])

    assert result.exit_code == 0
    for field in UpSettings.__dataclass_fields__:
        assert "--" + field.replace("_", "-") in result.output


def test_a_services_arguments_reach_it_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []

    class Service:
        @staticmethod
        def main(arguments: tuple[str, ...]) -> None:
            seen.append(arguments)

    monkeypatch.setitem(sys.modules, "gateway.__main__", Service)

    CliRunner().invoke(cli.main, ["gateway", "--http-port", "1", "--help"], catch_exceptions=False)

    assert seen == [("--http-port", "1", "--help")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device is Linux's")
@pytest.mark.parametrize("words", [["doctor"], ["up", "--help"], ["trace", "m", "42"]])
def test_an_output_that_cannot_be_written_is_told_in_a_line(words: list[str], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "deploy.cli", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "SEQMESH_DATA_DIR": str(tmp_path)},
        )

    assert "Error: the output cannot be written: No space left on device\n" == ended.stderr
    assert 1 == ended.returncode


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_gets_nothing(closed: str) -> None:
    command = shlex.join([sys.executable, "-m", "deploy.cli", "version"])

    ended = subprocess.run(f"{command} {closed}", shell=True, capture_output=True, text=True, check=False)

    assert (0, "") == (ended.returncode, ended.stderr)


@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", r"\u043c\udcff"), ("utf-8", r"м\udcff")])
def test_a_name_that_the_output_cannot_encode_is_escaped(encoding: str, shown: str, tmp_path: Path) -> None:
    models = os.fsencode(tmp_path) + "/м".encode() + b"\xff"

    ended = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "new", "mine", "--models", models],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )

    assert (0, b"") == (ended.returncode, ended.stderr)
    assert shown in ended.stdout.decode(encoding)


@pytest.mark.parametrize(
    "words", [["up", "--data-dir=caf\udce9"], ["up", "--models=caf\udce9"], ["executor", "--models=."]]
)
def test_a_folder_whose_path_is_no_utf8_is_refused_with_the_remedy(words: list[str], tmp_path: Path) -> None:
    """Neither JSON can name it, nor can libraries in C++ open it: a name from an old archive, mostly."""
    folder = tmp_path / "caf\udce9"
    folder.mkdir()

    ended = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *words],
        capture_output=True,
        check=False,
        cwd=folder if words[0] == "executor" else tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )

    assert ended.returncode
    assert b"is no UTF-8: rename what is not" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_a_reader_that_has_gone_is_no_verdict(tmp_path: Path) -> None:
    """`seqmesh analyze MODEL 2>&1 | head -1`: exit code 1 would say that no configuration is within the bounds."""
    read, write = os.pipe()
    os.close(read)

    with os.fdopen(write, "w") as broken:
        words = ["analyze", str(Path(__file__).parents[2] / "deploy" / "models" / "add_sub"), "--output=out"]
        ended = subprocess.run(
            [sys.executable, "-m", "deploy.cli", *words], stdout=broken, stderr=broken, check=False, cwd=tmp_path
        )

    assert EXIT_NOT_BEGUN == ended.returncode
    assert [] == list(tmp_path.iterdir())


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    said = CliRunner().invoke(cli.main, ["doctor"])

    assert "Error: the working directory has been removed" in said.output
    assert 1 == said.exit_code


def test_that_no_temporary_directory_is_usable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_usable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none_usable)

    said = CliRunner().invoke(cli.main, ["demo", "--private"])

    assert "Error: No usable temporary directory found in ['/tmp']" in said.output
    assert EXIT_NOT_BEGUN == said.exit_code


@pytest.mark.parametrize("command", ["seq", "drain"])
def test_what_stands_behind_two_dashes_is_no_option(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id may begin with a dash."""
    monkeypatch.chdir(tmp_path)
    words = {"seq": ["seq", "show", "m", "--", "-5"], "drain": ["drain", "--", "-x"]}[command]

    said = CliRunner().invoke(cli.main, words)

    assert "no mesh runs in" in said.output
    assert said.exit_code == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["new", "m" * 300], "300 characters, of at most 200"),
        (["new", "x", "--models", "/proc/nope"], "/proc/nope/x cannot be written"),
        (["new", "x", "--models", "m" * 300], "/x cannot be written: File name too long"),
        (["doctor", "--data-dir", "m" * 300], "/mesh.json cannot be read (File name too long)"),
        (["reshard", "2", "--data-dir", "m" * 300], "/redis cannot be read or written: File name too long"),
        (["seq", "replay", "m", "--file", "/dev/null"], "by MODEL and ID, or an exported one by --file"),
        (["seq", "replay", "m", "1", "--gateway", "localhost:65537"], "--gateway: 'localhost:65537' is no gateway"),
        (["seq", "replay", "m", "1", "--gateway", "http://localhost:8000"], "without a scheme and without a path"),
        (["chaos", "--write-models", "/proc/nope"], "/proc/nope cannot be written"),
        (["chaos", "--minutes", "nan"], "'nan' is no number"),
        (["up", "--console-token", "short"], "--console-token needs at least 16 characters"),
        (["up", "--console-token", 8 * "né"], "--console-token takes letters and signs of ASCII alone"),
        (["up", "--console-token", 8 * "a "], "--console-token takes letters and signs of ASCII alone"),
        (
            ["up", "--model-control-mode", "explicit"],
            "--model-control-mode is a setting of executors: set SEQMESH_MODEL_CONTROL_MODE for `seqmesh up`",
        ),
        (["up", "--no-exit-on-error"], "is a setting of executors: set SEQMESH_EXIT_ON_ERROR for"),
        (["up", "--lease-ms=1000"], "--lease-ms is a setting of executors and schedulers: set SEQMESH_LEASE_MS for"),
        (["up", "--name", "a"], "No such option"),
        (["up", "a repo"], "a model repository stands behind --models: --models 'a repo'"),
    ],
)
def test_what_cannot_be_done_is_told_without_a_traceback(words: list[str], text: str) -> None:
    said = CliRunner().invoke(cli.main, words)

    assert text in said.output
    assert said.exit_code in (1, 2)
    assert isinstance(said.exception, SystemExit)


def test_a_disk_that_is_full_behind_the_first_file_of_a_new_model_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise shutil.Error([(f"template/{name}", name, "No space left on device") for name in ("config.pbtxt", "1")])

    monkeypatch.setattr(shutil, "copytree", full)

    said = CliRunner().invoke(cli.main, ["new", "mine", "--models", str(tmp_path)])

    assert f"Error: {tmp_path / 'mine'} cannot be written: No space left on device\n" == said.output
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [0, 1])
def test_a_services_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A health check, and whatever starts services again, reads it."""

    class Service:
        @staticmethod
        def main(_: tuple[str, ...]) -> int:
            return code

    monkeypatch.setitem(sys.modules, "executor.__main__", Service)

    assert code == CliRunner().invoke(cli.main, ["executor", "healthcheck"]).exit_code


def test_a_console_without_a_mesh_names_the_remedy(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "console", "--data-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert 1 == ended.returncode
    assert f"no mesh runs in {tmp_path}: give the --data-dir of its `seqmesh up`" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_command_itself_imports_no_service_and_nothing_heavy() -> None:
    """A gateway's image has no torch, and `--help` must be quick."""
    program = (
        "import sys, deploy.cli\n"
        "print(sorted({'torch', 'grpc', 'numpy', 'gateway', 'scheduler', 'executor'} & set(sys.modules)))"
    )

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"


def test_a_missing_model_repository_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"

    result = CliRunner().invoke(cli.main, ["up", "--models", str(missing), "--data-dir", str(tmp_path)])

    assert result.exit_code == 1
    assert f"no model repository at {missing}" in result.output


@pytest.mark.parametrize("words", [["up", "--data-dir", "data"], ["new", "m"]])
def test_a_model_in_the_place_of_a_repository_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = {tmp_path / "1", tmp_path / "config.pbtxt"}
    (tmp_path / "1").mkdir()
    (tmp_path / "config.pbtxt").touch()

    result = CliRunner().invoke(cli.main, [*words, "--models", str(tmp_path)])

    assert result.exit_code == 1
    assert f"{tmp_path} is a model: --models names the directory of models that it is in" in result.output
    assert made == set(tmp_path.iterdir())


def test_a_model_repository_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may read everything."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)

    result = CliRunner().invoke(cli.main, ["up", "--models", str(tmp_path), "--data-dir", str(tmp_path / "mesh")])

    assert result.exit_code == 1
    assert f"the model repository {tmp_path} cannot be read (Permission denied): " in result.output
    assert "let this user read and enter it, or give other --models" in result.output


def test_an_empty_model_repository_is_named_with_what_fills_it(tmp_path: Path) -> None:
    empty, missing = tmp_path / "my models", tmp_path / "nowhere"
    empty.mkdir()

    # The second one ends the command before it changes anything of this process.
    result = CliRunner().invoke(cli.main, ["up", "--models", str(empty), "--models", str(missing)])

    assert result.exit_code == 1
    assert f"{empty} holds no model: `seqmesh new NAME --models '{empty}'` writes one" in result.output


@pytest.mark.parametrize(("arguments", "correlation_id"), [(["7"], 7), (["7", "--string"], "7"), (["talk"], "talk")])
def test_trace_prints_the_id_under_which_a_sequence_is_recorded(
    arguments: list[str], correlation_id: int | str
) -> None:
    shown = CliRunner().invoke(cli.main, ["trace", "m", *arguments])

    assert f"{sequence_trace_id(sequence_id('m', '', correlation_id)):032x}\n" == shown.output


def offered(*words: str) -> list[str]:
    """What a shell is offered for the last word of a line."""
    *before, last = words
    found = ShellComplete(cli.main, {}, "seqmesh", "_SEQMESH_COMPLETE").get_completions(before, last)
    return [one.value for one in found]


def test_a_shell_is_offered_commands_options_and_words_of_commands_that_are_imported_late() -> None:
    assert ["reshard"] == offered("res")
    assert {"pause", "export", "ls"} <= set(offered("seq", ""))
    assert ["--seconds", "--string"] == offered("seq", "pause", "m", "7", "--s")
    assert ["--http-max-input-size"] == offered("gateway", "--http-max-i")
    assert ["--data-dir"] == offered("console", "--data")
    assert ["live"] == offered("seq", "ls", "m", "--state", "l")


@pytest.mark.parametrize("command", ["trace", "seq show", "seq end", "drain"])
def test_an_argument_that_is_no_text_is_told(command: str, tmp_path: Path) -> None:
    place = [] if command == "trace" else ["--data-dir", str(tmp_path)]
    arguments = [*command.split(), *place, b"m\xff".decode(errors="surrogateescape")]
    arguments += [] if command == "drain" else ["7"]

    result = CliRunner().invoke(cli.main, arguments)

    assert (2, True) == (result.exit_code, "is no UTF-8 text" in result.output), result.output


def test_where_no_mesh_is_a_shell_is_offered_nothing(tmp_path: Path) -> None:
    assert [] == offered("seq", "show", "--data-dir", str(tmp_path), "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_a_line() -> None:
    line = (
        f'PATH="{Path(sys.executable).parent}:$PATH"; eval "$(seqmesh completion bash)"; '
        "COMP_WORDS=(seqmesh seq resu); COMP_CWORD=2; _seqmesh_completion seqmesh; echo ${COMPREPLY[@]}"
    )
    told = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)

    assert ("resume", 0) == (told.stdout.strip(), told.returncode), told.stderr

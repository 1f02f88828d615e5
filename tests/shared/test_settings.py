"""Settings: flag over environment over default, nothing unknown accepted, nothing secret shown."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from deploy.local.settings import UpSettings
from shared.settings import (
    ENTRY_POINTS,
    CommonSettings,
    MeshSettings,
    environment_of,
    parse_settings,
    setting,
    settings_command,
    settings_fields,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(CommonSettings):
    """One field of every kind."""

    http_port: int = setting(8000, help="Port.", group="Service", minimum=0, maximum=65535)
    body_bytes: int = setting(64 << 20, help="Size.", unit="bytes", minimum=1024)
    load: float = setting(1.25, help="Load.", minimum=1.0)
    mode: Literal["none", "explicit"] = setting("none", help="Mode.")
    paged: bool = setting(False, help="Paging.")
    models: tuple[Path, ...] = setting((), help="Repositories.", unit="dir", group="Models")
    names: tuple[str, ...] = setting((), help="Names.")


def parsed(*arguments: str) -> Example:
    return parse_settings(Example, arguments, program="example", help="An example.")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parsed(*arguments)

    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_defaults_hold_when_nothing_is_said() -> None:
    assert parsed() == Example()


@pytest.mark.parametrize(
    ("word", "paged"),
    [("--paged", True), ("--no-paged", False), ("--paged=true", True), ("--paged=1", True), ("--paged=off", False)],
)
def test_a_switch_may_have_a_value_as_on_tritons_command_line(word: str, *, paged: bool) -> None:
    """A refusal in Triton's words asks for `--allow-client-shm=true`."""
    assert paged is parsed(word).paged


@pytest.mark.parametrize("word", ["--paged=maybe", "--no-paged=true", "--page=true"])
def test_a_switch_with_another_value_is_refused(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert word.partition("=")[0] in refusal(capsys, word)


def test_the_flag_wins_over_the_environment_and_the_environment_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEQMESH_HTTP_PORT", "9000")

    assert parsed().http_port == 9000
    assert parsed("--http-port", "9001").http_port == 9001


def test_a_number_may_be_left_to_the_machine_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    def count(*arguments: str) -> object:
        return parse_settings(UpSettings, arguments, program="example", help="An example.").gateways

    assert [1, 3, "auto"] == [count(), count("--gateways", "3"), count("--gateways", "auto")]
    for wrong, said in (("0", "not in the range x>=1"), ("many", "nor the word auto")):
        with pytest.raises(SystemExit):
            count("--gateways", wrong)
        assert said in capsys.readouterr().err


def test_every_kind_of_value_is_read_from_flags() -> None:
    flags = "--body-bytes 2MiB --load 2 --mode explicit --paged --models a --models b --names x --names y --name n"

    settings = parsed(*flags.split())

    assert settings == Example(
        body_bytes=2 << 20,
        load=2.0,
        mode="explicit",
        paged=True,
        models=(Path("a"), Path("b")),
        names=("x", "y"),
        name="n",
    )


def test_every_kind_of_value_survives_the_way_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Example(
        redis_url="redis://:secret@example:1/2",
        body_bytes=2048,
        load=1.5,
        mode="explicit",
        paged=True,
        models=(Path("a"), Path("b c")),
        names=("x", "y"),
    )
    for name, value in environment_of(settings).items():
        monkeypatch.setenv(name, value)

    assert parsed() == settings


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("1KiB", 1024), ("64MiB", 64 << 20), ("1 GiB", 1 << 30), ("2MB", 2_000_000)]
)
def test_sizes_may_have_a_unit(text: str, size: int) -> None:
    assert parsed("--body-bytes", text).body_bytes == size


@pytest.mark.parametrize("text", ["", "MiB", "-5", "1.5MiB", "10 apples", "12", "²KiB", "9" * 5000])
def test_wrong_sizes_are_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert "--body-bytes" in refusal(capsys, "--body-bytes", text)


def test_values_out_of_bounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--http-port" in refusal(capsys, "--http-port", "65536")
    assert "--load" in refusal(capsys, "--load", "0.9")
    assert "--load" in refusal(capsys, "--load", "nan")
    assert "--mode" in refusal(capsys, "--mode", "poll")


def test_unknown_variables_are_refused_with_the_nearest_known_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEQMESH_HTP_PORT", "1")

    message = refusal(capsys)

    assert "unknown setting SEQMESH_HTP_PORT in the environment; did you mean SEQMESH_HTTP_PORT?" in message


def test_variables_of_the_other_services_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQMESH_BOUNDED_LOAD", "1.5")

    assert parsed() == Example()


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--http-prot" in refusal(capsys, "--http-prot", "1")


def test_a_wrong_url_is_refused_without_showing_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEQMESH_REDIS_URL", "http://:hunter2@example")

    message = refusal(capsys)

    assert "redis://" in message
    assert "hunter2" not in message


def test_a_secret_may_be_in_a_file_and_the_variable_itself_counts_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "url").write_text("redis://:hunter2@example/0\n")
    monkeypatch.setenv("SEQMESH_REDIS_URL_FILE", str(tmp_path / "url"))
    assert "redis://:hunter2@example/0" == parsed().redis_url

    monkeypatch.setenv("SEQMESH_REDIS_URL", "redis://other/0")
    assert "redis://other/0" == parsed().redis_url


@pytest.mark.parametrize("prefix", ["{team}", "mesh:{a}:", "a{b"])
def test_a_key_prefix_with_a_brace_is_refused(capsys: pytest.CaptureFixture[str], prefix: str) -> None:
    """The scripts would write other keys than the services read."""
    assert "has a brace" in refusal(capsys, "--key-prefix", prefix)


@pytest.mark.parametrize("name", ["x" * 129, "ü" * 65, "two\nlines"])
def test_a_name_that_other_processes_could_not_read_is_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """They would take the service for gone, and `seqmesh reshard` would begin beside it."""
    assert "a name has 128 bytes at most" in refusal(capsys, "--name", name)
    assert "x" * 128 == parsed("--name", "x" * 128).name


def test_an_empty_path_is_not_the_working_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the path is empty" in refusal(capsys, "--models", "")
    with pytest.raises(SystemExit):
        parse_settings(UpSettings, ["--data-dir", ""], program="up", help="")
    assert "the path is empty" in capsys.readouterr().err


def test_a_secrets_file_that_is_not_there_or_empty_is_named_and_other_settings_have_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SEQMESH_REDIS_URL_FILE", str(tmp_path / "url"))
    assert f"SEQMESH_REDIS_URL_FILE: cannot read {tmp_path / 'url'}" in refusal(capsys)

    (tmp_path / "url").write_text("\n")
    assert f"SEQMESH_REDIS_URL_FILE: {tmp_path / 'url'} is empty" in refusal(capsys)

    monkeypatch.delenv("SEQMESH_REDIS_URL_FILE")
    monkeypatch.setenv("SEQMESH_HTTP_PORT_FILE", "/tmp/port")
    assert "unknown setting SEQMESH_HTTP_PORT_FILE" in refusal(capsys)


def test_passwords_are_not_in_the_text_of_settings() -> None:
    settings = Example(redis_url="redis://user:hunter2@example:6379/0")

    assert "hunter2" not in repr(settings)


def test_a_password_on_the_command_line_is_warned_of_and_one_in_the_environment_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ps` shows everybody's command lines."""
    url = "redis://:hunter2@example"

    assert url == parsed("--redis-url", url).redis_url

    said = capsys.readouterr().err
    assert "set SEQMESH_REDIS_URL instead" in said
    assert "hunter2" not in said

    parsed("--redis-url", "redis://example")
    monkeypatch.setenv("SEQMESH_REDIS_URL", url)
    assert url == parsed().redis_url
    assert capsys.readouterr().err == ""


def test_a_required_setting_must_be_given_but_to_a_program_that_can_do_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Needy(MeshSettings):
        models: tuple[Path, ...] = setting((), help="Repositories.", required=True)

    with pytest.raises(SystemExit):
        parse_settings(Needy, [], program="needy", help="Needs models.")

    assert "Missing option '--models'" in capsys.readouterr().err
    assert () == parse_settings(Needy, [], program="check", help="", spared=("models",)).models


def test_the_help_shows_every_flag_with_its_variable_and_default_under_its_subject() -> None:
    command = settings_command(Example, lambda _: None, name="example", help="An example.")

    text = " ".join(CliRunner().invoke(command, ["--help"]).output.split())

    for field in settings_fields(Example):
        assert "--" + field.replace("_", "-") in text
        assert f"SEQMESH_{field.upper()}" in text
    assert "default: 64MiB" in text
    assert text.index("Models: --models") < text.index("--names")


def test_a_setting_that_names_no_group_has_that_of_the_one_before_it() -> None:
    groups = {name: meaning.group for name, meaning in settings_fields(Example).items()}

    assert ("Models", "Models") == (groups["models"], groups["names"])


def installed_classes() -> list[type[Any]]:
    return [entry.load() for entry in entry_points(group=ENTRY_POINTS)]


def test_every_program_announces_its_settings() -> None:
    assert {"up", "gateway", "scheduler", "executor", "console"} == {
        entry.name for entry in entry_points(group=ENTRY_POINTS)
    }


def test_the_same_name_means_the_same_in_every_program() -> None:
    """Type and unit agree everywhere; the default too, but where `up` starts the server itself."""
    seen: dict[str, tuple[object, ...]] = {}
    for settings_type in installed_classes():
        for field in dataclasses.fields(settings_type):
            meaning = field.metadata["meaning"]
            facts = (str(field.type), meaning.unit, meaning.minimum, meaning.maximum)
            assert seen.setdefault(field.name, facts) == facts, field.name


def test_every_setting_of_every_program_has_a_help_and_a_working_default() -> None:
    for settings_type in installed_classes():
        for name, meaning in settings_fields(settings_type).items():
            assert meaning.help.endswith("."), (settings_type, name)
        needed = [f"--{n.replace('_', '-')}=x" for n, m in settings_fields(settings_type).items() if m.required]
        command = settings_command(settings_type, lambda _: None, name="program", help="A program.")
        assert isinstance(command, click.Command)
        assert CliRunner().invoke(command, needed).exit_code == 0

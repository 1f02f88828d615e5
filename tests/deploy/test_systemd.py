"""The units of systemd: systemd itself reads and judges them, and what they start exists."""

from __future__ import annotations

import configparser
import dataclasses
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from executor.settings import ExecutorSettings
from gateway.settings import GatewaySettings
from shared.settings import installed_variables
from tests.docs import commands
from tests.markdown_pages import ROOT

UNITS = ROOT / "deploy" / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
KINDS = (GatewaySettings, ExecutorSettings)
GUIDE = (ROOT / "docs" / "start" / "systemd.md").read_text()
PROGRAM = "/opt/seqmesh/bin/seqmesh"
EXPOSURE_MAX = 15
"""Of 100: what `systemd-analyze security` calls OK ends at 50. The GPU's drop-in is open for its devices."""
EXPOSURE_GPU_MAX = 20
SYSTEMD = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
EACH = pytest.mark.parametrize("unit", SERVICES, ids=[path.stem for path in SERVICES])


def analyze(*arguments: object) -> str:
    """What `systemd-analyze` prints. Fails, with that, where it refuses."""
    done = subprocess.run(
        ["systemd-analyze", "--no-pager", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout + done.stderr


def values_of(unit: Path, name: str) -> list[str]:
    """Every value of a word in a unit."""
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units in a folder, with a program that exists."""
    shutil.copytree(UNITS, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*.service"):
        path.write_text(path.read_text().replace(PROGRAM, "/bin/true"))
    return tmp_path


def names(folder: Path) -> Iterable[Path]:
    """What an operator starts; an instance of each template."""
    return [folder / path.name.replace("@.", "@1.") for path in (*SERVICES, UNITS / "seqmesh.target")]


@SYSTEMD
def test_systemd_has_nothing_to_say_about_them(installed: Path) -> None:
    shutil.copy(installed / "seqmesh-executor@.service", installed / "seqmesh-executor@1.service")

    assert "" == analyze("verify", *names(installed))


@SYSTEMD
def test_systemd_finds_a_word_that_it_does_not_know(installed: Path) -> None:
    unit = installed / "seqmesh-gateway.service"
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHouse="))

    assert "ProtectHouse" in analyze("verify", unit)


@SYSTEMD
@EACH
def test_services_are_hardened(unit: Path, tmp_path: Path) -> None:
    without_gpus = shutil.copy(unit, tmp_path)

    analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", without_gpus)
    analyze("security", "--offline=true", f"--threshold={EXPOSURE_GPU_MAX}", unit)


@EACH
def test_what_is_started_exists_and_is_not_killed_before_it_has_ended(unit: Path) -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    (started,) = values_of(unit, "ExecStart")
    program, service, *flags = shlex.split(started)
    drains: dict[str, Any] = {field.name: field.default for kind in KINDS for field in dataclasses.fields(kind)}
    drain = {"gateway": drains["exit_timeout_secs"], "executor": drains["drain_timeout_s"]}.get(service, 0)

    assert PROGRAM == program
    needed = ["--models=x"] if service == "executor" else []
    commands.check(commands.Line({}, ("seqmesh", service, *flags, *needed)))
    assert [compose[service]["stop_grace_period"]] == [f"{second}s" for second in values_of(unit, "TimeoutStopSec")]
    assert drain < int(values_of(unit, "TimeoutStopSec")[0])


@EACH
def test_a_start_is_over_when_the_service_says_so_however_long_it_takes(unit: Path) -> None:
    """So `systemctl restart` of one service after the other never leaves two of them starting at once."""
    assert ["notify"] == values_of(unit, "Type")
    assert ["infinity"] == values_of(unit, "TimeoutStartSec")


@EACH
def test_a_redis_of_this_machine_ends_after_the_services_whatever_it_is_called(unit: Path) -> None:
    (after,) = values_of(unit, "After")
    names_of_redis = {f"{server}{suffix}.service" for server in ("redis", "valkey") for suffix in ("", "-server")}
    assert names_of_redis <= set(after.split())


def test_the_template_for_several_gateways_differs_by_its_flags_alone() -> None:
    (script,) = re.findall(r"^sed '(.+)' deploy", GUIDE, re.MULTILINE)
    unit = UNITS / "seqmesh-gateway.service"
    template = subprocess.run(["sed", script, unit], capture_output=True, text=True, check=True).stdout

    flags = " --reuse-port --metrics-port=%i"
    started = f"ExecStart={PROGRAM} gateway"
    assert unit.read_text().replace(started, started + flags) == template


def test_the_guide_installs_nothing_but_what_is_locked() -> None:
    """What runs as a service of a machine is what the tests have run."""
    script = (ROOT / "deploy" / "requirements_of.py").relative_to(ROOT)
    installed = re.findall(r"/bin/pip install (\S+) ", GUIDE)

    assert {"--require-hashes", "--no-deps"} == set(installed)
    assert f"{script} gateway scheduler executor" in GUIDE


def test_files_that_may_have_secrets_are_for_root_alone() -> None:
    assert {"0600"} == set(re.findall(r"^install -m (\d+) ", GUIDE, re.MULTILINE))


def test_variables_are_settings() -> None:
    said = [line.split("=")[0] for unit in SERVICES for line in values_of(unit, "Environment")]
    parser = configparser.ConfigParser()
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]  names keep their case
    parser.read_string("[env]\n" + (UNITS / "seqmesh.env").read_text())

    assert {"SEQMESH_REDIS_URL_FILE", "SEQMESH_MODEL_CACHE_DIR"} == set(said)
    assert {*said, *parser["env"]} <= set(installed_variables())

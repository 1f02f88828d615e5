"""`seqmesh new`: what it writes is served as it is, and its client gets answers."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

from deploy import cli
from deploy.local.embedded import free_port
from deploy.new.command import KINDS
from tests.mesh.running_mesh import running_mesh

SMOOTHED = ["1.0 -> 0.5000", "2.0 -> 1.2500", "3.0 -> 2.1250", "4.0 -> 3.0625"]


def new(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.main, ["new", *arguments], catch_exceptions=False)
    assert code == result.exit_code, result.output
    return result.output


@pytest.mark.timeout(300)  # on a busy machine an executor needs a minute to import torch, and onnxruntime
async def test_every_kind_of_new_model_is_served_as_it_was_written(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for kind in KINDS:
        assert "client.py" in new(f"my_{kind}", "--from", kind, "--models", str(repository))

    def steps(kind: str, address: str) -> list[str]:
        client = [sys.executable, str(repository / f"my_{kind}" / "client.py"), address]
        return subprocess.run(client, capture_output=True, text=True, check=True).stdout.splitlines()

    with running_mesh(tmp_path / "data", [repository]) as mesh:
        said = {kind: await asyncio.to_thread(steps, kind, mesh.grpc()) for kind in KINDS}

    assert SMOOTHED == said["python"] == said["onnx"]
    # The same number says something else in another state.
    assert 4 == len({line.split()[2] for line in said["torch"]})


def test_what_is_to_be_done_next_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path) -> None:
    models = tmp_path / "my models"

    said = new("mine", "--models", str(models))

    assert f"Now: seqmesh up --models '{models}'\n" in said
    assert f"python '{models / 'mine' / 'client.py'}'\n" in said


def test_a_client_of_a_new_model_says_what_starts_a_mesh_where_none_runs(tmp_path: Path) -> None:
    new("mine", "--models", str(tmp_path))
    client = [sys.executable, str(tmp_path / "mine" / "client.py"), f"127.0.0.1:{free_port()}"]

    said = subprocess.run(client, capture_output=True, text=True, check=False).stderr

    assert said.endswith(f"This starts a mesh with the model: seqmesh up --models {tmp_path}\n")
    assert "Traceback" not in said


@pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated:DeprecationWarning")
def test_an_error_of_the_model_names_the_file_that_it_was_written_by(tmp_path: Path) -> None:
    new("mine", "--from", "torch", "--models", str(tmp_path))
    model = cast("Any", torch.jit).load(tmp_path / "mine" / "1" / "model.pt")

    with pytest.raises(RuntimeError, match=re.escape(f'File "{tmp_path / "mine" / "make_model.py"}", line 19')):
        model(torch.zeros(2, 3), torch.zeros(2, 16))


@pytest.mark.parametrize("name", ["../outside", "", ".hidden", "a b"])
def test_a_name_that_is_no_folder_of_the_repository_is_refused(tmp_path: Path, name: str) -> None:
    assert "letters, digits" in new("--models", str(tmp_path / "models"), name, code=2)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_stays_as_it_is(tmp_path: Path) -> None:
    new("mine", "--models", str(tmp_path))
    (tmp_path / "mine" / "config.pbtxt").write_text("# mine")

    assert "exists" in new("mine", "--models", str(tmp_path), code=1)

    assert "# mine" == (tmp_path / "mine" / "config.pbtxt").read_text()
    assert ["mine"] == [one.name for one in tmp_path.iterdir()]


def test_without_the_package_that_writes_it_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        return None

    monkeypatch.setattr("deploy.new.command.find_spec", missing)

    assert "pip install onnx" in new("mine", "--from", "onnx", "--models", str(tmp_path), code=1)
    assert list(tmp_path.iterdir()) == []

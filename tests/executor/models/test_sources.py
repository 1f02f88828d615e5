"""Where models are read from: the repositories that are named."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from executor.models.sources import OVERRIDE, Override, open_sources
from shared.contract.errors import LoadError, MeshError
from shared.process.locked_folders import remove_abandoned


def test_a_folder_that_is_not_there_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """An executor that began without it would serve nothing, and say nothing of it."""
    here, missing = tmp_path / "here", tmp_path / "missing"
    here.mkdir()

    with pytest.raises(MeshError, match=f"no model repository at {missing}: --models names a directory of models"):
        open_sources([here, missing], tmp_path / "cache", 1)


def test_what_a_load_request_brought_outlives_a_killed_executor_until_another_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not longer, and nothing of an executor that lives."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    # Without the lock of a process, as one that was killed leaves it.
    left = tmp_path / f"{OVERRIDE}killed"
    (left / "m").mkdir(parents=True)
    lives = Override("m", {"1/model.py": b""})

    remove_abandoned(OVERRIDE)

    assert not left.exists()
    assert (lives.folder / "1" / "model.py").is_file()
    lives.cleanup()
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../m", "..", ".", "", "m/n"])
def test_files_of_a_model_whose_name_is_no_folders_are_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with pytest.raises(LoadError, match="a model's name must name a folder of its own"):
        Override(name, {"1/model.py": b""})

    assert [] == list(tmp_path.iterdir())


def test_files_for_which_there_is_no_room_are_refused_with_their_place_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as if the model repository were full."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(LoadError, match=rf"its files cannot be written to {re.escape(str(tmp_path))} \(TMPDIR\)"):
            Override("m", {"1/model.py": b"", "1/weights": bytes(1001)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert [] == list(tmp_path.iterdir())

"""Folders that are there as long as a process uses them."""

from __future__ import annotations

import fcntl
import os
import resource
import tempfile
from pathlib import Path

import pytest

from shared.process.locked_folders import locked_in_use, remove_abandoned, remove_unused


def test_a_folder_that_takes_a_removed_ones_place_is_not_removed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock = tmp_path / "folder", fcntl.flock
    folder.mkdir()

    def late(descriptor: int, operation: int) -> None:
        """Locks it when another process has removed it, and a third one has put its own there."""
        monkeypatch.setattr(fcntl, "flock", lock)
        folder.rename(tmp_path / "removed")
        folder.mkdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)

    assert remove_unused(folder)
    assert folder.exists()


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_a_folder_that_is_removed_before_it_is_locked_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock, opened = tmp_path / "folder", fcntl.flock, open_files()
    folder.mkdir()

    def late(descriptor: int, operation: int) -> None:
        folder.rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)

    assert locked_in_use(folder) is None
    assert opened == open_files()


def test_what_is_no_folder_is_left_alone(tmp_path: Path) -> None:
    """Any user can make a pipe or a file of such a name among the temporary files."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()

    assert [True, True] == [remove_unused(tmp_path / name) for name in ("pipe", "file")]
    assert {"pipe", "file"} == {path.name for path in tmp_path.iterdir()}


def test_links_of_such_a_name_are_left_alone_and_keep_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user can make one that leads to itself, or to a folder of somebody else."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "other" / "kept").mkdir(parents=True)
    (tmp_path / "mine-1").symlink_to("mine-1")
    (tmp_path / "mine-2").symlink_to("other")
    (tmp_path / "mine-3").mkdir()

    remove_abandoned("mine-")
    assert {"mine-1", "mine-2", "other"} == {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "other" / "kept").exists()


def test_where_nothing_can_be_written_a_process_starts_and_removes_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, above all, which it may fill. And in a container whose file system is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "mine-1").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        remove_abandoned("mine-")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert [] == list(tmp_path.iterdir())

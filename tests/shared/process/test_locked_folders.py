"""Folders that are there as long as a process uses them."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from shared.process.locked_folders import remove_unused


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

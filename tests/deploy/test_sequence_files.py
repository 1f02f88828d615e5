"""The file of an exported sequence is put where its name leads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import click
import pytest

from deploy.operate.sequences import write_whole


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)

    write_whole(link, b"new")

    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert oct(target.stat().st_mode & 0o777) == "0o600"
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe, heard = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_bytes()), daemon=True)
    reader.start()

    write_whole(pipe, b"a state")

    reader.join(20)
    assert heard == [b"a state"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_a_file_that_is_open_is_gone_on_with(tmp_path: Path, folder: str) -> None:
    """As /dev/stdout is, where the shell has redirected it."""
    file = tmp_path / "file"
    with file.open("wb", buffering=0) as opened:
        opened.write(b"before ")
        write_whole(Path(f"{folder}/{opened.fileno()}"), b"a state")
        opened.write(b" behind")

    assert file.read_bytes() == b"before a state behind"
    assert list(tmp_path.iterdir()) == [file]


def test_a_descriptor_that_is_not_open_is_told() -> None:
    with pytest.raises(click.ClickException, match="/dev/fd/999999 cannot be written"):
        write_whole(Path("/dev/fd/999999"), b"x")


def test_what_cannot_be_written_is_told_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="cannot be written"):
        write_whole(tmp_path, b"x")
    with pytest.raises(click.ClickException, match="cannot be written"):
        write_whole(tmp_path / "nowhere" / "file", b"x")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for file in (loop, loop / "file"):
        with pytest.raises(click.ClickException, match="cannot be written: Too many levels of symbolic links"):
            write_whole(file, b"x")
    loop.unlink()
    # As in a folder that is read-only, the system refuses to write the file and also to remove it.
    with pytest.raises(click.ClickException, match="cannot be written: File name too long"):
        write_whole(tmp_path / ("f" * 300), b"x")

    assert not list(tmp_path.iterdir())

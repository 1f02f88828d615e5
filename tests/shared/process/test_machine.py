"""What a container has is what its groups allow, of memory and of cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.process.machine import available_bytes, available_cores


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"memory.max": "3000", "a/memory.max": "2000", "a/b/memory.max": "max"}, 2000),
        ("0::/\n", {"memory.max": "1000"}, 1000),
        ("0::/of/the/host\n", {"memory.max": "1000"}, 1000),
        ("5:cpu:/x\n4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "500"}, 500),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": str((1 << 63) - 4096)}, None),
        ("", {}, None),
    ],
)
def test_a_container_has_what_its_groups_allow(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int | None
) -> None:
    (tmp_path / "self").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text + "\n")

    machine = available_bytes(tmp_path / "nothing", tmp_path)
    assert (expected or machine) == available_bytes(tmp_path / "self", tmp_path / "root")


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("", {}, 8),
    ],
)
def test_cores_are_those_that_may_be_used_and_no_more_than_the_quota_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], expected: int
) -> None:
    def eight(pid: int) -> set[int]:
        return set(range(8))

    monkeypatch.setattr(os, "sched_getaffinity", eight)
    (tmp_path / "self").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text + "\n")

    assert expected == available_cores(tmp_path / "self", tmp_path / "root")

"""The locks: exact versions, every one of them with hashes, of everything that the project names."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("gateway", "scheduler", "executor", "local", "vad", "docs", "dev")


def locked(name: str) -> dict[str, str]:
    """What a lock says of each package, by its name as indexes spell it."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE))
    return {spelled(line): line for line in text.splitlines() if line}


def spelled(requirement: str) -> str:
    """The name at the beginning of a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


@pytest.mark.parametrize("name", ["requirements.lock", "bootstrap.lock"])
def test_every_locked_package_has_one_version_and_hashes(name: str) -> None:
    form = re.compile(r"[a-z0-9.-]+==[^ ;]+( ;[^\\]+?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*")

    assert [] == [line[:60] for line in locked(name).values() if not form.fullmatch(line)]


def test_whatever_the_project_needs_is_locked() -> None:
    script = [sys.executable, str(ROOT / "deploy" / "requirements_of.py"), *EXTRAS]
    needed = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    known = locked("requirements.lock").keys() | locked("torch.lock").keys()

    assert len(needed) > 30
    assert [] == [one for one in needed if spelled(one) not in known]
    assert {"torch"} == known - locked("requirements.lock").keys()
    assert {"pip", "setuptools"} == locked("bootstrap.lock").keys()


def test_protobuf_has_the_upper_bound_of_tritonclient() -> None:
    """Without it `pip install '.[gateway,executor]'` downloads every release of onnxruntime, and finds no end."""
    script = [sys.executable, str(ROOT / "deploy" / "requirements_of.py"), "gateway", "executor"]
    needed = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    said = metadata.requires("tritonclient") or []

    expected = {bound_of(one) for one in said if spelled(one) == "protobuf"}
    assert expected == {bound_of(one) for one in needed if spelled(one) == "protobuf"}


def bound_of(requirement: str) -> int:
    """The first major version that a requirement refuses; 0: none."""
    found = re.search(r"<(\d+)", requirement)
    return int(found[1]) if found else 0

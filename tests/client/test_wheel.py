"""The client is installed without the mesh: its wheel, in an environment that has its own needs and no others."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("torch", "redis", "starlette", "hypercorn", "msgspec", "aiohttp", "shared", "gateway", "deploy")


def needs_of(requirement: str, found: dict[str, Distribution]) -> None:
    """Adds what a requirement needs, as it is installed here."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    extras = set(re.findall(r"\[(\w+)\]", requirement.split(";", maxsplit=1)[0]))
    if name in found and not extras:
        return
    try:
        found[name] = distribution(name)
    except PackageNotFoundError:
        return
    for needed in found[name].requires or ():
        marked = re.search(r"extra == ['\"](\w+)['\"]", needed)
        if marked is None or marked[1] in extras:
            needs_of(needed, found)


def test_the_wheel_alone_with_its_needs_is_enough(tmp_path: Path) -> None:
    # A copy: setuptools builds where the sources are.
    source = shutil.copytree(ROOT / "client", tmp_path / "client", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--disable-pip-version-check", "--wheel-dir", tmp_path, source],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("seqmesh_client-*.whl")
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        requirements = re.findall(r"^Requires-Dist: (.+)$", archive.read(metadata).decode(), re.MULTILINE)
        archive.extractall(packages)
    found: dict[str, Distribution] = {}
    for requirement in requirements:
        needs_of(requirement, found)
    for needed in found.values():
        for top in {Path(file).parts[0] for file in needed.files or () if not str(file).startswith("..")}:
            installed, target = Path(str(needed.locate_file(top))), packages / top
            if installed.exists() and not target.exists():
                target.symlink_to(installed)

    program = f"""
import importlib.util, seqmesh_client
assert {[*ABSENT]!r} == [name for name in {[*ABSENT]!r} if importlib.util.find_spec(name) is None]
with seqmesh_client.Client(["127.0.0.1:1"]) as client, client.sequence("model") as sequence:
    print(seqmesh_client.__file__, sequence.token[:4])
"""
    ran = subprocess.run(
        [environment / "bin" / "python", "-I", "-c", program], capture_output=True, text=True, timeout=100, check=False
    )

    assert 0 == ran.returncode, ran.stderr
    assert str(packages) in ran.stdout
    assert "seqmesh_client/py.typed" in names
    assert {"grpcio", "numpy", "protobuf", "tritonclient"} <= found.keys()

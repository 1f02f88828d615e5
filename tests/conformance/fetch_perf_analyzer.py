"""Fetches `perf_analyzer`, Triton's load tool: `python -m tests.conformance.fetch_perf_analyzer DIRECTORY`.

The binary lies in the wheel tritonclient 2.48.0 (2.50 was the last to carry it); it wants libb64.so.0d and
libcudart.so.12, which the wheel nvidia-pytriton brings along. Both come from PyPI by pip, 70 MB together. Prints the
path of a script that starts it.
"""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

BINARY_WHEEL = "tritonclient==2.48.0"
LIBRARY_WHEEL = "nvidia-pytriton==0.7.0"
PLATFORMS = ("manylinux1_x86_64", "manylinux_2_35_x86_64")
LIBRARIES = {"libb64-": "libb64.so.0d", "libcudart-": "libcudart.so.12"}
"""By the beginning of the mangled name that the wheel gives each."""
START = (
    '#!/bin/sh\nhere="$(dirname "$(readlink -f "$0")")"\nLD_LIBRARY_PATH="$here" exec "$here/perf_analyzer.bin" "$@"\n'
)


def fetch(directory: Path) -> Path:
    """Puts the tool into `directory` unless it is there; returns what starts it. Raises CalledProcessError."""
    script = directory / "perf_analyzer"
    if script.exists():
        return script
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        binary_wheel, library_wheel = download(BINARY_WHEEL, downloads), download(LIBRARY_WHEEL, downloads)
        with zipfile.ZipFile(binary_wheel) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith("/bin/perf_analyzer")]
            write_program(directory / "perf_analyzer.bin", wheel.read(name))
        with zipfile.ZipFile(library_wheel) as wheel:
            for name in wheel.namelist():
                for prefix, soname in LIBRARIES.items():
                    if Path(name).name.startswith(prefix):
                        (directory / soname).write_bytes(wheel.read(name))
    # Last, so that an interrupted fetch is done again.
    write_program(script, START.encode())
    return script


def download(requirement: str, directory: str) -> Path:
    """One wheel, without what it depends on."""
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--only-binary=:all:", *platforms, "--dest", directory, requirement], check=True)
    (wheel,) = Path(directory).glob(requirement.partition("==")[0].replace("-", "_") + "-*.whl")
    return wheel


def write_program(path: Path, content: bytes) -> None:
    """A file that may be executed."""
    path.write_bytes(content)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))

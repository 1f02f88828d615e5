"""Fetches NVIDIA's Model Analyzer: `python -m tests.conformance.fetch_model_analyzer DIRECTORY`.

It wants other versions of libraries than this project, so it gets a virtual environment of its own, from PyPI by pip.
Prints the path of the program.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

WHEEL = "triton-model-analyzer==1.58.0"


def fetch(directory: Path) -> Path:
    """Makes the environment in `directory` unless it is there; returns the program. Raises CalledProcessError."""
    program = directory / "bin" / "model-analyzer"
    if not program.exists():
        venv.create(directory, with_pip=True, clear=True)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", WHEEL]
        subprocess.run([directory / "bin" / "python", *install], check=True)
    return program


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1]).absolute()))

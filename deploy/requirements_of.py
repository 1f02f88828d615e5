"""Prints what extras of this project need, one requirement a line, as pyproject.toml says it: `requirements_of.py
[extra ...]`. For `pip install -r`, before the project itself and its client (`client/`) are installed. Standard library
only."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [project["optional-dependencies"][extra] for extra in sys.argv[1:]]
needed = [name for names in (project["dependencies"], *extras) for name in names]
sys.stdout.writelines(f"{name}\n" for name in needed if not name.startswith("seqmesh"))

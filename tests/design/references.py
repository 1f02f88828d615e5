"""What the pages of docs/design and docs/decisions name: files, and functions and classes in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((*(ROOT / "docs" / "design").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")))
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]*\.(?:py|lua|toml|yaml|md|svg))(?:::([\w.]+(?:::\w+)?))?`")
"""`path/file.py` or `path/file.py::name`."""
FOLDERS = re.compile(r"`((?:gateway|scheduler|executor|shared|deploy|tests|benchmarks|docs)(?:/[\w-]+)*/)`")


def named(page: Path) -> list[tuple[str, str]]:
    """(file, symbol or "") of each reference on a page."""
    return [(path, symbol) for path, symbol in NAMED.findall(page.read_text())]

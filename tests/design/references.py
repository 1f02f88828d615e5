"""What the pages of docs/design and docs/decisions name: files, and functions and classes in them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((*(ROOT / "docs" / "design").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")))
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]*\.(?:py|lua|toml|yaml|md|svg))(?:::([\w.]+(?:::\w+)?))?`")
"""`path/file.py` or `path/file.py::name`."""
FOLDERS = re.compile(r"`((?:gateway|scheduler|executor|shared|deploy|tests|benchmarks|docs)(?:/[\w-]+)*/)`")
FUNCTION = re.compile(r"^\s*(?:local )?function ([\w.]+)\(", re.MULTILINE)


def named(page: Path) -> list[tuple[str, str]]:
    """(file, symbol or "") of each reference on a page."""
    return [(path, symbol) for path, symbol in NAMED.findall(page.read_text())]


@functools.cache
def symbols(path: Path) -> frozenset[str]:
    """What a file defines: functions, classes, their methods and attributes (with a dot), and constants."""
    text = path.read_text()
    if path.suffix == ".lua":
        return frozenset(FUNCTION.findall(text))
    return frozenset(_defined(ast.parse(text).body, "")) if path.suffix == ".py" else frozenset()


def _defined(body: list[ast.stmt], prefix: str) -> list[str]:
    found: list[str] = []
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.append(prefix + name)
            case ast.ClassDef(name=name, body=inner):
                found += [prefix + name, *_defined(inner, f"{prefix}{name}.")]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.append(prefix + name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                found.append(prefix + name)
            case _:
                pass
    return found


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading (all of its `#` included)."""
    _, found, below = f"\n{page.read_text()}".partition(f"\n{heading}\n")
    assert found, f"no {heading!r} in {page.name}"
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert table is not None, f"no table below {heading!r} in {page.name}"
    lines = table[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

"""What the files of the repository define, for tables and pages that name it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LUA_FUNCTION = re.compile(r"^\s*(?:local )?function ([\w.]+)\(", re.MULTILINE)


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A Python file."""
    return ast.parse(path.read_text())


@functools.cache
def symbols(path: str) -> frozenset[str]:
    """What a Python or Lua file defines; of any other file nothing. path: in the repository.

    Functions, classes, and names that are assigned at the top or in a class; with a dot what belongs to a class.
    """
    if path.endswith(".lua"):
        return frozenset(LUA_FUNCTION.findall((ROOT / path).read_text()))
    return frozenset(_defined(parsed(ROOT / path).body, "")) if path.endswith(".py") else frozenset()


def _defined(body: list[ast.stmt], prefix: str) -> list[str]:
    found: list[str] = []
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.append(prefix + name)
            case ast.ClassDef(name=name, body=inner):
                found += [prefix + name, *_defined(inner, f"{prefix}{name}.")]
            case ast.Assign(targets=targets):
                found += [prefix + target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.append(prefix + name)
            case _:
                pass
    return found

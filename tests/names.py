"""One noun, one meaning: refuses a public class name that two modules define. `python -m tests.names`."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gateway", "scheduler", "executor", "shared", "deploy", "benchmarks", "client/seqmesh_client")
FOREIGN = {
    # Triton's own module, with Triton's own names.
    "executor/engine/python/response.py",
    "executor/engine/python/triton_python_backend_utils.py",
    # Models: Triton looks for a class `TritonPythonModel` in each, so each defines one.
    "benchmarks/dial_models",
    "benchmarks/models",
    "deploy/chaos/model",
    "deploy/models",
}


def modules(root: Path) -> Iterator[Path]:
    """The product's own modules."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            places = {path.relative_to(root).as_posix(), *(p.as_posix() for p in path.relative_to(root).parents)}
            if not places & FOREIGN:
                yield path


def repeated(root: Path) -> dict[str, list[str]]:
    """Public class names with more than one definition -> where."""
    defined: dict[str, list[str]] = defaultdict(list)
    for path in modules(root):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return {name: places for name, places in defined.items() if len(places) > 1}


def main() -> int:
    """Prints what is defined twice. Returns the exit code."""
    found = repeated(ROOT)
    for name, places in sorted(found.items()):
        print(f"{name} is defined in {' and '.join(places)}: one noun, one meaning")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

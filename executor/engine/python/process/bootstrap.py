"""Starts a module of the executor in any interpreter: `python bootstrap.py '{...}'` (`Environment.command`).

The interpreter may be that of a model's own environment, which knows nothing of the mesh. It finds the packages
`executor` and `shared` by this file's place. Of the executor's other packages it gets `msgspec` and `xxhash`, if it has
none and is of the same version of Python; nothing else of the executor's environment is importable. numpy must be its
own. What is missing is said where the executor listens. So this file is written for Pythons that are too old, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

OLDEST = [3, 11]


def main() -> None:
    """Runs `main` of a module, or says why it cannot run."""
    start: dict[str, Any] = json.loads(sys.argv[1])
    # The script's own folder is no place to import from. With PYTHONSAFEPATH it is not there.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)
    text = problem(start["version"], start["lent"])
    if text:
        tell(start["socket"], f"the environment of {sys.executable} {text}")
        sys.exit(1)
    for name in ("shared", "executor"):
        provide(name, Path(start["root"]) / name)
    sys.argv = [sys.argv[0], *start["arguments"]]
    importlib.import_module(start["module"]).main()


def problem(executors: list[int], lent: dict[str, str]) -> str:
    """Why the executor's modules cannot run here; "" after what they need was made importable.

    executors  the executor's version of Python
    lent       folders of packages that an interpreter of the same version may use
    """
    version = list(sys.version_info[:2])
    if version < OLDEST:
        return f"has Python {dotted(version)}, and needs {dotted(OLDEST)} or newer"
    missing: list[str] = []
    for name in ("numpy", "msgspec", "xxhash"):
        if importlib.util.find_spec(name) is not None:
            continue
        if name in lent and version == executors:
            provide(name, Path(lent[name]))
        else:
            missing.append(name)
    if not missing:
        return ""
    return f"has Python {dotted(version)} and lacks {', '.join(missing)} (the executor has Python {dotted(executors)})"


def dotted(version: list[int]) -> str:
    return ".".join(map(str, version))


def provide(name: str, folder: Path) -> None:
    """Imports a package from a folder that is not on the path."""
    spec = importlib.util.spec_from_file_location(
        name, str(folder / "__init__.py"), submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def tell(descriptor: int | None, text: str) -> None:
    """Says what is wrong: in a frame, if the executor listens at a socket, else as JSON on standard output."""
    if descriptor is None:
        sys.stdout.write(json.dumps({"error": text, "is_import_error": True}))
        return
    data = ("!" + text).encode()
    os.write(descriptor, struct.pack("<BQ", 0, len(data)) + data)


if __name__ == "__main__":
    main()

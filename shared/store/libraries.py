"""Lua scripts as what Redis loads.

All scripts are functions of one library (FUNCTION LOAD, FCALL), so Redis makes their Lua functions once and not with
each call, and those that several scripts need only once. The names carry a digest of the text, so several releases may
call theirs on one Redis, and one of the mesh, so that no mesh removes what another one uses. A library belongs to the
data: it is replicated and comes back with it. Where it is missing, its first caller loads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import NamedTuple

import msgspec

PRELUDES: Mapping[str, tuple[str, ...]] = {
    name: preludes
    for names, preludes in {
        "answers attempt reload page drain orphan lead lend resign draw total lose reopen resume": (),
        "submit commit cancel end count": ("tally",),
        "expire lay_out pause recall reclaim remove sweep vacate": ("leader",),
        "assign reject": ("leader", "tally"),
        "work_pull work_take work_read work_answers work_requeue work_withdraw work_refuse work_wake": (
            "tally",
            "work",
        ),
        "work_enqueue work_finish": ("tally", "work", "cache"),
    }.items()
    for name in names.split()
}
"""Script -> what stands before it, behind `common.lua`. Those of stateless work: `shared.store.work_scripts`."""
NAMES = tuple(PRELUDES)

ACCEPTING = frozenset({"submit", "work_enqueue", "reopen"})
"""Scripts that a Redis without memory refuses before they do anything: they bring in new requests and sequences."""

FINISHING = frozenset(NAMES) - ACCEPTING
"""Scripts that a Redis without memory runs nevertheless: they finish what was accepted, and that frees memory."""


LUA = resources.files("shared.store") / "lua"
EACH_CALL = "-- each call\n"
"""The line of a `.lua` file below which stands what runs with each call. Without it that is all of the file."""
LIBRARIES = "seqmesh_"
"""How the name of every library begins."""


class Library(msgspec.Struct, frozen=True):
    """All scripts of a release, for one mesh. digest: of their text"""

    mesh: str
    digest: str
    source: str

    @property
    def of_mesh(self) -> str:
        """How the names of all libraries of the mesh begin."""
        return LIBRARIES + self.mesh

    @property
    def name(self) -> str:
        return self.of_mesh + self.digest

    @property
    def text(self) -> str:
        """The library as FUNCTION LOAD takes it."""
        return f"#!lua name={self.name}\nlocal RELEASE = '{self.mesh}{self.digest}'\n{self.source}"

    def function(self, script: str) -> str:
        """What Redis calls a script."""
        return f"{script}_{self.mesh}{self.digest}"


def library(prefix: str, database: int = 0) -> Library:
    """The library of this release for a mesh. database: of the server, all of which share their functions"""
    mesh = hashlib.sha1(f"{database} {prefix}".encode()).hexdigest()[:8]
    preludes, texts = dict[str, _Parts](), list[str]()
    for script in NAMES:
        names = ("common", *PRELUDES[script])
        for name in names:
            # It stands before the first script that needs it: Lua knows 200 names at a time, and `submit` has most.
            if name not in preludes:
                preludes[name] = _parts(name)
                texts.append(preludes[name].defined)
        texts.append(_function(script, [preludes[name] for name in names]))
    source = "".join(texts)
    return Library(mesh, hashlib.sha1(source.encode()).hexdigest()[:16], source)


def file_text(name: str) -> str:
    """The text of a file beside the scripts. name: without `.lua`"""
    return (LUA / f"{name}.lua").read_text()


class _Parts(NamedTuple):
    """What Redis runs of a file when it loads the library, and what with each call of a script."""

    defined: str
    called: str


def _parts(name: str) -> _Parts:
    defined, line, called = file_text(name).rpartition(EACH_CALL)
    return _Parts(defined, line + called)


def _function(script: str, preludes: Sequence[_Parts]) -> str:
    """What defines and registers a script, in a block of its own."""
    own = _parts(script)
    called = "".join(part.called for part in (*preludes, own))
    flags = "'allow-oom'" if script in FINISHING else ""
    return (
        f"do\n{own.defined}offered().register_function({{ function_name = '{script}_' .. RELEASE, "
        f"flags = {{ {flags} }}, callback = function(keys, args)\n{called}end }})\nend\n"
    )

"""Lua scripts as what Redis loads.

A script is a function of a library of its own (FUNCTION LOAD, FCALL), so Redis makes its Lua functions once and not
with each call. The names carry a digest of the text, so several releases may call theirs on one Redis. A library
belongs to the data: it is replicated and comes back with it. Where one is missing, its first caller loads all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import resources

PRELUDES: Mapping[str, tuple[str, ...]] = {
    name: preludes
    for names, preludes in {
        "answers attempt reload page drain orphan lead resign draw total lose reopen resume": (),
        "expire lay_out pause recall reclaim remove sweep vacate": ("leader",),
        "submit commit cancel end count": ("tally",),
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


def script_source(name: str) -> str:
    """The library of a script, but for what its name depends on: its digest."""
    defined, called = "", ""
    for part in ("common", *PRELUDES[name], name):
        above, line, below = (LUA / f"{part}.lua").read_text().rpartition(EACH_CALL)
        defined, called = defined + above, called + line + below
    flags = "'allow-oom'" if name in FINISHING else ""
    return (
        f"{defined}offered().register_function({{ function_name = NAME, flags = {{ {flags} }}, "
        f"callback = function(keys, args)\n{called}end }})\n"
    )


def function_name(name: str, source: str) -> str:
    """What Redis calls the script of this source."""
    return f"{name}_{hashlib.sha1(source.encode()).hexdigest()[:16]}"


def library(function: str, source: str) -> str:
    """A script as FUNCTION LOAD takes it."""
    return f"#!lua name={LIBRARIES}{function}\nlocal NAME = '{function}'\n{source}"

"""Writes by which a process takes part in the mesh, which a Redis without memory carries out nevertheless.

Such a Redis refuses every plain command that may need memory. A service that was started anew could then tell nobody
that it lives. So nobody would compute, end or forget what was accepted, and Redis would stay full. What is written here
is small and bounded for each process, and goes with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.store.commands import Value

SCRIPT = """#!lua flags=allow-oom
local replies, at = {}, 1
for index, key in ipairs(KEYS) do
    local command = { unpack(ARGV, at + 1, at + ARGV[at]) }
    table.insert(command, 2, key)
    replies[index] = redis.call(unpack(command))
    at = at + 1 + ARGV[at]
end
return replies
"""


def vital(*commands: Sequence[Value]) -> tuple[str, int, *tuple[Value, ...]]:
    """The arguments of `Redis.eval` that carries out these commands as one atomic step. Its reply has that of each.

    commands  each with one key, its second word; of a Cluster all of one home
    """
    keys = [key for _, key, *_ in commands]
    words = [word for name, _, *rest in commands for word in (1 + len(rest), name, *rest)]
    return (SCRIPT, len(keys), *keys, *words)

"""Runs the mesh's own Lua files on the twin, as Redis does: Lua 5.1 with `redis`, `bit` and `cmsgpack`.

One Lua state serves every store of the process: a function keeps nothing of a call for the next one. Replies cross the
border by the rules of Redis: nil becomes false, a status a table with `ok`; on the way back a number loses its fraction
and an array ends at its first nil.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import lupa.lua51 as lupa
import msgspec

from tests.simulation.store import Args, Reply, Status, Store, StoreError

lua: Any = cast("Any", lupa).LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False)

_running: list[Store] = []


_loaded: dict[bytes, Any] = {}
"""Functions by name, of the library that is being loaded."""


def run_script(store: Store, source: bytes, name: bytes, keys: Args, args: Args) -> Reply:
    """Runs a library's function to its end; what it has written by then stays, also when it fails. Raises
    StoreError.
    """
    _running.append(store)
    try:
        return _from_lua(_functions(source)[name](lua.table_from(keys), lua.table_from(args)))
    except lupa.LuaError as error:
        raise StoreError(f"ERR {error}") from error
    finally:
        _running.pop()


@lru_cache(8)
def _functions(source: bytes) -> Mapping[bytes, Any]:
    """The functions of a library, by name. While it is loaded it sees of Redis only what it registers with."""
    names = lua.globals()
    whole, names[b"redis"] = names[b"redis"], lua.table_from({b"register_function": _register})
    try:
        # What stands behind #! is for Redis alone; the line's end stays, for the line numbers of errors.
        lua.execute(source[source.index(b"\n") :])
        return dict(_loaded)
    finally:
        names[b"redis"] = whole
        _loaded.clear()


def _register(function: Any, callback: Any = None) -> None:
    if callback is None:
        _loaded[function[b"function_name"]] = function[b"callback"]
    else:
        _loaded[function] = callback


def _call(name: bytes, *args: bytes | float) -> Any:
    return _to_lua(_running[-1].execute([name, *(arg if type(arg) is bytes else _number(arg) for arg in args)]))


def _pcall(name: bytes, *args: bytes | float) -> Any:
    try:
        return _call(name, *args)
    except StoreError as error:
        return lua.table_from({b"err": str(error).encode()})


def _log(level: int, text: bytes) -> None:
    """The twin has no log."""


def _number(value: Any) -> bytes:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise StoreError("ERR Lua redis lib command arguments must be strings or integers")
    # Redis 7.0 writes 0.1 as 0.10000000000000001, later servers do not.
    assert value == int(value), f"a script passes {value} on, instead of a text"
    return b"%d" % value


def _to_lua(reply: Reply) -> Any:
    if type(reply) is bytes or type(reply) is int:
        return reply
    if reply is None:
        return False
    if isinstance(reply, list):
        return lua.table_from([_to_lua(item) for item in cast("list[Reply]", reply)])
    assert isinstance(reply, Status)
    return lua.table_from({b"ok": bytes(reply)})


def _from_lua(value: Any) -> Reply:
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if isinstance(value, bytes):
        return value
    if isinstance(value, int | float):
        return int(value)
    if (error := value[b"err"]) is not None:
        raise StoreError(error.decode())
    if (status := value[b"ok"]) is not None:
        return Status(status)
    items: list[Reply] = []
    while (item := value[len(items) + 1]) is not None:
        items.append(_from_lua(item))
    return items


# -- libraries -------------------------------------------------------------------------------------------------------


def _int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _band(*values: int) -> int:
    result = -1
    for value in values:
        result &= int(value)
    return _int32(result)


def _bor(*values: int) -> int:
    result = 0
    for value in values:
        result |= int(value)
    return _int32(result)


def _pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(_plain(value))


def _plain(value: Any) -> Any:
    """A Lua value as MessagePack has it: strings are texts, a table with 1..n an array, one with names a map."""
    if isinstance(value, bytes):
        return value.decode()
    if value is None or isinstance(value, bool | int | float):
        return value
    keys, items = list(value.keys()), [_plain(item) for item in value.values()]
    if keys == list(range(1, len(items) + 1)):
        return items
    return {name.decode(): item for name, item in zip(keys, items, strict=True)}


def _unpack(packed: bytes) -> Any:
    return _from_plain(msgspec.msgpack.decode(packed))


def _from_plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list):
        return lua.table_from([_from_plain(item) for item in cast("list[Any]", value)])
    return value


def _single(name: bytes) -> Callable[[bytes], Any]:
    return lambda text: lua.table_from({name: text})


lua.globals()[b"redis"] = lua.table_from(
    {
        b"call": _call,
        b"pcall": _pcall,
        b"log": _log,
        b"LOG_WARNING": 3,
        b"error_reply": _single(b"err"),
        b"status_reply": _single(b"ok"),
    }
)
lua.globals()[b"bit"] = lua.table_from({b"band": _band, b"bor": _bor})
lua.globals()[b"cmsgpack"] = lua.table_from({b"pack": _pack, b"unpack": _unpack})

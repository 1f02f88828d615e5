"""An in-memory twin of Redis: the commands that the mesh uses, on a clock of one's choice.

The mesh's own Lua files run on it (`tests.simulation.lua_scripts`), and the tests of the scripts run on it and on the
real server alike (`tests/simulation/test_contract.py` compares the two command by command).

A command that the mesh begins to use and that is missing here fails with an error that names it: add a method.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from math import inf
from random import Random
from typing import Any, TypeVar

from shared.store.libraries import LIBRARIES
from tests.simulation.values import (
    FIRST,
    LAST,
    EntryId,
    HashValue,
    ListValue,
    SetValue,
    SortedSet,
    Stream,
    entry_text,
    score_text,
)

Reply = Any
"""bytes, int, None, a list of replies, `Status` or (in a list) `StoreError`."""
Args = Sequence[bytes]
Value = bytes | HashValue | SetValue | ListValue | SortedSet | Stream
V = TypeVar("V", bytes, HashValue, SetValue, ListValue, SortedSet, Stream)

TYPE_NAMES: dict[type, bytes] = {
    bytes: b"string",
    HashValue: b"hash",
    SetValue: b"set",
    ListValue: b"list",
    SortedSet: b"zset",
    Stream: b"stream",
}


class StoreError(Exception):
    """An error reply: its first word is the code."""


class Status(bytes):
    """A status reply (`OK`)."""

    __slots__ = ()


OK = Status(b"OK")


class Store:
    """All keys of one server.

    clock_us  its time, microseconds since 1970
    chance    what SPOP takes
    run       runs a function: (its library, its name, keys, arguments) -> reply; None where there are no scripts
    """

    def __init__(
        self,
        clock_us: Callable[[], int],
        chance: Random,
        run: Callable[[Store, bytes, bytes, Args, Args], Reply] | None = None,
    ) -> None:
        self.clock_us = clock_us
        self.chance = chance
        self._run = run
        self._values: dict[bytes, Value] = {}
        self._deadlines: dict[bytes, int] = {}
        self._libraries: dict[bytes, bytes] = {}
        self._frozen_us: int | None = None
        self.run_id = b"%040x" % chance.getrandbits(160)
        self.grown: list[bytes] = []
        """Streams and lists that something was added to, for those who are blocked on them; emptied by the reader."""

    def execute(self, command: Args) -> Reply:
        """Carries one command out. Raises StoreError."""
        method = COMMANDS.get(bytes(command[0]).upper())
        if method is None:
            raise StoreError(f"ERR unknown command '{command[0].decode()}': tests/simulation/store.py does not have it")
        return method(self, command[1:])

    def restart(self) -> None:
        """The server ends and comes back with all of its data, but without its libraries, as if it had been set up anew
        for the data: the scripts must be loaded again.
        """
        self._libraries.clear()
        self.run_id = b"%040x" % self.chance.getrandbits(160)

    # -- time and keys ----------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        """The time; it stands still while a script runs."""
        return self.clock_us() if self._frozen_us is None else self._frozen_us

    def now_ms(self) -> int:
        """The time, ms."""
        return self.now_us() // 1000

    def present(self) -> list[bytes]:
        """Every key that is there."""
        return [key for key in list(self._values) if self._value(key) is not None]

    def ttl_ms(self, key: bytes) -> int:
        """-2: no such key, -1: for ever."""
        if self._value(key) is None:
            return -2
        deadline = self._deadlines.get(key)
        return -1 if deadline is None else deadline - self.now_ms()

    def value(self, key: bytes) -> Value | None:
        """What a key holds, for checkers."""
        return self._value(key)

    def _value(self, key: bytes) -> Value | None:
        deadline = self._deadlines.get(key)
        if deadline is not None and self.now_ms() > deadline:
            self._remove(key)
        return self._values.get(key)

    def _typed(self, key: bytes, kind: type[V]) -> V | None:
        value = self._value(key)
        if value is None:
            return None
        if not isinstance(value, kind):
            raise StoreError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _made(self, key: bytes, kind: type[V]) -> V:
        value = self._typed(key, kind)
        if value is None:
            value = self._values[key] = kind()
        return value

    def _remove(self, key: bytes) -> bool:
        self._deadlines.pop(key, None)
        return self._values.pop(key, None) is not None

    def _remove_if_empty(self, key: bytes, value: HashValue | SetValue | ListValue | SortedSet) -> None:
        if not len(value):
            self._remove(key)

    # -- keys -------------------------------------------------------------------------------------------------------

    def cmd_del(self, args: Args) -> Reply:
        return sum(self._value(key) is not None and self._remove(key) for key in args)

    cmd_unlink = cmd_del

    def cmd_rename(self, args: Args) -> Reply:
        value, deadline = self._value(args[0]), self._deadlines.get(args[0])
        if value is None:
            raise StoreError("ERR no such key")
        self._remove(args[0])
        self._remove(args[1])
        self._values[args[1]] = value
        if deadline is not None:
            self._deadlines[args[1]] = deadline
        return OK

    def cmd_exists(self, args: Args) -> Reply:
        return sum(self._value(key) is not None for key in args)

    def cmd_type(self, args: Args) -> Reply:
        value = self._value(args[0])
        return Status(b"none" if value is None else TYPE_NAMES[type(value)])

    def cmd_pexpire(self, args: Args) -> Reply:
        if len(args) > 2:
            raise StoreError("ERR the twin knows no option of PEXPIRE")
        if self._value(args[0]) is None:
            return 0
        ttl_ms = _integer(args[1])
        if ttl_ms <= 0:
            self._remove(args[0])
        else:
            self._deadlines[args[0]] = self.now_ms() + ttl_ms
        return 1

    def cmd_expire(self, args: Args) -> Reply:
        return self.cmd_pexpire([args[0], b"%d" % (_integer(args[1]) * 1000), *args[2:]])

    def cmd_persist(self, args: Args) -> Reply:
        return int(self._value(args[0]) is not None and self._deadlines.pop(args[0], None) is not None)

    def cmd_pttl(self, args: Args) -> Reply:
        return self.ttl_ms(args[0])

    def cmd_ttl(self, args: Args) -> Reply:
        left = self.ttl_ms(args[0])
        return left if left < 0 else (left + 500) // 1000

    def cmd_scan(self, args: Args) -> Reply:
        options = _options(args[1:])
        pattern = options.get(b"MATCH", b"*").decode()
        return [b"0", [key for key in self.present() if fnmatch.fnmatchcase(key.decode(), pattern)]]

    # -- strings ----------------------------------------------------------------------------------------------------

    def cmd_get(self, args: Args) -> Reply:
        return self._typed(args[0], bytes)

    def cmd_mget(self, args: Args) -> Reply:
        return [value if isinstance(value := self._value(key), bytes) else None for key in args]

    def cmd_set(self, args: Args) -> Reply:
        key, value, rest = args[0], args[1], [arg.upper() for arg in args[2:]]
        ttl_ms: int | None = None
        keep = False
        index = 0
        while index < len(rest):
            option = rest[index]
            if option in (b"PX", b"EX"):
                index += 1
                ttl_ms = _integer(rest[index]) * (1000 if option == b"EX" else 1)
            elif option == b"KEEPTTL":
                keep = True
            elif option in (b"NX", b"XX"):
                if (self._value(key) is None) is (option == b"XX"):
                    return None
            else:
                raise StoreError("ERR syntax error")
            index += 1
        if ttl_ms is not None and ttl_ms <= 0:
            raise StoreError("ERR invalid expire time in 'set' command")
        self._value(key)
        self._values[key] = bytes(value)
        if ttl_ms is not None:
            self._deadlines[key] = self.now_ms() + ttl_ms
        elif not keep:
            self._deadlines.pop(key, None)
        return OK

    def cmd_incrby(self, args: Args) -> Reply:
        number = _integer(self._typed(args[0], bytes) or b"0") + _integer(args[1])
        self._values[args[0]] = b"%d" % number
        return number

    def cmd_incr(self, args: Args) -> Reply:
        return self.cmd_incrby([args[0], b"1"])

    def cmd_decr(self, args: Args) -> Reply:
        return self.cmd_incrby([args[0], b"-1"])

    # -- hashes -----------------------------------------------------------------------------------------------------

    def cmd_hset(self, args: Args) -> Reply:
        if len(args) < 3 or not len(args) % 2:
            raise StoreError("ERR wrong number of arguments for 'hset' command")
        hash_ = self._made(args[0], HashValue)
        before = len(hash_)
        for index in range(1, len(args), 2):
            hash_[args[index]] = args[index + 1]
        return len(hash_) - before

    def cmd_hsetnx(self, args: Args) -> Reply:
        hash_ = self._made(args[0], HashValue)
        if args[1] in hash_:
            return 0
        hash_[args[1]] = args[2]
        return 1

    def cmd_hget(self, args: Args) -> Reply:
        hash_ = self._typed(args[0], HashValue)
        return None if hash_ is None else hash_.get(args[1])

    def cmd_hmget(self, args: Args) -> Reply:
        hash_ = self._typed(args[0], HashValue)
        if hash_ is None:
            return [None] * (len(args) - 1)
        return [hash_.get(field) for field in args[1:]]

    def cmd_hgetall(self, args: Args) -> Reply:
        hash_ = self._typed(args[0], HashValue)
        return [] if hash_ is None else [part for pair in hash_.items() for part in pair]

    def cmd_hkeys(self, args: Args) -> Reply:
        return list(self._typed(args[0], HashValue) or ())

    def cmd_hvals(self, args: Args) -> Reply:
        hash_ = self._typed(args[0], HashValue)
        return [] if hash_ is None else list(hash_.values())

    def cmd_hlen(self, args: Args) -> Reply:
        return len(self._typed(args[0], HashValue) or ())

    def cmd_hexists(self, args: Args) -> Reply:
        return int(args[1] in (self._typed(args[0], HashValue) or ()))

    def cmd_hstrlen(self, args: Args) -> Reply:
        return len(self.cmd_hget(args) or b"")

    def cmd_hdel(self, args: Args) -> Reply:
        hash_ = self._typed(args[0], HashValue)
        if hash_ is None:
            return 0
        gone = sum(hash_.pop(field, None) is not None for field in args[1:])
        self._remove_if_empty(args[0], hash_)
        return gone

    def cmd_hincrby(self, args: Args) -> Reply:
        hash_, by = self._made(args[0], HashValue), _integer(args[2])
        try:
            number = int(hash_.get(args[1], b"0")) + by
        except ValueError:
            raise StoreError("ERR hash value is not an integer") from None
        hash_[args[1]] = b"%d" % number
        return number

    # -- sets -------------------------------------------------------------------------------------------------------

    def cmd_sadd(self, args: Args) -> Reply:
        members = self._made(args[0], SetValue)
        before = len(members)
        members.update(dict.fromkeys(args[1:]))
        return len(members) - before

    def cmd_srem(self, args: Args) -> Reply:
        members = self._typed(args[0], SetValue)
        if members is None:
            return 0
        before = len(members)
        for member in args[1:]:
            members.pop(member, None)
        self._remove_if_empty(args[0], members)
        return before - len(members)

    def cmd_smembers(self, args: Args) -> Reply:
        return list(self._typed(args[0], SetValue) or ())

    def cmd_sscan(self, args: Args) -> Reply:
        return [b"0", self.cmd_smembers(args)]

    def cmd_scard(self, args: Args) -> Reply:
        return len(self._typed(args[0], SetValue) or ())

    def cmd_sismember(self, args: Args) -> Reply:
        return int(args[1] in (self._typed(args[0], SetValue) or ()))

    def cmd_srandmember(self, args: Args) -> Reply:
        members = self.cmd_smembers(args)
        if len(args) == 1:
            return self.chance.choice(members) if members else None
        return self.chance.sample(members, min(len(members), _integer(args[1])))

    def cmd_spop(self, args: Args) -> Reply:
        members = self.cmd_smembers(args)
        taken = self.chance.sample(members, min(len(members), _integer(args[1]) if len(args) > 1 else 1))
        if taken:
            self.cmd_srem([args[0], *taken])
        return taken if len(args) > 1 else taken[0] if taken else None

    # -- sorted sets ------------------------------------------------------------------------------------------------

    def cmd_zadd(self, args: Args) -> Reply:
        index, options = 1, set[bytes]()
        while args[index].upper() in (b"NX", b"XX", b"GT", b"LT", b"CH"):
            options.add(args[index].upper())
            index += 1
        if unknown := options - {b"NX", b"XX", b"LT"}:
            raise StoreError(f"ERR the twin does not know ZADD with {unknown}")
        members = self._made(args[0], SortedSet)
        added = 0
        for at in range(index, len(args), 2):
            score, member = _score(args[at]), args[at + 1]
            known = member in members.scores
            if (known and b"NX" in options) or (not known and b"XX" in options):
                continue
            if known and b"LT" in options and members.scores[member] <= score:
                continue
            added += not known
            members.put(member, score)
        self._remove_if_empty(args[0], members)
        return added

    def cmd_zrem(self, args: Args) -> Reply:
        members = self._typed(args[0], SortedSet)
        if members is None:
            return 0
        gone = sum(members.remove(member) for member in args[1:])
        self._remove_if_empty(args[0], members)
        return gone

    def cmd_zcard(self, args: Args) -> Reply:
        return len(self._typed(args[0], SortedSet) or ())

    def cmd_zscore(self, args: Args) -> Reply:
        members = self._typed(args[0], SortedSet)
        score = None if members is None else members.scores.get(args[1])
        return None if score is None else score_text(score)

    def cmd_zrange(self, args: Args) -> Reply:
        if unknown := [arg for arg in args[3:] if arg.upper() != b"WITHSCORES"]:
            raise StoreError(f"ERR the twin does not know ZRANGE with {unknown}")
        members = self._typed(args[0], SortedSet)
        order = members.order if members else []
        return _scored(_span(order, _integer(args[1]), _integer(args[2])), with_scores=len(args) > 3)

    def cmd_zscan(self, args: Args) -> Reply:
        return [b"0", self.cmd_zrange([args[0], b"0", b"-1", b"WITHSCORES"])]

    def cmd_zrangebyscore(self, args: Args) -> Reply:
        members = self._typed(args[0], SortedSet)
        found = members.between(_bound(args[1]), _bound(args[2])) if members else []
        rest = [arg.upper() for arg in args[3:]]
        if b"LIMIT" in rest:
            at = rest.index(b"LIMIT")
            offset, count = _integer(rest[at + 1]), _integer(rest[at + 2])
            found = found[offset:] if count < 0 else found[offset : offset + count]
        return _scored(found, with_scores=b"WITHSCORES" in rest)

    def cmd_zlexcount(self, args: Args) -> Reply:
        members = self._typed(args[0], SortedSet)
        names = [member for _, member in members.order] if members else []
        return sum(_lex_after(name, args[1]) and _lex_before(name, args[2]) for name in names)

    # -- lists ------------------------------------------------------------------------------------------------------

    def cmd_rpush(self, args: Args) -> Reply:
        elements = self._made(args[0], ListValue)
        elements.extend(args[1:])
        self.grown.append(args[0])
        return len(elements)

    def cmd_lpop(self, args: Args) -> Reply:
        elements = self._typed(args[0], ListValue)
        if elements is None:
            return None
        taken = elements.popleft()
        self._remove_if_empty(args[0], elements)
        return taken

    def cmd_llen(self, args: Args) -> Reply:
        return len(self._typed(args[0], ListValue) or ())

    def cmd_lrange(self, args: Args) -> Reply:
        return _span(list(self._typed(args[0], ListValue) or ()), _integer(args[1]), _integer(args[2]))

    def cmd_ltrim(self, args: Args) -> Reply:
        elements = self._typed(args[0], ListValue)
        if elements is not None:
            left = _span(list(elements), _integer(args[1]), _integer(args[2]))
            elements.clear()
            elements.extend(left)
            self._remove_if_empty(args[0], elements)
        return OK

    def cmd_blpop(self, args: Args) -> Reply:
        """None: it would block."""
        for key in args[:-1]:
            if self.cmd_llen([key]):
                return [key, self.cmd_lpop([key])]
        return None

    # -- streams ----------------------------------------------------------------------------------------------------

    def cmd_xadd(self, args: Args) -> Reply:
        key, index = args[0], 1
        if args[index].upper() == b"NOMKSTREAM":
            index += 1
            if self._typed(key, Stream) is None:
                return None
        if len(args) - index < 3 or (len(args) - index) % 2 == 0:
            raise StoreError("ERR the twin knows XADD with an id and fields only")
        stream, fields = self._made(key, Stream), list(args[index + 1 :])
        if args[index] == b"*":
            self.grown.append(key)
            return entry_text(stream.append(self.now_ms(), fields))
        if (entry := _entry(args[index], 0)) <= stream.last:
            raise StoreError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        self.grown.append(key)
        return entry_text(stream.append_as(entry, fields))

    def cmd_xlen(self, args: Args) -> Reply:
        return len(self._typed(args[0], Stream) or ())

    def cmd_xdel(self, args: Args) -> Reply:
        stream = self._typed(args[0], Stream)
        return 0 if stream is None else sum(stream.remove(_entry(entry, 0)) for entry in args[1:])

    def cmd_xtrim(self, args: Args) -> Reply:
        stream = self._typed(args[0], Stream)
        strategy, limit = args[1].upper(), args[-1]
        if stream is None:
            return 0
        if strategy == b"MINID":
            return stream.trim(_entry(limit, 0))
        surplus = len(stream) - _integer(limit)
        return (
            stream.trim(stream.ids[surplus]) if 0 < surplus < len(stream) else stream.trim(LAST) if surplus > 0 else 0
        )

    def cmd_xrange(self, args: Args) -> Reply:
        return self._range(args[0], args[1], args[2], args[3:], backwards=False)

    def cmd_xrevrange(self, args: Args) -> Reply:
        return self._range(args[0], args[2], args[1], args[3:], backwards=True)

    def _range(self, key: bytes, low: bytes, high: bytes, options: Args, *, backwards: bool) -> Reply:
        stream = self._typed(key, Stream)
        if stream is None:
            return []
        ids = stream.between(_low(low), _high(high))
        if backwards:
            ids.reverse()
        count = _options(options).get(b"COUNT")
        return _entries(stream, ids if count is None else ids[: _integer(count)])

    def cmd_xread(self, args: Args) -> Reply:
        """None: there is nothing, and a BLOCK would block."""
        at = next(index for index, arg in enumerate(args) if arg.upper() == b"STREAMS")
        count = _options(args[:at]).get(b"COUNT")
        names = args[at + 1 :]
        half = len(names) // 2
        news: list[list[Any]] = []
        for key, place in zip(names[:half], names[half:], strict=True):
            stream = self._typed(key, Stream)
            ids = stream.after(_entry(place, 0)) if stream is not None else ()
            if stream is not None and ids:
                news.append([key, _entries(stream, ids if count is None else ids[: _integer(count)])])
        return news or None

    # -- scripts ----------------------------------------------------------------------------------------------------

    def cmd_function(self, args: Args) -> Reply:
        match args[0].upper(), *args[1:]:
            case b"LOAD", b"REPLACE", source:
                name = source.partition(b"\n")[0].partition(b" name=")[2]
                self._libraries[name] = source
                return name
            case b"LIST", b"LIBRARYNAME", pattern:
                found = [name for name in self._libraries if fnmatch.fnmatchcase(name.decode(), pattern.decode())]
                return [[b"library_name", name] for name in found]
            case b"DELETE", name if name in self._libraries:
                del self._libraries[name]
                return OK
            case b"FLUSH", *_:
                self._libraries.clear()
                return OK
            case other:
                raise StoreError(f"ERR the twin does not know FUNCTION {other}")

    @property
    def has_libraries(self) -> bool:
        """Whether scripts were loaded since it was set up."""
        return bool(self._libraries)

    def library_of(self, function: bytes) -> bytes | None:
        """The library's name ends as those of its functions do, as in the mesh."""
        return self._libraries.get(LIBRARIES.encode() + function.rpartition(b"_")[2])

    def cmd_fcall(self, args: Args) -> Reply:
        source = self.library_of(args[0])
        if source is None:
            raise StoreError("ERR Function not found")
        assert self._run is not None
        count = _integer(args[1])
        self._frozen_us = self.clock_us()
        try:
            return self._run(self, source, args[0], args[2 : 2 + count], args[2 + count :])
        finally:
            self._frozen_us = None

    def cmd_eval(self, args: Args) -> Reply:
        """As a function of a library of its own."""
        body = args[0].partition(b"\n")[2] if args[0].startswith(b"#!") else args[0]
        source = b"#!lua\nredis.register_function('eval', function(KEYS, ARGV) %b end)" % body
        self._libraries[LIBRARIES.encode() + b"eval"] = source
        try:
            return self.cmd_fcall([b"eval", *args[1:]])
        finally:
            del self._libraries[LIBRARIES.encode() + b"eval"]

    # -- the server -------------------------------------------------------------------------------------------------

    def cmd_time(self, args: Args) -> Reply:
        now_us = self.now_us()
        return [b"%d" % (now_us // 1_000_000), b"%d" % (now_us % 1_000_000)]

    def cmd_ping(self, args: Args) -> Reply:
        return Status(b"PONG")

    def cmd_client(self, args: Args) -> Reply:
        return OK

    def cmd_info(self, args: Args) -> Reply:
        return b"# Server\r\nredis_version:7.4.0\r\nredis_mode:standalone\r\nrun_id:%b\r\nrole:master\r\n" % self.run_id

    def cmd_config(self, args: Args) -> Reply:
        settings = {
            b"maxmemory-policy": b"noeviction",
            b"appendonly": b"yes",
            b"appendfsync": b"always",
            b"proto-max-bulk-len": b"536870912",
            b"client-query-buffer-limit": b"1073741824",
            b"notify-keyspace-events": b"",
        }
        asked = [name for name in args[1:] if name in settings and args[0].upper() == b"GET"]
        return [part for name in asked for part in (name, settings[name])]


class StoreKeys:
    """A store's keys as a synchronous client shows them (`tests.key_leaks`)."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def scan_iter(self, match: str, count: int) -> Iterator[bytes]:
        return iter(self._store.cmd_scan([b"0", b"MATCH", match.encode()])[1])

    def ttl(self, name: bytes) -> int:
        return self._store.cmd_ttl([name])

    def type(self, name: bytes) -> bytes:
        return self._store.cmd_type([name])

    def unlink(self, *names: bytes) -> int:
        return self._store.cmd_del(names)


COMMANDS: dict[bytes, Callable[[Store, Args], Reply]] = {
    name[4:].upper().encode(): getattr(Store, name) for name in vars(Store) if name.startswith("cmd_")
}


def _integer(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise StoreError("ERR value is not an integer or out of range") from None


def _score(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        raise StoreError("ERR value is not a valid float") from None


def _bound(text: bytes) -> tuple[float, bool]:
    if text in (b"-inf", b"+inf"):
        return (-inf if text == b"-inf" else inf), False
    return _score(text.removeprefix(b"(")), text.startswith(b"(")


def _lex_after(name: bytes, bound: bytes) -> bool:
    return bound == b"-" or (name > bound[1:] if bound.startswith(b"(") else name >= bound[1:])


def _lex_before(name: bytes, bound: bytes) -> bool:
    return bound == b"+" or (name < bound[1:] if bound.startswith(b"(") else name <= bound[1:])


def _span(items: list[Any], begin: int, end: int) -> list[Any]:
    """Items by index, both included, negative ones from the end."""
    size = len(items)
    return items[max(0, begin + size if begin < 0 else begin) : (end + size if end < 0 else end) + 1]


def _scored(found: Sequence[tuple[float, bytes]], *, with_scores: bool) -> list[bytes]:
    if not with_scores:
        return [member for _, member in found]
    return [part for score, member in found for part in (member, score_text(score))]


def _options(args: Args) -> dict[bytes, bytes]:
    return {args[index].upper(): args[index + 1] for index in range(0, len(args) - 1, 2)}


def _entry(text: bytes, number: int) -> EntryId:
    """An entry's id; one without a number has the given one."""
    ms, dash, rest = text.partition(b"-")
    return _integer(ms), _integer(rest) if dash else number


def _low(text: bytes) -> EntryId:
    if text == b"-":
        return FIRST
    if text.startswith(b"("):
        ms, number = _entry(text[1:], 0)
        return ms, number + 1
    return _entry(text, 0)


def _high(text: bytes) -> EntryId:
    return LAST if text == b"+" else _entry(text, LAST[1])


def _entries(stream: Stream, ids: Sequence[EntryId]) -> list[Any]:
    return [[entry_text(entry), list(stream.fields[entry])] for entry in ids]

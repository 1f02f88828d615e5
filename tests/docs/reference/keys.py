"""keys.md: every key in Redis, every field of a sequence's record, and of the entries of its streams."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from shared.contract.record import FIELDS, STATES, Field
from shared.store.key_kinds import (
    FEED_FIELDS,
    FEED_KINDS,
    INBOX_FIELDS,
    INBOX_KINDS,
    KINDS,
    STARTS_FIELDS,
    STARTS_KINDS,
    EntryField,
)
from shared.store.keyspace import DEFAULT_PREFIX, PERMANENT, SCHEMA_VERSION, SEQUENCE_BOUND, Keyspace, kind_of
from tests.docs.reference.markdown import code, page, table, text
from tests.every_key import every_key

HEAD = ("Key", "Type", "Lifetime", "What it holds", "Written by", "Read by")
NAMES = ("model", "version", "generation", "load", "executor", "gateway", "name", "sequence")
BASE = f"{DEFAULT_PREFIX}:{SCHEMA_VERSION}:"
INTRO = f"""
Keys begin with the prefix (`--key-prefix`) and the version of the schema, by default with `{BASE}`; it is left
out below, but of the one key that has no schema in its name. What stands in braces is the hash tag of a Cluster:
`{{<shard>}}` for what belongs to sequences and models, `{{mesh}}` for what belongs to the mesh.

`<sequence>` is `<model>|<version>|<id>`: the version that the client names, or nothing, and the correlation id with `i`
before an integer and `s` before a text. `<executor>` and `<gateway>` are one process's life: its name and a random
part. Names of scripts are in parentheses (`shared/store/lua`).

Nothing but seqmesh may write these keys.
"""
LIFETIMES = """
Lifetimes: *permanent* keys are small tables, counters and streams that are emptied. *Sequence*: while a sequence lives;
END, expiry and takeover remove the key or the entry. All others have a TTL.
"""
RECORD = """
The record of a sequence is the hash `seq:<sequence>`. Only scripts write it. Fields whose names end with `<step>` come
once for each of several steps. Of a record that could not be read the tombstone has `st`, `cl`, `nx`, `cm`, `sn` and
`vr` only.
"""
ENTRIES = """
What the scripts must read of a step, a control message or a message to the leader is a field of the stream entry. A
step's entry in an inbox has no `k`. A parked step has `q`, `n`, `f`, `g`, `t` and `m` of the fields of an inbox entry.
"""


def keys() -> str:
    """The page."""
    arguments: dict[str, Any] = {name: f"<{name}>" for name in NAMES} | {"shard": 0}
    found = {kind_of(key): key for key in every_key(Keyspace(shards=1), arguments)}
    assert found.keys() == KINDS.keys(), "a kind of key has no description, or the other way round"
    rows = [row(kind, found[kind]) for kind in KINDS]
    return page(
        "Keys in Redis",
        INTRO,
        "## Keys",
        LIFETIMES,
        table(HEAD, rows),
        "## The record of a sequence",
        RECORD,
        "States (`st`):",
        table(("State", "Meaning"), [[code(state.decode()), text(said)] for state, said in STATES.items()]),
        "Fields:",
        record(FIELDS),
        "## The entries of streams",
        ENTRIES,
        "### Inboxes",
        *entries(INBOX_FIELDS, INBOX_KINDS),
        "### The starts streams",
        *entries(STARTS_FIELDS, STARTS_KINDS),
        "### The feeds",
        *entries(FEED_FIELDS, FEED_KINDS),
    )


def row(kind: str, key: str) -> list[str]:
    """One kind of key."""
    about = KINDS[kind]
    shown = key.removeprefix(BASE).replace("{0}", "{<shard>}")
    ends = "; ".join(filter(None, (bound(key), about.ends)))
    return [code(shown), about.type, text(ends), text(about.holds), text(about.writers), text(about.readers)]


def bound(key: str) -> str:
    """What the keyspace says of a key's lifetime; "" for one with a TTL."""
    rest = key.removeprefix(BASE)
    if key.startswith(f"{DEFAULT_PREFIX}:{{mesh}}") or any(fnmatch.fnmatchcase(rest, each) for each in PERMANENT):
        return "permanent"
    return "sequence" if any(fnmatch.fnmatchcase(rest, each) for each in SEQUENCE_BOUND) else ""


def record(fields: Sequence[Field]) -> str:
    """The fields of a record."""
    rows = [
        [
            code(one.shown),
            text(one.type),
            text(one.meaning),
            ", ".join(map(code, one.writers)),
            text(one.absent) or "never",
        ]
        for one in fields
    ]
    return table(("Field", "Type", "Meaning", "Written by", "Absent"), rows)


def entries(fields: Sequence[EntryField], kinds: Mapping[str, str]) -> list[str]:
    """The fields and the kinds of one stream's entries."""
    return [
        table(
            ("Field", "Meaning", "Absent"), [[code(f.name), text(f.meaning), text(f.absent) or "never"] for f in fields]
        ),
        table(("Kind (`k`)", "Meaning"), [[code(kind), text(said)] for kind, said in kinds.items()]),
    ]

"""The record of a sequence, the hash `seq:<sequence>`: the fields and states that Python code reads, by name.

What each field means, which script writes it and when it is absent: docs/reference/keys.md, for all fields. The names
are two letters long because Redis holds one record for each live sequence: with 250,000 of them each further letter of
a name costs 250 KB. The Lua scripts write the names out. A test reads the scripts, and fails where a script uses a
field that is not on that page, or none uses one that is.

Only scripts write records. A START on a live sequence goes on counting in its record. A START after the end of a
sequence begins a new record, with nothing of the old one. What stays of a sequence that is over is a tombstone: its
record, with a TTL.

Step numbers count what the record accepted, from 1, across all STARTs. Times are the Redis server's clock.
"""

from __future__ import annotations

STATE = "st"
OWNER = "ow"
INSTANCE = "in"
SLOT = "sl"
EPOCH = "ep"
FIRST_EPOCH = "fe"
VERSION = "vr"
BIRTH = "bn"
ACCEPTED = "nx"
COMMITTED = "cm"
CHECKPOINTED = "ck"
FAILED_STEPS = "fl"
START = "sn"
EARLIER_STARTS = "es"
CLOSED = "cl"
RECENT_IDS = "rd"
OLDER_IDS = "ro"
KEPT_REPLIES = "rk"
REPLY = "p:"
LATEST = "la"
DURABLE = "du"
MARK = "mk"
VOID_SINCE = "vd"
VOID_CAUSE = "vk"
CANCELLED_STEPS = "ca"
GIVEN_UP = "gu"
WAIT_ENTRY = "be"
PAUSE = "ps"
DEADLINE_ENTRY = "dn"
TENANT = "tn"

WAITING, LIVE, MOVING, PAGED = b"w", b"l", b"m", b"p"
ENDED, EXPIRED, FAILED, LOST, CANCELLED = b"e", b"x", b"f", b"o", b"c"
TOMBSTONES = frozenset((ENDED, EXPIRED, FAILED, LOST, CANCELLED))
"""States of a sequence that is over."""
NO_ENTRY = b"0-1"
"""`WAIT_ENTRY` of a paused sequence."""

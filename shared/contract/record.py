"""The record of a sequence: every field of the hash `seq:<sequence>`, by name.

The names are two letters long because Redis holds one record for each live sequence: with 250,000 of them each further
letter of a name costs 250 KB. Python code uses the constants below. The Lua scripts write the names out; a test reads
all of them and fails where a script uses a field that is not named here, or none uses one that is.

Only scripts write records. A START on a live sequence goes on counting in its record. A START after the end of a
sequence begins a new record, with nothing of the old one. What stays of a sequence that is over is a tombstone: its
record, with a TTL. Of a record that could not be read the tombstone has `st`, `cl`, `nx`, `cm`, `sn` and `vr` only.

Step numbers count what the record accepted, from 1, across all STARTs. Times are the Redis server's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

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
CLOSED = "cl"
DURABLE = "du"
PAGEABLE = "pg"
MARK = "mk"
VOID_SINCE = "vd"
VOID_CAUSE = "vk"
WAIT = "be"
PATIENCE = "dl"
PATIENCE_NEWS = "dn"
CANCELLED_STEPS = "ca"
LOST_OWNERS = "tk"
TRIED = "tr"
GIVEN_UP = "gu"
LATEST = "la"
ORPHANED = "og"
RECENT_IDS = "rd"
OLDER_IDS = "ro"
KEPT_REPLIES = "rk"
REPLY = "p:"
JOINED = "j:"
LEFT = "a:"

WAITING, LIVE, MOVING, PAGED = b"w", b"l", b"m", b"p"
ENDED, EXPIRED, FAILED, LOST, CANCELLED = b"e", b"x", b"f", b"o", b"c"
TOMBSTONES = frozenset((ENDED, EXPIRED, FAILED, LOST, CANCELLED))
"""States of a sequence that is over."""

STATES: dict[bytes, str] = {
    WAITING: "waiting: the sequence is new and has no slot yet",
    LIVE: "live: the sequence has an owner and a slot",
    MOVING: "moving: the sequence is between two slots, and waits for the next one",
    PAGED: "paged: the sequence has no slot and wants none. Its state is its checkpoint",
    ENDED: "ended: the step with END is committed",
    EXPIRED: "expired: the sequence was idle for too long",
    FAILED: "failed: the step with START failed in the model",
    LOST: "lost: the sequence's state is gone",
    CANCELLED: "cancelled: the callers of a step have gone",
}
"""What the field `st` says."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record, or one for each of several steps: then `name` is a prefix, and the step's number follows.

    type     of the value, which Redis holds as text
    meaning  what the value says
    writers  the scripts that give the field a value (`shared/store/lua`)
    absent   when the field is missing; "" for a field that every record has
    """

    name: str
    type: str
    meaning: str
    writers: tuple[str, ...]
    absent: str = ""

    @property
    def shown(self) -> str:
        """The name as people read it."""
        return f"{self.name}<step>" if self.name.endswith(":") else self.name


NO_PLACE = "unless the sequence is live"
OVER = "when the sequence is over"

FIELDS: tuple[Field, ...] = (
    Field(
        STATE,
        "letter",
        "State of the sequence.",
        ("submit", "assign", "commit", "expire", "reclaim", "vacate", "reload", "lose"),
    ),
    Field(
        OWNER,
        "executor id",
        "Owner of the sequence. Of a paged sequence: its last owner, which may send its last commit once more.",
        ("assign",),
        "while the sequence waits for its first slot, while it moves (unless it was paged before), and " + OVER,
    ),
    Field(INSTANCE, "integer", "Index of the model's instance in the owner's process.", ("assign",), NO_PLACE),
    Field(SLOT, "integer", "Index of the slot in the instance.", ("assign",), NO_PLACE),
    Field(
        EPOCH,
        "integer",
        "Epoch of the ownership. A commit in another epoch is refused. A sequence gets a new epoch at once when it "
        "moves. A paged one keeps its epoch until `assign`; commits of its last owner are refused by `st`.",
        ("assign", "reclaim", "vacate"),
        "before the sequence has its first slot",
    ),
    Field(
        FIRST_EPOCH,
        "integer",
        "First epoch of this record. An inbox entry with an older one belongs to an earlier sequence of the same id.",
        ("assign",),
        "before the sequence has its first slot",
    ),
    Field(
        VERSION, "text", "Version of the model that the sequence runs on, chosen at its first step.", ("submit", "lose")
    ),
    Field(
        BIRTH,
        "stream entry id",
        "Entry by which the sequence first waited for a slot. It tells the sequence from every other one of the same "
        "id.",
        ("submit",),
    ),
    Field(ACCEPTED, "step number", "Last accepted step.", ("submit", "lose")),
    Field(COMMITTED, "step number", "Last committed step.", ("submit", "commit", "lose")),
    Field(
        CHECKPOINTED,
        "step number",
        "Step of the last checkpoint. A takeover runs the steps behind it again.",
        ("submit", "commit"),
    ),
    Field(
        FAILED_STEPS,
        "`<first>-<last> ...`",
        "Steps behind the checkpoint that failed in the model, rising. A takeover passes over them.",
        ("commit",),
        "when no step behind the checkpoint failed, and " + OVER,
    ),
    Field(START, "step number", "Latest accepted step with START.", ("submit", "lose")),
    Field(
        CLOSED,
        "0 or 1",
        "1: only a step with START is accepted: END is accepted, the state is gone, or the sequence is over.",
        ("submit", "commit", "expire", "reclaim", "reload", "lose"),
    ),
    Field(
        DURABLE,
        "0 or 1",
        "1: a takeover finds the sequence's state. 0: only its owner has the state.",
        ("submit", "commit"),
        OVER,
    ),
    Field(
        PAGEABLE,
        "1",
        "The sequence may be paged.",
        ("submit",),
        "when the model has no virtual slots, and " + OVER,
    ),
    Field(
        MARK,
        "text",
        "Mark of the load that ran the latest committed START. No other load may go on from the state.",
        ("commit",),
        "where models are not loaded anew (control mode `none`), before the first commit, and " + OVER,
    ),
    Field(
        VOID_SINCE,
        "step number",
        "The state is gone since this step. Steps behind it are answered with an error until a START.",
        ("commit", "reclaim"),
        "while there is a state, and " + OVER,
    ),
    Field(
        VOID_CAUSE,
        "letter",
        "Why the state is gone: `f` failed START, `o` lost, `c` cancelled.",
        ("commit", "reclaim"),
        "while there is a state, and " + OVER,
    ),
    Field(
        WAIT,
        "stream entry id",
        "Entry of the starts stream by which the sequence waits for a slot.",
        ("submit", "reclaim", "vacate", "sweep"),
        "unless the sequence is waiting or moving",
    ),
    Field(
        PATIENCE,
        "ms",
        "When the first of the waiting steps runs out of its `timeout`.",
        ("submit",),
        "unless the sequence is waiting and one of its steps has a timeout",
    ),
    Field(
        PATIENCE_NEWS,
        "stream entry id",
        "Entry of the starts stream that told the scheduler that `dl` was lowered.",
        ("submit",),
        "unless `dl` was lowered while the sequence waits",
    ),
    Field(
        CANCELLED_STEPS,
        "`<step> ...`",
        "Steps whose callers have gone. The owner cancels those that have not begun.",
        ("cancel", "commit"),
        "when there is none, and " + OVER,
    ),
    Field(
        LOST_OWNERS,
        "`<step> <count>`",
        "How many owners in a row were lost while this was the next step.",
        ("reclaim",),
        "when no owner was lost with an open step, and " + OVER,
    ),
    Field(
        TRIED,
        "integer",
        "Epoch of the owner that went on with the sequence alone, because the sequence was suspected.",
        ("attempt",),
        "when no owner did, and " + OVER,
    ),
    Field(
        GIVEN_UP,
        "step number",
        "Step that too many owners were lost with. It is answered with an error and does not run.",
        ("reclaim",),
        "when there is none, and " + OVER,
    ),
    Field(
        LATEST,
        "`<ms> <gateway> <token>`",
        "When, by which gateway and under which of its tokens the latest step was accepted. If a step of the open "
        "sequence was asked for again since then, ` <gateway> <token>` of that request follows.",
        ("submit",),
    ),
    Field(
        ORPHANED,
        "ms",
        "The connection that used the sequence last is gone. With open steps: how long the sequence may be idle "
        "after them. Without: when its idle time would have ended if the connection had stayed.",
        ("orphan", "commit"),
        "unless the sequence is an orphan",
    ),
    Field(
        RECENT_IDS,
        "16 bytes per step",
        "Digest of request id and content (12 bytes), and number of the step (4 bytes), of the last eight steps with a "
        "request id.",
        ("submit",),
        "when no step had a request id",
    ),
    Field(
        OLDER_IDS,
        "16 bytes per step",
        "The same of the steps before those: all open ones and the last ones at least.",
        ("submit",),
        "when no more than eight steps had a request id",
    ),
    Field(
        KEPT_REPLIES,
        "`<step>:<bytes> ...`",
        "Steps whose replies are kept for a retry, oldest first.",
        ("commit",),
        "when no reply is kept",
    ),
    Field(REPLY, "encoded reply", "Reply of the step, kept for a retry.", ("commit",), "when the reply is not kept"),
    Field(
        JOINED,
        "`<gateway> <token>;...`",
        "Who waits for the step beside its first caller: the latest few.",
        ("submit",),
        "when nobody does",
    ),
    Field(
        LEFT,
        "`<gateway> <token>;...`",
        "Which callers of the step have gone, of those who cannot ask again.",
        ("cancel",),
        "when none has",
    ),
)
"""Every field, in the order in which a reader needs them."""

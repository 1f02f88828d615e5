"""Every bound of the mesh that is not a setting, with its unit and its reason."""

from __future__ import annotations

CORRELATION_ID_CHARS_MAX = 128
"""Characters of a string correlation id (triton-spec 5.3)."""

SCRIPT_STEPS_MAX = 128
"""Steps that one call of a script carries: a script holds Redis up for about 10 us per step."""

SCRIPT_BYTES_MAX = 4 << 20
"""Bytes of messages after which a call of a script takes no more steps: Redis copies them, and everybody waits."""

VALUE_BYTES_MAX = 500 << 20
"""Bytes of one value on its way to Redis: an encoded request or answer, a state tensor. Redis takes none beyond 512 MiB
(proto-max-bulk-len; where that is set lower, `redis_client.value_bytes_max` tells), and cuts who sends one."""

REPLY_STREAM_TTL_MS = 60_000
"""How long a dead gateway's reply streams stay."""

JSON_NESTING_MAX = 100
"""Depth of a request's JSON (triton-spec 5.3)."""

CONTROL_STREAM_ENTRIES = 1_000
"""Load and unload commands kept for executors that were away; a few dozen bytes each."""

CONTROL_MESSAGE_BYTES_MAX = 128 << 20
"""Bytes of one load request's configuration and override files: they travel through Redis, which holds them."""

CONTROL_BYTES_MAX = 512 << 20
"""Bytes of all models' override configurations and files that Redis holds for executors to come."""

LABEL_FILE_BYTES_MAX = 1 << 20
"""A file with the names of an output's classes: it travels to every gateway."""

ERROR_CHARACTERS_MAX = 16_000
"""Of an error's text: it may quote what somebody sent, and of a failed load it stands in the executor's registration,
which everybody reads every second. A python model's traceback has its place in it."""

LOST_EXECUTORS_MAX = 3
"""Executors that may be lost while they run a stateless request: then it is what kills them, and it is answered."""

LOST_OWNERS_MAX = 5
"""Owners of a sequence that may be lost, one after the other, with the same next step: then that step is given up."""

RETRY_IDS = 64
"""Steps of a sequence whose request ids and contents are remembered, so that they do not run twice: 16 bytes of digest
each, and only for clients that give ids. Those in flight are remembered beyond it."""

RETRY_REPLIES = 8
"""Replies of a sequence that are kept for retries (model parameter `retry_replies`): what a client may lose at once."""

RETRY_REPLY_BYTES = 64 << 10
"""Bytes of those replies beyond the newest one, which is always kept (model parameter `retry_reply_bytes`)."""

JOINED_MAX = 16
"""Callers of one unanswered step who asked for it again and wait beside the first one: each gets an answer of its own,
and is a place in the record. One more takes the place of the oldest, who is told."""

MODEL_STATE_BYTES_MAX = 64 << 20
"""What a model may hand out as the state of one sequence: it goes to Redis with a commit, and everybody waits there."""

LIVE_MAX = 250_000
"""Live sequences of one model and shard, slots or no slots, where nobody says otherwise: each is a record, a checkpoint
and a deadline in Redis, about 1 KiB beside its state."""

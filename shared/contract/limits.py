"""Every bound of the mesh that is not a setting, with its unit and its reason."""

from __future__ import annotations

CORRELATION_ID_CHARS_MAX = 128
"""Characters of a string correlation id (triton-spec 5.3)."""

SCRIPT_STEPS_MAX = 128
"""Steps that one call of a script carries: a script blocks Redis for about 10 us per step."""

SCRIPT_BYTES_MAX = 4 << 20
"""Bytes of messages after which a call of a script takes no more steps: Redis copies them, and serves no other client
meanwhile.
"""

VALUE_BYTES_MAX = 500 << 20
"""Bytes of one value on its way to Redis: an encoded request or answer, a state tensor. Redis refuses values beyond 512
MiB (proto-max-bulk-len; if that is set lower, `fitness.value_bytes_max` tells), and cuts the connection.
"""

GATEWAY_MEMORY_MIN = 384 << 20
"""Least bound of the memory of a gateway's process: half of it is the process without any request."""

REPLY_STREAM_TTL_MS = 60_000
"""How long a dead gateway's reply streams stay."""

JSON_NESTING_MAX = 100
"""Depth of a request's JSON (triton-spec 5.3)."""

CONTROL_STREAM_ENTRIES = 1_000
"""Load and unload commands kept for executors that were disconnected; a few dozen bytes each."""

CONTROL_MESSAGE_BYTES_MAX = 128 << 20
"""Bytes of one load request's configuration and override files: they travel through Redis, which holds them."""

CONTROL_FILES_MAX = 4096
"""Files of one load request: a gateway looks at each path, 5 us, and executors write each file."""

CONTROL_BYTES_MAX = 512 << 20
"""Bytes of all models' override configurations and files that Redis holds for executors that start later."""

LABEL_FILE_BYTES_MAX = 1 << 20
"""Bytes of a file with the names of an output's classes, which is sent to every gateway."""

ERROR_CHARACTERS_MAX = 16_000
"""Characters of an error's text. The text may quote a request. The error of a failed load stands in the executor's
registration, which every service reads every second. A python model's traceback fits in.
"""

LOST_EXECUTORS_MAX = 3
"""Executors that may be lost while they run one stateless request. Then the request counts as the cause, and is
answered with an error.
"""

LOST_OWNERS_MAX = 5
"""Owners of a sequence that may be lost, one after the other, with the same next step. Then that step is given up."""

RETRY_IDS = 64
"""Steps of a sequence whose request ids and contents are remembered, so that they do not run twice: 16 bytes each, and
only for clients that give ids. Open steps are remembered beyond this number.
"""

RETRY_REPLIES = 8
"""Replies of a sequence that are kept for retries (model parameter `retry_replies`): how many a client may lose at
once.
"""

RETRY_REPLY_BYTES = 64 << 10
"""Bytes of these replies without the newest one, which is always kept (model parameter `retry_reply_bytes`)."""

ANSWERS_BYTES_MAX = 4 << 20
"""Bytes of the answers of one step that are kept for retries, if its model is decoupled: they lie in the sequence's
record. Beyond it the oldest ones go, and a retry gets them only from its own gateway.
"""

OPEN_ROWS_MAX = 1024
"""Requests of a decoupled model that one executor holds while their answers come: each keeps its inputs in memory."""

COUNTED_RESPONSES = 64
"""Answers of one request of a decoupled model that are counted each for itself (`response_stats`); the later ones are
counted as the last of these.
"""

JOINED_MAX = 16
"""Callers that asked again for one open step, and wait beside the first caller: each gets an answer of its own,
and takes space in the record. One caller more replaces the oldest, which is told.
"""

INSTANCES_MAX = 1024
"""Instances of a model in one executor. Each is a thread at least, and they are made one after the other: a count with
a few zeros too many would keep the executor from ever serving.
"""

MODEL_STATE_BYTES_MAX = 64 << 20
"""Bytes that a model may hand out as the state of one sequence: they go to Redis with a commit, which blocks Redis."""

ENSEMBLE_STEPS_MAX = 256
"""Steps of an ensemble, those of the ensembles within it included: a gateway sends them, and holds their tensors."""

ENSEMBLE_DEPTH_MAX = 32
"""Ensembles within each other: gateways walk through them by recursion."""

PAUSE_MS_MAX = 7 * 24 * 3600 * 1000
"""Longest pause of a sequence from one call: what waits in it, and its place among the live ones, is held no longer
than somebody asks for. It is resumed then."""

IDLE_MS_MAX = 100 * 365 * 24 * 3600 * 1000
"""Longest idle time of a sequence: a configuration that says more means for ever. Scripts count times up to 2^53, and
write numbers from 1e14 on with an exponent."""

LIVE_MAX = 250_000
"""Live sequences of one model and shard, with or without slots, by default: each is a record, a checkpoint and a
deadline in Redis, about 1 KiB beside its state.
"""

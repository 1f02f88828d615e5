"""What an executor and the process of an instance say to each other. Both run the same release: nothing is versioned.

`Call` and `Answer` take turns on one socket. On the other one, beside them, the process says what it logs and counts,
and is asked whether its model is ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from executor.engine.base import Row, RowError, RowResult, Timings
from shared.contract.ids import CorrelationId
from shared.contract.model_config import ModelConfig
from shared.contract.tensors import Tensor
from shared.statistics.reports import CustomFamily

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Anything that is said. The tag is the name of the class."""


# -- calls ------------------------------------------------------------------------------------------------------------


class Load(Message, frozen=True):
    """Make the instance (`LoadRequest`). log_level: what is below is not logged"""

    config: ModelConfig
    config_json: str
    model_dir: str
    version: str
    instance_name: str
    device: str
    slots: int
    state_value_bytes_max: int
    code: str
    log_level: int


class Run(Message, frozen=True):
    """Run a batch (`Engine.run`). number: by which one of its rows can be cancelled"""

    rows: Sequence[Row]
    want_state: Sequence[bool]
    number: int = 0


def travelling(rows: Sequence[Row]) -> list[Row]:
    """Rows as they go to the process: without their origins, because nothing calls other models from there."""
    return [row if row.origin is None else msgspec.structs.replace(row, origin=None) for row in rows]


class LoadStates(Message, frozen=True):
    """See `Engine.load_states`."""

    slots: Sequence[int]
    states: Sequence[Mapping[str, Tensor]]


class Restore(Message, frozen=True):
    """See `HandsOutState.restore_model`."""

    correlation_id: CorrelationId
    state: bytes


class ReleaseSequences(Message, frozen=True):
    """See `ReleasesSequences`. correlation_id: None for all"""

    correlation_id: CorrelationId | None


class DropState(Message, frozen=True):
    """See `Engine.drop_state`."""

    slot: int


class DescribeState(Message, frozen=True):
    """See `Engine.describe_state`."""

    slot: int


class Close(Message, frozen=True):
    """Finalize the model; the process ends after its answer."""


Call = Load | Run | LoadStates | Restore | ReleaseSequences | DropState | DescribeState | Close

# -- answers ----------------------------------------------------------------------------------------------------------


class Loaded(Message, frozen=True):
    """The instance is there, and what can be asked of it (see the protocols of `executor.engine.base`)."""

    hands_out_state: bool
    has_release: bool
    has_readiness: bool
    batch_rows: int
    alone_because: str
    is_testable: bool


class Ran(Message, frozen=True):
    """A batch's results. errors: by the row's index; there `rows` has None"""

    rows: Sequence[RowResult | None]
    errors: Mapping[int, RowError]
    timings: Timings


class Done(Message, frozen=True):
    """The call was made. text: what it returned"""

    text: str = ""


class Raised(Message, frozen=True):
    """The call raised."""

    code: str
    message: str


Answer = Loaded | Ran | Done | Raised

# -- beside the calls -------------------------------------------------------------------------------------------------


class LogLine(Message, frozen=True):
    """A record of the process's log."""

    level: int
    message: str
    fields: Mapping[str, str]


class Families(Message, frozen=True):
    """The metrics of the model's own, all of them."""

    families: tuple[CustomFamily, ...]


class ModelReady(Message, frozen=True):
    """Whether the model calls itself ready."""

    is_ready: bool


class AskReadiness(Message, frozen=True):
    """To the process."""


class Cancel(Message, frozen=True):
    """To the process: nobody waits for a row any more. number: of the batch (`Run`)"""

    number: int
    row: int


Note = LogLine | Families | ModelReady

encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder[Call](Call).decode
decode_answer = msgspec.msgpack.Decoder[Answer](Answer).decode
decode_note = msgspec.msgpack.Decoder[Note](Note).decode
decode_order = msgspec.msgpack.Decoder[AskReadiness | Cancel](AskReadiness | Cancel).decode

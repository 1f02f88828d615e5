"""What an executor and the process of an instance say to each other. Both run the same release: nothing is versioned.

`Call` and `Answer` take turns on one socket. On the other one, beside them, the process sends notes: what it logs and
counts, the calls of its model to other models, and the answers to open requests. It is sent orders there: what belongs
to these, and whether its model is ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from executor.engine.base import LoadRequest, Row, RowError, RowResult, Timings
from executor.engine.python.calls import CallAnswer, ModelCall
from shared.contract.errors import sendable
from shared.contract.ids import CorrelationId
from shared.contract.tensors import Tensor
from shared.statistics.reports import CustomFamily

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Anything that is said. The tag is the name of the class."""


# -- calls ------------------------------------------------------------------------------------------------------------


class Load(Message, frozen=True):
    """Make the instance. log_level: what is below is not logged"""

    request: LoadRequest
    log_level: int


class Run(Message, frozen=True):
    """Run a batch (`Engine.run`).

    answers  the number of each row's request (`Answered`, `NotWanted`); 0: nobody is answered
    states   what has become of states since the last batch, by slot: those after last answers; None: it is dropped
    """

    rows: Sequence[Row]
    want_state: Sequence[bool]
    answers: tuple[int, ...] = ()
    states: Mapping[int, Mapping[str, Tensor] | None] = {}


def travelling(rows: Sequence[Row]) -> list[Row]:
    """Rows as they go to the process: it has `Run.answers`."""
    return [row if row.answers is None else msgspec.structs.replace(row, answers=None) for row in rows]


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


class DescribeState(Message, frozen=True):
    """See `Engine.describe_state`."""

    slot: int


class Close(Message, frozen=True):
    """Finalize the model; the process ends after its answer."""


Call = Load | Run | LoadStates | Restore | ReleaseSequences | DescribeState | Close

# -- answers ----------------------------------------------------------------------------------------------------------


class Loaded(Message, frozen=True):
    """The instance is there, and what can be asked of it: attributes of its engine (see the protocols of
    `executor.engine.base`).
    """

    hands_out_state: bool
    has_release: bool
    has_readiness: bool
    batch_rows: int
    alone_because: str
    is_testable: bool
    makes_calls: bool


class Ran(Message, frozen=True):
    """A batch's results. errors: by the row's index; there `rows` has None"""

    rows: Sequence[RowResult | None]
    errors: Mapping[int, RowError]
    timings: Timings


class Done(Message, frozen=True):
    """The call was made. text: what it returned"""

    text: str = ""


class Raised(Message, frozen=True):
    """The call raised a MeshError with this code, or anything else, which is INTERNAL."""

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


class MakeCall(Message, frozen=True):
    """The model calls another one (`Calls.start`, `Calls.stream`). The call's number is the process's.

    streamed  it may get any number of responses, which are read one by one
    waits     in which of the executor's calls, counted from 1, the instance itself waits for the answer; 0: in none.
              The end of that call goes another way and may come before: then nobody waits any more
    """

    call: ModelCall
    streamed: bool
    waits: int


class ReadResponse(Message, frozen=True):
    """The next response of a call is wanted (`AnswerStream.read`). waits: as of `MakeCall`"""

    number: int
    waits: int


class GiveUpCall(Message, frozen=True):
    """Nobody wants what a call still has to say."""

    number: int


class Answered(Message, frozen=True):
    """An answer to an open request. number: of the request (`Run`); error: in place of a result; last: see
    `Answers.end`
    """

    number: int
    result: RowResult | None
    error: RowError | None
    last: bool


Note = LogLine | Families | ModelReady | MakeCall | ReadResponse | GiveUpCall | Answered

# -- orders, to the process -------------------------------------------------------------------------------------------


class AskReadiness(Message, frozen=True):
    """Is the model ready?"""


class CallAnswered(Message, frozen=True):
    """The answer to a call, or its next response; None behind the last response."""

    number: int
    answer: CallAnswer | None


class AnswersTaken(Message, frozen=True):
    """So many answers have been taken, with so many bytes (`answer_bytes`)."""

    count: int
    bytes: int


class NotWanted(Message, frozen=True):
    """Nobody waits for answers to a request any more. number: as of `Answered`"""

    number: int


Order = AskReadiness | CallAnswered | AnswersTaken | NotWanted


def answer_bytes(result: RowResult | None) -> int:
    """What an answer counts against the bound of those that are on their way."""
    return 0 if result is None else sum(len(tensor.raw) for tensor in result.outputs)


def sendable_error(error: RowError) -> RowError:
    """An error that can be sent, whatever a model said."""
    return msgspec.structs.replace(error, message=sendable(error.message))


def _packed_path(value: object) -> str:
    if not isinstance(value, Path):
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return str(value)


encode = msgspec.msgpack.Encoder(enc_hook=_packed_path).encode
decode_call = msgspec.msgpack.Decoder[Call](Call, dec_hook=lambda kind, value: kind(value)).decode
decode_answer = msgspec.msgpack.Decoder[Answer](Answer).decode
decode_note = msgspec.msgpack.Decoder[Note](Note).decode
decode_order = msgspec.msgpack.Decoder[Order](Order).decode

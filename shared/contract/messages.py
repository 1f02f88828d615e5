"""Messages between services: frozen structs. Requests, replies and control messages are msgpack, other records JSON.

A message's fields are only ever appended (with a default, and a new `release.REVISION`). Any other change is a new
`keyspace.SCHEMA_VERSION`; docs/contributing.md says how.
Numbers that Lua scripts must read (step, epoch, slot, flags, reply address) stand in fields of the stream entry, beside
the message, which the scripts do not look into.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from enum import IntFlag
from typing import Annotated

import msgspec

from shared.contract.ids import CorrelationId, Epoch, ExecutorId, InstanceIndex, SequenceId, SlotIndex, StepNumber
from shared.contract.limits import INSTANCES_MAX
from shared.contract.model_config import ModelConfig
from shared.contract.tensors import Tensor, check_tensor


class StepFlag(IntFlag):
    """Flags of a step, the same numbers as in `common.lua`. Only START and END have a meaning for the model.

    IMPLICIT  its sequence may begin without START
    DURABLE   the mesh holds its sequence's state
    ALONE     its sequence consists of this one request, under an id that the gateway made and no client knows
    PAGEABLE  its sequence gives up its slot between two steps while other sequences wait
    STREAMED  its model is decoupled: the step may have answers before its last one; only `commit` is told
    TOLD      its caller is told when it has a slot, and how long it waited (`ReplyMessage.notice`)
    NAMED     it is a model's call, and known by a name that no other call has; only `submit.lua` knows the flag
    """

    NONE = 0
    START = 1
    END = 2
    IMPLICIT = 4
    DURABLE = 8
    ALONE = 16
    PAGEABLE = 32
    STREAMED = 64
    TOLD = 128
    NAMED = 1024


START, END = int(StepFlag.START), int(StepFlag.END)
"""To compare a step's flags with: operations of `StepFlag` itself take many times as long."""
EXECUTOR_FLAGS = int(StepFlag.START | StepFlag.END | StepFlag.ALONE)
"""The flags that a step still has when its executor reads it. The executor hands ALONE back with the commit."""


class InferMessage(msgspec.Struct, frozen=True, array_like=True):
    """One inference request, checked against the model's configuration; the tensors' bytes are unchanged.

    version      the version that serves it, chosen by the gateway; a sequence stays with the version of its START
    outputs      names asked for; empty means all
    traceparent  W3C trace context of the gateway's span, "" when it is not sampled
    arrived_ns   wall clock at the gateway, ns
    own_sequence  the request is a sequence of its own, of an iterative model: the model gets START with its first pass,
                 and never END (triton-spec 1.10)
    keep_reply   the client can repeat this step (it gave a request id or `sequence_step`): the reply is stored for that
    cache_key    name under which a successful answer is stored in the response cache
                 (`shared.contract.response_cache`); "": it is not stored
    cache_bytes  bytes that the cache may hold, if the answer is stored
    flags        START and END of a stateless request: they mean nothing to the mesh, but its model can read them. The
                 flags of a step are in its stream entry
    call         of a call that a model made: its name, the same when the model's step runs again; "" for a client's
    chain        of a call: the models that wait for its answer, the first caller first (`shared.contract.calls`)
    deadline_ms  of a call: wall clock at the gateway, ms, after which nobody waits for its answer; 0: none
    salt         of `next_salt`; the last byte
    """

    model: str
    version: str
    request_id: str
    correlation_id: CorrelationId
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    priority: int = 0
    timeout_us: int = 0
    parameters: dict[str, str | int | bool | float] = {}
    traceparent: str = ""
    arrived_ns: int = 0
    keep_reply: bool = False
    own_sequence: bool = False
    cache_key: str = ""
    cache_bytes: int = 0
    flags: int = 0
    call: str = ""
    chain: tuple[str, ...] = ()
    deadline_ms: int = 0
    salt: int = 0


class ReplyMessage(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one request, built once, by the executor.

    error_code   a `shared.contract.errors.Code`, "" for success; then `error` is the text and `reason` (a `Reason` or
                 "") the cause. Both may be words of a newer release: a service that does not know them passes them on
    step         the step's number since its START; 0 for a stateless request
    number       of a decoupled model: which of the request's answers it is, from 1. An executor that runs the request
                 again after a takeover gives them the same numbers. 0: it is the only answer
    more         other answers follow
    empty        the last answer of a decoupled model that had none to give: it only says that no other follows
    notice       this is no answer: the step has its slot now, after so many ms (parameter WAITED_MS)
    salt         of `next_salt`; the last byte
    """

    version: str
    outputs: tuple[Tensor, ...] = ()
    error_code: str = ""
    error: str = ""
    reason: str = ""
    step: int = 0
    executor: str = ""
    parameters: dict[str, str | int | bool | float] = {}
    number: int = 0
    more: bool = False
    empty: bool = False
    notice: bool = False
    salt: int = 0


_salts = itertools.cycle(range(128))


def next_salt() -> int:
    """A number of one byte, another one each time.

    Lua in Redis finds a string that it is given by a hash of some of the string's bytes: of a string of 200 bytes each
    seventh, the last one first. Messages of one model often differ in other bytes only, and then lie in one list, which
    is gone through for each message. What differs at their end lets them lie in 128.
    """
    return next(_salts)


WAITED_MS = "sequence_waited_ms"
"""Parameter of a notice, and of the answer to a request that asked: how long the step waited for its slot."""


VersionNumber = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,19}\Z")]
"""A version, checked where it is read: gateways sort versions by their numbers."""


class ServedModel(msgspec.Struct, frozen=True):
    """One version of a model as an executor serves it.

    slots       per instance, 0 for stateless
    says_ready  whether the model calls itself ready; it is served in any case
    closing     it takes no new sequence; its sequences go on until they end
    pageable    its sequences give up their slots while other sequences wait
    idle_ms     no sequence expires sooner than this after its last step; 0: unknown
    mark        no state with another mark is gone on with (field `mk` of a record); "": states are not compared
    """

    model: str
    version: VersionNumber
    # The bound is checked where it is read: a scheduler makes tables for so many.
    instances: Annotated[int, msgspec.Meta(ge=0, le=INSTANCES_MAX)]
    slots: int
    says_ready: bool = True
    closing: bool = False
    pageable: bool = False
    idle_ms: int = 0
    mark: str = ""


UNLOADED = "unloaded"
"""Triton's reason for a version that was taken out of service, or that nobody has asked for."""


class RepositoryEntry(msgspec.Struct, frozen=True):
    """One line of the repository index: state READY, UNAVAILABLE, LOADING or UNLOADING; "" when never loaded."""

    model: str
    version: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{0,19}\Z")] = ""
    state: str = ""
    reason: str = ""


class LoadFailure(msgspec.Struct, frozen=True):
    """A control message that an executor could not carry out.

    entry       the message's id in the control stream; "" if the executor read it in the hash of wanted models
    code        a `shared.contract.errors.Code`
    found       False if this executor's repository has no such model; the repository of another executor may have it
    generation  the message's
    """

    entry: str
    model: str
    code: str
    error: str
    found: bool = True
    generation: str = ""


class ExecutorRegistration(msgspec.Struct, frozen=True):
    """What the mesh knows of an executor.

    leaving   it is stopping: its sequences are taken over at once, without waiting for the lease
    applied   entry id of the last control message up to which it has carried out all
    control_mode  none, explicit (it loads and unloads on request) or poll (it follows its repository's folders)
    failures  the latest control messages that it could not carry out, oldest first
    beyond    entry ids of control messages behind `applied` that it has carried out: one before them takes long
    """

    executor: ExecutorId
    name: str
    host: str
    pid: int
    started_ms: int
    models: tuple[ServedModel, ...] = ()
    repository: tuple[RepositoryEntry, ...] = ()
    leaving: bool = False
    applied: str = "0-0"
    control_mode: str = "none"
    failures: tuple[LoadFailure, ...] = ()
    beyond: tuple[str, ...] = ()

    def is_called(self, who: str) -> bool:
        """Whether an operator means this executor. who: a name, which several may have, or an id"""
        return who in (self.name, self.executor)


class ModelRecord(msgspec.Struct, frozen=True):
    """A loaded model, for gateways and schedulers, which have no repository.

    config_json  Triton's canonical JSON of the configuration
    versions     the versions that clients can ask for, ascending
    generation   which load of the model it is, the same on all executors; statistics begin at 0 with each load. "0" is
                 the load at start. Later loads are named by the control message, or by a digest of the polled files
    labels       output -> names of its classes by index, from the output's `label_filename`
    cache_scopes  version -> what its answers depend on, for the response cache; only if the model has it enabled
    """

    config: ModelConfig
    config_json: str
    versions: tuple[VersionNumber, ...]
    generation: str = "0"
    labels: dict[str, tuple[str, ...]] = {}
    cache_scopes: dict[str, str] = {}


class ControlMessage(msgspec.Struct, frozen=True):
    """The latest command about a model, for every executor: load it in this form, or unload it.

    action      load or unload
    files       override files (path in the model directory -> content)
    generation  which load it is, unique (`ModelRecord.generation`)
    """

    action: str
    model: str
    config_json: str = ""
    files: dict[str, bytes] = {}
    generation: str = "0"


class InboxStep(msgspec.Struct, frozen=True):
    """A step as its owner reads it from the inbox.

    entry      its id in the inbox; removed when a checkpoint covers the step
    flags      of `StepFlag`
    committed  the last committed step when this one was delivered
    version    the version that the sequence was pinned to at START, whatever the step's own message says
    cancelled  its caller had gone before it was delivered: it is not run (triton-spec 1.8)
    given_up   too many executors were lost with it: it is not run
    suspicion  number of owners that were lost with the sequence's next step, if they are enough to suspect it
    unreadable  its message cannot be read: it fails without being run
    """

    entry: str
    sequence: SequenceId
    step: StepNumber
    flags: int
    epoch: Epoch
    instance: InstanceIndex
    slot: SlotIndex
    committed: StepNumber
    version: str
    gateway: str
    token: str
    message: bytes
    cancelled: bool = False
    given_up: bool = False
    suspicion: int = 0
    unreadable: bool = False


class InboxExpired(msgspec.Struct, frozen=True):
    """Control message: the sequence of that epoch is over; the executor may drop its state.

    ended  it was not idle for too long: an operator or a client wanted that, or its record cannot be read
    """

    entry: str
    sequence: SequenceId
    epoch: Epoch
    ended: bool = False


class InboxCancelled(msgspec.Struct, frozen=True):
    """Control message: the caller of a delivered step has gone.

    Unless the step is already running, neither it nor the later steps are run (triton-spec 1.8).
    """

    entry: str
    sequence: SequenceId
    epoch: Epoch
    step: StepNumber


class InboxVacated(msgspec.Struct, frozen=True):
    """Control message: the sequence of that epoch has given up its slot between two steps.

    The owner of its next step restores its state.
    """

    entry: str
    sequence: SequenceId
    epoch: Epoch


class InboxOwned(msgspec.Struct, frozen=True):
    """Control message: this executor owns a sequence now that has no open step.

    It is only a hint, so that the state is loaded before the next step comes; that step says the same.

    committed  its last committed step
    version    the version that it is pinned to
    """

    entry: str
    sequence: SequenceId
    epoch: Epoch
    instance: InstanceIndex
    slot: SlotIndex
    committed: StepNumber
    version: str


InboxEntry = InboxStep | InboxExpired | InboxCancelled | InboxVacated | InboxOwned
"""What an inbox holds."""


def inbox_entry(entry: bytes, fields: Mapping[bytes, bytes]) -> InboxEntry:
    """Reads an inbox entry (fields: docs/reference/keys.md). Raises one of `shared.store.reading.FAILURES`."""
    kind = fields.get(b"k")
    if kind is None:
        return _inbox_step(entry, fields)
    sequence, epoch = SequenceId(fields[b"q"].decode()), Epoch(int(fields[b"e"]))
    match kind:
        case b"expired":
            return InboxExpired(entry.decode(), sequence, epoch, fields.get(b"d") == b"1")
        case b"vacated":
            return InboxVacated(entry.decode(), sequence, epoch)
        case b"cancelled":
            return InboxCancelled(entry.decode(), sequence, epoch, StepNumber(int(fields[b"s"])))
        case b"owned":
            return InboxOwned(
                entry=entry.decode(),
                sequence=sequence,
                epoch=epoch,
                instance=InstanceIndex(int(fields[b"i"])),
                slot=SlotIndex(int(fields[b"l"])),
                committed=StepNumber(int(fields[b"c"])),
                version=fields[b"v"].decode(),
            )
        case _:
            raise ValueError(f"a control message of an unknown kind: {kind!r}")


def _inbox_step(entry: bytes, fields: Mapping[bytes, bytes]) -> InboxStep:
    number, flags, gateway, token, sequence = fields[b"a"].decode().split(" ", 4)
    epoch, instance, slot, committed, version = fields[b"o"].decode().split(" ", 4)
    return InboxStep(
        entry=entry.decode(),
        sequence=SequenceId(sequence),
        step=StepNumber(int(number)),
        flags=int(flags) & EXECUTOR_FLAGS,
        epoch=Epoch(int(epoch)),
        instance=InstanceIndex(int(instance)),
        slot=SlotIndex(int(slot)),
        committed=StepNumber(int(committed)),
        version=version,
        gateway=gateway,
        token=token,
        message=fields[b"m"],
        cancelled=fields.get(b"x") == b"1",
        given_up=fields.get(b"x") == b"2",
        suspicion=int(fields.get(b"y", 0)),
    )


UNREADABLE = "the request cannot be read where the mesh stored it: it was not run"
"""The error for a request whose `InferMessage` cannot be decoded."""

_infer_decoder = msgspec.msgpack.Decoder(InferMessage)
_reply_decoder = msgspec.msgpack.Decoder(ReplyMessage)
_encoder = msgspec.msgpack.Encoder()

encode = _encoder.encode
"""Any message to bytes (msgpack)."""
decode_infer = _infer_decoder.decode
decode_reply = _reply_decoder.decode


def read_reply(raw: bytes) -> ReplyMessage:
    """Decodes a reply that a gateway can pass on.

    Raises what decoding raises, and ValueError for a reply that no client could read.
    """
    reply = decode_reply(raw)
    if reply.reason and not REASON.fullmatch(reply.reason):
        raise ValueError(f"no reason: {reply.reason[:64]!r}")
    if not 0 <= reply.step < 1 << 63:
        raise ValueError(f"no step: {reply.step}")
    if reply.notice and type(reply.parameters.get(WAITED_MS)) is not int:
        raise ValueError("a notice of no time")
    if reply.number < 0 or (reply.more and not reply.number):
        raise ValueError(f"no number of an answer: {reply.number}")
    for output in reply.outputs:
        check_tensor(output)
    return reply


REASON = re.compile(r"[a-z][a-z0-9_]{0,62}")
"""The form of every reason, also of newer releases: a reason is sent in headers, and in capitals in
google.rpc.ErrorInfo.
"""

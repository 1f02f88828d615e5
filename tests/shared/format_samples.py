"""Format 2.0: one value of everything that services write for each other, and how it is read.

`tests/fixtures/formats/2/recorded.json` holds the bytes that the first release of schema 2 writes for them. They are
never written anew: what they say must be read in the same way for as long as the schema is 2. A field that is added
later stands in ADDED, and not in the samples. `python -m tests.shared.format_samples` records those that are not there
yet, for a kind of message that is new.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from shared.contract import model_config as values
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, SlotIndex, StepNumber
from shared.contract.messages import (
    ControlMessage,
    ExecutorRegistration,
    InboxCancelled,
    InboxExpired,
    InboxOwned,
    InboxStep,
    InboxVacated,
    InferMessage,
    LoadFailure,
    ModelRecord,
    ReplyMessage,
    RepositoryEntry,
    ServedModel,
    StepFlag,
    decode_infer,
    decode_reply,
    encode,
    inbox_entry,
)
from shared.contract.state_fields import checkpointed_states
from shared.contract.tensors import Tensor
from shared.statistics.meter import Exemplar
from shared.statistics.reports import (
    CustomFamily,
    ExecutorReport,
    GpuReport,
    HostReport,
    ModelReport,
    Sample,
    decode_report,
    encode_report,
)
from shared.statistics.tally import MemoryUse, packed, unpacked
from shared.store.company import ServiceLine
from shared.store.keyspace import SCHEMA_VERSION
from shared.stored_settings import ChangedSettings, changed_settings_of

FILE = Path(__file__).parents[1] / "fixtures" / "formats" / str(SCHEMA_VERSION) / "recorded.json"
ADDED: Mapping[str, int] = {"ExecutorRegistration.beyond": 1, "InferMessage.salt": 1, "ReplyMessage.salt": 1}
"""`Class.field` of what came after format 2.0 -> the revision (`shared.store.release.REVISION`) that brought it."""

TENSOR = Tensor("X", "INT32", (1, 2), bytes(range(8)))
POLICY = values.QueuePolicy(values.TimeoutAction.DELAY, 11, True, 12)
CONFIG = values.ModelConfig(
    name="m",
    backend="python",
    platform="p",
    max_batch_size=8,
    inputs=(values.TensorSpec("X", "INT32", (-1, 2), True, True, (2,), "labels.txt"),),
    outputs=(values.TensorSpec("Y", "BYTES", (1,)),),
    default_model_filename="f.py",
    sequence_batching=values.SequenceBatching(
        strategy=values.Oldest(64, (4, 8), 5, preserve_ordering=True),
        idle_us=7,
        controls=(values.ControlSpec("S", values.ControlKind.START, "FP32", (0.0, 0.5)),),
        states=(values.StateSpec("I", "O", "FP32", (2,), (3,), "zero", same_buffer=True, growable=True),),
        iterative=True,
        implicit_start=True,
        describe_on_expiry=True,
        timeout_action=values.TimeoutAction.DELAY,
    ),
    dynamic_batching=values.DynamicBatching((4,), 9, True, 3, 2, POLICY, {1: POLICY}, own_timeouts=True),
    instance_groups=(values.InstanceGroup("g", "GPU", 2, (0, 1)),),
    parameters={"k": "v"},
    notes=("n",),
    batch_inputs=(values.BatchInput(next(iter(values.BatchInputKind)), ("B",), "FP32", "X"),),
    batch_outputs=(values.BatchOutput(("Y",), "X"),),
    warmup=(
        values.WarmupSample("w", 2, {"X": values.WarmupInput("INT32", (1,), values.WarmupSource.ZERO, "file")}, 3),
    ),
    response_cache=True,
    metric_tags={"t": "u"},
    histogram_buckets={"h": (0.5, 1.0)},
    state_methods=True,
    ensemble=(values.EnsembleStep("n", "3", {"I": "X"}, {"O": "Y"}),),
    decoupled=True,
    ensemble_inflight_max=6,
)
DIRECT = msgspec.structs.replace(
    CONFIG, sequence_batching=values.SequenceBatching(strategy=values.Direct(5, 0.5), idle_us=7)
)
SEQUENCE = SequenceId("m||i7")


def hash_of(**fields: bytes) -> bytes:
    """A hash of Redis, or the fields of a stream's entry, as one value."""
    return msgspec.msgpack.encode({name.encode(): value for name, value in fields.items()})


def read_hash(data: bytes) -> dict[bytes, bytes]:
    return msgspec.msgpack.decode(data, type=dict[bytes, bytes])


@dataclass(frozen=True)
class Recorded:
    """What is written, by today's code, and what reading it gives."""

    value: Any
    write: Callable[[], bytes]
    read: Callable[[bytes], Any]


def of_json(value: Any) -> Recorded:
    return Recorded(
        value, lambda: msgspec.json.encode(value), lambda data: msgspec.json.decode(data, type=cast("Any", type(value)))
    )


def inbox(value: Any, **fields: bytes) -> Recorded:
    """An entry as the scripts write it."""
    return Recorded(value, lambda: hash_of(**fields), lambda data: inbox_entry(b"5-1", read_hash(data)))


INFER = InferMessage(
    model="m",
    version="2",
    request_id="r",
    correlation_id="c",
    inputs=(TENSOR,),
    outputs=("Y",),
    priority=1,
    timeout_us=2,
    parameters={"s": "t", "i": -3, "b": True, "f": 0.5},
    traceparent="00-1-2-01",
    arrived_ns=4,
    keep_reply=True,
    own_sequence=True,
    cache_key="k",
    cache_bytes=5,
    flags=3,
    call="c",
    chain=("a", "b"),
    deadline_ms=6,
)
REPLY = ReplyMessage(
    "2", (TENSOR,), "INTERNAL", "text", "lost", 6, "executor-1-ab", {"p": 1}, 2, more=True, empty=True, notice=True
)
SERVED = ServedModel("m", "2", 1, 4, False, True, True, 7, "mark")
REGISTRATION = ExecutorRegistration(
    executor=ExecutorId("executor-1-ab"),
    name="executor-1",
    host="h",
    pid=1,
    started_ms=2,
    models=(SERVED,),
    repository=(RepositoryEntry("m", "2", "READY", "why"),),
    leaving=True,
    applied="3-0",
    control_mode="explicit",
    failures=(LoadFailure("4-0", "m", "NOT_FOUND", "text", found=False, generation="g"),),
)
REPORT = ExecutorReport(
    "executor-1-ab",
    "h",
    HostReport(0.5, 2, 1),
    (ModelReport("m", "2", 3, 0.5, (MemoryUse("GPU", 1, 9),), (4, 2), (Exemplar("e", 1, "t", 2, 3),)),),
    (GpuReport("u", 0.5, 2, 1, 3.0, 4.0, 5.0),),
    (CustomFamily("c", "counter", "help", (Sample("_sum", {"l": "v"}, 1.5),)),),
)
SAMPLES: Mapping[str, Recorded] = {
    "request": Recorded(INFER, lambda: encode(INFER), decode_infer),
    "reply": Recorded(REPLY, lambda: encode(REPLY), decode_reply),
    "checkpoint": Recorded(
        {"X": TENSOR},
        lambda: msgspec.msgpack.encode({b"s:X": encode(TENSOR)}),
        lambda data: checkpointed_states(read_hash(data)),
    ),
    "registration": of_json(REGISTRATION),
    "model": of_json(ModelRecord(CONFIG, '{"name":"m"}', ("1", "2"), "g", {"Y": ("cat",)}, {"2": "scope"})),
    "direct model": of_json(ModelRecord(DIRECT, "{}", ("1",))),
    "control": Recorded(
        ControlMessage("load", "m", "{}", {"1/model.py": b"\0"}, "g"),
        lambda: encode(ControlMessage("load", "m", "{}", {"1/model.py": b"\0"}, "g")),
        lambda data: msgspec.msgpack.decode(data, type=ControlMessage),
    ),
    "report": Recorded(REPORT, lambda: encode_report(REPORT), decode_report),
    "service": of_json(ServiceLine("gateway", "gateway-1", "0.1.0", "2.0", 5, "h", "grpc://h:1")),
    "tally": Recorded({"success_count": 1}, lambda: packed({"success_count": 1}), unpacked),
    "settings": Recorded(
        ChangedSettings({"log_info": False}, {"m": {"trace_level": ("OFF",)}, "": {"trace_rate": 5}}),
        lambda: hash_of(
            **{"log:log_info": b"false", "trace:trace_level:m": b'["OFF"]', "trace:trace_rate:": b"5"}
        ),
        lambda data: changed_settings_of(read_hash(data), "settings"),
    ),
    "inbox step": inbox(
        InboxStep(
            entry="5-1",
            sequence=SEQUENCE,
            step=StepNumber(3),
            flags=StepFlag.START | StepFlag.END,
            epoch=Epoch(2),
            instance=InstanceIndex(1),
            slot=SlotIndex(4),
            committed=StepNumber(2),
            version="2",
            gateway="g",
            token="t",
            message=b"m",
            cancelled=True,
            suspicion=2,
        ),
        a=b"3 3 g t m||i7", o=b"2 1 4 2 2", m=b"m", x=b"1", y=b"2",
    ),
    "inbox expired": inbox(InboxExpired("5-1", SEQUENCE, Epoch(2)), k=b"expired", q=b"m||i7", e=b"2"),
    "inbox vacated": inbox(InboxVacated("5-1", SEQUENCE, Epoch(2)), k=b"vacated", q=b"m||i7", e=b"2"),
    "inbox cancelled": inbox(
        InboxCancelled("5-1", SEQUENCE, Epoch(2), StepNumber(3)), k=b"cancelled", q=b"m||i7", e=b"2", s=b"3"
    ),
    "inbox owned": inbox(
        InboxOwned("5-1", SEQUENCE, Epoch(2), InstanceIndex(1), SlotIndex(4), StepNumber(2), "2"),
        k=b"owned", q=b"m||i7", e=b"2", i=b"1", l=b"4", c=b"2", v=b"2",
    ),
}  # fmt: skip


def recorded() -> dict[str, bytes]:
    """The bytes of each sample, as the first release of this schema wrote them."""
    return {name: base64.b64decode(text) for name, text in json.loads(FILE.read_text()).items()}


if __name__ == "__main__":
    known: dict[str, str] = json.loads(FILE.read_text()) if FILE.exists() else {}
    new = {name: base64.b64encode(sample.write()).decode() for name, sample in SAMPLES.items() if name not in known}
    FILE.write_text(json.dumps(known | new, indent=1) + "\n")

"""Ids of traces and spans: W3C trace context, ids derived from sequences, and the decision which traces are sampled.
Pure.

A sequence's trace must be found while the sequence still runs, by people and by services that never spoke to each
other. So its trace id is a hash of the sequence id, and so is the id of its root span: both follow from the sequence,
and need not be stored or sent. `Sampler.samples` looks at the trace id alone, so every service decides the same, and
a sequence is sampled whole or not at all.

A client that uses one correlation id for several sequences, one after the other, gets one trace for all of them,
because the correlation id is all that the client has when it looks the trace up. Each of these runs has its own
`sequence.start` span (see `shared.traces.tracing`).

Source: https://www.w3.org/TR/trace-context/ (traceparent), OpenTelemetry's TraceIdRatioBased (sampling by the low 64
bits of the trace id), https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from shared.contract.ids import CorrelationId, Epoch, SequenceId, sequence_id
from shared.process import logs

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
TRACESTATE_MEMBER = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
"""As in the first level of the standard. OpenTelemetry's SDK logs what else clients send, and drops it."""
TRACESTATE_MEMBERS_MAX = 32
TRACESTATE_CHARS_MAX = 512
"""Length that the standard asks every service to pass on; a longer tracestate is dropped."""
SAMPLED_FLAG = 1
LOW_64_BITS = (1 << 64) - 1
ALWAYS = 1 << 64
"""A bound that every trace id is below."""
DEFAULT_SAMPLER = "parentbased_always_on"


@dataclass(frozen=True, slots=True)
class ClientContext:
    """A client's `traceparent` and `tracestate`. trace_state: as it came, "" if there was no valid one"""

    trace_id: int
    span_id: int
    sampled: bool
    trace_state: str


def traceparent(trace_id: int, span_id: int) -> str:
    """W3C text of a sampled span's context."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"


def parse(text: str) -> tuple[int, int]:
    """Trace id and span id of a traceparent that this mesh wrote itself; zeros, which are no trace's, for any other
    text. It comes with steps and checkpoints, and is read where nobody could be told.
    """
    match = TRACEPARENT.fullmatch(text)
    return (int(match[2], 16), int(match[3], 16)) if match else (0, 0)


def client_context(headers: Mapping[str, str]) -> ClientContext | None:
    """The client's context; None if it sent none, or an invalid one (which is no error).

    headers  with lower-case names; only `traceparent` and `tracestate` are read
    source   W3C Trace Context 2.2.2, 3.2, 4.3: a later version's extra fields are ignored, version ff is invalid
    """
    text = headers.get("traceparent")
    match = TRACEPARENT.fullmatch(text.strip()) if text else None
    # Version 00 has exactly four fields; later versions may have more.
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if trace_id == 0 or span_id == 0:
        return None
    return ClientContext(trace_id, span_id, bool(int(match[4], 16) & SAMPLED_FLAG), _trace_state(headers))


def _trace_state(headers: Mapping[str, str]) -> str:
    text = headers.get("tracestate", "")
    if not text or len(text) > TRACESTATE_CHARS_MAX:
        return ""
    members = [member.strip(" \t") for member in text.split(",")]
    named = [member for member in members if member]
    if not 0 < len(named) <= TRACESTATE_MEMBERS_MAX:
        return ""
    return text if all(TRACESTATE_MEMBER.fullmatch(member) for member in named) else ""


def sequence_trace_id(sequence: SequenceId) -> int:
    """128-bit id of a sequence's trace; the same in every process and every release."""
    return xxhash.xxh3_128_intdigest(sequence.encode()) or 1


def sequence_root_id(sequence: SequenceId) -> int:
    """64-bit id of the root span of a sequence's trace."""
    return xxhash.xxh3_64_intdigest(sequence.encode()) or 1


def takeover_id(sequence: SequenceId, epoch: Epoch) -> int:
    """64-bit id of the span of the takeover that gave a sequence this epoch (an epoch is given once per shard)."""
    return xxhash.xxh3_64_intdigest(f"{sequence}@{epoch}".encode()) or 1


def sequence_traceparent(sequence: SequenceId) -> str:
    """The root context of a sequence's trace. Whether it is sampled, `Sampler.samples` says."""
    return traceparent(sequence_trace_id(sequence), sequence_root_id(sequence))


def takeover_traceparent(sequence: SequenceId, epoch: Epoch) -> str:
    """Context of the takeover's span. The new owner links its first span to it, without having been told."""
    return traceparent(sequence_trace_id(sequence), takeover_id(sequence, epoch))


def describe(model: str, version: str, correlation_id: CorrelationId) -> str:
    """Trace id of a client's sequence, 32 hex digits, as tracing tools search for it.

    version         the version that the client asks for, "" if it names none
    correlation_id  typed as the client sends it: 42 and "42" are different sequences
    """
    return f"{sequence_trace_id(sequence_id(model, version, correlation_id)):032x}"


def new_trace_id() -> int:
    """A random trace id, for a request that belongs to no sequence and brings no context."""
    return random.getrandbits(128) or 1


def new_span_id() -> int:
    return random.getrandbits(64) or 1


@dataclass(frozen=True, slots=True)
class Sampler:
    """Which traces are recorded.

    bound         a trace is sampled if the low 64 bits of its id are below this; 0 is never, `ALWAYS` is always
    parent_based  a request that belongs to no sequence follows its client's decision instead, if there is one.
                  A sequence has many clients' spans in it, so its own id decides in any case
    """

    bound: int = ALWAYS
    parent_based: bool = True

    def samples(self, trace_id: int) -> bool:
        """Whether a trace is recorded, by its id alone."""
        return trace_id & LOW_64_BITS < self.bound

    def samples_request(self, trace_id: int, client: ClientContext | None) -> bool:
        """Whether a request without a sequence is recorded."""
        if self.parent_based and client is not None:
            return client.sampled
        return self.samples(trace_id)


def sampler_from(environment: Mapping[str, str]) -> Sampler:
    """The sampler that OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG name.

    An unknown name, or a ratio that is none, is logged and replaced by the default, as the standard asks.
    """
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower() or DEFAULT_SAMPLER
    kind = name.removeprefix("parentbased_")
    parent_based = kind != name
    if kind == "always_on":
        return Sampler(ALWAYS, parent_based)
    if kind == "always_off":
        return Sampler(0, parent_based)
    if kind == "traceidratio":
        return Sampler(round(_ratio(environment.get("OTEL_TRACES_SAMPLER_ARG", "")) * ALWAYS), parent_based)
    logs.warning("unknown sampler, the default is used", OTEL_TRACES_SAMPLER=name, default=DEFAULT_SAMPLER)
    return Sampler()


def _ratio(text: str) -> float:
    try:
        ratio = float(text or "1")
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        logs.warning("sampling ratio is no number between 0 and 1, 1 is used", OTEL_TRACES_SAMPLER_ARG=text)
        return 1.0
    return ratio

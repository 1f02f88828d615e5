"""What the clients will do: an endless list of sequences. Pure: the same seed gives the same list.

Short and long ones, over every protocol, named by number or by request id, some with several open steps, some whose
client hangs up, some that stay silent for longer than their model allows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from deploy.chaos.faults import ChaosPlan, Fault
from deploy.chaos.models import FILLED, VARIANTS

ProtocolName = Literal["http", "grpc", "client", "stream"]
PROTOCOL_WEIGHTS: Mapping[ProtocolName, int] = {"http": 2, "grpc": 2, "client": 3, "stream": 4}
"""Streams are the cheapest protocol, so they carry most steps. `client` is seqmesh_client, over streams."""
VALUE_BITS = 40
NAMED_STEPS_MAX = 60
"""The mesh knows a sequence's last 64 request ids: a client that may be late by more steps numbers them."""
STREAM_WINDOW_MAX = 8
"""The mesh keeps the replies of a sequence's last 8 steps."""
UNARY_WINDOW_MAX = 3
"""Steps that are sent at once over several connections arrive in any order: those that come too early are refused, and
sent again."""
IDLE_FACTOR = 1.5
"""Length of a silence that must end a sequence, as a multiple of its model's idle time."""


class Script(msgspec.Struct, frozen=True, gc=False):
    """One sequence to be played.

    numbered    steps carry `sequence_step`; otherwise a request id each, and only START its number as well
    window      steps that may be open at the same time
    pause_s     mean pause before each step
    patience_s  an answer that takes longer is asked for again, through another gateway
    hang_ups    steps (from 1) at which the client hangs up as soon as they are sent
    silent_at   the step (from 1) before which the client is silent for longer than the model allows; 0: none
    ends        whether the last step is END; otherwise the sequence is left to expire
    """

    index: int
    correlation_id: int | str
    model: str
    protocol: ProtocolName
    numbered: bool
    window: int
    values: tuple[int, ...]
    pause_s: float
    patience_s: float
    hang_ups: tuple[int, ...] = ()
    silent_at: int = 0
    ends: bool = True


def script(seed: int, index: int, *, run: str, steps_max: int, protocols: Sequence[ProtocolName]) -> Script:
    """The sequence with that index.

    run        made part of the correlation id, so that runs on the same mesh do not meet
    steps_max  bound of its length
    protocols  those that the gateways offer
    """
    chance = random.Random(f"sequence {seed} {index}")
    (model,) = chance.choices(VARIANTS, [one.weight for one in VARIANTS])
    (protocol,) = chance.choices(protocols, [PROTOCOL_WEIGHTS[name] for name in protocols])
    numbered = chance.random() < 0.6 or protocol == "client"
    silent = model.idle_s < 10
    length = min(steps_max, length_of(chance, numbered=numbered, short=silent))
    hangs_up = chance.random() < 0.15
    return Script(
        index=index,
        # A text, or a number that no other run has.
        correlation_id=f"{run}/{index}" if chance.random() < 0.5 else (int(run, 36) << 24) + index + 1,
        model=model.name,
        protocol=protocol,
        numbered=numbered,
        window=window_of(chance, protocol, numbered=numbered),
        values=tuple(chance.getrandbits(VALUE_BITS) for _ in range(length)),
        pause_s=chance.choice((0.0, 0.0, 0.0, 0.005, 0.05)),
        patience_s=chance.uniform(3.0, 9.0),
        hang_ups=tuple(sorted(chance.sample(range(1, length + 1), min(length, 1 + length // 100)))) if hangs_up else (),
        silent_at=chance.randint(2, length) if silent and length > 1 and chance.random() < 0.5 else 0,
        ends=chance.random() < 0.97,
    )


def filler(plan: ChaosPlan, fault: Fault, position: int, protocol: ProtocolName) -> Script:
    """One of the sequences that take the slots of `FILLED`: three steps with a long pause between them."""
    chance = random.Random(f"filler {plan.seed} {fault.number} {position}")
    return Script(
        index=-1 - fault.number * 10_000 - position,
        correlation_id=f"{plan.run}/fill {fault.number}/{position}",
        model=FILLED,
        protocol=protocol,
        numbered=True,
        window=1,
        values=tuple(chance.getrandbits(VALUE_BITS) for _ in range(3)),
        pause_s=fault.seconds / 2,
        patience_s=15.0,
    )


def length_of(chance: random.Random, *, numbered: bool, short: bool) -> int:
    """Steps of a sequence: mostly few, sometimes hundreds."""
    kind = chance.random()
    if short or kind < 0.3:
        return chance.randint(1, 6)
    if not numbered or kind < 0.85:
        return chance.randint(10, NAMED_STEPS_MAX)
    return chance.randint(100, 600)


def window_of(chance: random.Random, protocol: ProtocolName, *, numbered: bool) -> int:
    """How many steps are open at once: one, mostly. Unary calls need numbers for more than one."""
    if chance.random() < 0.5:
        return 1
    if protocol in ("client", "stream"):
        return chance.randint(2, STREAM_WINDOW_MAX)
    return chance.randint(2, UNARY_WINDOW_MAX) if numbered else 1

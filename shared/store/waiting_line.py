"""Counts of the models' waiting lines and live sequences. The scripts that change the lines keep their counts, so that
reading costs the same however long a line is.

A field of the hash (`count_line` in common.lua) is a number of one shard; here the shards are added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.reading import counter, text_of, value_of

TAKEOVER_CAUSES = ("lost", "leaving", "moved")
"""Why a sequence was taken from its owner: the owner had died; it was leaving; or the sequence moved to another
slot.
"""
ENDS = {"e": "end", "x": "expired", "f": "failed", "o": "lost", "c": "cancelled", "r": "rejected"}
"""Why a sequence is over, by the state of its tombstone (common.lua); `r`: it waited too long for its first slot."""


@dataclass(slots=True)
class WaitingLine:
    """The counts of one model's line, by version but for `first`.

    first      sequences that wait for their first slot
    steps      steps that wait together with their sequences for a slot
    paged_out  how often a sequence gave up its slot, ever
    paged_in   how often such a sequence wanted a slot again, ever
    paged      live sequences without a slot that want none now
    taken_over  how often a sequence was taken from its owner, ever, by version and cause (`TAKEOVER_CAUSES`)
    refused    steps whose commit was refused, ever, because the executor was not the owner any more
    begun      sequences that began, ever
    over       sequences that are over, ever, by version and reason (`ENDS`)
    """

    first: int = 0
    steps: Counter[str] = field(default_factory=Counter[str])
    paged_out: Counter[str] = field(default_factory=Counter[str])
    paged_in: Counter[str] = field(default_factory=Counter[str])
    paged: Counter[str] = field(default_factory=Counter[str])
    taken_over: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    refused: Counter[str] = field(default_factory=Counter[str])
    begun: Counter[str] = field(default_factory=Counter[str])
    over: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def add(self, name: str, number: int) -> None:
        """Adds a field of the hash."""
        kind, _, version = name.partition(":")
        if kind == "w":
            self.first += number
        elif kind == "s":
            self.steps[version] += number
        elif kind == "out":
            self.paged_out[version] += number
            self.paged[version] += number
        elif kind == "in":
            self.paged_in[version] += number
            self.paged[version] -= number
        elif kind == "gone":
            self.paged[version] -= number
        elif kind in TAKEOVER_CAUSES:
            self.taken_over[version, kind] += number
        elif kind == "refused":
            self.refused[version] += number
        elif kind == "begun":
            self.begun[version] += number
        elif kind.startswith("over_") and (reason := ENDS.get(kind.removeprefix("over_"))):
            self.over[version, reason] += number


async def read_lines(redis: Redis, keys: Keyspace, models: Sequence[str]) -> dict[str, WaitingLine]:
    """The lines of these models, in one round trip. Raises one of `CONNECTION_LOST`."""
    pipe = redis.pipeline(transaction=False)
    lines = {model: WaitingLine() for model in models}
    asked = [(model, shard) for model in models for shard in keys.shards]
    for model, shard in asked:
        pipe.hgetall(keys.line(shard, model))
    replies: list[dict[bytes, bytes]] = await pipe.execute()
    for (model, shard), numbers in zip(asked, replies, strict=True):
        for name, data in numbers.items():
            number = value_of(keys.line(shard, model), data, counter, field=text_of(name))
            if number is not None:
                lines[model].add(text_of(name), number)
    return lines


async def read_live(redis: Redis, keys: Keyspace, models: Sequence[str]) -> dict[str, int]:
    """How many sequences of each model live, in a slot or without one. Raises one of `CONNECTION_LOST`."""
    pipe = redis.pipeline(transaction=False)
    for model in models:
        for shard in keys.shards:
            pipe.zcard(keys.deadlines(shard, model))
    counts = iter(await pipe.execute())
    return {model: sum(next(counts) for _ in keys.shards) for model in models}


async def read_queued(redis: Redis, keys: Keyspace, places: Sequence[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """The stateless requests that no executor has taken yet, by model and version. Raises one of `CONNECTION_LOST`."""
    pipe = redis.pipeline(transaction=False)
    for place in places:
        pipe.zcard(keys.work_queue(*place).queue)
    return dict(zip(places, await pipe.execute(), strict=True))

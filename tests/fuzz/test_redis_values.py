"""Spoilt values in Redis, a short run: every kind of key once; `make fuzz` plays longer ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shared.store.keyspace import TYPES
from tests.fuzz.redis_values import DISTURBS, HARMLESS, OWN, fuzzer

SEED = 1


def test_it_is_said_of_every_kind_of_key_whom_it_may_disturb() -> None:
    assert set(TYPES) == OWN | DISTURBS | HARMLESS
    assert len(TYPES) == len(OWN) + len(DISTURBS) + len(HARMLESS)


@pytest.mark.timeout(600)
async def test_a_value_that_cannot_be_read_is_nobody_elses_matter(tmp_path: Path) -> None:
    """What belongs to one sequence, or to nobody, is tried one after the other; what disturbs others only in part: a
    takeover takes its time (`make fuzz` tries all)."""
    async with fuzzer(tmp_path) as values:
        for number, kind in enumerate(sorted(OWN | HARMLESS)):
            await values.attack(random.Random(SEED + number), kind)
            await values.health()
        for number, kind in enumerate(("epoch", "feed", "work:meta", "executors", "models")):
            await values.attack(random.Random(SEED + number), kind)
            await values.health()

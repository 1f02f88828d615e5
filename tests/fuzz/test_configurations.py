"""Broken configurations, a short run; `make fuzz` plays longer ones."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.configurations import fuzzer
from tests.fuzz.fuzzing import fuzz


async def test_a_broken_configuration_is_refused_with_a_reason(tmp_path: Path) -> None:
    async with fuzzer(tmp_path) as configurations:
        found = await fuzz(configurations, seed=1, inputs=1500)

    assert [] == found.failures
    assert 1500 == found.inputs
    assert configurations.accepted > 50, "hardly anything was accepted: the mutations have become too rough"

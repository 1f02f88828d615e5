"""Broken HTTP requests, a short run; `make fuzz` plays longer ones."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from gateway.settings import HttpParser
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.http_requests import fuzzer

INPUTS = 300


@pytest.mark.parametrize("parser", get_args(HttpParser))
async def test_a_broken_request_harms_nobody(tmp_path: Path, parser: HttpParser) -> None:
    async with fuzzer(tmp_path, parser) as requests:
        found = await fuzz(requests, seed=1, inputs=INPUTS)

    assert [] == found.failures
    assert INPUTS == found.inputs
    assert requests.heard[200] > INPUTS // 20, "hardly anything was accepted: the mutations have become too rough"
    assert requests.heard[400] > INPUTS // 20, "hardly anything was refused: the mutations have become too gentle"

"""Broken gRPC messages and connections, a short run; `make fuzz` plays longer ones."""

from __future__ import annotations

from pathlib import Path

import grpc

from tests.fuzz.fuzzing import fuzz
from tests.fuzz.grpc_messages import fuzzer

INPUTS = 600


async def test_a_broken_message_harms_nobody(tmp_path: Path) -> None:
    async with fuzzer(tmp_path) as messages:
        found = await fuzz(messages, seed=1, inputs=INPUTS)

    assert [] == found.failures
    assert INPUTS == found.inputs
    assert messages.heard[grpc.StatusCode.OK] > INPUTS // 20, "hardly anything was accepted"
    assert messages.heard[grpc.StatusCode.INVALID_ARGUMENT] > INPUTS // 20, "hardly anything was refused"

"""Open steps that come to another ownership, on a real executor: what their callers hear there."""

from __future__ import annotations

import numpy as np
import pytest

from shared.contract.messages import StepFlag
from shared.contract.tensors import to_numpy
from tests.executor.living import Running
from tests.scripted_mesh import ScriptedMesh

SEQUENCE = 7
START, NONE = StepFlag.START, StepFlag.NONE
pytestmark = pytest.mark.leaves_sequences


@pytest.mark.parametrize(
    "runs",
    [
        [[START, NONE], [NONE, NONE, START, NONE]],
        [[START, NONE], [START, NONE, NONE], [NONE, START, NONE, START, START, NONE]],
        [[START, NONE], [NONE, START], [START, NONE], [NONE, START, NONE]],
    ],
    ids=["a later start", "a start behind which nothing was open, and several", "a start behind each move"],
)
async def test_each_step_is_answered_with_its_number_whatever_start_was_accepted_behind_it(
    mesh: ScriptedMesh, executor: Running, runs: list[list[StepFlag]]
) -> None:
    """runs: the steps that are open together when the sequence comes to its owner, each time anew."""
    number = 0
    heard: list[tuple[int, int]] = []
    wanted: list[tuple[int, int]] = []
    for moves, flags in enumerate(runs):
        if moves:
            assert await mesh.pause(SEQUENCE)
        steps = [mesh.submission(SEQUENCE, {"INPUT": np.array([[1]], np.int32)}, flag) for flag in flags]
        for step in steps:
            await mesh.submit(step)
        if moves:
            assert await mesh.resume(SEQUENCE)
        await mesh.assign(SEQUENCE, executor.executor)
        for step, flag in zip(steps, flags, strict=True):
            number = 1 if flag & START else number + 1
            wanted.append((number, number))
            reply = await mesh.reply(step)
            heard.append((reply.step, int(to_numpy(reply.outputs[0]).item())))

    assert wanted == heard

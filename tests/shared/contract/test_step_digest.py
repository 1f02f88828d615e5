"""A step that is sent again is the same one, or it is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shared.contract.messages import StepFlag
from shared.contract.step_digest import DIGEST_BYTES, step_digest
from shared.contract.tensors import Tensor

INPUTS = (Tensor("A", "INT8", (2,), b"ab"), Tensor("B", "INT8", (1,), b"c"))
DIGEST = step_digest("1", StepFlag.START, INPUTS)


def test_the_same_request_has_the_same_digest_whatever_else_its_step_is_flagged_with() -> None:
    assert DIGEST_BYTES == len(DIGEST)
    assert DIGEST == step_digest("1", StepFlag.START | StepFlag.DURABLE | StepFlag.TOLD, list(INPUTS))
    assert b"" == step_digest("", StepFlag.START, INPUTS), "nobody asks again without a request id"


@pytest.mark.parametrize(
    ("request_id", "flags", "inputs"),
    [
        ("2", StepFlag.START, INPUTS),
        ("1", StepFlag.NONE, INPUTS),
        ("1", StepFlag.START | StepFlag.END, INPUTS),
        ("1", StepFlag.START, INPUTS[:1]),
        ("1", StepFlag.START, INPUTS[::-1]),
        ("1", StepFlag.START, (Tensor("A", "INT8", (2,), b"ab"), Tensor("B", "INT8", (1,), b"d"))),
        ("1", StepFlag.START, (Tensor("A", "INT8", (1,), b"a"), Tensor("B", "INT8", (2,), b"bc"))),
        ("1", StepFlag.START, (Tensor("A", "UINT8", (2,), b"ab"), INPUTS[1])),
        ("1", StepFlag.START, (Tensor("A", "INT8", (2, 1), b"ab"), INPUTS[1])),
    ],
)
def test_other_inputs_another_id_or_another_place_in_the_run_make_another_step(
    request_id: str, flags: StepFlag, inputs: Sequence[Tensor]
) -> None:
    assert step_digest(request_id, flags, inputs) != DIGEST

"""Why a step was refused, in words."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from gateway.requests.admission import Admitted
from gateway.requests.infer_call import InferCall
from gateway.requests.refusals import refusal
from gateway.requests.waiting import Answer, PendingRequest
from shared.contract.errors import Reason
from shared.contract.ids import sequence_id
from shared.contract.messages import InferMessage, ModelRecord
from shared.store.script_values import SubmitCode, Submitted
from tests.gateway.fake_executor import running_sum

REPLAYED = {"sequence_recovery": "replay", "sequence_log_steps": "7"}


def pending(parameters: dict[str, str]) -> PendingRequest:
    """A step of sequence 5 of a model with these parameters."""
    config = msgspec.structs.replace(running_sum("model"), parameters=parameters)
    admitted = Admitted(InferMessage("model", "1", "", 5, ()), sequence=sequence_id("model", "", 5))
    future = cast("asyncio.Future[Answer]", None)
    return PendingRequest(
        InferCall("model"),
        ModelRecord(config, "{}", ("1",)),
        admitted,
        future,
        shard=cast(Any, 0),
        token="1",
    )


@pytest.mark.parametrize(
    ("parameters", "remedy"),
    [
        (REPLAYED, "7 steps and 16777216 bytes since START are kept"),
        (REPLAYED, "raise the model's parameters sequence_log_steps and sequence_log_bytes"),
        ({}, "name a sequence_recovery"),
    ],
)
def test_a_lost_sequence_s_refusal_names_what_would_keep_the_next_one(parameters: dict[str, str], remedy: str) -> None:
    error = refusal(pending(parameters), Submitted(SubmitCode.LOST, 9))

    assert (Reason.LOST, 9) == (error.reason, error.last_step)
    assert "the sequence's state was lost: its executor ended, its model was loaded anew, or" in error.message
    assert "; its last step was 9; " in error.message
    assert remedy in error.message


@pytest.mark.parametrize("code", [code for code in SubmitCode if code < 0])
def test_every_code_of_a_refusal_has_the_reason_of_its_name(code: SubmitCode) -> None:
    error = refusal(pending({}), Submitted(code, 9, extra=b"7"))

    assert (code.name.lower(), 9) == (error.reason, error.last_step)
    assert "sequence 5" in error.message
    assert "model 'model'" in error.message


def test_an_expired_sequence_is_told_which_setting_bounds_its_idle_time() -> None:
    error = refusal(pending({}), Submitted(SubmitCode.EXPIRED, 3))

    assert Reason.EXPIRED is error.reason
    assert "idle for too long (max_sequence_idle_microseconds of its model)" in error.message
    assert "its last step was 3" in error.message

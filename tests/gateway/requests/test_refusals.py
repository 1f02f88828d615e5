"""Why a step was refused, in words."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from gateway.requests.admission import TOLD
from gateway.requests.infer_call import InferCall
from gateway.requests.refusals import refusal
from gateway.requests.waiting import Answer
from shared.contract.errors import Code, Reason, SequenceError
from shared.contract.messages import WAITED_MS, ReplyMessage, encode
from shared.store.script_values import SubmitCode, Submitted
from tests.gateway.fake_executor import running_sum
from tests.gateway.requests.portless import pending

REPLAYED = {"sequence_recovery": "replay", "sequence_log_steps": "7"}


MODEL = running_sum("model")


@pytest.mark.parametrize(
    ("parameters", "remedy"),
    [
        (REPLAYED, "7 steps and 16777216 bytes since START are kept"),
        (REPLAYED, "raise the model's parameters sequence_log_steps and sequence_log_bytes"),
        ({}, "name a sequence_recovery"),
    ],
)
def test_a_lost_sequence_s_refusal_names_what_would_keep_the_next_one(parameters: dict[str, str], remedy: str) -> None:
    error = refusal(pending(msgspec.structs.replace(MODEL, parameters=parameters)), Submitted(SubmitCode.LOST, 9))

    assert (Reason.LOST, 9) == (error.reason, error.last_step)
    assert (
        "the sequence's state was lost: its executor ended, its model was unloaded or loaded anew, or" in error.message
    )
    assert "; its last step was 9; " in error.message
    assert remedy in error.message


async def test_who_is_taken_back_just_when_it_gets_its_slot_hears_that_it_would_have_waited_too_long() -> None:
    """Its owner cancels the step before it runs, and says so without a word."""
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    step = pending(MODEL, flags=TOLD, future=future)
    assert step.wait is not None
    step.wait.refusal = SequenceError("it would wait too long", Reason.WAIT_TOO_LONG)
    step.answered(encode(ReplyMessage("1", parameters={WAITED_MS: 7}, notice=True)), "key")

    step.answered(encode(ReplyMessage("1", error_code=Code.CANCELLED)), "key")

    assert step.wait.refusal is future.exception()


@pytest.mark.parametrize("code", [code for code in SubmitCode if code < 0])
def test_every_code_of_a_refusal_has_the_reason_of_its_name(code: SubmitCode) -> None:
    error = refusal(pending(MODEL), Submitted(code, 9, extra=b"7"))

    assert (code.name.lower(), 9) == (error.reason, error.last_step)
    assert "sequence 5" in error.message
    assert "model 'model'" in error.message


@pytest.mark.parametrize(
    ("code", "extra", "text"),
    [
        (SubmitCode.BACKLOG_FULL, b"", "the backlog of model 'model' is full: sequence 5 was not started, try again"),
        (SubmitCode.BACKLOG_FULL, b"live", "model 'model' has as many live sequences as it may: sequence 5 was not"),
        (SubmitCode.QUOTA, b"", "tenant '' has as many live sequences as it may: sequence 5 of model 'model' was not"),
        (SubmitCode.BUSY, b"", "too many open steps: wait for an answer, then try again"),
        (SubmitCode.LATE, b"", "it is not known whether this step of sequence 5 of model 'model' was accepted"),
        (SubmitCode.ANSWERED, b"", "step 2 of sequence 5 of model 'model' was answered, and its answer is kept no"),
        (SubmitCode.EXISTS, b"", "sequence 5 of model 'model' exists: its last step was 9"),
        (SubmitCode.WRONG_STEP, b"", "expects step 10 next, but the request is step 2"),
        (SubmitCode.NEVER_SEEN, b"", "must specify the START flag on the first request of the sequence"),
        (SubmitCode.ENDED, b"", "of the sequence (the sequence has ended; its last step was 9)"),
        (SubmitCode.FAILED, b"", "(the sequence's START failed in the model, or a step of its ensemble did)"),
        (SubmitCode.CANCELLED, b"", "(the sequence was cancelled; its last step was 9)"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_to_do(code: SubmitCode, extra: bytes, text: str) -> None:
    step = pending(MODEL)
    step.call = InferCall("model", expected_step=2)

    assert text in refusal(step, Submitted(code, 9, extra=extra)).message


def test_an_expired_sequence_is_told_which_setting_bounds_its_idle_time() -> None:
    error = refusal(pending(MODEL), Submitted(SubmitCode.EXPIRED, 3))

    assert Reason.EXPIRED is error.reason
    assert "idle for too long (max_sequence_idle_microseconds of its model)" in error.message
    assert "its last step was 3" in error.message

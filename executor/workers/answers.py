"""Builds the replies of the executor, as the bytes that a caller gets."""

from __future__ import annotations

from functools import partial

from executor.core.state import VoidCause
from executor.engine.base import RowError, RowResult
from shared.contract.errors import Code, Reason, sendable
from shared.contract.ids import ExecutorId, SequenceId, correlation_id_of, model_of
from shared.contract.limits import LOST_OWNERS_MAX, VALUE_BYTES_MAX
from shared.contract.messages import ReplyMessage, encode, next_salt


def answer(
    result: RowResult | RowError,
    *,
    version: str,
    executor: ExecutorId,
    step: int = 0,
    bytes_max: int = VALUE_BYTES_MAX,
    more: bool = False,
) -> bytes:
    """A row's result as an encoded reply. What a backend has put into it and no message takes becomes an error.

    step       number since the sequence's START, 0 for a stateless request
    bytes_max  largest value that Redis takes
    more       other answers follow
    """
    encoded = partial(_encoded, version=version, executor=executor, step=step, bytes_max=bytes_max, more=more)
    try:
        return encoded(result)
    except Exception as error:  # noqa: BLE001  the backend's own: it must not end the task that sends all answers
        message = f"the model's answer cannot be sent: {type(error).__name__}: {error}"
        is_lost = isinstance(result, RowError) and result.lost
        return encoded(RowError(Code.INTERNAL, message, lost=is_lost, number=result.number))


def _encoded(
    result: RowResult | RowError, *, version: str, executor: ExecutorId, step: int, bytes_max: int, more: bool
) -> bytes:
    of_many = (result.number, more)
    if isinstance(result, RowError):
        # If the state is lost, the step counts as not run, like the later steps, which get `void_answer`.
        reason, step = (Reason.LOST, max(0, step - 1)) if result.lost else ("", step)
        error = sendable(result.message)
        return encode(ReplyMessage(version, (), result.code, error, reason, step, executor, {}, *of_many))
    parameters = dict(result.parameters)
    reply, size = b"", sum(len(tensor.raw) for tensor in result.outputs)
    # What cannot be sent is not copied either: the event loop renews the lease.
    if size <= bytes_max:
        outputs, salt = tuple(result.outputs), next_salt()
        reply = encode(
            ReplyMessage(version, outputs, "", "", "", step, executor, parameters, *of_many, result.empty, salt=salt)
        )
        size = len(reply)
    if size > bytes_max:
        # The step stays committed. Redis would cut the connection at such an answer, which would then be sent again for
        # ever.
        text = f"the model's answer has {size} bytes, and Redis, through which it goes, takes {bytes_max}"
        return encode(ReplyMessage(version, (), Code.INTERNAL, text, "", step, executor, {}, *of_many))
    return reply


def refusal(code: Code, message: str, *, version: str, executor: ExecutorId) -> bytes:
    """An error of the executor itself, encoded."""
    return encode(ReplyMessage(version, error_code=code, error=sendable(message), executor=executor))


def cancelled_answer(*, version: str, executor: ExecutorId, last_step: int) -> bytes:
    """The answer to a step that was cancelled before it ran, or that was queued behind a cancelled one (triton-spec
    1.8).
    """
    return _of_no_run(version, executor, last_step, Code.CANCELLED, Reason.CANCELLED)


def given_up_answer(sequence: SequenceId, *, version: str, executor: ExecutorId, last_step: int) -> bytes:
    """The answer to a step with which too many executors were lost. Its sequence has no state from here on."""
    message = (
        f"sequence {correlation_id_of(sequence)} of model '{model_of(sequence)}' was given up: {LOST_OWNERS_MAX} "
        "executors were lost with its next step"
    )
    return _of_no_run(version, executor, last_step, Code.INTERNAL, Reason.LOST, message)


def unloaded_answer(model: str, version: str, *, others: bool, executor: ExecutorId) -> bytes:
    """The answer to a stateless request whose version was unloaded. others: the model has another version"""
    if others:
        text = f"Request for unknown model: '{model}' version {version} is not at ready state"
        return refusal(Code.UNAVAILABLE, text, version=version, executor=executor)
    text = f"Request for unknown model: '{model}' has no available versions"
    return refusal(Code.NOT_FOUND, text, version=version, executor=executor)


def void_answer(
    cause: VoidCause, sequence: SequenceId, *, version: str, executor: ExecutorId, last_step: int, loss_remedy: str
) -> bytes:
    """The answer to a step of a sequence without state: its START failed, its state was lost with an executor, or a
    step before it was cancelled. loss_remedy: advice against a lost state
    """
    if cause is VoidCause.CANCELLED:
        return cancelled_answer(version=version, executor=executor, last_step=last_step)
    reason = Reason.FAILED if cause is VoidCause.FAILED else Reason.LOST
    why = "the sequence's START failed"
    if cause is VoidCause.LOST:
        why = "the sequence's state was lost with the process that held it, or could not be restored"
        why += loss_remedy and f"; {loss_remedy}"
    message = (
        f"inference request for sequence {correlation_id_of(sequence)} to model '{model_of(sequence)}' must specify "
        f"the START flag on the first request of the sequence ({why})"
    )
    return _of_no_run(version, executor, last_step, Code.INVALID_ARG, reason, message)


def _of_no_run(
    version: str, executor: ExecutorId, last_step: int, code: Code, reason: Reason, error: str = ""
) -> bytes:
    """The answer to a step that the model did not run. last_step: the last one that it ran"""
    return encode(ReplyMessage(version, error_code=code, error=error, reason=reason, step=last_step, executor=executor))

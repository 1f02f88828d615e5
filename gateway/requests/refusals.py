"""The errors for steps that the script `submit` refuses: Triton's words first, then what only the mesh knows."""

from __future__ import annotations

from gateway.requests.admission import InferCall
from gateway.requests.waiting import PendingRequest
from shared.contract.errors import Reason, SequenceError
from shared.store.reading import text_of
from shared.store.scripts import SubmitCode, Submitted

REASONS = {
    SubmitCode.NEVER_SEEN: Reason.NEVER_SEEN,
    SubmitCode.ENDED: Reason.ENDED,
    SubmitCode.EXPIRED: Reason.EXPIRED,
    SubmitCode.FAILED: Reason.FAILED,
    SubmitCode.LOST: Reason.LOST,
    SubmitCode.CANCELLED: Reason.CANCELLED,
}
STORIES = {
    SubmitCode.ENDED: "the sequence has ended; its last step was {last}",
    SubmitCode.EXPIRED: "the sequence was idle for too long and has expired; its last step was {last}",
    SubmitCode.FAILED: "the sequence's START failed in the model",
    SubmitCode.LOST: "the sequence's state was lost with the executor that held it; its last step was {last}",
    SubmitCode.CANCELLED: "the sequence was cancelled; its last step was {last}",
}


def named(call: InferCall) -> str:
    """The request by the name that its client gave it: its request id or its step number."""
    return f"request {call.request_id}" if call.request_id else f"step {call.expected_step}"


def refusal(pending: PendingRequest, outcome: Submitted) -> SequenceError:
    """The error for a refused step: reason, last committed step, and a text that names model, sequence and remedy."""
    model, sequence = pending.call.model, pending.admitted.message.correlation_id
    match outcome.code:
        case SubmitCode.BACKLOG_FULL:
            full = f"model '{model}' has as many live sequences as it may"
            if outcome.extra != b"live":
                full = f"the backlog of model '{model}' is full"
            return SequenceError(
                f"{full}: sequence {sequence} was not started, try again later",
                Reason.BACKLOG_FULL,
                outcome.step,
            )
        case SubmitCode.BUSY:
            return SequenceError(
                f"sequence {sequence} of model '{model}' has too many unanswered steps: wait for an answer, then try "
                "again",
                Reason.BUSY,
                outcome.step,
            )
        case SubmitCode.LATE:
            return SequenceError(
                f"the connection to Redis was lost, and the sequence went on meanwhile: it is not known whether this "
                f"step of sequence {sequence} of model '{model}' was accepted; its last step was {outcome.step}. With "
                "its number as parameter 'sequence_step' it can be sent again safely",
                Reason.LATE,
                outcome.step,
            )
        case SubmitCode.ANSWERED:
            return SequenceError(
                f"{named(pending.call)} of sequence {sequence} of model '{model}' was answered, and its answer is "
                f"kept no longer; it does not run again. The sequence's last step was {outcome.step}",
                Reason.ANSWERED,
                outcome.step,
            )
        case SubmitCode.EXISTS:
            return SequenceError(
                f"sequence {sequence} of model '{model}' exists: its last step was {outcome.step}. Leave "
                "'sequence_step' out to begin it anew",
                Reason.EXISTS,
                outcome.step,
            )
        case SubmitCode.WRONG_STEP:
            return SequenceError(
                f"sequence {sequence} of model '{model}' expects step {text_of(outcome.extra)} next, but the request "
                f"is step {pending.call.expected_step}",
                Reason.WRONG_STEP,
                outcome.step,
            )
        case code:
            text = (
                f"inference request for sequence {sequence} to model '{model}' must specify the START flag on the "
                "first request of the sequence"
            )
            story = STORIES.get(code)
            if story:
                remedy = pending.record.config.loss_remedy if code is SubmitCode.LOST else ""
                text += f" ({story.format(last=outcome.step)}{remedy and f'; {remedy}'})"
            return SequenceError(text, REASONS[code], outcome.step)

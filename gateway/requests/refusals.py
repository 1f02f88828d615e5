"""The errors for steps that the script `submit` refuses: Triton's words first, then what only the mesh knows; and
the one for models whose answers an endpoint cannot give."""

from __future__ import annotations

from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import PendingRequest
from shared.contract.endpoints import Endpoint
from shared.contract.errors import Code, Reason, RequestError, SequenceError
from shared.store.script_values import SubmitCode, Submitted

STORIES = {
    SubmitCode.ENDED: "the sequence has ended; its last step was {last}",
    SubmitCode.EXPIRED: (
        "the sequence was idle for too long (max_sequence_idle_microseconds of its model) and has expired; its last "
        "step was {last}"
    ),
    SubmitCode.FAILED: "the sequence's START failed in the model, or a step of its ensemble did",
    SubmitCode.LOST: (
        "the sequence's state was lost: its executor ended, its model was unloaded or loaded anew, or the model's "
        "checkpoint or restore failed; its last step was {last}"
    ),
    SubmitCode.CANCELLED: "the sequence was cancelled; its last step was {last}",
}


def named(call: InferCall) -> str:
    """The request by the name that its client gave it: its request id or its step number."""
    return f"request {call.request_id}" if call.request_id else f"step {call.expected_step}"


def decoupled_refusal(endpoint: Endpoint) -> RequestError:
    """The error for a request to a decoupled model by a way on which exactly one answer can come."""
    return RequestError(f"{endpoint} doesn't support models with decoupled transaction policy", Code.UNSUPPORTED)


def refusal(pending: PendingRequest, outcome: Submitted) -> SequenceError:
    """The error for a refused step: reason, last accepted step, and a text that names model, sequence and remedy."""
    # The script's codes of refusals have the names of the reasons.
    return SequenceError(_text(pending, outcome), Reason[outcome.code.name], outcome.step)


def _text(pending: PendingRequest, outcome: Submitted) -> str:
    sequence = f"sequence {pending.admitted.message.correlation_id}"
    model, last = f"model '{pending.call.model}'", outcome.step
    match outcome.code:
        case SubmitCode.BACKLOG_FULL:
            full = f"{model} has as many live sequences as it may"
            if outcome.extra != b"live":
                full = f"the backlog of {model} is full"
            return f"{full}: {sequence} was not started, try again later"
        case SubmitCode.QUOTA:
            whose = f"tenant '{pending.call.tenant}' has as many live sequences as it may"
            return f"{whose}: {sequence} of {model} was not started, end one or try again later"
        case SubmitCode.BUSY:
            return f"{sequence} of {model} has too many open steps: wait for an answer, then try again"
        case SubmitCode.LATE:
            return (
                f"the connection to Redis was lost, and the sequence went on meanwhile: it is not known whether this "
                f"step of {sequence} of {model} was accepted; its last step was {last}. With its number as parameter "
                "'sequence_step' it can be sent again safely"
            )
        case SubmitCode.ANSWERED:
            return (
                f"{named(pending.call)} of {sequence} of {model} was answered, and its answer is kept no longer; it "
                f"does not run again. The sequence's last step was {last}"
            )
        case SubmitCode.EXISTS:
            return f"{sequence} of {model} exists: its last step was {last}. Leave 'sequence_step' out to begin it anew"
        case SubmitCode.WRONG_STEP:
            return (
                f"{sequence} of {model} expects step {last + 1} next, but the request is step "
                f"{pending.call.expected_step}"
            )
        case code:
            text = (
                f"inference request for {sequence} to {model} must specify the START flag on the first request of the "
                "sequence"
            )
            if code in STORIES:
                remedy = pending.record.config.loss_remedy if code is SubmitCode.LOST else ""
                text += f" ({STORIES[code].format(last=last)}{remedy and f'; {remedy}'})"
            return text

"""errors.md: codes and reasons of errors, what carries them in each protocol, and exit codes of processes."""

from __future__ import annotations

from http import HTTPStatus

import orjson

from deploy.analyze.command import EXIT_NONE_FITS
from deploy.chaos.report import EXIT_FAILED_CHECK
from deploy.cli import EXIT_INTERRUPTED
from deploy.local.endings import EXIT_NOT_BEGUN, EXIT_TOO_SOON
from executor.service import UNUSABLE_EXIT_CODE
from gateway.grpc.codec import encode_stream_error
from gateway.grpc.errors import DETAILS_KEY, DOMAIN
from gateway.grpc.metadata import STATUS_ON_ERROR_KEY
from gateway.requests.status import GRPC_STATUS, HTTP_STATUS, grpc_details, http_error
from shared.contract.errors import FAILED, OUTCOMES, Code, Reason, Retry, SequenceError
from tests.docs.reference.markdown import code, page, table, text

EXAMPLE = SequenceError("the sequence has ended; its last step was 7", Reason.ENDED, last_step=7)
CODES = """
Every error has a code. The statuses of both protocols follow from it.
"""
REASONS = """
An error that is about a step of a sequence says why, in one word. Texts begin with Triton's words. A client should read
the reason and the advice, not the text. Step numbers count from START, which is step 1. `last_step` is the last
step that the mesh has accepted, whether it is answered yet or not, so it does not depend on how far the executor has
come; 0 when there was none. In the answer to an accepted step that was not done, it is the step before that one.

Two answers have another code than the table says, because it is what became of the very step: a step that was cancelled
before it ran (`cancelled`, CANCELLED), and one that too many executors were lost with (`lost`, INTERNAL). A service of
a newer release may send a reason that is not in the table; its code says what to do.

UNAVAILABLE without a reason says nothing of the sequence. A step with a request id, or with its number as the parameter
`sequence_step`, can be sent again as it is, to any gateway: it does not run twice.
"""
OTHERS = (
    (HTTPStatus.FORBIDDEN, "The route is restricted to those who send a header, or a web page of another origin asks."),
    (HTTPStatus.NOT_FOUND, "The path is none of the protocol's."),
    (HTTPStatus.METHOD_NOT_ALLOWED, "The path has other methods; `Allow` names them."),
    (HTTPStatus.REQUEST_TIMEOUT, "The request's head or body came too slowly. The connection is closed."),
    (HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The request's head is too large. The connection is closed."),
    (HTTPStatus.INTERNAL_SERVER_ERROR, "A mistake in the gateway; its log has the traceback."),
    (
        HTTPStatus.NOT_IMPLEMENTED,
        "The body's `Content-Encoding` is not served; `Accept-Encoding` names those that are.",
    ),
    (HTTPStatus.SERVICE_UNAVAILABLE, "The gateway has as many connections as it may, or is stopping."),
    (HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "The client speaks another HTTP than 1.0 or 1.1."),
)
EXITS = (
    ("gateway, scheduler, executor, console", 0, "Stopped as it was told, by SIGTERM or SIGINT."),
    (
        "gateway, scheduler, console",
        1,
        "Failed; or it was told to stop a second time, and did not drain. The log says why.",
    ),
    ("executor", FAILED, "The same, in place of 1: a model's code may end the process with any of the usual codes."),
    (
        "executor",
        UNUSABLE_EXIT_CODE,
        "A model hangs (`--batch-limit-s`), or the GPU is lost: only a new process helps.",
    ),
    ("every command", 2, "The command line or the environment is wrong."),
    ("every command", EXIT_INTERRUPTED, "Ctrl-C ended it, unless a line below says more of it."),
    ("`seqmesh up`", 1, "The mesh could not begin, or was given up before it was ready once."),
    ("`seqmesh up`", 0, "Stopped as it was told."),
    (
        "`seqmesh drain`, `seq`, `tenants`, `settings`, `reshard`, `new`",
        1,
        "It could not be done; the message says what to do instead.",
    ),
    ("`seqmesh seq replay`", 1, "An answer is different. 2: nothing could be compared."),
    ("`seqmesh doctor`", 1, "Something fails; the report names the remedy."),
    ("`... healthcheck`, `livecheck`", 1, "The process of that name does not live; the message says why."),
    ("`seqmesh demo`", 1, "The answers of both runs differ."),
    ("`seqmesh demo vad`", 1, "The segments differ from those that onnxruntime finds alone."),
    ("`seqmesh analyze`", EXIT_NONE_FITS, "No configuration is within the bounds."),
    ("`seqmesh analyze`", EXIT_TOO_SOON, "The search ended too soon."),
    (
        "`seqmesh analyze`, `chaos`, `demo`",
        EXIT_NOT_BEGUN,
        "There is no verdict: it could not begin (no mesh starts, the model is not loaded), or an error ended it.",
    ),
    ("`seqmesh chaos`", EXIT_FAILED_CHECK, "A promise was broken."),
    ("`seqmesh chaos`", EXIT_TOO_SOON, "Nothing was broken, but the run ended too soon."),
)


def errors() -> str:
    """The page."""
    return page(
        "Errors", "## Codes", CODES, codes(), "## Reasons", REASONS, reasons(), advice(), carriers(), http(), exits()
    )


def codes() -> str:
    """Each code with its statuses."""
    rows = [[code(one), str(HTTP_STATUS[one]), code(GRPC_STATUS[one]), text(one.meaning)] for one in Code]
    return table(("Code", "HTTP", "gRPC", "Meaning"), rows)


def reasons() -> str:
    """Each reason with what happened."""
    rows = [
        [
            code(reason),
            str(HTTP_STATUS[outcome.code]),
            code(GRPC_STATUS[outcome.code]),
            code(outcome.retry),
            text(outcome.happened),
            text(outcome.remedy),
        ]
        for reason, outcome in OUTCOMES.items()
    ]
    return table(("Reason", "HTTP", "gRPC", "Retry", "What happened", "What a client can do"), rows)


def advice() -> str:
    """The words of `retry`."""
    return table(("Retry", "Meaning"), [[code(one), text(one.meaning)] for one in Retry])


def carriers() -> str:
    """Where the words stand."""
    status, body = http_error(EXAMPLE)
    metadata = [f"{name}: {value}" for name, value in grpc_details(EXAMPLE)]
    parameters = encode_stream_error(EXAMPLE, "", "m").infer_response.parameters
    named = ", ".join(code(name) for name in sorted(parameters))
    details = (
        "and the same once more as google.rpc.Status with an ErrorInfo (its domain is "
        f"`{DOMAIN}`, its reason in capitals) in `{DETAILS_KEY}`, unless the text is long."
    )
    stream = (
        "gRPC, a stream: a message with `error_message`, and in its `infer_response` the request's id and the "
        f"parameters {named}. The stream goes on. With the metadata `{STATUS_ON_ERROR_KEY}: true` the error of a "
        "request that was accepted ends the stream with its status."
    )
    return "\n\n".join(
        [
            "## What carries them",
            f"HTTP: the body. The status here is {status}.",
            f"```json\n{orjson.dumps(body).decode()}\n```",
            "gRPC, a call: status and text, and the trailing metadata",
            "```text\n" + "\n".join(metadata) + "\n```",
            details,
            stream,
        ]
    )


def http() -> str:
    """Statuses that follow from no code."""
    rows = [[str(status.value), text(what)] for status, what in OTHERS]
    restricted = "Over gRPC a restricted method answers `UNAVAILABLE`, as Triton's does."
    told = 'A gateway also answers for the connection and the route, always with a body `{"error": ...}`:'
    return "\n\n".join(["## Other statuses of HTTP", told, table(("HTTP", "What happened"), rows), restricted])


def exits() -> str:
    """Exit codes."""
    rows = [[who, str(number), text(what)] for who, number, what in EXITS]
    return "\n\n".join(["## Exit codes", table(("Process", "Code", "Meaning"), rows)])

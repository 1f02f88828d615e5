"""Sends the steps of a journal to a mesh as a new sequence, through a gateway's gRPC port."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import grpc
from tritonclient.grpc import service_pb2 as _service_pb2
from tritonclient.grpc import service_pb2_grpc as _service_pb2_grpc

from deploy.operate.comparison import ReplayAnswer
from seqmesh_client.shell import check_gateway, header_of
from shared.contract.ids import CorrelationId
from shared.contract.parameters import write_parameters
from shared.contract.tensors import Tensor
from shared.store.journals import JournaledStep

# The classes that protobuf generates at import have no types.
service_pb2: Any = _service_pb2
service_pb2_grpc: Any = _service_pb2_grpc
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
TLS = "grpcs"
END_S = 10.0
"""How long the closing END may take: nobody needs its answer."""
NO_ANSWERS = frozenset(
    {
        *("UNAVAILABLE", "DEADLINE_EXCEEDED", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED"),
        *("RESOURCE_EXHAUSTED", "ALREADY_EXISTS"),
    }
)
"""Statuses of requests that no model has answered."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the steps go.

    address   `grpc://HOST:PORT`, or `grpcs:` for TLS
    version   "": the one that clients get who name none
    metadata  of every request: names and values
    root_cert, client_key, client_cert  files for TLS; None: those of the machine, or none
    timeout_s  of each step
    is_direct  a gateway of a mesh that is at hand, which is reached past the proxies of the environment
    """

    address: str
    model: str
    version: str
    metadata: Sequence[tuple[str, str | bytes]] = ()
    root_cert: Path | None = None
    client_key: Path | None = None
    client_cert: Path | None = None
    timeout_s: float = 60.0
    is_direct: bool = False

    def channel(self) -> Any:
        scheme, _, host = self.address.partition("://")
        options = (*OPTIONS, ("grpc.enable_http_proxy", int(not self.is_direct)))
        if scheme != TLS:
            return grpc.aio.insecure_channel(host, options=options)
        files = (self.root_cert, self.client_key, self.client_cert)
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() if file else None for file in files))
        return grpc.aio.secure_channel(host, credentials, options=options)


async def replayed(target: Target, steps: Sequence[JournaledStep]) -> tuple[str, list[ReplayAnswer]]:
    """Runs the steps as a sequence of its own, and ends it. Raises click.ClickException if the mesh does not take them.

    Returns the version that answered, and its answers: one for each step, or fewer if a step failed in this run alone.
    """
    identity, version, answers = _new_id(steps[0].request.correlation_id), "", list[ReplayAnswer]()
    request, is_over = None, False
    async with target.channel() as channel:
        infer = partial(service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer, metadata=target.metadata)
        try:
            for number, step in enumerate(steps, 1):
                request = request_of(target, identity, number, step)
                try:
                    response = await infer(request, timeout=target.timeout_s)
                except grpc.aio.AioRpcError as error:
                    answers.append(_failure(number, error))
                else:
                    answers.append(answer_of(response))
                    version = response.model_version
                is_over = step.has_end
                if bool(answers[-1].error) != bool(step.reply.error_code):
                    break
        finally:
            if not is_over:
                await _end(infer, request)
    return version, answers


def _failure(number: int, error: grpc.aio.AioRpcError) -> ReplayAnswer:
    """The answer of a step that failed. Raises click.ClickException for one that no model has answered."""
    status = error.code().name
    if status in NO_ANSWERS:
        raise click.ClickException(f"step {number} is not taken ({status}): {error.details()}") from error
    return ReplayAnswer(error=error.details() or status)


async def _end(infer: Callable[..., Any], request: Any) -> None:
    """Ends the sequence with the inputs of its last step, whose request this is. Nobody hears the answer."""
    request.id = ""
    for name in ("sequence_start", "sequence_step"):
        request.parameters.pop(name, None)
    request.parameters["sequence_end"].bool_param = True
    # One that has failed at its START, or was lost, is over.
    with contextlib.suppress(grpc.aio.AioRpcError):
        await infer(request, timeout=END_S)


def _new_id(like: CorrelationId) -> CorrelationId:
    """An id of the same kind, which fits into each type that a model may want it in."""
    number = random.SystemRandom().randrange(1 << 30, 1 << 31)
    return number if isinstance(like, int) else f"replay-{number}"


def request_of(target: Target, correlation_id: CorrelationId, number: int, step: JournaledStep) -> Any:
    """The ModelInferRequest of a step. Its number keeps it out of every sequence that has the id already."""
    asked = step.request
    request: Any = service_pb2.ModelInferRequest(
        model_name=target.model, model_version=target.version, id=asked.request_id
    )
    write_parameters(request.parameters, {**asked.parameters, "sequence_id": correlation_id, "sequence_step": number})
    if number == 1:
        request.parameters["sequence_start"].bool_param = True
    if step.has_end:
        request.parameters["sequence_end"].bool_param = True
    for tensor in asked.inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw)
    for name in asked.outputs:
        request.outputs.add(name=name)
    return request


def answer_of(response: Any) -> ReplayAnswer:
    outputs = zip(response.outputs, response.raw_output_contents, strict=True)
    return ReplayAnswer(
        tuple(Tensor(output.name, output.datatype, tuple(output.shape), raw) for output, raw in outputs)
    )


def address_of(text: str) -> str:
    """The address of a gateway, with its scheme; "" if none is given. Raises click.ClickException for what is none."""
    if not text:
        return ""
    address = text if text.startswith(("grpc://", "grpcs://")) else f"grpc://{text}"
    try:
        check_gateway(address.partition("://")[2])
    except ValueError as wrong:
        raise click.ClickException(f"--gateway: {wrong}") from wrong
    return address


def header_given(text: str) -> tuple[str, str | bytes]:
    """A header of the command line. Raises click.ClickException for what is none."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.ClickException(f"--header '{text}' is not NAME=VALUE")
    try:
        return header_of(name.strip(), value)
    except (TypeError, ValueError) as wrong:
        raise click.ClickException(f"--header: {wrong}") from wrong

"""Sends the steps of a journal to a mesh as a new sequence, through a gateway's gRPC port."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import grpc
from tritonclient.grpc import service_pb2 as _service_pb2
from tritonclient.grpc import service_pb2_grpc as _service_pb2_grpc

from deploy.operate.comparison import ReplayAnswer
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


class ReplayError(click.ClickException):
    """The mesh does not take the steps, and why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the steps go.

    address   `grpc://HOST:PORT`, or `grpcs:` for TLS
    version   "": the one that clients get who name none
    metadata  of every request: names and values
    root_cert, client_key, client_cert  files for TLS; None: those of the machine, or none
    timeout_s  of each step
    """

    address: str
    model: str
    version: str
    metadata: Sequence[tuple[str, str | bytes]] = ()
    root_cert: Path | None = None
    client_key: Path | None = None
    client_cert: Path | None = None
    timeout_s: float = 60.0

    def channel(self) -> Any:
        parts = urlsplit(self.address)
        if parts.scheme != TLS:
            return grpc.aio.insecure_channel(parts.netloc, options=OPTIONS)
        files = (self.root_cert, self.client_key, self.client_cert)
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() if file else None for file in files))
        return grpc.aio.secure_channel(parts.netloc, credentials, options=OPTIONS)


async def replayed(target: Target, steps: Sequence[JournaledStep]) -> tuple[str, list[ReplayAnswer]]:
    """Runs the steps as a sequence of its own, and ends it. Raises ReplayError if the mesh does not take them.

    Returns the version that answered, and its answers: one for each step, or fewer if a step failed in this run alone.
    """
    run = _Run(target, _new_id(steps[0].request.correlation_id))
    async with target.channel() as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        try:
            for number, step in enumerate(steps, 1):
                answer = await run.send(infer, number, step)
                if bool(answer.error) != bool(step.reply.error_code):
                    break
        finally:
            await run.end(infer)
    return run.version, run.answers


class _Run:
    def __init__(self, target: Target, correlation_id: CorrelationId) -> None:
        self._target = target
        self._id = correlation_id
        self._open: Any = None
        self.version = ""
        self.answers: list[ReplayAnswer] = []

    async def send(self, infer: Any, number: int, step: JournaledStep) -> ReplayAnswer:
        target = self._target
        request = request_of(target, self._id, number, step)
        if not step.has_end:
            self._open = request
        try:
            response = await infer(request, timeout=target.timeout_s, metadata=target.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code().name in NO_ANSWERS:
                raise ReplayError(f"step {number} is not taken ({error.code().name}): {error.details()}") from error
            answer = ReplayAnswer(error=error.details() or error.code().name)
        else:
            answer, self.version = answer_of(response), response.model_version
        if step.has_end:
            self._open = None
        self.answers.append(answer)
        return answer

    async def end(self, infer: Any) -> None:
        """Ends the sequence, if its last step has not: with the inputs of that step. Nobody hears the answer."""
        if self._open is None:
            return
        request = self._open
        request.id = ""
        for name in ("sequence_start", "sequence_step"):
            request.parameters.pop(name, None)
        request.parameters["sequence_end"].bool_param = True
        # One that has failed at its START, or was lost, is over.
        with contextlib.suppress(grpc.aio.AioRpcError):
            await infer(request, timeout=END_S, metadata=self._target.metadata)


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

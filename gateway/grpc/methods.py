"""Serves the rpcs of a service by handlers that read their messages themselves.

grpc.aio's own unary handlers are called only when the message was received whole and unpacked, too late for a bound. On
the wire a unary call is a stream of one message. Served as a stream, nothing beyond the stream's window is received
until `gateway.grpc.intake` reads. Every MeshError, also of a malformed message, ends the call with its status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import message_factory

from gateway.grpc.connections import GrpcConnections
from gateway.grpc.errors import SHUTTING_DOWN, abort
from gateway.grpc.intake import Intake
from gateway.grpc.pb import Context
from shared.contract.errors import MeshError, UnavailableError


def add_service(server: Any, service: Any, servicer: Any, intake: Intake, connections: GrpcConnections) -> None:
    """Serves every rpc of a service by the servicer's method of the same name.

    The method gets the call's message and context; for a stream of requests only the context.

    service  protobuf's descriptor
    """
    handlers: dict[str, Any] = {}
    for method in service.methods:
        work = getattr(servicer, method.name)
        if not method.client_streaming:
            work = with_message(work, message_factory.GetMessageClass(method.input_type), intake)
        make: Any = (
            grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
        )
        answer: Any = message_factory.GetMessageClass(method.output_type)
        handlers[method.name] = make(serving(work, connections), None, answer.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)


def with_message(
    work: Callable[[Any, Context], Awaitable[Any]], kind: Any, intake: Intake
) -> Callable[[Context], Awaitable[Any]]:
    """A handler that reads the call's message, then calls `work`. kind: the message's class."""

    async def read_and_work(context: Context) -> Any:
        return await work(await intake.only_message(context, kind), context)

    return read_and_work


def serving(
    work: Callable[[Context], Awaitable[Any]], connections: GrpcConnections
) -> Callable[[object, Context], Awaitable[Any]]:
    """A handler that notes its call in `connections`, and ends it with the status of a MeshError."""

    async def serve(_messages: object, context: Context) -> Any:
        try:
            if not connections.enter(context):
                raise UnavailableError(SHUTTING_DOWN)
            return await work(context)
        except MeshError as error:
            refusal = error.released()
        try:
            await abort(context, refusal)
        finally:
            # The call keeps the exception of `abort` and thereby this frame, which must not keep the call in turn.
            del context, refusal

    return serve

"""Serves calls by the methods of servicers: finds the method, refuses who may not call it, decodes and encodes.

Every MeshError, also of a malformed message, ends its call with the error's status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from google.protobuf import message_factory

from gateway.bounds.unread_answers import UnreadAnswers
from gateway.grpc.errors import status_of
from gateway.grpc.intake import Intake
from gateway.grpc.restricted import refuse_restricted
from gateway.grpc.wire.rpc import Rpc
from gateway.requests.status import told_of
from gateway.restrictions import Restriction
from shared.contract.errors import Code, RequestError

Method = Callable[[Rpc], Awaitable[None]]
COUNTED_BYTES = 4 << 10
"""Answers up to this size are not counted as unread: the number of calls is bounded."""


class Rpcs:
    """The methods that a port serves, by path.

    Of the client's messages, a method that takes one gets it decoded, and the call; one that takes a stream gets the
    call alone. It returns its answer, or, of a method that answers with a stream, writes its answers to the call.

    unread        counts answers until their clients have read them; of streams their methods count
    restrictions  what closes parts of the protocol, by category
    """

    def __init__(self, intake: Intake, unread: UnreadAnswers, restrictions: Mapping[str, Restriction]) -> None:
        self._intake = intake
        self._unread = unread
        self._restrictions = restrictions
        self._methods: dict[str, Method] = {}

    def add(self, service: Any, servicer: Any) -> None:
        """Serves every rpc of a service by the servicer's method of the same name. service: protobuf's descriptor"""
        for method in service.methods:
            work: Callable[..., Awaitable[Any]] = getattr(servicer, method.name)
            if not method.client_streaming:
                work = self._with_message(work, message_factory.GetMessageClass(method.input_type))
            if not method.server_streaming:
                work = self._with_answer(work)
            self._methods[f"/{service.full_name}/{method.name}"] = work

    async def serve(self, rpc: Rpc) -> None:
        """Serves a call to its end."""
        try:
            refuse_restricted(rpc.opening, self._restrictions)
            method = self._methods.get(rpc.opening.path)
            if method is None:
                raise RequestError("Method not found!", Code.UNSUPPORTED)
            await method(rpc)
            rpc.end()
        except Exception as error:  # noqa: BLE001  of this call alone
            # Released, and not kept by this frame: its own frames would keep the request.
            rpc.end(*status_of(told_of(error, "grpc call failed unexpectedly", path=rpc.opening.path)))

    def _with_message(self, work: Callable[[Any, Rpc], Awaitable[Any]], kind: Any) -> Callable[[Rpc], Awaitable[Any]]:
        """Reads the call's message, then calls `work`. kind: the message's class"""

        async def read_and_work(rpc: Rpc) -> Any:
            return await work(await self._intake.only_message(rpc, kind), rpc)

        return read_and_work

    def _with_answer(self, work: Callable[[Rpc], Awaitable[Any]]) -> Method:
        """Calls `work`, then writes the message that it returns."""

        async def work_and_answer(rpc: Rpc) -> None:
            # In one expression, so that nothing keeps the answer while its bytes wait for the client.
            await rpc.write(self._counted((await work(rpc)).SerializeToString(), rpc))

        return work_and_answer

    def _counted(self, answer: bytes, rpc: Rpc) -> bytes:
        """The answer of a call. A large one counts as unread until the call ends."""
        if len(answer) > COUNTED_BYTES:
            self._unread.add(rpc, len(answer), rpc.cut)
            rpc.when_ended(partial(self._unread.took, rpc, len(answer)))
        return answer

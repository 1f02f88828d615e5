"""The asyncio shell: fulfils the wishes of `conversation` with grpc.aio."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar, cast

import grpc
import grpc.aio

from seqmesh_client.conversation import Ask, Inputs, Program, Wish
from seqmesh_client.delivery import Connect, Listen, Quiet
from seqmesh_client.shell import GatewayChannels, OneSequence
from seqmesh_client.token import Place
from seqmesh_client.wire import LinkBroken, StepOutputs, broken_by

ResultT = TypeVar("ResultT")


class AsyncLink:
    """One ModelStreamInfer call. It is broken off also when its sequence is dropped without being closed."""

    def __init__(self, stub: Any, headers: Sequence[tuple[str, str | bytes]]) -> None:
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._call: Any = stub.ModelStreamInfer(messages_of(self._outbox), metadata=headers)
        # It holds the call, with gRPC's own task, and nothing of the call holds this link: the link goes first.
        loop = asyncio.get_running_loop()
        weakref.finalize(self, break_off_soon, loop, self._call, self._outbox).atexit = False

    def send(self, message: Any) -> None:
        self._outbox.put_nowait(message)

    def close(self) -> None:
        break_off(self._call, self._outbox)

    async def receive(self, until: float) -> Any:
        """The next message. Raises LinkBroken when there is none until then."""
        try:
            with failures_told():
                async with asyncio.timeout(until - time.monotonic()):
                    message = await self._call.read()
        except TimeoutError:
            raise LinkBroken("no answer came in time") from None
        if message is cast(Any, grpc.aio).EOF:
            raise broken_by(None)
        return message


@contextmanager
def failures_told() -> Generator[None]:
    """What gRPC raises within it becomes LinkBroken."""
    try:
        yield
    except grpc.RpcError as error:
        raise broken_by(error) from None
    except asyncio.CancelledError:
        # gRPC raises it also where the channel of a call was closed. Nobody then cancels the task, and it must not end
        # as if somebody had.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise LinkBroken("the client was closed") from None


async def messages_of(outbox: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (message := await outbox.get()) is not None:
        yield message


def break_off(call: Any, outbox: asyncio.Queue[Any]) -> None:
    call.cancel()
    # Of a call that is over already, gRPC's own task still waits for the next message.
    outbox.put_nowait(None)


def break_off_soon(loop: asyncio.AbstractEventLoop, call: Any, outbox: asyncio.Queue[Any]) -> None:
    """For Python's collector, which may run in any thread, and when the loop is over."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(break_off, call, outbox)


class AsyncClient(GatewayChannels[grpc.aio.Channel]):
    """A client of one mesh, or of one plain Triton, for asyncio; its arguments: `GatewayChannels`."""

    def sequence(self, model: str, version: str = "", *, id: int | str | None = None, after: int = 0) -> AsyncSequence:
        """A new sequence. Nothing is sent before its first step.

        id     its correlation id; None: a random number. A model whose CORRID control is text needs a text. A negative
               number is sent as its 64 bits: -1 and 2**64 - 1 are one id
        after  > 0: the sequence has begun elsewhere, and that many of its steps have an outcome
        """
        return AsyncSequence(self, Place.of(model, version, id, after))

    def resume(self, token: str) -> AsyncSequence:
        """The sequence whose token this is, behind its last step with an outcome. Raises WrongToken."""
        return AsyncSequence(self, Place.of_token(token))

    async def close(self) -> None:
        """Closes all connections, and opens no other: a call that is under way, or comes later, raises RuntimeError.
        Open sequences stay open in the mesh.
        """
        self.is_closed = True
        if self.is_forked():
            return
        channels, self.channels = self.channels, {}
        for channel in channels.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def caller(self) -> tuple[int, object]:
        return os.getpid(), asyncio.get_running_loop()

    def _stub(self, gateway: int) -> Any:
        return self.stub(gateway, grpc.aio.insecure_channel, grpc.aio.secure_channel)

    def connect(self, gateway: int) -> AsyncLink:
        """A new stream to a gateway."""
        return AsyncLink(self._stub(gateway), self.headers)

    async def ask(self, wish: Ask) -> Any:
        """The response of a unary call. Raises LinkBroken, or an error that no other gateway can mend."""
        method = getattr(self._stub(wish.gateway), wish.method)
        with failures_told():
            return await method(wish.message, timeout=max(0.0, wish.until - time.monotonic()), metadata=self.headers)


class AsyncSequence(OneSequence[AsyncClient]):
    """A sequence of steps of one model, as a context manager. Its calls come one at a time.

    After a call that raised NoAnswer, or was cancelled, the same call with the same inputs goes on: it is the same
    step. The sequence ends with the step that has `last=True`, by `end`, or when its context is left in order. With an
    exception the context closes the connection alone: the sequence stays for `client.resume(sequence.token)` until its
    model's idle time is over.
    """

    async def step(
        self, inputs: Inputs, *, last: bool = False, outputs: Sequence[str] = (), timeout: float | None = None
    ) -> StepOutputs:
        """Runs the next step once, whatever breaks, and returns its answer.

        inputs   arrays by name, or the array of the model's only input
        last     the sequence ends with this step
        outputs  names of the wanted outputs; all if empty
        timeout  seconds without news while the caller waits, over all attempts; None: the client's `patience`
        raises   NoAnswer, StepRefused and what is below it, OutcomeUnknown; TypeError, ValueError or OverflowError for
                 values that are none of the input's type
        """
        conversation = self._conversation
        with self._turn():
            await self._run(conversation.drain())
            await self._run(conversation.give(inputs, outputs, timeout, last=last))
            return await self._run(conversation.outcome())

    async def steps(
        self,
        source: AsyncIterable[Inputs] | Iterable[Inputs],
        *,
        ahead: int = 8,
        end: bool = False,
        outputs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> AsyncIterator[StepOutputs]:
        """Runs a step for each item of a source, and yields the answers in order.

        At most `ahead` steps are without an answer: then the source is not read, nor does its reading begin while the
        caller does not ask for the next answer. Keep `ahead` at most the model's `retry_replies` (8): so many answers
        the mesh keeps for steps that are sent again.

        end     the source's last item is the sequence's last step. An item is then sent only when the next one is there
        raises  as `step`. Steps behind the failed one have no outcome then: `answered` says where to go on
        """
        conversation = self._conversation
        items = with_last_of(source, end=end)
        reading: asyncio.Task[tuple[Inputs, bool] | None] | None = None
        answering: asyncio.Task[None] | None = None
        at_end = False
        with self._turn():
            await self._run(conversation.drain())
        passed_over = conversation.passed_over
        try:
            while True:
                with self._turn(passed_over):
                    while answering is None or not answering.done():
                        if reading is None and not at_end and conversation.has_room(ahead):
                            reading = asyncio.create_task(next_of(items))
                        if answering is None and conversation.delivery.open:
                            answering = asyncio.create_task(self._run(conversation.arrival(whole=True)))
                        waiting = [one for one in (reading, answering) if one is not None]
                        if not waiting:
                            return
                        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                        if reading is not None and reading.done():
                            item, reading = reading.result(), None
                            at_end = item is None
                            if item is not None:
                                await self._run(conversation.give(item[0], outputs, timeout, last=item[1]))
                    answering.result()
                    answering = None
                    # Taken here and not in the task: a caller that is cancelled meanwhile has not had the answer.
                    answer = conversation.take_only()
                yield answer
        finally:
            left: list[asyncio.Task[Any]] = [one for one in (reading, answering) if one is not None]
            for one in left:
                one.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def answers(
        self, inputs: Inputs, *, last: bool = False, outputs: Sequence[str] = (), timeout: float | None = None
    ) -> AsyncIterator[StepOutputs]:
        """Runs one step of a decoupled model, and yields its answers as they come, each once.

        If the caller leaves early, the next call waits for the step's end first. Raises as `step`.
        """
        conversation = self._conversation
        with self._turn():
            await self._run(conversation.drain())
            await self._run(conversation.give(inputs, outputs, timeout, last=last))
        over, passed_over = False, conversation.passed_over
        while not over:
            with self._turn(passed_over):
                content, over = await self._run(conversation.next_answer())
            if content is not None:
                yield content

    async def end(self, *, timeout: float | None = None) -> None:
        """Ends the sequence without another step: its slot is free at once, and its model gets no END.

        Open steps get their outcomes first. A later run under the same id is left alone. Safe to repeat.

        timeout  seconds, over all attempts; None: the client's `patience`
        raises   NoAnswer; NotEnded if no answer has told the sequence's run: a server without runs, or an ensemble
        """
        with self._turn():
            await self._run(self._conversation.end(timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._client.is_forked():
                await self._run(self._conversation.leave())
        finally:
            self.hang_up()

    async def _run(self, program: Program[ResultT]) -> ResultT:
        """Fulfils a program's wishes to its end."""
        try:
            wish = next(program)
            while True:
                try:
                    result = await self._fulfil(wish)
                except Exception as error:  # noqa: BLE001  the program judges it
                    wish = program.throw(error)
                else:
                    wish = program.send(result)
        except StopIteration as end:
            return end.value

    async def _fulfil(self, wish: Wish) -> Any:
        match wish:
            case Quiet():
                await asyncio.sleep(wish.until - time.monotonic())
                return None
            case Connect():
                return self._client.connect(wish.gateway)
            case Ask():
                return await self._client.ask(wish)
            case Listen():
                return await self._conversation.link.receive(wish.until)


async def with_last_of(
    source: AsyncIterable[Inputs] | Iterable[Inputs], *, end: bool
) -> AsyncIterator[tuple[Inputs, bool]]:
    """The items, each with whether it is the last; without `end` none is, and no item waits for its successor."""
    last: list[Inputs] = []
    async for item in source if isinstance(source, AsyncIterable) else one_by_one(source):
        if not end:
            yield item, False
            continue
        if last:
            yield last.pop(), False
        last.append(item)
    if last:
        yield last.pop(), True


async def next_of(items: AsyncIterator[tuple[Inputs, bool]]) -> tuple[Inputs, bool] | None:
    return await anext(items, None)


async def one_by_one(source: Iterable[Inputs]) -> AsyncIterator[Inputs]:
    for item in source:
        yield item

"""The blocking shell: fulfils the wishes of `conversation` with grpc, a thread for each stream, and one to end them."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar

import grpc

from seqmesh_client.conversation import Ask, Inputs, Program, Wish
from seqmesh_client.delivery import Connect, Listen, Quiet
from seqmesh_client.shell import CLOSED, GatewayChannels, OneSequence
from seqmesh_client.token import Place
from seqmesh_client.wire import LinkBroken, StepOutputs, broken_by

ResultT = TypeVar("ResultT")
READ_AHEAD = 16
"""Messages of a stream that are read before they are asked for. Then the server waits, as it does for `AsyncClient`."""


class BlockingLink:
    """One ModelStreamInfer call. It is broken off also when its sequence is dropped without being closed.

    A thread opens and reads it, and ends with it; a thread of the client breaks it off. The caller's thread takes none
    of gRPC's locks: Ctrl-C, which Python raises anywhere, would leave one taken for ever. No thread holds this link,
    which goes first.
    """

    def __init__(self, stub: Any, headers: Sequence[tuple[str, str | bytes]], leaving: Leaving) -> None:
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(READ_AHEAD):
            self._room.put(None)
        opened: queue.SimpleQueue[Any] = queue.SimpleQueue()
        open_call = partial(stub.ModelStreamInfer, metadata=headers)
        boxes = self._inbox, self._outbox, self._room
        threading.Thread(target=read, args=(open_call, opened, *boxes), daemon=True, name="seqmesh-client").start()
        self._broken_off = weakref.finalize(self, break_off, opened, self._room, leaving)
        self._broken_off.atexit = False

    def send(self, message: Any) -> None:
        self._outbox.put(message)

    def close(self) -> None:
        self._broken_off()

    def receive(self, until: float) -> Any:
        """The next message. Raises LinkBroken when there is none until then."""
        try:
            # Python waits for no longer than that; infinity is a time, too.
            message = self._inbox.get(timeout=min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
        except queue.Empty:
            raise LinkBroken("no answer came in time") from None
        self._room.put(None)
        if isinstance(message, Exception):
            raise message
        return message


class Leaving:
    """Breaks calls off, in a thread that ends when neither a client nor a link has this any more."""

    def __init__(self) -> None:
        self.left: queue.SimpleQueue[Any] = queue.SimpleQueue()
        weakref.finalize(self, self.left.put, None).atexit = False
        threading.Thread(target=break_off_left, args=(self.left,), daemon=True, name="seqmesh-client-left").start()


def break_off(opened: queue.SimpleQueue[Any], room: queue.SimpleQueue[None], leaving: Leaving) -> None:
    leaving.left.put((opened, room))


def break_off_left(left: queue.SimpleQueue[Any]) -> None:
    """Breaks calls off, until there comes None."""
    while (one := left.get()) is not None:
        opened, room = one
        if (call := opened.get()) is not None:
            call.cancel()
        # The thread that reads it may wait for room.
        room.put(None)


def read(
    open_call: Callable[[Iterator[Any]], Any],
    opened: queue.SimpleQueue[Any],
    inbox: queue.SimpleQueue[Any],
    outbox: queue.SimpleQueue[Any],
    room: queue.SimpleQueue[None],
) -> None:
    """Opens a call, and hands over what it says, and its end.

    opened  gets the call, or None
    room    for messages that nobody has asked for
    """
    call = None
    try:
        call = open_call(iter(outbox.get, None))
        opened.put(call)
        for message in call:
            inbox.put(message)
            room.get()
    except grpc.RpcError as error:
        inbox.put(broken_by(error))
    except Exception as error:  # noqa: BLE001  the caller judges it
        inbox.put(error)
    else:
        inbox.put(broken_by(None))
    if call is None:
        opened.put(None)
    # gRPC's own thread waits for the next message to send.
    outbox.put(None)


class Client(GatewayChannels[grpc.Channel]):
    """A client of one mesh, or of one plain Triton, that blocks; its arguments: `GatewayChannels`.

    Threads may share it; each sequence belongs to one thread at a time.
    """

    _lock = threading.Lock()
    _leaving: Leaving | None = None

    @classmethod
    def renew_lock(cls) -> None:
        """For a forked process: there the lock would stay taken that another thread held at the fork."""
        cls._lock = threading.Lock()

    def sequence(
        self, model: str, version: str = "", *, id: int | str | None = None, after: int = 0
    ) -> BlockingSequence:
        """As `AsyncClient.sequence`."""
        return BlockingSequence(self, Place.of(model, version, id, after))

    def resume(self, token: str) -> BlockingSequence:
        """As `AsyncClient.resume`."""
        return BlockingSequence(self, Place.of_token(token))

    def close(self) -> None:
        """As `AsyncClient.close`. Any thread may call it."""
        self.is_closed = True
        if self.is_forked():
            return
        with self._lock:
            channels, self.channels = self.channels, {}
            self._leaving = None
        for channel in channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stub(self, gateway: int) -> Any:
        with self._lock:
            return self.stub(gateway, grpc.insecure_channel, grpc.secure_channel)

    def connect(self, gateway: int) -> BlockingLink:
        """A new stream to a gateway."""
        stub = self._stub(gateway)
        with self._lock:
            self._leaving = leaving = self._leaving or Leaving()
        return BlockingLink(stub, self.headers, leaving)

    def ask(self, wish: Ask) -> Any:
        """The response of a unary call. Raises LinkBroken, or an error that no other gateway can mend."""
        method = getattr(self._stub(wish.gateway), wish.method)
        try:
            with self.calling():
                return method(wish.message, timeout=max(0.0, wish.until - time.monotonic()), metadata=self.headers)
        except grpc.RpcError as error:
            raise broken_by(error) from None

    @contextmanager
    def calling(self) -> Generator[None]:
        """Another thread may close the client between a stub and its call: gRPC's error becomes that of `stub`."""
        try:
            yield
        except ValueError as error:
            if self.is_closed:
                raise RuntimeError(CLOSED) from error
            raise


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=Client.renew_lock)


class BlockingSequence(OneSequence[Client]):
    """A sequence of steps of one model, as a context manager: `AsyncSequence` for threads."""

    def step(
        self, inputs: Inputs, *, last: bool = False, outputs: Sequence[str] = (), timeout: float | None = None
    ) -> StepOutputs:
        """As `AsyncSequence.step`."""
        conversation = self._conversation
        with self._turn():
            self._run(conversation.drain())
            self._run(conversation.give(inputs, outputs, timeout, last=last))
            return self._run(conversation.outcome())

    def steps(
        self,
        source: Iterable[Inputs],
        *,
        ahead: int = 8,
        end: bool = False,
        outputs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Iterator[StepOutputs]:
        """As `AsyncSequence.steps`. The source is read until `ahead` steps are open, and only then are answers awaited:
        for a source that waits for something, use `ahead=1`, or `step`."""
        conversation = self._conversation
        items = with_last(source, end=end)
        at_end = False
        with self._turn():
            self._run(conversation.drain())
        passed_over = conversation.passed_over
        while True:
            with self._turn(passed_over):
                while not at_end and conversation.has_room(ahead):
                    item = next(items, None)
                    at_end = item is None
                    if item is not None:
                        self._run(conversation.give(item[0], outputs, timeout, last=item[1]))
                if not conversation.delivery.open:
                    return
                answer = self._run(conversation.outcome())
            yield answer

    def answers(
        self, inputs: Inputs, *, last: bool = False, outputs: Sequence[str] = (), timeout: float | None = None
    ) -> Iterator[StepOutputs]:
        """As `AsyncSequence.answers`."""
        conversation = self._conversation
        with self._turn():
            self._run(conversation.drain())
            self._run(conversation.give(inputs, outputs, timeout, last=last))
        over, passed_over = False, conversation.passed_over
        while not over:
            with self._turn(passed_over):
                content, over = self._run(conversation.next_answer())
            if content is not None:
                yield content

    def end(self, *, timeout: float | None = None) -> None:
        """As `AsyncSequence.end`."""
        with self._turn():
            self._run(self._conversation.end(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._client.is_forked():
                self._run(self._conversation.leave())
        finally:
            self.hang_up()

    def _run(self, program: Program[ResultT]) -> ResultT:
        """Fulfils a program's wishes to its end."""
        try:
            wish = next(program)
            while True:
                try:
                    result = self._fulfil(wish)
                except Exception as error:  # noqa: BLE001  the program judges it
                    wish = program.throw(error)
                else:
                    wish = program.send(result)
        except StopIteration as end:
            return end.value

    def _fulfil(self, wish: Wish) -> Any:
        match wish:
            case Quiet():
                time.sleep(max(0.0, wish.until - time.monotonic()))
                return None
            case Connect():
                return self._client.connect(wish.gateway)
            case Ask():
                return self._client.ask(wish)
            case Listen():
                with self._client.calling():
                    return self._conversation.link.receive(wish.until)


def with_last(source: Iterable[Inputs], *, end: bool) -> Iterator[tuple[Inputs, bool]]:
    """The items, each with whether it is the last; without `end` none is, and no item waits for its successor."""
    last: list[Inputs] = []
    for item in source:
        if not end:
            yield item, False
            continue
        if last:
            yield last.pop(), False
        last.append(item)
    if last:
        yield last.pop(), True

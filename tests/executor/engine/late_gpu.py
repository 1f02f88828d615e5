"""A GPU on the CPU that is as late as it may be: its streams do nothing before somebody waits for them. Or else copies
are made as early as they may be.

What an operator makes, and what is copied to the host, is garbage until then. So bytes that are looked at too early, a
copy that does not wait for what it copies, and memory that is written to before it was copied show as wrong numbers.
Operators of one stream see each other's results. Writes to a tensor that is there already are not late.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

GARBAGE = 77


class LateStream:
    """See `torch.cuda.Stream`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: list[Callable[[], object]] = []
        self.done = 0

    def run(self, end: int) -> None:
        """Makes the calls that were queued before that place."""
        # A tensor that was made in inference mode is written to in that mode.
        with _disable_current_modes(), torch.inference_mode():
            while self.done < end:
                self.done += 1
                self.calls[self.done - 1]()

    def wait_event(self, event: LateEvent) -> None:
        self.calls.append(event.synchronize)

    def wait_stream(self, other: LateStream) -> None:
        event = LateEvent()
        event.record(other)
        self.wait_event(event)


class LateEvent:
    """See `torch.cuda.Event`."""

    def __init__(self, **_: bool) -> None:
        self._stream: LateStream | None = None
        self._place = 0

    def record(self, stream: LateStream) -> None:
        self._stream, self._place = stream, len(stream.calls)

    def synchronize(self) -> None:
        assert self._stream is not None, "the event was recorded"
        self._stream.run(self._place)

    def elapsed_time(self, later: LateEvent) -> float:
        for event in (self, later):
            assert event._stream is not None and event._stream.done >= event._place, "torch refuses what is not reached"
        return 1.0


class _Queued(TorchDispatchMode):
    """Queues what is called meanwhile in the last of some streams. pinned: memory of the host"""

    def __init__(self, streams: Sequence[LateStream], pinned: set[int]) -> None:
        super().__init__()
        self._streams = streams
        self._pinned = pinned

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        stream, named = self._streams[-1], kwargs or {}
        if func is torch.ops.aten.copy_.default and (*args, *named.values())[2:] == (True,):
            stream.calls.append(lambda: args[0].copy_(args[1]))
            return args[0]
        given = {_memory(value) for value in tree_leaves((args, named)) if isinstance(value, torch.Tensor)}
        if self._pinned.issuperset(given):
            # Of the host, or of nothing: what is made so may be filled by no operator.
            return func(*args, **named)
        stream.run(len(stream.calls))
        made = func(*args, **named)
        if isinstance(made, torch.Tensor) and _memory(made) not in given:
            content = made.clone()
            made.fill_(GARBAGE)
            stream.calls.append(lambda: made.copy_(content))
        return made


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


@pytest.fixture(params=["late copies", "early copies"])
def late_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda` is one, as far as `running_batch` asks for it."""
    empty = cast("Any", torch.empty)
    current = [torch.device("cpu")]
    streams: list[LateStream] = []
    pinned = set[int]()
    kept: list[torch.Tensor] = []
    """What is pinned stays, so that no other tensor ever lies there."""

    def made(*sizes: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        memory = empty(*sizes, **named)
        if pin_memory:
            pinned.add(_memory(memory))
            kept.append(memory)
            memory.fill_(GARBAGE)
        return memory

    @contextmanager
    def device(entered: torch.device) -> Generator[None]:
        current.append(entered)
        yield
        current.pop()

    @contextmanager
    def stream(entered: LateStream) -> Generator[None]:
        assert current[-1] == entered.device, "its end would set up a context on the thread's own GPU"
        streams.append(entered)
        with nullcontext() if streams[1:] else _Queued(streams, pinned):
            yield
        streams.pop()
        if streams and request.param == "early copies":
            entered.run(len(entered.calls))

    monkeypatch.setattr(torch, "empty", made)
    fakes = {"Stream": LateStream, "default_stream": LateStream, "Event": LateEvent, "stream": stream, "device": device}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

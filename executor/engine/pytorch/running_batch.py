"""A batch that is computed: its times, and the bytes of its results on the host.

A GPU computes on its own, behind what the thread does that gives it its work. So the rows of results are made while
they are still computed: their bytes are views of memory on the host into which the GPU copies them. Nobody may look
into them before `end` has returned. The copies have a stream of their own, so that the next batch does not wait for
them; and each engine has its own streams, so that one instance does not wait for another one on the same GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch

from executor.engine.base import Timings
from executor.engine.pytorch.datatypes import raw_of
from shared.contract.limits import VALUE_BYTES_MAX

Spans = Iterable[tuple[int, int]]
"""Which rows of a tensor each piece has: the first one, and the one behind the last."""

Pieces = Callable[[torch.Tensor, int, Spans], list[bytes]]
"""See `HostBatch.pieces`."""


class HostBatch:
    """The calls of a module that make up one batch; `start` to `output_done` for each call. On a CPU everything is done
    when its call returns.
    """

    def __init__(self) -> None:
        self._at = 0
        self._input = self._infer = self._output = 0

    def start(self) -> None:
        """The call's tensors are made from here on. The call before may have failed at any point."""
        self._at = time.perf_counter_ns()

    def input_done(self) -> None:
        """The module is called from here on."""
        self._input += self._lap()

    def infer_done(self) -> None:
        """The module was called."""
        self._infer += self._lap()

    def output_done(self) -> None:
        """Its results were taken. Raises RuntimeError if one of them has no bytes."""
        self._output += self._lap()

    def _lap(self) -> int:
        before, self._at = self._at, time.perf_counter_ns()
        return self._at - before

    def pieces(self, tensor: torch.Tensor, rows: int, spans: Spans) -> list[bytes]:
        """The bytes of some of the `rows` along a result's first dimension, which is the whole of it if `rows` is 1."""
        return _copied(tensor, rows, spans)

    def end(self) -> Timings:
        """Waits for the batch. May be called on another thread. Raises RuntimeError if the GPU has failed."""
        return Timings(self._input, self._infer, self._output)


def _copied(tensor: torch.Tensor, rows: int, spans: Spans) -> list[bytes]:
    # The module may write to its own tensors in the next call. But what is refused by its size is not copied: that
    # would keep the interpreter, and so the lease, for a second a GiB.
    raw = raw_of(tensor)
    size = len(raw) // rows
    parts: list[Any] = [raw[begin * size : end * size] for begin, end in spans]
    return [bytes(part) if len(part) <= VALUE_BYTES_MAX else part for part in parts]


class GpuStreams:
    """The streams of one engine. What it has on the GPU must be made while they are active.

    computing  where everything is queued
    copying    where copies to the host are queued
    """

    def __init__(self, device: torch.device, *, is_shared: bool) -> None:
        """is_shared: everything is computed in the stream that each thread begins with, like all else that asks for it.
        For a module that other instances use tensors of, and may move them: nothing moves while it is used. And for one
        that forks: torch's own threads know of no other stream
        """
        self.computing = torch.cuda.default_stream(device) if is_shared else torch.cuda.Stream(device)
        self.copying = self.computing

    def copy_beside(self) -> None:
        """From now on the next call does not wait for copies. Not for a module that changes itself: what it returns may
        be its own, and the next call write to it.
        """
        self.copying = torch.cuda.Stream(self.computing.device)

    @contextmanager
    def active(self) -> Generator[None]:
        """What this thread gives the GPU meanwhile is queued in the stream of computations."""
        # The GPU first: who leaves a stream of another one sets up a context on the thread's own, which takes memory.
        with torch.cuda.device(self.computing.device), torch.cuda.stream(self.computing):
            yield


class GpuBatch:
    """As `HostBatch`, on a GPU. Its methods are called while its streams are active."""

    def __init__(self, streams: GpuStreams) -> None:
        self._streams = streams
        self._at = self._input = 0
        self._began = self._called = None
        self._calls: list[tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]] = []
        # What is copied must not be freed before that: its memory would be used for the next batch.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._due = 0

    def start(self) -> None:
        self._at = time.perf_counter_ns()
        # Of a call that has failed: nobody will look at them.
        del self._copies[self._due :]

    def input_done(self) -> None:
        self._input += time.perf_counter_ns() - self._at
        self._began = _marked(self._streams.computing)

    def infer_done(self) -> None:
        self._called = _marked(self._streams.computing)

    def pieces(self, tensor: torch.Tensor, rows: int, spans: Spans) -> list[bytes]:
        if tensor.device != self._streams.computing.device:
            return _copied(tensor, rows, spans)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copies.append((host, tensor))
        raw = raw_of(host)
        size = len(raw) // rows
        # Views are encoded like bytes, without another copy. They keep the memory of the whole batch until then.
        views: Any = [raw[begin * size : end * size] for begin, end in spans]
        return views

    def output_done(self) -> None:
        assert self._began is not None and self._called is not None, "the module was called"
        copying = self._streams.copying
        # What was queued since the call is waited for too: states may have been made of what the module returned.
        copying.wait_stream(self._streams.computing)
        with torch.cuda.stream(copying):
            for host, tensor in self._copies[self._due :]:
                # Without `resolve_neg` torch would negate on the host, before the numbers are there.
                host.copy_(tensor.resolve_neg(), non_blocking=True)
        self._due = len(self._copies)
        self._calls.append((self._began, self._called, _marked(copying)))

    def end(self) -> Timings:
        if self._calls:
            *_, over = self._calls[-1]
            over.synchronize()
        self._copies.clear()
        infer_ms = sum(began.elapsed_time(called) for began, called, _ in self._calls)
        output_ms = sum(called.elapsed_time(copied) for _, called, copied in self._calls)
        return Timings(self._input, round(infer_ms * 1e6), round(output_ms * 1e6))


def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """What is reached when the stream has done all that was queued in it. Who waits for it sleeps: a thread that looks
    again and again takes a processor from those that prepare the next batch.
    """
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event

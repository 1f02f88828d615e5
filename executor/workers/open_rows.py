"""The open requests of one model: their answers, on the way from the model's threads to Redis.

Requests to a decoupled model are open from their first batch on, those to another one if their batch has ended without
their only answer.

The model's threads number and encode answers, and hand them over. One task writes all that have gathered during one
round trip with the next one. A request is concluded when its batch has ended, the model has given its last answer, and
every answer before that is written; the last answer itself leaves with the request's commit.

Answers on their way are bounded, those of each request and all together: `send` waits. So a model that answers faster
than Redis writes waits for Redis, and one that answers without an end shares the round trips with the others.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from executor.engine.base import RowError, RowResult
from shared.contract.limits import COUNTED_RESPONSES
from shared.statistics.tally import Response
from shared.store.work_scripts import WorkHeld

ROW_ANSWERS_MAX = 256
ROW_BYTES_MAX = 1 << 20
"""Answers of one request that are on their way to Redis, and their bytes; the last one may exceed it."""
ALL_BYTES_MAX = 64 << 20
"""Bytes of the answers of all requests of a model."""
ROWS_PER_WRITE = 128
"""Requests whose answers travel in one write: with ROW_BYTES_MAX, and as of ALL_BYTES_MAX, they block Redis briefly."""
WRITE_BYTES = 4 << 20
LOOK_S = 0.5
"""How often is asked what became of requests that have no answer to write, where nobody else tells."""
FINISH_S = 5.0
"""How long an executor that leaves waits for last answers. What is open then is run again elsewhere."""

Key = TypeVar("Key")
Encode = Callable[[RowResult | RowError], bytes]
Numbered = tuple[int, bytes]


class OpenRow(Generic[Key]):
    """The answers to one request; see `executor.engine.base.Answers`.

    key     what the request is to its model
    encode  None of a model that is not decoupled: there is one answer, which has no number
    muted   the request runs for its state alone: it was answered before a takeover
    """

    def __init__(self, rows: OpenRows[Key], key: Key, encode: Encode | None, *, muted: bool) -> None:
        self.key = key
        self.count = 0
        self.last: RowResult | RowError | None = None
        self.responses: list[Response] = []
        self.finished: Any = None
        self.waiting: list[Numbered] = []
        self.waiting_bytes = 0
        self.is_writing = False
        self.is_over = False
        self._rows = rows
        self._encode = encode
        self._muted = muted
        self._cancelled = False
        self._since_ns = time.perf_counter_ns()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled or self.is_over

    def cancel(self) -> None:
        """Nobody waits for answers any more: they are dropped. The model is told if it asks, and ends the request."""
        with self._rows.changed:
            self._cancelled = True
            self._rows.changed.notify_all()

    @property
    def _drops(self) -> bool:
        return self._muted or self.is_cancelled or self.last is not None

    def send(self, answer: RowResult | RowError) -> None:
        rows = self._rows
        assert self._encode is not None, "it has one answer"
        with rows.changed:
            while not self._drops and (self.is_full or rows.is_full):
                rows.changed.wait()
            if self._drops:
                return
            self._note(answer)
            self.count += 1
            raw = self._encode(msgspec.structs.replace(answer, number=self.count))
            self.waiting.append((self.count, raw))
            self.waiting_bytes += len(raw)
            rows.bytes += len(raw)
            rows.put(self)

    def end(self, last: RowResult | RowError, keep_state: Callable[[], None] | None = None) -> None:
        with self._rows.changed:
            if self.is_over or self.last is not None:
                return
            if keep_state is not None:
                keep_state()
            self.last = last
            if self._encode is not None:
                self._note(last)
                self.last = msgspec.structs.replace(last, number=self.count + 1)
            self._rows.changed.notify_all()
            self._rows.put(self)

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= ROW_ANSWERS_MAX or self.waiting_bytes >= ROW_BYTES_MAX

    def _note(self, answer: RowResult | RowError) -> None:
        """Counts an answer for the statistics; those beyond the bound as one."""
        now_ns = time.perf_counter_ns()
        failed = isinstance(answer, RowError)
        response = Response(now_ns - self._since_ns, failed, not failed and answer.empty)
        self._since_ns = now_ns
        if len(self.responses) < COUNTED_RESPONSES:
            self.responses.append(response)

    @property
    def is_concluded(self) -> bool:
        return self.last is not None and self.finished is not None and not self.waiting and not self.is_writing


class OpenRows(Generic[Key]):
    """The open requests of one model on this executor.

    write  writes answers that are not the last ones; what became of each request. None where there are none, and
           nobody `looks`
    ended  called on the event loop for each concluded request, which is forgotten before
    looks  ask for requests without answers too, whether they are still wanted

    `changed` guards all fields that the model's threads read or write.
    """

    def __init__(
        self,
        write: Callable[[Sequence[tuple[Key, Sequence[Numbered]]]], Awaitable[Sequence[WorkHeld]]] | None,
        ended: Callable[[OpenRow[Key]], None],
        *,
        looks: bool,
    ) -> None:
        self._write = write
        self._ended = ended
        self._looks = looks
        self._loop = asyncio.get_running_loop()
        self._look_at_s = 0.0
        self._due = asyncio.Event()
        self._fewer = asyncio.Event()
        self._rows: dict[int, OpenRow[Key]] = {}
        self._news: dict[int, OpenRow[Key]] = {}
        # Re-entrant: the collector of garbage may call `end` of another request on a thread that holds it.
        self.changed = threading.Condition()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        return self.bytes >= ALL_BYTES_MAX

    def open(self, key: Key, encode: Encode | None, *, muted: bool = False) -> OpenRow[Key]:
        row = OpenRow(self, key, encode, muted=muted)
        if self._looks and not self._rows:
            self._look_at_s = self._loop.time() + LOOK_S
            self._due.set()
        self._rows[id(row)] = row
        return row

    def put(self, row: OpenRow[Key]) -> None:
        """Something of the row is to be done on the event loop. Called by any thread, with `changed` held."""
        if not self._news:
            try:
                self._loop.call_soon_threadsafe(self._due.set)
            except RuntimeError:
                # The event loop is closed, and the process about to end.
                row.is_over = True
                return
        self._news[id(row)] = row

    def conclude(self, row: OpenRow[Key], finished: Any, *, last: RowResult | RowError | None = None) -> None:
        """The row's batch has ended, and with it nothing runs over the row but the model's own threads.

        finished  handed on with the row
        last      the row's only answer, if the engine gave it at once
        """
        with self.changed:
            row.finished = finished
            if last is not None:
                row.end(last)
            self.put(row)

    def drop(self, row: OpenRow[Key]) -> None:
        """This executor does not run the request any more. What the model still sends is dropped."""
        with self.changed:
            row.is_over = True
            self.bytes -= row.waiting_bytes
            row.waiting, row.waiting_bytes = [], 0
            self.changed.notify_all()
        if self._rows.pop(id(row), None) is not None:
            self._fewer.set()

    async def below(self, count: int) -> None:
        """Returns when fewer requests are open."""
        while len(self._rows) >= count:
            self._fewer.clear()
            await self._fewer.wait()

    async def quiet(self) -> None:
        """Returns when no request is open. Those that stay open for too long are dropped."""
        try:
            async with asyncio.timeout(FINISH_S):
                await self.below(1)
        except TimeoutError:
            self.drop_all()

    def drop_all(self) -> None:
        for row in list(self._rows.values()):
            self.drop(row)

    async def run(self) -> None:
        """Writes answers and concludes requests, for ever."""
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._look_at_s if self._looks and self._rows else None):
                        await self._due.wait()
                self._due.clear()
                await self._look()
                while taken := self._take():
                    await self._written(taken)
                    # Where answers come without an end, too.
                    await self._look()
        finally:
            self.drop_all()

    async def _look(self) -> None:
        """Asks what became of the requests, if it is time for that."""
        now_s = self._loop.time()
        if self._looks and self._rows and now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            await self._written({id(row): (row, []) for row in self._rows.values()})

    def _take(self) -> Mapping[int, tuple[OpenRow[Key], Sequence[Numbered]]]:
        """The answers of one write. Concludes the rows that have none to be written."""
        taken: dict[int, tuple[OpenRow[Key], Sequence[Numbered]]] = {}
        concluded: list[OpenRow[Key]] = []
        with self.changed:
            size = 0
            for key, row in list(self._news.items()):
                if len(taken) >= ROWS_PER_WRITE or size >= WRITE_BYTES:
                    break
                del self._news[key]
                if row.waiting:
                    taken[key] = row, row.waiting
                    size += row.waiting_bytes
                    self.bytes -= row.waiting_bytes
                    row.waiting, row.waiting_bytes, row.is_writing = [], 0, True
                elif row.is_concluded and not row.is_over:
                    concluded.append(row)
            self.changed.notify_all()
        for row in concluded:
            self.drop(row)
            self._ended(row)
        return taken

    async def _written(self, taken: Mapping[int, tuple[OpenRow[Key], Sequence[Numbered]]]) -> None:
        assert self._write is not None, "there are no answers before the last ones"
        outcomes = await self._write([(row.key, answers) for row, answers in taken.values()])
        for (row, _), held in zip(taken.values(), outcomes, strict=True):
            if held is WorkHeld.GONE:
                self.drop(row)
            elif held is WorkHeld.CANCELLED:
                row.cancel()
        with self.changed:
            for row, _ in taken.values():
                row.is_writing = False
                if row.waiting or row.is_concluded:
                    self._news[id(row)] = row

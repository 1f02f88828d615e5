"""Requests that wait for a slot, and have asked to hear when they will have it.

A request asks by a parameter. While it waits, its place and the estimate are read from the forecast of its model's
leader (`shared.store.forecasts`), every half second for all requests of this gateway that have asked. They go to the
caller if its protocol can carry them before the answer, and into the error if the request is refused.

A request that says how long its caller will wait is taken back when it is almost certain to wait longer. The mesh
decides whether it comes too late for that: a step that has its slot meanwhile is run and answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from gateway.requests.waiting import PendingRequest
from shared.contract.errors import MeshError, Reason, SequenceError
from shared.contract.forecast import Forecast, Outlook
from shared.contract.ids import SequenceId
from shared.process import logs
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.forecasts import Forecasts

LOOK_S = 0.5
"""Pause between two looks at the forecasts."""


class SlotWaits:
    """The requests of one gateway that have asked.

    withdraw  takes an accepted request back
    """

    def __init__(self, forecasts: Forecasts, withdraw: Callable[[PendingRequest], None]) -> None:
        self._forecasts = forecasts
        self._withdraw = withdraw
        self._waiting: list[PendingRequest] = []
        self._refused: list[tuple[PendingRequest, MeshError]] = []
        self._work = asyncio.Event()

    def begin(self, pending: PendingRequest) -> None:
        """The request was accepted, and waits for a slot, as far as is known."""
        self._waiting.append(pending)
        self._work.set()

    def refuse(self, pending: PendingRequest, error: MeshError) -> None:
        """Fails a request because the line is full, as soon as the error can say what to expect of it."""
        self._refused.append((pending, error))
        self._work.set()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        self._waiting = [pending for pending in self._waiting if pending.waits]
        refused, self._refused = self._refused, []
        if not self._waiting and not refused:
            self._work.clear()
            return
        forecasts: Mapping[str, Forecast] = {}
        try:
            forecasts = await self._read([*self._waiting, *(pending for pending, _ in refused)])
        finally:
            for pending, error in refused:
                if (forecast := forecasts.get(pending.call.model)) is not None:
                    error.outlook = forecast.behind(pending.admitted.message.version)
                pending.failed(error)
        for pending in self._waiting:
            forecast = forecasts.get(pending.call.model)
            outlook = forecast.of(pending.sequence) if forecast is not None else None
            if outlook is not None and pending.waits:
                self._tell(pending, outlook)

    async def _read(self, requests: Iterable[PendingRequest]) -> Mapping[str, Forecast]:
        """The forecasts of the requests' models. While Redis is away, or full, there may be none."""
        asked = {pending.call.model: pending.sequence for pending in requests}
        found = await asyncio.gather(*map(self._forecast, asked.values()))
        return {model: forecast for model, forecast in zip(asked, found, strict=True) if forecast is not None}

    async def _forecast(self, sequence: SequenceId) -> Forecast | None:
        try:
            return await self._forecasts.of(sequence)
        except LOST_OR_REFUSED as error:
            logs.debug("no forecast", sequence=sequence, error=str(error))
            return None

    def _tell(self, pending: PendingRequest, outlook: Outlook) -> None:
        wait = pending.wait
        assert wait is not None, "only requests that have asked are kept"
        if wait.is_new and is_beyond(outlook, pending.call.wait_max_ms) and wait.refusal is None:
            wait.refusal = too_long(pending, outlook)
            self._withdraw(pending)
        pending.foretold(outlook)


def is_beyond(outlook: Outlook, max_ms: int) -> bool:
    """Whether a wait is almost certain to be longer than its caller will wait; 0: it has not said how long."""
    # Where only idle timeouts are known, any wait is possible: its lower end is 0.
    return bool(max_ms) and outlook.low_ms is not None and outlook.low_ms > max_ms


def too_long(pending: PendingRequest, outlook: Outlook) -> SequenceError:
    """The error of a request that was taken back because it would wait too long."""
    call = pending.call
    error = SequenceError(
        f"sequence {pending.admitted.message.correlation_id} of model '{call.model}' would wait for a slot for about "
        f"{outlook.wait_ms} ms, at place {outlook.place} of the line, and 'sequence_wait_max_ms' is "
        f"{call.wait_max_ms}: it was not started, try again later",
        Reason.WAIT_TOO_LONG,
    )
    error.outlook = outlook
    return error

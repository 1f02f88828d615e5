"""Asks the leader of a model how its waiting lines stand and move, and reads its forecast (`shared.contract.forecast`).

A question is an entry in the model's starts stream, which the leader removes. The forecast is a key that the leader
then writes every second for a while, for everybody. Without questions there is none.
"""

from __future__ import annotations

import asyncio
import time

from shared.contract.forecast import Forecast, decode_forecast
from shared.contract.ids import SequenceId, model_of
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.reading import value_of
from shared.store.wishes import WishEntry, uttered

ASK_AGAIN_S = 5.0
"""How long one question counts; a leader answers it for twice this time."""
PATIENCE_S, POLL_S = 1.0, 0.05
"""How long a first forecast is waited for, and how often it is looked for. A leader needs some ms for it."""


class Forecasts:
    """The forecasts of the mesh's models, for one process."""

    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        self._redis = redis
        self._keys = keys
        self._asked: dict[str, float] = {}

    async def of(self, sequence: SequenceId) -> Forecast | None:
        """The waiting lines of a sequence's model; None if no leader says how they stand.

        Raises one of CONNECTION_LOST, or ResponseError when Redis is full.
        """
        model, now = model_of(sequence), time.monotonic()
        question = None
        if now - self._asked.get(model, -ASK_AGAIN_S) >= ASK_AGAIN_S:
            question = await uttered(self._redis, self._keys, sequence, WishEntry("i", {}))
            # Only of the models whose question still counts: names come and go.
            self._asked = {one: at for one, at in self._asked.items() if now - at < ASK_AGAIN_S} | {model: now}
        forecast = None
        try:
            forecast = await self._read(model)
            while forecast is None and question is not None and time.monotonic() - now < PATIENCE_S:
                await asyncio.sleep(POLL_S)
                forecast = await self._read(model)
        finally:
            if forecast is None and question is not None:
                # Nobody leads the model, or the caller has gone: the questions must not pile up. Several may have been
                # on their way at once.
                self._asked.pop(model, None)
                await self._redis.xdel(*question)
        return forecast

    async def _read(self, model: str) -> Forecast | None:
        key = self._keys.forecast(model)
        # For a key of another type MGET has no error: the leader's next forecast replaces it.
        (raw,) = await self._redis.mget([key])
        return None if raw is None else value_of(key, raw, decode_forecast)

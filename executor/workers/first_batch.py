"""Triton's two debug variables, with which tests of batching get a predictable first batch.

    TRITONSERVER_DELAY_SCHEDULER          a model runs nothing until so many of its requests are queued: direct, in the
                                          slots of all its instances here; oldest, ready in the instance's own queue;
                                          stateless, in the model's queue
    TRITONSERVER_BACKLOG_DELAY_SCHEDULER  direct only: and until so many requests wait in the backlog

They hold back the first batch of each load of a model, and no other. They are read when a model is loaded, and are for
debugging only: if so many requests never come, the others wait for ever. Each executor counts for itself.

Source: Triton core, sequence_batch_scheduler.cc and dynamic_batch_scheduler.cc (triton-spec 1.12).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

from shared.contract.errors import LoadError
from shared.store.commands import Redis
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.keyspace import Keyspace
from shared.store.waiting_line import read_lines

REQUESTS_VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"
BACKLOG_VARIABLE = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"
POLL_S = 0.01

CountWaiting = Callable[[], Awaitable[int]]
"""Counts the requests of a model's sequences that wait for a slot."""


class FirstBatch:
    """Whether a model's first batch may run. Belongs to one load of the model, and outlives a lost lease."""

    def __init__(self, requests: int = 0, backlog: int = 0) -> None:
        """requests, backlog: how many requests must be queued, and how many must wait for a slot; 0 for none"""
        self._requests = requests
        self._backlog = backlog
        self.is_open = requests == 0 and backlog == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> FirstBatch:
        """As the variables say. Raises LoadError for one that is not a number."""
        variables = os.environ if environment is None else environment
        return cls(_count(variables, REQUESTS_VARIABLE), _count(variables, BACKLOG_VARIABLE))

    def look(self, queued: int, backlog: int | None = None) -> bool:
        """Whether the first batch may run; once True, always. backlog: None for a batcher that does not count it"""
        if queued >= self._requests and (backlog is None or backlog >= self._backlog):
            self.is_open = True
        return self.is_open

    async def opened(self, queued: Callable[[], int], count_waiting: CountWaiting | None = None) -> None:
        """Returns when the first batch may run; at once if no variable is set."""
        while not self.is_open:
            waiting = await count_waiting() if count_waiting is not None and self._backlog else None
            if not self.look(queued(), waiting):
                await asyncio.sleep(POLL_S)


def _count(variables: Mapping[str, str], name: str) -> int:
    value = variables.get(name, "") or "0"
    if not (value.isascii() and value.isdigit()):
        raise LoadError(f"the environment variable {name} must be a number of requests, not '{value}'")
    return int(value)


async def backlog_requests(redis: Redis, keys: Keyspace, model: str) -> int:
    """Requests of sequences of a model that wait for a slot; 0 while Redis cannot be reached."""
    try:
        lines = await read_lines(redis, keys, [model])
    except CONNECTION_LOST:
        return 0
    return lines[model].steps.total()

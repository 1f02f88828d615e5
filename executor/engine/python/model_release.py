"""A model's optional method `release`, which tells it that it does not own a sequence any more and may forget it.

    def release(self, correlation_id): ...

A model that keeps something by correlation id learns of a sequence's END from its flags. It does not learn from them
that a sequence has expired, was cancelled, has failed, gave up its slot, or goes on at another executor. So `release`
is called for every sequence that the model was given, by START or by `restore`, when that sequence leaves this instance
for any reason, END included. It is called on the model's thread, before anything comes under the same id
again. It is not called for a START that begins an open sequence again, nor for sequences that are open when the model
is finalized.

Triton knows no such method. A method of this name with another purpose is recognised by its parameter's name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from executor.engine.base import Row
from executor.engine.python.model import CallBlock, error_text, takes
from shared.contract.ids import CorrelationId

RELEASE = "release"

log = logging.getLogger(__name__)


def has_release(model_class: type[Any]) -> bool:
    return takes(getattr(model_class, RELEASE, None), correlation_id=0)


class GivenSequences:
    """The sequences that a model was given and has not released yet. executing: as of a `ModelState`"""

    def __init__(self, model: Any, name: str, executing: CallBlock) -> None:
        self._model = model
        self._name = name
        self._executing = executing
        self._given: dict[CorrelationId, None] = {}

    def give(self, rows: Iterable[Row]) -> None:
        """Notes that the model is given these rows.
        Rows of no sequence (null rows, trial runs at load) do not count.
        """
        self._given.update((row.correlation_id, None) for row in rows if row.correlation_id and row.slot is not None)

    def give_back(self, correlation_id: CorrelationId) -> None:
        """Notes that the model is given a sequence's state."""
        self._given[correlation_id] = None

    def release(self, correlation_id: CorrelationId) -> None:
        """Tells the model to forget a sequence, if the model was given it. An exception is logged, because no caller
        waits.
        """
        if correlation_id not in self._given:
            return
        del self._given[correlation_id]
        try:
            with self._executing():
                self._model.release(correlation_id=correlation_id)
        except BaseException as error:  # noqa: BLE001 - the model's own code
            log.error("model '%s': release of sequence %s failed: %s", self._name, correlation_id, error_text(error))

    def release_all(self) -> None:
        """Tells the model to forget every sequence that it was given."""
        for correlation_id in list(self._given):
            self.release(correlation_id)

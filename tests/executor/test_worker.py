"""An engine's thread: what the engine raises is the rows' error, never the loop's."""

from __future__ import annotations

from typing import Any

import pytest

from executor.engine.base import Row, RowError
from executor.worker import EngineWorker
from shared.ids import InstanceIndex


class Broken:
    """An engine that fails as a whole."""

    def __init__(self, failure: BaseException) -> None:
        self._failure = failure

    def run(self, rows: Any, want_state: Any) -> Any:
        raise self._failure

    def close(self) -> None: ...


@pytest.mark.parametrize("failure", [MemoryError("no room"), SystemExit(3)])
async def test_an_engine_that_raises_fails_every_row_but_the_null_rows(failure: BaseException) -> None:
    broken: Any = Broken(failure)
    worker = EngineWorker(broken, "sum", "sum_0_0", InstanceIndex(0))

    result = await worker.run([Row(inputs={}), Row(inputs={}, null=True)], [False, False])

    assert [RowError("INTERNAL", f"model 'sum' failed: {type(failure).__name__}: {failure}"), None] == list(result.rows)
    await worker.close()

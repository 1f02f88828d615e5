"""An engine's thread: what the engine raises is the rows' error, never the loop's."""

from __future__ import annotations

from typing import Any

from executor.engine.base import Row, RowError
from executor.worker import EngineWorker
from shared.ids import InstanceIndex


class Broken:
    """An engine that fails as a whole."""

    def run(self, rows: Any, want_state: Any) -> Any:
        raise MemoryError("no room")

    def close(self) -> None: ...


async def test_an_engine_that_raises_fails_every_row_but_the_null_rows() -> None:
    broken: Any = Broken()
    worker = EngineWorker(broken, "sum", "sum_0_0", InstanceIndex(0))

    result = await worker.run([Row(inputs={}), Row(inputs={}, null=True)], [False, False])

    assert [RowError("INTERNAL", "model 'sum' failed: no room"), None] == list(result.rows)
    await worker.close()

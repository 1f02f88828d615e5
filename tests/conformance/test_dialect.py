"""The dialect (docs/triton/dialect.md): what Triton's own parser refuses."""

from __future__ import annotations

import pytest

from shared.contract.errors import Code
from tests.conformance.calls import Caller, Step, fresh_id, refused

pytestmark = pytest.mark.mesh_only("Triton does not parse the dialect")
EXPIRED = "timeout of the corresponding sequence has been expired"
SHORT_US = 1


async def test_timeout_in_the_backlog_refuses_a_sequence_or_serves_it_late(lone_caller: Caller) -> None:
    """TIMEOUT_REJECT: it fails with its sequence, as in Triton. TIMEOUT_COMPLETE: it is served when a slot is free.

    Both models have one slot (`reusable_batch { max_size: 1 }`), which a sequence holds that began without START.
    """
    complete, reject = lone_caller.of("dialect_complete"), lone_caller.of("dialect_reject")
    holder, waiter = fresh_id(), fresh_id()
    assert [5, 5] == [(await caller(holder, 5)).total for caller in (complete, reject)]

    late = complete.begin(Step(waiter, 7, end=True, timeout_us=SHORT_US))
    with refused(Code.UNAVAILABLE, EXPIRED):
        await reject.infer(Step(waiter, 7, end=True, timeout_us=SHORT_US))

    assert [11, 11] == [(await caller(holder, 6, end=True)).total for caller in (complete, reject)]
    assert 7 == (await late).total
    # The slot that the refused sequence did not get serves the next one.
    assert 3 == (await reject(fresh_id(), 3, end=True)).total

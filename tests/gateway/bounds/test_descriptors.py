"""Open files are shared out so that nothing else has to go without."""

from __future__ import annotations

import pytest

from gateway.bounds.descriptors import (
    CONNECTIONS_MAX,
    LEAVING,
    METRICS,
    METRICS_SPARE,
    OWN,
    PORTS,
    SPARE,
    DescriptorShares,
    shares,
)


@pytest.mark.parametrize("limit", [128, 200, 1024, 5000])
def test_all_shares_together_are_no_more_than_there_are(limit: int) -> None:
    given = shares(limit)

    assert OWN + given.http + given.grpc + METRICS + SPARE + METRICS_SPARE + PORTS * LEAVING <= limit
    assert 1 <= given.http_per_client <= given.http


def test_what_was_set_counts() -> None:
    assert shares(1 << 20).http == shares(1 << 20).grpc == CONNECTIONS_MAX
    assert DescriptorShares(10, 5, CONNECTIONS_MAX) == shares(1 << 20, http=10)
    assert DescriptorShares(10, 7, 20) == shares(1 << 20, http=10, http_per_client=7, grpc=20)

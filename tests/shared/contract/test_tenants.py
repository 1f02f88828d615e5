"""What an operator may set for a tenant, and whom a header names."""

from __future__ import annotations

import pytest

from shared.contract.errors import RequestError
from shared.contract.tenants import (
    COUNT_MAX,
    EVERY_OTHER,
    RATE_MAX,
    RATE_MIN,
    SHARE_MAX,
    TenantLimits,
    Tenants,
    problem_of_name,
    tenant_of,
)


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        (TenantLimits(), ""),
        (TenantLimits(COUNT_MAX, RATE_MAX, COUNT_MAX, SHARE_MAX), ""),
        (TenantLimits(steps_per_s=RATE_MIN), ""),
        (TenantLimits(live_max=-1), "from 0 to"),
        (TenantLimits(live_max=COUNT_MAX + 1), "from 0 to"),
        (TenantLimits(burst=COUNT_MAX + 1), "from 0 to"),
        (TenantLimits(steps_per_s=RATE_MIN / 2), "steps per second"),
        (TenantLimits(steps_per_s=2.0 * RATE_MAX), "steps per second"),
        (TenantLimits(steps_per_s=-1.0), "steps per second"),
        (TenantLimits(steps_per_s=float("nan")), "steps per second"),
        (TenantLimits(share=0), "a share"),
        (TenantLimits(share=SHARE_MAX + 1), "a share"),
    ],
)
def test_limits_beyond_what_the_mesh_counts_are_no_limits(limits: TenantLimits, problem: str) -> None:
    assert bool(problem) is bool(limits.problem())
    assert problem in limits.problem()


@pytest.mark.parametrize(("rate", "burst", "expected"), [(0.0, 0, 1), (0.2, 0, 1), (7.6, 0, 8), (9.0, 3, 3)])
def test_a_burst_is_what_comes_in_a_second_unless_it_is_set(rate: float, burst: int, expected: int) -> None:
    assert expected == TenantLimits(steps_per_s=rate, burst=burst).burst_max


def test_a_tenant_has_its_own_limits_or_those_of_every_other_one() -> None:
    acme, others = TenantLimits(live_max=3, share=2), TenantLimits(live_max=1)
    tenants = Tenants({"acme": acme, EVERY_OTHER: others})

    assert (acme, others, TenantLimits()) == (tenants.of("acme"), tenants.of("blue"), Tenants().of("acme"))
    assert {"acme": 2} == tenants.shares
    assert {"": 1, "acme": 2, EVERY_OTHER: 3} == Tenants({"acme": acme, EVERY_OTHER: TenantLimits(share=3)}).shares


def test_one_request_is_one_tenant_s() -> None:
    assert ("a.b_C-9", "acme") == (tenant_of("a.b_C-9"), tenant_of("acme", "acme"))
    assert ("", "") == (problem_of_name("acme"), problem_of_name(EVERY_OTHER))
    with pytest.raises(RequestError, match="names two tenants, 'acme' and 'blue'"):
        tenant_of("blue", "acme")
    for name in ("", "a b", "a" * 65, EVERY_OTHER):
        with pytest.raises(RequestError, match="has to name a tenant"):
            tenant_of(name)
    assert "is no name of a tenant" in problem_of_name("a b")

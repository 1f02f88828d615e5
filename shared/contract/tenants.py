"""Tenants: on whose behalf requests come, and what the operator allows each of them.

A request names its tenant by the header `seqmesh-tenant`, in gRPC by the metadata key of the same name. The mesh
believes the header: a proxy that knows its users sets it. A sequence belongs to the tenant of the request that began
it. Requests without the header have no tenant, and no limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

import msgspec

from shared.contract.errors import RequestError

TENANT_HEADER = "seqmesh-tenant"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
EVERY_OTHER = "*"
"""In the place of a name: each tenant that has no limits of its own."""


class TenantLimits(msgspec.Struct, frozen=True):
    """What a tenant may do. Zeros mean: as much as it likes.

    live_max     most sequences that are not over
    steps_per_s  most requests in a second, on average
    burst        most requests at one moment, if none came lately; 0: those of one second
    share        weight where slots are short: a tenant of share 2 gets twice the slots of one of share 1
    """

    live_max: int = 0
    steps_per_s: float = 0.0
    burst: int = 0
    share: int = 1

    @property
    def burst_max(self) -> int:
        """Requests that may come at one moment, at least 1."""
        return self.burst or max(1, round(self.steps_per_s))

    def problem(self) -> str:
        """What is wrong with these limits; "" for nothing."""
        if not 0 <= self.live_max <= COUNT_MAX or not 0 <= self.burst <= COUNT_MAX:
            return f"most sequences (live-max) and a burst are whole numbers from 0 to {COUNT_MAX}"
        if self.steps_per_s and not RATE_MIN <= self.steps_per_s <= RATE_MAX:
            return f"steps per second are 0, for any number, or {RATE_MIN} to {RATE_MAX}"
        if not 1 <= self.share <= SHARE_MAX:
            return f"a share is a whole number from 1 to {SHARE_MAX}"
        return ""


COUNT_MAX = 1_000_000_000
RATE_MIN, RATE_MAX = 0.001, 1_000_000
SHARE_MAX = 1000

NO_LIMITS = TenantLimits()


class Tenants(msgspec.Struct, frozen=True, dict=True):
    """The limits of all tenants, by name."""

    named: Mapping[str, TenantLimits] = {}

    def of(self, tenant: str) -> TenantLimits:
        """The limits of a tenant: its own, else those of every other one."""
        return self.named.get(tenant) or self.named.get(EVERY_OTHER, NO_LIMITS)

    @cached_property
    def shares(self) -> dict[str, int]:
        """The share of EVERY_OTHER if it is not 1, and those that differ from it, by tenant. Whoever names no tenant
        ("") has a share of 1.
        """
        usual = self.of(EVERY_OTHER).share
        shares = {"": 1} | {name: limits.share for name, limits in self.named.items()}
        return {name: share for name, share in shares.items() if share != (1 if name == EVERY_OTHER else usual)}


NO_TENANTS = Tenants()


def tenant_of(value: str, named: str = "") -> str:
    """The tenant that a header names. Raises RequestError for what is no name, and for two tenants of one request.

    named  by the same header before, as by the client and by a proxy that did not take it away
    """
    if not NAME.fullmatch(value):
        raise RequestError(
            f"the header '{TENANT_HEADER}' has to name a tenant: 1 to 64 letters, digits, '.', '_' or '-'"
        )
    if named not in ("", value):
        raise RequestError(f"the header '{TENANT_HEADER}' names two tenants, '{named}' and '{value}': name one")
    return value


def problem_of_name(name: str) -> str:
    """What is wrong with a name that limits are set for; "" for nothing."""
    if name == EVERY_OTHER or NAME.fullmatch(name):
        return ""
    return f"{name!r} is no name of a tenant: 1 to 64 letters, digits, '.', '_' or '-', or '{EVERY_OTHER}'"

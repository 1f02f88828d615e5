"""Lets requests of a tenant in as fast as the operator allows: so many a second, over all gateways.

What a tenant may send now is counted in Redis (`draw.lua`). A gateway takes some requests more than it has: what the
tenant may send in AHEAD_S. So most requests of a busy tenant wait for no round trip. What is not used within CREDIT_S
is lost to the tenant.

The requests of a tenant are let in, or refused, in the order in which they came. Without Redis they are let in: nothing
is accepted then, and they wait, or fail, where all others do.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from gateway.requests.exchange.replies import never_sent
from gateway.requests.status import told_of
from shared.contract.errors import MeshError, Reason, SequenceError
from shared.contract.tenants import EVERY_OTHER, TenantLimits, Tenants
from shared.process import logs
from shared.store.script_values import Drawn

AHEAD_S = 0.02
CREDIT_S = 1.0
TENANTS_MAX = 1024
"""Tenants whose credit is remembered; beyond that, those that were quiet for longest are forgotten."""

Draw = Callable[[str, TenantLimits, int], Awaitable[Drawn]]


class Allowance:
    """Of one tenant: requests that may enter at once until a time (monotonic, s), and those that wait for more."""

    def __init__(self) -> None:
        self.credit = 0
        self.until = 0.0
        self.waiting: deque[Enters] = deque()
        self.drawing: asyncio.Task[None] | None = None

    def take(self, now: float) -> bool:
        """Uses the credit for one request, if there is any."""
        if self.credit < 1 or now > self.until:
            return False
        self.credit -= 1
        return True


Enters = Callable[[MeshError | None], None]
"""What becomes of a request: it enters (None), or is refused."""


class Allowances:
    """Of all tenants, in one gateway.

    tenants  their limits as they are now
    draw     takes requests from what a tenant may send; raises what redis-py raises
    """

    def __init__(self, tenants: Callable[[], Tenants], draw: Draw) -> None:
        self._tenants = tenants
        self._draw = draw
        self._known: OrderedDict[str, Allowance] = OrderedDict()
        self._waiting = 0

    def __len__(self) -> int:
        """Requests that wait to be let in. Counted as they come and go: each request to the gateway asks."""
        return self._waiting

    def counted_as(self, tenant: str) -> str:
        """The name under which a tenant is counted: clients may make names up, so only those with limits of their own
        are told apart."""
        return tenant if tenant in self._tenants().named else EVERY_OTHER

    def enter(self, tenant: str, enters: Enters) -> None:
        """Lets a request in, or refuses it, now or as soon as it is known."""
        limits = self._tenants().of(tenant)
        allowance = self._known.get(tenant)
        if not limits.steps_per_s and allowance is None:
            enters(None)
            return
        if allowance is None:
            self._forget()
            allowance = self._known[tenant] = Allowance()
        self._known.move_to_end(tenant)
        if not allowance.waiting and (not limits.steps_per_s or allowance.take(time.monotonic())):
            enters(None)
            return
        allowance.waiting.append(enters)
        self._waiting += 1
        if allowance.drawing is None:
            allowance.drawing = asyncio.create_task(self._let_in(tenant, allowance), name=f"allowance of {tenant}")

    def give_up(self, cause: str) -> None:
        """Refuses all requests that wait; what is decided about them later comes too late. cause: begins the error's
        text"""
        for allowance in self._known.values():
            for enters in allowance.waiting:
                enters(never_sent(cause))

    def _forget(self) -> None:
        quiet = [name for name, allowance in self._known.items() if allowance.drawing is None]
        for name in quiet[: max(0, len(self._known) - TENANTS_MAX)]:
            del self._known[name]

    async def _let_in(self, tenant: str, allowance: Allowance) -> None:
        try:
            while allowance.waiting:
                await self._round(tenant, allowance)
        except Exception as error:  # noqa: BLE001  of those that wait alone: nobody would ask for them again
            told = told_of(error, "allowance failed unexpectedly", tenant=tenant)
            while allowance.waiting:
                self._decide(allowance, told)
        finally:
            allowance.drawing = None

    async def _round(self, tenant: str, allowance: Allowance) -> None:
        """Decides upon all requests that wait now, in their order.

        Where the connection is lost all of them enter: while Redis is away a tenant may exceed its rate. What is left
        of a draw may be used for CREDIT_S and is lost then, also if the tenant's limits have changed meanwhile.
        """
        limits, asked = self._tenants().of(tenant), len(allowance.waiting)
        drawn = Drawn(asked, 0)
        if limits.steps_per_s:
            try:
                drawn = await self._draw(tenant, limits, asked + int(limits.steps_per_s * AHEAD_S))
            except (RedisError, OSError) as lost:
                logs.debug("allowance not counted", tenant=tenant, error=str(lost))
        for number in range(asked):
            self._decide(allowance, None if number < drawn.granted else too_fast(tenant, limits, drawn.next_us))
        allowance.credit, allowance.until = max(0, drawn.granted - asked), time.monotonic() + CREDIT_S

    def _decide(self, allowance: Allowance, refusal: MeshError | None) -> None:
        """Lets the request in that has waited for longest, or refuses it."""
        self._waiting -= 1
        allowance.waiting.popleft()(refusal)


def too_fast(tenant: str, limits: TenantLimits, next_us: int) -> SequenceError:
    """The error of a request that comes too soon. next_us: until the tenant may send one more"""
    error = SequenceError(
        f"tenant '{tenant}' sends more than the {limits.steps_per_s:g} requests a second that it may: try again later",
        Reason.QUOTA,
        None,
    )
    error.wait_ms = -(-next_us // 1000)
    return error

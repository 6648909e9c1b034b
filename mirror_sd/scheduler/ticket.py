"""A request as the scheduler sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass

TIERS = ("vip", "standard")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Times are seconds of the injected clock.

    `arrived_at` is when the gateway received it: a request that is submitted again after a lost
    worker keeps it, and so its place in the queue. `cost` is the work it asks for, in any unit:
    tenants get equal shares of it. `tokens_left` is how much longer it may run.
    `is_resumed`: part of its answer has been given, so that it can no longer be refused.
    `waits_for_batch`: it may be held back for a moment to join a running batch with others.
    `spare`: classes that must not take it over.
    """

    request_id: str
    device_class: str
    tier: str
    tenant: str
    arrived_at: float
    deadline: float = math.inf
    cost: float = 1.0
    tokens_left: int = 0
    is_resumed: bool = False
    waits_for_batch: bool = False
    spare: tuple[str, ...] = ()

    @property
    def is_vip(self) -> bool:
        return self.tier == TIERS[0]

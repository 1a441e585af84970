"""Whom to stop so that a tenant below its share need not wait for a place: a pure choice."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import msgspec

Ticket = TypeVar("Ticket", bound=Hashable)


class Running(msgspec.Struct, Generic[Ticket], frozen=True, kw_only=True):
    """A granted request."""

    ticket: Ticket
    tenant: str
    counter: float
    """Of its tenant, now."""
    granted_order: int
    """Grows with every grant."""
    charge: float
    """What its tenant was charged for it, by weight."""


def victim(
    running: Sequence[Running[Ticket]], *, tenant: str, counter: float, charge: float, quantum: float
) -> Ticket | None:
    """The newest request of the most over-served tenant, or None if nobody is over-served enough.

    `tenant` and `counter` are those of the one that waits, `charge` is what it would be charged. Over-served is who has
    most running, by weight, and is not behind in its counter: whoever comes from idle has a counter like everybody's,
    so the counter alone would never give it a place. Without the victim its tenant must still have more running than
    the other would have with its request, and `quantum` more: so two tenants never stop each other in turn.
    """
    has_running: dict[str, float] = defaultdict(float)
    for one in running:
        has_running[one.tenant] += one.charge
    others = [one for one in running if one.tenant != tenant and one.counter >= counter]
    if not others:
        return None
    worst = max(others, key=lambda one: (has_running[one.tenant], one.granted_order)).tenant
    newest = max((one for one in others if one.tenant == worst), key=lambda one: one.granted_order)
    left = has_running[worst] - newest.charge
    return newest.ticket if left >= has_running[tenant] + charge + quantum else None

"""Whom to stop so that a tenant below its share need not wait for a place: a pure choice."""

from collections.abc import Hashable, Iterable
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
    """What its tenant was charged for it, by weight: what the counter would be lower without it."""


def victim(
    running: Iterable[Running[Ticket]], *, tenant: str, counter: float, quantum: float
) -> Ticket | None:
    """The newest request of the most over-served tenant, or None if nobody is over-served enough.

    `tenant` and `counter` are those of the one that waits. A tenant is over-served if its counter would
    still be more than `quantum` above that one's without the victim: then stopping it takes nothing that
    the victim's tenant would get back at once, so two tenants never stop each other in turn.
    """
    others = [one for one in running if one.tenant != tenant]
    worst = max((one.counter for one in others), default=0.0)
    of_worst = [one for one in others if one.counter == worst]
    newest = max(of_worst, key=lambda one: one.granted_order, default=None)
    if newest is None or newest.counter - newest.charge <= counter + quantum:
        return None
    return newest.ticket

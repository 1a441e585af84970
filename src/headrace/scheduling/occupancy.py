"""Who fills the queue: waiting requests and tokens of every tenant, bounded, the largest gives way."""

from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from headrace.scheduling.jobs import Job
from headrace.scheduling.lazy_heap import Entry, LazyHeap
from headrace.scheduling.queue_bounds import QueueBounds, QueueFull

Ticket = TypeVar("Ticket", bound=Hashable)

_NO_TICKETS: Final[dict[Any, int]] = {}
"""Of all shares in which nothing was put back."""


class Share(Generic[Ticket]):
    """What one tenant has waiting: tokens of its tickets in order of arrival."""

    __slots__ = ("entry", "first", "has_changed", "num_tickets", "order", "others", "tenant", "tokens")

    def __init__(self, tenant: str, order: int) -> None:
        self.tenant = tenant
        self.num_tickets = 0
        self.tokens = 0
        """Of all its tickets."""
        self.entry: Entry | None = None
        """In the order of sizes."""
        self.has_changed = False
        """Its place in that order is not up to date."""
        self.order = order
        """Among tenants with equally much waiting, the lowest gives way first: who began to wait first, or was put
        back last."""
        self.first: dict[Ticket, int] = _NO_TICKETS
        """Put back, the one that was put back last at the end; they came before the others."""
        self.others: dict[Ticket, int] = {}

    def add(self, ticket: Ticket, tokens: int, *, is_first: bool) -> None:
        if is_first:
            if self.first is _NO_TICKETS:
                self.first = {}
            self.first[ticket] = tokens
        else:
            self.others[ticket] = tokens
        self.num_tickets += 1

    def resize(self, ticket: Ticket, tokens: int) -> None:
        tickets = self.first if ticket in self.first else self.others
        tickets[ticket] = tokens

    def remove(self, ticket: Ticket) -> None:
        if self.first and ticket in self.first:
            del self.first[ticket]
        else:
            del self.others[ticket]
        self.num_tickets -= 1

    def newest_first(self) -> Iterator[tuple[Ticket, int]]:
        return chain(reversed(self.others.items()), self.first.items())


class Occupancy(Generic[Ticket]):
    """The bounds of a queue, with the rules of `headrace.scheduling.queue_bounds`, in logarithmic time."""

    def __init__(self, bounds: QueueBounds) -> None:
        self._bounds = bounds
        self._shares: dict[str, Share[Ticket]] = {}
        self._largest: LazyHeap[Share[Ticket]] = LazyHeap()
        self._changed: set[Share[Ticket]] = set()
        """Those whose place in `_largest` is not up to date: it is only needed when the queue is full."""
        self._order = 0
        self.length = 0
        self.tokens = 0

    def of(self, tenant: str) -> tuple[int, int]:
        """(requests, tokens) that wait."""
        share = self._shares.get(tenant)
        return (share.num_tickets, share.tokens) if share is not None else (0, 0)

    @property
    def num_tenants(self) -> int:
        """Tenants that have requests waiting."""
        return len(self._shares)

    def tickets_of(self, tenant: str) -> Iterator[Ticket]:
        """A tenant's tickets in order of arrival. Nothing may change meanwhile."""
        share = self._shares.get(tenant)
        return iter(()) if share is None else chain(reversed(share.first), share.others)

    def add(self, job: Job[Ticket], *, is_first: bool = False) -> None:
        share = self._shares.get(job.tenant)
        if share is None:
            self._order += 1
            share = self._shares[job.tenant] = Share(job.tenant, self._order)
        if is_first:
            self._order += 1
            share.order = -self._order
        share.add(job.ticket, job.tokens, is_first=is_first)
        job.share = share
        self.length += 1
        self._count(share, job.tokens)

    def resize(self, job: Job[Ticket], tokens: int) -> None:
        """`job.tokens` is to become this."""
        assert job.share is not None
        job.share.resize(job.ticket, tokens)
        self._count(job.share, tokens - job.tokens)

    def remove(self, job: Job[Ticket]) -> None:
        share, job.share = job.share, None
        assert share is not None
        share.remove(job.ticket)
        self.length -= 1
        self._count(share, -job.tokens)
        if not share.num_tickets:
            del self._shares[share.tenant]
            self._largest.discard(share)
            self._changed.discard(share)

    def has_room(self, tenant: str, tokens: int) -> bool:
        """Whether one more can wait without anybody's giving way."""
        bounds = self._bounds
        if self.length >= bounds.length or self.tokens + tokens > bounds.tokens:
            return False
        length, waiting = self.of(tenant)
        return length < bounds.tenant_length and waiting + tokens <= bounds.tenant_tokens

    def make_room(self, tenant: str, tokens: int) -> list[Ticket]:
        """The tickets that have to go so that this one has room. Raises `QueueFull`; changes nothing."""
        self._check_tenant(tenant, tokens)
        bounds, length, waiting = self._bounds, self.length, self.tokens
        if length < bounds.length and waiting + tokens <= bounds.tokens:
            return []
        if length >= bounds.length:
            full = QueueFull(level="model", bound="requests", limit=bounds.length, used=length)
        else:
            full = QueueFull(level="model", bound="tokens", limit=bounds.tokens, used=waiting)
        for share in self._changed:
            share.has_changed = False
            self._set(share, share.tokens)
        self._changed.clear()
        own = self._shares.get(tenant)
        if own is not None:
            self._largest.discard(own)
        left: dict[Share[Ticket], int] = {}
        try:
            return self._evict(tokens, tokens + (own.tokens if own is not None else 0), left, full)
        finally:
            for share in left if own is None else (*left, own):
                self._set(share, share.tokens)

    def _evict(self, tokens: int, own: int, left: dict[Share[Ticket], int], full: QueueFull) -> list[Ticket]:
        """Newest tickets of whoever is the largest at that point. `left` says what each would keep."""
        bounds, length, waiting = self._bounds, self.length, self.tokens
        newest = {}
        evicted: list[Ticket] = []
        while length >= bounds.length or waiting + tokens > bounds.tokens:
            share = self._largest.peek()
            # Whoever would have as much waiting as the largest gains nothing by pushing it out.
            if share is None or own >= -self._largest.rank():
                raise full
            if share not in newest:
                newest[share] = share.newest_first()
                left[share] = share.tokens
            ticket, freed = next(newest[share])
            evicted.append(ticket)
            left[share] -= freed
            self._set(share, left[share])
            waiting -= freed
            length -= 1
        return evicted

    def _set(self, share: Share[Ticket], tokens: int) -> None:
        self._largest.set(share, -tokens, share.order)

    def _count(self, share: Share[Ticket], tokens: int) -> None:
        self.tokens += tokens
        share.tokens += tokens
        if not share.has_changed:
            share.has_changed = True
            self._changed.add(share)

    def _check_tenant(self, tenant: str, tokens: int) -> None:
        length, waiting = self.of(tenant)
        bounds = self._bounds
        if length >= bounds.tenant_length:
            raise QueueFull(level="tenant", bound="requests", limit=bounds.tenant_length, used=length)
        if waiting + tokens > bounds.tenant_tokens:
            raise QueueFull(level="tenant", bound="tokens", limit=bounds.tenant_tokens, used=waiting)

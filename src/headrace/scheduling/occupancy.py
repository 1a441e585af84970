"""Who fills the queue: waiting requests and tokens of every tenant, bounded, the largest gives way."""

from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from headrace.scheduling.dispatch import QueueBounds, QueueFull
from headrace.scheduling.lazy_heap import LazyHeap

Ticket = TypeVar("Ticket", bound=Hashable)


class _Share(Generic[Ticket]):
    """What one tenant has waiting: tokens of its tickets in order of arrival."""

    __slots__ = ("first", "others")

    def __init__(self) -> None:
        self.first: dict[Ticket, int] = {}
        """Put back, the one that was put back last at the end; they came before the others."""
        self.others: dict[Ticket, int] = {}

    def __len__(self) -> int:
        return len(self.first) + len(self.others)

    def of(self, ticket: Ticket) -> dict[Ticket, int]:
        return self.first if ticket in self.first else self.others

    def newest_first(self) -> Iterator[tuple[Ticket, int]]:
        return chain(reversed(self.others.items()), self.first.items())


class Occupancy(Generic[Ticket]):
    """The bounds of a queue, with the rules of `headrace.scheduling.dispatch`, in logarithmic time."""

    def __init__(self, bounds: QueueBounds) -> None:
        self._bounds = bounds
        self._shares: dict[str, _Share[Ticket]] = {}
        self._tokens_of: dict[str, int] = {}
        self._largest: LazyHeap[str] = LazyHeap()
        self._changed: set[str] = set()
        """Tenants whose place in `_largest` is not up to date: it is only needed when the queue is full."""
        self.length = 0
        self.tokens = 0

    def of(self, tenant: str) -> tuple[int, int]:
        """(requests, tokens) that wait."""
        share = self._shares.get(tenant)
        return (len(share), self._tokens_of[tenant]) if share is not None else (0, 0)

    def add(self, ticket: Ticket, tenant: str, tokens: int, *, is_first: bool = False) -> None:
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share()
            self._tokens_of[tenant] = 0
        (share.first if is_first else share.others)[ticket] = tokens
        self.length += 1
        self._count(tenant, tokens)

    def resize(self, ticket: Ticket, tenant: str, tokens: int) -> None:
        tickets = self._shares[tenant].of(ticket)
        more = tokens - tickets[ticket]
        tickets[ticket] = tokens
        self._count(tenant, more)

    def remove(self, ticket: Ticket, tenant: str) -> None:
        share = self._shares[tenant]
        self._count(tenant, -share.of(ticket).pop(ticket))
        self.length -= 1
        if not len(share):
            del self._shares[tenant], self._tokens_of[tenant]
            self._largest.discard(tenant)
            self._changed.discard(tenant)

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
        own = self.of(tenant)[1] + tokens
        for name in self._changed:
            self._largest.set(name, -self._tokens_of[name])
        self._changed.clear()
        self._largest.discard(tenant)
        left: dict[str, int] = {}
        try:
            return self._evict(tokens, own, left, full)
        finally:
            for name in (*left, tenant):
                if name in self._shares:
                    self._largest.set(name, -self._tokens_of[name])

    def _evict(self, tokens: int, own: int, left: dict[str, int], full: QueueFull) -> list[Ticket]:
        """Newest tickets of whoever is the largest at that point. `left` says what each would keep."""
        bounds, length, waiting = self._bounds, self.length, self.tokens
        newest = {}
        evicted: list[Ticket] = []
        while length >= bounds.length or waiting + tokens > bounds.tokens:
            name = self._largest.peek()
            # Whoever would have as much waiting as the largest gains nothing by pushing it out.
            if name is None or own >= -self._largest.rank():
                raise full
            if name not in newest:
                newest[name] = self._shares[name].newest_first()
                left[name] = self._tokens_of[name]
            ticket, freed = next(newest[name])
            evicted.append(ticket)
            left[name] -= freed
            self._largest.set(name, -left[name])
            waiting -= freed
            length -= 1
        return evicted

    def _count(self, tenant: str, tokens: int) -> None:
        self.tokens += tokens
        self._tokens_of[tenant] += tokens
        self._changed.add(tenant)

    def _check_tenant(self, tenant: str, tokens: int) -> None:
        length, waiting = self.of(tenant)
        bounds = self._bounds
        if length >= bounds.tenant_length:
            raise QueueFull(level="tenant", bound="requests", limit=bounds.tenant_length, used=length)
        if waiting + tokens > bounds.tenant_tokens:
            raise QueueFull(level="tenant", bound="tokens", limit=bounds.tenant_tokens, used=waiting)

"""A queue written another way, in linear time: what the fair queue does under `fifo` has to be the same."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from headrace.scheduling.queue_bounds import NoReplica, QueueBounds, QueueFull

Ticket = TypeVar("Ticket", bound=Hashable)


class _Replica:
    __slots__ = ("capacity", "is_paused", "replica_id", "running")

    def __init__(self, replica_id: str, capacity: int) -> None:
        self.replica_id = replica_id
        self.capacity = capacity
        self.running = 0
        self.is_paused = False


class _Share(Generic[Ticket]):
    """What one tenant has waiting: its tickets in order of arrival, with their tokens."""

    __slots__ = ("tickets", "tokens")

    def __init__(self) -> None:
        self.tickets: OrderedDict[Ticket, int] = OrderedDict()
        self.tokens = 0


class PlainQueue(Generic[Ticket]):
    """The queue and the replicas of one model. A ticket stands for a request."""

    def __init__(self, bounds: QueueBounds) -> None:
        self._bounds = bounds
        self._waiting: OrderedDict[Ticket, str] = OrderedDict()
        """Ticket and its tenant, next one first."""
        self._shares: OrderedDict[str, _Share[Ticket]] = OrderedDict()
        """By tenant; of equally large ones the first gives way first."""
        self._tokens = 0
        self._replicas: dict[str, _Replica] = {}
        self._expected: set[str] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    @property
    def num_running(self) -> int:
        return sum(replica.running for replica in self._replicas.values())

    def running_on(self, replica_id: str) -> int:
        replica = self._replicas.get(replica_id)
        return replica.running if replica else 0

    def places(self) -> Iterator[tuple[str, int, int]]:
        """(replica, its capacity, how many run there)"""
        for replica in self._replicas.values():
            yield replica.replica_id, replica.capacity, replica.running

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        """(requests, tokens) of a tenant that wait."""
        share = self._shares.get(tenant)
        return (len(share.tickets), share.tokens) if share else (0, 0)

    # --- replicas -----------------------------------------------------------------------------------

    def expect(self, replica_id: str) -> None:
        """A replica is starting: requests may wait for it."""
        self._expected.add(replica_id)

    def give_up(self, replica_id: str) -> None:
        """A replica will not come (back), and what ran on it is gone with it: `release` does nothing."""
        self._expected.discard(replica_id)
        self._replicas.pop(replica_id, None)

    def add(self, replica_id: str, *, capacity: int) -> None:
        """A replica is ready for `capacity` requests at once."""
        assert capacity >= 1
        self._expected.discard(replica_id)
        self._replicas[replica_id] = _Replica(replica_id, capacity)

    def set_capacity(self, replica_id: str, capacity: int) -> None:
        """From now on. What runs beyond a smaller one goes on to its end."""
        assert capacity >= 1
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.capacity = capacity

    def pause(self, replica_id: str, *, is_paused: bool) -> None:
        """A replica said that it is full (or may be asked again): it is granted nothing meanwhile."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.is_paused = is_paused

    # --- requests -----------------------------------------------------------------------------------

    def enter(
        self,
        ticket: Ticket,
        *,
        tenant: str,
        tokens: int,
        may_start: Callable[[Ticket], bool] | None = None,
    ) -> list[Ticket]:
        """Take a place in the queue. A refusal changes nothing.

        Returns the tickets that had to give up their places for this one. Raises `NoReplica` if nobody
        serves or will serve the model, `QueueFull` if all places are taken. A request that can start
        at once never finds the queue full; only where there is no place, `may_start` is asked for that.
        """
        assert ticket not in self._waiting
        if not self._replicas and not self._expected:
            raise NoReplica
        evicted: list[Ticket] = []
        # As long as a replica has room, those who wait are those who may not start yet.
        if not self._has_room(tenant, tokens) and not (
            self._pick() is not None and (may_start is None or may_start(ticket))
        ):
            self._check_tenant(tenant, tokens)
            evicted = self._make_room(tenant, tokens)
        self._waiting[ticket] = tenant
        self._add(ticket, tenant, tokens)
        return evicted

    def put_back(self, ticket: Ticket, replica_id: str, *, tenant: str, tokens: int) -> None:
        """A granted request could not start: it is the next one again. Bounds do not count it out."""
        self.release(replica_id)
        self._waiting[ticket] = tenant
        self._waiting.move_to_end(ticket, last=False)
        self._add(ticket, tenant, tokens)
        self._shares[tenant].tickets.move_to_end(ticket, last=False)
        self._shares.move_to_end(tenant, last=False)

    def resize(self, ticket: Ticket, tokens: int) -> None:
        """A waiting ticket stands for so many tokens from now on."""
        share = self._shares[self._waiting[ticket]]
        more = tokens - share.tickets[ticket]
        share.tickets[ticket] = tokens
        share.tokens += more
        self._tokens += more

    def leave(self, ticket: Ticket) -> bool:
        """Give up the place in the queue. False if the ticket was not waiting (any more)."""
        tenant = self._waiting.pop(ticket, None)
        if tenant is None:
            return False
        share = self._shares[tenant]
        tokens = share.tickets.pop(ticket)
        share.tokens -= tokens
        self._tokens -= tokens
        if not share.tickets:
            del self._shares[tenant]
        return True

    def drop_hopeless(self) -> list[Ticket]:
        """All waiting tickets, taken out, if no replica is left or expected; else none."""
        if self._replicas or self._expected:
            return []
        tickets = list(self._waiting)
        self._waiting.clear()
        self._shares.clear()
        self._tokens = 0
        return tickets

    def dispatch(self, may_start: Callable[[Ticket], bool] | None = None) -> Iterator[tuple[Ticket, str]]:
        """Grant places to waiting requests, next one first, each on the least loaded replica.

        Requests for which `may_start` says no keep their place and let others pass. It is asked right
        before each grant, so what the caller does with a grant counts for the next.
        """
        replica = self._pick()
        if replica is None or not self._waiting:
            return
        for ticket in self._in_order(may_start):
            self.leave(ticket)
            replica.running += 1
            yield ticket, replica.replica_id
            replica = self._pick()
            if replica is None:
                return

    def release(self, replica_id: str) -> None:
        """A granted request has left its replica."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            assert replica.running > 0
            replica.running -= 1

    def position(self, ticket: Ticket) -> int:
        """Place in the queue, from 1; 0 if it does not wait. Linear: for explanations, not for the hot path."""
        for place, waiting in enumerate(self._waiting, 1):
            if waiting == ticket:
                return place
        return 0

    # --- inside -----------------------------------------------------------------------------------------

    def _in_order(self, may_start: Callable[[Ticket], bool] | None) -> Iterator[Ticket]:
        """Who may start, oldest first. Each has left the queue before the next is asked for."""
        num_passed = 0  # those at the front who may not start: they stay there
        while True:
            for ticket in islice(self._waiting, num_passed, None):
                if may_start is None or may_start(ticket):
                    break
                num_passed += 1
            else:
                return
            yield ticket

    def _add(self, ticket: Ticket, tenant: str, tokens: int) -> None:
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share()
        share.tickets[ticket] = tokens
        share.tokens += tokens
        self._tokens += tokens

    def _has_room(self, tenant: str, tokens: int) -> bool:
        """Whether one more can wait without anybody's giving way."""
        bounds = self._bounds
        if len(self._waiting) >= bounds.length or self._tokens + tokens > bounds.tokens:
            return False
        length, waiting = self.waiting_of(tenant)
        return length < bounds.tenant_length and waiting + tokens <= bounds.tenant_tokens

    def _check_tenant(self, tenant: str, tokens: int) -> None:
        length, waiting = self.waiting_of(tenant)
        bounds = self._bounds
        if length >= bounds.tenant_length:
            raise QueueFull(level="tenant", bound="requests", limit=bounds.tenant_length, used=length)
        if waiting + tokens > bounds.tenant_tokens:
            raise QueueFull(level="tenant", bound="tokens", limit=bounds.tenant_tokens, used=waiting)

    def _make_room(self, tenant: str, tokens: int) -> list[Ticket]:
        """Room for one more, if need be at the expense of the tenants that have the most waiting."""
        bounds = self._bounds
        length, waiting = len(self._waiting), self._tokens
        if length < bounds.length and waiting + tokens <= bounds.tokens:
            return []
        if length >= bounds.length:
            full = QueueFull(level="model", bound="requests", limit=bounds.length, used=length)
        else:
            full = QueueFull(level="model", bound="tokens", limit=bounds.tokens, used=waiting)
        own = self.waiting_of(tenant)[1] + tokens
        left = {name: share.tokens for name, share in self._shares.items() if name != tenant}
        newest = {name: reversed(self._shares[name].tickets.items()) for name in left}
        evicted: list[Ticket] = []
        while length >= bounds.length or waiting + tokens > bounds.tokens:
            largest = max(left, key=lambda name: left[name], default=None)
            # Whoever would have as much waiting as the largest gains nothing by pushing it out.
            if largest is None or own >= left[largest]:
                raise full
            ticket, freed = next(newest[largest])
            evicted.append(ticket)
            left[largest] -= freed
            waiting -= freed
            length -= 1
        for ticket in evicted:
            self.leave(ticket)
        return evicted

    def _pick(self) -> _Replica | None:
        best: _Replica | None = None
        for replica in self._replicas.values():
            if (
                not replica.is_paused
                and replica.running < replica.capacity
                and (best is None or replica.running * best.capacity < best.running * replica.capacity)
            ):
                best = replica
        return best

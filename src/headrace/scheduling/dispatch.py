"""Who runs where, and who waits: a bounded first-in-first-out queue for each model.

Requests wait here and not inside engines, because an engine's queue cannot be reordered. A replica
is given a request only when it has a free place; load is counted here, synchronously, and never read
from a scrape.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Ticket = TypeVar("Ticket", bound=Hashable)


class QueueFull(Exception):
    """No place left in the queue of this model."""

    def __init__(self, *, limit: int, used: int) -> None:
        super().__init__(f"{used} of {limit} places are taken")
        self.limit = limit
        self.used = used


class NoReplica(Exception):
    """No replica serves this model and none is expected to."""


class _Replica:
    __slots__ = ("capacity", "replica_id", "running")

    def __init__(self, replica_id: str, capacity: int) -> None:
        self.replica_id = replica_id
        self.capacity = capacity
        self.running = 0


class ModelQueue(Generic[Ticket]):
    """The queue and the replicas of one model. A ticket stands for a request."""

    def __init__(self, *, length_max: int) -> None:
        self._length_max = length_max
        self._waiting: OrderedDict[Ticket, None] = OrderedDict()
        self._replicas: dict[str, _Replica] = {}
        self._expected: set[str] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(replica.running for replica in self._replicas.values())

    def running_on(self, replica_id: str) -> int:
        replica = self._replicas.get(replica_id)
        return replica.running if replica else 0

    # --- replicas -----------------------------------------------------------------------------------

    def expect(self, replica_id: str) -> None:
        """A replica is starting: requests may wait for it."""
        self._expected.add(replica_id)

    def give_up(self, replica_id: str) -> None:
        """A replica will not come (back)."""
        self._expected.discard(replica_id)
        self._replicas.pop(replica_id, None)

    def add(self, replica_id: str, *, capacity: int) -> None:
        """A replica is ready for `capacity` requests at once."""
        assert capacity >= 1
        self._expected.discard(replica_id)
        self._replicas[replica_id] = _Replica(replica_id, capacity)

    def remove(self, replica_id: str) -> None:
        """A replica is gone, and what ran on it with it. `release` for those requests does nothing."""
        self._replicas.pop(replica_id, None)

    # --- requests -----------------------------------------------------------------------------------

    def enter(self, ticket: Ticket, *, may_start: bool = True) -> None:
        """Take a place in the queue. A refusal changes nothing.

        Raises `NoReplica` if nobody serves or will serve the model, `QueueFull` if all places are
        taken. A request that can start at once never finds the queue full.
        """
        assert ticket not in self._waiting
        if not self._replicas and not self._expected:
            raise NoReplica
        # As long as a replica has room, those who wait are those who may not start yet.
        can_start = may_start and self._pick() is not None
        if not can_start and len(self._waiting) >= self._length_max:
            raise QueueFull(limit=self._length_max, used=len(self._waiting))
        self._waiting[ticket] = None

    def leave(self, ticket: Ticket) -> bool:
        """Give up the place in the queue. False if the ticket was not waiting (any more)."""
        if ticket not in self._waiting:
            return False
        del self._waiting[ticket]
        return True

    def drop_hopeless(self) -> list[Ticket]:
        """All waiting tickets, taken out, if no replica is left or expected; else none."""
        if self._replicas or self._expected:
            return []
        tickets = list(self._waiting)
        self._waiting.clear()
        return tickets

    def dispatch(self, may_start: Callable[[Ticket], bool] | None = None) -> Iterator[tuple[Ticket, str]]:
        """Grant places to waiting requests, oldest first, each on the least loaded replica.

        Requests for which `may_start` says no keep their place and let others pass. It is asked right
        before each grant, so what the caller does with a grant counts for the next.
        """
        for ticket in list(self._waiting):
            replica = self._pick()
            if replica is None:
                return
            if may_start is not None and not may_start(ticket):
                continue
            del self._waiting[ticket]
            replica.running += 1
            yield ticket, replica.replica_id

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

    def _pick(self) -> _Replica | None:
        best: _Replica | None = None
        for replica in self._replicas.values():
            if replica.running < replica.capacity and (
                best is None or replica.running * best.capacity < best.running * replica.capacity
            ):
                best = replica
        return best

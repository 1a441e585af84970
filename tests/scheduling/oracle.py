"""What is expected of a fair queue, worked out the plain way: all who wait are sorted, whatever that costs.

Looks only. A queue that has been asked here goes on as if it had not been.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from headrace.scheduling.class_shares import ClassShares
from headrace.scheduling.explain import Explanation
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.jobs import Place, rank_of
from headrace.scheduling.policy import QueuePolicy, ServiceClass

Ticket = TypeVar("Ticket", bound=Hashable)


class Waiting(msgspec.Struct, Generic[Ticket], frozen=True, kw_only=True):
    """One waiting request, for `forecast`."""

    ticket: Ticket
    tenant: str
    counter: float
    """Of its tenant."""
    charge: float
    """Cost, by weight, that the counter will grow by."""
    cost: float
    rank: Any
    service_class: ServiceClass
    is_first: bool
    """Put back: before everybody else."""


def expected_order(queue: FairQueue[Ticket]) -> Iterator[Ticket]:
    """Who would be granted after whom if nobody came."""
    if queue._newcomer is not None:
        return iter([queue._newcomer.ticket])
    waiting = [
        Waiting(
            ticket=job.ticket,
            tenant=job.counter.tenant,
            counter=job.counter.value,
            charge=queue._charge(job) / job.weight,
            cost=queue._charge(job),
            rank=rank_of(job, queue.policy),
            service_class=job.service_class,
            is_first=job.place is Place.FRONT,
        )
        for job in queue._waiting_room
    ]
    return forecast(waiting, queue.policy, owed=queue._waiting_room.owed)


def position(queue: FairQueue[Ticket], ticket: Ticket) -> int:
    """Place in the expected order, from 1; 0 if it does not wait."""
    for place, waiting in enumerate(expected_order(queue), 1):
        if waiting == ticket:
            return place
    return 0


def explain(
    queue: FairQueue[Ticket], ticket: Ticket, may_start: Callable[[Ticket], bool] | None = None
) -> Explanation | None:
    """Why a request waits; None if it does not. The reason is not refined as `ExplainedQueue.why` does."""
    job = queue._jobs.get(ticket)
    if job is None or job.place is Place.GRANTED:
        return None
    place = position(queue, ticket)
    weights = {one.tenant: one.weight for one in queue.counters.waiting()}
    return Explanation(
        position=place,
        tenant_share=weights[job.counter.tenant] / sum(weights.values()),
        waited_us=queue._now_us - job.entered_us,
        reason=queue._reason(job, place, may_start),
    )


def forecast(
    waiting: Sequence[Waiting[Ticket]], policy: QueuePolicy, *, owed: float = 0.0
) -> Iterator[Ticket]:
    """All tickets in the order in which they would be granted if nobody came and everybody might start.

    Those with `is_first` must come in their order. Aging, limits and budgets are left out.
    """
    yield from (one.ticket for one in waiting if one.is_first)
    others = [one for one in waiting if not one.is_first]
    if policy.name != "fair":
        yield from (one.ticket for one in sorted(others, key=lambda one: one.rank))
        return
    counters = {one.tenant: one.counter for one in waiting}
    for one in waiting:
        if one.is_first:
            counters[one.tenant] += one.charge
    shares = ClassShares(policy.batch_floor)
    shares.owed = owed
    interactive = _Class(counters, (one for one in others if one.service_class == "interactive"))
    batch = _Class(counters, (one for one in others if one.service_class == "batch"))
    while interactive.heap or batch.heap:
        is_batch = bool(batch.heap) and (shares.is_batch_turn or not interactive.heap)
        one = (batch if is_batch else interactive).take()
        counters[one.tenant] += one.charge
        other = interactive if is_batch else batch
        shares.granted(one.service_class, one.cost, does_other_wait=bool(other.heap))
        yield one.ticket


class _Class(Generic[Ticket]):
    """The waiting requests of one class by tenant; the lowest counter first."""

    def __init__(self, counters: dict[str, float], waiting: Iterable[Waiting[Ticket]]) -> None:
        self._counters = counters
        self._jobs: dict[str, list[Waiting[Ticket]]] = {}
        for one in waiting:
            self._jobs.setdefault(one.tenant, []).append(one)
        for jobs in self._jobs.values():
            jobs.sort(key=lambda one: one.rank, reverse=True)
        self.heap = [(counters[tenant], jobs[-1].rank, tenant) for tenant, jobs in self._jobs.items()]
        heapq.heapify(self.heap)

    def take(self) -> Waiting[Ticket]:
        while True:
            counter, rank, tenant = heapq.heappop(self.heap)
            if counter == self._counters[tenant]:
                break
            # The tenant was granted something of the other class meanwhile.
            heapq.heappush(self.heap, (self._counters[tenant], rank, tenant))
        jobs = self._jobs[tenant]
        one = jobs.pop()
        if jobs:
            heapq.heappush(self.heap, (counter + one.charge, jobs[-1].rank, tenant))
        return one

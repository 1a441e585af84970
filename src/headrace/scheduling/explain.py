"""Why a request waits: its place in the expected order, its tenant's share, and what it waits for. Pure."""

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from headrace.scheduling.class_shares import ClassShares
from headrace.scheduling.policy import QueuePolicy, ServiceClass

Ticket = TypeVar("Ticket", bound=Hashable)

Reason = Literal[
    "no_replica",
    "own_limit",
    "memory_limit",
    "throttled",
    "replicas_full",
    "replica_paused",
    "kept_for_short",
    "long_prompts",
    "memory",
    "set_aside",
    "preempted",
    "behind_others",
    "next",
]

REASONS: Final[dict[Reason, str]] = {
    "no_replica": "no replica of the model is ready",
    "own_limit": "a limit of its own (concurrency, streams) holds it back; others may pass it",
    "memory_limit": "a limit of GPU memory (gpu_memory_gb) of its own leaves no room for it until others of its own end",
    "throttled": "its limit of GPU memory (gpu_memory_gb) leaves no room for it, and there was a refusal for that not long "
    "ago: so it waits, at half the share, instead of being refused",
    "replicas_full": "every place on every replica is taken",
    "replica_paused": "the places that are free are on replicas that said they are full; they are asked again soon",
    "kept_for_short": "the places that are free are kept for short interactive requests",
    "long_prompts": "as many long prompts as may be are being read in",
    "memory": "no replica has memory for a request of its size yet",
    "set_aside": "the places that are free are on replicas where it may not run, or not yet",
    "preempted": "it was stopped for another's request and goes on as soon as its replica has a place",
    "behind_others": "others are before it",
    "next": "it is granted with the next decision",
}


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said of one waiting request."""

    position: int
    """From 1: how many would be granted up to it, if nobody came and all cost what is expected."""
    is_exact: bool = True
    """Otherwise it is further back than could be looked, and `position` is the first that it may have."""
    tenant_share: float
    """Its tenant's part of the weights of all who wait, 0 to 1."""
    waited_us: int
    reason: Reason


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


def tenant_share(tenant: str, weights: dict[str, float]) -> float:
    """`weights`: of all tenants that wait."""
    return weights[tenant] / sum(weights.values())


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

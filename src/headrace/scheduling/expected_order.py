"""Who would be granted after whom if nobody came: the first few, found without sorting everybody. Pure.

The lanes are read from their fronts, so that the first hundred cost the same whether a hundred wait or a hundred
thousand. Tests compare it with `tests.scheduling.oracle`, which sorts all who wait.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

from headrace.scheduling.class_shares import ClassShares
from headrace.scheduling.counters import TenantCounter
from headrace.scheduling.jobs import Job
from headrace.scheduling.lanes import Flow, Lane, Row
from headrace.scheduling.lazy_heap import Entry
from headrace.scheduling.waiting_room import WaitingRoom

Ticket = TypeVar("Ticket", bound=Hashable)
Found = TypeVar("Found")

LOOKS_EACH: Final = 16
"""Entries that may be looked at for each one that is found, dead ones included."""


class _Enough(Exception):
    """So much has been looked at that the search ends here."""


class _Looks:
    """How many entries may still be looked at."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def living(self, entries: Iterable[Found | None]) -> Iterator[Found]:
        """Those that stand for something."""
        for entry in entries:
            self.left -= 1
            if self.left < 0:
                raise _Enough
            if entry is not None:
                yield entry


def first_expected(
    room: WaitingRoom[Ticket], charge: Callable[[Job[Ticket]], float], number_max: int
) -> list[Job[Ticket]]:
    """The first ones in the expected order, at most so many. `charge` is the cost of which a job's tenant will be
    charged. Aging, limits and budgets are left out. Fewer than wait may also come because many who gave up are still
    in the way.
    """
    found: list[Job[Ticket]] = room.front()[:number_max]
    looks = _Looks(LOOKS_EACH * number_max)
    lanes = room.lanes()
    order = _fair(room, lanes, charge, looks) if room.is_fair else _by_rank(lanes, looks)
    try:
        while len(found) < number_max:
            job = next(order, None)
            if job is None:
                break
            found.append(job)
    except _Enough:
        pass
    return found


def _by_rank(lanes: list[Lane[Ticket]], looks: _Looks) -> Iterator[Job[Ticket]]:
    rows = heapq.merge(*(looks.living(lane.order.in_order()) for lane in lanes))
    return _merged((entry[0], _jobs(entry[3], looks)) for entry in rows)


def _fair(
    room: WaitingRoom[Ticket],
    lanes: list[Lane[Ticket]],
    charge: Callable[[Job[Ticket]], float],
    looks: _Looks,
) -> Iterator[Job[Ticket]]:
    counters: dict[TenantCounter, float] = {}

    def grant(job: Job[Ticket]) -> float:
        cost = charge(job)
        counters[job.counter] = counters.get(job.counter, job.counter.value) + cost / job.weight
        return cost

    for job in room.front():
        grant(job)
    shares = ClassShares(room.policy.batch_floor)
    shares.owed = room.owed
    interactive, batch = (
        _Class([lane for lane in lanes if lane.service_class == name], counters, looks)
        for name in ("interactive", "batch")
    )
    while interactive.num_left or batch.num_left:
        is_batch = batch.num_left > 0 and (shares.is_batch_turn or not interactive.num_left)
        source, other = (batch, interactive) if is_batch else (interactive, batch)
        job = source.take()
        shares.granted(job.service_class, grant(job), does_other_wait=other.num_left > 0)
        yield job


class _Class(Generic[Ticket]):
    """The waiting jobs of one class: of the tenant with the lowest counter, the first one.

    A row is looked into when its turn may come: as it is found in its lane, its counter is no higher than it will be.
    """

    def __init__(
        self, lanes: list[Lane[Ticket]], counters: dict[TenantCounter, float], looks: _Looks
    ) -> None:
        self.num_left = sum(lane.num_jobs for lane in lanes)
        self._counters = counters
        """Of tenants that have been granted something since."""
        self._looks = looks
        self._rows = heapq.merge(*(looks.living(lane.order.in_order()) for lane in lanes))
        self._coming: Entry | None = None
        self._has_begun = False
        self._heap: list[tuple[float, Any, Job[Ticket], Iterator[Job[Ticket]]]] = []
        """(counter, rank, first job, the jobs behind it); ranks are never equal."""

    def take(self) -> Job[Ticket]:
        if not self._has_begun:
            self._coming, self._has_begun = next(self._rows, None), True
        heap = self._heap
        while True:
            coming = self._coming
            if coming is not None and (not heap or (coming[0], coming[1]) <= heap[0][:2]):
                self._add(_jobs(coming[3], self._looks))
                self._coming = next(self._rows, None)
                continue
            value, rank, job, jobs = heapq.heappop(heap)
            now = self._counters.get(job.counter, value)
            if now == value:
                break
            heapq.heappush(heap, (now, rank, job, jobs))
        self._add(jobs)
        self.num_left -= 1
        return job

    def _add(self, jobs: Iterator[Job[Ticket]]) -> None:
        job = next(jobs, None)
        if job is not None:
            value = self._counters.get(job.counter, job.counter.value)
            heapq.heappush(self._heap, (value, job.rank, job, jobs))


def _jobs(row: Row[Ticket], looks: _Looks) -> Iterator[Job[Ticket]]:
    """Of one tenant, by rank."""
    flows = looks.living(row.flow_entries())
    return _merged((entry[0], _walk(entry[3], looks)) for entry in flows)


def _walk(flow: Flow[Ticket], looks: _Looks) -> Iterator[Job[Ticket]]:
    return looks.living(flow.in_order())


def _merged(groups: Iterator[tuple[Any, Iterator[Job[Ticket]]]]) -> Iterator[Job[Ticket]]:
    """The jobs of all groups by rank. Groups come by the rank of their first job, which comes with each."""
    heap: list[tuple[Any, Job[Ticket], Iterator[Job[Ticket]]]] = []
    coming = next(groups, None)
    while coming is not None or heap:
        if coming is not None and (not heap or coming[0] <= heap[0][0]):
            jobs = coming[1]
            coming = next(groups, None)
        else:
            _, job, jobs = heapq.heappop(heap)
            yield job
        following = next(jobs, None)
        if following is not None:
            heapq.heappush(heap, (following.rank, following, jobs))

"""Those who wait, in the order in which their policy would have them.

    lane (class, size) → row (one tenant) → flow (requests with the same gate) → job

A lane is what may be closed as a whole: batch behind interactive, long prompts over their budget, all but
short requests when only the reserve is left. Rows of a lane are ordered by the tenant's counter (`fair`) or by
their first job; the jobs of a row by their own rank. A flow whose first job may not start is passed over as a
whole. Everything is found and moved in logarithmic time.
"""

import heapq
from collections.abc import Collection, Hashable, Iterator
from typing import Any, Final, Generic, TypeVar

from headrace.scheduling.counters import TenantCounter
from headrace.scheduling.jobs import Job, Size
from headrace.scheduling.lazy_heap import SLACK, Entry, LazyHeap, walk
from headrace.scheduling.policy import ServiceClass

Ticket = TypeVar("Ticket", bound=Hashable)

_NO_FLOWS: Final[dict[Hashable, Any]] = {}
"""Of all rows with one flow."""


class Flow(Generic[Ticket]):
    """The jobs of one tenant in one lane that share a gate, by rank: a heap of ranks, of which those are dead that are
    no longer their job's."""

    __slots__ = ("entry", "gate", "num_jobs", "ranks", "row")

    def __init__(self, gate: Hashable, row: "Row[Ticket]") -> None:
        self.gate = gate
        self.row = row
        self.num_jobs = 0
        self.entry: Entry | None = None
        """In the order of its row's flows."""
        self.ranks: list[Entry] = []
        """The heap. To read."""

    def __iter__(self) -> Iterator[Job[Ticket]]:
        """All jobs, in no order."""
        return (rank[-1] for rank in self.ranks if rank[-1].rank is rank)

    def add(self, job: Job[Ticket]) -> None:
        job.flow = self
        self.num_jobs += 1
        ranks = self.ranks
        heapq.heappush(ranks, job.rank)
        if len(ranks) > 2 * self.num_jobs + SLACK:
            self.ranks = [rank for rank in ranks if rank[-1].rank is rank]
            heapq.heapify(self.ranks)

    def remove(self, job: Job[Ticket]) -> None:
        job.flow = None
        job.rank = ()
        self.num_jobs -= 1

    def first(self) -> Job[Ticket]:
        """There must be one."""
        ranks = self.ranks
        while True:
            rank = ranks[0]
            job: Job[Ticket] = rank[-1]
            if job.rank is rank:
                return job
            heapq.heappop(ranks)

    def in_order(self) -> Iterator[Job[Ticket] | None]:
        """The jobs by rank; None for each that is gone. Nothing may change meanwhile."""
        for rank in walk(self.ranks):
            yield rank[-1] if rank[-1].rank is rank else None


class Row(Generic[Ticket]):
    """What one tenant has in one lane. Nearly always it is one flow, which then stands here without a table."""

    __slots__ = ("_flows", "_only", "_order", "counter", "entry", "lane")

    def __init__(self, counter: TenantCounter, lane: "Lane[Ticket]", gate: Hashable) -> None:
        self.counter = counter
        self.lane = lane
        self.entry: Entry | None = None
        """In the order of its lane's rows."""
        self._only: Flow[Ticket] | None = Flow(gate, self)
        """While there is one; the row goes when it is empty."""
        self._flows: dict[Hashable, Flow[Ticket]] = _NO_FLOWS
        """By gate, while there are several; none of them is empty."""
        self._order: LazyHeap[Flow[Ticket]] | None = None
        """Of those several."""

    @property
    def is_empty(self) -> bool:
        return self._only is not None and not self._only.num_jobs

    def flows(self) -> Collection[Flow[Ticket]]:
        """In no order. To read."""
        return self._flows.values() if self._only is None else (self._only,)

    def add(self, job: Job[Ticket]) -> None:
        flow = self._flow(_gate(job))
        flow.add(job)
        if self._order is not None:
            self._order.set(flow, _bare(flow.first()))

    def _flow(self, gate: Hashable) -> Flow[Ticket]:
        only = self._only
        if only is not None:
            if only.gate == gate:
                return only
            self._only = None
            self._flows = {only.gate: only}
            self._order = LazyHeap()
            self._order.set(only, _bare(only.first()))
        flow = self._flows.get(gate)
        if flow is None:
            flow = self._flows[gate] = Flow(gate, self)
        return flow

    def remove(self, job: Job[Ticket]) -> None:
        flow = job.flow
        assert flow is not None
        flow.remove(job)
        if self._order is None:
            return
        if flow.num_jobs:
            self._order.set(flow, _bare(flow.first()))
            return
        self._order.discard(flow)
        del self._flows[flow.gate]
        if len(self._flows) == 1:
            (self._only,) = self._flows.values()
            self._flows = _NO_FLOWS
            self._order.clear()
            self._order = None

    def first_flow(self) -> Flow[Ticket]:
        """The one whose first job is the first."""
        if self._only is not None:
            return self._only
        assert self._order is not None
        flow = self._order.peek()
        assert flow is not None
        return flow

    def first(self) -> Job[Ticket]:
        """The job that comes before the others."""
        only = self._only
        if only is None:
            return self.first_flow().first()
        # `only.first()`, written out: asked four times for every request that waits.
        rank = only.ranks[0]
        job: Job[Ticket] = rank[-1]
        return job if job.rank is rank else only.first()

    def flow_entries(self) -> Iterator[Entry | None]:
        """The flows by the rank of their first jobs, as entries of a `LazyHeap`. Nothing may change meanwhile."""
        if self._order is not None:
            return self._order.in_order()
        flow = self.first_flow()
        return iter([(_bare(flow.first()), 0, 0, flow)])

    def in_order(self) -> Iterator[Flow[Ticket]]:
        """The flows by their first jobs. Nothing may change meanwhile."""
        yield self.first_flow()
        if self._order is None:
            return
        taken = [self._order.take()]
        try:
            while self._order.peek() is not None:
                yield self.first_flow()
                taken.append(self._order.take())
        finally:
            for entry in taken:
                assert entry is not None
                self._order.restore(entry)


class Lane(Generic[Ticket]):
    """The rows of one class and size."""

    def __init__(self, service_class: ServiceClass, size: Size, *, is_by_counter: bool) -> None:
        self.service_class = service_class
        self.size = size
        self._is_by_counter = is_by_counter
        self._rows: dict[TenantCounter, Row[Ticket]] = {}
        self.order: LazyHeap[Row[Ticket]] = LazyHeap()
        self.num_jobs = 0

    def __iter__(self) -> Iterator[Job[Ticket]]:
        """All jobs, in no order."""
        for row in self._rows.values():
            for flow in row.flows():
                yield from flow

    def add(self, job: Job[Ticket]) -> None:
        row = self._rows.get(job.counter)
        if row is None:
            row = self._rows[job.counter] = Row(job.counter, self, _gate(job))
        row.add(job)
        self.num_jobs += 1
        if row.first() is job:
            self._place(row, job)

    def remove(self, job: Job[Ticket]) -> None:
        assert job.flow is not None
        row = job.flow.row
        was_first = row.first() is job
        row.remove(job)
        self.num_jobs -= 1
        if row.is_empty:
            del self._rows[job.counter]
            self.order.discard(row)
        elif was_first:
            self._place(row, row.first())

    def row_of(self, counter: TenantCounter) -> Row[Ticket] | None:
        """What a tenant has here. To read."""
        return self._rows.get(counter)

    def moved(self, counter: TenantCounter) -> None:
        """The tenant's counter has changed."""
        row = self._rows.get(counter)
        if row is not None and self._is_by_counter:
            self.order.move(row, counter.value)

    def _place(self, row: Row[Ticket], first: Job[Ticket]) -> None:
        """Put a row where its counter and its first job belong. (When only the counter has changed since, it
        waits for `moved`.)"""
        rank = _bare(first)
        # Of equal counters, and of one tenant's rows in several lanes, the one whose job comes first is first.
        if self._is_by_counter:
            self.order.set(row, row.counter.value, rank)
        else:
            self.order.set(row, rank)


def _bare(job: Job[Any]) -> Entry:
    """Its rank without the job itself, which must not be kept for as long as a dead entry of its flow or row."""
    return job.rank[:-1]


def _gate(job: Job[Any]) -> Hashable:
    gate = job.demand.gate
    return job if gate is None else gate

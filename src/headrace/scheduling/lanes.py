"""Those who wait, in the order in which their policy would have them.

    lane (class, size) → row (one tenant) → flow (requests with the same gate) → job

A lane is what may be closed as a whole: batch behind interactive, long prompts over their budget, all but
short requests when only the reserve is left. Rows of a lane are ordered by the tenant's counter (`fair`) or by
their first job; the jobs of a row by their own rank. A flow whose first job may not start is passed over as a
whole. Everything is found and moved in logarithmic time.
"""

from collections.abc import Hashable, Iterator
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

import msgspec

from headrace.scheduling.counters import TenantCounter
from headrace.scheduling.lazy_heap import Entry, LazyHeap
from headrace.scheduling.policy import Demand, QueuePolicy, ServiceClass
from headrace.scheduling.replicas import Replica

Ticket = TypeVar("Ticket", bound=Hashable)
Size = Literal["brief", "usual", "long"]


class Place(Enum):
    """Where a job is."""

    LANE = "lane"
    FRONT = "front"
    """Put back: before everything else."""
    GRANTED = "granted"
    GONE = "gone"


class Job(msgspec.Struct, Generic[Ticket], eq=False):
    """A request as the queue knows it. Two are never equal."""

    ticket: Ticket
    tenant: str
    counter: TenantCounter
    tokens: int
    """Held: what it takes of a replica's memory at most."""
    demand: Demand
    order: int
    entered_us: int
    weight: float
    """By which its cost is divided: its demand's when it came, for all its corrections."""
    charged: float = 0.0
    """Cost that its tenant was charged for it, not yet divided by the weight."""
    paid: float = 0.0
    """The part of it that real work stands for."""
    output_tokens: int = 0
    """Reported so far."""
    has_answered: bool = False
    is_aged: bool = False
    grant_order: int = 0
    place: Place = Place.LANE
    lane: "Lane[Ticket] | None" = None
    rank: Any = None
    replica: Replica | None = None
    """Where it was granted a place."""

    @property
    def service_class(self) -> ServiceClass:
        """After aging."""
        return "interactive" if self.is_aged else self.demand.service_class


def rank_of(job: Job[Any], policy: QueuePolicy) -> Any:
    """Among all (`fifo`, `priority`, `shortest-remaining`) or among the tenant's own (`fair`); lowest first.

    Waiting is worth something in each of them, so nobody is overtaken for ever: a rank never changes, and
    those who come later than what the difference is worth come behind.
    """
    if policy.name == "fifo":
        return job.order
    if policy.name == "shortest-remaining":
        left = job.demand.prompt_tokens + job.demand.expected_output_tokens - job.output_tokens
        return (job.entered_us + left * policy.token_aging_us, left, job.order)
    priority = job.demand.priority
    return (job.entered_us - priority * policy.priority_aging_us, -priority, job.order)


def size_of(demand: Demand, policy: QueuePolicy) -> Size:
    if policy.name == "fifo":
        return "usual"
    if policy.long_prompt_tokens is not None and demand.prompt_tokens > policy.long_prompt_tokens:
        return "long"
    is_brief = (
        policy.interactive_reserve > 0
        and demand.service_class == "interactive"
        and demand.expected_output_tokens <= policy.reserve_output_tokens_max
    )
    return "brief" if is_brief else "usual"


class Flow(Generic[Ticket]):
    __slots__ = ("gate", "jobs")

    def __init__(self, gate: Hashable) -> None:
        self.gate = gate
        self.jobs: LazyHeap[Job[Ticket]] = LazyHeap()


class Row(Generic[Ticket]):
    """What one tenant has in one lane."""

    __slots__ = ("_order", "counter", "flows")

    def __init__(self, counter: TenantCounter) -> None:
        self.counter = counter
        self.flows: dict[Hashable, Flow[Ticket]] = {}
        self._order: LazyHeap[Flow[Ticket]] | None = None
        """Of the flows, while there are several. Nearly always there is one."""

    def add(self, job: Job[Ticket]) -> None:
        gate = _gate(job)
        flow = self.flows.get(gate)
        if flow is None:
            flow = self.flows[gate] = Flow(gate)
        flow.jobs.set(job, job.rank)
        if self._order is not None:
            self._order.set(flow, flow.jobs.rank())
        elif len(self.flows) > 1:
            self._order = LazyHeap()
            for one in self.flows.values():
                self._order.set(one, one.jobs.rank())

    def remove(self, job: Job[Ticket]) -> None:
        gate = _gate(job)
        flow = self.flows[gate]
        flow.jobs.discard(job)
        is_empty = not len(flow.jobs)
        if is_empty:
            del self.flows[gate]
        if len(self.flows) <= 1:
            self._order = None
        elif self._order is not None:
            if is_empty:
                self._order.discard(flow)
            else:
                self._order.set(flow, flow.jobs.rank())

    def first_flow(self) -> Flow[Ticket]:
        """The one whose first job is the first."""
        if self._order is None:
            return next(iter(self.flows.values()))
        flow = self._order.peek()
        assert flow is not None
        return flow

    def rank(self) -> Any:
        """Of the first job."""
        return self.first_flow().jobs.rank()

    def flow_entries(self) -> Iterator[Entry]:
        """The flows by the rank of their first jobs, as entries of a `LazyHeap`. Nothing may change meanwhile."""
        if self._order is not None:
            return self._order.in_order()
        flow = self.first_flow()
        return iter([[flow.jobs.rank(), 0, 0, flow]])

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
            for flow in row.flows.values():
                yield from flow.jobs

    def add(self, job: Job[Ticket]) -> None:
        row = self._rows.get(job.counter)
        is_first = row is None or not self._is_by_counter or job.rank < self.order.tie_of(row)
        if row is None:
            row = self._rows[job.counter] = Row(job.counter)
        row.add(job)
        job.lane = self
        self.num_jobs += 1
        if is_first:
            self._place(row)

    def remove(self, job: Job[Ticket]) -> None:
        row = self._rows[job.counter]
        row.remove(job)
        job.lane = None
        self.num_jobs -= 1
        if not row.flows:
            del self._rows[job.counter]
            self.order.discard(row)
        elif not self._is_by_counter or job.rank == self.order.tie_of(row):
            self._place(row)

    def row_of(self, counter: TenantCounter) -> Row[Ticket] | None:
        """What a tenant has here. To read."""
        return self._rows.get(counter)

    def moved(self, counter: TenantCounter) -> None:
        """The tenant's counter has changed."""
        row = self._rows.get(counter)
        if row is not None and self._is_by_counter:
            self.order.move(row, counter.value)

    def _place(self, row: Row[Ticket]) -> None:
        """Put a row where its counter and its first job belong. (When only the counter has changed since, it
        waits for `moved`.)"""
        rank = row.rank()
        # Of equal counters, and of one tenant's rows in several lanes, the one whose job comes first is first.
        if self._is_by_counter:
            self.order.set(row, row.counter.value, rank)
        else:
            self.order.set(row, rank)


def _gate(job: Job[Any]) -> Hashable:
    gate = job.demand.gate
    return job if gate is None else gate

"""What can be told of a queue to those who wait in it, at a cost that does not grow with its length. Pure.

Positions are exact for the first ones in the expected order; of everybody else it is only known that they are behind
those. Times are microseconds, costs are those of `TokenPrices`.
"""

from collections.abc import Callable, Hashable
from heapq import nlargest
from itertools import islice
from typing import Final, Generic, TypeVar

import msgspec

from headrace.scheduling.expected_order import first_expected
from headrace.scheduling.explain import Explanation, Reason
from headrace.scheduling.jobs import Job, Place
from headrace.scheduling.policy import ServiceClass
from headrace.scheduling.queue_bounds import QueueBounds
from headrace.scheduling.queue_state import QueueState

Ticket = TypeVar("Ticket", bound=Hashable)

MayStart = Callable[[Ticket], bool]

COUNTERS_COUNTED_ANEW_MAX: Final = 100
"""With more counters than this the sum of the weights that wait is counted at most once in `WEIGHTS_AGE_US`."""
WEIGHTS_AGE_US: Final = 100_000


class WaitingRequest(msgspec.Struct, Generic[Ticket], frozen=True, kw_only=True, gc=False):
    """One that waits, for a list."""

    ticket: Ticket
    service_class: ServiceClass
    """After aging."""
    priority: int
    tokens: int
    """Held: prompt and longest answer."""
    explanation: Explanation


class TenantPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one tenant, or several that share a queue, have of a model."""

    flow: str
    num_waiting: int
    num_granted: int
    weight: float
    share: float
    """Of the weights of all who wait, 0 to 1; 0 for one that has nothing waiting."""
    lead: float
    """Cost, by weight, that its counter is above the lowest of those who wait. 0: it is the next one."""


class ExplainedQueue(QueueState[Ticket]):
    """Answers questions of those who wait, and changes nothing."""

    _weights_known: tuple[int, int, float] = (-1, 0, 0.0)
    """Tenants that waited, when, and the sum of their weights."""

    def why(
        self, ticket: Ticket, may_start: MayStart[Ticket] | None, *, number_max: int
    ) -> Explanation | None:
        """Why a request waits, with a position that is exact among the first `number_max` only; None if it does not.

        Costs no more than finding those, and less if more of its own are before it.
        """
        job = self._jobs.get(ticket)
        if job is None or job.place is Place.GRANTED:
            return None
        position = None
        ahead = self._own_before(job, number_max)
        if ahead < number_max:
            found = first_expected(self._room, self._charge, number_max)
            position = next((place for place, one in enumerate(found, 1) if one is job), None)
            ahead = len(found)
        return self._explanation(job, position, ahead, may_start)

    def in_expected_order(
        self, may_start: MayStart[Ticket] | None, *, number_max: int
    ) -> list[WaitingRequest[Ticket]]:
        """The first ones, each explained."""
        found = first_expected(self._room, self._charge, number_max)
        return [self._waiting(job, place, 0, may_start) for place, job in enumerate(found, 1)]

    def waiting_requests_of(
        self, tenant: str, may_start: MayStart[Ticket] | None, *, number_max: int, looked_at_max: int
    ) -> list[WaitingRequest[Ticket]]:
        """A tenant's own: those that are among the first `looked_at_max` of all, in their order, then others as they
        came, together at most `number_max`."""
        found = first_expected(self._room, self._charge, looked_at_max)
        own = {job.ticket: (place, job) for place, job in enumerate(found, 1) if job.tenant == tenant}
        listed = [self._waiting(job, place, 0, may_start) for place, job in islice(own.values(), number_max)]
        room = number_max - len(listed)
        if room > 0 and len(own) < self.waiting_of(tenant)[0]:
            others = (one for one in self._occupancy.tickets_of(tenant) if one not in own)
            behind = len(found)
            listed += [
                self._waiting(self._jobs[one], None, behind, may_start) for one in islice(others, room)
            ]
        return listed

    def share_of(self, flow: str, weight: float) -> float:
        """What part of the weights of all who wait this one has, or would have if it waited."""
        counter = self._counters.get(flow)
        total = self._weights_waiting()
        if counter is not None and counter.num_waiting:
            return min(1.0, counter.weight / total)
        return weight / (total + weight)

    def part_of(self, flow: str, weight: float) -> TenantPart:
        """What one tenant has of the model. `weight`: should the queue know nothing of it."""
        counter = self._counters.get(flow)
        return TenantPart(
            flow=flow,
            num_waiting=0 if counter is None else counter.num_waiting,
            num_granted=0 if counter is None else counter.num_granted,
            weight=weight if counter is None else counter.weight,
            share=self.share_of(flow, weight) if counter is not None and counter.num_waiting else 0.0,
            lead=0.0 if counter is None else max(0.0, counter.value - self._counters.start()),
        )

    def parts(self, number_max: int) -> list[TenantPart]:
        """Of those who have requests here, who have most waiting first."""
        counters = (one for one in self._counters.all() if one.num_waiting or one.num_granted)
        largest = nlargest(number_max, counters, key=lambda one: (one.num_waiting, one.num_granted))
        return [self.part_of(one.tenant, one.weight) for one in largest]

    @property
    def bounds(self) -> QueueBounds:
        return self._bounds

    @property
    def num_tenants_waiting(self) -> int:
        return self._occupancy.num_tenants

    @property
    def num_places(self) -> int:
        """On all replicas that are ready."""
        return self._replicas.capacity

    def num_waiting_of(self, service_class: ServiceClass) -> int:
        """Requests of a class that wait, after aging."""
        return self._room.num_waiting(service_class)

    def weights_waiting(self) -> dict[str, float]:
        """Weight of each flow that has requests waiting."""
        return {one.tenant: one.weight for one in self._counters.waiting()}

    def costs_running(self) -> dict[str, float]:
        """Cost of what is computed of the requests that run, by flow."""
        costs: dict[str, float] = {}
        for job in self._grants:
            cost = self._cost(job, job.output_tokens) if job.has_answered else job.paid
            costs[job.counter.tenant] = costs.get(job.counter.tenant, 0.0) + max(cost, job.paid)
        return costs

    # --- inside -------------------------------------------------------------------------------------

    def _own_before(self, job: Job[Ticket], enough: int) -> int:
        """Some of its tenant's that are before it for certain: in a flood that is known without looking at others."""
        if job.order != self._order or job.place is not Place.LANE:
            return 0
        if job.demand.priority > 0 or self._policy.name == "shortest-remaining":
            return 0
        # The newest with the lowest priority: everything else of its tenant and class is before it.
        number = -1
        for lane in self._room.lanes():
            row = lane.row_of(job.counter) if lane.service_class == job.service_class else None
            for flow in () if row is None else row.flows():
                number += flow.num_jobs
                if number >= enough:
                    return number
        return max(0, number)

    def _waiting(
        self, job: Job[Ticket], position: int | None, behind: int, may_start: MayStart[Ticket] | None
    ) -> WaitingRequest[Ticket]:
        return WaitingRequest(
            ticket=job.ticket,
            service_class=job.service_class,
            priority=job.demand.priority,
            tokens=job.tokens,
            explanation=self._explanation(job, position, behind, may_start),
        )

    def _explanation(
        self, job: Job[Ticket], position: int | None, behind: int, may_start: MayStart[Ticket] | None
    ) -> Explanation:
        """`position`: None where it is only known to be behind so many."""
        place = behind + 1 if position is None else position
        return Explanation(
            position=place,
            is_exact=position is not None,
            tenant_share=self.share_of(job.counter.tenant, job.weight),
            waited_us=self._now_us - job.entered_us,
            reason=self._refined(job, place, may_start),
        )

    def _refined(self, job: Job[Ticket], position: int, may_start: MayStart[Ticket] | None) -> Reason:
        reason = self._reason(job, position, may_start)
        if reason in ("replicas_full", "memory") and job.paid:
            return "preempted"
        replicas = self._replicas.all()
        if reason == "replicas_full" and any(
            one.is_paused and one.running < one.capacity for one in replicas
        ):
            return "replica_paused"
        if reason == "memory" and any(one.has_room(job.tokens) for one in replicas):
            return "set_aside"
        return reason

    def _weights_waiting(self) -> float:
        number, counted_us, total = self._weights_known
        now_number = self._occupancy.num_tenants
        is_old = number != now_number or self._now_us >= counted_us + WEIGHTS_AGE_US
        if is_old or len(self._counters) <= COUNTERS_COUNTED_ANEW_MAX:
            total = sum(one.weight for one in self._counters.all() if one.num_waiting)
            self._weights_known = (now_number, self._now_us, total)
        return total

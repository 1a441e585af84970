"""The parts of a fair queue, and everything that can be asked of it without changing it."""

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from headrace.scheduling.counters import TenantCounters
from headrace.scheduling.dispatch import QueueBounds
from headrace.scheduling.explain import Explanation, Reason, Waiting, forecast, tenant_share
from headrace.scheduling.grants import Grants
from headrace.scheduling.lanes import Job, Lane, Place
from headrace.scheduling.occupancy import Occupancy
from headrace.scheduling.placing import Fits, Placing, WarmOn
from headrace.scheduling.policy import Demand, QueuePolicy
from headrace.scheduling.preemption import Running, victim
from headrace.scheduling.waiting_room import WaitingRoom

Ticket = TypeVar("Ticket", bound=Hashable)

Describe = Callable[[Ticket], Demand]


class QueueState(Generic[Ticket]):
    """What `headrace.scheduling.fair.FairQueue` consists of. Reads only."""

    def __init__(
        self,
        bounds: QueueBounds,
        policy: QueuePolicy | None = None,
        *,
        describe: Describe[Ticket] | None = None,
        fits: Fits[Ticket] | None = None,
        warm_on: WarmOn[Ticket] | None = None,
    ) -> None:
        policy = policy or QueuePolicy()
        self._bounds = bounds
        self._policy = policy
        self._describe = describe
        self._placing: Placing[Ticket] = Placing(fits=fits, warm_on=warm_on)
        self._replicas = self._placing.replicas
        self._now_us = 0
        self._order = 0
        self._jobs: dict[Ticket, Job[Ticket]] = {}
        """Waiting and granted."""
        self._room: WaitingRoom[Ticket] = WaitingRoom(policy)
        self._occupancy: Occupancy[Ticket] = Occupancy(bounds)
        self._counters = TenantCounters(idle_max=policy.idle_tenants_max)
        self._grants: Grants[Ticket] = Grants(policy.long_prompt_tokens)

    @property
    def policy(self) -> QueuePolicy:
        return self._policy

    @property
    def counters(self) -> TenantCounters:
        """To read."""
        return self._counters

    @property
    def num_waiting(self) -> int:
        return self._occupancy.length

    @property
    def waiting_tokens(self) -> int:
        return self._occupancy.tokens

    @property
    def num_running(self) -> int:
        return self._replicas.running

    def running_on(self, replica_id: str) -> int:
        replica = self._replicas.get(replica_id)
        return replica.running if replica else 0

    def places(self) -> Iterator[tuple[str, int, int]]:
        """(replica, its capacity, how many run there)"""
        for replica in self._replicas.all():
            yield replica.replica_id, replica.capacity, replica.running

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        """(requests, tokens) of a tenant that wait."""
        return self._occupancy.of(tenant)

    def has_place(self, ticket: Ticket) -> bool:
        """Whether a replica has room for this waiting request now."""
        job = self._jobs[ticket]
        return self._placing.pick(ticket, job.tokens) is not None

    def next_waiting(self, may_start: Callable[[Ticket], bool] | None = None) -> Ticket | None:
        """Who would be granted the next place that comes free, if it were one for everybody."""
        for job in self._room.front():
            if may_start is None or may_start(job.ticket):
                return job.ticket
        job_or_none = self._room.first(is_open=lambda lane: True, may_start=may_start, is_warm=None)
        return None if job_or_none is None else job_or_none.ticket

    # --- explaining ---------------------------------------------------------------------------------

    def position(self, ticket: Ticket) -> int:
        """Place in the expected order, from 1; 0 if it does not wait. Linear: for explanations only."""
        for place, waiting in enumerate(self.expected_order(), 1):
            if waiting == ticket:
                return place
        return 0

    def expected_order(self) -> Iterator[Ticket]:
        """Who would be granted after whom if nobody came (`headrace.scheduling.explain.forecast`)."""
        waiting = [
            Waiting(
                ticket=job.ticket,
                tenant=job.counter.tenant,
                counter=job.counter.value,
                charge=self._charge(job) / job.weight,
                cost=self._charge(job),
                rank=job.rank if job.place is Place.LANE else 0,
                service_class=job.service_class,
                is_first=job.place is Place.FRONT,
            )
            for job in self._room
        ]
        return forecast(waiting, self._policy, owed=self._room.owed)

    def explain(
        self, ticket: Ticket, may_start: Callable[[Ticket], bool] | None = None
    ) -> Explanation | None:
        """Why a request waits; None if it does not."""
        job = self._jobs.get(ticket)
        if job is None or job.place is Place.GRANTED:
            return None
        position = self.position(ticket)
        return Explanation(
            position=position,
            tenant_share=tenant_share(
                job.counter.tenant, {one.tenant: one.weight for one in self._counters.waiting()}
            ),
            waited_us=self._now_us - job.entered_us,
            reason=self._reason(job, position, may_start),
        )

    def preempt_for(self, ticket: Ticket) -> tuple[Ticket, str] | None:
        """The granted request that should be stopped for this waiting one, and where it runs; or None.

        The owner stops it, and calls `preempted` when it has stopped.
        """
        job = self._jobs.get(ticket)
        if job is None or job.place is Place.GRANTED:
            return None
        running = [
            Running(
                ticket=one.ticket,
                tenant=one.counter.tenant,
                counter=one.counter.value,
                granted_order=one.grant_order,
                charge=one.charged / one.weight,
            )
            for one in self._grants
        ]
        chosen = victim(
            running,
            tenant=job.counter.tenant,
            counter=job.counter.value,
            charge=self._charge(job) / job.weight,
            quantum=self._policy.quantum,
        )
        if chosen is None:
            return None
        replica = self._jobs[chosen].replica
        assert replica is not None
        return chosen, replica.replica_id

    # --- inside -------------------------------------------------------------------------------------

    def _charge(self, job: Job[Ticket]) -> float:
        """What its tenant will be charged when it is granted."""
        return max(0.0, self._cost(job, job.demand.expected_output_tokens) - job.charged)

    def _cost(self, job: Job[Ticket], output_tokens: int) -> float:
        demand = job.demand
        return self._policy.prices.cost(
            prompt_tokens=demand.prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=demand.cached_tokens,
        )

    def _is_open(self, lane: Lane[Ticket]) -> bool:
        return self._closed(lane) is None

    def _closed(self, lane: Lane[Ticket]) -> Reason | None:
        return self._placing.closed(lane, self._policy, num_reading_long=self._grants.num_reading_long)

    def _reason(self, job: Job[Ticket], position: int, may_start: Callable[[Ticket], bool] | None) -> Reason:
        if not len(self._replicas):
            return "no_replica"
        if may_start is not None and not may_start(job.ticket):
            return "own_limit"
        if self._replicas.num_free <= 0:
            return "replicas_full"
        if job.place is Place.LANE:
            closed = self._closed(self._room.lane_of(job))
            if closed is not None:
                return closed
        if self._placing.pick(job.ticket, job.tokens) is None:
            return "memory"
        return "next" if position == 1 else "behind_others"

"""The parts of a fair queue, and everything that can be asked of it without changing it."""

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from headrace.scheduling.counters import TenantCounters
from headrace.scheduling.explain import Reason
from headrace.scheduling.grants import Grants
from headrace.scheduling.jobs import Job, Place
from headrace.scheduling.lanes import Lane
from headrace.scheduling.occupancy import Occupancy
from headrace.scheduling.placing import Fits, MayRun, Placing, WarmOn
from headrace.scheduling.policy import Demand, QueuePolicy
from headrace.scheduling.queue_bounds import QueueBounds
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
        may_run: MayRun[Ticket] | None = None,
        fits: Fits[Ticket] | None = None,
        warm_on: WarmOn[Ticket] | None = None,
    ) -> None:
        policy = policy or QueuePolicy()
        self._bounds = bounds
        self._policy = policy
        self._describe = describe
        self._placing: Placing[Ticket] = Placing(may_run=may_run, fits=fits, warm_on=warm_on)
        self._placing.slack = policy.locality_slack
        self._replicas = self._placing.replicas
        self._now_us = 0
        self._order = 0
        self._jobs: dict[Ticket, Job[Ticket]] = {}
        """Waiting and granted."""
        self._newcomer: Job[Ticket] | None = None
        """The only one that waits, before it is in the next two: nearly always it is granted a place at once, and need
        not be put in there and taken out again."""
        self._waiting_room: WaitingRoom[Ticket] = WaitingRoom(policy)
        self._occupied: Occupancy[Ticket] = Occupancy(bounds)
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
        return self._occupied.length if self._newcomer is None else 1

    @property
    def waiting_tokens(self) -> int:
        return self._occupied.tokens if self._newcomer is None else self._newcomer.tokens

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
        newcomer = self._newcomer
        if newcomer is not None and newcomer.tenant == tenant:
            return 1, newcomer.tokens
        return self._occupied.of(tenant)

    def has_place(self, ticket: Ticket) -> bool:
        """Whether a replica has room for this waiting request now."""
        job = self._jobs[ticket]
        return self._placing.pick(ticket, job.tokens) is not None

    # --- inside -------------------------------------------------------------------------------------

    @property
    def _room(self) -> WaitingRoom[Ticket]:
        """With everybody in it who waits."""
        if self._newcomer is not None:
            self._house()
        return self._waiting_room

    @property
    def _occupancy(self) -> Occupancy[Ticket]:
        """Of everybody who waits."""
        if self._newcomer is not None:
            self._house()
        return self._occupied

    def _house(self) -> None:
        """The newcomer is one among those who wait."""
        job, self._newcomer = self._newcomer, None
        assert job is not None
        self._occupied.add(job)
        self._waiting_room.add(job)

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
            closed = self._closed(self._waiting_room.lane_of(job))
            if closed is not None:
                return closed
        if self._placing.pick(job.ticket, job.tokens) is None:
            return "memory"
        return "next" if position == 1 else "behind_others"

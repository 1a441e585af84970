"""Who runs where, and who waits: a bounded queue for each model that shares it fairly between tenants.

It keeps the interface of `headrace.scheduling.dispatch.ModelQueue` and adds who is next. The tenant with the
lowest counter (`headrace.scheduling.counters`) is; a request is charged to its tenant when it is granted, with
its expected output, and settled by the real one. Nobody waits while a place is free that the policy
lets it have: the queue is work-conserving but for the places that `interactive_reserve` keeps free on purpose.

What the owner must call, besides what `ModelQueue` asks for:

- say what a request asks for: `demand` of `enter`, or `describe` of the constructor for all of them;
- say the time: `now_us` of `enter` and `dispatch`, or `advance` before them;
- `progress` while a request runs, at least once when its prompt has been read in;
- `settle` with the real counts when it ends, however it ends, before `release`.

A grant that is released and never settled stands as it was charged.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

from headrace.scheduling.counters import TenantCounters
from headrace.scheduling.dispatch import NoReplica, QueueBounds
from headrace.scheduling.explain import Explanation, Reason, Waiting, forecast, tenant_share
from headrace.scheduling.lanes import Job, Lane, Place
from headrace.scheduling.occupancy import Occupancy
from headrace.scheduling.policy import Demand, QueuePolicy
from headrace.scheduling.preemption import Running, victim
from headrace.scheduling.replicas import Replica, Replicas
from headrace.scheduling.waiting_room import WaitingRoom

Ticket = TypeVar("Ticket", bound=Hashable)

ORPHANS_MAX: Final = 65_536
"""Requests whose replica is gone and that are not settled yet. The oldest then stands as it was charged."""

_NO_DEMAND: Final = Demand()

Describe = Callable[[Ticket], Demand]
Fits = Callable[[Ticket, str], bool]
"""Whether a replica's memory has room for a request now. While it has not, nobody passes that request."""
WarmOn = Callable[[Ticket], tuple[str, int] | None]
"""The replica that has the request's prefix in its cache, and how many tokens of it."""


class FairQueue(Generic[Ticket]):
    """The queue and the replicas of one model. A ticket stands for a request."""

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
        self._fits = fits
        self._warm_on = warm_on
        self._now_us = 0
        self._order = 0
        self._jobs: dict[Ticket, Job[Ticket]] = {}
        """Waiting and granted."""
        self._room: WaitingRoom[Ticket] = WaitingRoom(policy)
        self._occupancy: Occupancy[Ticket] = Occupancy(bounds)
        self._counters = TenantCounters(idle_max=policy.idle_tenants_max)
        self._replicas = Replicas()
        self._granted: dict[Replica, dict[Ticket, Job[Ticket]]] = {}
        """By replica, in order of their grants."""
        self._orphans: OrderedDict[Ticket, None] = OrderedDict()
        self._num_reading_long = 0

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

    def advance(self, now_us: int) -> None:
        """Say what time it is. Never goes back."""
        self._now_us = max(self._now_us, now_us)

    def set_policy(self, policy: QueuePolicy) -> None:
        """Decide like this from now on. What waits keeps waiting, counters and grants stay as they are."""
        self._policy = policy
        self._counters.idle_max = policy.idle_tenants_max
        self._room.change_policy(policy)
        self._num_reading_long = sum(
            self._is_reading_long(job) for jobs in self._granted.values() for job in jobs.values()
        )

    # --- replicas -----------------------------------------------------------------------------------

    def expect(self, replica_id: str) -> None:
        """A replica is starting: requests may wait for it."""
        self._replicas.expect(replica_id)

    def give_up(self, replica_id: str) -> None:
        """A replica will not come (back), and what ran on it is gone with it: `release` does nothing, `settle`
        still does."""
        replica = self._replicas.give_up(replica_id)
        if replica is None:
            return
        for ticket, job in self._granted.pop(replica).items():
            self._num_reading_long -= self._is_reading_long(job)
            job.has_answered = True
            self._orphans[ticket] = None
        while len(self._orphans) > ORPHANS_MAX:
            self._stand(next(iter(self._orphans)))

    def add(self, replica_id: str, *, capacity: int, kv_tokens: int | None = None) -> None:
        """A replica is ready for `capacity` requests at once, that together hold at most `kv_tokens`."""
        self.give_up(replica_id)
        self._replicas.add(replica_id, capacity=capacity, kv_tokens=kv_tokens)
        replica = self._replicas.get(replica_id)
        assert replica is not None
        self._granted[replica] = {}

    def pause(self, replica_id: str, *, is_paused: bool) -> None:
        """A replica said that it is full (or may be asked again): it is granted nothing meanwhile."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.is_paused = is_paused

    # --- waiting ------------------------------------------------------------------------------------

    def enter(
        self,
        ticket: Ticket,
        *,
        tenant: str,
        tokens: int,
        may_start: bool = True,
        demand: Demand | None = None,
        now_us: int = 0,
    ) -> list[Ticket]:
        """Take a place in the queue. A refusal changes nothing.

        Returns the tickets that had to give up their places for this one. Raises `NoReplica` if nobody
        serves or will serve the model, `QueueFull` if all places are taken. A request that can start
        at once never finds the queue full.
        """
        assert ticket not in self._jobs
        if self._replicas.is_hopeless:
            raise NoReplica
        self.advance(now_us)
        if demand is None:
            demand = self._describe(ticket) if self._describe else _NO_DEMAND
        assert demand.weight > 0
        evicted: list[Ticket] = []
        if not (may_start and self._has_place(ticket, tokens, demand)):
            evicted = self._occupancy.make_room(tenant, tokens)
        for other in evicted:
            self.leave(other)
        self._order += 1
        counter = self._counters.enter(tenant, demand.weight)
        job = Job(
            ticket, counter=counter, tokens=tokens, demand=demand, order=self._order, entered_us=self._now_us
        )
        self._jobs[ticket] = job
        self._occupancy.add(ticket, tenant, tokens)
        self._room.add(job)
        return evicted

    def resize(self, ticket: Ticket, tokens: int) -> None:
        """A ticket stands for so many tokens from now on. One that is granted may be resized too."""
        job = self._jobs[ticket]
        if job.place is Place.GRANTED:
            assert job.replica is not None
            job.replica.kv_used += tokens - job.tokens
        else:
            self._occupancy.resize(ticket, job.tenant, tokens)
        job.tokens = tokens

    def leave(self, ticket: Ticket) -> bool:
        """Give up the place in the queue. False if the ticket was not waiting (any more)."""
        job = self._jobs.get(ticket)
        if job is None or job.place is Place.GRANTED:
            return False
        del self._jobs[ticket]
        self._room.remove(job)
        self._occupancy.remove(ticket, job.tenant)
        job.place = Place.GONE
        self._counters.leave(job.counter)
        return True

    def drop_hopeless(self) -> list[Ticket]:
        """All waiting tickets, taken out, if no replica is left or expected; else none."""
        if not self._replicas.is_hopeless:
            return []
        front = [job.ticket for job in self._room.front()]
        others = sorted((job for job in self._room if job.place is Place.LANE), key=lambda job: job.order)
        tickets = [*front, *(job.ticket for job in others)]
        for ticket in tickets:
            self.leave(ticket)
        return tickets

    # --- granted ------------------------------------------------------------------------------------

    def dispatch(
        self, may_start: Callable[[Ticket], bool] | None = None, *, now_us: int = 0
    ) -> Iterator[tuple[Ticket, str]]:
        """Grant places to waiting requests, next one first, each on the least loaded replica with room.

        Requests for which `may_start` says no keep their place and let others pass. It is asked right
        before each grant, so what the caller does with a grant counts for the next.
        """
        self.advance(now_us)
        while self._replicas.num_free > 0 and self.num_waiting:
            choice = self._choose(may_start)
            if choice is None:
                return
            job, replica, cached_tokens = choice
            self._grant(job, replica, cached_tokens)
            yield job.ticket, replica.replica_id

    def progress(self, ticket: Ticket, output_tokens: int) -> None:
        """The prompt has been read in and so many tokens of the answer are there. More than was expected is
        charged at once."""
        job = self._jobs.get(ticket)
        if job is None or job.place is not Place.GRANTED or job.output_tokens > output_tokens:
            return
        if not job.has_answered:
            self._num_reading_long -= self._is_reading_long(job)
            job.has_answered = True
        job.output_tokens = output_tokens
        if output_tokens > job.demand.expected_output_tokens:
            self._correct(job, max(job.charged, self._cost(job, output_tokens)))

    def settle(
        self,
        ticket: Ticket,
        *,
        output_tokens: int,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """A granted request has ended: its tenant is charged what it really took. Call before `release`.

        Counts that are left out are as in its demand. Nothing happens to a ticket that is not granted.
        """
        job = self._jobs.get(ticket)
        if job is None or job.place is not Place.GRANTED:
            return
        demand = job.demand
        cost = self._policy.prices.cost(
            prompt_tokens=demand.prompt_tokens if prompt_tokens is None else prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=demand.cached_tokens if cached_tokens is None else cached_tokens,
        )
        self._correct(job, cost)
        self._finish(job)

    def settle_late(self, tenant: str, *, cost: float, weight: float = 1.0) -> None:
        """What a request cost that had been settled as nothing, because it was thought lost."""
        self._counters.charge_late(tenant, cost / weight)
        counter = self._counters.get(tenant)
        if counter is not None:
            self._room.moved(counter)

    def release(self, replica_id: str) -> None:
        """A granted request has left its replica."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        self._replicas.release(replica)
        granted = self._granted[replica]
        while len(granted) > replica.running:
            self._stand(next(iter(granted)))

    def put_back(
        self,
        ticket: Ticket,
        replica_id: str,
        *,
        tenant: str,
        tokens: int,
        output_tokens: int = 0,
        is_preempted: bool = False,
    ) -> None:
        """A granted request waits again. Bounds do not count it out.

        One that could not start is the next one again, before everybody else, and its charge is taken back.
        One that was stopped for another (`is_preempted`) is the next of its tenant; what it has taken so far
        stays charged, and computing that again will not be.
        """
        job = self._jobs[ticket]
        assert job.place is Place.GRANTED
        assert job.tenant == tenant
        is_there = job.replica is self._replicas.get(replica_id)
        self._forget_grant(job)
        if is_there:
            self.release(replica_id)
        if is_preempted:
            job.paid = max(job.paid, self._cost(job, output_tokens))
        refund, job.charged = job.charged - job.paid, job.paid
        job.tokens = tokens
        job.output_tokens = output_tokens if is_preempted else 0
        job.has_answered = False
        self._occupancy.add(ticket, tenant, tokens, is_first=True)
        self._counters.put_back(job.counter, refund / job.weight)
        if is_preempted:
            self._room.add(job)
        else:
            self._room.add_first(job)
        self._room.moved(job.counter)

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
                tenant=job.tenant,
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
                job.tenant, {one.tenant: one.weight for one in self._counters.waiting()}
            ),
            waited_us=self._now_us - job.entered_us,
            reason=self._reason(job, position, may_start),
        )

    def preempt_for(self, ticket: Ticket) -> tuple[Ticket, str] | None:
        """The granted request that should be stopped for this waiting one, and where it runs; or None.

        The owner stops it, and calls `put_back` with `is_preempted` when it has stopped.
        """
        job = self._jobs.get(ticket)
        if job is None or job.place is Place.GRANTED:
            return None
        running = [
            Running(
                ticket=one.ticket,
                tenant=one.tenant,
                counter=one.counter.value,
                granted_order=one.grant_order,
                charge=one.charged / one.weight,
            )
            for jobs in self._granted.values()
            for one in jobs.values()
        ]
        chosen = victim(running, tenant=job.tenant, counter=job.counter.value, quantum=self._policy.quantum)
        if chosen is None:
            return None
        replica = self._jobs[chosen].replica
        assert replica is not None
        return chosen, replica.replica_id

    # --- inside -------------------------------------------------------------------------------------

    def _choose(self, may_start: Callable[[Ticket], bool] | None) -> tuple[Job[Ticket], Replica, int] | None:
        self._room.age(self._now_us)
        job = next((one for one in self._room.front() if may_start is None or may_start(one.ticket)), None)
        if job is None:
            is_warm = None if self._warm_on is None else self._is_warm
            job = self._room.first(is_open=self._is_open, may_start=may_start, is_warm=is_warm)
        if job is None:
            return None
        warm = self._warm_place(job)
        if warm is not None:
            return job, *warm
        replica = self._pick(job.ticket, job.tokens)
        # The next one does not fit yet: nobody passes it, or a large one would wait for ever.
        return None if replica is None else (job, replica, 0)

    def _grant(self, job: Job[Ticket], replica: Replica, cached_tokens: int) -> None:
        self._room.remove(job)
        self._occupancy.remove(job.ticket, job.tenant)
        if cached_tokens > job.demand.cached_tokens:
            job.demand = _with_cached(job.demand, cached_tokens)
        charge = self._charge(job)
        job.charged += charge
        job.place = Place.GRANTED
        job.replica = replica
        self._order += 1
        job.grant_order = self._order
        self._num_reading_long += self._is_reading_long(job)
        self._granted[replica][job.ticket] = job
        self._replicas.take(replica, job.tokens)
        self._counters.grant(job.counter, charge / job.weight)
        self._room.granted(job, charge)
        self._room.moved(job.counter)

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

    def _correct(self, job: Job[Ticket], cost: float) -> None:
        more, job.charged = cost - job.charged, cost
        if more:
            self._counters.correct(job.counter, more / job.weight)
            self._room.moved(job.counter)

    def _stand(self, ticket: Ticket) -> None:
        """Nobody settles this one: it is left as it was charged."""
        self._finish(self._jobs[ticket])

    def _finish(self, job: Job[Ticket]) -> None:
        self._forget_grant(job)
        job.place = Place.GONE
        del self._jobs[job.ticket]
        self._counters.finish(job.counter)

    def _forget_grant(self, job: Job[Ticket]) -> None:
        replica = job.replica
        assert replica is not None
        self._num_reading_long -= self._is_reading_long(job)
        granted = self._granted.get(replica)
        if granted is not None and granted.pop(job.ticket, None) is not None:
            replica.kv_used -= job.tokens
        self._orphans.pop(job.ticket, None)
        job.replica = None

    def _is_reading_long(self, job: Job[Ticket]) -> bool:
        limit = self._policy.long_prompt_tokens
        return (
            limit is not None
            and job.place is Place.GRANTED
            and not job.has_answered
            and job.demand.prompt_tokens > limit
        )

    def _is_open(self, lane: Lane[Ticket]) -> bool:
        return self._closed(lane) is None

    def _closed(self, lane: Lane[Ticket]) -> Reason | None:
        """Why nothing of this lane is granted for now."""
        policy = self._policy
        if lane.size == "long" and self._num_reading_long >= policy.long_prompts_max:
            return "long_prompts"
        is_kept = policy.interactive_reserve > 0 and policy.name != "fifo"
        is_short = lane.service_class == "interactive" and lane.size == "brief"
        if is_kept and not is_short:
            # One place is always for everybody, however small the fleet is.
            reserve = min(policy.interactive_reserve, self._replicas.capacity - 1)
            if self._replicas.num_free <= reserve:
                return "kept_for_short"
        return None

    def _pick(self, ticket: Ticket, tokens: int) -> Replica | None:
        fits = self._fits
        return self._replicas.pick(tokens, None if fits is None else lambda name: fits(ticket, name))

    def _has_place(self, ticket: Ticket, tokens: int, demand: Demand) -> bool:
        """Whether a newcomer that may start would find a place."""
        if self._pick(ticket, tokens) is None:
            return False
        return self._is_open(self._room.lane_for(demand))

    def _is_warm(self, job: Job[Ticket]) -> bool:
        return self._warm_place(job) is not None

    def _warm_place(self, job: Job[Ticket]) -> tuple[Replica, int] | None:
        warm = None if self._warm_on is None else self._warm_on(job.ticket)
        if warm is None:
            return None
        replica = self._replicas.get(warm[0])
        if replica is None or not replica.has_room(job.tokens):
            return None
        if self._fits is not None and not self._fits(job.ticket, replica.replica_id):
            return None
        return replica, warm[1]

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
        if self._pick(job.ticket, job.tokens) is None:
            return "memory"
        return "next" if position == 1 else "behind_others"


def _with_cached(demand: Demand, cached_tokens: int) -> Demand:
    return Demand(
        prompt_tokens=demand.prompt_tokens,
        expected_output_tokens=demand.expected_output_tokens,
        cached_tokens=cached_tokens,
        weight=demand.weight,
        service_class=demand.service_class,
        priority=demand.priority,
        gate=demand.gate,
    )

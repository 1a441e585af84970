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

Where releases come without settling, the oldest grant of the replica is taken to have ended and stands as it was
charged: good enough to count places, not to put requests back.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Final, TypeVar

import msgspec

from headrace.scheduling.dispatch import NoReplica
from headrace.scheduling.lanes import Job, Place
from headrace.scheduling.policy import Demand, QueuePolicy
from headrace.scheduling.queue_state import QueueState
from headrace.scheduling.replicas import Replica

Ticket = TypeVar("Ticket", bound=Hashable)

_NO_DEMAND: Final = Demand()


class FairQueue(QueueState[Ticket]):
    """The queue and the replicas of one model. A ticket stands for a request."""

    def advance(self, now_us: int) -> None:
        """Say what time it is. Never goes back."""
        self._now_us = max(self._now_us, now_us)

    def set_policy(self, policy: QueuePolicy) -> None:
        """Decide like this from now on. What waits keeps waiting, counters and grants stay as they are."""
        self._policy = policy
        self._counters.idle_max = policy.idle_tenants_max
        self._room.change_policy(policy)
        self._grants.change_long_prompts(policy.long_prompt_tokens)

    # --- replicas -----------------------------------------------------------------------------------

    def expect(self, replica_id: str) -> None:
        """A replica is starting: requests may wait for it."""
        self._replicas.expect(replica_id)

    def give_up(self, replica_id: str) -> None:
        """A replica will not come (back), and what ran on it is gone with it: `release` does nothing, `settle`
        still does."""
        replica = self._replicas.give_up(replica_id)
        if replica is not None:
            for job in self._grants.lose_replica(replica):
                self._finish(job)

    def add(self, replica_id: str, *, capacity: int, kv_tokens: int | None = None) -> None:
        """A replica is ready for `capacity` requests at once, that together hold at most `kv_tokens`."""
        self.give_up(replica_id)
        self._replicas.add(replica_id, capacity=capacity, kv_tokens=kv_tokens)
        replica = self._replicas.get(replica_id)
        assert replica is not None
        self._grants.add_replica(replica)

    def set_capacity(self, replica_id: str, capacity: int) -> None:
        """From now on. What runs beyond a smaller one goes on to its end; nothing is granted there meanwhile."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            self._replicas.set_capacity(replica, capacity)

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
        may_start: Callable[[Ticket], bool] | None = None,
        demand: Demand | None = None,
        now_us: int = 0,
    ) -> list[Ticket]:
        """Take a place in the queue. A refusal changes nothing.

        Returns the tickets that had to give up their places for this one. Raises `NoReplica` if nobody
        serves or will serve the model, `QueueFull` if all places are taken. A request that can start
        at once (`may_start` says so, and there is a place) never finds the queue full.
        """
        assert ticket not in self._jobs
        if self._replicas.is_hopeless:
            raise NoReplica
        self.advance(now_us)
        if demand is None:
            demand = self._describe(ticket) if self._describe else _NO_DEMAND
        assert demand.weight > 0
        evicted: list[Ticket] = []
        can_start = may_start is None or may_start(ticket)
        if not (can_start and self._has_place(ticket, tokens, demand)):
            evicted = self._occupancy.make_room(tenant, tokens)
        for other in evicted:
            self.leave(other)
        self._order += 1
        counter = self._counters.enter(demand.flow or tenant, demand.weight)
        job = Job(
            ticket,
            tenant=tenant,
            counter=counter,
            tokens=tokens,
            demand=demand,
            order=self._order,
            entered_us=self._now_us,
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
        self._grants.answered(job)
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
        for job in self._grants.surplus(replica):
            self._finish(job)

    def put_back(self, ticket: Ticket, replica_id: str, *, tenant: str, tokens: int) -> None:
        """A granted request could not start: it is the next one again, and its charge is taken back. Bounds
        do not count it out."""
        job = self._jobs[ticket]
        assert job.tenant == tenant
        self._take_back(job, replica_id, tokens)
        self._room.add_first(job)

    def preempted(
        self, ticket: Ticket, replica_id: str, *, tokens: int, output_tokens: int, in_favour_of: Ticket
    ) -> None:
        """A granted request was stopped for another (`preempt_for`), which is the next one now if it still waits.

        The stopped one waits again, before the rest of its tenant's. What it has taken stays charged, and computing
        that again will not be. `output_tokens`: so many were generated, over all its attempts.
        """
        job = self._jobs[ticket]
        job.paid = max(job.paid, self._cost(job, output_tokens))
        self._take_back(job, replica_id, tokens)
        job.output_tokens = output_tokens
        # Where it can go on differs from where its tenant's others can start.
        job.demand = msgspec.structs.replace(job.demand, gate=None)
        self._room.add(job)
        favoured = self._jobs.get(in_favour_of)
        if favoured is not None and favoured.place is Place.LANE:
            self._room.remove(favoured)
            self._room.add_first(favoured)

    # --- inside -------------------------------------------------------------------------------------

    def _choose(self, may_start: Callable[[Ticket], bool] | None) -> tuple[Job[Ticket], Replica, int] | None:
        self._room.age(self._now_us)
        job = next((one for one in self._room.front() if may_start is None or may_start(one.ticket)), None)
        if job is None:
            is_warm = self._placing.is_warm if self._placing.has_warmth else None
            job = self._room.first(is_open=self._is_open, may_start=may_start, is_warm=is_warm)
        if job is None:
            return None
        warm = self._placing.warm(job)
        if warm is not None:
            return job, *warm
        replica = self._placing.pick(job.ticket, job.tokens)
        # The next one does not fit yet: nobody passes it, or a large one would wait for ever.
        return None if replica is None else (job, replica, 0)

    def _grant(self, job: Job[Ticket], replica: Replica, cached_tokens: int) -> None:
        self._room.remove(job)
        self._occupancy.remove(job.ticket, job.tenant)
        if cached_tokens > job.demand.cached_tokens:
            job.demand = msgspec.structs.replace(job.demand, cached_tokens=cached_tokens)
        charge = self._charge(job)
        job.charged += charge
        job.place = Place.GRANTED
        job.has_answered = False
        self._order += 1
        job.grant_order = self._order
        self._grants.add(job, replica)
        self._replicas.take(replica, job.tokens)
        self._counters.grant(job.counter, charge / job.weight)
        self._room.granted(job, charge)
        self._room.moved(job.counter)

    def _take_back(self, job: Job[Ticket], replica_id: str, tokens: int) -> None:
        """It waits again; what it has not paid for by real work is not charged any more."""
        assert job.place is Place.GRANTED
        is_there = job.replica is self._replicas.get(replica_id)
        self._grants.remove(job)
        if is_there:
            self.release(replica_id)
        refund, job.charged = job.charged - job.paid, job.paid
        job.tokens = tokens
        job.output_tokens = 0
        self._occupancy.add(job.ticket, job.tenant, tokens, is_first=True)
        self._counters.put_back(job.counter, refund / job.weight)
        self._room.moved(job.counter)

    def _correct(self, job: Job[Ticket], cost: float) -> None:
        more, job.charged = cost - job.charged, cost
        if more:
            self._counters.correct(job.counter, more / job.weight)
            self._room.moved(job.counter)

    def _finish(self, job: Job[Ticket]) -> None:
        self._grants.remove(job)
        job.place = Place.GONE
        del self._jobs[job.ticket]
        self._counters.finish(job.counter)

    def _has_place(self, ticket: Ticket, tokens: int, demand: Demand) -> bool:
        """Whether a newcomer that may start would find a place."""
        if self._placing.pick(ticket, tokens) is None:
            return False
        return self._is_open(self._room.lane_for(demand))

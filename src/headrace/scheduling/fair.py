"""Who runs where, and who waits: a bounded queue for each model that shares it fairly between tenants.

Requests wait here and not inside engines, because an engine's queue cannot be reordered. A replica is given a request
only when it has a free place; load is counted here, synchronously, and never read from a scrape.

The tenant with the lowest counter (`headrace.scheduling.counters`) is next; a request is charged to its tenant when
it is granted, with its expected output, and settled by the real one. Nobody waits while a place is free that the policy
lets it have: the queue is work-conserving but for the places that `interactive_reserve` keeps free on purpose.

What the owner must call, besides `enter`, `dispatch` and `release` for each request:

- say what a request asks for: `demand` of `enter`, or `describe` of the constructor for all of them;
- say the time: `now_us` of `enter` and `dispatch`, or `advance` before them;
- `progress` while a request runs, at least once when its prompt has been read in;
- `settle` with the real counts when it ends, however it ends, before `release`.

Where releases come without settling, the oldest grant of the replica is taken to have ended and stands as it was
charged: good enough to count places, not to put requests back.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Final, TypeVar

import msgspec

from headrace.scheduling.explained_queue import ExplainedQueue
from headrace.scheduling.jobs import Job, Place
from headrace.scheduling.policy import Demand, QueuePolicy
from headrace.scheduling.preemption import RunningShares
from headrace.scheduling.queue_bounds import NoReplica
from headrace.scheduling.queue_steps import QueueSteps

Ticket = TypeVar("Ticket", bound=Hashable)

_NO_DEMAND: Final = Demand()

ASKING_TENANTS_MAX: Final = 16
"""So many tenants are asked whether a running request should be stopped for one of theirs."""


class FairQueue(QueueSteps[Ticket], ExplainedQueue[Ticket]):
    """The queue and the replicas of one model. A ticket stands for a request."""

    def set_policy(self, policy: QueuePolicy) -> None:
        """Decide like this from now on. What waits keeps waiting, counters and grants stay as they are."""
        self._policy = policy
        self._placing.slack = policy.locality_slack
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
            self._replicas.pause(replica, is_paused=is_paused)

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
        at once (`may_start` says so, and there is a place) never finds the queue full; `may_start` is asked only
        where it would.
        """
        assert ticket not in self._jobs
        if self._replicas.is_hopeless:
            raise NoReplica
        self.advance(now_us)
        if demand is None:
            demand = self._describe(ticket) if self._describe else _NO_DEMAND
        assert demand.weight > 0
        evicted: list[Ticket] = []
        occupancy = self._occupancy
        if not occupancy.has_room(tenant, tokens):
            can_start = may_start is None or may_start(ticket)
            if not (can_start and self._has_place(ticket, tokens, demand)):
                evicted = occupancy.make_room(tenant, tokens)
        for other in evicted:
            self.leave(other)
        self._order += 1
        counter = self._counters.enter(demand.flow or tenant, demand.weight)
        job = Job(ticket, tenant, counter, tokens, demand, self._order, self._now_us, demand.weight)
        self._jobs[ticket] = job
        if occupancy.length:
            occupancy.add(job)
            self._waiting_room.add(job)
        else:
            self._newcomer = job
        return evicted

    def resize(self, ticket: Ticket, tokens: int) -> None:
        """A ticket stands for so many tokens from now on. One that is granted may be resized too."""
        job = self._jobs[ticket]
        if job.place is Place.GRANTED:
            assert job.replica is not None
            job.replica.kv_used += tokens - job.tokens
        else:
            self._occupancy.resize(job, tokens)
        job.tokens = tokens

    def leave(self, ticket: Ticket) -> bool:
        """Give up the place in the queue. False if the ticket was not waiting (any more)."""
        job = self._jobs.get(ticket)
        if job is None or job.place is Place.GRANTED:
            return False
        del self._jobs[ticket]
        self._room.remove(job)
        self._occupancy.remove(job)
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
        if counter is not None and counter.num_waiting:
            self._room.moved(counter)

    def release(self, replica_id: str) -> None:
        """A granted request has left its replica."""
        self._release(replica_id)

    def put_back(self, ticket: Ticket, replica_id: str, *, tenant: str, tokens: int) -> None:
        """A granted request could not start: it is the next one again, and its charge is taken back. Bounds
        do not count it out."""
        job = self._jobs[ticket]
        assert job.tenant == tenant
        self._take_back(job, replica_id, tokens)
        self._room.add_first(job)

    def preemption(self, may_start: Callable[[Ticket], bool] | None = None) -> tuple[Ticket, Ticket] | None:
        """(granted request that should be stopped, waiting one that should have its place), or None (`fair` only).

        The waiting one is the first for which `RunningShares.victim` finds somebody: tenants are asked in the queue's
        order, each for its first interactive request that may start. The owner stops the granted one, and calls
        `preempted` when it has stopped. Costs nothing to speak of while no tenant has several requests running.
        """
        if self._policy.name != "fair" or not self._counters.num_with_several or not self.num_waiting:
            return None
        self._room.age(self._now_us)
        asking = self._room.first_of_each(may_start, tenants_max=ASKING_TENANTS_MAX)
        if not asking:
            return None
        shares = RunningShares(self._grants)
        for job in asking:
            charge = max(job.charged, self._cost(job, job.demand.expected_output_tokens)) / job.weight
            chosen = shares.victim(
                job,
                charge=charge,
                quantum=self._policy.quantum,
                can_replace=partial(self._placing.can_replace, job),
            )
            if chosen is not None:
                return chosen.ticket, job.ticket
        return None

    def preempted(
        self, ticket: Ticket, replica_id: str, *, tokens: int, output_tokens: int, in_favour_of: Ticket
    ) -> None:
        """A granted request was stopped for another (`preemption`), which is the next one now if it still waits.

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
        if favoured is not None and favoured.place is not Place.GRANTED:
            self._room.remove(favoured)
            self._room.add_first(favoured)

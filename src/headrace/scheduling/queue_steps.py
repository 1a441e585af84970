"""What the calls of a fair queue consist of: choosing who is next, granting, charging, taking back."""

from collections.abc import Callable, Hashable
from typing import TypeVar

import msgspec

from headrace.scheduling.jobs import Job, Place
from headrace.scheduling.policy import Demand
from headrace.scheduling.queue_state import QueueState
from headrace.scheduling.replicas import Replica

Ticket = TypeVar("Ticket", bound=Hashable)

MayStart = Callable[[Ticket], bool]
Choice = tuple[Job[Ticket], Replica, int]
"""Who is next, on which replica, and how many tokens of its prompt are in that one's cache."""


class QueueSteps(QueueState[Ticket]):
    """The steps of `headrace.scheduling.fair.FairQueue`."""

    def advance(self, now_us: int) -> None:
        """Say what time it is. Never goes back."""
        if now_us > self._now_us:
            self._now_us = now_us

    # --- who is next --------------------------------------------------------------------------------

    def _choose(self, may_start: MayStart[Ticket] | None) -> Choice[Ticket] | None:
        newcomer = self._newcomer
        if newcomer is not None:
            # Nobody else waits, so whoever comes out of the lanes could only be this one.
            if self._waiting_room.is_aged(newcomer, self._now_us):
                newcomer.is_aged = True
            if self._policy.closes_lanes and not self._is_open(self._waiting_room.lane_of(newcomer)):
                return None
            if may_start is not None and not may_start(newcomer.ticket):
                return None
            return self._place(newcomer)
        room = self._waiting_room
        room.age(self._now_us)
        job = room.first_in_front(may_start)
        if job is None:
            job = room.first(
                is_open=self._is_open if self._policy.closes_lanes else None,
                may_start=may_start,
                is_warm=self._placing.is_warm if self._placing.has_warmth else None,
            )
        return None if job is None else self._place(job)

    def _place(self, job: Job[Ticket]) -> Choice[Ticket] | None:
        if self._placing.has_warmth:
            warm = self._placing.warm(job)
            if warm is not None:
                return job, *warm
        replica = self._placing.pick(job.ticket, job.tokens)
        # The next one does not fit yet: nobody passes it, or a large one would wait for ever.
        return None if replica is None else (job, replica, 0)

    def _has_place(self, ticket: Ticket, tokens: int, demand: Demand) -> bool:
        """Whether a newcomer that may start would find a place."""
        if self._placing.pick(ticket, tokens) is None:
            return False
        return self._is_open(self._waiting_room.lane_for(demand))

    # --- granting and charging ----------------------------------------------------------------------

    def _grant(self, job: Job[Ticket], replica: Replica, cached_tokens: int) -> None:
        if cached_tokens > job.demand.cached_tokens:
            job.demand = msgspec.structs.replace(job.demand, cached_tokens=cached_tokens)
        charge = self._charge(job)
        job.charged += charge
        # Before it is taken out: so its tenant's row moves once, to where it belongs.
        self._counters.grant(job.counter, charge / job.weight)
        is_alone = job is self._newcomer
        if is_alone:
            self._newcomer = None
            self._waiting_room.granted_alone()
        else:
            self._room.remove(job)
            self._occupancy.remove(job)
            self._waiting_room.granted(job, charge)
            self._moved(job)
        job.place = Place.GRANTED
        job.has_answered = False
        self._order += 1
        job.grant_order = self._order
        self._grants.add(job, replica)
        self._replicas.take(replica, job.tokens)

    def _moved(self, job: Job[Ticket]) -> None:
        """Its tenant's counter has changed. Only of those who wait, it says who is next."""
        if job.counter.num_waiting:
            self._room.moved(job.counter)

    def _take_back(self, job: Job[Ticket], replica_id: str, tokens: int) -> None:
        """It waits again; what it has not paid for by real work is not charged any more."""
        assert job.place is Place.GRANTED
        is_there = job.replica is self._replicas.get(replica_id)
        self._grants.remove(job)
        if is_there:
            self._release(replica_id)
        refund, job.charged = job.charged - job.paid, job.paid
        job.tokens = tokens
        job.output_tokens = 0
        self._occupancy.add(job, is_first=True)
        self._counters.put_back(job.counter, refund / job.weight)
        self._moved(job)

    def _release(self, replica_id: str) -> None:
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        self._replicas.release(replica)
        unsettled = self._grants.surplus(replica)
        if unsettled is not None:
            self._finish(unsettled)

    def _correct(self, job: Job[Ticket], cost: float) -> None:
        more, job.charged = cost - job.charged, cost
        if more:
            self._counters.correct(job.counter, more / job.weight)
            self._moved(job)

    def _finish(self, job: Job[Ticket]) -> None:
        self._grants.remove(job)
        job.place = Place.GONE
        del self._jobs[job.ticket]
        self._counters.finish(job.counter)

"""Whom to stop so that a tenant below its share need not wait for a place: a pure choice."""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from headrace.scheduling.counters import TenantCounter
from headrace.scheduling.jobs import Job

Ticket = TypeVar("Ticket", bound=Hashable)


class RunningShares(Generic[Ticket]):
    """What each tenant has running: the charges of its granted requests, by weight."""

    def __init__(self, granted: Iterable[Job[Ticket]]) -> None:
        self._newest_first: dict[TenantCounter, list[Job[Ticket]]] = {}
        for job in granted:
            self._newest_first.setdefault(job.counter, []).append(job)
        self._charges: dict[TenantCounter, float] = {}
        for counter, jobs in self._newest_first.items():
            jobs.sort(key=lambda job: job.grant_order, reverse=True)
            self._charges[counter] = sum(job.charged / job.weight for job in jobs)
        self._largest_first = sorted(
            (counter for counter, jobs in self._newest_first.items() if len(jobs) > 1),
            key=lambda counter: (self._charges[counter], self._newest_first[counter][0].grant_order),
            reverse=True,
        )
        """Those with several requests. Nobody's only one is stopped."""

    def victim(
        self,
        waiting: Job[Ticket],
        *,
        charge: float,
        quantum: float,
        can_replace: Callable[[Job[Ticket]], bool],
    ) -> Job[Ticket] | None:
        """The newest request of the most over-served tenant, or None if nobody is over-served enough.

        `charge`: what the waiting one costs in all, by weight. `can_replace`: whether stopping a request gives it a place.

        Over-served is who has most running and is not behind in its counter by more than one of its requests: whoever
        comes from idle has a counter like everybody's, so the counter alone would never give it a place, and after its
        first short request it would wait until the next of the others' long ones is granted. Without the victim its
        tenant must still have more running than the other would have, and `quantum` more. So the largest share only
        ever shrinks: tenants never stop each other in turn.
        """
        most = self._charges.get(waiting.counter, 0.0) + charge + quantum
        for counter in self._largest_first:
            if self._charges[counter] < most:
                return None
            if counter is waiting.counter:
                continue
            newest = next((job for job in self._newest_first[counter] if can_replace(job)), None)
            if newest is None:
                continue
            one = newest.charged / newest.weight
            if counter.value + one >= waiting.counter.value and self._charges[counter] - one >= most:
                return newest
        return None

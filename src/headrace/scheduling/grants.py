"""Requests that were granted a place: on which replica, and those whose replica is gone."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

from headrace.scheduling.jobs import Job
from headrace.scheduling.replicas import Replica

Ticket = TypeVar("Ticket", bound=Hashable)

ORPHANS_MAX: Final = 65_536
"""Requests whose replica is gone and that are not settled yet. The oldest then stands as it was charged."""


class Grants(Generic[Ticket]):
    """All granted jobs, and how many of them are long prompts being read in."""

    def __init__(self, long_prompt_tokens: int | None) -> None:
        self._long_prompt_tokens = long_prompt_tokens
        self._on: dict[Replica, dict[Ticket, Job[Ticket]]] = {}
        """By replica, in order of their grants."""
        self._orphans: OrderedDict[Ticket, Job[Ticket]] = OrderedDict()
        self.num_reading_long = 0

    def __iter__(self) -> Iterator[Job[Ticket]]:
        """All that are on a replica."""
        for jobs in self._on.values():
            yield from jobs.values()

    def add_replica(self, replica: Replica) -> None:
        self._on[replica] = {}

    def lose_replica(self, replica: Replica) -> list[Job[Ticket]]:
        """What ran there is orphaned. Returns the orphans that are too many, oldest first."""
        for ticket, job in self._on.pop(replica).items():
            self.answered(job)
            self._orphans[ticket] = job
        surplus = len(self._orphans) - ORPHANS_MAX
        return [job for job, _ in zip(self._orphans.values(), range(surplus), strict=False)]

    def add(self, job: Job[Ticket], replica: Replica) -> None:
        job.replica = replica
        self._on[replica][job.ticket] = job
        replica.unread_tokens += _unread(job)
        if self._long_prompt_tokens is not None:
            self.num_reading_long += self._is_reading_long(job)

    def answered(self, job: Job[Ticket]) -> None:
        """Its prompt has been read in, or never will be."""
        if self._long_prompt_tokens is not None:
            self.num_reading_long -= self._is_reading_long(job)
        if not job.has_answered and job.replica is not None:
            job.replica.unread_tokens -= _unread(job)
        job.has_answered = True

    def remove(self, job: Job[Ticket]) -> None:
        replica = job.replica
        assert replica is not None
        self.answered(job)
        jobs = self._on.get(replica)
        if jobs is not None and jobs.pop(job.ticket, None) is not None:
            replica.kv_used -= job.tokens
        elif self._orphans:
            self._orphans.pop(job.ticket, None)
        job.replica = None

    def surplus(self, replica: Replica) -> Job[Ticket] | None:
        """The oldest job of a replica if it has more than run there: one was released and never settled."""
        jobs = self._on[replica]
        return next(iter(jobs.values())) if len(jobs) > replica.running else None

    def change_long_prompts(self, long_prompt_tokens: int | None) -> None:
        self._long_prompt_tokens = long_prompt_tokens
        self.num_reading_long = sum(map(self._is_reading_long, self))

    def _is_reading_long(self, job: Job[Ticket]) -> bool:
        limit = self._long_prompt_tokens
        return limit is not None and not job.has_answered and job.demand.prompt_tokens > limit


def _unread(job: Job[Ticket]) -> int:
    """What its demand says does not change while it is granted."""
    return max(0, job.demand.prompt_tokens - job.demand.cached_tokens)

"""Where a request may run now, and what is closed for now."""

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from headrace.scheduling.explain import Reason
from headrace.scheduling.jobs import Job
from headrace.scheduling.lanes import Lane
from headrace.scheduling.locality import Warmth, choose
from headrace.scheduling.policy import QueuePolicy
from headrace.scheduling.replicas import Replica, Replicas

Ticket = TypeVar("Ticket", bound=Hashable)

MayRun = Callable[[Ticket, str], bool]
"""Whether a replica is one for this request at all, now or later."""
Fits = Callable[[Ticket, str], bool]
"""Whether a replica's memory has room for a request now. While it has not, nobody passes that request."""
WarmOn = Callable[[Ticket], Warmth | None]
"""Which replicas have the request's beginning in memory; None if that is not known of any."""


class Placing(Generic[Ticket]):
    """The replicas of a queue, with its rules about free places."""

    def __init__(
        self, *, may_run: MayRun[Ticket] | None, fits: Fits[Ticket] | None, warm_on: WarmOn[Ticket] | None
    ) -> None:
        self.replicas = Replicas()
        self._may_run = may_run
        self._fits = _both(may_run, fits)
        self._warm_on = warm_on
        self.has_warmth = warm_on is not None
        self.slack = 0.0
        """The policy's `locality_slack`."""

    def pick(self, ticket: Ticket, tokens: int) -> Replica | None:
        """The least loaded replica with room."""
        fits = self._fits
        if fits is None:
            return self.replicas.pick(tokens)
        return self.replicas.pick(tokens, lambda name: fits(ticket, name))

    def can_replace(self, waiting: Job[Ticket], granted: Job[Ticket]) -> bool:
        """Whether stopping a granted request gives a waiting one a place, if memory is left aside."""
        replica = granted.replica
        if replica is None or replica.is_paused or replica.running > replica.capacity:
            return False
        return self._may_run is None or self._may_run(waiting.ticket, replica.replica_id)

    def is_warm(self, job: Job[Ticket]) -> bool:
        """Whether it would go to a replica that has something of its prompt."""
        warmth = self._warmth(job)
        choice = None if warmth is None else self._choose(warmth, job)
        return warmth is not None and choice is not None and warmth.is_at(choice[0])

    def warm(self, job: Job[Ticket]) -> tuple[Replica, int] | None:
        """By what is known of its prompt: the replica to take, and how many tokens of it are there. None: nothing is
        known, or none has room.
        """
        warmth = self._warmth(job)
        return None if warmth is None else self._choose(warmth, job)

    def _warmth(self, job: Job[Ticket]) -> Warmth | None:
        return None if self._warm_on is None else self._warm_on(job.ticket)

    def _choose(self, warmth: Warmth, job: Job[Ticket]) -> tuple[Replica, int] | None:
        prompt_tokens = job.demand.prompt_tokens
        return choose(warmth, self._roomy(job), prompt_tokens=prompt_tokens, slack=self.slack)

    def _roomy(self, job: Job[Ticket]) -> Iterator[Replica]:
        fits = self._fits
        for replica in self.replicas.all():
            if replica.has_room(job.tokens) and (fits is None or fits(job.ticket, replica.replica_id)):
                yield replica

    def closed(self, lane: Lane[Ticket], policy: QueuePolicy, *, num_reading_long: int) -> Reason | None:
        """Why nothing of this lane is granted for now."""
        if lane.size == "long" and num_reading_long >= policy.long_prompts_max:
            return "long_prompts"
        is_kept = policy.interactive_reserve > 0 and policy.name != "fifo"
        is_short = lane.service_class == "interactive" and lane.size == "brief"
        if is_kept and not is_short:
            # One place is always for everybody, however small the fleet is.
            reserve = min(policy.interactive_reserve, self.replicas.capacity - 1)
            if self.replicas.num_free <= reserve:
                return "kept_for_short"
        return None


def _both(may_run: MayRun[Ticket] | None, fits: Fits[Ticket] | None) -> Fits[Ticket] | None:
    if may_run is None or fits is None:
        return may_run or fits
    return lambda ticket, replica_id: may_run(ticket, replica_id) and fits(ticket, replica_id)

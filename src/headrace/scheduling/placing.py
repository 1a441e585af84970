"""Where a request may run now, and what is closed for now."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from headrace.scheduling.explain import Reason
from headrace.scheduling.lanes import Job, Lane
from headrace.scheduling.policy import QueuePolicy
from headrace.scheduling.replicas import Replica, Replicas

Ticket = TypeVar("Ticket", bound=Hashable)

Fits = Callable[[Ticket, str], bool]
"""Whether a replica's memory has room for a request now. While it has not, nobody passes that request."""
WarmOn = Callable[[Ticket], tuple[str, int] | None]
"""The replica that has the request's prefix in its cache, and how many tokens of it."""


class Placing(Generic[Ticket]):
    """The replicas of a queue, with its rules about free places."""

    def __init__(self, *, fits: Fits[Ticket] | None, warm_on: WarmOn[Ticket] | None) -> None:
        self.replicas = Replicas()
        self._fits = fits
        self._warm_on = warm_on
        self.has_warmth = warm_on is not None

    def pick(self, ticket: Ticket, tokens: int) -> Replica | None:
        """The least loaded replica with room."""
        fits = self._fits
        return self.replicas.pick(tokens, None if fits is None else lambda name: fits(ticket, name))

    def is_warm(self, job: Job[Ticket]) -> bool:
        return self.warm(job) is not None

    def warm(self, job: Job[Ticket]) -> tuple[Replica, int] | None:
        """The replica that has its prefix, if it has room too, and how many tokens of it."""
        warm = None if self._warm_on is None else self._warm_on(job.ticket)
        if warm is None:
            return None
        replica = self.replicas.get(warm[0])
        if replica is None or not replica.has_room(job.tokens):
            return None
        if self._fits is not None and not self._fits(job.ticket, replica.replica_id):
            return None
        return replica, warm[1]

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

"""A request as the queue knows it: where it is, its rank among others, and how it counts by its size."""

from collections.abc import Hashable
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

from headrace.scheduling.counters import TenantCounter
from headrace.scheduling.lazy_heap import Entry
from headrace.scheduling.policy import Demand, QueuePolicy, ServiceClass
from headrace.scheduling.replicas import Replica

if TYPE_CHECKING:
    from headrace.scheduling.lanes import Flow
    from headrace.scheduling.occupancy import Share

Ticket = TypeVar("Ticket", bound=Hashable)
Size = Literal["brief", "usual", "long"]


class Place(Enum):
    """Where a job is."""

    LANE = "lane"
    FRONT = "front"
    """Put back: before everything else."""
    GRANTED = "granted"
    GONE = "gone"


class Job(msgspec.Struct, Generic[Ticket], eq=False):
    """A request as the queue knows it. Two are never equal."""

    ticket: Ticket
    tenant: str
    counter: TenantCounter
    tokens: int
    """Held: what it takes of a replica's memory at most."""
    demand: Demand
    order: int
    entered_us: int
    weight: float
    """By which its cost is divided: its demand's when it came, for all its corrections."""
    charged: float = 0.0
    """Cost that its tenant was charged for it, not yet divided by the weight."""
    paid: float = 0.0
    """The part of it that real work stands for."""
    output_tokens: int = 0
    """Reported so far."""
    has_answered: bool = False
    is_aged: bool = False
    grant_order: int = 0
    place: Place = Place.LANE
    share: "Share[Ticket] | None" = None
    """While it waits: what its tenant has waiting."""
    flow: "Flow[Ticket] | None" = None
    """While it is in a lane: where in it."""
    rank: Entry = ()
    """While it is in a lane (`rank_of`)."""
    entry: Entry | None = None
    """In the order of ages."""
    replica: Replica | None = None
    """Where it was granted a place."""

    @property
    def service_class(self) -> ServiceClass:
        """After aging."""
        return "interactive" if self.is_aged else self.demand.service_class


def rank_of(job: Job[Any], policy: QueuePolicy) -> Entry:
    """Among all (`fifo`, `priority`, `shortest-remaining`) or among the tenant's own (`fair`); lowest first.

    The last element is the job, so that a heap of ranks is one of jobs. It is never compared: `order` is unique.

    Waiting is worth something in each of them, so nobody is overtaken for ever: a rank never changes, and
    those who come later than what the difference is worth come behind.
    """
    if policy.name == "fifo":
        return (job.order, job)
    if policy.name == "shortest-remaining":
        left = job.demand.prompt_tokens + job.demand.expected_output_tokens - job.output_tokens
        return (job.entered_us + left * policy.token_aging_us, left, job.order, job)
    priority = job.demand.priority
    return (job.entered_us - priority * policy.priority_aging_us, -priority, job.order, job)


def size_of(demand: Demand, policy: QueuePolicy) -> Size:
    if policy.name == "fifo":
        return "usual"
    if policy.long_prompt_tokens is not None and demand.prompt_tokens > policy.long_prompt_tokens:
        return "long"
    is_brief = (
        policy.interactive_reserve > 0
        and demand.service_class == "interactive"
        and demand.expected_output_tokens <= policy.reserve_output_tokens_max
    )
    return "brief" if is_brief else "usual"

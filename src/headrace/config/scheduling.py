"""How a model is shared: what its queue decides by, and what a tenant's part in that is."""

from typing import Annotated, Final, Literal

import msgspec

from headrace import bounds

PolicyName = Literal["fifo", "priority", "shortest-remaining", "fair"]
POLICIES: Final[tuple[PolicyName, ...]] = ("fifo", "priority", "shortest-remaining", "fair")
ServiceClass = Literal["interactive", "batch"]
Isolation = Literal["shared", "weighted", "dedicated"]


_Cost = Annotated[float, msgspec.Meta(ge=0, le=1_000)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=604_800)]


class SchedulingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is next when more is asked of a model than it can do. All of it can be changed at run time."""

    scheduler_policy: PolicyName = "fair"
    """`fair`: the tenant that has had least, by tokens and weight. `fifo`: who came first. `priority`: the highest
    priority, among all tenants. `shortest-remaining`: the fewest tokens to compute."""
    input_cost: _Cost = 1.0
    """What a token of the prompt counts in the fairness between tenants. It has nothing to do with money."""
    output_cost: Annotated[float, msgspec.Meta(gt=0, le=1_000)] = 2.0
    """The same for a token of the answer."""
    cached_input_cost: _Cost = 0.1
    """The same for a token of the prompt that was still in a cache; at most `input_cost`."""
    batch_floor: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    """Requests of class `batch` get at least this share of what is granted while they wait (`fair`)."""
    batch_aging_s: _Seconds = 60.0
    """A `batch` request that has waited so long counts as `interactive` from then on (`fair`)."""
    priority_aging_s: Annotated[float, msgspec.Meta(ge=0, le=604_800)] = 10.0
    """One step of priority is worth so much waiting: nobody is overtaken by those who come later than that."""
    token_aging_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 10.0
    """One token less to compute is worth so much waiting (`shortest-remaining`)."""
    locality_quantum: Annotated[float, msgspec.Meta(ge=0, le=1_000_000_000)] = 0.0
    """Cost by which a tenant may be ahead of the lowest and still go first, because a worker has its prefix."""
    long_prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] | None = None
    """Longer prompts than this have a budget of their own (`long_prompts_max`); left out, no prompt is long."""
    long_prompts_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    """Long prompts that are read in at once, on all replicas of the model together."""
    interactive_reserve: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    """The last free places, on all replicas together, that only short interactive requests may take."""
    reserve_output_tokens_max: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)] = 256
    """A request that is expected to write more is not short."""
    preemption: bool = False
    """Where no place is free, stop the newest request of the tenant that has most running for an interactive one of a
    tenant that would still have less (`fair`). The stopped one waits and goes on later, without a repeated or missing
    token."""

    def __post_init__(self) -> None:
        if self.cached_input_cost > self.input_cost:
            raise ValueError("cached_input_cost must not be larger than input_cost")


class Sharing(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A tenant's part in sharing the models with others."""

    weight: Annotated[float, msgspec.Meta(ge=0.01, le=1_000)] = 1.0
    """Twice the weight is twice the service while both wait."""
    service_class: ServiceClass = "interactive"
    """Of requests that say nothing else. A `batch` tenant's cannot become interactive."""
    priority_max: Annotated[int, msgspec.Meta(ge=0, le=bounds.PRIORITY_MAX)] = 0
    """Requests may ask for a priority up to this; a higher one is lowered to it."""
    isolation: Isolation = "weighted"
    """`weighted`: a queue of its own, by weight. `shared`: one queue together with all tenants of that mode, first in,
    first out among them, with the weight of one. `dedicated`: runs on the workers set aside for it, where a model has such;
    elsewhere as `weighted`."""
    allow_degrade: bool = False
    """A request that would be refused may be served with less: a shorter answer, or the model's `degrade_to`. The reply
    says so, and a request can forbid it."""


SharingValues = dict[str, float | str | bool | None]
"""What to change of `Sharing`, by name; None goes back to the default, what is not named stays."""

EVEN: Final = Sharing()
"""Of a tenant that nobody has said anything about."""

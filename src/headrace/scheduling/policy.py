"""What decides who is next: the policy of a queue, the price of tokens, and what a request asks for."""

from collections.abc import Hashable
from typing import Final

import msgspec

from headrace.config.scheduling import POLICIES as POLICIES
from headrace.config.scheduling import PolicyName as PolicyName
from headrace.config.scheduling import SchedulingSettings
from headrace.config.scheduling import ServiceClass as ServiceClass

SECOND_US: Final = 1_000_000


class TokenPrices(msgspec.Struct, frozen=True, kw_only=True):
    """What a token costs in the fairness between tenants. Not money.

    Input 1 and output 2 are the defaults of the virtual token counter (OSDI 2024).
    """

    input: float = 1.0
    output: float = 2.0
    cached_input: float = 0.1
    """A prompt token whose attention state is still in a cache is copied, not computed."""

    def __post_init__(self) -> None:
        assert 0 <= self.cached_input <= self.input
        assert self.output > 0

    def cost(self, *, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        cached = min(cached_tokens, prompt_tokens)
        return (
            self.input * (prompt_tokens - cached) + self.cached_input * cached + self.output * output_tokens
        )


class Demand(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request asks for, as far as it is known when it enters the queue."""

    prompt_tokens: int = 0
    expected_output_tokens: int = 0
    """What it is charged when it starts. The real count corrects it."""
    cached_tokens: int = 0
    """Prompt tokens that will not have to be computed."""
    weight: float = 1.0
    """Of the tenant. The newest request's counts from then on."""
    service_class: ServiceClass = "interactive"
    priority: int = 0
    """Higher is sooner, among the tenant's own requests (`fair`) or among all (`priority`)."""
    flow: str | None = None
    """Tenants of one flow share one counter, first in, first out among them. None: the tenant's own."""
    gate: Hashable = None
    """Requests of one tenant with equal gates get the same answer to `may_start`: where one is told no, the
    others are not asked. None: its answer is its own."""


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a queue decides. May be changed at any time; nothing that waits is lost by it."""

    name: PolicyName = "fair"
    prices: TokenPrices = TokenPrices()
    batch_floor: float = 0.1
    """The class `batch` gets at least this share of the cost that is granted while it waits (`fair`)."""
    aging_us: int = 60 * SECOND_US
    """A `batch` request that has waited so long counts as `interactive` from then on (`fair`)."""
    priority_aging_us: int = 10 * SECOND_US
    """One step of priority is worth so much waiting: nobody is overtaken by those who come later than that."""
    token_aging_us: int = 10_000
    """One token less to compute is worth so much waiting (`shortest-remaining`)."""
    quantum: float = 0.0
    """Cost by which a tenant whose prefix is warm may be ahead of the lowest and still go first."""
    locality_slack: float = 0.5
    """Part of a replica's places that it may have more taken than the least loaded one and still be given a request
    for what it has of the prompt (`headrace.scheduling.locality`)."""
    locality_candidates_max: int = 8
    """So many tenants are looked at for a warm prefix."""
    long_prompt_tokens: int | None = None
    """Longer prompts than this have a budget of their own. None: no prompt is long."""
    long_prompts_max: int = 1
    """Long prompts that are read in at once, on all replicas together."""
    interactive_reserve: int = 0
    """The last free places, on all replicas together, that only short interactive requests may take."""
    reserve_output_tokens_max: int = 256
    """A request that is expected to write more is not short."""
    idle_tenants_max: int = 10_000
    """Tenants without requests that are remembered for what they had beyond their share."""

    @property
    def closes_lanes(self) -> bool:
        """Whether there is anything that some requests may not take while a place is free."""
        return self.name != "fifo" and (self.interactive_reserve > 0 or self.long_prompt_tokens is not None)

    @classmethod
    def of(cls, settings: SchedulingSettings) -> "QueuePolicy":
        """The policy that a model's settings ask for."""
        return cls(
            name=settings.scheduler_policy,
            prices=TokenPrices(
                input=settings.input_cost,
                output=settings.output_cost,
                cached_input=settings.cached_input_cost,
            ),
            batch_floor=settings.batch_floor,
            aging_us=int(settings.batch_aging_s * SECOND_US),
            priority_aging_us=int(settings.priority_aging_s * SECOND_US),
            token_aging_us=int(settings.token_aging_ms * 1000),
            quantum=settings.locality_quantum,
            locality_slack=settings.locality_slack,
            long_prompt_tokens=settings.long_prompt_tokens,
            long_prompts_max=settings.long_prompts_max,
            interactive_reserve=settings.interactive_reserve,
            reserve_output_tokens_max=settings.reserve_output_tokens_max,
        )

    def __post_init__(self) -> None:
        assert self.name in POLICIES
        assert 0 <= self.batch_floor < 1
        assert self.aging_us > 0
        assert self.priority_aging_us >= 0
        assert self.token_aging_us >= 0
        assert self.quantum >= 0
        assert 0 <= self.locality_slack <= 1
        assert self.locality_candidates_max >= 0
        assert self.long_prompts_max >= 1
        assert self.interactive_reserve >= 0
        assert self.idle_tenants_max >= 0

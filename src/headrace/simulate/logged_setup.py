"""A setup as it stands in the first line of a decision log: every field, and checked when it is read.

Defaults may change from version to version, so none is left out.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.bounds import (
    SEED_MAX,
    SIMULATED_SLOTS_MAX,
    SIMULATED_WORKERS_MAX,
    TRACE_REQUESTS_MAX,
    TRACE_TOKENS_MAX,
)
from headrace.scheduling.policy import PolicyName, QueuePolicy
from headrace.simulate.engine import EngineModel, Prefill
from headrace.simulate.outcome import Prediction, Setup

Count = Annotated[int, Meta(ge=0, le=10**18)]
AtLeastOne = Annotated[int, Meta(ge=1, le=10**18)]
Number = Annotated[float, Meta(ge=0, le=1e12)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]


class LoggedPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As `TokenPrices`."""

    input: Positive
    output: Positive
    cached_input: Number


class LoggedPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As `QueuePolicy`."""

    name: PolicyName
    prices: LoggedPrices
    batch_floor: Annotated[float, Meta(ge=0, lt=1)]
    aging_us: AtLeastOne
    priority_aging_us: Count
    token_aging_us: Count
    quantum: Number
    locality_slack: Annotated[float, Meta(ge=0, le=1)]
    locality_candidates_max: Count
    long_prompt_tokens: AtLeastOne | None
    long_prompts_max: AtLeastOne
    interactive_reserve: Count
    reserve_output_tokens_max: Count
    idle_tenants_max: Count


class LoggedEngine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As `EngineModel`."""

    prefill_us_per_token: Number
    decode_us: Annotated[float, Meta(ge=1, le=1e9)]
    decode_us_per_context_token: Number
    decode_us_per_sequence: Number
    slots: Annotated[int, Meta(ge=1, le=SIMULATED_SLOTS_MAX)]
    kv_tokens: AtLeastOne
    prefill: Prefill
    steps_per_round: Annotated[int, Meta(ge=1, le=1000)]
    has_lookahead: bool
    batch_tokens_max: Annotated[int, Meta(ge=1, le=TRACE_TOKENS_MAX)]
    target_step_ms: Positive
    idle_step_ms: Positive
    reads_short_first: bool
    cache_blocks: Count | None


class LoggedSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As `Setup`."""

    name: str
    policy: LoggedPolicy
    prediction: Prediction
    engine: LoggedEngine
    workers: Annotated[int, Meta(ge=1, le=SIMULATED_WORKERS_MAX)]
    queue_length: Annotated[int, Meta(ge=1, le=TRACE_REQUESTS_MAX)]
    has_preemption: bool
    seed: Annotated[int, Meta(ge=0, le=SEED_MAX)]

    def __post_init__(self) -> None:
        prices = self.policy.prices
        if prices.cached_input > prices.input:
            raise ValueError("a cached input token costs more than one that is computed")


def logged(setup: Setup) -> LoggedSetup:
    """As it is written."""
    return msgspec.convert(msgspec.to_builtins(setup), LoggedSetup)


def setup_of(found: LoggedSetup) -> Setup:
    """As it was."""
    policy = msgspec.convert(msgspec.to_builtins(found.policy), QueuePolicy)
    engine = msgspec.convert(msgspec.to_builtins(found.engine), EngineModel)
    return Setup(
        name=found.name,
        policy=policy,
        prediction=found.prediction,
        engine=engine,
        workers=found.workers,
        queue_length=found.queue_length,
        has_preemption=found.has_preemption,
        seed=found.seed,
    )

"""The limits that the whole cluster, models, tenants, what is inside a tenant, and keys can have."""

from typing import Annotated, Literal

import msgspec

Level = Literal["cluster", "model", "tenant", "department", "user", "tenant_model", "key"]
InnerLevel = Literal["department", "user", "tenant_model"]
"""The levels inside a tenant. `tenant_model` is what one tenant takes of one model."""
LimitType = Literal["rps", "tpm", "concurrency", "streams", "prompt_tokens", "total_tokens", "memory"]

_Rate = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]
_Gigabytes = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A limit left out is unlimited; 0 lets nothing through."""

    rps: _Rate | None = None
    """Requests per second, as a steady rate with bursts of up to one second's worth (at least one)."""
    concurrency: _Count | None = None
    """Requests on workers at once."""
    streams: _Count | None = None
    """Streamed requests on workers at once."""
    tpm: _Tokens | None = None
    """Tokens per minute: settled in the last 60 seconds plus all that is held never exceeds it."""
    max_prompt_tokens: _Tokens | None = None
    """Tokens of one prompt."""
    max_total_tokens: _Tokens | None = None
    """Tokens of one request, prompt and answer together."""
    gpu_memory_gb: _Gigabytes | None = None
    """GB (1024 MB) of memory that requests on workers are taken to need at once."""


UNLIMITED = Limits()


class TenantLevels(msgspec.Struct, frozen=True, kw_only=True):
    """The limits inside a tenant, beside those of the tenant as a whole."""

    departments: dict[str, Limits] = {}
    """All departments (projects) by name, those without limits too: keys can name them."""
    user_limits: Limits = UNLIMITED
    """What every single user may take."""
    users: dict[str, Limits] = {}
    """For particular users, in place of `user_limits` limit by limit."""
    model_limits: dict[str, Limits] = {}
    """What the tenant may take of one model, by the model's id."""


NO_LEVELS = TenantLevels()

LimitValues = dict[str, int | float | None]
"""Limits to change, by name; None takes one away, those not named stay."""


class LevelChanges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to change of `TenantLevels`. What is not named stays; None takes a whole entry away."""

    departments: dict[str, LimitValues | None] = {}
    user_limits: LimitValues = {}
    users: dict[str, LimitValues | None] = {}
    model_limits: dict[str, LimitValues | None] = {}


NO_CHANGES = LevelChanges()

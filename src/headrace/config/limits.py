"""The limits that tenants, keys, models and the whole cluster can have."""

from typing import Annotated, Literal

import msgspec

Level = Literal["cluster", "tenant", "key", "model"]
LimitType = Literal["rps", "tpm", "concurrency", "streams", "prompt_tokens", "total_tokens"]

_Rate = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]


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


UNLIMITED = Limits()

"""What a caller is told of a queue that refused it, or in which it waited too long."""

import msgspec


class QueueFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Of one model's queue. Tokens are those that are held, prompts and longest answers. Of other tenants there are
    sums only."""

    length: int
    """Requests that wait, of all tenants."""
    length_max: int
    tokens: int
    tokens_max: int
    tenants: int
    """Tenants that have requests waiting."""
    tenant_length: int
    """Requests of this tenant that wait."""
    tenant_length_max: int
    tenant_tokens: int
    tenant_tokens_max: int
    share: float
    """This tenant's part of the weights of all who wait, 0 to 1; had it something waiting if it has not."""
    position: int | None = None
    """When the request began to wait. None: it never did."""
    is_position_exact: bool | None = None
    """Otherwise `position` is the first that it may have had."""
    reason: str | None = None
    """Why it began to wait."""
    waited_ms: int | None = None

"""How much may wait for a model, and why a request may not.

The queue is bounded in requests and in tokens, as a whole and for each tenant. A tenant that reaches its
own bound is refused. When the whole queue is full and the newcomer's tenant is not the one that fills it, the
tenant with the most waiting tokens gives up its newest requests: one tenant's flood never refuses another.
"""

from typing import Literal

import msgspec

Bound = Literal["requests", "tokens"]


class QueueBounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much may wait for one model. Tokens are those that are held: prompt and longest answer."""

    length: int
    tokens: int
    tenant_length: int
    tenant_tokens: int


class QueueFull(Exception):
    """No place left in the queue of this model, or in this tenant's part of it."""

    def __init__(self, *, level: Literal["model", "tenant"], bound: Bound, limit: int, used: int) -> None:
        super().__init__(f"{used} of {limit} {bound} are taken")
        self.level = level
        self.bound = bound
        self.limit = limit
        self.used = used


class NoReplica(Exception):
    """No replica serves this model and none is expected to."""

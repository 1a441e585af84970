"""Why a request waits: its place in the expected order, its tenant's share, and what it waits for. Pure."""

from typing import Final, Literal

import msgspec

Reason = Literal[
    "no_replica",
    "own_limit",
    "memory_limit",
    "throttled",
    "replicas_full",
    "replica_paused",
    "kept_for_short",
    "long_prompts",
    "memory",
    "set_aside",
    "preempted",
    "behind_others",
    "next",
]

REASONS: Final[dict[Reason, str]] = {
    "no_replica": "no replica of the model is ready",
    "own_limit": "a limit of its own (concurrency, streams) holds it back; others may pass it",
    "memory_limit": "a limit of GPU memory (gpu_memory_gb) of its own leaves no room for it until others of its own end",
    "throttled": "its limit of GPU memory (gpu_memory_gb) leaves no room for it, and there was a refusal for that not long "
    "ago: so it waits, at half the share, instead of being refused",
    "replicas_full": "every place on every replica is taken",
    "replica_paused": "the places that are free are on replicas that said they are full; they are asked again soon",
    "kept_for_short": "the places that are free are kept for short interactive requests",
    "long_prompts": "as many long prompts as may be are being read in",
    "memory": "no replica has memory for a request of its size yet",
    "set_aside": "the places that are free are on replicas where it may not run, or not yet",
    "preempted": "it was stopped for another's request and goes on as soon as its replica has a place",
    "behind_others": "others are before it",
    "next": "it is granted with the next decision",
}


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said of one waiting request."""

    position: int
    """From 1: how many would be granted up to it, if nobody came and all cost what is expected."""
    is_exact: bool = True
    """Otherwise it is further back than could be looked, and `position` is the first that it may have."""
    tenant_share: float
    """Its tenant's part of the weights of all who wait, 0 to 1."""
    waited_us: int
    reason: Reason

"""Which replica a request goes to when parts of its prompt are in the memory of some.

Where nothing is known of a request the least loaded replica takes it. Nobody waits for a warm one: of those that have a place now,

1. the one of its *session* is taken. It loses only if it is crowded (it has more than the slack of its places more taken
   than the least loaded one has) and what it has of the prompt is worth less than the work it is ahead by;
2. else of those that are not crowded the one with the least *work before the first token*: prompts still to be read in
   there, its own tokens that are not in memory, and `NEIGHBOUR_TOKENS` for each request that runs. Where several may
   have a popular beginning, the slack bounds how far they pile up on one.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from headrace.scheduling.replicas import Replica

NEIGHBOUR_TOKENS: Final = 64
"""A running request slows its neighbours down by about as much as so many prompt tokens do."""
SLACK_PLACES_MIN: Final = 1.0
"""On small replicas one place more is no crowd, whatever the slack."""


class Warmth(msgspec.Struct, frozen=True, gc=False):
    """Where a request's beginning is in memory, as far as is known."""

    tokens: Mapping[str, int]
    """How many of the prompt's tokens, by replica."""
    home: str | None = None
    """The replica of its session, whatever is left of it there."""

    def is_at(self, replica: Replica) -> bool:
        """Whether there is anything of it at a replica."""
        return replica.replica_id == self.home or self.tokens.get(replica.replica_id, 0) > 0


def choose(
    warmth: Warmth, roomy: Iterable[Replica], *, prompt_tokens: int, slack: float
) -> tuple[Replica, int] | None:
    """The replica to take of those that have room, and how many of the prompt's tokens it has; None: none has room.

    `slack` is the part of a replica's places that it may have more taken than the least loaded one.
    """
    candidates = list(roomy)
    least = min(candidates, key=_share, default=None)
    if least is None:
        return None
    tokens = warmth.tokens
    best, best_rank = least, _rank(least, tokens, prompt_tokens)
    for replica in candidates:
        is_crowded = _places_ahead(replica, least) > max(replica.capacity * slack, SLACK_PLACES_MIN)
        if replica.replica_id == warmth.home:
            warm_tokens = tokens.get(replica.replica_id, 0)
            ahead = _work(replica) - _work(least)
            if not is_crowded or warm_tokens - tokens.get(least.replica_id, 0) > ahead:
                return replica, warm_tokens
        if not is_crowded:
            rank = _rank(replica, tokens, prompt_tokens)
            if rank < best_rank:
                best, best_rank = replica, rank
    return best, tokens.get(best.replica_id, 0)


def _rank(replica: Replica, tokens: Mapping[str, int], prompt_tokens: int) -> tuple[int, bool, float]:
    warm_tokens = tokens.get(replica.replica_id, 0)
    return (_work(replica) + max(prompt_tokens - warm_tokens, 0), not warm_tokens, _share(replica))


def _share(replica: Replica) -> float:
    return replica.running / replica.capacity


def _places_ahead(replica: Replica, least: Replica) -> float:
    return replica.running - _share(least) * replica.capacity


def _work(replica: Replica) -> int:
    return replica.unread_tokens + NEIGHBOUR_TOKENS * replica.running

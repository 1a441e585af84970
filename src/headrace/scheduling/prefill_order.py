"""Whose prompt an engine step reads in first, so that a long one does not hold up short ones.

`headrace.scheduling.steps` says how many prompt tokens a step computes; they go to prompts in this order. The one with
the least left comes first: of equally long prompts that is the one that was begun first. The oldest comes first
whenever it has got less than its part of what was read in since it became the oldest: a long prompt beside an endless
row of short ones is read in at a quarter of the speed, and never starves.
"""

from collections.abc import Hashable, Sequence
from typing import Final

OLDEST_PART: Final = 0.25
"""What the oldest prompt gets of all that is read in, at least."""

LONG_PORTIONS: Final = 4
"""A prompt with more left than so many portions is a long one."""


class PrefillOrder:
    """Remembers what the oldest prompt and the others got. Prompts are known by any name of their own."""

    def __init__(self) -> None:
        self._oldest: Hashable = None
        self._to_oldest = 0
        self._to_all = 0

    def order(self, names: Sequence[Hashable], remaining: Sequence[int]) -> list[int]:
        """Places of the prompts in the order in which they get what a step can compute.

        `names` and `remaining`, each prompt's tokens still to compute, are in order of age, oldest first.
        """
        if names and names[0] != self._oldest:
            self._oldest, self._to_oldest, self._to_all = names[0], 0, 0
        order = sorted(range(len(remaining)), key=remaining.__getitem__)
        if len(order) > 1 and self._to_oldest < OLDEST_PART * self._to_all:
            order.remove(0)
            order.insert(0, 0)
        return order

    def took(self, name: Hashable, tokens: int) -> None:
        """So many tokens of a prompt were read in."""
        self._to_all += tokens
        if name == self._oldest:
            self._to_oldest += tokens


def without_long_rider(shares: list[int], remaining: Sequence[int], *, portion: int) -> list[int]:
    """Cut a piece of a long prompt off a call in which others are read in to their end: they would wait for it.

    `shares` are tokens in the order of `PrefillOrder.order`, so that only the last can be a piece; `remaining` is in the
    same order. Long is what takes several portions more.
    """
    if len(shares) > 1:
        left = remaining[len(shares) - 1]
        if shares[-1] < left and left > LONG_PORTIONS * portion:
            return shares[:-1]
    return shares

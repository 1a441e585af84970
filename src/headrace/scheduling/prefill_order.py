"""Whose prompt an engine step reads in first, so that a long one does not hold up short ones.

`headrace.scheduling.steps` says how many prompt tokens a step computes; they go to prompts in this order. The one with
the least left comes first: of equally long prompts that is the one that was begun first. Every so often the oldest
comes first whatever it has left: a long prompt beside an endless row of short ones is read in at a stated part of the
speed, and never starves.
"""

from collections.abc import Sequence
from typing import Final

OLDEST_EVERY: Final = 4
"""So many portions of prefill, and one of them is for the oldest prompt."""

LONG_PORTIONS: Final = 4
"""A prompt with more left than so many portions is a long one."""


def prefill_order(remaining: Sequence[int], *, portions_before: int) -> list[int]:
    """Places of the prompts in the order in which they get what a step can compute.

    `remaining` holds each prompt's tokens still to compute, oldest first; `portions_before` counts the portions of
    prefill so far.
    """
    order = sorted(range(len(remaining)), key=remaining.__getitem__)
    if order and portions_before % OLDEST_EVERY == OLDEST_EVERY - 1:
        order.remove(0)
        order.insert(0, 0)
    return order


def without_long_rider(shares: list[int], remaining: Sequence[int], *, portion: int) -> list[int]:
    """Cut a piece of a long prompt off a call in which others are read in to their end: they would wait for it.

    `shares` are tokens in the order of `prefill_order`, so that only the last can be a piece; `remaining` is in the
    same order. Long is what takes several portions more.
    """
    if len(shares) > 1:
        left = remaining[len(shares) - 1]
        if shares[-1] < left and left > LONG_PORTIONS * portion:
            return shares[:-1]
    return shares

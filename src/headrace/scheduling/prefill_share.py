"""How a step's prefill is shared between short and long prompts, so that a long one does not hold up short ones.

`headrace.scheduling.steps.share_out` reads prompts in one after the other. Here short prompts go first,
except for a part of each step that a long prompt always gets: it is never starved either.
"""

from collections.abc import Sequence

from headrace.bounds import CHUNK_GRAIN
from headrace.scheduling.steps import share_out


def share_out_by_length(
    remaining: Sequence[int], is_long: Sequence[bool], portion: int, *, room: int, long_share: float
) -> list[int]:
    """Split a portion over prompts: tokens for each, in the same order, 0 for none.

    `remaining` holds each prompt's tokens still to compute. Where both kinds wait, long prompts get
    `long_share` of the portion (whole grains, at least one) and what the short ones leave.
    """
    assert 0 < long_share < 1
    long = [place for place, flag in enumerate(is_long) if flag]
    short = [place for place, flag in enumerate(is_long) if not flag]
    shares = [0] * len(remaining)
    kept = 0
    if long and short:
        kept = max(CHUNK_GRAIN, int(portion * long_share) // CHUNK_GRAIN * CHUNK_GRAIN)
    if portion > kept:
        _fill(shares, short, remaining, portion - kept, room - kept)
    used = sum(shares)
    # Short ends may have taken a little more than their portion; what is kept for the long ones stays theirs.
    left = max(portion - used, kept)
    if left > 0:
        _fill(shares, long, remaining, left, room - used)
    return shares


def _fill(shares: list[int], places: list[int], remaining: Sequence[int], portion: int, room: int) -> None:
    for place, tokens in zip(
        places, share_out([remaining[i] for i in places], portion, room=room), strict=False
    ):
        shares[place] = tokens

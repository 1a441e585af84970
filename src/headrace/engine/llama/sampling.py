"""Drawing the next token from a row of logits.

Order of the steps, as in OpenAI's and vLLM's APIs: keep the `top_k` largest logits, divide by the
temperature, softmax, keep the smallest set of most probable tokens that reaches `top_p` ("nucleus
sampling", Holtzman et al., arXiv:1904.09751), draw from what is left.

The random number of a draw is a function of the seed and of the position alone, not of how many draws
went before. A sequence that is dropped and computed again from its tokens continues as it would have.

Written in numpy instead of llama.cpp's sampler chain: nothing of the vocabulary is copied into structs,
and nothing is sorted that a cut-off can exclude. One row of 49 152 logits shaped like a language
model's, one core of a Zen 5, numpy against the chain (without its input copy), in microseconds:
temperature alone 46 / 660, with top_p 0.95 65 / 395, with top_k 40 as well 64 / 20. A nucleus of
10 000 tokens takes 160 to 220, one of 30 000 (a nearly flat distribution) 690.
"""

import math
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.engine.protocol import Sampling
from headrace.errors import EngineFault

Logits = NDArray[np.float32]

GREEDY_TEMPERATURE_MAX: Final = 1e-4
"""At or below this the most probable token takes all: dividing by it could only overflow."""

_NUCLEUS_SHARES: Final = (1e-3, 1e-5)
"""Cut-offs tried for the nucleus, as shares of the whole probability, before the one that always holds."""

_BLOCK: Final = 256
_MASK_64: Final = (1 << 64) - 1


def greedy_tokens(rows: Logits) -> list[int]:
    """The most probable token of each row; `rows` has shape (rows, vocabulary).

    Raises `EngineFault` when a row's maximum is not a finite number.
    """
    best = rows.argmax(axis=1)
    # argmax answers with a NaN's place when there is one, so looking at the maximum finds them all.
    if not np.isfinite(rows[np.arange(len(rows)), best]).all():
        raise _not_finite()
    tokens: list[int] = best.tolist()
    return tokens


def sample_token(row: Logits, sampling: Sampling, position: int) -> int:
    """One token drawn from a row of logits; `position` is where the token will stand in its sequence.

    Raises `EngineFault` when the row's maximum is not a finite number.
    """
    peak = float(row.max())
    if not math.isfinite(peak):
        raise _not_finite()
    if sampling.temperature <= GREEDY_TEMPERATURE_MAX:
        return int(row.argmax())
    uniform = uniform_number(sampling.seed, position)
    if 0 < sampling.top_k < len(row):
        candidates = _largest(row, sampling.top_k)
        weights = _weights(row[candidates], peak, sampling.temperature)
        return _draw(candidates, weights, float(weights.sum()) * sampling.top_p, uniform)
    weights = _weights(row, peak, sampling.temperature)
    if sampling.top_p < 1.0:
        target = float(weights.sum()) * sampling.top_p
        candidates = _nucleus_candidates(weights, target)
        return _draw(candidates, weights[candidates], target, uniform)
    return _draw_from_all(weights, uniform)


def uniform_number(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only (SplitMix64, Steele et al. 2014)."""
    state = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return ((state ^ (state >> 31)) >> 11) * 2.0**-53


def _weights(logits: Logits, peak: float, temperature: float) -> Logits:
    """Softmax numerators: 1 for the largest logit, 0 where a logit is minus infinity."""
    weights = logits - np.float32(peak)
    weights *= np.float32(1.0 / temperature)
    np.exp(weights, out=weights)
    return weights


def _largest(row: Logits, count: int) -> NDArray[np.intp]:
    """Indexes of the `count` largest values; of equal ones at the border, those with the lowest index."""
    if count == len(row):
        return np.arange(count)
    border = np.partition(row, len(row) - count)[len(row) - count]
    above = np.flatnonzero(row > border)
    level = np.flatnonzero(row == border)[: count - len(above)]
    return np.concatenate((above, level))


def _nucleus_candidates(weights: Logits, target: float) -> NDArray[np.intp]:
    """Indexes of a set of largest weights that together reach `target`; not yet the smallest such set.

    Taking all weights above a cut-off gives such a set as soon as their sum reaches the target, and
    sorting a few hundred of them is far cheaper than sorting the vocabulary. The last cut-off cannot
    fail: what lies below it sums to less than what the target leaves over.
    """
    total = float(weights.sum())
    for share in _NUCLEUS_SHARES:
        candidates = np.flatnonzero(weights >= np.float32(share * total))
        if float(weights[candidates].sum()) >= target:
            return candidates
    return np.flatnonzero(weights >= np.float32(max(total - target, 0.0) / len(weights)))


def _draw(candidates: NDArray[np.intp], weights: Logits, target: float, uniform: float) -> int:
    """A candidate drawn in proportion to its weight from the smallest set that reaches `target`.

    Only the values are sorted, to find the border of the set: that is several times faster than
    sorting indexes, and the result cannot depend on how a sort orders equal weights.
    """
    descending = np.sort(weights)[::-1].copy()
    nucleus = _largest(weights, _place(descending, target, side="left") + 1)
    return int(candidates[nucleus[_draw_from_all(weights[nucleus], uniform)]])


def _draw_from_all(weights: Logits, uniform: float) -> int:
    """An index drawn in proportion to its weight."""
    index = _place(weights, uniform * float(weights.sum()), side="right")
    # Close to 1, rounding may lead past the last token that has a weight at all.
    return index if weights[index] > 0 else int(weights.argmax())


def _place(weights: Logits, goal: float, *, side: Literal["left", "right"]) -> int:
    """The index at which the running sum of `weights` reaches (left) or passes (right) `goal`.

    By way of block sums: a running sum in double precision over a whole vocabulary takes 0.4 ms. When
    rounding leaves the last sum under the goal, the answer is the last index.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    block_sums = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    block = min(int(np.searchsorted(block_sums, goal, side=side)), len(starts) - 1)
    first = block * _BLOCK
    inside = np.cumsum(weights[first : first + _BLOCK], dtype=np.float64)
    rest = goal - (float(block_sums[block - 1]) if block else 0.0)
    return first + min(int(np.searchsorted(inside, rest, side=side)), len(inside) - 1)


def _not_finite() -> EngineFault:
    return EngineFault("the model computed logits that are not finite numbers (corrupt weights or overflow)")

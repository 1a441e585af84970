"""What a portion of a prompt costs by its rows and what stands before it, and when it is filled up to a whole tile.

llama.cpp's flash attention computes 64 or more rows of a sequence in tiles, and fewer row by row, which behind a
long context is much slower: on a Zen 5 core, behind 1 500 tokens of the built-in model, 63 rows take 556 ms and 64 take
281 (`benchmarks/kv/rows.py`). So rows that nobody needs are computed with the others and forgotten at once. No row looks
at a later one, so they change nothing. Attention of ours (`native/attention.cpp`) knows no tiles in this sense: with it,
and without flash attention, nothing is filled up.
"""

from typing import Final

import msgspec

from headrace.engine.llama.kernels import TileSpeeds
from headrace.engine.llama.memory import Shape

TILE_ROWS: Final = 64

PLAIN_ROWS: Final = 16
"""The grain of portions where there are no tiles: without flash attention 16 rows behind 6 000 tokens take 217 ms, 64 take
824; with ours behind 3 000 tokens 39 and 131 (BF16)."""


class Tiles(msgspec.Struct, frozen=True):
    """The rule for one model."""

    balance_tokens: float
    """Behind so many tokens a row's attention takes as long as all the rest of it."""
    cost_rows: float
    """`TileSpeeds.cost_rows`."""

    def padding(self, rows: int, *, start: int) -> int:
        """How many rows to add to a portion of `rows` that begins at position `start`, so that it takes less time; 0
        where it would take more. It depends on nothing else: a prompt is computed in the same way each time.
        """
        if not 1 < rows < TILE_ROWS:
            return 0
        row_by_row = rows * (self.balance_tokens + start)
        as_tile = TILE_ROWS * self.balance_tokens + self.cost_rows * start
        return TILE_ROWS - rows if as_tile < row_by_row else 0


def tiles_of(shape: Shape, speeds: TileSpeeds, *, parameters: int) -> Tiles:
    """The rule for a model."""
    return Tiles(speeds.row_speed * _balance(shape, parameters), speeds.cost_rows)


def context_cost_of(shape: Shape, speed: float, *, parameters: int) -> float:
    """`EngineInfo.context_cost` of a model, by the speed of attention (`Kernels`)."""
    return 1 / (speed * _balance(shape, parameters))


def _balance(shape: Shape, parameters: int) -> float:
    """Behind so many tokens a row's attention takes as many multiplications as all the rest of it.

    The weights of the embedding are not multiplied with for rows that are not sampled; attention multiplies each row's
    queries with the keys, and the scores with the values, of every token before it.
    """
    weights = parameters - shape.vocabulary * shape.embedding
    return weights / (2 * shape.layers * shape.embedding)

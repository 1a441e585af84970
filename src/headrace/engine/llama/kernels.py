"""How fast a library's kernels are against each other, for the choices that the engine has.

Measured on one core of a Zen 5 with the built-in model (`benchmarks/kv/rows.py`). Which kernels there are depends on what
the library was compiled for; what they multiply, on the weights.
"""

from typing import Final

import msgspec

from headrace.engine.llama import definitions
from headrace.engine.llama.builds import Build


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds of one library with one kind of weights. Speeds of attention are multiplications per second, against
    those of the weights.
    """

    single_rows_max: int = 1
    """Up to so many decode steps are faster one by one than together."""
    row_speed: float
    """Flash attention row by row."""
    portion_speed: float
    """Flash attention in whole tiles, or no flash attention: both are about as fast."""
    tile_cost_rows: float
    """The flash attention of a whole tile takes as long as that of so many rows one by one."""


NARROW: Final = Kernels(row_speed=0.18, portion_speed=0.65, tile_cost_rows=17.3)
"""Vectors of 256 bits."""
WIDE: Final = Kernels(row_speed=0.19, portion_speed=0.51, tile_cost_rows=24)
"""Vectors of 512 bits: weights 1.3 times as fast as with `NARROW`."""
WIDE_BF16: Final = Kernels(row_speed=0.1, portion_speed=0.28, tile_cost_rows=24)
"""BF16 weights multiplied as they are, 2.5 times as fast as Q8_0 with `NARROW`; attention gains nothing by it."""

_SINGLE_ROWS_Q8_0: Final = 4
"""The matrix kernel for a few columns of Q8_0 is slower than the vector kernel called as often. In ms per step, together
against one by one, without 512-bit vectors: 2 rows 28.1 / 14.8, 3 rows 37.3 / 22.8, 4 rows 36.2 / 31.0, 5 rows 45.9 / 39.3,
6 rows 43.7 / 46.8; with them 24.7 / 13.5, 31.2 / 20.8, 35.4 / 27.4. The logits are the same to the last bit. With several
threads the matrix kernel wins from 3 rows on. BF16, with 512-bit vectors: 15.0 / 19.3, 18.5 / 28.3, 21.7 / 36.8."""


def kernels_of(build: Build, file_type: int, *, threads: int) -> Kernels:
    """What is known of a library with a model file's kind of weights."""
    kernels = NARROW
    if build.has_wide_kernels:
        is_bf16 = file_type == definitions.FILE_TYPE_BY_TENSOR_TYPE[definitions.TYPE_BF16]
        kernels = WIDE_BF16 if is_bf16 and build.multiplies_bf16 else WIDE
    is_q8_0 = file_type == definitions.FILE_TYPE_BY_TENSOR_TYPE[definitions.TYPE_Q8_0]
    if is_q8_0 and threads == 1:
        return msgspec.structs.replace(kernels, single_rows_max=_SINGLE_ROWS_Q8_0)
    return kernels

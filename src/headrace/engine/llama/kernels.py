"""How fast a library's kernels are against each other, for the choices that the engine has.

Measured on one core of a Zen 5 with the built-in model (`benchmarks/kv/rows.py`). Which kernels there are depends on what
the library was compiled for; what they multiply, on the weights.
"""

from typing import Final

import msgspec

from headrace.engine.llama import definitions
from headrace.engine.llama.builds import Build


class TileSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Of llama.cpp's flash attention, which computes 64 and more rows of a sequence in tiles and fewer one by one."""

    row_speed: float
    """One by one, like `Kernels.attention_speed`."""
    cost_rows: float
    """A whole tile takes as long as so many rows one by one."""


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds of one library with one kind of weights. Speeds of attention are multiplications per second, against
    those of the weights.
    """

    single_rows_max: int = 1
    """Up to so many decode steps are faster one by one than together."""
    attention_speed: float
    """Flash attention of whole portions."""
    plain_speed: float
    """Attention where flash attention is switched off."""
    tiles: TileSpeeds | None = None
    """None: rows take as long in any company."""


GGML: Final = Kernels(
    attention_speed=0.65, plain_speed=0.65, tiles=TileSpeeds(row_speed=0.18, cost_rows=17.3)
)
"""Nothing of ours; vectors of 256 bits."""
WIDE: Final = Kernels(attention_speed=1.25, plain_speed=0.51)
"""Attention of ours, weights by llama.cpp with vectors of 512 bits: 1.3 times as fast as with `GGML`."""
WIDE_BF16: Final = Kernels(attention_speed=0.5, plain_speed=0.21)
"""Both of ours: 3.3 times as fast as Q8_0 with `GGML`."""
WIDE_Q8_0: Final = Kernels(attention_speed=0.37, plain_speed=0.16)
"""Both of ours: 4.6 times as fast as with `GGML`. Weights gain more than attention, so attention counts for more."""

_SINGLE_ROWS_Q8_0: Final = 4
"""llama.cpp's matrix kernel for a few columns of Q8_0 is slower than its vector kernel called as often. In ms per step,
together against one by one: 2 rows 28.1 / 14.8, 3 rows 37.3 / 22.8, 4 rows 36.2 / 31.0, 5 rows 45.9 / 39.3, 6 rows 43.7 /
46.8. The logits are the same to the last bit. With several threads the matrix kernel wins from 3 rows on. (Ours: 2 rows 6.5
/ 12.)"""


def kernels_of(build: Build, file_type: int, *, threads: int) -> Kernels:
    """What is known of a library with a model file's kind of weights. Of a model with more than plain attention (capped
    scores, sinks, position biases), or of experts, these are guesses: llama.cpp's kernels compute that.
    """
    is_q8_0 = file_type == definitions.FILE_TYPE_BY_TENSOR_TYPE[definitions.TYPE_Q8_0]
    is_bf16 = file_type == definitions.FILE_TYPE_BY_TENSOR_TYPE[definitions.TYPE_BF16]
    if is_q8_0 and "q8_0" in build.kernels:
        return WIDE_Q8_0
    if is_bf16 and "bf16" in build.kernels:
        return WIDE_BF16
    kernels = WIDE if "attention" in build.kernels else GGML
    if is_q8_0 and threads == 1:
        return msgspec.structs.replace(kernels, single_rows_max=_SINGLE_ROWS_Q8_0)
    return kernels
